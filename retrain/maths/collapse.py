"""Runs that collapsed: one that lies far below what its seed and its condition let expect.

A mean over seeds with a collapsed run in it says little about the typical run, and no test of means changes that. The
*gap* of a run is how far it fell against the other conditions of its seed, beside how these conditions usually differ:
the median over the others of (usual difference − difference in this seed), with the median over seeds as the usual.
Medians, so that a collapse neither hides itself nor accuses the rest of its seed. Of two conditions the lower of the
pair is the one that fell.

A run is flagged when its gap exceeds a multiple of the typical gap: the root mean square of the smaller three quarters
of all gaps, which a quarter of collapsed runs leaves alone. The multiple is the one that ``FALSE_FLAGS`` of tables of
normal values of this very shape exceed, from a simulation that is always the same: "four median absolute deviations",
a multiple for large samples, flags 26 to 28 % of normal tables of two conditions and over 40 % of five
(``benchmarks/rules.py flags``).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from retrain.maths.arrays import Marks, Table

FALSE_FLAGS = 0.05  # Share of tables without a collapse in which a run is flagged nevertheless
FEWEST_SEEDS = 4  # Fewest seeds from which a typical value is estimated
SIMULATIONS = 4_000
KEPT = 0.75
ROUNDING = 1e-9


@dataclass(frozen=True)
class Collapse:
    """A flagged run: row (seed) and column (condition) of the table, and how far it fell, in the table's unit."""

    seed: int
    condition: int
    gap: float


def gaps(tables: Table) -> Table:
    """How far each run fell, [..., seeds, conditions], from tables of that shape with NaN where a run is missing."""
    ahead = tables[..., :, :, None] - tables[..., :, None, :]
    fell = _median(ahead, -3)[..., None, :, :] - ahead
    columns = tables.shape[-1]
    if columns == 2:
        return np.stack([fell[..., 0, 1], fell[..., 1, 0]], axis=-1)
    return _median(fell[..., ~np.eye(columns, dtype=bool)].reshape(*fell.shape[:-1], columns - 1), -1)


def _median(values: np.ndarray, axis: int) -> np.ndarray:
    """Median of what is not NaN, NaN of nothing (numpy's own is slow and warns)."""
    ordered = np.sort(values, axis=axis)  # NaN last
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    low, high = (np.take_along_axis(ordered, np.maximum(place, 0), axis) for place in ((count - 1) // 2, count // 2))
    return np.squeeze((low + high) / 2.0, axis=axis)


def _ratio(fallen: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """The gaps [..., seeds, conditions] over the typical one; ``floor`` is the least it can be."""
    if fallen.shape[-1] == 2:  # the other column has the same sizes
        sizes = np.abs(fallen[..., 0])
    else:
        sizes = np.abs(fallen).reshape(*fallen.shape[:-2], -1)
    sizes = np.sort(sizes, axis=-1)  # NaN last
    kept = np.ceil(KEPT * (~np.isnan(sizes)).sum(axis=-1, keepdims=True))
    squares = np.where(np.arange(sizes.shape[-1]) < kept, sizes, 0.0) ** 2
    typical = np.sqrt(squares.sum(axis=-1) / np.maximum(kept[..., 0], 1.0))
    typical = np.maximum(typical, max(floor, 1e-300))
    return fallen / typical[..., None, None]


@lru_cache(maxsize=256)
def threshold(seeds: int, conditions: int) -> float:
    """The multiple of the typical gap that one in ``1/FALSE_FLAGS`` normal tables of this shape exceeds."""
    tables = np.random.default_rng((seeds, conditions)).standard_normal((SIMULATIONS, seeds, conditions))
    blocks = [_ratio(gaps(block)).max(axis=(-2, -1)) for block in np.array_split(tables, 20)]
    return float(np.quantile(np.concatenate(blocks), 1.0 - FALSE_FLAGS))


def flagged(tables: Table, resolution: float = 0.0) -> Marks:
    """Whether each run of tables [..., seeds, conditions] collapsed; NaN is a run that is missing.

    ``resolution`` is the step of the scale of the values: a typical gap is never taken to be below that of rounding,
    so that equal values flag no neighbour. Tables of one condition or of fewer than four seeds have no flags. The
    shape that counts is that without empty rows and columns.
    """
    values = np.asarray(tables, dtype=np.float64)
    seen = ~np.isnan(values)
    several = seen.sum(axis=-1, keepdims=True) > 1
    values = np.where(several, values, np.nan)
    seen &= several
    flags = np.zeros(values.shape, dtype=bool)
    rows, columns = seen.any(axis=-1).sum(axis=-1), seen.any(axis=-2).sum(axis=-1)
    for n, c in {(int(n), int(c)) for n, c in zip(np.ravel(rows), np.ravel(columns), strict=True)}:
        if n < FEWEST_SEEDS or c < 2:
            continue
        these = (rows == n) & (columns == c)
        own = values[these]
        fallen = gaps(own)
        ratio = _ratio(fallen, resolution / np.sqrt(6.0))
        rounding = ROUNDING * np.nanmax(np.abs(own), axis=(-2, -1), initial=0.0)[..., None, None]
        with np.errstate(invalid="ignore"):
            flags[these] = (ratio > threshold(n, c)) & (fallen > rounding)
    return flags


def collapses(table: Table, resolution: float = 0.0) -> list[Collapse]:
    """The flagged runs of one table [seeds, conditions], see ``flagged``, the deepest fall first."""
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"a table has seeds and conditions: got shape {values.shape}")
    found = np.argwhere(flagged(values, resolution))
    if not len(found):
        return []
    fallen = gaps(values)
    listed = [Collapse(int(seed), int(column), float(fallen[seed, column])) for seed, column in found]
    return sorted(listed, key=lambda each: -each.gap)
