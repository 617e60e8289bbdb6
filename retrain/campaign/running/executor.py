"""The executor in this process: one job after the other, over one base in memory.

No thread is needed to turn what the loop tells its observer into events: ``Cohort.train`` pauses between steps, and
what was told until then is handed out in the pause. A signal therefore finds the main thread at its work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.campaign.planning.plan import RunSpec
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
from retrain.errors import DeviceLost, Interrupted, RetrainError, StorageError
from retrain.gpus import lost
from retrain.record.observer import NullObserver, SpecLike

if TYPE_CHECKING:
    from retrain.campaign.running.models import Bases


class Outbox(NullObserver):
    """An observer that keeps what it hears as events, from any thread, until they are asked for."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        """See ``Observer.run_started``."""
        self._waiting.append(RunStarted(spec.run_id, step, max_steps))

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        """See ``Observer.step``."""
        self._waiting.append(StepDone(spec.run_id, dict(row)))

    def evaluated(self, spec: SpecLike, name: str, row: Mapping[str, Any]) -> None:
        """See ``Observer.evaluated``."""
        self._waiting.append(Evaluated(spec.run_id, name, dict(row)))

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        """See ``Observer.run_finished``."""
        self._waiting.append(RunEnded(spec.run_id, status, message))

    def message(self, text: str, level: str = "info") -> None:
        """See ``Observer.message``."""
        self._waiting.append(Message(text, level))

    def facts(self, facts: dict[str, Any]) -> None:
        """What the campaign's manifest says from now on."""
        self._waiting.append(Facts(facts))

    def drain(self) -> Iterator[Event]:
        """What was heard since the last time."""
        while self._waiting:
            yield self._waiting.popleft()


@dataclass
class Submitted:
    """A job that waits or is under way."""

    id: str
    job: Job
    stopping: bool = False

    def stop(self) -> None:
        """See ``Handle.stop``."""
        self.stopping = True


class InProcess:
    """See ``Executor``. The base stays in memory between jobs, until ``close``. Imports torch with the first job."""

    def __init__(self) -> None:
        self._jobs: deque[Submitted] = deque()
        self._count = 0
        self._bases: Bases | None = None

    def submit(self, job: Job) -> Submitted:
        """See ``Executor.submit``."""
        self._count += 1
        handle = Submitted(str(self._count), job)
        self._jobs.append(handle)
        return handle

    def events(self) -> Generator[Event, None, None]:
        """See ``Executor.events``."""
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
        """See ``Executor.close``."""
        self._jobs.clear()
        if self._bases is not None:
            self._bases.release()
            self._bases = None

    def _train(self, mine: Submitted, job: CohortJob, outbox: Outbox) -> Generator[Event, None, JobEnded]:
        """Build the runs of a cohort, restore what was saved of them, and train them together."""
        from retrain.campaign.running.assemble import Changed, Restart, assemble, memory_facts
        from retrain.campaign.running.fitting import DoesNotFit
        from retrain.policy.budget import is_out_of_memory

        specs = [RunSpec.from_json(run) for run in job.runs]
        restart = Restart(job.failed_at, job.together, job.accepted)
        with ExitStack() as stack:
            try:
                cohort = assemble(
                    Path(job.directory), specs, Path(job.folder), outbox, lambda: mine.stopping, stack, restart,
                    self._base(),
                )  # fmt: skip
            except DoesNotFit as short:
                return JobEnded(mine.id, "too_large", str(short), short.lanes)
            except Changed as changed:
                return JobEnded(mine.id, "changed", str(changed), changes=changed.lines)
            except RetrainError as error:
                if error.exit_status == 2 or isinstance(error, StorageError | DeviceLost):
                    raise  # a wrong model name or data file, a full disk, a dead GPU: no run has failed
                for spec in specs:
                    outbox.run_finished(spec, "failed", str(error))
                return JobEnded(mine.id)
            if memory := memory_facts(Path(job.directory), cohort):
                outbox.facts({"memory": memory})
            try:
                with closing(cohort.train()) as pauses:
                    for _ in pauses:
                        yield from outbox.drain()
            except Interrupted as end:
                return JobEnded(mine.id, "stopped", str(end))
            except StorageError:  # no run's fault: all of them go on once there is room
                raise
            except Exception as error:  # the shared part failed (engine, base): none of these runs can go on
                if lost(error):  # but a new process can go on with them
                    raise
                active = [run for run in cohort.runs if run.active]
                if is_out_of_memory(error) and len(active) > 1 and specs[0].config.campaign.lanes == "auto":
                    reason = f"{len(active)} runs ran out of memory together"
                    return JobEnded(mine.id, "too_large", reason, len(active) // 2)
                for run in active:
                    run.fail(error)
                    outbox.run_finished(run.spec, "failed", run.error or "")
            finally:
                for run in cohort.runs:
                    run.recorder.close(failed=run.error is not None)
                self._base().forget_adapters()
        return JobEnded(mine.id)

    def _squeeze(self, mine: Submitted, job: SqueezeJob, outbox: Outbox) -> JobEnded:
        """What rank would have been enough. A fault here costs the analysis, not the runs."""
        from retrain.campaign.adapters.squeeze import squeeze_after_run

        spec = RunSpec.from_json(job.run)
        try:
            found = squeeze_after_run(Path(job.directory), spec, Path(job.folder), self._base().take)
            outbox.facts({"squeeze": found})
        except RetrainError as error:
            if lost(error):
                raise
            outbox.message(f"squeeze analysis of {spec.run_id} failed: {error}", "warning")
        return JobEnded(mine.id)

    def _base(self) -> Bases:
        from retrain.campaign.running.models import Bases

        self._bases = self._bases or Bases()
        return self._bases
