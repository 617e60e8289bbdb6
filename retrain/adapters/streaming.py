"""Write PEFT adapters one module at a time, so that an adapter larger than memory can be squeezed.

All shapes are known, so the header of the safetensors file is written first, and tensors follow in any order.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from retrain.errors import ModelError
from retrain.files import write_json
from retrain.policy.adapter_io import Factors, Pair, absolute_base
from retrain.records.schema.base import Values
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from retrain.util.tensor_file import data_of, dtype_name, header


def write_streamed(
    directory: Path, layout: Mapping[str, Factors], pairs: Iterable[tuple[str, Pair]], config: Values
) -> None:
    """Write a PEFT directory from an iterable of modules; ``layout`` declares all of them. Raises ModelError if a
    module is missing or has another shape than declared."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = {
        key: (dtype_name(where.dtype), shape)
        for where in layout.values()
        for key, shape in ((where.a_key, where.a_shape), (where.b_key, where.b_shape))
    }
    head, begins = header(entries, {"format": "pt"})
    missing = dict(layout)
    with open(directory / ADAPTER_WEIGHTS, "wb") as file:
        file.write(head)
        start = file.tell()
        for name, pair in pairs:
            where = missing.pop(name)
            for key, shape, tensor in zip(
                (where.a_key, where.b_key), (where.a_shape, where.b_shape), pair, strict=True
            ):
                if tuple(tensor.shape) != tuple(shape) or tensor.dtype != where.dtype:
                    raise ModelError(f"{key} is {tuple(tensor.shape)} {tensor.dtype}, announced as {shape}")
                file.seek(start + begins[key])
                file.write(data_of(tensor))
        if missing:
            raise ModelError(f"{next(iter(missing))} was declared in the header and not written")
    write_json(directory / ADAPTER_CONFIG, absolute_base(config))
