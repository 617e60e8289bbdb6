"""Recognise environments written for other trainers by their methods.

- ``problems`` and ``start``: an environment of retrain's protocol, used unchanged.
- ``load_dataset`` and ``compute_reward``, as in Telescope: ``load_dataset`` returns samples (``prompt``, ``answer``,
  ``metadata``), ``compute_reward`` grades answers to them. With ``env_response``, episodes have several turns. See
  ``styles_graded``.
- environments of the Tinker cookbook: a builder that returns data sets when called, a data set with ``get_batch``, or
  an environment with ``initial_observation`` and ``step``. See ``styles_cookbook``.

Methods may be async or not.
"""

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from retrain.environments.arguments import refuse_unknown, validated
from retrain.environments.providers.styles_cookbook import HELD_OUT, Builders, Cookbook, dataset_builders
from retrain.environments.providers.styles_graded import GradedEnvironment, Run
from retrain.errors import PluginError, UsageError

PAIRS = "problems and start; load_dataset and compute_reward; get_batch and __len__; initial_observation and step"


class Split(BaseModel):
    """Arguments of an adapter: ``size``, the number of problems if they are seeds; ``heldout``, the number to hold
    out."""

    model_config = ConfigDict(strict=True)

    size: PositiveInt = 1000
    heldout: NonNegativeInt = 200


def adapt(written: Callable[..., object], args: Mapping[str, object], run: Run) -> Any:
    """Return the environment that ``written`` (a class, a factory function or a data set builder) makes with ``args``.

    An environment in another trainer's style is wrapped. ``args`` may then have ``heldout``, the number of problems to
    hold out if the environment has no held-out set, and ``size``, the number of problems if problems are seeds. They
    are passed to ``written`` instead if it has parameters of these names. ``run`` awaits async results. Raises
    UsageError for invalid arguments, PluginError if the result is no environment.
    """
    owner = f"environment {getattr(written, '__qualname__', None) or type(written).__qualname__}"
    arguments, split = dict(args), {}
    if not _has(written, "start"):
        known = inspect.signature(written).parameters
        split = {name: arguments.pop(name) for name in Split.model_fields if name in arguments and name not in known}
    numbers = validated(Split, split, owner)
    if inspect.isclass(written) and _has(written, "initial_observation", "step"):
        return _seeded(written, arguments, numbers, owner, run)
    _check(written, arguments)
    made = run(written(**arguments))
    if _is_builder(made):
        made = run(made())
    if _has(made, "start"):
        refuse_unknown(split, (), owner)
        return made
    train, test = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
    own_heldout = f"{owner}, which has held-out problems of its own,"
    refuse_unknown(split, ("heldout",) if test is None else (), owner if test is None else own_heldout)
    heldout = numbers.heldout if "heldout" in split else None
    if _has(train, "load_dataset", "compute_reward"):
        return GradedEnvironment(train, owner, run, heldout)
    if _has(train, "make_envs"):
        raise PluginError(f"{owner} is one problem (make_envs): give a data set of them, with get_batch and __len__")
    if not all(_is_dataset(each) for each in (train, test) if each is not None):
        raise PluginError(f"{owner} is no environment: it has none of {PAIRS}")
    return Cookbook(train, dataset_builders(train, test, heldout, owner), owner, run)


def _seeded(
    written: Callable[..., object], arguments: Mapping[str, object], split: Split, owner: str, run: Run
) -> Cookbook:
    """Return an environment whose problems are seeds: ``written(**arguments, seed=…)`` makes an episode of one problem.
    The first ``split.heldout`` seeds are held out, the next ``split.size`` are for training. Raises PluginError if
    ``written`` takes no seed, UsageError for invalid arguments."""
    if "seed" not in inspect.signature(written).parameters:
        raise PluginError(
            f"{owner} is one episode (initial_observation and step) and takes no seed, so that there is but one "
            "problem: give a data set with get_batch and __len__, or let __init__ take a seed"
        )
    _check(written, {**arguments, "seed": 0})
    heldout, total = split.heldout, split.heldout + split.size
    seeds = {HELD_OUT: range(heldout), "train": range(heldout, total)}

    def builder(_: str, seed: int) -> SimpleNamespace:
        return SimpleNamespace(make_envs=lambda: [written(**arguments, seed=seed)])

    return Cookbook(written, Builders(seeds.__getitem__, builder), owner, run)


def _check(written: Callable[..., object], arguments: Mapping[str, object]) -> None:
    try:
        signature = inspect.signature(written)
    except ValueError:  # a class without a signature, such as a subclass of dict without __init__
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(f"[environment] args: {error}") from None


def _has(made: object, *methods: str) -> bool:
    return all(callable(getattr(made, name, None)) for name in methods)


def _is_dataset(made: object) -> bool:
    return _has(made, "get_batch") and hasattr(type(made), "__len__")


def _is_builder(made: object) -> bool:
    known = _has(made, "start") or _has(made, "load_dataset") or _is_dataset(made)
    return callable(made) and not known and not inspect.isclass(made) and not inspect.isroutine(made)
