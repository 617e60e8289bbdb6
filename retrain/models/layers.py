"""Names of the linear layers that get an adapter, and memory sizes computed from a model's ``config.json``. The
estimate of a run and the run itself both use them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.files import read_json
from retrain.models.directory import find_file

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the dense decoders whose blocks have the layers ``BLOCK_LAYERS``."""
BLOCK_LAYERS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)

SMALL_MODEL_BYTES = 32 << 20
"""Weights up to this size count as small on a CPU: a few MiB of cache per core hold most of them."""
COPY_SHARE = 0.25
"""Largest share of memory for the copies of weights that decoding makes: merged with an adapter, or packed."""
NF4_BLOCK = 64  # 4-bit weights that share a scale
TRAINED_BYTES, PUBLISHED_BYTES = 16, 4
"""Bytes per adapter weight: of training (fp32 weight, gradient, two AdamW moments); of a published version (fp32)."""
LOGITS_COPIES = 5
"""fp32 rows [V] in memory per sampled token: logits, probability mass, its cumulative sum and two temporaries."""

GATHERED = 3
"""Copies of a sharded layer in memory while it is gathered: communication buffer, gathered weights, and fused weights
for decoding. Embedding and output layer have two, because they are not fused."""

USABLE_SHARE = 0.85
"""Share of the memory free after loading the base that a plan may use; the rest allows for fragmentation."""
LEAST_ROWS = 8
"""Minimum number of sequences per lane whose cache must fit: with fewer, decoding is bound by reading the weights."""
GPU_SAMPLING_SHARE, GPU_TRAINING_SHARE = 0.8, 0.4
"""Shares of the GPU memory left free by base and lanes: for the KV cache and logits of a decode batch (the rest is for
prefill and fragmentation), and for the activations that a micro-batch saves for its backward pass."""
GPU_MICRO_BATCH_TOKENS = (512, 32768)
"""Minimum and maximum number of tokens of a micro-batch on a GPU; more would not raise its utilisation."""
GPU_MOST_ROWS, GPU_COLUMNS = 4096, 128
"""Rows of a GPU's decode batch beyond which decoding is compute-bound. Tokens of which the length of its KV cache is a
multiple."""


def targeted(layer: str, targets: str | Sequence[str]) -> bool:
    """Return whether the linear layer with the module path ``layer`` gets an adapter: always for ``"all-linear"``, else
    if its path is a target or ends with a dot and a target."""
    return targets == "all-linear" or any(layer == target or layer.endswith("." + target) for target in targets)


def dense_layers(config: Mapping[str, Any]) -> list[str] | None:
    """Return the module paths of a dense decoder's linear layers, without the output layer; None for a ``model_type``
    outside ``DENSE_FAMILIES``, whose layers are only known after loading."""
    if config.get("model_type") not in DENSE_FAMILIES:
        return None
    return [f"model.layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in BLOCK_LAYERS]


def target_mistakes(targets: str | Sequence[str], layers: Sequence[str], head: str) -> list[tuple[str, str]]:
    """Return (fault, corrected configuration line) of each target that matches none of ``layers``. ``head``: path of
    the output layer, which gets no adapter."""
    if targets == "all-linear":
        return []
    right = [target for target in targets if any(targeted(layer, [target]) for layer in layers)]
    fix = f"target_modules = {json.dumps(right or 'all-linear')}"
    leaves = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
    mistakes = []
    for target in targets:
        if target not in right:
            fault = f"which is no linear layer of the model; it has {leaves}"
            fault = "the output layer, which gets no adapter" if targeted(head, [target]) else fault
            mistakes.append((f"names {json.dumps(target)}, {fault}", fix))
    return mistakes


def gpu_token_budget(free_bytes: int, token_bytes: int) -> int:
    """Return the number of tokens per micro-batch on a GPU. ``free_bytes``: memory left by base and lanes;
    ``token_bytes``: activations that a token saves for the backward pass."""
    least, most = GPU_MICRO_BATCH_TOKENS
    return min(most, max(least, int(GPU_TRAINING_SHARE * free_bytes) // token_bytes))


def fitting_lanes(usable: int, copy: int, update: int, lanes: Iterable[tuple[int, int]]) -> int:
    """Return how many of ``lanes``, taken in order, fit into ``usable`` bytes. Each lane is a pair of byte
    counts: what is always in memory (adapter, critic, optimizers), and its minimal KV cache. All lanes share one
    ``copy`` of the weights. The caches and one ``update`` are never in memory at once, so the larger counts."""
    resident, caches, fitting = copy, 0, 0
    for lane_resident, cache in lanes:
        resident, caches = resident + lane_resident, caches + cache
        fitting += resident + max(caches, update) <= usable
    return fitting


def cpu_token_budget(weight_bytes: int) -> int:
    """Return the number of tokens per micro-batch on a CPU: the smallest power of two at full speed, to save memory.

    Measured with ``benchmarks/update.py --micro``. At hidden size 256 (one micro-batch per core), 768 to 2,048 tokens
    are equally fast, and 512 tokens are 16 % slower. At hidden size 512 (one micro-batch over all cores), 1,536 and
    2,048 tokens are equally fast, and 1,024 tokens are 10 % slower.
    """
    return 1024 if weight_bytes <= SMALL_MODEL_BYTES else 2048


def adapter_bytes(weights: int, itemsize: int, versions: int = 1) -> int:
    """Return the bytes of one lane's adapter with ``weights`` parameters: training state, published ``versions``, and a
    copy for decoding in the base's precision (``itemsize`` bytes)."""
    return weights * (TRAINED_BYTES + versions * PUBLISHED_BYTES + itemsize)


def held_weights(shard: int, ends: int, layer: int) -> int:
    """Return the peak bytes of a sharded base's weights on a device: its ``shard``, the gathered ``ends`` (embedding
    and output layer), and one gathered decoder ``layer`` at a time."""
    return shard + max(2 * ends, ends + GATHERED * layer)


def update_copy(weights: int, itemsize: int, update_dtype: str) -> int:
    """Return the bytes of the bfloat16 copy of ``weights`` parameters that ``update_dtype = "bfloat16"`` makes of an
    fp32 base (``policy.arithmetic``); 0 for other settings."""
    return 2 * weights if update_dtype == "bfloat16" and itemsize == 4 else 0


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer that determine its memory and compute."""

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
    dense: bool = True  # Decodes with plain matrix products, which on a CPU may read copied weights

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture | None:
        """Return the sizes in a ``transformers`` config.json; None if it lacks layers, heads, width or vocabulary."""
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
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of a block's linear layers by path; of one expert in a mixture of experts."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        gate = {"mlp.gate_proj": (self.hidden, self.intermediate)} if self.mlp_matrices == 3 else {}
        return {
            "self_attn.q_proj": (self.hidden, queries),
            "self_attn.k_proj": (self.hidden, keys),
            "self_attn.v_proj": (self.hidden, keys),
            "self_attn.o_proj": (queries, self.hidden),
            **gate,
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }

    def parameters(self) -> int:
        router = self.hidden * self.experts if self.experts > 1 else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.linear_parameters(self.experts) + self.layers * (router + norms) + embeddings + self.hidden

    def linear_parameters(self, experts: int) -> int:
        """Return the number of parameters in the linear layers of all blocks, with ``experts`` experts per block."""
        shapes = self.linear_shapes.items()
        return self.layers * sum(a * b * (experts if name.startswith("mlp.") else 1) for name, (a, b) in shapes)

    def adapter_parameters(self, rank: int, target_modules: str | Sequence[str]) -> int:
        return rank * sum(
            (inputs + outputs) * (self.experts if name.startswith("mlp.") else 1)
            for layer in range(self.layers)
            for name, (inputs, outputs) in self.linear_shapes.items()
            if targeted(f"model.layers.{layer}.{name}", target_modules)
        )

    def cache_bytes(self, itemsize: int) -> int:
        """Return the bytes of the KV cache per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def kept_bytes(self, itemsize: int) -> int:
        """Return the bytes per token that a forward pass saves for the backward pass of the update.

        Saved are the inputs of norms, linear layers and attention, the output of attention, and both halves of the MLP.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = self.active_experts * self.intermediate  # over all experts that process a token
        norms = 2 * self.hidden + self.head_norms * (queries + keys)
        linear = 2 * self.hidden + queries + wide
        attention = 2 * queries + 2 * keys
        return self.layers * (norms + linear + attention + 2 * wide) * itemsize


QWEN3 = {
    "0.6B": (28, 1024, 16, 3072, True),
    "1.7B": (28, 2048, 16, 6144, True),
    "4B": (36, 2560, 32, 9728, True),
    "8B": (36, 4096, 32, 12288, False),
    "14B": (40, 5120, 40, 17408, False),
    "32B": (64, 5120, 64, 25600, False),
}
"""(layers, hidden size, heads, MLP size, tied embeddings) of the published dense models, so that the shipped GPU
campaigns can be explained on a machine without the hub."""


def model_config(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the config.json of ``model`` on this machine, else its published sizes (``QWEN3``), else None."""
    path = find_file(model, "config.json", revision)
    if path is not None:
        return read_json(path)
    sizes = QWEN3.get(model.removeprefix("Qwen/Qwen3-").removesuffix("-Base")) if model.startswith("Qwen/") else None
    if sizes is None:
        return None
    layers, hidden, heads, intermediate, tied = sizes
    return {
        "model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate,
        "vocab_size": 151_936, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "eos_token_id": 151_935, "tie_word_embeddings": tied,
    }  # fmt: skip


def architecture_of(model: str, revision: str | None = None) -> Architecture | None:
    """Return the sizes of ``model``; None if its config.json is not on this machine or is not a decoder's."""
    config = model_config(model, revision)
    return None if config is None else Architecture.from_config(config)
