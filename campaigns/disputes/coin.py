"""A reward that says nothing about the answer, for ``rewards.toml``: half of all answers get 1, whatever they say.

    [reward]
    type = "custom"
    custom_module = "coin"

The coin falls by a hash of prompt and answer, so that a resumed run equals the uninterrupted one. Equal answers to a
prompt get the same coin.
"""

from __future__ import annotations

import hashlib


def score(completion: str, prompt: str) -> float:
    """0 or 1, each for half of all answers."""
    return float(hashlib.blake2b(f"{prompt}\n{completion}".encode(), digest_size=1).digest()[0] % 2)
