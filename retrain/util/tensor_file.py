"""Makes safetensors files whose bytes depend only on their content. The library's own writer orders metadata
randomly."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

DTYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "int16": ("I16", 2), "uint16": ("U16", 2),
    "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int32": ("I32", 4), "uint32": ("U32", 4), "float32": ("F32", 4),
    "float64": ("F64", 8), "int64": ("I64", 8), "uint64": ("U64", 8),
}  # fmt: skip
"""Safetensors' code and the bytes per element of each type, by the type's name in numpy and torch. The order is the one
in which safetensors sorts types."""
_RANK = {name: rank for rank, name in enumerate(DTYPES)}

Layout = Mapping[str, tuple[str, Sequence[int]]]  # Name of the type in `DTYPES` and shape of every tensor


def dtype_name(tensor: object) -> str:
    """Return the key in ``DTYPES`` for a numpy array, a torch tensor, or a dtype of either library."""
    return str(getattr(tensor, "dtype", tensor)).removeprefix("torch.")


def header(layout: Layout, metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Return the file's header bytes, and the offset of each tensor in the data after them, in file order. Wide types
    come first, so that all tensors are aligned."""
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata is not None else {}
    begins, end = {}, 0
    for name in sorted(layout, key=lambda name: (-_RANK[layout[name][0]], name)):
        dtype, shape = layout[name]
        code, width = DTYPES[dtype]
        begins[name], end = end, end + width * prod(shape)
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins


def data_of(tensor: Any) -> memoryview:
    """Return the bytes of a numpy array or torch tensor, row by row."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def to_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return numpy arrays or torch tensors as the bytes of a safetensors file.

    Callers write the bytes themselves, because safetensors raises no OSError on a full disk.
    """
    head, begins = header({name: (dtype_name(each), each.shape) for name, each in tensors.items()}, metadata)
    return b"".join([head, *(data_of(tensors[name]) for name in begins)])
