"""One optimizer step of one lane: accumulated gradients, a check that they are finite, clipping and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from retrain.errors import NonFinite
from retrain.maths.ratios import MISMATCH_METRICS, RATIO_METRICS, Sums, loss_metrics
from retrain.policy.critic import Critic, ValueHead
from retrain.policy.gradient import AccumulationResult, GradientAccumulator, PhaseTimer, UpdateContext
from retrain.policy.lora import Adapter
from retrain.policy.objective import Objective
from retrain.policy.optimizer import Step
from retrain.policy.terms import NotFiniteError, ValueTerm
from retrain.types import Sample, TrainBatch, UpdateResult, without_advantages

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
        self.metrics: dict[str, Any] = {"optim/lr": self.lr, "num_datums": len(self.batch.samples)}
        self.steps: list[Step] = []
        self.timer = PhaseTimer(self.context.base.device)
        self.logprobs: dict[Sample, np.ndarray] = {}

    def accumulate_policy(self) -> None:
        """Accumulate the policy's gradient over the samples with a token in the loss."""
        trained = [sample for sample in self.batch.samples if sample.loss_mask.any()]
        if not trained:
            self.compare_with_sampler(self.batch.probe)
            return
        self._add_policy(self._accumulate(self.adapter, self.objective.without(ValueTerm), trained))

    def accumulate_critic(self, critic: Critic) -> None:
        """Accumulate the critic's gradient; of its value head alone where it reads the policy's adapter."""
        if not self.batch.samples:
            return
        adapter, frozen = critic.adapter or self.adapter, critic.adapter is None
        objective = self.objective.only(ValueTerm)
        self._add_critic(critic, self._accumulate(adapter, objective, self.batch.samples, critic.head, frozen))

    def accumulate_both(self, critic: Critic) -> None:
        """Accumulate the gradients of the policy and of a critic on the policy's adapter, in one pass."""
        result = self._accumulate(self.adapter, self.objective, self.batch.samples, critic.head)
        if not any(sample.loss_mask.any() for sample in self.batch.samples):
            self.metrics |= UNTRAINED
        self._add_policy(result)
        self._add_critic(critic, result)

    def compare_with_sampler(self, probe: Sequence[Sample]) -> None:
        """Compare sampler and trainer by forward passes over ``probe`` instead of training the policy."""
        self.metrics |= UNTRAINED
        if not probe:
            return
        sums = self._accumulate(self.adapter, self.objective.without_gradient(), probe).sums
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

    def _accumulate(
        self,
        adapter: Adapter,
        objective: Objective,
        samples: Sequence[Sample],
        head: ValueHead | None = None,
        frozen: bool = False,
    ) -> AccumulationResult:
        accumulator = GradientAccumulator(self.context, self.batch, adapter, objective, head, frozen)
        try:
            result = accumulator.accumulate(samples)
        except NotFiniteError as error:
            raise NonFinite(f"{error}: the update was not applied") from error
        self.timer.add(result.timer)
        self.logprobs |= result.logprobs
        return result

    def _add_policy(self, result: AccumulationResult) -> None:
        self.metrics |= policy_metrics(result.sums, self.objective.kl_coef, len(self.batch.samples))
        self.metrics |= {"loss": result.loss, "reported_loss": result.loss}
        self.steps.append(Step(self.optimizer, [self.adapter.flat], self.lr, result.loss))

    def _add_critic(self, critic: Critic, result: AccumulationResult) -> None:
        self.metrics |= value_metrics(result.sums)
        self.steps.append(critic.step(self.lr, result.loss))


def policy_step(update: PendingUpdate, grad_clip_norm: float = 1.0) -> UpdateResult:
    """Take one optimizer step of a policy without a critic.

    Without samples (no group had signal) no weight changes and the loss is 0; sampler and trainer are then compared on
    ``batch.probe``. Raises NonFinite when a loss or gradient is not finite and RunFailed when one sample does not fit
    in memory; the weights are then unchanged.
    """
    update.accumulate_policy()
    return update.apply(grad_clip_norm)


def critic_step(update: PendingUpdate, critic: Critic, grad_clip_norm: float = 1.0) -> UpdateResult:
    """Take one optimizer step of a policy and one of its critic on the same samples, after accumulating both gradients,
    so that an error (``policy_step``) leaves all weights unchanged."""
    samples = update.batch.samples
    if update.batch.step < critic.warmup_steps:
        update.compare_with_sampler([without_advantages(sample) for sample in samples[:PROBE_SIZE]])
        update.accumulate_critic(critic)
    elif critic.adapter is None and samples:
        update.accumulate_both(critic)
    else:
        update.accumulate_policy()
        update.accumulate_critic(critic)
    update.metrics.pop("objective/kl", None)  # the credit step measures it over all completions
    return update.apply(grad_clip_norm)


def batch_gradient(
    context: UpdateContext, adapter: Adapter, batch: TrainBatch, objective: Objective, *, critic: Critic | None = None
) -> torch.Tensor:
    """Return the adapter's gradient before clipping, [D] in fp32; 0 where nothing trains.

    A critic's warm-up is ignored. No weight, optimizer or random stream changes. Raises as ``policy_step``.
    """
    assert adapter.flat.grad is not None
    if critic is not None and critic.adapter is None:
        accumulator = GradientAccumulator(context, batch, adapter, objective, critic.head)
        samples = batch.samples
    else:
        accumulator = GradientAccumulator(context, batch, adapter, objective.without(ValueTerm))
        samples = [sample for sample in batch.samples if sample.loss_mask.any()]
    if not samples:
        return torch.zeros_like(adapter.flat.grad)
    device = context.base.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            accumulator.accumulate(samples)
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


def value_metrics(sums: Sums) -> dict[str, float]:
    tokens = float(sums["value_tokens"])
    return {
        "loss/value_avg": float(sums["value_loss"]) / tokens,
        "val/clipfrac_avg": float(sums["value_clipped"]) / tokens,
    }
