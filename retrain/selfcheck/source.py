"""Which model the self-check is made on, as plain data, so that another process can make the same one.

The model that a campaign names, where its weights lie on this machine; else random weights at its shapes, with four
layers. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from retrain.campaign.planning.architecture import Architecture, architecture_of
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.models import Bases
from retrain.config import Config, load, parse_dict
from retrain.errors import ModelError, UsageError
from retrain.files import read_json
from retrain.models import find_file
from retrain.models.directory import INDEX, WHOLE, local_directory, model_fault
from retrain.policy.base import BaseModel
from retrain.policy.device import resolve_device, resolve_dtype, set_up
from retrain.policy.memory import available_memory
from retrain.tokenizer import ByteTokenizer

LAYERS = 4
"""Of a model of random weights: all layers do the same, and one after the other is enough to see errors grow."""
GPU_SHAPES = "Qwen/Qwen3-8B"
"""Whose shapes a GPU is checked at, where no file names a model."""
SPREAD = 6.0
"""Standard deviation of the logits of random weights: as sure of a few tokens as a trained model. At that of a fresh
initialisation all tokens are nearly equal, and rounding decides which one is drawn."""
ROOM = 0.5
"""Share of the available memory that random weights may take."""


@dataclass(frozen=True)
class Source:
    """The first run's resolved configuration, and the shapes (a transformers config.json) of random weights; None for
    the model that the configuration names. ``asked`` is the device as it was typed."""

    config: Config
    shapes: Mapping[str, Any] | None
    asked: str

    @classmethod
    def of(cls, file: Path | None, device: str) -> Source:
        """The model of a campaign file, or without one the bundled model on a CPU and an 8B-like one on a GPU.

        Raises UsageError and ConfigError for what cannot be read, ModelError for a model that cannot be had.
        """
        devices = _devices(device)
        if file is None:
            on_gpu = devices != "cpu"
            config = parse_dict({"model": {"model": GPU_SHAPES}} if on_gpu else {})
            return cls(_on(config, devices), shapes_of(config) if on_gpu else None, device)
        config = Plan.of(load(file)).specs[0].config
        if config.backend.backend != "local":
            raise UsageError(f"{file} trains with {config.backend.backend}: there is nothing of retrain's own to check")
        model = config.model
        fault = model_fault(model.model, trust_remote_code=model.trust_remote_code)
        there = fault or local_directory(model.model) or _weights_cached(model.model, model.revision)
        return cls(_on(config, devices), None if there else shapes_of(config), device)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Source:
        """What ``to_json`` wrote."""
        return cls(parse_dict(data["config"]), data["shapes"], data["asked"])

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        config = self.config.model_dump(mode="json", by_alias=True)
        return {"config": config, "shapes": self.shapes, "asked": self.asked}

    def bases(self) -> Bases:
        """What loads the base, as training does, or makes it of random weights."""
        shapes = self.shapes
        return Bases(None if shapes is None else lambda config: random_base(shapes, config))


def _devices(asked: str) -> str:
    """The device as the configuration has it. Raises UsageError for one that is not there."""
    if asked == "auto":
        return "gpu:0" if torch.cuda.is_available() else "cpu"
    number = asked.removeprefix("gpu:")
    if asked != "cpu" and not (number != asked and number.isdecimal()):
        raise UsageError(f"--device {asked!r} is none of auto, cpu, gpu:0, gpu:1 …; type: retrain doctor --device auto")
    resolve_device(asked)
    return asked


def _on(config: Config, devices: str) -> Config:
    """The configuration on this device, without the hub."""
    data = config.model_dump(mode="json", by_alias=True)
    data["backend"]["devices"] = devices
    data["model"]["local_files_only"] = True
    return parse_dict(data)


def _weights_cached(model: str, revision: str | None) -> bool:
    """Whether the hub's cache has all weights of the model."""
    if find_file(model, WHOLE, revision):
        return True
    index = find_file(model, INDEX, revision)
    return index is not None and all(
        find_file(model, shard, revision) for shard in set(read_json(index)["weight_map"].values())
    )


def shapes_of(config: Config) -> dict[str, Any]:
    """The config.json of the model that a configuration names, with ``LAYERS`` layers. Raises ModelError where its
    shapes are not known here."""
    model = config.model
    path = find_file(model.model, "config.json", model.revision)
    if path is not None:
        whole = read_json(path)
        shapes = dict(whole.get("text_config", whole))
    elif (known := architecture_of(model.model, model.revision)) is not None:
        shapes = _qwen3(known)
    else:
        raise ModelError(
            f"neither weights nor config.json of {model.model!r} are on this machine, and nothing is downloaded: "
            "download it first, or give a file with a local directory"
        )
    for key in ("num_hidden_layers", "n_layer"):
        if key in shapes:
            shapes[key] = min(LAYERS, shapes[key])
    if shapes.get("layer_types"):
        shapes["layer_types"] = shapes["layer_types"][:LAYERS]
    shapes.pop("quantization_config", None)
    # A tied output layer of random weights would give every token itself again.
    return {**shapes, "tie_word_embeddings": False}


def _qwen3(known: Architecture) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": known.layers,
        "hidden_size": known.hidden,
        "intermediate_size": known.intermediate,
        "vocab_size": known.vocab,
        "num_attention_heads": known.heads,
        "num_key_value_heads": known.kv_heads,
        "head_dim": known.head_dim,
        "tie_word_embeddings": known.tied,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "eos_token_id": known.vocab - 1,
    }


def random_base(shapes: Mapping[str, Any], config: Config) -> BaseModel:
    """A model of random weights, the same in every process on the same device. Its tokens are bytes, as far as they
    go. Raises ModelError when it does not fit or transformers cannot make it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = resolve_device(config.backend.device)
    set_up(device)
    dtype = resolve_dtype(config.inference.dtype, device)
    sizes = Architecture.from_config(shapes)
    needed, room = (sizes.parameters() if sizes else 0) * dtype.itemsize, available_memory(device)
    if needed > ROOM * room:
        raise ModelError(
            f"random weights at the shapes of {config.model.model} take {needed / 2**30:.1f} GiB of "
            f"{room / 2**30:.1f} that are free: give --file with a smaller model, or another --device"
        )
    try:
        made = AutoConfig.for_model(**{key: value for key, value in shapes.items() if key != "dtype"})
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device), torch.no_grad():
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype).eval()
            ids = torch.arange(1, 65)[None] % int(shapes["vocab_size"])
            spread = float(model(input_ids=ids, use_cache=False).logits.float().std())
            model.get_output_embeddings().weight.mul_(round(SPREAD / spread, 2))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"no random weights can be made at the shapes of {config.model.model}: {reason}") from error
    model.to(device).eval().requires_grad_(False)
    ends = shapes.get("eos_token_id")
    eos_ids = (int(shapes["vocab_size"]) - 1,) if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    name = f"{config.model.model} (shapes)"
    return BaseModel(name, model, ByteTokenizer(), device, dtype, eos_ids, 0, "random weights")
