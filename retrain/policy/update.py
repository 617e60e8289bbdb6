"""One optimizer step of one lane: policy gradient over micro-batches, global denominators, clipping, AdamW.

Loss normalisers count every token and sequence of the optimizer step, also those of groups without signal, which
cost no backward pass; so neither micro-batching nor skipping changes the update. What is minimised is an
``policy.objective.Objective``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from retrain.errors import NonFinite
from retrain.maths.losses import MISMATCH_METRICS, RATIO_METRICS, NotFiniteError, Sums, add_sums, loss_metrics
from retrain.policy.backbone import as_in_forward, backbone_of, checkpointed
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget, is_out_of_memory
from retrain.policy.logprobs import collate, split_microbatches, token_logprobs
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.objective import Objective, TokenScores
from retrain.policy.packing import Layout
from retrain.policy.protocol import Denominators, TrainBatch, Want
from retrain.policy.threads import Workers
from retrain.rng import torch_seed
from retrain.types import Sample

FUSED = ("cuda",)
"""Devices on which AdamW is one kernel."""
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


def new_optimizer(
    adapter: Adapter, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the adapter's flat master weights; on a GPU as one kernel, which needs no memory besides the moments
    and therefore changes all or nothing."""
    kind: dict[str, Any] = {"fused": True} if adapter.flat.device.type in FUSED else {"foreach": False}
    return torch.optim.AdamW([adapter.flat], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **kind)


def apply_gradient(optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer, whose first one makes its moments: where memory runs out before anything was changed,
    a second try begins anew with what torch can give back. Raises what the optimizer raised."""
    fresh, before = not optimizer.state, _versions(optimizer)
    try:
        optimizer.step()
        return
    except (MemoryError, RuntimeError) as error:
        changed = any(_versions(optimizer)[tensor] != version for tensor, version in before.items())
        if changed or not is_out_of_memory(error):
            raise
    if fresh:
        optimizer.state.clear()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    optimizer.step()


def _versions(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """How often every tensor of an optimizer, weights and moments, has been changed in place."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return {tensor: tensor._version for tensor in (*weights, *moments) if isinstance(tensor, torch.Tensor)}


def train_step(
    base: BaseModel,
    lanes: Lanes,
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    batch: TrainBatch,
    objective: Objective,
    lr: float,
    *,
    budget: Budget,
    grad_clip_norm: float = 1.0,
    dropout: float = 0.0,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Accumulate gradients over all samples and take one optimizer step.

    ``budget`` bounds the micro-batches and learns from steps that run out of memory; ``workers`` do micro-batches
    side by side, which changes no bit of the result; ``dropout`` is sampled from a stream of ``batch.stream``. Returns
    the catalogue's update metrics. With no samples (no group had signal) nothing changes and the loss is 0; those of
    ``batch.probe`` then go through the forward pass, so that sampler and trainer are compared in every step. Raises
    NonFinite when the loss or the gradient is not finite and RunFailed when one sample does not fit in memory; the
    weights are then untouched.
    """
    samples = batch.samples
    metrics: dict[str, Any] = {"optim/lr": lr, "num_datums": len(samples)}
    trained = [sample for sample in samples if sample.loss_mask.any()]
    if not trained:
        metrics |= {"num_datums": 0, "loss": 0.0, "reported_loss": 0.0, **dict.fromkeys(RATIO_METRICS)}
        if not batch.probe:
            return metrics
    assert adapter.flat.grad is not None
    stream = (*batch.stream, "dropout", batch.step)
    asked = objective if trained else objective.without_gradient()
    work = _Work(base, lanes, adapter, asked, batch.denominators, dropout, stream)
    try:
        loss_total, sums, clock = work.gradient(trained or batch.probe, budget, workers or Workers())
    except NotFiniteError as error:
        raise NonFinite(f"{error}: the update was not applied") from error
    ratios = loss_metrics(sums)
    metrics |= _kl_metrics(sums, objective.kl_coef, len(samples if trained else batch.probe))
    if not trained:
        return metrics | {key: ratios[key] for key in MISMATCH_METRICS} | clock.metrics()
    norm = float(adapter.flat.grad.norm())
    if not (math.isfinite(loss_total) and math.isfinite(norm)):
        raise NonFinite(f"loss {loss_total} with gradient norm {norm}: the update was not applied")
    clipped = grad_clip_norm > 0 and norm > grad_clip_norm
    if clipped:
        adapter.flat.grad.mul_(grad_clip_norm / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = lr
    clock.begin()
    apply_gradient(optimizer)
    clock.lap("weight_sync_trainer")
    metrics.update({"loss": loss_total, "reported_loss": loss_total})
    metrics.update({"optim/grad_norm": norm, "optim/grad_clipped": clipped})
    return metrics | ratios | clock.metrics()


def _kl_metrics(sums: Sums, kl_coef: float, sequences: int) -> dict[str, float]:
    """KL to the base per token, and what it takes from the reward of a rollout; nothing where it was not asked."""
    if "kl" not in sums or sums["tokens"] == 0:
        return {}
    total = float(sums["kl"])
    return {"kl": total / float(sums["tokens"]), "objective/non_score_reward": 0.0 - kl_coef * total / sequences}


@dataclass
class _Part:
    """What one micro-batch gave: its share of the loss and the statistics, and its gradient unless accumulated."""

    loss: torch.Tensor
    sums: Sums
    clock: _Clock
    gradient: torch.Tensor | None


@dataclass
class _Work:
    """The forward and backward passes of one optimizer step."""

    base: BaseModel
    lanes: Lanes
    adapter: Adapter
    objective: Objective
    denominators: Denominators
    dropout: float
    dropout_stream: tuple[int | str, ...]

    def gradient(self, samples: Sequence[Sample], budget: Budget, workers: Workers) -> tuple[float, Sums, _Clock]:
        """Fill ``adapter.flat.grad``; returns the loss, the statistics and the times. Made again with smaller
        micro-batches for as long as memory runs out."""
        budget.note(*backbone_of(self.base).notes)
        while True:
            batches = self._micro_batches(samples, budget.tokens)
            reason = self._attempt(batches, budget, workers)
            if not isinstance(reason, str):
                break
            if self.base.device.type == "cuda":
                torch.cuda.empty_cache()
            budget.shrink([len(part) for part, _ in batches], [len(sample) for sample in samples], reason)
        sums, clock = None, _Clock(self.base.device)
        for part in reason:
            sums = add_sums(sums, part.sums)
            clock.add(part.clock, 1 / min(workers.count, len(reason)))
        clock.microbatches = len(reason)
        return float(torch.stack([part.loss for part in reason]).sum()), sums or {}, clock

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

    def _attempt(
        self, batches: Sequence[tuple[list[Sample], bool]], budget: Budget, workers: Workers
    ) -> list[_Part] | str:
        """All micro-batches; the words of the error when memory ran out. The error itself, which keeps every tensor
        of the failed pass alive, is gone then."""
        flat_grad = self.adapter.flat.grad
        assert flat_grad is not None
        flat_grad.zero_()
        apart = workers.count > 1 and len(batches) > 1
        try:
            numbered = [(i, part, wanted) for i, (part, wanted) in enumerate(batches)]
            parts = workers.map(lambda item: self._micro_batch(*item, budget.checkpointing, apart), numbered)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return str(error)
        for part in parts:  # in order, so that the sum does not depend on who was first
            if part.gradient is not None:
                flat_grad += part.gradient
        return parts

    def _micro_batch(self, number: int, samples: list[Sample], wanted: bool, twice: bool, apart: bool) -> _Part:
        """One forward pass and, if ``wanted``, one backward pass, into ``adapter.flat.grad`` or a tensor ``apart``."""
        base, objective, clock = self.base, self.objective, _Clock(self.base.device)
        batch = collate(samples, base, share=self.dropout == 0)
        clock.lap("prepare_tensors")
        batch = batch.to(base.device)
        clock.lap("data_to_device")
        if self.dropout > 0:
            torch.manual_seed(torch_seed(*self.dropout_stream, number))
        reference_BT = None
        if Want.REFERENCE in objective.needs:  # no lane is active yet: the frozen base itself
            with torch.no_grad():
                reference_BT, _ = token_logprobs(base, batch, objective.temperature)
            clock.lap("compute_kl")
        layers = checkpointed(lambda: self._again(batch.layout)) if twice and wanted else nullcontext()
        gradient = None
        with torch.set_grad_enabled(wanted), self.lanes.single(self.adapter, self.dropout), layers:
            logprobs_BT, entropy_BT = token_logprobs(
                base, batch, objective.temperature, entropy=Want.ENTROPY in objective.needs, lap=clock.lap
            )
            clock.lap("forward")
            scores = TokenScores(logprobs_BT, entropy_BT, reference_BT)
            loss, sums = objective.loss(batch, scores, self.denominators, clock.lap)
            clock.lap("loss_computation")
            if wanted and apart:
                gradient = self.adapter.gradient_of(loss)
            elif wanted:
                loss.backward()
            clock.lap("backward")
        return _Part(loss.detach(), sums, clock, gradient)

    @contextmanager
    def _again(self, layout: Layout) -> Iterator[None]:
        """What a layer finds when it is computed a second time, maybe in a thread of autograd's."""
        with self.lanes.single(self.adapter, self.dropout), as_in_forward(layout):
            yield


class _Clock:
    """Seconds of ``UPDATE_PARTS``; on a GPU each lap waits for the device, a few times per micro-batch."""

    def __init__(self, device: torch.device):
        self.device, self.microbatches = device, 0
        self.totals: dict[str, float] = {part: 0.0 for part in UPDATE_PARTS}
        self.begin()

    def begin(self) -> None:
        """The next lap counts from here."""
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as ``part``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.totals[part] += now - self.last
        self.last = now

    def add(self, other: _Clock, share: float) -> None:
        """Count another's laps too; ``share`` of their time, when several ran at once."""
        for part, seconds in other.totals.items():
            self.totals[part] += share * seconds

    def metrics(self) -> dict[str, float]:
        """The catalogue's timing_* keys."""
        timings = {f"timing_{part}_total": seconds for part, seconds in self.totals.items()}
        return timings | {"timing_microbatches": self.microbatches}
