"""What a run scored on every held-out problem, from the completions of its evaluations."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.maths.statistics import majority, pass_at_k
from retrain.records.reader import RunReader
from retrain.verdicts.results import Measure, RunResult

Row = dict[str, Any]
SAME = 1e-6  # Rounding tolerance between the mean over problems and the run's recorded value


def problem_scores(run: RunResult, measure: Measure) -> dict[str, float] | None:
    """Each problem's part in the run's number, by problem id; their mean is that number.

    None where the run's files do not say: another metric than accuracy, reward, length, pass@k, avg@k and maj@k,
    completions that are not there (directories of earlier releases), or that give another number.
    """
    value, weights = run.value(measure), run.weights(measure)
    if value is None or not weights:
        return None
    parts = measure.key.split("/")
    tag = parts[2] if len(parts) == 4 else None
    samples: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in RunReader(run.path).held_out_completions(measure.held_out):
        if row["step"] in weights and (tag is None or tag in row["tags"]):
            samples[row["step"], row["problem_id"]].append(row)
    problems = list(dict.fromkeys(problem for _, problem in samples))
    if not problems or len(samples) != len(problems) * len(weights):
        return None
    scores = {}
    for problem in problems:
        of_steps = [_score(samples[step, problem], parts[-1]) for step in weights]
        scores[problem] = sum(w * s for w, s in zip(weights.values(), of_steps, strict=True))
    mean = sum(scores.values()) / len(scores)
    return scores if math.isclose(mean, value, rel_tol=SAME, abs_tol=SAME) else None


def _score(rows: Sequence[Row], metric: str) -> float:
    """The metric of one problem, NaN where it is none of a problem."""
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
