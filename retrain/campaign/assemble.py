"""Put a cohort together: base, lanes, engine, data, graders, and each run restored to where it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from retrain.campaign.manifest import run_directory
from retrain.campaign.plan import RunSpec
from retrain.checkpoints import checkpoint_directories
from retrain.credit import Modes, load_modes
from retrain.detectors import load_detector
from retrain.engines.local import LocalEngine
from retrain.environments import Dataset, load_data
from retrain.environments.dataset import content_hash
from retrain.errors import CheckpointError
from retrain.maths.planning import Detector
from retrain.policy.base import BaseModel, load_base
from retrain.policy.lora import Lanes
from retrain.policy.threads import Workers, workers_for
from retrain.record.context import RunContext, chart_ranges
from retrain.record.environment import run_facts, write_environment
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
) -> Cohort:
    """The cohort of these runs, ready to train. ``stack`` closes graders and unwraps the base at the end.

    ``folder`` is that of the TOML file, where relative paths to data and modules are looked up first.

    Raises RetrainError when a plug-in, the model, the data or a checkpoint cannot be used.
    """
    config = specs[0].config
    modes = [(load_modes(spec.config.algorithm, folder), load_detector(spec.config, folder)) for spec in specs]
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    base = load_base(
        config.model.model,
        revision=config.model.revision,
        local_files_only=config.model.local_files_only,
        trust_remote_code=config.model.trust_remote_code,
        devices=config.backend.devices,
        dtype=config.inference.dtype,
    )
    lanes = Lanes(base, config.lora.target_modules)
    stack.callback(lanes.detach)
    # Dropout draws from torch's global stream, which runs side by side would share.
    one_by_one = any(spec.config.lora.dropout > 0 for spec in specs)
    workers = Workers() if one_by_one else workers_for(base)
    stack.callback(workers.close)
    engine = LocalEngine(base, lanes, workers=workers)
    data = load_data(
        config.data, config.evaluation.problems, config.training.max_examples, config.campaign.seed, folder
    )
    for note in data.notes:
        observer.message(note)
    graders: dict[str, Grader] = {}
    runs, used = [], []
    for spec, mode in zip(specs, modes, strict=True):
        key = spec.config.reward.model_dump_json()
        if key not in graders:
            graders[key] = stack.enter_context(build_grader(spec.config.reward, folder))
        try:
            run = _build_run(directory, spec, mode, base, lanes, data, graders[key], observer, stack, folder)
        except CheckpointError as error:  # this run's own files: the others can go on
            observer.run_finished(spec, "failed", str(error))
            continue
        run.check_engine(engine.gives_entropy)
        runs.append(run)
        used.append(graders[key])
    yardstick = None
    if specs[0].is_campaign and data.heldout:
        yardstick = Yardstick(directory, f"{base.fingerprint} {content_hash((), data.heldout)}")
    return Cohort(base, lanes, engine, runs, used, data.heldout, observer, stop, workers, yardstick)


def _build_run(
    directory: Path,
    spec: RunSpec,
    modes: tuple[Modes, Detector],
    base: BaseModel,
    lanes: Lanes,
    data: Dataset,
    grader: Grader,
    observer: Any,
    stack: ExitStack,
    folder: Path,
) -> Run:
    where = run_directory(directory, spec)
    tags = tuple(sorted({tag for problem in data.heldout for tag in problem.tags}))
    context = RunContext(
        condition=spec.label,
        run_id=spec.run_id,
        seed=spec.config.training.seed,
        config=spec.config,
        max_steps=spec.config.training.max_steps,
        is_campaign=spec.is_campaign,
        tags=tags,
        reward_names=grader.names,
        ranges=chart_ranges(grader.ranges, spec.config.reward),
        folder=folder,
    )
    recorder = RunRecorder(where, context, warn=lambda text: observer.message(f"{spec.run_id}: {text}", "warning"))
    stack.callback(recorder.close, failed=True)  # for what goes wrong before training; closing twice does nothing
    stream = (spec.config.campaign.seed, spec.config.training.seed)
    cursor = DataCursor(data.train, stream, spec.config.data.shuffle)
    run = Run(spec, where, base, lanes, recorder, cursor, *modes)
    resumed = recorder.begun or bool(checkpoint_directories(where))
    if resumed:
        for line in run.restore():
            recorder.log(line)
            observer.message(f"{spec.run_id}: {line}")
    elif spec.config.resume.from_:
        for line in run.continue_from(Path(spec.config.resume.from_)):
            recorder.log(line)
            observer.message(f"{spec.run_id}: {line}")
    built = {
        "model": type(base.model).__name__,
        "tokenizer": type(base.tokenizer).__name__,
        "optimizer": type(run.optimizer).__name__,
        "engine": "LocalEngine",
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": str(base.device),
    }
    facts = run_facts(
        spec.config,
        built=built,
        run_id=spec.run_id,
        condition=spec.label,
        seeds={"campaign": spec.config.campaign.seed, "run": spec.config.training.seed},
        base={"name": base.name, "fingerprint": base.fingerprint},
        data_hash=data.content_hash,
        ranges=dict(context.ranges),
        heldout_hash=content_hash((), data.heldout),
        data_sizes={"train": len(data.train), "heldout": len(data.heldout)},
    )
    write_environment(where)
    recorder.start(facts)
    return run
