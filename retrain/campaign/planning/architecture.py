"""Sizes of a model, from its ``config.json`` alone: no torch, no weights, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.files import read_json
from retrain.models.directory import find_file
from retrain.models.layers import DENSE_FAMILIES, kept_bytes, targeted


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer, as far as its costs depend on them."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool
    mlp_matrices: int = 3
    experts: int = 1
    active_experts: int = 1
    head_norms: bool = False
    dense: bool = True  # Whether it decodes as plain matrix products, which on a CPU may read copies of the weights

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture | None:
        """Read a ``transformers`` config.json; None when it is no decoder whose sizes we can read."""
        config = config.get("text_config", config)

        def first(*names: str) -> Any:
            return next((config[name] for name in names if config.get(name) is not None), None)

        layers, heads = first("num_hidden_layers", "n_layer"), first("num_attention_heads", "n_head")
        hidden, vocab = first("hidden_size", "n_embd"), first("vocab_size")
        if not (layers and hidden and vocab and heads):
            return None
        experts = first("num_experts", "num_local_experts", "n_routed_experts") or 1
        old_style = "n_embd" in config
        return cls(
            layers=layers,
            hidden=hidden,
            vocab=vocab,
            heads=heads,
            kv_heads=first("num_key_value_heads") or heads,
            head_dim=first("head_dim") or hidden // heads,
            intermediate=(first("moe_intermediate_size") if experts > 1 else None)
            or first("intermediate_size", "n_inner")
            or 4 * hidden,
            tied=bool(config.get("tie_word_embeddings", old_style)),
            mlp_matrices=2 if old_style else 3,
            experts=experts,
            active_experts=first("num_experts_per_tok") or 1,
            head_norms=str(config.get("model_type", "")).startswith("qwen3"),
            dense=config.get("model_type") in DENSE_FAMILIES,
        )

    @property
    def attention_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the attention's linear layers, by their usual names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
        }

    @property
    def mlp_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of one expert's linear layers, by their usual names."""
        up = {"gate_proj": (self.hidden, self.intermediate)} if self.mlp_matrices == 3 else {}
        return {**up, "up_proj": (self.hidden, self.intermediate), "down_proj": (self.intermediate, self.hidden)}

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers of a block."""
        return self.attention_shapes | self.mlp_shapes

    def parameters(self) -> int:
        router = self.hidden * self.experts if self.experts > 1 else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.linear_parameters(self.experts) + self.layers * (router + norms) + embeddings + self.hidden

    def linear_parameters(self, experts: int) -> int:
        """Numbers in the linear layers of all blocks, with so many experts."""
        attention = sum(a * b for a, b in self.attention_shapes.values())
        mlp = experts * sum(a * b for a, b in self.mlp_shapes.values())
        return self.layers * (attention + mlp)

    def adapter_parameters(self, rank: int, target_modules: str | Sequence[str]) -> int:
        """LoRA parameters at ``rank``: rank·(inputs + outputs) of every adapted linear layer."""
        attention = {f"self_attn.{name}": sum(sizes) for name, sizes in self.attention_shapes.items()}
        mlp = {f"mlp.{name}": self.experts * sum(sizes) for name, sizes in self.mlp_shapes.items()}
        return rank * sum(
            features
            for layer in range(self.layers)
            for name, features in (attention | mlp).items()
            if targeted(f"model.layers.{layer}.{name}", target_modules)
        )

    def cache_bytes(self, bytes_per_number: int) -> int:
        """Bytes of keys and values that one token occupies."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def kept_bytes(self, bytes_per_number: int) -> int:
        """Bytes that one token's forward pass keeps for its backward pass."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = self.active_experts * self.intermediate
        return self.layers * kept_bytes(self.hidden, queries, keys, wide, self.head_norms, bytes_per_number)


QWEN3 = {
    "0.6B": (28, 1024, 16, 3072, True),
    "1.7B": (28, 2048, 16, 6144, True),
    "4B": (36, 2560, 32, 9728, True),
    "8B": (36, 4096, 32, 12288, False),
    "14B": (40, 5120, 40, 17408, False),
    "32B": (64, 5120, 64, 25600, False),
}
"""Layers, hidden, heads, intermediate, tied of the published dense models, so that the shipped GPU campaigns can be
explained on a machine that has never met a hub."""


def architecture_of(model: str, revision: str | None = None) -> Architecture | None:
    """Sizes of ``model``, or None when its config.json is not on this machine or is of an unknown form."""
    path = find_file(model, "config.json", revision)
    if path is not None:
        return Architecture.from_config(read_json(path))
    sizes = QWEN3.get(model.removeprefix("Qwen/Qwen3-").removesuffix("-Base")) if model.startswith("Qwen/") else None
    if sizes is None:
        return None
    layers, hidden, heads, intermediate, tied = sizes
    return Architecture(layers, hidden, 151_936, heads, 8, 128, intermediate, tied, head_norms=True)
