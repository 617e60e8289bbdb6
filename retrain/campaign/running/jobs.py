"""Run the jobs of a campaign: in this process, one after another over one base model, or through an executor.

The controller passes work items in the order in which they should begin, and decides after each job what follows.
``Scheduler`` knows only the names of runs, and never has two active jobs with the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from retrain.campaign.running.protocol import Event, Handle, Job, JobEnded, JobRunner, Message
from retrain.campaign.running.team import Team
from retrain.device import lost
from retrain.errors import RetrainError
from retrain.records.observer import Observer
from retrain.training.inputs import CohortJob, Guard, allow_all

if TYPE_CHECKING:
    from retrain.engines.server.fleet import Fleet
    from retrain.training.bases import Bases


class InProcess:
    """Runs jobs in this process. The base model stays in memory between jobs, until ``close``.

    ``team`` are the other ranks' processes, ``servers`` the inference servers that another process has launched,
    ``server_directory`` the directory for those that a worker launches itself. On a rank other than 0, ``bases`` has
    the connection to the other ranks.
    """

    slots = 1

    def __init__(
        self, team: Team | None = None, servers: Fleet | None = None, guard: Guard = allow_all,
        bases: Bases | None = None,
    ) -> None:  # fmt: skip
        self.team, self.servers, self.guard, self._bases = team, servers, guard, bases
        self.server_directory: Path | None = None

    def has_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def do(self, job: Job, observer: Observer, stop: Callable[[], bool]) -> JobEnded:
        """Run a job. ``stop`` is called between steps; if it raises, nothing more is saved.

        Raises StorageError when no run can be written any more, another RetrainError for an unusable model, data source
        or plug-in.
        """
        if self.team is not None:
            self.team.begin(job)
        from retrain.campaign.running import execution  # imports torch, which takes seconds

        try:
            if self._bases is None:
                self._bases = execution.bases_for(self.team, self.servers, self.server_directory)
            if isinstance(job, CohortJob):
                return execution.train(job, observer, stop, self._bases, self.guard)
            return execution.squeeze(job, observer, self._bases, self.guard)
        except (Exception, KeyboardInterrupt) as error:
            if gone := lost(error):
                self._bases = None  # the state on the device is undefined
                raise gone from error
            raise

    def close(self) -> None:
        if self._bases is not None:
            self._bases.release()
            self._bases = None
        if self.team is not None:
            self.team.close()


class InProcessRunner:
    """Runs the submitted job in this process when the next event is requested. ``stopping`` is called between steps."""

    slots = 1
    id = ""

    def __init__(self, here: InProcess, observer: Observer, stopping: Callable[[], bool]):
        self.here, self.observer, self.stopping = here, observer, stopping
        self._job: Job | None = None

    def submit(self, job: Job) -> InProcessRunner:
        self._job = job
        return self

    def stop(self) -> None: ...  # no job is running when this is called

    def events(self) -> Generator[Event, None, None]:
        while self._job is not None:
            job, self._job = self._job, None
            yield self.here.do(job, self.observer, self.stopping)


class WorkItem(Protocol):
    """Part of the campaign that yields one job at a time until none is left."""

    @property
    def names(self) -> frozenset[str]: ...

    @property
    def trains(self) -> bool:
        """True if the item's jobs train. After a request to stop, only items that do not train begin."""
        ...

    def job(self) -> Job | None: ...

    def give_up(self, reason: str) -> None:
        """Record the remaining runs as failed, because the job has died too often."""


class Scheduler:
    """Submits the jobs of work items to an executor as it has room for them.

    ``on_event`` is called with every event. ``after`` is called with each item whose job has ended and is not
    restarted, and returns the items that follow. ``stopping`` is called at every event and returns whether to end after
    the current steps. ``max_restarts`` limits how often a dead job of one item is restarted. ``room``: number of jobs
    submitted at a time, by default the executor's slots.
    """

    def __init__(
        self,
        executor: JobRunner,
        on_event: Callable[[Event], None],
        after: Callable[[WorkItem, JobEnded], Iterable[WorkItem]],
        stopping: Callable[[], bool],
        max_restarts: int,
        room: int | None = None,
    ):
        self.executor, self.on_event, self.after, self.stopping = executor, on_event, after, stopping
        self.max_restarts, self.room = max_restarts, room or executor.slots
        self.lost_steps = False  # Whether a job died after a request to stop, so that not everything has been saved
        self._waiting: deque[WorkItem] = deque()
        self._under_way: dict[str, tuple[WorkItem, Handle]] = {}
        self.names_under_way = set[str]()  # Names of the runs of all active jobs
        self._deaths: dict[WorkItem, int] = {}
        self._fault: RetrainError | None = None

    def stop_where(self, unwanted: Callable[[frozenset[str]], bool]) -> None:
        for work, handle in self._under_way.values():
            if work.names and unwanted(work.names):
                handle.stop()

    def carry_out(self, works: Iterable[WorkItem]) -> bool:
        """Execute these work items. Return False if a request to stop came before all training was done.

        Raises what the executor or ``after`` raises; on a RetrainError of ``after`` the other jobs are first saved and
        ended.
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
        self.on_event(event)
        if isinstance(event, JobEnded):
            work, _ = self._under_way.pop(event.job)
            self.names_under_way -= work.names
            self._waiting.extendleft(reversed([*self._next(work, event)]))
        if self.stopping() or self._fault is not None:
            for _, handle in self._under_way.values():
                handle.stop()
        self._fill()

    def _next(self, item: WorkItem, end: JobEnded) -> Iterable[WorkItem]:
        try:
            if end.status == "died":
                return self._again(item, end.reason)
            return self.after(item, end)
        except RetrainError as error:
            self._fault = self._fault or error
            return []

    def _again(self, item: WorkItem, reason: str) -> Iterable[WorkItem]:
        """Return the item of a dead job, to restart it; after too many deaths, give it up and return what follows."""
        if self.stopping():
            self.lost_steps = True
            return [item]
        deaths = self._deaths[item] = self._deaths.get(item, 0) + 1
        if deaths <= self.max_restarts:
            self.on_event(
                Message(f"{reason}: its job begins again ({deaths} of {self.max_restarts} restarts)", "warning")
            )
            return [item]
        times = f", {deaths} times now" if deaths > 1 else ""
        item.give_up(f"{reason}{times}")
        return self.after(item, JobEnded("", "died", reason))

    def _fill(self) -> None:
        if self._fault is not None or (self.stopping() and self._has_training_left()):
            return
        while len(self._under_way) < self.room:
            item = next((item for item in self._waiting if self.names_under_way.isdisjoint(item.names)), None)
            if item is None:
                return
            self._waiting.remove(item)
            job = item.job()
            if job is not None:
                handle = self.executor.submit(job)
                self._under_way[handle.id] = item, handle
                self.names_under_way |= item.names

    def _has_training_left(self) -> bool:
        """Return whether any item trains or will train; drop waiting items without remaining jobs."""
        if any(work.trains for work, _ in self._under_way.values()):
            return True
        self._waiting = deque(work for work in self._waiting if work.job() is not None)
        return any(work.trains for work in self._waiting)
