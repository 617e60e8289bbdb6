"""Collect a report's data from a campaign's files: curves over seeds, distributions, answers to the same prompt."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
from pydantic import TypeAdapter

from retrain.config.campaign import condition_name
from retrain.config.evaluation import HELDOUT, PART
from retrain.config.root import flat
from retrain.files import read_jsonl
from retrain.records.reader import held_out_completions, planned_configs, read_manifest
from retrain.records.schema.base import Row
from retrain.records.schema.comparison import Comparison
from retrain.records.schema.layout import GENERATIONS
from retrain.verdicts.pooling import compare_directories, read_source
from retrain.verdicts.results import Measure, RunResult, first_set, value_text
from retrain.verdicts.tables import TableComparison

Point = tuple[float, float]
Completion = Row  # A row of ``emergence/evaluations.jsonl`` or ``emergence/generations.jsonl``
Side = Sequence[tuple[int, Completion]]  # Completions with the seeds of their runs
MIN_BAND_SEEDS = 3  # With two seeds, the 95 % interval is ±12.7 standard errors and would hide the chart
SMOOTHING = 20  # Training curves are moving averages over 1/20 of the steps, at least 3; none below 12 steps


@dataclass
class Campaign:
    """The records of a campaign, its runs in the manifest's order, and the resolved configuration of each condition.
    Labels are ``condition_name``s."""

    directory: Path
    manifest: Row
    comparison: Comparison
    runs: list[RunResult]
    configs: dict[str, Row]
    # Measure of results of other tools, of which only evaluations are known; None for runs of retrain
    foreign: Measure | None = None

    @property
    def labels(self) -> list[str]:
        return [condition.label for condition in self.comparison.conditions]

    @property
    def measure(self) -> Measure:
        return self.measure_of(self.comparison.summary, self.comparison.metric)

    def measure_of(self, summary: str, key: str) -> Measure:
        return Measure(summary, key) if self.foreign is None else replace(self.foreign, summary=summary, key=key)

    @property
    def set_names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.set_names))

    @property
    def shown_set(self) -> str:
        """Held-out set whose completions are shown: the set of the compared metric, else the first set."""
        return self.measure.held_out or first_set(self.runs)

    def of(self, label: str) -> list[RunResult]:
        return sorted((run for run in self.runs if run.label == label), key=lambda run: run.pair)


def read_campaign(directory: Path) -> Campaign:
    """Return the records of a campaign for its report, with a comparison of the runs that have ended. Raises UsageError
    if the directory is no campaign or run."""
    runs = read_source(directory).runs
    manifest = read_manifest(directory)
    comparison = compare_directories([directory])
    planned, configs = planned_configs(directory), {}
    for run in manifest["runs"]:
        if run["run_id"] in planned:
            configs.setdefault(run["label"], planned[run["run_id"]])
    labels = [condition["label"] for condition in comparison["conditions"]]
    for run in runs:
        run.label = condition_name(run.label)
    configs = {condition_name(label): config for label, config in configs.items()}
    renamed = TypeAdapter(Comparison).validate_python(_with_condition_names(comparison, labels))
    return Campaign(directory, manifest, renamed, runs, configs)


def campaign_of_tables(name: str, judged: TableComparison) -> Campaign:
    """Return other tools' results for a report; ``name`` is the comparison file or the paths that were compared."""
    manifest = {"name": name, "updated": time.time()}
    return Campaign(Path(), manifest, judged.comparison, judged.runs, {}, foreign=judged.measure)


def _with_condition_names(report: object, labels: Iterable[str]) -> object:
    """Return a copy of plain data with these labels replaced by their ``condition_name``, as keys and as values."""
    names = {label: condition_name(label) for label in labels}

    def renamed(value: object) -> object:
        if isinstance(value, Mapping):
            return {names.get(key, key): renamed(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [renamed(each) for each in value]
        return names.get(value, value) if isinstance(value, str) else value

    return renamed(report)


class RunCurve(TypedDict):
    seed: int
    points: Sequence[Point]


class Curve(TypedDict):
    """A metric of a condition, as the page's charts take it.

    ``mean`` [step, value] is over the ``n`` finished runs, with the 95 % interval as ``band`` [step, low, high].
    ``runs`` has the points of all runs, also failed and unfinished ones. ``part`` has the points of evaluations of a
    part of the problems.
    """

    label: str
    index: int
    n: NotRequired[int]
    mean: Sequence[Point]
    band: Sequence[tuple[float, float, float]]
    runs: Sequence[RunCurve]
    part: Sequence[Point]


def curve(label: str, index: int, runs: Sequence[RunResult], measure: Measure, *, smooth: bool) -> Curve:
    lines: list[tuple[RunResult, Sequence[Point]]] = []
    for run in runs:
        points: Sequence[Point] = run.curve(measure.key, measure.set_name)
        if smooth and points:
            steps, levels = zip(*points, strict=True)
            averages = moving_average(np.arange(len(steps)), np.array(levels), window_of(len(steps)))
            points = list(zip(steps, averages.tolist(), strict=True))
        if points:
            lines.append((run, points))
    finished = [dict(points) for run, points in lines if run.done]
    common = sorted(set.intersection(*map(set, finished))) if finished else []
    values = np.array([[points[step] for step in common] for points in finished])
    ends = interval_of_means(values, measure.is_share)
    return {
        "label": label, "index": index, "n": len(finished),
        "mean": list(zip(common, values.mean(axis=0).tolist(), strict=True)) if common else [],
        "band": [] if ends is None else list(zip(common, *(end.tolist() for end in ends), strict=True)),
        "runs": [{"seed": run.seed, "points": points} for run, points in lines],
        "part": _parts(runs, measure.key),
    }  # fmt: skip


def interval_of_means(values: np.ndarray, is_share: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """Return both ends [steps] of the 95 % t interval of the mean over runs of ``values`` [runs, steps]; None below
    ``MIN_BAND_SEEDS`` runs."""
    from scipy.special import stdtrit

    runs = len(values)
    if runs < MIN_BAND_SEEDS:
        return None
    reach = stdtrit(runs - 1, 0.975) * values.std(axis=0, ddof=1) / math.sqrt(runs)
    low, high = values.mean(axis=0) - reach, values.mean(axis=0) + reach
    return (np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)) if is_share else (low, high)


def _parts(runs: Sequence[RunResult], key: str) -> list[Point]:
    """Return (step, mean over runs) of evaluations of a part of the problems, which take place between full
    evaluations. Uses the finished runs, or all runs if none is finished."""
    name = Measure(key=key).held_out
    if name is None:
        return []
    part = key.replace(f"eval/{name}/", f"eval/{name}{PART}/", 1)
    curves = [dict(run.curve(part)) for run in [run for run in runs if run.done] or runs]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(step, sum(points[step] for points in curves) / len(curves)) for step in steps]


def window_of(steps: int) -> int:
    return max(3, steps // SMOOTHING) if steps >= 12 else 1


def moving_average(steps: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """Return for each value the mean of the values at the last ``window`` steps, including its own step. NaN stay NaN
    and are left out of means; ``steps`` must ascend."""
    finite = np.isfinite(values)
    if window < 2 or not finite.any():
        return values
    at, numbers = np.maximum.accumulate(steps[finite]), values[finite].astype(np.float64)
    total = np.concatenate([[0.0], np.cumsum(numbers)])
    ends = np.arange(1, len(numbers) + 1)
    starts = np.minimum(np.searchsorted(at, at - window, side="right"), ends - 1)
    averages = np.full(len(values), np.nan)
    averages[finite] = (total[ends] - total[starts]) / (ends - starts)
    return averages


def completions(run: RunResult, held_out: str) -> tuple[list[Completion], list[Completion], str]:
    """Return the completions of the run's first and last evaluation on a held-out set, and a phrase that names them.

    Without evaluations: those of the first and last tenth of training, where the same seed met the same prompts.
    """
    rows = held_out_completions(run.path, held_out)
    evaluation = "held-out evaluation" if held_out == HELDOUT else f"held-out evaluation on {held_out}"
    if rows:
        first, last = rows[0]["step"], rows[-1]["step"]
        early = [row for row in rows if row["step"] == first] if first < last else []
        return early, [row for row in rows if row["step"] == last], evaluation
    rows = read_jsonl(run.path / GENERATIONS)
    if not rows:
        return [], [], evaluation
    steps = rows[-1]["step"] + 1
    tenth = max(1, steps // 10)
    early = [row for row in rows if row["step"] < tenth] if steps > tenth else []
    return early, [row for row in rows if row["step"] >= steps - tenth], "training prompts, first and last tenth"


@dataclass
class Twin:
    """Answers to one prompt on two sides: two conditions, or before and after training. ``first``, ``second``: (right
    answers, all answers) on each side; ``examples``: an answer of the run with ``seed`` on each side."""

    problem: str
    prompt: str
    first: tuple[int, int]
    second: tuple[int, int]
    examples: tuple[Completion, Completion]
    seed: int
    tags: tuple[str, ...] = ()

    @property
    def change(self) -> float:
        return self.second[0] / self.second[1] - self.first[0] / self.first[1]


def twins(sides: Sequence[tuple[int, Sequence[Completion], Sequence[Completion]]], most: int) -> tuple[list[Twin], int]:
    """Return the prompts whose solve rate differs most between two sides, and the number of prompts on both sides.

    ``sides`` has (seed, completions on the first side, on the second) for every seed that has both. Ties are broken by
    the problem's name, so that a repeated report is the same.
    """
    by_problem: dict[str, tuple[list[tuple[int, Completion]], list[tuple[int, Completion]]]] = {}
    for seed, *both in sides:
        common = set.intersection(*({row["problem_id"] for row in rows} for rows in both))
        for side, rows in enumerate(both):
            for row in rows:
                if row["problem_id"] in common:
                    by_problem.setdefault(row["problem_id"], ([], []))[side].append((seed, row))
    pairs = [_twin(problem, *both) for problem, both in by_problem.items()]
    pairs.sort(key=lambda twin: (-abs(twin.change), twin.problem))
    return [twin for twin in pairs[:most] if twin.change != 0.0], len(pairs)


def _twin(problem: str, first: Side, second: Side) -> Twin:
    before, after = _counts(first), _counts(second)
    rises = after[0] * before[1] > before[0] * after[1]
    pairs = [(a, b, seed) for seed, a in first for other, b in second if other == seed]
    # A pair that shows the change: wrong on one side, right on the other, in the direction of the rates.
    typical = (pair for pair in pairs if bool(pair[0]["correct"]) != rises and bool(pair[1]["correct"]) == rises)
    a, b, seed = next(typical, pairs[0])
    return Twin(problem, a["prompt"], before, after, (a, b), seed, tuple(a.get("tags") or ()))


def _counts(side: Side) -> tuple[int, int]:
    """Return the numbers of right and of all answers. The untrained model, sampled once for all seeds, counts once."""
    by_seed: dict[int, list[tuple[str, bool]]] = defaultdict(list)
    for seed, row in side:
        by_seed[seed].append((row["completion"], bool(row["correct"])))
    samples = list(by_seed.values())
    if all(row["step"] == 0 for _, row in side) and all(answers == samples[0] for answers in samples):
        samples = samples[:1]
    marks = [correct for answers in samples for _, correct in answers]
    return sum(marks), len(marks)


def settings(configs: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return (dotted key, value of each configuration) for every setting in which the configurations differ."""
    tables = [dict(flat(config)) for config in configs]
    out = []
    for key in dict.fromkeys(key for table in tables for key in table):
        if key.startswith(("campaign.", "logging.")) or key == "training.seed":
            continue  # the name of a run and where its logs go always differ
        values = [value_text(table.get(key)) for table in tables]
        if len(set(values)) > 1:
            out.append((key, values))
    return out
