"""Environments written for other trainers, recognised by their methods.

- ``problems`` and ``start``: an environment of ours, taken as it is.
- ``load_dataset`` and ``compute_reward``: the samples of the first (``prompt``, ``answer``, ``metadata``) are graded by
  the second, as in Telescope; with ``env_response`` in several turns. See ``styles_graded``.
- the Tinker cookbook's: a builder that is called for its data sets, a data set with ``get_batch``, a group builder with
  ``make_envs``, or an environment with ``initial_observation`` and ``step``. See ``styles_cookbook``.

Methods may be async or not; they run on an event loop of the adapter's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from retrain.environments.providers.arguments import count, refuse_unknown
from retrain.environments.providers.styles_cookbook import Cookbook, DatasetProblems, SeededProblems
from retrain.environments.providers.styles_graded import Graded
from retrain.environments.providers.styles_loop import Loop
from retrain.errors import PluginError, RetrainError, UsageError
from retrain.plugins import described

HELDOUT = 200
SIZE = 1000
PAIRS = (
    "problems and start; load_dataset and compute_reward; get_batch and __len__; make_envs; "
    "initial_observation and step"
)


def adapt(written: Any, args: Mapping[str, Any], tokenizer: Any = None) -> Any:
    """The native environment that a class, a function that returns one, or an object stands for.

    ``args`` go to the class or function; ``heldout`` (problems to hold out, where it has no held-out ones of its own,
    by default a tenth and at most 200), and ``size`` of an environment that takes a ``seed``, are the adapter's where
    the class does not take them. ``tokenizer`` decodes observations that are tokens. Raises UsageError for arguments
    that it does not take, PluginError for what is no environment, with the methods that one has.
    """
    name = getattr(written, "__qualname__", None) or type(written).__qualname__
    owner = f"environment {name}"
    is_class, given = inspect.isclass(written), dict(args)
    if is_class and _has(written, "initial_observation", "step"):
        return _seeded(written, given, owner, tokenizer)
    own = _own_arguments(written, given) if is_class or inspect.isroutine(written) else {}
    made = _made(written, given, owner) if is_class or inspect.isroutine(written) else written
    if made is written and given:
        raise UsageError(f"{owner} is made already and takes no arguments: {', '.join(given)}")
    if _has(made, "problems", "start"):
        _refuse(own, owner)
        return made
    loop = Loop(owner)
    made = loop.run(made)
    if isinstance(made, tuple) and len(made) == 2 and _is_dataset(made[0]):  # what a builder returns
        return _datasets(made, own, loop, owner, tokenizer)
    if _has(made, "load_dataset", "compute_reward"):
        return Graded(made, loop, owner, _heldout(own, owner))
    if _is_dataset(made):
        return _datasets((made, None), own, loop, owner, tokenizer)
    if _has(made, "make_envs"):
        raise PluginError(f"{owner} is one problem (make_envs): give a data set of them, with get_batch and __len__")
    if callable(made) and not inspect.isclass(made) and not inspect.isroutine(made):
        return _datasets(_built(made, loop, owner), own, loop, owner, tokenizer)
    raise PluginError(f"{owner} is no environment: it has none of {PAIRS}")


def _seeded(written: Any, given: dict[str, Any], owner: str, tokenizer: Any) -> Cookbook:
    """A class whose objects are episodes."""
    known = inspect.signature(written).parameters
    if "seed" not in known:
        raise PluginError(
            f"{owner} is one episode (initial_observation and step) and takes no seed, so that there is but one "
            "problem: give a data set with get_batch and __len__, or let __init__ take a seed"
        )
    own = _own_arguments(written, given)
    _check(written, given | {"seed": 0}, owner)
    size = count(own.get("size", SIZE), "size", owner, 1)
    problems = SeededProblems(written, given, size, count(own.get("heldout", HELDOUT), "heldout", owner))
    return Cookbook(problems, Loop(owner), owner, tokenizer)


def _datasets(pair: tuple[Any, Any], own: dict[str, Any], loop: Loop, owner: str, tokenizer: Any) -> Cookbook:
    train, test = pair
    if test is not None and own:
        _refuse(own, f"{owner}, which has held-out problems of its own,")
    return Cookbook(DatasetProblems(train, test, _heldout(own, owner), owner), loop, owner, tokenizer)


def _built(made: Any, loop: Loop, owner: str) -> tuple[Any, Any]:
    """What a builder returns when it is called: data sets for training and testing, the latter perhaps None."""
    try:
        pair = loop.run(made())
    except RetrainError:
        raise
    except Exception as error:
        raise PluginError(f"{owner}: {described(error)}") from error
    two = isinstance(pair, tuple | list) and len(pair) == 2
    if two and _is_dataset(pair[0]) and (pair[1] is None or _is_dataset(pair[1])):
        return pair[0], pair[1]
    raise PluginError(f"{owner} returned {type(pair).__name__}, not two data sets with get_batch and __len__")


def _heldout(own: dict[str, Any], owner: str) -> int | None:
    """The adapter's own argument; None where it is not set."""
    _refuse({name: value for name, value in own.items() if name != "heldout"}, owner)
    return count(own["heldout"], "heldout", owner, 1) if "heldout" in own else None


def _refuse(own: Mapping[str, Any], owner: str) -> None:
    refuse_unknown(own, (), owner)


def _own_arguments(written: Any, given: dict[str, Any]) -> dict[str, Any]:
    """``heldout`` and ``size``, taken out of ``given`` where the class or function does not name them."""
    known = inspect.signature(written).parameters
    return {name: given.pop(name) for name in ("heldout", "size") if name in given and name not in known}


def _made(written: Any, given: Mapping[str, Any], owner: str) -> Any:
    _check(written, given, owner)
    try:
        return written(**given)
    except RetrainError:
        raise
    except Exception as error:
        raise PluginError(f"{owner}: {described(error)}") from error


def _check(written: Any, given: Mapping[str, Any], owner: str) -> None:
    """Raise UsageError for an argument that there is not, or one that is missing."""
    parameters = inspect.signature(written).parameters
    kinds = inspect.Parameter
    if not any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values()):
        refuse_unknown(given, parameters, owner)
    for name, parameter in parameters.items():
        variadic = parameter.kind in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        if parameter.default is kinds.empty and not variadic and name not in given:
            raise UsageError(f"{owner} needs the argument {name!r} in [environment] args")


def _has(made: Any, *methods: str) -> bool:
    return all(callable(getattr(made, name, None)) for name in methods)


def _is_dataset(made: Any) -> bool:
    return _has(made, "get_batch") and hasattr(type(made), "__len__")
