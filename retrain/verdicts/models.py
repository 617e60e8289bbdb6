"""Comparison of one model for each condition by problem: a statement about these models, not about training runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from retrain.errors import plural
from retrain.maths.bounded import bounded_mean_interval
from retrain.maths.statistics import paired_interval
from retrain.records.schema.base import Row, Values
from retrain.records.schema.comparison import ConditionComparison
from retrain.util.text import points
from retrain.verdicts.comparison import condition_level
from retrain.verdicts.declaration import Standing
from retrain.verdicts.problem_scores import problem_scores
from retrain.verdicts.results import Measure, RunResult, finished_of
from retrain.verdicts.rule import ALPHA
from retrain.verdicts.wording import models_sentence, models_verdict


def model_conditions(
    runs: Sequence[RunResult], labels: Sequence[str], measure: Measure, standing: Standing
) -> list[ConditionComparison]:
    """Return all conditions, the baseline first, compared by problem. There is one run for each condition."""
    by_label = {label: next((run for run, _ in finished_of(label, runs, measure).values()), None) for label in labels}
    scores = {label: problem_scores(run, measure) if run else None for label, run in by_label.items()}
    levels = [_with_interval(condition_level(label, runs, measure), scores[label], measure) for label in labels]
    of_models = [{measure.key: scores[label] or {}} for label in labels]
    rows = {row["model"]: row for row in compare_models(labels, of_models, share=measure.is_share)}
    conditions = [replace(levels[0], verdict="baseline")]
    for level in levels[1:]:
        status = standing.of(level.label, labels[0], runs, [run.seed for run in runs])
        condition = replace(
            level, standing=status.name, standing_reasons=status.reasons, pairs_planned=status.pairs_planned
        )
        row = rows.get(level.label)
        if row is not None:
            ends = None if row["low"] is None else [row["low"], row["high"]]
            difference = row["difference"]
            condition = replace(
                condition, difference=difference, typical_difference=difference, difference_interval=ends
            )
        condition = replace(condition, verdict=models_verdict(condition, measure))
        problems = 0 if row is None else row["problems"]
        text = models_sentence(condition, labels[0], measure, problems=problems, comparisons=len(labels) - 1)
        conditions.append(replace(condition, sentence=text))
    return conditions


def _with_interval(
    level: ConditionComparison, scores: Mapping[str, float] | None, measure: Measure
) -> ConditionComparison:
    if not scores or not measure.is_share:
        return level
    interval = bounded_mean_interval(list(scores.values()), 0.0, 1.0)
    return (
        level
        if interval.low is None or interval.high is None
        else replace(level, interval=[interval.low, interval.high])
    )


def compare_models(
    names: Sequence[str], scores: Sequence[Mapping[str, Mapping[str, float]]], *, share: bool = True
) -> list[Row]:
    """Compare models with the first by problem. ``scores``: each model's score of a problem, by held-out set and
    problem; ``share``: scores lie in [0, 1], such as the share of correct answers.

    The intervals hold together at 95 % (Bonferroni): each has the level 1 − 0.05/n for n comparisons. Those of shares
    are score intervals (``maths.bounded``), others t intervals over problems. Problems that one of the two models lacks
    are left out.
    """
    pairs = []
    for name, mine in zip(names[1:], scores[1:], strict=True):
        for held_out, baseline in scores[0].items():
            if common := [problem for problem in baseline if problem in mine.get(held_out, {})]:
                differences = [mine[held_out][problem] - baseline[problem] for problem in common]
                pairs.append((name, held_out, differences, len(baseline.keys() | mine[held_out].keys()) - len(common)))
    rows = []
    for name, held_out, differences, left_out in pairs:
        level = 1.0 - ALPHA / len(pairs)
        if share:
            gain = bounded_mean_interval(differences, -1.0, 1.0, level=level)
        else:
            gain = paired_interval(differences, [0.0] * len(differences), level)
        row = {"model": name, "baseline": names[0], "set": held_out, "problems": len(differences)}
        row |= {"left_out": left_out, "difference": gain.estimate, "low": gain.low, "high": gain.high}
        rows.append(row | {"sentence": _sentence(row)})
    return rows


def _sentence(row: Values) -> str:
    low, high = row["low"], row["high"]
    text = f"{row['model']} − {row['baseline']} on {row['set']}: {points(row['difference'])} points"
    left_out = f" ({row['left_out']} that not both have are left out)" if row["left_out"] else ""
    if low is None or high is None:
        return f"{text}, {plural(row['problems'], 'problem')}{left_out}: cannot tell"
    text += f" [{points(low)}, {points(high)}], {plural(row['problems'], 'problem')}{left_out}"
    if low > 0 or high < 0:
        return f"{text}: {'higher' if low > 0 else 'lower'}"
    return f"{text}: no difference shown; up to {points(max(-low, high), sign=False)} points stay open"
