"""Add a teacher's advantage to every token's (on-policy distillation; see ``maths.distillation``).

It is added after token credit, which spreads the reward alone, and before anything is rejected. Differences from
published code: it stands beside the reward's advantage instead of in the reward, so that it is neither compared within
groups nor discounted; and completions whose reward could not be had take no part, as everywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from retrain.algorithms.protocol import Credit
from retrain.config.distillation import Distillation
from retrain.errors import RunFailed
from retrain.maths.distillation import distillation_advantages
from retrain.maths.losses import kl_terms
from retrain.policy.protocol import Scores
from retrain.types import Group, Rollout

C = TypeVar("C", bound=Credit)


def no_comparison(groups: Sequence[Group]) -> None:
    """Advantage 0 for every rollout that has a reward, where that counts nothing; groups without any are marked."""
    for group in groups:
        for rollout in group.rollouts:
            known = rollout.reward.total_reward is not None and len(rollout) > 0
            rollout.advantage, rollout.turn_advantages = 0.0 if known else np.nan, None
        group.discarded = None if np.isfinite(group.advantages_N).any() else "no_reward"


def distil(groups: Sequence[Group], credit: C, own: Distillation, scores: Scores | None) -> C:
    """``token_advantages_T`` of every credited rollout becomes reward_weight · A + the teacher's, and ``advantage`` the
    mean of it; groups whose rewards are all the same train as well. Where the teacher says nothing of a rollout (an
    empty array), it adds nothing. The credit with its numbers for the record.

    ``scores`` are those of all rollouts in order: the ``teacher``'s log-probabilities, and with ``student = "trainer"``
    the policy's. Raises RunFailed where the teacher's are not finite.
    """
    assert scores is not None, "a teacher was asked"
    assert scores.teacher is not None, "a teacher was asked"
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    students = scores.logprobs if own.student == "trainer" else [rollout.logprobs_T for rollout in rollouts]
    assert students is not None, "the policy was asked"
    found = zip(rollouts, students, scores.teacher, strict=True)
    said = [each for each in found if each[0].token_advantages_T is not None and len(each[2])]
    spoken = {rollout for rollout, _, _ in said}
    credit = _weighed(groups, credit, own, lambda rollout: rollout in spoken)
    if not said:
        return credit
    student_1T = torch.from_numpy(np.concatenate([mine_T for _, mine_T, _ in said])).double()[None]
    teacher_1T = torch.from_numpy(np.concatenate([theirs_T for _, _, theirs_T in said])).double()[None]
    if not bool(torch.isfinite(teacher_1T).all()):
        raise RunFailed(f"the teacher {own.teacher} gives a sampled token a log-probability that is not finite")
    mask_1T = torch.ones(student_1T.shape, dtype=torch.bool)
    advantages_1T = distillation_advantages(student_1T, teacher_1T, mask_1T, own.weight, own.clamp)
    parts = np.split(advantages_1T[0].numpy(), np.cumsum([len(rollout) for rollout, _, _ in said])[:-1])
    for (rollout, _, _), part_T in zip(said, parts, strict=True):
        assert rollout.token_advantages_T is not None
        rollout.token_advantages_T = rollout.token_advantages_T + part_T
        rollout.advantage = float(rollout.token_advantages_T.mean())
    numbers = _numbers(student_1T, teacher_1T, mask_1T, advantages_1T, own)
    return replace(credit, metrics={**credit.metrics, **numbers})


def compare_whole(groups: Sequence[Group], credit: C, own: Distillation) -> C:
    """Where a term of the loss compares whole distributions, tokens keep reward_weight · A, and groups train in which
    some completion has a teacher (``teacher_prompt``)."""
    return _weighed(groups, credit, own, lambda rollout: rollout.teacher_prompt is not None)


def _weighed(groups: Sequence[Group], credit: C, own: Distillation, taught: Callable[[Rollout], bool]) -> C:
    """Every token's advantage times ``reward_weight``, and which groups train: those in which somebody is ``taught``
    do whatever their rewards are, and where the teacher is alone no others do."""
    credited = [one for group in groups for one in group.rollouts if one.token_advantages_T is not None]
    spoken = {one for one in credited if taught(one)}
    for group in groups:
        if not spoken.isdisjoint(group.rollouts):
            group.discarded = None if group.discarded == "zero_advantage" else group.discarded
        elif own.alone:
            group.discarded = group.discarded or "zero_advantage"
    for rollout in credited:
        assert rollout.token_advantages_T is not None
        rollout.token_advantages_T = own.reward_weight * rollout.token_advantages_T
        rollout.advantage = float(rollout.token_advantages_T.mean()) if len(rollout) else 0.0
    share = len(spoken) / len(credited) if credited else None
    return replace(credit, metrics={**credit.metrics, "distillation/taught_frac": share})


def _numbers(
    student_1T: torch.Tensor, teacher_1T: torch.Tensor, mask_1T: torch.Tensor, advantages_1T: torch.Tensor,
    own: Distillation,
) -> dict[str, Any]:  # fmt: skip
    gap_1T = (teacher_1T - student_1T).abs()
    return {
        "distillation/reverse_kl": float(kl_terms("k1", student_1T, teacher_1T, mask_1T).mean()),
        "distillation/reverse_kl_k3": float(kl_terms("k3", student_1T, teacher_1T, mask_1T).mean()),
        "distillation/teacher_logprob": float(teacher_1T.mean()),
        "distillation/clamped_frac": 0.0 if own.clamp is None else float((gap_1T > own.clamp).double().mean()),
        "distillation/advantage_std": float(advantages_1T.std(correction=0)),
    }
