"""Execute a plan: train its cohorts until every run is done or has failed, then analyse and compare.

Only the controller writes the campaign's manifest, schedules jobs and prints messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGINT

from retrain.campaign.executors.table import EXECUTORS
from retrain.campaign.planning.changes import Approval, settings_changes, version_changes
from retrain.campaign.planning.engine import with_engine
from retrain.campaign.planning.manifest import (
    CampaignObserver,
    CampaignOutcome,
    Manifest,
    declaration,
    has_begun,
    read_plan,
    recorded_entries,
    restored_when_refused,
    summary,
    write_plan,
)
from retrain.campaign.planning.plan import Plan, cut, is_unfinished, lane_count, seeds_before_interim, smaller_cohorts
from retrain.campaign.planning.references import check, require_packages
from retrain.campaign.running.interim import InterimMonitor
from retrain.campaign.running.jobs import InProcess, InProcessRunner, Scheduler, WorkItem
from retrain.campaign.running.protocol import JobEnded, SqueezeJob, report
from retrain.campaign.running.tasks import WORKERS
from retrain.campaign.running.team import Team
from retrain.campaign.running.workers import CampaignWorkers, can_adopt_workers
from retrain.config import LoadedConfig
from retrain.config.runs import RunSpec, run_directory, without_sepa
from retrain.device import torchrun_rank
from retrain.errors import (
    DeviceLost,
    RetrainError,
    ServerFailed,
    ServerNotStarted,
    StorageError,
    UsageError,
    WorkersLost,
    plural,
)
from retrain.files import write_bytes, write_json
from retrain.ownership import remove_leftovers
from retrain.records.environment import run_facts, system_files
from retrain.records.observer import Observer
from retrain.records.reader import planned_configs
from retrain.records.registry import OFF, ON, Registry
from retrain.records.schema.campaign import ENDED, RunEntry
from retrain.records.schema.layout import ADAPTER_WEIGHTS, CONFIG, FINAL, REPORT
from retrain.training.inputs import CohortJob, Guard, allow_all
from retrain.util.mirror import Mirror, uploading
from retrain.util.session import ENDINGS, DirectoryLock, StopRequest, wait_for_writers
from retrain.verdicts.pooling import conclude
from retrain.verdicts.report import write_report


def launch(
    loaded: LoadedConfig, out: Path | None, observer: Observer, retry_failed: bool = False,
    approval: Approval | None = None, registry: str = "", choose: Callable[..., Plan] = with_engine,
) -> CampaignOutcome:  # fmt: skip
    """Plan a file, check it and train it. ``choose`` settles the plan's engine; if ``engine = "auto"`` led to a vLLM
    that does not start, retrain's own engine takes its place."""
    planned = Plan.of(loaded, out, registry)
    plan = choose(planned)
    try:
        return execute(check(plan), observer, retry_failed, approval)
    except ServerNotStarted as error:
        other = choose(planned, broken=f"vLLM did not start ({error.reason})")
        if other.specs[0].config.inference == plan.specs[0].config.inference:
            raise
        return execute(check(other), observer, retry_failed, approval)


def resume(
    directory: Path, observer: Observer, retry_failed: bool = False, approval: Approval | None = None,
    sets: Sequence[str] = (),
) -> CampaignOutcome:  # fmt: skip
    """Continue a run or campaign from its directory, with ``section.key=value`` settings applied to all of its runs."""
    return execute(check(read_plan(directory, sets)), observer, retry_failed, approval)


def execute(
    plan: Plan, observer: Observer, retry_failed: bool = False, approval: Approval | None = None,
    executor: CampaignWorkers | InProcess | None = None,
) -> CampaignOutcome:  # fmt: skip
    """Train a checked plan, or continue it if its directory already holds part of it.

    Finished runs are skipped unless the plan has more steps; failed runs are skipped unless ``retry_failed``.
    ``approval`` accepts or refuses differences from the directory's records; None refuses all. ``executor`` replaces
    the configured executor, and is closed at the end. Raises StorageError when the directory cannot be written,
    LeaseLost when another process has taken over the directory.
    """
    plan = with_engine(plan)
    lock = DirectoryLock(plan.directory, observer.message)
    approval, executor = approval or Approval(), executor or executor_of(plan, lambda directory: lock.check)
    with ExitStack() as stack:
        stack.enter_context(lock)
        if url := plan.specs[0].config.logging.mirror:  # exits last, after the manifest was written
            stack.enter_context(uploading(Mirror(url, plan.directory), observer.message, lock.lose))
        stack.enter_context(restored_when_refused(plan.directory, plan.specs))
        adopting = plan.specs[0].is_campaign and can_adopt_workers(plan)
        if plan.specs[0].is_campaign and not adopting:
            homes = (plan.directory / WORKERS).glob("worker_*/")
            wait_for_writers([*(run_directory(plan.directory, spec) for spec in plan.specs), *homes], observer.message)
        if not adopting:
            remove_leftovers(plan.directory)
        manifest = stack.enter_context(_open(plan, observer, approval, lock.check))
        loaded = plan.source
        if loaded is not None or plan.sets:
            manifest.files.write(lambda: write_plan(plan))
        if loaded is not None and loaded.config.is_campaign:
            manifest.files.write(lambda: _write_facts(plan.directory, loaded))
        return Controller(plan, manifest, observer, approval, lock, executor).carry_out(retry_failed)


def executor_of(plan: Plan, guard: Guard = allow_all) -> CampaignWorkers | InProcess:
    """Return the executor that a plan's configuration selects.

    ``guard`` maps a run's directory to the check that precedes each write of this process (workers hold leases of their
    own). Raises UsageError if a configured device does not exist, or if torchrun has started processes that the
    configuration does not use.
    """
    config = plan.specs[0].config
    if torchrun_rank() is not None and config.backend.shard == "none":
        raise UsageError(
            f'torchrun has started {os.environ["WORLD_SIZE"]} process(es), and with [backend] shard = "none" one '
            'trains: type --set backend.shard="dp", or start retrain without torchrun'
        )
    if config.campaign.executor == "inprocess":
        return InProcess(None if config.backend.shard == "none" else Team(config), guard=guard)
    if torchrun_rank() is not None:
        raise UsageError(
            f"torchrun has started {os.environ['WORLD_SIZE']} process(es), and workers of executor = "
            f'"{config.campaign.executor}" start their ranks themselves: start retrain without torchrun'
        )
    return EXECUTORS[config.campaign.executor](plan)


def _write_facts(directory: Path, loaded: LoadedConfig) -> None:
    write_json(directory / CONFIG, run_facts(loaded.config, file=loaded.path.name))
    for name, data in system_files(loaded.path.parent).items():
        write_bytes(directory / name, data)


def _open(plan: Plan, observer: Observer, approval: Approval, guard: Callable[[], None]) -> Manifest:
    """Have differences from the directory's records approved; return the manifest, with declaration and registry."""
    directory = plan.directory
    entries, lost = recorded_entries(directory, plan.specs)
    _approve(plan, observer, approval, lost, entries)
    begun = has_begun(entries.values())
    registry = plan.registry if plan.specs[0].is_campaign and not begun else ""
    if registry == ON:
        registry = Registry(directory).prepare(observer)
    manifest = Manifest.open(directory, plan.name, plan.specs, guard)
    if not begun:  # until then, a later start may replace the declaration
        manifest.content["declared"] = declaration(plan.specs).to_row()
    if registry:
        manifest.content["registry"] = registry
    elif plan.registry == OFF and manifest.is_registered:
        observer.message("this campaign is in the registry already: --no-registry changes nothing", "warning")
    manifest.content.pop("notes", None)
    if warnings := without_sepa(plan.specs):
        manifest.content["notes"] = [f"{warning}." for warning in warnings]
    manifest.write()
    return manifest


def _approve(
    plan: Plan, observer: Observer, approval: Approval, lost: Sequence[str], entries: Mapping[str, RunEntry]
) -> None:
    configs = planned_configs(plan.directory)
    settings, extensions = settings_changes(plan.specs, configs, entries) if configs else ([], [])
    changes = [*lost, *settings]
    for spec in plan.specs:
        entry = entries.get(spec.run_id)
        if entry and is_unfinished(entry, spec):
            changes += version_changes(run_directory(plan.directory, spec), spec, plan.folder)
    if changes:
        approval(plan.directory, changes)
    for line in extensions:
        observer.message(f"changed since the last start: {line}")


@dataclass(eq=False)
class CohortWork:
    """Work item of one cohort. ``job`` looks up which runs remain, because the interim analysis may have stopped some
    runs and a worker that died may have finished others. ``again``: all of these runs have failed, and each resumes
    from its own newest checkpoint."""

    controller: Controller
    specs: Sequence[RunSpec]
    again: bool = False
    trains: bool = field(default=True, init=False)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(spec.run_id for spec in self.specs)

    def remaining_runs(self) -> list[RunSpec]:
        """Return the runs of the next job; none when all have ended.

        Includes failed runs of an unfinished cohort: if the other runs resume before the step at which a run failed,
        their decode batches must contain the failed run until that step, to be the same as before.
        """
        group = [spec for spec in self.specs if self._entry(spec).state not in ("done", "stopped")]
        if self.again or any(self._entry(spec).state != "failed" for spec in group):
            return group
        return []

    def job(self) -> CohortJob | None:
        specs = self.remaining_runs()
        if not specs:
            return None
        failed = [] if self.again else [spec for spec in specs if self._entry(spec).state == "failed"]
        return self.controller.plan.job(
            specs,
            failed_at={spec.run_id: self._entry(spec).step for spec in failed},
            same_step=not self.again,
            accepted=list(self.controller.approval.accepted),
        )

    def give_up(self, reason: str) -> None:
        for spec in self.specs:
            if self._entry(spec).state not in ENDED:
                self.controller.recording.run_finished(spec, "failed", reason)

    def _entry(self, spec: RunSpec) -> RunEntry:
        return self.controller.manifest.run(spec.run_id)


@dataclass(eq=False)
class SqueezeWork:
    controller: Controller
    spec: RunSpec
    subfolder: str
    names: frozenset[str] = field(default=frozenset(), init=False)  # A finished run conflicts with no other work item
    trains: bool = field(default=False, init=False)

    def job(self) -> SqueezeJob:
        plan = self.controller.plan
        return SqueezeJob(plan.directory, plan.folder, [self.spec], plan.longest, self.subfolder)

    def give_up(self, reason: str) -> None:
        self.controller.recording.message(f"squeeze analysis of {self.spec.run_id} failed: {reason}", "warning")


class Controller:
    def __init__(
        self, plan: Plan, manifest: Manifest, observer: Observer, approval: Approval, lock: DirectoryLock,
        executor: CampaignWorkers | InProcess,
    ):  # fmt: skip
        self.plan, self.manifest, self.observer = plan, manifest, observer
        self.approval, self.executor = approval, executor
        self.specs, self.directory = plan.specs, manifest.directory
        self.stop = StopRequest(lock)
        self.interim = InterimMonitor.of(manifest, plan.specs, observer) if plan.specs[0].is_campaign else None
        self._analysed = [spec for spec in plan.specs if spec.config.squeeze.enabled]
        # Runs whose rank analysis this process has started, by subfolder; a failed analysis is not repeated
        self._squeezed: dict[str, RunSpec] = {}
        self.recording = CampaignObserver(manifest, observer)
        on_event = partial(report, observer=self.recording, specs={spec.run_id: spec for spec in plan.specs})
        restarts = plan.specs[0].config.campaign.max_restarts
        runner = (
            InProcessRunner(executor, self.recording, self.stop.is_due) if isinstance(executor, InProcess) else executor
        )
        # Workers may begin waiting tasks without a controller, but not runs that the interim analysis may stop. With
        # lanes = "auto" such runs are published only after the analysis.
        may_stop = self.interim is not None and plan.specs[0].config.campaign.lanes != "auto"
        room = len(plan.specs) if isinstance(executor, CampaignWorkers) and not may_stop else executor.slots
        self.scheduler = Scheduler(runner, on_event, self._after, self.stop.is_due, restarts, room)

    def carry_out(self, retry_failed: bool) -> CampaignOutcome:
        manifest, observer, specs = self.manifest, self.observer, self.specs
        settled = ("done", "stopped") if retry_failed else ("done", "failed", "stopped")
        if planned := [spec for spec in specs if manifest.run(spec.run_id).state not in settled]:
            observer.plan(planned)
        if self.interim is not None:
            self.interim.update()  # a process may have been killed between its last run and the analysis
        todo = [spec for spec in planned if manifest.run(spec.run_id).state not in settled]
        self._announce(todo, retry_failed)
        with closing(self.executor), self.stop.listening(observer.message):
            try:
                is_complete = self._train(self._cohorts(retry_failed) if todo else [])
            except KeyboardInterrupt:
                return self._interrupted(todo, saved=False)
            if not is_complete:
                return self._interrupted(todo, saved=not self.scheduler.lost_steps)
        return self._conclude()

    def _conclude(self) -> CampaignOutcome:
        states = {entry.state for entry in self.manifest.runs}
        if len(self.specs) > 1 and "done" in states:
            self.manifest.files.flush()  # ``conclude`` reads it from disk
            self.manifest.note(comparison=conclude(self.directory))
        if self.specs[0].is_campaign:
            _report(self.manifest, self.observer)
        return CampaignOutcome(1 if "failed" in states else 0, self.directory, summary(self.manifest))

    def _announce(self, todo: Sequence[RunSpec], retry_failed: bool) -> None:
        failed = sum(self.manifest.run(spec.run_id).state == "failed" for spec in self.specs)
        if failed and not retry_failed:
            self.observer.message(
                f"{plural(failed, 'failed run')} not continued; type --retry-failed to continue them too", "warning"
            )
        if todo:
            require_packages((spec.config for spec in todo), self.plan.folder)
            for note in self.plan.notes:
                self.observer.message(note)
            self.observer.message(f"loading {todo[0].config.model.model}")  # before torch and transformers are imported
        elif not failed:
            self.observer.message(
                f"every run in {self.directory} is done; give another directory with --out to train anew"
            )

    def _interrupted(self, todo: Sequence[RunSpec], saved: bool) -> CampaignOutcome:
        came = ENDINGS[self.stop.signal or SIGINT]
        for spec in todo:
            if self.manifest.run(spec.run_id).state == "running":
                self.manifest.update(spec.run_id, state="interrupted", reason=came.reason)
                self.observer.run_finished(spec, "interrupted", "")
        return CampaignOutcome(came.status, self.directory, summary(self.manifest), saved)

    def _cohorts(self, retry_failed: bool) -> list[CohortWork]:
        manifest, works = self.manifest, list[CohortWork]()
        on_gpu = self.executor.has_gpu() and self.specs[0].config.backend.device != "cpu"
        for group in planned_cohorts(manifest, self.specs, on_gpu, self.executor.slots):
            states = {spec.run_id: manifest.run(spec.run_id).state for spec in group}
            works.append(CohortWork(self, group))
            if retry_failed and "failed" in states.values():
                failed = [spec for spec in group if states[spec.run_id] == "failed"]
                works.append(CohortWork(self, failed, again=True))
        manifest.files.flush()  # a later process trains the same cohorts
        return [work for work in works if work.remaining_runs()]

    def _train(self, works: Sequence[CohortWork]) -> bool:
        """Execute the work items and the rank analyses that are due; return False if a request to stop came first."""
        try:
            # There may be no cohorts, if an earlier process was killed between the last run and its rank analysis.
            parts = [works]
            if self.interim is not None and self.specs[0].config.campaign.lanes == "auto":
                first = set(self.interim.seeds)
                before = [work for work in works if any(spec.seed in first for spec in work.specs)]
                parts = [before, [work for work in works if work not in before]]
            return all(map(self.scheduler.carry_out, parts)) and self.scheduler.carry_out(self._squeezes())
        except (StorageError, DeviceLost, ServerFailed, WorkersLost) as error:
            for entry in self.manifest.runs:
                if entry.state == "running":
                    with suppress(StorageError):
                        self.manifest.update(entry.run_id, state="interrupted", reason=str(error))
            raise RetrainError(
                f"{error}\nEverything up to the last checkpoint is saved. {error.advice}, then type: retrain resume "
                f"{self.directory}"
            ) from error

    def _after(self, item: WorkItem, end: JobEnded) -> list[WorkItem]:
        if not isinstance(item, CohortWork):
            return []
        more: list[WorkItem] = []
        if end.status == "changed":
            self.approval(self.directory, end.changes)
        if end.status in ("changed", "stopped"):
            more = [item]  # its next job leaves out runs that the interim analysis has stopped
        if end.status == "too_large":
            more = self._in_parts(item, end)
        if self.interim is not None and (unwanted := self.interim.update(self.scheduler.names_under_way)):
            unneeded = unwanted | {entry.run_id for entry in self.manifest.runs if entry.state in ENDED}
            self.scheduler.stop_where(lambda names: names <= unneeded)
        return [*more, *self._squeezes()]

    def _in_parts(self, item: CohortWork, short: JobEnded) -> list[WorkItem]:
        parts = smaller_cohorts(item.remaining_runs(), short.lanes, short.reason)
        self.observer.message(f"{short.reason}: they train in {len(parts)} cohorts, one after another", "warning")
        names, before = {spec.run_id for part in parts for spec in part}, self.manifest.content["cohorts"]
        position = next(i for i, cohort in enumerate(before) if names & set(cohort))
        cut = [[spec.run_id for spec in part] for part in parts]
        rest = [[name for name in cohort if name not in names] for cohort in before]
        cohorts = [cohort for cohort in rest[:position] + cut + rest[position:] if cohort]
        self.manifest.note(lanes=len(parts[0]), cohorts=cohorts)
        self.manifest.files.flush()
        return [CohortWork(self, part, item.again) for part in parts]

    def _squeezes(self) -> list[WorkItem]:
        """Return work items for the rank analyses that are due.

        The manifest stores the analysis of the first run in ``squeeze``; with ``runs = "one per condition"``, those of
        the other conditions in ``squeezes`` by label. The first run is the first in the plan that has not failed or
        been stopped, so that the choice does not depend on timing.
        """
        works: list[WorkItem] = []
        for subfolder, spec in self._due_analyses().items():
            if subfolder in self._squeezed or self.manifest.run(spec.run_id).state != "done":
                continue
            weights = run_directory(self.directory, spec) / FINAL / ADAPTER_WEIGHTS
            if spec.config.backend.backend == "local" or weights.is_file():
                # a plug-in backend may train something else than a LoRA adapter
                self._squeezed[subfolder] = spec
                works.append(SqueezeWork(self, spec, subfolder))
        return works

    def _due_analyses(self) -> dict[str, RunSpec]:
        """Return the runs whose LoRA rank is still to be analysed, by analysis folder; they may still be training."""
        content, over = self.manifest.content, ("failed", "stopped")
        hoped = [spec for spec in self._analysed if self.manifest.run(spec.run_id).state not in over]
        if not hoped:
            return {}
        of_condition = {spec.label: spec for spec in reversed(hoped)}
        analysis = content.get("squeeze")
        first = analysis["label"] if analysis else self._squeezed.get("squeeze", hoped[0]).label
        due = {} if analysis else {"squeeze": of_condition[first]}
        if hoped[0].config.squeeze.runs == "one per condition":
            analysed = {first, *(content.get("squeezes") or ())}
            due |= {f"squeeze/{label}": spec for label, spec in of_condition.items() if label not in analysed}
        return due


def planned_cohorts(manifest: Manifest, specs: Sequence[RunSpec], on_gpu: bool, slots: int = 1) -> list[list[RunSpec]]:
    planned = _begun_cohorts(manifest, specs)
    names = {spec.run_id for group in planned for spec in group}
    rest = [spec for spec in specs if spec.run_id not in names]
    lanes = manifest.content.get("lanes") if specs[0].config.campaign.lanes == "auto" else None
    if lanes is None or manifest.content.get("slots", 1) != slots:
        lanes = lane_count(specs if slots == 1 else rest or specs, on_gpu, slots)
    planned += cut(rest, on_gpu, slots, lanes, seeds_before_interim(specs))
    manifest.content.pop("slots", None)
    facts = {"slots": slots} if slots > 1 else {}
    manifest.note(lanes=lanes, cohorts=[[spec.run_id for spec in group] for group in planned], **facts)
    return planned


def _begun_cohorts(manifest: Manifest, specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
    known = {spec.run_id: spec for spec in specs}
    recorded = [[known[name] for name in group if name in known] for group in manifest.content.get("cohorts", [])]
    return [group for group in recorded if any(manifest.run(spec.run_id).state != "pending" for spec in group)]


def _report(manifest: Manifest, observer: Observer) -> None:
    try:
        manifest.files.flush()
        write_report(manifest.directory)
        manifest.note(report=REPORT)
    except Exception as error:  # any error: the results are already on disk
        message = f"no {REPORT}: {type(error).__name__}: {error}; type: retrain report {manifest.directory}"
        observer.message(message, "warning")
