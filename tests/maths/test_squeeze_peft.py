"""A truncated adapter through peft itself: both load, and the compressed one computes the truncated ΔW."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from retrain.maths.squeeze import analyse, lora_alpha, lora_scale, truncate

NAMES = ("first", "second")


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def peft_model(rank: int, alpha: float, rslora: bool, pattern: dict[str, int] | None = None) -> PeftModel:
    alphas = {name: lora_alpha(alpha, r, rslora) for name, r in (pattern or {}).items()}
    config = LoraConfig(
        r=rank,
        lora_alpha=lora_alpha(alpha, rank, rslora),  # type: ignore[arg-type]
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
        alpha = lora_alpha(scale, source_rank, rslora)
        values = analyse(a, b, lora_scale(alpha, source_rank, rslora))
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
