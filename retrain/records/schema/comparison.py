"""``comparison.json``: conditions against a baseline, paired by seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from retrain.records.schema.base import Record, Row


@dataclass(frozen=True)
class Bounds(Record):
    """An estimate with a 95 % interval."""

    estimate: float | None
    """The estimate."""
    low: float | None
    """Lower end; null where there are too few values."""
    high: float | None
    """Upper end; null where there are too few values."""


@dataclass(frozen=True)
class ConditionSummary(Record):
    """One condition under a further measure, without a verdict."""

    label: str
    """Label of the condition."""
    finished: list[int]
    """Seeds of the runs that have a value."""
    after_values: list[float]
    """Value of each finished run."""
    before: float | None
    """Mean value of the untrained model."""
    after_mean: float | None
    """Mean value of the finished runs."""
    interval: list[float] | None
    """Its 95 % interval over seeds: score interval for shares, t for others."""
    difference: float | None
    """Mean paired difference to the baseline."""
    difference_interval: list[float] | None
    """Its 95 % interval for other seeds and these problems; of a family simultaneous, and in agreement with the
    test."""
    pairs: int
    """Pairs of seeds with the baseline."""
    p_value: float | None
    """p of the declared test; null where there are too few pairs for a verdict."""


@dataclass(frozen=True)
class ConditionComparison(ConditionSummary):
    """One condition under the measure that decides; what is about pairs is null for the baseline."""

    seeds: list[int]
    """Seeds planned."""
    iqm: Bounds | None
    """Interquartile mean of the values with its trimmed t interval, null below 4 seeds."""
    mean_bootstrap: Bounds | None
    """Mean with an expanded bootstrap interval over seeds, null below 8 seeds."""
    iqm_bootstrap: Bounds | None
    """Interquartile mean with the same interval."""
    difference_t: list[float] | None
    """t interval of this difference alone."""
    difference_new_problems: Bounds | None
    """Difference with its interval for other seeds and new problems; null without the evaluations' completions."""
    difference_adjusted: Bounds | None
    """With `[campaign] sequential`, the difference corrected for the looks."""
    differences: list[float]
    """Difference of each pair."""
    paired_seeds: list[int]
    """Seed of each pair."""
    iqm_difference: Bounds | None
    """Interquartile mean of the differences."""
    probability_of_improvement: Bounds | None
    """Probability that a run of this condition has a larger value than one of the baseline."""
    smallest_p: float | None
    """Smallest p that so many pairs can reach."""
    p_holm: float | None
    """p of the declared test, corrected for the family by it."""
    p_exact: float | None
    """p of the sign flips, beside any test."""
    difference_tested: float | None
    """The estimate that the test is of: for the normal test that of the fit of seed + condition."""
    equivalence_p: float | None
    """p of the two one-sided tests against the margin."""
    equivalence_p_holm: float | None
    """The same, corrected for the family."""
    test: str | None
    """The test that decided."""
    pairs_needed: int | None
    """Pairs that it needs for a verdict."""
    collapsed: list[Row]
    """`seed` and `gap` of the runs far below what seed and condition let expect."""
    stop_reason: str | None
    """With looks: `decided`, `futility` or `planned end`."""
    verdict: str
    """The verdict in short; `baseline` for the baseline."""
    sentence: str
    """The verdict in a sentence."""
    missing: list[Row]
    """`run_id`, `seed`, `state` and `reason` of every run without a value."""
    failed: int
    """Failed runs."""
    tokens: int
    """Tokens of prompts and completions in training, of all its runs."""
    seconds: float
    """Device time of all its runs (s)."""
    tokens_per_run: float | None
    """Mean tokens of a finished run."""
    seconds_per_run: float | None
    """Mean device time of a finished run (s)."""
    cost_ratio: float | None
    """Device time of a run relative to the baseline's."""
    held_out: bool
    """True if its runs were evaluated on held-out problems."""
    standing: str = ""
    """`declared`, `interim` or `exploratory`; none of the baseline."""
    standing_reasons: list[str] = field(default_factory=list)
    """Why it is not `declared`."""
    pairs_planned: int | None = None
    """Pairs of seeds that were declared."""
    sequential: Row | None = None
    """With `[campaign] sequential`, the state of the rule."""


@dataclass(frozen=True)
class SecondaryComparison(Record):
    """A further measure: those of final value, area and last three that did not decide, the largest pass@k and maj@k,
    every tag."""

    metric: str
    """Key of the metric."""
    summary: str
    """`final`, `last3` or `auc`."""
    share: bool
    """True if the metric lies in [0, 1]."""
    conditions: list[Row]
    """The conditions, the baseline first."""  # ConditionSummary


@dataclass(frozen=True)
class Comparison(Record):
    """Every condition against the baseline, paired by seed."""

    format: int
    """Version of the format: 2."""
    metric: str
    """Key of the metric that decides."""
    summary: str
    """Summary of a run's curve: `final`, `last3` or `auc`."""
    share: bool
    """True if the metric lies in [0, 1], so that differences are in percentage points."""
    baseline: str
    """Label of the baseline."""
    family: list[str]
    """Labels that are tested against it."""
    margin: float | None
    """Equivalence margin."""
    pairs_needed: int
    """Pairs of seeds that a verdict needs."""
    conditions: list[Row]
    """The conditions, the baseline first."""  # ConditionComparison
    secondary: list[Row]
    """Further measures, without verdicts."""  # SecondaryComparison
    standing: str
    """`declared`, `interim` or `exploratory` ([what that means](verdicts.md#not-to-be-bent))."""
    failed: list[str]
    """Run ids of failed runs."""
    warnings: list[str]
    """Warnings to a reader of the verdict."""
    note: str
    """The warnings and what is missing, in one text."""
    declared: Row = field(default_factory=dict)
    """The same as in `manifest.json`."""
