"""Types of numpy arrays (those of tensors are in ``shapes``), and a function that names a plug-in. Does not import
torch."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float64, Integer, Num

TokenMask = Bool[np.ndarray, "T"]
AnyTokenMask = Bool[np.ndarray, "_"]
OffsetArray = Integer[np.ndarray, "T 2"]
TokenNumbers = Integer[np.ndarray, "T"]
# Per token its half-open character range in the text: a list of pairs or an integer array [T, 2]
Offsets = Sequence[tuple[int, int]] | Integer[np.ndarray, "_ 2"]

# One number per replicate: a seed, a problem, a pair of runs
Values = Sequence[float] | Num[np.ndarray, "S"] | Bool[np.ndarray, "S"]
Doubles_S = Float64[np.ndarray, "S"]
Table = Num[np.ndarray, "..."]  # Array of any shape


def plugin_name(function: Callable[..., object]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
