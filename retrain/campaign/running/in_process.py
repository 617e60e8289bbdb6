"""Training in this process: one job after another, over one base in memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from retrain.campaign.running.protocol import Event, Job, JobEnded, SqueezeJob
from retrain.campaign.running.team import Team
from retrain.config.runs import run_directory
from retrain.device import failure_text, is_out_of_memory, lost
from retrain.errors import DeviceLost, Interrupted, LeaseLost, RetrainError, ServerFailed, StorageError
from retrain.records.observer import Observer
from retrain.training.inputs import CohortJob, Guard, allow_all

if TYPE_CHECKING:
    from retrain.engines.server.fleet import Fleet
    from retrain.training.bases import Bases
    from retrain.training.loop import Cohort


class InProcess:
    """Does jobs. The base stays in memory between them, until ``close``. Torch is imported for the first job, or when
    somebody asks about GPUs.

    ``team`` are processes that compute together with this one; ``servers`` are kept by another one, which launches
    them; ``bases`` are those of a rank other than 0.
    """

    slots = 1

    def __init__(
        self, team: Team | None = None, servers: Fleet | None = None, guard: Guard = allow_all,
        bases: Bases | None = None,
    ) -> None:  # fmt: skip
        self.team, self.servers, self.guard, self._bases = team, servers, guard, bases

    def has_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def do(self, job: Job, observer: Observer, stop: Callable[[], bool]) -> JobEnded:
        """Do a job. ``stop`` is asked between steps; it may raise, and then nothing more is saved.

        Raises StorageError when no run can be written any more, another RetrainError when the model, the data or a
        plug-in cannot be used.
        """
        if self.team is not None:
            self.team.begin(job)
        try:
            if isinstance(job, CohortJob):
                return self._train(job, observer, stop)
            return self._squeeze(job, observer)
        except (Exception, KeyboardInterrupt) as error:
            if gone := lost(error):
                self._bases = None  # nothing on the device can be undone any more
                raise gone from error
            raise

    def close(self) -> None:
        if self._bases is not None:
            self._bases.release()
            self._bases = None
        if self.team is not None:
            self.team.close()

    def _train(self, job: CohortJob, observer: Observer, stop: Callable[[], bool]) -> JobEnded:
        """Build the runs of a cohort, restore what was saved of them, and train them together."""
        from retrain.policy.local import DoesNotFit
        from retrain.training.assemble import assemble, memory_facts
        from retrain.training.run_builder import RecordsDiffer

        with ExitStack() as stack:
            try:
                cohort = assemble(job, observer, stop, stack, self._own_bases(), self.guard)
            except DoesNotFit as short:
                return JobEnded(status="too_large", reason=str(short), lanes=short.lanes)
            except RecordsDiffer as changed:
                return JobEnded(status="changed", reason=str(changed), changes=changed.lines)
            except (RetrainError, MemoryError) as error:
                unfit = isinstance(error, RetrainError) and error.exit_status == 2
                if unfit or isinstance(error, StorageError | LeaseLost | DeviceLost | ServerFailed):
                    raise  # a wrong model name or data file, a full disk, a dead GPU or server: no run has failed
                for spec in job.runs:
                    observer.run_finished(spec, "failed", failure_text(error))
                return JobEnded()
            if memory := memory_facts(cohort):
                observer.note({"memory": memory})
            try:
                return _train_cohort(cohort, observer, stop)
            finally:
                for run in cohort.runs:
                    run.recorder.close(failed=run.error is not None)
                self._own_bases().forget_adapters()

    def _squeeze(self, job: SqueezeJob, observer: Observer) -> JobEnded:
        """What rank would have been enough. A fault here costs the analysis, not the runs."""
        from retrain.adapters.squeeze import squeeze_after_run

        spec, warn = job.runs[0], partial(observer.message, level="warning")
        self.guard(run_directory(job.directory, spec))()
        bases = self._own_bases()
        analyse = partial(squeeze_after_run, job.directory, job.place, spec, job.folder, job.longest, bases, warn)
        try:
            if bases.ranks is not None:
                bases.load(spec.config)  # while all ranks are at it
            analysis = bases.from_first("squeeze analysis", analyse)
            observer.note({"squeeze": analysis} if job.place == "squeeze" else {"squeezes": {spec.label: analysis}})
        except RetrainError as error:
            if lost(error):
                raise
            observer.message(f"squeeze analysis of {spec.run_id} failed: {error}", "warning")
        return JobEnded()

    def _own_bases(self) -> Bases:
        from retrain.training.bases import Bases

        if self._bases is None:
            self._bases = Bases(ranks=None if self.team is None else self.team.ranks(), servers=self.servers)
        return self._bases


def _train_cohort(cohort: Cohort, observer: Observer, stop: Callable[[], bool]) -> JobEnded:
    """Train the runs of a cohort to their end. Raises what is no fault of theirs: they can be resumed."""

    try:
        with closing(cohort.train()) as pauses:
            for _ in pauses:
                stop()  # what it raises in a pause has the cohort end without saving
    except Interrupted as end:
        return JobEnded(status="stopped", reason=str(end))
    except (StorageError, LeaseLost):
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
            return JobEnded(status="too_large", reason=reason, lanes=len(active) // 2)
        for run in active:
            run.fail(error)
            observer.run_finished(run.spec, "failed", run.error or "")
    return JobEnded()


class JobsHere:
    """Runs jobs in this process, each when its event is asked for; see ``JobRunner``. ``stopping`` is asked between
    steps."""

    slots = 1
    id = ""

    def __init__(self, here: InProcess, observer: Observer, stopping: Callable[[], bool]):
        self.here, self.observer, self.stopping = here, observer, stopping
        self._job: Job | None = None

    def submit(self, job: Job) -> JobsHere:
        self._job = job
        return self

    def stop(self) -> None:
        """Do nothing: no job is under way when this is called."""

    def events(self) -> Generator[Event, None, None]:
        while self._job is not None:
            job, self._job = self._job, None
            yield self.here.do(job, self.observer, self.stopping)
