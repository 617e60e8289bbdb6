"""The scheduler, with jobs that nobody does: order, slots, restarts, stops; and how cohorts are cut for it."""

from __future__ import annotations

import dataclasses
from collections import deque

import pytest
from toymodels import campaign_head

from retrain.campaign.planning.cohorts import cut
from retrain.campaign.planning.plan import plan
from retrain.campaign.running.protocol import JobEnded, Message, Tick
from retrain.campaign.running.scheduler import Scheduler
from retrain.config import load
from retrain.errors import UsageError


@dataclasses.dataclass(eq=False)
class Some:
    """Work that touches the runs that its letters are called; ``times`` jobs until nothing is left."""

    letters: str
    trains: bool = True
    times: int = 1
    gave_up: str = ""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.letters) if self.trains else frozenset()

    def job(self):
        return self if self.times else None

    def give_up(self, reason: str) -> None:
        self.gave_up, self.times = reason, 0


class Script:
    """An executor whose jobs end in the order, and in the way, that a list says: (letters, status), or "tick"."""

    def __init__(self, slots: int, *ends):
        self.slots, self.ends = slots, deque(ends)
        self.begun: list[str] = []
        self.stops: list[str] = []
        self.most = 0
        self.under_way: dict[str, Some] = {}

    def submit(self, work: Some):
        executor, name = self, f"{len(self.begun)}"

        class Handle:
            id = name

            def stop(self) -> None:
                if work.letters not in executor.stops:
                    executor.stops.append(work.letters)

        self.begun.append(work.letters)
        self.under_way[name] = work
        self.most = max(self.most, len(self.under_way))
        assert len(self.under_way) <= self.slots
        return Handle()

    def events(self):
        while self.under_way:
            end = self.ends.popleft() if self.ends else (next(iter(self.under_way.values())).letters, "done")
            if end == "tick":
                yield Tick()
                continue
            name = next(name for name, work in self.under_way.items() if work.letters == end[0])
            work = self.under_way.pop(name)
            if end[1] == "done":
                work.times -= 1
            yield JobEnded(name, end[1], f"{end[0]} {end[1]}")


def scheduler(executor, after=lambda work, end: [], stopping=lambda: False, restarts: int = 2):
    heard: list = []
    return Scheduler(executor, heard.append, after, stopping, restarts), heard


def follow_up(work, end):
    return [Some("x"), Some("y")] if work.letters == "ab" else []


@pytest.mark.parametrize(
    ("slots", "ends", "works", "begun"),
    [
        (2, [("b", "done"), ("a", "done")], "a b c d", "a b c d"),
        (1, [], "a b", "a b"),
        (2, [("c", "done"), ("ab", "done")], "ab b c", "ab c x y b"),  # b waits for the job that trains it
        (1, [], "ab c", "ab x y c"),  # what follows from an end comes before what waits
        (1, [], "- b -", "b"),  # of which nothing is left
        (1, [("a", "died"), ("a", "died")], "a b", "a a b"),
    ],
)
def test_jobs_begin_in_this_order(slots, ends, works, begun):
    executor = Script(slots, *ends)
    jobs = [Some(letters, times=int(letters != "-")) for letters in works.split()]
    assert scheduler(executor, follow_up, restarts=1)[0].carry_out(jobs)
    assert executor.begun == begun.split()
    assert executor.most == slots
    assert [job.gave_up for job in jobs if job.gave_up] == (["a died, 2 times now"] if "a a" in begun else [])


def test_a_restart_is_reported():
    executor = Script(1, ("a", "died"))
    mine, heard = scheduler(executor)
    assert mine.carry_out([Some("a")])
    assert [event.text for event in heard if isinstance(event, Message)] == [
        "a died: its job begins again (1 of 2 restarts)"
    ]


def test_a_stop_reaches_every_job_and_begins_no_other():
    executor = Script(2, "tick", ("b", "stopped"), ("a", "stopped"))
    mine, heard = scheduler(executor, lambda work, end: [work] if end.status == "stopped" else [])
    mine.stopping = lambda: Tick() in heard
    assert not mine.carry_out([Some("a"), Some("b"), Some("c")])
    assert (executor.begun, executor.stops) == (["a", "b"], ["a", "b"])
    assert not mine.lost_steps


def test_a_job_that_dies_while_all_end_is_not_begun_again():
    executor = Script(1, "tick", ("a", "died"))
    mine, heard = scheduler(executor)
    mine.stopping = lambda: Tick() in heard
    assert not mine.carry_out([Some("a")])
    assert mine.lost_steps
    assert executor.begun == ["a"]


def test_after_the_last_cohort_a_stop_lets_analyses_be_made():
    executor = Script(1, "tick", ("a", "done"))
    mine, heard = scheduler(executor, lambda work, end: [Some("s", trains=False)] if work.trains else [])
    mine.stopping = lambda: Tick() in heard
    assert mine.carry_out([Some("a")])
    assert executor.begun == ["a", "s"]


def test_a_fault_in_what_follows_lets_the_others_save_first():
    def after(work, end):
        if work.letters == "a":
            raise UsageError("refused")
        return []

    executor = Script(2, ("a", "changed"), ("b", "stopped"))
    with pytest.raises(UsageError, match="refused"):
        scheduler(executor, after)[0].carry_out([Some("a"), Some("b"), Some("c")])
    assert (executor.begun, executor.stops) == (["a", "b"], ["b"])


def test_jobs_whose_runs_nobody_needs_are_stopped():
    executor = Script(2, "tick")
    mine, _ = scheduler(executor)
    mine.hear = lambda event: mine.stop_where(lambda names: names <= {"a", "b", "c"}) if event == Tick() else None
    assert mine.carry_out([Some("ab"), Some("cd")])
    assert executor.stops == ["ab"]


def test_an_executor_that_ends_too_early_is_a_fault():
    class Ends(Script):
        def events(self):
            yield Tick()

    with pytest.raises(RuntimeError, match="ended before its jobs 0"):
        scheduler(Ends(1))[0].carry_out([Some("a")])


FIVE = [("grpo", "none"), ("maxrl", "none"), ("rloo", "none"), ("maxrl", "gtpo"), ("grpo", "gtpo")]


@pytest.mark.parametrize(
    ("conditions", "seeds", "slots", "on_gpu", "sizes"),
    [
        (5, 8, 1, False, [10] * 4),
        (5, 8, 8, False, [5] * 8),  # as many cohorts as slots, of whole seeds
        (5, 8, 4, False, [10] * 4),
        (5, 8, 3, False, [10] * 4),  # three seeds would be more than share a base
        (2, 8, 3, False, [6, 6, 4]),
        (2, 8, 2, False, [8, 8]),
        (5, 3, 8, False, [3, 2] * 3),  # fewer seeds than slots: equal parts of each
        (4, 1, 2, False, [2, 2]),
        (2, 1, 8, False, [1, 1]),
    ],
)
def test_cohorts_are_cut_to_fill_the_slots(tmp_path, conditions, seeds, slots, on_gpu, sizes):
    path = tmp_path / "cut.toml"
    path.write_text(campaign_head(*FIVE[:conditions], seeds=list(range(seeds)), max_steps=1))
    groups = cut(plan(load(path)), on_gpu, slots)
    assert [len(group) for group in groups] == sizes
    if len(groups[0]) < conditions:
        assert all(len({spec.seed for spec in group}) == 1 for group in groups)


def test_lanes_and_interim_analyses_limit_the_cohorts(tmp_path):
    path = tmp_path / "cut.toml"
    path.write_text(campaign_head(*FIVE[:3], seeds=[1, 2], max_steps=1, lanes=2))
    assert [len(group) for group in cut(plan(load(path)), False, 8)] == [2, 2, 2]
    path.write_text(campaign_head(*FIVE[:2], seeds=list(range(8)), max_steps=1, sequential="linear"))
    for slots, sizes in ((1, [4] * 4), (8, [2] * 8)):  # every slot has whole seeds
        assert [len(group) for group in cut(plan(load(path)), False, slots)] == sizes
