"""Find the files of runs: from a file, a directory or a pattern with placeholders to the files of each run."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from retrain.config.base import is_plugin
from retrain.config.comparing import Results
from retrain.errors import NotReadable, PluginError, UsageError, listed
from retrain.plugins import described, load_function
from retrain.records.foreign import condition_and_seed
from retrain.records.foreign.table import FORMATS, Format, Request, ResultRow, format_of

# Regular expressions of the placeholders in a pattern
PLACEHOLDERS = {"condition": ".+", "run": ".+", "set": ".+", "seed": r"\d{1,9}", "step": r"\d{1,12}"}
HINT = f'Formats: {", ".join(FORMATS)}; name one by format = "…" (--format), or module:function for a reader'
TOKEN = re.compile(r"\*|\{([^{}]*)\}")


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
    files: Sequence[ResultFile]
    # Names in the path: by placeholders, or by a directory that is named as <label>_s<seed>
    condition: str | None = None
    seed: int | None = None
    run: str | None = None
    # Name of a file or directory, used if neither the path nor the rows name the condition
    fallback: str = ""
    # Format of all files; None: it is recognised for each file
    format: Format | None = None

    @property
    def is_named(self) -> bool:
        """True if the path names the run."""
        return not (self.condition is None and self.seed is None and self.run is None)


def find_runs(entry: Results, base: Path) -> list[RunFiles]:
    """Return the files of every run at ``entry.path``, relative to ``base``.

    A run directory without results has no files. Raises NothingFound if nothing matches the path.
    """
    known = named_format(entry.format, base) if entry.format else None
    matched = matches(entry.path, base)
    directories = [match for match in matched if match.path.is_dir()]
    if not directories:
        return _runs_of_files(entry, matched, known)
    is_pattern = TOKEN.search(entry.path) is not None
    runs = [run for match in directories for run in _runs_of_directory(entry, match, known, is_pattern)]
    if not runs or (is_pattern and not any(run.files for run in runs)):
        where = entry.path if is_pattern else f"{entry.path} and its subdirectories"
        if known is not None:
            raise NothingFound(
                f"{where}: no files of {known.tool} ({', '.join(known.patterns)}); name them in the path"
            )
        example = f"'{entry.path}/{{condition}}/seed{{seed}}'"
        raise NothingFound(f"{where}: no file in a known format. Type where the files are, such as {example}. {HINT}")
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


def _rows_of_plugin(name: str, base: Path) -> Callable[[Path, Request], Iterator[ResultRow]]:
    function = load_function(name, base, "format")

    def rows(path: Path, request: Request) -> Iterator[ResultRow]:
        try:
            for number, row in enumerate(function(path), start=1):
                if not isinstance(row, ResultRow):
                    raise PluginError(f"format {name!r} yields {type(row).__name__}, not ResultRow")
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
    if (base / path).exists():
        if not ((base / path).is_file() or (base / path).is_dir()):
            raise UsageError(f"{pattern} is no regular file: write the results into one")
        return [Match(base / path, {})]
    current = [Match(base / path.anchor, {})]
    for part in path.relative_to(path.anchor).parts:
        following = [inner for match in current for inner in _matches_inside(match, part, pattern)]
        if not following:
            directory = next((match.path for match in current if match.path.is_dir()), current[0].path)
            fault = f"nothing matches {pattern}" if TOKEN.search(pattern) else f"{pattern} is not a directory or file"
            raise NothingFound(f"{fault}: {_nearest(directory, part)}")
        current = following
    return list({match.path: match for match in current}.values())


def _matches_inside(match: Match, part: str, pattern: str) -> Iterator[Match]:
    if part == "**":
        yield match
        for name in _entries(match.path):
            if (path := match.path / name).is_dir() and not path.is_symlink():
                yield from _matches_inside(Match(path, match.values), part, pattern)
    elif TOKEN.search(part) is None:
        if (path := match.path / part).exists():
            yield Match(path, match.values)
    else:
        expression = _expression(part, match.values, pattern)
        for name in _entries(match.path, hidden=part.startswith(".")):
            if found := expression.fullmatch(name):
                yield Match(match.path / name, {**match.values, **found.groupdict()})


def _expression(part: str, values: Mapping[str, str], pattern: str) -> re.Pattern[str]:
    """Return the regular expression of one element of a pattern. A placeholder that has a value matches it alone."""
    text, end = "", 0
    for token in TOKEN.finditer(part):
        text += re.escape(part[end : token.start()])
        name, end = token[1], token.end()
        if name is None:
            text += ".*"
        elif name not in PLACEHOLDERS:
            names = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise UsageError(f"{pattern}: {{{name}}} is not a placeholder; there are {names}")
        elif name in values:
            text += re.escape(values[name])
        else:
            text += f"(?P={name})" if f"(?P<{name}>" in text else f"(?P<{name}>{PLACEHOLDERS[name]})"
    return re.compile(text + re.escape(part[end:]))


def _entries(directory: Path, hidden: bool = False) -> list[str]:
    if not directory.is_dir():  # a file, or a symbolic link to nothing
        return []
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise NotReadable(directory, error) from error
    return [name for name in names if hidden or not name.startswith(".")]


def _nearest(directory: Path, part: str) -> str:
    if not directory.is_dir():
        return f"{directory} is a file"
    names = _entries(directory)
    close = get_close_matches(part, names, n=1)
    hint = f", did you mean {close[0]}?" if close else f"; it contains {listed(names, 5) or 'nothing'}"
    return f"{directory} has no {part}{hint}"


def _runs_of_files(entry: Results, matched: Sequence[Match], known: Format | None) -> list[RunFiles]:
    """Return a run for each combination of condition, seed and run in the paths; without these, one for each file."""
    groups: dict[tuple[str, ...], list[Match]] = {}
    for match in matched:
        names = tuple(match.values.get(name, "") for name in ("condition", "seed", "run"))
        groups.setdefault(names if any(names) else (str(match.path),), []).append(match)
    runs = []
    for group in groups.values():
        first = group[0]
        files = [ResultFile(path, _integer(values, "step"), values.get("set")) for path, values in group]
        path = first.path.absolute()
        fallback = next((name for named in (path.with_suffix(""), path.parent) if (name := _name_with_seed(named))), "")
        run = _with_names(RunFiles(entry, str(first.path), files, fallback=fallback, format=known), first)
        runs.append(run if run.is_named or fallback else replace(run, origin=entry.path))  # its rows name the runs
    return runs


def _runs_of_directory(entry: Results, match: Match, known: Format | None, is_run: bool) -> list[RunFiles]:
    """Return the run whose directory this is, or one for each of its files if they are named by seeds, else a run for
    each of its subdirectories. With ``is_run``, or if its
    name has a seed, a directory without results is a run too, which has no files."""
    if run := _run_of_directory(entry, match, known, nested=False):
        paths = [file.path for file in run.files]
        if run.seed is None and len(paths) > 1 and all(_name_with_seed(path.with_suffix("")) for path in paths):
            return _runs_of_files(entry, [Match(path, match.values) for path in paths], run.format)
        return [run]
    inside = [Match(match.path / name, match.values) for name in _entries(match.path)]
    runs = [
        _run_of_directory(entry, inner, known) or _directory(entry, inner) for inner in inside if inner.path.is_dir()
    ]
    with_files = [run for run in runs if run.files]
    has_seeds = any(run.seed is not None for run in with_files)
    if len(with_files) > 1 or has_seeds:
        # Beside directories that are named by seeds, one that is not, and has no results, is no run
        return [run for run in runs if run.files or run.seed is not None or not has_seeds]
    if run := _run_of_directory(entry, match, known):
        return [run]
    run = _directory(entry, match)
    return [run] if is_run or run.seed is not None else []


def _run_of_directory(entry: Results, match: Match, known: Format | None, nested: bool = True) -> RunFiles | None:
    """Return the run in a directory, in the first format that recognises files there; None if there are none.

    ``nested = False`` leaves out files at any depth (``**``), which may belong to several runs.
    """
    if known is not None and not known.patterns:  # a reader of one's own
        return replace(_directory(entry, match), files=[ResultFile(match.path)], format=known)
    for each in [known] if known else map(format_of, FORMATS):
        patterns = [pattern for pattern in each.patterns if nested or "**" not in pattern]
        paths = sorted({path for pattern in patterns for path in match.path.glob(pattern) if path.is_file()})
        if refused := next((path for path in paths if not os.access(path, os.R_OK)), None):
            raise NotReadable(refused, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        if files := [ResultFile(path) for path in paths if known or each.recognises(path)]:
            return replace(_directory(entry, match), files=files, format=each)
    return None


def _directory(entry: Results, match: Match) -> RunFiles:
    """Return the run in a directory, without its files. A seed in the directory's name counts as one in the path."""
    path = match.path.absolute()
    name = _name_with_seed(path)
    run = _with_names(RunFiles(entry, str(match.path), [], fallback=name or path.name), match)
    if path.name == run.condition:
        return run
    if not name:
        return run if run.condition is None or run.run else replace(run, run=path.name)
    label, seed = condition_and_seed(name)
    if run.seed is None and entry.seed is None:
        run = replace(run, seed=seed)
    if run.condition is None and entry.condition is None:
        run = replace(run, condition=label)
    return run


def _name_with_seed(path: Path) -> str:
    """Return the name of a file or directory with a seed, with that of its parent if it is a seed alone; else ""."""
    label, seed = condition_and_seed(path.name)
    return "" if seed is None else f"{path.parent.name}/{path.name}" if label == path.name else path.name


def _with_names(run: RunFiles, match: Match) -> RunFiles:
    values = match.values
    return replace(run, condition=values.get("condition"), seed=_integer(values, "seed"), run=values.get("run"))


def _integer(values: Mapping[str, str], name: str) -> int | None:
    return int(values[name]) if name in values else None
