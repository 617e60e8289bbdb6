r"""Where problems come from: a local file, a hub data set, or a function of the user's.

Reference answers may be whole solutions: GSM8K's ``#### 1,234`` and MATH's ``\boxed{…}`` are found in any of the
sources (``rewards.extract.reference_answer``); the full text stays in ``metadata["solution"]``.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.errors import DataError, PluginError
from retrain.extras import missing
from retrain.plugins import load_function
from retrain.rewards.extract import reference_answer
from retrain.types import Problem

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands (``file:line``), for errors and as the problem's id, and its columns."""


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; ``tags`` None means none, several are joined."""

    prompt: str
    answer: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class HubSource:
    """A data set on the Hugging Face hub: repository, configurations (concatenated) and columns."""

    repository: str
    configurations: tuple[str, ...]
    columns: Columns


HUB: dict[str, HubSource] = {
    "gsm8k": HubSource("openai/gsm8k", ("main",), Columns("question", "answer")),
    "math": HubSource(
        "EleutherAI/hendrycks_math",
        (
            "algebra",
            "counting_and_probability",
            "geometry",
            "intermediate_algebra",
            "number_theory",
            "prealgebra",
            "precalculus",
        ),
        Columns("problem", "solution", ("type", "level")),
    ),
}
FILE_ENDINGS = (".jsonl", ".parquet")


def file_problems(source: str, columns: Columns, base_dir: Path | None = None) -> list[Problem]:
    """Problems of a ``.jsonl`` or ``.parquet`` file, looked up in ``base_dir``, then in the current directory.

    Raises DataError naming ``file:line`` for the first malformed row, MissingExtra for Parquet without pyarrow.
    """
    path = found(source, base_dir)
    rows = parquet_rows(path, source) if path.suffix == ".parquet" else jsonl_rows(path, source)
    return problems_of_rows(rows, columns, f"the file {path}")


def found(source: str, base_dir: Path | None) -> Path:
    """The file that ``source`` names, as an absolute path. Raises DataError when there is none."""
    folders = dict.fromkeys(folder.resolve() for folder in (base_dir, Path.cwd()) if folder is not None)
    tried = [folder / Path(source).expanduser() for folder in folders]
    for path in tried:
        if path.is_file():
            return path
    raise DataError(f"data source {source!r}: no such file (looked for {' and '.join(map(str, dict.fromkeys(tried)))})")


def jsonl_rows(path: Path, label: str) -> Iterator[Row]:
    """Rows of a JSON Lines file; blank lines are left out. Raises DataError at a line that is no JSON object.

    ``label`` is the path as the user wrote it: the same in errors and ids on every machine.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{label}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise DataError(f"{where}  is not UTF-8 (byte {error.start + 1} of the line)") from None
            except json.JSONDecodeError as error:
                raise DataError(f"{where}  is not JSON: {error.msg} at column {error.colno}") from None
            except RecursionError:
                raise DataError(f"{where}  is nested too deeply") from None
            if not text:
                continue
            if not isinstance(row, dict):
                raise DataError(f'{where}  is not an object: write {{"prompt": "…", "answer": "…"}}')
            yield where, row


def parquet_rows(path: Path, label: str) -> Iterator[Row]:
    """Rows of a Parquet file. Raises DataError if it is damaged, MissingExtra without pyarrow."""
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
    """Problems of ``gsm8k`` or ``math`` through ``datasets``: from its cache, else downloaded.

    Raises MissingExtra without ``datasets``, DataError when the hub is out of reach (at once if HF_HUB_OFFLINE is
    set) with the way around it.
    """
    hub = HUB[name]
    try:
        import datasets
    except ModuleNotFoundError:
        raise missing(f"data source {name!r}", "datasets") from None
    rows: list[Row] = []
    for configuration in hub.configurations:
        try:
            table = datasets.load_dataset(hub.repository, configuration, split=split)
        except Exception as error:  # the hub client's many ways to fail; the reason is told
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"data source {name!r} ({hub.repository}, split {split!r}) is not to be had: {reason}. Without a hub, "
                f'use a copy as a file:  [data] source = "path/{split}.jsonl"  '
                f'prompt_column = "{hub.columns.prompt}"  answer_column = "{hub.columns.answer}"'
            ) from error
        prefix = f"{name}/{split}" if len(hub.configurations) == 1 else f"{name}/{split}/{configuration}"
        rows += [(f"{prefix}:{number}", dict(row)) for number, row in enumerate(table, start=1)]
    return problems_of_rows(rows, hub.columns, f"{name}, split {split!r}")


def takes_split(source: str, base_dir: Path | None = None) -> bool:
    """Whether a ``module:function`` source can be asked for a split. Raises PluginError when there is no such one."""
    return bool(inspect.signature(load_function(source, base_dir, "data source")).parameters)


def function_problems(source: str, split: str, columns: Columns, base_dir: Path | None = None) -> list[Problem]:
    """Problems of ``module:function``, called with the split if it takes a parameter.

    It returns Problems, or mappings with the configured columns. Raises PluginError when it cannot be found or
    returns something else; what it raises itself passes through.
    """
    function = load_function(source, base_dir, "data source")
    items = function(split) if takes_split(source, base_dir) else function()
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
        raise PluginError(f"data source {source!r} returned {type(items).__name__}, not a list of problems")
    problems: list[Problem] = []
    for number, item in enumerate(items, start=1):
        if isinstance(item, Problem):
            problems.append(item)
        elif isinstance(item, Mapping):
            problems.append(problem_of_row(f"{source}:{split}:{number}", item, columns))
        else:
            raise PluginError(f"data source {source!r} returned {type(item).__name__} as item {number}, not a Problem")
    if not problems:
        raise DataError(f"data source {source!r} returned no problems for the split {split!r}")
    return problems


def problems_of_rows(rows: Iterable[Row], columns: Columns, what: str) -> list[Problem]:
    """Rows as problems. Raises DataError if there is none, some have an answer and others not, or none has a tag's
    column."""
    problems, seen = [], dict[str, None]()
    for where, row in rows:
        problems.append(problem_of_row(where, row, columns))
        seen |= dict.fromkeys(row)
    if not problems:
        raise DataError(f"{what} holds no problems")
    if any(problem.answer for problem in problems):  # no answers at all is a data set for a judge
        for problem in problems:
            if not problem.answer:
                raise DataError(f'{problem.id}  column "{columns.answer}" is empty: no completion could ever be right')
    for column in columns.tags:
        if column not in seen:
            names = ", ".join(seen)
            raise DataError(f'{what} has no column "{column}": set [data] tags_column to one that it has ({names})')
    return problems


def problem_of_row(where: str, row: Mapping[str, Any], columns: Columns) -> Problem:
    """One row as a problem with ``where`` as its id. Raises DataError naming ``where``, the column and what to type."""
    for key, column in (("prompt_column", columns.prompt), ("answer_column", columns.answer)):
        if column not in row:
            names = ", ".join(map(str, row)) or "none"
            raise DataError(f'{where}  has no column "{column}": set [data] {key} to one that it has ({names})')
    text = _answer(where, columns.answer, row[columns.answer])
    answer = reference_answer(text)
    used = {columns.prompt, columns.answer, *columns.tags}
    metadata = {str(key): value for key, value in row.items() if key not in used}
    if answer != text:
        metadata["solution"] = text
    tags = tuple(tag for column in columns.tags for tag in _tags(where, column, row.get(column)))
    return Problem(where, _prompt(where, columns.prompt, row[columns.prompt]), answer, tags, metadata)


def _prompt(where: str, column: str, value: Any) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f'{where}  column "{column}" is empty')
        return _encodable(where, column, value)
    if not isinstance(value, list) or not value:
        raise DataError(f'{where}  column "{column}" is {_kind(value)}, not a text or a list of chat messages')
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f'{where}  column "{column}": a message is not {{"role": "…", "content": "…"}}')
        _encodable(where, column, message["role"] + message["content"])
    if value[-1]["role"] == "assistant":
        raise DataError(f'{where}  column "{column}": the last message is the assistant\'s, nothing is left to answer')
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _answer(where: str, column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _encodable(where, column, value).strip()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f'{where}  column "{column}" is {_kind(value)}, not a text or a number')
    return str(value)


def _tags(where: str, column: str, value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(tag, bool) or not isinstance(tag, str | int) for tag in values):
        raise DataError(f'{where}  column "{column}" is {_kind(value)}, not a tag or a list of tags')
    return [_encodable(where, column, str(tag)) for tag in values]


def _encodable(where: str, column: str, text: str) -> str:
    """``text``, which a tokenizer must be able to encode: half a surrogate pair (``"\\ud800"``) is an error."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f'{where}  column "{column}" holds half of a surrogate pair, which is no text')
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else f"{str(value)[:40]!r} ({type(value).__name__})"
