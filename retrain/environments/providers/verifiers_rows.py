"""Rows of an environment of ``verifiers`` and what both kinds of environment offer to ``verifiers.Verifiers``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from retrain.environments.providers.inversion import Lead
from retrain.types import Message


class Row(NamedTuple):
    """A task of the library's. ``digest`` is a hash of all that makes it; another process must have the same one in
    this place."""

    prompt: tuple[Message, ...]
    answer: str
    tags: tuple[str, ...]
    digest: str


class Library(Protocol):
    """What is asked of either kind of environment. Rows are numbered; ``train`` are those to train with, ``eval``
    those that the environment itself holds out."""

    def rows(self, part: str) -> Sequence[Row]:
        """All rows of a part, [] where there are none."""
        ...

    def lead(self, part: str, index: int) -> Lead:
        """What leads a rollout of this row."""
        ...


def digest(task: Any) -> str:
    """A hash of what is JSON, or can be written as text."""
    return hashlib.sha256(json.dumps(task, sort_keys=True, default=str).encode()).hexdigest()[:16]
