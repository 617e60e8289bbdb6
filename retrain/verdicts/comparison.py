"""What a campaign found: every condition against the baseline, with intervals and a verdict that a person can quote.

The seed is the replicate: completions are never pooled over seeds. Conditions are paired by seed, because the same
seed has the same adapter, the same order of problems and the same random numbers. What decides is declared before
(`[campaign] primary_metric`); everything else is shown without a verdict. Failed and missing runs are named.

``records.schema.comparison`` declares what is found, as ``comparison.json`` holds it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from retrain.config.campaign import condition_name, find_label
from retrain.errors import UsageError, plural
from retrain.maths.intervals import iqm_interval, mean_interval
from retrain.maths.statistics import (
    Interval,
    bootstrap_ci,
    holm,
    iqm,
    paired_bootstrap_ci,
    paired_comparison,
    pairs_for_verdict,
    probability_of_improvement,
    tost_p,
)
from retrain.records.notes import is_graded
from retrain.records.schema.base import Row
from retrain.records.schema.comparison import Comparison, ConditionSummary, SecondaryComparison
from retrain.rewards.base import AUDIT
from retrain.verdicts.audited import audited
from retrain.verdicts.declaration import DECLARED, EXPLORATORY, INTERIM, P_VALUES, Standing
from retrain.verdicts.declared_rule import declared_by, judge, overlay, varied_by
from retrain.verdicts.declared_rule import words as rule_words
from retrain.verdicts.intervals import alone, hold_equivalence, possible, put_intervals
from retrain.verdicts.results import Measure, RunResult, finished_of, first_set, last3_notes, require_measure, values_of
from retrain.verdicts.words import missing_words, sentence, verdict

MIN_BOOTSTRAP_SEEDS = 8
"""Below it even the expanded bootstrap is too narrow: 77 to 94 % instead of 95 % at 5 (benchmarks/calibration.py)."""
SECONDARY = ("final", "auc", "last3")
PAIRED = (
    "difference", "difference_interval", "difference_t", "difference_new_problems", "difference_adjusted",
    "differences", "paired_seeds", "iqm_difference", "probability_of_improvement",
    "pairs", "smallest_p", "equivalence_p", "equivalence_p_holm",
)  # fmt: skip
"""Of a condition, what comes from its pairs with the baseline."""


def compare_runs(
    runs: Sequence[RunResult],
    labels: Sequence[str],
    *,
    metric: str | None = None,
    baseline: str | None = None,
    margin: float | None = None,
    warnings: Sequence[str] = (),
    sequential: Mapping[str, Any] | None = None,
    standing: Standing | None = None,
    rule: Mapping[str, Any] | None = None,
) -> Row:
    """Return the ``Comparison`` of conditions over seeds as a JSON object.

    ``metric`` as ``Measure.parse`` reads it; unset is held-out accuracy after the last update, and the correct rate
    of training where nothing was held out. ``margin`` is what the campaign declared, ``sequential`` the manifest's
    record of its stopping rule, ``rule`` the keys of [campaign] that make the rule (unset: as the first run has them),
    ``standing`` whether verdicts may be given (unset: all that is planned was declared).
    Raises UsageError for an unknown metric or baseline.
    """
    first = (find_label(baseline, labels) or baseline) if baseline else labels[0]
    if first not in labels:
        raise UsageError(f"no condition {first}: the conditions are {', '.join(map(condition_name, labels))}")
    order = [first, *(label for label in labels if label != first)]
    measure = Measure.parse(metric or "final", first_set(runs))
    held_out = any(run.evaluations for run in runs)
    if metric is None and not held_out and any(run.rows for run in runs):
        measure = Measure("final", "correct_rate")
    require_measure(measure, runs)
    conditions = [_condition(label, [run for run in runs if run.label == label], measure) for label in order]
    results = {label: values_of(label, runs, measure) for label in order}
    declared = declared_by(runs) if rule is None else rule
    judge(conditions, results, declared, measure, _resolution(runs, measure))
    _test(conditions, runs, measure, margin)
    if sequential and first == labels[0] and measure.name == sequential["metric"]:
        overlay(conditions[1:], sequential, measure)
        hold_equivalence(conditions[1:], sequential, measure, margin)
    else:
        sequential = None
    conditions[0]["verdict"] = "baseline"
    for condition in conditions[1:]:
        (standing or Standing()).judge(condition, runs, first)
        condition["verdict"] = verdict(condition, measure, margin)
        if condition["pairs"] < condition["pairs_needed"]:
            condition |= dict.fromkeys(P_VALUES)
    put_intervals(conditions, runs, measure, resolution=_resolution(runs, measure), sequential=sequential)
    for condition in conditions[1:]:
        condition["sentence"] = sentence(condition, first, measure, len(conditions) - 1, varied_by(runs))
        condition["sentence"] += rule_words(condition, conditions[0], measure)
    interim = {condition["label"] for condition in conditions[1:] if condition["standing"] == INTERIM}
    standings = {condition["standing"] for condition in conditions[1:]}
    failed = [run.run_id for run in runs if run.state == "failed"]
    notes = [*warnings, *_warnings(conditions, measure, held_out or metric is not None), *_graded(runs, measure)]
    notes += last3_notes(measure, runs)
    notes += [f"{each.sentence}." for each in audited(runs, order) if each.standing == "hacked"]
    needed = [condition["pairs_needed"] for condition in conditions[1:]]
    return Comparison(
        format=2,
        metric=measure.key,
        summary=measure.summary,
        share=measure.is_share,
        baseline=first,
        family=order[1:],
        margin=margin,
        pairs_needed=max(needed, default=pairs_for_verdict()),
        conditions=conditions,
        secondary=[_secondary(runs, order, other, interim) for other in _others(measure, runs)],
        standing=next((one for one in (EXPLORATORY, INTERIM) if one in standings), DECLARED),
        failed=failed,
        warnings=notes,
        note=" ".join([*notes, *missing_words(conditions)]),
    ).to_row()


def _condition(label: str, runs: Sequence[RunResult], measure: Measure) -> dict[str, Any]:
    results = finished_of(label, runs, measure)
    finished, after = [run for run, _ in results.values()], [value for _, value in results.values()]
    before = [value for run in finished if (value := run.before(measure)) is not None]
    no_value = f"its files have no {measure.name}"
    runs = sorted(runs, key=lambda run: run.pair)
    missing = [
        {
            "run_id": run.run_id,
            "seed": run.seed,
            "state": run.state,
            "reason": run.reason or (no_value if run.done else None),
        }
        for run in runs
        if run.pair not in results
    ]
    return {
        "label": label,
        "seeds": [run.seed for run in runs],
        "finished": [run.seed for run in finished],
        "before": _mean(before),
        **_level(after, finished, measure),
        "after_values": after,
        "iqm": _iqm(after, measure, _resolution(finished, measure), level=True) if after else None,
        "mean_bootstrap": _bootstrap(after, np.mean),
        "iqm_bootstrap": _bootstrap(after, iqm),
        **dict.fromkeys(PAIRED),
        **{"differences": [], "paired_seeds": [], "pairs": 0},
        "verdict": "",
        "sentence": "",
        "missing": missing,
        "failed": sum(run.state == "failed" for run in runs),
        "tokens": sum(run.tokens for run in runs),
        "seconds": sum(run.device_seconds for run in runs),
        "tokens_per_run": _mean([run.tokens for run in finished]),
        "seconds_per_run": _mean([run.device_seconds for run in finished]),
        "cost_ratio": None,
        "held_out": any(run.evaluations for run in runs),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _level(values: Sequence[float], runs: Sequence[RunResult], measure: Measure) -> dict[str, Any]:
    if not values:
        return {"after_mean": None, "interval": None}
    own = mean_interval(values, share=measure.is_share, resolution=_resolution(runs, measure))
    return {"after_mean": own.estimate, "interval": [own.low, own.high] if own.low is not None else None}


def _resolution(runs: Sequence[RunResult], measure: Measure) -> float:
    """The step of the scale that these runs' values lie on, the coarsest where they differ."""
    return max((run.resolution(measure) for run in runs), default=0.0)


def _ends(interval: Interval, pairs: int) -> dict[str, float | None]:
    enough = pairs >= MIN_BOOTSTRAP_SEEDS
    low, high = (interval.low, interval.high) if enough else (None, None)
    return {"estimate": interval.estimate, "low": low, "high": high}


def _bootstrap(values: Sequence[float], statistic: Any) -> dict[str, float | None] | None:
    if not values:
        return None
    return _ends(bootstrap_ci(values, np.random.default_rng(0), statistic=statistic, expanded=True), len(values))


def _paired(label: str, baseline: str, runs: Sequence[RunResult], measure: Measure) -> list[tuple[int, float, float]]:
    """(seed, value, baseline's value) of every pair of finished runs."""
    mine, base = (finished_of(each, runs, measure) for each in (label, baseline))
    return [(run.seed, value, base[pair][1]) for pair, (run, value) in mine.items() if pair in base]


def _test(conditions: list[dict[str, Any]], runs: Sequence[RunResult], measure: Measure, margin: float | None) -> None:
    """Fill in every paired difference to the first condition, and equivalence with Holm over all, tested or not."""
    baseline, others = conditions[0], conditions[1:]
    for condition in others:
        pairs = _paired(condition["label"], baseline["label"], runs, measure)
        condition |= {"pairs": len(pairs), "paired_seeds": [seed for seed, _, _ in pairs]}
        if condition["seconds_per_run"] is not None and baseline["seconds_per_run"]:
            condition["cost_ratio"] = condition["seconds_per_run"] / baseline["seconds_per_run"]
        if pairs:
            values = [a for _, a, _ in pairs], [b for _, _, b in pairs]
            condition |= _against(*values, measure, _resolution(runs, measure))
            if margin is not None and len(pairs) >= condition["pairs_needed"]:
                differences = np.asarray(condition["differences"])
                condition["equivalence_p"] = tost_p(differences, margin, _resolution(runs, measure))
    # What could not be tested still belongs to the family.
    values = [1.0 if condition["equivalence_p"] is None else condition["equivalence_p"] for condition in others]
    for condition, adjusted in zip(others, holm(values), strict=True):
        if condition["equivalence_p"] is not None:
            condition["equivalence_p_holm"] = float(adjusted)


def _against(mine: Sequence[float], base: Sequence[float], measure: Measure, resolution: float) -> dict[str, Any]:
    a, b = np.asarray(mine), np.asarray(base)
    paired = paired_comparison(a, b, resolution=resolution)
    return {
        "difference": paired.mean,
        "differences": (a - b).tolist(),
        "smallest_p": paired.smallest_p,
        "iqm_difference": _iqm(a - b, measure, resolution),
        "probability_of_improvement": _ends(
            paired_bootstrap_ci(a, b, np.random.default_rng(0), probability_of_improvement, resamples=2_000), len(a)
        ),
    }


def _iqm(values: Any, measure: Measure, resolution: float, *, level: bool = False) -> dict[str, float | None]:
    return asdict(possible(iqm_interval(values, resolution=resolution), measure, level=level))


def _others(primary: Measure, runs: Sequence[RunResult]) -> list[Measure]:
    """Measures shown beside the primary one: of each held-out set final value and area of accuracy, the best pass@k
    and maj@k, each tag."""
    rows = [row for run in runs for row in run.last_evaluations.values()]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    wanted = []
    for name in dict.fromkeys(name for run in runs for name in run.set_names):
        wanted += [Measure(summary, f"eval/{name}/correct_rate") for summary in SECONDARY]
        for kind in ("pass@", "maj@"):
            ks = [int(match[1]) for key in keys if (match := re.fullmatch(rf"eval/{re.escape(name)}/{kind}(\d+)", key))]
            if ks and max(ks) > 1:
                wanted.append(Measure("final", f"eval/{name}/{kind}{max(ks)}"))
        if f"eval/{name}/{AUDIT}" in keys:
            wanted += [Measure("final", f"eval/{name}/{key}") for key in ("reward_mean", AUDIT)]
    wanted += [Measure("final", key) for key in keys if key.count("/") == 3 and key.endswith("/correct_rate")]
    return [other for other in wanted if other != primary and any(run.value(other) is not None for run in runs)]


def _secondary(runs: Sequence[RunResult], order: Sequence[str], measure: Measure, interim: Collection[str]) -> Row:
    """One further measure: differences with intervals, no verdict; without p where a condition is interim."""
    rows = []
    for label in order:
        results = finished_of(label, runs, measure).values()
        finished, values = [run for run, _ in results], [value for _, value in results]
        before = [value for run in finished if (value := run.before(measure)) is not None]
        pairs = _paired(label, order[0], runs, measure) if label != order[0] else []
        paired = paired_comparison([a for _, a, _ in pairs], [b for _, _, b in pairs]) if pairs else None
        gains = [a - b for _, a, b in pairs]
        summary = ConditionSummary(
            label=label,
            finished=[run.seed for run in finished],
            after_values=values,
            before=_mean(before),
            **_level(values, finished, measure),
            difference=paired.mean if paired else None,
            difference_interval=alone(gains, measure, _resolution(finished, measure)) if pairs else None,
            pairs=len(pairs),
            p_value=paired.p if paired and paired.verdict_possible and label not in interim else None,
        )
        rows.append(summary.to_row())
    return SecondaryComparison(measure.key, measure.summary, measure.is_share, rows).to_row()


def _graded(runs: Sequence[RunResult], measure: Measure) -> list[str]:
    """That accuracy decides although rewards are graded, and what would see them whole."""
    accuracy = re.search(r"correct_rate$|(pass|avg|maj)@\d+$", measure.key)
    if not accuracy or not any(is_graded(row) for run in runs for row in run.rows):
        return []
    other = "final:reward_mean" if measure.is_held_out else "final:mean_reward"
    return [
        "The reward has values other than 0 and 1, and what decides here counts an answer as correct or not: "
        f'primary_metric = "{other}" sees the whole reward.'
    ]


def _warnings(conditions: Sequence[dict[str, Any]], measure: Measure, held_out: bool) -> list[str]:
    notes = []
    if not held_out and not measure.is_held_out:
        notes.append("No held-out evaluation was asked for ([evaluation] problems = 0); training rewards are compared.")
    family = len(conditions) - 1
    pairs = max((condition["pairs"] for condition in conditions[1:]), default=0)
    needed = max((condition["pairs_needed"] for condition in conditions[1:]), default=0)
    exact = any(condition["test"] == "exact" for condition in conditions[1:])
    if 0 < pairs < needed and not exact:
        notes.append(f"{plural(pairs, 'paired seed')}: a verdict needs {needed} or more.")
    elif 0 < pairs < needed:
        least = min(1.0, family * 2.0 ** -(pairs - 1))
        over = f" after correction for {family} comparisons" if family > 1 else ""
        notes.append(
            f"With {plural(pairs, 'paired seed')} the smallest p-value any difference can reach is "
            f"{least:.3g}{over}: a verdict needs {needed} or more."
        )
    return notes
