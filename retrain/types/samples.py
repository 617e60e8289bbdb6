"""Samples: rollouts as flat sequences of tokens, one entry per token of what was read and what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from retrain.types.credit import CreditedRollout
from retrain.types.rollouts import Group, Rollout, Support, Turn, split_sequences


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of tokens to train on, one entry per token of what was read and what was sampled [L].

    A rollout of two turns that read (1, 2), sampled (10, 11), read (5) and sampled (12), with an advantage of 0.5:

    - ``token_ids`` 1 2 10 11 5 12 (int64)
    - ``action_mask`` 0 0 1 1 0 1 (bool): the sampled tokens; in all float arrays the others are 0
    - ``loss_mask`` 0 0 1 1 0 1 (bool): those of them that train
    - ``logprobs`` 0 0 −1.2 −0.3 0 −2.0 (float64, nats): of the distribution that each was sampled from
    - ``versions`` −1 −1 3 3 −1 3 (int64): of the weights that sampled it; −1 where none did
    - ``advantages`` 0 0 0.5 0.5 0 0.5 (float64)

    ``support`` is that of the sampled tokens, one after the other; None when sampling was not truncated.
    ``old_logprobs`` are the trainer's own before the first of several updates, ``values`` and ``value_targets`` those
    of a critic, ``policy_weights`` factors of the policy loss (0: rejected); None where there is no such thing.
    ``teacher_prompt`` is as in ``CreditedRollout``.
    """

    token_ids: np.ndarray
    action_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    loss_mask: np.ndarray
    support: Support | None = None
    old_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    value_targets: np.ndarray | None = None
    policy_weights: np.ndarray | None = None
    teacher_prompt: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prefix(self) -> int:
        """Tokens before the first action: what a group's samples have in common."""
        return int(self.action_mask.argmax())

    @classmethod
    def single_turn(
        cls,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs_T: np.ndarray,
        advantages_T: np.ndarray,
        loss_mask_T: np.ndarray | None = None,
        support: Support | None = None,
    ) -> Sample:
        """One action after one prompt, with its log-probabilities and advantages token by token."""
        read, sampled = len(prompt_ids), len(token_ids)
        mask = np.ones(sampled, dtype=bool) if loss_mask_T is None else loss_mask_T
        return cls(
            token_ids=np.array([*prompt_ids, *token_ids], dtype=np.int64),
            action_mask=np.repeat([False, True], [read, sampled]),
            logprobs=np.concatenate([np.zeros(read), logprobs_T]),
            versions=np.repeat([-1, 0], [read, sampled]),
            advantages=np.concatenate([np.zeros(read), advantages_T]),
            loss_mask=np.concatenate([np.zeros(read, dtype=bool), mask]),
            support=support,
        )


def samples_of_rollout(rollout: Rollout) -> list[Sample]:
    """Return the rollout as the policy saw it, token for token; nothing is tokenised again.

    One sample, and one more for every time that the conversation was rewritten; none where the policy never acted. No
    token has an advantage or trains.
    """
    return [_flatten(turns) for turns in split_sequences(rollout.turns)]


def training_samples(rollout: CreditedRollout) -> list[Sample]:
    """Return the samples of a rollout with its credit; without a reward no token trains."""
    sequences = zip(split_sequences(rollout.turns), sequence_slices(rollout), strict=True)
    return [_with_credit(_flatten(turns), rollout, tokens) for turns, tokens in sequences]


def sequence_slices(rollout: Rollout) -> list[slice]:
    """Return which of the rollout's sampled tokens [T] each of its samples holds."""
    lengths = [sum(len(turn.action) for turn in turns) for turns in split_sequences(rollout.turns)]
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _flatten(turns: Sequence[Turn]) -> Sample:
    length = sum(len(turn.observation_ids) + len(turn.action) for turn in turns)
    sample = Sample(
        token_ids=np.zeros(length, dtype=np.int64),
        action_mask=np.zeros(length, dtype=bool),
        logprobs=np.zeros(length),
        versions=np.full(length, -1, dtype=np.int64),
        advantages=np.zeros(length),
        loss_mask=np.zeros(length, dtype=bool),
        support=_joined_support([turn.action.support for turn in turns]),
    )
    at = 0
    for turn in turns:
        begin, count = at + len(turn.observation_ids), len(turn.action)
        sample.token_ids[at:begin] = turn.observation_ids
        at = begin + count
        sample.token_ids[begin:at] = turn.action.token_ids
        sample.action_mask[begin:at] = True
        sample.logprobs[begin:at] = turn.action.logprobs_T
        sample.versions[begin:at] = turn.action.policy_version
    return sample


def _with_credit(sample: Sample, rollout: CreditedRollout, tokens: slice) -> Sample:
    """Return the sample of these ``tokens`` of the rollout with their credit."""

    def placed(values_T: np.ndarray | None) -> np.ndarray | None:
        if values_T is None:
            return None
        values = np.zeros(len(sample))
        values[sample.action_mask] = values_T[tokens]
        return values

    loss_mask = sample.loss_mask
    if rollout.is_credited:
        loss_mask = sample.action_mask.copy()
        if rollout.loss_mask_T is not None:
            loss_mask[sample.action_mask] = rollout.loss_mask_T[tokens]
    advantages = placed(rollout.token_advantages_T)
    return replace(
        sample,
        advantages=sample.advantages if advantages is None else advantages,
        loss_mask=loss_mask,
        old_logprobs=placed(rollout.old_logprobs_T),
        policy_weights=placed(rollout.policy_weights_T),
        values=placed(rollout.values_T),
        value_targets=placed(rollout.value_targets_T),
        teacher_prompt=rollout.teacher_prompt,
    )


def _joined_support(parts: Sequence[Support | None]) -> Support | None:
    """The support of several actions as that of one; all of them have one, or none has."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len(known) < 2:
        return known[0] if len(known) == len(parts) else None
    starts = np.cumsum([0, *(len(part.ids) for part in known)])
    offsets = [part.offsets[bool(i) :] + start for i, (part, start) in enumerate(zip(known, starts, strict=False))]
    return Support(np.concatenate([part.ids for part in known]), np.concatenate(offsets))


def without_advantages(sample: Sample) -> Sample:
    """The sample with an advantage of 0 for every sampled token; all of them train."""
    return replace(sample, advantages=np.zeros(len(sample)), loss_mask=sample.action_mask)


def with_prompt(sample: Sample, prompt_ids: Sequence[int]) -> Sample:
    """Return the sample with ``prompt_ids`` in place of its prompt, and without credit."""
    prefix = sample.prefix

    def moved(values: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([np.full(len(prompt_ids), fill, values.dtype), values[prefix:]])

    return replace(
        sample,
        token_ids=np.concatenate([np.asarray(prompt_ids, dtype=np.int64), sample.token_ids[prefix:]]),
        action_mask=moved(sample.action_mask, False),
        logprobs=moved(sample.logprobs, 0.0),
        versions=moved(sample.versions, -1),
        advantages=moved(sample.advantages, 0.0),
        loss_mask=moved(sample.loss_mask, False),
        old_logprobs=None,
        values=None,
        value_targets=None,
        policy_weights=None,
        teacher_prompt=None,
    )


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    """Return the samples of all rollouts, without credit."""
    return [sample for group in groups for rollout in group.rollouts for sample in samples_of_rollout(rollout)]
