"""LoRA lanes: many adapters over one frozen base, applied together.

Every target linear layer is wrapped once. The mode of ``Lanes`` decides what the wrapper adds to the base's output:
nothing (the reference model), one adapter (``single``), or a stack of adapters, each for an equal share of the batch
rows (``stacked``: one decode batch for all runs). LoRA as in arXiv 2106.09685 with peft's initialisation (A Kaiming
uniform, B zero), ΔW = (alpha/r)·B·A; master weights are fp32 whatever the base's dtype, and AdamW steps them.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrain.config import Config
from retrain.device import free_cached_memory, is_out_of_memory
from retrain.errors import ModelError, NonFinite
from retrain.maths.squeeze import truncate
from retrain.models.layers import target_mistakes, targeted
from retrain.policy.arithmetic import adapted_linear
from retrain.policy.base import BaseModel
from retrain.policy.quantized import QuantizedLinear
from retrain.rng import torch_seed
from retrain.threads import thread_values

FUSED = ("cuda",)  # Devices on which AdamW is one kernel
# By layer: A of every lane [L, in, r] and B of every lane [L, r, out], the scale folded into B
Stacks = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerShape:
    name: str
    in_features: int
    out_features: int


class LoraWeights:
    """LoRA weights: A [r, in] and B [out, r] by layer, views of one fp32 buffer ``flat``. Only those of the subclass
    ``Adapter`` are trained; others never change.

    ``scale`` is alpha/r. The first ``live_rank`` rows of A and columns of B are in use; the others are 0.
    """

    def __init__(self, shapes: Sequence[LayerShape], rank: int, scale: float, live_rank: int, flat: Tensor):
        self.shapes, self.rank, self.scale, self.live_rank, self.flat = tuple(shapes), rank, scale, live_rank, flat
        self.A: dict[str, Tensor] = {}
        self.B: dict[str, Tensor] = {}
        offset = 0
        for shape in shapes:
            for store, rows, columns in ((self.A, rank, shape.in_features), (self.B, shape.out_features, rank)):
                store[shape.name] = self._view(slice(offset, offset + rows * columns), (rows, columns))
                offset += rows * columns

    def _view(self, position: slice, shape: tuple[int, int]) -> Tensor:
        return self.flat[position].view(shape)

    def tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the detached (A, B) of every layer, without the rows and columns beyond the live rank."""
        live = self.live_rank
        return {s.name: (self.A[s.name].detach()[:live], self.B[s.name].detach()[:, :live]) for s in self.shapes}

    def fingerprint(self) -> str:
        return hashlib.sha256(self.flat.detach().cpu().numpy().tobytes()).hexdigest()[:16]

    def frozen(self, device: torch.device | str | None = None) -> LoraWeights:
        """Return a copy of the current weights on ``device``; None: on the same device."""
        flat = self.flat.detach()
        copy = flat.clone() if device is None else flat.to(device, copy=True)
        return LoraWeights(self.shapes, self.rank, self.scale, self.live_rank, copy)


class Adapter(LoraWeights):
    """One run's LoRA weights as they are trained: parameters whose gradients are views of ``flat.grad``.

    With one buffer, clipping, AdamW and checkpoints work on a single tensor.
    """

    flat: nn.Parameter

    def __init__(self, shapes: Sequence[LayerShape], rank: int, alpha: float, device: torch.device):
        flat = nn.Parameter(torch.zeros(rank * sum(s.in_features + s.out_features for s in shapes), device=device))
        flat.grad = torch.zeros_like(flat)
        super().__init__(shapes, rank, alpha / rank, rank, flat)

    def _view(self, position: slice, shape: tuple[int, int]) -> nn.Parameter:
        assert self.flat.grad is not None
        view = nn.Parameter(self.flat.data[position].view(shape))
        # Autograd adds to a .grad that exists in place, hence to the one buffer.
        view.grad = self.flat.grad[position].view(shape)
        return view

    def initialise(self, *seed: int | str) -> Adapter:
        """Draw A ~ U(±1/√in) from a random stream for each layer, named by ``seed`` and the layer, and set B to 0. The
        numbers are the same on every device."""
        with torch.no_grad():
            for shape in self.shapes:
                stream = torch.Generator().manual_seed(torch_seed(*seed, "adapter", shape.name))
                # peft's Kaiming uniform with a = √5 has this bound.
                bound = 1.0 / math.sqrt(shape.in_features)
                weights = torch.empty(self.rank, shape.in_features).uniform_(-bound, bound, generator=stream)
                self.A[shape.name].copy_(weights)
                self.B[shape.name].zero_()
        return self

    def load(self, tensors: dict[str, tuple[Tensor, Tensor]], lowered: bool = False) -> None:
        """Copy (A, B) of every layer into this adapter. With ``lowered``, a smaller rank is accepted and becomes the
        live rank. Raises ModelError if layers or shapes differ."""
        if missing := sorted(set(self.A) - set(tensors)):
            raise ModelError(f"the adapter lacks {len(missing)} of the target layers, e.g. {missing[0]}")
        live = min((a.shape[0] for a, _ in tensors.values()), default=self.rank) if lowered else self.rank
        with torch.no_grad():
            for name, (a, b) in tensors.items():
                fits = name in self.A and a.shape[0] == b.shape[1] == live <= self.rank
                if not fits or a.shape[1:] != self.A[name].shape[1:] or b.shape[:1] != self.B[name].shape[:1]:
                    raise ModelError(f"adapter layer {name} of shape {tuple(a.shape)}, {tuple(b.shape)} does not fit")
                self._put(name, a, b)
        self.live_rank = live

    def _put(self, name: str, a: Tensor, b: Tensor) -> None:
        rank = a.shape[0]
        self.A[name][:rank].copy_(a)
        self.A[name][rank:].zero_()
        self.B[name][:, :rank].copy_(b)
        self.B[name][:, rank:].zero_()

    def lower(self, rank: int) -> None:
        """Replace every ΔW by its best approximation of this rank (LoRA-Squeeze, arXiv 2602.10993).

        Training leaves the other rows at 0: where a row of A and its column of B are both 0, so are their gradients.
        ``rank`` is at most the live one.
        """
        with torch.no_grad():
            for name, (a, b) in self.tensors().items():
                self._put(name, *truncate(a, b, self.scale, rank))
        self.live_rank = rank

    @property
    def views(self) -> list[Tensor]:
        """Return A and B of every layer, in the order of ``flat``."""
        return [store[shape.name] for shape in self.shapes for store in (self.A, self.B)]


class LaneMode(threading.local):
    """The mode of a thread. The wrapped layers add ``adapter``, or the stack of adapters ``stacks``, or nothing if both
    are None."""

    adapter: LoraWeights | None = None
    dropout: float = 0.0
    stacks: Stacks | None = None


class LaneLinear(nn.Module):
    lanes: Lanes

    def __init__(self, base: nn.Module, lanes: Lanes, name: str):
        super().__init__()
        self.base, self.name, self.lanes = base, name, lanes

    @property
    def weight(self) -> Tensor:
        # Some model code reads dtype or shape from it.
        return self.base.weight  # pyright: ignore[reportReturnType]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [rows, T, out] of x [rows, T, in], with the adapters of this thread's mode."""
        mode = self.lanes.mode
        if mode.adapter is not None:
            a, b = mode.adapter.A[self.name], mode.adapter.B[self.name]
            return adapted_linear(self.base, x, a, b, mode.adapter.scale, mode.dropout)
        out = self.base(x)
        if mode.stacks is not None:
            a_LIR, b_LRO = mode.stacks[self.name]  # scale folded into b
            count = a_LIR.shape[0]
            low = torch.bmm(x.reshape(count, -1, x.shape[-1]), a_LIR)
            return torch.baddbmm(out.view(count, -1, out.shape[-1]), low, b_LRO).view(out.shape)
        return out


def _is_linear(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Linear) and type(module).__name__ not in ("NonDynamicallyQuantizableLinear",)
    return plain or isinstance(module, QuantizedLinear)


class Lanes:
    """The wrapped target layers of one base, and the mode of each thread. Adapters belong to the runs.

    ``target_modules`` is ``"all-linear"`` (all but the output layer, as in peft) or a list of module paths or their
    ends. Raises ModelError if one of them matches no layer that can have an adapter.
    """

    def __init__(self, base: BaseModel, target_modules: str | Sequence[str] = "all-linear"):
        self.base, self.mode = base, LaneMode()
        self.target_modules = target_modules
        head = base.model.get_output_embeddings()
        linears = {name: module for name, module in base.model.named_modules() if _is_linear(module)}
        layers = [name for name, module in linears.items() if module is not head]
        if not layers:
            raise ModelError(f"{base.name} has no linear layers besides its output layer: nothing can have an adapter")
        head_name = next((name for name, module in linears.items() if module is head), "")
        if mistakes := target_mistakes(target_modules, layers, head_name):
            raise ModelError("\n".join(f"[lora] target_modules {message}: {fix}" for message, fix in mistakes))
        chosen = [(name, linears[name]) for name in layers if targeted(name, target_modules)]
        self.shapes = [LayerShape(name, m.in_features, m.out_features) for name, m in chosen]
        for name, module in chosen:
            parent_name, _, leaf = name.rpartition(".")
            setattr(base.model.get_submodule(parent_name), leaf, LaneLinear(module, self, name))
        base.on_release(self.detach)

    def detach(self) -> None:
        for shape in self.shapes:
            parent_name, _, leaf = shape.name.rpartition(".")
            parent = self.base.model.get_submodule(parent_name)
            layer = getattr(parent, leaf)
            if isinstance(layer, LaneLinear) and layer.lanes is self:
                setattr(parent, leaf, layer.base)

    def new_adapter(self, rank: int, alpha: float) -> Adapter:
        return Adapter(self.shapes, rank, alpha, self.base.device)

    def single(self, adapter: LoraWeights | None, dropout: float = 0.0) -> AbstractContextManager[None]:
        """Apply ``adapter`` to all rows; None is the base. An ``Adapter`` receives gradients, a frozen copy does
        not."""
        return thread_values(self.mode, adapter=adapter, dropout=dropout)

    def stack(self, adapters: Sequence[LoraWeights]) -> Stacks:
        """Stack adapters of any ranks, zero-padded to the largest, in the base's dtype."""
        rank, dtype, stacks = max(adapter.rank for adapter in adapters), self.base.dtype, {}
        with torch.no_grad():
            for shape in self.shapes:
                a = self.padded([adapter.A[shape.name].t() for adapter in adapters], rank, 1)
                # Scaled in fp32 and rounded once, as in the update (arithmetic._scaled).
                b = self.padded([adapter.B[shape.name].t() * adapter.scale for adapter in adapters], rank, 0)
                stacks[shape.name] = (a.to(dtype), b.to(dtype))
        return stacks

    def stacked(self, adapters: Sequence[LoraWeights]) -> AbstractContextManager[None]:
        """Apply the adapters to equal consecutive shares of the rows, without gradients."""
        return thread_values(self.mode, stacks=self.stack(adapters))

    @staticmethod
    def padded(parts: Sequence[Tensor], rank: int, dim: int) -> Tensor:
        """Stack [*, r] (dim 1) or [r, *] (dim 0) matrices along a new first axis, zero-padded to ``rank``."""
        padded = [
            part
            if part.shape[dim] == rank
            else F.pad(part, (0, rank - part.shape[1]) if dim else (0, 0, 0, rank - part.shape[0]))
            for part in parts
        ]
        return torch.stack(padded).contiguous()


# -- AdamW ----------------------------------------------------------------------------------------------------


def new_optimizer(weights: Sequence[nn.Parameter], lr: float, config: Config) -> torch.optim.AdamW:
    keys, weight_decay = config.optimizer, config.training.weight_decay
    # On a GPU one kernel, which needs no memory besides the moments and therefore changes all or nothing.
    kernel = {"fused": True} if weights[0].device.type in FUSED else {"foreach": False}
    return torch.optim.AdamW(weights, lr, (keys.beta1, keys.beta2), keys.eps, weight_decay, **kernel)


def apply_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer. If memory runs out before anything has changed, as when the first step allocates moments,
    free torch's cache and try once more. Raises the error if a weight or moment has already changed."""
    fresh, before = not optimizer.state, _versions(optimizer)
    try:
        optimizer.step()
        return
    except (MemoryError, RuntimeError) as error:
        changed = any(_versions(optimizer)[tensor] != version for tensor, version in before.items())
        if changed or not is_out_of_memory(error):
            raise
    if fresh:
        optimizer.state.clear()
    free_cached_memory()
    optimizer.step()


def _versions(optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    # torch counts the in-place changes of each tensor in _version.
    return {tensor: tensor._version for tensor in (*weights, *moments) if isinstance(tensor, Tensor)}


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return host copies of AdamW's moments and step counts as ``<index of the weight>.<name>``; empty before the first
    update."""
    return {
        f"{index}.{name}": torch.as_tensor(value).detach().cpu().clone()
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def load_moments(optimizer: torch.optim.Optimizer, stored: Mapping[str, Tensor]) -> None:
    state = optimizer.state_dict()
    state["state"] = {}
    for key, tensor in stored.items():
        index, _, name = key.partition(".")
        state["state"].setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict(state)


class OptimizerStep:
    """The pending step of one optimizer. ``name``: prefix of its metrics, "" for the policy's."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], lr: float, loss: float, name: str = ""
    ):
        self.optimizer, self.lr, self.loss, self.name = optimizer, lr, loss, name
        self.gradients = [weight.grad for weight in weights if weight.grad is not None]
        norms = [float(gradient.norm()) for gradient in self.gradients]
        self.norm = norms[0] if len(norms) == 1 else math.hypot(*norms)

    def check(self) -> None:
        if not (math.isfinite(self.loss) and math.isfinite(self.norm)):
            of = "of the critic " if self.name else ""
            raise NonFinite(f"loss {self.loss} {of}with gradient norm {self.norm}: the update was not applied")

    def take(self, clip_norm: float) -> dict[str, float]:
        """Clip the gradients to ``clip_norm`` (0: no clipping), change the weights, and return metrics."""
        clipped = clip_norm > 0 and self.norm > clip_norm
        if clipped:
            for gradient in self.gradients:
                # As in torch.nn.utils.clip_grad_norm_, the 1e-6 included.
                gradient.mul_(clip_norm / (self.norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        apply_gradient(self.optimizer)
        logged = {f"optim/{self.name}grad_norm": self.norm, f"optim/{self.name}lr": self.lr}
        return logged if self.name else {**logged, "optim/grad_clipped": clipped}
