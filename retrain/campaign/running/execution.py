"""Train cohorts and analyse adapters in this process."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from retrain.adapters.squeeze import squeeze_after_run
from retrain.campaign.running.protocol import JobEnded, SqueezeJob
from retrain.campaign.running.rank_evaluation import evaluate_ranks
from retrain.campaign.running.team import Team
from retrain.config.runs import run_directory
from retrain.device import failure_text, is_out_of_memory, lost
from retrain.engines.server.fleet import Fleet
from retrain.errors import DeviceLost, LeaseLost, RetrainError, RunInterrupted, ServerFailed, StorageError
from retrain.policy.local import DoesNotFit
from retrain.records.observer import Observer
from retrain.training.assemble import assemble, memory_facts
from retrain.training.bases import Bases
from retrain.training.inputs import CohortJob, Guard
from retrain.training.loop import Cohort
from retrain.training.run_builder import RecordsDiffer


def bases_for(team: Team | None, servers: Fleet | None, server_directory: Path | None = None) -> Bases:
    ranks = None if team is None else team.ranks()
    return Bases(ranks=ranks, servers=servers, server_directory=server_directory)


def train(job: CohortJob, observer: Observer, stop: Callable[[], bool], bases: Bases, guard: Guard) -> JobEnded:
    with ExitStack() as stack:
        try:
            cohort = assemble(job, observer, stop, stack, bases, guard)
        except DoesNotFit as short:
            return JobEnded(status="too_large", reason=str(short), lanes=short.lanes)
        except RecordsDiffer as changed:
            return JobEnded(status="changed", reason=str(changed), changes=changed.lines)
        except RunInterrupted as end:
            return JobEnded(status="stopped", reason=str(end))
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
            bases.forget_adapters()


def _train_cohort(cohort: Cohort, observer: Observer, stop: Callable[[], bool]) -> JobEnded:
    """Train the runs of a cohort to their end. Errors of storage, lease, server or device are raised and fail no run;
    other errors fail all active runs."""
    try:
        with closing(cohort.train()) as pauses:
            for _ in pauses:
                stop()  # an exception of the caller ends the cohort without saving
    except RunInterrupted as end:
        return JobEnded(status="stopped", reason=str(end))
    except (StorageError, LeaseLost):
        raise
    except ServerFailed as error:  # the runs can continue once a server answers
        for run in cohort.runs:
            if run.active:
                run.recorder.record_server(run.step, str(error), "error")
        raise
    except Exception as error:  # the shared part failed (engine, base): none of these runs can continue
        if lost(error):  # but a new process can continue them
            raise
        return _end_all(cohort, observer, error)
    return JobEnded()


def _end_all(cohort: Cohort, observer: Observer, error: Exception) -> JobEnded:
    """Record that all active runs have failed, or ask for smaller cohorts after they ran out of memory together."""
    active = [run for run in cohort.runs if run.active]
    if is_out_of_memory(error) and len(active) > 1 and active[0].config.campaign.lanes == "auto":
        reason = f"{len(active)} runs ran out of memory together"
        return JobEnded(status="too_large", reason=reason, lanes=len(active) // 2)
    for run in active:
        run.fail(error)
        observer.run_finished(run.spec, "failed", run.error or "")
    return JobEnded()


def squeeze(job: SqueezeJob, observer: Observer, bases: Bases, guard: Guard) -> JobEnded:
    """Analyse which LoRA rank would have sufficed. A failure is a warning: the run itself is complete."""
    spec, warn = job.runs[0], partial(observer.message, level="warning")
    guard(run_directory(job.directory, spec))()
    evaluate = partial(evaluate_ranks, spec, job.folder, job.longest, bases, job.directory / job.subfolder)
    analyse = partial(squeeze_after_run, job.directory, job.subfolder, spec, evaluate, warn)
    try:
        if bases.ranks is not None:
            bases.load(spec.config)  # on all ranks: loading compares the ranks' weights
        analysis = bases.from_first("squeeze analysis", analyse)
        observer.note({"squeeze": analysis} if job.subfolder == "squeeze" else {"squeezes": {spec.label: analysis}})
    except RetrainError as error:
        if lost(error):
            raise
        observer.message(f"squeeze analysis of {spec.run_id} failed: {error}", "warning")
    return JobEnded()
