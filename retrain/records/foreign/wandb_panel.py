"""CSV exports of Weights & Biases: the points of a panel, and the table of runs.

A panel's export has the column ``Step`` (or another x axis) and for every run ``<run> - <metric>``, with ``__MIN`` and
``__MAX`` beside it. An empty cell is a step at which the run logged nothing. The columns of a grouped panel are named
``<key>: <value> - <metric>`` and hold means over runs. The table's export has a row for every run, with its settings
and the last values of its metrics, which cannot be told apart: the metric must be named.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from retrain.errors import UsageError
from retrain.records.foreign import condition_and_seed
from retrain.records.foreign.cells import Batch, CellConverter, as_integer, as_number
from retrain.records.foreign.table import Format, ReadRequest, ResultRow
from retrain.records.foreign.tabular import FORMAT as TABLE
from retrain.records.foreign.tabular import csv_batches

Value = TypeVar("Value")

SEPARATOR = " - "
RANGE = ("__MIN", "__MAX")
GROUPED = re.compile(r"[\w./-]+: (.+)")
# Columns of the table of runs, by the field of the row
RUN_COLUMNS = {"run": "Name", "state": "State", "condition": "Group", "time": "Created", "step": "_step"}


def _recognises(path: Path) -> bool:
    if path.suffix.lower() != ".csv":
        return False
    try:
        names = list(next(csv_batches(path))[1])
    except (UsageError, StopIteration):
        return False
    return {"Name", "State"} <= set(names) or _is_panel(names)


def _is_panel(names: Sequence[str]) -> bool:
    if len(names) < 2 or SEPARATOR in names[0] or not all(SEPARATOR in name for name in names[1:]):
        return False
    return names[0] == "Step" or any(name.endswith(RANGE) for name in names)


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    for batch in csv_batches(path):
        names = list(batch[1])
        if not _is_panel(names):
            yield from _run_rows(path, names, request)
            return
        yield from _panel_rows(path, batch, request)


def _panel_rows(path: Path, batch: Batch, request: ReadRequest) -> Iterator[ResultRow]:
    axis, *names = batch[1]
    steps = _column(path, batch, axis, as_integer)
    for name in names:
        run, metric = _run_and_metric(name, request)
        # Columns such as "<run> - _step" belong to the x axis
        if name.endswith(RANGE) or metric.startswith("_") or not request.needs(metric):
            continue
        grouped = GROUPED.fullmatch(run)
        condition, seed = (grouped[1], None) if grouped else condition_and_seed(run)
        points = zip(batch[0], steps, _column(path, batch, name, as_number), batch[1][name], strict=True)
        logged = [(line, step, value) for line, step, value, text in points if text]
        for line, step, value in logged or [(1, None, None)]:  # a run without a point has no value
            yield ResultRow(metric, value, step, condition=condition, run=run, seed=seed, line=line)


def _run_and_metric(name: str, request: ReadRequest) -> tuple[str, str]:
    """Split the name of a column. Names of runs and metrics may contain the separator: the requested metric decides,
    else the last separator."""
    if request.metric and name.endswith(SEPARATOR + request.metric):
        return name.removesuffix(SEPARATOR + request.metric), request.metric
    run, _, metric = name.rpartition(SEPARATOR)
    return run, metric


def _run_rows(path: Path, names: Sequence[str], request: ReadRequest) -> Iterator[ResultRow]:
    """Yield the last value of the metric, whose column must be requested, of every run."""
    columns = {field: name for field, name in RUN_COLUMNS.items() if name in names}
    for row in TABLE.rows(path, replace(request, columns={**columns, **request.columns})):
        condition, seed = condition_and_seed(str(row.run))
        yield row._replace(condition=row.condition or condition, seed=seed if row.seed is None else row.seed)


def _column(path: Path, batch: Batch, name: str, convert: Callable[[object], Value]) -> list[Value]:
    return CellConverter(convert).column(path, name, batch[0], batch[1][name])


FORMAT = Format(tool="Weights & Biases", patterns=("*.csv",), recognises=_recognises, rows=_rows)
