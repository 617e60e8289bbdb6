"""Read runs as ``RunResult`` for comparisons. Long runs are read from columns, because their rows would not fit in
memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from retrain.records.schema.campaign import RunEntry
from retrain.records.schema.layout import METRICS
from retrain.ui.library import Library
from retrain.ui.numbers import Numbers, own_seconds, steps_of
from retrain.ui.sources import RunSource
from retrain.verdicts.pooling import Reader
from retrain.verdicts.results import Measure, RunResult, read_run

WHOLE_BYTES = 2 << 20
"""Bytes of ``metrics.jsonl`` up to which a run is compared from its rows, exactly as ``retrain compare`` does."""
GRADED = ("reward_min", "reward_max", "mean_reward", "reward_std")


@dataclass
class ColumnRun(RunResult):
    """A run whose training metrics are read one column at a time. ``rows`` has only its last row and, if its rewards
    are not only 0 and 1, a row that shows this."""

    numbers: Numbers = field(kw_only=True, repr=False)

    def curve(self, key: str, set_name: str | None = None) -> list[tuple[int, float]]:
        if Measure(key=key, set_name=set_name).held_out:
            return super().curve(key, set_name)
        steps, values = points_of(self.numbers, key)
        return list(zip(steps.astype(int).tolist(), values.tolist(), strict=True))

    @property
    def device_seconds(self) -> float:
        seconds = own_seconds(self.numbers)
        return float(np.nansum(seconds)) if seconds is not None else 0.0


def reader(library: Library, runs: Mapping[str, RunSource]) -> Reader:
    def read(directory: Path, entry: RunEntry) -> RunResult:
        run = runs.get(entry.run_id)
        if run is None:  # its files lie elsewhere, or the manifest does not have it
            state = "missing" if entry.state == "missing" else "failed"
            return RunResult(entry.run_id, entry.label, entry.seed or 0, state, "outside", directory)
        if entry.state == "running":
            entry = replace(entry, state=run.state)
        metrics = library.file(run, METRICS)
        if metrics is None or metrics.stat().st_size <= WHOLE_BYTES:
            return read_run(directory, entry)
        numbers = library.numbers(run)
        rows = [row for row in (_graded_row(numbers), dict(numbers.last)) if row]
        return ColumnRun(**vars(read_run(directory, entry, rows)), numbers=numbers)

    return read


def _graded_row(numbers: Numbers) -> dict[str, float]:
    """Return a row with rewards other than 0 and 1 (``records.notes.is_graded``); {} if there is none."""
    with numbers.lock():
        low, high, mean, std = (numbers.column(key).astype(np.float64) for key in GRADED)
    with np.errstate(invalid="ignore"):
        ends = np.isin(low, (0.0, 1.0)) & np.isin(high, (0.0, 1.0))
        other = np.isfinite(low + high + mean + std) & (~ends | (np.abs(std**2 - mean * (1 - mean)) > 1e-5))
    places = np.flatnonzero(other)
    if not len(places):
        return {}
    return {key: float(column[places[0]]) for key, column in zip(GRADED, (low, high, mean, std), strict=True)}


def points_of(numbers: Numbers, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a metric, float64, without rows that lack it. The step of a held-out metric is the
    number of updates done at the evaluation."""
    rows = numbers.evaluations()
    name = Measure(key=key).held_out
    if name is not None and rows:
        pairs = [(row["step"], value) for row in rows
                 if row.get("name") == name and isinstance(value := row.get(key), int | float)]  # fmt: skip
        table = np.array(pairs, np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]
    with numbers.lock():
        column, steps = numbers.column(key), steps_of(numbers)
    known = np.isfinite(column)
    return steps[known], column[known].astype(np.float64)
