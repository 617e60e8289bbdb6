"""PPO's advantages: one per action token, from its reward and what a critic expects (generalised advantage estimation,
arXiv 1506.02438; PPO, 1707.06347).

Differences from the textbook: the action tokens of a rollout are one sequence, over all its turns, so what the policy
read in between has no value, and the last token of a turn bootstraps from the first one of the next. A turn's reward
comes with its last token, and what the total is beyond those of single turns with the last token of all. With
``kl_in_reward`` every token has a reward of −kl_coef·KL to the base, as in TRL; there the score stands one position
later where there is room, here on the last token.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from retrain.algorithms.turns import own_rewards
from retrain.config import Config
from retrain.maths.critic import explained_variance, gae, length_lambda, token_rewards, whiten_tokens
from retrain.maths.losses import kl_terms
from retrain.policy.protocol import Scores
from retrain.types import Group, Rollout


def fill_token_advantages(
    groups: Sequence[Group], scores: Scores, config: Config
) -> tuple[dict[Rollout, np.ndarray], dict[str, Any]]:
    """The advantage of every action token, float64 [T], of the rollouts that have a reward; and numbers for the record.

    Sets ``advantage`` (the mean over its tokens), ``values_T`` and ``value_targets_T`` of these rollouts, and
    ``discarded`` of groups without any reward. ``scores`` are those of all rollouts, in order.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert scores.values is not None, "the critic's values were asked for"
    for group in groups:
        group.discarded = None
    for rollout in rollouts:
        rollout.advantage, rollout.turn_advantages = math.nan, None
        rollout.values_T = rollout.value_targets_T = None
    rated = [i for i, one in enumerate(rollouts) if one.reward.total_reward is not None and len(one) > 0]
    for group in groups:
        if all(rollout.reward.total_reward is None or not len(rollout) for rollout in group.rollouts):
            group.discarded = "no_reward"
    divergence = sequence_kl(scores, config)
    if not rated:
        return {}, divergence
    own = [rollouts[i] for i in rated]
    mask_BT = _padded([np.ones(len(rollout)) for rollout in own]).bool()
    values_BT = _padded([scores.values[i] for i in rated])
    kl_BT, metrics = _divergence(rated, scores, config, mask_BT)
    last_B = torch.tensor([own_rewards(rollout)[-1] for rollout in own], dtype=torch.float64)
    rewards_BT = token_rewards(last_B, kl_BT, mask_BT, config.algorithm.reward_kl_coef)
    rewards_BT += _padded([_on_the_way(rollout) for rollout in own])
    critic = config.critic
    targets_BT = values_BT + gae(rewards_BT, values_BT, mask_BT, critic.gamma, critic.value_lambda)
    lam = critic.policy_lambda
    if critic.lam_length is not None:
        lam = length_lambda(torch.tensor([len(rollout) for rollout in own], dtype=torch.float64), critic.lam_length)
    advantages_BT = gae(rewards_BT, values_BT, mask_BT, critic.gamma, lam)
    if critic.whiten:
        advantages_BT = whiten_tokens(advantages_BT, mask_BT)
    advantages = {}
    for rollout, row_T, values_T, targets_T in zip(own, advantages_BT, values_BT, targets_BT, strict=True):
        count = len(rollout)
        advantages[rollout] = row_T[:count].numpy()
        rollout.advantage = float(row_T[:count].mean())
        rollout.values_T, rollout.value_targets_T = values_T[:count].numpy(), targets_T[:count].numpy()
    return advantages, {
        **metrics,
        **divergence,
        "critic/value_mean": float(values_BT[mask_BT].mean()),
        "critic/target_mean": float(targets_BT[mask_BT].mean()),
        "critic/explained_variance": explained_variance(values_BT, targets_BT, mask_BT),
    }


def _on_the_way(rollout: Rollout) -> np.ndarray:
    """The rewards of all turns but the last, each at its turn's last token, float64 [T]. A turn in which nothing was
    sampled leaves its own to the one before it, or to the first that has something."""
    rewards_T = np.zeros(len(rollout))
    ends = np.cumsum([len(turn.action) for turn in rollout.turns[:-1]]) - 1
    np.add.at(rewards_T, np.maximum(ends, 0).astype(int), own_rewards(rollout)[:-1])
    return rewards_T


def _divergence(
    rated: Sequence[int], scores: Scores, config: Config, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the KL to the base that is in the reward of every token [B, T], and its mean over tokens."""
    if not config.algorithm.reward_kl_coef:
        return torch.zeros(mask_BT.shape, dtype=torch.float64), {}
    kl_BT = _kl(config.algorithm.kl_in_reward, rated, scores, mask_BT)
    return kl_BT, {"kl": float(_kl("k3", rated, scores, mask_BT).sum() / mask_BT.sum())}


def sequence_kl(scores: Scores, config: Config) -> dict[str, float]:
    """Return what TRL records of the KL to the base: the mean over all rollouts of its sum over their tokens, estimated
    as in the reward or else by k1, and what it takes from the reward. Empty without scores or tokens."""
    lengths = [len(logprobs_T) for logprobs_T in scores.logprobs or ()]
    sampled = [i for i, length in enumerate(lengths) if length]
    if scores.reference is None or not sampled:
        return {}
    mask_BT = _padded([np.ones(lengths[i]) for i in sampled]).bool()
    weight = config.algorithm.reward_kl_coef
    kind = config.algorithm.kl_in_reward if weight else "k1"
    total = float(_kl(kind, sampled, scores, mask_BT).sum(1).mean())
    return {"objective/kl": total, **({"objective/non_score_reward": -weight * total} if weight else {})}


def _kl(kind: str, rows: Sequence[int], scores: Scores, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the estimate ``kind`` of the KL to the base of these rollouts' tokens [B, T], 0 in the padding."""
    assert scores.logprobs is not None
    assert scores.reference is not None
    policy_BT = _padded([scores.logprobs[i] for i in rows])
    reference_BT = _padded([scores.reference[i] for i in rows])
    return torch.where(mask_BT, kl_terms(kind, policy_BT, reference_BT, mask_BT), 0.0)


def _padded(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """Rows of their own lengths as one table, float64 [B, T], 0 beyond."""
    table_BT = np.zeros((len(arrays), max(map(len, arrays))))
    for row_T, array in zip(table_BT, arrays, strict=True):
        row_T[: len(array)] = array
    return torch.from_numpy(table_BT)
