"""Parquet files of results, read in batches.

If a request needs the first and last steps alone, they are found first, from the columns that tell runs, sets and
metrics apart, and then only these rows are read.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from retrain.errors import UsageError
from retrain.extras import missing
from retrain.records.foreign.cells import Batch, Layout, as_integer, layout_of, matches
from retrain.records.foreign.table import Request

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

BATCH = 1 << 18  # Rows that are in memory at a time
GROUP = ("condition", "run", "seed", "set", "metric")  # Fields that tell apart what has a first and a last step
MOST_CODES = 1 << 40

Cells = tuple[Hashable, ...]


def parquet_batches(path: Path, request: Request) -> Iterator[Batch]:
    """Yield the columns that ``request`` needs, and the numbers of their records (1-based). Raises UsageError if the
    file is damaged, MissingExtra without pyarrow."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile, read_schema
    except ModuleNotFoundError:
        raise missing(f"reading {path}", "pyarrow") from None
    try:
        schema = read_schema(path)
        texts = [
            column.name
            for column in schema
            if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        ]
        with ParquetFile(path, read_dictionary=texts) as file:
            yield from _batches(file, request, layout_of(path, schema.names, request))
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def parquet_columns(path: Path) -> list[str]:
    from pyarrow.parquet import read_schema

    return read_schema(path).names


class _Keys(NamedTuple):
    """Columns by which rows are selected: those of the group, then that of the step, then those of ``where``."""

    group: Sequence[str]
    step: Sequence[str]
    where: Sequence[str]

    @property
    def names(self) -> list[str]:
        return [*self.group, *self.step, *self.where]


def _batches(file: "ParquetFile", request: Request, layout: Layout) -> Iterator[Batch]:
    import pyarrow

    columns = layout.columns
    is_large = "problem" in columns or not layout.is_wide  # a wide table without problems has gaps, but few rows
    step = [columns["step"]] if "step" in columns and request.steps != "all" and is_large else []
    keys = _Keys([columns[field] for field in GROUP if field in columns], step, list(request.where))
    in_groups = [_combinations_in(file, group, keys.names) for group in range(file.num_row_groups)]
    wanted = _wanted(set().union(*in_groups), keys, request, layout)
    names = list(dict.fromkeys([*columns.values(), *keys.names]))
    begin = 1
    for group, combinations in enumerate(in_groups):
        if not combinations.isdisjoint(wanted):
            at = begin
            for batch in file.iter_batches(BATCH, row_groups=[group], columns=names):
                cells, of_rows = _combinations(batch, keys.names)
                mask = np.array([each in wanted for each in cells], dtype=bool)[of_rows]
                selected = batch.filter(pyarrow.array(mask))
                lines: list[int] = (np.flatnonzero(mask) + at).tolist()
                yield lines, {name: _values(selected.column(name)) for name in names}
                at += batch.num_rows
        begin += file.metadata.row_group(group).num_rows
    yield [], {name: [] for name in names}


def _combinations_in(file: "ParquetFile", group: int, names: Sequence[str]) -> set[Cells]:
    """Return the distinct combinations of values that these columns have in a row group."""
    found = set[Cells]()
    for batch in file.iter_batches(BATCH, row_groups=[group], columns=names):
        found.update(_combinations(batch, names)[0])
    return found


def _wanted(combinations: set[Cells], keys: _Keys, request: Request, layout: Layout) -> set[Cells]:
    """Return the combinations that the request asks for."""
    wheres, at_step = list(request.where.values()), len(keys.group)
    metric = keys.group.index(layout.columns["metric"]) if request.metric and "metric" in layout.columns else None
    steps_of = defaultdict[Cells, list[tuple[int | None, Cells]]](list)
    for cells in combinations:
        if metric is not None and str(cells[metric]) != request.metric:
            continue
        if all(map(matches, wheres, cells[len(cells) - len(wheres) :])):
            steps_of[cells[:at_step]].append((_step(cells[at_step]) if keys.step else None, cells))
    return {cells for steps in steps_of.values() for cells in _at_ends(steps, request)}


def _step(cell: object) -> int | None:
    try:
        return as_integer(cell)
    except ValueError:
        return None  # its row is read, and then refused with its line


def _at_ends(steps: Sequence[tuple[int | None, Cells]], request: Request) -> Iterator[Cells]:
    """Yield the combinations of the first and the last steps, and those without a step."""
    last = math.inf if request.last_step is None else request.last_step
    ordered = sorted({step for step, _ in steps if step is not None and step <= last})
    ends = {None, *ordered[:1], *ordered[-3 if request.steps == "last3" else -1 :]}
    return (cells for step, cells in steps if step in ends)


def _combinations(batch: "pyarrow.RecordBatch", names: Sequence[str]) -> tuple[list[Cells], np.ndarray]:
    """Return the distinct combinations of values in these columns, and for each row the index of its combination."""
    codes, most, columns = np.zeros(batch.num_rows, dtype=np.int64), 1, list[tuple[np.ndarray, list[Hashable]]]()
    for name in names:
        indices, values = _encoded(batch.column(name))
        if most * len(values) > MOST_CODES:
            codes = np.unique(codes, return_inverse=True)[1]
            most = batch.num_rows
        codes = codes * len(values) + indices
        most *= len(values)
        columns.append((indices, [None if value != value else value for value in values]))  # NaN differs from itself
    _, first, of_rows = np.unique(codes, return_index=True, return_inverse=True)
    return [tuple(values[indices[row]] for indices, values in columns) for row in first.tolist()], of_rows


def _encoded(column: "pyarrow.Array") -> tuple[np.ndarray, list[Hashable]]:
    """Return the distinct values of a column, the last of which is None, and for each row the index of its value."""
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):  # nanoseconds need pandas
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    encoded = column if isinstance(column, pyarrow.DictionaryArray) else column.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    indices = encoded.indices.cast(pyarrow.int64()).fill_null(len(values)).to_numpy()
    return indices, [*values, None]


def _values(column: "pyarrow.Array") -> list[object]:
    indices, values = _encoded(column)
    return np.array(values, dtype=object)[indices].tolist()
