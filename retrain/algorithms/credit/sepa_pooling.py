"""SEPA, selective entropy pooling with annealing: the uncertainties of execution tokens (all but planning tokens) move
towards the mean of their completion.

λ of a step follows from earlier batches (``SepaState.pooling``); only then is the step's batch observed
(``SepaState.after``). A batch that reaches the gate therefore opens it for the next step, at which the ramp starts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from retrain.algorithms.algorithm import CreditStep, StepContext, pad_field, token_mask, with_rows
from retrain.algorithms.credit.uncertainty import moments
from retrain.config.algorithm import Sepa
from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.types import CreditedBatch, CreditedRollout

NO_VARIANCE = 1e-12  # A var₀ below this is nothing but rounding and cannot be a divisor


class SepaPooling(CreditStep):
    """Pools uncertainties (``sepa_pool``) with the λ of the step, then updates the state from which the next λ
    follows."""

    name = "sepa"

    def __init__(self, sepa: Sepa):
        self.sepa = sepa
        self._state = SepaState.before_training(sepa)

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        lam, gate_open = self._state.pooling(self.sepa, context.step), self._state.is_open(context.step)
        rated, exec_variance = batch.rated, None
        if rated:
            h_BT, planning_BT = pad_field(rated, "uncertainty_T"), pad_field(rated, "planning_T", np.bool_)
            mask_BT = token_mask(rated)
            exec_variance = moments(h_BT, mask_BT & ~planning_BT)[1]
            batch = with_rows(batch, rated, pooled_uncertainty_T=sepa_pool(h_BT, planning_BT, mask_BT, lam))
        # Only now: λ of this step must not depend on this step's batch.
        self._state = self._state.after(self.sepa, context.step, correct_rate(batch.rollouts), exec_variance)
        return batch.with_metrics({"sepa_lambda": lam, "sepa_gate_open": gate_open})

    def state(self) -> dict[str, object]:
        return asdict(self._state)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._state = SepaState(**state)


def correct_rate(rollouts: Sequence[CreditedRollout]) -> float:
    flags = [rollout.reward.is_correct for rollout in rollouts]
    return sum(flags) / len(flags)


@torch.no_grad()
def sepa_pool(h_BT: Floats_BT, planning_BT: Mask_BT, mask_BT: Mask_BT, lam: float) -> Floats_BT:
    """Return λ·mean(h_exec) + (1−λ)·h for execution tokens, with the mean over their completion's execution tokens.

    Planning tokens keep their h. λ is clamped to [0, 1]; λ = 0 and completions without execution tokens are exact
    no-ops. Keeps Σh of every completion, hence h̄ and every planning weight. Raises ValueError for a NaN λ.
    """
    if math.isnan(lam):
        raise ValueError("SEPA λ is NaN")
    lam = min(max(lam, 0.0), 1.0)
    if lam == 0.0:
        return h_BT
    execution_BT = mask_BT & ~planning_BT
    count_B_1 = execution_BT.sum(1, keepdim=True).clamp(min=1)
    mean_B_1 = torch.where(execution_BT, h_BT, 0.0).sum(1, keepdim=True) / count_B_1
    # lerp is exact at both ends: λ = 1 gives the mean itself.
    return torch.where(execution_BT, torch.lerp(h_BT, mean_B_1.expand_as(h_BT), lam), h_BT)


@dataclass(frozen=True)
class SepaState:
    """The state of SEPA between steps.

    ``opened_at``: first step with an open gate, None while shut; ``var_ema``: running execution variance; ``var_0``:
    its value at the end of warm-up; ``observed``: batches that had a variance.
    """

    opened_at: int | None = None
    var_ema: float | None = None
    var_0: float | None = None
    observed: int = 0

    @classmethod
    def before_training(cls, sepa: Sepa) -> "SepaState":
        return cls(opened_at=0 if sepa.correct_rate_gate <= 0.0 else None)

    def is_open(self, step: int) -> bool:
        return self.opened_at is not None and step >= self.opened_at

    def pooling(self, sepa: Sepa, step: int) -> float:
        """Return λ in [0, 1] for ``step``: 0 while the gate is shut, then a linear ramp that begins ``delay_steps``
        later.

        The schedule ``auto`` takes the larger of the ramp and 1 − min(varEMA/(var₀·threshold), 1), as soon as the
        warm-up has set a var₀ above ``NO_VARIANCE``. ``steps = 0`` means no ramp.
        """
        if self.opened_at is None or step < self.opened_at:
            return 0.0
        since = step - self.opened_at - sepa.delay_steps
        ramp = min(max(since / sepa.steps, 0.0), 1.0) if sepa.steps else 0.0
        if sepa.schedule == "auto" and self.var_ema is not None and self.var_0 is not None and self.var_0 > NO_VARIANCE:
            return max(ramp, 1.0 - min(self.var_ema / (self.var_0 * sepa.threshold), 1.0))
        return ramp

    def after(self, sepa: Sepa, step: int, correct_rate: float, exec_variance: float | None) -> "SepaState":
        """Return the state after the batch of ``step``.

        ``exec_variance`` is the batch's variance of the uncertainty of execution tokens before pooling. It is None for
        a batch without such tokens, which does not change the running variance. The gate opens for ``step + 1`` and
        never shuts again.
        """
        state = self
        if self.opened_at is None and correct_rate >= sepa.correct_rate_gate:
            state = replace(state, opened_at=step + 1)  # this step's λ is already in use
        if exec_variance is None:
            return state
        decay = sepa.ema_decay
        ema = exec_variance if self.var_ema is None else decay * self.var_ema + (1.0 - decay) * exec_variance
        observed = self.observed + 1
        return replace(
            state, var_ema=ema, observed=observed, var_0=ema if observed == sepa.warmup_steps else self.var_0
        )
