"""Compare campaigns as ``retrain compare`` does, in a background thread, when their files have changed."""

import math
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from threading import Condition, Thread

import numpy as np

from retrain.errors import RetrainError
from retrain.files import stamp_of
from retrain.records.reader import planned_configs, read_object
from retrain.records.registry import Registry
from retrain.records.schema.base import Row
from retrain.records.schema.layout import COMPARISON, CONFIG, EVALS, EVALUATIONS, METRICS, PLAN
from retrain.ui.answers import JsonObject
from retrain.ui.library import Library
from retrain.ui.measured import reader
from retrain.ui.metrics import watched
from retrain.ui.numbers import own_seconds
from retrain.ui.sources import Home, RunSource, touched
from retrain.verdicts.planning import WANTED_POWER, pair_spread, seeds_needed
from retrain.verdicts.pooling import compare_directories
from retrain.verdicts.results import Measure
from retrain.verdicts.wording import amount

ENDED = ("done", "failed", "stopped")
ALONE = "one run of a campaign compares nothing: open its campaign"
FOREIGN = "these files declare no conditions and no metric that decides: curves are shown, and nothing is tested"
FILE_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, ArithmeticError)
READ = (CONFIG, EVALS, EVALUATIONS)  # Files of a run that a comparison reads
DECLARED = ("interim", "declared", "notes", "registry")  # Entries of a manifest that a comparison reads
Signature = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class Finding:
    """Comparison of a campaign, or the reason ``why`` there is none. ``power``: see ``power_of``. ``fresh``: the
    comparison is of the present files."""

    signature: Signature
    comparison: Row | None
    why: str | None
    power: list[JsonObject] = field(default_factory=list)
    fresh: bool = True


class Findings:
    """Comparisons of a library's campaigns. ``of``: number of runs and comparisons that were queued; ``done``: how many
    of them are finished. Both are 0 if nothing is queued."""

    def __init__(self, library: Library):
        self._library = library
        self._turn = Condition()
        self._findings: dict[Path, Finding] = {}
        self._seconds: dict[Path, tuple[int, float]] = {}
        self._requests: dict[Path, tuple[Home, Signature, bool]] = {}  # Latest request for each campaign
        self._queue: PriorityQueue[tuple[int, int, Path, RunSource | None]] = PriorityQueue()
        self._numbers = count()
        self._thread: Thread | None = None
        self.done = self.of = 0

    def comparison(self, home: Home, wait_s: float) -> Finding:
        """Return the comparison of a campaign's present files, or why there is none. If the comparison takes longer
        than ``wait_s`` seconds, return the previous one, with ``fresh`` false."""
        if home.source != "retrain":
            return Finding((), None, FOREIGN)
        if not home.manifest:
            return Finding((), None, home.missing[0] if home.missing else ALONE)
        signature = self.signature(home)
        self.ask([home], first=True)
        with self._turn:
            self._turn.wait_for(lambda: self._is_current(home, signature), wait_s)
        last = self.last(home)
        if last and last.signature == signature:
            return last
        why = last.why if last else "it is being read for the first time: look again in a moment"
        comparison = self.last_comparison(home)
        return Finding((), comparison, None if comparison else why, last.power if last else [], fresh=False)

    def _is_current(self, home: Home, signature: Signature) -> bool:
        last = self.last(home)
        return last is not None and last.signature == signature

    def last_comparison(self, home: Home) -> Row | None:
        """Return the last comparison made here, else the one in the files of an ended campaign, else None. Computes
        nothing."""
        if home.path in self._findings:
            return self._findings[home.path].comparison
        if home.source == "retrain" and home.state in ENDED:
            written = read_object(self._library.places.file(home.path, COMPARISON))
            return written if written.get("format") == 3 else None
        return None

    def last(self, home: Home) -> Finding | None:
        """Return the last finding made here, or None. Every comparison makes a new object."""
        return self._findings.get(home.path)

    def device_seconds(self, home: Home) -> float | None:
        seconds = [self._seconds[run.path][1] for run in home.runs if run.path in self._seconds]
        return math.fsum(seconds) if seconds else None

    def signature(self, home: Home) -> Signature:
        """Return a value that changes when the comparison may change. It covers states, settings, evaluations,
        declarations, interim analyses and notes, but not rows of training."""
        runs = [(run.run_id, run.state, run.reason, *(stamp_of(run.path / name) for name in READ)) for run in home.runs]
        entries = [(entry["label"], entry["seed"], entry.get("seal")) for entry in home.manifest.get("runs", ())]
        stamps = stamp_of(home.path / PLAN), stamp_of(Registry(home.path).path)
        return (stamps, [home.manifest.get(name) for name in DECLARED], entries, runs)

    def ask_where_needed(self, homes: Iterable[Home]) -> None:
        """Read and compare, in the background, campaigns whose written comparison is missing or older than an
        evaluation."""
        self.ask([home for home in homes if not self._is_written(home)])

    def _is_written(self, home: Home) -> bool:
        written = touched(home.path / COMPARISON) if home.state in ENDED else None
        newest = max((moment for run in home.runs if (moment := touched(run.path / EVALS))), default=0.0)
        return written is not None and written >= newest and self.last_comparison(home) is not None

    def ask(self, homes: Iterable[Home], first: bool = False) -> None:
        """Queue campaigns with new files, to be read and compared in the background, small ones before large ones.
        ``first`` puts them before all others. Requests may overlap, because reading a run again costs little."""
        for home in homes:
            stamps = [stamp_of(run.path / METRICS) for run in home.runs]
            signature = (self.signature(home), stamps)
            with self._turn:
                _, earlier, was_first = self._requests.get(home.path, (None, None, False))
                if earlier == signature and (was_first or not first):
                    continue
                self._requests[home.path] = home, signature, first
                size = 0 if first else sum(stamp.size for stamp in stamps if stamp)
                for run in (*home.runs, None):  # None: the comparison
                    self._queue.put((size, next(self._numbers), home.path, run))
                self.of += len(home.runs) + 1
                if self._thread is None:
                    self._thread = Thread(target=self._follow, name="findings", daemon=True)
                    self._thread.start()

    def _follow(self) -> None:
        while True:
            _, _, path, run = self._queue.get()
            if run is None:
                self._compare_if_changed(self._requests[path][0])
            else:
                with suppress(Exception):  # a damaged file may be complete the next time
                    self._read(run)
            with self._turn:
                self.done += 1
                if self._queue.empty():
                    self.done = self.of = 0

    def _read(self, run: RunSource) -> None:
        numbers = self._library.numbers(run, make=True)
        rows = len(numbers)
        if self._seconds.get(run.path, (-1, 0.0))[0] != rows:
            seconds = own_seconds(numbers)
            if seconds is not None:
                self._seconds[run.path] = rows, float(np.nansum(seconds))
            for key in watched(numbers.keys):  # so that what pages show first is in memory
                numbers.column(key)

    def _compare_if_changed(self, home: Home) -> None:
        signature = self.signature(home)
        if not home.manifest or self._is_current(home, signature):
            return
        try:
            finding = self._compare(home, signature)
        except Exception as error:  # a bug must not end the thread that reads all campaigns
            traceback.print_exc()
            why = f"the comparison failed ({type(error).__name__}); the terminal shows where"
            finding = Finding(signature, None, why)
        with self._turn:
            self._findings[home.path] = finding
            self._turn.notify_all()

    def _compare(self, home: Home, signature: Signature) -> Finding:
        read = reader(self._library, {run.run_id: run for run in home.runs})
        try:
            comparison = compare_directories([home.path], read=read) | {"directories": [home.location]}
        except RetrainError as error:
            return Finding(signature, None, self._library.places.with_places(str(error)))
        except FILE_ERRORS as error:
            return Finding(signature, None, f"its files cannot be compared as they are: {type(error).__name__}")
        try:
            power = power_of(home, comparison)
        except (RetrainError, *FILE_ERRORS):
            power = []  # no spread yet, or a plan that this release does not read
        return Finding(signature, comparison, None, power)


def verdict_of(comparison: Row | None) -> JsonObject | None:
    conditions = comparison["conditions"][1:] if comparison else []
    others = [condition for condition in conditions if condition.get("typical_difference") is not None]
    if not comparison or not others:
        return None
    largest = max(others, key=lambda condition: abs(condition["typical_difference"]))
    low, high = largest.get("difference_interval") or (None, None)
    return {
        "label": largest["label"], "word": largest["verdict"], "sentence": largest["sentence"],
        "difference": largest["typical_difference"], "low": low, "high": high,
        "margin": comparison.get("margin"), "share": bool(comparison.get("share")), "baseline": comparison["baseline"],
    }  # fmt: skip


def power_of(home: Home, comparison: Row) -> list[JsonObject]:
    """Return for each condition a sentence on the number of seeds that would show its present difference, and TOML with
    these seeds."""
    others = comparison["conditions"][1:]
    measure = Measure(comparison["summary"], comparison["metric"])
    spread = pair_spread([condition["differences"] for condition in others])
    seeds = sorted({config["training"]["seed"] for config in planned_configs(home.path).values()})
    if not spread or not seeds:
        return []
    lines: list[JsonObject] = []
    for condition in others:
        if not condition["typical_difference"]:
            continue
        target = abs(condition["typical_difference"])
        needed = seeds_needed(len(others), target / spread)
        seen = f"a difference of {amount(target, measure)}, as {condition['label']} shows it so far,"
        if needed is None:
            line = f"{seen} would need more than 10,000 seeds"
        elif needed <= len(seeds):
            line = f"{seen} needs {needed} seeds, which are planned ({len(seeds)})"
        else:
            line = f"{seen} is found with {100 * WANTED_POWER:.0f} % probability by {needed} fresh seeds"
        is_few = needed is not None and len(seeds) < needed <= 1_000
        toml = f"seeds = {list(range(seeds[-1] + 1, seeds[-1] + 1 + needed))}" if needed and is_few else None
        lines.append({"label": condition["label"], "line": line, "needed": needed, "toml": toml})
    return lines
