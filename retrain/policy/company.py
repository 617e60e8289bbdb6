"""Ranks that hold parts of the same weights, and come together whenever one of them needs some whole.

To gather a layer's weights takes all ranks, and each has work of another length: decode batches end early,
micro-batches differ in number. So nobody assumes what the others do. A rank that needs a unit of weights says which
one, all hear what each of them needs, and together they gather those units, one after the other. Ranks that do the same
at about the same time therefore gather every unit once; a rank that has nothing to do, or has failed, keeps the others
company until nobody needs anything any more. No order of passes can make them wait for each other, and an error stays
one rank's own.

While a rank computes with a passing unit (a layer) it has no other; a unit that stays (embedding and output layer) is
there until the work ends.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from retrain.device import is_out_of_memory
from retrain.errors import ModelError, RankLost, RunFailed

NOTHING, READY = -1, -2  # Messages of a rank: needs no more weights; has loaded its shard
LOST = "the ranks that share the base's weights have lost each other"


class NotReady(ModelError):
    """Another rank has not taken its part of the base, and says why itself."""


class Unit(Protocol):
    """Weights that are gathered together. ``stays``: until the work ends, on all ranks."""

    @property
    def stays(self) -> bool: ...

    def make_room(self) -> None:
        """Allocate what gathering takes, and give it back. Raises as an allocator does where there is no room."""
        ...

    def gather(self) -> None:
        """Have the whole of them here; every rank of the group calls this."""
        ...

    def let_go(self) -> None: ...


class Company:
    """The ranks of ``group``, which sees nothing else; weights move within ``weights_group``. For one thread at a
    time."""

    def __init__(self, group: Any, weights_group: Any):
        self.group, self.weights_group = group, weights_group
        self.alone: Callable[[], AbstractContextManager[None]] = nullcontext
        """On rank 0, what has the others keep it company for work of its own."""
        self._units: list[Unit] = []
        self._there = set[int]()
        self._open = False
        self.lost = False
        """Whether another rank is gone, or this one could not do its part: nothing is gathered any more, and only the
        end of this process tells ranks that wait for it."""

    @classmethod
    def form(cls, device: str, seconds: float) -> Company:
        """All processes together; each calls this at the same time. ``device``: the type of those that hold the
        weights; ``seconds``: how long one waits for another."""
        ranks, patience = list(range(dist.get_world_size())), timedelta(seconds=seconds)
        group = dist.new_group(ranks, patience, backend="gloo")
        on_gpus = device == "cuda"
        return cls(group, dist.new_group(ranks, patience, backend="nccl") if on_gpus else group)

    @property
    def count(self) -> int:
        return dist.get_world_size(self.group)

    def share(self, units: Sequence[Unit]) -> None:
        """These are the units from now on, the same on every rank, and none of them is whole now. Raises NotReady when
        a rank has ended its work without."""
        self._units = list(units)
        self._there.clear()
        if NOTHING in self._hear(READY):
            raise NotReady("another rank has not taken its part of the base")

    @contextmanager
    def work(self) -> Iterator[None]:
        """In this block, which all ranks enter at about the same time, units can be needed. At its end the others are
        kept company until all have ended, also where it ends with an error; a person who wants to stop is not kept."""
        self._open = True
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # what they hold would be missing for the others' units
            self._accompany()
            raise
        else:
            self._accompany()
        finally:
            self._open = False
            for place in sorted(self._there):
                self._units[place].let_go()
            self._there.clear()

    def need(self, place: int) -> None:
        """Have the unit at this place whole, and no other passing one. Raises RankLost when another rank is gone or
        nothing can be gathered any more, and whatever an allocator raises."""
        if place in self._there:
            return
        if not self._open:
            raise RunFailed("weights that several ranks share were needed outside of what the ranks do together")
        self._let_pass()
        self._units[place].make_room()
        self._agree(place)

    def _accompany(self) -> None:
        """Gather what others need until nobody needs anything."""
        self._let_pass()
        while not self.lost and self._agree(NOTHING):
            pass

    def _agree(self, mine: int) -> bool:
        """Hear what everybody needs, and gather it together; whether anybody needed anything."""
        said = set(self._hear(mine))
        try:
            for place in sorted(said - {NOTHING, READY}):
                self._units[place].gather()
                if place == mine or self._units[place].stays:
                    self._there.add(place)
                else:
                    self._units[place].let_go()
        except Exception as error:
            raise self._parted(error) from error
        return said != {NOTHING}

    def _hear(self, mine: int) -> list[int]:
        """What every rank says at this time."""
        if self.lost:
            raise RankLost(LOST)
        try:
            said = [torch.empty(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(said, torch.tensor([mine]), group=self.group)
        except RuntimeError as error:
            raise self._parted(error) from error
        return [int(each) for each in said]

    def _parted(self, error: Exception) -> RankLost:
        self.lost = True
        return RankLost(f"{LOST} ({next(iter(str(error).splitlines()), type(error).__name__)})")

    def _let_pass(self) -> None:
        for place in [place for place in self._there if not self._units[place].stays]:
            self._units[place].let_go()
            self._there.remove(place)
