"""The executor in this process: one job after the other, over one base in memory.

No thread is needed to turn calls of the loop's observer into events: ``Cohort.train`` pauses between steps, and what
the observer has collected is handed out in the pause. A signal therefore finds the main thread at its work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.campaign.planning.asked import Longest
from retrain.campaign.planning.plan import RunSpec, run_directory
from retrain.campaign.running.protocol import (
    CohortJob,
    Evaluated,
    Event,
    Facts,
    Job,
    JobEnded,
    Message,
    RunEnded,
    RunStarted,
    SqueezeJob,
    StepDone,
)
from retrain.errors import DeviceLost, Interrupted, LeaseLost, RetrainError, ServerFailed, StorageError
from retrain.gpus import lost
from retrain.records.observer import NullObserver, SpecLike

if TYPE_CHECKING:
    from retrain.campaign.running.models import Bases
    from retrain.campaign.running.team import Team
    from retrain.engines.server.fleet import Fleet


Guard = Callable[[Path], None]


def allow_all(directory: Path) -> None:
    """Allow every write: the guard of an executor whose directories nobody else writes."""


class Outbox(NullObserver):
    """An observer that keeps its calls as events, from any thread, until they are asked for."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        self.put(RunStarted(spec.run_id, step, max_steps))

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        self.put(StepDone(spec.run_id, dict(row)))

    def evaluated(self, spec: SpecLike, name: str, row: Mapping[str, Any]) -> None:
        self.put(Evaluated(spec.run_id, name, dict(row)))

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        self.put(RunEnded(spec.run_id, status, message))

    def message(self, text: str, level: str = "info") -> None:
        self.put(Message(text, level))

    def put(self, event: Event) -> None:
        self._waiting.append(event)

    def drain(self) -> Iterator[Event]:
        while self._waiting:
            yield self._waiting.popleft()


@dataclass
class Submitted:
    """A job that waits or is under way."""

    id: str
    job: Job
    stopping: bool = False

    def stop(self) -> None:
        self.stopping = True


class InProcess:
    """See ``Executor``. The base stays in memory between jobs, until ``close``. Torch is imported when it
    is first asked about GPUs, or given a job. ``team`` are processes that compute together with this one; ``servers``
    are kept by another one, which launches them. ``guard`` gets the directory of a run before each write into it and
    raises LeaseLost once another process may write there."""

    slots = 1

    def __init__(self, team: Team | None = None, servers: Fleet | None = None, guard: Guard = allow_all) -> None:
        self.team, self.servers, self.guard = team, servers, guard
        self._jobs: deque[Submitted] = deque()
        self._count = 0
        self._bases: Bases | None = None

    def has_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def submit(self, job: Job) -> Submitted:
        self._count += 1
        handle = Submitted(str(self._count), job)
        self._jobs.append(handle)
        return handle

    def events(self) -> Generator[Event, None, None]:
        while self._jobs:
            mine, outbox = self._jobs.popleft(), Outbox()
            try:
                if isinstance(mine.job, CohortJob):
                    end = yield from self._train(mine, mine.job, outbox)
                else:
                    end = self._squeeze(mine, mine.job, outbox)
            except (Exception, KeyboardInterrupt) as error:
                yield from outbox.drain()
                if gone := lost(error):
                    self._bases = None  # nothing on the device can be undone any more
                    raise gone from error
                raise
            yield from outbox.drain()
            yield end

    def close(self) -> None:
        self._jobs.clear()
        if self._bases is not None:
            self._bases.release()
            self._bases = None
        if self.team is not None:
            self.team.close()

    def _train(self, mine: Submitted, job: CohortJob, outbox: Outbox) -> Generator[Event, None, JobEnded]:
        """Build the runs of a cohort, restore what was saved of them, and train them together."""
        from retrain.campaign.running.assemble import Changed, assemble, memory_facts
        from retrain.campaign.running.fitting import DoesNotFit
        from retrain.policy.budget import failure_text, is_out_of_memory

        with ExitStack() as stack:
            try:
                cohort = assemble(job, outbox, lambda: mine.stopping, stack, self._own_bases(), self.guard)
            except DoesNotFit as short:
                return JobEnded(mine.id, "too_large", str(short), short.lanes)
            except Changed as changed:
                return JobEnded(mine.id, "changed", str(changed), changes=changed.lines)
            except (RetrainError, MemoryError) as error:
                unfit = isinstance(error, RetrainError) and error.exit_status == 2
                if unfit or isinstance(error, StorageError | LeaseLost | DeviceLost | ServerFailed):
                    raise  # a wrong model name or data file, a full disk, a dead GPU or server: no run has failed
                for run in job.runs:
                    outbox.put(RunEnded(run["run_id"], "failed", failure_text(error)))
                return JobEnded(mine.id)
            if memory := memory_facts(cohort):
                outbox.put(Facts({"memory": memory}))
            try:
                with closing(cohort.train()) as pauses:
                    for _ in pauses:
                        yield from outbox.drain()
            except Interrupted as end:
                return JobEnded(mine.id, "stopped", str(end))
            except (StorageError, LeaseLost):  # no fault of a run: all of them can be resumed
                raise
            except ServerFailed as error:  # they go on once there is a server
                for run in cohort.runs:
                    if run.active:
                        run.recorder.record_server(run.step, str(error), "error")
                raise
            except Exception as error:  # the shared part failed (engine, base): none of these runs can go on
                if lost(error):  # but a new process can go on with them
                    raise
                active = [run for run in cohort.runs if run.active]
                if is_out_of_memory(error) and len(active) > 1 and active[0].config.campaign.lanes == "auto":
                    reason = f"{len(active)} runs ran out of memory together"
                    return JobEnded(mine.id, "too_large", reason, len(active) // 2)
                for run in active:
                    run.fail(error)
                    outbox.put(RunEnded(run.run_id, "failed", run.error or ""))
            finally:
                for run in cohort.runs:
                    run.recorder.close(failed=run.error is not None)
                self._own_bases().forget_adapters()
        return JobEnded(mine.id)

    def _squeeze(self, mine: Submitted, job: SqueezeJob, outbox: Outbox) -> JobEnded:
        """What rank would have been enough. A fault here costs the analysis, not the runs."""
        from retrain.campaign.adapters.squeeze import squeeze_after_run

        spec, longest = RunSpec.from_json(job.run), Longest(**job.longest)
        self.guard(run_directory(Path(job.directory), spec))
        try:
            where = Path(job.directory), job.place
            warn = partial(outbox.message, level="warning")
            analysis = squeeze_after_run(*where, spec, Path(job.folder), longest, self._own_bases(), warn)
            outbox.put(Facts({"squeeze": analysis} if job.place == "squeeze" else {"squeezes": {spec.label: analysis}}))
        except RetrainError as error:
            if lost(error):
                raise
            outbox.put(Message(f"squeeze analysis of {spec.run_id} failed: {error}", "warning"))
        return JobEnded(mine.id)

    def _own_bases(self) -> Bases:
        from retrain.campaign.running.models import Bases

        if self._bases is None:
            self._bases = Bases(ranks=None if self.team is None else self.team.ranks(), servers=self.servers)
        return self._bases
