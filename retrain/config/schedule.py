"""When a run is evaluated, and how thoroughly: what `[training] eval_every` and `[evaluation] schedule` come to, and
whether the metric that a campaign declares can be measured with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from retrain.config.base import Finding

if TYPE_CHECKING:
    from retrain.config.root import Config

Extent = Literal["whole", "part"]
"""All problems and samples of every held-out set, or the part of them that is for the curve alone."""
DECIDING = 3
"""Evaluations whose mean is `last3`."""
LATE = 0.75
"""`last3` is about the end of training where its evaluations lie after this share of the steps."""
SHORT = r"(correct_rate|reward_mean|mean_length|(pass|avg|maj)@\d+|[^/]+/correct_rate)?"
"""Metrics of held-out problems that are named without their set."""


def deciding_marks(max_steps: int) -> tuple[int, ...]:
    """Updates done at the evaluations that `schedule = "verdict"` decides by: about 80, 90 and 100 % of the steps; all
    of them, where there are fewer than three."""
    ninety = min(max_steps - 1, round(0.9 * max_steps))
    return tuple(step for step in (min(ninety - 1, round(0.8 * max_steps)), ninety, max_steps) if step > 0)


def whole_evaluations(schedule: str, max_steps: int, eval_every: int) -> tuple[int, ...]:
    """Updates done at every evaluation of all problems and samples after the start, in order."""
    if schedule == "verdict":
        return deciding_marks(max_steps)
    return (*(range(eval_every, max_steps, eval_every) if eval_every else ()), max_steps)


def part_evaluations(schedule: str, max_steps: int, eval_every: int) -> tuple[int, ...]:
    """Updates done at every evaluation of a part of the problems, in order."""
    if schedule != "verdict" or not eval_every:
        return ()
    return tuple(step for step in range(eval_every, max_steps, eval_every) if step not in deciding_marks(max_steps))


def too_early(first: int, max_steps: int) -> bool:
    """Whether an evaluation that `last3` begins with lies outside the end of training."""
    return first < min(LATE * max_steps, deciding_marks(max_steps)[0])


def extent_after(config: Config, step: int) -> Extent | None:
    """How a run with this configuration is evaluated after ``step`` updates; None for not at all."""
    training, schedule = config.training, config.evaluation.schedule
    if not config.evaluation.problems:
        return None
    if step >= training.max_steps or step in whole_evaluations(schedule, training.max_steps, training.eval_every):
        return "whole"
    return "part" if step in part_evaluations(schedule, training.max_steps, training.eval_every) else None


def deciding_rules(config: Config) -> Iterator[Finding]:
    """A schedule of evaluations has something to evaluate, and what is declared as deciding is among it."""
    schedule, training = config.evaluation.schedule, config.training
    if schedule == "verdict" and not config.evaluation.problems:
        keys = ("evaluation.schedule", "evaluation.problems")
        yield Finding(keys, "has no effect with problems = 0", "remove the line, or problems = 128")
        return
    if not config.is_campaign:
        return
    metric = config.campaign.primary_metric
    summary, _, key = metric.partition(":")
    held_out = key.startswith("eval/") or re.fullmatch(SHORT, key) is not None
    if summary == "auc" and held_out and schedule == "verdict":
        yield Finding(
            ("campaign.primary_metric", "evaluation.schedule"),
            f'is "{metric}", the area under a curve for which schedule = "verdict" asks only a part of the problems',
            f'primary_metric = "{metric.replace("auc", "last3", 1)}", or schedule = "every"',
        )
    if summary != "last3":
        return
    if not held_out:
        yield Finding(
            ("campaign.primary_metric",),
            f'is "{metric}", the mean of three held-out evaluations, and {key} is a number of training, whose final '
            "value is its mean over the last tenth of the steps",
            f'primary_metric = "final:{key}"',
        )
    elif config.evaluation.problems:
        yield from _last3_findings(metric, schedule, training.max_steps, training.eval_every)


def _last3_findings(metric: str, schedule: str, max_steps: int, eval_every: int) -> Iterator[Finding]:
    """There are three evaluations to take the mean of, and they are about the end of training."""
    steps = whole_evaluations(schedule, max_steps, eval_every)[-DECIDING:]
    if max_steps < DECIDING:
        what = f'is "{metric}", the mean of three evaluations, and there are fewer steps: max_steps = {max_steps}'
        yield Finding(("campaign.primary_metric", "training.max_steps"), what, 'primary_metric = "final"')
        return
    keys, fix = ("campaign.primary_metric", "training.eval_every"), f"eval_every = {max(1, max_steps // 10)}"
    fix = f'[evaluation] schedule = "verdict", or {fix}'
    if len(steps) < DECIDING:
        done = " and ".join(map(str, steps))
        what = f'is "{metric}", the mean of three evaluations, and after the start there'
        what += f" {'is that' if len(steps) == 1 else 'are those'} after {done} of {max_steps} steps"
        yield Finding(keys, what, fix)
    elif too_early(steps[0], max_steps):
        first, second, last = steps
        what = f'is "{metric}", here the mean of those after {first}, {second} and {last} of {max_steps} steps: '
        yield Finding(keys, f"{what}not of the end of training alone; for that type", fix, warning=True)
