"""Read runs for a comparison: one number per run for any metric, with tokens and seconds.

A measure is a metric with a summary, which makes one number of a run's curve: ``final`` is the value after the last
update, ``last3`` the mean over the last three scheduled evaluations, ``auc`` the area under the curve over steps,
divided by the number of steps (the mean height of the curve).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeGuard

from retrain.config.evaluation import DECIDING, HELDOUT, PART, SUMMARIES, last_evaluations, too_early
from retrain.config.root import sections
from retrain.errors import UsageError
from retrain.records.catalogue import BY_KEY
from retrain.records.reader import evaluation_rows, metrics_rows, read_config
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import RunEntry

METRIC = f"eval/{HELDOUT}/correct_rate"
# Metrics of the held-out evaluation that may be named without its prefix
HELD_OUT_SHORT = ("correct_rate", "reward_mean", "audit", "mean_length", "pass@<k>", "avg@<k>", "maj@<k>")
# Metrics whose larger values are better
MERITS = r"(correct_rate|reward_mean|audit|mean_reward|reward/total|(pass|avg|maj)@\d+)$"
# The final value of a training metric is its mean over the last tenth of the steps, because single steps are noisy
LAST_SHARE = 10

SECTIONS = frozenset(sections())
SHARED_SPANS = ("rollout", "eval")
OWN_SPANS = ("score", "credit", "update", "record", "checkpoint")


@dataclass(frozen=True)
class Measure:
    summary: str = "final"
    key: str = METRIC
    # Held-out set of a metric of another tool, whose key does not name it; None: the key decides
    set_name: str | None = None
    # None: the catalogue of metrics decides
    unit: Literal["share", "number"] | None = None
    # Whether a larger value is an improvement; None: the key decides
    merit: bool | None = None

    @classmethod
    def parse(cls, text: str, held_out: str = HELDOUT) -> Measure:
        """Return the measure that ``summary``, ``key`` or ``summary:key`` names (``last3``, ``pass@4``,
        ``auc:pass@4``); by default ``final`` and ``correct_rate``. Keys of HELD_OUT_SHORT and ``<tag>/correct_rate``
        get the prefix ``eval/<held_out>/``."""
        summary, colon, key = text.partition(":")
        if summary not in SUMMARIES:
            summary, key = "final", text
        elif not colon or not key:
            key = "correct_rate"
        of_tag = key.count("/") == 1 and key.endswith("/correct_rate")
        short = "/" not in key and re.sub(r"@\d+$", "@<k>", key) in HELD_OUT_SHORT
        return cls(summary, f"eval/{held_out}/{key}" if short or of_tag else key)

    @property
    def name(self) -> str:
        return f"{self.summary}:{self.key}"

    @property
    def is_held_out(self) -> bool:
        return self.held_out is not None

    @property
    def held_out(self) -> str | None:
        if self.set_name is not None:
            return self.set_name
        return self.key.split("/")[1] if self.key.startswith("eval/") else None

    @property
    def is_share(self) -> bool:
        """True where values lie in [0, 1]; their differences are in percentage points."""
        if self.unit is not None:
            return self.unit == "share"
        metric = BY_KEY.get(self._pattern())
        return metric is not None and metric.unit == "share"

    @property
    def higher_is_better(self) -> bool | None:
        """True if a larger value is an improvement; None if unknown, so that verdicts say "higher" and not "better"."""
        if self.merit is not None:
            return self.merit
        return True if re.search(MERITS, self.key) else None

    def _pattern(self) -> str:
        """Return the key as in the catalogue, with placeholders for names and numbers."""
        key = re.sub(r"@\d+", "@<k>", self.key)
        if key in BY_KEY or not key.startswith("eval/"):
            return key
        parts = key.split("/")
        return "/".join(["eval", "<name>", *(["<tag>"] if len(parts) > 3 else []), parts[-1]])


@dataclass
class RunResult:
    """One run with its state and its rows (all that were written, also by a run that failed).

    Runs of different conditions with equal ``pair`` (campaign seed, run seed) share random streams and are compared.
    ``facts`` is the whole ``config.json`` of the run, ``config`` only its configuration sections.
    """

    run_id: str
    label: str
    seed: int
    state: str
    reason: str | None
    path: Path
    pair: tuple[int, int] = (0, 0)
    rows: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    config: Row = field(default_factory=dict)
    facts: Row = field(default_factory=dict)
    # Score of each problem by step; None: to be computed from the completions in ``path``
    problems: Mapping[int, Mapping[str, float]] | None = None
    # Largest change of an evaluation's value by one answer or by rounding; None: to be computed from its row
    value_step: float | None = None

    @property
    def set_names(self) -> list[str]:
        sets = self.config.get("evaluation", {}).get("sets") or [{"name": HELDOUT}]
        return [each["name"] for each in sets]

    @property
    def schedule(self) -> str:
        return self.config.get("evaluation", {}).get("schedule", "every")

    @property
    def last_three(self) -> tuple[int, ...]:
        """Numbers of updates at the last three evaluations (or fewer) on all problems that the configured schedule has.
        An evaluation at the former end of a run that was continued does not count."""
        training = self.config.get("training", {})
        if "eval_every" in training and "max_steps" in training:
            steps = last_evaluations(self.schedule, training["max_steps"], training["eval_every"])
        else:  # the schedule was not recorded
            steps = sorted({int(row["step"]) for row in self.evaluations if row["step"]})
        return tuple(steps[-DECIDING:])

    @property
    def done(self) -> bool:
        return self.state == "done"

    def curve(self, key: str, set_name: str | None = None) -> list[tuple[int, float]]:
        """Return (step, value) of the rows that have the metric. For a held-out metric, the step is the number of
        updates done at the evaluation. ``set_name`` as in ``Measure``."""
        if name := Measure(key=key, set_name=set_name).held_out:
            rows = [row for row in self.evaluations if row.get("name") == name]
        else:
            rows = self.rows
        return [(int(row["step"]), float(value)) for row in rows if _is_number(value := row.get(key))]

    def value(self, measure: Measure) -> float | None:
        """Return the value of a measure; None if the files have none, or if the last evaluation could not be graded."""
        curve = self.curve(measure.key, measure.set_name)
        if not curve or (measure.summary == "last3" and not measure.is_held_out):
            return None
        if measure.is_held_out:
            return self._held_out_value(measure, curve)
        values = [value for _, value in curve]
        if measure.summary == "final":
            values = values[-max(1, len(values) // LAST_SHARE) :]
        return sum(values) / len(values)

    def _held_out_value(self, measure: Measure, curve: Sequence[tuple[int, float]]) -> float | None:
        rows = [row for row in self.evaluations if row.get("name") == measure.held_out]
        if curve[-1][0] != rows[-1]["step"]:
            return None  # the last evaluation could not be graded
        if measure.summary == "final":
            return curve[-1][1]
        if measure.summary == "auc":
            # Under the schedule "verdict", evaluations between the start and the end are of parts of the problems.
            return None if self.schedule == "verdict" else area_under(curve)
        values = dict(curve)
        last = [values[step] for step in self.last_three if step in values]
        return sum(last) / DECIDING if len(last) == DECIDING else None

    def result(self, measure: Measure) -> float | None:
        return self.value(measure) if self.done else None

    def before(self, measure: Measure) -> float | None:
        curve = self.curve(measure.key, measure.set_name) if measure.is_held_out else []
        if len(curve) == 1 and measure.set_name is not None:
            return None  # another tool may call the step of its only evaluation 0
        return curve[0][1] if curve and curve[0][0] == 0 else None

    def weights(self, measure: Measure) -> dict[int, float]:
        """Return the weight of each evaluation, by step, in the value of a held-out measure; empty for others."""
        steps = [step for step, _ in self.curve(measure.key, measure.set_name)] if measure.is_held_out else []
        if not steps:
            return {}
        if measure.summary == "auc":
            span = steps[-1] - steps[0]
            ends = [steps[0], *steps, steps[-1]]
            return {step: (ends[i + 2] - ends[i]) / (2 * span) for i, step in enumerate(steps)} if span else {}
        last = [step for step in self.last_three if step in steps] if measure.summary == "last3" else steps[-1:]
        return {step: 1.0 / len(last) for step in last}

    def resolution(self, measure: Measure) -> float:
        """Return the largest change of a held-out rate, pass@k, avg@k or maj@k by one changed answer; 0 where unknown.

        For a weighted mean of several evaluations, it is multiplied by the root of the summed squared weights, because
        their rounding errors are independent. For a tag, it is the resolution of all problems, a lower bound: the
        number of problems with the tag is not recorded.
        """
        if self.value_step is not None:
            return self.value_step * math.sqrt(sum(weight**2 for weight in self.weights(measure).values()))
        rate = re.fullmatch(r"eval/[^/]+(?:/[^/]+)?/(correct_rate|(pass|avg|maj)@(\d+))", measure.key)
        last = self.last_evaluations.get(measure.held_out or "", {})
        problems, samples = last.get(f"eval/{measure.held_out}/problems") or 0, last.get("samples") or 1
        if rate is None or not problems:
            return 0.0
        kind, k = rate[2], int(rate[3] or 1)
        answer = 1.0 / samples
        if kind == "pass":  # most, if the changed answer is the problem's only right one
            answer = min(k, samples) / samples
        elif kind == "maj":  # the changed answer decides a vote among k
            answer = 1.0 / max(1, samples // k)
        return answer / problems * math.sqrt(sum(weight**2 for weight in self.weights(measure).values()))

    @property
    def last_evaluations(self) -> dict[str, Row]:
        rows = {str(row.get("name", HELDOUT)): row for row in self.evaluations}
        return {name: row for name, row in rows.items() if not name.endswith(PART)}

    @property
    def metric_keys(self) -> set[str]:
        """Keys that a measure can name: keys of evaluations, and keys with a number in the last row of training."""
        held_out = {key for row in self.last_evaluations.values() for key in row if key.startswith("eval/")}
        return held_out | {key for row in self.rows[-1:] for key, value in row.items() if _is_number(value)}

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions in training, evaluations not counted."""
        return int(self.rows[-1].get("num_tokens") or 0) if self.rows else 0

    @property
    def device_seconds(self) -> float:
        return sum(_device_seconds(row) for row in self.rows)


def area_under(curve: Sequence[tuple[int, float]]) -> float | None:
    """Return the mean height of a curve of (step, value) points by the trapezoid rule; None for a single point."""
    if len(curve) < 2 or curve[-1][0] == curve[0][0]:
        return None
    area = sum((s1 - s0) * (v0 + v1) / 2 for (s0, v0), (s1, v1) in pairwise(curve))
    return area / (curve[-1][0] - curve[0][0])


def read_run(directory: Path, entry: RunEntry, rows: list[Row] | None = None) -> RunResult:
    """Read a run's files. If ``rows`` are given, they replace the rows of ``metrics.jsonl``, which is not read."""
    path = directory / entry.path
    facts = read_config(path)
    config = {name: table for name, table in facts.items() if name in SECTIONS and isinstance(table, dict)}
    seed = entry.seed or 0
    return RunResult(
        run_id=entry.run_id,
        label=entry.label,
        seed=seed,
        state=entry.state,
        reason=entry.reason,
        path=path,
        pair=(config.get("campaign", {}).get("seed", 0), seed),
        rows=metrics_rows(path) if rows is None else rows,
        evaluations=evaluation_rows(path),
        config=config,
        facts=facts,
    )


Pair = tuple[int, int]


def finished_of(label: str, runs: Sequence[RunResult], measure: Measure) -> dict[Pair, tuple[RunResult, float]]:
    """Return the finished runs of a condition with their values, sorted by pair; runs without a value are left out."""
    mine = sorted((run for run in runs if run.label == label), key=lambda run: run.pair)
    return {run.pair: (run, value) for run in mine if (value := run.result(measure)) is not None}


def values_of(label: str, runs: Sequence[RunResult], measure: Measure) -> dict[Pair, float]:
    return {pair: value for pair, (_, value) in finished_of(label, runs, measure).items()}


def first_set(runs: Sequence[RunResult]) -> str:
    """Return the held-out set to which short metric names refer: the runs' first set."""
    return next((name for run in runs for name in run.set_names), HELDOUT)


def require_measure(measure: Measure, runs: Sequence[RunResult]) -> None:
    """Raise UsageError, with the nearest keys, when no run has this metric at all."""
    keys = {key for run in runs for key in run.metric_keys}
    if measure.key in keys or not any(run.rows or run.evaluations for run in runs):
        return
    prefix = f"eval/{first_set(runs)}/"
    short = {key.removeprefix(prefix): None for key in keys}
    near = get_close_matches(measure.key.removeprefix(prefix), list(short), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}" if near else ""
    raise UsageError(f"no run has the metric {measure.key}{hint}")


def require_evaluations(measure: Measure, runs: Sequence[RunResult]) -> None:
    """Raise UsageError if no finished run has the evaluations that the measure's summary needs."""
    finished = [run for run in runs if run.done]
    if measure.summary == "last3" and not measure.is_held_out:
        raise UsageError(
            f"{measure.name} is no mean of three evaluations: {measure.key} is a number of training, whose final value "
            f"is its mean over the last tenth of the steps; type --metric {measure.key}"
        )
    if measure.summary == "last3" and finished and all(len(run.last_three) < DECIDING for run in finished):
        raise UsageError(
            "no run has three evaluations after the start, which last3 is the mean of; type --metric final, or train "
            'with [evaluation] schedule = "verdict"'
        )
    curveless = bool(finished) and all(run.schedule == "verdict" for run in finished)
    if measure.summary == "auc" and measure.is_held_out and curveless:
        raise UsageError(
            'no run has a curve to take the area under: with [evaluation] schedule = "verdict" only the last '
            "evaluations have all problems; type --metric last3"
        )


def last3_notes(measure: Measure, runs: Sequence[RunResult]) -> list[str]:
    """Return a warning if the evaluations of ``last3`` differ between runs or begin well before the end of training."""
    if measure.summary != "last3":
        return []
    seen = {run.last_three: run for run in runs if run.done and len(run.last_three) == DECIDING}
    listed = [f"{a}, {b} and {c}" for a, b, c in seen]
    if len(seen) > 1:
        return [f"last3 is not the same in all runs: the mean of the evaluations after {' or '.join(listed)} steps."]
    if any(too_early(three[0], three[-1]) for three in seen):
        return [f"last3 is the mean of the evaluations after {listed[0]} steps: not of the end of training alone."]
    return []


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_text(value: object) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _device_seconds(row: Values) -> float:
    # Seconds in which a cohort's runs sample or evaluate together are divided by the number of its runs
    separate = sum(row.get(f"time/{part}") or 0.0 for part in OWN_SPANS)
    shared = sum(row.get(f"time/{part}") or 0.0 for part in SHARED_SPANS)
    return separate + shared / (row.get("cohort_size") or 1)
