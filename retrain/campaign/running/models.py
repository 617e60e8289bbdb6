"""What samples and learns in a cohort: a base model with lanes and an engine, or backends of the user's own.

One base is in memory at a time. A cohort that wants the base of the one before finds it as that left it, prepared;
before another is loaded, everything that was put on it is taken off and it is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from retrain.campaign.planning.plan import RunSpec
from retrain.config import Config
from retrain.engines.local import LocalEngine
from retrain.engines.plugin import PluginEngine
from retrain.engines.protocol import Engine
from retrain.maths.backpressure import DecodeWork
from retrain.policy.base import BaseModel, base_of
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes
from retrain.policy.plugin import PluginPolicy, load_backend
from retrain.policy.protocol import Policy
from retrain.policy.threads import Workers
from retrain.pressure import decode_work
from retrain.tokenizer import ByteTokenizer, Tokenizer


class CohortModel(Protocol):
    """What the runs of a cohort share. ``identity`` tells frozen weights apart."""

    name: str
    identity: str
    tokenizer: Tokenizer
    workers: Workers

    @property
    def engine(self) -> Engine:
        """What samples for all of them."""
        ...

    def policy(self, spec: RunSpec, directory: Path) -> Policy:
        """The policy of one run, untrained; ``directory`` is the run's."""
        ...

    def built(self) -> dict[str, Any]:
        """Of what it is made, for ``config.json``."""
        ...

    def decode_work(self) -> DecodeWork | None:
        """What a decode step costs, if that is known."""
        ...

    def notes(self) -> list[str]:
        """What a person should know of it."""
        ...


@dataclass
class LocalModel:
    """A base in this process, with the lanes that train on it and the engine that samples with them."""

    base: BaseModel
    lanes: Lanes
    engine: LocalEngine
    workers: Workers

    def __post_init__(self) -> None:
        self.name, self.identity, self.tokenizer = self.base.name, self.base.fingerprint, self.base.text
        self.engine.workers = self.workers

    def policy(self, spec: RunSpec, directory: Path) -> LocalPolicy:
        """See ``CohortModel.policy``."""
        stream = (spec.config.campaign.seed, spec.config.training.seed)
        return LocalPolicy(self.base, self.lanes, spec.config, stream, self.workers)

    def built(self) -> dict[str, Any]:
        """See ``CohortModel.built``."""
        return {
            "model": type(self.base.model).__name__,
            "tokenizer": type(self.base.tokenizer).__name__,
            "engine": type(self.engine).__name__,
            "dtype": str(self.base.dtype).removeprefix("torch."),
            "device": str(self.base.device),
            "threads": {"workers": self.workers.count, "torch": torch.get_num_threads()},
            "optimizer": "AdamW",
        }

    def decode_work(self) -> DecodeWork | None:
        """See ``CohortModel.decode_work``."""
        return decode_work(self.base)

    def notes(self) -> list[str]:
        """See ``CohortModel.notes``."""
        notes = []
        if not getattr(self.base.tokenizer, "chat_template", None):
            notes.append(
                f"{self.base.name} has no chat template: prompts are plain text, messages joined by blank lines; for a "
                "model that is trained to chat, give one with its template"
            )
        if not self.engine.fast:
            notes.append(f"{self.base.name} decodes through transformers' own forward pass, slower than plain products")
        return notes


class PluginModel:
    """Backends of the user's own, one for each run. There are no weights to share."""

    def __init__(self, config: Config, backends: Mapping[str, Any]):
        self.plugin, self.backends = config.backend.backend, backends
        first = next(iter(backends.values()))
        self.name, self.identity = config.model.model, self.plugin
        self.tokenizer = Tokenizer(getattr(first, "tokenizer", None) or ByteTokenizer())
        self.engine = PluginEngine(self.plugin, getattr(first, "gives_entropy", False))
        self.workers = Workers()

    @classmethod
    def load(cls, specs: list[RunSpec], folder: Path) -> PluginModel:
        """A backend for every run. Raises PluginError when one cannot be loaded or made."""
        return cls(specs[0].config, {spec.run_id: load_backend(spec.config, folder) for spec in specs})

    def policy(self, spec: RunSpec, directory: Path) -> PluginPolicy:
        """See ``CohortModel.policy``."""
        return PluginPolicy(self.backends[spec.run_id], self.plugin, directory / "checkpoints")

    def built(self) -> dict[str, Any]:
        """See ``CohortModel.built``."""
        return {
            "model": self.plugin,
            "tokenizer": type(self.tokenizer.source).__name__,
            "engine": type(self.engine).__name__,
            "dtype": "float32",
            "device": "cpu",
            "threads": {"workers": self.workers.count, "torch": torch.get_num_threads()},
            "optimizer": None,
        }

    def decode_work(self) -> None:
        """Nothing is known of it."""

    def notes(self) -> list[str]:
        """There is nothing to say."""
        return []


class Bases:
    """The base model in memory, for one cohort after another; freed at the end of the ``with`` block. ``load`` makes
    the one that a configuration names."""

    def __init__(self, load: Callable[[Config], BaseModel] = base_of) -> None:
        self._load, self._key, self._targets = load, "", ""
        self._base: BaseModel | None = None
        self._prepared: tuple[Lanes, LocalEngine] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.release()

    def take(
        self, config: Config, tell: Callable[[str], None] = lambda line: None
    ) -> tuple[BaseModel, Lanes, LocalEngine]:
        """The base that a run's configuration names, with the lanes that it trains, and an engine. What is in memory
        already is taken from there. Raises ModelError when it cannot be had."""
        model, targets = config.model, repr(config.lora.target_modules)
        key = repr((
            model.model, model.revision, model.trust_remote_code, model.local_files_only,
            config.backend.devices, config.inference.dtype,
        ))  # fmt: skip
        if self._base is None or key != self._key:
            self.release()
            self._base, self._key = self._load(config), key
        if self._prepared is None or targets != self._targets:
            self._prepared = None
            self._base.release()
            lanes = Lanes(self._base, config.lora.target_modules)
            self._prepared, self._targets = (lanes, LocalEngine(self._base, lanes, tell=tell)), targets
        lanes, engine = self._prepared
        engine.forget()
        engine.tell = tell
        return self._base, lanes, engine

    def release(self) -> None:
        """Take everything off the base and let go of it."""
        if self._base is not None:
            self._base.release()
        self._base = self._prepared = None
