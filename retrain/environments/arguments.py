"""Validate the arguments of environments and tools. Error messages have one line."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from retrain.errors import UsageError
from retrain.extras import is_installed, missing

Model = TypeVar("Model", bound=BaseModel)


def imported(module: str, feature: str) -> ModuleType:
    """Import a module of an optional package. Raises MissingExtra, whose message begins with ``feature``, if the
    package is not installed."""
    top = module.partition(".")[0]
    if not is_installed(top):
        raise missing(feature, top)
    return importlib.import_module(module)


def did_you_mean(name: object, candidates: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the most similar candidate; "" if none is similar."""
    close = difflib.get_close_matches(str(name)[:100], list(candidates), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def refuse_unknown(arguments: Iterable[str], names: Iterable[str], owner: str) -> None:
    """Raise a UsageError, whose message begins with ``owner``, for the first argument that is not among ``names``."""
    options = list(names)
    for name in arguments:
        if name not in options:
            hint = did_you_mean(name, options) or f"; there are {', '.join(options) or 'none'}"
            raise UsageError(f"{owner} has no argument {name!r}{hint}")


def validated(model: type[Model], arguments: Mapping[str, object], owner: str) -> Model:
    """Return ``arguments`` as an instance of a pydantic model. Raises a UsageError, whose message begins with
    ``owner``, for the first invalid argument."""
    refuse_unknown(arguments, model.model_fields, owner)
    try:
        return model.model_validate(arguments)
    except ValidationError as error:
        (first, *_) = error.errors()
        name = ".".join(map(str, first["loc"]))
        where = f"{name} is {first['input']!r}: " if name else ""
        reason = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{owner}: {where}{reason}") from None
