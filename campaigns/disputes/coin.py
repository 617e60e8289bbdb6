"""A random reward for ``rewards.toml``: 1 for half of all answers, whatever they say, and 0 for the others.

    [reward]
    type = "custom"
    custom_module = "coin"

It is a hash of prompt and answer, so that a resumed run equals the uninterrupted one. Equal answers to a prompt get
equal rewards.
"""

from __future__ import annotations

import hashlib


def score(completion: str, prompt: str) -> float:
    """Return 0 or 1, each for half of all answers."""
    return float(hashlib.blake2b(f"{prompt}\n{completion}".encode(), digest_size=1).digest()[0] % 2)
