"""Builds the runs of a cohort: finds their checkpoints, compares their records, and restores them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from retrain.algorithms import Modes, build_algorithm, objective_of
from retrain.algorithms.credit.planning_tokens import Detector
from retrain.algorithms.distillation import TeacherContext
from retrain.config import Config
from retrain.config.modes import Need
from retrain.config.runs import RunSpec, run_directory, run_place
from retrain.config.tasks import AUDIT
from retrain.data import Dataset, content_hash
from retrain.data.dataset import column_values
from retrain.data.prompts import Renderer
from retrain.environments.build import environments_of, episode_limits
from retrain.environments.protocol import Environment
from retrain.errors import UsageError
from retrain.files import prepare_directory
from retrain.ownership import claim
from retrain.plugins import plugin_ranges
from retrain.policy.local import LocalPolicy
from retrain.policy.objective import Objective
from retrain.records.context import RunContext
from retrain.records.environment import is_source, module_hashes, named_code, run_facts, system_files
from retrain.records.observer import Observer
from retrain.records.reader import intact_config
from retrain.records.recorder import NullRecorder, RunRecorder
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import CONFIG, WARMUP
from retrain.rewards import Grader
from retrain.rollouts.collect import RecentWeights
from retrain.training.bases import CohortModel
from retrain.training.checkpoints import Checkpoints, NullCheckpoints, common_step
from retrain.training.inputs import BASE_WEIGHTS, CohortJob, Guard, machine_changes, world_changes
from retrain.training.recovery import continue_from, resume
from retrain.training.run import DataCursor, RolloutRequests, Run
from retrain.training.updates import UpdatePlan, learning_rate
from retrain.training.warmup import WarmUp
from retrain.types import Problem


class RecordsDiffer(Exception):
    """Base, data, teacher or record files differ from the runs' records, and the user has not accepted that."""

    def __init__(self, lines: list[str]):
        super().__init__(lines)
        self.lines = lines

    def __str__(self) -> str:
        return "; ".join(self.lines)


@dataclass
class ResumePoint:
    """The ``step`` from which a run continues; 0 is the start.

    ``passed_over`` has one line for each later checkpoint that cannot be used. ``any_base``: the user has accepted
    other base weights. For the run's records, ``facts`` describe its inputs and ``system`` holds files about the
    machine.
    """

    step: int
    passed_over: list[str] = field(default_factory=list)
    any_base: bool = False
    facts: dict[str, object] = field(default_factory=dict)
    system: Mapping[str, bytes] = field(default_factory=dict)


def find_resume_points(job: CohortJob) -> dict[str, ResumePoint]:
    """Return where each run of a cohort continues, by run id. With ``same_step``, a failed run is tried again if the
    others go back to the step of its failure or an earlier one. Raises RecordsDiffer for missing rows that no
    checkpoint restores and the user has not accepted."""
    points, missing_rows = dict[str, ResumePoint](), list[str]()
    active = [spec for spec in job.runs if spec.run_id not in job.failed_at]
    for group in [active] if job.same_step else [[spec] for spec in job.runs]:
        step, resumed, lines = _common_resume_points(job, group)
        points |= resumed
        missing_rows += lines
        if job.same_step:
            retried = [spec for spec in job.runs if job.failed_at.get(spec.run_id, -1) >= step]
            points |= {spec.run_id: ResumePoint(min(step, spec.config.training.max_steps)) for spec in retried}
    if unaccepted := [line for line in missing_rows if line not in job.accepted]:
        raise RecordsDiffer(unaccepted)
    return points


def _common_resume_points(job: CohortJob, group: Sequence[RunSpec]) -> tuple[int, dict[str, ResumePoint], list[str]]:
    reports: list[list[str]] = [[] for _ in group]
    common = common_step(
        [(run_directory(job.directory, spec), spec.config.training.max_steps) for spec in group], reports
    )
    points = {
        spec.run_id: ResumePoint(min(common.step, spec.config.training.max_steps), report)
        for spec, report in zip(group, reports, strict=True)
    }
    missing_rows = [
        f"{spec.run_id}: {line}; what is missing cannot be restored"
        for spec, lines in zip(group, common.missing_rows, strict=True)
        for line in lines
    ]
    return common.step, points, missing_rows


def check_recorded_facts(
    job: CohortJob, specs: Sequence[RunSpec], points: Mapping[str, ResumePoint], model: CohortModel, data: Dataset,
    warm_ups: Mapping[str, str], observer: Observer,
) -> None:  # fmt: skip
    """Compare base, data, warm-up and machine with the runs' records, and store the present ones in ``points`` for the
    new records. ``warm_ups``: hash of each run's warm-up. Raises RecordsDiffer for differences that the user has not
    accepted."""
    facts, system = shared_facts(model, data), system_files(job.folder)
    directories = {spec.run_id: run_directory(job.directory, spec) for spec in specs}
    records = {run_id: intact_config(path) for run_id, path in directories.items() if (path / CONFIG).exists()}
    now = {spec.run_id: facts | _run_facts(model, data, spec) for spec in specs}
    for run_id, digest in warm_ups.items():
        now[run_id] |= {"warmup_hash": digest}
    differing = [line for run_id, recorded in records.items() for line in world_changes(recorded, now[run_id])]
    if unaccepted := [line for line in dict.fromkeys(differing) if line not in job.accepted]:
        raise RecordsDiffer(unaccepted)
    for spec in specs:
        point = points[spec.run_id]
        point.facts = now[spec.run_id] | {"modules": module_hashes(spec.config, job.folder)}
        point.system = system
        if (recorded := records.get(spec.run_id)) is None:
            continue
        changes = world_changes(recorded, now[spec.run_id])
        point.any_base = any(line.startswith(BASE_WEIGHTS) for line in changes)
        for line in machine_changes(recorded, facts):
            observer.message(f"{spec.run_id}: {line}: what follows is rounded differently", "warning")


def shared_facts(model: CohortModel, data: Dataset) -> dict[str, object]:
    return {
        "built": model.built,
        "base": {
            "name": model.name,
            "fingerprint": model.identity,
            "tokenizer": _tokenizer_digest(model.tokenizer.source),
        },
        "data_hash": data.content_hash,
        "heldout_hash": content_hash((), data.heldout),
        "heldout_hashes": {name: content_hash((), problems) for name, problems in data.sets.items()},
        "data_sizes": {"train": len(data.train), "heldout": len(data.heldout)},
    }


def _tokenizer_digest(tokenizer: object) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str()) | {"padding": None, "truncation": None}  # kept from the last call
    else:
        rules = getattr(tokenizer, "get_vocab", dict)()
    parts = [rules, getattr(tokenizer, "chat_template", None)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _run_facts(model: CohortModel, data: Dataset, spec: RunSpec) -> dict[str, object]:
    teacher = model.teachers.get(spec.run_id)
    rubrics = column_values(spec.config.graded_columns, data.train, *data.sets.values())
    taught_by: dict[str, object] = {} if teacher is None else {"taught_by": teacher.identity}
    return taught_by | ({"rubrics": rubrics[0]} if rubrics else {})


@dataclass(frozen=True)
class RunBuilder:
    """Builds the runs of a cohort. Without ``writes`` (on ranks other than 0), runs write no records or checkpoints."""

    job: CohortJob
    model: CohortModel
    data: Dataset
    warm_ups: Mapping[str, WarmUp]
    observer: Observer
    stack: ExitStack
    guard: Guard
    writes: bool = True

    def build(self, spec: RunSpec, modes: tuple[Modes, Detector], grader: Grader, point: ResumePoint) -> Run:
        """Build a run, restore it and begin its records. Raises CheckpointError when its files cannot be used."""
        config, model, (own_modes, detector) = spec.config, self.model, modes
        environments = environments_of(config, self.data, grader, self.job.folder)
        recorder = self.recorder(spec, grader, environments["train"])
        self.stack.callback(
            recorder.close, failed=True
        )  # closes it if anything below fails; closing twice does nothing
        requests = RolloutRequests(
            config,
            environments["train"],
            renderer_of(model, config),
            episode_limits(config, model.context),
            DataCursor(self.data.train, config.stream("data"), config.data.shuffle),
            RecentWeights(config.training.max_off_policy_steps, remembers=config.inference.served),
        )
        policy = model.policy(spec, recorder.directory)
        if (warm_up := self.warm_ups.get(spec.run_id)) is not None and isinstance(policy, LocalPolicy):
            policy.start_from(warm_up.adapter.weights)
        run = Run(
            spec=spec,
            policy=policy,
            algorithm=build_algorithm(config, own_modes, detector, model.tokenizer, config.stream("sampling")),
            update_plan=_update_plan(config, objective_of(config, own_modes.loss)),
            environments=environments,
            requests=requests,
            recorder=recorder,
            checkpoints=(Checkpoints if self.writes else NullCheckpoints)(
                recorder, config.training, model.identity, point.any_base, len(self.data.train), spec.export
            ),
            watch=model.watch(config) if model.watch is not None else None,
            teacher=model.teachers.get(spec.run_id),
            teacher_context=_teacher_context(model, config),
        )
        if spec.export is not None and self.writes:
            prepare_directory(spec.export)  # before training, so that a fault does not cost hours
        notes = [*self.data.notes, *model.notes, *self._inexact(run)]
        if warm_up is not None:
            notes.append(
                f"starts from {WARMUP}/{warm_up.digest}, which is also the reference policy; {warm_up.summary}"
            )
        if Need.ENTROPY in config.algorithm.needs and not model.engine.gives_entropy:
            raise UsageError(
                f"{run.run_id} needs full-vocabulary entropies, which this engine does not return: "
                'use [inference] engine = "local"'
            )
        initial_adapter = run.policy.fingerprint()
        restored = _restore(run, model, point)
        for note in notes:
            recorder.log(note)
        for line in restored:
            recorder.log(line)
            self.observer.message(f"{spec.run_id}: {line}")
        recorder.start(_facts_of(run, point, initial_adapter), point.system)
        return run

    def recorder(self, spec: RunSpec, grader: Grader, environment: Environment) -> RunRecorder:
        folder, data = self.job.folder, self.data
        plugins, tasks = _declared_ranges(spec.config, folder, grader, environment)
        graded = grader.names if spec.config.environment.provider is None else ()
        graded = (*graded, AUDIT) if spec.config.audit.is_enabled else graded
        context = RunContext(
            condition=spec.label,
            run_id=spec.run_id,
            seed=spec.config.training.seed,
            config=spec.config,
            max_steps=spec.config.training.max_steps,
            is_campaign=spec.is_campaign,
            tags=_tags_of(data.heldout),
            set_tags={name: _tags_of(problems) for name, problems in data.sets.items()},
            reward_names=(*graded, *(name for name in tasks if name != "reward")),
            ranges=_merged_ranges(plugins, tasks),
            skipped_prompts=data.skipped,
            folder=folder,
        )
        directory = run_directory(self.job.directory, spec)
        if not self.writes:
            return NullRecorder(directory, context)
        claim(directory, claim(self.job.directory).at(run_place(spec)) if spec.is_campaign else None)
        return RunRecorder(
            directory,
            context,
            warn=partial(self.observer.message, level="warning"),
            token_text=self.model.tokenizer.offsets,
            guard=self.guard(directory),
        )

    def _inexact(self, run: Run) -> list[str]:
        if run.environments["train"].exact:
            return []
        note = (
            "what the environment answers is not known to be a function of problem, seed and actions: a run that is "
            "interrupted goes on, but need not equal one that is not"
        )
        self.observer.message(f"{run.run_id}: {note}")
        return [note]


def renderer_of(model: CohortModel, config: Config) -> Renderer:
    return Renderer(model.tokenizer.source, config.data, config.environment.tools_prompt)


def _update_plan(config: Config, objective: Objective) -> UpdatePlan:
    optimizer, training = config.optimizer, config.training
    rate = partial(
        learning_rate,
        optimizer.schedule,
        max_steps=training.max_steps * training.updates,
        warmup_steps=optimizer.warmup_steps * training.updates,
        base=training.lr,
    )
    return UpdatePlan(objective, training.updates, rate, config.algorithm if config.masks_per_update else None)


def _teacher_context(model: CohortModel, config: Config) -> TeacherContext | None:
    section = config.distillation
    if not section.active or section.context == "none":
        return None
    return TeacherContext(renderer_of(model, config), section, model.context or 1 << 30)


def _tags_of(problems: Sequence[Problem]) -> tuple[str, ...]:
    return tuple(sorted({tag for problem in problems for tag in problem.tags}))


def _restore(run: Run, model: CohortModel, point: ResumePoint) -> list[str]:
    config, lines = run.config, []
    if config.model.trust_remote_code:
        lines.append(f"{model.name} may run code of its own: trust_remote_code = true")
    if run.recorder.any_written or run.checkpoints.any_written:
        lines += resume(run, point.step, point.passed_over)
    is_resumed = run.checkpoints.restored_step is not None
    if not is_resumed and config.resume.from_:
        lines += continue_from(run, Path(config.resume.from_))
    if is_resumed and config.inference.served:
        lines.append(
            "rollouts that were in flight are drawn again; what servers sample may differ in its last bits, so the run "
            "need not equal one that was not interrupted bit for bit"
        )
    return lines


def _facts_of(run: Run, point: ResumePoint, initial_adapter: str | None) -> dict[str, object]:
    config = run.config
    is_fresh = initial_adapter and not config.resume.from_
    return run_facts(
        config,
        run_id=run.run_id,
        condition=run.spec.label,
        seeds={"campaign": config.campaign.seed, "run": config.training.seed},
        ranges=dict(run.recorder.context.ranges),
        **({"initial_adapter": initial_adapter} if is_fresh else {}),
        **point.facts,
    )


def _declared_ranges(
    config: Config, folder: Path, grader: Grader, environment: Environment
) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the chart ranges that plug-ins declare for their metrics, and the ranges of reward components and sample
    metrics. For the latter, [reward] overrides the environment, which overrides the data source."""
    code = [(key, plugin_ranges(value, folder, f"{key} =")) for key, value in named_code(config)]
    ends = {"min": config.reward.reward_min, "max": config.reward.reward_max}
    limits = {name: end for name, end in ends.items() if end is not None}
    only = grader.names if config.environment.provider is None and len(grader.names) == 1 else ()
    written = _merged_ranges(dict.fromkeys(("reward", *only), limits) if limits else {}, config.reward.metrics_ranges)
    plugins = _merged_ranges(*(ranges for key, ranges in code if not is_source(key)))
    sources = (ranges for key, ranges in code if is_source(key))
    return plugins, _merged_ranges(*sources, environment.ranges, written)


def _merged_ranges(*declared: Mapping[str, Values]) -> dict[str, Row]:
    ranges: dict[str, Row] = {}
    for name, limits in (item for owner in declared for item in owner.items()):
        ranges.setdefault(name, {}).update(limits)
    return ranges
