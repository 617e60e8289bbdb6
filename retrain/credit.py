"""From graded groups to what the policy trains on: advantages, planning masks, token credit, loss denominators.

The formulas are in ``retrain.maths``; this file lays groups out as padded tensors and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.maths.advantages import ADVANTAGES, group_advantages, whiten
from retrain.maths.credit import (
    NEEDS_ENTROPY,
    OWN_ADVANTAGE,
    TRANSFORMS,
    UNCERTAINTIES,
    ModeInputs,
    TokenCredit,
    placebo_mask,
    token_advantages,
)
from retrain.maths.losses import POLICY_LOSSES
from retrain.maths.planning import Detector, text_and_offsets
from retrain.plugins import load_function
from retrain.policy.base import BaseModel
from retrain.policy.logprobs import TrainSequence
from retrain.policy.update import Denominators
from retrain.rng import uniforms
from retrain.types import Completion, Group, Problem, RewardResult

PROBE_SIZE = 4
"""Completions of a step without signal on which sampler and trainer are compared: one small forward pass."""

Mode = str | Callable[..., Any]
"""The name of one of the formulas in ``retrain.maths``, or a function of the user's."""


@dataclass(frozen=True)
class Modes:
    """The formulas of a run: from rewards to advantages, from advantages to tokens, how uncertain a token is, and
    the loss of a token."""

    advantage: Mode
    transform: Mode
    uncertainty: Mode
    loss: Mode = "ppo"


def load_modes(algorithm: Any, base_dir: Path | None = None) -> Modes:
    """The modes that ``[algorithm]`` names, plug-ins loaded from ``base_dir`` or the current directory.

    Raises PluginError when one cannot be loaded.
    """

    def one(key: str, own: Sequence[str]) -> Mode:
        name = getattr(algorithm, key)
        return name if name in own else load_function(name, base_dir, f"[algorithm] {key} =")

    return Modes(
        one("advantage_mode", tuple(ADVANTAGES)),
        one("transform_mode", TRANSFORMS),
        one("uncertainty_kind", UNCERTAINTIES),
        one("loss", tuple(POLICY_LOSSES)),
    )


@dataclass(frozen=True)
class GroupContext:
    """What an advantage plug-in may look at besides the rewards: the group's problem and graded completions."""

    problem: Problem
    completions: Sequence[Completion]
    rewards: Sequence[RewardResult]


@dataclass(frozen=True)
class CreditResult:
    """Sequences to train on, the denominators of the whole step, and the catalogue's credit statistics."""

    sequences: list[TrainSequence]
    denominators: Denominators
    stats: dict[str, float | None]
    exec_variance: float | None
    probe: list[TrainSequence] = field(default_factory=list)
    """A few completions that the trainer scores where nothing trains (see ``probe_of``)."""


def fill_advantages(groups: Sequence[Group], mode: Mode, reward_name: str = "reward") -> None:
    """Set ``advantages_N`` and ``discarded`` of every group from its rewards.

    Completions without a reward (grading failed) take no part: NaN, and the rest of the group is compared among
    itself. ``reinforce_pp`` is whitened over the batch. A group whose advantages are all equal to 0 carries no
    signal and is marked ``zero_advantage``, one without any reward ``no_reward``.
    """
    rated = []
    for group in groups:
        rewards_N = group.rewards_N
        known = np.isfinite(rewards_N)
        group.advantages_N = np.full(len(rewards_N), np.nan)
        if known.any() and not (mode == "rloo" and known.sum() < 2):
            rewards = torch.from_numpy(rewards_N[known])
            values = group_advantages(mode, rewards, reward_name=reward_name, context=_context(group, known))
            group.advantages_N[known] = values.numpy()
            rated.append((group, known))
    if mode == "reinforce_pp" and rated:
        flat = torch.from_numpy(np.concatenate([group.advantages_N[known] for group, known in rated]))
        counts = torch.tensor([len(c) for g, known in rated for c, k in zip(g.completions, known, strict=True) if k])
        whitened, start = whiten(flat, counts).numpy(), 0
        for group, known in rated:
            group.advantages_N[known] = whitened[start : start + int(known.sum())]
            start += int(known.sum())
    for group in groups:
        known = np.isfinite(group.advantages_N)
        if not known.any():
            group.discarded = "no_reward"
        else:
            group.discarded = None if np.any(group.advantages_N[known] != 0) else "zero_advantage"


def _context(group: Group, known: np.ndarray) -> GroupContext:
    """The part of the group that has rewards, in their order."""
    places = np.flatnonzero(known)
    return GroupContext(
        group.prompt.problem, [group.completions[i] for i in places], [group.rewards[i] for i in places]
    )


def completion_offsets(completion: Completion, base: BaseModel) -> tuple[str, Any]:
    """Text of a completion and, for each of its tokens, the characters [start, end) it stands for.

    Sampled ids need not be the tokenizer's own way of writing the text, so it is the tokens as sampled that are
    decoded: by their bytes where the tokenizer works on bytes, otherwise as a stream in which characters that need
    several tokens belong to the last of them. Special tokens stand for nothing.
    """
    table = base.token_bytes
    if table is not None:
        return text_and_offsets([table[i] if i < len(table) else b"" for i in completion.token_ids])
    backend = getattr(base.tokenizer, "backend_tokenizer", None)
    offsets: list[tuple[int, int]] = []
    if backend is None:  # a tokenizer without a fast backend: lengths of the decoded prefixes
        text = ""
        for end in range(1, len(completion.token_ids) + 1):
            longer = base.decode(completion.token_ids[:end])
            offsets.append((len(text), max(len(text), len(longer))))
            text = longer
        return text, offsets
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(backend, token_id) or "" for token_id in completion.token_ids]
    start = 0
    for piece in pieces:
        offsets.append((start, start + len(piece)))
        start += len(piece)
    return "".join(pieces), offsets


def mark_planning(groups: Sequence[Group], detector: Detector, base: BaseModel) -> None:
    """Set ``planning`` of every group: per completion a bool array [T]."""
    decoded = [completion_offsets(completion, base) for group in groups for completion in group.completions]
    masks = iter(detector.token_masks([text for text, _ in decoded], [offsets for _, offsets in decoded]))
    for group in groups:
        group.planning = [np.asarray(next(masks), dtype=bool) for _ in group.completions]


def _padded(arrays: Sequence[np.ndarray], width: int, dtype: type) -> torch.Tensor:
    out = np.zeros((len(arrays), width), dtype=dtype)
    for i, array in enumerate(arrays):
        out[i, : len(array)] = array
    return torch.from_numpy(out)


def _padded_if_all(arrays: Sequence[np.ndarray | None], width: int, dtype: type) -> torch.Tensor | None:
    """Padded, or None where one is missing."""
    there = [array for array in arrays if array is not None]
    return _padded(there, width, dtype) if len(there) == len(arrays) else None


def assign_credit(
    groups: Sequence[Group],
    config: Any,
    sepa_lambda: float,
    placebo_stream: tuple[int | str, ...],
    modes: Modes | None = None,
) -> CreditResult:
    """Token credit for every completion that has a reward; sequences only from groups with signal, or from all of
    them when the loss has a KL or entropy term or ``discard_group_zero_advantage`` is off (they are then no longer
    marked as discarded). The denominators count all of them either way.

    ``config`` is the run's configuration; ``placebo_stream`` names the random stream of the HICRA placebo; ``modes``
    are loaded from ``config`` by default. Where the transform makes its own advantages (``gtpo_paper``, one of the
    user's), what it returns decides which groups have signal.
    """
    modes = modes or load_modes(config.algorithm)
    keeps_all, probe = config.algorithm.keeps_uniform_groups, probe_of(groups)
    if keeps_all:
        for group in groups:
            group.discarded = None if group.discarded == "zero_advantage" else group.discarded
    rows = [(g, i) for g in groups for i in range(len(g.completions)) if np.isfinite(g.advantages_N[i])]
    if not rows:
        return CreditResult([], Denominators(0, 0), {}, None, probe)
    credit, lengths = _token_credit(rows, config, modes, sepa_lambda, placebo_stream)
    advantages, loss_mask = credit.advantages_B_T.numpy(), credit.loss_mask_B_T.numpy()
    own = callable(modes.transform) or modes.transform in OWN_ADVANTAGE
    if own and not keeps_all:
        signal = {id(group) for (group, _), row in zip(rows, advantages, strict=True) if row.any()}
        for group, _ in rows:
            group.discarded = None if id(group) in signal else "zero_advantage"
    by_token: dict[int, list[np.ndarray | None]] = {id(group): [None] * len(group.completions) for group in groups}
    for group in groups:
        group.token_advantages = by_token[id(group)]
    sequences = []
    for (group, i), length, row, trains in zip(rows, lengths, advantages, loss_mask, strict=True):
        by_token[id(group)][i] = row[:length]
        if group.discarded is None:
            completion, prompt = group.completions[i], group.prompt.token_ids
            sequences.append(
                TrainSequence(
                    prompt,
                    completion.token_ids,
                    completion.logprobs_T,
                    row[:length],
                    trains[:length],
                    completion.support,
                )
            )
    denominators = Denominators(
        tokens=int(credit.denominator_mask_B_T.sum()),
        sequences=sum(length > 0 for length in lengths),
        all_tokens=config.algorithm.entropy_mask_denominator == "all",
    )
    return CreditResult(sequences, denominators, credit.stats, credit.exec_variance, probe)


def probe_of(groups: Sequence[Group], size: int = PROBE_SIZE) -> list[TrainSequence]:
    """The first completion of every group, then the second, and so on, up to ``size`` of them, without advantages.

    Which ones depends on the order of the prompts alone, so a repeated or resumed step scores the same.
    """
    longest = max((len(group.completions) for group in groups), default=0)
    found = (
        (group.prompt, group.completions[i])
        for i in range(longest)
        for group in groups
        if i < len(group.completions) and len(group.completions[i])
    )
    return [
        TrainSequence(p.token_ids, c.token_ids, c.logprobs_T, np.zeros(len(c)), np.ones(len(c), dtype=bool))
        for p, c in islice(found, size)
    ]


def _token_credit(
    rows: Sequence[tuple[Group, int]],
    config: Any,
    modes: Modes,
    sepa_lambda: float,
    placebo_stream: tuple[int | str, ...],
) -> tuple[TokenCredit, list[int]]:
    """Credit of the completions at ``rows`` (group, place in it), padded to one width, and their lengths."""
    completions = [g.completions[i] for g, i in rows]
    planning = [None if g.planning is None else g.planning[i] for g, i in rows]
    lengths = [len(c) for c in completions]
    width = max(lengths)
    mask_BT = _padded([np.ones(length, bool) for length in lengths], width, np.bool_)
    planning_BT = _padded_if_all(planning, width, np.bool_)
    placebo_BT = None
    if modes.transform == "gtpo_hicra_placebo" and planning_BT is not None:
        draws = torch.from_numpy(np.stack([uniforms(width, *placebo_stream, row) for row in range(len(rows))]))
        placebo_BT = placebo_mask(draws, planning_BT, mask_BT)
    number = {group: place for place, group in enumerate(dict.fromkeys(id(g) for g, _ in rows))}
    credit = token_advantages(
        modes.transform,
        torch.tensor([g.advantages_N[i] for g, i in rows], dtype=torch.float64),
        _padded([c.logprobs_T for c in completions], width, np.float64),
        _padded_if_all([c.entropy_T for c in completions], width, np.float64),
        planning_BT,
        mask_BT,
        uncertainty_kind=modes.uncertainty,
        beta=config.gtpo.beta,
        alpha=config.hicra.alpha,
        sepa_lambda=sepa_lambda,
        inputs=ModeInputs(
            rewards_B=torch.tensor([g.rewards[i].total_reward for g, i in rows], dtype=torch.float64),
            correct_B=torch.tensor([g.rewards[i].is_correct for g, i in rows]),
            group_B=torch.tensor([number[id(g)] for g, _ in rows]),
            placebo_B_T=placebo_BT,
            alpha1=config.gtpo.alpha1,
            alpha2=config.gtpo.alpha2,
            entropy_rho=config.algorithm.entropy_mask_rho,
            entropy_denominator=config.algorithm.entropy_mask_denominator,
        ),
    )
    return credit, lengths


def needs_entropy(config: Any) -> bool:
    """Whether the configuration can only run on an engine that returns full-vocabulary entropies."""
    return config.algorithm.uncertainty_kind == "shannon_entropy" or config.algorithm.transform_mode in NEEDS_ENTROPY
