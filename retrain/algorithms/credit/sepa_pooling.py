"""SEPA, selective entropy pooling with annealing: uncertainties of execution tokens move to their completion's mean.

Order within a step: λ is read first (``sepa_lambda``), from what earlier batches showed; the batch is observed
afterwards (``sepa_observe``). A batch that reaches the gate therefore opens it for the next step, where the ramp's
clock starts at 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from retrain.algorithms.algorithm import CreditStep, StepContext
from retrain.algorithms.arrays import pad_field, token_mask, with_rows
from retrain.algorithms.credit.uncertainty import moments
from retrain.config.algorithm import Sepa
from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.types import CreditedBatch, CreditedRollout

SEPA_SCHEDULES = ("linear", "auto")
NO_VARIANCE = 1e-12


class SepaPooling(CreditStep):
    """Pools uncertainties by the λ of the step, and observes the batch for the λ of the next one."""

    name = "sepa"

    def __init__(self, schedule: "SepaSchedule"):
        self.schedule = schedule
        self._state = sepa_start(schedule)

    @classmethod
    def of(cls, sepa: Sepa) -> "SepaPooling":
        return cls(SepaSchedule(var_threshold=sepa.threshold, **sepa.model_dump(exclude={"threshold"})))

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        lam = sepa_lambda(self.schedule, self._state, context.step)
        gate_open = sepa_gate_open(self._state, context.step)
        rated, exec_variance = batch.rated, None
        if rated:
            h_BT, planning_BT = pad_field(rated, "uncertainty_T"), pad_field(rated, "planning_T", np.bool_)
            mask_BT = token_mask(rated)
            exec_variance = moments(h_BT, mask_BT & ~planning_BT)[1]
            batch = with_rows(batch, rated, pooled_uncertainty_T=sepa_pool(h_BT, planning_BT, mask_BT, lam))
        self._state = sepa_observe(
            self.schedule, self._state, context.step, correct_rate(batch.rollouts), exec_variance
        )
        return batch.with_metrics({"sepa_lambda": lam, "sepa_gate_open": gate_open})

    def state(self) -> dict[str, object]:
        return asdict(self._state)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._state = SepaState(**state)


def correct_rate(rollouts: Sequence[CreditedRollout]) -> float:
    """Return the share of correct rollouts among all that were sampled."""
    flags = [rollout.reward.is_correct for rollout in rollouts]
    return sum(flags) / len(flags)


@torch.no_grad()
def sepa_pool(h_BT: Floats_BT, planning_BT: Mask_BT, mask_BT: Mask_BT, lam: float) -> Floats_BT:
    """Selective entropy pooling: execution tokens move to their completion's mean, λ·mean(h_exec) + (1−λ)·h.

    Planning tokens stay. λ is clamped to [0, 1]; λ = 0 and completions without execution tokens are exact no-ops.
    Keeps Σh of every completion, hence h̄ and every planning weight. Raises ValueError for a NaN λ.
    """
    if math.isnan(lam):
        raise ValueError("SEPA λ is NaN")
    lam = min(max(lam, 0.0), 1.0)
    if lam == 0.0:
        return h_BT
    execution_BT = mask_BT & ~planning_BT
    count_B_1 = execution_BT.sum(1, keepdim=True).clamp(min=1)
    mean_B_1 = torch.where(execution_BT, h_BT, 0.0).sum(1, keepdim=True) / count_B_1
    return torch.where(execution_BT, torch.lerp(h_BT, mean_B_1.expand_as(h_BT), lam), h_BT)


def sepa_lambda_linear(step: int, steps: int, delay_steps: int = 0) -> float:
    """Return clamp((step − delay_steps)/steps, 0, 1); ``steps = 0`` means no ramp at all and gives 0."""
    if steps < 0 or delay_steps < 0:
        raise ValueError(f"SEPA steps and delay_steps must be >= 0: got {steps} and {delay_steps}")
    return min(max((step - delay_steps) / steps, 0.0), 1.0) if steps else 0.0


@dataclass(frozen=True)
class SepaSchedule:
    """The fixed parameters of a SEPA schedule; what moves is its ``SepaState``."""

    schedule: str = "linear"
    steps: int = 500
    delay_steps: int = 0
    correct_rate_gate: float = 0.0
    ema_decay: float = 0.99
    var_threshold: float = 0.2
    warmup_steps: int = 50

    def __post_init__(self) -> None:
        if self.schedule not in SEPA_SCHEDULES:
            raise ValueError(f"unknown SEPA schedule {self.schedule!r}: one of {', '.join(SEPA_SCHEDULES)}")
        if self.steps < 0 or self.delay_steps < 0 or self.warmup_steps < 1:
            raise ValueError("SEPA steps and delay_steps must be >= 0 and warmup_steps >= 1")
        if not (0.0 <= self.correct_rate_gate <= 1.0 and 0.0 <= self.ema_decay < 1.0 and self.var_threshold > 0.0):
            raise ValueError("SEPA needs 0 <= correct_rate_gate <= 1, 0 <= ema_decay < 1 and var_threshold > 0")


@dataclass(frozen=True)
class SepaState:
    """The memory of a schedule of earlier batches; strict JSON as a dictionary."""

    opened_at: int | None
    """First step with an open gate, None while it is shut."""
    var_ema: float | None = None
    """Running average of the execution variance."""
    var_0: float | None = None
    """Its value at the end of warm-up."""
    observed: int = 0
    """Batches that had a variance."""


def sepa_start(schedule: SepaSchedule) -> SepaState:
    """Return the state before the first step."""
    return SepaState(opened_at=0 if schedule.correct_rate_gate <= 0.0 else None)


def sepa_gate_open(state: SepaState, step: int) -> bool:
    """Return whether the correctness gate lets λ rise at ``step``."""
    return state.opened_at is not None and step >= state.opened_at


def sepa_lambda(schedule: SepaSchedule, state: SepaState, step: int) -> float:
    """Return λ in [0, 1] for ``step``: 0 behind a shut gate; linear ramp counted from the gate's opening.

    ``auto`` takes the larger of the ramp and 1 − min(varEMA/(var₀·threshold), 1), the latter only once warm-up
    has set var₀ and only if there was any variance to lose.
    """
    if state.opened_at is None or step < state.opened_at:
        return 0.0
    value = sepa_lambda_linear(step - state.opened_at, schedule.steps, schedule.delay_steps)
    if schedule.schedule == "auto" and state.var_0 is not None and state.var_0 > NO_VARIANCE:
        assert state.var_ema is not None, "the average is older than its value at the end of warm-up"
        value = max(value, 1.0 - min(state.var_ema / (state.var_0 * schedule.var_threshold), 1.0))
    return value


def sepa_observe(
    schedule: SepaSchedule, state: SepaState, step: int, correct_rate: float | None, exec_variance: float | None
) -> SepaState:
    """Return the state after the batch of ``step``.

    ``exec_variance`` is the batch variance of the raw execution uncertainty, None without execution tokens (the
    average then stays). The gate opens for ``step + 1`` and never shuts again. Raises ValueError on NaN.
    """
    for name, value in (("correct_rate", correct_rate), ("exec_variance", exec_variance)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"SEPA {name} must be finite or None: got {value}")
    if state.opened_at is None and correct_rate is not None and correct_rate >= schedule.correct_rate_gate:
        state = replace(state, opened_at=step + 1)
    if exec_variance is None:
        return state
    decay, average = schedule.ema_decay, exec_variance
    if state.var_ema is not None:
        average = decay * state.var_ema + (1.0 - decay) * exec_variance
    observed = state.observed + 1
    var_0 = average if observed == schedule.warmup_steps else state.var_0
    return replace(state, var_ema=average, var_0=var_0, observed=observed)
