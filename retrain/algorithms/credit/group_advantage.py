"""Episode advantages: one number per completion or turn, from the rewards of its group, and their spread over tokens.

All modes subtract the group's mean, r_i − r̄, and differ in the scale: none (Dr. GRPO), the group's standard deviation
(GRPO), N/(N−1) (RLOO), the group's mean (MaxRL), the batch's token-weighted standard deviation (REINFORCE++). The scale
decides which objective is maximised: with success probability p the expected weight on ∇p is 1 for RLOO, (N−1)/N for
Dr. GRPO and (1 − (1−p)^(N−1))/p for MaxRL, a truncated maximum likelihood.

With ``turn_credit = "turn"``, turn t of a rollout has the discounted return G_t = Σ_{k≥t} γ^(k−t) r_k. It is compared
with G_t of the group's other rollouts that reached turn t; a turn that no other rollout reached has the advantage 0
(turn-level group-relative advantages; arXiv 2505.11821 is related).

With ``turn_credit = "state"`` (GiGPO, arXiv 2505.10978) whole episodes are compared. In addition, G_t is compared among
all turns of the group that began with the same observation (state), also turns of one rollout. Where a rollout reaches
a state several times, published code counts one turn or all of them; here all count. A state that occurs only once adds
nothing.

The last axis of ``rewards_N`` is the group; leading axes are batched, so [N] and [P, N] both work. Results are float64
and carry no gradient. Rewards that differ by less than 1e-8 (relative to the largest, absolute below 1) count as equal:
float noise must not become an advantage.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from retrain.algorithms.algorithm import CreditStep, StepContext
from retrain.config.modes import Advantage, Named
from retrain.errors import PluginError, RunFailed
from retrain.maths.arrays import plugin_name
from retrain.maths.shapes import Doubles_B, Doubles_PN, Floats_B, Rewards_PN, Values_B, of_shape
from retrain.types import (
    Action,
    CreditedBatch,
    CreditedGroup,
    CreditedRollout,
    Denominators,
    Problem,
    RewardResult,
    Rollout,
)

EQUAL_REWARDS = 1e-8
GRPO_EPSILON = 1e-6  # As in verl's compute_grpo_outcome_advantage

Formula = Callable[[Rewards_PN], Doubles_PN]


@dataclass(frozen=True)
class GroupContext:
    """The group's problem and its graded completions, for advantage plug-ins."""

    problem: Problem
    completions: Sequence[Action]
    rewards: Sequence[RewardResult]


@dataclass(frozen=True)
class ComparedRollouts:
    """Rollouts, or turns of rollouts, whose ``returns`` are compared."""

    group: CreditedGroup
    rollouts: list[CreditedRollout]
    returns: list[float]
    turns: list[int] | None = None  # Turn of each entry (rollouts may repeat); None: whole rollouts
    weight: float = 1.0  # Factor of the advantage

    @property
    def places(self) -> list[int | None]:
        return [None] * len(self.rollouts) if self.turns is None else [*self.turns]

    @property
    def actions(self) -> list[Action]:
        return [rollout.turns[-1 if turn is None else turn].action for rollout, turn in self._pairs()]

    @property
    def tokens(self) -> list[int]:
        return [len(rollout if turn is None else rollout.turns[turn].action) for rollout, turn in self._pairs()]

    def _pairs(self) -> Iterator[tuple[CreditedRollout, int | None]]:
        return zip(self.rollouts, self.places, strict=True)


@dataclass(frozen=True)
class TurnCredit:
    discount: float  # Per turn
    state_weight: float | None = None  # GiGPO's ω; None: compare turns by number, not by state


def comparisons(group: CreditedGroup, by: TurnCredit | None = None) -> Iterator[ComparedRollouts]:
    """Yield the comparisons of a group's rollouts that have a reward; those of whole episodes first."""
    rewarded = [rollout for rollout in group.rollouts if rollout.has_reward and rollout.turns]
    if by is None or by.state_weight is not None:
        yield ComparedRollouts(group, rewarded, [rollout.reward.total_reward or 0.0 for rollout in rewarded])
    if by is None:
        return
    alike: dict[object, list[tuple[CreditedRollout, int, float]]] = {}
    for rollout in rewarded:
        for turn, value in enumerate(returns_to_go(rollout, by.discount)):
            place = turn if by.state_weight is None else tuple(rollout.turns[turn].observation_ids)
            alike.setdefault(place, []).append((rollout, turn, value))
    for here in alike.values():
        rollouts, turns, values = (list(part) for part in zip(*here, strict=True))
        yield ComparedRollouts(group, rollouts, values, turns, by.state_weight or 1.0)  # GiGPO's ω


def returns_to_go(rollout: Rollout, discount: float) -> list[float]:
    returns, later = [], 0.0
    for reward in reversed(turn_rewards(rollout)):
        later = reward + discount * later  # G_t = r_t + γ·G_{t+1}
        returns.append(later)
    return returns[::-1]


def turn_rewards(rollout: Rollout) -> list[float]:
    """Return the reward of each turn; the part of the total that no turn received is added to the last turn."""
    rewards = [turn.reward or 0.0 for turn in rollout.turns]
    rewards[-1] += (rollout.reward.total_reward or 0.0) - math.fsum(rewards)
    return rewards


def add_advantage(rollout: CreditedRollout, turn: int | None, value: float) -> CreditedRollout:
    """Return the rollout with the advantage ``value``. With ``turn``, ``value`` is added to that turn's advantage, and
    the rollout's advantage is then the mean over tokens."""
    if turn is None:
        return replace(rollout, advantage=value)
    before = rollout.turn_advantages
    if before is None:
        # With ``turn_credit = "state"`` the episode advantage comes first and applies to every turn.
        start = rollout.advantage if math.isfinite(rollout.advantage) else 0.0
        before = (start,) * len(rollout.turns)
    advantages = tuple(part + value if index == turn else part for index, part in enumerate(before))
    pairs = zip(advantages, rollout.turns, strict=True)
    mean = sum(part * len(exchange.action) for part, exchange in pairs) / max(1, len(rollout))
    return replace(rollout, turn_advantages=advantages, advantage=mean)


def has_signal(group: CreditedGroup) -> bool:
    parts = (one.turn_advantages or (one.advantage,) for one in group.rollouts if math.isfinite(one.advantage))
    return any(value != 0 for part in parts for value in part)


@dataclass(frozen=True)
class GroupAdvantage(CreditStep):
    """Computes advantages from the rewards of each group, by rollout or (``turn_credit``) by turn, with the ``formula``
    of a built-in ``mode`` or a user's function ``mode``. ``facts``: the mode's row in ``config.modes``;
    ``reward_name``: the reward in messages.

    Rollouts without a reward are excluded and get NaN. Some modes are whitened over the batch. A group with only zero
    advantages is discarded as ``zero_advantage``, one without rewards as ``no_reward``. Raises RunFailed when the mode
    is not defined for a reward.
    """

    mode: Named
    facts: Advantage
    formula: Formula | None = None
    turn_credit: TurnCredit | None = None
    reward_name: str = "reward"

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        facts, rated = self.facts, list[tuple[ComparedRollouts, list[float]]]()
        for group in batch.groups:
            for comparison in comparisons(group, self.turn_credit):
                # A turn compared with itself alone has no baseline.
                smallest = max(facts.smallest_group, 1 if comparison.turns is None else 2)
                if len(comparison.rollouts) >= smallest:
                    rated.append((comparison, self._advantages(comparison)))
                elif comparison.turns is not None:  # nothing to compare this turn with
                    rated.append((comparison, [0.0] * len(comparison.rollouts)))
        if facts.whitened and rated:
            rated = _whitened(rated)
        credited = {rollout: rollout for rollout in batch.rollouts}
        for comparison, values in rated:
            for rollout, turn, value in zip(comparison.rollouts, comparison.places, values, strict=True):
                credited[rollout] = add_advantage(credited[rollout], turn, comparison.weight * value)
        return discard_without_signal(batch.with_rollouts(credited.values()))

    def _advantages(self, comparison: ComparedRollouts) -> list[float]:
        returns_N = torch.tensor(comparison.returns, dtype=torch.float64)
        outside_N = returns_N[(returns_N < 0.0) | (returns_N > 1.0)]
        if self.facts.unit_rewards and len(outside_N):
            raise RunFailed(
                f"advantage_mode = {self.mode} is defined for rewards in [0, 1], but {self.reward_name} gave "
                f"{outside_N[0].item():g}: rescale that reward or use advantage_mode = grpo"
            )
        rewards = [rollout.reward for rollout in comparison.rollouts]
        context = GroupContext(comparison.group.prompt.problem, comparison.actions, rewards)
        if callable(self.mode):
            return plugin_advantages(self.mode, returns_N, context).tolist()
        assert self.formula is not None, "a built-in mode has a formula"
        return self.formula(returns_N).tolist()


@dataclass(frozen=True)
class ZeroAdvantage(CreditStep):
    """Gives every rollout with a reward the advantage 0, for runs in which only a teacher gives advantages."""

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        rollouts = batch.rollouts
        rated = [rollout.has_reward and len(rollout) > 0 for rollout in rollouts]
        batch = batch.with_fields(rollouts, ({"advantage": 0.0 if known else math.nan} for known in rated))
        return batch.with_discarded(None if _is_rated(group.rollouts) else "no_reward" for group in batch.groups)


def discard_without_signal(batch: CreditedBatch) -> CreditedBatch:
    reasons = []
    for group in batch.groups:
        reason = None if has_signal(group) else "zero_advantage"
        reasons.append(reason if _is_rated(group.rollouts) else "no_reward")
    return batch.with_discarded(reasons)


def _is_rated(rollouts: Sequence[CreditedRollout]) -> bool:
    return any(math.isfinite(rollout.advantage) for rollout in rollouts)


def _whitened(rated: Sequence[tuple[ComparedRollouts, list[float]]]) -> list[tuple[ComparedRollouts, list[float]]]:
    values_N = torch.tensor([value for _, values in rated for value in values], dtype=torch.float64)
    tokens_N = torch.tensor([tokens for comparison, _ in rated for tokens in comparison.tokens])
    parts = iter(whiten(values_N, tokens_N).tolist())
    return [(comparison, [next(parts) for _ in values]) for comparison, values in rated]


@dataclass(frozen=True)
class SpreadAdvantage(CreditStep):
    """Spreads the advantage of each rollout or turn over its tokens, unless a critic has set token advantages. Also
    sets loss masks, and denominators that count all rollouts with an advantage.

    With ``keeps_uniform_groups``, groups whose advantages are all 0 train too.
    """

    keeps_uniform_groups: bool

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        if self.keeps_uniform_groups:
            reasons = [group.discarded for group in batch.groups]
            batch = batch.with_discarded(None if reason == "zero_advantage" else reason for reason in reasons)
        rated = batch.rated
        if not rated:
            return batch
        tokens = sum(map(len, rated))
        sequences = sum(rollout.sequences for rollout in rated if len(rollout) > 0)
        batch = replace(batch, denominators=Denominators(tokens, sequences, action_tokens=tokens))
        return batch.with_fields(
            rated,
            ({"token_advantages_T": _token_advantages(one), "loss_mask_T": np.ones(len(one), bool)} for one in rated),
        )


def _token_advantages(rollout: CreditedRollout) -> np.ndarray:
    advantages_T = np.full(len(rollout), rollout.advantage)
    if rollout.token_advantages_T is not None:
        advantages_T = rollout.token_advantages_T
    elif rollout.turn_advantages is not None:
        advantages_T = np.repeat(rollout.turn_advantages, [len(turn.action) for turn in rollout.turns])
    if not np.isfinite(advantages_T).all():
        raise ValueError("episode advantages must be finite: leave out the completions without a reward")
    return advantages_T


def checked_rewards(rewards_N: Rewards_PN) -> Doubles_PN:
    """Return rewards as detached float64. Raises ValueError unless they are finite and have a group axis."""
    if rewards_N.dim() == 0:
        raise ValueError("rewards need a group axis: got a single number")
    rewards_N = rewards_N.detach().to(torch.float64)
    finite_N = torch.isfinite(rewards_N)
    if not bool(finite_N.all()):
        where = torch.nonzero(~finite_N)[0].tolist()
        raise ValueError(f"rewards must be finite: found {rewards_N[tuple(where)].item()} at index {where}")
    return rewards_N


def centred(rewards_N: Rewards_PN) -> Doubles_PN:
    """Return centred rewards r − r̄, exactly 0 for a group of equal rewards."""
    if rewards_N.shape[-1] == 0:
        return rewards_N.clone()
    spread = rewards_N.amax(-1, keepdim=True) - rewards_N.amin(-1, keepdim=True)
    # Relative to the largest reward, but absolute below 1: tiny rewards near 0 count as equal.
    noise = EQUAL_REWARDS * rewards_N.abs().amax(-1, keepdim=True).clamp(min=1.0)
    return torch.where(spread < noise, 0.0, rewards_N - rewards_N.mean(-1, keepdim=True))


def dr_grpo(rewards_N: Rewards_PN) -> Doubles_PN:
    """Return r_i − r̄ (arXiv 2503.20783), to be used with the ``constant`` loss normaliser."""
    return centred(checked_rewards(rewards_N))


def grpo(rewards_N: Rewards_PN) -> Doubles_PN:
    """Return (r_i − r̄)/(std + 1e-6) with the population standard deviation (arXiv 2402.03300)."""
    centred_N = centred(checked_rewards(rewards_N))
    if centred_N.shape[-1] == 0:
        return centred_N
    deviation = centred_N.square().mean(-1, keepdim=True).sqrt()
    return torch.where(deviation < EQUAL_REWARDS, 0.0, centred_N / (deviation + GRPO_EPSILON))


def rloo(rewards_N: Rewards_PN) -> Doubles_PN:
    """Return r_i minus the mean of the other rewards, N/(N−1)·(r_i − r̄) (arXiv 2402.14740).

    Raises ValueError for a group of one, which has no other rewards.
    """
    centred_N = centred(checked_rewards(rewards_N))
    size = centred_N.shape[-1]
    if size == 1:
        raise ValueError("rloo compares with the other completions of the group: it needs group_size >= 2, got 1")
    return centred_N * (size / (size - 1)) if size else centred_N


def maxrl(rewards_N: Rewards_PN) -> Doubles_PN:
    """Return (r_i − r̄)/r̄, all 0 when every reward is 0 (arXiv 2602.02710).

    It is maximum likelihood only for rewards 0 and 1. Raises ValueError for rewards outside [0, 1].
    """
    rewards_N = checked_rewards(rewards_N)
    outside_N = rewards_N[(rewards_N < 0.0) | (rewards_N > 1.0)]
    if len(outside_N):
        raise ValueError(f"maxrl is defined for rewards in [0, 1]: got {outside_N[0].item():g}")
    centred_N = centred(rewards_N)
    if centred_N.shape[-1] == 0:
        return centred_N
    mean = rewards_N.mean(-1, keepdim=True)
    return torch.where(mean > 0.0, centred_N / torch.where(mean > 0.0, mean, 1.0), 0.0)


def whiten(advantages_B: Floats_B, token_counts_B: Values_B) -> Doubles_B:
    """Return (A − mean)/std over all trained tokens of the batch, float64 [B] (REINFORCE++, arXiv 2501.03262).

    ``advantages_B`` holds r_i − r̄ of every completion. All ``token_counts_B`` tokens of a completion share its
    advantage, so mean and population standard deviation are weighted by length. A standard deviation of 0, or no token
    at all, gives 0.
    """
    advantages_B = checked_rewards(advantages_B)
    counts_B = token_counts_B.detach().to(advantages_B)
    if counts_B.shape != advantages_B.shape:
        raise ValueError(f"one token count per advantage: got {tuple(counts_B.shape)} for {tuple(advantages_B.shape)}")
    total = counts_B.sum()
    if float(total) <= 0.0:
        return torch.zeros_like(advantages_B)
    centred_B = advantages_B - (advantages_B * counts_B).sum() / total
    deviation = ((centred_B.square() * counts_B).sum() / total).sqrt()
    return torch.zeros_like(centred_B) if float(deviation) < EQUAL_REWARDS else centred_B / deviation


def plugin_advantages(
    function: Callable[..., object], rewards_N: Rewards_PN, context: GroupContext | None = None
) -> Doubles_PN:
    """Return advantages of a user's ``function(rewards_N)`` or ``function(rewards_N, context)``, float64 [N].

    Raises PluginError naming the plug-in when the result has another length or is not finite.
    """
    plugin, rewards_N = f"advantage plug-in {plugin_name(function)}", checked_rewards(rewards_N)
    positional = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    takes_context = len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in positional)
    # A copy: the function may write into its argument.
    result = function(rewards_N.clone(), context) if takes_context else function(rewards_N.clone())
    result = of_shape(plugin, result, rewards_N, "rewards", "one number per completion")
    advantages_N = result.detach().to(torch.float64)
    if not bool(torch.isfinite(advantages_N).all()):
        raise PluginError(f"{plugin} returned NaN or infinity: {advantages_N.tolist()}")
    return advantages_N
