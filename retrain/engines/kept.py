"""Keys and values of sequences that may go on: the next turn of an episode begins where the last one ended."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from retrain.types import PolicyRef

Name = tuple[int | str, ...]


class Batch(NamedTuple):
    """Keys and values [sequences, kv_heads, columns, head_dim] of every layer, of sequences that ended together."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (*self.keys, *self.values))


class Kept(NamedTuple):
    """One sequence: ``token_ids`` are those whose keys and values stand in the first columns of row ``place``."""

    batch: Batch
    place: int
    token_ids: tuple[int, ...]


class KeptSequences:
    """Sequences by policy and name, up to ``limit`` bytes: those that were kept first leave first. Several threads may
    use it at once."""

    def __init__(self, limit: int):
        self.limit = limit
        self._entries: OrderedDict[tuple[PolicyRef, Name], Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, ref: PolicyRef, named: Sequence[tuple[Name, Sequence[int]]], batch: Batch) -> None:
        """Keep the sequences of a batch, row by row: each has a name, and the tokens that its columns stand for."""
        share = batch.bytes // max(1, len(named))
        if share > self.limit:
            return
        with self._lock:
            for place, (name, token_ids) in enumerate(named):
                self._pop((ref, name))
                while self._entries and self._bytes + share > self.limit:
                    self._pop(next(iter(self._entries)))
                self._entries[ref, name] = Kept(batch, place, tuple(token_ids))
                self._bytes += share

    def take(self, ref: PolicyRef, name: Name, prompt_ids: Sequence[int]) -> Kept | None:
        """The sequence with which this prompt begins, which is not kept any longer; None where it is not there."""
        with self._lock:
            kept = self._pop((ref, name))
        if kept is None:
            return None
        length = len(kept.token_ids)
        return kept if length < len(prompt_ids) and tuple(prompt_ids[:length]) == kept.token_ids else None

    def drop(self, ref: PolicyRef, name: Name) -> None:
        with self._lock:
            self._pop((ref, name))

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _pop(self, key: tuple[PolicyRef, Name]) -> Kept | None:
        kept = self._entries.pop(key, None)
        if kept is not None:
            self._bytes -= kept.batch.bytes // len(kept.batch.keys[0])
        return kept
