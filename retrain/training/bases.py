"""Loads what a cohort samples and trains with: a base model with lanes and an engine, or a user's backends.

One base is in memory at a time. Cohorts with the same base share it with its preparations (lanes, fused weights);
before another base is loaded, the preparations are undone and the base is freed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch

from retrain.algorithms.distillation import Teacher
from retrain.config import Config
from retrain.config.runs import RunSpec
from retrain.device import bfloat16_advice, described, gpu_facts, limit_memory, physical_memory, update_advice
from retrain.engines.local import LocalEngine
from retrain.engines.plugin import PluginEngine
from retrain.engines.protocol import Engine
from retrain.engines.server.automatic import USABLE, adapter_slots, asleep_bytes, server_rank
from retrain.engines.server.engine import ServerEngine, server_engine
from retrain.engines.server.fleet import Fleet
from retrain.errors import ModelError
from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel, MemoryPlan, ModelFiles, find_model_files, load_base, load_weights
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes
from retrain.policy.plugin import PluginPolicy, load_backend
from retrain.policy.protocol import Policy
from retrain.policy.update import DistributionTeacher
from retrain.ranks import RankGroup
from retrain.threads import Workers
from retrain.tokenizer import ByteTokenizer, Tokenizer
from retrain.training.watch import Watch

T = TypeVar("T")


@dataclass
class CohortModel:
    """The model, engine and teachers that the runs of a cohort share. ``identity``: fingerprint of the frozen weights,
    or the name of a plug-in backend."""

    name: str
    identity: str
    tokenizer: Tokenizer
    engine: Engine
    workers: Workers
    policy: Callable[[RunSpec, Path], Policy]  # Builds a run's untrained policy from its spec and directory
    built: dict[str, object]  # Facts for `built` in `config.json`
    context: int | None = None  # Context length in tokens, if known
    watch: Callable[[Config], Watch] | None = None  # None if sampler and trainer compute alike
    notes: Sequence[str] = ()  # Notes for the user
    teachers: Mapping[str, Teacher] = field(default_factory=dict)  # By run id


def local_model(
    base: BaseModel,
    lanes: Lanes,
    engine: Engine,
    workers: Workers,
    plan: MemoryPlan,
    ranks: RankGroup | None = None,
    teachers: Mapping[str, Teacher] | None = None,
) -> CohortModel:
    """Return the model of a cohort whose base is in this process; ``engine`` samples here or in servers. ``ranks``: the
    processes that train together; ``teachers``: by run id."""

    def policy(spec: RunSpec, directory: Path) -> LocalPolicy:
        teacher = (teachers or {}).get(spec.run_id) if spec.config.distillation.full_vocabulary else None
        full_vocab_teacher = teacher if isinstance(teacher, DistributionTeacher) else None
        return LocalPolicy(
            base, lanes, spec.config, spec.config.stream("init"), workers, plan, ranks, full_vocab_teacher
        )

    notes = []
    if not getattr(base.tokenizer, "chat_template", None):
        notes.append(
            f"{base.name} has no chat template: prompts are plain text, messages joined by blank lines; for a model "
            "that is trained to chat, give one with its template"
        )
    if isinstance(engine, LocalEngine):
        engine.workers = workers
        engine.begin(plan)
        if not engine.fast:
            notes.append(f"{base.name} decodes through transformers' own forward pass, slower than plain products")
    if base.quantized:
        notes.append(base.quantized.summary)
    dtype = str(base.dtype).removeprefix("torch.")

    def watch(config: Config) -> Watch:
        rounded = config.training.update_dtype
        limit = config.inference.mismatch_limit_in(dtype if rounded == "model" else rounded)
        return Watch(base, lanes, config.training.temperature, limit)

    built = _built(type(base.model).__name__, base.tokenizer, engine, dtype, described(base.device), workers, "AdamW")
    if base.quantized:
        built["quantized"] = asdict(base.quantized)
    built |= gpu_facts(base.device) | {"ranks": 1 if ranks is None else ranks.count}
    return CohortModel(
        base.name,
        base.fingerprint,
        base.text,
        engine,
        workers if ranks is None else Workers(),  # ranks train one run at a time
        policy,
        built,
        base.context_length,
        None if isinstance(engine, LocalEngine) and not base.quantized else watch,
        notes,
        teachers or {},
    )


def plugin_model(specs: Sequence[RunSpec], folder: Path) -> CohortModel:
    """Return the model of a cohort with a plug-in backend; each run has its own backend object and weights.

    Raises PluginError when a backend cannot be loaded or built.
    """
    config = specs[0].config
    plugin, backends = config.backend.backend, {spec.run_id: load_backend(spec.config, folder) for spec in specs}
    first = backends[specs[0].run_id]

    def policy(spec: RunSpec, directory: Path) -> PluginPolicy:
        return PluginPolicy(backends[spec.run_id], plugin, directory / "checkpoints")

    tokenizer = Tokenizer(getattr(first, "tokenizer", None) or ByteTokenizer())
    engine, workers = PluginEngine(plugin, getattr(first, "gives_entropy", False)), Workers()
    built = _built(plugin, tokenizer.source, engine, "float32", "cpu", workers, None)
    return CohortModel(config.model.model, plugin, tokenizer, engine, workers, policy, built)


def _built(
    model: str, tokenizer: object, engine: Engine, dtype: str, device: str, workers: Workers, optimizer: str | None
) -> dict[str, object]:
    return {
        "model": model,
        "tokenizer": type(tokenizer).__name__,
        "engine": type(engine).__name__,
        "dtype": dtype,
        "device": device,
        "threads": {"workers": workers.count, "torch": torch.get_num_threads()},
        "optimizer": optimizer,
    }


class Bases:
    """Holder of the base model in memory, which consecutive cohorts reuse and the end of the ``with`` block frees.
    ``load`` replaces loading from files. ``ranks``: processes that load the same base together. ``servers``: the
    launched servers, if another process owns them. ``server_directory``: for servers of this process, if it is a
    worker."""

    def __init__(
        self,
        load: Callable[[Config], BaseModel] | None = None,
        ranks: RankGroup | None = None,
        servers: Fleet | None = None,
        server_directory: Path | None = None,
    ) -> None:
        self.ranks, self.servers, self.server_directory = ranks, servers, server_directory
        self._load, self._key, self._targets = load, "", ""
        self._files: ModelFiles | None = None
        self._base: BaseModel | None = None
        self._lanes: Lanes | None = None
        self._engine: LocalEngine | None = None
        self._server: tuple[str, ServerEngine] | None = None
        self._others: dict[str, BaseModel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.release()

    def agreed(self, point: str, compute: Callable[[], T]) -> T:
        return compute() if self.ranks is None else self.ranks.agree(point, compute)

    def from_first(self, point: str, compute: Callable[[], T]) -> T:
        return compute() if self.ranks is None else self.ranks.from_first(point, compute)

    def smallest_memory(self, plan: Callable[[], MemoryPlan]) -> MemoryPlan:
        """Return the memory plan of the rank with the least free memory. All ranks must split a batch by the same plan,
        because each rank computes the micro-batches of certain indices."""
        return plan() if self.ranks is None else min(self.ranks.gather("planning memory", plan), key=lambda p: p.room)

    def model_files(self, config: Config) -> ModelFiles:
        """Return the files of the configured model without loading weights; cached. When the model changes, the base in
        memory is released. Raises ModelError when files are missing or unusable."""
        model = config.model
        key = repr((
            model.model, model.revision, model.quantize, model.trust_remote_code, model.local_files_only,
            config.backend.device, config.inference.dtype,
        ))  # fmt: skip
        if self._files is None or key != self._key:
            self.release()
            self._files, self._key = find_model_files(config), key
        return self._files

    def with_engine(
        self, config: Config, notify: Callable[[str], None] = lambda line: None
    ) -> tuple[BaseModel, Lanes, LocalEngine]:
        """Return the base of a configuration, its lanes and an engine in this process; all three are reused if they are
        in memory. Adapters in the engine are dropped. Raises ModelError when the base cannot be loaded."""
        base, lanes = self.with_lanes(config, notify)
        if self._engine is None:
            self._engine = LocalEngine(base, lanes, notify=notify)
        self._engine.forget()
        self._engine.begin(MemoryPlan.of(base))
        self._engine.notify = notify
        return base, lanes, self._engine

    def with_servers(
        self, config: Config, directory: Path, notify: Callable[[str, str], None] = lambda text, level: None
    ) -> tuple[BaseModel, Lanes, ServerEngine]:
        """Return the base of a configuration, its lanes and an engine that samples from its servers. Launched servers
        write logs to ``directory`` and keep running for the next cohort. Raises UsageError when no server answers."""
        base, lanes = self.with_lanes(config, lambda line: notify(line, "info"))
        model = config.model  # servers do not depend on the rank or other settings of training
        key = repr((config.inference, model.model, model.revision, base.fingerprint))
        if self._server is None or self._server[0] != key:
            self._close_server()
            directory = self.server_directory or directory
            self._server = key, server_engine(config, base, directory, notify, self.servers)
        if (released := config.inference.released) and base.device.type == "cuda":
            features = sum(shape.in_features + shape.out_features for shape in lanes.shapes)
            adapter = server_rank(config.model.lora_rank) * features * base.dtype.itemsize
            kept = base.weight_bytes + adapter_slots(config.inference.launch) * adapter
            usable = int(USABLE * physical_memory(base.device))
            limit_memory(base.device, usable - asleep_bytes(released, kept))
        engine = self._server[1]
        engine.forget()
        engine.pool.notify = notify
        return base, lanes, engine

    def load(self, config: Config, notify: Callable[[str], None] = lambda line: None) -> BaseModel:
        """Return the base of a configuration, reusing the one in memory; all ranks call this together. Raises
        ModelError when it cannot be loaded."""
        if self._load is not None:
            self._base = self._base or self._load(config)
            return self._base
        files = self.model_files(config)
        if self._base is None:
            self._base = self._load_weights(files, config)
            larger = self._base.device.type == "cpu" and not self._base.is_small
            if larger and (advice := bfloat16_advice(config.inference.dtype)):
                notify(advice)
        if self._base.device.type == "cpu" and (advice := update_advice(config.training.update_dtype)):
            notify(advice)
        return self._base

    def with_lanes(self, config: Config, notify: Callable[[str], None] = lambda line: None) -> tuple[BaseModel, Lanes]:
        base, targets = self.load(config, notify), repr(config.lora.target_modules)
        if self._lanes is None or targets != self._targets:
            self._lanes = self._engine = None
            base.release()
            self._lanes, self._targets = Lanes(base, config.lora.target_modules), targets
        if base.sharded is not None:
            backbone_of(base)  # its trial passes gather shards, so all ranks must run them now
        return base, self._lanes

    def second_model(self, config: Config, name: str) -> BaseModel:
        """Return another model for forward passes (a teacher), with the device and dtype of the base; freed with the
        base. Raises ModelError when it cannot be loaded."""
        if name not in self._others:
            model = config.model
            self._others[name] = load_base(
                name,
                local_files_only=model.local_files_only,
                trust_remote_code=model.trust_remote_code,
                devices=config.backend.device,
                dtype=config.inference.dtype,
            )
        return self._others[name]

    def _load_weights(self, files: ModelFiles, config: Config) -> BaseModel:
        device, dtype, ranks = config.backend.device, config.inference.dtype, self.ranks
        if ranks is None:
            return load_weights(files, device, dtype)
        shards = ranks if config.backend.shard == "fsdp2" else None
        base = ranks.agree("loading the base", lambda: load_weights(files, device, dtype, shards))
        prints = ranks.gather("comparing the base", lambda: base.fingerprint)
        for rank, fingerprint in enumerate(prints):
            if fingerprint != prints[0]:
                raise ModelError(
                    f"rank {rank} has other weights of {base.name} than rank 0 ({fingerprint}, not {prints[0]}): "
                    "give all of them the same model"
                )
        ranks.in_use = base.in_use if base.sharded is not None else nullcontext
        return base

    def forget_adapters(self) -> None:
        if self._engine is not None:
            self._engine.forget()
        if self._server is not None:
            self._server[1].forget()

    def release(self) -> None:
        if self.ranks is not None:
            self.ranks.in_use = nullcontext
        self._close_server()
        for base in (*self._others.values(), *([] if self._base is None else [self._base])):
            base.release()
        self._others.clear()
        self._files = self._base = self._lanes = self._engine = None

    def _close_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server[1], None
            server.close()
            if self._base is not None and self._base.device.type == "cuda":
                limit_memory(self._base.device, None)
