"""Arrays of rollouts as padded tables and back."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.types import CreditedBatch, CreditedRollout, Rollout


def pad(arrays: Sequence[np.ndarray], dtype: type = np.float64) -> torch.Tensor:
    """Return rows of different lengths as one table [B, T], 0 beyond each row's end."""
    table_BT = np.zeros((len(arrays), max(map(len, arrays))), dtype=dtype)
    for row_T, array in zip(table_BT, arrays, strict=True):
        row_T[: len(array)] = array
    return torch.from_numpy(table_BT)


def pad_if_all(arrays: Sequence[np.ndarray | None], dtype: type = np.float64) -> torch.Tensor | None:
    """Return the padded table, or None where a row is missing."""
    rows = [array for array in arrays if array is not None]
    return pad(rows, dtype) if len(rows) == len(arrays) else None


def token_mask(rows: Sequence[Rollout | np.ndarray]) -> Mask_BT:
    """Return which entries of the padded table of these rollouts or arrays are not padding."""
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]


def fields(name: str, table_BT: Floats_BT | Mask_BT, rollouts: Sequence[Rollout]) -> Iterable[dict[str, Any]]:
    """Yield for each rollout its row of the table, without padding, as the field ``name``."""
    for rollout, row_T in zip(rollouts, table_BT.numpy(), strict=True):
        yield {name: row_T[: len(rollout)]}


def pad_field(rollouts: Sequence[CreditedRollout], name: str, dtype: type = np.float64) -> torch.Tensor:
    """Return the field ``name``, an array [T] of every rollout, as a padded table [B, T]."""
    return pad([getattr(rollout, name) for rollout in rollouts], dtype)


def discard_by_tokens(batch: CreditedBatch) -> CreditedBatch:
    """Discard the groups in which no token has an advantage, and no others: for token credit that starts from the
    rewards, so that the episode advantage does not say which groups have signal."""
    reasons = []
    for group in batch.groups:
        rows = [rollout.token_advantages_T for rollout in group.rollouts if rollout.token_advantages_T is not None]
        has_signal = any(row_T.any() for row_T in rows)
        reasons.append(group.discarded if not rows else None if has_signal else "zero_advantage")
    return batch.with_discarded(reasons)
