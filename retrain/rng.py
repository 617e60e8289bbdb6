"""Random numbers that depend only on the name of their stream.

A stream's name consists of the campaign seed, run seed, purpose, step, prompt and sample. No generator object lives
longer than the call that uses it, so there is no state to save, batching cannot change what is sampled, and two
conditions with the same seed have common random numbers.
"""

import hashlib

import numpy as np


def stream_key(*name: int | str) -> int:
    """Return the 128-bit key of a stream. Names that differ in the order, type or boundaries of their parts have
    different keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in name)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(*name: int | str) -> np.random.Generator:
    """Return a new counter-based (Philox) generator at the start of the named stream."""
    return np.random.Generator(np.random.Philox(key=stream_key(*name)))


def uniforms(count: int, *name: int | str) -> np.ndarray:
    """Return the first ``count`` uniforms in [0, 1) of the named stream, float64 [count]. A larger count appends
    numbers and does not change these."""
    return generator(*name).random(count)


def torch_seed(*name: int | str) -> int:
    return stream_key(*name) & (2**63 - 1)
