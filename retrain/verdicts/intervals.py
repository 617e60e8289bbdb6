"""The intervals of a comparison, made to agree with what the test decided.

Of every condition's difference to the baseline: for other seeds on these problems (``difference_interval``, with those
of the whole family at once), for other seeds on new problems (``difference_new_problems``), and, where a sequential
rule looked, corrected for the moment at which it stopped (``difference_adjusted``). The maths is in ``maths.family``,
``maths.crossed`` and ``maths.stopped``; here it meets runs, scales and verdicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from retrain.maths.crossed import new_problems_interval
from retrain.maths.family import simultaneous_intervals, t_interval
from retrain.maths.statistics import Interval, holm
from retrain.maths.stopped import stopped_interval
from retrain.verdicts.declared_rule import table_of
from retrain.verdicts.problem_scores import problem_scores
from retrain.verdicts.results import Measure, RunResult, finished_of, values_of
from retrain.verdicts.words import SIGNIFICANT, amount

DIRECTIONS = ("better", "worse", "higher", "lower")  # First words of verdicts that there is a difference
Condition = dict[str, Any]
Ends = list[float] | None


def possible(interval: Interval, measure: Measure, *, level: bool = False) -> Interval:
    """An interval within what the measure can be: of shares, differences within [−1, 1] and levels within [0, 1]."""
    if not measure.is_share or interval.low is None or interval.high is None:
        return interval
    least = 0.0 if level else -1.0
    return Interval(interval.estimate, max(interval.low, least), min(interval.high, 1.0))


def alone(differences: Sequence[float], measure: Measure, resolution: float) -> Ends:
    """The 95 % interval of one difference that is no member of a family; None with one pair."""
    table = np.stack([np.zeros(len(differences)), np.asarray(differences)], axis=1)
    (own,) = simultaneous_intervals(table, resolution=resolution)
    return None if own is None else _ends(possible(own, measure))


def put_intervals(
    conditions: Sequence[Condition], runs: Sequence[RunResult], measure: Measure, *, resolution: float,
    sequential: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Fill in the intervals of all conditions but the first, the baseline, once their verdicts are known.

    The family's intervals are those of the test that decided: ``condition["test"]``, where all have the normal one,
    else exact. An end that passes 0 although the verdict says there is a difference is 0: Holm's and Dunnett's tests
    go on where intervals for all at once stop; and one that stops short of 0 without a difference shown reaches it.
    """
    baseline, others = conditions[0], conditions[1:]
    if not others:
        return
    level = 1.0 - SIGNIFICANT / len(others)
    kind = "normal" if all(condition.get("test") == "normal" for condition in others) else "exact"
    results = _Results(runs, measure)
    labels = [condition["label"] for condition in conditions]
    table, _ = table_of(labels, {label: values_of(label, runs, measure) for label in labels})
    if not len(table):
        return
    at_once = simultaneous_intervals(table, kind, level=1.0 - SIGNIFICANT, resolution=resolution)
    for condition, own in zip(others, at_once, strict=True):
        if own is None:
            continue
        condition["difference_t"] = _ends(possible(t_interval(condition["differences"], 0.95, resolution), measure))
        adjusted = _after_looks(condition, sequential, level, resolution)
        if adjusted is not None:
            condition["difference_adjusted"] = asdict(_agreeing(possible(adjusted, measure), condition))
        own = _agreeing(possible(own, measure), condition)
        condition["difference_interval"] = _ends(own)
        if kind == "normal" and np.isnan(table).any():  # the fit takes what it can from seeds that are not whole, too
            condition["difference"] = own.estimate
        wider = results.on_new_problems(condition, baseline["label"], level, resolution)
        if wider is not None:
            wider = possible(_around(wider, own), measure)
            condition["difference_new_problems"] = asdict(wider)


def _ends(interval: Interval) -> Ends:
    return None if interval.low is None or interval.high is None else [interval.low, interval.high]


def _agreeing(interval: Interval, condition: Condition) -> Interval:
    """The interval, cut at 0 or stretched to it where the verdict says so."""
    low, high, verdict = interval.low, interval.high, condition["verdict"]
    if low is None or high is None:
        return interval
    if verdict.startswith("no difference"):
        return Interval(interval.estimate, min(low, 0.0), max(high, 0.0))
    if verdict.split()[0].rstrip(",") not in DIRECTIONS:  # interim, exploratory, or too few pairs to tell
        return interval
    if condition["difference_tested"] > 0.0:
        return Interval(interval.estimate, max(low, 0.0), high)
    return Interval(interval.estimate, low, min(high, 0.0))


def _around(wider: Interval, inner: Interval) -> Interval:
    """What holds for more populations holds for fewer: never narrower than the interval for these problems."""
    if wider.low is None or wider.high is None or inner.low is None or inner.high is None:
        return wider
    return Interval(wider.estimate, min(wider.low, inner.low), max(wider.high, inner.high))


# Looks


def _after_looks(
    condition: Condition, sequential: Mapping[str, Any] | None, level: float, resolution: float
) -> Interval | None:
    """The difference corrected for the moment at which the rule stopped, None without looks or spread."""
    record: Mapping[str, Any] = (sequential or {}).get("conditions", {}).get(condition["label"]) or {}
    looks = record.get("looks") or []
    if not looks or any(look.get("spent") is None for look in looks):
        return None
    # A cohort may have trained seeds beyond the one at which the rule stopped.
    differences = [value for _, value in record["differences"] if value is not None][: looks[-1]["pairs"]]
    if len(differences) < 2:
        return None
    spread = max(float(np.std(differences, ddof=1)), resolution / 6.0**0.5)
    if spread == 0.0:
        return None
    spent = [look["spent"] for look in looks]
    return stopped_interval(float(np.mean(differences)), spread, spent, len(differences) - 1, level)


def hold_equivalence(
    conditions: Sequence[Condition], sequential: Mapping[str, Any] | None, measure: Measure, margin: float | None
) -> None:
    """With a sequential rule, equivalence is tested once, at the planned end of a condition that was not stopped.

    A claim made there is one of those that a test without looks would make, so that its error is no larger; what was
    stopped, for a difference or for futility, has no p-value of equivalence, nor has a rule without a planned end.
    ``conditions`` are all but the first one.
    """
    if not sequential or margin is None:
        return
    endless = sequential["rule"] == "always_valid"
    for condition in conditions:
        record = sequential["conditions"].get(condition["label"])
        planned = record is not None and len(record["differences"]) >= sequential["planned"]
        if endless or record is None or not planned or record["stopped_after"] is not None:
            condition["equivalence_p"] = condition["equivalence_p_holm"] = None
    known = [1.0 if condition["equivalence_p"] is None else condition["equivalence_p"] for condition in conditions]
    for condition, adjusted in zip(conditions, holm(known), strict=True):
        if condition["equivalence_p"] is None:
            continue
        condition["equivalence_p_holm"] = float(adjusted)
        if adjusted <= SIGNIFICANT and condition["verdict"] == "no difference shown":
            condition["verdict"] = f"no difference beyond {amount(margin, measure)}"


# Problems


class _Results:
    """Finished runs by condition, and the scores of their problems, read once for each run and only where asked for."""

    def __init__(self, runs: Sequence[RunResult], measure: Measure):
        self._runs, self.measure = runs, measure
        self._known: dict[str, dict[tuple[int, int], RunResult]] = {}
        self._scores: dict[int, dict[str, float] | None] = {}

    def on_new_problems(self, condition: Condition, baseline: str, level: float, resolution: float) -> Interval | None:
        """The interval for other seeds on new problems, None where a pair's files do not have the same problems."""
        if not self.measure.is_held_out or len(condition["differences"]) < 2:
            return None
        mine, base = self.finished(condition["label"]), self.finished(baseline)
        rows = []
        for pair in (pair for pair in mine if pair in base):
            a, b = self._of(mine[pair]), self._of(base[pair])
            if a is None or b is None or set(a) != set(b) or (rows and len(a) != len(rows[0])):
                return None
            rows.append([[a[problem], b[problem]] for problem in sorted(a)])
        if len(rows) != len(condition["differences"]):
            return None
        return new_problems_interval(np.array(rows), level, resolution)

    def finished(self, label: str) -> dict[tuple[int, int], RunResult]:
        if label not in self._known:
            own = finished_of(label, self._runs, self.measure)
            self._known[label] = {pair: run for pair, (run, _) in own.items()}
        return self._known[label]

    def _of(self, run: RunResult) -> dict[str, float] | None:
        if id(run) not in self._scores:
            self._scores[id(run)] = problem_scores(run, self.measure)
        return self._scores[id(run)]
