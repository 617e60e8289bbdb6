"""Connects the ranks of a run: processes that each compute a share of its prompts and micro-batches (SPMD).

All ranks run the same program on the same state and meet at the same points, where they exchange results or all-reduce
gradients. Whatever could differ between them (clocks, free memory, files, a request to stop) is decided on rank 0. An
error of one rank is raised on all of them.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from retrain.device import is_out_of_memory
from retrain.errors import RankLost, first_line

T = TypeVar("T")
JOIN_SECONDS = 600.0  # Timeout for connecting, which includes the import of torch on every rank
IDLE_SECONDS = 7 * 86400.0
"""Timeout of an exchange. It is long because graders, servers or a person may keep one rank busy. If a rank dies, its
connections close, which ends the wait at once."""
DEVICE_SECONDS = 1800.0  # Timeout of GPU collectives, which ranks reach at about the same time
END = "end"  # Point at which rank 0 tells the other ranks to end


class RanksEnded(RankLost):
    """Rank 0 has told the other ranks to end."""


@dataclass(frozen=True)
class _Share:
    """Contribution of one rank to an exchange: its point in the program, and the pickled result or the error."""

    point: str
    result: bytes
    error: Exception | None = None
    note: str = ""


class RankGroup:
    """The connection of this rank to the others; not thread-safe.

    ``device_group``: process group for gradients and shards. ``needs_group``: process group in which ranks exchange
    which shards they need. ``in_use()``: context in which sharded weights may be read. ``blame``: returns a sentence
    about a rank whose process has ended, or "". ``is_lost``: a collective has failed; ``is_broken``: an exchange was
    interrupted. After either, no exchange is possible.
    """

    def __init__(self, rank: int, count: int, store: dist.Store | None = None, blame: Callable[[], str] = str):
        """Connect through ``store`` or the environment variables of torchrun. Raises RankLost when a rank is
        missing."""
        self.rank, self.count, self.blame = rank, count, blame
        self.in_use: Callable[[], AbstractContextManager[None]] = nullcontext
        self.is_broken = self.is_lost = False
        self.note = ""  # Appended to this rank's point in the message of diverged ranks
        met: dict[str, Any] = {"init_method": "env://"} if store is None else {"store": store}
        try:
            dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=JOIN_SECONDS), **met)
            groups = (dist.new_group(timeout=timedelta(seconds=IDLE_SECONDS), backend="gloo") for _ in range(2))
            self._exchanges, self.needs_group = groups
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {rank} has not met the {count - 1} others: {first_line(error)}") from error
        self.device_group: Any = self._exchanges

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def use_gpus(self, new_group: Callable[..., Any] = dist.new_group) -> None:
        """Use NCCL for ``add_up`` and gathers from now on; every rank calls this."""
        self.device_group = new_group(timeout=timedelta(seconds=DEVICE_SECONDS), backend="nccl")

    def gather(self, point: str, compute: Callable[[], T]) -> list[T]:
        """Return the results of ``compute`` on all ranks, by rank, copied by pickling. Raises the error of the lowest
        rank.

        ``point`` names the place in the program; raises RankLost if another rank is at another point, or gone.
        """
        return [pickle.loads(share.result) for share in self._meet(point, compute, pickle.dumps)]

    def agree(self, point: str, compute: Callable[[], T]) -> T:
        """Return the result of ``compute`` on this rank after it has succeeded on all ranks. Raises as ``gather``."""
        results = list[T]()
        self._meet(point, lambda: results.append(compute()), lambda result: b"")
        return results[0]

    def from_first(self, point: str, compute: Callable[[], T]) -> T:
        """Return the result of ``compute`` on rank 0, the only rank that calls it. Raises as ``gather``."""
        return pickle.loads(self._meet(point, lambda: compute() if self.is_first else None, pickle.dumps)[0].result)

    def share(self, point: str, sizes: Sequence[int], compute: Callable[[list[int]], Sequence[T]]) -> list[T]:
        """Distribute items of these sizes over the ranks; return the results of all items, on every rank. ``compute``
        gets the indices of this rank's items and returns one result per index."""
        shares = deal(sizes, self.count)
        parts = self.gather(point, lambda: list(compute(shares[self.rank])))
        pairs = (zip(indices, part, strict=True) for indices, part in zip(shares, parts, strict=True))
        results = dict(chain.from_iterable(pairs))
        return [results[i] for i in range(len(sizes))]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum the tensors over all ranks, in place. Raises RankLost."""
        self.is_broken = True
        try:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.device_group)
        except RuntimeError as error:
            raise self.lost(error) from error
        self.is_broken = False

    def end(self) -> None:
        """Tell the other ranks to end, unless an exchange was interrupted; rank 0 calls this."""
        if not self.is_broken:
            with suppress(RankLost):
                self._exchange(_Share(END, b""))

    def leave(self) -> None:
        with suppress(RuntimeError, AssertionError, ValueError):
            dist.destroy_process_group()

    def lost(self, error: Exception) -> RankLost:
        """Mark the connection as lost; return the error to raise after a failed collective."""
        self.is_broken = self.is_lost = True
        return RankLost(self.blame() or f"another rank is gone ({first_line(error)})")

    def _meet(self, point: str, compute: Callable[[], T], dump: Callable[[T], bytes]) -> list[_Share]:
        self.is_broken = True  # stays so if this rank is interrupted before the exchange below is complete
        if self.in_use is not nullcontext:
            self._exchange(_Share(point, b""))  # sharded weights are gathered only when all are at the same point
        try:
            with self.in_use():
                mine = _Share(point, dump(compute()))
        except RankLost:
            raise
        except Exception as error:
            mine, raised = _Share(point, b"", _portable(error)), error
            if is_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # frees the tensors that the frames hold, for another try
        else:
            raised = None
        shares = self._exchange(mine)
        self.is_broken = False
        first = next((share for share in shares if share.error is not None), None)
        if first is None or first.error is None:
            return shares
        if raised is not None and shares.index(first) == self.rank:
            raise raised
        raise first.error

    def _exchange(self, mine: _Share) -> list[_Share]:
        shares: list[Any] = [None] * self.count
        self.is_broken = True
        try:
            dist.all_gather_object(shares, replace(mine, note=self.note), group=self._exchanges)
        except RuntimeError as error:
            raise self.lost(error) from error
        other = next((rank for rank, share in enumerate(shares) if share.point != mine.point), None)
        if other is None:
            self.is_broken = False
            return shares
        if shares[0].point == END:
            raise RanksEnded("rank 0 has ended")
        self.is_lost = True
        places = (f"rank {rank} is at {shares[rank].point!r}{shares[rank].note}" for rank in (self.rank, other))
        raise RankLost(f"the ranks are at different points of the program: {', '.join(places)}")


def deal(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Distribute the indices of ``sizes`` to ``count`` shares of about equal total size: the largest item first, each
    to the share with the smallest total. Shares are sorted; with equal sizes, item i goes to share i modulo
    ``count``."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += sizes[index]
    return [sorted(share) for share in shares]


def _portable(error: Exception) -> Exception:
    """Return a picklable copy of the error, with its traceback as a note; a RuntimeError if it cannot be pickled."""
    text = "on another rank:\n" + "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(text)
    return copy
