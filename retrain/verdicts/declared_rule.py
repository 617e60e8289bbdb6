"""The declared rule in a comparison: p-values, which test spoke, collapsed runs, and what the looks decided.

``maths.deciding`` does the mathematics; here it meets the conditions of ``comparison``. Of each condition compared with
the baseline are filled in:

    p_value     two-sided, of the declared test alone; with looks the stage-wise one of where the condition left
    p_holm      adjusted for the family: Holm, step-down Dunnett or closed permutation, as the test has it
    p_exact     of the sign flips of these pairs, uncorrected, beside any test
    difference_tested   what this test estimates the difference by: the mean of the pairs, but of the normal test the
                fit of seed + condition, which also knows runs without a partner; a verdict's direction is its sign
    test        which test spoke: the declared one, or "exact" where a collapsed run handed over to it
    pairs_needed    pairs without which this test can decide nothing
    collapsed   [{seed, gap}] runs of this condition far below what seed and condition let expect, see maths.collapse
    stop_reason "decided", "futility", "planned end" or null, with looks
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.config.campaign import RULE_KEYS, condition_name
from retrain.errors import plural
from retrain.maths.deciding import decide
from retrain.maths.permutation import MOST_COMPARISONS
from retrain.maths.rules import FUTILE, Rule
from retrain.maths.statistics import pairs_for_verdict
from retrain.verdicts.results import Measure
from retrain.verdicts.words import amount, direction

FILLED = ("p_value", "p_holm", "p_exact", "difference_tested", "test", "pairs_needed", "stop_reason")
NO_VERDICT = "no difference shown"
FUTILITY = "no difference shown (stopped for futility)"

Values = Mapping[str, Mapping[Any, float]]  # Results by condition and pair of seeds


def rule_of(declared: Mapping[str, Any], family: int, planned: int, measure: Measure, *, looks: bool = True) -> Rule:
    """The rule that these keys of [campaign] declare; missing ones are the defaults.

    Without ``looks`` it is what decides when nothing was looked at before. What cannot hold for this family (an earlier
    spread of one difference, closed permutation of seven) is left out: the configuration refuses it, but directories
    that are put together may come to it.
    """
    test, sequential = declared.get("test", "exact"), declared.get("sequential", "off") if looks else "off"
    if test == "permutation" and family > MOST_COMPARISONS:
        test = "exact"
    futility = declared.get("futility", False)
    stops = sequential not in ("off", "always_valid")
    spread = float(declared.get("prior_spread") or 0.0) if test == "normal" and family == 1 else 0.0
    return Rule(
        test=test,
        family=max(family, 1),
        planned=max(planned, 1),
        looks=sequential,
        futility=(FUTILE if futility is True else float(futility)) if futility and stops else None,
        race=bool(declared.get("race", False)) and stops,
        upward=measure.higher_is_better,
        prior_spread=spread,
        prior_freedom=float(declared.get("prior_freedom", 4)) if spread and sequential == "off" else 0.0,
    )


def declared_by(runs: Sequence[Any]) -> dict[str, Any]:
    """The keys of the rule as the first run with a record of its settings has them."""
    campaign = next((own for run in runs if (own := run.config.get("campaign"))), {})
    return {key: campaign[key] for key in RULE_KEYS if key in campaign}


def varied_by(runs: Sequence[Any]) -> str:
    """What the seeds of a condition differ in (`[campaign] vary`), as the first run with a record of its settings has
    it."""
    return str(next((own for run in runs if (own := run.config.get("campaign"))), {}).get("vary", "all"))


def table_of(labels: Sequence[str], results: Values) -> tuple[np.ndarray, list[Any]]:
    """[seeds, conditions] with NaN for what is missing, and the pair of each row, in their order."""
    pairs = sorted({pair for label in labels for pair in results[label]})
    rows = [[results[label].get(pair, np.nan) for label in labels] for pair in pairs]
    return np.array(rows, dtype=np.float64).reshape(len(pairs), len(labels)), pairs


def judge(
    conditions: Sequence[dict[str, Any]],
    results: Values,
    declared: Mapping[str, Any],
    measure: Measure,
    resolution: float,
) -> None:
    """Fill the p-values and collapses into the conditions, the first of which is the baseline."""
    labels = [condition["label"] for condition in conditions]
    for condition in conditions:
        condition |= dict.fromkeys(FILLED) | {"collapsed": []}
    if len(labels) < 2:
        return
    table, pairs = table_of(labels, results)
    rule = rule_of(declared, len(labels) - 1, len(pairs), measure, looks=False)
    decisions = decide(table, rule, resolution)
    for run in decisions.collapses:
        conditions[run.condition]["collapsed"].append({"seed": pairs[run.seed][1], "gap": run.gap})
    for condition, found in zip(conditions[1:], decisions.comparisons, strict=True):
        exact = found.by == "exact"
        condition |= {
            "p_value": found.p,
            "p_holm": found.p_adjusted,
            "p_exact": found.p_exact,
            "difference_tested": found.tested,
            "test": found.by,
            "pairs_needed": pairs_for_verdict(rule.family) if exact else rule.fewest,
        }


def overlay(conditions: Sequence[dict[str, Any]], record: Mapping[str, Any], measure: Measure) -> None:
    """Put what the looks decided, the manifest's record, into a comparison's conditions (all but the first).

    The p-value of one look at the end is not valid after several looks; the stage-wise one is.
    """
    for condition in conditions:
        own = record["conditions"].get(condition["label"])
        if own is None:
            continue
        looks, left = own["looks"], own["stopped_after"] is not None
        always = record["rule"] == "always_valid"
        ended = left or always or len(own["differences"]) == record["planned"]
        last = looks[-1] if looks and ended else None
        size = len(record["conditions"])
        reason = own.get("stop_reason") or ("decided" if left else "planned end" if ended and not always else None)
        condition["p_value"] = last["p"] if last else None
        condition["p_holm"] = _adjusted(last, size) if last else None
        if last:
            condition["difference_tested"] = last.get("tested", last["mean"])
        condition["test"] = last.get("by", "exact") if last else record.get("test", "exact")
        condition["stop_reason"] = reason
        condition["sequential"] = {
            "rule": record["rule"],
            "planned": record["planned"],
            "looks": len(looks),
            "stopped_after": own["stopped_after"],
            "spent": looks[-1].get("spent") if looks else 0.0,
            "level": record["alpha"] / size if record.get("test", "exact") == "exact" else record["alpha"],
        }
        if left:  # it took no more pairs than it had then, whatever the whole table would take by now
            condition["pairs_needed"] = own["stopped_after"]
        if left and looks:
            found = direction(condition["difference_tested"], measure)
            condition["verdict"] = found if reason == "decided" else FUTILITY
        elif not ended:
            condition["verdict"] = "cannot tell: the sequential rule has not decided yet"
        elif condition["pairs"] >= condition["pairs_needed"]:  # of fewer pairs nothing can be said
            condition["verdict"] = NO_VERDICT


def _adjusted(look: Mapping[str, Any], size: int) -> float | None:
    """The p of a look, corrected for so many comparisons; None of one that had too few pairs for any."""
    if "p_adjusted" in look:
        return look["p_adjusted"]
    return None if look["p"] is None else min(1.0, look["p"] * size)


def words(condition: Mapping[str, Any], baseline: Mapping[str, Any], measure: Measure) -> str:
    """What the looks did and which runs collapsed, as sentences after the finding; "" when neither."""
    return _looks_words(condition) + _collapse_words(condition, baseline, measure)


def _looks_words(condition: Mapping[str, Any]) -> str:
    facts = condition.get("sequential")
    if not facts:
        return ""
    after, planned = facts["stopped_after"], facts["planned"]
    if facts["rule"] == "always_valid":
        what = f"decided after {plural(after, 'pair')}" if after is not None else "not decided; seeds may be added"
        return f" Always-valid rule: {what}."
    spent = f", {facts['spent']:.2g} of {facts['level']:.3g} spent" if facts["spent"] is not None else ""
    if condition.get("stop_reason") == "futility":
        return (
            f" Stopped after {after} of {planned} pairs: a difference was unlikely to show at the end, which does not "
            "make the conditions equivalent."
        )
    if after is not None:
        return f" Stopped after {after} of {planned} pairs by the sequential rule{spent}."
    return f" Sequential rule: not stopped in {facts['looks']} looks{spent}."


def _collapse_words(condition: Mapping[str, Any], baseline: Mapping[str, Any], measure: Measure) -> str:
    fallen = [
        f"{condition_name(each['label'])} of seed {run['seed']} collapsed "
        f"({amount(run['gap'], measure)} below what its seed lets expect)"
        for each in (condition, baseline)
        for run in each.get("collapsed", [])
    ]
    if not fallen:
        return ""
    decides = " The exact test decides." if condition.get("test") == "exact" else ""
    return f" This speaks of typical runs, not of the mean: {', '.join(fallen)}.{decides}"
