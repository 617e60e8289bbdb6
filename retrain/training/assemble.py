"""Assembles a cohort: model, data, graders, and its runs, restored from their checkpoints."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from retrain.algorithms import Modes, load_detector, load_modes
from retrain.algorithms.credit.planning_tokens import Detector
from retrain.algorithms.distillation import Teacher
from retrain.algorithms.teachers import teachers_of
from retrain.config import Config
from retrain.config.runs import RunSpec
from retrain.data import Dataset
from retrain.data.dataset import longest_prompt
from retrain.device import resolve_device
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import Engine
from retrain.engines.server.canary import CanarySettings, run_canaries
from retrain.engines.server.engine import ServerEngine
from retrain.engines.server.fleet import RemoteFleet
from retrain.environments.build import (
    askable,
    check_gradable,
    check_tests,
    data_of,
    episode_limits,
    missing_column,
    parts_of,
)
from retrain.errors import CheckpointError, DataError
from retrain.ownership import claim
from retrain.policy.base import BaseModel, MemoryPlan
from retrain.policy.local import LocalPolicy, check_memory, lane_bytes, workers_of
from retrain.policy.lora import Lanes
from retrain.ranks import RankGroup
from retrain.records.base_evaluations import BaseEvaluations
from retrain.records.observer import Observer
from retrain.rewards import Grader, build_grader
from retrain.rollouts.collect import collect
from retrain.rollouts.pressure import Pressure, decode_work
from retrain.threads import Workers
from retrain.training.bases import Bases, CohortModel, local_model, plugin_model
from retrain.training.by_ranks import AbsentEngine, RankCollector
from retrain.training.evaluation import Evaluator
from retrain.training.inputs import CohortJob, Guard, allow_all
from retrain.training.loop import Cohort
from retrain.training.run import Run
from retrain.training.run_builder import ResumePoint, RunBuilder, check_recorded_facts, find_resume_points, renderer_of
from retrain.training.warmup import WarmUp, WarmUpTraining, read_warm_ups


class ServerEvents:
    """Passes messages about servers to ``observer``, and to the records of every run of a cohort.

    Thread-safe. Messages that arrive before ``attach`` names the runs are recorded at that call.
    """

    def __init__(self, observer: Observer):
        self._observer, self._lock = observer, threading.Lock()
        self._early: list[tuple[str, str]] = []
        self._runs: Sequence[Run] | None = None

    def message(self, text: str, level: str = "info") -> None:
        self._observer.message(text, level)
        self.record(text, level)

    def record(self, text: str, level: str = "info") -> None:
        with self._lock:
            if self._runs is None:
                self._early.append((text, level))
            for run in self._runs or ():
                if run.active:
                    run.recorder.record_server(run.step, text, level)

    def attach(self, runs: Sequence[Run]) -> None:
        with self._lock:
            self._runs, early = runs, self._early
        for message in early:
            self.record(*message)

    def detach(self) -> None:
        with self._lock:
            self._runs = ()


Teachers = Mapping[str, Teacher]  # By run id; only runs that have a teacher
Graders = Mapping[str, Grader]  # By ``config.reward.grading``: equal settings share a grader


def assemble(
    job: CohortJob, observer: Observer, stop: Callable[[], bool], stack: ExitStack, bases: Bases | None = None,
    guard: Guard = allow_all,
) -> Cohort:  # fmt: skip
    """Return the cohort of a job's runs, ready to train.

    Closing ``stack`` closes graders and records; the base stays in ``bases``. A run whose checkpoint cannot be used is
    reported as failed and left out. Raises RetrainError when a plug-in, the model or the data cannot be used,
    DoesNotFit when memory is too short for all runs, RecordsDiffer when inputs differ from the records.
    """
    bases = bases or stack.enter_context(Bases())
    ranks = bases.ranks
    resume_points = bases.from_first("finding checkpoints", partial(find_resume_points, job))
    specs = [spec for spec in job.runs if spec.run_id in resume_points]
    config = specs[0].config  # Used for what is the same in all runs of a cohort

    # What is quick to read comes before the weights, which may take minutes.
    modes, graders, data = bases.agreed("reading data", partial(read_inputs, specs, job, stack, bases))
    plans = bases.agreed("reading examples", partial(read_warm_ups, specs, job.folder, bases))
    server_events = ServerEvents(observer) if config.inference.served else None
    model = load_model(specs, job, data, bases, stack, observer, server_events)
    if not is_local(config):
        data = askable(data, config, job.longest, model.tokenizer.source, context=0)
    digests = {run_id: plan.digest(model.identity) for run_id, plan in plans.items()}
    check = partial(check_recorded_facts, job, specs, resume_points, model, data, digests, observer)
    check_on_first_rank(check, resume_points, data, bases)
    if server_events is not None:
        bases.from_first("checking servers", partial(check_servers, model.engine, bases, specs, server_events))
    for note in (*data.notes, *model.notes):  # only after all checks
        observer.message(note)

    writes = ranks is None or ranks.is_first
    owner = claim(job.directory) if plans and writes else None
    warm_ups = WarmUpTraining(job.directory, owner, bases, model.workers, observer.message, stop).adapters(plans)
    builder = RunBuilder(job, model, data, warm_ups, observer, stack, guard, writes)
    runs: list[Run] = []
    for spec, own_modes in zip(specs, modes, strict=True):
        grader, point = graders[spec.config.reward.grading], resume_points[spec.run_id]
        try:
            runs.append(bases.agreed(spec.run_id, partial(builder.build, spec, own_modes, grader, point)))
        except CheckpointError as error:  # only this run's files are faulty: the others continue
            observer.run_finished(spec, "failed", str(error))
    if server_events is not None:
        server_events.attach(runs)
        stack.callback(server_events.detach)
    restore_engine(model, runs)

    evaluator = evaluator_of(specs[0], job.directory, model, ranks, warm_ups)
    return Cohort(model.engine, runs, evaluator, observer, stop, model.workers, pressure_of(runs, model))


def read_inputs(
    specs: Sequence[RunSpec], job: CohortJob, stack: ExitStack, bases: Bases
) -> tuple[list[tuple[Modes, Detector]], Graders, Dataset]:
    """Return the plug-ins of each run, the graders, and the data. For a local model, too long prompts are removed here;
    a plug-in backend must first be loaded, because it provides the tokenizer."""
    config = specs[0].config
    modes = [(load_modes(spec.config.algorithm, job.folder), load_detector(spec.config, job.folder)) for spec in specs]
    use_deterministic(config.training.deterministic)
    graders = build_graders(specs, job.folder, stack)
    data = load_problems(specs, job.folder, graders)
    if is_local(config):
        files = bases.model_files(config)
        data = askable(data, config, job.longest, files.tokenizer, files.context)
    return modes, graders, data


def check_on_first_rank(
    check: Callable[[], None], points: Mapping[str, ResumePoint], data: Dataset, bases: Bases
) -> None:
    """Call ``check`` on rank 0, and copy ``any_base`` of its resume points to all ranks. Raises DataError if the ranks
    have read different problems."""

    def accepted_bases() -> dict[str, bool]:
        check()
        return {run_id: point.any_base for run_id, point in points.items()}

    ranks = bases.ranks
    if ranks is not None and len(set(ranks.gather("comparing data", lambda: data.content_hash))) > 1:
        raise DataError("the ranks have read different problems: give all of them the same data")
    for run_id, is_accepted in bases.from_first("comparing records", accepted_bases).items():
        points[run_id].any_base = is_accepted


def is_local(config: Config) -> bool:
    return config.backend.backend == "local"


def use_deterministic(enabled: bool) -> None:
    if enabled:
        # cuBLAS reads this when its first handle is made; without it torch refuses deterministic matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)


def build_graders(specs: Sequence[RunSpec], folder: Path, stack: ExitStack) -> Graders:
    config = specs[0].config
    rewards = {spec.config.reward.grading: spec.config.reward for spec in specs}
    device = partial(resolve_device, config.backend.device)
    build = partial(build_grader, base_dir=folder, device=device, audit=config.audit)
    return {key: stack.enter_context(closing(build(reward))) for key, reward in rewards.items()}


def load_problems(specs: Sequence[RunSpec], folder: Path, graders: Graders) -> Dataset:
    """Return the problems of these runs. Raises DataError when the data lack a column that a grader needs."""
    data = data_of(specs[0].config, folder)
    tested = [spec.config for spec in specs if spec.config.tested]
    if tested and not specs[0].config.tested:  # otherwise data_of has checked them
        check_tests(data, tested[0])
    for spec in specs:
        check_gradable(data, spec.config)
        if fault := missing_column(graders[spec.config.reward.grading].columns, data, spec.config):
            raise DataError(f"[reward] custom_function: {fault}")
    return data


def load_model(
    specs: Sequence[RunSpec], job: CohortJob, data: Dataset, bases: Bases, stack: ExitStack, observer: Observer,
    server_events: ServerEvents | None,
) -> CohortModel:  # fmt: skip
    """Return the base model, lanes, engine and teachers of the cohort; with ``server_events`` the engine samples from
    servers. For a plug-in backend, return the user's own policies and engine."""
    config, ranks = specs[0].config, bases.ranks
    if not is_local(config):
        return plugin_model(specs, job.folder)

    def prepare() -> tuple[BaseModel, Lanes, Engine, Workers, Teachers, MemoryPlan]:
        if server_events is None:
            base, lanes, engine = bases.with_engine(config, observer.message)
        elif ranks is None or ranks.is_first:
            base, lanes, engine = bases.with_servers(config, job.directory, server_events.message)
        else:
            (base, lanes), engine = bases.with_lanes(config), AbsentEngine()
        workers = stack.enter_context(closing(workers_of(base, specs)))
        taught = [spec for spec in specs if spec.config.distillation.active]
        load, notify = bases.second_model, observer.message
        teachers, copies = teachers_of(taught, job.folder, base, lanes, load, ranks, notify) if taught else ({}, 0)
        longest = max(longest_prompt(asked, base.tokenizer, section) for asked, section in parts_of(data, config))
        tokens = _episode_tokens(config, longest, base.context_length)
        check_memory(base, lanes, specs, tokens, decodes=server_events is None)
        plan = MemoryPlan.of(base, lane_bytes(base, lanes, specs) + copies)
        return base, lanes, engine, workers, teachers, plan

    if ranks is not None:
        bases.load(config, observer.message)
    base, lanes, engine, workers, teachers, plan = bases.agreed("preparing the model", prepare)
    plan = bases.smallest_memory(lambda: plan)
    return local_model(base, lanes, engine, workers, plan, ranks, teachers)


def _episode_tokens(config: Config, prompt: int, context: int) -> int:
    """Return an estimate of the tokens before the last action of the longest episode: the prompt, and two times
    ``max_tokens`` (action and observation) for each earlier turn."""
    section, action = config.environment, config.training.max_tokens
    limits = [section.max_episode_tokens or context, context, prompt + (2 * section.turns - 1) * action]
    return prompt if section.turns == 1 else max(prompt, min(limits) - action)


def check_servers(engine: Engine, bases: Bases, specs: Sequence[RunSpec], server_events: ServerEvents) -> None:
    """Test the servers with canary adapters, and record their messages. Raises ModelError for a server that fails."""
    if not isinstance(engine, ServerEngine):
        return
    if isinstance(bases.servers, RemoteFleet):
        bases.servers.record = server_events.record
    base, lanes = bases.with_lanes(specs[0].config)
    kinds = []
    for spec in specs:
        tolerance = spec.config.inference.tolerance_in(str(base.dtype).removeprefix("torch."))
        rank, alpha = spec.config.model.lora_rank, spec.config.lora.alpha
        kinds.append(CanarySettings(rank, alpha, spec.config.training.temperature, tolerance))
    for result in run_canaries(engine, base, lanes, list(dict.fromkeys(kinds))):
        server_events.message(result.summary)


def restore_engine(model: CohortModel, runs: Sequence[Run]) -> None:
    loaded = [run.checkpoints.loaded for run in runs if run.checkpoints.loaded is not None]
    if saved := {state.step: engine for state in loaded if (engine := state.shared.get("engine"))}:
        model.engine.restore(saved[max(saved)])


def evaluator_of(
    spec: RunSpec, directory: Path, model: CohortModel, ranks: RankGroup | None = None,
    warm_ups: Mapping[str, WarmUp] = MappingProxyType({}),
) -> Evaluator:  # fmt: skip
    config, is_shared = spec.config, spec.is_campaign and is_local(spec.config)
    base_evaluations = BaseEvaluations(directory, model.identity) if is_shared else None
    limits = episode_limits(config, model.context)
    collector = collect if ranks is None else RankCollector(ranks, config.inference.served)
    renderer = renderer_of(model, config)
    return Evaluator(model.engine, renderer, config.held_out, base_evaluations, limits, ranks, collector, warm_ups)


def pressure_of(runs: Sequence[Run], model: CohortModel) -> Pressure | None:
    asking = [run for run in runs if run.config.backpressure.enabled]
    if not asking:
        return None
    prompts = sum(run.config.training.batch_size for run in runs)
    samples = max(run.config.training.group_size for run in runs)
    work = decode_work(model.engine.base) if isinstance(model.engine, LocalEngine) else None
    pressure = Pressure(asking[0].config.backpressure, prompts, samples, work)
    for run in asking:
        loaded = run.checkpoints.loaded
        if loaded is not None and (saved := loaded.shared.get("pressure")):
            pressure.restore(saved)
    return pressure


def memory_facts(cohort: Cohort) -> dict[str, object]:
    """Return the manifest's ``memory`` by run id: the bytes of a decode batch and the tokens of a micro-batch."""
    return {
        run.run_id: {
            "decode_bytes": cohort.engine.state().get("decode_bytes"),
            "micro_batch_tokens": run.policy.budget.tokens,
        }
        for run in cohort.runs
        if isinstance(run.policy, LocalPolicy)
    }
