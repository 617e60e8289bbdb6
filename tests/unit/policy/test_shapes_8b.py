"""Two layers of an 8B model's shapes, without its memory: every tensor stays on the model's device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eight_b import eight_b, update
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrain.policy.lora import Lanes


class NoCpu(TorchDispatchMode):
    """Raises where an operation meets a tensor of the CPU besides those of another device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim() > 0}
        if len(devices) > 1 and func.overloadpacket is not torch.ops.aten._to_copy:
            raise AssertionError(f"{func} meets tensors of {sorted(devices)}")
        return out


@pytest.mark.parametrize("twice", [False, True], ids=["kept", "twice"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_update_on_meta_meets_no_tensor_of_the_cpu(twice, dropout):
    base = eight_b("meta")
    lanes = Lanes(base)
    with NoCpu():
        adapter, optimizer = update(base, lanes, dropout, twice)
    assert adapter.flat.grad.device.type == "meta"
    assert {m.device.type for m in optimizer.state[adapter.flat].values() if m.dim()} == {"meta"}


def test_the_watch_sees_a_tensor_of_the_cpu():
    """On meta torch itself would not mind a scalar's neighbour: the watch does."""
    with NoCpu(), pytest.raises((AssertionError, RuntimeError)):
        torch.where(torch.ones(2, device="meta").bool(), torch.ones(2), torch.ones(2, device="meta"))


def test_sampling_and_update_stay_on_a_device_that_is_not_there():
    script = Path(__file__).parents[2] / "fake_gpu.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "one that had not would have been seen" in done.stdout
