"""The built-in policy: a LoRA adapter over a frozen base that other runs share, with its optimizer."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.config import Config
from retrain.errors import CheckpointError, ModelError
from retrain.files import write_bytes
from retrain.policy.adapter_io import peft_config, read_adapter, write_peft
from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget, is_out_of_memory
from retrain.policy.critic import MOMENTS, WEIGHTS, Critic
from retrain.policy.logprobs import split_microbatches
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.policy.memory import MemoryPlan
from retrain.policy.objective import Objective
from retrain.policy.optimizer import new_optimizer
from retrain.policy.protocol import PolicySnapshot, Scores, TrainBatch, Want
from retrain.policy.ranks import Ranks
from retrain.policy.rounded import products_in_bfloat16
from retrain.policy.scoring import scored
from retrain.policy.shares import RunShares
from retrain.policy.teacher import WholeTeacher
from retrain.policy.threads import Workers
from retrain.policy.update import Passes, batch_gradient, train_step
from retrain.tensor_file import to_bytes
from retrain.types import Sample

OPTIMIZER = "optimizer.safetensors"
KL_SECONDS = "timing_compute_kl_total"


@dataclass(frozen=True)
class LocalSnapshot:
    """An adapter as it was: its weights, what peft has to know of them, and if it is resumable AdamW's moments and the
    critic."""

    weights: LoraWeights
    peft: Mapping[str, Any]
    optimizer: Mapping[str, torch.Tensor] | None = None
    critic: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """What goes into each of the critic's files."""

    def write(self, directory: Path) -> None:
        """A PEFT directory and the optimizer. Raises StorageError when the file system refuses."""
        assert self.optimizer is not None, "only a resumable snapshot is a checkpoint"
        self.export(directory, directory)
        write_bytes(directory / OPTIMIZER, to_bytes(self.optimizer))
        for name, tensors in self.critic.items():
            write_bytes(directory / name, to_bytes(tensors))

    def export(self, directory: Path, checkpoint: Path) -> None:
        """A PEFT directory that peft, transformers, vLLM and SGLang load."""
        write_peft(directory, self.weights.tensors(), dict(self.peft))

    def discard(self) -> None:
        """Nothing lies about."""


class LocalPolicy:
    """One run's adapter on the lanes of a base. ``stream`` names the run's random stream; ``workers`` do micro-batches
    side by side, unless the update itself is one of several that run side by side; ``plan`` is the cohort's, by default
    that of a run by itself; ``ranks`` are processes that do a share of updates and scores; ``teacher`` is
    whose distributions its loss may compare with."""

    starts_as_base = True

    def __init__(
        self,
        base: BaseModel,
        lanes: Lanes,
        config: Config,
        stream: tuple[int | str, ...],
        workers: Workers | None = None,
        plan: MemoryPlan | None = None,
        ranks: Ranks | None = None,
        teacher: WholeTeacher | None = None,
    ):
        self.base, self.lanes, self.config, self.workers = base, lanes, config, workers
        self.shares = None if ranks is None else RunShares(ranks, config.algorithm.loss)
        self.adapter = self._new_adapter().initialise(*stream)
        optimizer, training = config.optimizer, config.training
        betas = (optimizer.beta1, optimizer.beta2)
        self.optimizer = new_optimizer([self.adapter.flat], training.lr, betas, optimizer.eps, training.weight_decay)
        tokens, plan = training.micro_batch_tokens, plan or MemoryPlan.of(base)
        self.budget = Budget(plan.micro_batch_tokens, plan=plan) if tokens == "auto" else Budget(tokens)
        self.critic = Critic(base, lanes, config, stream) if config.algorithm.critic else None
        self.bfloat16 = training.update_dtype == "bfloat16"
        self.teacher = teacher
        self.version = 0
        self._reference_s = 0.0  # Seconds of the base's forward passes in `score` since the last update

    @property
    def capabilities(self) -> Mapping[str, bool]:
        return {
            "loss_is_placeholder": False,
            "backend_reports_sync_loss": True,
            "backend_preserves_token_advantages": True,
        }

    def score(self, samples: Sequence[Sample], want: frozenset[Want], weights: PolicySnapshot | None = None) -> Scores:
        """See ``Policy.score``; in micro-batches, which get smaller when memory runs out, without gradients, and by
        ``[training] update_dtype``, so that updates compare with what they compute themselves. Raises ModelError for
        values where it has no critic."""
        if Want.VALUES in want and self.critic is None:
            raise ModelError("this policy has no critic that could give values")
        adapter = self.adapter if weights is None else _weights_of(weights)
        while want:
            parts = split_microbatches(samples, self.budget.tokens, packed=backbone_of(self.base).packs)
            sizes = [len(part) for part in parts]
            try:
                with products_in_bfloat16(self.bfloat16):
                    return self._score(samples, parts, want, adapter)
            except (MemoryError, RuntimeError) as error:
                if max(sizes) == 1 or not is_out_of_memory(error):
                    raise
                reason = str(error)
            self.budget.shrink(sizes, [len(sample) for sample in samples], reason)
        return Scores()

    def _score(
        self,
        samples: Sequence[Sample],
        parts: Sequence[Sequence[int]],
        want: frozenset[Want],
        adapter: Adapter | LoraWeights,
    ) -> Scores:
        temperature = self.config.training.temperature
        critic = None if self.critic is None else (self.critic.adapter or self.adapter, self.critic.head)
        chosen = [[samples[i] for i in part] for part in parts]
        wanted = {kind: [np.zeros(0)] * len(samples) for kind in want}
        for kinds in filter(None, (want & {Want.REFERENCE}, want - {Want.REFERENCE})):
            begin = time.perf_counter()
            if self.shares is None:
                found = scored(self.lanes, chosen, kinds, adapter, temperature, critic)
            else:
                found = self.shares.scores(self.lanes, chosen, kinds, adapter, temperature, critic, self.bfloat16)
            if Want.REFERENCE in kinds:
                self._reference_s += time.perf_counter() - begin
            for part, arrays in zip(parts, found, strict=True):
                for kind, rows in arrays.items():
                    for i, row_T in zip(part, rows, strict=True):
                        wanted[kind][i] = row_T
        return Scores(**{str(kind): rows for kind, rows in wanted.items()})

    def update(self, batch: TrainBatch, objective: Objective, lr: float) -> dict[str, Any]:
        """See ``train_step``; ``timing_compute_kl_total`` counts the base's forward passes in ``score`` too."""
        before = self._changes()
        try:
            metrics = train_step(
                self._passes,
                self.adapter,
                self.optimizer,
                batch,
                objective,
                lr,
                grad_clip_norm=self.config.optimizer.grad_clip_norm,
                critic=self.critic,
            )
            if self._reference_s:
                metrics[KL_SECONDS] = metrics.get(KL_SECONDS, 0.0) + self._reference_s
                self._reference_s = 0.0
            return metrics
        finally:
            self.version += self._changes() != before  # also when an error came after a part of the change

    def gradient(self, batch: TrainBatch, objective: Objective) -> torch.Tensor:
        """The gradient that ``update`` would clip and apply, fp32 [D] in the order of the adapter's weights; nothing
        is changed. See ``batch_gradient``."""
        return batch_gradient(self._passes, self.adapter, batch, objective, critic=self.critic)

    @property
    def _passes(self) -> Passes:
        dropout, workers = self.config.lora.dropout, self.workers or Workers()
        return Passes(self.lanes, self.budget, workers, dropout, self.bfloat16, self.shares, self.teacher)

    def fingerprint(self) -> str:
        return hashlib.sha256(self.adapter.flat.detach().cpu().numpy().tobytes()).hexdigest()[:16]

    def _changes(self) -> list[int]:
        """How often its weights, a critic's included, have been changed in place."""
        weights = [self.adapter.flat, *([] if self.critic is None else self.critic.weights)]
        return [flat._version for flat in weights]

    def snapshot(self, resumable: bool = False) -> LocalSnapshot:
        model, lora = self.config.model, self.config.lora
        peft = peft_config(self.adapter, self.base.name, model.revision, lora.dropout)
        if not resumable:
            return LocalSnapshot(self.adapter.frozen(), peft)
        critic = {} if self.critic is None else {WEIGHTS: self.critic.tensors(), MOMENTS: self.critic.moments()}
        return LocalSnapshot(self.adapter.frozen("cpu"), peft, optimizer_tensors(self.optimizer), critic)

    def load(self, directory: Path) -> None:
        """See ``Policy.load``. Raises CheckpointError when the adapter is of another shape."""
        from safetensors.torch import load_file

        try:
            self.adapter.load(read_adapter(directory).tensors, lowered=True)
        except ModelError as error:
            raise CheckpointError(f"{directory} does not fit this run: {error}") from error
        load_optimizer(self.optimizer, load_file(directory / OPTIMIZER))
        if self.critic is not None:
            self.critic.load(directory)

    def begin_with(self, directory: Path) -> None:
        """The weights of a PEFT directory. Raises ModelError when there is none, UsageError when its scale differs."""
        stored = read_adapter(directory)
        stored.require_scale(self.adapter.scale, str(directory))
        self.adapter.load(stored.tensors)

    def read(self, directory: Path) -> LocalSnapshot:
        """See ``Policy.read``. Raises CheckpointError when the adapter is of another shape."""
        stored, adapter = read_adapter(directory), self._new_adapter()
        try:
            adapter.load(stored.tensors, lowered=True)
        except ModelError as error:
            raise CheckpointError(f"{directory} does not fit this run: {error}") from error
        return LocalSnapshot(adapter.frozen(), stored.config)

    def _new_adapter(self) -> Adapter:
        return self.lanes.new_adapter(self.config.model.lora_rank, self.config.lora.alpha)

    def begin_step(self, step: int) -> list[str]:
        """Lower the adapter's rank where ``step`` begins a stage of ``[lora] anneal``.

        The optimizer begins anew: its moments belong to rows that are no more. A checkpoint of this step holds the
        adapter as it was before, and resuming lowers it again, to the same numbers.
        """
        lines = []
        for stage, rank in self.config.lora.anneal:
            if stage == step and self.adapter.live_rank > rank:
                lines.append(f"step {step}: the adapter goes on with rank {rank} of {self.adapter.live_rank}")
                self.adapter.lower(rank)
                self.optimizer.state.clear()
                self.version += 1
        return lines

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "budget": self.budget.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        self.budget.restore(state["budget"])

    def notes(self) -> list[str]:
        """What memory and the model's layers did not allow."""
        return self.budget.take_notes()


def _weights_of(snapshot: PolicySnapshot) -> LoraWeights:
    """What to score with. Raises TypeError for the snapshot of another kind of policy."""
    if not isinstance(snapshot, LocalSnapshot):
        raise TypeError(f"this policy scores with LoRA adapters, not with {type(snapshot).__name__}")
    return snapshot.weights


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's moments and step count, copied to the host; empty before the first update."""
    state = optimizer.state_dict()["state"].get(0, {})
    return {key: torch.as_tensor(value).detach().cpu().clone() for key, value in state.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put the moments back (nothing to do for a checkpoint from before the first update)."""
    state = optimizer.state_dict()
    state["state"] = {0: dict(tensors)} if tensors else {}
    optimizer.load_state_dict(state)
