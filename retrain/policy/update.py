"""One optimizer step of one lane: policy gradient over micro-batches, global denominators, clipping, AdamW.

Loss normalisers count every token and sequence of the optimizer step, also those of groups without signal, which
cost no backward pass; so neither micro-batching nor skipping changes the update.

Beside the policy loss, with the same weights per token: the KL divergence to the base (k2, whose gradient is the
reverse KL's; the base is the model with no adapter active) and a bonus on the entropy of the whole distribution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrain.errors import NonFinite
from retrain.maths.losses import (
    MISMATCH_METRICS,
    RATIO_METRICS,
    Loss,
    NotFiniteError,
    Sums,
    add_sums,
    entropy_loss,
    importance_ratio,
    kl_terms,
    log_ratio,
    loss_metrics,
    mismatch_weights,
    policy_loss,
    ratio_sums,
    token_weights,
)
from retrain.models.sizes import cpu_token_budget
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget, is_out_of_memory
from retrain.policy.head import Lap, no_lap
from retrain.policy.logprobs import MicroBatch, TrainSequence, collate, split_microbatches, token_logprobs
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.memory import available_memory, kept_bytes
from retrain.policy.packing import Layout
from retrain.policy.threads import Workers
from retrain.policy.trunk import as_in_forward, checkpointed, trunk_of
from retrain.rng import torch_seed

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
"""What the seconds of an update are told apart by; the catalogue says what each is (``timing_<part>_total``)."""


@dataclass(frozen=True)
class LossSettings:
    """What the update needs to know of the configuration."""

    loss: Loss = "ppo"
    normalizer: str = "tokens"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 5.0
    temperature: float = 1.0
    max_tokens: int = 256
    micro_batch_tokens: int = 16384
    grad_clip_norm: float = 1.0
    dropout: float = 0.0
    log_kl: bool = False
    dual_clip: float | None = None
    tis_cap: float | None = None
    icepop_band: tuple[float, float] | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


@dataclass(frozen=True)
class Denominators:
    """Counts over *all* completions of the optimizer step, trained on or not.

    ``all_tokens``: sequence lengths count every completion token, not only those of the loss mask.
    """

    tokens: int
    sequences: int
    all_tokens: bool = False


def new_optimizer(
    adapter: Adapter, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the adapter's flat master weights."""
    return torch.optim.AdamW([adapter.flat], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)


def default_token_budget(base: BaseModel) -> int:
    """Tokens of a micro-batch: ``cpu_token_budget``; on a GPU what is kept for the backward pass fits in 40 % of the
    free memory, and no more than keeps its units busy."""
    if base.device.type == "cpu":
        return cpu_token_budget(base.weight_bytes)
    return min(32768, max(512, int(0.4 * available_memory(base.device)) // kept_bytes(base)))


def train_step(
    base: BaseModel,
    lanes: Lanes,
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    sequences: Sequence[TrainSequence],
    settings: LossSettings,
    denominators: Denominators,
    lr: float,
    dropout_stream: tuple[int | str, ...] = (),
    budget: Budget | None = None,
    workers: Workers | None = None,
    probe: Sequence[TrainSequence] = (),
) -> dict[str, Any]:
    """Accumulate gradients over all sequences and take one optimizer step.

    ``budget`` bounds the micro-batches and learns from steps that run out of memory; ``workers`` do micro-batches
    side by side, which changes no bit of the result. Returns the catalogue's update metrics. With no sequences (no
    group had signal) nothing changes and the loss is 0; the sequences of ``probe`` (without advantages) then go
    through the forward pass, so that sampler and trainer are compared in every step. Raises NonFinite when the loss
    or the gradient is not finite and RunFailed when one sequence does not fit in memory; the weights are then
    untouched.
    """
    metrics: dict[str, Any] = {"optim/lr": lr, "num_datums": len(sequences)}
    trained = [s for s in sequences if s.loss_mask_T.any()]
    if not trained:
        metrics |= {"num_datums": 0, "loss": 0.0, "reported_loss": 0.0, **dict.fromkeys(RATIO_METRICS)}
        if not probe:
            return metrics
    assert adapter.flat.grad is not None
    asked = settings if trained else _without_gradient(settings)
    work = _Work(base, lanes, adapter, asked, denominators, dropout_stream)
    try:
        loss_total, sums, clock = work.gradient(
            trained or probe, budget or Budget(settings.micro_batch_tokens), workers or Workers()
        )
    except NotFiniteError as error:
        raise NonFinite(f"{error}: the update was not applied") from error
    ratios = loss_metrics(sums)
    metrics |= _kl_metrics(sums, settings.kl_coef, len(sequences if trained else probe))
    if not trained:
        return metrics | {key: ratios[key] for key in MISMATCH_METRICS} | clock.metrics()
    norm = float(adapter.flat.grad.norm())
    if not (math.isfinite(loss_total) and math.isfinite(norm)):
        raise NonFinite(f"loss {loss_total} with gradient norm {norm}: the update was not applied")
    clipped = settings.grad_clip_norm > 0 and norm > settings.grad_clip_norm
    if clipped:
        adapter.flat.grad.mul_(settings.grad_clip_norm / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = lr
    clock.begin()
    optimizer.step()
    clock.lap("weight_sync_trainer")
    metrics.update({"loss": loss_total, "reported_loss": loss_total})
    metrics.update({"optim/grad_norm": norm, "optim/grad_clipped": clipped})
    return metrics | ratios | clock.metrics()


def _without_gradient(settings: LossSettings) -> LossSettings:
    """The same forward passes, that to the base included, with a loss that has no gradient without advantages."""
    log_kl = settings.log_kl or settings.kl_coef > 0
    return replace(settings, loss="reinforce", kl_coef=0.0, entropy_coef=0.0, log_kl=log_kl)


def _kl_metrics(sums: Sums, kl_coef: float, sequences: int) -> dict[str, float]:
    """KL to the base per token, and what it takes from the reward of a completion; nothing where it was not asked."""
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
    settings: LossSettings
    denominators: Denominators
    dropout_stream: tuple[int | str, ...]

    def gradient(
        self, sequences: Sequence[TrainSequence], budget: Budget, workers: Workers
    ) -> tuple[float, Sums, _Clock]:
        """Fill ``adapter.flat.grad``; returns the loss, the statistics and the times. Made again with smaller
        micro-batches for as long as memory runs out."""
        budget.tell(*trunk_of(self.base).notes)
        while True:
            batches = self._micro_batches(sequences, budget.tokens)
            reason = self._attempt(batches, budget, workers)
            if not isinstance(reason, str):
                break
            if self.base.device.type == "cuda":
                torch.cuda.empty_cache()
            budget.shrink([len(part) for part, _ in batches], [len(s) for s in sequences], reason)
        sums, clock = None, _Clock(self.base.device)
        for part in reason:
            sums = add_sums(sums, part.sums)
            clock.add(part.clock, 1 / min(workers.count, len(reason)))
        clock.microbatches = len(reason)
        return float(torch.stack([part.loss for part in reason]).sum()), sums or {}, clock

    def _micro_batches(self, sequences: Sequence[TrainSequence], tokens: int) -> list[tuple[list[TrainSequence], bool]]:
        """The sequences in micro-batches, each with whether it has a gradient.

        A completion whose advantages are all 0 has none unless the loss has other terms (one of the user's own may
        do anything); it still counts in the statistics, which a forward pass gives.
        """
        settings, batches = self.settings, []
        always = settings.kl_coef > 0 or settings.entropy_coef > 0 or not isinstance(settings.loss, str)
        signal = [always or bool(s.advantages_T[s.loss_mask_T].any()) for s in sequences]
        for wanted in (True, False):
            chosen = [s for s, has in zip(sequences, signal, strict=True) if has == wanted]
            for indices in split_microbatches(chosen, tokens, packed=trunk_of(self.base).packs):
                batches.append(([chosen[i] for i in indices], wanted))
        return batches

    def _attempt(
        self, batches: Sequence[tuple[list[TrainSequence], bool]], budget: Budget, workers: Workers
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

    def _micro_batch(
        self, number: int, sequences: list[TrainSequence], wanted: bool, twice: bool, apart: bool
    ) -> _Part:
        """One forward pass and, if ``wanted``, one backward pass, into ``adapter.flat.grad`` or a tensor ``apart``."""
        base, settings, clock = self.base, self.settings, _Clock(self.base.device)
        batch = collate(sequences, base, share=settings.dropout == 0)
        clock.lap("prepare_tensors")
        batch = batch.to(base.device)
        clock.lap("data_to_device")
        if settings.dropout > 0:
            torch.manual_seed(torch_seed(*self.dropout_stream, number))
        reference_BT = _reference_logprobs(base, batch, settings)
        if reference_BT is not None:
            clock.lap("compute_kl")
        layers = checkpointed(lambda: self._again(batch.layout)) if twice and wanted else nullcontext()
        gradient = None
        with torch.set_grad_enabled(wanted), self.lanes.single(self.adapter, settings.dropout), layers:
            logprobs_BT, entropy_BT = token_logprobs(
                base, batch, settings.temperature, entropy=settings.entropy_coef > 0, lap=clock.lap
            )
            clock.lap("forward")
            loss, sums = microbatch_loss(
                batch, logprobs_BT, settings, self.denominators, reference_BT, entropy_BT, clock.lap
            )
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
        with self.lanes.single(self.adapter, self.settings.dropout), as_in_forward(layout):
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
        found = {f"timing_{part}_total": seconds for part, seconds in self.totals.items()}
        return found | {"timing_microbatches": self.microbatches}


def _reference_logprobs(base: BaseModel, batch: MicroBatch, settings: LossSettings) -> torch.Tensor | None:
    """Log-probabilities [B, T] of the frozen base where they are needed; call with no lane active."""
    if not (settings.log_kl or settings.kl_coef > 0):
        return None
    with torch.no_grad():
        return token_logprobs(base, batch, settings.temperature)[0]


def microbatch_loss(
    batch: MicroBatch,
    logprobs_BT: torch.Tensor,
    settings: LossSettings,
    denominators: Denominators,
    reference_BT: torch.Tensor | None = None,
    entropy_BT: torch.Tensor | None = None,
    lap: Lap = no_lap,
) -> tuple[torch.Tensor, Sums]:
    """This micro-batch's share of the step's loss (0-dim), and its statistics.

    ``reference_BT`` (log-probabilities of the base) is needed for ``kl_coef`` and adds the sum ``kl`` (k3);
    ``entropy_BT``, with its gradient, for ``entropy_coef``. ``lap`` hears of "loss_computation" before and of
    "compute_kl" after the KL to the base.
    """
    mask_BT = batch.loss_mask_BT
    per_token_BT, sums = _policy_part(batch, logprobs_BT, settings)
    if reference_BT is not None:
        lap("loss_computation")
        sums["kl"] = kl_terms("k3", logprobs_BT.detach(), reference_BT, mask_BT).double().sum()
        if settings.kl_coef > 0:
            per_token_BT = per_token_BT + settings.kl_coef * kl_terms("k2", logprobs_BT, reference_BT, mask_BT)
        lap("compute_kl")
    if entropy_BT is not None and settings.entropy_coef > 0:
        per_token_BT = per_token_BT + entropy_loss(entropy_BT, mask_BT, settings.entropy_coef)
    weights_BT = token_weights(
        settings.normalizer,
        mask_BT,
        total_tokens=denominators.tokens,
        total_sequences=denominators.sequences,
        max_tokens=settings.max_tokens,
        denominator_mask_B_T=batch.completion_BT if denominators.all_tokens else None,
    )
    return (per_token_BT * weights_BT).sum(), sums


def _policy_part(batch: MicroBatch, logprobs_BT: torch.Tensor, settings: LossSettings) -> tuple[torch.Tensor, Sums]:
    """Policy loss [B, T] and ratio statistics, with the mismatch of sampler and trainer corrected if asked.

    A correction splits π/π_sampler into the policy's own ratio π/π_old, which the loss clips, and the weight
    π_old/π_sampler. A batch has one update, so π_old is π itself and the own ratio is 1; the statistics stay those
    against the sampler, and what they count as clipped is what the cap or the band cuts.
    """
    mask_BT, sampler_BT = batch.loss_mask_BT, batch.sampler_logprobs_BT
    cap, band = settings.tis_cap, settings.icepop_band
    corrected = cap is not None or band is not None
    old_BT = logprobs_BT.detach() if corrected else sampler_BT
    weights_BT = mismatch_weights(old_BT, sampler_BT, mask_BT, cap=cap, band=band) if corrected else None
    per_token_BT, sums = policy_loss(
        settings.loss,
        logprobs_BT,
        old_BT,
        batch.advantages_BT,
        mask_BT,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        ratio_cap=settings.ratio_cap,
        weights_B_T=weights_BT,
    )
    if corrected:
        low, high = band or (0.0, cap or math.inf)
        ratio_BT = importance_ratio(old_BT, sampler_BT, mask_BT)
        sums = ratio_sums(log_ratio(old_BT, sampler_BT, mask_BT), mask_BT, ratio_BT < low, ratio_BT > high)
    return per_token_BT, sums
