"""The updates of one batch: passes over it, each in minibatches, and what the row says of all of them together.

With several updates the importance ratio of the loss is π/π_old, π_old being the trainer itself before the first of
them (PPO, arXiv 1707.06347): its log-probabilities are computed once and kept on the rollouts. Every update divides its
loss by what its own minibatch counts, groups without signal included.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.algorithms.protocol import Credit
from retrain.config.training import Training
from retrain.errors import NonFinite
from retrain.policy.protocol import Policy, TrainBatch, Want, probe_of
from retrain.rng import generator
from retrain.types import Group, samples_of_rollout


def note_old_logprobs(policy: Policy, groups: Sequence[Group]) -> None:
    """Have the policy score the rollouts that train, where that has not been done: what it is before the updates."""
    trained = [rollout for group in groups if group.discarded is None for rollout in group.rollouts]
    missing = [one for one in trained if one.token_advantages_T is not None and one.old_logprobs_T is None]
    samples = [sample for rollout in missing for sample in samples_of_rollout(rollout)]
    if not samples:
        return
    scores = policy.score(samples, frozenset({Want.LOGPROBS})).logprobs
    assert scores is not None, "a policy gives what it is asked for"
    parts = iter(scores)
    for rollout in missing:
        own = [next(parts) for _ in range(rollout.sequences)]
        rollout.old_logprobs_T = np.concatenate([np.zeros(0), *own])


def passes(
    groups: Sequence[Group],
    credit: Credit,
    training: Training,
    step: int,
    stream: tuple[int | str, ...],
    keep_logprobs: bool = False,
) -> Iterator[list[TrainBatch]]:
    """The passes over a batch, each as its minibatches; the rollouts of a minibatch stand in the batch's order.

    A minibatch without anything to train on is left out. Where the whole batch has nothing, there is one pass with one
    empty batch, whose ``probe`` compares sampler and trainer. With ``keep_logprobs`` the rollouts keep after a single
    update what the trainer found of their tokens (of several, ``old_logprobs_T`` is that).
    """
    trained = [rollout for group in groups if group.discarded is None for rollout in group.rollouts]
    flat = {one: samples_of_rollout(one) for one in trained if one.token_advantages_T is not None}
    if not (training.several_updates and any(flat.values())):
        samples = [sample for own in flat.values() for sample in own]
        probe = [] if samples else probe_of(groups)
        yield [TrainBatch(samples, credit.denominators, step, stream, probe, keep_logprobs=keep_logprobs)]
        for rollout, own in flat.items():
            parts = [sample.trainer_logprobs for sample in own if sample.trainer_logprobs is not None]
            if own and len(parts) == len(own):
                rollout.trainer_logprobs_T = np.concatenate(parts)
        return
    counted = [[rollout for rollout in group.rollouts if rollout.token_advantages_T is not None] for group in groups]
    whole = training.minibatch_by == "group"
    units = [own for own in counted if own] if whole else [[rollout] for own in counted for rollout in own]
    for iteration in range(training.num_iterations):
        order = np.arange(len(units))
        if training.minibatches > 1:
            order = generator(*stream, "minibatches", step, iteration).permutation(len(units))
        minibatches = []
        for i, part in enumerate(np.array_split(order, training.minibatches)):
            own = [rollout for unit in sorted(part.tolist()) for rollout in units[unit]]
            samples = [sample for rollout in own for sample in flat.get(rollout, ())]
            update = iteration * training.minibatches + i
            minibatches.append(TrainBatch(samples, credit.denominators_of(own), step, stream, update=update))
        yield [batch for batch in minibatches if batch.samples]


@dataclass(frozen=True)
class Taken:
    """One update with its numbers under the catalogue's keys; ``error`` is why it was left out."""

    batch: TrainBatch
    numbers: Mapping[str, Any]
    error: NonFinite | None = None

    def weight(self, key: str) -> float:
        """What it counts in a mean of this number: the tokens that it trained on, the action tokens that a critic has
        a value for, or its completions."""
        samples = self.batch.samples
        if key in OF_COMPLETIONS:
            return float(len(samples))
        return float(sum((s.action_mask if key in OF_ACTIONS else s.loss_mask).sum() for s in samples))


def far_enough(taken: Sequence[Taken], target_kl: float | None) -> bool:
    """Whether the policy has moved so far from where the batch began that no further pass is made."""
    moved = _mean(taken, "policy/approxkl_avg")
    return target_kl is not None and moved is not None and moved > target_kl


SUMMED = ("timing_", "num_datums")  # Prefixes of metrics that are summed over updates
ANY = ("optim/grad_clipped", "optim/skipped")  # Metrics that are 1 for a step if they are for one of its updates
PER_UPDATE = ("loss", "reported_loss", "optim/lr", "optim/grad_norm", "optim/critic_lr", "optim/critic_grad_norm")
"""Means over updates. All numbers that are named nowhere here are means over trained tokens."""
OF_ACTIONS = ("loss/value_avg", "val/clipfrac_avg", "rejected_tokens_frac")
"""Means over action tokens, all of which have a value."""
OF_COMPLETIONS = ("objective/kl", "objective/non_score_reward", "rejected_sequences_frac")  # Means over completions
MAXIMA = {"optim/lr": "optim/lr_max", "optim/grad_norm": "optim/grad_norm_max"}


def together(taken: Sequence[Taken], passes_made: int) -> dict[str, Any]:
    """The numbers of a step with several updates: means over trained tokens or over updates, and the extremes."""
    keys = dict.fromkeys(key for each in taken for key in each.numbers)
    row = {key: _joined(taken, key) for key in keys}
    row["num_datums"] = round((row.get("num_datums") or 0) / max(1, passes_made))
    row["val/ratio_var"] = _ratio_variance(taken)
    for key, largest in MAXIMA.items():
        row[largest] = max(_values(taken, key), default=None)
    clipped = [bool(value) for value in _values(taken, "optim/grad_clipped")]
    row["optim/grad_clipped_frac"] = sum(clipped) / len(clipped) if clipped else None
    row["optim/updates"] = sum(bool(each.batch.samples) and not each.numbers["optim/skipped"] for each in taken)
    return row


def _joined(taken: Sequence[Taken], key: str) -> Any:
    values = _values(taken, key)
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
    return _mean(taken, key)


def _values(taken: Sequence[Taken], key: str) -> list[Any]:
    return [value for each in taken if (value := each.numbers.get(key)) is not None]


def _mean(taken: Sequence[Taken], key: str) -> float | None:
    """Over whatever this number is a mean of; where no update has anything of it, as with a probe, over updates."""
    known = [(each.weight(key), float(each.numbers[key])) for each in taken if each.numbers.get(key) is not None]
    if not any(weight for weight, _ in known):
        known = [(1.0, value) for _, value in known]
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight * value for weight, value in known) / total if total else None


def _ratio_variance(taken: Sequence[Taken]) -> float | None:
    """The variance over the trained tokens of all updates, from means and variances of each."""
    key = "val/ratio"
    mean, inner = _mean(taken, key), _mean(taken, "val/ratio_var")
    if mean is None or inner is None:
        return None
    known = [each for each in taken if each.numbers.get(key) is not None]
    total = math.fsum(each.weight(key) for each in known)
    return inner + math.fsum(each.weight(key) * (each.numbers[key] - mean) ** 2 for each in known) / total
