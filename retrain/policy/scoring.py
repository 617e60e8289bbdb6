"""Scores of sampled tokens by forward passes without gradients."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch

from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget, is_out_of_memory
from retrain.policy.critic import ValueHead
from retrain.policy.logprobs import by_place, collate, hidden_states, per_sample, split_microbatches, token_logprobs
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.policy.protocol import Want
from retrain.types import Sample

Scored = list[dict[Want, list[np.ndarray]]]
"""Per micro-batch and kind of score, each sample's array over its sampled tokens [T]."""


T = TypeVar("T")


def in_microbatches(
    base: BaseModel, budget: Budget, samples: Sequence[Sample], compute: Callable[[list[list[int]]], T]
) -> T:
    """Return ``compute(parts)``, ``parts`` being the samples' indices in micro-batches, smaller ones for as long as
    memory runs out. Raises the error where a single sample does not fit."""
    while True:
        parts = split_microbatches(samples, budget.tokens, packed=backbone_of(base).packs)
        sizes = [len(part) for part in parts]
        try:
            return compute(parts)
        except (MemoryError, RuntimeError) as error:
            if max(sizes) == 1 or not is_out_of_memory(error):
                raise
            reason = str(error)  # the error itself would keep every tensor of the failed pass in memory
        budget.shrink(sizes, [len(sample) for sample in samples], reason)


def scored(
    lanes: Lanes,
    parts: Iterable[Sequence[Sample]],
    want: frozenset[Want],
    adapter: Adapter | LoraWeights,
    temperature: float,
    critic: tuple[Adapter | LoraWeights, ValueHead] | None = None,
) -> Scored:
    """Score micro-batches by one forward pass each of the base, of the policy and of the ``critic`` (an adapter and its
    value head), as far as ``want`` needs them."""
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
