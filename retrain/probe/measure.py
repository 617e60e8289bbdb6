"""The probe: at every point, sample once, credit under every condition, take each gradient, compare them.

The runs are put together as training does it (``assemble``), one lane for each condition, in a directory that is
removed again and without trackers; no step is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from retrain.algorithms.standard import Standard
from retrain.campaign.judging.probed import BATCHES, PROBLEMS, SAMPLES, could_show
from retrain.campaign.planning.cohorts import base_key
from retrain.campaign.planning.plan import Plan, RunSpec
from retrain.campaign.running.assemble import assemble
from retrain.campaign.running.fitting import DoesNotFit
from retrain.campaign.running.models import Bases
from retrain.campaign.running.protocol import CohortJob
from retrain.campaign.running.trial import Messages
from retrain.config import parse_dict
from retrain.errors import RunFailed, UsageError
from retrain.maths import gradients
from retrain.maths.schedules import sepa_lambda
from retrain.maths.statistics import Interval
from retrain.policy.local import LocalPolicy
from retrain.probe.points import BASE, Arrived, Point, arrive
from retrain.probe.recorded import LEAST_BATCHES, Recorded, usable
from retrain.probe.reread import distance, recorded_batches
from retrain.probe.rollouts import (
    Credited,
    credited,
    gradient_of,
    open_gate,
    sample_batches,
    sample_heldout,
    sampling_key,
    success_gradients,
    uniform,
)
from retrain.probe.store import Products, Rows, Scaling, layers_of, products
from retrain.probe.tokens import differences
from retrain.rng import generator
from retrain.run import Run
from retrain.tokenizer import Tokenizer
from retrain.types import Group

LAYERS_SHOWN = 5


@dataclass(frozen=True)
class Effort:
    """How much is sampled: batches of training rollouts, and held-out problems with so many samples each (0: none)."""

    batches: int = BATCHES
    problems: int = PROBLEMS
    samples: int = SAMPLES


def probe(
    plan: Plan,
    points: Sequence[Point],
    effort: Effort,
    tell: Callable[[str], None],
    bases: Bases | None = None,
    recorded: Recorded | None = None,
) -> dict[str, Any]:
    """The report of a file at these points, as plain data; nothing is written. With ``recorded`` the batches are the
    steps of every point, else they are sampled there. Raises UsageError for a file with nothing to compare, and what
    training raises."""
    begin = time.monotonic()
    specs, notes = comparable(plan, recorded)
    if effort.batches < LEAST_BATCHES:
        raise UsageError(
            f"--batches {effort.batches} is too few for an interval: type --batches {LEAST_BATCHES} or more"
        )
    with ExitStack() as stack:
        bases = bases or stack.enter_context(Bases())
        found = [_at(plan, specs, point, effort, tell, bases, recorded) for point in points]
    training = specs[0].config.training
    return {
        "name": plan.name,
        "model": specs[0].config.model.model,
        "baseline": specs[0].label,
        "conditions": [spec.label for spec in specs],
        "seed": specs[0].seed,
        "could_show": could_show(plan.specs),
        "begins": specs[0].config.resume.from_ or BASE,
        "metric": specs[0].config.campaign.primary_metric,
        "recorded": None if recorded is None else recorded.about(),
        "prompts": training.batch_size,
        "samples": training.group_size,
        "notes": notes,
        "points": found,
        "seconds": time.monotonic() - begin,
    }


def comparable(plan: Plan, recorded: Recorded | None = None) -> tuple[list[RunSpec], list[str]]:
    """The conditions whose gradients lie in one space, as runs of the first seed, baseline first, with ``recorded``
    those that these rollouts can stand for; and notes about the others. Raises UsageError unless there are two."""
    seed = plan.specs[0].seed
    specs = [spec for spec in plan.specs if spec.seed == seed]
    if len(specs) < 2:
        raise UsageError(f"{plan.name} has one condition: a probe compares two or more")
    first = specs[0]
    if any(spec.config.backend.backend != "local" for spec in specs):
        backend = next(spec.config.backend.backend for spec in specs if spec.config.backend.backend != "local")
        raise UsageError(f"{backend} gives no gradients: a probe needs the built-in backend")
    kept = [spec for spec in specs if _space(spec) == _space(first)]
    notes = [
        f"{spec.label} is left out: its base, problems or adapter are not the baseline's, and gradients of two kinds "
        "of weights cannot be compared"
        for spec in specs
        if spec not in kept
    ]  # fmt: skip
    if len(kept) < 2:
        raise UsageError(
            f"no condition of {plan.name} has base, problems and adapter of the baseline: there is nothing to compare"
        )
    if recorded is None:
        return kept, notes
    kept, others = usable(kept, recorded)
    return kept, [*notes, *others]


def _space(spec: RunSpec) -> tuple[Any, ...]:
    return base_key(spec), spec.config.model.lora_rank, spec.config.lora.alpha, str(spec.config.lora.target_modules)


def _untracked(spec: RunSpec) -> RunSpec:
    data = spec.config.to_dict()
    data["logging"] |= {"report_to": [], "wandb_project": None}
    data["backend"]["adapter_path"] = None
    data["resume"]["from"] = None
    return replace(spec, is_campaign=True, config=parse_dict(data))


def _at(
    plan: Plan, specs: Sequence[RunSpec], point: Point, effort: Effort, tell: Callable[[str], None], bases: Bases,
    recorded: Recorded | None,
) -> dict[str, Any]:  # fmt: skip
    """The report of one point."""
    with ExitStack() as stack:
        aside = Path(stack.enter_context(TemporaryDirectory(prefix="retrain-probe-")))
        try:
            job = CohortJob.of(replace(plan, directory=aside), [_untracked(spec) for spec in specs])
            cohort = assemble(job, Messages(tell), lambda: False, stack, bases)
        except DoesNotFit as short:
            raise UsageError(f"{short}: a probe has one lane for each condition") from short
        if recorded is not None:
            recorded.require_base(cohort.runs[0])
        arrived = arrive(point, cohort.runs)
        return _Look(cohort.engine, cohort.runs, point, arrived, effort, tell, recorded).report()


class _Look:
    """One point, with all conditions' runs there."""

    def __init__(
        self, engine: Any, runs: Sequence[Run], point: Point, arrived: Arrived, effort: Effort,
        tell: Callable[[str], None], recorded: Recorded | None = None,
    ):  # fmt: skip
        self.engine, self.runs, self.point, self.arrived, self.effort = engine, runs, point, arrived, effort
        self.recorded, self.batches = recorded, effort.batches if recorded is None else len(point.steps)
        self.tell = lambda text: tell(f"{point.name}: {text}")
        self.seconds: dict[str, float] = {}
        for run in runs:
            run.step = point.step or 0
            default = run.step * run.config.training.batch_size
            run.cursor.position = default if arrived.cursor is None else arrived.cursor
        self.states = [self._state(run) for run in runs]
        self.keys = [sampling_key(run if recorded is None else runs[0]) for run in runs]
        first = runs[0].policy
        assert isinstance(first, LocalPolicy)
        self.policy = first

    def _state(self, run: Run) -> dict[str, Any]:
        """The algorithm's state: the checkpoint's where it is one of this condition, or all runs begin with it."""
        arrived = self.arrived
        own = self.point.beginning or arrived.run_id.rpartition("_s")[0] == run.spec.label
        if arrived.algorithm is not None and own:
            return arrived.algorithm
        return open_gate(run.algorithm.state())

    def _credit_step(self, run: Run, batch: int = 0) -> int:
        """The step whose schedules count for a batch: from the point's own on, for a recorded one that is later its
        own; from half of the run on at the base, where they have not begun."""
        step = self.point.step
        if not step:
            return run.config.training.max_steps // 2 + batch
        return max(step + batch, self.point.steps[batch] if self.recorded is not None else 0)

    def report(self) -> dict[str, Any]:
        """All that is asked at this point."""
        begin = time.monotonic()
        batches = self._sampled()
        held_out = self._heldout()
        self.seconds["sampling"] = time.monotonic() - begin
        shared = next(iter(batches.values()))
        rewards = [one.reward for groups in shared for group in groups for one in group.rollouts]
        if all(reward.total_reward is None for reward in rewards):
            raise RunFailed(f"{self._whose}: no rollout has a reward: {rewards[0].error}")
        if all(uniform(groups) for groups in shared):
            other = "type more --batches, or probe another checkpoint"
            raise RunFailed(
                f"{self._whose}: all groups of {len(shared)} batches have equal rewards, so no condition has "
                f"a gradient here: {other if self.recorded is None else 'take other steps, or leave --rollouts out'}"
            )
        away = None if self.recorded is None else self._about_recorded(shared)
        begin = time.monotonic()
        width = int(self.policy.adapter.flat.numel())
        wanted = success_gradients(self.runs[0], held_out)
        rows = Rows(len(self.runs) * self.batches + len(wanted), width)
        try:
            credits = [self._gradients(rows, number, batches) for number in range(len(self.runs))]
            for part, gradient in enumerate(wanted):
                rows.put(len(self.runs) * self.batches + part, gradient)
            self.seconds["gradients"] = time.monotonic() - begin
            scalings = [self._scaling(run) for run in self.runs]
            found = products(rows, layers_of(self.policy.adapter), self.batches, scalings, self.arrived.moments)
            on_disk = rows.on_disk
        finally:
            rows.close()
        return {
            "at": self.point.name,
            "step": self.point.step,
            "batches": self.batches,
            "recorded": away,
            "rollouts": len(rewards),
            "success": sum(reward.is_correct for reward in rewards) / max(1, len(rewards)),
            "uniform_batches": sum(uniform(groups) for groups in shared),
            "weights": width,
            "on_disk": on_disk,
            "heldout": self._about(held_out),
            **self._compared(found, credits),
            "seconds": self.seconds,
        }

    @property
    def _whose(self) -> str:
        """Whose rollouts these are, for messages."""
        return self.point.typed if self.recorded is None else self.recorded.typed

    # -- rollouts and gradients ---------------------------------------------------------------------------------

    def _sampled(self) -> dict[tuple[Any, ...], list[list[Group]]]:
        """Batches by sampling key, the baseline's first. Recorded ones stand for all conditions."""
        if self.recorded is not None:
            return {self.keys[0]: recorded_batches(self.recorded, self.point.steps, self.runs[0])}
        found: dict[tuple[Any, ...], list[list[Group]]] = {}
        for run, key in zip(self.runs, self.keys, strict=True):
            if key not in found:
                found[key] = sample_batches(self.engine, run, self.batches, self.tell)
        return found

    def _heldout(self) -> list[Group]:
        effort, run = self.effort, self.runs[0]
        if effort.problems == 0:
            return []
        steps = self.batches
        if self.recorded is not None:
            steps = max(0, self.point.steps[-1] + 1 - run.step)
        skip = steps * run.config.training.batch_size
        groups = sample_heldout(self.engine, run, effort.problems, effort.samples, skip)
        self.tell(f"sampled {len(groups)} held-out problems, {effort.samples} times each")
        return groups

    def _about_recorded(self, batches: Sequence[Sequence[Group]]) -> dict[str, Any]:
        """Which steps these are, how many updates they are from the point's weights at the least and at the most, and
        how far those are from the weights that sampled."""
        steps, place = self.point.steps, self.point.step
        away = [] if place is None else [abs(step - place) for step in steps]
        ends = [min(away), max(away)] if away else None
        return {"steps": list(steps), "updates_away": ends, **distance(self.runs[0], batches)}

    def _about(self, groups: Sequence[Group]) -> dict[str, Any] | None:
        """How well the point does on held-out problems."""
        flags = [one.reward.is_correct for group in groups for one in group.rollouts]
        if not flags:
            return None
        return {"problems": len(groups), "samples": self.effort.samples, "success": sum(flags) / len(flags)}

    def _gradients(self, rows: Rows, number: int, batches: dict[tuple[Any, ...], list[list[Group]]]) -> list[Credited]:
        """Credit every batch under one condition and put its gradients into their rows."""
        run, credits = self.runs[number], list[Credited]()
        for i, groups in enumerate(batches[self.keys[number]]):
            step = self._credit_step(run, i)
            own = credited(run, groups, step, self.states[number])
            rows.put(number * self.batches + i, gradient_of(run, own, step))
            credits.append(own)
        self.tell(f"{number + 1} of {len(self.runs)} conditions: {run.spec.label}")
        return credits

    def _scaling(self, run: Run) -> Scaling:
        optimizer = run.config.optimizer
        before, run.step = run.step, min(self._credit_step(run), run.config.training.max_steps - 1)
        try:
            return Scaling(run.lr(), optimizer.grad_clip_norm, optimizer.eps)
        finally:
            run.step = before

    # -- what they say ------------------------------------------------------------------------------------------

    def _stream(self, *name: int | str) -> np.random.Generator:
        """The same for all conditions: their intervals come from the same resamples."""
        return generator("probe", *name)

    def _compared(self, found: Products, credits: Sequence[Sequence[Credited]]) -> dict[str, Any]:
        count = len(self.runs)
        grams = [found.gram[c, :, c] for c in range(count)]
        sampled = [self.keys.index(key) for key in self.keys]
        pairs: list[list[dict[str, Any] | None]] = [[None] * count for _ in range(count)]
        for a in range(count):
            for b in range(a, count):
                pairs[a][b] = pairs[b][a] = self._pair(found.gram, a, b) if sampled[a] == sampled[b] else None
        conditions = [
            self._condition(found, grams, c, credits[c], None if sampled[c] else credits[0])
            | {"rollouts": sampled[c], "same_rollouts": sampled[c] == 0}
            for c in range(count)
        ]
        return {"cosines": pairs, "conditions": conditions}

    def _pair(self, gram: np.ndarray, a: int, b: int) -> dict[str, Any] | None:
        """Off the diagonal two conditions on the same batch, on it one condition on two batches: the noise floor."""
        if a == b:
            return _json(gradients.noise_floor(gram[a, :, a], self._stream("floor")))
        return _json(gradients.cosine_interval(gram, a, b, self._stream("cosine")))

    def _condition(
        self,
        found: Products,
        grams: Sequence[np.ndarray],
        number: int,
        credits: Sequence[Credited],
        baseline: Sequence[Credited] | None,
    ) -> dict[str, Any]:
        run, gram, training = self.runs[number], grams[number], self.runs[number].config.training
        norms = [gradients.lengths(found.gram, each) for each in (number, 0)]
        clips = [each.config.optimizer.grad_clip_norm for each in (run, self.runs[0])]
        clipped = [gradients.clipped_lengths(norm, clip) for norm, clip in zip(norms, clips, strict=True)]
        beta1, (steps, aligned) = run.config.optimizer.beta1, found.steps
        adamw = gradients.steady_ratio(steps[number], steps[0], beta1, self._stream("length"))
        at = None
        if found.steps_at is not None:
            at = gradients.steady_ratio(found.steps_at[0][number], found.steps_at[0][0], beta1, self._stream("length"))
        noise = gradients.signal_to_noise(gram, self._stream("noise"))
        text = Tokenizer(run.renderer.tokenizer)
        return {
            "label": run.spec.label,
            "lr": training.lr,
            "equal_lr": training.lr / adamw.estimate if adamw is not None and adamw.estimate > 0 else None,
            "expected_cosine": _json(gradients.expected_cosine(found.gram, 0, number, self._stream("expected"))),
            "lambda": self._lambda(run, number),
            "norm": float(norms[0].mean()),
            "clipped": float((norms[0] > clips[0]).mean()) if clips[0] > 0 else 0.0,
            "halves": gradients.halves_cosine(gram, self._stream("halves")),
            "length": {
                "gradient": _json(gradients.ratio_interval(norms[0], norms[1], self._stream("length"))),
                "clipped": _json(gradients.ratio_interval(clipped[0], clipped[1], self._stream("length"))),
                "adamw": _json(adamw),
                "adamw_here": _json(at),
            },
            "signal_to_noise": _json(noise),
            "prompts_for_one": training.batch_size / noise.estimate if noise and noise.estimate > 0 else None,
            "alignment": self._alignment(found, number, steps, aligned, beta1),
            "tokens": None if number == 0 or baseline is None else differences(credits, baseline, text.offsets),
            "layers": [] if baseline is None else _layers(found, number),
        }  # fmt: skip

    def _lambda(self, run: Run, number: int) -> float | None:
        """SEPA's λ in the middle batch, where the condition has one."""
        if not isinstance(run.algorithm, Standard) or run.config.algorithm.transform_mode != "gtpo_sepa":
            return None
        step = self._credit_step(run, self.batches // 2)
        return sepa_lambda(run.algorithm.schedule, self.states[number]["sepa"], step)

    def _alignment(
        self, found: Products, number: int, steps: np.ndarray, aligned: np.ndarray, beta1: float
    ) -> dict[str, Any] | None:
        """With held-out success: cosine and inner product of the gradient, and the first-order gain of AdamW's step,
        as it is and at the baseline's length, absolute and beyond the baseline's (``beyond_baseline`` as it is,
        ``versus_baseline`` at its length)."""
        if not found.wanted.size:
            return None
        stream = partial(self._stream, "alignment")

        def factor(weights: np.ndarray) -> np.ndarray:
            own, base = (gradients.steady_length(steps[each], beta1, weights) for each in (number, 0))
            return np.divide(base, own, out=np.zeros_like(base), where=own > 0)

        versus = beyond = None
        if number:
            # The baseline's part is paired: the same batches, the same held-out problems, the same resamples.
            versus = _json(gradients.mean_difference(aligned[number], aligned[0], stream(), factor))
            beyond = _json(gradients.mean_difference(aligned[number], aligned[0], stream()))
        return {
            "cosine": _json(gradients.aligned_cosine(
                found.aligned[number], found.gram[number, :, number], found.wanted, stream()
            )),
            "product": _json(gradients.mean_product(found.aligned[number], stream())),
            "gain": _json(gradients.mean_product(aligned[number], stream())),
            "gain_equal": _json(gradients.mean_product(aligned[number], stream(), factor)),
            "versus_baseline": versus,
            "beyond_baseline": beyond,
        }  # fmt: skip


def _layers(found: Products, number: int) -> list[dict[str, Any]]:
    """The layers in which the update differs most from the baseline's: cosine over all batches, and the share of the
    squared length in the layer, of this condition and of the baseline."""
    totals = sum(found.layers.values())
    assert isinstance(totals, np.ndarray)
    rows = []
    for name, table in found.layers.items():
        (product, square), base = table[number], table[0, 1]
        if square <= 0 or base <= 0:
            continue
        shares = square / totals[number, 1], base / totals[0, 1]
        rows.append({"layer": name, "cosine": float(product / math.sqrt(square * base)),
                     "share": float(shares[0]), "baseline_share": float(shares[1])})  # fmt: skip
    rows.sort(key=lambda row: row["cosine"])
    return rows[:LAYERS_SHOWN] if number else []


def _json(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else vars(interval)
