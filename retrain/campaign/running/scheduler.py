"""Keep an executor busy: as many jobs under way as it has room for, each followed to its end by itself.

What there is to do is given as ``Work``, in the order in which it should begin; whoever gives it decides after each end
what follows from that. Nothing is known here of runs but their names: two works that touch the same run are not under
way at the same time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Set
from contextlib import closing
from typing import Protocol

from retrain.campaign.running.protocol import Event, Handle, Job, JobEnded, JobRunner, Message
from retrain.errors import RetrainError


class Work(Protocol):
    """Something that takes one job at a time until it is done."""

    @property
    def names(self) -> frozenset[str]: ...

    @property
    def trains(self) -> bool:
        """Whether a stop comes before it; what only looks at finished runs is still done when nothing else is left."""
        ...

    def job(self) -> Job | None:
        """What is to be done now that its turn has come; None when nothing is left of it."""

    def give_up(self, reason: str) -> None:
        """Its job has died too often."""


class Scheduler:
    """Does works with an executor. ``hear`` gets every event; ``after`` says, once a job has ended (not for "died"),
    what has to be done next; ``stopping`` is asked at every event whether to end after the steps under way;
    ``max_restarts`` is how often the job of one work may die; ``room`` is how many jobs may be under way or wait at the
    executor, its slots unless given."""

    def __init__(
        self,
        executor: JobRunner,
        hear: Callable[[Event], None],
        after: Callable[[Work, JobEnded], Iterable[Work]],
        stopping: Callable[[], bool],
        max_restarts: int,
        room: int | None = None,
    ):
        self.executor, self.hear, self.after, self.stopping = executor, hear, after, stopping
        self.max_restarts, self.room = max_restarts, room or executor.slots
        self.lost_steps = False  # Whether a job died while all were asked to stop: not everything has been saved
        self._waiting: deque[Work] = deque()
        self._under_way: dict[str, tuple[Work, Handle]] = {}
        self._busy = set[str]()
        self._deaths: dict[Work, int] = {}
        self._fault: RetrainError | None = None

    @property
    def names_under_way(self) -> Set[str]:
        """The runs that are being worked on, as they are now and will be: it changes with them."""
        return self._busy

    def stop_where(self, unwanted: Callable[[frozenset[str]], bool]) -> None:
        """Ask the jobs whose runs are all ``unwanted`` for an end after their step."""
        for work, handle in self._under_way.values():
            if work.names and unwanted(work.names):
                handle.stop()

    def carry_out(self, works: Iterable[Work]) -> bool:
        """Do all of these works; False when asked to stop before all that train were done.

        Raises what the executor's events or ``after`` raise. What ``after`` raises (a RetrainError) ends the other jobs
        first, saved.
        """
        self._waiting.extend(works)
        self._fill()
        if self._under_way:
            with closing(self.executor.events()) as events:
                for event in events:
                    self._take(event)
                    if not self._under_way:
                        break
        if self._under_way:
            raise RuntimeError(f"the executor's events ended before its jobs {', '.join(self._under_way)}")
        if self._fault is not None:
            raise self._fault
        return not self._has_training_left()

    def _take(self, event: Event) -> None:
        self.hear(event)
        if isinstance(event, JobEnded):
            work, _ = self._under_way.pop(event.job)
            self._busy -= work.names
            self._waiting.extendleft(reversed([*self._next(work, event)]))
        if self.stopping() or self._fault is not None:
            for _, handle in self._under_way.values():
                handle.stop()
        self._fill()

    def _next(self, work: Work, end: JobEnded) -> Iterable[Work]:
        try:
            if end.status == "died":
                return self._again(work, end.reason)
            return self.after(work, end)
        except RetrainError as error:
            self._fault = self._fault or error
            return []

    def _again(self, work: Work, reason: str) -> Iterable[Work]:
        """The work whose job has died, unless that has happened too often."""
        if self.stopping():
            self.lost_steps = True
            return [work]
        deaths = self._deaths[work] = self._deaths.get(work, 0) + 1
        if deaths <= self.max_restarts:
            self.hear(Message(f"{reason}: its job begins again ({deaths} of {self.max_restarts} restarts)", "warning"))
            return [work]
        times = f", {deaths} times now" if deaths > 1 else ""
        work.give_up(f"{reason}{times}")
        return self.after(work, JobEnded("", "died", reason))

    def _fill(self) -> None:
        """Begin what may begin, in its order, while there are free slots."""
        if self._fault is not None or (self.stopping() and self._has_training_left()):
            return
        while len(self._under_way) < self.room:
            work = next((work for work in self._waiting if self._busy.isdisjoint(work.names)), None)
            if work is None:
                return
            self._waiting.remove(work)
            job = work.job()
            if job is not None:
                handle = self.executor.submit(job)
                self._under_way[handle.id] = work, handle
                self._busy |= work.names

    def _has_training_left(self) -> bool:
        """Whether anything trains or would; what has nothing left to do is forgotten."""
        if any(work.trains for work, _ in self._under_way.values()):
            return True
        self._waiting = deque(work for work in self._waiting if work.job() is not None)
        return any(work.trains for work in self._waiting)
