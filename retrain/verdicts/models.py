"""Comparison of one model for each condition by problem: a statement about these models, not about training runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from retrain.maths.bounded import bounded_mean_interval
from retrain.maths.statistics import Interval, paired_interval
from retrain.records.schema.comparison import ConditionComparison
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
    scores: dict[str, Mapping[str, float]] = {}
    levels = {label: condition_level(label, runs, measure) for label in labels}
    for label in labels:
        for run, _ in finished_of(label, runs, measure).values():
            if of_problem := problem_scores(run, measure):
                scores[label] = of_problem
                levels[label] = _with_interval(levels[label], of_problem, measure)
    baseline, *others = labels
    conditions = [replace(levels[baseline], verdict="baseline")]
    for label in others:
        status = standing.of(label, baseline, runs, [run.seed for run in runs])
        condition = replace(
            levels[label], standing=status.name, standing_reasons=status.reasons, pairs_planned=status.pairs_planned
        )
        if label in scores and baseline in scores:
            differences = [scores[label][problem] - score for problem, score in scores[baseline].items()]
            gain = _mean_difference(differences, 1.0 - ALPHA / len(others), share=measure.is_share)
            condition = replace(
                condition, difference=gain.estimate, typical_difference=gain.estimate, difference_interval=gain.ends
            )
        condition = replace(condition, verdict=models_verdict(condition, measure))
        problems = len(scores.get(baseline, ()))
        text = models_sentence(condition, baseline, measure, problems=problems, comparisons=len(others))
        conditions.append(replace(condition, sentence=text))
    return conditions


def _with_interval(level: ConditionComparison, scores: Mapping[str, float], measure: Measure) -> ConditionComparison:
    ends = bounded_mean_interval(list(scores.values()), 0.0, 1.0).ends if measure.is_share else None
    return replace(level, interval=ends or level.interval)


def _mean_difference(differences: Sequence[float], level: float, *, share: bool) -> Interval:
    """Return the mean over problems with a score interval for shares (``maths.bounded``), else a t interval."""
    if share:
        return bounded_mean_interval(differences, -1.0, 1.0, level=level)
    return paired_interval(differences, [0.0] * len(differences), level)
