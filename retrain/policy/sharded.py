"""A base whose matrices are sharded over the ranks of one run by torch's FSDP2, layer by layer.

``fully_shard`` cuts every matrix along its rows and gathers those of a unit at once. A unit is one decoder layer, or
all that is in none of them. Norms and biases, which are small, stay whole on every rank. Sampling ends earlier on one
rank than on another and micro-batches differ in number, so FSDP2's own hooks, which need equal passes on all ranks,
are not used: before each gather the ranks say which unit they need, and gather those units together, in order.

A gathered weight is one tensor for good, whose memory comes and goes: whatever keeps it (a saved tensor of a backward
pass, the decoder's frame) reads it again as soon as its unit is gathered again. Weights are read from safetensors one
tensor at a time, so that no process ever holds more than its own shard and one unit.
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

Tell = Callable[[str, torch.Tensor], object]
INSTEAD = 'type [backend] shard = "dp"'
NOTHING = -1  # What a rank says that needs no unit any more


class _Holder(nn.Module):
    """Parameters that are sharded and gathered as one FSDP2 unit; never called."""


class FsdpUnit:
    """Modules whose matrices are sharded and gathered together."""

    def __init__(self, modules: Sequence[nn.Module], ranks: RankGroup, device: torch.device):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        self.device = device
        holder = _Holder()
        for place, module in enumerate(modules):
            holder.add_module(str(place), module)
        small = {weight for weight in holder.parameters() if weight.dim() < 2}
        self.nbytes = sum(weight.nbytes for weight in holder.parameters() if weight.dim() >= 2)
        mesh = DeviceMesh.from_group(ranks.device_group, device.type)
        self._sharded = fully_shard(holder, mesh=mesh, reshard_after_forward=False, ignored_params=small)

    def require_memory(self) -> None:
        """Allocate what gathering takes, and free it. Raises as an allocator does where it does not fit."""
        if self.device.type == "cuda":
            torch.empty(2 * self.nbytes, dtype=torch.uint8, device=self.device)

    def gather(self) -> None:
        self._sharded.unshard()

    def reshard(self) -> None:
        self._sharded.reshard()


class ShardedWeights:
    """The weights of a base that is sharded over ``ranks``: decoder layers are units 0, 1, …, all the rest is the last
    one. One layer is gathered at a time; the last unit stays gathered until ``in_use`` ends. For one thread at a time.
    """

    def __init__(self, ranks: RankGroup, units: Sequence[FsdpUnit], shard_bytes: int):
        self.ranks, self.shard_bytes, self._units, self._ends = ranks, shard_bytes, list(units), len(units) - 1
        self._gathered, self._is_open = set[int](), False
        self.gathered_bytes = held_weights(0, units[-1].nbytes, max(unit.nbytes for unit in units[:-1]))

    @property
    def held_bytes(self) -> int:
        """Return the peak bytes of weights on this device."""
        return self.shard_bytes + self.gathered_bytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Allow units to be gathered in this block, which all ranks enter together. A rank that is done, or has failed,
        gathers what the others need until no rank needs anything."""
        self._is_open = True
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # what they hold would be missing for the others' units
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
        """Gather a decoder layer; the one before is resharded. Raises RankLost when another rank is gone, and whatever
        an allocator raises."""
        if unit in self._gathered:
            return
        if not self._is_open:
            raise RunFailed("sharded weights were read where not all ranks take part")
        self._reshard_layers()
        self._units[unit].require_memory()
        self._gather_with_others(unit)

    def ends(self) -> None:
        """Gather embedding and output layer, and whatever else is in no decoder layer."""
        self.layer(self._ends)

    def _finish(self) -> None:
        self._reshard_layers()
        while self._gather_with_others(NOTHING):
            pass

    def _gather_with_others(self, own: int) -> bool:
        """Gather the units that the ranks need, in order; return whether any rank needed one."""
        try:
            needs = [torch.empty(1, dtype=torch.int64) for _ in range(self.ranks.count)]
            dist.all_gather(needs, torch.tensor([own]), group=self.ranks.needs_group)
            units = {int(need) for need in needs} - {NOTHING}
            for unit in sorted(units):
                self._units[unit].gather()
                if unit in (own, self._ends):
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
    """A model of which this rank has a shard. ``parts`` is what every tensor of its state adds to a fingerprint, in the
    order of the names."""

    model: PreTrainedModel
    weights: ShardedWeights
    parts: list[bytes]


def load_sharded(
    source: str,
    options: Mapping[str, object],
    dtype: torch.dtype,
    device: torch.device,
    ranks: RankGroup,
    fingerprint: Callable[[str, torch.Tensor], bytes],
) -> ShardedModel:
    """Load the model of ``source`` (with ``from_pretrained``'s options), frozen, this rank's shard of it on ``device``;
    all ranks call this together. ``fingerprint(name, tensor)`` is called with every whole tensor, in ``dtype``.

    Raises ModelError for a model that cannot be cut, and what transformers raises for one that cannot be loaded.
    """
    model = _empty_model(source, options, dtype)
    layers = _layers(model)
    inner = [set(layer.modules()) for layer in layers]
    owners = [module for module in model.modules() if any(weight.dim() >= 2 for weight in module.parameters(False))]
    outer = [module for module in owners if not any(module in own for own in inner)]
    if any(layers[0] in module.modules() for module in outer):
        raise ModelError(f"{type(model).__name__} has weights beside its layers that cannot be cut: {INSTEAD}")
    files, said = _Files.find(source, options), dict[str, bytes]()
    reader = _Reader(model, files, dtype, device, lambda name, tensor: said.setdefault(name, fingerprint(name, tensor)))
    units = []
    for layer in layers:
        reader.fill(layer)
        units.append(FsdpUnit([layer], ranks, device))
    reader.fill(model)
    reader.fill_buffers()
    units.append(FsdpUnit(outer, ranks, device))
    own = sum(getattr(weight, "to_local", lambda weight=weight: weight)().nbytes for weight in model.parameters())
    weights = ShardedWeights(ranks, units, own)
    _hook(weights, layers, owners, outer)
    model.eval().requires_grad_(False)
    return ShardedModel(model, weights, [said[name] for name in model.state_dict()])


def _empty_model(source: str, options: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The model with its buffers, as ``from_pretrained`` makes it, and parameters that have a shape alone."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(source, **options)
    if getattr(config, "quantization_config", None):
        raise ModelError(f"a quantised model cannot be cut: {INSTEAD}")
    remote = bool(options.get("trust_remote_code"))
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote)
    model.tie_weights()
    if dtype.itemsize < 4 and getattr(model, "_keep_in_fp32_modules", None):
        raise ModelError(f"{type(model).__name__} keeps some layers in float32, and cannot be cut: {INSTEAD}")
    with suppress(OSError):  # where it has none, what its configuration says
        model.generation_config = GenerationConfig.from_pretrained(source, **options)
    return model


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder's layers. Raises ModelError where there are none to be found."""
    decoder = getattr(model, "get_decoder", lambda: None)()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ModelError(f"{type(model).__name__} has no list of layers that could be cut: {INSTEAD}")
    return list(layers)


@dataclass(frozen=True)
class _Files:
    """In which file every tensor of a model is."""

    places: Mapping[str, str]

    @classmethod
    def find(cls, source: str, options: Mapping[str, Any]) -> _Files:
        """Those of a model, downloaded where they are not here."""
        from safetensors import safe_open
        from transformers.utils.hub import cached_file

        asked = {key: value for key, value in options.items() if key != "trust_remote_code"}
        missing: dict[str, Any] = {
            "_raise_exceptions_for_missing_entries": False,
            "_raise_exceptions_for_connection_errors": False,
        }
        if whole := cached_file(source, WHOLE, **asked, **missing):
            with safe_open(whole, framework="pt") as file:
                return cls(dict.fromkeys(file.keys(), whole))
        index = cached_file(source, INDEX, **asked, **missing)
        if not index:
            raise ModelError(f"it has neither {WHOLE} nor {INDEX}, and others cannot be read in parts: {INSTEAD}")
        names: dict[str, str] = json.loads(Path(index).read_bytes())["weight_map"]
        paths = {name: str(cached_file(source, name, **asked)) for name in set(names.values())}
        return cls({name: paths[file] for name, file in names.items()})

    def read(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self.places[name], framework="pt") as file:
            return file.get_tensor(name)


class _Reader:
    """Fills parameters and buffers that a file has, one after another; ``tell`` hears of every name and tensor."""

    def __init__(self, model: PreTrainedModel, files: _Files, dtype: torch.dtype, device: torch.device, tell: Tell):
        self.model, self.files, self.dtype, self.device, self.tell = model, files, dtype, device, tell
        self._names: dict[int, list[str]] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(weight), []).append(name)

    def fill(self, module: nn.Module) -> None:
        """Fill the parameters under this module that are empty yet. Raises ModelError for what no file has."""
        for weight in list(module.parameters()):
            if weight.is_meta:
                self._fill(weight, self._names[id(weight)])

    def fill_buffers(self) -> None:
        """Fill the buffers that a file has, and put all of them on the device."""
        state = self.model.state_dict()
        for module_name, module in self.model.named_modules():
            for leaf, tensor in list(module.named_buffers(recurse=False)):
                name = f"{module_name}.{leaf}".lstrip(".")
                filled = self.files.read(name).to(tensor.dtype) if name in self.files.places else tensor
                module._buffers[leaf] = filled.to(self.device)
                if name in state:
                    self.tell(name, filled)

    def _fill(self, weight: nn.Parameter, names: list[str]) -> None:
        name = next((name for name in names if name in self.files.places), None)
        if name is None:
            raise ModelError(f"{names[0]} is under no such name in the model's files, which have to be read: {INSTEAD}")
        tensor = self.files.read(name).to(self.dtype)
        if tensor.shape != weight.shape:
            raise ModelError(f"{name} is {tuple(tensor.shape)} in the model's files, and {tuple(weight.shape)} in it")
        filled = nn.Parameter(tensor.to(self.device).contiguous(), requires_grad=False)
        for place in names:
            self.tell(place, tensor)
            parent, _, leaf = place.rpartition(".")
            self.model.get_submodule(parent).register_parameter(leaf, filled)


def _hook(
    weights: ShardedWeights, layers: Sequence[nn.Module], owners: Sequence[nn.Module], outer: Sequence[nn.Module]
) -> None:
    """Whoever calls a module finds its weights there, and so does the backward pass of a layer."""
    for module in outer:
        module.register_forward_pre_hook(_asking(weights.ends))
    for place, layer in enumerate(layers):
        ask, inside = partial(weights.layer, place), set(layer.modules())
        for module in [layer, *(owner for owner in owners if owner in inside)]:
            module.register_forward_pre_hook(_asking(ask))
        layer.register_forward_hook(_asking_again(ask))


def _asking(ask: Callable[[], None]) -> Callable[[nn.Module, object], None]:
    """Return a hook that runs before a forward pass."""
    return lambda module, given: ask()


def _asking_again(ask: Callable[[], None]) -> Callable[[nn.Module, object, object], None]:
    """A hook after a forward pass: before the gradient of what it has given goes back through it, the weights are there
    again."""

    def watch(module: nn.Module, given: object, made: object) -> None:
        for out in _tensors(made):
            if out.requires_grad:
                out.register_hook(lambda gradient: ask())

    return watch


def _tensors(made: object) -> Iterator[torch.Tensor]:
    given = made if isinstance(made, tuple | list) else [made]
    yield from (each for each in given if isinstance(each, torch.Tensor))
