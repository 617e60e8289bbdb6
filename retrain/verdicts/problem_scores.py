"""Scores of a run on every held-out problem, from the completions of its evaluations."""

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

import numpy as np

from retrain.maths.crossed import new_problems_interval
from retrain.maths.statistics import Interval, majority, pass_at_k
from retrain.records.reader import held_out_completions
from retrain.records.schema.base import Row
from retrain.verdicts.results import Measure, Pair, RunResult, finished_of

SAME = 1e-6  # Rounding tolerance between the mean over problems and the run's recorded value


def problem_scores(run: RunResult, measure: Measure) -> dict[str, float] | None:
    """Return the run's score on each problem, by problem id; the mean over problems is the run's value.

    Scores of other tools are in ``RunResult.problems``. For retrain's runs they are computed from the completions.
    Returns None for metrics other than accuracy, reward, length, pass@k, avg@k and maj@k, for runs without completions
    (of earlier releases), and if the mean over problems differs from the recorded value.
    """
    value, weights = run.value(measure), run.weights(measure)
    if value is None or not weights:
        return None
    of_steps = _scores_of_completions(run, measure, weights) if run.problems is None else run.problems
    scores = _weighted(of_steps, weights)
    mean = sum(scores.values()) / len(scores) if scores else math.nan
    return scores if math.isclose(mean, value, rel_tol=SAME, abs_tol=SAME) else None


def _scores_of_completions(run: RunResult, measure: Measure, steps: Container[int]) -> dict[int, dict[str, float]]:
    """Return the score of each problem by step."""
    _, _, *tag, metric = measure.key.split("/")
    samples: dict[int, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in held_out_completions(run.path, measure.held_out):
        if row["step"] in steps and (not tag or tag[0] in row["tags"]):
            samples[row["step"]][row["problem_id"]].append(row)
    return {
        step: {problem: _score(rows, metric) for problem, rows in of_step.items()} for step, of_step in samples.items()
    }


def _weighted(problems: Mapping[int, Mapping[str, float]], weights: Mapping[int, float]) -> dict[str, float] | None:
    """Return the weighted mean over evaluations of each problem's score; None if they do not have the same problems."""
    of_steps = [problems.get(step, {}) for step in weights]
    if not of_steps[0] or any(scores.keys() != of_steps[0].keys() for scores in of_steps):
        return None
    return {
        problem: sum(weight * scores[problem] for weight, scores in zip(weights.values(), of_steps, strict=True))
        for problem in of_steps[0]
    }


def _score(rows: Sequence[Row], metric: str) -> float:
    correct = [bool(row["correct"]) for row in rows]
    name, _, k = metric.partition("@")
    match name:
        case "correct_rate" | "avg":
            return sum(correct) / len(correct)
        case "pass":
            return pass_at_k(len(correct), sum(correct), int(k))
        case "maj":
            return majority([row.get("answer") for row in rows], correct, int(k))
        case "reward_mean":
            return float(np.mean([math.nan if row["reward"] is None else row["reward"] for row in rows]))
        case "mean_length":
            return float(np.mean([row["num_tokens"] for row in rows]))
        case _:
            return math.nan


class ProblemScores:
    """Problem scores of all runs. A run's files are read when they are first needed, and only once."""

    def __init__(self, runs: Sequence[RunResult], measure: Measure):
        self._runs, self.measure = runs, measure
        self._finished: dict[str, dict[Pair, RunResult]] = {}
        self._scores: dict[int, dict[str, float] | None] = {}

    def new_problems_interval(self, label: str, baseline: str, level: float, resolution: float) -> Interval | None:
        """Return the interval of a difference for other seeds and new problems; None for a training metric, with fewer
        than two pairs, or if the runs do not have the same problems."""
        if not self.measure.is_held_out:
            return None
        mine, base = self._finished_of(label), self._finished_of(baseline)
        rows = []
        for pair in (pair for pair in mine if pair in base):
            a, b = self._of(mine[pair]), self._of(base[pair])
            if a is None or b is None or set(a) != set(b) or (rows and len(a) != len(rows[0])):
                return None
            rows.append([[a[problem], b[problem]] for problem in sorted(a)])
        return new_problems_interval(np.array(rows), level, resolution) if len(rows) > 1 else None

    def _finished_of(self, label: str) -> dict[Pair, RunResult]:
        if label not in self._finished:
            results = finished_of(label, self._runs, self.measure)
            self._finished[label] = {pair: run for pair, (run, _) in results.items()}
        return self._finished[label]

    def _of(self, run: RunResult) -> dict[str, float] | None:
        if id(run) not in self._scores:
            self._scores[id(run)] = problem_scores(run, self.measure)
        return self._scores[id(run)]
