"""``comparison.json``: conditions against a baseline, paired by seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

from retrain.records.schema.base import Record, Row


@dataclass(frozen=True)
class Bounds(Record):
    """An estimate with a 95 % interval, whose ends are null if there are too few values."""

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
    """A seed whose paired difference is far from the typical one; ``distance`` is the former minus the latter."""

    seed: int
    distance: float


@dataclass(frozen=True, kw_only=True)
class ConditionSummary(Record):
    """One condition under a measure other than the primary metric, without a verdict."""

    label: Annotated[str, "Label of the condition."]
    finished: Annotated[list[int], "Seeds of the runs that have a value."]
    after_values: Annotated[list[float], "Value of each finished run."]
    before: Annotated[float | None, "Mean value of the untrained model."]
    after_mean: Annotated[float | None, "Mean value of the finished runs."]
    interval: Annotated[list[float] | None, "Its 95 % interval over seeds: score interval for shares, t for others."]
    difference: Annotated[float | None, "Mean paired difference to the baseline."] = None
    typical_difference: Annotated[
        float | None, "Typical paired difference: the value about which the differences balance, large ones cut."
    ] = None
    difference_interval: Annotated[
        list[float] | None,
        "95 % interval of the typical difference for other seeds and these problems, for all conditions and analyses "
        "together; null where nothing can be excluded.",
    ] = None
    pairs: Annotated[int, "Pairs of seeds with the baseline."] = 0
    p_value: Annotated[
        float | None,
        "p of no typical difference, corrected for all conditions and analyses; null where there are too few pairs "
        "for a verdict.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class ConditionComparison(ConditionSummary):
    """One condition under the primary metric; fields about pairs are null for the baseline."""

    seeds: Annotated[list[int], "Seeds planned."]
    iqm: Annotated[Bounds | None, "Interquartile mean of the values with its trimmed t interval, null below 4 seeds."]
    mean_bootstrap: Annotated[Bounds | None, "Mean with an expanded bootstrap interval over seeds, null below 8 seeds."]
    iqm_bootstrap: Annotated[Bounds | None, "Interquartile mean with the same interval."]
    difference_new_problems: Annotated[
        Bounds | None,
        "Difference with its interval for other seeds and new problems; null without the evaluations' completions.",
    ] = None
    differences: Annotated[list[float], "Difference of each pair."] = field(default_factory=list)
    paired_seeds: Annotated[list[int], "Seed of each pair."] = field(default_factory=list)
    iqm_difference: Annotated[Bounds | None, "Interquartile mean of the differences."] = None
    probability_of_improvement: Annotated[
        Bounds | None, "Probability that a run of this condition has a larger value than one of the baseline."
    ] = None
    outlier_seeds: Annotated[list[OutlierSeed], "Seeds that are no typical ones."] = field(default_factory=list)
    pairs_needed: Annotated[int | None, "Pairs that a verdict needs."] = None
    decided_after: Annotated[
        int | None, "Pairs of the interim analysis that found a difference; null where the planned end decides."
    ] = None
    unseen_collapse_rate: Annotated[
        float | None, 'For "typical runs alike": the rate of collapse that these runs leave open.'
    ] = None
    mean_difference_bound: Annotated[
        float | None,
        'For "typical runs alike": how far the means differ at most if runs collapse to the untrained model at this '
        "rate.",
    ] = None
    missing: Annotated[list[MissingRun], "Every run without a value."]
    failed: Annotated[int, "Failed runs."]
    tokens: Annotated[int, "Tokens of prompts and completions in training, of all its runs."]
    seconds: Annotated[float, "Device time of all its runs (s)."]
    tokens_per_run: Annotated[float | None, "Mean tokens of a finished run."]
    seconds_per_run: Annotated[float | None, "Mean device time of a finished run (s)."]
    cost_ratio: Annotated[float | None, "Device time of a run relative to the baseline's."] = None
    held_out: Annotated[bool, "True if its runs were evaluated on held-out problems."]
    verdict: Annotated[str, "The verdict in short; `baseline` for the baseline."] = ""
    sentence: Annotated[str, "The verdict in a sentence."] = ""
    standing: Annotated[str, "`declared`, `interim` or `exploratory`; none of the baseline."] = ""
    standing_reasons: Annotated[list[str], "Why it is not `declared`."] = field(default_factory=list)
    pairs_planned: Annotated[int | None, "Pairs of seeds that were declared."] = None
    missing_could_change: Annotated[
        bool | None,
        "While declared runs are missing and 6 pairs are there: false if the verdict would be the same with every "
        "missing value at either end of its range.",
    ] = None


@dataclass(frozen=True)
class SecondaryComparison(Record):
    """A secondary measure: a summary that did not decide, the largest pass@k or maj@k, or a tag's accuracy."""

    metric: Annotated[str, "Key of the metric."]
    summary: Annotated[str, "`final`, `last3` or `auc`."]
    share: Annotated[bool, "True if the metric lies in [0, 1]."]
    conditions: Annotated[list[ConditionSummary], "The conditions, the baseline first."]


@dataclass(frozen=True)
class Comparison(Record):
    """Every condition against the baseline, paired by seed unless ``replicate`` or ``pairing`` is "none"."""

    omitted_if_empty = ("source", "replicate", "pairing", "read")

    format: Annotated[int, "Version of the format: 3."]
    metric: Annotated[str, "Key of the metric that decides."]
    summary: Annotated[str, "Summary of a run's curve: `final`, `last3` or `auc`."]
    share: Annotated[bool, "True if the metric lies in [0, 1], so that differences are in percentage points."]
    baseline: Annotated[str, "Label of the baseline."]
    family: Annotated[list[str], "Labels that are tested against it."]
    margin: Annotated[float | None, "Equivalence margin."]
    pairs_needed: Annotated[int, "Pairs of seeds that a verdict needs."]
    conditions: Annotated[list[ConditionComparison], "The conditions, the baseline first."]
    secondary: Annotated[list[SecondaryComparison], "Further measures, without verdicts."]
    standing: Annotated[
        str,
        "`declared`, `interim` or `exploratory` ([what that means](verdicts.md#status-declared-interim-exploratory)).",
    ]
    failed: Annotated[list[str], "Run ids of failed runs."]
    warnings: Annotated[list[str], "Warnings to a reader of the verdict."]
    note: Annotated[str, "The warnings and what is missing, in one text."]
    follow_up: Annotated[
        str,
        'After "no difference shown": the power of a new campaign with fresh seeds and, on a second line, its command.',
    ] = ""
    declared: Annotated[Row, "The same as in `manifest.json`."] = field(default_factory=dict)
    source: Annotated[str, "Tools that wrote the results, and the number of files; absent for runs of retrain."] = ""
    replicate: Annotated[
        str, "`training`: training runs are compared; `none`: one model of each condition, by problem."
    ] = ""
    pairing: Annotated[str, "`seed`, or `none`: whole runs are compared, not paired."] = ""
    read: Annotated[list[str], "What was read of other tools' results, and which runs are missing."] = field(
        default_factory=list
    )

    def to_json(self) -> Row:
        """Return the comparison as plain data. Keys that only other tools' results need are left out if empty."""
        row = asdict(self)
        return {key: value for key, value in row.items() if key not in self.omitted_if_empty or value}
