"""What the annotations of ``retrain.maths`` say is held to in every test, and they speak one language."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from jaxtyping import AbstractArray, TypeCheckError

import retrain.maths
from retrain.maths import arrays, shapes
from retrain.maths.credit import TokenCredit, gtpo_weights
from retrain.maths.losses import LossBounds, ppo
from retrain.maths.planning import overlapping_tokens
from retrain.maths.statistics import paired_comparison
from retrain.types import DIMENSIONS

MODULES = [
    importlib.import_module(f"retrain.maths.{found.name}") for found in pkgutil.iter_modules(retrain.maths.__path__)
]
ZEROS, ONES = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
BOUNDS = LossBounds()


@pytest.mark.parametrize(
    "call",
    [
        lambda: gtpo_weights(ZEROS, ONES[:1], 0.1),  # the rows of one are not those of the other
        lambda: gtpo_weights(ZEROS[0], ONES[0], 0.1),  # an axis is missing
        lambda: gtpo_weights(ZEROS, ZEROS, 0.1),  # a mask is bool
        lambda: gtpo_weights(ZEROS.long(), ONES, 0.1),
        lambda: ppo(ZEROS, ZEROS, ZEROS.T, ONES, BOUNDS),
        lambda: TokenCredit(ZEROS, ONES, ONES[:, :2]),
        lambda: paired_comparison(np.zeros(4), np.zeros(5)),
        lambda: overlapping_tokens([(0, 1)], 4, np.zeros((2, 3), dtype=np.int64)),
    ],
)
def test_a_wrong_shape_or_kind_is_caught(call):
    with pytest.raises(TypeCheckError):
        call()


def test_right_shapes_pass():
    assert ppo(ZEROS, ZEROS, ZEROS, ONES, BOUNDS)[0].shape == (2, 3)
    assert overlapping_tokens([(0, 1)], 4, np.zeros((2, 2), dtype=np.int64)).shape == (2,)


def test_a_result_of_another_shape_than_announced_is_caught(monkeypatch):
    monkeypatch.setattr("retrain.maths.losses._clipped_objective", lambda ratio, advantages, bounds: ratio[:, :2])
    with pytest.raises(TypeCheckError, match="return value"):
        ppo(ZEROS, ZEROS, ZEROS, ONES, BOUNDS)


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function of ``retrain.maths`` and every public method of its public classes, by its name."""
    for module in MODULES:
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(thing):
                yield f"{module.__name__}.{name}", thing
            elif inspect.isclass(thing):
                for own, method in vars(thing).items():
                    if inspect.isfunction(method) and not own.startswith("_"):
                        yield f"{module.__name__}.{name}.{own}", method


def parts(hint: Any) -> Iterator[Any]:
    """The types that a type is made of."""
    if get_origin(hint) is None and not isinstance(hint, list | tuple):
        yield hint
    for part in hint if isinstance(hint, list | tuple) else get_args(hint):
        yield from parts(part)


def is_shaped(part: Any) -> bool:
    return inspect.isclass(part) and issubclass(part, AbstractArray)


def test_every_tensor_of_a_public_function_has_its_shape():
    found = 0
    for name, function in public():
        hints = get_type_hints(function)
        for argument, hint in hints.items():
            bare = [part for part in parts(hint) if part in (torch.Tensor, np.ndarray)]
            assert not bare, f"{name}: {argument} is an array of any shape"
            found += any(map(is_shaped, parts(hint)))
        for argument in inspect.signature(function).parameters:
            assert argument in hints or argument == "self", f"{name}: {argument} has no annotation"
    assert found > 100


def test_fields_have_their_shapes():
    found = 0
    for module in MODULES:
        for name, thing in vars(module).items():
            if inspect.isclass(thing) and dataclasses.is_dataclass(thing) and thing.__module__ == module.__name__:
                for field, hint in get_type_hints(thing).items():
                    assert not {torch.Tensor, np.ndarray} & set(parts(hint)), f"{name}.{field} is of any shape"
                    found += any(map(is_shaped, parts(hint)))
    assert found >= 8


def test_names_and_shapes_share_the_letters_of_one_legend():
    """``mask_BT`` is [B, T]: the letters at the end of a name are its dimensions, all from ``DIMENSIONS``."""
    used = {
        letter
        for module in (shapes, arrays)
        for hint in vars(module).values()
        for part in parts(hint)
        if is_shaped(part)
        for letter in re.findall(r"[A-Za-z]\w*", part.dim_str)
    }
    assert used <= set(DIMENSIONS)
    words = "|".join(filter(str.islower, DIMENSIONS))  # those of several letters stand apart: A_r_in
    ending, compared = rf"_([A-Z1]+|(?:{words})(?:_(?:{words}))*)$", 0
    for name, function in public():
        for argument, hint in get_type_hints(function).items():
            suffix = re.search(ending, argument)
            shaped = [part.dim_str for part in parts(hint) if is_shaped(part)]
            if suffix and shaped:
                letters = " ".join(re.findall("[a-z]+|[A-Z1]", suffix.group(1)))
                assert all(dims.endswith(letters) for dims in shaped), f"{name}: {argument} is [{shaped[0]}]"
                compared += 1
    assert compared > 60
