"""Convert a TOML file and ``--set`` values to a `Config`, or report all of their mistakes at once.

`tomli` returns values without positions, so ``key_lines`` scans a text that `tomli` has accepted and finds the line of
every key, table header and array element, without validation.
"""

import os
import re
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import NamedTuple

import tomli

from retrain.config.checking import KeyLocations, examine
from retrain.config.problems import Mistake, Path
from retrain.config.root import Config, homes, sections
from retrain.config.tasks import FILE_ENDINGS, SOURCES
from retrain.errors import ConfigError, ConfigProblem, UsageError

_STRING = (
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})'  # a multi-line string may end in up to two quotes of its own
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
)
_NAME = rf"[ \t]*(?:{_STRING}|[A-Za-z0-9_-]+)[ \t]*"
_KEY = re.compile(rf"{_NAME}(?:\.{_NAME})*", re.DOTALL)
_SCALAR = re.compile(rf"""{_STRING}|[^,\]}}\n#"'][^,\]}}\n#]*""", re.DOTALL)
_FILLER = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_SEPARATOR = re.compile(r"(?:[ \t\n,]+|#[^\n]*)*")
_EQUALS = re.compile(r".?[ \t]*")
_HEADER, _HEADER_END = re.compile(r"\[{0,2}"), re.compile(r"\]{0,2}")
_OPENING, _CLOSING = re.compile(r"[\[{]?"), re.compile(r"[\]}]?")


class Repeat(NamedTuple):
    """A key or table that is written twice, with its 1-based lines."""

    path: Path
    first: int
    again: int
    is_table: bool


@dataclass(frozen=True)
class LoadedConfig:
    config: Config
    path: FilePath
    text: str
    locations: KeyLocations
    warnings: list[str] = field(default_factory=list)
    sets: tuple[str, ...] = ()


def load(path: FilePath | str, sets: Sequence[str] = ()) -> LoadedConfig:
    """Read a configuration file, apply ``section.key=value`` settings, and validate all of it.

    Raises UsageError when there is no such file, and ConfigError with every mistake, ordered by line.
    """
    path = FilePath(path)
    text, data = read_toml(path)
    locations = KeyLocations(path.name, key_lines(text))
    wrong = apply_sets(data, sets, locations, is_file=True)
    _resolve_paths(data, path)
    config, warnings = examine(data, locations, wrong)
    if config.logging.log_dir is None:
        directory = f"logs/{path.stem}"
        config = config.model_copy(update={"logging": config.logging.model_copy(update={"log_dir": directory})})
    return LoadedConfig(config, path, text, locations, warnings, tuple(sets))


def parse_dict(data: Mapping[str, object], sets: Sequence[str] = ()) -> Config:
    """Return the configuration in plain data such as ``config.to_dict()``, with ``section.key=value`` settings applied.
    Raises ConfigError with every mistake."""
    changed, locations = deepcopy(dict(data)), KeyLocations("config")
    wrong = apply_sets(changed, sets, locations)
    return examine(changed, locations, wrong)[0]


def read_toml(path: FilePath) -> tuple[str, dict[str, object]]:
    """Return text and data of a TOML file. Raises UsageError when there is no such file, and ConfigError with the line
    of a syntax error."""
    text, name = "", path.name
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    try:
        text = raw.decode("utf-8-sig")
        return text, tomli.loads(text)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = ConfigProblem(f"{name}:{line}", "encoding", "is not UTF-8", "save the file as UTF-8")
    except RecursionError:
        problem = ConfigProblem(f"{name}:1", "syntax", "is nested too deeply", "tables within sections")
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python reads
        problem = _syntax_problem(str(error), text, name)
    raise ConfigError([problem])


def _syntax_problem(message: str, text: str, name: str) -> ConfigProblem:
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    lines = text.replace("\r\n", "\n").split("\n")
    number = int(match.group(1)) if match else len(text.rstrip("\n").split("\n"))
    line = lines[number - 1].strip() if number <= len(lines) else ""
    if repeat := find_repeat("\n".join(lines[:number])):
        table = ".".join(part for part in repeat.path if isinstance(part, str))
        fix = f"put the keys of both under one [{table}]" if repeat.is_table else "keep one of them"
        message = f"is {'declared' if repeat.is_table else 'written'} twice, first in line {repeat.first}"
        return ConfigProblem(f"{name}:{repeat.again}", Mistake(repeat.path, message).key, message, fix)
    reason = re.sub(r"\s*\(at [^)]*\)", "", message)
    reason = re.sub(r"\(['\"].*\)", lambda names: ".".join(literal_eval(names.group())), reason)
    where = f" at column {match.group(2)}" if match else " at the end of the file"
    pair = re.match(r"([\w.\-\"]+)\s*=\s*([^\s\"'\[{#][^#]*?)\s*(?:#.*)?$", line)
    if pair and pair.group(2).lower() in ("true", "false"):
        fix = f"{pair.group(1)} = {pair.group(2).lower()}"
    elif "overwrite" in reason or "twice" in reason or "namespace" in reason:
        fix = "each key and each section stands once; keep one of them"
    elif pair and "value" in reason.lower():
        fix = f'{pair.group(1)} = "{pair.group(2)}"'
    else:
        fix = "a line is key = value or [section], and strings are in quotes"
    return ConfigProblem(f"{name}:{number}", "syntax", f"is not TOML: {reason[:1].lower()}{reason[1:]}{where}", fix)


def apply_sets(
    data: dict[str, object], sets: Iterable[str], locations: KeyLocations, *, is_file: bool = False
) -> list[Mistake]:
    """Merge ``section.key=value`` settings into ``data`` and return the malformed ones.

    Rejects [campaign] settings for a file without that section: they would turn one run into dozens.
    """
    wrong = []
    single_run = locations.name if is_file and "campaign" not in data else ""
    for setting in sets:
        name, _, value = setting.partition("=")
        if mistake := _setting_mistake(setting, single_run):
            locations.sets.add(("--set",))
            wrong.append(mistake)
            continue
        parts = tuple(part.strip() for part in name.split("."))
        locations.replace(parts)
        _put(data, parts, _set_value(value.strip()))
        if parts == ("training", "max_steps") and isinstance(campaign := data.get("campaign"), dict):
            campaign.pop("max_steps", None)  # it would override this setting
    return wrong


def _setting_mistake(setting: str, single_run: str) -> Mistake | None:
    """Return the mistake in a setting, or None; ``single_run`` is the name of a file without [campaign], or ""."""
    name, equals, value = (part.strip() for part in setting.partition("="))
    section, *keys = (part.strip() for part in name.split("."))
    if not (equals and section and all(keys)):
        problem, fix = "is not of the form section.key=value", "--set training.lr=1e-4"
    elif not keys and section not in sections() and (named := homes(section)):
        problem, fix = "needs its section", " or ".join(f"--set {dotted}={value}" for dotted in named)
    elif single_run and section == "campaign":
        problem = f"is for campaigns, and {single_run} describes a single run: it has no section [campaign]"
        fix = "leave it out, or add [campaign] to the file"
        if keys == ["max_steps"]:
            fix = f"--set training.max_steps={value}"
    else:
        return None
    return Mistake(("--set",), problem, fix, about=name if equals and name else setting)


def _put(table: dict[str, object], path: tuple[str, ...], value: object) -> None:
    """Set the value at this path. A value on the way to it that is no table is replaced by a table."""
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = table[part] = {}
        table = inner
    table[path[-1]] = value


def _set_value(text: str) -> object:
    try:
        parsed = tomli.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["v"] if list(parsed) == ["v"] else text


def _resolve_paths(data: dict[str, object], path: FilePath) -> None:
    """Make paths of problems and rewards beside the TOML file absolute, so that a resume finds them."""
    graders = [data.get("reward"), data.get("audit"), *_rows(data.get("reward"), "components")]
    named = [(data.get("data"), key) for key in ("source", "eval_source")]
    named += [(table, "source") for table in _rows(data.get("evaluation"), "sets")]
    named += [(table, key) for table in graders for key in ("custom_module", "reward_model")]
    for table, key in named:
        if not isinstance(table, dict):
            continue
        value = table.get(key)
        if not isinstance(value, str) or not value or "\0" in value:
            continue
        if key == "custom_module" and not value.endswith(".py"):
            value = value.replace(".", "/") + ".py"
        candidate = path.parent / value
        may_be_directory = key == "reward_model" or (key != "custom_module" and value not in SOURCES)
        is_file = value.endswith((".py", *FILE_ENDINGS)) and candidate.is_file()
        if is_file or (may_be_directory and candidate.is_dir()):
            table[key] = os.path.abspath(candidate)  # not resolved: a link may have a more meaningful name


def _rows(table: object, key: str) -> list[object]:
    rows = table.get(key) if isinstance(table, dict) else None
    return rows if isinstance(rows, list) else []


def key_lines(text: str) -> dict[Path, int]:
    """Return the 1-based line of every path in a valid TOML ``text``.

    A path consists of names of tables and keys, and of indices into arrays: ``("campaign", "conditions", 0, "lr")``. A
    quoted key that contains dots is one name. Implied tables (``a`` in ``[a.b]``) have the line where they first
    appear.
    """
    return _Scan(text).document()


def find_repeat(text: str) -> Repeat | None:
    """Return the key or table that ``text``, valid TOML up to its last line, writes twice; None for other faults."""
    scan = _Scan(text)
    with suppress(ValueError):  # the scan fails where the text is no longer TOML
        scan.document()
    return scan.repeat


class _Scan:
    def __init__(self, text: str):
        self.text = text.replace("\r\n", "\n")
        self.position, self.line = 0, 1
        self.lines: dict[Path, int] = {}
        self.array_lengths: dict[Path, int] = {}
        self.written: dict[Path, int] = {}
        self.repeat: Repeat | None = None

    def document(self) -> dict[Path, int]:
        table: Path = ()
        self._skip(_FILLER)
        while self.position < len(self.text):
            if brackets := self._skip(_HEADER):
                table = self._header(is_array=len(brackets) == 2)
            else:
                self._pair(table)
            self._skip(_FILLER)
        return self.lines

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        if match is None:
            raise ValueError(f"not TOML at line {self.line}")
        self.position = match.end()
        self.line += match.group().count("\n")
        return match.group()

    def _names(self) -> list[str]:
        names: list[str] = []
        inner: object = tomli.loads(f"{self._skip(_KEY)} = 0")
        while isinstance(inner, dict):
            ((name, inner),) = inner.items()
            names.append(name)
        return names

    def _write(self, path: Path, above: int, is_table: bool) -> None:
        """Record the line of a key or table, and a repetition if it was written before. The first ``above`` names of
        its path are tables that may be written again."""
        if path in self.written and self.repeat is None:
            self.repeat = Repeat(path, self.written[path], self.line, is_table)
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], self.line)
            if length > above:
                self.written.setdefault(path[:length], self.line)

    def _header(self, is_array: bool) -> Path:
        path: Path = ()
        *parents, last = self._names()
        for name in parents:
            path = self._latest((*path, name))
        path = (*path, last)
        if is_array:
            self.array_lengths[path] = self.array_lengths.get(path, 0) + 1
        path = self._latest(path)
        self._write(path, len(path) - 1, is_table=True)
        self._skip(_HEADER_END)
        return path

    def _latest(self, path: Path) -> Path:
        """Return the path extended by the latest element if it is an array of tables."""
        length = self.array_lengths.get(path)
        return path if length is None else (*path, length - 1)

    def _pair(self, table: Path) -> None:
        path = (*table, *self._names())
        self._write(path, len(table), is_table=False)
        self._skip(_EQUALS)
        self._value(path)

    def _value(self, path: Path) -> None:
        opening = self._skip(_OPENING)
        if not opening:
            self._skip(_SCALAR)
            return
        index = 0
        self._skip(_SEPARATOR)
        while not self._skip(_CLOSING):
            if opening == "{":
                self._pair(path)
            else:
                self.lines.setdefault((*path, index), self.line)
                self._value((*path, index))
                index += 1
            self._skip(_SEPARATOR)
