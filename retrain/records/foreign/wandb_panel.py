"""CSV exports of Weights & Biases: the points of a panel, and the table of runs.

A panel's export has the column ``Step`` (or another x axis) and for every run ``<run> - <metric>``, with ``__MIN`` and
``__MAX`` beside it. An empty cell is a step at which the run logged nothing. The columns of a grouped panel are named
``<key>: <value> - <metric>`` and hold means over runs. The table's export has a row for every run, with its settings
and the last values of its metrics, which cannot be told apart: all columns of numbers count as metrics.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from retrain.errors import UsageError
from retrain.records.foreign import condition_and_seed
from retrain.records.foreign.cells import STATES, Batch, Converted, as_integer, as_number, as_time, is_empty
from retrain.records.foreign.table import Format, Request, ResultRow
from retrain.records.foreign.tabular import csv_batches

Number = TypeVar("Number", int | None, float | None)

SEPARATOR = " - "
RANGE = ("__MIN", "__MAX")
GROUPED = re.compile(r"[\w./-]+: (.+)")
# Columns of the table of runs that are no metrics
ABOUT_RUNS = {
    "Name",
    "ID",
    "State",
    "Notes",
    "User",
    "Tags",
    "Created",
    "Runtime",
    "Sweep",
    "Group",
    "Job Type",
    "seed",
}


def recognises(path: Path) -> bool:
    if path.suffix.lower() != ".csv":
        return False
    try:
        names = list(next(csv_batches(path))[1])
    except (UsageError, StopIteration):
        return False
    return {"Name", "State"} <= set(names) or bool(names and _is_panel(names))


def _is_panel(names: Sequence[str]) -> bool:
    is_named = SEPARATOR not in names[0] and all(SEPARATOR in name for name in names[1:])
    return len(names) > 1 and is_named and (names[0] == "Step" or any(name.endswith(RANGE) for name in names))


def rows(path: Path, request: Request) -> Iterator[ResultRow]:
    for batch in csv_batches(path):
        if _is_panel(list(batch[1])):
            yield from _panel_rows(path, batch, request)
        else:
            yield from _run_rows(path, batch, request)


def _panel_rows(path: Path, batch: Batch, request: Request) -> Iterator[ResultRow]:
    lines, cells = batch
    axis, *names = cells
    # Columns such as "<run> - _step" belong to the x axis
    names = [name for name in names if not name.endswith(RANGE) and not name.rpartition(SEPARATOR)[2].startswith("_")]
    steps = _column(path, batch, axis, as_integer)
    suffix = _metric_suffix(names, request.metric or request.column)
    for name in names:
        run, metric = _split(name, suffix)
        if request.metric not in (None, metric):
            continue
        grouped = GROUPED.fullmatch(run)
        condition, seed = (grouped[1], None) if grouped else condition_and_seed(run)
        values = _column(path, batch, name, as_number)
        points = [point for point in zip(lines, steps, values, cells[name], strict=True) if not is_empty(point[-1])]
        for line, step, value, _ in points or [(1, None, None, None)]:
            yield ResultRow(metric, value, step, condition=condition, run=run, seed=seed, line=line)


def _metric_suffix(names: Sequence[str], metric: str | None) -> str:
    """Return the end that all names share, from a separator on; "" if they share none. Of a single name it is the part
    after the last separator, because names of runs contain separators more often than those of metrics."""
    if metric is not None and any(name.endswith(SEPARATOR + metric) for name in names):
        return SEPARATOR + metric
    ends = [names[0][match.start() :] for match in re.finditer(SEPARATOR, names[0])] if names else []
    shared = (end for end in ends if all(name.endswith(end) for name in names))
    return ends[-1] if len(names) == 1 else next(shared, "")


def _split(name: str, suffix: str) -> tuple[str, str]:
    """Return run and metric."""
    if suffix and name.endswith(suffix):
        return name.removesuffix(suffix), suffix.removeprefix(SEPARATOR)
    run, _, metric = name.rpartition(SEPARATOR)
    return run, metric


def _run_rows(path: Path, batch: Batch, request: Request) -> Iterator[ResultRow]:
    lines, cells = batch
    nothing = [None] * len(lines)
    seeds = _column(path, batch, "seed", as_integer) if "seed" in cells else nothing
    steps = _column(path, batch, "_step", as_integer) if "_step" in cells else nothing
    times = _column(path, batch, "Created", as_time) if "Created" in cells else nothing
    groups = cells.get("Group", nothing)
    wanted = request.metric or request.column
    for metric in [str(wanted)] if wanted in cells else [] if request.metric else _metrics(cells):
        values = _column(path, batch, metric, as_number)
        for index, (line, name, state) in enumerate(zip(lines, cells["Name"], cells["State"], strict=True)):
            condition, seed = condition_and_seed(str(name))
            yield ResultRow(
                metric,
                values[index],
                steps[index],
                condition=str(groups[index] or condition),
                run=str(name),
                seed=seed if seeds[index] is None else seeds[index],
                state=STATES.get(str(state).lower(), "unfinished"),
                time=times[index],
                line=line,
            )


def _metrics(cells: Mapping[str, Sequence[object]]) -> Iterator[str]:
    """Yield the columns of the table of runs that hold numbers alone."""
    for name, values in cells.items():
        with suppress(ValueError):
            numbers = [] if name in ABOUT_RUNS or name.startswith("_") else list(map(as_number, values))
            if any(number is not None for number in numbers):
                yield name


def _column(path: Path, batch: Batch, name: str, convert: Callable[[object], Number]) -> list[Number]:
    return Converted(convert).column(batch[1][name], path, name, batch[0])


FORMAT = Format(tool="Weights & Biases", patterns=("*.csv",), recognises=recognises, rows=rows)
