"""LoRA-Squeeze (arXiv 2602.10993): the exact spectrum of ΔW = s·B·A without forming it, and truncation to a rank.

QR of the two thin factors leaves an r × r core whose singular values are those of ΔW. Energy of the first k values,
V(k) = Σ_{i≤k} s_i²/Σ s_i², is a squared error: 95 % energy is a 22.4 % error of the weights, so both are shown. Whether
an adapter still works does not follow from its energy; it has to be evaluated after compression.

Factors are as PEFT stores them, A [r, in] and B [out, r]; for embeddings (A [r, vocabulary], B [dim, r]) ΔW is the
transpose, with the same values. Half-precision factors are computed in float32, float64 stays.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from retrain.errors import UsageError
from retrain.maths.shapes import AnySpectrum, CutA, CutB, Doubles_K, FactorA, FactorB, Spectrum

# Slack when an energy is compared with a required one, so that 1.0 can be reached in floating point
ENERGY_TOLERANCE = 1e-9


def _factors(A_r_in: FactorA, B_out_r: FactorB) -> tuple[FactorA, FactorB]:
    """Return both factors, detached, in a dtype that LAPACK has. Raises ValueError for wrong shapes or non-finite
    values."""
    if A_r_in.dim() != 2 or B_out_r.dim() != 2 or A_r_in.shape[0] != B_out_r.shape[1]:
        raise ValueError(f"expected A [r, in] and B [out, r]: got {tuple(A_r_in.shape)} and {tuple(B_out_r.shape)}")
    dtype = torch.float64 if torch.float64 in (A_r_in.dtype, B_out_r.dtype) else torch.float32
    A_r_in, B_out_r = A_r_in.detach().to(dtype), B_out_r.detach().to(dtype)
    # NaN and infinity propagate to the sum: no boolean tensor of the factor's size is allocated.
    if not (bool(torch.isfinite(A_r_in.sum())) and bool(torch.isfinite(B_out_r.sum()))):
        raise ValueError("the adapter holds NaN or infinity: there is no spectrum to analyse")
    return A_r_in, B_out_r


@torch.no_grad()
def analyse(A_r_in: FactorA, B_out_r: FactorB, scale: float) -> Doubles_K:
    """Return the singular values of scale·B·A, descending, float64 [min(r, in, out)].

    Raises ValueError for NaN or factors that do not fit each other.
    """
    A_r_in, B_out_r = _factors(A_r_in, B_out_r)
    # B·A = Q_B·(R_B·R_Aᵀ)·Q_Aᵀ with orthonormal Q_B and Q_A: the r × r core has the singular values of B·A.
    core = torch.linalg.qr(B_out_r, mode="r").R @ torch.linalg.qr(A_r_in.T, mode="r").R.T
    return torch.linalg.svdvals(core).to(torch.float64) * abs(scale)


def energy(singular_values: Spectrum) -> Doubles_K | None:
    """Return the energy V(k) = Σ_{i≤k} s_i²/Σ s_i² for k = 1 … len, float64, ending in exactly 1. None when ΔW = 0 (an
    untrained module)."""
    squares = singular_values.to(torch.float64).square()
    total = squares.sum()
    if float(total) == 0.0:
        return None
    retained = squares.cumsum(0) / total
    # cumsum and sum add in different orders, so the last quotient may be 1 ± rounding.
    retained[-1] = 1.0
    return retained.clamp(max=1.0)


@dataclass(frozen=True)
class SqueezeRow:
    """The energy that one rank keeps in the trained modules, and the relative error of the weights, √(1 − mean
    energy)."""

    rank: int
    mean_energy: float
    min_energy: float
    max_energy: float
    weight_error: float


@dataclass(frozen=True)
class SqueezeAnalysis:
    """The squeeze table of an adapter.

    ``recommended``: the recommended rank, None if there is none; ``reason`` explains either. ``worst_module``: the
    module that keeps least energy at the recommended rank. ``rank_pattern``: ranks by module that keep the same total
    energy. ``untrained``: modules with ΔW = 0, which count in no average.
    """

    source_rank: int
    rows: tuple[SqueezeRow, ...]
    recommended: int | None
    reason: str
    worst_module: str | None
    rank_pattern: dict[str, int]
    untrained: tuple[str, ...]


def recommend(
    spectra: Mapping[str, AnySpectrum],
    min_variance_retention: float,
    min_layer_retention: float,
    ranks: Sequence[int] | None = None,
) -> SqueezeAnalysis:
    """Return the table and the smallest rank with a sufficient mean energy and a sufficient energy in every module.

    ``spectra`` maps module names to ``analyse`` results; ``ranks`` limits the candidates (default: all up to the source
    rank). A module of lower rank than a candidate keeps all of its energy. Raises UsageError for a candidate above the
    source rank.
    """
    source_rank = max((len(values) for values in spectra.values()), default=0)
    curves = {name: curve for name, values in spectra.items() if (curve := energy(values)) is not None}
    untrained = tuple(name for name in spectra if name not in curves)
    if not curves:
        reason = "every ΔW is 0: the adapter is untrained, so no rank can be recommended"
        return SqueezeAnalysis(source_rank, (), None, reason, None, {}, untrained)
    padded = [torch.nn.functional.pad(curve, (0, source_rank - len(curve)), value=1.0) for curve in curves.values()]
    table = torch.stack(padded)
    rows = []
    for rank in sorted(set(ranks)) if ranks else range(1, source_rank + 1):
        if not 1 <= rank <= source_rank:
            raise UsageError(f"target rank {rank} is outside 1 … {source_rank}, the rank the adapter was trained with")
        at_rank = table[:, rank - 1]
        mean = min(float(at_rank.mean()), 1.0)
        rows.append(SqueezeRow(rank, mean, float(at_rank.min()), float(at_rank.max()), math.sqrt(1.0 - mean)))
    mean_floor, layer_floor = min_variance_retention - ENERGY_TOLERANCE, min_layer_retention - ENERGY_TOLERANCE
    sufficient = (row.rank for row in rows if row.mean_energy >= mean_floor and row.min_energy >= layer_floor)
    rank = next(sufficient, None)
    criterion = f"mean energy >= {min_variance_retention:g} and every module's >= {min_layer_retention:g}"
    if rank is None:
        reason = f"no candidate rank up to {rows[-1].rank} keeps {criterion}"
        return SqueezeAnalysis(source_rank, tuple(rows), None, reason, None, {}, untrained)
    worst = min(curves, key=lambda name: float(curves[name][min(rank, len(curves[name])) - 1]))
    reason = f"smallest rank with {criterion}"
    return SqueezeAnalysis(source_rank, tuple(rows), rank, reason, worst, rank_pattern(spectra, rank), untrained)


def rank_pattern(spectra: Mapping[str, AnySpectrum], uniform_rank: int) -> dict[str, int]:
    """Return ranks by module, with the smallest sum that keeps at least the energy Σ s² that ``uniform_rank`` keeps in
    all modules together.

    The largest singular values of all modules together are kept (Eckart–Young over the block-diagonal ΔW), at least one
    per module because PEFT has no rank 0.
    """
    names = list(spectra)
    squares = {name: spectra[name].to(torch.float64).square() for name in names}
    target = sum(float(values[:uniform_rank].sum()) for values in squares.values())
    pattern = dict.fromkeys(names, 1)
    spent = sum(float(values[:1].sum()) for values in squares.values())
    remaining = sorted(
        ((float(value), index) for index, name in enumerate(names) for value in squares[name][1:]),
        key=lambda pair: -pair[0],
    )
    for value, index in remaining:
        # ``spent`` and ``target`` add the same squares in different orders.
        if spent >= target * (1.0 - ENERGY_TOLERANCE) or value <= 0.0:
            break
        pattern[names[index]] += 1
        spent += value
    return pattern


@torch.no_grad()
def truncate(
    A_r_in: FactorA, B_out_r: FactorB, scale: float, rank: int, new_scale: float | None = None
) -> tuple[CutA, CutB]:
    """Return A' [rank, in] and B' [out, rank] with new_scale·B'A' = the best rank-``rank`` approximation of scale·BA.

    ``new_scale = None`` keeps ``scale``. Singular values are shared evenly (√s on each side); the dtypes of A and B are
    kept; ΔW = 0 gives zeros. ``rank`` is at most that of the factors. Raises ValueError for bad factors.
    """
    new_scale = scale if new_scale is None else new_scale
    A, B = _factors(A_r_in, B_out_r)
    Q_B, R_B = torch.linalg.qr(B)
    Q_A, R_A = torch.linalg.qr(A.T)
    U, S, Vh = torch.linalg.svd(R_B @ R_A.T, full_matrices=False)
    factor = scale / new_scale if new_scale else 1.0
    root = (S[:rank] * abs(factor)).sqrt()
    # √s needs |scale|; the sign of the quotient of scales goes to B.
    B_out_k = Q_B @ (U[:, :rank] * root) * math.copysign(1.0, factor)
    A_k_in = (root[:, None] * Vh[:rank]) @ Q_A.T
    missing = rank - A_k_in.shape[0]  # ranks above min(in, out) carry nothing
    if missing > 0:
        A_k_in = torch.nn.functional.pad(A_k_in, (0, 0, 0, missing))
        B_out_k = torch.nn.functional.pad(B_out_k, (0, missing))
    return A_k_in.to(A_r_in.dtype).contiguous(), B_out_k.to(B_out_r.dtype).contiguous()
