"""Find the campaigns and runs below the given directories; files are read again only after a change."""

import os
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock

from retrain.records.foreign import ForeignReader
from retrain.records.foreign.cookbook import CookbookReader
from retrain.records.foreign.trackio import TrackioReader
from retrain.records.foreign.trl import TrlReader
from retrain.records.reader import read_object
from retrain.records.schema.base import Row
from retrain.records.schema.layout import CONFIG, MANIFEST
from retrain.ui.answers import ApiError
from retrain.ui.iterations import Index
from retrain.ui.numbers import Numbers, Store, numbers_of, tidy
from retrain.ui.places import Places, nothing, stays_inside
from retrain.ui.sources import Home, RunSource, foreign_home, is_our_run, our_home
from retrain.util.jsonl import Tail

DEPTH = 2  # How many levels below a given directory campaigns and runs are looked for
CHECKED_S = 0.5  # Seconds for which the check of a run's paths is cached
MOST_FOLDERS = 5_000

CachedHome = tuple[float, Hashable, Home | None]  # (time of reading, stamp, result) of a directory


class Library:
    """Campaigns and runs of some directories; thread-safe. ``cache``: directory for columns of metrics of long runs
    that wrote no columns themselves; without it these columns are held in memory. ``fresh_s``: seconds for which a
    reading is cached."""

    def __init__(self, places: Places, cache: Path | None = None, fresh_s: float = 0.8):
        self.places, self.fresh_s, self._cache, self._store = places, fresh_s, cache, Store()
        self.readers: Sequence[ForeignReader] = (CookbookReader(), TrlReader(), TrackioReader())
        self._lock = RLock()
        self._paths: list[Path] = []
        self._looked = 0.0
        self._homes: dict[Path, CachedHome] = {}
        self._indices: dict[Path, Index] = {}
        self._numbers: dict[str, Numbers] = {}
        self._checked: dict[Path, float] = {}  # When the paths of a run were checked
        if cache is not None:
            tidy(cache)

    def homes(self) -> list[Home]:
        with self._lock:
            if time.monotonic() - self._looked > self.fresh_s:
                self._paths = [path for root in self.places.roots.values() for path in self._below(root, DEPTH)]
                self._looked = time.monotonic()
            paths = list(dict.fromkeys(self._paths))
        homes = [home for path in paths if (home := self._read(path)) is not None]
        return sorted(homes, key=lambda home: (-(home.updated or 0.0), home.location))

    def home(self, location: str) -> Home:
        """Return the campaign or run at a location; for a run of a campaign, that run alone. Raises ApiError (404)."""
        campaign = self._campaign_of(location)
        if campaign is not None:
            return campaign.of_run(next(run for run in campaign.runs if run.location == location))
        home = self._read(self.places.find(location))
        if home is None:
            raise nothing(location)
        return home

    def campaign(self, location: str) -> Home:
        """Return the campaign at a location, or the campaign of the run there; for a run without a campaign, the
        run."""
        return self._campaign_of(location) or self.home(location)

    def run(self, location: str) -> RunSource:
        """Return the run at a location, or the only run of the campaign there. Raises ApiError (404) for several."""
        home = self.home(location)
        if len(home.runs) != 1:
            raise nothing(location)
        return home.runs[0]

    def numbers(self, run: RunSource, refresh: bool = True, make: bool = False) -> Numbers:
        """Return the metrics of a run. ``refresh``: first read what is new in its files; ``make``: even if this takes
        seconds. Raises ApiError (404) if a file of the run is outside the given directories."""
        now = time.monotonic()
        if now - self._checked.get(run.path, -CHECKED_S) >= CHECKED_S:
            if not stays_inside(run.path, self.places):
                raise nothing(run.location)
            self._checked[run.path] = now
        with self._lock:
            if run.location not in self._numbers:
                self._numbers[run.location] = numbers_of(run, self.places.file, self._store, self._cache)
            numbers = self._numbers[run.location]
        if refresh:
            numbers.refresh(make)
        return numbers

    def rows(self, run: RunSource, name: str, last_only: bool = False) -> list[Row]:
        """Return the rows of a JSONL file of the run, or only those near its end; [] if there is none."""
        path = self.file(run, name)
        return Tail(path, last_only).rows()[1] if path is not None else []

    def settings(self, run: RunSource) -> Row:
        """Return the settings, nested or flat; for retrain's runs, all of ``config.json``."""
        if run.reader is not None and run.foreign is not None:
            return run.reader.config(run.foreign, self.places.file)
        return read_object(self.file(run, CONFIG))

    def file(self, run: RunSource, name: str) -> Path | None:
        return self.places.file(run.path, name)

    def index(self, run: RunSource) -> Index:
        with self._lock:
            return self._indices.setdefault(run.path, Index(run.path, self.places.file, run.location))

    def _campaign_of(self, location: str) -> Home | None:
        parts = location.split("/")
        for up in (2, 1):
            if len(parts) > up:
                with suppress(ApiError, OSError):
                    home = self._read(self.places.find("/".join(parts[:-up])))
                    if home is not None and any(run.location == location for run in home.runs):
                        return home
        return None

    def _read(self, path: Path) -> Home | None:
        moment, stamp, home = self._homes.get(path, (-1e9, None, None))
        if time.monotonic() - moment > self.fresh_s:
            try:
                if home is None or home.stamp(self.places) != stamp:
                    home = our_home(path, self.places) or self._foreign(path)
                    stamp = home.stamp(self.places) if home is not None else None
            except OSError:  # taken away while it was read
                home = None
            now = time.monotonic()
            if home is not None and home is not self._homes.get(path, (0.0, None, None))[2]:
                self._checked |= {run.path: now for run in home.runs if run.reader is None}  # when it was read
            self._homes[path] = now, stamp, home
        return home

    def _foreign(self, path: Path) -> Home | None:
        return next((home for reader in self.readers if (home := foreign_home(path, reader, self.places))), None)

    def _is_ours(self, path: Path) -> bool:
        return self.places.file(path, MANIFEST) is not None or is_our_run(path, self.places)

    def _below(self, path: Path, levels: int) -> Iterator[Path]:
        """Yield the campaigns and runs at and below a directory, without searching inside them."""
        if self._is_ours(path):
            yield path
            return
        children = list(self._folders(path)) if levels else []
        if not any(self._is_ours(child) for child in children) and self._read(path) is not None:
            yield path
            return
        for child in children:
            yield from self._below(child, levels - 1)

    def _folders(self, path: Path) -> Iterator[Path]:
        with suppress(OSError), os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
            for name in names[:MOST_FOLDERS]:
                if (folder := self.places.folder(path, name)) is not None:
                    yield folder
