"""Compares the gradients that a file's conditions compute on the same graded rollouts, without taking steps.

The runs are assembled as for training, one lane for each condition, in a temporary directory and without trackers.
Batches are those that the baseline's run would sample next. Every condition credits them with training's functions, and
its gradient is the one that its optimizer would receive.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from retrain.algorithms.algorithm import training_samples
from retrain.campaign.planning.plan import Plan, base_key
from retrain.config.runs import RunSpec
from retrain.engines.protocol import Engine
from retrain.errors import CheckpointError, RunFailed, UsageError
from retrain.maths.statistics import bootstrap_interval
from retrain.policy.local import DoesNotFit, LocalPolicy
from retrain.probe.conditions import conditions_of, temporary
from retrain.records.observer import Messages
from retrain.records.schema.base import Row
from retrain.rng import generator
from retrain.rollouts.collect import require_graded
from retrain.rollouts.queue import StepRollouts, collect_rounds
from retrain.training.assemble import assemble
from retrain.training.run import Run
from retrain.types import CreditedGroup, Group, Rollout, StepBatch

LEAST_BATCHES = 3  # Smallest number of batches from which an interval is computed
AT_ONCE = 4  # Number of batches that are sampled in one call

Progress = Callable[[str], None]


def probe(plan: Plan, batches: int, progress: Progress) -> Row:
    """Return the comparison of the conditions' runs of the first seed, as plain data.

    Each condition has ``norm`` (mean length of its gradient), ``length`` (ratio to the baseline's length, geometric
    mean), ``cosine`` (to the baseline's gradient on the same batch, mean) and ``halves`` (cosine between its gradients
    summed over two halves of the batches: near 1 if the direction depends little on the rollouts). Intervals are 95 %
    bootstrap intervals over batches. Raises UsageError for a file with nothing to compare, and training's errors.
    """
    begin = time.monotonic()
    specs, notes = comparable(plan)
    if batches < LEAST_BATCHES:
        raise UsageError(f"--batches {batches} is too few for an interval: type --batches {LEAST_BATCHES} or more")
    with ExitStack() as stack:
        aside = Path(stack.enter_context(TemporaryDirectory(prefix="retrain-probe-")))
        job = replace(plan, directory=aside).job([temporary(spec) for spec in specs])
        try:
            cohort = assemble(job, _Observer(progress), lambda: False, stack)
        except DoesNotFit as short:
            raise UsageError(f"{short}: a probe has one lane for each condition") from short
        first = cohort.runs[0]
        sampled = sample_batches(cohort.engine, first, batches, progress)
        rollouts = [rollout for groups in sampled for group in groups for rollout in group.rollouts]
        _require_signal(sampled, rollouts)
        cosines, norms, halves = _compare(cohort.runs, sampled, progress)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(norms / norms[0])
    return {
        "name": plan.name,
        "model": first.config.model.model,
        "seed": first.spec.seed,
        "begins": first.config.resume.from_ or "base",
        "step": first.step,
        "batches": batches,
        "prompts": first.config.training.batch_size,
        "samples": first.config.training.group_size,
        "success": sum(rollout.reward.is_correct for rollout in rollouts) / len(rollouts),
        "uniform_batches": sum(map(_is_uniform, sampled)),
        "baseline": specs[0].label,
        "conditions": [
            {
                "label": spec.label,
                "norm": float(norms[c].mean()),
                "length": _interval(ratios[c], math.exp),
                "cosine": _interval(cosines[c]),
                "halves": halves[c],
            }
            for c, spec in enumerate(specs)
        ],
        "notes": notes,
        "seconds": time.monotonic() - begin,
    }  # fmt: skip


def comparable(plan: Plan) -> tuple[list[RunSpec], list[str]]:
    """Return the first seed's runs whose gradients can be compared on the baseline's rollouts, baseline first, and
    notes about the other conditions. Raises UsageError unless there are at least two runs."""
    specs = conditions_of(plan)
    first, comparable_specs, notes = specs[0], list[RunSpec](), list[str]()
    for spec in specs:
        if _adapter(spec) != _adapter(first):
            notes.append(f"{spec.label} is left out: its base, problems or adapter differ from the baseline's")
        elif _sampling(spec) != _sampling(first):
            notes.append(f"{spec.label} is left out: it samples or grades other rollouts than the baseline")
        else:
            comparable_specs.append(spec)
    if len(comparable_specs) < 2:
        raise UsageError(f"{plan.name} has nothing to compare: {'; '.join(notes)}")
    return comparable_specs, notes


def _adapter(spec: RunSpec) -> tuple[object, ...]:
    return base_key(spec), spec.config.model.lora_rank, spec.config.lora.alpha, str(spec.config.lora.target_modules)


def _sampling(spec: RunSpec) -> tuple[object, ...]:
    training, config = spec.config.training, spec.config
    sizes = training.batch_size, training.group_size, training.dynamic_sampling
    return *sizes, training.sampling.requested, config.reward.grading, repr(config.environment), config.resume.from_


class _Observer(Messages):
    def run_finished(self, spec: RunSpec, status: str, reason: str) -> None:
        raise CheckpointError(f"{spec.label}: {reason}")


def sample_batches(engine: Engine, run: Run, batches: int, progress: Progress) -> list[list[Group]]:
    """Return the graded rollouts of the run's next steps, all sampled with its current weights. Raises RunFailed for
    errors of a grader or the chat template."""
    run.publish_to(engine)
    sampled, requests = list[list[Group]](), run.requests
    for start in range(run.step, run.step + batches, AT_ONCE):
        steps = range(start, min(start + AT_ONCE, run.step + batches))
        rollouts = [StepRollouts(step, requests.of_step(run.step, step), requests.resample) for step in steps]
        collect_rounds(engine, rollouts)
        graded = [require_graded(each.groups) for each in rollouts]
        sampled += [requests.resampler.select(groups).groups if requests.resampler else groups for groups in graded]
        progress(f"sampled {len(sampled)} of {batches} batches")
    return sampled


def _require_signal(sampled: Sequence[Sequence[Group]], rollouts: Sequence[Rollout]) -> None:
    if all(rollout.reward.total_reward is None for rollout in rollouts):
        raise RunFailed(f"no rollout has a reward: {rollouts[0].reward.error}")
    if all(map(_is_uniform, sampled)):
        raise RunFailed(
            f"all groups of {len(sampled)} batches have equal rewards, so no condition has a gradient: type more "
            "--batches, or begin at another checkpoint with --set resume.from=DIR"
        )


def _is_uniform(groups: Sequence[Group]) -> bool:
    rewards = [group.rewards_N[np.isfinite(group.rewards_N)] for group in groups]
    return not any(len(each) and each.max() - each.min() > 1e-8 for each in rewards)


def _compare(
    runs: Sequence[Run], sampled: Sequence[Sequence[Group]], progress: Progress
) -> tuple[np.ndarray, np.ndarray, list[float | None]]:
    """Return the cosine of each gradient with the baseline's, and its length, float64 [conditions, batches] each. Also
    return for each condition the cosine between the sum of its odd-numbered and the sum of its even-numbered nonzero
    gradients. Cosines with a gradient of length 0 are NaN, or None in the last list."""
    states = [with_open_gate(run.algorithm.state()) if run.step == 0 else run.algorithm.state() for run in runs]
    cosines_CB, norms_CB = np.full((2, len(runs), len(sampled)), np.nan)
    sums = [[torch.zeros(()), torch.zeros(())] for _ in runs]
    for i, groups in enumerate(sampled):
        baseline = None
        for c, run in enumerate(runs):
            # Schedules that begin at 0 would make conditions look alike at the first step.
            step = (run.step or run.config.training.max_steps // 2) + i
            gradient = gradient_of(run, groups, step, states[c])
            baseline = gradient if baseline is None else baseline
            norms_CB[c, i], cosines_CB[c, i] = gradient.norm(), cosine(gradient, baseline)
            half = int((norms_CB[c, :i] > 0).sum()) % 2
            sums[c][half] = sums[c][half] + gradient
        progress(f"compared {i + 1} of {len(sampled)} batches")
    halves = [cosine(*each) for each in sums]
    return cosines_CB, norms_CB, [each if math.isfinite(each) else None for each in halves]


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    lengths = float(first.double().norm() * second.double().norm())
    return float(first.double() @ second.double()) / lengths if lengths > 0 else math.nan


def gradient_of(run: Run, groups: Sequence[Group], step: int, state: Row) -> torch.Tensor:
    """Return the gradient [D] that the run's optimizer would receive for the whole batch. Credit is computed as at
    ``step``, with the state ``state`` of the run's algorithm. Afterwards the run has its old step again, and its
    algorithm has ``state``."""
    assert isinstance(run.policy, LocalPolicy)
    before, run.step = run.step, step
    run.algorithm.restore(state)
    try:
        batch = run.credit(list(map(CreditedGroup.of, groups)))
        samples = [sample for rollout in batch.trained for sample in training_samples(rollout)]
        return run.policy.gradient(
            StepBatch(samples, batch.denominators, step, run.requests.stream), run.update_plan.objective
        )
    finally:
        run.step = before
        run.algorithm.restore(state)


def with_open_gate(state: Row) -> Row:
    """Return the algorithm's state with SEPA's gate open from the start: with a shut gate, a condition with SEPA would
    look like one without."""
    sepa = state.get("sepa")
    if not isinstance(sepa, dict) or sepa.get("opened_at") is not None:
        return state
    return {**state, "sepa": {**sepa, "opened_at": 0}}


def _interval(values_B: np.ndarray, scale: Callable[[float], float] = float) -> dict[str, float | None] | None:
    """Return the mean of the finite values with its bootstrap interval, all mapped by ``scale``; None without finite
    values. Calls with equally many values draw the same resamples."""
    finite_B = values_B[np.isfinite(values_B)]
    if not len(finite_B):
        return None
    interval = bootstrap_interval([finite_B], generator("probe"), partial(np.mean, axis=-1), resamples=2000)
    return {name: None if end is None else scale(end) for name, end in vars(interval).items()}
