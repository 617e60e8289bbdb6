"""Continues every condition of a file for a few steps from one checkpoint and ranks them by their held-out change.

All runs step together on one frozen base, in a temporary directory and without trackers. As with ``[resume] from``,
they continue the weights, AdamW's moments, the step number and with it every schedule, and the position in the data.
Their seeds are fresh, so that the order of the problems and all samples are new.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from retrain.campaign.planning.plan import Plan, base_key, cut, smaller_cohorts
from retrain.config.runs import RunSpec
from retrain.errors import CheckpointError, UsageError
from retrain.files import read_json
from retrain.maths.statistics import paired_interval
from retrain.models.directory import bundled_name
from retrain.policy.critic import WEIGHTS as CRITIC
from retrain.policy.local import DoesNotFit
from retrain.probe.conditions import conditions_of, forked
from retrain.probe.gradients import Progress, with_open_gate
from retrain.records.observer import Messages, SpecLike
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import ADAPTER_CONFIG, STATE
from retrain.training.assemble import assemble
from retrain.training.bases import Bases
from retrain.training.checkpoints import verify_checkpoint
from retrain.training.inputs import CohortJob
from retrain.training.state import RunState
from retrain.verdicts.results import Measure

FORECAST = (
    "A forecast and no verdict: on two campaigns the order of such forks had rank correlations of 0.2 to 0.9 with that "
    "at the end (docs/results.md). Conditions whose intervals overlap have no order; the campaign decides."
)
LAST_USUAL_SEED = 1000  # Campaigns and follow-ups usually have seeds up to this one; forks have larger ones


@dataclass(frozen=True)
class Fork:
    # Runs of every condition with every fresh seed, seed by seed
    plan: Plan
    checkpoint: Path
    # State in the checkpoint
    state: RunState
    # Step at which the runs stop
    end: int
    measure: Measure
    # Conditions that cannot continue the checkpoint, each with the reason
    left_out: list[str]
    # Steps of all these runs, divided by the steps of all runs of the file
    share: float

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(spec.label for spec in self.plan.specs))

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(spec.seed for spec in self.plan.specs))


def plan_fork(plan: Plan, checkpoint: Path, steps: int, seeds: int) -> Fork:
    """Return the fork of a plan's conditions. Raises UsageError for a checkpoint that cannot be continued, steps beyond
    the end of the schedules, and fewer than two conditions that fit."""
    specs = conditions_of(plan)
    state, adapter = _state_of(checkpoint), read_json(checkpoint / ADAPTER_CONFIG)
    held_out = specs[0].config.decisive
    if fault := _plan_fault(plan, specs, checkpoint, state, str(adapter["base_model_name_or_path"]), steps):
        raise UsageError(fault)
    assert held_out is not None
    faults = {spec.label: _misfit(spec, specs[0], checkpoint, state.step, adapter) for spec in specs}
    left_out = [f"{label} is left out: {fault}" for label, fault in faults.items() if fault]
    fitting = [spec for spec in specs if not faults[spec.label]]
    if len(fitting) < 2:
        raise UsageError(f"{checkpoint} has fewer than two conditions to continue: {'; '.join(left_out)}")
    runs = [forked(spec, seed, checkpoint) for seed in _fresh_seeds(plan, state, seeds) for spec in fitting]
    measure = Measure.parse(specs[0].config.campaign.primary_metric, held_out.name)
    measure = measure if measure.is_held_out else Measure.parse("correct_rate", held_out.name)
    share = steps * len(runs) / sum(spec.config.training.max_steps for spec in plan.specs)
    return Fork(replace(plan, specs=runs), checkpoint, state, state.step + steps, measure, left_out, share)


def _plan_fault(plan: Plan, specs: Sequence[RunSpec], checkpoint: Path, state: RunState, base: str, steps: int) -> str:
    model, last = specs[0].config.model.model, min(spec.config.training.max_steps for spec in specs)
    if _model_id(base) != _model_id(model):
        return f"{checkpoint} was trained on {base}, and {plan.name} trains {model}: name one of its own runs"
    if state.step == 0:
        return f"{checkpoint} is at step 0: a fork continues a later checkpoint"
    if state.step + steps > last:
        return f"{checkpoint} is at step {state.step} of {last}: --fork {steps} goes beyond the end"
    if specs[0].config.decisive is None:
        return f"{plan.name} has no held-out problems to rank by: set [evaluation] problems above 0"
    if specs[0].config.campaign.vary == "init":
        return '[campaign] vary = "init" makes all seeds of a fork alike: type --set campaign.vary="all"'
    return ""


def _state_of(checkpoint: Path) -> RunState:
    if not (checkpoint / STATE).is_file():
        raise UsageError(
            f"{checkpoint} is no checkpoint: name a directory such as logs/NAME/runs/RUN/checkpoints/step_000040"
        )
    try:
        verify_checkpoint(checkpoint)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    return RunState.from_dict(read_json(checkpoint / STATE))


def _model_id(name: str) -> str:
    return bundled_name(name) or (str(Path(name).resolve()) if Path(name).is_dir() else name)


def _fresh_seeds(plan: Plan, state: RunState, count: int) -> range:
    own = state.run_id.rpartition("_s")[2]
    first = 1 + max(LAST_USUAL_SEED, int(own) if own.isdecimal() else 0, *(spec.seed for spec in plan.specs))
    return range(first, first + count)


def _misfit(spec: RunSpec, baseline: RunSpec, checkpoint: Path, step: int, adapter: Values) -> str:
    model, lora, algorithm = spec.config.model, spec.config.lora, spec.config.algorithm
    if base_key(spec) != base_key(baseline):
        return "its base, problems or adapted layers differ from the baseline's"
    rank = min([model.lora_rank, *(rank for stage, rank in lora.anneal if stage < step)])
    if adapter["r"] != rank or not np.isclose(adapter["lora_alpha"] / rank, lora.alpha / model.lora_rank):
        return f"the checkpoint's adapter has rank {adapter['r']} and alpha {adapter['lora_alpha']:g}"
    if algorithm.critic and not (checkpoint / CRITIC).is_file():
        return "the checkpoint holds no critic"
    return ""


class _Measurements(Messages):
    def __init__(self, fork: Fork, progress: Progress):
        super().__init__(progress)
        self.fork = fork
        self.samples = {each.name: each.samples for each in fork.plan.specs[0].config.held_out}
        self.before: dict[int, float] = {}
        self.after: dict[tuple[str, int], float] = {}
        self.failures: list[str] = []
        self.tokens = 0

    def step(self, spec: SpecLike, row: Values) -> None:
        self.tokens += row["env/all/total_ac_tokens"]
        if spec.run_id == self.fork.plan.specs[-1].run_id:
            self.message(f"step {row['step'] + 1} of {self.fork.end}")

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        answers = row[f"eval/{name}/problems"] * self.samples[name]
        self.tokens += round(answers * (row[f"eval/{name}/mean_length"] or 0))
        value = row.get(self.fork.measure.key)
        if value is not None and row[f"eval/{name}/step"] == self.fork.state.step:
            self.before[spec.seed] = value
        elif value is not None:
            self.after[spec.label, spec.seed] = value

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        if status == "failed":
            self.failures.append(f"{spec.run_id} failed: {message}")


def run_fork(fork: Fork, progress: Progress) -> Row:
    """Continue every condition and return the ranking as plain data, the highest change first.

    ``change`` is a condition's held-out metric at the end minus its metric at the checkpoint, ``difference`` its metric
    at the end minus the baseline's. Both are means over seeds with 95 % t intervals, paired by seed. The metric at the
    checkpoint is measured once per seed, because all conditions have the same weights there. Raises UsageError for a
    checkpoint of other weights, and the errors of training.
    """
    begin, results = time.monotonic(), _Measurements(fork, progress)
    on_gpu = torch.cuda.is_available() and fork.plan.specs[0].config.backend.device != "cpu"
    waiting = deque(cut(fork.plan.specs, on_gpu))
    with TemporaryDirectory(prefix="retrain-probe-") as folder, Bases() as bases:
        plan = replace(fork.plan, directory=Path(folder))
        while waiting:
            group = waiting.popleft()
            try:
                _continue(plan.job(group), fork, results, bases)
            except DoesNotFit as short:
                waiting.extendleft(reversed(smaller_cohorts(group, short.lanes, str(short))))
    conditions = [_condition(label, fork, results) for label in fork.labels]
    conditions.sort(key=lambda row: -row["change"]["estimate"] if row["change"] else np.inf)
    return {
        "name": fork.plan.name,
        "checkpoint": str(fork.checkpoint),
        "run": fork.state.run_id,
        "step": fork.state.step,
        "end": fork.end,
        "max_steps": min(spec.config.training.max_steps for spec in fork.plan.specs),
        "seeds": fork.seeds,
        "metric": fork.measure.key,
        "before": float(np.mean(list(results.before.values()))) if results.before else None,
        "baseline": fork.labels[0],
        "conditions": conditions,
        "notes": [*fork.left_out, *results.failures],
        "tokens": results.tokens,
        "share": fork.share,
        "seconds": time.monotonic() - begin,
        "forecast": FORECAST,
    }


def _continue(job: CohortJob, fork: Fork, results: _Measurements, bases: Bases) -> None:
    with ExitStack() as stack:
        failed = len(results.failures)
        cohort = assemble(job, results, lambda: False, stack, bases)
        if len(results.failures) > failed:
            raise UsageError(f"{fork.checkpoint} cannot be continued: {results.failures[failed]}")
        for run in cohort.runs:
            if "sepa" not in fork.state.algorithm:
                run.algorithm.restore(with_open_gate(run.algorithm.state()))
        cohort.extent = lambda run: "whole" if run.step == fork.end else None
        first = {run.spec.seed: run for run in reversed(cohort.runs) if run.spec.seed not in results.before}
        with closing(cohort.train()) as pauses:
            next(pauses)  # after this the engine has the weights
            cohort.evaluations.trained(dict.fromkeys(first.values(), "whole"))
            for _ in pauses:
                if all(run.error is not None or run.step >= fork.end for run in cohort.runs):
                    break
        bases.forget_adapters()


def _condition(label: str, fork: Fork, results: _Measurements) -> Row:
    before, after = results.before, results.after
    seeds = [seed for seed in fork.seeds if (label, seed) in after and seed in before]
    pairs = [(after[label, seed], after[fork.labels[0], seed]) for seed in seeds if (fork.labels[0], seed) in after]
    return {
        "label": label,
        "change": _interval([(after[label, seed], before[seed]) for seed in seeds]),
        "difference": None if label == fork.labels[0] else _interval(pairs),
        "changes": {seed: after[label, seed] - before[seed] for seed in seeds},
    }


def _interval(pairs: Sequence[tuple[float, float]]) -> dict[str, float | None] | None:
    return vars(paired_interval([a for a, _ in pairs], [b for _, b in pairs])) if pairs else None
