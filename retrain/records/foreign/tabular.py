"""Tables of results: CSV, TSV, JSON Lines and Parquet.

Long tables have a row for each number, with columns named as the fields of ``ResultRow``; ``ReadRequest.columns`` maps
other names. In wide tables ``ReadRequest.metric`` names the column that holds the value.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, islice, repeat
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign.cells import CONVERSIONS, FIELDS, Batch, CellConverter, TableLayout, as_text, layout_of
from retrain.records.foreign.json_files import json_row, numbered_lines
from retrain.records.foreign.parquet import parquet_batches
from retrain.records.foreign.table import CORRECT, Format, MetricFacts, ReadRequest, ResultRow
from retrain.util.jsonl import LONGEST_LINE

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
BATCH, BATCH_SIZE = 1 << 14, 1 << 22  # Rows that are converted at a time, and their characters


def csv_batches(path: Path) -> Iterator[Batch]:
    """Yield the columns of a CSV or TSV file as texts. Raises UsageError, with the line, for a row with too many or too
    few values."""
    csv.field_size_limit(LONGEST_LINE)
    lines = _text_lines(path)
    first = next(lines, "")
    delimiter = max(",;\t", key=re.sub(r'"[^"]*"', "", first).count)
    reader = csv.reader(chain([first], lines), delimiter=delimiter, skipinitialspace=delimiter != "\t", strict=True)
    rows, numbers, begin, size = list[list[str]](), list[int](), 1, 0
    try:
        header = [name.strip() for name in next(reader, [])]
        if twice := next((name for name, count in Counter(header).items() if name and count > 1), None):
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
                size += sum(map(len, row))
            begin = reader.line_num + 1
            if len(rows) == BATCH or size > BATCH_SIZE:
                yield numbers, dict(zip(header, zip(*rows, strict=True), strict=True))
                rows, numbers, size = [], [], 0
    except csv.Error as error:
        raise UsageError(f"{path}:{begin}  is not CSV: {error}") from None
    columns = zip(*rows, strict=True) if rows else repeat((), len(header))
    yield numbers, dict(zip(header, columns, strict=True))


def _text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file in UTF-8, without a byte-order mark."""
    for number, line in numbered_lines(path):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path}:{number}  is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8"
            ) from None


def jsonl_batches(path: Path, request: ReadRequest) -> Iterator[Batch]:
    """Yield the keys of JSON objects that ``request`` needs as columns, None where an object lacks the key. Lines are
    parsed many at a time, which takes a third of the time."""
    numbered = ((number, line) for number, line in enumerate(_text_lines(path), start=1) if not line.isspace())
    names = dict[str, None]()
    while batch := list(_up_to_size(islice(numbered, BATCH))):
        lines, texts = zip(*batch, strict=True)
        try:
            rows = json.loads(f"[{','.join(texts)}]")
        except (ValueError, RecursionError):
            rows = []
        if len(rows) != len(lines) or not all(isinstance(row, dict) for row in rows):
            rows = [json_row(path, number, line) for number, line in batch]
        names.update(dict.fromkeys(chain.from_iterable(rows)))
        needed = {*layout_of(path, list(names), request).columns.values(), *request.where}
        yield lines, {name: [row.get(name) for row in rows] for name in needed}


def _up_to_size(batch: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield lines until they have ``BATCH_SIZE`` characters."""
    size = 0
    for number, line in batch:
        yield number, line
        if (size := size + len(line)) > BATCH_SIZE:
            return


def _batches(path: Path, request: ReadRequest) -> Iterator[Batch]:
    if path.suffix.lower() == ".parquet":
        return parquet_batches(path, request)
    return csv_batches(path) if path.suffix.lower() in (".csv", ".tsv") else jsonl_batches(path, request)


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    conversions = {field: CellConverter(convert) for field, convert in CONVERSIONS.items()}
    gaps, measured = dict[Sequence[object], ResultRow](), set[Sequence[object]]()
    for lines, cells in _batches(path, request):
        if cells and not lines:
            continue  # only names of columns
        layout = layout_of(path, list(cells), request)
        mask = _mask(cells, layout, request)
        numbers, columns = list(compress(lines, mask)), []
        for field in FIELDS:
            if (name := layout.columns.get(field)) is not None:
                columns.append(conversions[field].column(path, name, numbers, list(compress(cells[name], mask))))
            else:
                columns.append(repeat(layout.metric if field == "metric" else ResultRow._field_defaults[field]))
        rows = map(ResultRow._make, zip(*columns, numbers, strict=False))
        if not layout.is_wide:
            yield from rows
            continue
        for row in rows:
            run = (row.condition, row.run, row.seed)
            if row.problem is None and row.value is None:  # not measured at this step
                gaps[run] = row
            else:
                measured.add(run)
                yield row
    yield from (row for run, row in gaps.items() if run not in measured)


def _mask(cells: Mapping[str, Sequence[object]], layout: TableLayout, request: ReadRequest) -> list[bool]:
    """Return which rows are requested."""
    if (column := layout.columns.get("metric")) is not None:
        mask = [request.needs(str(raw)) for raw in cells[column]]
    else:
        mask = [request.needs(str(layout.metric))] * len(cells[layout.columns["value"]])
    for name, value in request.where.items():
        wanted = str(value).lower()
        mask = [is_kept and str(as_text(raw)).lower() == wanted for is_kept, raw in zip(mask, cells[name], strict=True)]
    return mask


FORMAT = Format(
    tool="tables",
    patterns=tuple(f"*{ending}" for ending in ENDINGS),
    recognises=lambda path: path.suffix.lower() in ENDINGS,
    rows=_rows,
    facts=lambda path: {CORRECT: MetricFacts(higher_is_better=True, unit="share")},
)
