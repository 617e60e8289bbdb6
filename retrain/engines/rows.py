"""Sequences of a decode batch: which they are, and the actions that came of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.policy.base import BaseModel
from retrain.types import Action, SampleRequest, Support

IDLE_SHARE = 0.25  # The batch shrinks when at least this share of it would be freed (a copy of the cache is the price)


@dataclass(frozen=True)
class LaneRequest(SampleRequest):
    """A request whose weights are lane ``lane`` of the decode batch."""

    lane: int = 0


@dataclass(frozen=True)
class Row:
    """One sequence to be: which request it samples, and as which of its samples."""

    request: int
    sample: int


def actions_of(
    base: BaseModel,
    tokens_NT: np.ndarray,
    logprobs_NT: np.ndarray,
    entropy_NT: np.ndarray,
    lengths_N: np.ndarray,
    supports_N: Sequence[Support | None] | None = None,
) -> list[Action]:
    """What was sampled in each row: its first ``lengths_N`` tokens, with their log-probabilities and entropies."""
    actions = []
    for i, length in enumerate(lengths_N):
        ids = tokens_NT[i, :length].tolist()
        actions.append(
            Action(
                token_ids=ids,
                text=base.text.decode(ids),
                logprobs_T=logprobs_NT[i, :length].copy(),
                entropy_T=entropy_NT[i, :length].copy(),
                stop_reason="stop" if ids[-1] in base.eos_ids else "length",
                support=None if supports_N is None else supports_N[i],
            )
        )
    return actions
