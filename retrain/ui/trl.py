"""Runs of TRL and of transformers' Trainer: the ``log_history`` of ``trainer_state.json``.

The newest state is that of the output directory itself, written when training has ended, or of the checkpoint with the
largest number. What was logged at one step, the lines of an evaluation among them, is one row.
"""

import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from retrain.files import Stamp, stamp_of
from retrain.records.reader import read_object
from retrain.ui.foreign import Foreign
from retrain.ui.numbers import Numbers, Pool
from retrain.ui.places import Places
from retrain.ui.sources import QUIET_S, Run, age, whole

STATE = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")


class LogHistory:
    """The rows of a ``trainer_state.json``, read again whenever another one is the newest, or it was replaced."""

    def __init__(self, run: Path, places: Places):
        self._run, self._places, self._lock = run, places, RLock()
        self._signature: tuple[Path, Stamp | None] | None = None
        self._rows: list[dict[str, Any]] = []
        self._columns: dict[str, np.ndarray] = {}

    reading = False

    def refresh(self, make: bool = False) -> None:
        """Read it where it is another one; one that is just being written leaves what was there."""
        path = newest_state(self._run, self._places)
        if path is None:
            return
        signature = path, stamp_of(path)
        with self._lock:
            if signature != self._signature and (state := read_object(path)):
                self._rows, self._signature = _merged(state.get("log_history")), signature
                keys = dict.fromkeys(key for row in self._rows for key, value in row.items() if _is_number(value))
                self._columns = {
                    key: np.array([_number(row.get(key)) for row in self._rows], np.float32) for key in keys
                }

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> Collection[str]:
        return self._columns.keys()

    @property
    def last(self) -> Mapping[str, Any]:
        return self._rows[-1] if self._rows else {}

    def column(self, key: str) -> np.ndarray:
        """float32 [rows]."""
        return self._columns.get(key, np.full(len(self._rows), np.nan, np.float32))

    def evaluations(self) -> list[dict[str, Any]]:
        """None: evaluations are keys of the rows (``eval_…``)."""
        return []

    def still(self) -> AbstractContextManager[object]:
        return self._lock


class Trl(Foreign):
    """A Trainer's output directory."""

    name = "trl"
    missing = (
        "conditions that were declared, so there is no verdict: runs whose names differ in their seed alone are taken"
        " for seeds of one condition",
        "numbers of every step: the Trainer logs every logging_steps, and writes them with a checkpoint",
        "rollouts, token files, notes and spans of time",
    )
    seed_keys = ("seed",)

    def __init__(self) -> None:
        self._histories: dict[Path, LogHistory] = {}

    def is_run(self, path: Path, places: Places) -> bool:
        """Whether it, or a checkpoint in it, has a trainer's state; a checkpoint alone is none beside its run."""
        return newest_state(path, places) is not None

    def progress(self, path: Path, places: Places) -> tuple[int, int, str]:
        newest = newest_state(path, places)
        state = read_object(newest)
        step, planned = whole(state.get("global_step")), whole(state.get("max_steps"))
        seconds = age(newest)
        running = seconds is not None and seconds < QUIET_S
        return step, planned, "done" if planned and step >= planned else "running" if running else "interrupted"

    def newest(self, path: Path, places: Places) -> Path | None:
        return newest_state(path, places)

    def numbers(self, run: Run, places: Places, pool: Pool) -> Numbers:
        return self._histories.setdefault(run.path, LogHistory(run.path, places))

    def settings(self, run: Run, places: Places) -> dict[str, Any]:
        """What the adapter's and the model's configuration say; the arguments are pickled, and not read."""
        newest = newest_state(run.path, places)
        state = {key: value for key, value in read_object(newest).items() if not isinstance(value, list | dict)}
        folder = newest.parent if newest is not None else run.path
        parts = {name: read_object(places.file(folder, f"{name}.json")) for name in ("config", "adapter_config")}
        return {"trainer_state": state, **{name: part for name, part in parts.items() if part}}


def newest_state(run: Path, places: Places) -> Path | None:
    """The trainer's state in a run's directory that has gone furthest."""
    own = places.file(run, STATE)
    if own is not None:
        return own
    try:
        names = [name for entry in run.iterdir() if CHECKPOINT.fullmatch(name := entry.name)]
    except OSError:
        return None
    for name in sorted(names, key=lambda name: -int(name.partition("-")[2])):
        if (found := places.file(run, f"{name}/{STATE}")) is not None:
            return found
    return None


def _merged(history: Any) -> list[dict[str, Any]]:
    """What was logged by step, in their order; a line without a step belongs to the one before."""
    rows: dict[int, dict[str, Any]] = {}
    step = 0
    for line in history if isinstance(history, list) else ():
        if isinstance(line, dict):
            step = whole(line.get("step"), step)
            rows.setdefault(step, {}).update(line)
    return [rows[step] | {"step": step} for step in sorted(rows)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    try:
        return float(value) if _is_number(value) else np.nan
    except OverflowError:
        return np.nan
