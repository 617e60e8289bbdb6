"""What the recorder is given: one step, or one held-out evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrain.types.credit import CreditedGroup
from retrain.types.rollouts import Group


@dataclass
class EvalRecord:
    """One held-out evaluation: every group with its rollouts, none of which has an advantage.

    ``step`` counts the updates done; ``temperature``, ``samples`` per problem, ``max_tokens``, ``top_p``, ``top_k`` and
    ``min_p`` are how it sampled. With ``error``, what environment or grader raised, groups are missing.
    """

    name: str
    step: int
    groups: list[Group]
    temperature: float
    samples: int
    seconds: float
    max_tokens: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    error: Exception | None = None


@dataclass
class StepRecord:
    """One optimizer step of one run; the recorder makes all metrics from it.

    ``groups`` are all groups of the batch, before any filtering, ``dropped`` those that others were sampled in place
    of: they count in what the run has sampled, and nowhere else. ``update`` holds the policy's numbers of this step
    under their catalogue keys (loss, optim/grad_norm, val/ratio, …), ``state`` the controllers' (sepa_lambda, …),
    ``spans`` the wall-clock parts: (name, start, end) in seconds since the epoch, names as in ``time/<name>``.
    """

    step: int
    groups: Sequence[CreditedGroup]
    update: dict[str, Any]
    state: dict[str, Any]
    spans: list[tuple[str, float, float]]
    step_start: float
    step_end: float
    dropped: Sequence[Group] = ()
