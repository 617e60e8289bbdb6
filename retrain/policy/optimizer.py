"""AdamW over flat weights, the step of one optimizer (norm, check, clipping, change), and learning-rate schedules."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from retrain.device import is_out_of_memory
from retrain.errors import NonFinite

FUSED = ("cuda",)  # Devices on which AdamW is one kernel
LR_SCHEDULES = ("constant", "linear", "cosine")


def new_optimizer(
    weights: Sequence[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW over flat master weights."""
    # On a GPU one kernel, which needs no memory besides the moments and therefore changes all or nothing.
    kind: dict[str, Any] = {"fused": True} if weights[0].device.type in FUSED else {"foreach": False}
    return torch.optim.AdamW(weights, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **kind)


def apply_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer. If memory runs out before anything was changed, as when the first step allocates moments,
    free torch's cache and try once more."""
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
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    optimizer.step()


def _versions(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """Return how often each weight and moment has been changed in place."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return {tensor: tensor._version for tensor in (*weights, *moments) if isinstance(tensor, torch.Tensor)}


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copy AdamW's moments and step counts to the host, as ``<index of the weight>.<name>``; empty before the first
    update."""
    return {
        f"{index}.{name}": torch.as_tensor(value).detach().cpu().clone()
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def load_moments(optimizer: torch.optim.Optimizer, stored: Mapping[str, torch.Tensor]) -> None:
    state = optimizer.state_dict()
    state["state"] = {}
    for key, tensor in stored.items():
        index, _, name = key.partition(".")
        state["state"].setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict(state)


class Step:
    """The pending step of one optimizer; ``name`` is the prefix of its metrics, "" for the policy's."""

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

    def take(self, clip_norm: float) -> dict[str, Any]:
        """Clip the gradients to ``clip_norm`` (0: never), change the weights, and return metrics."""
        clipped = clip_norm > 0 and self.norm > clip_norm
        if clipped:
            for gradient in self.gradients:
                gradient.mul_(clip_norm / (self.norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        apply_gradient(self.optimizer)
        logged = {f"optim/{self.name}grad_norm": self.norm, f"optim/{self.name}lr": self.lr}
        return logged if self.name else {**logged, "optim/grad_clipped": clipped}


def learning_rate(schedule: str, step: int, max_steps: int, warmup_steps: int, base: float) -> float:
    """Return the learning rate of 0-based ``step``.

    Warm-up rises linearly and reaches ``base`` at step ``warmup_steps - 1``; its first step is base/warmup_steps,
    not 0. After it ``linear`` and ``cosine`` fall so that they would reach 0 at ``max_steps``: the last step still
    trains. Raises ValueError for an unknown schedule or a step outside [0, max_steps].
    """
    if schedule not in LR_SCHEDULES:
        raise ValueError(f"unknown learning-rate schedule {schedule!r}: one of {', '.join(LR_SCHEDULES)}")
    if not 0 <= step <= max_steps:
        raise ValueError(f"step {step} is outside [0, max_steps = {max_steps}]")
    if step < warmup_steps:
        return base * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return base
    progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
    return base * (1.0 - progress) if schedule == "linear" else base * 0.5 * (1.0 + math.cos(math.pi * progress))
