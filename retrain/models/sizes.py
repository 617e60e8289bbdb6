"""Sizes that both the estimate of a run and the run itself use."""

from __future__ import annotations

SMALL_MODEL_BYTES = 32 << 20
"""Weights up to this size count as small on a CPU: a few MiB of cache per core hold most of them."""


def cpu_token_budget(weight_bytes: int) -> int:
    """Tokens of a micro-batch on a CPU: for the sake of memory, the fewest that are computed at full speed.

    Measured with ``benchmarks/update.py --micro``: at hidden 256 (a micro-batch on every core) 768 to 2,048 tokens take
    the same time and 512 16 % more; at hidden 512 (one micro-batch on all cores) 1,536 and 2,048 take the same and
    1,024 10 % more.
    """
    return 1024 if weight_bytes <= SMALL_MODEL_BYTES else 2048


def kept_numbers(itemsize: int) -> int:
    """Numbers per layer and token, in units of the hidden size, that the update keeps for its backward pass: measured
    for Qwen3 with an MLP three times as wide; in half precision norms keep copies in fp32."""
    return 40 if itemsize < 4 else 24
