"""Compute log-probabilities of given tokens and of the most probable tokens in their places, by one forward pass."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from retrain.engines.step import truncated
from retrain.policy.backbone import backbone_of, collate, whole_logits
from retrain.policy.base import BaseModel
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.packing import Layout
from retrain.serving.schema import SamplingBody
from retrain.types import Sample

Tops = Sequence[tuple[int, float]]  # (token id, log-probability), the most probable first
ROWS = 256  # Positions whose logits are in memory at once


def score(
    base: BaseModel,
    lanes: Lanes,
    weights: LoraWeights,
    token_ids: Sequence[int],
    begin: int,
    sampling: SamplingBody | None,
    top: int,
) -> tuple[list[float], list[Tops]]:
    """Return the log-probability of each of ``token_ids[begin:]`` (``begin`` ≥ 1) given the tokens before it, and the
    ``top`` most probable tokens in its place. Both are computed for the distribution of ``sampling``; temperature 0
    counts as 1 without truncation. None stands for the model's distribution at temperature 1."""
    given, asked = token_ids[:begin], token_ids[begin:]
    zeros_T = np.zeros(len(asked))
    batch = collate([Sample.single_turn(given, asked, zeros_T, zeros_T)], base).to(base.device)
    logprobs: list[float] = []
    tops: list[Tops] = []
    with torch.no_grad(), lanes.stacked([weights]):
        for start, logits_RV in _logits(base, batch.layout):
            logprob_RV = _processed(logits_RV, sampling).log()
            chosen_R1 = batch.targets_M[start : start + len(logits_RV)].unsqueeze(1)
            logprobs += logprob_RV.gather(1, chosen_R1).squeeze(1).tolist()
            best = logprob_RV.topk(min(top, logprob_RV.shape[1]), -1)
            tops += [list(zip(*each, strict=True)) for each in zip(best[1].tolist(), best[0].tolist(), strict=True)]
    return logprobs, tops


def _logits(base: BaseModel, layout: Layout) -> Iterator[tuple[int, torch.Tensor]]:
    backbone = backbone_of(base)
    if backbone.head is None:
        yield 0, whole_logits(base, layout)
        return
    hidden_MH = backbone.hidden(layout)
    for start in range(0, len(hidden_MH), ROWS):
        yield start, backbone.head.logits(hidden_MH[start : start + ROWS])


def _processed(logits_RV: torch.Tensor, sampling: SamplingBody | None) -> torch.Tensor:
    """Return the probabilities of the sampling distribution [R, V] in at least fp32; truncated tokens have 0."""
    x_RV = logits_RV.to(torch.float64 if logits_RV.dtype == torch.float64 else torch.float32)
    if sampling is None or not sampling.temperature:
        return x_RV.softmax(-1)
    x_RV = x_RV / sampling.temperature
    mass_RV, size = (x_RV - x_RV.amax(-1, keepdim=True)).exp(), x_RV.shape[1]
    if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
        most = min(sampling.top_k or size, size)
        cut_R3 = x_RV.new_tensor([[most, sampling.top_p, sampling.min_p]]).expand(len(x_RV), 3)
        mass_RV, _ = truncated(mass_RV, cut_R3, torch.arange(most, device=x_RV.device), False)
    return mass_RV / mass_RV.sum(-1, keepdim=True)
