"""Tables of results: CSV, TSV, JSON Lines and Parquet.

Long tables have a row for each number, with columns named as the fields of ``ResultRow``; ``Request.columns`` maps
other names. In wide tables ``Request.metric`` names the column that holds the value.
"""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, compress, islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from retrain.errors import NotReadable, UsageError
from retrain.records.foreign.cells import CONVERSIONS, FIELDS, MISSING, Batch, Converted, is_empty, layout_of, matches
from retrain.records.foreign.parquet import parquet_batches, parquet_columns
from retrain.records.foreign.table import CORRECT, Format, MetricFacts, Request, ResultRow
from retrain.util.jsonl import Row

Value = TypeVar("Value")

BATCH = 1 << 14  # Rows that are converted at a time


def csv_batches(path: Path) -> Iterator[Batch]:
    """Yield the columns of a CSV or TSV file as texts. Raises UsageError, with the line, for a row with too many or too
    few values."""
    lines = text_lines(path)
    first = next(lines, "")
    unquoted = re.sub(r'"[^"]*"', "", first)
    delimiter = max(",;\t", key=unquoted.count)
    reader = csv.reader(chain([first], lines), delimiter=delimiter, skipinitialspace=delimiter != "\t", strict=True)
    rows, numbers, begin = list[list[str]](), list[int](), 1
    try:
        header = [name.strip() for name in next(reader, [])]
        if twice := next((name for name in header if name and header.count(name) > 1), None):
            raise UsageError(f'{path}:1  names the column "{twice}" twice')
        begin = reader.line_num + 1  # a quoted value may contain line breaks
        for row in reader:
            if row and len(row) != len(header):
                raise UsageError(
                    f"{path}:{begin}  has {len(row)} values, and the first line names {len(header)} columns"
                )
            if row:
                rows.append(row)
                numbers.append(begin)
            begin = reader.line_num + 1
            if len(rows) == BATCH:
                yield numbers, dict(zip(header, zip(*rows, strict=True), strict=True))
                rows, numbers = [], []
    except csv.Error as error:
        raise UsageError(f"{path}:{begin}  is not CSV: {error}") from None
    columns = zip(*rows, strict=True) if rows else repeat((), len(header))
    yield numbers, dict(zip(header, columns, strict=True))


def jsonl_batches(path: Path) -> Iterator[Batch]:
    """Yield the keys of JSON objects as columns, ``MISSING`` where an object lacks the key. Raises UsageError at a line
    that is not a JSON object."""
    numbered = ((number, line) for number, line in enumerate(text_lines(path), start=1) if not line.isspace())
    names = dict[str, None]()
    while lines := list(islice(numbered, BATCH)):
        rows = _objects(path, lines)
        names.update(dict.fromkeys(chain.from_iterable(rows)))
        yield [number for number, _ in lines], {name: _cells(rows, name) for name in names}
    yield [], {name: [] for name in names}


def _objects(path: Path, lines: Sequence[tuple[int, str]]) -> list[Row]:
    """Return the objects in numbered lines. They are parsed at once, which takes a third of the time, and line by line
    if one of them is invalid."""
    with suppress(ValueError, RecursionError):
        rows = json.loads(f"[{','.join(line for _, line in lines)}]")
        if len(rows) == len(lines) and all(isinstance(row, dict) for row in rows):
            return rows
    rows = list[Row]()
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}  is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(f'{path}:{number}  is not an object such as {{"condition": "…", "value": 0.5}}')
        rows.append(row)
    return rows


def _cells(rows: Sequence[Row], name: str) -> list[object]:
    try:
        return list(map(itemgetter(name), rows))
    except KeyError:
        return [row.get(name, MISSING) for row in rows]


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file in UTF-8, without a byte-order mark."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}:{number}  is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8"
        ) from None
    except OSError as error:
        raise NotReadable(path, error) from None


def rows(path: Path, request: Request) -> Iterator[ResultRow]:
    conversions = {field: Converted(convert) for field, convert in CONVERSIONS.items()}
    filters = {name: Converted(partial(matches, wanted)) for name, wanted in request.where.items()}
    gaps, measured = dict[Sequence[object], ResultRow](), set[Sequence[object]]()
    for lines, cells in batches(path, request):
        if cells and not lines:
            continue  # only names of columns
        layout = layout_of(path, cells, request)
        if layout.metric is not None and request.metric not in (None, layout.metric):
            continue
        masks = [filters[name].column(cells[name], path, name, lines) for name in filters]
        if layout.metric is None and request.metric is not None:
            masks.append([str(raw) == request.metric for raw in cells[layout.columns["metric"]]])
        mask = list(map(all, zip(*masks, strict=True))) if masks else None
        numbers = _selected(lines, mask)
        columns = []
        for field in FIELDS:
            if (name := layout.columns.get(field)) is not None:
                columns.append(conversions[field].column(_selected(cells[name], mask), path, name, numbers))
            else:
                columns.append(repeat(layout.metric if field == "metric" else ResultRow._field_defaults[field]))
        made = map(ResultRow._make, zip(*columns, numbers, strict=False))
        if not layout.is_wide:
            yield from made
            continue
        for row, raw in zip(made, _selected(cells[layout.columns["value"]], mask), strict=True):
            run = (row.condition, row.run, row.seed)
            if row.problem is None and is_empty(raw):  # not measured at this step
                gaps[run] = row
            else:
                measured.add(run)
                yield row
    yield from (row for run, row in gaps.items() if run not in measured)


def _selected(values: Sequence[Value], mask: Sequence[bool] | None) -> Sequence[Value]:
    return values if mask is None else list(compress(values, mask))


def batches(path: Path, request: Request) -> Iterator[Batch]:
    if path.suffix.lower() == ".parquet":
        return parquet_batches(path, request)
    return csv_batches(path) if path.suffix.lower() in (".csv", ".tsv") else jsonl_batches(path)


def columns_of(path: Path) -> list[str]:
    if path.suffix.lower() == ".parquet":
        return parquet_columns(path)
    return list(next(batches(path, Request()))[1])


ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

FORMAT = Format(
    tool="tables",
    patterns=tuple(f"*{ending}" for ending in ENDINGS),
    recognises=lambda path: path.suffix.lower() in ENDINGS,
    rows=rows,
    columns=columns_of,
    facts=lambda path: {CORRECT: MetricFacts(higher_is_better=True, unit="share")},
)
