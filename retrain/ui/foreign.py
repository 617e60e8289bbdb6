"""Directories of other tools: single runs, and folders of runs that are read as one campaign."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.ui.numbers import Numbers, Pool
from retrain.ui.places import Places
from retrain.ui.sources import Home, Run, age, touched, whole

SEED = re.compile(r"[-_./ ]*(?:seed|s)[-_=]?(\d{1,9})$", re.IGNORECASE)  # The end of a run's name that says its seed
MOST_RUNS = 1_000


class Foreign(ABC):
    """What cookbook and TRL share: a run says little, and a folder of them nothing."""

    name: str
    missing: Sequence[str]
    seed_keys: Sequence[str]

    @abstractmethod
    def is_run(self, path: Path, places: Places) -> bool:
        """Whether a directory is one run."""

    @abstractmethod
    def progress(self, path: Path, places: Places) -> tuple[int, int, str]:
        """Steps done, steps planned (0 where nothing says so), state."""

    @abstractmethod
    def newest(self, path: Path, places: Places) -> Path | None:
        """The file that grows."""

    @abstractmethod
    def numbers(self, run: Run, places: Places, pool: Pool) -> Numbers: ...

    @abstractmethod
    def settings(self, run: Run, places: Places) -> dict[str, Any]: ...

    def is_home(self, path: Path, places: Places) -> bool:
        """Whether it is a run, or a folder of two runs or more."""
        return self.is_run(path, places) or len(self._children(path, places)) > 1

    def read(self, path: Path, places: Places) -> Home | None:
        """Runs whose names differ in their seed alone are one condition; the first by name is taken as baseline."""
        place = places.place_of(path)
        single = self.is_run(path, places)
        paths = [path] if single else self._children(path, places)
        if not paths:
            return None
        runs: list[Run] = []
        labels: dict[str, int] = {}
        for each in paths:
            found = SEED.search(each.name)
            label = each.name[: found.start()] if found and found.start() else each.name
            index = labels.setdefault(label, len(labels))
            runs.append(self._run(each, place if single else f"{place}/{each.name}", label, index, places))
        times = [moment for each in paths if (moment := touched(self.newest(each, places)))]
        kind = "run" if single else "campaign"
        return Home(place, path, kind, self, path.name, runs, None, max(times, default=None), {}, self.missing)

    def _run(self, path: Path, place: str, label: str, index: int, places: Places) -> Run:
        step, planned, state = self.progress(path, places)
        run = Run(place, path, path.name, label, index, None, state, None, step, planned, (0, 0))
        settings = self.settings(run, places)
        found = SEED.search(path.name)
        given = next((settings[key] for key in self.seed_keys if isinstance(settings.get(key), int)), None)
        seed = int(found[1]) if found else given
        newest = self.newest(path, places)
        return Run(
            place, path, path.name, label, index, seed, state, None, step, planned, (0, whole(seed)), age(newest)
        )

    def _children(self, path: Path, places: Places) -> list[Path]:
        try:
            names = sorted(entry.name for entry in path.iterdir())[:MOST_RUNS]
        except OSError:
            return []
        folders = (path / name for name in names if not name.startswith("."))
        inside = [each for each in folders if not each.is_symlink() and places.folder(path, each.name) is not None]
        return [each for each in inside if self.is_run(each, places)]
