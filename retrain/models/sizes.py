"""Sizes that both the estimate of a run and the run itself use."""

from __future__ import annotations

SMALL_MODEL_BYTES = 32 << 20
"""Weights up to this size count as small on a CPU: a few MiB of cache per core hold most of them."""
ADAPTER_BYTES = 20
"""Per adapter weight, beside its copy in the base's precision that decoding reads: fp32 master, gradient, the two
moments of AdamW, and the weights as they were published to the engine."""
LOGITS_COPIES = 5
"""What a sampled token takes in fp32, in rows of logits: themselves, their mass, its sum and two temporaries."""


def cpu_token_budget(weight_bytes: int) -> int:
    """Tokens of a micro-batch on a CPU: for the sake of memory, the fewest that are computed at full speed.

    Measured with ``benchmarks/update.py --micro``: at hidden 256 (a micro-batch on every core) 768 to 2,048 tokens take
    the same time and 512 16 % more; at hidden 512 (one micro-batch on all cores) 1,536 and 2,048 take the same and
    1,024 10 % more.
    """
    return 1024 if weight_bytes <= SMALL_MODEL_BYTES else 2048


def adapter_bytes(weights: int, itemsize: int) -> int:
    """Bytes of one lane whose adapter has this many weights, over a base with numbers of ``itemsize`` bytes."""
    return weights * (ADAPTER_BYTES + itemsize)


def kept_bytes(hidden: int, queries: int, keys: int, intermediate: int, head_norms: bool, itemsize: int) -> int:
    """Bytes that one layer keeps of one token for the backward pass of the update.

    ``queries`` and ``keys``: numbers in all query heads and in all key heads; ``intermediate``: width of the MLP, of
    all experts that a token meets; ``head_norms``: queries and keys are normalised. Norms, linear layers and attention
    keep their inputs, attention also its output, the MLP its gate and its other half.
    """
    norms = 2 * hidden + head_norms * (queries + keys)
    linear = 2 * hidden + queries + intermediate
    attention = 2 * queries + 2 * keys
    return (norms + linear + attention + 2 * intermediate) * itemsize
