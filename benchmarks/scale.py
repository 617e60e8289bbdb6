"""What campaigns on 1 to 4,096 GPUs lose to failures, slow GPUs, saving and their own end: simulated, nothing trained.

    python benchmarks/scale.py [--gpus 1 8 64 512 4096] [--repeats 3] [--seed 0] [--plots docs/images]

Real are the cutting of runs into cohorts, the scheduler with its restarts, and the test that looks at results. A step's
seconds are assumed (``step_seconds``). Simulated are the GPUs, by a clock that goes from event to event.
Each cohort trains on one GPU, as in the product, so GPUs do not wait for each other within a step.

- A step of a cohort takes its nominal seconds times the GPU's own factor times the step's, both lognormal around 1;
  the mean of the GPUs that there are is 1.
- Failures come at random, at a rate per GPU; a share of them takes all GPUs of its node. Of a job that dies one is told
  ``told`` seconds later, and it begins again at its last save; every job spends ``start`` seconds on starting first.
- A GPU that failed is out of service for ``repair`` seconds, and paid for.
- Goodput is useful time (nominal seconds of steps, each counted once) over that of all GPUs until the last run ends.

Everything follows from ``--seed``.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
from plots import Series, write_plot

from retrain.campaign.planning import cohorts
from retrain.campaign.planning.plan import RunSpec, plan
from retrain.campaign.running.protocol import CohortJob, Event, Job, JobEnded
from retrain.campaign.running.scheduler import Scheduler, Work
from retrain.config import parse_dict
from retrain.maths.deciding import Left, decide_look
from retrain.maths.rules import Rule
from retrain.rng import generator

HOUR = 3600.0
MTBF_HOURS = 16384 * 54 * 24 / 419
"""Of one GPU and its part of everything around it: 419 unexpected interruptions in 54 days of 16,384 H100s (The Llama 3
Herd of Models, 2024, section 3.3.4)."""
CONDITIONS = (("grpo", "none"), ("rloo", "none"), ("dr_grpo", "none"), ("maxrl", "none"), ("maxrl", "gtpo"))
MODEL = "Qwen/Qwen3-8B"
TRAINING = {"max_steps": 200, "batch_size": 32, "group_size": 8, "max_tokens": 1024}


@dataclass(frozen=True)
class World:
    """Seconds unless it says otherwise; ``mtbf`` is a GPU's, infinite without failures. ``gpu_spread`` and
    ``step_spread`` are the standard deviations of the logarithm of a GPU's and of a step's factor."""

    mtbf: float = MTBF_HOURS * HOUR
    node: int = 8
    node_share: float = 0.2
    told: float = 60
    start: float = 120
    repair: float = HOUR
    save: float = 10
    save_every: int = 20
    steps: int = TRAINING["max_steps"]
    gpu_spread: float = 0.05
    step_spread: float = 0.1
    max_restarts: int = 3


CALM = World(mtbf=math.inf, start=0, save=0, gpu_spread=0, step_spread=0)
"""Nothing fails, waits or varies."""

SPENT = ("useful", "slow", "saving", "starting", "redone", "repaired", "unneeded", "idle")
"""What the time of all GPUs goes into: nominal seconds of steps that count; what these took beyond; saving; starting
and loading; what a failure undid; being out of service; steps of runs that were given up or stopped; nothing."""


@dataclass
class Attempt:
    """One job: the GPU that it is on (None: it waits for one), since when, from which step on, and when each of its
    remaining steps will have ended, saves included. ``until`` is the step after which it was asked to stop."""

    job: CohortJob
    gpu: int | None = None
    begin: float = 0
    done: int = 0
    ends: np.ndarray = field(default_factory=lambda: np.zeros(0))
    version: int = 0
    dead: bool = False
    until: int | None = None


@dataclass
class Progress:
    """What is on the disk of a cohort: its steps, and the nominal seconds of them."""

    steps: int = 0
    nominal: float = 0


@dataclass(frozen=True)
class SimulatedHandle:
    """See ``Handle``."""

    id: str
    ask: Callable[[], None]

    def stop(self) -> None:
        """See ``Handle.stop``."""
        self.ask()


class Gpus:
    """See ``Executor``: GPUs that fail, differ in speed and come back; a job that finds none in service waits.
    ``nominal`` gives the seconds of a step by the number of runs that step together. ``used`` has GPU seconds by what
    they went into, ``progress`` is by the name of a cohort, which its job has as its directory, ``runs`` have begun."""

    def __init__(self, count: int, world: World, nominal: Callable[[int], float], seed: int):
        self.slots, self.world, self.nominal, self.seed = count, world, nominal, seed
        self.now = 0.0
        self.deaths = self._submitted = 0
        self.runs: set[str] = set()
        self.used: dict[str, float] = defaultdict(float)
        self.progress: dict[str, Progress] = defaultdict(Progress)
        factor = _around_one(generator("scale", seed, "gpus"), world.gpu_spread, count)
        self._factor = factor / factor.mean()
        self._fate = generator("scale", seed, "failures")
        self._idle = list(range(count))
        self._out: dict[int, float] = {}
        self._jobs: dict[str, Attempt] = {}
        self._on: dict[int, str] = {}
        self._queue = deque[str]()
        self._events: list[tuple[float, int, str, str, int]] = []
        self._order = 0
        self._plan_failure()

    def has_gpu(self) -> bool:
        """See ``Executor.has_gpu``."""
        return True

    def close(self) -> None:
        """See ``Executor.close``."""

    def submit(self, job: Job) -> SimulatedHandle:
        """See ``Executor.submit``."""
        assert isinstance(job, CohortJob)
        number = str(self._submitted)
        self._submitted += 1
        self._jobs[number] = Attempt(job)
        self._queue.append(number)
        self._place()
        return SimulatedHandle(number, partial(self._stop, number))

    def events(self) -> Generator[Event, None, None]:
        """See ``Executor.events``."""
        while self._jobs:
            self.now, _, kind, name, version = heapq.heappop(self._events)
            if kind == "failure":
                self._fail()
                self._plan_failure()
            elif kind == "repaired":
                self.used["repaired"] += self.now - self._out.pop(int(name))
                heapq.heappush(self._idle, int(name))
                self._place()
            elif name in self._jobs and version == self._jobs[name].version:
                yield self._end(name, kind)
        for since in self._out.values():
            self.used["repaired"] += self.now - since

    def _at(self, when: float, kind: str, name: str = "", version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, kind, name, version))

    def _place(self) -> None:
        """Begin what waits on the free GPUs, those with the lowest numbers first."""
        while self._queue and self._idle:
            number = self._queue.popleft()
            if number in self._jobs:
                self._begin(number, self._jobs[number], heapq.heappop(self._idle))

    def _begin(self, number: str, job: Attempt, gpu: int) -> None:
        world, done = self.world, self.progress[job.job.directory].steps
        own = _around_one(generator("scale", self.seed, "steps", number), world.step_spread, world.steps - done)
        steps = np.arange(done + 1, world.steps + 1)
        seconds = self.nominal(len(job.job.runs)) * self._factor[gpu] * own + world.save * self._saved_after(steps)
        job.gpu, job.begin, job.done = gpu, self.now, done
        self.runs.update(run["run_id"] for run in job.job.runs)
        job.ends = self.now + world.start + np.cumsum(seconds)
        self._on[gpu] = number
        self._at(float(job.ends[-1]), "done", number)

    def _saved_after(self, steps: np.ndarray) -> np.ndarray:
        return (steps % self.world.save_every == 0) | (steps == self.world.steps)

    def _plan_failure(self) -> None:
        if math.isfinite(self.world.mtbf):
            self._at(self.now + self._fate.exponential(self.world.mtbf / self.slots), "failure")

    def _fail(self) -> None:
        """Something breaks: a GPU, or a node with all of its GPUs."""
        first, size = int(self._fate.integers(self.slots)), 1
        if self._fate.random() < self.world.node_share:
            first, size = first // self.world.node * self.world.node, self.world.node
        for gpu in range(first, min(first + size, self.slots)):
            if gpu in self._out:
                continue
            if gpu in self._on:
                self._die(self._on.pop(gpu))
            else:
                self._idle.remove(gpu)
                heapq.heapify(self._idle)
            self._out[gpu] = self.now
            self._at(self.now + self.world.repair, "repaired", str(gpu))

    def _die(self, number: str) -> None:
        """Its GPU is gone. What was done since the last save is lost, and nobody knows yet."""
        job, every = self._jobs[number], self.world.save_every
        ended = job.done + int(np.searchsorted(job.ends, self.now, side="right"))
        self._book(job, max(job.done, ended // every * every), self.now)
        self.deaths += 1
        job.version, job.dead = job.version + 1, True
        self._at(self.now + self.world.told, "died", number, job.version)

    def _stop(self, number: str) -> None:
        """End after the step under way, saved."""
        job = self._jobs[number]
        if job.dead or job.until is not None:
            return
        job.version += 1
        if job.gpu is None:
            job.until = job.done
            self._at(self.now, "stopped", number, job.version)
            return
        left = min(int(np.searchsorted(job.ends, self.now)), len(job.ends) - 1)
        job.until = job.done + left + 1
        save = 0 if self._saved_after(np.array(job.until)) else self.world.save
        kind = "done" if job.until == self.world.steps else "stopped"
        self._at(float(job.ends[left]) + save, kind, number, job.version)

    def _end(self, number: str, kind: str) -> JobEnded:
        job = self._jobs.pop(number)
        if kind == "died":
            return JobEnded(number, "died", f"{job.job.directory} died")
        if job.gpu is not None:
            self._book(job, self.world.steps if job.until is None else job.until, self.now)
            del self._on[job.gpu]
            heapq.heappush(self._idle, job.gpu)
            self._place()
        return JobEnded(number, "done" if kind == "done" else "stopped")

    def _book(self, job: Attempt, kept: int, until: float) -> None:
        """What is on the disk now, and what the time of an attempt, up to ``until``, went into."""
        world, progress = self.world, self.progress[job.job.directory]
        steps = np.arange(job.done + 1, kept + 1)
        saves = int(self._saved_after(steps).sum()) + (kept == job.until and not self._saved_after(np.array(kept)))
        starting, nominal = min(world.start, until - job.begin), len(steps) * self.nominal(len(job.job.runs))
        stood = job.begin + starting
        if len(steps):
            stood = float(job.ends[len(steps) - 1]) + world.save * (saves - int(self._saved_after(steps).sum()))
        self.used["starting"] += starting
        self.used["saving"] += world.save * saves
        self.used["slow"] += stood - job.begin - starting - world.save * saves - nominal
        self.used["redone"] += until - stood
        progress.steps, progress.nominal = kept, progress.nominal + nominal


def _around_one(numbers: np.random.Generator, spread: float, count: int) -> np.ndarray:
    """Lognormal factors with mean 1."""
    return np.exp(spread * numbers.standard_normal(count) - spread**2 / 2)


@dataclass(eq=False)
class Cohort:
    """The work of runs that step together, without those that have been ``stopped``."""

    specs: Sequence[RunSpec]
    stopped: set[str]
    trains: bool = field(default=True, init=False)
    given_up: bool = field(default=False, init=False)
    done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(spec.run_id for spec in self.specs)
        self.name = self.specs[0].run_id

    def job(self) -> CohortJob | None:
        """See ``Work.job``."""
        left = [] if self.done else [{"run_id": name} for name in sorted(self.names - self.stopped)]
        return CohortJob(self.name, "", left, {}) if left else None

    def give_up(self, reason: str) -> None:
        """See ``Work.give_up``."""
        self.given_up = True


class SimulatedLooks:
    """The looks at results that are drawn by lot: of each run its condition's effect and noise, so that the difference
    of a pair has a standard deviation of 1. The last condition has an ``effect``, the others none."""

    def __init__(self, specs: Sequence[RunSpec], rule: Rule, effect: float, seed: int):
        self.specs, self.rule = specs, rule
        self.labels = list(dict.fromkeys(spec.label for spec in specs))
        numbers = generator("scale", seed, "results")
        self.values = {spec.run_id: float(numbers.standard_normal()) / 2**0.5 for spec in specs}
        for spec in specs:
            self.values[spec.run_id] += effect * (spec.label == self.labels[-1])
        self.seeds = list(dict.fromkeys(spec.seed for spec in specs))
        self.by_seed = {(spec.seed, spec.label): spec.run_id for spec in specs}
        self.left: list[Left | None] = [None] * rule.family
        self.table: list[list[float]] = []
        self.paths: list[list[float]] = [[] for _ in range(rule.family)]

    def look(self, ended: Set[str]) -> set[str]:
        """Look at the seeds that have become complete, in their order; the runs that are not needed any more."""
        while len(self.table) < len(self.seeds) and not all(self.left):
            seed = self.seeds[len(self.table)]
            here = [label for i, label in enumerate(self.labels) if i == 0 or self.left[i - 1] is None]
            if not all(self.by_seed[seed, label] in ended for label in here):
                break
            row = [self.values[self.by_seed[seed, label]] if label in here else math.nan for label in self.labels]
            self.table.append(row)
            fresh = np.array([label in here for label in self.labels[1:]])
            for i in np.flatnonzero(fresh):
                self.paths[i].append(row[i + 1] - row[0])
            found = decide_look(
                np.array(self.table), [np.array(path) for path in self.paths], self.rule, self.left, fresh, 0.0
            )
            for i, decision in enumerate(found):
                if fresh[i] and decision is not None and decision.reason in ("decided", "futility"):
                    self.left[i] = Left.after(decision.reason == "decided", decision.p_adjusted)
        out = {label for label, left in zip(self.labels[1:], self.left, strict=True) if left is not None}
        whole = all(self.left)
        return {spec.run_id for spec in self.specs if whole or spec.label in out}


@dataclass(frozen=True)
class Outcome:
    """A simulated campaign: seconds from beginning to end, shares of all GPU time by what it went into, how many jobs
    died, how many runs were begun and how many given up."""

    seconds: float
    shares: dict[str, float]
    deaths: int
    begun: int
    given_up: int

    @property
    def goodput(self) -> float:
        """The useful share."""
        return self.shares["useful"]


def simulate(
    groups: Sequence[Sequence[RunSpec]],
    gpus: int,
    world: World,
    nominal: Callable[[int], float],
    seed: int = 0,
    looks: SimulatedLooks | None = None,
) -> Outcome:
    """Carry these cohorts out with the product's scheduler."""
    fleet, stopped, ended = Gpus(gpus, world, nominal, seed), set[str](), set[str]()
    works = [Cohort(group, stopped) for group in groups]

    def after(work: Work, end: JobEnded) -> Iterable[Work]:
        assert isinstance(work, Cohort)
        if end.status in ("done", "died"):
            work.done = True
            ended.update(work.names)
        if looks is not None:
            under_way = scheduler.names_under_way
            unwanted = looks.look(ended) - ended
            stopped.update(unwanted - under_way)
            scheduler.stop_where(lambda names: names <= unwanted | ended)
        return [work] if end.status == "stopped" else []

    scheduler = Scheduler(fleet, lambda event: None, after, lambda: False, world.max_restarts)
    scheduler.carry_out(works)
    whole = gpus * fleet.now
    steps = {work.name: fleet.progress[work.name] for work in works if work.name in fleet.progress}
    finished = {work.name for work in works if work.done and not work.given_up}
    used = dict(fleet.used)
    used["useful"] = sum(progress.nominal for name, progress in steps.items() if name in finished)
    used["unneeded"] = sum(progress.nominal for name, progress in steps.items() if name not in finished)
    used["idle"] = whole - sum(used.values())
    return Outcome(
        seconds=fleet.now,
        shares={key: used.get(key, 0.0) / whole for key in SPENT},
        deaths=fleet.deaths,
        begun=len(fleet.runs),
        given_up=sum(len(work.specs) for work in works if work.given_up),
    )


def young_daly(save: float, mtbf: float) -> float:
    """The time between saves that loses least, to first order (Young 1974; Daly 2006)."""
    return math.sqrt(2 * save * mtbf)


def first_order(interval: float, save: float, mtbf: float, restart: float) -> float:
    """Goodput of one worker with so much work between saves, to first order in what is short beside ``mtbf``: saving,
    half an interval lost and a restart for each failure."""
    return 1 - save / interval - (interval / 2 + restart) / mtbf


def exact(interval: float, save: float, mtbf: float, restart: float) -> float:
    """The same where failures come at random also while it saves and restarts: an interval takes
    mtbf·exp(restart/mtbf)·(exp((interval + save)/mtbf) − 1) in the mean (Daly 2006)."""
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf))


def made_campaign(seeds: int, sequential: str = "off") -> list[RunSpec]:
    """The runs of five conditions and so many seeds; all runs of a condition share one configuration."""
    conditions = [{"advantage_mode": a, "transform_mode": t} for a, t in CONDITIONS]
    test = {"test": "normal", "race": True} if sequential != "off" else {}
    file = {
        "campaign": {"seeds": list(range(1, 21)), "conditions": conditions, "sequential": sequential} | test,
        "model": {"model": MODEL, "lora_rank": 16},
        "training": TRAINING,
        "evaluation": {"problems": 256},
    }
    one = plan(parse_dict(file))[: len(CONDITIONS)]
    return [replace(spec, seed=seed, run_id=f"{spec.label}_s{seed}") for seed in range(1, seeds + 1) for spec in one]


def cut_for(seeds: int, gpus: int, sequential: str = "off") -> list[list[RunSpec]]:
    """The campaign in cohorts, as the product cuts it for so many GPUs. Which runs may share a base is worked out once
    for each configuration, of which there are five."""
    specs = made_campaign(seeds, sequential)
    keys = {spec.label: cohorts.base_key(spec) for spec in specs[: len(CONDITIONS)]}
    with patch.object(cohorts, "base_key", lambda spec: keys[spec.label]):
        return cohorts.cut(specs, on_gpu=True, slots=gpus)


def step_seconds(runs: int) -> float:
    """Return the seconds that a step of so many runs is assumed to take: 206 s for five."""
    return 21.07 + 37.06 * runs


def several(repeats: int, seed: int, run: Callable[[int], Outcome]) -> list[Outcome]:
    """The same campaign with other luck, ``repeats`` times."""
    return [run(1000 * seed + each) for each in range(repeats)]


def mean(values: Iterable[float]) -> float:
    """The mean."""
    return statistics.fmean(values)


def percent(values: Sequence[float]) -> str:
    """The mean of shares, and how far they lie apart where they do."""
    low, high = (f"{100 * each:.1f}" for each in (min(values), max(values)))
    return f"{100 * mean(values):.1f}" + (f" ({low} to {high})" if low != high else "")


def share(found: Sequence[Outcome], key: str) -> str:
    """The mean share that went into this, in percent."""
    return f"{round(100 * mean(one.shares[key] for one in found), 2) + 0.0:.2f}"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As Markdown."""
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


ROUNDS = (1, 4, 16)
"""Cohorts for each GPU."""
MTBF_SWEEP = (MTBF_HOURS, 5000, 500, 50)
SAVE_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
"""Steps between saves."""
SAVING = World(mtbf=50 * HOUR, node_share=0, told=0, repair=0, gpu_spread=0, step_spread=0, steps=256, max_restarts=999)
"""Of the table of saves: a GPU as may be taken away at any time, and everything else calm, as the formula has it."""
LOOKED = (1, 2, 5, 10, 20, 100)
"""GPUs of the table of looks."""
LOOK_SEEDS, LOOK_EFFECT = 20, 1.5


def goodputs(
    gpus: Sequence[int], rounds: Sequence[int], repeats: int, seed: int
) -> dict[int, dict[int, list[Outcome]]]:
    """Campaigns by GPUs and cohorts for each."""
    found: dict[int, dict[int, list[Outcome]]] = {}
    for count in gpus:
        for each in rounds:
            groups = cut_for(count * each, count)
            found.setdefault(count, {})[each] = several(
                repeats, seed, lambda s, g=groups, n=count: simulate(g, n, World(), step_seconds, s)
            )
    return found


def saves(repeats: int, seed: int) -> list[tuple[int, list[float], float, float]]:
    """By steps between saves: goodputs of one GPU that trains 400 cohorts, the exact formula and its first order."""
    groups = cut_for(400, 1)
    rows = []
    for every in SAVE_SWEEP:
        world = replace(SAVING, save_every=every)
        outcomes = several(repeats, seed, lambda s, w=world: simulate(groups, 1, w, step_seconds, s))
        step = step_seconds(5)
        # Every run also starts once without a failure.
        per_start = world.start / (world.steps * step)
        whole = exact(every * step, world.save, world.mtbf, world.start)
        order = first_order(every * step, world.save, world.mtbf, world.start)
        rows.append((every, [one.goodput for one in outcomes], 1 / (1 / whole + per_start), order - per_start))
    return rows


def looks(gpus: int, repeats: int, seed: int) -> list[tuple[Outcome, Outcome]]:
    """Campaigns of which one condition differs, with a rule that stops conditions early and without."""
    rule = Rule(test="normal", family=4, planned=LOOK_SEEDS, looks="obrien_fleming", race=True)
    with_rule, without = cut_for(LOOK_SEEDS, gpus, sequential="obrien_fleming"), cut_for(LOOK_SEEDS, gpus)
    specs, found = made_campaign(LOOK_SEEDS, sequential="obrien_fleming"), []
    for each in range(repeats):
        luck = 1000 * seed + each
        looked = SimulatedLooks(specs, rule, LOOK_EFFECT, luck)
        found.append(
            (
                simulate(with_rule, gpus, World(), step_seconds, luck, looked),
                simulate(without, gpus, World(), step_seconds, luck),
            )
        )
    return found


def main() -> int:
    """Print every table, and draw where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["goodput", "failures", "saves", "looks"], nargs="+", default=None)
    parser.add_argument("--plots", type=Path, help="directory for scale-goodput.svg and scale-saves.svg")
    options = parser.parse_args()
    wanted = options.only or ["goodput", "failures", "saves", "looks"]
    repeats, seed = options.repeats, options.seed
    if "goodput" in wanted:
        print_goodput(options.gpus, repeats, seed, options.plots)
    if "failures" in wanted:
        print_failures(max(each for each in options.gpus if each <= 512), repeats, seed)
    if "saves" in wanted:
        print_saves(repeats, seed, options.plots)
    if "looks" in wanted:
        print_looks(5 * repeats, seed)
    return 0


def print_goodput(gpus: Sequence[int], repeats: int, seed: int, plots: Path | None) -> None:
    """Goodput by GPUs and cohorts for each of them, and where the rest of the time goes."""
    found = goodputs(gpus, ROUNDS, repeats, seed)
    step = step_seconds(len(CONDITIONS))
    print(f"goodput in %: cohorts of 5 runs, {World().steps} steps of {step:.0f} s\n")
    print_table(
        ["GPUs", *(f"{each} cohort{'s' * (each > 1)} for each" for each in ROUNDS)],
        [[f"{n:,}", *(percent([one.goodput for one in found[n][each]]) for each in ROUNDS)] for n in gpus],
    )
    print("where the time of all GPUs goes, in %: 4 cohorts for each\n")
    print_table(
        ["GPUs", "hours", "jobs that died", *SPENT],
        [
            [
                f"{n:,}",
                f"{mean(one.seconds for one in found[n][4]) / HOUR:.1f}",
                f"{mean(one.deaths for one in found[n][4]):.1f}",
                *(share(found[n][4], key) for key in SPENT),
            ]
            for n in gpus
        ],
    )
    if plots is not None:
        kinds = zip(ROUNDS, ("limit", "predicted", "measured"), strict=True)
        series = [
            Series(f"{each} for each GPU", kind, [100 * mean(one.goodput for one in found[n][each]) for n in gpus])
            for each, kind in kinds
        ]
        write_plot(plots / "scale-goodput.svg", "Goodput by cohorts for each GPU", "GPUs", "%", gpus, series, (60, 100))


def print_failures(gpus: int, repeats: int, seed: int) -> None:
    """Goodput by how often GPUs fail."""
    groups = cut_for(4 * gpus, gpus)
    rows = []
    for hours in MTBF_SWEEP:
        world = World(mtbf=hours * HOUR)
        found = several(repeats, seed, lambda s, w=world: simulate(groups, gpus, w, step_seconds, s))
        died, lost = mean(one.deaths for one in found), mean(one.given_up for one in found)
        row = [f"{hours:,.0f}", percent([one.goodput for one in found]), f"{died:,.1f}", f"{lost:,.1f}"]
        rows.append([*row, *(share(found, key) for key in SPENT[3:])])
    print(f"{gpus} GPUs, 4 cohorts for each, by hours between failures of one GPU\n")
    print_table(["hours", "goodput, %", "jobs that died", "runs given up", *SPENT[3:]], rows)


def print_saves(repeats: int, seed: int, plots: Path | None) -> None:
    """Goodput by the steps between saves, beside the formula."""
    rows, step = saves(repeats, seed), step_seconds(len(CONDITIONS))
    best = young_daly(SAVING.save, SAVING.mtbf) / step
    print(f"one GPU that fails every {SAVING.mtbf / HOUR:.0f} h; Young and Daly: {best:.1f} steps between saves\n")
    print_table(
        ["steps between saves", "goodput, %", "formula, %", "first order, %"],
        [[str(n), percent(found), f"{100 * whole:.1f}", f"{100 * order:.1f}"] for n, found, whole, order in rows],
    )
    if plots is not None:
        series = [
            Series("formula", "predicted", [100 * row[2] for row in rows]),
            Series("first order", "limit", [100 * row[3] for row in rows]),
            Series("simulated", "measured", [100 * mean(row[1]) for row in rows]),
        ]
        title = "Goodput of a GPU that fails every 50 hours"
        write_plot(plots / "scale-saves.svg", title, "steps between saves", "%", SAVE_SWEEP, series, (80, 100))


def print_looks(repeats: int, seed: int) -> None:
    """What a rule that stops conditions saves, by GPUs."""
    rows = []
    for gpus in LOOKED:
        found = looks(gpus, repeats, seed)
        hours, plain = ([pair[i].seconds / HOUR for pair in found] for i in (0, 1))
        rows.append(
            [
                f"{gpus}",
                f"{mean(pair[0].begun for pair in found):.0f}",
                f"{mean(hours):.0f}",
                f"{mean(plain):.0f}",
                f"{gpus * mean(hours):,.0f}",
                f"{gpus * mean(plain):,.0f}",
            ]
        )
    print(
        f"5 conditions × {LOOK_SEEDS} seeds, one differs by {LOOK_EFFECT} standard deviations of a pair's difference\n"
    )
    print_table(["GPUs", "runs begun", "hours", "without looks", "GPU-hours", "without looks"], rows)


if __name__ == "__main__":
    sys.exit(main())
