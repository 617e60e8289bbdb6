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
from retrain.campaign.changes import BASE_WEIGHTS, Restart, machine_changes, recorded_facts, world_changes
from retrain.campaign.fitting import check_memory
from retrain.campaign.manifest import run_directory
from retrain.campaign.plan import RunSpec
from retrain.campaign.references import SOURCES, named_code
from retrain.checkpoints import checkpoint_directories, common_step
from retrain.config import Config
from retrain.credit import Modes, completion_offsets, load_modes
from retrain.detectors import load_detector
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import Engine
from retrain.environments import Dataset, load_data
from retrain.environments.dataset import content_hash
from retrain.errors import CheckpointError
from retrain.files import prepare_directory
from retrain.maths.planning import Detector
from retrain.plugins import plugin_ranges
from retrain.policy.base import BaseModel, base_of, tokenizer_hash
from retrain.policy.lora import Lanes
from retrain.policy.threads import Workers, workers_for
from retrain.record.context import RunContext, chart_ranges
from retrain.record.environment import Surroundings, module_hashes, run_facts
from retrain.record.recorder import RunRecorder
from retrain.record.yardstick import Yardstick
from retrain.rewards import Grader, build_grader
from retrain.run import DataCursor, Run
from retrain.trainer import Cohort


def assemble(
    directory: Path,
    specs: Sequence[RunSpec],
    folder: Path,
    observer: Any,
    stop: Callable[[], bool],
    stack: ExitStack,
    restart: Restart = Restart(),  # noqa: B008 - frozen
) -> Cohort:
    """The cohort of these runs, ready to train. ``stack`` closes graders and unwraps the base at the end.

    ``folder`` is that of the TOML file, where relative paths to data and modules are looked up first.

    Raises RetrainError when a plug-in, the model, the data or a checkpoint cannot be used, or when what has to be
    loaded to be known differs from the runs' records and is not approved.
    """
    begin = _beginnings(directory, specs, restart)
    specs = [spec for spec in specs if spec.run_id in begin]
    config = specs[0].config
    modes = [(load_modes(spec.config.algorithm, folder), load_detector(spec.config, folder)) for spec in specs]
    if config.training.deterministic:
        # cuBLAS reads this when its first handle is made; without it torch refuses deterministic matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.training.deterministic)
    # What is quick to read comes before the model, which may take minutes.
    rewards = {spec.config.reward.grading: spec.config.reward for spec in specs}
    graders = {key: stack.enter_context(build_grader(reward, folder)) for key, reward in rewards.items()}
    data = data_of(config, folder)
    for note in data.notes:
        observer.message(note)
    base, lanes, engine, workers, backends = _policy(specs, folder, stack, observer)
    facts, surroundings = _world(base, data, engine, workers), Surroundings.now()
    for spec in specs:
        recorded = recorded_facts(run_directory(directory, spec))
        changes = world_changes(recorded, facts)
        restart.approve(directory, changes)
        begin[spec.run_id].any_base = any(line.startswith(BASE_WEIGHTS) for line in changes)
        for line in machine_changes(recorded, facts):
            observer.message(f"{spec.run_id}: {line}: what follows is rounded differently", "warning")
    runs, used = [], []
    for spec, mode in zip(specs, modes, strict=True):
        grader = graders[spec.config.reward.grading]
        begin[spec.run_id].facts = facts | {"modules": module_hashes(spec.config, folder)}
        begin[spec.run_id].surroundings = surroundings
        try:
            run = _build_run(
                directory, spec, mode, base, lanes, data, grader, observer, stack, folder, begin[spec.run_id],
                backends.get(spec.run_id),
            )  # fmt: skip
        except CheckpointError as error:  # this run's own files: the others can go on
            observer.run_finished(spec, "failed", str(error))
            continue
        run.check_engine(engine.gives_entropy)
        runs.append(run)
        used.append(grader)
    yardstick = None
    if specs[0].is_campaign and data.heldout and not backends:
        yardstick = Yardstick(directory, f"{base.fingerprint} {content_hash((), data.heldout)}")
    return Cohort(base, lanes, engine, runs, used, data.heldout, observer, stop, workers, yardstick)


def data_of(config: Config, folder: Path) -> Dataset:
    """The training and held-out problems of a run's configuration. Raises DataError when they cannot be had."""
    return load_data(
        config.data, config.evaluation.problems, config.training.max_examples, config.campaign.seed, folder
    )


def _policy(
    specs: Sequence[RunSpec], folder: Path, stack: ExitStack, observer: Any
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
    check_memory(base, lanes, specs)
    engine = LocalEngine(base, lanes, workers=workers, tell=observer.message)
    if not engine.fast:
        observer.message(f"{base.name} decodes through transformers' own forward pass, slower than plain products")
    return base, lanes, engine, workers, {}


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
        "data_sizes": {"train": len(data.train), "heldout": len(data.heldout)},
    }


def _build_run(
    directory: Path,
    spec: RunSpec,
    modes: tuple[Modes, Detector],
    base: BaseModel,
    lanes: Lanes | None,
    data: Dataset,
    grader: Grader,
    observer: Any,
    stack: ExitStack,
    folder: Path,
    begin: Beginning,
    backend: Any = None,
) -> Run:
    where = run_directory(directory, spec)
    tags = tuple(sorted({tag for problem in data.heldout for tag in problem.tags}))
    plugins, tasks = _declared_ranges(spec.config, folder, grader)
    context = RunContext(
        condition=spec.label,
        run_id=spec.run_id,
        seed=spec.config.training.seed,
        config=spec.config,
        max_steps=spec.config.training.max_steps,
        is_campaign=spec.is_campaign,
        tags=tags,
        reward_names=(*grader.names, *(name for name in tasks if name != "reward")),
        ranges=chart_ranges(plugins, tasks),
        folder=folder,
    )
    recorder = RunRecorder(
        where,
        context,
        warn=lambda text: observer.message(f"{spec.run_id}: {text}", "warning"),
        token_text=lambda completion: completion_offsets(completion, base),
    )
    stack.callback(recorder.close, failed=True)  # for what goes wrong before training; closing twice does nothing
    stream = (spec.config.campaign.seed, spec.config.training.seed)
    cursor = DataCursor(data.train, stream, spec.config.data.shuffle)
    if backend is None:
        run = Run(spec, where, base, lanes, recorder, cursor, *modes)
    else:
        own = OwnRun(spec, where, base, lanes, recorder, cursor, *modes)
        run = own.attach(backend, spec.config.backend.backend)
    run.any_base = begin.any_base
    if run.export is not None:
        prepare_directory(run.export)  # now, and not after hours of training
    trusted = [f"{base.name} may run code of its own: trust_remote_code = true"] * spec.config.model.trust_remote_code
    lines = [*trusted]
    if recorder.begun or checkpoint_directories(where):
        lines += run.restore(begin.step, begin.told)
    if run.restored_step is None and spec.config.resume.from_:
        lines += run.continue_from(Path(spec.config.resume.from_))
    for line in lines:
        recorder.log(line)
        observer.message(f"{spec.run_id}: {line}")
    built = begin.facts["built"] | {"optimizer": type(run.optimizer).__name__}
    facts = run_facts(
        spec.config,
        run_id=spec.run_id,
        condition=spec.label,
        seeds={"campaign": spec.config.campaign.seed, "run": spec.config.training.seed},
        ranges=dict(context.ranges),
        **(begin.facts | {"built": built}),
    )
    recorder.start(facts, begin.surroundings)
    return run


def _declared_ranges(config: Any, folder: Path, grader: Grader) -> tuple[dict[str, Any], dict[str, Any]]:
    """In which ranges numbers lie, for charts: those of plug-ins under their own keys, and those of components and
    sample metrics, as data source, reward and [reward] say; where they differ, the last of these counts."""
    code = [(key, plugin_ranges(value, folder, f"{key} =")) for key, value in named_code(config)]
    ends = {"min": config.reward.reward_min, "max": config.reward.reward_max}
    known = {name: end for name, end in ends.items() if end is not None}
    written = {**config.reward.metrics_ranges, **({"reward": known} if known else {})}
    plugins = chart_ranges(*(ranges for key, ranges in code if key not in SOURCES))
    return plugins, chart_ranges(*(ranges for key, ranges in code if key in SOURCES), grader.ranges, written)
