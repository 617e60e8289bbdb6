"""Trainer log-probabilities: one fresh forward pass over prompt + completion, logits for completion tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from retrain.policy.base import BaseModel


@dataclass
class TrainSequence:
    """One completion to train on: token ids, and per completion token (arrays [T]) what the sampler and credit say."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    sampler_logprobs_T: np.ndarray
    advantages_T: np.ndarray
    loss_mask_T: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass
class MicroBatch:
    """Padded tensors of some sequences: prompts end and completions start at the same column."""

    ids_BL: torch.Tensor
    attention_BL: torch.Tensor
    targets_BT: torch.Tensor
    completion_BT: torch.Tensor
    loss_mask_BT: torch.Tensor
    advantages_BT: torch.Tensor
    sampler_logprobs_BT: torch.Tensor


def position_ids(attention_BL: torch.Tensor) -> torch.Tensor:
    """Positions that count real tokens only: padding on the left does not shift them."""
    return (attention_BL.long().cumsum(-1) - 1).clamp_min(0)


def split_microbatches(sequences: Sequence[TrainSequence], token_budget: int) -> list[list[int]]:
    """Indices in micro-batches whose padded size stays within ``token_budget`` (one sequence always fits).

    Sequences are sorted by length so that padding is small; the order is a function of the lengths alone.
    """
    order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
    batches: list[list[int]] = []
    prompt = completion = 0
    for i in order:
        wider_prompt = max(prompt, len(sequences[i].prompt_ids))
        wider_completion = max(completion, len(sequences[i].completion_ids))
        if batches and (len(batches[-1]) + 1) * (wider_prompt + wider_completion) <= token_budget:
            batches[-1].append(i)
            prompt, completion = wider_prompt, wider_completion
        else:
            batches.append([i])
            prompt, completion = len(sequences[i].prompt_ids), len(sequences[i].completion_ids)
    return batches


def collate(sequences: Sequence[TrainSequence], base: BaseModel) -> MicroBatch:
    """Pad prompts on the left and completions on the right, onto the base's device."""
    width = max(len(s.prompt_ids) for s in sequences)
    length = max(len(s.completion_ids) for s in sequences)
    rows = len(sequences)
    ids = np.full((rows, width + length), base.pad_id, dtype=np.int64)
    attention = np.zeros((rows, width + length), dtype=np.int64)
    real = np.float64 if base.dtype == torch.float64 else np.float32
    floats = np.zeros((2, rows, length), dtype=real)
    masks = np.zeros((2, rows, length), dtype=bool)
    for i, s in enumerate(sequences):
        p, t = len(s.prompt_ids), len(s.completion_ids)
        ids[i, width - p : width] = s.prompt_ids
        ids[i, width : width + t] = s.completion_ids
        attention[i, width - p : width + t] = 1
        floats[0, i, :t], floats[1, i, :t] = s.advantages_T, s.sampler_logprobs_T
        masks[0, i, :t], masks[1, i, :t] = True, s.loss_mask_T
    device = base.device
    ids_BL = torch.from_numpy(ids).to(device)
    return MicroBatch(
        ids_BL=ids_BL,
        attention_BL=torch.from_numpy(attention).to(device),
        targets_BT=ids_BL[:, width:],
        completion_BT=torch.from_numpy(masks[0]).to(device),
        loss_mask_BT=torch.from_numpy(masks[1]).to(device),
        advantages_BT=torch.from_numpy(floats[0]).to(device),
        sampler_logprobs_BT=torch.from_numpy(floats[1]).to(device),
    )


def token_logprobs(
    base: BaseModel, batch: MicroBatch, temperature: float, *, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability [B, T] of each completion token at this temperature, and the full-vocabulary entropy [B, T].

    The distribution is the one that the engine samples from: logits / temperature over the whole vocabulary, in
    fp32 (fp64 for fp64 bases). Padding columns hold finite values to be masked by the caller.
    """
    length = batch.targets_BT.shape[1]
    logits: Any = base.model(
        input_ids=batch.ids_BL,
        attention_mask=batch.attention_BL,
        position_ids=position_ids(batch.attention_BL),
        use_cache=False,
        logits_to_keep=length + 1,
    ).logits[:, :-1]
    real = torch.float64 if base.dtype == torch.float64 else torch.float32
    logprobs_BTV = torch.log_softmax(logits.to(real) / temperature, dim=-1)
    chosen_BT = logprobs_BTV.gather(-1, batch.targets_BT.unsqueeze(-1)).squeeze(-1)
    entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1) if entropy else None
    return chosen_BT, entropy_BT
