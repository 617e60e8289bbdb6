"""A base is prepared once, undone by one call, and gone from memory when nobody wants it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from lane_cases import requests, rollout, totals, trained
from toymodels import toy_base

from retrain.engines.local import LocalEngine
from retrain.policy.lora import LaneLinear, Lanes
from retrain.policy.update import LossSettings, new_optimizer, train_step


def _used(base) -> None:
    """Sample and train with the base: everything that is ever put on a model is on it afterwards."""
    lanes = Lanes(base)
    adapter = trained(lanes, 0)
    LocalEngine(base, lanes).sample(requests(), [adapter])
    sequences = rollout(base, lanes, adapter)
    optimizer = new_optimizer(adapter, 0.01, (0.9, 0.999), 1e-8, 0.0)
    train_step(base, lanes, adapter, optimizer, sequences, LossSettings(), totals(sequences), 0.01)


def _logits(base) -> torch.Tensor:
    with torch.no_grad():
        return base.model(input_ids=torch.arange(12).view(2, 6), use_cache=False).logits


@pytest.fixture
def own_base(tmp_path):
    return toy_base(tmp_path)


def test_one_call_takes_everything_off_the_model_again(own_base):
    before, attention = _logits(own_base), own_base.model.config._attn_implementation
    kinds = [type(module) for module in own_base.model.modules()]
    _used(own_base)
    assert any(isinstance(module, LaneLinear) for module in own_base.model.modules())
    assert own_base.model.config._attn_implementation != attention
    assert any("forward" in module.__dict__ for module in own_base.model.modules())
    own_base.release()
    assert [type(module) for module in own_base.model.modules()] == kinds
    assert own_base.model.config._attn_implementation == attention
    assert not any("forward" in module.__dict__ for module in own_base.model.modules())
    for weight in own_base.model.parameters():
        assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    assert torch.equal(_logits(own_base), before)
    own_base.release()  # nothing is left to take off


def test_a_released_base_can_be_prepared_anew(own_base):
    _used(own_base)
    own_base.release()
    _used(own_base)


def test_a_base_that_nobody_wants_is_freed(own_base):
    _used(own_base)
    weights = [weakref.ref(weight) for weight in own_base.model.parameters()]
    own_base.release()
    own_base.model = None
    gc.collect()
    assert not any(weight() is not None for weight in weights)
