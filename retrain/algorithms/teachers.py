"""Builds the teachers of a cohort's runs: adapters of its base, further models in memory, or servers."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from retrain.algorithms.distillation import AdapterTeacher, BaseTeacher, ModelTeacher, PolicyTeacher, Teacher
from retrain.config import Config
from retrain.config.runs import RunSpec
from retrain.engines.server.teacher import ServerTeacher, server_teacher
from retrain.errors import ModelError, UsageError
from retrain.policy.adapter_io import read_adapter
from retrain.policy.base import BaseModel, MemoryPlan
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.policy.protocol import Policy
from retrain.policy.teaching import TeacherSource, recorded_base, teacher_source, vocabulary_fault
from retrain.ranks import RankGroup
from retrain.types import Sample

Loader = Callable[[Config, str], BaseModel]  # Loads a further model of a configuration, by its name


def teachers_of(
    specs: Sequence[RunSpec], folder: Path, base: BaseModel, lanes: Lanes, load_model: Loader, ranks: RankGroup | None,
    notify: Callable[[str], None],
) -> tuple[dict[str, Teacher], int]:  # fmt: skip
    """Return the teachers by run id, shared by runs with the same teacher, and the bytes of further models in memory.

    Raises ModelError when a teacher cannot be loaded or has another vocabulary, UsageError when an adapter does not fit
    the base or a server does not answer.
    """
    made: dict[tuple[TeacherSource, str], Teacher] = {}
    teachers: dict[str, Teacher] = {}
    for spec in specs:
        section = spec.config.distillation
        try:
            source = teacher_source(spec.config, folder)
        except ModelError as error:
            raise ModelError(f'[distillation] teacher = "{section.teacher}": {error}') from error
        key = source, repr((section.url, section.server, section.api_key_env))  # runs with equal keys share one
        if key not in made:
            made[key] = _teacher(spec.config, source, base, lanes, load_model)
        teachers[spec.run_id] = made[key]
    copies = 0
    for teacher in made.values():
        if isinstance(teacher, ModelTeacher):
            size = teacher.base.weight_bytes
            copies += size
            notify(f"teacher {teacher.base.name}: a second model of {_size(size)} beside {base.name}")
        elif isinstance(teacher, ServerTeacher):
            notify(f"teacher {teacher.model} at {teacher.url}: answers, {teacher.first_s:.2f} s for its first tokens")
    if ranks is not None:
        for run_id, teacher in teachers.items():
            if isinstance(teacher, ServerTeacher):
                teachers[run_id] = _FirstRankTeacher(teacher, ranks, teacher.identity)
    return teachers, copies


@dataclass
class _FirstRankTeacher:
    """A server that only rank 0 calls, because repeated answers may differ in their last bits."""

    server: ServerTeacher
    ranks: RankGroup
    identity: str

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self.ranks.from_first("teacher", lambda: self.server.score(policy, samples))


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**28 else f"{count / 2**20:.0f} MiB"


def _teacher(config: Config, source: TeacherSource, base: BaseModel, lanes: Lanes, load_model: Loader) -> Teacher:
    section = config.distillation
    subject = f'[distillation] teacher = "{section.teacher}"'
    if source.kind == "base":
        return BaseTeacher(base.fingerprint)
    if source.kind == "policy":
        return PolicyTeacher()
    if source.kind == "server":
        return server_teacher(config)
    if source.kind == "adapter":
        return _adapter(Path(source.name), subject, base, lanes)
    try:
        other = load_model(config, source.name)
    except ModelError as error:
        nowhere = "" if Path(source.name).is_dir() else "no directory of this name is here, nor below the file's; "
        raise ModelError(f"{subject}: {nowhere}{error}") from error
    if fault := vocabulary_fault(base.tokenizer.get_vocab(), other.tokenizer.get_vocab(), base.name):
        raise ModelError(f"{subject}: {fault}")
    if other.vocab_size < base.vocab_size:
        raise ModelError(
            f"{subject}: its output layer has {other.vocab_size} tokens, fewer than the {base.vocab_size} that "
            f"{base.name} may sample"
        )
    tokens = config.training.micro_batch_tokens
    plan = MemoryPlan.of(base, other.weight_bytes)
    return ModelTeacher(other, plan.micro_batch_tokens if tokens == "auto" else tokens, config.training.temperature)


def _adapter(directory: Path, subject: str, base: BaseModel, lanes: Lanes) -> AdapterTeacher:
    fingerprint, dtype = recorded_base(directory)
    # A fingerprint hashes bits, so the same weights in another number format have another one.
    if fingerprint and fingerprint != base.fingerprint and dtype == str(base.dtype).removeprefix("torch."):
        raise UsageError(f"{subject}: it was trained on other weights than those of {base.name}")
    stored = read_adapter(directory)
    shapes = {shape.name: shape for shape in lanes.shapes}
    for name, (a, b) in stored.tensors.items():
        shape = shapes.get(name)
        if shape is None:
            raise UsageError(
                f"{subject}: it changes the layer {name}, which has no adapter here: set [lora] target_modules to "
                'its own layers, or "all-linear"'
            )
        if (a.shape[1], b.shape[0]) != (shape.in_features, shape.out_features):
            raise UsageError(
                f"{subject}: its layer {name} is not one of {base.name}: it is an adapter of another model"
            )
    # Ranks and scales may differ by layer: use scale 1 and multiply each B by its scale.
    rank = max((a.shape[0] for a, _ in stored.tensors.values()), default=1)
    adapter = lanes.new_adapter(rank, float(rank))
    with torch.no_grad():
        for name, (a, b) in stored.tensors.items():
            adapter.A[name][: a.shape[0]].copy_(a)
            adapter.B[name][:, : a.shape[0]].copy_(b * stored.scales[name])
    weights = adapter.frozen()
    digest = hashlib.sha256(weights.flat.cpu().numpy().tobytes()).hexdigest()[:16]
    return AdapterTeacher(LocalSnapshot(weights, stored.config.copy), f"adapter {digest}")
