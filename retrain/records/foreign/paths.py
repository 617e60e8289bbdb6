"""Find the files of runs: from a file, a directory or a pattern with placeholders to the files of each run."""

import errno
import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import NamedTuple

from retrain.config.base import is_plugin
from retrain.config.comparing import Results
from retrain.errors import NotReadable, PluginError, UsageError, listed
from retrain.plugins import described, load_function
from retrain.records.foreign import condition_and_seed
from retrain.records.foreign.table import FORMATS, Format, ReadRequest, ResultRow, format_of

# Regular expressions of the placeholders in a pattern
PLACEHOLDERS = {"condition": "[^/]+", "run": "[^/]+", "set": "[^/]+", "seed": r"\d{1,9}", "step": r"\d{1,12}"}
# Types of the numbers in the rows of a user's reader, including those of NumPy
NUMBERS = {"value": Real, "step": Integral, "sample": Integral, "seed": Integral, "time": Real}
NAMES = {Real: "a number", Integral: "an integer"}
HINT = f'Formats: {", ".join(FORMATS)}; name one by format = "…" (--format), or module:function for a reader'
TOKEN = re.compile(r"(\*\*/|\*|\{[^{}]*\})")


class NothingFound(UsageError):
    """A path that matches nothing, or only directories without results."""


class Match(NamedTuple):
    """A path that a pattern matches, and the values of the placeholders."""

    path: Path
    values: Mapping[str, str]


class ResultFile(NamedTuple):
    """A file of a run, with the step and the held-out set that its path names."""

    path: Path
    step: int | None = None
    set: str | None = None


@dataclass(frozen=True)
class RunFiles:
    """Files that a pattern assigns to one run, or one file whose rows may name several runs."""

    entry: Results
    # Pattern, directory or file by which the run is known, for messages
    origin: str
    files: Sequence[ResultFile] = ()
    # Names in the path, else in the section of the comparison file; a directory may be named as <label>_s<seed>
    condition: str | None = None
    seed: int | None = None
    run: str | None = None
    # Name of a file or directory, used if the rows do not name the condition either
    fallback: str = ""
    # Format of all files; None: it is recognised for each file
    format: Format | None = None


def find_runs(entry: Results, base: Path) -> list[RunFiles]:
    """Return the files of every run at ``entry.path``, relative to ``base``.

    A run directory without results has no files. Raises NothingFound if nothing matches the path.
    """
    known = named_format(entry.format, base) if entry.format else None
    matched = matches(entry.path, base)
    directories = [match for match in matched if match.path.is_dir()]
    if not directories:
        return _runs_of_files(entry, matched, known)
    runs = [run for match in directories for run in _runs_of_directory(entry, match, known)]
    is_pattern = TOKEN.search(entry.path) is not None
    if not runs or (is_pattern and not any(run.files for run in runs)):
        where = entry.path if is_pattern else f"{entry.path} and its subdirectories"
        fault = "no file in a known format" if known is None else f"no files of {known.tool}"
        example = f"'{entry.path}/{{condition}}/seed{{seed}}'"
        raise NothingFound(f"{where}: {fault}. Type where the files are, such as {example}. {HINT}")
    return runs


def named_format(name: str, base: Path) -> Format:
    """Return the format with this name, or that of ``module:function``. Raises UsageError for an unknown one."""
    if is_plugin(name):
        return Format(name, (), lambda path: True, _rows_of_plugin(name, base))
    if name not in FORMATS:
        close = get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f'format "{name}" is unknown: {hint}There are {", ".join(FORMATS)}, and module:function')
    return format_of(name)


def recognise(path: Path) -> Format:
    """Return the first format that recognises a file. Raises UsageError if there is none."""
    for name in FORMATS:
        if (known := format_of(name)).recognises(path):
            return known
    raise UsageError(f"{path} is in no known format. {HINT}")


def _rows_of_plugin(name: str, base: Path) -> Callable[[Path, ReadRequest], Iterator[ResultRow]]:
    function = load_function(name, base, "format")

    def rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
        try:
            for number, row in enumerate(function(path), start=1):
                if not isinstance(row, ResultRow):
                    raise PluginError(f"format {name!r} yields {type(row).__name__}, not ResultRow")
                for field, kind in NUMBERS.items():
                    if not isinstance(value := getattr(row, field), kind | None):
                        raise PluginError(f"format {name!r} yields {field} = {value!r:.80}, which is not {NAMES[kind]}")
                yield row if row.line else row._replace(line=number)
        except (UsageError, PluginError):
            raise
        except Exception as error:  # any exception of the user's code
            raise PluginError(f"format {name!r} failed on {path}: {described(error)}") from error

    return rows


def matches(pattern: str, base: Path) -> list[Match]:
    """Return the paths that ``pattern`` matches, sorted. Raises NothingFound, with the nearest existing path, if there
    is none."""
    path = Path(pattern).expanduser()
    if os.path.exists(base / path):  # False where permission is denied
        if not ((base / path).is_file() or (base / path).is_dir()):
            raise UsageError(f"{pattern} is no regular file: write the results into one")
        return [Match(base / path, {})]
    if found := _glob(path, base):
        return found
    nearest, parent = next((found[0].path, parent) for parent in path.parents if (found := _glob(parent, base)))
    if not nearest.is_dir():
        raise NothingFound(f"nothing matches {pattern}: {nearest} is a file")
    part = path.parts[len(parent.parts)]
    _require_readable(nearest)
    names = sorted(entry.name for entry in nearest.iterdir())
    close = get_close_matches(part, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"it contains {listed(names, 5) or 'nothing'}"
    raise NothingFound(f"nothing matches {pattern}: {nearest} has no {part}; {hint}")


def _glob(path: Path, base: Path) -> list[Match]:
    text, expression = "", ""
    for token in TOKEN.split(str(path)):
        name = token[1:-1]
        if token == "**/":
            text, expression = text + token, expression + "(?:.+/)?"
        elif token == "*":
            text, expression = text + token, expression + "[^/]*"
        elif not token.startswith("{"):
            text, expression = text + glob.escape(token), expression + re.escape(token)
        elif name in PLACEHOLDERS:
            group = f"(?P<{name}>"
            text += "*"
            expression += f"(?P={name})" if group in expression else f"{group}{PLACEHOLDERS[name]})"
        else:
            names = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise UsageError(f"{path}: {token} is not a placeholder; there are {names}")
    found = ((name, re.fullmatch(expression, name)) for name in sorted(glob.glob(text, root_dir=base, recursive=True)))
    named = [Match(base / name, match.groupdict()) for name, match in found if match]
    return [match for match in named if os.path.isfile(match.path) or os.path.isdir(match.path)]  # no links to nothing


def _runs_of_files(entry: Results, matched: Sequence[Match], known: Format | None) -> list[RunFiles]:
    """Return a run for each combination of condition, seed and run in the paths; without these, one for each file."""
    groups: dict[tuple[str, ...], list[Match]] = {}
    for match in matched:
        names = tuple(match.values.get(name, "") for name in ("condition", "seed", "run"))
        groups.setdefault(names if any(names) else (str(match.path),), []).append(match)
    runs = []
    for group in groups.values():
        path = group[0].path.absolute()
        fallback = _name_with_seed(path.with_suffix("")) or _name_with_seed(path.parent)
        files = [_file(match.path, match.values) for match in group]
        runs.append(replace(_named_run(entry, group[0]), files=files, fallback=fallback, format=known))
    return runs


def _runs_of_directory(entry: Results, match: Match, known: Format | None) -> list[RunFiles]:
    """Return the run whose directory this is, else a run for each of its subdirectories that has results, or a seed in
    its name."""
    run = _directory(entry, match)
    if run.seed is not None or run.run is not None:
        return [_with_files(run, match, known)]
    direct = _with_files(run, match, known, nested=False)
    if direct.files:
        return _runs_by_seed(direct)
    runs = _runs_of_subdirectories(entry, match, known)
    if any(run.files for run in runs) and (len(runs) > 1 or runs[0].seed is not None):
        return runs
    run = _with_files(run, match, known)
    return [run] if run.files or run.condition is not None else []


def _runs_of_subdirectories(entry: Results, match: Match, known: Format | None) -> list[RunFiles]:
    _require_readable(match.path)
    runs = []
    for path in sorted(match.path.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            inner = Match(path, match.values)
            runs += _runs_by_seed(_with_files(_directory(entry, inner), inner, known))
    return [run for run in runs if run.files or run.seed is not None]


def _runs_by_seed(run: RunFiles) -> list[RunFiles]:
    """Return a run for each file if a directory without a seed has several files, all named by seeds."""
    names = [_name_with_seed(file.path.with_suffix("")) for file in run.files]
    if run.seed is not None or len(names) < 2 or not all(names):
        return [run]
    runs = []
    for file, name in zip(run.files, names, strict=True):
        seed = None if run.condition is None else condition_and_seed(name)[1]  # else rows may name condition and seed
        runs.append(replace(run, origin=str(file.path), files=[file], seed=seed, run=None, fallback=name))
    return runs


def _with_files(run: RunFiles, match: Match, known: Format | None, nested: bool = True) -> RunFiles:
    """Add the files in the first format that recognises files in the directory."""
    if known is not None and not known.patterns:  # a reader of one's own
        return replace(run, files=[_file(match.path, match.values)], format=known)
    for form in [known] if known else map(format_of, FORMATS):
        files = [_file(path, match.values) for path in _paths_below(match.path, form, nested)]
        if files := [file for file in files if known or form.recognises(file.path)]:
            return replace(run, files=files, format=form)
    return run


def _paths_below(directory: Path, form: Format, nested: bool) -> list[Path]:
    """Return the files where a format may have them. ``nested = False`` leaves out those at any depth (``**``), which
    may belong to several runs."""
    patterns = [pattern for pattern in form.patterns if nested or "**" not in pattern]
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def _directory(entry: Results, match: Match) -> RunFiles:
    """Return the run in a directory, without its files. A seed in the directory's name counts as one in the path."""
    run, path = _named_run(entry, match), match.path.absolute()
    if path.name == run.condition:
        return run
    if name := _name_with_seed(path):
        label, seed = condition_and_seed(name)
        return replace(run, condition=run.condition or label, seed=seed if run.seed is None else run.seed)
    return replace(run, fallback=path.name) if run.condition is None else replace(run, run=run.run or path.name)


def _named_run(entry: Results, match: Match) -> RunFiles:
    values = match.values
    condition, seed = values.get("condition", entry.condition), int(values["seed"]) if "seed" in values else entry.seed
    return RunFiles(entry, str(match.path), condition=condition, seed=seed, run=values.get("run"))


def _file(path: Path, values: Mapping[str, str]) -> ResultFile:
    _require_readable(path)
    return ResultFile(path, int(values["step"]) if "step" in values else None, values.get("set"))


def _require_readable(path: Path) -> None:
    if not os.access(path, os.R_OK):
        raise NotReadable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _name_with_seed(path: Path) -> str:
    """Return a name that contains a seed, preceded by the parent's name if it is only a seed; "" without a seed."""
    label, seed = condition_and_seed(path.name)
    return "" if seed is None else f"{path.parent.name}/{path.name}" if label == path.name else path.name
