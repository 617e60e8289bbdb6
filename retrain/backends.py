"""Training backends of the user's own: a class named ``module:Class`` in ``[backend] backend``, one object per run.

The built-in backend trains LoRA adapters of a model in this process, and all its runs share one decode batch. One of
your own brings the policy itself: it samples, takes optimizer steps, saves and loads; retrain does the rest (problems,
rewards, advantages, token credit, records, checkpoints, comparison). See ``docs/backends.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from retrain.engines.protocol import Finished, SampleRequest
from retrain.errors import PluginError, RunFailed
from retrain.maths.losses import RATIO_METRICS
from retrain.plugins import check_backend_class, load_function
from retrain.policy.base import BaseModel
from retrain.policy.logprobs import TrainSequence
from retrain.policy.update import Denominators
from retrain.record.catalogue import BY_KEY, LOSS, POLICY, TIME
from retrain.types import Completion

OWN_KEYS = frozenset(metric.key for metric in (*LOSS, *POLICY)) | {m.key for m in TIME if m.key.startswith("timing_")}
"""Keys of the catalogue that a backend may report; the others are measured here."""


@dataclass(frozen=True)
class TrainBatch:
    """What one optimizer step trains on.

    ``sequences`` are the completions with signal: prompt and completion ids, the sampler's log-probabilities, and an
    advantage and a mask for every completion token. ``denominators`` count the whole step, groups without signal
    included. ``lr`` is the scheduled rate, ``step`` counts from 0, ``stream`` names the run's random stream.
    """

    sequences: Sequence[TrainSequence]
    denominators: Denominators
    lr: float
    step: int
    stream: tuple[int | str, ...]


class Backend(Protocol):
    """One run's policy. It is made with the run's resolved configuration: ``Class(config)``.

    ``reports_sync_loss``: the loss that ``train_step`` returns belongs to that very step; where it is false, rows mark
    theirs as a placeholder. ``preserves_token_advantages``: every token trains with its own advantage; where it is
    false, token credit other than ``none`` is refused. Both are looked up on the class, before anything is loaded.

    May also have ``tokenizer`` (as in transformers: callable, ``decode``, perhaps a chat template; by default prompts
    become their UTF-8 bytes) and ``gives_entropy`` (completions carry full-vocabulary entropies; by default not).
    """

    reports_sync_loss: bool
    preserves_token_advantages: bool

    def sample(self, requests: Sequence[SampleRequest]) -> Sequence[Sequence[Completion]]:
        """``request.samples`` completions of every request, in order, with the log-probabilities they were drawn at."""
        ...

    def train_step(self, batch: TrainBatch) -> Mapping[str, Any]:
        """Take one optimizer step. Returns numbers to log: ``loss``, and whatever else there is to tell."""
        ...

    def save(self, directory: Path) -> None:
        """Write everything that ``load`` needs to go on exactly here into the empty ``directory``."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote."""
        ...


def load_backend(config: Any, base_dir: Path | None) -> Any:
    """A new backend for one run's configuration. Raises PluginError when it cannot be loaded or made."""
    plugin = config.backend.backend
    found = load_function(plugin, base_dir, "[backend] backend =")
    check_backend_class(found, plugin)
    return found(config)


class ByteTokenizer:
    """Text as its UTF-8 bytes, for backends without a tokenizer of their own."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """``{"input_ids": bytes}``."""
        return {"input_ids": list(text.encode("utf-8", errors="surrogateescape"))}

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The text of the ids below 256; others stand for nothing."""
        return bytes(token for token in token_ids if 0 <= token < 256).decode("utf-8", errors="surrogateescape")


def backend_base(name: str, plugin: str, first: Any) -> BaseModel:
    """What the loop knows of a backend's model: a name and the tokenizer. There are no weights to share."""
    tokenizer = getattr(first, "tokenizer", None) or ByteTokenizer()
    return BaseModel(name, None, tokenizer, torch.device("cpu"), torch.float32, (), 0, plugin)


class OwnEngine:
    """Samples every run's prompts with that run's own backend; checks what comes back."""

    max_rows: int | None = None
    sync_seconds: float | None = None

    def __init__(self, plugin: str, gives_entropy: bool):
        self.plugin, self.gives_entropy = plugin, gives_entropy

    def sample(
        self, requests: Sequence[SampleRequest], adapters: Sequence[Any], finished: Finished | None = None
    ) -> list[list[Completion]]:
        """One list of completions per request, in order; ``request.lane`` indexes the backends in ``adapters``.

        Raises PluginError naming the backend when the number of completions, a length or a value is wrong.
        """
        found: list[list[Completion]] = [[] for _ in requests]
        for lane, backend in enumerate(adapters):
            places = [i for i, request in enumerate(requests) if request.lane == lane]
            groups = [list(group) for group in backend.sample([requests[i] for i in places])] if places else []
            if len(groups) != len(places):
                raise PluginError(f"backend {self.plugin} sampled {len(groups)} groups for {len(places)} prompts")
            for place, group in zip(places, groups, strict=True):
                self._check(requests[place], group)
                found[place] = group
                if finished is not None:
                    finished(place, group)
        return found

    def _check(self, request: SampleRequest, group: Sequence[Completion]) -> None:
        told = f"backend {self.plugin} sampled"
        if len(group) != request.samples:
            raise PluginError(f"{told} {len(group)} completions of a prompt where {request.samples} were asked for")
        for completion in group:
            logprobs_T = np.asarray(completion.logprobs_T)
            if logprobs_T.shape != (len(completion),):
                raise PluginError(f"{told} {len(completion)} tokens with {logprobs_T.shape} log-probabilities")
            if not (np.isfinite(logprobs_T).all() and (logprobs_T <= 1e-6).all()):
                raise PluginError(f"{told} a token whose log-probability is not finite, or above 0")
            if not len(completion) or len(completion) > request.max_tokens:
                raise PluginError(f"{told} {len(completion)} tokens where 1 to {request.max_tokens} were asked for")


def train_with(backend: Any, plugin: str, batch: TrainBatch) -> dict[str, Any]:
    """One step of a backend of the user's, its numbers checked, under the catalogue's keys.

    What it returned as its loss is ``loss`` and ``reported_loss``, also where the backend does not report the step's
    own (rows then mark it as a placeholder). Raises PluginError for something else than numbers by name or a name that
    is measured here, RunFailed for a loss that is not finite.
    """
    known = {"optim/lr": batch.lr, "num_datums": len(batch.sequences), **dict.fromkeys(RATIO_METRICS)}
    if not batch.sequences:  # no group had signal: nothing to train on
        return known | {"loss": None, "reported_loss": None}
    returned = backend.train_step(batch)
    if not isinstance(returned, Mapping):
        kind = type(returned).__name__
        raise PluginError(f"backend {plugin}: train_step returned {kind}, not a dictionary of metrics")
    told = {}
    for key, value in returned.items():
        plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        if not isinstance(key, str) or not (plain is None or isinstance(plain, bool | int | float | str)):
            raise PluginError(f"backend {plugin}: train_step returned {key!r}: {type(value).__name__}, not a number")
        if key in BY_KEY and key not in OWN_KEYS:
            raise PluginError(f"backend {plugin}: train_step returned {key!r}, which is measured here: rename it")
        told[key] = plain
    loss = told.pop("loss", None)
    if isinstance(loss, float) and not math.isfinite(loss):
        raise RunFailed(f"backend {plugin}: the loss of step {batch.step} is {loss}")
    return known | {"reported_loss": loss} | told | {"loss": loss}
