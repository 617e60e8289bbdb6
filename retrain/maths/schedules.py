"""Learning rate and SEPA λ as functions of the step, and the SEPA controller as a pure state transition.

Order within a step: λ is read first (``sepa_lambda``), from what earlier batches showed; the batch is observed
afterwards (``sepa_observe``). A batch that reaches the gate therefore opens it for the next step, where the ramp's
clock starts at 0.
"""

import math
from dataclasses import dataclass
from typing import Any

LR_SCHEDULES = ("constant", "linear", "cosine")
SEPA_SCHEDULES = ("linear", "auto")
NO_VARIANCE = 1e-12


def learning_rate(schedule: str, step: int, max_steps: int, warmup_steps: int, base: float) -> float:
    """Learning rate of 0-based ``step``.

    Warm-up rises linearly and reaches ``base`` at step ``warmup_steps - 1``; its first step is base/warmup_steps,
    not 0. After it ``linear`` and ``cosine`` fall so that they would reach 0 at ``max_steps``: the last step still
    trains. Raises ValueError for an unknown schedule or a step outside [0, max_steps].
    """
    if schedule not in LR_SCHEDULES:
        raise ValueError(f"unknown learning-rate schedule {schedule!r}: one of {', '.join(LR_SCHEDULES)}")
    if not 0 <= step <= max_steps:
        raise ValueError(f"step {step} is outside [0, max_steps = {max_steps}]")
    if step < warmup_steps:
        return base * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return base
    progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
    return base * (1.0 - progress) if schedule == "linear" else base * 0.5 * (1.0 + math.cos(math.pi * progress))


def sepa_lambda_linear(step: int, steps: int, delay_steps: int = 0) -> float:
    """clamp((step − delay_steps)/steps, 0, 1); ``steps = 0`` means no ramp at all and gives 0."""
    if steps < 0 or delay_steps < 0:
        raise ValueError(f"SEPA steps and delay_steps must be >= 0: got {steps} and {delay_steps}")
    return min(max((step - delay_steps) / steps, 0.0), 1.0) if steps else 0.0


@dataclass(frozen=True)
class SepaSchedule:
    """The fixed parameters of a SEPA schedule; the moving part is the state dict below."""

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


def sepa_start(schedule: SepaSchedule) -> dict[str, Any]:
    """The state before the first step, strict JSON.

    ``opened_at``: first step with an open gate, None while shut; ``var_ema``: running execution variance;
    ``var_0``: its value at the end of warm-up; ``observed``: batches that had a variance.
    """
    opened_at = 0 if schedule.correct_rate_gate <= 0.0 else None
    return {"opened_at": opened_at, "var_ema": None, "var_0": None, "observed": 0}


def sepa_gate_open(state: dict[str, Any], step: int) -> bool:
    """Whether the correctness gate lets λ rise at ``step``."""
    return state["opened_at"] is not None and step >= state["opened_at"]


def sepa_lambda(schedule: SepaSchedule, state: dict[str, Any], step: int) -> float:
    """λ in [0, 1] for ``step``: 0 behind a shut gate; linear ramp counted from the gate's opening.

    ``auto`` takes the larger of the ramp and 1 − min(varEMA/(var₀·threshold), 1), the latter only once warm-up
    has set var₀ and only if there was any variance to lose.
    """
    if not sepa_gate_open(state, step):
        return 0.0
    value = sepa_lambda_linear(step - state["opened_at"], schedule.steps, schedule.delay_steps)
    if schedule.schedule == "auto" and state["var_0"] is not None and state["var_0"] > NO_VARIANCE:
        value = max(value, 1.0 - min(state["var_ema"] / (state["var_0"] * schedule.var_threshold), 1.0))
    return value


def sepa_observe(
    schedule: SepaSchedule, state: dict[str, Any], step: int, correct_rate: float | None, exec_variance: float | None
) -> dict[str, Any]:
    """The state after the batch of ``step``; ``state`` itself is left alone.

    ``exec_variance`` is the batch variance of the raw execution uncertainty, None without execution tokens (the
    average then stays). The gate opens for ``step + 1`` and never shuts again. Raises ValueError on NaN.
    """
    for name, value in (("correct_rate", correct_rate), ("exec_variance", exec_variance)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"SEPA {name} must be finite or None: got {value}")
    after = dict(state)
    if after["opened_at"] is None and correct_rate is not None and correct_rate >= schedule.correct_rate_gate:
        after["opened_at"] = step + 1
    if exec_variance is not None:
        previous = after["var_ema"]
        decay = schedule.ema_decay
        after["var_ema"] = exec_variance if previous is None else decay * previous + (1.0 - decay) * exec_variance
        after["observed"] += 1
        if after["observed"] == schedule.warmup_steps:
            after["var_0"] = after["var_ema"]
    return after
