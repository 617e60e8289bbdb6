"""Generalised advantage estimation: one advantage per action token, from rewards and a critic's values (arXiv
1506.02438; PPO, 1707.06347).

Differences from the textbook: the action tokens of all turns of a rollout are one sequence. Observation tokens have no
value, and the last token of a turn bootstraps from the first one of the next turn. The value after the last action is
0, also after a cut-off. A turn's reward is at its last token; the part of the total that no turn received is at the
rollout's last token. With ``kl_in_reward`` every token has a reward of −kl_coef·KL to the base, as in TRL. TRL puts the
score one position after the last token if there is room, this file on the last token. The policy and the critic may
have different λ. Advantages are whitened with the unbiased variance, as in TRL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from retrain.algorithms.algorithm import CreditStep, StepContext, pad, token_mask, with_rows
from retrain.algorithms.credit.group_advantage import turn_rewards
from retrain.config.training import CriticSection
from retrain.maths.ratios import sampled_token_kl
from retrain.maths.shapes import Floats_B, Floats_BT, Mask_BT
from retrain.types import CreditedBatch, CreditedRollout, Rollout, Scores, Want


@dataclass(frozen=True)
class RewardKL:
    estimator: str  # k1, k2 or k3
    coef: float  # 0: recorded only


@dataclass(frozen=True)
class GaeAdvantage(CreditStep):
    """Sets the advantage of every token (the rollout's is the mean over its tokens), the critic's values and their
    targets. Groups without any reward are discarded as ``no_reward``."""

    critic: CriticSection
    kl: RewardKL

    @property
    def requires(self) -> frozenset[Want]:
        return frozenset({Want.VALUES, Want.LOGPROBS, Want.REFERENCE})

    def measure(self, scores: Scores) -> Mapping[str, float]:
        return sequence_kl(scores, self.kl)

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        scores = context.scores
        assert scores.values is not None, "the critic's values were asked for"
        # Equal rewards in a group are no reason to discard it: the critic is the baseline, not the group's mean.
        batch = batch.with_discarded(
            None if any(map(_is_rated, group.rollouts)) else "no_reward" for group in batch.groups
        )
        rollouts = batch.rollouts
        rows = [row for row, rollout in enumerate(rollouts) if _is_rated(rollout)]
        if not rows:
            return batch
        rated = [rollouts[row] for row in rows]
        mask_BT = token_mask(rated)
        values_BT = pad([scores.values[row] for row in rows])
        kl_BT, metrics = self._divergence(rows, scores, mask_BT)
        rewards_BT = _rewards(rated, kl_BT, mask_BT, self.kl.coef)
        # λ-returns with the critic's λ, from advantages before whitening: whitened ones have lost the scale of returns.
        targets_BT = values_BT + gae(rewards_BT, values_BT, mask_BT, self.critic.gamma, self.critic.value_lambda)
        advantages_BT = gae(rewards_BT, values_BT, mask_BT, self.critic.gamma, self._policy_lambda(rated))
        if self.critic.whiten:
            advantages_BT = whiten_tokens(advantages_BT, mask_BT)
        batch = with_rows(
            batch, rated, token_advantages_T=advantages_BT, values_T=values_BT, value_targets_T=targets_BT
        )
        means = [row_T[: len(rollout)].mean() for row_T, rollout in zip(advantages_BT, rated, strict=True)]
        batch = batch.with_fields([batch.rollouts[row] for row in rows], ({"advantage": float(m)} for m in means))
        return batch.with_metrics(
            {
                **metrics,
                "critic/value_mean": float(values_BT[mask_BT].mean()),
                "critic/target_mean": float(targets_BT[mask_BT].mean()),
                "critic/explained_variance": explained_variance(values_BT, targets_BT, mask_BT),
            }
        )

    def _policy_lambda(self, rated: Sequence[Rollout]) -> float | Floats_B:
        if self.critic.lam_length is None:
            return self.critic.policy_lambda
        return length_lambda(
            torch.tensor([len(rollout) for rollout in rated], dtype=torch.float64), self.critic.lam_length
        )

    def _divergence(self, rows: Sequence[int], scores: Scores, mask_BT: Mask_BT) -> tuple[Floats_BT, dict[str, float]]:
        if not self.kl.coef:
            return torch.zeros(mask_BT.shape, dtype=torch.float64), {}
        kl_BT = _kl(self.kl.estimator, rows, scores, mask_BT)
        return kl_BT, {"kl": float(_kl("k3", rows, scores, mask_BT).sum() / mask_BT.sum())}


def sequence_kl(scores: Scores, kl: RewardKL) -> dict[str, float]:
    """Return two metrics as in TRL: ``objective/kl``, the KL to the base summed over tokens, as a mean over rollouts
    (by the estimator of the KL reward, or k1 without one), and ``objective/non_score_reward``, what the KL reward adds.
    Empty without reference scores or tokens."""
    lengths = [len(logprobs_T) for logprobs_T in scores.logprobs or ()]
    rows = [row for row, length in enumerate(lengths) if length]
    if scores.reference is None or not rows:
        return {}
    mask_BT = pad([np.ones(lengths[row]) for row in rows]).bool()
    total = float(_kl(kl.estimator if kl.coef else "k1", rows, scores, mask_BT).sum(1).mean())
    return {"objective/kl": total, **({"objective/non_score_reward": -kl.coef * total} if kl.coef else {})}


def _is_rated(rollout: CreditedRollout) -> bool:
    return rollout.has_reward and len(rollout) > 0


def _rewards(rated: Sequence[Rollout], kl_BT: Floats_BT, mask_BT: Mask_BT, kl_coef: float) -> Floats_BT:
    last_B = torch.tensor([turn_rewards(rollout)[-1] for rollout in rated], dtype=torch.float64)
    return token_rewards(last_B, kl_BT, mask_BT, kl_coef) + pad([_earlier_rewards(rollout) for rollout in rated])


def _earlier_rewards(rollout: Rollout) -> np.ndarray:
    """Return the rewards of all turns but the last, each at its turn's last token, float64 [T]. The reward of a turn
    without tokens goes to the turn before it, or else to the first turn with tokens."""
    rewards_T = np.zeros(len(rollout))
    ends = np.cumsum([len(turn.action) for turn in rollout.turns[:-1]]) - 1
    # Not +=, which drops repeated indices: a turn without tokens and the turn before it share one.
    np.add.at(rewards_T, np.maximum(ends, 0).astype(int), turn_rewards(rollout)[:-1])
    return rewards_T


def _kl(estimator: str, rows: Sequence[int], scores: Scores, mask_BT: Mask_BT) -> Floats_BT:
    assert scores.logprobs is not None
    assert scores.reference is not None
    policy_BT = pad([scores.logprobs[row] for row in rows])
    reference_BT = pad([scores.reference[row] for row in rows])
    return torch.where(mask_BT, sampled_token_kl(estimator, policy_BT, reference_BT, mask_BT), 0.0)


WHITENING_EPSILON = 1e-8  # As in TRL's masked_whiten


def token_rewards(scores_B: Floats_B, kl_BT: Floats_BT, mask_BT: Mask_BT, kl_coef: float) -> Floats_BT:
    """Return −kl_coef·KL_t for every token, plus the row's score at its last token; 0 outside the mask."""
    rewards_BT = torch.where(mask_BT, -kl_coef * kl_BT, 0.0)
    # The reversed cumulative sum counts the tokens from here to the end of the row.
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last_BT, rewards_BT + scores_B.to(rewards_BT).unsqueeze(1), rewards_BT)


def gae(
    rewards_BT: Floats_BT, values_BT: Floats_BT, mask_BT: Mask_BT, gamma: float, lam: float | Floats_B
) -> Floats_BT:
    """Return A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γV_{t+1} − V_t over the tokens of the mask, 0 elsewhere.

    ``lam`` is one number or one for each row. Tokens outside the mask do not count as time. Same dtype as
    ``values_BT``, no gradient. Raises ValueError for shapes that differ, or γ or λ outside [0, 1].
    """
    if not (rewards_BT.shape == values_BT.shape == mask_BT.shape):
        shapes = ", ".join(str(tuple(each.shape)) for each in (rewards_BT, values_BT, mask_BT))
        raise ValueError(f"rewards, values and mask have different shapes: {shapes}")
    lam_B = torch.as_tensor(lam, dtype=torch.float64).expand(mask_BT.shape[0])
    if not (0.0 <= gamma <= 1.0 and bool(((lam_B >= 0.0) & (lam_B <= 1.0)).all())):
        raise ValueError(f"gamma and lam must be in [0, 1]: got {gamma} and {lam}")
    from scipy.signal import lfilter

    order_BT = torch.argsort(~mask_BT, dim=1, stable=True)  # the tokens of the mask first
    inside_BT = mask_BT.gather(1, order_BT)
    packed_BT = torch.where(inside_BT, values_BT.detach().gather(1, order_BT), 0.0)
    # V after the last token is 0, at an end of sequence and at a cut-off alike: there is no bootstrap value.
    next_BT = torch.nn.functional.pad(packed_BT, (0, 1))[:, 1:]
    delta_BT = torch.where(inside_BT, rewards_BT.detach().gather(1, order_BT) + gamma * next_BT - packed_BT, 0.0)
    backwards_BT = delta_BT.flip(1).cpu().double().numpy()
    for lam_value in lam_B.unique().tolist():
        rows = (lam_B == lam_value).numpy()
        # A_t = δ_t + γλ·A_{t+1} is a first-order recursive filter of the reversed row, which scipy runs without a
        # Python loop over tokens.
        backwards_BT[rows] = lfilter([1.0], [1.0, -gamma * lam_value], backwards_BT[rows], axis=1)
    advantages_BT = torch.as_tensor(backwards_BT).flip(1).to(values_BT)
    return torch.zeros_like(advantages_BT).scatter_(1, order_BT, advantages_BT)


def length_lambda(lengths_B: Floats_B, scale: float) -> Floats_B:
    """Return λ = 1 − 1/(scale·length) of every rollout, at least 0 (VAPO, arXiv 2504.05118). In long rollouts, rewards
    at the end thus reach the first tokens less attenuated. Raises ValueError unless scale > 0."""
    if not scale > 0.0:
        raise ValueError(f"the scale of lengths must be above 0: got {scale}")
    return (1.0 - 1.0 / (scale * lengths_B)).clamp(min=0.0)


def whiten_tokens(values_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
    """Return (x − mean)/√(variance + 1e-8) over the tokens of the mask, with the unbiased variance; 0 elsewhere, and
    for fewer than two tokens."""
    count = int(mask_BT.sum())
    if count < 2:
        return torch.zeros_like(values_BT)
    mean = torch.where(mask_BT, values_BT, 0.0).sum() / count
    # Centre before squaring: E[x²] − E[x]² would cancel for advantages with a large mean.
    centred_BT = torch.where(mask_BT, values_BT - mean, 0.0)
    variance = centred_BT.square().sum() / (count - 1)
    return centred_BT * torch.rsqrt(variance + WHITENING_EPSILON)


def explained_variance(values_BT: Floats_BT, targets_BT: Floats_BT, mask_BT: Mask_BT) -> float | None:
    """Return 1 − Var(R − V)/Var(R) of targets R and values V over the tokens of the mask: 1 for a perfect critic, 0 for
    one that predicts the mean. None if the targets vary by no more than rounding."""
    targets_M, values_M = targets_BT[mask_BT].double(), values_BT[mask_BT].double()
    if len(targets_M) == 0:
        return None
    # Targets are A + V: where V is large, their variance may be nothing but the rounding of that sum.
    rounding = torch.finfo(targets_BT.dtype).eps * float(torch.maximum(targets_M.abs(), values_M.abs()).max())
    variance = float(targets_M.var(correction=0))
    if variance <= (2.0 * rounding) ** 2:
        return None
    return 1.0 - float((targets_M - values_M).var(correction=0)) / variance
