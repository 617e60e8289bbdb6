"""Ranks that gather weights together, as threads: whatever each of them does, nobody waits for ever."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from retrain.errors import RankLost, RunFailed
from retrain.policy import company as company_module
from retrain.policy.company import LOST, Company, NotReady

PATIENCE = 20.0
ENDS = 4
"""The place of the unit that stays, behind four that pass."""


class Table:
    """Where so many ranks meet: each hears what all have brought. One that is closed lets nobody meet any more."""

    last: Table

    def __init__(self, count: int):
        self.count, self.barrier = count, threading.Barrier(count, timeout=PATIENCE)
        self.brought: dict[int, object] = {}
        self.met: list[object] = []
        Table.last = self

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
    """A unit that all gather or none; ``scarce`` is what there is no room for."""

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


@pytest.fixture
def ranks(monkeypatch):
    """Makes so many ranks, each its company and its units."""

    def all_gather(into, own, group):
        rank, table = group
        for tensor, each in zip(into, table.meet(rank, int(own)), strict=True):
            tensor.fill_(each)

    fake = SimpleNamespace(
        all_gather=all_gather,
        get_world_size=lambda group: group[1].count,
    )
    monkeypatch.setattr(company_module, "dist", fake)

    def make(count: int):
        table, made = Table(count), []
        for rank in range(count):
            own = Company((rank, table), (rank, table))
            made.append((own, [Weights(place, rank, table) for place in range(ENDS + 1)]))
        at_once(*(lambda own=own, units=units: own.share(units) for own, units in made))
        table.met.clear()
        return table, made

    return make


def at_once(*works):
    """What each raises, or gives, all being done at the same time."""
    found = [None] * len(works)

    def do(place):
        try:
            found[place] = works[place]()
        except BaseException as error:
            found[place] = error
            if isinstance(error, RankLost):  # its process ends
                Table.last.barrier.abort()

    threads = [threading.Thread(target=do, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    return found


def walk(own, units, script):
    """Need the units of a script, one after another, and see each time what is there."""
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


def test_ranks_that_do_the_same_gather_everything_once(ranks):
    table, made = ranks(3)
    script = [ENDS, 0, 1, 2, 3, 3, 2, 2, 1, 0]  # a forward and a backward pass
    assert at_once(*(lambda one=one: walk(*one, script) for one in made)) == [len(script)] * 3
    gathered = [what for what in table.met if isinstance(what, tuple)]
    assert gathered == [("gather", place) for place in [ENDS, 0, 1, 2, 3, 2, 1, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_each_needs_all_come_to_an_end(ranks, seed):
    draw = random.Random(seed)
    _, made = ranks(3)
    for _ in range(3):  # one request after another
        scripts = [[draw.randrange(ENDS + 1) for _ in range(draw.choice([0, 1, 5, 30]))] for _ in made]
        works = [lambda one=one, script=script: walk(*one, script) for one, script in zip(made, scripts, strict=True)]
        assert at_once(*works) == [len(script) for script in scripts]


def test_an_error_stays_one_ranks_own_and_the_next_request_works(ranks):
    _, made = ranks(3)

    def fails(own, units):
        with own.work():
            own.need(1)
            raise ZeroDivisionError("mine")

    works = [lambda one=one: walk(*one, [ENDS, 0, 1, 2, 3] * 3) for one in made[1:]]
    found = at_once(lambda: fails(*made[0]), *works)
    assert isinstance(found[0], ZeroDivisionError)
    assert found[1:] == [15, 15]
    assert not any(unit.whole for _, units in made for unit in units)
    assert at_once(*(lambda one=one: walk(*one, [2, 3]) for one in made)) == [2, 2, 2]


def test_without_room_for_a_unit_a_rank_asks_nobody_for_it_and_frees_what_it_holds(ranks):
    table, made = ranks(2)
    held = []

    class Activations:
        pass

    def pass_of(own, units):
        big = Activations()
        held.append(weakref.ref(big))
        own.need(2)

    def runs_out(own, units):
        units[2].scarce = 1
        with own.work():
            pass_of(own, units)

    def looks(own, units):
        with own.work():
            for place in (0, 1, 3):
                own.need(place)
            gc.collect()
            return held[0]() is None

    found = at_once(lambda: runs_out(*made[0]), lambda: looks(*made[1]))
    assert isinstance(found[0], torch.OutOfMemoryError)
    assert found[1] is True
    assert ("gather", 2) not in table.met
    assert at_once(*(lambda one=one: walk(*one, [2]) for one in made)) == [1, 1]


def test_a_rank_that_is_lost_in_the_middle_ends_the_others(ranks):
    table, made = ranks(3)

    def dies(own, units):
        with own.work():
            own.need(0)
            table.barrier.abort()
            raise KeyboardInterrupt

    found = at_once(lambda: dies(*made[0]), *(lambda one=one: walk(*one, [0, 1, 2]) for one in made[1:]))
    assert isinstance(found[0], KeyboardInterrupt)
    for error in found[1:]:
        assert isinstance(error, RankLost)
        assert str(error) == f"{LOST} (Connection closed by peer)"
    with pytest.raises(RankLost, match=LOST), made[1][0].work():
        made[1][0].need(0)


def test_who_runs_out_of_memory_while_all_gather_lets_nobody_wait(ranks):
    _, made = ranks(2)
    made[0][1][1].broken = 1
    found = at_once(*(lambda one=one: walk(*one, [0, 1, 2]) for one in made))
    assert [type(error) for error in found] == [RankLost, RankLost]
    assert str(found[0]) == f"{LOST} (no room in the middle of it)"
    assert made[0][0].lost


def test_a_base_that_a_rank_could_not_take_is_nobodys(ranks):
    _, made = ranks(3)

    def takes(own, units):
        with own.work():
            own.share(units)
            own.need(0)

    def fails(own, units):
        with own.work():
            raise ZeroDivisionError("no such file")

    found = at_once(lambda: takes(*made[0]), lambda: fails(*made[1]), lambda: takes(*made[2]))
    assert [type(error) for error in found] == [NotReady, ZeroDivisionError, NotReady]
    assert at_once(*(lambda one=one: takes(*one) for one in made)) == [None, None, None]


def test_weights_are_there_for_what_all_do_together_alone(ranks):
    _, made = ranks(1)
    own, units = made[0]
    with pytest.raises(RunFailed, match="needed outside of what the ranks do together"):
        own.need(0)
    assert walk(own, units, [0]) == 1
    with pytest.raises(RunFailed):
        own.need(0)
