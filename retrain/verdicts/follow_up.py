"""Command for a follow-up campaign with fresh seeds, printed after "no difference shown"."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.records.reader import read_plan_file
from retrain.records.schema.layout import PLAN
from retrain.verdicts.planning import PLANNED_SEEDS, power, seeds_needed
from retrain.verdicts.results import Measure
from retrain.verdicts.words import NOT_SHOWN, amount

MOST_FOLLOW_UP_SEEDS = 20
"""Seeds of a follow-up at most: beyond, a difference is too small for the spread of these runs."""


def follow_up(comparison: Mapping[str, Any], directory: Path) -> str:
    """Return the power of a follow-up and, on a second line, its command; "" where every comparison has an answer.

    The same file is declared anew with seeds that no run has had: nothing is pooled.
    """
    others = comparison["conditions"][1:]
    unanswered = [condition["differences"] for condition in others if condition["verdict"] == NOT_SHOWN]
    if not unanswered or not (directory / PLAN).is_file():
        return ""
    measure, margin = Measure(comparison["summary"], comparison["metric"]), comparison["margin"]
    spread = pair_spread(unanswered)
    effect = 1.5 if margin is None or not spread else margin / spread
    needed = seeds_needed(len(others), effect)
    count = min(max(PLANNED_SEEDS, needed or MOST_FOLLOW_UP_SEEDS), MOST_FOLLOW_UP_SEEDS)
    share = f"{100 * power(count, len(others), effect):.0f} %"
    what = f"a difference of {amount(margin, measure)}" if margin and spread else "a difference of 1.5 pair spreads"
    if margin is None and spread:
        what += f" ({amount(1.5 * spread, measure)})"
    last = max(seed for condition in comparison["conditions"] for seed in condition["seeds"])
    command = _command(directory, range(last + 1, last + 1 + count))
    return f"A new campaign with {count} fresh seeds finds {what} with {share} probability; declare it with\n{command}"


def _command(directory: Path, seeds: range) -> str:
    """Return the command that trains a campaign's file with other seeds, into a directory beside its own."""
    plan = read_plan_file(directory)
    sets = [setting for setting in plan.get("sets", []) if setting.partition("=")[0].strip() != "campaign.seeds"]
    sets.append(f"campaign.seeds=[{','.join(map(str, seeds))}]")
    own = directory.resolve()
    out = own.with_name(f"{own.name}_seeds{seeds[0]}-{seeds[-1]}")
    words = ["retrain", "train", _shown(Path(plan["folder"], plan["file"]))]
    return shlex.join([*words, *(word for setting in sets for word in ("--set", setting)), "--out", _shown(out)])


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def pair_spread(differences: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation of paired differences within conditions; None without two pairs."""
    groups = [np.asarray(values) for values in differences if len(values) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    if not freedom:
        return None
    return float(np.sqrt(sum(((values - values.mean()) ** 2).sum() for values in groups) / freedom))
