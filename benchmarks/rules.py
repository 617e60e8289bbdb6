"""What each rule of deciding costs and how often it errs: tables of error, power and expected runs by simulation.

    python benchmarks/rules.py [tests] [looks] [flags] [moderated] [always_valid] [collapsed]
        [bent]
        [--simulations 2000] [--json FILE]

Without a name all tables are made. Campaigns are simulated and judged by ``retrain.maths.following.follow``, which
looks as real ones do. A difference of two runs has a standard deviation of 4 points wherever that matters (collapses);
effects are in these standard deviations. Told are, for families of 1, 2 and 4 comparisons:

- tests: each test at the end, how often any of the conditions that are alike is called different, where all are, under
  normal values, unequal spreads (one condition varies twice as much), heavy tails (t with 3 degrees of freedom), and
  collapses (one run in ten of every condition, or of one only with its mean made equal, is 20 points lower); power;
- looks: each rule of looks with and without futility and racing: error, power, runs when alike and when one differs;
- flags: how often a table without a collapse has a flag, by the rule in use and by 4 median absolute deviations, and
  how often a run 20 points down is found;
- moderated: error and power of the normal test with an earlier spread that is right, half, or double;
- always_valid: pairs that the always-valid rule needs beside the exact test;
- bent: how often equal conditions are called different by who looks without a rule (at 6, 7 and 8 pairs, or at every
  pair from 6 to 16) and stops at the first p of 5 %, or picks the best of five baselines;
- collapsed: how often conditions of equal means are called different because runs of one collapse, and without a flag.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from retrain.files import write_json
from retrain.maths.collapse import flagged, gaps
from retrain.maths.following import Followed, follow
from retrain.maths.power import seeds_needed
from retrain.maths.rules import Rule
from retrain.maths.sequential import evidence

FAMILIES = (1, 2, 4)
RUN = 1.0 / math.sqrt(2.0)
"""Standard deviation of a run beside its seed, in those of a difference."""
FALL = 20.0 / 4.0
EFFECT = 1.5
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Equal normal spreads."""
    return RUN * random.standard_normal(size)


def unequal(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """The last condition varies twice as much as the others."""
    values = normal(random, size)
    values[..., -1] *= 2.0
    return values


def heavy(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Student's t with 3 degrees of freedom, of the same standard deviation."""
    return RUN * random.standard_t(3, size) / math.sqrt(3.0)


def collapsing(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """One run in ten of every condition is 20 points lower."""
    return normal(random, size) - FALL * (random.random(size) < 0.1)


def collapsing_alone(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """So in the last condition only, of which the other runs are two points better: equal means, unequal runs."""
    values = normal(random, size)
    values[..., -1] += 0.1 * FALL - FALL * (random.random(size[:-1]) < 0.1)
    return values


DRAWS: dict[str, Draw] = {
    "normal": normal,
    "unequal spreads": unequal,
    "heavy tails": heavy,
    "collapses in all": collapsing,
    "collapses in one": collapsing_alone,
}


def runs(found: Followed) -> float:
    """Mean number of runs, those of the baseline included."""
    return float((found.pairs.sum(axis=1) + found.pairs.max(axis=1)).mean())


def measured(rule: Rule, simulations: int, draw: Draw = normal) -> dict[str, float]:
    """Error when all means are equal, and power and false findings when the first condition differs."""
    random = np.random.default_rng((rule.planned, rule.family))
    tables = draw(random, (simulations, rule.planned, rule.family + 1))
    alike = follow(tables, rule)
    tables[..., 1] += EFFECT
    differs = follow(tables, rule)
    return {
        "error": float(alike.different.any(axis=1).mean()),
        "runs_alike": runs(alike),
        "power": float(differs.different[:, 0].mean()),
        "others": float(differs.different[:, 1:].any(axis=1).mean()),
        "runs_different": runs(differs),
    }


def tests(simulations: int) -> list[dict[str, Any]]:
    """The tests at the end of eight seeds."""
    rows = []
    for name, draw in DRAWS.items():
        for family in FAMILIES:
            for test in ("exact", "normal", "permutation"):
                count = min(simulations, 300) if test == "permutation" and family > 1 else simulations
                for seeds in (6, 8, 9) if test != "permutation" else (8,):
                    found = measured(Rule(test=test, family=family, planned=seeds), count, draw)
                    rows.append({"spread": name, "family": family, "test": test, "seeds": seeds} | found)
    return rows


def looks(simulations: int) -> list[dict[str, Any]]:
    """The rules of looks, planned on eight and nine seeds."""
    rows = []
    for family in FAMILIES:
        for test in ("exact", "normal"):
            for seeds in (8, 9):
                kinds: list[tuple[str, float | None, bool]] = [("off", None, False)]
                for spending in ("linear", "obrien_fleming", "square"):
                    kinds += [(spending, None, False), (spending, 0.2, False)]
                    kinds += [(spending, None, True)] if family > 1 else []
                for spending, futility, race in kinds:
                    rule = Rule(test, family, seeds, spending, futility, race)  # pyright: ignore[reportArgumentType]
                    row = {"family": family, "test": test, "seeds": seeds, "looks": spending}
                    rows.append(row | {"futility": futility, "race": race} | measured(rule, simulations))
    # The design that is recommended for families, where its assumptions fail.
    for name, draw in list(DRAWS.items())[1:]:
        rule = Rule("normal", 4, 8, "obrien_fleming", None, True)
        row = {"family": 4, "test": "normal", "seeds": 8, "looks": "obrien_fleming", "spread": name}
        rows.append(row | {"futility": None, "race": True} | measured(rule, simulations, draw))
    return rows


def flags(simulations: int) -> list[dict[str, Any]]:
    """Flags without a collapse, and of one or two runs of one condition that fell by 20 points."""
    rows = []
    for seeds, conditions in ((6, 2), (8, 2), (12, 2), (6, 3), (5, 5), (6, 5), (8, 5)):
        random = np.random.default_rng((seeds, conditions, 1))
        tables = RUN * random.standard_normal((simulations, seeds, conditions))
        fallen = gaps(tables)
        deviation = np.median(np.abs(fallen), axis=(1, 2))
        row: dict[str, Any] = {
            "seeds": seeds,
            "conditions": conditions,
            "false": float(flagged(tables).any(axis=(1, 2)).mean()),
            "false_4_mad": float((fallen.max(axis=(1, 2)) > 4.0 * deviation).mean()),
        }
        for count in (1, 2):
            tables[:, count - 1, -1] -= FALL
            row[f"found_{count}"] = float(flagged(tables)[:, 0, -1].mean())
        rows.append(row)
    return rows


def moderated(simulations: int) -> list[dict[str, Any]]:
    """The normal test of one comparison by few pairs, with the spread of earlier campaigns."""
    rows = []
    for seeds in (3, 4, 5, 6):
        for freedom in (0, 4, 8):
            for prior in (0.5, 1.0, 2.0) if freedom else (0.0,):
                rule = Rule("normal", 1, seeds, prior_spread=prior, prior_freedom=freedom)
                random = np.random.default_rng(seeds)
                tables = normal(random, (simulations, seeds, 2))
                error = follow(tables, rule).different.mean()
                tables[..., 1] += 1.75
                power = follow(tables, rule).different.mean()
                row = {"seeds": seeds, "freedom": freedom, "prior": prior}
                rows.append(row | {"error": float(error), "power": float(power)})
    return rows


def always_valid(simulations: int) -> list[dict[str, Any]]:
    """Pairs that the always-valid rule and the exact test need for 80 % power, and the error after 100 looks."""
    most, rows = 100, []
    for effect in (0.75, 1.0, 1.5, 2.0):
        d = effect + np.random.default_rng(1).standard_normal((simulations, most))
        found = np.maximum.accumulate(evidence(d), axis=1) >= 20.0
        first = np.where(found.any(axis=1), found.argmax(axis=1) + 1, most)
        needed = int((found.mean(axis=0) >= 0.8).argmax()) + 1
        planned = seeds_needed(Rule(), effect) or most
        rows.append({"effect": effect, "exact": planned, "always_valid": needed, "expected": float(first.mean())})
    alike = np.random.default_rng(2).standard_normal((simulations, most))
    error = (evidence(alike).max(axis=1) >= 20.0).mean()
    return [row | {"error": float(error)} for row in rows]


def collapsed(simulations: int) -> list[dict[str, Any]]:
    """Two conditions of equal means, of which the runs of one collapse in one of ten cases and are better otherwise:
    how often the exact test calls them different, how often without a flag, and how often it calls it better."""
    rows = []
    for seeds in (8, 12, 16):
        for deviation in (4.0, 2.0):
            random = np.random.default_rng((seeds, int(deviation)))
            tables = normal(random, (simulations, seeds, 2))
            fall = 20.0 / deviation
            tables[..., 1] += 0.1 * fall - fall * (random.random(tables.shape[:-1]) < 0.1)
            found = follow(tables, Rule(planned=seeds)).different[:, 0]
            flags = flagged(tables).any(axis=(1, 2))
            better = found & (tables[..., 1].mean(axis=1) > tables[..., 0].mean(axis=1))
            row = {"seeds": seeds, "deviation": deviation, "error": float(found.mean())}
            rows.append(row | {"better": float(better.mean()), "unflagged": float((found & ~flags).mean())})
    return rows


def bent(simulations: int) -> list[dict[str, Any]]:
    """Alike conditions judged by the exact test without a plan: looks at these numbers of pairs until one has p ≤ 5 %,
    and five conditions of which each is tried as the baseline, with Holm's correction within each."""
    rows = []
    d = normal(np.random.default_rng(5), (simulations, 16, 2))
    for name, pairs in (("6, 7, 8 pairs", range(6, 9)), ("6 to 12 pairs", range(6, 13)), ("6 to 16", range(6, 17))):
        found = [follow(d[:, :n], Rule(planned=n)).different[:, 0] for n in pairs]
        rows.append({"done": name, "error": float(np.any(found, axis=0).mean())})
    five = normal(np.random.default_rng(6), (simulations, 8, 5))
    for name, baselines in (("the declared baseline", 1), ("the best of five baselines", 5)):
        tried = [np.roll(five, -place, axis=2) for place in range(baselines)]
        found = [follow(table, Rule(planned=8, family=4)).different.any(axis=1) for table in tried]
        rows.append({"done": name, "error": float(np.any(found, axis=0).mean())})
    return rows


def told(name: str, rows: list[dict[str, Any]]) -> str:
    """One table as text: shares in percent."""
    shares = ("error", "power", "others", "false", "false_4_mad", "found_1", "found_2", "better", "unflagged")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [name, "  ".join(f"{key:>15}" for key in keys)]
    for row in rows:
        cells = []
        for key in keys:
            value = row.get(key)
            text = "" if value is None else str(value)
            if isinstance(value, float):
                text = f"{100 * value:.1f}%" if key in shares else f"{value:.1f}"
            cells.append(f"{text:>15}")
        lines.append("  ".join(cells))
    return "\n".join(lines)


TABLES: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "tests": tests,
    "looks": looks,
    "flags": flags,
    "moderated": moderated,
    "always_valid": always_valid,
    "collapsed": collapsed,
    "bent": bent,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="which tables to make; default all")
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {}
    for name in args.tables or TABLES:
        found[name] = TABLES[name](args.simulations)
        print(told(name, found[name]) + "\n", flush=True)
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
