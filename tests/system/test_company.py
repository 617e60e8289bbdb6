from __future__ import annotations

import gc
import random
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from retrain.errors import RankLost
from retrain.policy import company as company_module
from retrain.policy.company import LOST, Company

PATIENCE = 20.0
ENDS = 4
"""The place of the unit that stays, behind four that pass."""


class Table:
    """Where so many ranks meet: each hears what all have brought. After ``barrier.abort()`` no ranks meet any more."""

    def __init__(self, count: int):
        self.count, self.barrier = count, threading.Barrier(count, timeout=PATIENCE)
        self.brought: dict[int, object] = {}
        self.met: list[object] = []

    def meet(self, rank: int, what: object) -> list[object]:
        try:
            self.brought[rank] = what
            self.barrier.wait()
            found = [self.brought[each] for each in range(self.count)]
            if rank == 0:
                self.met.append(what)
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RuntimeError("Connection closed by peer") from error
        return found


class Weights:
    """A unit that all gather or none; ``scarce`` is how often there is no room for it."""

    def __init__(self, place: int, rank: int, table: Table):
        self.place, self.rank, self.table, self.stays = place, rank, table, place == ENDS
        self.whole = False
        self.scarce = self.broken = 0

    def make_room(self) -> None:
        if self.scarce:
            self.scarce -= 1
            raise torch.OutOfMemoryError("no room")

    def gather(self) -> None:
        assert not self.whole
        if self.broken:
            raise torch.OutOfMemoryError("no room in the middle of it")
        assert self.table.meet(self.rank, ("gather", self.place)) == [("gather", self.place)] * self.table.count
        self.whole = True

    def let_go(self) -> None:
        assert self.whole
        self.whole = False


class Ranks:
    """So many ranks, each a company with its units."""

    def __init__(self, count: int):
        self.table = Table(count)
        self.companies = [Company((rank, self.table), (rank, self.table)) for rank in range(count)]
        self.units = [[Weights(place, rank, self.table) for place in range(ENDS + 1)] for rank in range(count)]
        self.do(*[lambda own, units: own.share(units)] * count)
        self.table.met.clear()

    def do(self, *works):
        """What each rank's work raises or returns, all being done at the same time."""
        found = [None] * len(works)

        def do(rank):
            try:
                found[rank] = works[rank](self.companies[rank], self.units[rank])
            except BaseException as error:
                found[rank] = error
                if isinstance(error, RankLost):  # its process ends
                    self.table.barrier.abort()

        threads = [threading.Thread(target=do, args=(rank,), daemon=True) for rank in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
        return found


@pytest.fixture
def ranks(monkeypatch):
    def all_gather(into, own, group):
        rank, table = group
        for tensor, each in zip(into, table.meet(rank, int(own)), strict=True):
            tensor.fill_(each)

    fake = SimpleNamespace(all_gather=all_gather, get_world_size=lambda group: group[1].count)
    monkeypatch.setattr(company_module, "dist", fake)
    return Ranks


def walk(*script):
    """Need the units of a script, one after another, and see each time what is there."""

    def work(own, units):
        with own.work():
            stays = False
            for place in script:
                own.need(place)
                assert units[place].whole
                stays = stays or place == ENDS
                assert sum(unit.whole for unit in units[:ENDS]) <= 1
                assert units[ENDS].whole >= stays
        assert not any(unit.whole for unit in units)
        return len(script)

    return work


@pytest.mark.parametrize("seed", range(3))
def test_whatever_each_needs_all_come_to_an_end(ranks, seed):
    draw, made = random.Random(seed), ranks(3)
    for _ in range(3):  # one request after another
        scripts = [[draw.randrange(ENDS + 1) for _ in range(draw.choice([0, 1, 5, 30]))] for _ in range(3)]
        assert made.do(*(walk(*script) for script in scripts)) == [len(script) for script in scripts]


def test_without_room_for_a_unit_a_rank_asks_no_other_for_it_and_frees_what_it_holds(ranks):
    made, held = ranks(2), []

    class Activations:
        pass

    def needs_room(own):
        big = Activations()
        held.append(weakref.ref(big))
        own.need(2)

    def runs_out(own, units):
        units[2].scarce = 1
        with own.work():
            needs_room(own)

    def looks(own, units):
        with own.work():
            for place in (0, 1, 3):
                own.need(place)
            gc.collect()
            return held[0]() is None

    found = made.do(runs_out, looks)
    assert isinstance(found[0], torch.OutOfMemoryError)
    assert found[1] is True
    assert ("gather", 2) not in made.table.met
    assert made.do(walk(2), walk(2)) == [1, 1]


def test_a_rank_that_runs_out_of_memory_while_all_gather_lets_no_rank_wait(ranks):
    made = ranks(2)
    made.units[0][1].broken = 1
    found = made.do(walk(0, 1, 2), walk(0, 1, 2))
    assert [type(error) for error in found] == [RankLost, RankLost]
    assert str(found[0]) == f"{LOST} (no room in the middle of it)"
    assert made.companies[0].lost
