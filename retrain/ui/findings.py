"""What campaigns found, by the functions of ``retrain compare``; kept while their files stay, made anew in a thread."""

import math
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import numpy as np

from retrain.errors import RetrainError
from retrain.files import stamp_of
from retrain.records.reader import read_object
from retrain.records.registry import Registry
from retrain.records.schema.layout import COMPARISON, CONFIG, EVALS, EVALUATIONS, METRICS, PLAN
from retrain.ui.library import Library
from retrain.ui.measured import reader
from retrain.ui.metrics import watched
from retrain.ui.numbers import own_seconds
from retrain.ui.power import power_of
from retrain.ui.sources import Home, Run, touched
from retrain.verdicts.pooling import compare_directories

ALONE = "one run of a campaign compares nothing: open its campaign"
FOREIGN = "these files declare no conditions and no metric that decides: curves are shown, and nothing is tested"
ODD = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, ArithmeticError)
"""What reading files of any content may raise."""
READ = (CONFIG, EVALS, EVALUATIONS)  # Files of a run that a comparison reads
DECLARED = ("interim", "declared", "notes", "registry")  # Entries of a manifest that it reads
Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Found:
    """A comparison as it was when the files had this signature, or why there is none, and the lines of its power."""

    signature: Signature
    comparison: dict[str, Any] | None
    why: str | None
    power: list[dict[str, Any]] = field(default_factory=list)
    fresh: bool = True


@dataclass(eq=False)
class Task:
    """A campaign that waits to be read, run by run, and then compared; ``size`` in bytes of rows."""

    home: Home
    runs: deque[Run]
    size: int


class Findings:
    """The comparisons of a library's campaigns."""

    def __init__(self, library: Library):
        self._library = library
        self._turn = Condition()
        self._kept: dict[Path, Found] = {}
        self._versions: dict[Path, int] = {}
        self._seconds: dict[Path, tuple[int, float]] = {}
        self._asked: dict[Path, Signature] = {}
        self._waiting: list[Task] = []
        self._thread: Thread | None = None
        self.done = self.of = 0

    def comparison(self, home: Home, wait_s: float) -> Found:
        """What ``compare_directories`` returns for a campaign as it is now, or why there is nothing. After ``wait_s``
        what was known before; ``fresh`` says which."""
        if home.source != "retrain":
            return Found((), None, FOREIGN)
        if not home.manifest:
            return Found((), None, home.missing[0] if home.missing else ALONE)
        signature, end = self.signature(home), time.monotonic() + wait_s
        self.ask([home], first=True)
        with self._turn:
            while (kept := self._kept.get(home.path)) is None or kept.signature != signature:
                if (left := end - time.monotonic()) <= 0:
                    why = kept.why if kept else "it is being read for the first time: look again in a moment"
                    known = self.known(home)
                    return Found((), known, None if known else why, kept.power if kept else [], fresh=False)
                self._turn.wait(left)
            return kept

    def known(self, home: Home) -> dict[str, Any] | None:
        """What is known without a computation: the last comparison, or that which an ended campaign wrote."""
        kept = self._kept.get(home.path)
        if kept is not None:
            return kept.comparison
        if home.source == "retrain" and home.state in ("done", "failed", "stopped"):
            found = read_object(self._library.places.file(home.path, COMPARISON))
            return found if found.get("format") == 3 else None
        return None

    def version(self, home: Home) -> int:
        """How often the comparison was made anew."""
        return self._versions.get(home.path, 0)

    def device_seconds(self, home: Home) -> float | None:
        """Seconds of devices that all runs took, as far as they were read; None before any was."""
        known = [self._seconds[run.path][1] for run in home.runs if run.path in self._seconds]
        return math.fsum(known) if known else None

    def signature(self, home: Home) -> Signature:
        """What a comparison depends on: states, settings, evaluations, and what the campaign declared, looked at and
        noted; not every row of training."""
        runs = [(run.run_id, run.state, run.reason, *(stamp_of(run.path / name) for name in READ)) for run in home.runs]
        entries = [(entry["label"], entry["seed"], entry.get("seal")) for entry in home.manifest.get("runs", ())]
        stamps = stamp_of(home.path / PLAN), stamp_of(Registry(home.path).path)
        return (stamps, [home.manifest.get(name) for name in DECLARED], entries, runs)

    def ask_where_needed(self, homes: Iterable[Home]) -> None:
        """Have those read and compared that have no comparison in their files since the last evaluation."""
        self.ask([home for home in homes if not self._is_written(home)])

    def _is_written(self, home: Home) -> bool:
        """Return whether an ended campaign has written its comparison after all evaluations."""
        written = touched(home.path / COMPARISON) if home.state in ("done", "failed", "stopped") else None
        newest = [moment for run in home.runs if (moment := touched(run.path / EVALS))]
        return written is not None and written >= max(newest, default=0.0) and self.known(home) is not None

    def ask(self, homes: Sequence[Home], first: bool = False) -> None:
        """Have these read and compared in the background where something is new, small ones before large ones;
        ``first``: before all others."""
        signatures = {home.path: tuple(stamp_of(run.path / METRICS) for run in home.runs) for home in homes}

        def size(home: Home) -> int:
            return sum(found.size for found in signatures[home.path] if found)

        with self._turn:
            for home in sorted(homes, key=size):
                signature = (self.signature(home), signatures[home.path])
                task = next((task for task in self._waiting if task.home.path == home.path), None)
                if self._asked.get(home.path) != signature:
                    self._asked[home.path] = signature
                    if task is None:
                        task = Task(home, deque(), size(home))
                        self.of += 1
                        place = sum(each.size <= task.size for each in self._waiting)
                        self._waiting.insert(place, task)
                    self.of += len(home.runs) - len(task.runs)
                    task.home, task.runs = home, deque(home.runs)
                    self._turn.notify_all()
                if first and task is not None:
                    self._waiting.remove(task)
                    self._waiting.insert(0, task)
                if self._thread is None and self._waiting:
                    self._thread = Thread(target=self._work, name="findings", daemon=True)
                    self._thread.start()

    def _work(self) -> None:
        while True:
            with self._turn:
                while not self._waiting:
                    self._turn.wait()
                task = self._waiting[0]
                run = task.runs.popleft() if task.runs else None
                home = task.home
            if run is not None:
                with suppress(Exception):  # a file that is odd now may be whole the next time; the page shows the rest
                    self._read(run)
            else:
                signature = self.signature(home)
                kept = self._kept.get(home.path)
                found = kept if kept and kept.signature == signature else self._compared(home, signature)
            with self._turn:
                self.done += 1
                if run is None:
                    if found is not self._kept.get(home.path):
                        self._kept[home.path] = found
                        self._versions[home.path] = self.version(home) + 1
                    if task.home is home:  # not asked for again meanwhile
                        self._waiting.remove(task)
                    else:
                        self.of += 1
                    if not self._waiting:
                        self.done = self.of = 0
                    self._turn.notify_all()

    def _read(self, run: Run) -> None:
        numbers = self._library.numbers(run, make=True)
        rows = len(numbers)
        if self._seconds.get(run.path, (-1, 0.0))[0] != rows:
            seconds = own_seconds(numbers)
            if seconds is not None:
                self._seconds[run.path] = rows, float(np.nansum(seconds))
            for key in watched(numbers.keys):  # what is looked at first is in memory
                numbers.column(key)

    def _compared(self, home: Home, signature: Signature) -> Found:
        try:
            return self._compare(home, signature)
        except Exception as error:  # a mistake of ours must not end the thread that reads all others
            traceback.print_exc()
            return Found(signature, None, f"the comparison failed ({type(error).__name__}); the terminal shows where")

    def _compare(self, home: Home, signature: Signature) -> Found:
        if home.source != "retrain" or not home.manifest:
            return Found(signature, None, FOREIGN)
        read = reader(self._library, {run.run_id: run for run in home.runs})
        try:
            found = compare_directories([home.path], read=read) | {"directories": [home.place]}
        except RetrainError as error:
            return Found(signature, None, self._library.places.told(str(error)))
        except ODD as error:
            why = f"its files cannot be compared as they are: {type(error).__name__}"
            return Found(signature, None, why)
        try:
            power = power_of(home, found)
        except (RetrainError, *ODD):
            power = []  # no spread yet, or a plan that this release does not read
        return Found(signature, found, None, power)


def verdict_of(comparison: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The primary difference in short: of the first condition beside the baseline, or, of several, of the one whose
    difference is largest."""
    if not comparison:
        return None
    others = [one for one in comparison["conditions"][1:] if one.get("typical_difference") is not None]
    if not others:
        return None
    one = max(others, key=lambda each: abs(each["typical_difference"]))
    low, high = one.get("difference_interval") or (None, None)
    standing = one.get("standing")
    return {
        "label": one["label"], "word": one["verdict"], "sentence": one["sentence"],
        "standing": standing if standing in ("interim", "exploratory") else None,
        "difference": one["typical_difference"], "low": low, "high": high,
        "margin": comparison.get("margin"), "share": bool(comparison.get("share")), "baseline": comparison["baseline"],
    }  # fmt: skip
