"""One optimizer step of one lane: policy gradient over micro-batches, global denominators, clipping, AdamW.

Loss normalisers count every token and sequence of the optimizer step, also those of groups without signal, which
cost no backward pass; so neither micro-batching nor skipping changes the update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrain.errors import RunFailed
from retrain.maths.losses import RATIO_METRICS, Sums, add_sums, kl_terms, loss_metrics, policy_loss, token_weights
from retrain.policy.base import BaseModel
from retrain.policy.logprobs import MicroBatch, TrainSequence, collate, split_microbatches, token_logprobs
from retrain.policy.lora import Adapter, Lanes
from retrain.rng import torch_seed


@dataclass(frozen=True)
class LossSettings:
    """What the update needs to know of the configuration."""

    loss: str = "ppo"
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
    """Padded tokens of a micro-batch: bounded so that fp32 logits and their softmax stay within a few GiB on a GPU,
    and in a size that the caches of a CPU like."""
    if base.device.type == "cpu":
        return 4096
    logits_bytes = 4 * 4 * base.vocab_size
    free, _ = torch.cuda.mem_get_info(base.device)
    hidden_bytes = (
        40 * base.model.config.get_text_config().hidden_size * base.model.config.get_text_config().num_hidden_layers
    )
    return max(512, int(0.4 * free) // (logits_bytes + hidden_bytes))


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
) -> dict[str, Any]:
    """Accumulate gradients over all sequences and take one optimizer step.

    Returns the catalogue's update metrics. With no sequences (no group had signal) nothing changes and the loss is
    0. Raises RunFailed when the loss or the gradient is not finite; the weights are then untouched.
    """
    metrics: dict[str, Any] = {"optim/lr": lr, "num_datums": len(sequences)}
    if not sequences:
        return metrics | {"loss": 0.0, "reported_loss": 0.0} | dict.fromkeys(RATIO_METRICS)
    assert adapter.flat.grad is not None
    adapter.flat.grad.zero_()
    sums: Sums | None = None
    losses, kl = [], []
    clock = _Clock(base.device)
    for number, indices in enumerate(split_microbatches(sequences, settings.micro_batch_tokens)):
        batch = collate([sequences[i] for i in indices], base)
        clock.lap("prepare_tensors")
        if settings.dropout > 0:
            torch.manual_seed(torch_seed(*dropout_stream, number))
        with lanes.single(adapter, settings.dropout):
            logprobs_BT = token_logprobs(base, batch, settings.temperature)[0]
            clock.lap("forward")
            loss, part = microbatch_loss(batch, logprobs_BT, settings, denominators)
            clock.lap("loss_computation")
            loss.backward()
            clock.lap("backward")
        losses.append(loss.detach())
        sums = add_sums(sums, part)
        if settings.log_kl:
            with torch.no_grad():  # no lane active: the frozen base
                reference_BT = token_logprobs(base, batch, settings.temperature)[0]
            kl.append(kl_terms("k3", logprobs_BT.detach(), reference_BT, batch.loss_mask_BT).sum())
    loss_total = float(torch.stack(losses).sum())
    norm = float(adapter.flat.grad.norm())
    if not (math.isfinite(loss_total) and math.isfinite(norm)):
        raise RunFailed(f"loss {loss_total} with gradient norm {norm}: the update was not applied")
    clipped = settings.grad_clip_norm > 0 and norm > settings.grad_clip_norm
    if clipped:
        adapter.flat.grad.mul_(settings.grad_clip_norm / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    metrics.update({"loss": loss_total, "reported_loss": loss_total})
    metrics.update({"optim/grad_norm": norm, "optim/grad_clipped": clipped})
    if kl and sums is not None:
        metrics["kl"] = float(torch.stack(kl).sum() / sums["tokens"])
    return metrics | loss_metrics(sums or {}) | clock.metrics()


class _Clock:
    """Seconds of the update's parts; on a GPU each lap waits for the device, a few times per micro-batch."""

    def __init__(self, device: torch.device):
        self.device, self.totals, self.laps = device, dict[str, float](), dict[str, int]()
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as ``part``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.totals[part] = self.totals.get(part, 0.0) + now - self.last
        self.laps[part] = self.laps.get(part, 0) + 1
        self.last = now

    def metrics(self) -> dict[str, float]:
        """The catalogue's timing_* keys."""
        found = {f"timing_{part}_total": seconds for part, seconds in self.totals.items()}
        return found | {
            f"timing_{part}_microbatch_mean": found[f"timing_{part}_total"] / n for part, n in self.laps.items()
        }


def microbatch_loss(
    batch: MicroBatch, logprobs_BT: torch.Tensor, settings: LossSettings, denominators: Denominators
) -> tuple[torch.Tensor, Sums]:
    """This micro-batch's share of the step's loss (0-dim), and its statistics."""
    per_token_BT, sums = policy_loss(
        settings.loss,
        logprobs_BT,
        batch.sampler_logprobs_BT,
        batch.advantages_BT,
        batch.loss_mask_BT,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        ratio_cap=settings.ratio_cap,
    )
    weights_BT = token_weights(
        settings.normalizer,
        batch.loss_mask_BT,
        total_tokens=denominators.tokens,
        total_sequences=denominators.sequences,
        max_tokens=settings.max_tokens,
        denominator_mask_B_T=batch.completion_BT if denominators.all_tokens else None,
    )
    return (per_token_BT * weights_BT).sum(), sums
