"""A comparison in words: the verdict, and the sentence that a person can quote without the table."""

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.config.campaign import condition_name
from retrain.errors import listed, plural
from retrain.records.text import minus, points
from retrain.verdicts.declaration import EXPLORATORY, INTERIM
from retrain.verdicts.results import Measure

SIGNIFICANT = 0.05
VARIED = {
    "all": "other seeds",
    "init": "other initial adapters",
    "data": "other orders of the problems",
    "sampling": "other samples",
}
"""What replicates are, by `[campaign] vary`."""
NAMED_RUNS = 6  # Missing runs listed by name; the rest are only counted


def verdict(condition: Mapping[str, Any], measure: Measure, margin: float | None) -> str:
    """The finding about one condition, compared with the baseline, in a few words.

    Only what was declared gets a verdict; what a stopping rule has decided stands in the condition already.
    """
    pairs, needed = condition["pairs"], condition["pairs_needed"]
    if condition["standing"] == EXPLORATORY:
        return EXPLORATORY
    if condition["standing"] == INTERIM:
        return f"{INTERIM}: {pairs} of {plural(condition['pairs_planned'], 'pair')}"
    if condition["verdict"]:
        return condition["verdict"]
    if pairs == 0:
        return "cannot tell: no pair of finished runs"
    if pairs < needed:
        return f"cannot tell: {plural(pairs, 'pair')} of seeds, {needed} needed"
    different = condition["p_holm"] <= SIGNIFICANT
    small = condition["equivalence_p_holm"] is not None and condition["equivalence_p_holm"] <= SIGNIFICANT
    within = f"beyond {amount(margin or 0.0, measure)}"
    if different:
        return direction(condition["difference_tested"], measure) + (f", though not {within}" if small else "")
    return f"no difference {within}" if small else "no difference shown"


def direction(difference: float, measure: Measure) -> str:
    """Whether a difference is for the better; of a metric that is no merit, only that it is higher or lower."""
    if measure.higher_is_better:
        return "better" if difference > 0 else "worse"
    return "higher" if difference > 0 else "lower"


def sentence(condition: Mapping[str, Any], baseline: str, measure: Measure, family: int, varied: str = "all") -> str:
    """Difference, interval, p, pairs, verdict with the population it speaks of, what remains possible, and the cost, in
    one sentence. ``varied`` is `[campaign] vary`."""
    start = f"{condition_name(condition['label'])} − {condition_name(baseline)}: "
    pairs = condition["pairs"]
    if not pairs:
        return f"{start}{condition['verdict']}."
    text = difference_words(condition, measure)
    if wider := new_problems(condition, measure):
        text += f" (on new problems too{brackets(wider, measure)})"
    if condition["p_holm"] is not None:
        text += f", {p_words(condition['p_holm'])}"
        text += f" (corrected for {family} comparisons)" if family > 1 else ""
    cost = condition["cost_ratio"]
    text += f", {_finding(condition, measure, varied)}"
    text += f"; {cost:.2f} times the device time per run" if cost is not None else ""
    return f"{start}{text}."


def _finding(condition: Mapping[str, Any], measure: Measure, varied: str) -> str:
    pairs, found = plural(condition["pairs"], "pair"), condition["verdict"]
    if condition["standing"] == INTERIM:
        return f"{condition['pairs']} of {plural(condition['pairs_planned'], 'pair')}: interim, no verdict yet"
    if condition["standing"] == EXPLORATORY:
        return f"{pairs}: exploratory, no verdict ({'; '.join(condition['standing_reasons'])})"
    if found.startswith("cannot tell"):
        needed = condition["pairs_needed"]
        return f"{pairs}: cannot tell, {needed} are needed" if "sequential" not in condition else f"{pairs}: {found}"
    open_yet, alike = remaining(condition, measure), condition.get("equivalence_p_holm")
    if alike is not None and alike <= SIGNIFICANT:  # said, since the 95 % interval may reach beyond the margin
        found += f", equivalence {p_words(alike)}"
    return f"{pairs}: {found} ({population(measure, varied)})" + (f"; {open_yet}" if open_yet else "")


def population(measure: Measure, varied: str = "all") -> str:
    """Of what a verdict over seeds speaks: p and the interval beside it know how seeds vary, in what `[campaign] vary`
    lets them, and not how problems do."""
    return f"{VARIED[varied]}, these problems" if measure.is_held_out else VARIED[varied]


def difference_words(condition: Mapping[str, Any], measure: Measure) -> str:
    """The difference with its unit and its interval, as far as there is one."""
    return amount(condition["difference"], measure, sign=True) + brackets(condition["difference_interval"], measure)


def new_problems(condition: Mapping[str, Any], measure: Measure) -> list[float] | None:
    """The ends of the interval of a difference that holds for new problems too; None without one, as in comparisons of
    earlier releases, and where it reads as the one for these problems does."""
    own = condition.get("difference_new_problems")
    if not own or own["low"] is None:
        return None
    ends = [own["low"], own["high"]]
    return None if brackets(ends, measure) == brackets(condition["difference_interval"], measure) else ends


def brackets(ends: Sequence[float] | None, measure: Measure) -> str:
    """An interval behind its estimate; "" where there is none."""
    return f" [{', '.join(number(end, measure) for end in ends)}]" if ends else ""


def remaining(condition: Mapping[str, Any], measure: Measure) -> str:
    """Without a difference shown: what the 95 % interval leaves open, in either direction; else ""."""
    ends = condition["difference_interval"]
    if not ends or condition["verdict"] != "no difference shown":
        return ""
    return f"the interval leaves {amount(max(abs(end) for end in ends), measure)} open"


def number(value: float, measure: Measure, *, sign: bool = False) -> str:
    """A difference: points of a share with one decimal, three digits of anything else; a real minus sign."""
    return points(value, sign=sign) if measure.is_share else minus(f"{value:{'+' if sign else ''}.3g}")


def amount(value: float, measure: Measure, *, sign: bool = False) -> str:
    return number(value, measure, sign=sign) + (" points" if measure.is_share else "")


def probability(p: float) -> str:
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def p_words(p: float) -> str:
    """A p-value in a sentence: `p = 0.017`, or `p < 0.0001`."""
    said = probability(p)
    return f"p {said}" if said.startswith("<") else f"p = {said}"


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
