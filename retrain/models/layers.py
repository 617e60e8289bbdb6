"""Linear layers that get an adapter; sizes in memory that both the estimate of a run and the run itself use, and those
of a model from its ``config.json`` alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.files import read_json
from retrain.models.directory import find_file

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the decoders whose blocks have the layers below under these names."""
BLOCK_LAYERS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)

SMALL_MODEL_BYTES = 32 << 20
"""Weights up to this size count as small on a CPU: a few MiB of cache per core hold most of them."""
COPY_SHARE = 0.25
"""Largest share of memory for copied weights of decoding: merged with an adapter, or packed."""
NF4_BLOCK = 64  # Numbers in 4 bits that share a scale
TRAINED_BYTES, PUBLISHED_BYTES = 16, 4
"""Bytes per adapter weight: fp32 master, gradient and two moments of AdamW; and a version published to the engine."""
LOGITS_COPIES = 5
"""fp32 rows [V] per sampled token: logits, their mass, its cumulative sum and two temporaries."""

GATHERED = 3
"""Memory of gathering a sharded layer, in layers: the communication buffer, its weights, and the fused weights of
decoding. Embedding and output layer are not fused."""

USABLE_SHARE = 0.85
"""Share of the free memory after loading the base that is planned with; the rest allows for fragmentation."""
LEAST_ROWS = 8
"""Least sequences of a lane whose cache must fit: with fewer, decoding would be bound by reading the weights."""
GPU_SAMPLING_SHARE, GPU_TRAINING_SHARE = 0.8, 0.4
"""Shares of a GPU's memory that base and lanes leave: for keys, values and logits of a decode batch (the rest is for
prefill and fragmentation); for the activations that a micro-batch keeps for its backward pass."""
GPU_MICRO_BATCH_TOKENS = (512, 32768)
"""Least and most tokens of a micro-batch on a GPU; more tokens do not use it better."""
GPU_MOST_ROWS, GPU_COLUMNS = 4096, 128
"""Most rows of a GPU's decode batch, beyond which decoding is compute-bound; and the tokens by which its cache is
sized."""


def targeted(layer: str, targets: str | Sequence[str]) -> bool:
    """Return whether the layer with this module path gets an adapter: with ``"all-linear"`` every one, else those whose
    path is one of the targets or ends with one, after a dot."""
    return targets == "all-linear" or any(layer == target or layer.endswith("." + target) for target in targets)


def dense_layers(config: Mapping[str, Any]) -> list[str] | None:
    """Return the module paths of the linear layers, without the output layer, of the model with this config.json; None
    where only the loaded model shows them."""
    if config.get("model_type") not in DENSE_FAMILIES:
        return None
    return [f"model.layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in BLOCK_LAYERS]


def target_mistakes(targets: str | Sequence[str], layers: Sequence[str], head: str) -> list[tuple[str, str]]:
    """Return, for each target that matches none of the ``layers``, the fault and the corrected line. ``head``: path of
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
    """Return the tokens of a micro-batch on a GPU, of which base and lanes leave ``free_bytes`` and a token keeps
    ``token_bytes`` for its backward pass."""
    least, most = GPU_MICRO_BATCH_TOKENS
    return min(most, max(least, int(GPU_TRAINING_SHARE * free_bytes) // token_bytes))


def fitting_lanes(usable: int, copy: int, update: int, lanes: Iterable[tuple[int, int]]) -> int:
    """Return how many of the first lanes fit into ``usable`` bytes. A lane is given by its resident bytes (adapter,
    critic, optimizers) and its least cache; all share one ``copy`` of the weights. Resident bytes come with either all
    caches or one ``update``, whichever is larger."""
    resident, caches, fitting = copy, 0, 0
    for lane_resident, cache in lanes:
        resident, caches = resident + lane_resident, caches + cache
        fitting += resident + max(caches, update) <= usable
    return fitting


def cpu_token_budget(weight_bytes: int) -> int:
    """Return the tokens of a micro-batch on a CPU: the fewest, to save memory, that reach full speed.

    Measured with ``benchmarks/update.py --micro``: at hidden 256 (a micro-batch on every core) 768 to 2,048 tokens take
    the same time and 512 16 % more; at hidden 512 (one micro-batch on all cores) 1,536 and 2,048 take the same and
    1,024 10 % more.
    """
    return 1024 if weight_bytes <= SMALL_MODEL_BYTES else 2048


def adapter_bytes(weights: int, itemsize: int, versions: int = 1) -> int:
    """Return the bytes of one lane with this many adapter weights: training state, published versions, and decoding's
    copy at ``itemsize`` bytes, the precision of the base."""
    return weights * (TRAINED_BYTES + versions * PUBLISHED_BYTES + itemsize)


def held_weights(shard: int, ends: int, layer: int) -> int:
    """Return the peak bytes of a sharded base's weights on a device: its ``shard``, and the gathered ``ends``
    (embedding and output layer) with one gathered decoder ``layer`` at a time."""
    return shard + max(2 * ends, ends + GATHERED * layer)


def update_copy(weights: int, itemsize: int, update_dtype: str) -> int:
    """Return the bytes of the bfloat16 copy of ``weights`` numbers that ``update_dtype = "bfloat16"`` makes of an fp32
    base (``policy.arithmetic``); 0 without one."""
    return 2 * weights if update_dtype == "bfloat16" and itemsize == 4 else 0


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
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers of a block, of one expert's in the MLP, by their usual paths."""
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
        """Numbers in the linear layers of all blocks, with so many experts."""
        shapes = self.linear_shapes.items()
        return self.layers * sum(a * b * (experts if name.startswith("mlp.") else 1) for name, (a, b) in shapes)

    def adapter_parameters(self, rank: int, target_modules: str | Sequence[str]) -> int:
        """LoRA parameters at ``rank``: rank·(inputs + outputs) of every adapted linear layer."""
        return rank * sum(
            (inputs + outputs) * (self.experts if name.startswith("mlp.") else 1)
            for layer in range(self.layers)
            for name, (inputs, outputs) in self.linear_shapes.items()
            if targeted(f"model.layers.{layer}.{name}", target_modules)
        )

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values that one token occupies."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def kept_bytes(self, itemsize: int) -> int:
        """Bytes that one token's forward pass keeps for the backward pass of the update.

        Norms, linear layers and attention keep their inputs, attention also its output, the MLP its gate and its other
        half.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = self.active_experts * self.intermediate  # of all experts that a token meets
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
"""Layers, hidden, heads, intermediate, tied of the published dense models, so that the shipped GPU campaigns can be
explained on a machine that has never met a hub."""


def model_config(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the config.json of ``model``, or its published sizes; None when neither is on this machine."""
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
    """Return the sizes of ``model``, or None when they are unknown or of an unknown form."""
    config = model_config(model, revision)
    return None if config is None else Architecture.from_config(config)
