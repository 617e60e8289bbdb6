"""Parquet files of results, read in batches.

Tables with answers to problems may be large, so only their rows of the needed steps are read.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrain.errors import UsageError, first_line
from retrain.extras import missing
from retrain.records.foreign.cells import Batch, TableLayout, as_integer, layout_of
from retrain.records.foreign.table import ReadRequest

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

BATCH = 1 << 18  # Rows that are in memory at a time
GROUP = ("condition", "run", "seed", "set", "metric")  # Fields that tell apart what has a first and a last step


def parquet_batches(path: Path, request: ReadRequest) -> Iterator[Batch]:
    """Yield the columns that ``request`` needs, and the numbers of their records (1-based). Raises UsageError if the
    file is damaged, MissingExtra without pyarrow."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile, read_schema
    except ModuleNotFoundError:
        raise missing(f"reading {path}", "pyarrow") from None
    try:
        schema = read_schema(path)
        kinds = pyarrow.types
        texts = [column.name for column in schema if kinds.is_string(column.type) or kinds.is_large_string(column.type)]
        layout, begin = layout_of(path, schema.names, request), 1
        names = list(dict.fromkeys([*layout.columns.values(), *request.where]))
        with ParquetFile(path, read_dictionary=texts) as file:
            steps = _needed_steps(file, layout, request)
            for batch in file.iter_batches(BATCH, columns=names):
                lines = np.arange(begin, begin + batch.num_rows)
                begin += batch.num_rows
                if steps is not None:
                    indices, values = _encoded(batch.column(layout.columns["step"]))
                    mask = np.array([_step(value) in steps for value in values])[indices]
                    batch, lines = batch.filter(pyarrow.array(mask)), lines[mask]
                yield lines.tolist(), {name: _values(batch.column(name)) for name in names}
    # ValueError and OverflowError: texts that are not UTF-8, and times that no date has
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UsageError(f"{path} cannot be read as Parquet: {first_line(error)}") from None


def _needed_steps(file: "ParquetFile", layout: TableLayout, request: ReadRequest) -> set[int | None] | None:
    """Return the steps that any run needs, with None for rows that name no step; None if all rows are read, as of
    tables without problems: these are small, and the last steps may have no value of the metric."""
    import pyarrow

    if request.steps == "all" or not {"step", "problem"} <= layout.columns.keys():
        return None
    columns = (layout.columns[field] for field in ("step", *GROUP) if field in layout.columns)
    names = list(dict.fromkeys([*columns, *request.where]))
    steps_of = defaultdict[tuple[Hashable, ...], set[int | None]](set)
    for batch in file.iter_batches(BATCH, columns=names):
        for row in pyarrow.Table.from_batches([batch]).group_by(names).aggregate([]).to_pylist():
            step, *group = (row[name] for name in names)
            steps_of[tuple(group)].add(_step(step))
    named = ([step for step in steps if step is not None] for steps in steps_of.values())
    return {None}.union(*map(request.needed_steps, named))


def _step(cell: object) -> int | None:
    try:
        return as_integer(cell)
    except ValueError:
        return None  # its row is read, and then refused with its line


def _encoded(column: "pyarrow.Array") -> tuple[np.ndarray, list[object]]:
    """Return the distinct values of a column, the last of which is None, and for each row the index of its value."""
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):  # nanoseconds need pandas
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    encoded = column if isinstance(column, pyarrow.DictionaryArray) else column.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    indices = encoded.indices.cast(pyarrow.int64()).fill_null(len(values)).to_numpy()
    return indices, [*values, None]


def _values(column: "pyarrow.Array") -> list[object]:
    """Return the values of a column, with one object for all equal ones: ``to_pylist`` is slow, and copies texts."""
    indices, values = _encoded(column)
    return np.array(values, dtype=object)[indices].tolist()
