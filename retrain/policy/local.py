"""The built-in policy: a LoRA adapter over a frozen base that other runs share, with its optimizer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from retrain.config import Config
from retrain.config.runs import RunSpec
from retrain.device import available_memory
from retrain.errors import CheckpointError, ModelError, UsageError
from retrain.files import write_bytes
from retrain.models.layers import LEAST_ROWS, TRAINED_BYTES, USABLE_SHARE, adapter_bytes, fitting_lanes, update_copy
from retrain.policy.adapter_io import StoredAdapter, peft_config, read_adapter, write_peft
from retrain.policy.arithmetic import copied_bytes, products_in_bfloat16
from retrain.policy.backbone import Scored, in_microbatches, score_microbatches
from retrain.policy.base import BaseModel, MemoryPlan, cache_bytes, kept_bytes, workers_for
from retrain.policy.critic import MOMENTS, WEIGHTS, Critic, critic_step
from retrain.policy.lora import Adapter, Lanes, LoraWeights, load_moments, moments, new_optimizer
from retrain.policy.objective import Objective
from retrain.policy.packing import Budget
from retrain.policy.protocol import Policy, PolicySnapshot, PolicyState
from retrain.policy.update import DistributionTeacher, PendingUpdate, UpdateContext, batch_gradient, policy_step
from retrain.ranks import RankGroup
from retrain.threads import Workers
from retrain.types import Sample, Scores, StepBatch, UpdateResult, Want
from retrain.util.tensor_file import to_bytes

OPTIMIZER = "optimizer.safetensors"
KL_SECONDS = "timing_compute_kl_total"


@dataclass(frozen=True)
class LocalSnapshot(PolicySnapshot):
    """A copy of an adapter; a resumable snapshot also has AdamW's moments and the critic."""

    weights: LoraWeights
    peft_config: Callable[[], Mapping[str, object]] = dict  # Called when the adapter is written: peft imports slowly
    optimizer: Mapping[str, Tensor] | None = None
    critic: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # By file name

    def write(self, directory: Path) -> None:
        assert self.optimizer is not None, "only a resumable snapshot is a checkpoint"
        self.export(directory, directory)
        write_bytes(directory / OPTIMIZER, to_bytes(self.optimizer))
        for name, tensors in self.critic.items():
            write_bytes(directory / name, to_bytes(tensors))

    def export(self, directory: Path, checkpoint: Path) -> None:
        write_peft(directory, self.weights.tensors(), self.peft_config())


class LocalPolicy(Policy):
    """One run's adapter on the lanes of a base.

    ``stream`` names the run's random stream. ``workers``: threads for micro-batches, None if several updates run in
    parallel. ``plan``: the cohort's memory plan, by default that of a single run. ``ranks``: processes that share
    updates and scores.
    """

    starts_as_base = True

    def __init__(
        self,
        base: BaseModel,
        lanes: Lanes,
        config: Config,
        stream: tuple[int | str, ...],
        workers: Workers | None = None,
        plan: MemoryPlan | None = None,
        ranks: RankGroup | None = None,
        teacher: DistributionTeacher | None = None,
    ):
        self.base, self.lanes, self.config, self.workers = base, lanes, config, workers
        self.ranks = ranks
        self.adapter = self._new_adapter().initialise(*stream)
        training = config.training
        self.optimizer = new_optimizer([self.adapter.flat], training.lr, config)
        tokens, plan = training.micro_batch_tokens, plan or MemoryPlan.of(base)
        self.budget = Budget(plan.micro_batch_tokens, plan=plan) if tokens == "auto" else Budget(tokens)
        self.critic = Critic(base, lanes, config, stream) if config.algorithm.critic else None
        self.bfloat16 = training.update_dtype == "bfloat16"
        self.teacher = teacher
        self.version = 0
        self.reference: LoraWeights | None = None  # None: the reference policy is the base
        self._reference_s = 0.0  # Seconds of the reference's forward passes in `score` since the last update

    @property
    def capabilities(self) -> Mapping[str, bool]:
        return {
            "loss_is_placeholder": False,
            "backend_reports_sync_loss": True,
            "backend_preserves_token_advantages": True,
        }

    def score(self, samples: Sequence[Sample], want: frozenset[Want], weights: PolicySnapshot | None = None) -> Scores:
        """Score at the precision of updates (``[training] update_dtype``), because updates compare with these scores.
        Raises ModelError for values if the policy has no critic."""
        if Want.VALUES in want and self.critic is None:
            raise ModelError("this policy has no critic that could give values")
        adapter = self.adapter if weights is None else _weights_of(weights)
        if not want:
            return Scores()
        return in_microbatches(self.base, self.budget, samples, partial(self._score, samples, want, adapter))

    def _score(
        self, samples: Sequence[Sample], want: frozenset[Want], adapter: LoraWeights, parts: Sequence[Sequence[int]]
    ) -> Scores:
        batches = [[samples[i] for i in part] for part in parts]
        scores = {kind: [np.zeros(0)] * len(samples) for kind in want}
        critic = None if self.critic is None else (self.critic.adapter or self.adapter, self.critic.head)

        def compute(kinds: frozenset[Want], indices: Sequence[int]) -> Scored:
            with products_in_bfloat16(self.bfloat16):
                temperature, chosen = self.config.training.temperature, [batches[i] for i in indices]
                return score_microbatches(self.lanes, chosen, kinds, adapter, temperature, critic, self.reference)

        # The base's passes run separately, because their time is reported as the KL's.
        for kinds in filter(None, (want & {Want.REFERENCE}, want - {Want.REFERENCE})):
            begin = time.perf_counter()
            if self.ranks is None:
                results = compute(kinds, range(len(batches)))
            else:
                sizes = [sum(map(len, samples)) for samples in batches]
                results = self.ranks.share("scores", sizes, partial(compute, kinds))
            if Want.REFERENCE in kinds:
                self._reference_s += time.perf_counter() - begin
            for part, arrays in zip(parts, results, strict=True):
                for kind, rows in arrays.items():
                    for i, row_T in zip(part, rows, strict=True):
                        scores[kind][i] = row_T
        return Scores(**{str(kind): rows for kind, rows in scores.items()})

    def update(self, batch: StepBatch, objective: Objective, lr: float) -> UpdateResult:
        clip_norm = self.config.optimizer.grad_clip_norm
        update = PendingUpdate(self._context, self.adapter, self.optimizer, batch, objective, lr)
        try:
            if self.critic is None:
                result = policy_step(update, clip_norm)
            else:
                result = critic_step(update, self.critic, clip_norm)
        finally:
            # Also after an error: the version must never name two different weights.
            self.version += update.is_applied
        kl_seconds, self._reference_s = self._reference_s, 0.0
        if not kl_seconds:
            return result
        # The base's forward passes in ``score`` count too.
        metrics = {**result.metrics, KL_SECONDS: result.metrics.get(KL_SECONDS, 0.0) + kl_seconds}
        return replace(result, metrics=metrics)

    def gradient(self, batch: StepBatch, objective: Objective) -> Tensor:
        """Return the gradient that ``update`` would clip and apply, fp32 [D] in the order of the adapter's weights."""
        head = self.critic.head if self.critic is not None and self.critic.adapter is None else None
        return batch_gradient(self._context, self.adapter, batch, objective, head)

    @property
    def _context(self) -> UpdateContext:
        dropout, workers = self.config.lora.dropout, self.workers or Workers()
        shared = (self.bfloat16, self.ranks, self.teacher, self.reference)
        return UpdateContext(self.lanes, self.budget, workers, dropout, *shared)

    def fingerprint(self) -> str:
        return self.adapter.fingerprint()

    def snapshot(self, resumable: bool = False) -> LocalSnapshot:
        model, lora = self.config.model, self.config.lora
        weights = self.adapter.frozen("cpu" if resumable else None)
        config = partial(peft_config, weights, self.base.name, model.revision, lora.dropout)
        if not resumable:
            return LocalSnapshot(weights, config)
        critic = (
            {} if self.critic is None else {WEIGHTS: self.critic.tensors(), MOMENTS: moments(self.critic.optimizer)}
        )
        return LocalSnapshot(weights, config, optimizer_tensors(self.optimizer), critic)

    def load(self, directory: Path) -> None:
        """Restore a checkpoint. Raises CheckpointError if its adapter has another shape."""
        from safetensors.torch import load_file

        _load(self.adapter, read_adapter(directory), directory)
        load_moments(self.optimizer, {f"0.{name}": tensor for name, tensor in load_file(directory / OPTIMIZER).items()})
        if self.critic is not None:
            self.critic.load(directory)

    def start_from(self, weights: LoraWeights) -> None:
        """Set the adapter to a copy of ``weights``, and use ``weights`` as the reference policy."""
        with torch.no_grad():
            self.adapter.flat.copy_(weights.flat)
        self.reference = weights

    def begin_with(self, directory: Path) -> None:
        """Load the weights of a PEFT directory. Raises ModelError if none of them fit, UsageError if their LoRA
        scale is not the run's."""
        stored = read_adapter(directory)
        scale = self.adapter.scale
        if wrong := [other for other in stored.scales.values() if abs(other - scale) > 1e-9]:
            raise UsageError(
                f"{directory} has LoRA scale {wrong[0]:g}, this run {scale:g}: "
                "set [model] lora_rank and [lora] alpha to the adapter's"
            )
        self.adapter.load(stored.tensors)

    def read(self, directory: Path) -> LocalSnapshot:
        """Read an exported adapter. Raises CheckpointError if it has another shape."""
        stored, adapter = read_adapter(directory), self._new_adapter()
        _load(adapter, stored, directory)
        return LocalSnapshot(adapter.frozen(), stored.config.copy)

    def _new_adapter(self) -> Adapter:
        return self.lanes.new_adapter(self.config.model.lora_rank, self.config.lora.alpha)

    def begin_step(self, step: int) -> list[str]:
        """Lower the adapter's rank if ``step`` begins a stage of ``[lora] anneal``, and reset the optimizer, whose
        moments belong to the old rows. A checkpoint of this step still holds the adapter of the old rank. Return log
        lines."""
        lines = []
        for stage, rank in self.config.lora.anneal:
            if stage == step and self.adapter.live_rank > rank:
                lines.append(f"step {step}: the adapter goes on with rank {rank} of {self.adapter.live_rank}")
                self.adapter.lower(rank)
                # Truncation rotates the remaining rows: moments of the old ones belong to no weight.
                self.optimizer.state.clear()
                self.version += 1
        return lines

    def state(self) -> PolicyState:
        return {"version": self.version, "budget": self.budget.state()}

    def restore(self, state: PolicyState) -> None:
        self.version = state["version"]
        if "budget" in state:
            self.budget.restore(state["budget"])

    def notes(self) -> list[str]:
        return self.budget.take_notes()


def _load(adapter: Adapter, stored: StoredAdapter, directory: Path) -> None:
    try:
        adapter.load(stored.tensors, lowered=True)
    except ModelError as error:
        raise CheckpointError(f"{directory} does not fit this run: {error}") from error


def _weights_of(snapshot: PolicySnapshot) -> LoraWeights:
    if not isinstance(snapshot, LocalSnapshot):
        raise TypeError(f"this policy scores with LoRA adapters, not with {type(snapshot).__name__}")
    return snapshot.weights


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {key.removeprefix("0."): tensor for key, tensor in moments(optimizer).items()}


class DoesNotFit(Exception):
    """The runs of a cohort do not fit into memory together. ``lanes``: number of runs that do (0: not even one)."""

    def __init__(self, lanes: int, message: str):
        super().__init__(lanes, message)
        self.lanes = lanes

    def __str__(self) -> str:
        return self.args[1]


def workers_of(base: BaseModel, specs: Sequence[RunSpec]) -> Workers:
    """Return the threads that update the runs of a cohort in parallel. It is one thread if a run has dropout, which
    draws from torch's global random stream."""
    return Workers() if any(spec.config.lora.dropout > 0 for spec in specs) else workers_for(base)


def lane_bytes(base: BaseModel, lanes: Lanes, specs: Sequence[RunSpec]) -> int:
    """Return the bytes of these runs' adapters, critics and optimizers, for the layers that have adapters."""
    features = sum(shape.in_features + shape.out_features for shape in lanes.shapes)
    total = 0
    for spec in specs:
        rank = spec.config.model.lora_rank
        total += adapter_bytes(rank * features, base.dtype.itemsize, spec.config.published_versions)
        total += (spec.config.lane_ranks - rank) * features * TRAINED_BYTES  # critics are not published
    return total


def least_cached_tokens(config: Config, prompt_tokens: int) -> int:
    """Return the fewest tokens of KV cache that a run needs, with prompts of ``prompt_tokens`` tokens."""
    training = config.training
    sampled = max([training.max_tokens, *(each.sampling.max_tokens for each in config.held_out)])
    return min(LEAST_ROWS, training.batch_size * training.group_size) * (prompt_tokens + sampled)


def check_memory(
    base: BaseModel, lanes: Lanes, specs: Sequence[RunSpec], prompt_tokens: int, decodes: bool = True
) -> None:
    """Raise DoesNotFit, with the number of runs that fit, if the runs of ``specs`` exceed the free memory. They need
    their adapters and optimizers, and the larger of their smallest KV caches and one update. ``prompt_tokens``: tokens
    of the longest prompt. ``decodes``: whether this process samples and so needs caches."""
    # At least the update of one sequence must fit; caches are freed then.
    longest = prompt_tokens + max(spec.config.training.max_tokens for spec in specs)
    update = longest * kept_bytes(base)
    usable = int(USABLE_SHARE * max(0, available_memory(base.device) - base.gathered_bytes))
    weights, width = base.weight_bytes // base.dtype.itemsize, base.dtype.itemsize
    copy = max(update_copy(weights, width, spec.config.training.update_dtype) for spec in specs)
    copy = max(0, copy - copied_bytes(base.model))  # copies of earlier cohorts exist already
    sizes = [lane_bytes(base, lanes, [spec]) for spec in specs]
    caches = [decodes * least_cached_tokens(spec.config, prompt_tokens) * cache_bytes(base) for spec in specs]
    fitting = fitting_lanes(usable, copy, update, zip(sizes, caches, strict=True))
    if fitting < len(specs):
        gib = 2**30
        raise DoesNotFit(
            fitting,
            f"{len(specs)} runs need {(copy + sum(sizes) + max(sum(caches), update)) / gib:.1f} GiB beside "
            f"{base.name}, {usable / gib:.1f} GiB are usable: {fitting} fit",
        )
