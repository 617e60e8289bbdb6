"""Comparison of every condition with the baseline: differences, intervals, and a verdict in one sentence.

The seed is the replicate: completions are never pooled over seeds. Conditions are paired by seed, because the same seed
has the same initial adapter, order of problems and random numbers. The deciding metric is declared before training
(`[campaign] primary_metric`); other metrics have no verdict. Failed and missing runs are named.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from retrain.config.campaign import condition_name, find_label
from retrain.config.evaluation import SUMMARIES
from retrain.config.tasks import AUDIT
from retrain.errors import UsageError, plural
from retrain.maths.intervals import iqm_interval, mean_interval
from retrain.maths.statistics import Interval, bootstrap_interval, iqm, probability_of_improvement
from retrain.records.notes import is_graded
from retrain.records.schema.campaign import ENDED
from retrain.records.schema.comparison import (
    Bounds,
    Comparison,
    ConditionComparison,
    ConditionSummary,
    MissingRun,
    OutlierSeed,
    SecondaryComparison,
)
from retrain.verdicts.audited import audited
from retrain.verdicts.declaration import DECLARED, EXPLORATORY, INTERIM, DeclaredRule, Standing
from retrain.verdicts.problem_scores import ProblemScores
from retrain.verdicts.results import Measure, Pair, RunResult, finished_of, last3_notes, values_of
from retrain.verdicts.rule import ALPHA, FEWEST_PAIRS, Analysis, interim_seeds, judge, outlier_places
from retrain.verdicts.wording import missing_words, sentence, verdict

# Fewest seeds with a bootstrap interval: at 5 seeds, expanded 95 % intervals held in only 77 to 94 % of cases
MIN_BOOTSTRAP_SEEDS = 8
SECONDARY = ("final", "auc", "last3")
NO_RULE, ALL_DECLARED = DeclaredRule(), Standing()
Floats = NDArray[np.float64]


def compare_pairs(
    runs: Sequence[RunResult],
    labels: Sequence[str],
    measure: Measure,
    rule: DeclaredRule = NO_RULE,
    standing: Standing = ALL_DECLARED,
    warnings: Sequence[str] = (),
) -> Comparison:
    """Compare the conditions ``labels``, the baseline first, by pairs of runs with one seed. ``standing`` decides
    whether verdicts may be given. ``warnings`` come first among the warnings of the result."""
    paired = _PairedRuns.of(runs, labels, measure)
    builder = _ConditionBuilder(paired, rule, standing)
    conditions = [replace(condition_level(labels[0], runs, measure), verdict="baseline")]
    analyses = [paired.analyses(rule, standing.added)]
    if not standing.reasons:
        analyses += [case.analyses(rule, standing.added) for case in paired.extremes()]
    for label, *of_label in zip(labels[1:], *analyses, strict=True):
        conditions.append(builder.condition(label, conditions[0], *of_label))
    interim = {condition.label for condition in conditions if condition.standing == INTERIM}
    return replace(
        comparison_of(conditions, runs, measure, warnings),
        margin=rule.margin,
        secondary=[_secondary(runs, labels, other, interim) for other in _secondary_measures(measure, runs)],
    )


def comparison_of(
    conditions: Sequence[ConditionComparison], runs: Sequence[RunResult], measure: Measure, warnings: Sequence[str]
) -> Comparison:
    """Return the comparison of these conditions, the baseline first, with its warnings."""
    baseline, *family = (condition.label for condition in conditions)
    standings = {condition.standing for condition in conditions}
    hacked = [f"{audit.sentence}." for audit in audited(runs, [baseline, *family]) if audit.standing == "hacked"]
    notes = [*warnings, *_few_pairs(conditions), *_graded(runs, measure), *last3_notes(measure, runs), *hacked]
    return Comparison(
        format=3,
        metric=measure.key,
        summary=measure.summary,
        share=measure.is_share,
        baseline=baseline,
        family=family,
        margin=None,
        pairs_needed=FEWEST_PAIRS,
        conditions=list(conditions),
        secondary=[],
        standing=next((name for name in (EXPLORATORY, INTERIM) if name in standings), DECLARED),
        failed=[run.run_id for run in runs if run.state == "failed"],
        warnings=notes,
        note=" ".join([*notes, *missing_words([run for condition in conditions for run in condition.missing])]),
    )


def baseline_first(labels: Sequence[str], name: str | None) -> list[str]:
    """Return the labels, first that of the condition ``name`` (None: the first one). Raises UsageError."""
    first = find_label(name, labels) if name else labels[0]
    if first is None:
        raise UsageError(f"no condition {name}: the conditions are {', '.join(map(condition_name, labels))}")
    return [first, *(label for label in labels if label != first)]


@dataclass(frozen=True)
class _PairedRuns:
    """The runs of all conditions under one measure, paired by seed; the baseline comes first."""

    runs: Sequence[RunResult]
    labels: Sequence[str]
    measure: Measure
    # All planned pairs, in the declared order
    pairs: Sequence[Pair]
    # float64 [conditions, pairs], NaN where a run has no value
    values: Floats
    # True where ``values`` holds an assumed value of a missing run, bool [conditions, pairs]
    assumed: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, runs: Sequence[RunResult], labels: Sequence[str], measure: Measure) -> "_PairedRuns":
        pairs = list(dict.fromkeys(run.pair for run in runs))
        results = [values_of(label, runs, measure) for label in labels]
        values = np.array([[result.get(pair, np.nan) for pair in pairs] for result in results], dtype=np.float64)
        return cls(runs, labels, measure, pairs, values)

    @property
    def differences(self) -> Floats:
        """Return the differences to the baseline, float64 [conditions - 1, pairs]."""
        return self.values[1:] - self.values[:1]

    @property
    def seeds(self) -> list[int]:
        return [seed for _, seed in self.pairs]

    def analyses(self, rule: DeclaredRule, added: Collection[str]) -> list[Analysis]:
        """Judge the declared conditions as one family, and each added condition in the family of all conditions."""
        seen = self._seen_at_interim(rule)
        analyses = judge(self.differences, seen, rule.margin)
        declared = [row for row, label in enumerate(self.labels[1:]) if label not in added]
        if 0 < len(declared) < len(analyses):
            of_declared = judge(self.differences[declared], None if seen is None else seen[declared], rule.margin)
            for row, analysis in zip(declared, of_declared, strict=True):
                analyses[row] = analysis
        return analyses

    def extremes(self) -> list["_PairedRuns"]:
        """Return the two extreme cases for missing values: each condition has the low end of the measure's range and
        the baseline the high end, and the reverse. Empty if no value is missing, there are too few pairs or the range
        is unknown."""
        # Runs that the interim analysis stopped are not missing.
        stopped = {(run.label, run.pair) for run in self.runs if run.state == "stopped"}
        was_stopped = np.array([[(label, pair) in stopped for pair in self.pairs] for label in self.labels])
        missing = np.isnan(self.values) & ~was_stopped
        most = np.count_nonzero(~np.isnan(self.differences), axis=1).max(initial=0)
        if not missing.any() or most < FEWEST_PAIRS or not self.measure.is_share:
            return []
        worst = np.zeros_like(self.values)
        worst[0] = 1.0
        return [
            replace(self, values=np.where(missing, end, self.values), assumed=missing) for end in (worst, 1 - worst)
        ]

    def _seen_at_interim(self, rule: DeclaredRule) -> Floats | None:
        """Return the differences at the interim analysis, float64 [conditions - 1, seeds]: as recorded or, without a
        record, computed once all runs of its seeds have ended. None if there is no analysis, or not yet."""
        record, planned = rule.interim, interim_seeds(len(self.pairs))
        if record is not None and (record.metric, record.baseline) == (self.measure.name, self.labels[0]):
            nothing = [None] * len(record.seeds)
            rows = [record.differences.get(label, nothing) for label in self.labels[1:]]
            seen, now = np.array(rows, dtype=np.float64), slice(len(record.seeds))
            if self.assumed is None:
                return seen
            return np.where((self.assumed[1:] | self.assumed[:1])[:, now], self.differences[:, now], seen)
        if record is not None or not rule.has_interim_analysis or planned is None:
            return None
        first = set(self.pairs[:planned])
        if any(run.state not in ENDED for run in self.runs if run.pair in first):
            return None
        return self.differences[:, :planned]


class _ConditionBuilder:
    def __init__(self, paired: _PairedRuns, rule: DeclaredRule, standing: Standing):
        self.paired, self.standing, self.margin = paired, standing, rule.margin
        self.measure, self.comparisons = paired.measure, len(paired.labels) - 1
        self.scores = ProblemScores(paired.runs, paired.measure)
        campaign = next((run.config["campaign"] for run in paired.runs if run.config.get("campaign")), {})
        self.varied = str(campaign.get("vary", "all"))

    def condition(
        self, label: str, baseline: ConditionComparison, analysis: Analysis, *worst: Analysis
    ) -> ConditionComparison:
        """Return a condition with its comparison and verdict; ``worst``: its analyses in the cases of ``extremes``."""
        runs, measure = self.paired.runs, self.measure
        standing = self.standing.of(label, baseline.label, runs, self.paired.seeds[: analysis.seeds])
        pairs = _pairs(label, baseline.label, runs, measure)
        has_enough, is_interim = len(pairs) >= FEWEST_PAIRS, standing.name == INTERIM
        is_robust = analysis.is_decided and bool(worst) and {case.outcome for case in worst} == {analysis.outcome}
        condition = condition_level(label, runs, measure)
        condition = replace(
            condition,
            pairs=len(pairs),
            paired_seeds=[seed for seed, _, _ in pairs],
            pairs_needed=FEWEST_PAIRS,
            p_value=analysis.p if has_enough and not is_interim else None,
            decided_after=None if analysis.is_final else analysis.pairs,
            standing=standing.name,
            standing_reasons=standing.reasons,
            pairs_planned=standing.pairs_planned,
            missing_could_change=not is_robust if has_enough and is_interim else None,
            cost_ratio=_ratio(condition.seconds_per_run, baseline.seconds_per_run),
        )
        if pairs:
            condition = self._differences(condition, baseline, pairs, analysis)
        if analysis.outcome == "alike":
            condition = self._unseen_collapses(condition, baseline, analysis.pairs)
        condition = replace(condition, verdict=verdict(condition, analysis.outcome, measure))
        text = sentence(
            condition, baseline, measure, comparisons=self.comparisons, margin=self.margin, varied=self.varied
        )
        return replace(condition, sentence=text)

    def _unseen_collapses(
        self, condition: ConditionComparison, baseline: ConditionComparison, pairs: int
    ) -> ConditionComparison:
        """Add the largest share of runs that may fall back to the accuracy before training although none of ``pairs``
        pairs did, and the largest difference of the means if they do."""
        rate = 1 - (ALPHA / (self.comparisons + 1)) ** (1 / pairs)
        sign = -1.0 if self.measure.higher_is_better is False else 1.0
        gains = [
            sign * (level.after_mean - level.before)
            for level in (condition, baseline)
            if level.after_mean is not None and level.before is not None
        ]
        bound = (self.margin or 0.0) + rate * max(0.0, *gains) if gains else None
        return replace(condition, unseen_collapse_rate=rate, mean_difference_bound=bound)

    def _differences(
        self,
        condition: ConditionComparison,
        baseline: ConditionComparison,
        pairs: Sequence[tuple[int, float, float]],
        analysis: Analysis,
    ) -> ConditionComparison:
        measure, resolution = self.measure, _resolution(self.paired.runs, self.measure)
        values, of_baseline = (np.array([pair[column] for pair in pairs]) for column in (1, 2))
        differences = values - of_baseline
        typical = analysis.typical if analysis.typical is not None else float(np.mean(differences))
        improvement = bootstrap_interval(
            (values, of_baseline), np.random.default_rng(0), probability_of_improvement, resamples=2_000
        )
        outliers = outlier_places(differences, typical, self.margin)
        return replace(
            condition,
            difference=float(np.mean(differences)),
            typical_difference=typical,
            difference_interval=ends_of(analysis, measure),
            difference_new_problems=self._new_problems(condition.label, baseline.label, ends_of(analysis, measure)),
            differences=differences.tolist(),
            iqm_difference=_iqm(differences, measure, resolution),
            probability_of_improvement=_bootstrapped(improvement, len(pairs)),
            outlier_seeds=[OutlierSeed(pairs[index][0], float(differences[index]) - typical) for index in outliers],
        )

    def _new_problems(self, label: str, baseline: str, ends: Sequence[float] | None) -> Bounds | None:
        """Return the interval for new problems, extended to contain ``ends``, the interval for these problems."""
        level, resolution = 1.0 - ALPHA / self.comparisons, _resolution(self.paired.runs, self.measure)
        interval = self.scores.new_problems_interval(label, baseline, level, resolution)
        if interval is None or ends is None:
            return None
        interval = possible(interval, self.measure)
        if interval.low is None or interval.high is None:
            return _bounds(interval)
        return Bounds(interval.estimate, min(interval.low, ends[0]), max(interval.high, ends[1]))


def condition_level(label: str, runs: Sequence[RunResult], measure: Measure) -> ConditionComparison:
    """Return a condition without its comparison with the baseline."""
    runs = sorted((run for run in runs if run.label == label), key=lambda run: run.pair)
    results = finished_of(label, runs, measure)
    finished, values = [run for run, _ in results.values()], [value for _, value in results.values()]
    return ConditionComparison(
        **vars(_summary(label, results, measure)),
        seeds=[run.seed for run in runs],
        iqm=_iqm(values, measure, _resolution(finished, measure), level=True) if values else None,
        mean_bootstrap=_bootstrap(values, partial(np.mean, axis=-1)),
        iqm_bootstrap=_bootstrap(values, iqm),
        missing=[_missing(run, measure) for run in runs if run.pair not in results],
        failed=sum(run.state == "failed" for run in runs),
        tokens=sum(run.tokens for run in runs),
        seconds=sum(run.device_seconds for run in runs),
        tokens_per_run=_mean([run.tokens for run in finished]),
        seconds_per_run=_mean([run.device_seconds for run in finished]),
        held_out=any(run.evaluations for run in runs),
    )


def _summary(label: str, results: Mapping[Pair, tuple[RunResult, float]], measure: Measure) -> ConditionSummary:
    """Return a condition without its differences to the baseline; ``results`` come from ``finished_of``."""
    finished, values = [run for run, _ in results.values()], [value for _, value in results.values()]
    before = [value for run in finished if (value := run.before(measure)) is not None]
    mean = None
    if values:
        mean = mean_interval(values, share=measure.is_share, resolution=_resolution(finished, measure))
    return ConditionSummary(
        label=label,
        finished=[run.seed for run in finished],
        after_values=values,
        before=_mean(before),
        after_mean=mean.estimate if mean else None,
        interval=mean.ends if mean else None,
    )


def _missing(run: RunResult, measure: Measure) -> MissingRun:
    absent = f"its files have no {measure.name}" if run.done else None
    return MissingRun(run.run_id, run.seed, run.state, run.reason or absent)


def possible(interval: Interval, measure: Measure, *, level: bool = False) -> Interval:
    """Clip the interval of a share to possible values: [0, 1] for a ``level``, [−1, 1] for a difference of levels."""
    if not measure.is_share or interval.low is None or interval.high is None:
        return interval
    least = 0.0 if level else -1.0
    return Interval(interval.estimate, max(interval.low, least), min(interval.high, 1.0))


def ends_of(analysis: Analysis, measure: Measure) -> list[float] | None:
    if analysis.typical is None:
        return None
    return possible(Interval(analysis.typical, analysis.low, analysis.high), measure).ends


def _bounds(interval: Interval) -> Bounds:
    return Bounds(interval.estimate, interval.low, interval.high)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _ratio(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else value / of


def _resolution(runs: Sequence[RunResult], measure: Measure) -> float:
    return max((run.resolution(measure) for run in runs), default=0.0)


def _bootstrapped(interval: Interval, pairs: int) -> Bounds:
    has_interval = pairs >= MIN_BOOTSTRAP_SEEDS
    return Bounds(interval.estimate, *((interval.low, interval.high) if has_interval else (None, None)))


def _bootstrap(values: Sequence[float], statistic: Callable[..., Floats | float]) -> Bounds | None:
    if not values:
        return None
    interval = bootstrap_interval([values], np.random.default_rng(0), statistic)
    return _bootstrapped(interval, len(values))


def _iqm(values: Sequence[float] | Floats, measure: Measure, resolution: float, *, level: bool = False) -> Bounds:
    return _bounds(possible(iqm_interval(values, resolution=resolution), measure, level=level))


def _pairs(label: str, baseline: str, runs: Sequence[RunResult], measure: Measure) -> list[tuple[int, float, float]]:
    """Return (seed, value, baseline's value) of every pair of finished runs."""
    mine, base = finished_of(label, runs, measure), finished_of(baseline, runs, measure)
    return [(run.seed, value, base[pair][1]) for pair, (run, value) in mine.items() if pair in base]


def _secondary_measures(primary: Measure, runs: Sequence[RunResult]) -> list[Measure]:
    if primary.set_name is not None:
        # Of other tools' evaluations, only those that the primary measure needs were read.
        measures = [replace(primary, summary=summary) for summary in SUMMARIES[: SUMMARIES.index(primary.summary)]]
    else:
        measures = _measures_of_sets(runs)
    return [other for other in measures if other != primary and any(run.value(other) is not None for run in runs)]


def _measures_of_sets(runs: Sequence[RunResult]) -> list[Measure]:
    keys = list(dict.fromkeys(key for run in runs for row in run.last_evaluations.values() for key in row))
    names = dict.fromkeys(name for run in runs for name in run.set_names)
    measures = [measure for name in names for measure in _measures_of_set(f"eval/{name}/", keys)]
    return measures + [Measure("final", key) for key in keys if key.count("/") == 3 and key.endswith("/correct_rate")]


def _measures_of_set(prefix: str, keys: Sequence[str]) -> list[Measure]:
    """Return a set's secondary measures: accuracy in three summaries, largest pass@k and maj@k, reward with audit."""
    measures = [Measure(summary, f"{prefix}correct_rate") for summary in SECONDARY]
    for kind in ("pass@", "maj@"):
        ks = [int(match[1]) for key in keys if (match := re.fullmatch(rf"{re.escape(prefix + kind)}(\d+)", key))]
        if max(ks, default=1) > 1:
            measures.append(Measure("final", f"{prefix}{kind}{max(ks)}"))
    if f"{prefix}{AUDIT}" in keys:
        measures += [Measure("final", f"{prefix}{key}") for key in ("reward_mean", AUDIT)]
    return measures


def _secondary(
    runs: Sequence[RunResult], order: Sequence[str], measure: Measure, interim: Collection[str]
) -> SecondaryComparison:
    """Compare each condition separately with the baseline on a secondary measure; no p for ``interim`` conditions."""
    differences = _PairedRuns.of(runs, order, measure).differences
    baseline, *summaries = (_summary(label, finished_of(label, runs, measure), measure) for label in order)
    conditions = [baseline]
    for row, summary in zip(differences, summaries, strict=True):
        (analysis,) = judge(row[None])
        has_p = analysis.pairs >= FEWEST_PAIRS and summary.label not in interim
        conditions.append(
            replace(
                summary,
                difference=analysis.mean,
                typical_difference=analysis.typical,
                difference_interval=ends_of(analysis, measure),
                pairs=analysis.pairs,
                p_value=analysis.p if has_p else None,
            )
        )
    return SecondaryComparison(measure.key, measure.summary, measure.is_share, conditions)


def _graded(runs: Sequence[RunResult], measure: Measure) -> list[str]:
    accuracy = re.search(r"correct_rate$|(pass|avg|maj)@\d+$", measure.key)
    if not accuracy or not any(is_graded(row) for run in runs for row in run.rows):
        return []
    other = "final:reward_mean" if measure.is_held_out else "final:mean_reward"
    return [
        "The reward has values other than 0 and 1, and what decides here counts an answer as correct or not: "
        f'primary_metric = "{other}" sees the whole reward.'
    ]


def _few_pairs(conditions: Sequence[ConditionComparison]) -> list[str]:
    pairs = max((condition.pairs for condition in conditions[1:]), default=0)
    if not 0 < pairs < FEWEST_PAIRS:
        return []
    return [
        f"With {plural(pairs, 'paired seed')} the smallest p-value any difference can reach is "
        f"{2.0 ** (1 - pairs):.3g}: a verdict needs {FEWEST_PAIRS} or more."
    ]
