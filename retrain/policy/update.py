"""One optimizer step of one lane: accumulated gradients, a check that they are finite, clipping and AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from retrain.device import is_out_of_memory
from retrain.errors import NonFinite
from retrain.maths.ratios import MISMATCH_METRICS, RATIO_METRICS, Sums, loss_metrics
from retrain.policy.gradient import AccumulationResult, GradientAccumulator, PhaseTimer, UpdateContext
from retrain.policy.head import ValueHead
from retrain.policy.lora import Adapter
from retrain.policy.objective import NotFiniteError, Objective, ValueTerm
from retrain.types import Sample, TrainBatch, UpdateResult

FUSED = ("cuda",)  # Devices on which AdamW is one kernel
PROBE_SIZE = 4  # Rollouts on which sampler and trainer are compared in a step without signal: one small forward pass
UNTRAINED = {"num_datums": 0, "loss": 0.0, "reported_loss": 0.0, **dict.fromkeys(RATIO_METRICS)}
"""Metrics of the policy where no token is in its loss."""
MEANS = {"loss/policy_avg": "policy_loss", "policy/entropy_avg": "entropy"}
"""Metrics that are means over the trained tokens, and their sums, which only some objectives have."""


@dataclass
class PendingUpdate:
    """Gradients and metrics of one update, before any weight has changed."""

    context: UpdateContext
    adapter: Adapter
    optimizer: torch.optim.Optimizer
    batch: TrainBatch
    objective: Objective
    lr: float

    def __post_init__(self) -> None:
        self.metrics: dict[str, float | None] = {"optim/lr": self.lr, "num_datums": len(self.batch.samples)}
        self.steps: list[Step] = []
        self.timer = PhaseTimer(self.context.base.device)
        self.logprobs: dict[Sample, np.ndarray] = {}

    def accumulate_policy(self) -> None:
        """Accumulate the policy's gradient over the samples with a token in the loss."""
        trained = [sample for sample in self.batch.samples if sample.loss_mask.any()]
        if not trained:
            self.compare_with_sampler(self.batch.probe)
            return
        self.add_policy(self.accumulate(self.adapter, self.objective.without(ValueTerm), trained))

    def compare_with_sampler(self, probe: Sequence[Sample]) -> None:
        """Compare sampler and trainer by forward passes over ``probe`` instead of training the policy."""
        self.metrics |= UNTRAINED
        if not probe:
            return
        sums = self.accumulate(self.adapter, self.objective.without_gradient(), probe).sums
        ratios = loss_metrics(sums)
        self.metrics |= {key: ratios[key] for key in MISMATCH_METRICS}
        self.metrics |= kl_metrics(sums, self.objective.kl_coef, len(probe))

    def apply(self, grad_clip_norm: float) -> UpdateResult:
        """Step the optimizers. Raises NonFinite, with every weight unchanged, if a gradient is not finite."""
        if not self.timer.microbatches:
            return UpdateResult(self.metrics)
        for step in self.steps:
            step.check()
        self.timer.begin()
        for step in self.steps:
            self.metrics |= step.take(grad_clip_norm)
        self.timer.lap("weight_sync_trainer")
        logprobs = [self.logprobs.get(sample) for sample in self.batch.samples] if self.batch.keep_logprobs else []
        return UpdateResult(self.metrics | self.timer.metrics(), logprobs)

    def accumulate(
        self,
        adapter: Adapter,
        objective: Objective,
        samples: Sequence[Sample],
        head: ValueHead | None = None,
        frozen: bool = False,
    ) -> AccumulationResult:
        """Accumulate the gradient of ``objective``. Raises NonFinite when a score of a trained token is not finite."""
        accumulator = GradientAccumulator(self.context, self.batch, adapter, objective, head, frozen)
        try:
            result = accumulator.accumulate(samples)
        except NotFiniteError as error:
            raise NonFinite(f"{error}: the update was not applied") from error
        self.timer.add(result.timer)
        self.logprobs |= result.logprobs
        return result

    def add_policy(self, result: AccumulationResult) -> None:
        """Add the policy's step, whose gradient ``result`` describes."""
        self.metrics |= policy_metrics(result.sums, self.objective.kl_coef, len(self.batch.samples))
        self.metrics |= {"loss": result.loss, "reported_loss": result.loss}
        self.steps.append(Step(self.optimizer, [self.adapter.flat], self.lr, result.loss))


def without_advantages(sample: Sample) -> Sample:
    """Return the sample with an advantage of 0 for every sampled token; all of them train."""
    return replace(sample, advantages=np.zeros(len(sample)), loss_mask=sample.action_mask)


def policy_step(update: PendingUpdate, grad_clip_norm: float = 1.0) -> UpdateResult:
    """Take one optimizer step of a policy without a critic.

    Without samples (no group had signal) no weight changes and the loss is 0; sampler and trainer are then compared on
    ``batch.probe``. Raises NonFinite when a loss or gradient is not finite and RunFailed when one sample does not fit
    in memory; the weights are then unchanged.
    """
    update.accumulate_policy()
    return update.apply(grad_clip_norm)


def batch_gradient(
    context: UpdateContext, adapter: Adapter, batch: TrainBatch, objective: Objective, head: ValueHead | None = None
) -> Tensor:
    """Return the adapter's gradient before clipping, [D] in fp32; 0 where nothing trains.

    ``head`` is that of a critic on the same adapter, whose warm-up is ignored. No weight, optimizer or random stream
    changes. Raises as ``policy_step``.
    """
    assert adapter.flat.grad is not None
    samples = batch.samples
    if head is None:
        objective = objective.without(ValueTerm)
        samples = [sample for sample in samples if sample.loss_mask.any()]
    if not samples:
        return torch.zeros_like(adapter.flat.grad)
    device = context.base.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            GradientAccumulator(context, batch, adapter, objective, head).accumulate(samples)
    except NotFiniteError as error:
        raise NonFinite(f"{error}: there is no gradient") from error
    gradient = adapter.flat.grad.clone()
    if not bool(torch.isfinite(gradient).all()):
        raise NonFinite("the gradient is not finite")
    return gradient


def policy_metrics(sums: Sums, kl_coef: float, sequences: int) -> dict[str, float | None]:
    metrics, tokens = loss_metrics(sums), float(sums["tokens"])
    if tokens:
        metrics |= {key: float(sums[name]) / tokens for key, name in MEANS.items() if name in sums}
    if float(sums.get("taught_tokens", 0.0)):
        metrics["distillation/divergence"] = float(sums["divergence"] / sums["taught_tokens"])
    return metrics | kl_metrics(sums, kl_coef, sequences)


def kl_metrics(sums: Sums, kl_coef: float, sequences: int) -> dict[str, float]:
    """Return the KL divergence to the base per token and per sequence, and its penalty on a completion's reward."""
    if "kl" not in sums or sums["tokens"] == 0:
        return {}
    kl = float(sums["kl"])
    metrics = {"kl": kl / float(sums["tokens"]), "objective/kl": float(sums["sequence_kl"] / sums["sequences"])}
    if kl_coef:
        metrics["objective/non_score_reward"] = 0.0 - kl_coef * kl / sequences  # not a negation: no −0.0 in the rows
    return metrics


# -- AdamW ----------------------------------------------------------------------------------------------------


def new_optimizer(
    weights: Sequence[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW over flat master weights."""
    # On a GPU one kernel, which needs no memory besides the moments and therefore changes all or nothing.
    fused = weights[0].device.type in FUSED
    return torch.optim.AdamW(
        weights, lr, betas, eps, weight_decay, fused=fused or None, foreach=None if fused else False
    )


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


def _versions(optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    """Return how often each weight and moment has been changed in place."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return {tensor: tensor._version for tensor in (*weights, *moments) if isinstance(tensor, Tensor)}


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copy AdamW's moments and step counts to the host, as ``<index of the weight>.<name>``; empty before the first
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

    def take(self, clip_norm: float) -> dict[str, float]:
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
