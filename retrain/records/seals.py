"""The seal of a run's evaluations: a SHA-256 over all rows so far, kept in the manifest.

A row's hash covers the hash of the row before it, so that the last hash covers the whole file and an evaluation only
has to hash its own rows. ``seconds`` is left out, so that an interrupted run has the same seal as an uninterrupted one.
"""

import hashlib
from collections.abc import Iterable

from retrain.files import dumps
from retrain.records.schema.base import Values


def chained(digest: str, rows: Iterable[Values]) -> str:
    """Return the hash of a file after ``rows`` were appended; ``digest`` is its hash before, "" for an empty file."""
    for row in rows:
        text = dumps({key: value for key, value in row.items() if key != "seconds"})
        digest = hashlib.sha256(f"{digest}{text}".encode()).hexdigest()
    return digest
