"""How many more seeds would tell a difference as large as was seen: lines of words, and of TOML to paste."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retrain.campaign.planning.manifest import read_plan
from retrain.maths.power import seeds_needed, spread_limit
from retrain.ui.sources import Home
from retrain.verdicts.declared_rule import rule_of
from retrain.verdicts.design import POWER, spread_of
from retrain.verdicts.pooling import Reader, read_source
from retrain.verdicts.results import Measure
from retrain.verdicts.words import amount


def power_of(home: Home, comparison: Mapping[str, Any], read: Reader) -> list[dict[str, Any]]:
    """How many seeds would tell the differences that were seen so far, by the functions of ``retrain explain
    --pilot``. Raises UsageError where the runs show no spread yet."""
    others = comparison["conditions"][1:]
    if not others or not home.manifest:
        return []
    measure = Measure(comparison["summary"], comparison["metric"])
    plan = read_plan(home.path)
    spread = spread_of(read_source(home.path, read=read).runs, measure, home.place)
    if not spread.value:
        return []
    seeds = sorted({spec.seed for spec in plan.specs})
    rule = rule_of(plan.specs[0].config.campaign.model_dump(), len(others), len(seeds), measure)
    fixed = replace(rule, looks="off", test="exact" if rule.test == "permutation" else rule.test)
    with_ = spread_limit(spread.value, spread.freedom) if spread.freedom else spread.value
    lines = []
    for condition in others:
        if not condition.get("difference"):
            continue
        target = abs(condition["difference"])
        needed = seeds_needed(fixed, target / with_, POWER)
        seen = f"a difference of {amount(target, measure)}, as {condition['label']} shows it so far,"
        if needed is None:
            line = f"{seen} would need more than 10,000 seeds"
        elif needed <= len(seeds):
            line = f"{seen} needs {needed} seeds, which are planned ({len(seeds)})"
        else:
            line = f"{seen} is found with {100 * POWER:.0f} % probability by {needed} seeds: {needed - len(seeds)} more"
        few = needed is not None and len(seeds) < needed <= 1_000
        lines.append({"label": condition["label"], "line": line, "needed": needed,
                      "toml": _toml(seeds, needed) if few and needed else None})  # fmt: skip
    return lines


def _toml(seeds: list[int], needed: int) -> str:
    """The line for [campaign] that asks for so many seeds, those that there are first."""
    more = [seed for seed in range(1, needed + len(seeds) + 1) if seed not in seeds]
    return f"seeds = {[*seeds, *more[: needed - len(seeds)]]}"
