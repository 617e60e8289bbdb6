"""Two samplings of the same requests beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.types import Action


@dataclass(frozen=True)
class Agreement:
    """``tokens`` were compared, up to where sequences part; of ``sequences`` so many ``parted``; ``gaps`` are the
    differences of log-probabilities (nats)."""

    sequences: int
    parted: int
    tokens: int
    gaps: np.ndarray

    @property
    def parted_per_token(self) -> float:
        """How often a draw comes out differently."""
        return self.parted / max(1, self.tokens)

    @property
    def p99(self) -> float:
        """99 of 100 differences are smaller; infinite where nothing could be compared."""
        return float(np.quantile(self.gaps, 0.99)) if len(self.gaps) else float("inf")

    @property
    def largest(self) -> float:
        """The largest difference."""
        return float(self.gaps.max()) if len(self.gaps) else float("inf")

    @property
    def words(self) -> str:
        """How they compare."""
        same = self.sequences - self.parted
        exactly = ", bit for bit" if not self.parted and self.largest == 0 else ""
        return f"{same} of {self.sequences} sequences equal{exactly}"


def agreement(ours: Sequence[Sequence[Action]], theirs: Sequence[Sequence[Action]]) -> Agreement:
    """Compare them sequence by sequence, each up to the first token that differs."""
    parted = sequences = 0
    gaps = [np.zeros(0)]
    for mine, others in zip(ours, theirs, strict=True):
        for one, other in zip(mine, others, strict=True):
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            shortest = min(len(one), len(other))
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), shortest)
            difference = one.logprobs_T[:common].astype(np.float64) - other.logprobs_T[:common]
            gaps.append(np.abs(difference))
            sequences += 1
            parted += one.token_ids != other.token_ids
    gaps_N = np.concatenate(gaps)
    return Agreement(sequences, parted, len(gaps_N), gaps_N)
