"""Read runs of other tools: one module for each tool, one interface (``ForeignReader``).

A directory is either one run, or a folder of at least two runs, which are read as one campaign. Runs whose names differ
only in their seed form one condition. No verdict is given, because no comparison was declared before the runs.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.files import stamp_of
from retrain.records.schema.base import Row

# The seed at the end of a run's name. A single "s" stands alone: "opus4" has no seed. The first lookbehind keeps the
# search linear in names with many separators.
SEED = re.compile(r"(?<![-_./ ])[-_./ ]*(?:seed|(?<![^\W_])s)[-_=]?(\d{1,9})$", re.IGNORECASE)
MOST_RUNS = 1_000
QUIET_S = 600.0  # Seconds without writes after which a run without a recorded end counts as interrupted
NO_VERDICT = (
    "conditions that were declared, so there is no verdict: runs whose names differ in their seed alone are taken for "
    "seeds of one condition"
)

# Maps (directory, path below it) to the path of that file; None if it is missing or must not be read
FindFile = Callable[[Path, str], Path | None]


@dataclass(frozen=True)
class ForeignRun:
    """One run of another tool. ``max_steps`` is 0 if the planned number of steps is unknown; ``written`` is the Unix
    time at which the newest row was written."""

    directory: Path
    name: str
    condition: str
    seed: int | None
    state: str
    step: int
    max_steps: int = 0
    written: float | None = None


class ForeignReader(ABC):
    """Reader of one tool's runs. ``missing`` lists what the tool does not record, as texts for the user."""

    tool: str
    missing: Sequence[str]

    @abstractmethod
    def runs(self, directory: Path, find: FindFile) -> list[ForeignRun]:
        """Return the run whose directory this is, or the runs that it contains; [] if it contains none, or if only one
        of its subdirectories is a run."""

    @abstractmethod
    def rows(self, run: ForeignRun, find: FindFile) -> list[Row] | None:
        """Return one row of metrics per step, in the order of the steps; None if they cannot be read at present."""

    def metrics_file(self, run: ForeignRun, find: FindFile) -> Path | None:
        """Return the JSON-lines file that holds the run's rows; None if the tool writes no such file."""
        return None

    @abstractmethod
    def config(self, run: ForeignRun, find: FindFile) -> Row:
        """Return the run's settings, nested or flat."""

    @abstractmethod
    def stamp(self, run: ForeignRun, find: FindFile) -> Hashable:
        """Return a value that changes whenever the run's rows or settings change; callers use it for caching."""


class DirectoryReader(ForeignReader):
    """Reader of a tool that writes each run to a separate directory."""

    @abstractmethod
    def newest(self, directory: Path, find: FindFile) -> Path | None:
        """Return the file that changes as the run proceeds; None if the directory is not a run of the tool."""

    @abstractmethod
    def progress(self, directory: Path, find: FindFile) -> tuple[int, int, int | None]:
        """Return the number of steps done, the number planned (0 if unknown) and the seed in the run's settings."""

    def runs(self, directory: Path, find: FindFile) -> list[ForeignRun]:
        if self.newest(directory, find) is not None:
            return [self._run(directory, find)]
        inside = [path for path in _folders(directory) if self.newest(path, find) is not None]
        return [self._run(path, find) for path in inside] if len(inside) > 1 else []

    def stamp(self, run: ForeignRun, find: FindFile) -> Hashable:
        path = self.newest(run.directory, find)
        return path, stamp_of(path)

    def _run(self, path: Path, find: FindFile) -> ForeignRun:
        step, planned, own_seed = self.progress(path, find)
        condition, seed = condition_and_seed(path.name)
        newest = stamp_of(self.newest(path, find))
        written = newest.written / 1e9 if newest else None
        state = "done" if planned and step >= planned else "running" if is_recent(written) else "interrupted"
        seed = own_seed if seed is None else seed
        return ForeignRun(path, path.name, condition, seed, state, step, planned, written)


def condition_and_seed(name: str) -> tuple[str, int | None]:
    """Split the name of a run: ``grpo-seed2`` is seed 2 of the condition ``grpo``."""
    match = SEED.search(name)
    return (name[: match.start()] if match and match.start() else name), int(match[1]) if match else None


def is_recent(written: float | None) -> bool:
    """Return whether a run may still be training if its newest row was written at this Unix time."""
    return written is not None and time.time() - written < QUIET_S


def integer(value: object, default: int = 0) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < 1e15 else default


def _folders(directory: Path) -> list[Path]:
    """Return the subdirectories among the first ``MOST_RUNS`` entries by name. Hidden ones are left out, and symbolic
    links, which may lead out of the directory."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())[:MOST_RUNS]
    except OSError:
        return []
    paths = (directory / name for name in names if not name.startswith("."))
    return [path for path in paths if path.is_dir() and not path.is_symlink()]
