"""The teachers of a cohort's runs: adapters of the base in memory, further models beside it, or servers."""

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
from retrain.policy.teaching import Place, place_of, recorded_base, vocabulary_fault
from retrain.ranks import RankGroup
from retrain.types import Sample

Loader = Callable[[Config, str], BaseModel]  # Loads a further model of a configuration, by its name


def teachers_of(
    specs: Sequence[RunSpec], folder: Path, base: BaseModel, lanes: Lanes, beside: Loader, ranks: RankGroup | None,
    notify: Callable[[str], None],
) -> tuple[dict[str, Teacher], int]:  # fmt: skip
    """Return by a run's id who teaches it, one for all of these runs that want the same; and the bytes of further
    models in memory, of which ``notify`` hears.

    Raises ModelError when one cannot be had or has other tokens, UsageError when an adapter does not fit the base or a
    server does not answer.
    """
    made: dict[tuple[Place, str], Teacher] = {}
    teachers: dict[str, Teacher] = {}
    for spec in specs:
        own = spec.config.distillation
        try:
            place = place_of(spec.config, folder)
        except ModelError as error:
            raise ModelError(f'[distillation] teacher = "{own.teacher}": {error}') from error
        key = place, repr((own.url, own.server, own.api_key_env))
        if key not in made:
            made[key] = _teacher(spec.config, place, base, lanes, beside)
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
                teachers[run_id] = _AskedByFirst(teacher, ranks, teacher.identity)
    return teachers, copies


@dataclass
class _AskedByFirst:
    """A server that rank 0 alone asks: its answers may differ in their last bits."""

    server: ServerTeacher
    ranks: RankGroup
    identity: str

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self.ranks.from_first("teacher", lambda: self.server.score(policy, samples))


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**28 else f"{count / 2**20:.0f} MiB"


def _teacher(config: Config, place: Place, base: BaseModel, lanes: Lanes, beside: Loader) -> Teacher:
    own = config.distillation
    what = f'[distillation] teacher = "{own.teacher}"'
    if place.kind == "base":
        return BaseTeacher(base.fingerprint)
    if place.kind == "policy":
        return PolicyTeacher()
    if place.kind == "server":
        return server_teacher(config)
    if place.kind == "adapter":
        return _adapter(Path(place.name), what, base, lanes)
    try:
        other = beside(config, place.name)
    except ModelError as error:
        nowhere = "" if Path(place.name).is_dir() else "no directory of this name is here, nor below the file's; "
        raise ModelError(f"{what}: {nowhere}{error}") from error
    if fault := vocabulary_fault(base.tokenizer.get_vocab(), other.tokenizer.get_vocab(), base.name):
        raise ModelError(f"{what}: {fault}")
    if other.vocab_size < base.vocab_size:
        raise ModelError(
            f"{what}: its output layer has {other.vocab_size} tokens, fewer than the {base.vocab_size} that "
            f"{base.name} may sample"
        )
    tokens = config.training.micro_batch_tokens
    plan = MemoryPlan.of(base, other.weight_bytes)
    return ModelTeacher(other, plan.micro_batch_tokens if tokens == "auto" else tokens, config.training.temperature)


def _adapter(directory: Path, what: str, base: BaseModel, lanes: Lanes) -> AdapterTeacher:
    """The adapter as weights of these lanes; layers that it leaves alone have zeros. Raises UsageError where it does
    not fit."""
    fingerprint, dtype = recorded_base(directory)
    if fingerprint and fingerprint != base.fingerprint and dtype == str(base.dtype).removeprefix("torch."):
        raise UsageError(f"{what}: it was trained on other weights than those of {base.name}")
    stored = read_adapter(directory)
    shapes = {shape.name: shape for shape in lanes.shapes}
    for name, (a, b) in stored.tensors.items():
        shape = shapes.get(name)
        if shape is None:
            raise UsageError(
                f"{what}: it changes the layer {name}, which has no adapter here: set [lora] target_modules to its own "
                'layers, or "all-linear"'
            )
        if (a.shape[1], b.shape[0]) != (shape.in_features, shape.out_features):
            raise UsageError(f"{what}: its layer {name} is not one of {base.name}: it is an adapter of another model")
    # An adapter of any ranks and scales as one with scale 1: each B is multiplied by its own.
    rank = max((a.shape[0] for a, _ in stored.tensors.values()), default=1)
    adapter = lanes.new_adapter(rank, float(rank))
    with torch.no_grad():
        for name, (a, b) in stored.tensors.items():
            adapter.A[name][: a.shape[0]].copy_(a)
            adapter.B[name][:, : a.shape[0]].copy_(b * stored.scales[name])
    weights = adapter.frozen()
    digest = hashlib.sha256(weights.flat.cpu().numpy().tobytes()).hexdigest()[:16]
    return AdapterTeacher(LocalSnapshot(weights, stored.config.copy), f"adapter {digest}")
