"""Takes one optimizer step of one lane: accumulates and times the gradients of micro-batches, then steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from retrain.errors import NonFinite
from retrain.maths.ratios import MISMATCH_METRICS, RATIO_METRICS, Sums, add_sums, loss_metrics
from retrain.policy.arithmetic import products_in_bfloat16
from retrain.policy.backbone import (
    as_table,
    backbone_of,
    checkpointed,
    collate,
    hidden_states,
    per_sample,
    token_logprobs,
)
from retrain.policy.base import BaseModel
from retrain.policy.head import Head, ValueHead, head_divergence
from retrain.policy.lora import Adapter, Lanes, LoraWeights, OptimizerStep
from retrain.policy.objective import NotFiniteError, Objective, TeacherTerm, TokenScores, ValueTerm
from retrain.policy.packing import Budget, Layout, MicroBatch, split_microbatches, update_mode, with_prompt
from retrain.ranks import RankGroup
from retrain.records.catalogue import TIMED_PARTS
from retrain.rng import torch_seed
from retrain.threads import Workers
from retrain.types import Sample, StepBatch, UpdateResult, Want

UPDATE_PHASES = [part for part in TIMED_PARTS if part != "weight_sync_inference"]
MIN_SHARED_TOKENS = 512  # Least tokens per micro-batch when micro-batches are made smaller so that every rank gets one
BACKWARD_COST = 3  # Cost of a forward and a backward pass, in forward passes
PROBE_SIZE = 4  # Rollouts on which sampler and trainer are compared in a step without signal: one small forward pass
# Metrics of a step in which no token trains the policy
UNTRAINED = {"num_datums": 0, "loss": 0.0, "reported_loss": 0.0, **dict.fromkeys(RATIO_METRICS)}
# Metrics that are means over the trained tokens, and the names of their sums, which only some objectives compute
MEANS = {"loss/policy_avg": "policy_loss", "policy/entropy_avg": "entropy"}


@dataclass(frozen=True)
class MicroBatchSpec:
    index: int  # Number of the micro-batch in the update, which seeds dropout
    samples: list[Sample]
    needs_gradient: bool

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class MicroBatchResult:
    loss: Tensor
    sums: Sums
    timer: PhaseTimer
    gradients: list[Tensor]  # Empty if they were added to the accumulator's buffers
    logprobs: list[np.ndarray]  # Empty unless the batch keeps them


def _on_host(result: MicroBatchResult) -> MicroBatchResult:
    sums = {name: value.cpu() for name, value in result.sums.items()}
    return replace(result, loss=result.loss.cpu(), sums=sums, gradients=[])


@dataclass(frozen=True)
class AccumulationResult:
    loss: float
    sums: Sums
    timer: PhaseTimer
    logprobs: dict[Sample, np.ndarray]


@runtime_checkable
class DistributionTeacher(Protocol):
    """A teacher in this process that gives its full-vocabulary distributions."""

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[Tensor, Head]:
        """Return the teacher's hidden states [M, H] that predict the sampled tokens of ``views``, without gradients,
        and its output layer.

        ``views`` are the student's samples with the teacher's prompts in place of the student's. A teacher that shares
        weights with the student uses the student's ``lanes`` and ``adapter``.
        """
        ...


@dataclass(frozen=True)
class UpdateContext:
    lanes: Lanes
    budget: Budget
    workers: Workers = field(default_factory=Workers)  # Threads; their number changes no bit of the result
    dropout: float = 0.0
    bfloat16: bool = False  # Round an fp32 base's products (``policy.arithmetic``)
    ranks: RankGroup | None = None  # Processes that each compute a share of the micro-batches
    teacher: DistributionTeacher | None = None  # For a ``TeacherTerm``
    reference: LoraWeights | None = None  # Adapter of the reference policy; None: the base itself

    @property
    def parallelism(self) -> int:
        return self.workers.count * (1 if self.ranks is None else self.ranks.count)

    @property
    def base(self) -> BaseModel:
        return self.lanes.base


def iter_microbatches(
    samples: Sequence[Sample], token_budget: int, *, packed: bool, every_sequence: bool
) -> Iterator[MicroBatchSpec]:
    """Yield the samples in micro-batches, those with a gradient first.

    With ``every_sequence`` the objective has a gradient for every sample. Without, a sample whose advantages are all 0
    needs only a forward pass, for the statistics.
    """
    with_gradient = [every_sequence or bool(sample.advantages[sample.loss_mask].any()) for sample in samples]
    numbers = count()
    for needs_gradient in (True, False):
        selected = [sample for sample, has in zip(samples, with_gradient, strict=True) if has == needs_gradient]
        for indices in split_microbatches(selected, token_budget, packed=packed):
            yield MicroBatchSpec(next(numbers), [selected[i] for i in indices], needs_gradient)


@dataclass(frozen=True)
class GradientAccumulator:
    """Accumulates the gradient of one objective with respect to ``adapter`` and, if given, the value ``head``. With
    ``frozen``, only the head gets a gradient."""

    context: UpdateContext
    batch: StepBatch
    adapter: Adapter
    objective: Objective
    head: ValueHead | None = None
    frozen: bool = False

    @property
    def base(self) -> BaseModel:
        return self.context.base

    @property
    def buffers(self) -> list[Tensor]:
        """Return the flat gradients of the adapter and of the value head, which are accumulated in place."""
        weights = [] if self.frozen else [self.adapter.flat]
        grads = [flat.grad for flat in (*weights, *([] if self.head is None else [self.head.flat]))]
        return [grad for grad in grads if grad is not None]

    def accumulate(self, samples: Sequence[Sample]) -> AccumulationResult:
        """Fill ``buffers`` with the gradient of the samples. If memory runs out, start again with smaller
        micro-batches."""
        budget = self.context.budget
        budget.note(*backbone_of(self.base).notes)
        specs, results = budget.fit(samples, lambda: self._split(samples), self._fill_buffers, recomputes=True)
        sums, timer = None, PhaseTimer(self.base.device)
        for result in results:
            sums = add_sums(sums, result.sums)
            timer.add(result.timer, 1 / min(self.context.parallelism, len(results)))
        logprobs = {
            sample: logprobs_T
            for spec, result in zip(specs, results, strict=True)
            for sample, logprobs_T in zip(spec.samples, result.logprobs, strict=False)
        }
        loss = float(torch.stack([result.loss for result in results]).sum())
        return AccumulationResult(loss, sums or {}, timer, logprobs)

    def _split(self, samples: Sequence[Sample]) -> list[MicroBatchSpec]:
        ranks, tokens = self.context.ranks, self.context.budget.tokens
        options = {"packed": backbone_of(self.base).packs, "every_sequence": self.objective.every_sequence}
        specs = list(iter_microbatches(samples, tokens, **options))
        while ranks is not None and len(specs) < min(ranks.count, len(samples)) and tokens > MIN_SHARED_TOKENS:
            tokens = max(MIN_SHARED_TOKENS, min(tokens, sum(map(len, samples))) // 2)
            specs = list(iter_microbatches(samples, tokens, **options))
        return specs

    def _fill_buffers(self, specs: Sequence[MicroBatchSpec]) -> tuple[Sequence[MicroBatchSpec], list[MicroBatchResult]]:
        buffers, ranks = self.buffers, self.context.ranks
        for buffer in buffers:
            buffer.zero_()
        if ranks is None:
            return specs, self._add_gradients(specs)
        # Cost in tokens of a forward pass, so that ranks finish together.
        sizes = [sum(map(len, spec.samples)) * (BACKWARD_COST if spec.needs_gradient else 1) for spec in specs]
        results = ranks.share(
            "micro-batches",
            sizes,
            lambda indices: list(map(_on_host, self._add_gradients([specs[i] for i in indices]))),
        )
        ranks.add_up(buffers)
        return specs, results

    def _add_gradients(self, specs: Sequence[MicroBatchSpec]) -> list[MicroBatchResult]:
        workers, recompute = self.context.workers, self.context.budget.checkpointing
        separate = workers.count > 1 and len(specs) > 1
        results = workers.map(lambda spec: self._compute(spec, recompute, separate), specs)
        for result in results:  # in a fixed order, so that the sum has the same bits
            for buffer, gradient in zip(self.buffers, result.gradients, strict=False):
                buffer += gradient
        return results

    def _compute(self, spec: MicroBatchSpec, recompute: bool, separate: bool) -> MicroBatchResult:
        """Run the passes of a micro-batch. Gradients are added to ``buffers``, or returned if ``separate``.
        ``recompute``: layers are computed again in the backward pass instead of keeping their activations."""
        context, timer, gradients = self.context, PhaseTimer(self.base.device, microbatches=1), []
        with products_in_bfloat16(context.bfloat16):
            # With dropout every sequence draws a mask for its own copy of the prompt.
            batch = collate(spec.samples, self.base, share=context.dropout == 0)
            timer.lap("prepare_tensors")
            batch = batch.to(self.base.device)
            timer.lap("data_to_device")
            if context.dropout > 0:
                # Seeded by the micro-batch's number, so that masks do not depend on the thread or rank that computes
                # it.
                update = [self.batch.update] if self.batch.update else []
                torch.manual_seed(torch_seed(*self.batch.stream, "dropout", self.batch.step, *update, spec.index))
            reference_BT = self._reference_logprobs(batch, timer)
            teacher = self._teacher_states(spec.samples, timer)
            layers = (
                checkpointed(lambda: self._recomputing(batch.layout)) if recompute and spec.needs_gradient else None
            )
            with torch.set_grad_enabled(spec.needs_gradient), self._active(), layers or nullcontext():
                scores = self._scores(batch, spec.samples, reference_BT, teacher, timer)
                timer.lap("forward")
                loss, sums = self.objective.loss(batch, scores, self.batch.denominators, timer.lap)
                timer.lap("loss_computation")
                # Threads must not add to the same .grad: additions in any order would change bits of the sum.
                if spec.needs_gradient and separate:
                    gradients = self._gradients(loss)
                elif spec.needs_gradient:
                    loss.backward()
                timer.lap("backward")
        kept = scores.logprobs_BT if self.batch.keep_logprobs else None
        logprobs = [] if kept is None else per_sample(kept.detach().float(), batch)
        return MicroBatchResult(loss.detach(), sums, timer, gradients, logprobs)

    def _reference_logprobs(self, batch: MicroBatch, timer: PhaseTimer) -> Tensor | None:
        if Want.REFERENCE not in self.objective.needs:
            return None
        with torch.no_grad(), self.context.lanes.single(self.context.reference):
            reference_BT, _ = token_logprobs(self.base, batch, self.objective.temperature)
        timer.lap("compute_kl")
        return reference_BT

    def _teacher_states(self, samples: list[Sample], timer: PhaseTimer) -> tuple[Tensor, Head] | None:
        if Want.TEACHER not in self.objective.needs:
            return None
        assert self.context.teacher is not None, "a term of the loss wants a teacher"
        views = [with_prompt(s, s.teacher_prompt) if s.teacher_prompt else s for s in samples]
        with self.context.lanes.single(self.context.reference):  # the teacher "base" scores with the reference policy
            states = self.context.teacher.states(self.context.lanes, self.adapter, views)
        timer.lap("compute_kl")
        return states

    def _scores(
        self,
        batch: MicroBatch,
        samples: list[Sample],
        reference_BT: Tensor | None,
        teacher: tuple[Tensor, Head] | None,
        timer: PhaseTimer,
    ) -> TokenScores:
        needs = self.objective.needs
        hidden_MH, values_BT, divergence_BT, taught_BT = None, None, None, None
        if self.head is not None and Want.VALUES in needs:
            # A value head alone needs no graph through the base.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                hidden_MH = hidden_states(self.base, batch)
            values_BT = as_table(self.head(hidden_MH), batch)
        if Want.LOGPROBS not in needs:
            return TokenScores(values_BT=values_BT)
        if teacher is not None:
            hidden_MH = hidden_states(self.base, batch) if hidden_MH is None else hidden_MH
            divergence_BT = as_table(self._divergence(hidden_MH, *teacher), batch)
            has_teacher_B1 = torch.tensor([[sample.teacher_prompt is not None] for sample in samples])
            taught_BT = batch.action_BT & has_teacher_B1.to(self.base.device)
        top_M = batch.sampler_logprobs_BT.new_empty(len(batch.targets_M)) if self.objective.is_supervised else None
        logprobs_BT, entropy_BT = token_logprobs(
            self.base,
            batch,
            self.objective.temperature,
            entropy=Want.ENTROPY in needs,
            entropy_gradient=self.objective.entropy_gradient,
            lap=timer.lap,
            hidden_MH=hidden_MH,
            top_M=top_M,
        )
        top_BT = None if top_M is None else as_table(top_M, batch)
        return TokenScores(logprobs_BT, entropy_BT, reference_BT, values_BT, divergence_BT, taught_BT, top_BT)

    def _divergence(self, hidden_MH: Tensor, teacher_MH: Tensor, teacher: Head) -> Tensor:
        term = next(term for term in self.objective.terms if isinstance(term, TeacherTerm))
        head = backbone_of(self.base).head
        assert head is not None, "a model that gives hidden states has an output layer"
        options = {"alpha": term.alpha, "top": term.top, "temperature": self.objective.temperature}
        return head_divergence(head, hidden_MH, teacher, teacher_MH, **options)

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradients of ``loss`` in the order of ``buffers``, without adding to them."""
        views = [] if self.frozen else self.adapter.views
        weights = [*views, *([] if self.head is None else [self.head.flat])]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        adapter = [torch.cat([gradient.flatten() for gradient in gradients[: len(views)]])] if views else []
        return [*adapter, *gradients[len(views) :]]

    @contextmanager
    def _recomputing(self, layout: Layout) -> Iterator[None]:
        """Set precision, adapter and layout in the thread that recomputes a layer, which may be one of autograd's."""
        with products_in_bfloat16(self.context.bfloat16), self._active(), update_mode(layout):
            yield

    def _active(self) -> AbstractContextManager[None]:
        return self.context.lanes.single(self.adapter, self.context.dropout)


class PhaseTimer:
    """Measures the seconds of each of ``UPDATE_PHASES``. On a GPU each lap waits for the device, a few times per
    micro-batch."""

    def __init__(self, device: torch.device, microbatches: int = 0):
        self.device, self.microbatches = device, microbatches
        self.totals: dict[str, float] = {phase: 0.0 for phase in UPDATE_PHASES}
        self.begin()

    def begin(self) -> None:
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.totals[phase] += now - self.last
        self.last = now

    def add(self, other: PhaseTimer, share: float = 1.0) -> None:
        """Add the micro-batches of another timer and ``share`` of its seconds, below 1 if several timers ran in
        parallel."""
        self.microbatches += other.microbatches
        for phase, seconds in other.totals.items():
            self.totals[phase] += share * seconds

    def metrics(self) -> dict[str, float]:
        timings = {f"timing_{phase}_total": seconds for phase, seconds in self.totals.items()}
        return timings | {"timing_microbatches": self.microbatches}


# -- the optimizer step ----------------------------------------------------------------------------------------------


@dataclass
class PendingUpdate:
    """Gradients and metrics of one update, before any weight has changed."""

    context: UpdateContext
    adapter: Adapter
    optimizer: torch.optim.Optimizer
    batch: StepBatch
    objective: Objective
    lr: float

    def __post_init__(self) -> None:
        self.metrics: dict[str, float | None] = {"optim/lr": self.lr, "num_datums": len(self.batch.samples)}
        self.steps: list[OptimizerStep] = []
        self.is_applied = False  # Whether weights may have changed, also when an error ended `apply` after that
        self.timer = PhaseTimer(self.context.base.device)
        self.logprobs: dict[Sample, np.ndarray] = {}

    def accumulate_policy(self) -> None:
        trained = [sample for sample in self.batch.samples if sample.loss_mask.any()]
        if not trained:
            self.compare_with_sampler(self.batch.probe)
            return
        self.add_policy(self.accumulate(self.adapter, self.objective.without(ValueTerm), trained))

    def compare_with_sampler(self, probe: Sequence[Sample]) -> None:
        """Compare sampler and trainer by forward passes over ``probe`` instead of training the policy."""
        self.metrics |= UNTRAINED
        if not probe:
            return
        sums = self.accumulate(self.adapter, self.objective.without_gradient(), probe).sums
        ratios = loss_metrics(sums)
        self.metrics |= {key: ratios[key] for key in MISMATCH_METRICS}
        self.metrics |= kl_metrics(sums, self.objective.kl_coef, len(probe))

    def apply(self, grad_clip_norm: float) -> UpdateResult:
        """Step the optimizers. Raises NonFinite, with every weight unchanged, if a loss or gradient is not finite."""
        if not self.timer.microbatches:
            return UpdateResult(self.metrics)
        for step in self.steps:
            step.check()
        self.timer.begin()
        self.is_applied = bool(self.steps)
        for step in self.steps:
            self.metrics |= step.take(grad_clip_norm)
        self.timer.lap("weight_sync_trainer")
        logprobs = [self.logprobs.get(sample) for sample in self.batch.samples] if self.batch.keep_logprobs else []
        return UpdateResult(self.metrics | self.timer.metrics(), logprobs)

    def accumulate(
        self,
        adapter: Adapter,
        objective: Objective,
        samples: Sequence[Sample],
        head: ValueHead | None = None,
        frozen: bool = False,
    ) -> AccumulationResult:
        """Accumulate the gradient of ``objective``. Raises NonFinite if a trained token's score is not finite."""
        accumulator = GradientAccumulator(self.context, self.batch, adapter, objective, head, frozen)
        try:
            result = accumulator.accumulate(samples)
        except NotFiniteError as error:
            raise NonFinite(f"{error}: the update was not applied") from error
        self.timer.add(result.timer)
        self.logprobs |= result.logprobs
        return result

    def add_policy(self, result: AccumulationResult) -> None:
        self.metrics |= policy_metrics(result.sums, self.objective.kl_coef, len(self.batch.samples))
        self.metrics |= {"loss": result.loss, "reported_loss": result.loss}
        self.steps.append(OptimizerStep(self.optimizer, [self.adapter.flat], self.lr, result.loss))


def without_advantages(sample: Sample) -> Sample:
    """Return the sample with advantages of 0 and a ``loss_mask`` that includes every sampled token."""
    return replace(sample, advantages=np.zeros(len(sample)), loss_mask=sample.action_mask)


def policy_step(update: PendingUpdate, grad_clip_norm: float = 1.0) -> UpdateResult:
    """Take one optimizer step of a policy without a critic.

    Without samples (no group had signal) no weight changes and the loss is 0; sampler and trainer are then compared on
    ``batch.probe``. Raises NonFinite if a loss or gradient is not finite, and RunFailed if one sample does not fit in
    memory; the weights are then unchanged.
    """
    update.accumulate_policy()
    return update.apply(grad_clip_norm)


def batch_gradient(
    context: UpdateContext, adapter: Adapter, batch: StepBatch, objective: Objective, head: ValueHead | None = None
) -> Tensor:
    """Return the adapter's gradient before clipping, [D] in fp32; 0 if nothing trains.

    ``head``: value head of a critic that shares the adapter; the critic's warm-up is ignored. No weight, optimizer or
    random stream changes. Raises NonFinite if a score or the gradient is not finite, and RunFailed if one sample does
    not fit in memory.
    """
    assert adapter.flat.grad is not None
    samples = batch.samples
    if head is None:
        objective = objective.without(ValueTerm)
        samples = [sample for sample in samples if sample.loss_mask.any()]
    if not samples:
        return torch.zeros_like(adapter.flat.grad)
    device = context.base.device
    try:
        # Dropout seeds torch's global stream; the caller's is put back.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            GradientAccumulator(context, batch, adapter, objective, head).accumulate(samples)
    except NotFiniteError as error:
        raise NonFinite(f"{error}: there is no gradient") from error
    gradient = adapter.flat.grad.clone()
    if not bool(torch.isfinite(gradient).all()):
        raise NonFinite("the gradient is not finite")
    return gradient


def policy_metrics(sums: Sums, kl_coef: float, sequences: int) -> dict[str, float | None]:
    metrics, tokens = loss_metrics(sums), float(sums["tokens"])
    if tokens:
        metrics |= {key: float(sums[name]) / tokens for key, name in MEANS.items() if name in sums}
    if float(sums.get("taught_tokens", 0.0)):
        metrics["distillation/divergence"] = float(sums["divergence"] / sums["taught_tokens"])
    return metrics | kl_metrics(sums, kl_coef, sequences)


def kl_metrics(sums: Sums, kl_coef: float, sequences: int) -> dict[str, float]:
    if "kl" not in sums or sums["tokens"] == 0:
        return {}
    kl = float(sums["kl"])
    metrics = {"kl": kl / float(sums["tokens"]), "objective/kl": float(sums["sequence_kl"] / sums["sequences"])}
    if kl_coef:
        metrics["objective/non_score_reward"] = 0.0 - kl_coef * kl / sequences  # not a negation: no −0.0 in the rows
    return metrics
