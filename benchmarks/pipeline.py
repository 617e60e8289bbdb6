"""Error and power of the whole pipeline: real campaigns from file to verdict, alike and with a known difference.

    python benchmarks/pipeline.py [--campaigns 64] [--difference 2.0] [--seeds 7] [--out DIR] [--json FILE]

Every campaign trains two conditions of the bundled model in the wind tunnel, with seeds of its own, and ends in the
verdict that `retrain compare` prints. Half of them compare conditions that are alike: their learning rates differ by
0.2 %, enough for the runs to part after a few steps and too little to matter. In the other half one learning rate is
smaller by a factor (``--difference``). Told is how often each verdict was given, with exact 95 % intervals, beside
the power that `retrain explain` promises for the difference and spread of all pairs together. Directories that are
there already are only read, so that it can be stopped and continued.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from windtunnel import train

from retrain.files import write_json
from retrain.verdicts.planning import power
from retrain.verdicts.pooling import compare_directories

ALIKE = 1.002
"""The factor between learning rates that makes no difference: doubling them moves accuracy by points."""
STEPS, PROMPTS, RATE = 12, 4, 2e-3
RULE: tuple[str, ...] = ()
SEEDS = 7


def campaign(folder: Path, factor: float, first_seed: int, rule: tuple[str, ...], seeds: int) -> dict[str, Any]:
    """One campaign: ``RATE`` against ``RATE / factor``, the smaller one being the baseline; its finding."""
    mode = {"advantage_mode": "grpo", "transform_mode": "none"}
    conditions = [mode | {"lr": RATE / factor}, mode | {"lr": RATE}]
    begun = time.process_time()
    train(folder, conditions, seeds=range(first_seed, first_seed + seeds), steps=STEPS, batch_size=PROMPTS, sets=rule)
    seconds = time.process_time() - begun
    comparison = compare_directories([folder / "runs"])
    base, other = comparison["conditions"]
    return {
        "verdict": other["verdict"],
        "p": other["p_value"],
        "difference": other["difference"],
        "interval": other["difference_interval"],
        "differences": other["differences"],
        "values": [base["after_values"], other["after_values"]],
        "runs": len(base["finished"]) + len(other["finished"]),
        "seconds": seconds,
    }


def exact(count: int, total: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval of a share."""
    from scipy.stats import beta

    low = float(beta.ppf(0.025, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(0.975, count + 1, total - count)) if count < total else 1.0
    return low, high


def summary(found: list[dict[str, Any]], truth: float) -> dict[str, Any]:
    """How often each verdict came, and how often the interval contains ``truth``."""
    verdicts = Counter(each["verdict"].partition(" (")[0] for each in found)
    better = sum(each["verdict"].startswith("better") for each in found)
    worse = sum(each["verdict"].startswith("worse") for each in found)
    covered = sum(each["interval"][0] <= truth <= each["interval"][1] for each in found if each["interval"])
    differences = np.concatenate([each["differences"] for each in found])
    return {
        "campaigns": len(found),
        "verdicts": dict(verdicts),
        "better": better,
        "worse": worse,
        "better_interval": exact(better, len(found)),
        "different_interval": exact(better + worse, len(found)),
        "covered": covered,
        "pairs": len(differences),
        "mean": float(differences.mean()),
        "mean_error": float(differences.std(ddof=1) / np.sqrt(len(differences))),
        "spread": float(differences.std(ddof=1)),
        "runs": float(np.mean([each["runs"] for each in found])),
        "seconds": float(sum(each["seconds"] for each in found)),
    }


def told(alike: dict[str, Any], different: dict[str, Any]) -> str:
    """Both halves as text."""
    lines = []
    for name, half in (("alike", alike), ("different", different)):
        low, high = half["different_interval" if name == "alike" else "better_interval"]
        count = half["better"] + (half["worse"] if name == "alike" else 0)
        lines += [
            f"{name}: {half['campaigns']} campaigns, {half['runs']:.1f} runs each; over all {half['pairs']} pairs the "
            f"difference is {100 * half['mean']:+.2f} ± {100 * half['mean_error']:.2f} points, standard deviation "
            f"{100 * half['spread']:.2f}",
            f"  called {'different' if name == 'alike' else 'better'}: {count} of {half['campaigns']} = "
            f"{100 * count / half['campaigns']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]; the 95 % interval contains "
            f"the difference of all pairs in {half['covered']}; {half['seconds']:.0f} CPU seconds",
            *(f"    {verdict}: {times}" for verdict, times in sorted(half["verdicts"].items())),
            f"  promised {100 * half['promised']:.1f} %",
        ]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=64, help="campaigns of each half")
    parser.add_argument("--difference", type=float, default=2.0, help="factor between learning rates where they differ")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds that each campaign plans")
    parser.add_argument("--rule", nargs="*", default=RULE, help="section.key=value settings that say how it is decided")
    parser.add_argument("--out", type=Path, help="where the campaigns are kept; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    halves: dict[str, list[dict[str, Any]]] = {"alike": [], "different": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.campaigns):
            for name, factor in (("alike", ALIKE), ("different", args.difference)):
                place = (args.out or Path(folder)) / f"{name}_{number}"
                found = campaign(place, factor, 1 + args.seeds * number, tuple(args.rule), args.seeds)
                halves[name].append(found)
                print(f"{place.name}: {found['verdict']}, {found['runs']} runs", file=sys.stderr, flush=True)
    everything = {}
    for name, found in halves.items():
        truth = 0.0 if name == "alike" else float(np.mean(np.concatenate([each["differences"] for each in found])))
        of_half = summary(found, truth)
        promised = power(args.seeds, 1, abs(of_half["mean"]) / of_half["spread"])
        everything[name] = of_half | {"promised": promised}
    print(told(everything["alike"], everything["different"]))
    if args.json:
        write_json(args.json, {"rule": list(args.rule), "halves": everything, "campaigns": halves})


if __name__ == "__main__":
    main()
