"""Ranks: processes that train one run together, each with its share of the prompts and of the micro-batches (SPMD).

All ranks run the same program on the same state and meet at the same points, where they exchange what each has
computed or add up their gradients. What could differ between them (clocks, free memory, files, a request to stop) is
decided on rank 0. An error of one rank is raised on all of them, so that they handle it alike.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from retrain.device import is_out_of_memory
from retrain.errors import RankLost, first_line

T = TypeVar("T")
JOIN_SECONDS = 600.0  # How long the ranks may take to find each other: they import torch first
IDLE_SECONDS = 7 * 86400.0
"""Timeout of an exchange in seconds: graders, servers and a person may take long in between. A rank that dies closes
its connections, which ends the wait at once."""
DEVICE_SECONDS = 1800.0  # How long ranks wait for each other on their GPUs, which they reach at about the same time
END = "end"  # The point at which rank 0 tells the others to end


class RanksEnded(RankLost):
    """Rank 0 has told the other ranks to end."""


@dataclass(frozen=True)
class _Share:
    """Contribution of one rank to an exchange: its point in the program, and the pickled result or its error."""

    point: str
    result: bytes
    error: Exception | None = None
    note: str = ""


class RankGroup:
    """The connection of this rank to the others; not for several threads at once.

    ``device_group`` moves gradients and shards, ``needs_group`` says which shards are needed.
    ``in_use`` surrounds whatever reads the weights of a base that is sharded over the ranks. ``blame`` returns a
    sentence about a rank whose process has ended, "" if none is known. ``is_lost``: a collective has failed;
    ``is_broken``: an exchange is under way, or was interrupted. After either nothing can be exchanged any more.
    """

    def __init__(self, rank: int, count: int, store: dist.Store | None = None, blame: Callable[[], str] = str):
        """Meet the other ranks, through ``store`` or as the environment says that torchrun sets. Raises RankLost when
        they do not come."""
        self.rank, self.count, self.blame = rank, count, blame
        self.in_use: Callable[[], AbstractContextManager[None]] = nullcontext
        self.is_broken = self.is_lost = False
        self.note = ""  # Why this rank is where it is, for the message when the ranks have parted
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

    def use_gpus(self) -> None:
        """Add up and gather on GPUs from now on; every rank calls this."""
        self.device_group = dist.new_group(timeout=timedelta(seconds=DEVICE_SECONDS), backend="nccl")

    def gather(self, point: str, compute: Callable[[], T]) -> list[T]:
        """Return what ``compute`` returns on every rank, copied by pickling. Raises what the lowest rank raised.

        ``point`` names the place in the program; RankLost is raised where another rank is elsewhere, or gone.
        """
        return [pickle.loads(share.result) for share in self._meet(point, compute, pickle.dumps)]

    def agree(self, point: str, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns on this rank, once it has succeeded on all of them; see ``gather``."""
        results = list[T]()
        self._meet(point, lambda: results.append(compute()), lambda result: b"")
        return results[0]

    def from_first(self, point: str, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns on rank 0, which alone calls it; see ``gather``."""
        return pickle.loads(self._meet(point, lambda: compute() if self.is_first else None, pickle.dumps)[0].result)

    def share(self, point: str, sizes: Sequence[int], compute: Callable[[list[int]], Sequence[T]]) -> list[T]:
        """Return the results of all pieces of work of these sizes, each computed by one rank: ``compute`` returns those
        of the indices that it gets, in their order."""
        shares = deal(sizes, self.count)
        parts = self.gather(point, lambda: list(compute(shares[self.rank])))
        results = {i: each for own, part in zip(shares, parts, strict=True) for i, each in zip(own, part, strict=True)}
        return [results[i] for i in range(len(sizes))]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, on this process's device."""
        self.is_broken = True
        try:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.device_group)
        except RuntimeError as error:
            raise self.lost(error) from error
        self.is_broken = False

    def end(self) -> None:
        """Tell the other ranks to end, from rank 0, unless they cannot hear it any more."""
        if not self.is_broken:
            with suppress(RankLost):
                self._exchange(_Share(END, b""))

    def leave(self) -> None:
        """Part from the other ranks, whether they are still there or not."""
        with suppress(RuntimeError, AssertionError, ValueError):
            dist.destroy_process_group()

    def lost(self, error: Exception) -> RankLost:
        """Return the error to raise where a collective has failed."""
        self.is_broken = self.is_lost = True
        return RankLost(self.blame() or f"another rank is gone ({first_line(error)})")

    def _meet(self, point: str, compute: Callable[[], T], dump: Callable[[T], bytes]) -> list[_Share]:
        self.is_broken = True  # until the exchange at the end is complete: nobody waits there for an interrupted rank
        if self.in_use is not nullcontext:
            self._exchange(_Share(point, b""))  # sharded weights are gathered only when all are at the same point
        try:
            with self.in_use():
                own = _Share(point, dump(compute()))
        except RankLost:
            raise
        except Exception as error:
            own, raised = _Share(point, b"", _portable(error)), error
            if is_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # what they hold would be missing when it is tried again
        else:
            raised = None
        shares = self._exchange(own)
        self.is_broken = False
        first = next((share for share in shares if share.error is not None), None)
        if first is None or first.error is None:
            return shares
        if raised is not None and shares.index(first) == self.rank:
            raise raised
        raise first.error

    def _exchange(self, own: _Share) -> list[_Share]:
        shares: list[Any] = [None] * self.count
        self.is_broken = True
        try:
            dist.all_gather_object(shares, replace(own, note=self.note), group=self._exchanges)
        except RuntimeError as error:
            raise self.lost(error) from error
        other = next((rank for rank, share in enumerate(shares) if share.point != own.point), None)
        if other is None:
            self.is_broken = False
            return shares
        if shares[0].point == END:
            raise RanksEnded("rank 0 has ended")
        self.is_lost = True
        places = (f"rank {rank} is at {shares[rank].point!r}{shares[rank].note}" for rank in (self.rank, other))
        raise RankLost(f"the ranks have parted: {', '.join(places)}")


def deal(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of pieces of work in ``count`` shares of about the same size: the largest first, each to the
    share that has least. Every share is in order; of equal sizes, piece i goes to share i modulo ``count``."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += sizes[index]
    return [sorted(share) for share in shares]


def _portable(error: Exception) -> Exception:
    """Return a copy of the error that can be sent, with its traceback as a note; one with its words where it cannot."""
    text = "on another rank:\n" + "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(text)
    return copy
