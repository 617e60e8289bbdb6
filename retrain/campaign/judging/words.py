"""A comparison in words: the verdict, and the sentence that a person can quote without the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.campaign.judging.results import Measure
from retrain.maths.statistics import pairs_for_verdict
from retrain.record.numbers import minus, points
from retrain.wording import listed, plural

SIGNIFICANT = 0.05
NAMED_RUNS = 6
"""Missing runs that are named one by one; further ones are counted."""


def verdict(condition: Mapping[str, Any], measure: Measure, family: int, margin: float | None) -> str:
    """The finding about one condition, compared with the baseline, in a few words.

    ``family`` is the number of conditions compared with the baseline, this one included.
    """
    pairs, needed = condition["pairs"], pairs_for_verdict(family)
    if pairs == 0:
        return "cannot tell: no pair of finished runs"
    if pairs < needed:
        return f"cannot tell: {plural(pairs, 'pair')} of seeds, {needed} needed"
    different = condition["p_holm"] <= SIGNIFICANT
    small = condition["equivalence_p_holm"] is not None and condition["equivalence_p_holm"] <= SIGNIFICANT
    within = f"beyond {amount(margin or 0.0, measure)}"
    if different:
        return direction(condition["difference"], measure) + (f", though not {within}" if small else "")
    return f"no difference {within}" if small else "no difference shown"


def direction(difference: float, measure: Measure) -> str:
    """Whether a difference is for the better; of a metric that is no merit, only that it is higher or lower."""
    if measure.higher_is_better:
        return "better" if difference > 0 else "worse"
    return "higher" if difference > 0 else "lower"


def sentence(condition: Mapping[str, Any], baseline: str, measure: Measure, family: int) -> str:
    """Difference, interval, p, pairs, verdict, what is excluded, and the cost, in one sentence."""
    start, pairs = f"{condition['label']} − {baseline}: ", condition["pairs"]
    if not pairs:
        return f"{start}{condition['verdict']}."
    text = difference_words(condition, measure)
    if condition["p_holm"] is not None:
        text += f", p = {probability(condition['p_holm'])}"
        text += f" (corrected for {family} comparisons)" if family > 1 else ""
    finding = condition["verdict"]
    if finding.startswith("cannot tell") and "sequential" not in condition:
        finding = f"cannot tell, {pairs_for_verdict(family)} are needed"
    text += f", {plural(pairs, 'pair')}: {finding}"
    excluded = exclusion(condition, measure)
    cost = condition["cost_ratio"]
    text += f"; {excluded}" if excluded else ""
    text += f"; {cost:.2f} times the device time per run" if cost is not None else ""
    return f"{start}{text}."


def difference_words(condition: Mapping[str, Any], measure: Measure) -> str:
    """The difference with its unit and its interval, as far as there is one."""
    return amount(condition["difference"], measure, sign=True) + brackets(condition["difference_interval"], measure)


def brackets(ends: Sequence[float] | None, measure: Measure) -> str:
    """An interval behind its estimate; "" where there is none."""
    return f" [{', '.join(number(end, measure) for end in ends)}]" if ends else ""


def exclusion(condition: Mapping[str, Any], measure: Measure) -> str:
    """What the 95 % interval of the difference rules out, where there are enough pairs for a verdict, else "".

    Without a difference shown those are larger ones, in either direction; with one, smaller ones in its direction.
    """
    ends = condition["difference_interval"]
    if condition["p_holm"] is None or not ends or condition["verdict"].startswith("cannot tell"):
        return ""
    low, high = ends
    if condition["verdict"].startswith("no difference"):
        return f"differences above {amount(max(abs(low), abs(high)), measure)} are excluded"
    if low <= 0.0 <= high:
        return ""
    up, down = ("gains", "losses") if measure.higher_is_better else ("rises", "falls")
    return f"{up if low > 0.0 else down} below {amount(min(abs(low), abs(high)), measure)} are excluded"


def number(value: float, measure: Measure, *, sign: bool = False) -> str:
    """A difference: points of a share with one decimal, three digits of anything else; a real minus sign."""
    return points(value, sign=sign) if measure.is_share else minus(f"{value:{'+' if sign else ''}.3g}")


def amount(value: float, measure: Measure, *, sign: bool = False) -> str:
    """A difference with its unit."""
    return number(value, measure, sign=sign) + (" points" if measure.is_share else "")


def probability(p: float) -> str:
    """A p-value with two digits."""
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def missing_words(conditions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which runs are in no mean, and why: failed ones and those that have not finished are told apart."""
    missing = [run for condition in conditions for run in condition["missing"]]
    notes = []
    for kind, runs in (
        ("failed", [run for run in missing if run["state"] == "failed"]),
        ("unfinished", [run for run in missing if run["state"] not in ("failed", "done", "stopped")]),
        ("stopped (sequential rule)", [run for run in missing if run["state"] == "stopped"]),
        ("finished without a value", [run for run in missing if run["state"] == "done"]),
    ):
        if runs:
            names = listed([run["run_id"] for run in runs], NAMED_RUNS)
            are = "is" if len(runs) == 1 else "are"
            notes.append(f"{plural(len(runs), f'{kind} run')} {are} not in the means: {names}.")
    if any(run["state"] == "failed" for run in missing):
        notes.append("If runs fail because of what is compared, the means of the others flatter their condition.")
    return notes
