"""What there is below the given directories, read again only where files changed."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

from retrain.ui.cookbook import Cookbook
from retrain.ui.iterations import Index
from retrain.ui.numbers import Numbers, Pool
from retrain.ui.places import Places, nothing, stays_inside
from retrain.ui.retrain_runs import RetrainRuns
from retrain.ui.sources import Home, Run, Source
from retrain.ui.trl import Trl

DEPTH = 2  # How many levels below a given directory campaigns and runs are looked for
FRESH_S = 0.8  # Seconds for which a reading is cached
CHECKED_S = 0.5  # Seconds for which the check of a run's paths is cached
MOST_FOLDERS = 5_000


class Library:
    """The campaigns and runs of some directories; safe to use from several threads."""

    def __init__(self, places: Places, pool: Pool):
        self.places, self.pool = places, pool
        self.sources: Sequence[Source] = (RetrainRuns(), Cookbook(), Trl())
        self._lock = RLock()
        self._found: list[tuple[Path, Source]] = []
        self._looked = 0.0
        self._homes: dict[Path, tuple[float, Home | None]] = {}
        self._source_by_run: dict[Path, Source] = {}
        self._indices: dict[Path, Index] = {}
        self._checked: dict[Path, float] = {}

    def homes(self) -> list[Home]:
        """Every campaign and run, as they are now, the latest first."""
        with self._lock:
            if time.monotonic() - self._looked > FRESH_S:
                self._found = [pair for root in self.places.roots.values() for pair in self._below(root, DEPTH)]
                self._looked = time.monotonic()
            found = list(dict(self._found).items())
        homes = [home for path, source in found if (home := self._read(path, source)) is not None]
        return sorted(homes, key=lambda home: (-(home.updated or 0.0), home.place))

    def home(self, place: str) -> Home:
        """The campaign or run at a place; of a run of a campaign, that run alone. Raises Refusal (404)."""
        path = self.places.find(place)
        source = next((each for each in self.sources if each.is_home(path, self.places)), None)
        campaign = self._campaign_of(place)
        if campaign is not None and (own := [run for run in campaign.runs if run.path == path]):
            run = own[0]
            return Home(
                run.place, path, "run", campaign.source, run.run_id, own, campaign.created, campaign.updated, {},
                campaign.missing,
            )  # fmt: skip
        home = self._read(path, source) if source is not None else None
        if home is None:
            raise nothing(place)
        return home

    def campaign(self, place: str) -> Home:
        """The campaign that a place is, or that the run at this place belongs to; a run alone is its own."""
        return self._campaign_of(place) or self.home(place)

    def run(self, place: str) -> Run:
        """The run at a place; that of a campaign with a single one. Raises Refusal (404) where there are several."""
        home = self.home(place)
        if len(home.runs) != 1:
            raise nothing(place)
        return home.runs[0]

    def numbers(self, run: Run, refresh: bool = True, make: bool = False) -> Numbers:
        """The numbers of a run, with what is new in its files; with ``make`` also what takes seconds to read. Raises
        Refusal where one of its files leads elsewhere."""
        source, now = self._source_of(run), time.monotonic()
        if now - self._checked.get(run.path, -CHECKED_S) >= CHECKED_S:
            if not stays_inside(run.path, self.places):
                raise nothing(run.place)
            self._checked[run.path] = now
        numbers = source.numbers(run, self.places, self.pool)
        if refresh:
            numbers.refresh(make)
        return numbers

    def settings(self, run: Run) -> dict[str, Any]:
        return self._source_of(run).settings(run, self.places)

    def file(self, run: Run, name: str) -> Path | None:
        return self.places.file(run.path, name)

    def index(self, run: Run) -> Index:
        with self._lock:
            return self._indices.setdefault(run.path, Index(run.path, self.places.file, run.place))

    def _source_of(self, run: Run) -> Source:
        source = self._source_by_run.get(run.path)
        if source is None:
            raise nothing(run.place)
        return source

    def _campaign_of(self, place: str) -> Home | None:
        """The campaign one or two levels above a run's place, inside its root."""
        parts = place.split("/")
        for up in (2, 1):
            if len(parts) > up:
                with suppress(Exception):
                    path = self.places.find("/".join(parts[:-up]))
                    source = next((each for each in self.sources if each.is_home(path, self.places)), None)
                    home = self._read(path, source) if source is not None else None
                    if home is not None and any(run.place == place for run in home.runs):
                        return home
        return None

    def _read(self, path: Path, source: Source) -> Home | None:
        with self._lock:
            moment, home = self._homes.get(path, (-1e9, None))
        if time.monotonic() - moment > FRESH_S:
            try:
                home = source.read(path, self.places)
            except OSError:  # taken away while it was read
                home = None
            with self._lock:
                self._homes[path] = time.monotonic(), home
                if home is not None:
                    self._source_by_run |= {run.path: source for run in home.runs}
        return home

    def _below(self, path: Path, levels: int) -> Iterator[tuple[Path, Source]]:
        """Campaigns and runs at and below a directory; what lies inside of one is its own."""
        ours, *others = self.sources
        if ours.is_home(path, self.places):
            yield path, ours
            return
        children = list(self._folders(path)) if levels else []
        if not any(ours.is_home(child, self.places) for child in children):
            for source in others:
                if source.is_home(path, self.places):
                    yield path, source
                    return
        for child in children:
            yield from self._below(child, levels - 1)

    def _folders(self, path: Path) -> Iterator[Path]:
        with suppress(OSError), os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
            for name in names[:MOST_FOLDERS]:
                if (folder := self.places.folder(path, name)) is not None:
                    yield folder
