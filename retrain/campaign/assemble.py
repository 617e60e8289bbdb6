"""Put a cohort together: base, lanes, engine, data, graders, and each run restored to where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from retrain.backend_run import OwnRun
from retrain.backends import OwnEngine, backend_base, load_backend
from retrain.campaign.asked import askable, data_of, longest_completions
from retrain.campaign.changes import BASE_WEIGHTS, Restart, machine_changes, recorded_facts, world_changes
from retrain.campaign.fitting import check_memory
from retrain.campaign.manifest import planned_configs, run_directory
from retrain.campaign.outputs import run_place
from retrain.campaign.plan import RunSpec
from retrain.campaign.references import is_source, named_code
from retrain.checkpoints import checkpoint_directories, common_step
from retrain.config import Config, parse_dict
from retrain.credit import Modes, completion_offsets, load_modes
from retrain.detectors import load_detector
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import Engine
from retrain.environments import Dataset
from retrain.environments.dataset import content_hash
from retrain.environments.prompts import longest_prompt
from retrain.errors import CheckpointError
from retrain.evaluation import Evaluator
from retrain.files import prepare_directory
from retrain.maths.planning import Detector
from retrain.ownership import claim
from retrain.plugins import plugin_ranges
from retrain.policy.base import BaseModel, base_of, tokenizer_hash, tokenizer_of
from retrain.policy.lora import Lanes
from retrain.policy.threads import Workers, workers_for
from retrain.record.context import RunContext, chart_ranges
from retrain.record.environment import Surroundings, module_hashes, run_facts
from retrain.record.recorder import RunRecorder
from retrain.record.yardstick import Yardstick
from retrain.rewards import Grader, build_grader
from retrain.run import DataCursor, Run
from retrain.trainer import Cohort
from retrain.types import Problem


def assemble(
    directory: Path,
    specs: Sequence[RunSpec],
    folder: Path,
    observer: Any,
    stop: Callable[[], bool],
    stack: ExitStack,
    restart: Restart = Restart(),  # noqa: B008 - frozen
    others: Sequence[RunSpec] = (),
) -> Cohort:
    """The cohort of these runs, ready to train. ``stack`` closes graders and unwraps the base at the end.

    ``folder`` is that of the TOML file, where relative paths to data and modules are looked up first; ``others`` are
    runs of the plan besides those in the directory's plan.json.

    Raises RetrainError when a plug-in, the model, the data or a checkpoint cannot be used, or when what has to be
    loaded to be known differs from the runs' records and is not approved.
    """
    begin = _beginnings(directory, specs, restart)
    specs = [spec for spec in specs if spec.run_id in begin]
    modes = [(load_modes(spec.config.algorithm, folder), load_detector(spec.config, folder)) for spec in specs]
    _use_deterministic(specs[0].config.training.deterministic)
    # What is quick to read comes before the model, which may take minutes.
    rewards = {spec.config.reward.grading: spec.config.reward for spec in specs}
    graders = {key: stack.enter_context(build_grader(reward, folder)) for key, reward in rewards.items()}
    data = data_of(specs[0].config, folder)
    planned = [parse_dict(config) for config in planned_configs(directory).values()]
    longest = longest_completions([*planned, *(spec.config for spec in (*others, *specs))])
    if specs[0].config.backend.backend == "local":
        tokenizer, context = tokenizer_of(specs[0].config)  # found before weights are loaded
        if not getattr(tokenizer, "chat_template", None):
            observer.message(
                f"{specs[0].config.model.model} has no chat template: prompts are plain text, messages joined by blank "
                "lines; for a model that is trained to chat, give one with its template"
            )
        data = askable(data, specs[0].config, longest, tokenizer, context)
    base, lanes, engine, workers, backends = _policy(specs, folder, data, stack, observer)
    if backends:
        data = askable(data, specs[0].config, longest, base.tokenizer, context=0)
    for note in data.notes:
        observer.message(note)
    shared = _Shared(directory, folder, base, lanes, data, observer, stack)
    _approve_world(shared, specs, begin, _world(base, data, engine, workers), restart)
    runs, used = [], []
    for spec, mode in zip(specs, modes, strict=True):
        grader = graders[spec.config.reward.grading]
        try:
            run = _build_run(shared, spec, mode, grader, begin[spec.run_id], backends.get(spec.run_id))
        except CheckpointError as error:  # this run's own files: the others can go on
            observer.run_finished(spec, "failed", str(error))
            continue
        run.check_engine(engine.gives_entropy)
        runs.append(run)
        used.append(grader)
    kept = Yardstick(directory, base.fingerprint) if specs[0].is_campaign and not backends else None
    evaluator = Evaluator(engine, base.tokenizer, specs[0].config.held_out, data.sets, kept)
    return Cohort(base, lanes, engine, runs, used, evaluator, observer, stop, workers)


def _use_deterministic(wanted: bool) -> None:
    if wanted:
        # cuBLAS reads this when its first handle is made; without it torch refuses deterministic matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def _policy(
    specs: Sequence[RunSpec], folder: Path, data: Dataset, stack: ExitStack, observer: Any
) -> tuple[BaseModel, Lanes | None, Engine, Workers, dict[str, Any]]:
    """What samples and learns: the base with its lanes and engine, or a backend of the user's for every run."""
    config = specs[0].config
    plugin = config.backend.backend
    if plugin != "local":
        backends = {spec.run_id: load_backend(spec.config, folder) for spec in specs}
        first = backends[specs[0].run_id]
        base = backend_base(config.model.model, plugin, first)
        return base, None, OwnEngine(plugin, getattr(first, "gives_entropy", False)), Workers(), backends
    base = base_of(config)
    lanes = Lanes(base, config.lora.target_modules)
    stack.callback(lanes.detach)
    # Dropout draws from torch's global stream, which runs side by side would share.
    one_by_one = any(spec.config.lora.dropout > 0 for spec in specs)
    workers = Workers() if one_by_one else workers_for(base)
    stack.callback(workers.close)
    check_memory(base, lanes, specs, _longest_prompt(config, data, base.tokenizer))
    engine = LocalEngine(base, lanes, workers=workers, tell=observer.message)
    if not engine.fast:
        observer.message(f"{base.name} decodes through transformers' own forward pass, slower than plain products")
    return base, lanes, engine, workers, {}


def _longest_prompt(config: Config, data: Dataset, tokenizer: Any) -> int:
    """Tokens of the longest prompt that is sampled from, in training or evaluation."""
    parts = [(data.train, config.data), *((data.sets[each.name], each.data) for each in config.held_out)]
    return max(longest_prompt(problems, tokenizer, keys) for problems, keys in parts)


@dataclass
class Beginning:
    """Where a run goes on: at ``step`` (None is its own newest checkpoint); ``told`` says what was passed over,
    ``any_base`` whether other weights of the base were accepted, ``facts`` and ``surroundings`` what it is made with
    and in."""

    step: int | None
    told: list[str]
    any_base: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    surroundings: Surroundings | None = None


@dataclass(frozen=True)
class _Shared:
    """What all runs of a cohort are built on."""

    directory: Path
    folder: Path
    base: BaseModel
    lanes: Lanes | None
    data: Dataset
    observer: Any
    stack: ExitStack


def _beginnings(directory: Path, specs: Sequence[RunSpec], restart: Restart) -> dict[str, Beginning]:
    """Where each run of a cohort goes on; failed runs are in it when the others go back to before their failure."""
    told: dict[str, list[str]] = {spec.run_id: [] for spec in specs}
    step: int | None = None
    if restart.together:
        going = [spec for spec in specs if spec.run_id not in restart.failed_at]
        step = common_step(
            [(run_directory(directory, spec), spec.config.training.max_steps) for spec in going],
            [told[spec.run_id] for spec in going],
        )
        specs = [spec for spec in specs if restart.failed_at.get(spec.run_id, step) >= step]
    return {
        spec.run_id: Beginning(None if step is None else min(step, spec.config.training.max_steps), told[spec.run_id])
        for spec in specs
    }


def _approve_world(
    shared: _Shared, specs: Sequence[RunSpec], begin: dict[str, Beginning], facts: dict[str, Any], restart: Restart
) -> None:
    """Have what differs between these facts and the runs' records approved, and the facts kept for the new ones."""
    surroundings = Surroundings.now(shared.folder)
    for spec in specs:
        recorded, own = recorded_facts(run_directory(shared.directory, spec)), begin[spec.run_id]
        changes = world_changes(recorded, facts)
        restart.approve(shared.directory, changes)
        own.any_base = any(line.startswith(BASE_WEIGHTS) for line in changes)
        own.facts = facts | {"modules": module_hashes(spec.config, shared.folder)}
        own.surroundings = surroundings
        for line in machine_changes(recorded, facts):
            shared.observer.message(f"{spec.run_id}: {line}: what follows is rounded differently", "warning")


def _world(base: BaseModel, data: Dataset, engine: Engine, workers: Workers) -> dict[str, Any]:
    """What a run is made with that has to be loaded to be known; part of every run's ``config.json``."""
    return {
        "built": {
            "model": type(base.model).__name__ if base.model is not None else base.fingerprint,
            "tokenizer": type(base.tokenizer).__name__,
            "engine": type(engine).__name__,
            "dtype": str(base.dtype).removeprefix("torch."),
            "device": str(base.device),
            "threads": {"workers": workers.count, "torch": torch.get_num_threads()},
        },
        "base": {
            "name": base.name,
            "fingerprint": base.fingerprint,
            "tokenizer": tokenizer_hash(base.tokenizer),
        },
        "data_hash": data.content_hash,
        "heldout_hash": content_hash((), data.heldout),
        "heldout_hashes": {name: content_hash((), problems) for name, problems in data.sets.items()},
        "data_sizes": {"train": len(data.train), "heldout": len(data.heldout)},
    }


def _build_run(
    shared: _Shared, spec: RunSpec, modes: tuple[Modes, Detector], grader: Grader, begin: Beginning, backend: Any
) -> Run:
    """One run of the cohort, where it goes on, with its record begun. Raises CheckpointError when its files do not
    let it."""
    recorder = _recorder(shared, spec, grader)
    shared.stack.callback(recorder.close, failed=True)  # before training goes wrong; closing twice does nothing
    run = _new_run(shared, spec, recorder, modes, backend)
    run.any_base = begin.any_base
    if run.export is not None:
        prepare_directory(run.export)  # now, and not after hours of training
    for note in shared.data.notes:
        recorder.log(note)
    for line in _restored(run, shared.base, begin):
        recorder.log(line)
        shared.observer.message(f"{spec.run_id}: {line}")
    recorder.start(_facts(run, recorder.context, begin), begin.surroundings)
    return run


def tags_of(problems: Sequence[Problem]) -> tuple[str, ...]:
    """All tags of these problems, in alphabetical order."""
    return tuple(sorted({tag for problem in problems for tag in problem.tags}))


def _recorder(shared: _Shared, spec: RunSpec, grader: Grader) -> RunRecorder:
    """What writes the run's directory, with all that its rows and charts need to know of it."""
    plugins, tasks = _declared_ranges(spec.config, shared.folder, grader)
    context = RunContext(
        condition=spec.label,
        run_id=spec.run_id,
        seed=spec.config.training.seed,
        config=spec.config,
        max_steps=spec.config.training.max_steps,
        is_campaign=spec.is_campaign,
        tags=tags_of(shared.data.heldout),
        set_tags={name: tags_of(problems) for name, problems in shared.data.sets.items()},
        reward_names=(*grader.names, *(name for name in tasks if name != "reward")),
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
        token_text=lambda completion: completion_offsets(completion, shared.base),
    )


def _new_run(shared: _Shared, spec: RunSpec, recorder: RunRecorder, modes: tuple[Modes, Detector], backend: Any) -> Run:
    """The run at its first step, on lanes of the base or on its own backend."""
    stream = (spec.config.campaign.seed, spec.config.training.seed)
    cursor = DataCursor(shared.data.train, stream, spec.config.data.shuffle)
    parts = (spec, recorder.directory, shared.base, shared.lanes, recorder, cursor, *modes)
    return Run(*parts) if backend is None else OwnRun(*parts).attach(backend, spec.config.backend.backend)


def _restored(run: Run, base: BaseModel, begin: Beginning) -> list[str]:
    """Bring the run to where it goes on; what there is to say about it."""
    config, lines = run.config, []
    if config.model.trust_remote_code:
        lines.append(f"{base.name} may run code of its own: trust_remote_code = true")
    if run.recorder.begun or checkpoint_directories(run.directory):
        lines += run.restore(begin.step, begin.told)
    if run.restored_step is None and config.resume.from_:
        lines += run.continue_from(Path(config.resume.from_))
    return lines


def _facts(run: Run, context: RunContext, begin: Beginning) -> dict[str, Any]:
    """The run's ``config.json``."""
    built = begin.facts["built"] | {"optimizer": type(run.optimizer).__name__}
    return run_facts(
        run.config,
        run_id=context.run_id,
        condition=context.condition,
        seeds={"campaign": run.config.campaign.seed, "run": context.seed},
        ranges=dict(context.ranges),
        **(begin.facts | {"built": built}),
    )


def _declared_ranges(config: Any, folder: Path, grader: Grader) -> tuple[dict[str, Any], dict[str, Any]]:
    """In which ranges numbers lie, for charts: those of plug-ins under their own keys, and those of components and
    sample metrics, as data source, reward and [reward] say; where they differ, the last of these counts."""
    code = [(key, plugin_ranges(value, folder, f"{key} =")) for key, value in named_code(config)]
    ends = {"min": config.reward.reward_min, "max": config.reward.reward_max}
    known = {name: end for name, end in ends.items() if end is not None}
    written = {**config.reward.metrics_ranges, **({"reward": known} if known else {})}
    plugins = chart_ranges(*(ranges for key, ranges in code if not is_source(key)))
    return plugins, chart_ranges(*(ranges for key, ranges in code if is_source(key)), grader.ranges, written)
