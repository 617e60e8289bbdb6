"""Trainer log-probabilities: one fresh forward pass over prompt + completion, nothing of the vocabulary for prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from retrain.policy.base import BaseModel
from retrain.policy.head import Lap, Supports, no_lap
from retrain.policy.packing import Layout
from retrain.policy.trunk import trunk_of, whole_logits
from retrain.types import Support


@dataclass
class TrainSequence:
    """One completion to train on: token ids, and per completion token (arrays [T]) what the sampler and credit say.

    ``support``: the tokens that each was drawn among where sampling was truncated; log-probabilities, of the base too,
    and entropies are then over these, so that the ratio is that of the distributions sampled from.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    sampler_logprobs_T: np.ndarray
    advantages_T: np.ndarray
    loss_mask_T: np.ndarray
    support: Support | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass
class MicroBatch:
    """Some sequences: the layout that the model reads, and per completion token [B, T] what the loss reads."""

    layout: Layout
    targets_BT: torch.Tensor
    completion_BT: torch.Tensor
    loss_mask_BT: torch.Tensor
    advantages_BT: torch.Tensor
    sampler_logprobs_BT: torch.Tensor
    supports: Supports | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(
            self.layout.to(device),
            self.targets_BT.to(device),
            self.completion_BT.to(device),
            self.loss_mask_BT.to(device),
            self.advantages_BT.to(device),
            self.sampler_logprobs_BT.to(device),
            None if self.supports is None else self.supports.to(device),
        )


def position_ids(attention_BL: torch.Tensor) -> torch.Tensor:
    """Positions that count real tokens only: padding on the left does not shift them."""
    return (attention_BL.long().cumsum(-1) - 1).clamp_min(0)


def split_microbatches(
    sequences: Sequence[TrainSequence], token_budget: int, *, packed: bool = False
) -> list[list[int]]:
    """Indices in micro-batches whose size stays within ``token_budget`` (one sequence always fits).

    Padded: tokens including padding, sequences sorted by length so that there is little of it. ``packed``: a prompt
    counts once for neighbours that share it, groups stay together as far as they fit. The order is a function of the
    prompts and lengths alone.
    """
    if packed:
        members: dict[tuple[int, ...], list[int]] = {}
        for i, sequence in enumerate(sequences):
            members.setdefault(tuple(sequence.prompt_ids), []).append(i)
        groups = sorted(members.values(), key=lambda group: max(len(sequences[i]) for i in group))
        order = [i for group in groups for i in sorted(group, key=lambda i: len(sequences[i]))]
    else:
        order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
    batches: list[list[int]] = []
    prompt = completion = used = 0
    for i in order:
        prompt_ids, width, length = (
            sequences[i].prompt_ids,
            len(sequences[i].prompt_ids),
            len(sequences[i].completion_ids),
        )
        shared = packed and batches and tuple(prompt_ids) == tuple(sequences[batches[-1][-1]].prompt_ids)
        grown = used + length + (0 if shared else width)
        if not packed and batches:
            grown = (len(batches[-1]) + 1) * (max(prompt, width) + max(completion, length))
        if batches and grown <= token_budget:
            batches[-1].append(i)
            prompt, completion, used = max(prompt, width), max(completion, length), grown
        else:
            batches.append([i])
            prompt, completion, used = width, length, width + length
    return batches


def collate(sequences: Sequence[TrainSequence], base: BaseModel, *, share: bool = True) -> MicroBatch:
    """The tensors of these sequences, on the host. ``share``: prompts that repeat are computed once."""
    length = max(len(s.completion_ids) for s in sequences)
    rows = len(sequences)
    real = np.float64 if base.dtype == torch.float64 else np.float32
    targets = np.full((rows, length), base.pad_id, dtype=np.int64)
    floats = np.zeros((2, rows, length), dtype=real)
    masks = np.zeros((2, rows, length), dtype=bool)
    for i, s in enumerate(sequences):
        t = len(s.completion_ids)
        targets[i, :t] = s.completion_ids
        floats[0, i, :t], floats[1, i, :t] = s.advantages_T, s.sampler_logprobs_T
        masks[0, i, :t], masks[1, i, :t] = True, s.loss_mask_T
    return MicroBatch(
        layout=trunk_of(base).layout(sequences, base, share),
        targets_BT=torch.from_numpy(targets),
        completion_BT=torch.from_numpy(masks[0]),
        loss_mask_BT=torch.from_numpy(masks[1]),
        advantages_BT=torch.from_numpy(floats[0]),
        sampler_logprobs_BT=torch.from_numpy(floats[1]),
        supports=_supports(sequences),
    )


def _supports(sequences: Sequence[TrainSequence]) -> Supports | None:
    """What the completion tokens were drawn among, sequence after sequence; None where it was the whole vocabulary."""
    known = [s.support for s in sequences if s.support is not None]
    if not known:
        return None
    if len(known) < len(sequences):
        raise ValueError("some sequences were drawn from truncated distributions and some were not")
    counts_M = np.concatenate([np.diff(support.offsets) for support in known])
    rows_K = np.repeat(np.arange(len(counts_M)), counts_M)
    ids_K = np.concatenate([support.ids for support in known]).astype(np.int64)
    offsets = np.concatenate([[0], counts_M.cumsum()])
    return Supports(torch.from_numpy(rows_K), torch.from_numpy(ids_K), offsets.tolist())


def token_logprobs(
    base: BaseModel, batch: MicroBatch, temperature: float, *, entropy: bool = False, lap: Lap = no_lap
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability [B, T] of each completion token at this temperature, and the entropy [B, T].

    The distribution is the one that the engine samples from: logits / temperature over the whole vocabulary, or over
    the recorded support of each token, in fp32 (fp64 for fp64 bases). Padding columns hold 0. ``batch`` is on the
    base's device; ``lap`` as in ``Head.logprobs``.
    """
    trunk, layout = trunk_of(base), batch.layout
    targets_M = batch.targets_BT[batch.completion_BT]
    if trunk.head is not None:
        chosen_M, entropy_M = trunk.head.logprobs(
            trunk.hidden(layout), targets_M, temperature, entropy=entropy, lap=lap, supports=batch.supports
        )
    else:
        real = torch.float64 if base.dtype == torch.float64 else torch.float32
        z_MV = whole_logits(base, layout).to(real) / temperature
        if batch.supports is not None:
            z_MV = batch.supports.only(z_MV)
        logprobs_MV = torch.log_softmax(z_MV, dim=-1)
        chosen_M = logprobs_MV.gather(-1, targets_M.unsqueeze(-1)).squeeze(-1)
        entropy_M = None
        if entropy:
            lap("forward")
            probs_MV = logprobs_MV.exp()
            if batch.supports is not None:
                logprobs_MV = logprobs_MV.masked_fill(logprobs_MV == -math.inf, 0.0)  # 0 · −inf
            entropy_M = -(probs_MV * logprobs_MV).sum(-1)
            lap("compute_entropy")
    return _table(chosen_M, batch), None if entropy_M is None else _table(entropy_M, batch)


def _table(values_M: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Values of the completion tokens at their places [B, T], 0 elsewhere."""
    zeros_BT = values_M.new_zeros(batch.completion_BT.shape)
    return zeros_BT.masked_scatter(batch.completion_BT, values_M)
