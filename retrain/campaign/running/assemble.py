"""Put a cohort together: model, data, graders, and each run restored to where it was."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retrain.algorithms import Modes, build_algorithm, load_detector, load_modes
from retrain.algorithms.credit.planning_tokens import Detector
from retrain.algorithms.objective import objective_of
from retrain.campaign.planning.asked import Longest, askable, check_rubrics, data_of, missing_column, parts_of
from retrain.campaign.planning.changes import BASE_WEIGHTS, machine_changes, recorded_facts, world_changes
from retrain.campaign.planning.outputs import run_place
from retrain.campaign.planning.plan import RunSpec, run_directory
from retrain.campaign.planning.references import is_source, named_code
from retrain.campaign.running.fitting import check_memory, lane_bytes
from retrain.campaign.running.models import Bases, CohortModel, local_model, plugin_model
from retrain.campaign.running.protocol import CohortJob
from retrain.campaign.running.server_events import ServerEvents
from retrain.campaign.running.teachers import teachers_of
from retrain.config import Config
from retrain.config.modes import Need
from retrain.data import Dataset, content_hash
from retrain.data.dataset import DataCursor, column_values
from retrain.data.prompts import Renderer, longest_prompt
from retrain.engines.server.canary import canaries
from retrain.engines.server.engine import ServerEngine
from retrain.engines.server.fleet import Tell, Told
from retrain.environments.build import environments_of
from retrain.environments.protocol import Environment, Limits
from retrain.errors import CheckpointError, DataError, ModelError, UsageError
from retrain.files import prepare_directory
from retrain.ownership import claim
from retrain.plugins import plugin_ranges
from retrain.policy.base import BaseModel
from retrain.policy.context import Context
from retrain.policy.device import resolve_device
from retrain.policy.local import LocalPolicy
from retrain.policy.memory import MemoryPlan
from retrain.policy.threads import Workers, workers_for
from retrain.records.base_evaluations import BaseEvaluations
from retrain.records.context import RunContext, chart_ranges
from retrain.records.environment import SystemInfo, module_hashes, run_facts
from retrain.records.observer import Observer
from retrain.records.recorder import RunRecorder
from retrain.rewards import Grader, build_grader
from retrain.rewards.audit import AUDIT
from retrain.rollouts.pressure import Pressure
from retrain.rollouts.versions import RecentWeights
from retrain.training.checkpoint_files import common_step
from retrain.training.checkpoints import Checkpoints
from retrain.training.evaluation import Evaluator
from retrain.training.loop import Cohort
from retrain.training.requests import RolloutRequests
from retrain.training.resume import continue_from, resume
from retrain.training.run import Run
from retrain.types import Problem


class Changed(Exception):
    """What had to be loaded to be known differs from the runs' records, in ways that are not accepted."""

    def __init__(self, lines: list[str]):
        super().__init__("; ".join(lines))
        self.lines = lines


def assemble(
    job: CohortJob, observer: Observer, stop: Callable[[], bool], stack: ExitStack, bases: Bases | None = None,
    guard: Callable[[Path], None] = lambda directory: None,
) -> Cohort:  # fmt: skip
    """The cohort of a job's runs, ready to train. ``stack`` closes graders at the end; ``bases`` is where the base is
    taken from and stays; ``guard`` gets a run's directory before each write into it and raises LeaseLost.

    Raises RetrainError when a plug-in, the model, the data or a checkpoint cannot be used, DoesNotFit when memory is
    too short for all of them, and Changed.
    """
    directory, folder, longest = Path(job.directory), Path(job.folder), Longest(**job.longest)
    specs = [RunSpec.from_json(run) for run in job.runs]
    begin = _resume_points(specs, job)
    specs = [spec for spec in specs if spec.run_id in begin]
    modes = [(load_modes(spec.config.algorithm, folder), load_detector(spec.config, folder)) for spec in specs]
    first, bases = specs[0].config, bases or stack.enter_context(Bases())
    use_deterministic(first.training.deterministic)
    # What is quick to read comes before the weights, which may take minutes.
    rewards = {spec.config.reward.grading: spec.config.reward for spec in specs}
    device = partial(resolve_device, first.backend.device)
    build = partial(build_grader, base_dir=folder, device=device, audit=first.audit)
    graders = {key: stack.enter_context(build(reward)) for key, reward in rewards.items()}
    data = data_of(first, folder)
    for spec in specs:
        check_rubrics(data, spec.config)
        if fault := missing_column(graders[spec.config.reward.grading].reward.columns, data, spec.config):
            raise DataError(f"[reward] custom_function: {fault}")
    if _is_local(first):
        files = bases.look(first)
        data = askable(data, first, longest, files.tokenizer, files.context)
    events = ServerEvents(observer)
    load = partial(model_of, specs, folder, data, bases, stack, observer, directory, events.message)
    model = _on_all_ranks(specs, folder, bases, load)
    if not _is_local(first):
        data = askable(data, first, longest, model.tokenizer.source, context=0)
    shared = _Shared(directory, folder, model, data, observer, stack, guard)
    _compare_records(shared, specs, begin, _world(model, data), job)
    if isinstance(model.engine, ServerEngine):
        if isinstance(bases.servers, Told):
            bases.servers.record = events.record
        for line in tried_servers(model.engine, bases, specs):
            events.message(line)
    for note in (*data.notes, *model.notes):  # once it is known that these runs train here
        observer.message(note)
    runs = []
    for spec, mode in zip(specs, modes, strict=True):
        grader = graders[spec.config.reward.grading]
        try:
            run = _build_run(shared, spec, mode, grader, begin[spec.run_id])
        except CheckpointError as error:  # this run's own files: the others can go on
            observer.run_finished(spec, "failed", str(error))
            continue
        runs.append(run)
    events.attach(runs)
    stack.callback(events.detach)
    loaded = [run.checkpoints.loaded for run in runs if run.checkpoints.loaded is not None]
    if with_engine := [state for state in loaded if state.shared.get("engine")]:
        model.engine.restore(max(with_engine, key=lambda state: state.step).shared["engine"])
    kept = BaseEvaluations(directory, model.identity) if specs[0].is_campaign and _is_local(first) else None
    limits = Limits.of(first, model.context)
    evaluator = Evaluator(model.engine, _renderer(model, first), first.held_out, kept, limits)
    return Cohort(model.engine, runs, evaluator, observer, stop, model.workers, _pressure(runs, model))


def memory_facts(cohort: Cohort) -> dict[str, Any]:
    """What the manifest says under ``memory`` of the runs of this cohort: by the run's id, the bytes of a decode batch
    and the tokens of a micro-batch."""
    return {
        run.run_id: {
            "decode_bytes": cohort.engine.state().get("decode_bytes"),
            "micro_batch_tokens": run.policy.budget.tokens,
        }
        for run in cohort.runs
        if isinstance(run.policy, LocalPolicy)
    }


def _is_local(config: Config) -> bool:
    return config.backend.backend == "local"


def _pressure(runs: Sequence[Run], model: CohortModel) -> Pressure | None:
    asking = [run for run in runs if run.config.backpressure.enabled]
    if not asking:
        return None
    prompts = sum(run.config.training.batch_size for run in runs)
    samples = max(run.config.training.group_size for run in runs)
    pressure = Pressure(asking[0].config.backpressure, prompts, samples, model.decode_work)
    for run in asking:
        loaded = run.checkpoints.loaded
        if loaded is not None and (saved := loaded.shared.get("pressure")):
            pressure.restore(saved)
    return pressure


def use_deterministic(wanted: bool) -> None:
    if wanted:
        # cuBLAS reads this when its first handle is made; without it torch refuses deterministic matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def _on_all_ranks(specs: Sequence[RunSpec], folder: Path, bases: Bases, own: Callable[[], CohortModel]) -> CohortModel:
    """The model of these runs, while other ranks load it too. Raises ModelError where theirs is another one."""
    model, identities = bases.with_ranks(specs, folder, own)
    for rank, identity in enumerate(identities, start=1):
        if identity != model.identity:
            raise ModelError(
                f"rank {rank} has other weights of {model.name} than rank 0 ({identity}, not {model.identity}): give "
                "all of them the same model"
            )
    return model


def model_of(
    specs: Sequence[RunSpec],
    folder: Path,
    data: Dataset,
    bases: Bases,
    stack: ExitStack,
    observer: Observer,
    directory: Path,
    server_message: Tell,
) -> CohortModel:
    """What samples and learns: the base with its lanes and engine, here or in servers (``directory`` is for what these
    need, ``server_message`` hears of them), or a backend of the user's for every run."""
    config = specs[0].config
    if not _is_local(config):
        return plugin_model(specs, folder)
    served = config.inference.served
    if served:
        base, lanes, engine = bases.take_served(config, directory, server_message)
    else:
        base, lanes, engine = bases.take(config, observer.message)
    workers = stack.enter_context(closing(workers_of(base, specs)))
    teachers, copies = teachers_of(specs, folder, base, lanes, bases, observer.message)
    longest = max(longest_prompt(asked, base.tokenizer, section) for asked, section in parts_of(data, config))
    check_memory(base, lanes, specs, _episode_tokens(config, longest, base.context_length), decodes=not served)
    plan = MemoryPlan.of(base, lane_bytes(base, lanes, specs) + copies)
    return local_model(base, lanes, engine, workers, plan, bases.ranks, teachers)


def workers_of(base: BaseModel, specs: Sequence[RunSpec]) -> Workers:
    """The workers of these runs' cohort. Dropout draws from torch's global stream, which runs side by side would
    share."""
    return Workers() if any(spec.config.lora.dropout > 0 for spec in specs) else workers_for(base)


@dataclass
class ResumePoint:
    """Where a run goes on: at ``step``; 0 is the start.

    ``passed_over`` says what was wrong with later checkpoints, ``any_base`` whether other weights of the base were
    accepted, ``facts`` and ``system`` what the run is made with and in.
    """

    step: int
    passed_over: list[str] = field(default_factory=list)
    any_base: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    system: SystemInfo | None = None


@dataclass(frozen=True)
class _Shared:
    """What all runs of a cohort are built on."""

    directory: Path
    folder: Path
    model: CohortModel
    data: Dataset
    observer: Observer
    stack: ExitStack
    guard: Callable[[Path], None]


def _resume_points(specs: Sequence[RunSpec], job: CohortJob) -> dict[str, ResumePoint]:
    """Return where each run of a cohort continues; failed runs are included when the others go back to before their
    failure. Raises Changed where rows of a record are missing that no earlier checkpoint can restore."""
    directory, begin, lost = Path(job.directory), dict[str, ResumePoint](), list[str]()
    going = [spec for spec in specs if spec.run_id not in job.failed_at]
    for group in [going] if job.together else [[spec] for spec in specs]:
        reports: list[list[str]] = [[] for _ in group]
        common = common_step(
            [(run_directory(directory, spec), spec.config.training.max_steps) for spec in group], reports
        )
        for spec, report, lines in zip(group, reports, common.missing_rows, strict=True):
            begin[spec.run_id] = ResumePoint(min(common.step, spec.config.training.max_steps), report)
            lost += [f"{spec.run_id}: {line}; what is missing cannot be restored" for line in lines]
        if job.together:
            again = [spec for spec in specs if job.failed_at.get(spec.run_id, -1) >= common.step]
            begin |= {spec.run_id: ResumePoint(min(common.step, spec.config.training.max_steps)) for spec in again}
    if refused := [line for line in lost if line not in job.accepted]:
        raise Changed(refused)
    return begin


def _compare_records(
    shared: _Shared, specs: Sequence[RunSpec], begin: dict[str, ResumePoint], facts: dict[str, Any], job: CohortJob
) -> None:
    """Compare these facts with the runs' records, and keep them for the new ones. Raises Changed."""
    system = SystemInfo.now(shared.folder)
    records = {spec.run_id: recorded_facts(run_directory(shared.directory, spec)) for spec in specs}
    now = {spec.run_id: facts | _taught_by(shared.model, spec) | _rubrics(shared.data, spec) for spec in specs}
    differing = [line for run_id, recorded in records.items() for line in world_changes(recorded, now[run_id])]
    if refused := [line for line in dict.fromkeys(differing) if line not in job.accepted]:
        raise Changed(refused)
    for spec in specs:
        recorded, own = records[spec.run_id], begin[spec.run_id]
        changes = world_changes(recorded, now[spec.run_id])
        own.any_base = any(line.startswith(BASE_WEIGHTS) for line in changes)
        own.facts = now[spec.run_id] | {"modules": module_hashes(spec.config, shared.folder)}
        own.system = system
        for line in machine_changes(recorded, facts):
            shared.observer.message(f"{spec.run_id}: {line}: what follows is rounded differently", "warning")


def _rubrics(data: Dataset, spec: RunSpec) -> dict[str, Any]:
    """What the data says that this run is graded by; nothing where it is graded by nothing else than answers."""
    found = column_values(spec.config.rubric_columns, data.train, *data.sets.values())
    return {"rubrics": found[0]} if found else {}


def _taught_by(model: CohortModel, spec: RunSpec) -> dict[str, Any]:
    """Whose weights teach this run; nothing where it has no teacher."""
    teacher = model.teachers.get(spec.run_id)
    return {} if teacher is None else {"taught_by": teacher.identity}


def _world(model: CohortModel, data: Dataset) -> dict[str, Any]:
    """What a run is made with that has to be loaded to be known; part of every run's ``config.json``."""
    return {
        "built": model.built,
        "base": {"name": model.name, "fingerprint": model.identity, "tokenizer": model.tokenizer.digest},
        "data_hash": data.content_hash,
        "heldout_hash": content_hash((), data.heldout),
        "heldout_hashes": {name: content_hash((), problems) for name, problems in data.sets.items()},
        "data_sizes": {"train": len(data.train), "heldout": len(data.heldout)},
    }


def _build_run(
    shared: _Shared, spec: RunSpec, modes: tuple[Modes, Detector], grader: Grader, begin: ResumePoint
) -> Run:
    """One run of the cohort, restored, with its record begun. Raises CheckpointError when its files cannot be used."""
    environments = environments_of(spec.config, shared.data, grader, shared.folder)
    recorder = _recorder(shared, spec, grader, environments["train"])
    shared.stack.callback(recorder.close, failed=True)  # before training goes wrong; closing twice does nothing
    config, model, data, (own, detector) = spec.config, shared.model, shared.data, modes
    requests = RolloutRequests(
        config,
        environments["train"],
        _renderer(model, config),
        Limits.of(config, model.context),
        DataCursor(data.train, config.stream("data"), config.data.shuffle),
        RecentWeights(config.training.max_off_policy_steps, remembers=config.inference.served),
    )
    run = Run(
        spec=spec,
        policy=model.policy(spec, recorder.directory),
        algorithm=build_algorithm(config, own, detector, model.tokenizer, config.stream("sampling")),
        objective=objective_of(config, own.loss),
        environments=environments,
        requests=requests,
        recorder=recorder,
        checkpoints=Checkpoints(
            recorder, config.training, model.identity, begin.any_base, len(data.train), spec.export
        ),
        watch=model.watch(config) if model.watch is not None else None,
        teacher=model.teachers.get(spec.run_id),
        teacher_context=_shown(model, config),
    )
    if spec.export is not None:
        prepare_directory(spec.export)  # now, and not after hours of training
    notes = [*data.notes, *model.notes]
    if not environments["train"].exact:
        note = (
            "what the environment answers is not known to be a function of problem, seed and actions: a run that is "
            "interrupted goes on, but need not equal one that is not"
        )
        notes.append(note)
        shared.observer.message(f"{spec.run_id}: {note}")
    if Need.ENTROPY in config.algorithm.needs and not model.engine.gives_entropy:
        raise UsageError(
            f"{run.run_id} needs full-vocabulary entropies, which this engine does not return: "
            'use [inference] engine = "local"'
        )
    fresh = getattr(run.policy, "fingerprint", lambda: None)()  # a backend of the user's need not have one
    lines = _restored(run, model, begin)
    if run.checkpoints.restored_step is not None and config.inference.served:
        lines.append(
            "rollouts that were in flight are drawn again; what servers sample may differ in its last bits, so the run "
            "need not equal one that was not interrupted bit for bit"
        )
    for note in notes:
        recorder.log(note)
    for line in lines:
        recorder.log(line)
        shared.observer.message(f"{spec.run_id}: {line}")
    facts = run_facts(
        config,
        run_id=run.run_id,
        condition=spec.label,
        seeds={"campaign": config.campaign.seed, "run": config.training.seed},
        ranges=dict(recorder.context.ranges),
        **({"initial_adapter": fresh} if fresh and not config.resume.from_ else {}),
        **begin.facts,
    )
    recorder.start(facts, begin.system)
    return run


def tags_of(problems: Sequence[Problem]) -> tuple[str, ...]:
    return tuple(sorted({tag for problem in problems for tag in problem.tags}))


def _recorder(shared: _Shared, spec: RunSpec, grader: Grader, environment: Environment) -> RunRecorder:
    plugins, tasks = _declared_ranges(spec.config, shared.folder, grader, environment)
    graded = grader.names if spec.config.environment.provider is None else ()
    graded = (*graded, AUDIT) if spec.config.audit.wanted else graded
    context = RunContext(
        condition=spec.label,
        run_id=spec.run_id,
        seed=spec.config.training.seed,
        config=spec.config,
        max_steps=spec.config.training.max_steps,
        is_campaign=spec.is_campaign,
        tags=tags_of(shared.data.heldout),
        set_tags={name: tags_of(problems) for name, problems in shared.data.sets.items()},
        reward_names=(*graded, *(name for name in tasks if name != "reward")),
        ranges=chart_ranges(plugins, tasks),
        skipped_prompts=shared.data.skipped,
        folder=shared.folder,
    )
    directory = run_directory(shared.directory, spec)
    claim(directory, claim(shared.directory).at(run_place(spec)) if spec.is_campaign else None)
    return RunRecorder(
        directory,
        context,
        warn=lambda text: shared.observer.message(f"{spec.run_id}: {text}", "warning"),
        token_text=shared.model.tokenizer.offsets,
        guard=partial(shared.guard, directory),
    )


def _shown(model: CohortModel, config: Config) -> Context | None:
    own = config.distillation
    if not own.active or own.context == "none":
        return None
    return Context(_renderer(model, config), own, model.context or 1 << 30)


def _renderer(model: CohortModel, config: Config) -> Renderer:
    return Renderer(model.tokenizer.source, config.data, config.environment.tools_prompt)


def _episode_tokens(config: Config, prompt: int, context: int) -> int:
    """Tokens that stand before the last action of the longest episode, as far as they are known: the prompt, and in
    every turn but the last an action and an answer as long as that."""
    section, action = config.environment, config.training.max_tokens
    known = [section.max_episode_tokens or context, context, prompt + (2 * section.turns - 1) * action]
    return prompt if section.turns == 1 else max(prompt, min(known) - action)


def _restored(run: Run, model: CohortModel, begin: ResumePoint) -> list[str]:
    config, lines = run.config, []
    if config.model.trust_remote_code:
        lines.append(f"{model.name} may run code of its own: trust_remote_code = true")
    if run.recorder.begun or run.checkpoints.any_written:
        lines += resume(run, begin.step, begin.passed_over)
    if run.checkpoints.restored_step is None and config.resume.from_:
        lines += continue_from(run, Path(config.resume.from_))
    return lines


def _declared_ranges(
    config: Config, folder: Path, grader: Grader, environment: Environment
) -> tuple[dict[str, Any], dict[str, Any]]:
    """In which ranges numbers lie, for charts: those of plug-ins under their own keys, and those of components and
    sample metrics, as data source, reward and [reward] say; where they differ, the last of these counts."""
    code = [(key, plugin_ranges(value, folder, f"{key} =")) for key, value in named_code(config)]
    ends = {"min": config.reward.reward_min, "max": config.reward.reward_max}
    known = {name: end for name, end in ends.items() if end is not None}
    only = grader.names if config.environment.provider is None and len(grader.names) == 1 else ()
    written = chart_ranges(dict.fromkeys(("reward", *only), known) if known else {}, config.reward.metrics_ranges)
    plugins = chart_ranges(*(ranges for key, ranges in code if not is_source(key)))
    graded = grader.ranges if config.environment.provider is None else {}
    ends = environment.reward_range
    acted = {**environment.metrics_ranges, **({} if ends is None else {"reward": {"min": ends[0], "max": ends[1]}})}
    return plugins, chart_ranges(*(ranges for key, ranges in code if is_source(key)), acted, graded, written)


def tried_servers(engine: ServerEngine, bases: Bases, specs: Sequence[RunSpec]) -> Iterator[str]:
    """Yield a line for each server and kind of adapter that the runs train. Raises ModelError for a server that
    does not compute what is trained here."""
    base, lanes = bases.trained(specs[0].config)
    kinds = []
    for spec in specs:
        tolerance = spec.config.inference.tolerance_in(str(base.dtype).removeprefix("torch."))
        kinds.append((spec.config.model.lora_rank, spec.config.lora.alpha, spec.config.training.temperature, tolerance))
    with base.presence.alone():
        for found in canaries(engine, base, lanes, list(dict.fromkeys(kinds))):
            yield found.words
