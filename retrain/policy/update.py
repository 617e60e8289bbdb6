"""One optimizer step of one lane: policy gradient over micro-batches, global denominators, clipping, AdamW.

Loss normalisers count every token and sequence of the optimizer step, also those of groups without signal, which
cost no backward pass; so neither micro-batching nor skipping changes the update. What is minimised is an
``policy.objective.Objective``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from retrain.errors import NonFinite
from retrain.maths.losses import MISMATCH_METRICS, RATIO_METRICS, NotFiniteError, Sums, add_sums, loss_metrics
from retrain.policy.backbone import as_in_forward, backbone_of, checkpointed
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget, is_out_of_memory
from retrain.policy.context import view_of
from retrain.policy.critic import Critic, ValueHead
from retrain.policy.divergence import head_divergence
from retrain.policy.head import Head
from retrain.policy.logprobs import MicroBatch, by_place, collate, hidden_states, split_microbatches, token_logprobs
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.objective import Objective, TeacherTerm, TokenScores, ValueTerm
from retrain.policy.optimizer import Step
from retrain.policy.packing import Layout
from retrain.policy.protocol import PROBE_SIZE, TrainBatch, Want
from retrain.policy.rounded import products_in_bfloat16
from retrain.policy.teacher import WholeTeacher
from retrain.policy.threads import Workers
from retrain.rng import torch_seed
from retrain.types import Sample, without_advantages

UPDATE_PARTS = (
    "forward",
    "backward",
    "loss_computation",
    "compute_kl",
    "compute_entropy",
    "data_to_device",
    "prepare_tensors",
    "weight_sync_trainer",
)
"""The parts that an update's seconds are counted by; the catalogue describes each (``timing_<part>_total``)."""


Numbered = tuple[int, list[Sample], bool]
"""A micro-batch: its place in the step, which names its dropout, its samples, and whether it has a gradient."""


class Shares(Protocol):
    """Other processes that do a part of the micro-batches (``policy.shares``); ``count`` includes this one."""

    @property
    def count(self) -> int: ...

    def parts(self, work: Work, batches: Sequence[Numbered], twice: bool) -> list[Part]:
        """``Work.parts`` of all of these, in their order, each process having done a share."""
        ...


LEAST_SHARED_TOKENS = 512  # Tokens of a micro-batch that is not cut further so that every process has one


@dataclass(frozen=True)
class Passes:
    """How forward and backward passes are made, for all updates of a run.

    ``budget`` bounds the micro-batches and learns from steps that run out of memory; ``workers`` do micro-batches
    side by side, which changes no bit of the result; ``bfloat16`` has an fp32 base multiply in it
    (``policy.rounded``); ``shares`` are other processes that do some of them; ``teacher`` gives the distributions that
    a term of the loss compares with.
    """

    lanes: Lanes
    budget: Budget
    workers: Workers = field(default_factory=Workers)
    dropout: float = 0.0
    bfloat16: bool = False
    shares: Shares | None = None
    teacher: WholeTeacher | None = None

    @property
    def side_by_side(self) -> int:
        """How many micro-batches are under way at once."""
        return self.workers.count * (1 if self.shares is None else self.shares.count)

    @property
    def base(self) -> BaseModel:
        return self.lanes.base


def train_step(
    passes: Passes,
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    batch: TrainBatch,
    objective: Objective,
    lr: float,
    *,
    grad_clip_norm: float = 1.0,
    critic: Critic | None = None,
) -> dict[str, Any]:
    """Accumulate gradients over all samples and take one optimizer step.

    Dropout is sampled from a stream of ``batch.stream``. A ``critic`` learns from the same samples, in a pass of its
    own unless it reads the policy's adapter; in its warm-up nothing else changes. Returns the catalogue's
    update metrics. With no samples (no group had signal) nothing changes and the loss is 0; those of ``batch.probe``
    then go through the forward pass, so that sampler and trainer are compared in every step. Raises NonFinite when a
    loss or a gradient is not finite and RunFailed when one sample does not fit in memory; the weights are then
    untouched.
    """
    samples = batch.samples
    warming = critic is not None and batch.step < critic.warmup_steps
    trained = [] if warming else [sample for sample in samples if sample.loss_mask.any()]
    probe = [without_advantages(sample) for sample in samples[:PROBE_SIZE]] if warming else batch.probe
    metrics: dict[str, Any] = {"optim/lr": lr, "num_datums": len(samples)}
    if not trained:
        metrics |= {"num_datums": 0, "loss": 0.0, "reported_loss": 0.0, **dict.fromkeys(RATIO_METRICS)}
    work = partial(Work, passes, batch)
    planned: list[tuple[Work, Sequence[Sample]]] = []
    shared = critic if critic is not None and critic.adapter is None and samples and not warming else None
    if shared is not None:
        planned.append((work(adapter, objective, head=shared.head), samples))
    elif trained or probe:
        asked = objective if trained else objective.without_gradient()
        planned.append((work(adapter, asked.without(ValueTerm)), trained or probe))
    if critic is not None and samples and shared is None:
        lane, frozen = critic.adapter or adapter, critic.adapter is None
        planned.append((work(lane, objective.alone(ValueTerm), head=critic.head, frozen=frozen), samples))
    steps, clock = list[Step](), Clock(passes.base.device)
    try:
        for each, used in planned:
            loss, sums, own = each.gradient(used)
            clock.add(own, 1.0)
            clock.microbatches += own.microbatches
            if Want.LOGPROBS in each.objective.needs:
                metrics |= _policy_metrics(sums, objective.kl_coef, len(samples if trained else probe), bool(trained))
                if critic is not None:
                    metrics.pop("objective/kl", None)  # the credit step has it of all completions
                if trained or shared is not None:
                    metrics |= {"loss": loss, "reported_loss": loss}
                    steps.append(Step(optimizer, [adapter.flat], lr, loss))
            if critic is not None and each.head is not None:
                metrics |= _value_metrics(sums)
                steps.append(critic.step(lr, loss))
    except NotFiniteError as error:
        raise NonFinite(f"{error}: the update was not applied") from error
    if not planned:
        return metrics
    for step in steps:
        step.check()
    clock.begin()
    for step in steps:
        metrics |= step.take(grad_clip_norm)
    clock.lap("weight_sync_trainer")
    return metrics | clock.metrics()


def batch_gradient(
    passes: Passes, adapter: Adapter, batch: TrainBatch, objective: Objective, *, critic: Critic | None = None
) -> torch.Tensor:
    """The gradient of the adapter that ``train_step`` would clip and give to the optimizer, a copy [D] in fp32.

    A critic's warm-up is not looked at: in it ``train_step`` leaves the policy alone, and this is the gradient that
    follows it. No weight, no optimizer and no random stream changes. 0 where nothing trains. Raises NonFinite when it
    is not finite, RunFailed when one sample does not fit in memory.
    """
    assert adapter.flat.grad is not None
    shared = critic if critic is not None and critic.adapter is None else None
    samples = batch.samples if shared is not None else [one for one in batch.samples if one.loss_mask.any()]
    if not samples:
        return torch.zeros_like(adapter.flat.grad)
    wanted = objective if shared is not None else objective.without(ValueTerm)
    work, device = Work(passes, batch, adapter, wanted, None if shared is None else shared.head), passes.base.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            work.gradient(samples)
    except NotFiniteError as error:
        raise NonFinite(f"{error}: there is no gradient") from error
    found = adapter.flat.grad.clone()
    if not bool(torch.isfinite(found).all()):
        raise NonFinite("the gradient is not finite")
    return found


def _policy_metrics(sums: Sums, kl_coef: float, sequences: int, trained: bool) -> dict[str, Any]:
    """Ratios and clipping where something trained, else the comparison of sampler and trainer alone; the means that
    terms have asked for."""
    ratios, tokens = loss_metrics(sums), float(sums["tokens"])
    logged = {"loss/policy_avg": "policy_loss", "policy/entropy_avg": "entropy"}
    means = {key: float(sums[name]) / tokens for key, name in logged.items() if name in sums and tokens}
    if float(sums.get("taught_tokens", 0.0)):
        means["distillation/divergence"] = float(sums["divergence"] / sums["taught_tokens"])
    if not trained:
        return {key: ratios[key] for key in MISMATCH_METRICS} | _kl_metrics(sums, kl_coef, sequences)
    return ratios | means | _kl_metrics(sums, kl_coef, sequences)


def _value_metrics(sums: Sums) -> dict[str, float]:
    """Means over all action tokens."""
    tokens = float(sums["value_tokens"])
    return {
        "loss/value_avg": float(sums["value_loss"]) / tokens,
        "val/clipfrac_avg": float(sums["value_clipped"]) / tokens,
    }


def _kl_metrics(sums: Sums, kl_coef: float, sequences: int) -> dict[str, float]:
    """Return KL to the base per token and per sequence, and what it takes from the reward of a rollout; nothing where
    it was not computed."""
    if "kl" not in sums or sums["tokens"] == 0:
        return {}
    total = float(sums["kl"])
    penalty = {"objective/non_score_reward": 0.0 - kl_coef * total / sequences} if kl_coef else {}
    per_sequence = float(sums["sequence_kl"] / sums["sequences"])
    return {"kl": total / float(sums["tokens"]), "objective/kl": per_sequence, **penalty}


@dataclass
class Part:
    """What one micro-batch gave: its share of the loss and the statistics, and its gradients unless they are in the
    buffers or a part before it already."""

    loss: torch.Tensor
    sums: Sums
    clock: Clock
    gradients: list[torch.Tensor]


@dataclass
class Work:
    """The forward and backward passes of one optimizer step, with this adapter; ``head`` gives values of the same
    hidden states. A ``frozen`` adapter has no gradient, only the head has."""

    passes: Passes
    batch: TrainBatch
    adapter: Adapter
    objective: Objective
    head: ValueHead | None = None
    frozen: bool = False

    @property
    def base(self) -> BaseModel:
        return self.passes.base

    @property
    def dropout_stream(self) -> tuple[int | str, ...]:
        """The name of the random stream of this update's dropout."""
        batch = self.batch
        return (*batch.stream, "dropout", batch.step, *([batch.update] if batch.update else []))

    @property
    def buffers(self) -> list[torch.Tensor]:
        weights = [] if self.frozen else [self.adapter.flat]
        grads = [flat.grad for flat in (*weights, *([] if self.head is None else [self.head.flat]))]
        return [grad for grad in grads if grad is not None]

    def gradient(self, samples: Sequence[Sample]) -> tuple[float, Sums, Clock]:
        """Fill ``buffers``; returns the loss, the statistics and the times. Made again with smaller
        micro-batches for as long as memory runs out."""
        budget = self.passes.budget
        budget.note(*backbone_of(self.base).notes)
        while True:
            batches = self._enough(samples, budget.tokens)
            reason = self._attempt(batches)
            if not isinstance(reason, str):
                break
            if self.base.device.type == "cuda":
                torch.cuda.empty_cache()
            budget.shrink([len(part) for part, _ in batches], [len(sample) for sample in samples], reason)
        sums, clock = None, Clock(self.base.device)
        for part in reason:
            sums = add_sums(sums, part.sums)
            clock.add(part.clock, 1 / min(self.passes.side_by_side, len(reason)))
        clock.microbatches = len(reason)
        return float(torch.stack([part.loss for part in reason]).sum()), sums or {}, clock

    def _enough(self, samples: Sequence[Sample], tokens: int) -> list[tuple[list[Sample], bool]]:
        """Micro-batches of so many tokens; smaller ones where several processes would not have one each, as long as
        that pays."""
        batches, shares = self._micro_batches(samples, tokens), self.passes.shares
        while shares is not None and len(batches) < min(shares.count, len(samples)) and tokens > LEAST_SHARED_TOKENS:
            tokens = max(LEAST_SHARED_TOKENS, min(tokens, sum(map(len, samples))) // 2)
            batches = self._micro_batches(samples, tokens)
        return batches

    def _micro_batches(self, samples: Sequence[Sample], tokens: int) -> list[tuple[list[Sample], bool]]:
        """The samples in micro-batches, each with whether it has a gradient.

        A sample whose advantages are all 0 has none unless some term of the loss wants every sequence; it still counts
        in the statistics, which a forward pass gives.
        """
        batches, always = [], self.objective.every_sequence
        signal = [always or bool(sample.advantages[sample.loss_mask].any()) for sample in samples]
        for wanted in (True, False):
            chosen = [sample for sample, has in zip(samples, signal, strict=True) if has == wanted]
            for indices in split_microbatches(chosen, tokens, packed=backbone_of(self.base).packs):
                batches.append(([chosen[i] for i in indices], wanted))
        return batches

    def _attempt(self, batches: Sequence[tuple[list[Sample], bool]]) -> list[Part] | str:
        """All micro-batches; the words of the error when memory ran out. The error itself, which keeps every tensor
        of the failed pass alive, is gone then."""
        buffers, twice, shares = self.buffers, self.passes.budget.checkpointing, self.passes.shares
        for buffer in buffers:
            buffer.zero_()
        apart = self.passes.workers.count > 1 and len(batches) > 1
        try:
            numbered = [(i, part, wanted) for i, (part, wanted) in enumerate(batches)]
            parts = self.parts(numbered, twice, apart) if shares is None else shares.parts(self, numbered, twice)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return str(error)
        for part in parts:  # in order, so that the sum does not depend on who was first
            for buffer, gradient in zip(buffers, part.gradients, strict=False):
                buffer += gradient
        return parts

    def parts(self, batches: Sequence[Numbered], twice: bool, apart: bool) -> list[Part]:
        """The passes of these micro-batches, their gradients added to ``buffers`` or in tensors ``apart``; ``twice``
        computes layers again in the backward pass instead of keeping them."""
        return self.passes.workers.map(lambda item: self._micro_batch(*item, twice, apart), batches)

    def summed_parts(self, batches: Sequence[Numbered], twice: bool) -> list[Part]:
        """The same with the sum of all gradients, in fp64, in the first of the parts; no more of them than there are
        workers are in memory at once."""
        totals = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in self.buffers]
        parts, count = list[Part](), self.passes.workers.count
        for begin in range(0, len(batches), count):
            for part in self.parts(batches[begin : begin + count], twice, apart=True):
                for total, gradient in zip(totals, part.gradients, strict=False):
                    total += gradient
                parts.append(replace(part, gradients=[]))
        return [replace(parts[0], gradients=totals), *parts[1:]] if parts else []

    def _micro_batch(self, number: int, samples: list[Sample], wanted: bool, twice: bool, apart: bool) -> Part:
        """One forward pass and, if ``wanted``, one backward pass, into ``buffers`` or tensors ``apart``."""
        with products_in_bfloat16(self.passes.bfloat16):
            return self._passes(number, samples, wanted, twice, apart)

    def _passes(self, number: int, samples: list[Sample], wanted: bool, twice: bool, apart: bool) -> Part:
        base, objective, clock = self.base, self.objective, Clock(self.base.device)
        batch = collate(samples, base, share=self.passes.dropout == 0)
        clock.lap("prepare_tensors")
        batch = batch.to(base.device)
        clock.lap("data_to_device")
        if self.passes.dropout > 0:
            torch.manual_seed(torch_seed(*self.dropout_stream, number))
        reference_BT = None
        if Want.REFERENCE in objective.needs:  # no lane is active yet: the frozen base itself
            with torch.no_grad():
                reference_BT, _ = token_logprobs(base, batch, objective.temperature)
            clock.lap("compute_kl")
        taught = None
        if Want.TEACHER in objective.needs:
            assert self.passes.teacher is not None, "a term of the loss wants a teacher"
            taught = self.passes.teacher.states(self.passes.lanes, self.adapter, list(map(view_of, samples)))
            clock.lap("compute_kl")
        layers = checkpointed(lambda: self._again(batch.layout)) if twice and wanted else nullcontext()
        gradients = []
        with torch.set_grad_enabled(wanted), self._active(), layers:
            scores = self._scores(batch, clock, taught)
            clock.lap("forward")
            if taught is not None:
                spoken_B1 = torch.tensor([[sample.teacher_prompt is not None] for sample in samples])
                scores = replace(scores, taught_BT=batch.action_BT & spoken_B1.to(base.device))
            if scores.logprobs_BT is not None and self.batch.keep_logprobs:
                _leave(samples, scores.logprobs_BT, batch.action_BT)
            scores = replace(scores, reference_BT=reference_BT)
            loss, sums = objective.loss(batch, scores, self.batch.denominators, clock.lap)
            clock.lap("loss_computation")
            if wanted and apart:
                gradients = self._gradients(loss)
            elif wanted:
                loss.backward()
            clock.lap("backward")
        return Part(loss.detach(), sums, clock, gradients)

    def _scores(self, batch: MicroBatch, clock: Clock, taught: tuple[torch.Tensor, Head] | None = None) -> TokenScores:
        """What the objective reads, of the adapter that is active; ``taught`` are a teacher's hidden states and output
        layer."""
        needs, objective = self.objective.needs, self.objective
        hidden_MH, values_BT, divergence_BT = None, None, None
        if self.head is not None and Want.VALUES in needs:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                hidden_MH = hidden_states(self.base, batch)
            values_BT = by_place(self.head(hidden_MH), batch)
        if Want.LOGPROBS not in needs:
            return TokenScores(values_BT=values_BT)
        if taught is not None:
            hidden_MH = hidden_states(self.base, batch) if hidden_MH is None else hidden_MH
            divergence_BT = by_place(self._divergence(hidden_MH, *taught), batch)
        logprobs_BT, entropy_BT = token_logprobs(
            self.base,
            batch,
            objective.temperature,
            entropy=Want.ENTROPY in needs,
            entropy_gradient=objective.entropy_gradient,
            lap=clock.lap,
            hidden_MH=hidden_MH,
        )
        return TokenScores(logprobs_BT, entropy_BT, values_BT=values_BT, divergence_BT=divergence_BT)

    def _divergence(self, hidden_MH: torch.Tensor, teacher_MH: torch.Tensor, teacher: Head) -> torch.Tensor:
        """From the teacher's distributions [M], as the term of the loss wants it."""
        term = next(each for each in self.objective.terms if isinstance(each, TeacherTerm))
        head = backbone_of(self.base).head
        assert head is not None, "a model that gives hidden states has an output layer"
        how = {"alpha": term.alpha, "top": term.top, "temperature": self.objective.temperature}
        return head_divergence(head, hidden_MH, teacher, teacher_MH, **how)

    def _gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of ``loss`` in the order of ``buffers``, which are left alone."""
        views = [] if self.frozen else self.adapter.views
        weights = [*views, *([] if self.head is None else [self.head.flat])]
        found = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        flat = [torch.cat([gradient.flatten() for gradient in found[: len(views)]])] if views else []
        return [*flat, *found[len(views) :]]

    @contextmanager
    def _again(self, layout: Layout) -> Iterator[None]:
        """What a layer finds when it is computed a second time, maybe in a thread of autograd's."""
        with products_in_bfloat16(self.passes.bfloat16), self._active(), as_in_forward(layout):
            yield

    def _active(self) -> AbstractContextManager[None]:
        return self.passes.lanes.single(self.adapter, self.passes.dropout)


def _leave(samples: Sequence[Sample], logprobs_BT: torch.Tensor, action_BT: torch.Tensor) -> None:
    """Keep on each sample what the pass found of its sampled tokens."""
    rows, own = logprobs_BT.detach().float().cpu().numpy(), action_BT.cpu().numpy()
    for sample, row_T, own_T in zip(samples, rows, own, strict=True):
        sample.trainer_logprobs = row_T[own_T]


class Clock:
    """Seconds of ``UPDATE_PARTS``; on a GPU each lap waits for the device, a few times per micro-batch."""

    def __init__(self, device: torch.device):
        self.device, self.microbatches = device, 0
        self.totals: dict[str, float] = {part: 0.0 for part in UPDATE_PARTS}
        self.begin()

    def begin(self) -> None:
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as ``part``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.totals[part] += now - self.last
        self.last = now

    def add(self, other: Clock, share: float) -> None:
        """Count another's laps too; ``share`` of their time, when several ran at once."""
        for part, seconds in other.totals.items():
            self.totals[part] += share * seconds

    def metrics(self) -> dict[str, float]:
        """The catalogue's timing_* keys."""
        timings = {f"timing_{part}_total": seconds for part, seconds in self.totals.items()}
        return timings | {"timing_microbatches": self.microbatches}
