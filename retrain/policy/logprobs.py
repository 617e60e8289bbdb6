"""Trainer log-probabilities: one fresh forward pass over a sample, with the output layer for sampled tokens alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from retrain.errors import ModelError
from retrain.policy.backbone import backbone_of, whole_logits
from retrain.policy.base import BaseModel
from retrain.policy.head import Lap, Supports, no_lap
from retrain.policy.packing import Layout, prefix_key
from retrain.policy.rounded import NARROW, rounded, rounds
from retrain.types import Sample


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of some samples: what the model reads, and of their action tokens what the loss reads.

    Tables [B, T] have a row for each sample and its action tokens from the left; the padding after them is 0 or False.
    A sample with the action tokens 10, 11, 12, of which the last does not train, has ``action_BT`` 1 1 1 0 and
    ``loss_mask_BT`` 1 1 0 0 beside a sample of four. Floats have the base's dtype, float32 at least.
    """

    layout: Layout
    targets_M: torch.Tensor  # int64 [M]: the action tokens, sample after sample
    action_BT: torch.Tensor  # bool
    loss_mask_BT: torch.Tensor  # bool: those that train
    advantages_BT: torch.Tensor
    sampler_logprobs_BT: torch.Tensor  # nats
    supports: Supports | None = None  # None where sampling was not truncated
    old_logprobs_BT: torch.Tensor | None = None  # nats, before the first of several updates of a batch
    values_BT: torch.Tensor | None = None  # The critic's, before the update
    value_targets_BT: torch.Tensor | None = None  # With a critic
    policy_weights_BT: torch.Tensor | None = None  # Where tokens can be rejected: 0 for those that were

    def to(self, device: torch.device) -> MicroBatch:
        moved = {name: part.to(device) for name, part in vars(self).items() if part is not None}
        return MicroBatch(**moved)


def split_microbatches(samples: Sequence[Sample], token_budget: int, *, packed: bool = False) -> list[list[int]]:
    """Return indices in micro-batches of at most ``token_budget`` tokens, or of one sample.

    Padded: padding counts, and samples are sorted by length. ``packed``: a prefix counts once for neighbours that share
    it, and groups stay together as far as they fit. The order depends on prefixes and lengths only.
    """
    keys = [prefix_key(sample) for sample in samples]
    batches: list[list[int]] = []
    prefix = rest = used = 0
    for i in _packed_order(samples, keys) if packed else sorted(range(len(samples)), key=lambda i: len(samples[i])):
        width = samples[i].prefix
        length = len(samples[i]) - width
        shared = packed and batches and keys[i] == keys[batches[-1][-1]]
        grown = used + length + (0 if shared else width)
        if not packed and batches:
            grown = (len(batches[-1]) + 1) * (max(prefix, width) + max(rest, length))
        if batches and grown <= token_budget:
            batches[-1].append(i)
            prefix, rest, used = max(prefix, width), max(rest, length), grown
        else:
            batches.append([i])
            prefix, rest, used = width, length, width + length
    return batches


def _packed_order(samples: Sequence[Sample], keys: Sequence[bytes]) -> list[int]:
    """Return indices group by group, each group's samples and the groups' longest samples in ascending length."""
    groups: dict[bytes, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    sorted_groups = (sorted(group, key=lambda i: len(samples[i])) for group in groups.values())
    return [i for group in sorted(sorted_groups, key=lambda group: len(samples[group[-1]])) for i in group]


OPTIONAL = ("old_logprobs", "values", "value_targets", "policy_weights")  # Arrays that only some samples have


def collate(samples: Sequence[Sample], base: BaseModel, *, share: bool = True) -> MicroBatch:
    """Return these samples as tensors on the host. ``share``: equal prefixes are computed once."""
    counts = [int(sample.action_mask.sum()) for sample in samples]
    shape = (len(samples), max(counts))
    real = np.float64 if base.dtype == torch.float64 else np.float32
    floats = np.zeros((2, *shape), dtype=real)
    masks = np.zeros((2, *shape), dtype=bool)
    for i, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        mask = sample.action_mask
        floats[0, i, :count], floats[1, i, :count] = sample.advantages[mask], sample.logprobs[mask]
        masks[0, i, :count], masks[1, i, :count] = True, sample.loss_mask[mask]
    return MicroBatch(
        layout=backbone_of(base).layout(samples, base, share),
        targets_M=torch.from_numpy(np.concatenate([sample.token_ids[sample.action_mask] for sample in samples])),
        action_BT=torch.from_numpy(masks[0]),
        loss_mask_BT=torch.from_numpy(masks[1]),
        advantages_BT=torch.from_numpy(floats[0]),
        sampler_logprobs_BT=torch.from_numpy(floats[1]),
        supports=_supports(samples),
        **{f"{name}_BT": _table_of(samples, name, shape, real) for name in OPTIONAL},
    )


def _table_of(samples: Sequence[Sample], name: str, shape: tuple[int, int], real: type) -> torch.Tensor | None:
    """Return an array of every sample over its action tokens [B, T]; None where one has none."""
    arrays = [getattr(sample, name) for sample in samples]
    if any(array is None for array in arrays):
        return None
    table = np.zeros(shape, dtype=real)
    for row, sample, array in zip(table, samples, arrays, strict=True):
        row[: int(sample.action_mask.sum())] = array[sample.action_mask]
    return torch.from_numpy(table)


def _supports(samples: Sequence[Sample]) -> Supports | None:
    """Return the supports of the action tokens, sample after sample; None for the whole vocabulary."""
    supports = [sample.support for sample in samples if sample.support is not None]
    if not supports:
        return None
    if len(supports) < len(samples):
        raise ValueError("some samples were sampled from truncated distributions and some were not")
    counts_M = np.concatenate([np.diff(support.offsets) for support in supports])
    rows_K = np.repeat(np.arange(len(counts_M)), counts_M)
    ids_K = np.concatenate([support.ids for support in supports]).astype(np.int64)
    offsets = np.concatenate([[0], counts_M.cumsum()])
    return Supports(torch.from_numpy(rows_K), torch.from_numpy(ids_K), offsets.tolist())


def token_logprobs(
    base: BaseModel,
    batch: MicroBatch,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_gradient: bool = True,
    lap: Lap = no_lap,
    hidden_MH: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability [B, T] of each action token, and with ``entropy`` the entropy; 0 in the padding.

    The distribution is the one that the engine samples from: softmax(logits / temperature) over the vocabulary, or over
    the recorded support of each token, in fp32 (fp64 for fp64 bases). ``batch`` is on the base's device; ``lap`` as in
    ``Head.logprobs``; ``hidden_MH`` are the hidden states if already computed.
    """
    backbone, layout = backbone_of(base), batch.layout
    if backbone.head is not None:
        head, hidden_MH = backbone.head, backbone.hidden(layout) if hidden_MH is None else hidden_MH
        if rounds(head.weight_VH):  # its logits keep sixteen bits, as those of a bfloat16 base
            head, hidden_MH = replace(head, weight_VH=rounded(head.weight_VH), product_VH=None), hidden_MH.to(NARROW)
        chosen_M, entropy_M = head.logprobs(
            hidden_MH,
            batch.targets_M,
            temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            lap=lap,
            supports=batch.supports,
        )
    else:
        real = torch.float64 if base.dtype == torch.float64 else torch.float32
        z_MV = whole_logits(base, layout).to(real) / temperature
        if batch.supports is not None:
            z_MV = batch.supports.only(z_MV)
        logprobs_MV = torch.log_softmax(z_MV, dim=-1)
        chosen_M = logprobs_MV.gather(-1, batch.targets_M.unsqueeze(-1)).squeeze(-1)
        entropy_M = None
        if entropy:
            lap("forward")
            probs_MV = logprobs_MV.exp()
            if batch.supports is not None:
                logprobs_MV = logprobs_MV.masked_fill(logprobs_MV == -math.inf, 0.0)  # 0 · −inf
            entropy_M = -(probs_MV * logprobs_MV).sum(-1)
            entropy_M = entropy_M if entropy_gradient else entropy_M.detach()
            lap("compute_entropy")
    return by_place(chosen_M, batch), None if entropy_M is None else by_place(entropy_M, batch)


def hidden_states(base: BaseModel, batch: MicroBatch) -> torch.Tensor:
    """Return the hidden states [M, H] that predict an action token. Raises ModelError for models without access to
    them."""
    backbone = backbone_of(base)
    if backbone.decoder is None:
        raise ModelError(
            f"{type(base.model).__name__} does not come apart into layers and an output layer, so it can have no "
            'critic: advantage_mode = "grpo"'
        )
    return backbone.hidden(batch.layout)


def by_place(values_M: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the values of the action tokens as a table [B, T], 0 in the padding."""
    return values_M.new_zeros(batch.action_BT.shape).masked_scatter(batch.action_BT, values_M)


def per_sample(values_BT: torch.Tensor, batch: MicroBatch) -> list[np.ndarray]:
    """Return each sample's values of its action tokens [T], on the host."""
    rows = zip(values_BT.cpu().numpy(), batch.action_BT.cpu().numpy(), strict=True)
    return [row_T[action_T] for row_T, action_T in rows]
