"""What a model with an adapter says of sampled tokens, by forward passes without gradients."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from retrain.policy.critic import ValueHead
from retrain.policy.logprobs import by_place, collate, hidden_states, token_logprobs
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.policy.protocol import Want
from retrain.types import Sample

Scored = list[dict[Want, list[np.ndarray]]]
"""Of each micro-batch what was asked for: of each sample an array over its sampled tokens [T]."""


def scored(
    lanes: Lanes,
    parts: Iterable[Sequence[Sample]],
    want: frozenset[Want],
    adapter: Adapter | LoraWeights,
    temperature: float,
    critic: tuple[Adapter | LoraWeights, ValueHead] | None = None,
) -> Scored:
    """Score micro-batches, one forward pass for the base, one for the policy and one for the ``critic``, an adapter and
    the head on it, each where it is wanted."""
    found: Scored = []
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
                own, head = critic
                with lanes.single(own):
                    tables[Want.VALUES] = by_place(head(hidden_states(lanes.base, batch)), batch)
        own_BT = batch.action_BT.cpu().numpy()
        arrays: dict[Want, list[np.ndarray]] = {}
        for kind in want:
            table = tables[kind]
            assert table is not None
            arrays[kind] = [row_T[own_T] for row_T, own_T in zip(table.cpu().numpy(), own_BT, strict=True)]
        found.append(arrays)
    return found
