"""A small adapter as PEFT writes it."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file


def adapter(path, seed=0, rank=4, dtype=torch.float32, zero=False, **settings):
    """Two modules' factors as PEFT names them; returns them."""
    path.mkdir(parents=True)
    torch.manual_seed(seed)
    factors = {}
    for name, wide, high in (("layers.0.q_proj", 20, 30), ("layers.1.v_proj", 12, 8)):
        a, b = torch.randn(rank, wide).to(dtype), (torch.randn(high, rank) * (not zero)).to(dtype)
        factors[name] = (a, b)
    tensors = {f"base_model.model.{name}.lora_{side}.weight": pair[i].contiguous()
               for name, pair in factors.items() for i, side in enumerate("AB")}  # fmt: skip
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 2 * rank} | settings))
    return factors
