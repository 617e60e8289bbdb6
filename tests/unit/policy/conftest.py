"""Tiny models with random weights of the families that are tested."""

import math
from collections.abc import Callable

import pytest
import torch

from retrain.policy.base import BaseModel

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "tied llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": {"sliding_window": None},
    "windowed mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "sliding_window": 64},
    "gemma3_text": {
        "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "phi": {},
    "phi3": {"head_dim": 8},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_head": 4, "n_layer": 3},
    "mamba": {"state_size": 4, "intermediate_size": 64},
}  # fmt: skip


class Words:
    """The part of a tokenizer that sampling needs."""

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def build(family: str, dtype: torch.dtype, size: float = 1.0) -> BaseModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[-1], **(SIZES | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval().requires_grad_(False)
    for name, weight in model.named_parameters() if size else ():
        noise = torch.randn(weight.shape)
        if weight.dim() == 1:
            weight.copy_(0.3 * noise + ("norm" in name and family != "gemma2"))
        elif "embed" in name:
            weight.copy_(0.01 * noise)
        else:
            weight.copy_(size * noise / math.sqrt(weight.shape[-1]))
    return BaseModel(family, model.to(dtype), Words(), torch.device("cpu"), dtype, (1,), 0, "")


@pytest.fixture(scope="session")
def tiny() -> Callable[..., BaseModel]:
    """Build a model of a family. Size 0 keeps transformers' initialisation, under which layers change little."""
    return build
