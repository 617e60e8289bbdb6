"""Sampling and an update of two layers of an 8B model on an accelerator that is not there.

Torch's fake tensors (shapes, types and devices without numbers) on a device that only this process knows: a tensor that
was left on the CPU ends the operation that meets it. A script, because a process cannot forget such a device again.
"""

from __future__ import annotations

from unittest import mock

import torch
from eight_b import VOCABULARY, eight_b, update
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from retrain.engines import dense
from retrain.engines.dense import DenseDecoder, KVCache
from retrain.engines.step import Rows, Sampled, decode_steps
from retrain.policy.lora import Lanes


class Module(_DummyBackendModule):
    """What else torch wants of a device's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("fakegpu", Module())
GPU = torch.device("fakegpu:0")


def sampling() -> None:
    """Prefill, two decode steps of two lanes, compaction."""
    base = eight_b("fakegpu:0")
    lanes = Lanes(base)
    with mock.patch.object(dense, "_fused", lambda base, weights: torch.cat(list(weights))):  # fakes have no views
        decoder = DenseDecoder(base)
    blocks = decoder.blocks([lanes.new_adapter(8, 16.0).frozen() for _ in range(2)])
    rows, width, capacity = 4, 7, 128
    last = torch.full((rows,), width - 1, device=GPU)
    cache, places = KVCache(decoder, rows, capacity), torch.arange(rows, device=GPU)
    prompts = torch.zeros(rows, width, dtype=torch.long, device=GPU)
    logits = decoder.prefill(prompts, last, blocks, cache, places, places)
    assert (logits.shape, logits.device) == ((rows, VOCABULARY), GPU)
    numbers = [torch.zeros(rows, dtype=torch.long, device=GPU) for _ in range(5)]
    batch = Rows(numbers[0], last + 1, numbers[1], numbers[2].bool(), numbers[3], numbers[4], None, None, None)
    sampled = Sampled(
        ends=torch.ones(1, dtype=torch.long, device=GPU),
        uniforms_NT=torch.zeros(rows + 1, 9, dtype=torch.float64, device=GPU),
        tokens_NT=torch.zeros(rows + 1, 9, dtype=torch.long, device=GPU),
        logprobs_NT=torch.zeros(rows + 1, 9, device=GPU),
        entropy_NT=torch.zeros(rows + 1, 9, device=GPU),
        kept=None,
    )
    frame = decoder.turned(capacity)
    for in_any_order in (False, True):
        decode_steps(frame, blocks, batch, sampled, cache.keys, cache.values, 128, True, 1, in_any_order)
    cache.select(torch.zeros(2, dtype=torch.long, device=GPU))
    held = [*cache.keys, *cache.values, *batch[:6], *sampled[:5]]
    assert {tensor.device for tensor in held} == {GPU}


def training() -> None:
    """An update, layers kept and computed twice, without and with dropout."""
    for twice in (False, True):
        for dropout in (0.0, 0.1):
            base = eight_b("fakegpu:0")
            adapter, optimizer = update(base, Lanes(base), dropout, twice)
            assert adapter.flat.grad is not None
            assert adapter.flat.grad.device == GPU
            assert {m.device for m in optimizer.state[adapter.flat].values() if m.dim()} == {GPU}


if __name__ == "__main__":
    with FakeTensorMode():
        with torch.no_grad():
            sampling()
        training()
    with FakeTensorMode():
        try:
            torch.ones(2, device=GPU) + torch.ones(2)
        except RuntimeError:
            print("every tensor stayed on the device, and one that had not would have been seen")
