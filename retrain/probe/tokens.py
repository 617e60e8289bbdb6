"""Where two conditions credit the same rollouts differently: which tokens, of what kind, and which of them most.

Credit is compared in units of its own size (each condition's divided by its root mean square over all tokens), so that
a factor, which is a matter of the learning rate, is no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from retrain.probe.rollouts import Credited
from retrain.types import Rollout

CHANGED = 0.05
"""Credit that differs by more than this share of its root mean square has changed."""
SHOWN = 4
"""Completions shown with their tokens."""
SHOWN_TOKENS = 400
"""Tokens shown of one completion."""
PLACES = ("first third", "middle third", "last third")

TokenText = Callable[[Sequence[int]], tuple[str, Any]]


def credits_of(batches: Sequence[Credited]) -> list[np.ndarray]:
    """What each token of each rollout trains with, [T]; 0 where it does not train."""
    found = []
    for batch in batches:
        for group in batch.groups:
            for rollout in group.rollouts:
                own_T = np.zeros(len(rollout))
                if group.discarded is None and rollout.token_advantages_T is not None:
                    mask_T = True if rollout.loss_mask_T is None else rollout.loss_mask_T
                    own_T = np.where(mask_T, rollout.token_advantages_T, 0.0)
                found.append(own_T)
    return found


def differences(
    batches: Sequence[Credited], baseline: Sequence[Credited], token_text: TokenText | None
) -> dict[str, Any] | None:
    """Shares of tokens whose credit changes and of the squared change that falls to them, by kind, and the completions
    in which most changes. None where either condition credits nothing, or they are not of the same rollouts."""
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    mine, other = credits_of(batches), credits_of(baseline)
    if [len(each) for each in mine] != [len(each) for each in other] or not mine:
        return None
    sizes = [float(np.sqrt((np.concatenate(each) ** 2).mean())) for each in (mine, other)]
    if not all(size > 0 for size in sizes):
        return None
    deltas = [own_T / sizes[0] - base_T / sizes[1] for own_T, base_T in zip(mine, other, strict=True)]
    delta_N = np.concatenate(deltas)
    total = float((delta_N**2).sum())
    kinds = {
        name: {
            "tokens": int(mask_N.sum()),
            "changed": float((np.abs(delta_N[mask_N]) > CHANGED).mean()) if mask_N.any() else None,
            "of_change": float((delta_N[mask_N] ** 2).sum()) / total if total > 0 else None,
        }
        for name, mask_N in _kinds(rollouts).items()
    }
    return {
        "changed": float((np.abs(delta_N) > CHANGED).mean()),
        "root_mean_square": float(np.sqrt((delta_N**2).mean())),
        "kinds": kinds,
        "shown": _shown(rollouts, deltas, token_text) if total > 0 else [],
    }


def _kinds(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Masks over all tokens, [N]."""
    planning = [np.zeros(len(r), bool) if r.planning_T is None else r.planning_T for r in rollouts]
    correct = [np.full(len(r), r.reward.is_correct) for r in rollouts]
    thirds = [(3 * np.arange(len(r))) // max(1, len(r)) for r in rollouts]
    planning_N, correct_N, third_N = (np.concatenate(each) for each in (planning, correct, thirds))
    masks = {"planning": planning_N, "execution": ~planning_N, "correct": correct_N, "wrong": ~correct_N}
    return {**masks, **{name: third_N == third for third, name in enumerate(PLACES)}}


def _shown(
    rollouts: Sequence[Rollout], deltas: Sequence[np.ndarray], token_text: TokenText | None
) -> list[dict[str, Any]]:
    """The completions with the largest root mean square change, at most one of a problem: [text, change] of each token
    and what the completion was worth."""
    if token_text is None:
        return []
    order = sorted(range(len(rollouts)), key=lambda i: -float((deltas[i] ** 2).mean()) if len(deltas[i]) else 0.0)
    shown, problems = [], set()
    for i in order:
        rollout = rollouts[i]
        if len(shown) == SHOWN or not len(rollout):
            break
        if rollout.prompt.problem.id in problems:
            continue
        problems.add(rollout.prompt.problem.id)
        text, offsets = token_text(rollout.token_ids)
        pieces = [
            [text[start:end], round(float(delta), 4)] for (start, end), delta in zip(offsets, deltas[i], strict=True)
        ]
        shown.append(
            {
                "problem": rollout.prompt.problem.id,
                "prompt": rollout.prompt.text[-500:],
                "reward": rollout.reward.total_reward,
                "correct": rollout.reward.is_correct,
                "tokens": pieces[:SHOWN_TOKENS],
                "left_out": max(0, len(pieces) - SHOWN_TOKENS),
            }
        )
    return shown
