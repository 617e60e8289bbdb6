"""Truncated sampling (top-k, top-p, min-p), and the record of which tokens each token was sampled from.

A truncated sampler draws from π(·|S) = π/π(S) on a kept set S. With π over the whole vocabulary in the update, every
importance ratio would be wrong by π(S). The kept set is therefore recorded token by token as it was sampled, and the
update takes its log-probabilities over that very set: "Keep Sampling Mask" (DeepSeek-V3.2, arXiv 2512.02556 §3.1; as a
list of token ids with offsets in vLLM's and prime-rl's sampling replay). An update that found the set again from its
own logits would have one that moves with the policy: a token at its edge drops out, for dropout or rounding alone, and
has no ratio.

Order as in vLLM: temperature; min-p (at least so large a share of the largest probability); top-k; top-p of what is
left (the smallest set of the most probable tokens that holds so much of it). The set is found in ``engines.draw``.

``remember`` is written so that TorchScript compiles it (see ``engines.step``) and CUDA graphs capture it: in place, no
wait for the device, and shapes that do not depend on what is kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from retrain.types import SampleRequest, Support


class Kept(NamedTuple):
    """The record, by sequence and token: ``count_NT`` ids from place ``first_NT`` on in ``ids_M``, of which ``used_1``
    places are taken. The last place of ``ids_M`` takes what nobody wants. ``rank_K``: 0 to K − 1."""

    ids_M: torch.Tensor
    used_1: torch.Tensor
    first_NT: torch.Tensor
    count_NT: torch.Tensor
    rank_K: torch.Tensor


def remember(kept: Kept, ids_RK: torch.Tensor, place_R: torch.Tensor) -> None:
    """Note the kept ids of each row (−1: none) as those of token ``place_R`` of the flattened [N, T]."""
    there_RK = ids_RK >= 0
    count_R = there_RK.sum(1)
    end_R = count_R.cumsum(0) + kept.used_1
    places_RK = (there_RK.view(-1).cumsum(0) - 1 + kept.used_1).masked_fill(~there_RK.view(-1), kept.ids_M.shape[0] - 1)
    kept.ids_M.index_copy_(0, places_RK, ids_RK.view(-1).to(kept.ids_M.dtype))
    kept.first_NT.view(-1).index_copy_(0, place_R, end_R - count_R)
    kept.count_NT.view(-1).index_copy_(0, place_R, count_R)
    kept.used_1.copy_(end_R[-1:])


def cuts_of(requests: Sequence[SampleRequest], vocabulary: int) -> np.ndarray | None:
    """``cut_R3`` of rows that sample these requests, float64; None when none is truncated."""
    cuts = [
        (min(r.top_k or vocabulary, vocabulary), r.top_p, r.min_p) if r.truncates else (0, 1.0, 0.0) for r in requests
    ]
    return np.array(cuts, dtype=np.float64) if any(r.truncates for r in requests) else None


class Keeper:
    """The host's side of the record of ``count`` sequences of at most ``longest`` tokens, ``most`` ids for each: makes
    room ahead of the device and reads it at the end."""

    def __init__(self, count: int, longest: int, most: int, device: torch.device):
        self.kept = Kept(
            ids_M=torch.empty(1, dtype=torch.int32, device=device),
            used_1=torch.zeros(1, dtype=torch.long, device=device),
            first_NT=torch.zeros(count, longest, dtype=torch.long, device=device),
            count_NT=torch.zeros(count, longest, dtype=torch.long, device=device),
            rank_K=torch.arange(most, device=device),
        )

    def make_room(self, draws: int) -> bool:
        """Room for so many more draws; True when ``kept`` has moved for it. Waits for the device."""
        used, size = int(self.kept.used_1), len(self.kept.ids_M)
        needed = used + draws * len(self.kept.rank_K) + 1
        if needed <= size:
            return False
        wider = self.kept.ids_M.new_empty(max(2 * size, needed))
        wider[:used] = self.kept.ids_M[:used]
        self.kept = self.kept._replace(ids_M=wider)
        return True

    def supports(self, sequences: Sequence[int], lengths: Sequence[int]) -> list[Support | None]:
        """What was kept for each token of these sequences; None for one that was not truncated."""
        index = torch.tensor(sequences, device=self.kept.ids_M.device)
        first_NT, count_NT = (table[index].cpu().numpy() for table in (self.kept.first_NT, self.kept.count_NT))
        supports: list[Support | None] = []
        for first_T, count_T, length in zip(first_NT, count_NT, lengths, strict=True):
            first_T, count_T = first_T[:length], count_T[:length]
            if not count_T.any():
                supports.append(None)
                continue
            offsets = np.concatenate([[0], count_T.cumsum()])
            places = np.repeat(first_T - offsets[:-1], count_T) + np.arange(offsets[-1])
            ids = self.kept.ids_M[torch.from_numpy(places).to(self.kept.ids_M.device)]
            supports.append(Support(ids.cpu().numpy(), offsets))
        return supports
