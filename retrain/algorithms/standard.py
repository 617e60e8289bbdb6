"""The algorithm that configurations name: advantage, planning tokens, token credit with its SEPA schedule.

The formulas are in ``retrain.maths``; this file lays rollouts out as padded tensors and back, and keeps what SEPA
remembers from step to step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.algorithms.distillation import compare_whole, distil, no_comparison
from retrain.algorithms.gae import fill_token_advantages
from retrain.algorithms.protocol import Credit
from retrain.algorithms.rejection import reject
from retrain.algorithms.turns import Compared, TurnCredit, add_advantage, compared, has_signal
from retrain.config import Config
from retrain.config.algorithm import Algorithm as AlgorithmSection
from retrain.config.modes import MODES, Named, advantage_of, credit_of
from retrain.errors import RunFailed
from retrain.maths.advantages import group_advantages, whiten
from retrain.maths.credit import ModeInputs, TokenCredit, placebo_mask, token_advantages
from retrain.maths.planning import STRATEGIC_GRAMS, Detector, PluginDetector, RegexDetector
from retrain.maths.schedules import SepaSchedule, sepa_gate_open, sepa_lambda, sepa_observe, sepa_start
from retrain.plugins import load_function
from retrain.policy.protocol import Denominators, Scores
from retrain.rng import uniforms
from retrain.tokenizer import Tokenizer
from retrain.types import Action, Group, Problem, RewardResult, Rollout


@dataclass(frozen=True)
class Modes:
    """The formulas of a run: from rewards to advantages, from advantages to tokens, how uncertain a token is, and
    the loss of a token."""

    advantage: Named
    transform: Named
    uncertainty: Named
    loss: Named = "ppo"


def load_detector(config: Config, base_dir: Path | None = None) -> Detector:
    """Return the detector of planning tokens that a configuration names, a plug-in loaded from ``base_dir`` or the
    current directory. Raises PluginError when it cannot be loaded."""
    name = config.planning.detector
    if name == "regex":
        return RegexDetector(tuple(config.logging.strategic_grams or STRATEGIC_GRAMS))
    return PluginDetector(load_function(name, base_dir, "[planning] detector ="))


def load_modes(algorithm: AlgorithmSection, base_dir: Path | None = None) -> Modes:
    """The modes that ``[algorithm]`` names, plug-ins loaded from ``base_dir`` or the current directory.

    Raises PluginError when one cannot be loaded.
    """

    def one(key: str) -> Named:
        name = getattr(algorithm, key)
        return name if name in MODES[key] else load_function(name, base_dir, f"[algorithm] {key} =")

    return Modes(one("advantage_mode"), one("transform_mode"), one("uncertainty_kind"), one("loss"))


@dataclass(frozen=True)
class GroupContext:
    """What an advantage plug-in is given besides the rewards: the group's problem and its graded completions."""

    problem: Problem
    completions: Sequence[Action]
    rewards: Sequence[RewardResult]


@dataclass(frozen=True)
class WatchedCredit(Credit):
    """With the variance that the SEPA ``auto`` schedule watches."""

    exec_variance: float | None = None


class Standard:
    """Advantages, planning tokens and token credit of one run's configuration.

    ``stream`` names the run's random stream, which the HICRA placebo samples from.
    """

    def __init__(
        self, config: Config, modes: Modes, detector: Detector, tokenizer: Tokenizer, stream: tuple[int | str, ...]
    ):
        self.config, self.modes, self.detector, self.tokenizer, self.stream = config, modes, detector, tokenizer, stream
        sepa = config.sepa
        self.schedule = SepaSchedule(var_threshold=sepa.threshold, **sepa.model_dump(exclude={"threshold"}))
        self.sepa = sepa_start(self.schedule)
        self.needs = config.algorithm.needs | config.distillation.needs

    def credit(self, groups: Sequence[Group], scores: Scores | None, step: int) -> Credit:
        """See ``Algorithm.credit``. λ is read first: what is observed of this batch counts from the next step on."""
        own, numbers = self._advantages(groups, scores)
        self.mark_planning(groups)
        lam, gate_open = sepa_lambda(self.schedule, self.sepa, step), sepa_gate_open(self.sepa, step)
        credit = assign_credit(groups, self.config, lam, (*self.stream, "placebo", step), self.modes, own)
        if self.config.distillation.sampled:
            credit = distil(groups, credit, self.config.distillation, scores)
        elif self.config.distillation.whole:
            credit = compare_whole(groups, credit, self.config.distillation)
        credit, several = replace(credit, metrics={**credit.metrics, **numbers}), self.config.training.several_updates
        credit = reject(groups, credit, self.config.algorithm, scores, several)
        if not credit_of(self.modes.transform).pooled:
            return credit
        self.sepa = sepa_observe(self.schedule, self.sepa, step, correct_rate(groups), credit.exec_variance)
        return replace(credit, metrics={**credit.metrics, "sepa_lambda": lam, "sepa_gate_open": gate_open})

    def _advantages(
        self, groups: Sequence[Group], scores: Scores | None
    ) -> tuple[Mapping[Rollout, np.ndarray], dict[str, Any]]:
        if self.config.distillation.alone:
            no_comparison(groups)
            return {}, {}
        if advantage_of(self.modes.advantage).by_token:
            assert scores is not None, "values were asked for"
            return fill_token_advantages(groups, scores, self.config)
        turns = turn_credit_of(self.config.algorithm)
        reward = self.config.environment.provider or self.config.reward.type
        fill_advantages(groups, self.modes.advantage, reward, turns)
        return {}, {}

    def mark_planning(self, groups: Sequence[Group]) -> None:
        mark_planning(groups, self.detector, self.tokenizer)

    def state(self) -> dict[str, Any]:
        return {"sepa": self.sepa}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sepa = state["sepa"]


def turn_credit_of(algorithm: AlgorithmSection) -> TurnCredit | None:
    """How the configuration credits turns; None for whole episodes alone."""
    if algorithm.turn_credit == "episode":
        return None
    return TurnCredit(algorithm.turn_discount, algorithm.state_weight if algorithm.turn_credit == "state" else None)


def correct_rate(groups: Sequence[Group]) -> float:
    """Share of correct rollouts among all that were sampled."""
    flags = [rollout.reward.is_correct for group in groups for rollout in group.rollouts]
    return sum(flags) / len(flags)


def fill_advantages(
    groups: Sequence[Group], mode: Named, reward_name: str = "reward", by: TurnCredit | None = None
) -> None:
    """Set the advantages of all rollouts, with ``by`` turn by turn, and ``discarded`` of every group.

    Rollouts without a reward (grading failed) take no part: NaN, and the rest of the group is compared among
    itself. Some modes are whitened over the batch. A group whose advantages are all equal to 0 carries no
    signal and is marked ``zero_advantage``, one without any reward ``no_reward``.

    Raises RunFailed, which names the reward, where the mode is not defined for it.
    """
    facts = advantage_of(mode)
    rated: list[tuple[Compared, list[float]]] = []
    for group in groups:
        for rollout in group.rollouts:
            rollout.advantage, rollout.turn_advantages = math.nan, None
        for each in compared(group, by):
            if len(each.rollouts) >= max(facts.smallest_group, 1 if each.turns is None else 2):
                rated.append((each, _advantages(each, mode, reward_name)))
            elif each.turns is not None:  # nothing to compare this turn with
                rated.append((each, [0.0] * len(each.rollouts)))
    if facts.whitened and rated:
        values_N = torch.tensor([value for _, values in rated for value in values], dtype=torch.float64)
        whitened_N = whiten(values_N, torch.tensor([tokens for each, _ in rated for tokens in each.tokens]))
        parts = iter(whitened_N.tolist())
        rated = [(each, [next(parts) for _ in values]) for each, values in rated]
    for each, values in rated:
        for rollout, turn, value in zip(each.rollouts, each.places, values, strict=True):
            add_advantage(rollout, turn, each.weight * value)
    for group in groups:
        if not np.isfinite(group.advantages_N).any():
            group.discarded = "no_reward"
        else:
            group.discarded = None if has_signal(group) else "zero_advantage"


def _advantages(each: Compared, mode: Named, reward_name: str) -> list[float]:
    """One for each of the rollouts that are compared. Raises RunFailed where the mode is not defined for the reward."""
    returns_N = torch.tensor(each.returns, dtype=torch.float64)
    outside_N = returns_N[(returns_N < 0.0) | (returns_N > 1.0)]
    if advantage_of(mode).unit_rewards and len(outside_N):
        raise RunFailed(
            f"advantage_mode = {mode} is defined for rewards in [0, 1], but {reward_name} gave "
            f"{outside_N[0].item():g}: rescale that reward or use advantage_mode = grpo"
        )
    rewards = [rollout.reward for rollout in each.rollouts]
    context = GroupContext(each.group.prompt.problem, each.actions, rewards)
    return group_advantages(mode, returns_N, context).tolist()


def mark_planning(groups: Sequence[Group], detector: Detector, tokenizer: Tokenizer) -> None:
    """Set ``planning_T`` of every rollout. Turns are looked at one by one: no phrase spans two of them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    placed = [tokenizer.offsets(turn.action.token_ids) for rollout in rollouts for turn in rollout.turns]
    masks = iter(detector.token_masks([text for text, _ in placed], [offsets for _, offsets in placed]))
    for rollout in rollouts:
        own = [np.asarray(next(masks), dtype=bool) for _ in rollout.turns]
        rollout.planning_T = np.concatenate([np.zeros(0, dtype=bool), *own])


def _padded(arrays: Sequence[np.ndarray], width: int, dtype: type) -> torch.Tensor:
    out = np.zeros((len(arrays), width), dtype=dtype)
    for i, array in enumerate(arrays):
        out[i, : len(array)] = array
    return torch.from_numpy(out)


def _padded_if_all(arrays: Sequence[np.ndarray | None], width: int, dtype: type) -> torch.Tensor | None:
    known = [array for array in arrays if array is not None]
    return _padded(known, width, dtype) if len(known) == len(arrays) else None


def assign_credit(
    groups: Sequence[Group],
    config: Config,
    sepa_lambda: float,
    placebo_stream: tuple[int | str, ...],
    modes: Modes | None = None,
    by_token: Mapping[Rollout, np.ndarray] | None = None,
) -> WatchedCredit:
    """Set the token advantages and loss masks of every rollout that has a reward. Groups without signal stay marked
    as discarded, unless the loss has a KL or entropy term or ``discard_group_zero_advantage`` is off: then all groups
    train. The denominators count all of them either way.

    ``placebo_stream`` names the random stream of the HICRA placebo; ``modes`` are loaded from ``config`` by default;
    ``by_token`` are advantages of single tokens [T], where a critic gives them.
    Where the token credit makes its own advantages (``gtpo_paper``, one of the user's), what it returns decides which
    groups have signal.
    """
    modes = modes or load_modes(config.algorithm)
    for group in groups:
        for rollout in group.rollouts:
            rollout.token_advantages_T = rollout.loss_mask_T = None
        if config.algorithm.keeps_uniform_groups and group.discarded == "zero_advantage":
            group.discarded = None
    rows = [(group, rollout) for group in groups for rollout in group.rollouts if math.isfinite(rollout.advantage)]
    if not rows:
        return WatchedCredit(Denominators(0, 0))
    credit = _token_credit(rows, config, modes, sepa_lambda, placebo_stream, by_token or {})
    advantages_BT, loss_mask_BT = credit.advantages_BT.numpy(), credit.loss_mask_BT.numpy()
    for (_, rollout), advantages_T, mask_T in zip(rows, advantages_BT, loss_mask_BT, strict=True):
        rollout.token_advantages_T = advantages_T[: len(rollout)]
        rollout.loss_mask_T = mask_T[: len(rollout)]
    if credit_of(modes.transform).own_advantage and not config.algorithm.keeps_uniform_groups:
        signal = {group for (group, _), row in zip(rows, advantages_BT, strict=True) if row.any()}
        for group, _ in rows:
            group.discarded = None if group in signal else "zero_advantage"
    counted = credit.denominator_mask_BT.sum(1).tolist()
    denominators = Denominators(
        tokens=sum(counted),
        sequences=sum(rollout.sequences for _, rollout in rows if len(rollout) > 0),
        all_tokens=config.algorithm.entropy_mask_denominator == "all",
        action_tokens=sum(len(rollout) for _, rollout in rows),
    )
    tokens = {rollout: count for (_, rollout), count in zip(rows, counted, strict=True)}
    return WatchedCredit(denominators, credit.stats, tokens, exec_variance=credit.exec_variance)


def _spread(rollout: Rollout) -> np.ndarray:
    """The advantage of every token before it is weighted: its turn's, or the whole rollout's."""
    if rollout.turn_advantages is None:
        return np.full(len(rollout), rollout.advantage)
    return np.repeat(rollout.turn_advantages, [len(turn.action) for turn in rollout.turns])


def _token_credit(
    rows: Sequence[tuple[Group, Rollout]],
    config: Config,
    modes: Modes,
    sepa_lambda: float,
    placebo_stream: tuple[int | str, ...],
    by_token: Mapping[Rollout, np.ndarray],
) -> TokenCredit:
    rollouts = [rollout for _, rollout in rows]
    lengths = [len(rollout) for rollout in rollouts]
    width = max(lengths)
    mask_BT = _padded([np.ones(length, bool) for length in lengths], width, np.bool_)
    planning_BT = _padded_if_all([rollout.planning_T for rollout in rollouts], width, np.bool_)
    placebo_BT = None
    if modes.transform == "gtpo_hicra_placebo" and planning_BT is not None:
        uniforms_BT = torch.from_numpy(np.stack([uniforms(width, *placebo_stream, row) for row in range(len(rows))]))
        placebo_BT = placebo_mask(uniforms_BT, planning_BT, mask_BT)
    number = {group: index for index, group in enumerate(dict.fromkeys(group for group, _ in rows))}
    return token_advantages(
        modes.transform,
        _padded([by_token.get(rollout, _spread(rollout)) for rollout in rollouts], width, np.float64),
        _padded([rollout.logprobs_T for rollout in rollouts], width, np.float64),
        _padded_if_all([rollout.entropy_T for rollout in rollouts], width, np.float64),
        planning_BT,
        mask_BT,
        uncertainty_kind=modes.uncertainty,
        beta=config.gtpo.beta,
        alpha=config.hicra.alpha,
        sepa_lambda=sepa_lambda,
        inputs=ModeInputs(
            rewards_B=torch.tensor([rollout.reward.total_reward for rollout in rollouts], dtype=torch.float64),
            correct_B=torch.tensor([rollout.reward.is_correct for rollout in rollouts]),
            group_B=torch.tensor([number[group] for group, _ in rows]),
            placebo_BT=placebo_BT,
            alpha1=config.gtpo.alpha1,
            alpha2=config.gtpo.alpha2,
            centred=config.gtpo.centred,
            entropy_rho=config.algorithm.entropy_mask_rho,
            entropy_denominator=config.algorithm.entropy_mask_denominator,
        ),
    )
