"""What the environments of other people's libraries ask of their arguments, and the errors when it is not so."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from retrain.errors import UsageError
from retrain.extras import is_installed, missing


def imported(module: str, feature: str) -> ModuleType:
    """An optional package's module. Raises MissingExtra, which begins with ``feature``, when it is not installed."""
    top = module.partition(".")[0]
    if not is_installed(top):
        raise missing(feature, top)
    return importlib.import_module(module)


def meant(name: object, candidates: Iterable[str]) -> str:
    """``; did you mean …`` for the nearest candidate, "" when none is near."""
    close = difflib.get_close_matches(str(name), list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}" if close else ""


def named_arguments(made: type) -> list[str]:
    """The arguments that a class takes by name, besides ``id``, which stands beside [environment] args."""
    parameters = inspect.signature(made).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "id"]


def refuse_unknown(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise UsageError, which begins with ``owner``, for the first given argument that is none of the known."""
    options = list(known)
    for name in given:
        if name not in options:
            hint = meant(name, options) or f"; there are {', '.join(options) or 'none'}"
            raise UsageError(f"{owner} has no argument {name!r}{hint}")


def count(value: Any, name: str, owner: str, least: int = 0) -> int:
    """A whole number of at least ``least``. Raises UsageError, which begins with ``owner``, for anything else."""
    if type(value) is not int or value < least:
        raise UsageError(f"{owner}: {name} is {value!r}, not a whole number of at least {least}")
    return value


def text_or_none(value: Any, name: str, owner: str) -> str | None:
    """A text, or None. Raises UsageError, which begins with ``owner``, for anything else, "" too."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise UsageError(f"{owner}: {name} is {value!r}, not a text")


def table(value: Any, name: str, owner: str) -> dict[str, Any]:
    """A table with text keys. Raises UsageError, which begins with ``owner``, for anything else."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{owner}: {name} is {value!r}, not a table")
    return dict(value)


def ends(value: Any, name: str, owner: str) -> tuple[float, float] | None:
    """A range, its lower end first, or None. Raises UsageError, which begins with ``owner``, for anything else."""
    if value is None:
        return None
    known = list(value) if isinstance(value, list | tuple) else []
    if len(known) != 2 or not all(type(end) in (int, float) and math.isfinite(end) for end in known):
        raise UsageError(f"{owner}: {name} is {value!r}, not a list of two numbers")
    if known[0] >= known[1]:
        raise UsageError(f"{owner}: {name} is {value!r}, whose first number is not below its second")
    return float(known[0]), float(known[1])
