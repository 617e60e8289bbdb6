"""Which linear layers ``[lora] target_modules`` means, by the names of a model's layers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the decoders whose blocks have the layers below under these names."""
BLOCK_LAYERS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)


def targeted(layer: str, targets: str | Sequence[str]) -> bool:
    """Whether the layer with this module path gets an adapter: with ``"all-linear"`` every one, else those whose path
    is one of the targets or ends with one, after a dot."""
    return targets == "all-linear" or any(layer == target or layer.endswith("." + target) for target in targets)


def dense_layers(config: Mapping[str, Any]) -> list[str] | None:
    """Module paths of the linear layers, without the output layer, of the model with this config.json; None where
    only the loaded model shows them."""
    if config.get("model_type") not in DENSE_FAMILIES:
        return None
    return [f"model.layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in BLOCK_LAYERS]


def target_mistakes(targets: str | Sequence[str], layers: Sequence[str], head: str) -> list[tuple[str, str]]:
    """For every target that means none of the ``layers``: what it is, and the line to type instead. ``head`` is the
    path of the output layer, which gets no adapter."""
    if targets == "all-linear":
        return []
    right = [target for target in targets if any(targeted(layer, [target]) for layer in layers)]
    fix = f"target_modules = {json.dumps(right or 'all-linear')}"
    leaves = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
    return [
        (
            f"names {json.dumps(target)}, "
            + (
                "the output layer, which gets no adapter"
                if targeted(head, [target])
                else f"which is no linear layer of the model; it has {leaves}"
            ),
            fix,
        )
        for target in targets
        if target not in right
    ]
