"""The rollouts of the steps of runs: the weights that draw them, and the queue that samples.

With the bound k (``[training] max_off_policy_steps``) the rollouts of step t are drawn by the weights as they are
before step max(0, t − k). With k = 0 these are the weights that train on them.

An engine that samples with the processors that also train is asked when rollouts are due: every update waits for its
own. One that has processors of its own (``Engine.beside``) is asked in a thread, so that it samples for later steps
while a policy is updated. What is offered is sampled and taken in order: no long rollout is passed over for a short
one, none is sampled in vain, and a step has the same problems either way.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from retrain.device import timestamp
from retrain.engines.protocol import Engine, PolicyRef
from retrain.policy.protocol import PolicySnapshot
from retrain.rollouts.collect import CollectResult, RolloutRequest, collect
from retrain.rollouts.pressure import Pressure
from retrain.rollouts.resample import Resample
from retrain.types import Group

CLOSING_S = 5.0  # Seconds that the end of a queue waits for its thread, which may be grading
Owner = TypeVar("Owner")
Span = tuple[str, float, float]
"""Name, begin and end of a part of a step, in seconds since the epoch."""


@dataclass(frozen=True)
class Weights:
    """A run's weights as they are before ``step``."""

    step: int
    ref: PolicyRef
    snapshot: PolicySnapshot


class RecentWeights:
    """The weights of a run that rollouts still to be drawn, or still to be trained on, belong to: those before the
    present step and before the ``bound`` steps ahead of it, the oldest first.

    ``remembers``: the last that were dropped are in ``snapshots`` too, so that an engine can be told that still has
    them.
    """

    def __init__(self, bound: int, remembers: bool = False):
        self.bound, self.remembers = bound, remembers
        self._dropped: Weights | None = None
        self._weights: list[Weights] = []
        self._replaced: list[Weights] = []
        self.published: set[PolicyRef] = set()  # Policy refs currently loaded in the engine

    def publish_to(self, engine: Engine, newest: Weights) -> None:
        """Have the engine sample with these weights, and retire those that are too old."""
        for weights in (*self._weights, newest):
            if weights.ref not in self.published:
                engine.publish(weights.ref, weights.snapshot)
                self.published.add(weights.ref)
        self._retire(engine, self.note(newest))

    def withdraw_from(self, engine: Engine) -> None:
        """Retire all weights that the engine has."""
        self._retire(engine, list(self.published))

    def _retire(self, engine: Engine, refs: Sequence[PolicyRef]) -> None:
        for ref in refs:
            engine.retire(ref)
            self.published.discard(ref)

    def note(self, weights: Weights) -> list[PolicyRef]:
        """Add the weights before this step, in place of those noted for it, and return the refs that are needed no
        longer. Replaced weights stay for a step: a request may name them already."""
        before = [*self._replaced, *self._weights]
        retained = [each for each in self._weights if weights.step - self.bound <= each.step < weights.step]
        replaced = [each for each in before if each.step == weights.step and each.ref != weights.ref]
        names = {each.ref for each in (*retained, *replaced, weights)}
        dropped = [each for each in before if each.ref not in names]
        self._replaced, self._weights = replaced if self.bound else [], [*retained, weights]
        dropped += [] if self.bound else replaced
        if self.remembers and dropped:
            self._dropped = dropped[-1]
        return list(dict.fromkeys(each.ref for each in dropped))

    def before(self, step: int) -> list[Weights]:
        """Return the weights before earlier steps that rollouts of this and later steps are drawn by."""
        return [each for each in self._weights if step - self.bound <= each.step < step]

    def drawing(self, step: int) -> PolicyRef:
        """Return the weights that draw the rollouts of a step: of those at least ``bound`` steps before it the newest,
        or the oldest there are."""
        old_enough = [each for each in self._weights if each.step <= step - self.bound]
        return (old_enough[-1] if old_enough else self._weights[0]).ref

    def newest(self) -> PolicyRef:
        """Return the present weights."""
        return self._weights[-1].ref

    def snapshots(self) -> dict[int, PolicySnapshot]:
        """Return the weights that are kept, by version."""
        known = [*([self._dropped] if self._dropped else []), *self._weights]
        return {each.ref.version: each.snapshot for each in known}

    def age(self, version: int, step: int) -> int:
        """Return how many steps before ``step`` weights of this version were last the newest: 0 while they are."""
        known = [*self._replaced, *self._weights]
        last = max((each.step for each in known if each.ref.version == version), default=None)
        return step - last if last is not None else self.bound + 1


@dataclass(eq=False)
class StepRollouts:
    """The rollouts of one step: its requests and their results, both with those of the rounds of resampling.

    ``rounds`` are what the rounds collected, for all steps of the same decode batch; empty until it is sampled.
    """

    step: int
    requests: list[RolloutRequest]
    resample: Resample | None = None
    groups: list[Group | Exception] = field(default_factory=list)
    rounds: Sequence[CollectResult] = ()


def collect_rounds(engine: Engine, steps: Sequence[StepRollouts], max_rows: int | None = None) -> list[CollectResult]:
    """Sample and grade the requests of these steps, then in rounds those that ``resample`` adds, each round in one
    decode batch. Returns what each round collected."""
    pending, rounds = [(rollouts, rollouts.requests) for rollouts in steps], list[CollectResult]()
    while pending or not rounds:
        rounds.append(collect(engine, [request for _, requests in pending for request in requests], max_rows))
        groups = iter(rounds[-1].groups)
        for rollouts, requests in pending:
            rollouts.groups += islice(groups, len(requests))
        more = [
            (rollouts, list(rollouts.resample(rollouts.step, rollouts.requests, rollouts.groups)))
            for rollouts in steps
            if rollouts.resample is not None
        ]
        pending = [(rollouts, requests) for rollouts, requests in more if requests]
        for rollouts, requests in pending:
            rollouts.requests += requests
    return rounds


@dataclass(frozen=True)
class SampledStep(Generic[Owner]):
    """The groups of every owner, in the order of its requests; ``spans`` of time, ("rollout" | "score", start, end) in
    seconds since the epoch, or ("ahead", …) of sampling in a thread and ("rollout", …) of waiting for it; the seconds
    that the engine took to load weights, None where it does not say; and how many later steps are sampled."""

    groups: dict[Owner, list[Group | Exception]]
    spans: list[Span]
    sync_seconds: float | None
    depth: int = 0


class RolloutQueue(Generic[Owner]):
    """Samples for all runs of a cohort in one decode batch. ``pressure`` decides how many rollouts decode at once;
    ``ahead``: a thread samples what is offered, whether it is due or not."""

    def __init__(self, engine: Engine, pressure: Pressure | None = None, ahead: bool = False):
        self.engine, self.pressure, self.ahead = engine, pressure, ahead
        self._offers: dict[tuple[Owner, int], StepRollouts] = {}
        self._changed = threading.Condition()
        self._collecting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None
        self._busy: list[tuple[float, float]] = []
        self._since: float | None = None

    def offer(
        self, owner: Owner, requests: Mapping[int, Sequence[RolloutRequest]], resample: Resample | None = None
    ) -> None:
        """Add an owner's requests, by step; ``resample`` adds to them once they are sampled, called by the thread that
        samples."""
        with self._changed:
            for step, step_requests in requests.items():
                self._offers[owner, step] = StepRollouts(step, list(step_requests), resample)
            self._changed.notify_all()

    def withdraw(self, owner: Owner) -> None:
        with self._changed:
            self._offers = {key: offer for key, offer in self._offers.items() if key[0] != owner}

    def take(self, due: Mapping[Owner, int]) -> SampledStep[Owner]:
        """Return the groups of every owner's step, which it has offered. Raises what the engine raised."""
        begin = timestamp()
        if self.ahead:
            self._wait(list(due.items()))
        else:
            self._collect([self._offers[key] for key in due.items()])
        with self._changed:
            sampled = {owner: self._offers.pop((owner, step)) for owner, step in due.items()}
            depth = len({offer.step for offer in self._offers.values() if offer.rounds})
        rounds = list(dict.fromkeys(collected for rollouts in sampled.values() for collected in rollouts.rounds))
        spans = [span for collected in rounds for span in collected.spans]
        if self.ahead:
            sampled_ahead = [("ahead", start, end) for name, start, end in spans if name == "rollout"]
            spans = [*sampled_ahead, ("rollout", begin, timestamp())]
        groups = {owner: rollouts.groups for owner, rollouts in sampled.items()}
        return SampledStep(groups, spans, _sync_seconds(rounds), depth)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend sampling ahead: environments and graders serve one batch at a time."""
        with self._collecting:
            yield

    def overlap(self, begin: float, end: float) -> float:
        """Return the seconds between ``begin`` and ``end`` in which rollouts were sampled and graded in the thread."""
        with self._changed:
            spans = [*self._busy, *([] if self._since is None else [(self._since, end)])]
            self._busy = [span for span in self._busy if span[1] > begin]
        return sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in spans)

    def close(self) -> None:
        """Stop sampling, and cancel what is in flight."""
        with self._changed:
            self._closed = True
            self._offers.clear()
            self._changed.notify_all()
        if self._thread is not None:
            if self._since is not None:
                self.engine.give_up()
            self._thread.join(CLOSING_S)

    def _collect(self, offers: Sequence[StepRollouts]) -> None:
        with self._collecting:
            self._since = timestamp()
            try:
                rounds = collect_rounds(self.engine, offers, self.pressure.max_rows if self.pressure else None)
            finally:
                with self._changed:
                    self._busy.append((self._since, timestamp()))
                    self._since = None
        if self.pressure is not None:
            _observe(self.pressure, rounds[0])  # later rounds are too small to tell how fast decoding is
        for offer in offers:
            offer.rounds = rounds

    def _wait(self, due: Sequence[tuple[Owner, int]]) -> None:
        """Wait until all of these are sampled. Raises what ended the thread."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._sample_offers, name="rollouts ahead", daemon=True)
                self._thread.start()
            while any(not self._offers[key].rounds for key in due):
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()

    def _sample_offers(self) -> None:
        """Sample what is offered, until the queue is closed."""
        while True:
            with self._changed:
                while not self._closed and not self._waiting():
                    self._changed.wait()
                if self._closed:
                    return
                offers = self._waiting()
            try:
                self._collect(offers)
            except BaseException as error:
                self._failure = error
            with self._changed:
                self._changed.notify_all()
                if self._failure is not None:
                    return

    def _waiting(self) -> list[StepRollouts]:
        """Return the offers of the earliest step that is not sampled."""
        missing = [offer for offer in self._offers.values() if not offer.rounds]
        first = min((offer.step for offer in missing), default=0)
        return [offer for offer in missing if offer.step == first]


def _sync_seconds(rounds: Sequence[CollectResult]) -> float | None:
    """Return the seconds that the engine took to load weights, None where it does not say."""
    seconds = [collected.sync_seconds for collected in rounds if collected.sync_seconds is not None]
    return sum(seconds) if seconds else None


def _observe(pressure: Pressure, collected: CollectResult) -> None:
    """Report tokens sampled, seconds of decoding, and how many tokens came before one on average."""
    groups = [group for group in collected.groups if isinstance(group, Group)]
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
    if not rollouts:
        return
    sampled, read = sum(map(len, rollouts)), sum(rollout.observation_tokens for rollout in rollouts)
    seconds = sum(end - start for name, start, end in collected.spans if name == "rollout")
    pressure.observe(sampled, seconds, read / len(rollouts) + sampled / (2 * len(rollouts)))
