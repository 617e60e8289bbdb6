"""Scores of sampled tokens by forward passes without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch

from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel
from retrain.policy.critic import ValueHead
from retrain.policy.logprobs import by_place, collate, hidden_states, per_sample, split_microbatches, token_logprobs
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.memory import Budget
from retrain.types import Sample, Want

T = TypeVar("T")


Scored = list[dict[Want, list[np.ndarray]]]
"""Per micro-batch and kind of score, each sample's array over its sampled tokens [T]."""


def in_microbatches(
    base: BaseModel, budget: Budget, samples: Sequence[Sample], compute: Callable[[Sequence[list[int]]], T]
) -> T:
    """Return ``compute(parts)`` for the samples' indices in micro-batches that fit in memory (``Budget.fit``)."""
    packed = backbone_of(base).packs
    return budget.fit(samples, lambda: split_microbatches(samples, budget.tokens, packed=packed), compute)


def scored(
    lanes: Lanes,
    parts: Iterable[Sequence[Sample]],
    want: frozenset[Want],
    adapter: LoraWeights,
    temperature: float,
    critic: tuple[LoraWeights, ValueHead] | None = None,
) -> Scored:
    """Score micro-batches by one forward pass each of the base, the policy and the ``critic`` (an adapter and its value
    head), as far as ``want`` needs them."""
    scores: Scored = []
    for samples in parts:
        batch = collate(samples, lanes.base).to(lanes.base.device)
        tables: dict[Want, torch.Tensor | None] = {}
        with torch.no_grad():
            if Want.REFERENCE in want:
                tables[Want.REFERENCE], _ = token_logprobs(lanes.base, batch, temperature)
            if want & {Want.LOGPROBS, Want.ENTROPY}:
                with lanes.single(adapter):
                    tables[Want.LOGPROBS], tables[Want.ENTROPY] = token_logprobs(
                        lanes.base, batch, temperature, entropy=Want.ENTROPY in want
                    )
            if Want.VALUES in want and critic is not None:
                value_adapter, head = critic
                with lanes.single(value_adapter):
                    tables[Want.VALUES] = by_place(head(hidden_states(lanes.base, batch)), batch)
        scores.append({kind: per_sample(table, batch) for kind in want if (table := tables[kind]) is not None})
    return scores
