"""Queues and samples the rollouts of the steps of runs, in advance if the engine allows it.

With the staleness limit k (``[training] max_off_policy_steps``) the rollouts of step t are sampled by the weights
before step max(0, t − k); with k = 0 these are the weights that train on them.

An engine on the trainer's processors samples when rollouts are due, so every update waits for them. A concurrent
engine (``Engine.is_concurrent``) is called in a thread and samples later steps during an update. With either engine,
requests are sampled and taken in order, and long rollouts are not skipped for short ones: a step has the same problems.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from retrain.device import timestamp
from retrain.engines.protocol import Engine
from retrain.rollouts.collect import Collector, CollectResult, RolloutRequest, collect
from retrain.rollouts.pressure import Pressure
from retrain.rollouts.resample import Resample
from retrain.types import Group

CLOSING_S = 5.0  # Seconds that the end of a queue waits for its thread, which may be grading
Owner = TypeVar("Owner")
Span = tuple[str, float, float]  # Name of a part of a step, its begin and end in seconds since the epoch


@dataclass(eq=False)
class StepRollouts:
    """The rollouts of one step: its requests and their results, including those of resampling rounds.

    ``rounds``: results of each round for all steps of the same decode batch; empty before sampling.
    """

    step: int
    requests: list[RolloutRequest]
    resample: Resample | None = None
    groups: list[Group | Exception] = field(default_factory=list)
    rounds: Sequence[CollectResult] = ()


def collect_rounds(
    engine: Engine, steps: Sequence[StepRollouts], max_rows: int | None = None, collect: Collector = collect
) -> list[CollectResult]:
    """Sample and grade the requests of these steps, then those that ``resample`` adds, one decode batch per round.
    Return the result of each round."""
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
    """Rollouts of one step: the ``groups`` of every owner, in the order of its requests. ``spans``: as in
    ``CollectResult``; for a step that was sampled ahead, "ahead" is the time of sampling and "rollout" the time that
    the step waited for it. ``depth``: number of later steps already sampled."""

    groups: dict[Owner, list[Group | Exception]]
    spans: list[Span]
    sync_seconds: float | None
    depth: int = 0


@dataclass(eq=False)
class RolloutQueue(Generic[Owner]):
    """Queue of rollout requests, sampled for all owners (the runs of a cohort) in one decode batch. ``pressure`` limits
    the rollouts that are decoded at once; ``ahead``: a thread samples offered requests before they are due."""

    engine: Engine
    pressure: Pressure | None = None
    ahead: bool = False
    collect: Collector = collect
    _offers: dict[tuple[Owner, int], StepRollouts] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _collecting: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _closed: bool = False
    _failure: BaseException | None = None
    _busy: list[tuple[float, float]] = field(default_factory=list)
    _since: float | None = None

    def offer(
        self, owner: Owner, requests: Mapping[int, Sequence[RolloutRequest]], resample: Resample | None = None
    ) -> None:
        """Set the owner's requests for each step. After each decode batch, the thread that samples asks ``resample``
        for more requests of each step."""
        with self._changed:
            for step, step_requests in requests.items():
                self._offers[owner, step] = StepRollouts(step, list(step_requests), resample)
            self._changed.notify_all()

    def withdraw(self, owner: Owner) -> None:
        with self._changed:
            self._offers = {key: offer for key, offer in self._offers.items() if key[0] != owner}

    def take(self, due: Mapping[Owner, int]) -> SampledStep[Owner]:
        """Sample the ``due`` step of every owner, or wait until the thread has sampled it. Raises engine errors."""
        begin = timestamp()
        if self.ahead:
            self._wait(list(due.items()))
        else:
            self._collect([self._offers[key] for key in due.items()])
        with self._changed:
            sampled = {owner: self._offers.pop((owner, step)) for owner, step in due.items()}
            depth = len({offer.step for offer in self._offers.values() if offer.rounds})
        # Owners that were sampled in one batch share its rounds, which count once.
        rounds = list(dict.fromkeys(collected for rollouts in sampled.values() for collected in rollouts.rounds))
        spans = [span for collected in rounds for span in collected.spans]
        if self.ahead:
            sampled_ahead = [("ahead", start, end) for name, start, end in spans if name == "rollout"]
            spans = [*sampled_ahead, ("rollout", begin, timestamp())]
        groups = {owner: rollouts.groups for owner, rollouts in sampled.items()}
        return SampledStep(groups, spans, _sync_seconds(rounds), depth)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend sampling ahead in the block, because environments and graders serve one batch at a time."""
        with self._collecting:
            yield

    def overlap(self, begin: float, end: float) -> float:
        """Return the seconds between ``begin`` and ``end`` in which rollouts were sampled and graded in the thread."""
        with self._changed:
            spans = [*self._busy, *([] if self._since is None else [(self._since, end)])]
            self._busy = [span for span in self._busy if span[1] > begin]
        return sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in spans)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._offers.clear()
            self._changed.notify_all()
        if self._thread is not None:
            if self._since is not None:
                self.engine.cancel()
            self._thread.join(CLOSING_S)

    def _collect(self, offers: Sequence[StepRollouts]) -> None:
        with self._collecting:
            self._since = timestamp()
            try:
                max_rows = self.pressure.max_rows if self.pressure else None
                rounds = collect_rounds(self.engine, offers, max_rows, self.collect)
            finally:
                with self._changed:
                    self._busy.append((self._since, timestamp()))
                    self._since = None
        if self.pressure is not None:
            _observe(self.pressure, rounds[0])  # later rounds are too small to tell how fast decoding is
        for offer in offers:
            offer.rounds = rounds

    def _wait(self, due: Sequence[tuple[Owner, int]]) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._sample_offers, name="rollouts ahead", daemon=True)
                self._thread.start()
            while any(not self._offers[key].rounds for key in due):
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()

    def _sample_offers(self) -> None:
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
        missing = [offer for offer in self._offers.values() if not offer.rounds]
        first = min((offer.step for offer in missing), default=0)
        return [offer for offer in missing if offer.step == first]


def _sync_seconds(rounds: Sequence[CollectResult]) -> float | None:
    seconds = [collected.sync_seconds for collected in rounds if collected.sync_seconds is not None]
    return sum(seconds) if seconds else None


def _observe(pressure: Pressure, collected: CollectResult) -> None:
    groups = [group for group in collected.groups if isinstance(group, Group)]
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
    if not rollouts:
        return
    sampled, read = sum(map(len, rollouts)), sum(rollout.observation_tokens for rollout in rollouts)
    seconds = sum(end - start for name, start, end in collected.spans if name == "rollout")
    # Before a sampled token there is on average half of the completion.
    pressure.observe(sampled, seconds, read / len(rollouts) + sampled / (2 * len(rollouts)))
