import numpy as np
import pytest
import torch
from safetensors import numpy as their_numpy
from safetensors import torch as their_torch

from retrain.util.tensor_file import to_bytes

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor(3.5), "wide": torch.ones(3, dtype=torch.float64),
    "half": torch.full((3,), 0.3, dtype=torch.bfloat16), "ids": torch.arange(5), "none": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]), 'ü"': torch.tensor([1, 2], dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_a_file_is_as_safetensors_writes_it(metadata):
    """Metadata of more than one entry, which safetensors orders at random, aside."""
    assert to_bytes(TENSORS, metadata) == their_torch.save({k: v.contiguous() for k, v in TENSORS.items()}, metadata)
    arrays = {"x": np.arange(3, dtype=np.uint8), "y": np.eye(3, dtype=np.float32), "z": np.int64([7])}
    assert to_bytes(arrays, metadata) == their_numpy.save(arrays, metadata)
    assert their_torch.load(to_bytes({}, metadata)) == {}
