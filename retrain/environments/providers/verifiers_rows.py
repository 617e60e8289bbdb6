"""Represent tasks of both kinds of verifiers' environments as rows, and select the rows to hold out."""

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from retrain.errors import UsageError
from retrain.types import Message

# Environment variable that is never set: the local endpoint needs no key, and must not receive the user's
UNSET_KEY = "RETRAIN_VERIFIERS_NO_KEY"
# Share and largest number of training problems to hold out, if the environment has no held-out problems and the
# configuration no ``heldout``
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 200


class TaskRow(NamedTuple):
    """A task. ``digest`` is a hash of its content, which must be the same at the row's index in every process."""

    prompt: tuple[Message, ...]
    answer: str
    tags: tuple[str, ...]
    digest: str


def digest(task: object) -> str:
    return hashlib.sha256(json.dumps(task, sort_keys=True, default=str).encode()).hexdigest()[:16]


def held_out(rows: Sequence[TaskRow], count: int | None) -> set[int]:
    """Return the indices of the ``count`` held-out rows. Raises UsageError if none is left for training.

    The rows with the smallest hashes are held out, so that they are the same in every run and equal rows are either all
    held out or all trained on.
    """
    if count is None:
        count = min(max(round(len(rows) * HELD_OUT_SHARE), len(rows) > 1), MOST_HELD_OUT)
    if count <= 0:
        return set()
    hashes = [row.digest for row in rows]
    last = sorted(hashes)[min(count, len(hashes)) - 1]
    held = {index for index, value in enumerate(hashes) if value <= last}
    if len(held) == len(rows):
        raise UsageError(f"heldout = {count} leaves none of the {len(rows)} problems to train with: take a smaller one")
    return held
