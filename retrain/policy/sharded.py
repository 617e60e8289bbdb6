"""Shards the matrices of a base over the ranks of one run with torch's FSDP2, layer by layer.

``fully_shard`` shards every matrix by rows and gathers those of a unit at once. A unit is one decoder layer, or all
modules outside the layers. Norms and biases are small and replicated on every rank. FSDP2's own hooks need equal passes
on all ranks and are not used, because sampling ends at different times and micro-batches differ in number: before each
gather, the ranks exchange which units they need, and gather these together, in order.

A gathered weight is always the same tensor, whose memory is freed and allocated again: references to it (saved tensors
of a backward pass, the decoder's frame) are valid whenever its unit is gathered. Weights are read from safetensors one
tensor at a time, so that no process holds more than its own shard and one unit.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from retrain.device import is_out_of_memory
from retrain.errors import ModelError, RunFailed
from retrain.models.directory import INDEX, WHOLE
from retrain.models.layers import held_weights
from retrain.ranks import RankGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnTensor = Callable[[str, torch.Tensor], object]
INSTEAD = 'type [backend] shard = "dp"'
NOTHING = -1  # Sent by a rank that needs no further unit


class _Holder(nn.Module):
    """A container of the modules that FSDP2 shards and gathers as one unit. It has no forward pass."""


class FsdpUnit:
    def __init__(self, modules: Sequence[nn.Module], ranks: RankGroup, device: torch.device):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        self.device = device
        holder = _Holder()
        for index, module in enumerate(modules):
            holder.add_module(str(index), module)
        small = {weight for weight in holder.parameters() if weight.dim() < 2}
        self.nbytes = sum(weight.nbytes for weight in holder.parameters() if weight.dim() >= 2)
        mesh = DeviceMesh.from_group(ranks.device_group, device.type)
        self._sharded = fully_shard(holder, mesh=mesh, reshard_after_forward=False, ignored_params=small)

    def require_memory(self) -> None:
        """Allocate and free the memory of a gather. Raises an out-of-memory error before any rank communicates."""
        if self.device.type == "cuda":
            # Twice the unit: FSDP2 gathers into one buffer and copies from it into the parameters.
            torch.empty(2 * self.nbytes, dtype=torch.uint8, device=self.device)

    def gather(self) -> None:
        self._sharded.unshard()

    def reshard(self) -> None:
        self._sharded.reshard()


class ShardedWeights:
    """The sharded weights of a base. Units 0, 1, … are its decoder layers, the last unit is everything else. One layer
    is gathered at a time; the last unit stays gathered until ``in_use`` ends. Not thread-safe."""

    def __init__(self, ranks: RankGroup, units: Sequence[FsdpUnit], shard_bytes: int):
        self.ranks, self.shard_bytes, self._units, self._ends = ranks, shard_bytes, list(units), len(units) - 1
        self._gathered, self._is_open = set[int](), False
        self.gathered_bytes = held_weights(0, units[-1].nbytes, max(unit.nbytes for unit in units[:-1]))

    @property
    def held_bytes(self) -> int:
        return self.shard_bytes + self.gathered_bytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Allow gathers in this block, which all ranks enter together. A rank that has finished or failed joins the
        gathers of the others until no rank needs a unit."""
        self._is_open = True
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # frees the memory that gathers for the other ranks need
            if not self.ranks.is_lost:
                self._finish()
            raise
        else:
            self._finish()
        finally:
            self._is_open = False
            for unit in sorted(self._gathered):
                self._units[unit].reshard()
            self._gathered.clear()

    def layer(self, unit: int) -> None:
        """Reshard the layer gathered last, then gather a unit. Raises RunFailed outside ``in_use``, RankLost if another
        rank is gone, and out-of-memory errors."""
        if unit in self._gathered:
            return
        if not self._is_open:
            raise RunFailed("sharded weights were read where not all ranks take part")
        self._reshard_layers()
        self._units[unit].require_memory()
        self._gather_with_others(unit)

    def ends(self) -> None:
        """Gather embedding, output layer and all other modules outside the decoder layers."""
        self.layer(self._ends)

    def _finish(self) -> None:
        self._reshard_layers()
        while self._gather_with_others(NOTHING):
            pass

    def _gather_with_others(self, needed: int) -> bool:
        try:
            # On the host, in a separate process group: a collective on the device would wait for the work queued there.
            needs = [torch.empty(1, dtype=torch.int64) for _ in range(self.ranks.count)]
            dist.all_gather(needs, torch.tensor([needed]), group=self.ranks.needs_group)
            units = {int(need) for need in needs} - {NOTHING}
            for unit in sorted(units):
                self._units[unit].gather()
                if unit in (needed, self._ends):
                    self._gathered.add(unit)
                else:
                    self._units[unit].reshard()
        except Exception as error:
            raise self.ranks.lost(error) from error
        return bool(units)

    def _reshard_layers(self) -> None:
        for unit in self._gathered - {self._ends}:
            self._units[unit].reshard()
            self._gathered.remove(unit)


@dataclass(frozen=True)
class ShardedModel:
    model: PreTrainedModel
    weights: ShardedWeights
    parts: list[bytes]  # Input of the fingerprint, one part per tensor of the state dict, in its order


def load_sharded(
    source: str,
    options: Mapping[str, object],
    dtype: torch.dtype,
    device: torch.device,
    ranks: RankGroup,
    fingerprint: Callable[[str, torch.Tensor], bytes],
) -> ShardedModel:
    """Load this rank's shard of a frozen model to ``device``, with the options of ``from_pretrained``. All ranks call
    this together. ``fingerprint(name, tensor)`` is called with every full tensor in ``dtype``.

    Raises ModelError for a model that cannot be sharded, and the errors of transformers.
    """
    model = _empty_model(source, options, dtype)
    layers = _layers(model)
    inner = [set(layer.modules()) for layer in layers]
    owners = [module for module in model.modules() if any(weight.dim() >= 2 for weight in module.parameters(False))]
    outer = [module for module in owners if not any(module in modules for modules in inner)]
    if any(layers[0] in module.modules() for module in outer):
        raise ModelError(f"{type(model).__name__} has weights beside its layers that cannot be sharded: {INSTEAD}")
    files, parts = _find_files(source, options), dict[str, bytes]()
    reader = _Reader(
        model, files, dtype, device, lambda name, tensor: parts.setdefault(name, fingerprint(name, tensor))
    )
    units = []
    for layer in layers:
        reader.fill(layer)
        units.append(FsdpUnit([layer], ranks, device))
    reader.fill(model)
    reader.fill_buffers()
    units.append(FsdpUnit(outer, ranks, device))
    shard_bytes = sum(
        getattr(weight, "to_local", lambda weight=weight: weight)().nbytes for weight in model.parameters()
    )
    weights = ShardedWeights(ranks, units, shard_bytes)
    _hook(weights, layers, owners, outer)
    model.eval().requires_grad_(False)
    return ShardedModel(model, weights, [parts[name] for name in model.state_dict()])


def _empty_model(source: str, options: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Return the model as ``from_pretrained`` makes it, but with parameters on the meta device. Buffers have values."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(source, **options)
    if getattr(config, "quantization_config", None):
        raise ModelError(f"a quantised model cannot be sharded: {INSTEAD}")
    remote = bool(options.get("trust_remote_code"))
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote)
    model.tie_weights()
    if dtype.itemsize < 4 and getattr(model, "_keep_in_fp32_modules", None):
        raise ModelError(f"{type(model).__name__} keeps some layers in float32 and cannot be sharded: {INSTEAD}")
    with suppress(OSError):  # without a file, its defaults follow from the configuration
        model.generation_config = GenerationConfig.from_pretrained(source, **options)
    return model


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    decoder = getattr(model, "get_decoder", lambda: None)()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ModelError(f"{type(model).__name__} has no list of layers that could be sharded: {INSTEAD}")
    return list(layers)


def _find_files(source: str, options: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the file of each of a model's tensors, downloaded if necessary. Raises ModelError unless they are
    safetensors."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    hub_options = {key: value for key, value in options.items() if key != "trust_remote_code"}
    missing: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    if single_file := cached_file(source, WHOLE, **hub_options, **missing):
        with safe_open(single_file, framework="pt") as file:
            return dict.fromkeys(file.keys(), single_file)
    index = cached_file(source, INDEX, **hub_options, **missing)
    if not index:
        raise ModelError(f"it has neither {WHOLE} nor {INDEX}, the only files that can be read in parts: {INSTEAD}")
    names: dict[str, str] = json.loads(Path(index).read_bytes())["weight_map"]
    paths = {name: str(cached_file(source, name, **hub_options)) for name in set(names.values())}
    return {name: paths[file] for name, file in names.items()}


class _Reader:
    """Fills parameters and buffers from ``files`` (by tensor), one at a time; calls ``on_tensor`` with every name and
    tensor."""

    def __init__(
        self, model: PreTrainedModel, files: Mapping[str, str], dtype: torch.dtype, device: torch.device,
        on_tensor: OnTensor,
    ):  # fmt: skip
        self.model, self.files, self.dtype, self.device, self.on_tensor = model, files, dtype, device, on_tensor
        self._names: dict[int, list[str]] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(weight), []).append(name)

    def _read(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def fill(self, module: nn.Module) -> None:
        for weight in list(module.parameters()):
            if weight.is_meta:
                self._fill(weight, self._names[id(weight)])

    def fill_buffers(self) -> None:
        """Fill the buffers that the files contain, and move all buffers to the device."""
        state = self.model.state_dict()
        for module_name, module in self.model.named_modules():
            for leaf, tensor in list(module.named_buffers(recurse=False)):
                name = f"{module_name}.{leaf}".lstrip(".")
                filled = self._read(name).to(tensor.dtype) if name in self.files else tensor
                module._buffers[leaf] = filled.to(self.device)
                if name in state:
                    self.on_tensor(name, filled)

    def _fill(self, weight: nn.Parameter, names: list[str]) -> None:
        name = next((name for name in names if name in self.files), None)
        if name is None:
            raise ModelError(f"{names[0]} is under no such name in the model's files, which have to be read: {INSTEAD}")
        tensor = self._read(name).to(self.dtype)
        if tensor.shape != weight.shape:
            raise ModelError(f"{name} is {tuple(tensor.shape)} in the model's files, and {tuple(weight.shape)} in it")
        filled = nn.Parameter(tensor.to(self.device).contiguous(), requires_grad=False)
        for alias in names:
            self.on_tensor(alias, tensor)
            parent, _, leaf = alias.rpartition(".")
            self.model.get_submodule(parent).register_parameter(leaf, filled)


def _hook(
    weights: ShardedWeights, layers: Sequence[nn.Module], owners: Sequence[nn.Module], outer: Sequence[nn.Module]
) -> None:
    """Add hooks that gather a module's weights before its forward pass, and before its layer's backward pass."""
    for module in outer:
        module.register_forward_pre_hook(_before_forward(weights.ends))
    for index, layer in enumerate(layers):
        gather, inside = partial(weights.layer, index), set(layer.modules())
        for module in [layer, *(owner for owner in owners if owner in inside)]:
            module.register_forward_pre_hook(_before_forward(gather))
        layer.register_forward_hook(_before_backward(gather))


def _before_forward(gather: Callable[[], None]) -> Callable[[nn.Module, object], None]:
    return lambda module, args: gather()


def _before_backward(gather: Callable[[], None]) -> Callable[[nn.Module, object, object], None]:
    def hook(module: nn.Module, args: object, output: object) -> None:
        for tensor in _tensors(output):
            # When the gradient of the output arrives, the backward pass of this module is next.
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gather())

    return hook


def _tensors(output: object) -> Iterator[torch.Tensor]:
    values = output if isinstance(output, tuple | list) else [output]
    yield from (value for value in values if isinstance(value, torch.Tensor))
