"""Updates a policy on one batch in epochs and minibatches, and aggregates the metrics of the step.

With several updates, the importance ratio of the loss is π/π_old, where π_old is the policy before the first of them
(PPO, arXiv 1707.06347): its log-probabilities are computed once and kept on the rollouts. Every update divides its loss
by the denominators of its minibatch, which include groups without signal.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from retrain.algorithms.algorithm import join_by_rollout, samples_of_rollout, training_samples
from retrain.algorithms.credit.rejection_mask import mask_minibatch
from retrain.config.algorithm import AlgorithmSection
from retrain.config.training import Training
from retrain.errors import NonFinite
from retrain.maths.ratios import RATIO_METRICS
from retrain.policy.objective import Objective
from retrain.policy.protocol import Policy
from retrain.policy.update import PROBE_SIZE, without_advantages
from retrain.rng import generator
from retrain.types import CreditedBatch, CreditedRollout, Denominators, Group, Sample, StepBatch, Want


def with_old_logprobs(batch: CreditedBatch, policy: Policy, logprobs: Sequence[np.ndarray] | None) -> CreditedBatch:
    """Return the batch with ``old_logprobs_T``, the policy's log-probabilities before the first of several updates.
    ``logprobs``: these values for all rollouts if they are already computed; None: the trained rollouts are scored."""
    if logprobs is not None:
        return batch.with_fields(batch.rollouts, ({"old_logprobs_T": logprobs_T} for logprobs_T in logprobs))
    trained = batch.trained
    samples = [sample for rollout in trained for sample in samples_of_rollout(rollout)]
    if not samples:
        return batch
    scores = policy.score(samples, frozenset({Want.LOGPROBS})).logprobs
    assert scores is not None, "a policy gives what it is asked for"
    joined = join_by_rollout(scores, trained)
    return batch.with_fields(trained, ({"old_logprobs_T": logprobs_T} for logprobs_T in joined))


def with_trainer_logprobs(batch: CreditedBatch, trainer_logprobs: Sequence[np.ndarray | None]) -> CreditedBatch:
    if not trainer_logprobs:
        return batch
    parts, changes = iter(trainer_logprobs), []
    for rollout in batch.trained:
        logprobs = list(islice(parts, rollout.sequences))
        complete = [part for part in logprobs if part is not None]
        is_complete = bool(logprobs) and len(complete) == len(logprobs)
        changes.append({"old_logprobs_T": np.concatenate(complete)} if is_complete else {})
    return batch.with_fields(batch.trained, changes)


def iter_minibatches(
    batch: CreditedBatch, training: Training, step: int, stream: tuple[int | str, ...], keep_logprobs: bool = False
) -> Iterator[list[StepBatch]]:
    """Yield each epoch over a batch as a list of minibatches, with rollouts in the batch's order.

    Minibatches without trained samples are left out. A batch without trained samples yields one empty minibatch, whose
    ``probe`` compares sampler and trainer. ``keep_logprobs`` requests the trainer's log-probabilities from a single
    update (with several updates, ``old_logprobs_T`` has them).
    """
    samples = {rollout: training_samples(rollout) for rollout in batch.trained}
    flat = [sample for parts in samples.values() for sample in parts]
    is_single = training.num_iterations == 1 and training.minibatches == 1
    if is_single or not flat:
        probe = [] if flat else probe_of(batch.groups)
        yield [StepBatch(flat, batch.denominators, step, stream, probe, keep_logprobs=keep_logprobs)]
        return
    units = _minibatch_units(batch, training)
    for epoch in range(training.num_iterations):
        minibatches = []
        for index, rollouts in enumerate(_dealt(units, training, (*stream, "minibatches", step, epoch))):
            chosen = [sample for rollout in rollouts for sample in samples.get(rollout, ())]
            update = epoch * training.minibatches + index
            minibatches.append(StepBatch(chosen, denominators_of(batch, rollouts), step, stream, update=update))
        yield [minibatch for minibatch in minibatches if minibatch.samples]


def _minibatch_units(batch: CreditedBatch, training: Training) -> list[list[CreditedRollout]]:
    credited = [[rollout for rollout in group.rollouts if rollout.is_credited] for group in batch.groups]
    if training.minibatch_by == "group":
        return [rollouts for rollouts in credited if rollouts]
    return [[rollout] for rollouts in credited for rollout in rollouts]


def _dealt(
    units: Sequence[Sequence[CreditedRollout]], training: Training, stream: tuple[int | str, ...]
) -> list[list[CreditedRollout]]:
    order = generator(*stream).permutation(len(units)) if training.minibatches > 1 else np.arange(len(units))
    parts = np.array_split(order, training.minibatches)
    return [[rollout for unit in sorted(part.tolist()) for rollout in units[unit]] for part in parts]


def denominators_of(batch: CreditedBatch, rollouts: Sequence[CreditedRollout]) -> Denominators:
    sampled = [rollout for rollout in rollouts if len(rollout) > 0]
    return replace(
        batch.denominators,
        tokens=sum(len(r) if r.counted_tokens is None else r.counted_tokens for r in sampled),
        sequences=sum(r.sequences if r.counted_sequences is None else r.counted_sequences for r in sampled),
        action_tokens=sum(map(len, sampled)),
    )


@dataclass(frozen=True)
class MinibatchUpdate:
    """A minibatch and its update's metrics by catalogue key. ``error``: the fault for which the update was skipped."""

    batch: StepBatch
    metrics: Mapping[str, float | None]
    error: NonFinite | None = None
    trainer_logprobs: Sequence[np.ndarray | None] = ()

    def weight(self, key: str) -> float:
        """Return the weight of this update in the mean of the metric ``key``: its number of trained tokens, of action
        tokens, or of completions."""
        samples = self.batch.samples
        if key in OF_COMPLETIONS:
            return float(len(samples))
        return float(sum((s.action_mask if key in OF_ACTIONS else s.loss_mask).sum() for s in samples))


@dataclass(frozen=True)
class UpdatePlan:
    """Update settings of a run. ``per_step``: number of updates with each batch. ``learning_rate`` maps the number of
    an update, counted over the run, to its rate. ``masked_by``: settings of the M2PO mask, which is computed before
    each update; None without this mask."""

    objective: Objective
    per_step: int
    learning_rate: Callable[[int], float]
    masked_by: AlgorithmSection | None


def update_minibatch(batch: StepBatch, policy: Policy, plan: UpdatePlan) -> MinibatchUpdate:
    """Take one optimizer step; skip it when loss or gradient is not finite."""
    lr, masked = plan.learning_rate(batch.step * plan.per_step + batch.update), dict[str, float]()
    if plan.masked_by is not None and batch.samples:
        batch, masked = mask_minibatch(batch, policy, plan.masked_by)
    try:
        result = policy.update(batch, plan.objective, lr)
        metrics = {**result.metrics, **masked, "optim/skipped": False}
        return MinibatchUpdate(batch, metrics, trainer_logprobs=result.trainer_logprobs)
    except NonFinite as error:
        absent = dict.fromkeys(("loss", "reported_loss", "optim/grad_norm", "optim/grad_clipped", *RATIO_METRICS))
        metrics = {**absent, "optim/lr": lr, "num_datums": len(batch.samples), "optim/skipped": True}
        return MinibatchUpdate(batch, metrics, error)


def learning_rate(schedule: str, step: int, max_steps: int, warmup_steps: int, base: float) -> float:
    """Return the learning rate of 0-based ``step``, which counts updates.

    Warm-up rises linearly from base/warmup_steps (step 0) to ``base`` (step ``warmup_steps - 1``). Then ``linear`` and
    ``cosine`` fall and would reach 0 at ``max_steps``: the last step still trains.
    """
    if step < warmup_steps:
        return base * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return base
    progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
    return base * (1.0 - progress) if schedule == "linear" else base * 0.5 * (1.0 + math.cos(math.pi * progress))


def exceeds_target_kl(updates: Sequence[MinibatchUpdate], target_kl: float | None) -> bool:
    approximate_kl = _mean(updates, "policy/approxkl_avg")
    return target_kl is not None and approximate_kl is not None and approximate_kl > target_kl


SUMMED = ("timing_", "num_datums")  # Prefixes of metrics that are summed over updates
ANY = ("optim/grad_clipped", "optim/skipped")  # Metrics that are true for a step if true for any of its updates
# Metrics that are averaged over updates. Metrics in none of these tuples are averaged over trained tokens
PER_UPDATE = ("loss", "reported_loss", "optim/lr", "optim/grad_norm", "optim/critic_lr", "optim/critic_grad_norm")
# Metrics that are averaged over all action tokens, because each of them has a value
OF_ACTIONS = ("loss/value_avg", "val/clipfrac_avg", "rejected_tokens_frac")
OF_COMPLETIONS = ("objective/kl", "objective/non_score_reward", "rejected_sequences_frac")  # Averaged over completions
MAXIMA = {"optim/lr": "optim/lr_max", "optim/grad_norm": "optim/grad_norm_max"}


def aggregate_metrics(updates: Sequence[MinibatchUpdate], epochs: int) -> dict[str, float | None]:
    """Return the metrics of a step with several updates: means over trained tokens or over updates, and extremes."""
    keys = dict.fromkeys(key for update in updates for key in update.metrics)
    row = {key: _aggregate(updates, key) for key in keys}
    row["num_datums"] = round((row.get("num_datums") or 0) / max(1, epochs))
    row["val/ratio_var"] = _ratio_variance(updates)
    for key, largest in MAXIMA.items():
        row[largest] = max(_values(updates, key), default=None)
    clipped = [bool(value) for value in _values(updates, "optim/grad_clipped")]
    row["optim/grad_clipped_frac"] = sum(clipped) / len(clipped) if clipped else None
    row["optim/updates"] = sum(bool(u.batch.samples) and not u.metrics["optim/skipped"] for u in updates)
    return row


def _aggregate(updates: Sequence[MinibatchUpdate], key: str) -> float | None:
    values = _values(updates, key)
    if not values:
        return None
    if key in ANY:
        return any(values)
    if key.startswith(SUMMED):
        return sum(values)
    if key.endswith("_min"):
        return min(values)
    if key.endswith("_max"):
        return max(values)
    if key in PER_UPDATE:
        return sum(values) / len(values)
    return _mean(updates, key)


def _values(updates: Sequence[MinibatchUpdate], key: str) -> list[float]:
    return [value for update in updates if (value := update.metrics.get(key)) is not None]


def _mean(updates: Sequence[MinibatchUpdate], key: str) -> float | None:
    """Return the weighted mean of a metric; if all weights are 0, as for a probe, the mean over updates."""
    pairs = _weighted(updates, key)
    if not any(weight for weight, _ in pairs):
        pairs = [(1.0, value) for _, value in pairs]
    total = math.fsum(weight for weight, _ in pairs)
    return math.fsum(weight * value for weight, value in pairs) / total if total else None


def _ratio_variance(updates: Sequence[MinibatchUpdate]) -> float | None:
    key = "val/ratio"
    mean, inner = _mean(updates, key), _mean(updates, "val/ratio_var")
    if mean is None or inner is None:
        return None
    pairs = _weighted(updates, key)
    total = math.fsum(weight for weight, _ in pairs)
    # Law of total variance: the mean of the updates' variances plus the variance of their means.
    return inner + math.fsum(weight * (value - mean) ** 2 for weight, value in pairs) / total


def _weighted(updates: Sequence[MinibatchUpdate], key: str) -> list[tuple[float, float]]:
    return [(u.weight(key), float(value)) for u in updates if (value := u.metrics.get(key)) is not None]


def probe_of(groups: Sequence[Group]) -> list[Sample]:
    """Return up to ``PROBE_SIZE`` rollouts without advantages: the first of every group, then the second, and so on.

    The choice depends only on the order of prompts, so that a resumed step scores the same rollouts.
    """
    longest = max((len(group.rollouts) for group in groups), default=0)
    chosen = (
        group.rollouts[i]
        for i in range(longest)
        for group in groups
        if i < len(group.rollouts) and len(group.rollouts[i])
    )
    return [without_advantages(samples_of_rollout(rollout)[-1]) for rollout in islice(chosen, PROBE_SIZE)]
