"""Rollouts for the next update of every run, and where they may run ahead of the policy those of later updates.

An engine that samples with the processors that also train is asked when rollouts are due: every update waits for its
own. One that has processors of its own (``Engine.beside``) is asked in a thread, so that it samples for later steps
while a policy is updated. How far ahead is decided by who offers, and what is offered is sampled and taken in order: no
long rollout is passed over for a short one, none is sampled in vain, and a step has the same problems either way.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from retrain.device import timestamp
from retrain.engines.protocol import Engine
from retrain.rollouts.collect import Collected, RolloutRequest
from retrain.rollouts.pressure import Pressure
from retrain.rollouts.resample import Resample, StepRollouts, collect_rounds
from retrain.types import Group

CLOSING_S = 5.0  # Seconds that the end of a queue waits for its thread, which may be grading
Owner = TypeVar("Owner")
Span = tuple[str, float, float]


@dataclass(frozen=True)
class SampledStep(Generic[Owner]):
    """The groups of every owner, in the order of its requests; ``spans`` of time, ("rollout" | "score", start, end) in
    seconds since the epoch, or ("ahead", …) of sampling in a thread and ("rollout", …) of waiting for it; the seconds
    that the engine took to load weights, None where it does not say; and how many later steps are sampled."""

    groups: dict[Owner, list[Group | Exception]]
    spans: list[Span]
    sync_seconds: float | None
    depth: int = 0


@dataclass
class _Offer(Generic[Owner]):
    """One owner's requests of one step, and once it is sampled their groups, with all rounds of its batch."""

    owner: Owner
    step: int
    requests: Sequence[RolloutRequest]
    resample: Resample | None = None
    groups: list[Group | Exception] | None = None
    collected: Sequence[Collected] = ()


class RolloutQueue(Generic[Owner]):
    """Samples for all runs of a cohort in one decode batch. ``pressure`` decides how many rollouts decode at once;
    ``ahead``: a thread samples what is offered, whether it is due or not."""

    def __init__(self, engine: Engine, pressure: Pressure | None = None, ahead: bool = False):
        self.engine, self.pressure, self.ahead = engine, pressure, ahead
        self._offers: dict[tuple[Owner, int], _Offer[Owner]] = {}
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
                self._offers[owner, step] = _Offer(owner, step, step_requests, resample)
            self._changed.notify_all()

    def withdraw(self, owner: Owner) -> None:
        with self._changed:
            self._offers = {key: offer for key, offer in self._offers.items() if key[0] != owner}

    def take(self, due: Mapping[Owner, int]) -> SampledStep[Owner]:
        """Return the groups of every owner's step, which it has offered. Raises what the engine raised."""
        begin = timestamp()
        if self.ahead:
            self._wait([(owner, step) for owner, step in due.items()])
        else:
            self._collect([self._offers[owner, step] for owner, step in due.items()])
        with self._changed:
            offers = [self._offers.pop((owner, step)) for owner, step in due.items()]
            depth = len({step for (_, step), offer in self._offers.items() if offer.groups is not None})
        rounds = list({id(collected): collected for offer in offers for collected in offer.collected}.values())
        spans = [span for collected in rounds for span in collected.spans]
        syncs = [collected.sync_seconds for collected in rounds if collected.sync_seconds is not None]
        if self.ahead:
            sampled_ahead = [("ahead", start, end) for name, start, end in spans if name == "rollout"]
            spans = [*sampled_ahead, ("rollout", begin, timestamp())]
        groups = {offer.owner: offer.groups or [] for offer in offers}
        return SampledStep(groups, spans, sum(syncs) if syncs else None, depth)

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

    def _collect(self, offers: Sequence[_Offer[Owner]]) -> None:
        steps = [StepRollouts(offer.step, list(offer.requests), offer.resample) for offer in offers]
        with self._collecting:
            self._since = timestamp()
            try:
                rounds = collect_rounds(self.engine, steps, self.pressure.max_rows if self.pressure else None)
            finally:
                with self._changed:
                    self._busy.append((self._since, timestamp()))
                    self._since = None
        if self.pressure is not None:
            _observe(self.pressure, rounds[0])  # later rounds are too small to tell how fast decoding is
        for offer, rollouts in zip(offers, steps, strict=True):
            offer.groups, offer.collected = rollouts.groups, rounds

    def _wait(self, due: Sequence[tuple[Owner, int]]) -> None:
        """Wait until all of these are sampled. Raises what ended the thread."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._sample_offers, name="rollouts ahead", daemon=True)
                self._thread.start()
            while any(self._offers[each].groups is None for each in due):
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

    def _waiting(self) -> list[_Offer[Owner]]:
        """Return the offers of the earliest step that is not sampled."""
        missing = [offer for offer in self._offers.values() if offer.groups is None]
        first = min((offer.step for offer in missing), default=0)
        return [offer for offer in missing if offer.step == first]


def _observe(pressure: Pressure, collected: Collected) -> None:
    """Report tokens sampled, seconds of decoding, and how many tokens came before one on average."""
    groups = [group for group in collected.groups if isinstance(group, Group)]
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
    if not rollouts:
        return
    sampled, read = sum(map(len, rollouts)), sum(rollout.observation_tokens for rollout in rollouts)
    seconds = sum(end - start for name, start, end in collected.spans if name == "rollout")
    pressure.observe(sampled, seconds, read / len(rollouts) + sampled / (2 * len(rollouts)))
