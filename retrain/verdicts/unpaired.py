"""Conditions whose runs have no seeds in common, each compared with the baseline by a permutation of whole runs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from retrain.records.schema.comparison import ConditionComparison, OutlierSeed
from retrain.verdicts.comparison import condition_level, ends_of
from retrain.verdicts.declaration import INTERIM, Standing
from retrain.verdicts.results import Measure, RunResult
from retrain.verdicts.rule import ALPHA, outlier_places, typical_differences
from retrain.verdicts.two_sample import can_reject, compare_samples, runs_needed
from retrain.verdicts.wording import unpaired_sentence, unpaired_verdict


def unpaired_conditions(
    runs: Sequence[RunResult], labels: Sequence[str], measure: Measure, standing: Standing
) -> list[ConditionComparison]:
    """Return all conditions, the baseline first, with verdicts. There is no interim analysis, and no verdict "typical
    runs alike"."""
    baseline, *levels = (condition_level(label, runs, measure) for label in labels)
    analyses = compare_samples([level.after_values for level in levels], baseline.after_values)
    baseline = replace(baseline, verdict="baseline", outlier_seeds=_outlier_runs(baseline))
    conditions, alpha = [baseline], ALPHA / max(len(levels), 1)
    for level, analysis in zip(levels, analyses, strict=True):
        # Where Holm's last steps reject, fewer runs are enough.
        has_enough = analysis.p <= ALPHA or can_reject(len(level.finished), len(baseline.finished), alpha)
        status = standing.of(level.label, baseline.label, runs, [run.seed for run in runs])
        condition = replace(
            level,
            difference=analysis.mean,
            typical_difference=analysis.typical,
            difference_interval=ends_of(analysis, measure),
            p_value=analysis.p if has_enough and status.name != INTERIM else None,
            standing=status.name,
            standing_reasons=status.reasons,
            outlier_seeds=_outlier_runs(level),
        )
        fewest = None if has_enough else runs_needed(alpha)
        condition = replace(condition, verdict=unpaired_verdict(condition, baseline, analysis, measure, fewest))
        text = unpaired_sentence(condition, baseline, measure, comparisons=len(levels))
        conditions.append(replace(condition, sentence=text))
    return conditions


def _outlier_runs(level: ConditionComparison) -> list[OutlierSeed]:
    """Return the runs that are far from the typical value of their own condition."""
    if not level.after_values:
        return []
    values = np.array(level.after_values)
    typical = float(typical_differences(values[None])[0])
    outliers = outlier_places(values, typical, None)
    return [OutlierSeed(level.finished[index], float(values[index]) - typical) for index in outliers]
