"""``comparison.json``: conditions against a baseline, paired by seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from retrain.records.schema.base import Record, Row


@dataclass(frozen=True)
class Bounds(Record):
    """An estimate with a 95 % interval, whose ends are null where there are too few values."""

    estimate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MissingRun(Record):
    """A run that has no value of the primary metric, with its state in the manifest and the reason."""

    run_id: str
    seed: int
    state: str
    reason: str | None


@dataclass(frozen=True)
class OutlierSeed(Record):
    """A seed whose difference is far from the typical one, by ``distance``."""

    seed: int
    distance: float


@dataclass(frozen=True, kw_only=True)
class ConditionSummary(Record):
    """One condition under a measure other than the primary metric, without a verdict."""

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
    difference: float | None = None
    """Mean paired difference to the baseline."""
    typical_difference: float | None = None
    """Typical paired difference: the value about which the differences balance, large ones cut."""
    difference_interval: list[float] | None = None
    """95 % interval of the typical difference for other seeds and these problems, for all conditions and analyses
    together; null where nothing can be excluded."""
    pairs: int = 0
    """Pairs of seeds with the baseline."""
    p_value: float | None = None
    """p of no typical difference, corrected for all conditions and analyses; null where there are too few pairs for a
    verdict."""


@dataclass(frozen=True, kw_only=True)
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
    difference_new_problems: Bounds | None = None
    """Difference with its interval for other seeds and new problems; null without the evaluations' completions."""
    differences: list[float] = field(default_factory=list)
    """Difference of each pair."""
    paired_seeds: list[int] = field(default_factory=list)
    """Seed of each pair."""
    iqm_difference: Bounds | None = None
    """Interquartile mean of the differences."""
    probability_of_improvement: Bounds | None = None
    """Probability that a run of this condition has a larger value than one of the baseline."""
    outlier_seeds: list[OutlierSeed] = field(default_factory=list)
    """Seeds that are no typical ones."""
    pairs_needed: int | None = None
    """Pairs that a verdict needs."""
    decided_after: int | None = None
    """Pairs of the interim analysis that found a difference; null where the planned end decides."""
    unseen_collapse_rate: float | None = None
    """For "typical runs alike": the rate of collapse that these runs leave open."""
    mean_difference_bound: float | None = None
    """For "typical runs alike": how far the means differ at most if runs collapse to the untrained model at this
    rate."""
    missing: list[MissingRun]
    """Every run without a value."""
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
    cost_ratio: float | None = None
    """Device time of a run relative to the baseline's."""
    held_out: bool
    """True if its runs were evaluated on held-out problems."""
    verdict: str = ""
    """The verdict in short; `baseline` for the baseline."""
    sentence: str = ""
    """The verdict in a sentence."""
    standing: str = ""
    """`declared`, `interim` or `exploratory`; none of the baseline."""
    standing_reasons: list[str] = field(default_factory=list)
    """Why it is not `declared`."""
    pairs_planned: int | None = None
    """Pairs of seeds that were declared."""
    missing_could_change: bool | None = None
    """While declared runs are missing and 6 pairs are there: false if the verdict would be the same with every missing
    value at either end of its range."""


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
    conditions: list[ConditionSummary]
    """The conditions, the baseline first."""


@dataclass(frozen=True)
class Comparison(Record):
    """Every condition against the baseline, paired by seed."""

    format: int
    """Version of the format: 3."""
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
    conditions: list[ConditionComparison]
    """The conditions, the baseline first."""
    secondary: list[SecondaryComparison]
    """Further measures, without verdicts."""
    standing: str
    """`declared`, `interim` or `exploratory` ([what that means](verdicts.md#status-declared-interim-exploratory))."""
    failed: list[str]
    """Run ids of failed runs."""
    warnings: list[str]
    """Warnings to a reader of the verdict."""
    note: str
    """The warnings and what is missing, in one text."""
    follow_up: str = ""
    """After "no difference shown": the power of a new campaign with fresh seeds and, on a second line, its command."""
    declared: Row = field(default_factory=dict)
    """The same as in `manifest.json`."""
