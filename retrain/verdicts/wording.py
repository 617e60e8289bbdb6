"""Put a comparison into words: the verdict, and the sentence that a person can quote without the table."""

from collections.abc import Sequence
from statistics import stdev

from retrain.config.campaign import condition_name
from retrain.errors import listed, plural
from retrain.records.schema.comparison import ConditionComparison, ConditionSummary, MissingRun, OutlierSeed
from retrain.util.text import p_words, percent, plain, points
from retrain.verdicts.declaration import EXPLORATORY, INTERIM
from retrain.verdicts.results import Measure
from retrain.verdicts.rule import FEWEST_PAIRS, Analysis, Outcome

ALIKE = "typical runs alike"
NOT_SHOWN = "no difference shown"
MISSING = "missing seeds could change the verdict"
NO_ANSWERS = "cannot tell: the answers to problems of one model or both are missing"
# Name of what differs between replicates, by `[campaign] vary`
VARIED = {
    "all": "other seeds",
    "init": "other initial adapters",
    "data": "other orders of the problems",
    "sampling": "other samples",
}
THESE_MODELS = "these two models, on problems like these; nothing about another training run"
MOST_UNEQUAL = 2.5  # Ratio of the runs' standard deviations; at 3 to 1, the test errs in 9 to 10 % instead of 5 %
NAMED_RUNS = 6  # Missing runs listed by name; the rest are only counted


def verdict(condition: ConditionComparison, outcome: Outcome | None, measure: Measure) -> str:
    """Return the verdict on one condition in a few words; an interim or exploratory comparison gets its status instead.
    ``outcome``: result of the deciding analysis."""
    pairs, typical = condition.pairs, condition.typical_difference
    if condition.standing == EXPLORATORY:
        return EXPLORATORY
    if condition.standing == INTERIM:
        return f"{INTERIM}: {pairs} of {plural(condition.pairs_planned or 0, 'pair')}"
    if typical is None:
        return "cannot tell: no pair of finished runs"
    against = any(outlier.distance * typical < 0 for outlier in condition.outlier_seeds)
    too_few = f"{plural(pairs, 'pair')} of seeds, {FEWEST_PAIRS} needed" if pairs < FEWEST_PAIRS else ""
    return _finding_words(outcome, typical, measure, against=against, too_few=too_few)


def _finding_words(outcome: Outcome | None, typical: float, measure: Measure, *, against: bool, too_few: str) -> str:
    """Return what an analysis found in a few words. ``against``: an outlier lies on the other side. ``too_few``: how
    many pairs or runs there are and are needed; "" if there are enough."""
    if outcome in ("higher", "lower"):
        return f"{'typical runs ' if against else ''}{direction(typical, measure)}"
    if outcome == "alike":
        return ALIKE
    if outcome == "not shown":
        return NOT_SHOWN
    return f"cannot tell: {too_few or 'mean and typical difference disagree'}"


def direction(difference: float, measure: Measure) -> str:
    if measure.higher_is_better is None:
        return "higher" if difference > 0 else "lower"
    return "better" if (difference > 0) == measure.higher_is_better else "worse"


def sentence(
    condition: ConditionComparison,
    baseline: ConditionComparison,
    measure: Measure,
    *,
    comparisons: int,
    margin: float | None,
    varied: str = "all",
) -> str:
    """Return one sentence with differences, interval, p, number of pairs, verdict and its population, qualifications
    and relative cost. ``varied`` is `[campaign] vary`."""
    start = f"{condition_name(condition.label)} − {condition_name(baseline.label)}: "
    typical, mean = condition.typical_difference, condition.difference
    if typical is None or mean is None:
        return f"{start}{condition.verdict}."
    text = _estimate(condition, typical, mean, measure, comparisons)
    parts = [f"{text}, {_finding(condition, measure, margin, varied)}", *_qualifications(condition, baseline, measure)]
    if condition.cost_ratio is not None:
        parts.append(f"{condition.cost_ratio:.2f} times the device time per run")
    return f"{start}{'; '.join(parts)}."


def _estimate(condition: ConditionComparison, typical: float, mean: float, measure: Measure, comparisons: int) -> str:
    text = f"{amount(typical, measure, sign=True)} typically{brackets(condition.difference_interval, measure)}"
    text += f" (mean {number(mean, measure, sign=True)})"
    if ends := new_problems(condition, measure):
        text += f" (on new problems too{brackets(ends, measure)})"
    if condition.p_value is not None:
        text += f", {p_words(condition.p_value)}"
        text += f" (corrected for {comparisons} comparisons)" if comparisons > 1 else ""
    return text


def unpaired_verdict(
    condition: ConditionComparison,
    baseline: ConditionComparison,
    analysis: Analysis,
    measure: Measure,
    fewest: int | None,
) -> str:
    """Return the verdict of a comparison of whole runs in a few words. ``fewest``: runs that are needed on each side,
    None if there are enough."""
    if condition.standing in (EXPLORATORY, INTERIM):
        return condition.standing
    typical = analysis.typical
    if typical is None:
        return "cannot tell: no finished runs on both sides"
    against = any(outlier.distance * typical < 0 for outlier in condition.outlier_seeds)
    against |= any(outlier.distance * typical > 0 for outlier in baseline.outlier_seeds)
    too_few = "" if fewest is None else f"{_runs(condition, baseline)}, {fewest} + {fewest} needed"
    return _finding_words(analysis.outcome, typical, measure, against=against, too_few=too_few)


def unpaired_sentence(
    condition: ConditionComparison, baseline: ConditionComparison, measure: Measure, *, comparisons: int
) -> str:
    start = f"{condition_name(condition.label)} − {condition_name(baseline.label)}: "
    typical, mean = condition.typical_difference, condition.difference
    if typical is None or mean is None:
        return f"{start}{condition.verdict}."
    finding = _status(condition) or f"{condition.verdict} ({population(measure)})"
    text = f"{_estimate(condition, typical, mean, measure, comparisons)}, {_runs(condition, baseline)}, not paired"
    outliers = [
        f"run {outlier.seed} of {condition_name(level.label)} {_moved(outlier, measure)}"
        for level in (condition, baseline)
        for outlier in level.outlier_seeds
    ]
    parts = [f"{text}: {finding}", *outliers, *_open(condition, measure), *_unequal_spreads(condition, baseline)]
    return f"{start}{'; '.join(parts)}."


def _unequal_spreads(condition: ConditionComparison, baseline: ConditionComparison) -> list[str]:
    if min(len(condition.after_values), len(baseline.after_values)) < 2:
        return []
    low, high = sorted(stdev(level.after_values) for level in (condition, baseline))
    unequal = f"the test assumes equal spreads, and those of the runs differ by more than {MOST_UNEQUAL} to 1"
    return [unequal] if high > MOST_UNEQUAL * low else []


def _moved(outlier: OutlierSeed, measure: Measure) -> str:
    return f"lies {amount(abs(outlier.distance), measure)} {'lower' if outlier.distance < 0 else 'higher'}"


def _runs(condition: ConditionComparison, baseline: ConditionComparison) -> str:
    return f"{len(condition.finished)} + {len(baseline.finished)} runs"


def models_verdict(condition: ConditionComparison, measure: Measure) -> str:
    """Return the verdict of a comparison of two models by problem in a few words."""
    if condition.standing in (EXPLORATORY, INTERIM):
        return condition.standing
    if condition.difference is None:
        return NO_ANSWERS
    ends = condition.difference_interval
    if ends is None:
        return "cannot tell: one problem"
    if ends[0] > 0 or ends[1] < 0:
        return f"these models: {direction(condition.difference, measure)}"
    return NOT_SHOWN


def models_sentence(
    condition: ConditionComparison, baseline: str, measure: Measure, *, problems: int, comparisons: int
) -> str:
    start = f"{condition_name(condition.label)} − {condition_name(baseline)}: "
    if condition.difference is None:
        return f"{start}{_status(condition) if condition.standing == INTERIM else NO_ANSWERS}."
    text = f"{amount(condition.difference, measure, sign=True)}{brackets(condition.difference_interval, measure)}"
    text += f" (corrected for {comparisons} comparisons)" if comparisons > 1 else ""
    finding = _status(condition) or condition.verdict.removeprefix("these models: ")
    parts = [f"{text}, {plural(problems, 'problem')}: {finding}", *_open(condition, measure), THESE_MODELS]
    return f"{start}{'; '.join(parts)}."


def _status(condition: ConditionComparison) -> str:
    """Return why there is no verdict yet, or none at all; "" where there is one."""
    if condition.standing == INTERIM:
        return f"{INTERIM}, no verdict yet"
    if condition.standing == EXPLORATORY:
        return f"{EXPLORATORY}, no verdict ({'; '.join(condition.standing_reasons)})"
    return ""


def _open(condition: ConditionComparison, measure: Measure) -> list[str]:
    ends = condition.difference_interval
    if condition.verdict != NOT_SHOWN or not ends:
        return []
    return [f"up to {amount(max(abs(end) for end in ends), measure)} stay open"]


def _finding(condition: ConditionComparison, measure: Measure, margin: float | None, varied: str) -> str:
    pairs = plural(condition.pairs, "pair")
    if condition.standing == INTERIM:
        so_far = f"{condition.pairs} of {plural(condition.pairs_planned or 0, 'pair')}: interim, no verdict yet"
        if condition.missing_could_change is None:
            return so_far
        if condition.missing_could_change:
            return f"{so_far}; {MISSING}"
        finding = direction(condition.typical_difference or 0.0, measure)
        return f"{so_far}; {finding} also with the missing accuracies at 0 % or at 100 %"
    if status := _status(condition):
        return f"{pairs}: {status}"
    if condition.pairs < FEWEST_PAIRS:
        return f"{pairs}: cannot tell, {FEWEST_PAIRS} are needed"
    within = f" within {amount(margin or 0.0, measure)}" if condition.verdict == ALIKE else ""
    return f"{pairs}: {condition.verdict}{within} ({population(measure, varied)})"


def _qualifications(condition: ConditionComparison, baseline: ConditionComparison, measure: Measure) -> list[str]:
    parts = [f"seed {outlier.seed} {_moved(outlier, measure)}" for outlier in condition.outlier_seeds]
    parts += _open(condition, measure)
    if condition.verdict == ALIKE and condition.unseen_collapse_rate is not None:
        parts.append(f"none of {len(condition.finished)} + {len(baseline.finished)} runs is an outlier")
        unseen = f"collapses in up to {percent(condition.unseen_collapse_rate)} of runs would have gone unseen"
        bound = condition.mean_difference_bound
        if bound is not None:
            unseen += f", so that the means differ by at most {amount(bound, measure)}"
        parts.append(unseen)
    if condition.decided_after is not None:
        parts.append(f"decided after {condition.decided_after} of {plural(condition.pairs_planned or 0, 'pair')}")
        if condition.pairs <= condition.decided_after:
            parts.append("later seeds were not trained")
    return parts


def population(measure: Measure, varied: str = "all") -> str:
    """Return the population that a verdict holds for. p and interval include the spread of whatever `[campaign] vary`
    lets differ between seeds, but not the spread between problems."""
    return f"{VARIED[varied]}, these problems" if measure.is_held_out else VARIED[varied]


def difference_words(condition: ConditionSummary, measure: Measure) -> str:
    if condition.typical_difference is None:
        return ""
    return amount(condition.typical_difference, measure, sign=True) + brackets(condition.difference_interval, measure)


def new_problems(condition: ConditionComparison, measure: Measure) -> list[float] | None:
    """Return the interval for new problems; None if there is none, or if the one for these problems prints alike."""
    wider = condition.difference_new_problems
    if wider is None or wider.low is None or wider.high is None:
        return None
    ends = [wider.low, wider.high]
    return None if brackets(ends, measure) == brackets(condition.difference_interval, measure) else ends


def brackets(ends: Sequence[float] | None, measure: Measure, *, sign: bool = True) -> str:
    """Format an interval to follow its estimate; "" without an interval. ``sign``: with a sign, for differences."""
    return f" [{', '.join(number(end, measure, sign=sign) for end in ends)}]" if ends else ""


def number(value: float, measure: Measure, *, sign: bool = False) -> str:
    return points(value, sign=sign) if measure.is_share else plain(value, sign)


def amount(value: float, measure: Measure, *, sign: bool = False) -> str:
    return number(value, measure, sign=sign) + (" points" if measure.is_share else "")


_MISSING_KINDS = {
    "failed": "failed {}",
    "missing": "missing {}",
    "unfinished": "unfinished {}",
    "stopped": "stopped (interim analysis) {}",
    "done": "finished {} without a value",
}


def missing_words(missing: Sequence[MissingRun]) -> list[str]:
    notes = []
    states = [run.state if run.state in _MISSING_KINDS else "unfinished" for run in missing]
    for state, kind in _MISSING_KINDS.items():
        if runs := [run.run_id for run, other in zip(missing, states, strict=True) if other == state]:
            noun, verb = ("run", "is") if len(runs) == 1 else ("runs", "are")
            notes.append(f"{len(runs):,} {kind.format(noun)} {verb} not in the means: {listed(runs, NAMED_RUNS)}.")
    if "failed" in states:
        notes.append("If runs fail because of what is compared, the means of the others flatter their condition.")
    return notes
