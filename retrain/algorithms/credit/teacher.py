"""Credit from a teacher (on-policy distillation): added to every token's advantage, or a term of the loss.

On-policy distillation minimises the reverse KL divergence Σ_t KL(π ‖ π_teacher) on the student's own samples. Its
policy gradient has the advantage −(ln π − ln π_teacher) of the token itself, without later tokens (discount 0; Thinking
Machines, "On-Policy Distillation"; verl pull request 4897). The advantage carries no gradient. As a loss, the estimate
k1 would have an expected gradient of 0, and k3 the gradient of the forward divergence.

The teacher's advantage is added after token credit, which spreads only the reward, and before rejection. Differences
from published code: it is added to the reward's advantage, not to the reward, so that it is neither compared within
groups nor discounted; and completions without a reward are left out, as everywhere.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import torch

from retrain.algorithms.algorithm import CreditStep, StepContext
from retrain.config.algorithm import Distillation
from retrain.errors import RunFailed
from retrain.maths.ratios import sampled_token_kl
from retrain.maths.shapes import Floats_BT
from retrain.types import CreditedBatch, CreditedRollout, Want


@dataclass(frozen=True)
class TeacherAdvantage(CreditStep):
    """Sets every token's advantage to reward_weight · A + the teacher's, and the rollout's to the mean over its tokens.

    Groups whose rewards are all the same train as well. A rollout that the teacher does not score (an empty array)
    keeps reward_weight · A. Reads the ``teacher``'s log-probabilities, and with ``student = "trainer"`` the policy's.
    Raises RunFailed if a log-probability of the teacher is not finite.
    """

    section: Distillation

    @property
    def requires(self) -> frozenset[Want]:
        student = {Want.LOGPROBS} if self.section.student == "trainer" else set()
        return frozenset({Want.TEACHER, *student})

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        scores, rollouts = context.scores, batch.rollouts
        assert scores.teacher is not None, "a teacher was asked"
        from_trainer = self.section.student == "trainer"
        students = scores.logprobs if from_trainer else [rollout.logprobs_T for rollout in rollouts]
        assert students is not None, "the policy was asked"
        rows = [row for row, one in enumerate(rollouts) if one.is_credited and len(scores.teacher[row])]
        batch = _weigh_reward(batch, self.section, {rollouts[row] for row in rows})
        if not rows:
            return batch
        student_1T = torch.from_numpy(np.concatenate([students[row] for row in rows])).double()[None]
        teacher_1T = torch.from_numpy(np.concatenate([scores.teacher[row] for row in rows])).double()[None]
        if not bool(torch.isfinite(teacher_1T).all()):
            raise RunFailed(
                f"the teacher {self.section.teacher} gives a sampled token a log-probability that is not finite"
            )
        advantages_1T = distillation_advantages(student_1T, teacher_1T, self.section.weight, self.section.clamp)
        taught = [batch.rollouts[row] for row in rows]
        parts = np.split(advantages_1T[0].numpy(), np.cumsum([len(rollout) for rollout in taught])[:-1])
        totals = [_token_advantages(one) + part_T for one, part_T in zip(taught, parts, strict=True)]
        batch = batch.with_fields(
            taught, ({"token_advantages_T": total_T, "advantage": float(total_T.mean())} for total_T in totals)
        )
        return batch.with_metrics(_teacher_metrics(student_1T, teacher_1T, advantages_1T, self.section.clamp))


@dataclass(frozen=True)
class FullVocabularyTeacher(CreditStep):
    """Scales every token's advantage by ``reward_weight``; the teacher itself enters through a term of the loss that
    compares full distributions. Groups with a rollout that has a ``teacher_prompt`` train even without signal."""

    section: Distillation

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        taught = {one for one in batch.rollouts if one.is_credited and one.teacher_prompt is not None}
        return _weigh_reward(batch, self.section, taught)


def _weigh_reward(batch: CreditedBatch, section: Distillation, taught: AbstractSet[CreditedRollout]) -> CreditedBatch:
    """Multiply every token's advantage by ``reward_weight`` and decide which groups train. Groups with a ``taught``
    rollout train even if their rewards are equal; if only the teacher gives advantages, no other group trains."""
    reasons = []
    for group in batch.groups:
        reason = group.discarded
        if not taught.isdisjoint(group.rollouts):
            reason = None if reason == "zero_advantage" else reason
        elif section.teacher_only:
            reason = reason or "zero_advantage"
        reasons.append(reason)
    credited = [rollout for rollout in batch.rollouts if rollout.is_credited]
    weighted = [section.reward_weight * _token_advantages(rollout) for rollout in credited]
    batch = batch.with_discarded(reasons).with_fields(
        credited,
        (
            {"token_advantages_T": values_T, "advantage": float(values_T.mean()) if len(values_T) else 0.0}
            for values_T in weighted
        ),
    )
    return batch.with_metrics({"distillation/taught_frac": len(taught) / len(credited) if credited else None})


def _token_advantages(rollout: CreditedRollout) -> np.ndarray:
    assert rollout.token_advantages_T is not None, "only credited rollouts have a teacher"
    return rollout.token_advantages_T


def distillation_advantages(
    student_BT: Floats_BT, teacher_BT: Floats_BT, weight: float, clamp: float | None = None
) -> Floats_BT:
    """Return weight · (ln π_teacher − ln π) of every token; ``clamp`` bounds the difference.

    No gradient. Raises ValueError for a negative weight or a clamp that is not above 0.
    """
    if weight < 0.0 or (clamp is not None and not clamp > 0.0):
        raise ValueError(f"weight must not be negative and clamp be above 0: got {weight} and {clamp}")
    gap_BT = (teacher_BT - student_BT).detach()
    if clamp is not None:
        gap_BT = gap_BT.clamp(-clamp, clamp)
    return weight * gap_BT


def _teacher_metrics(
    student_1T: Floats_BT, teacher_1T: Floats_BT, advantages_1T: Floats_BT, clamp: float | None
) -> dict[str, float]:
    mask_1T = torch.ones(student_1T.shape, dtype=torch.bool)
    gap_1T = (teacher_1T - student_1T).abs()
    return {
        "distillation/reverse_kl": float(sampled_token_kl("k1", student_1T, teacher_1T, mask_1T).mean()),
        "distillation/reverse_kl_k3": float(sampled_token_kl("k3", student_1T, teacher_1T, mask_1T).mean()),
        "distillation/teacher_logprob": float(teacher_1T.mean()),
        "distillation/clamped_frac": 0.0 if clamp is None else float((gap_1T > clamp).double().mean()),
        "distillation/advantage_std": float(advantages_1T.std(correction=0)),
    }
