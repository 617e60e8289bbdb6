import dataclasses
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.models import campaign_head

from retrain.campaign.planning.plan import cut, plan, seeds_before_interim
from retrain.campaign.running.jobs import InProcessRunner, Scheduler
from retrain.campaign.running.protocol import JobEnded, Message, Tick
from retrain.config import load
from retrain.errors import UsageError
from retrain.records.observer import NullObserver


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
        self.under_way: dict[str, Some] = {}

    def submit(self, work: Some):
        name = f"{len(self.begun)}"
        self.begun.append(work.letters)
        self.under_way[name] = work
        assert len(self.under_way) <= self.slots
        return SimpleNamespace(id=name, stop=lambda: self.stops.append(work.letters))

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


@pytest.mark.parametrize(("slots", "ends", "works", "begun"), [
    (2, [("b", "done"), ("a", "done")], "a b c d", "a b c d"),
    (1, [], "a b", "a b"),
    (2, [("c", "done"), ("ab", "done")], "ab b c", "ab c x y b"),  # b waits for the job that trains it
    (1, [], "ab c", "ab x y c"),  # what follows from an end comes before what waits
    (1, [], "- b -", "b"),  # of which nothing is left
    (1, [("a", "died"), ("a", "died")], "a b", "a a b"),
])  # fmt: skip
def test_jobs_begin_in_this_order(slots, ends, works, begun):
    executor = Script(slots, *ends)
    jobs = [Some(letters, times=int(letters != "-")) for letters in works.split()]
    mine, heard = scheduler(executor, follow_up, restarts=1)
    assert mine.carry_out(jobs)
    assert executor.begun == begun.split()
    died = "a a" in begun
    assert [job.gave_up for job in jobs if job.gave_up] == ["a died, 2 times now"] * died
    told = [event.text for event in heard if isinstance(event, Message)]
    assert ("a died: its job begins again (1 of 1 restarts)" in told) == died


@pytest.mark.parametrize("lost", [False, True])
def test_a_stop_reaches_every_job_and_begins_no_other(lost):
    executor = Script(2, "tick", ("b", "died" if lost else "stopped"), ("a", "stopped"))
    mine, heard = scheduler(executor, lambda work, end: [work] if end.status == "stopped" else [])
    mine.stopping = lambda: Tick() in heard
    assert not mine.carry_out([Some("a"), Some("b"), Some("c")])
    assert (executor.begun, set(executor.stops)) == (["a", "b"], {"a", "b"})
    assert mine.lost_steps is lost


def test_a_fault_in_what_follows_lets_the_others_save_first():
    def after(work, end):
        if work.letters == "a":
            raise UsageError("refused")
        return []

    executor = Script(2, ("a", "changed"), ("b", "stopped"))
    with pytest.raises(UsageError, match="refused"):
        scheduler(executor, after)[0].carry_out([Some("a"), Some("b"), Some("c")])
    assert (executor.begun, set(executor.stops)) == (["a", "b"], {"b"})


def test_jobs_whose_runs_nobody_needs_are_stopped():
    executor = Script(2, "tick")
    mine, _ = scheduler(executor)
    mine.on_event = lambda event: mine.stop_where(lambda names: names <= {"a", "b", "c"}) if event == Tick() else None
    assert mine.carry_out([Some("ab"), Some("cd")])
    assert set(executor.stops) == {"ab"}


class Here:
    """Does jobs in this process, and hears of a stop in the one called ``stop_in``."""

    def __init__(self, stop_in: str = ""):
        self.stop_in, self.done, self.stopped = stop_in, list[str](), False

    def do(self, work: Some, observer, stop):
        self.done.append(work.letters)
        self.stopped |= work.letters == self.stop_in
        work.times -= not (self.stopped and work.trains)
        return JobEnded(status="stopped" if self.stopped else "done")


@pytest.mark.parametrize(("stop_in", "done", "all_trained"), [
    ("", "ab x y - c", True),
    ("ab", "ab", False),  # what only looks at finished runs comes after the training that is left
    ("-", "ab x y - c", True),
])  # fmt: skip
def test_works_are_done_in_this_process_one_after_another(stop_in, done, all_trained):
    here: Any = Here(stop_in)
    works = [Some("ab"), Some("-", trains=False), Some("c", trains=stop_in != "-")]

    def after(work, end):
        return follow_up(work, end) if end.status == "done" else [work]

    mine, _ = scheduler(InProcessRunner(here, NullObserver(), lambda: here.stopped), after, lambda: here.stopped)
    assert mine.carry_out(works) is all_trained
    assert here.done == done.split()


FIVE = [("grpo", "none"), ("maxrl", "none"), ("rloo", "none"), ("maxrl", "gtpo"), ("grpo", "gtpo")]


@pytest.mark.parametrize(("conditions", "seeds", "slots", "keys", "sizes"), [
    (5, 8, 1, {}, [10, 10, 10, 5, 5]),  # no cohort has seeds on both sides of the interim analysis
    (5, 8, 1, {"sequential": "off"}, [10] * 4),
    (5, 8, 8, {}, [5] * 8),  # as many cohorts as slots, of whole seeds
    (5, 8, 3, {}, [10, 10, 10, 5, 5]),  # three seeds would be more than share a base
    (2, 8, 3, {}, [6, 6, 2, 2]),
    (5, 3, 8, {}, [3, 2] * 3),  # fewer seeds than slots: equal parts of each
    (3, 2, 8, {"lanes": 2}, [2, 2, 2]),
    (2, 8, 1, {"lanes": 6}, [6, 6, 4]),
    (2, 16, 1, {}, [10, 6, 10, 6]),
])  # fmt: skip
def test_cohorts_are_cut_to_fill_the_slots(tmp_path, conditions, seeds, slots, keys, sizes):
    path = tmp_path / "cut.toml"
    path.write_text(campaign_head(*FIVE[:conditions], seeds=list(range(seeds)), max_steps=1, **keys))
    specs = plan(load(path))
    groups = cut(specs, False, slots, first=seeds_before_interim(specs))
    assert [len(group) for group in groups] == sizes
    if len(groups[0]) < conditions and not keys:
        assert all(len({spec.seed for spec in group}) == 1 for group in groups)
