"""Fresh seeds that would show a difference as large as was seen: lines of words, and of TOML to paste."""

from collections.abc import Mapping
from typing import Any

from retrain.records.reader import planned_configs
from retrain.ui.sources import Home
from retrain.verdicts.planning import WANTED_POWER, pair_spread, seeds_needed
from retrain.verdicts.results import Measure
from retrain.verdicts.wording import amount


def power_of(home: Home, comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how many seeds would show the differences seen so far, by the table of the rule's power."""
    others = comparison["conditions"][1:]
    if not others or not home.manifest:
        return []
    measure = Measure(comparison["summary"], comparison["metric"])
    spread = pair_spread([condition["differences"] for condition in others])
    if not spread:
        return []
    seeds = sorted({config["training"]["seed"] for config in planned_configs(home.path).values()})
    if not seeds:
        return []
    lines = []
    for condition in others:
        if not condition["typical_difference"]:
            continue
        target = abs(condition["typical_difference"])
        needed = seeds_needed(len(others), target / spread)
        seen = f"a difference of {amount(target, measure)}, as {condition['label']} shows it so far,"
        if needed is None:
            line = f"{seen} would need more than 10,000 seeds"
        elif needed <= len(seeds):
            line = f"{seen} needs {needed} seeds, which are planned ({len(seeds)})"
        else:
            line = f"{seen} is found with {100 * WANTED_POWER:.0f} % probability by {needed} fresh seeds"
        few = needed is not None and len(seeds) < needed <= 1_000
        lines.append({"label": condition["label"], "line": line, "needed": needed,
                      "toml": _toml(seeds, needed) if few and needed else None})  # fmt: skip
    return lines


def _toml(seeds: list[int], needed: int) -> str:
    """Return the line for [campaign] of a new campaign with so many fresh seeds."""
    return f"seeds = {list(range(seeds[-1] + 1, seeds[-1] + 1 + needed))}"
