"""A truncated adapter through peft itself: both load, and the compressed one computes the truncated ΔW."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from retrain.maths.squeeze import analyse, truncate

NAMES = ("first", "second")


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def alpha_of(scale: float, rank: int, rslora: bool) -> float:
    """The alpha that gives ``scale`` at ``rank``: the scale is alpha/rank, or alpha/√rank with rank-stabilised LoRA."""
    return scale * (math.sqrt(rank) if rslora else rank)


def peft_model(rank: int, scale: float, rslora: bool, pattern: dict[str, int] | None = None) -> PeftModel:
    alphas = {name: alpha_of(scale, r, rslora) for name, r in (pattern or {}).items()}
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha_of(scale, rank, rslora),  # type: ignore[arg-type]
        target_modules=list(NAMES),
        use_rslora=rslora,
        rank_pattern=pattern or {},
        alpha_pattern=alphas,
    )
    return get_peft_model(Toy(), config)


def layer(model: PeftModel, name: str):
    return getattr(model.base_model.model, name)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("pattern", [None, {"second": 2}])
def test_compressed_adapter_loads_and_computes_the_truncated_update(tmp_path, rslora, pattern):
    source_rank, target, scale = 6, 3, 1.7
    source = peft_model(source_rank, scale, rslora)
    compressed = peft_model(target, scale, rslora, pattern)
    x = torch.randn(4, 12)
    kept = {}
    for name in NAMES:
        old, new = layer(source, name), layer(compressed, name)
        nn.init.normal_(old.lora_B["default"].weight)
        assert old.scaling["default"] == pytest.approx(scale)
        a, b = old.lora_A["default"].weight, old.lora_B["default"].weight
        rank = (pattern or {}).get(name, target)
        delta = old.get_delta_weight("default").detach()
        values = analyse(a, b, scale)
        full = torch.linalg.svdvals(delta.double())
        assert torch.allclose(values[: len(full)], full[: len(values)], rtol=1e-4, atol=1e-5)
        a_k, b_k = truncate(a, b, scale, rank)
        new.lora_A["default"].weight.data.copy_(a_k)
        new.lora_B["default"].weight.data.copy_(b_k)
        u, s, v = torch.linalg.svd(delta)
        kept[name] = u[:, :rank] * s[:rank] @ v[:rank]
    compressed.save_pretrained(tmp_path / "compressed")
    loaded = PeftModel.from_pretrained(Toy(), tmp_path / "compressed")
    reference = Toy()
    for name in NAMES:
        getattr(reference, name).weight.data += kept[name]
        assert torch.allclose(layer(loaded, name).get_delta_weight("default"), kept[name], atol=1e-5)
    assert torch.allclose(loaded(x), reference(x), atol=1e-4)
