"""A real race to one verdict: which of two learning rates is better? TRL's runs one by one, and `retrain train`.

    python benchmarks/race.py --trl ENV/bin/python [--repeats 10] [--lower 1.6e-3] [--out DIR] [--json FILE]

The truth is made by construction: the same recipe with a lower learning rate (``--lower``) is worse after these few
steps, by as much as the runs of all repetitions together show. Both sides have the same model, problems, prompts,
grader, LoRA shape, batch and number of steps. Ours is one campaign file per repetition, from the command line to the
verdict, each with seeds of its own. TRL's are runs of GRPOTrainer, one process after the other, the way a shell script
would do it; an environment with trl, peft, tomli and pydantic is given by ``--trl``.

Time is processor time of whole processes on one core, imports and evaluations included, so that other work on the
machine does not count. How many runs TRL would need is the number with which Welch's t test has the power that our
rule has, for the same difference and the spread of TRL's own runs, with the interval that this spread leaves. The bars
say where the factor comes from: a cheaper run, lanes over one base, and fewer runs (pairs, and the rule that decides).
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from windtunnel import CAMPAIGN, PROBLEMS

from retrain.campaign.planning.plan import plan
from retrain.config import load
from retrain.files import read_json, write_json
from retrain.maths.power import power
from retrain.maths.rules import Rule
from retrain.verdicts.declared_rule import rule_of
from retrain.verdicts.pooling import compare_directories
from retrain.verdicts.results import Measure

HERE = Path(__file__).resolve().parent
STEPS, PROMPTS, RATE, LOWER, SEEDS = 16, 6, 2e-3, 1.6e-3, 10
RULE = 'test = "normal"\nsequential = "obrien_fleming"\nfutility = true'
CONDITION = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'


def campaign_file(folder: Path, seeds: Sequence[int], rule: str, lower: float, lanes: str = '"auto"') -> Path:
    """The campaign of one repetition: the lower rate is the baseline."""
    folder.mkdir(parents=True, exist_ok=True)
    conditions = f"{CONDITION}lr = {lower:g}\n{CONDITION}"
    asked = {"seeds": list(seeds), "steps": STEPS, "lanes": lanes, "batch_size": PROMPTS, "problems": PROBLEMS}
    path = folder / "race.toml"
    path.write_text(CAMPAIGN.format(conditions=f"{rule}\n{conditions}", **asked))
    return path


def timed(command: Sequence[str | Path], python_path: str) -> tuple[str, float]:
    """What a process printed, and its processor seconds (those of its own children included).

    Raises SystemExit with the end of what it said when it failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*map(str, command)], env=environment | {"PYTHONPATH": python_path}, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ours(folder: Path, seeds: Sequence[int], rule: str, lower: float, lanes: str = '"auto"') -> dict[str, Any]:
    """One campaign from the command line to its verdict; read from ``folder`` where it is there already."""
    kept = folder / "found.json"
    if kept.is_file():
        return read_json(kept)
    file = campaign_file(folder, seeds, rule, lower, lanes)
    command = [sys.executable, "-m", "retrain", "train", file, "--out", folder / "runs", "--plain"]
    _, seconds = timed(command, str(HERE.parent))
    base, other = compare_directories([folder / "runs"])["conditions"]
    found = {
        "verdict": other["verdict"],
        "differences": other["differences"],
        "values": [base["after_values"], other["after_values"]],
        "runs": len(base["finished"]) + len(other["finished"]),
        "seconds": seconds,
    }
    write_json(kept, found)
    return found


def theirs(folder: Path, python: Path, rate: float, seed: int, *, idle: bool = False) -> dict[str, Any]:
    """One run of TRL, or with ``idle`` its start alone; read from ``folder`` where it is there already."""
    kept = folder / (f"trl_start_{seed}.json" if idle else f"trl_{rate:g}_{seed}.json")
    if kept.is_file():
        return read_json(kept)
    file = campaign_file(folder, [1], "", RATE)
    command = [python, HERE / "race_trl.py", file, "--lr", f"{rate:g}", "--seed", str(seed), *["--idle"] * idle]
    text, seconds = timed(command, str(HERE.parent))
    found = json.loads(text.splitlines()[-1]) | {"seconds": seconds}
    write_json(kept, found)
    return found


def welch_runs(effect: float, wanted: float) -> int:
    """Runs in all (two conditions) with which a two-sided t test at 5 % finds ``effect`` standard deviations of a run
    with this power, by the noncentral t distribution."""
    from scipy.stats import nct, t

    for n in range(2, 4000):
        freedom, shift = 2 * n - 2, effect / math.sqrt(2.0 / n)
        reach = float(t.ppf(0.975, freedom))
        if 1.0 - nct.cdf(reach, freedom, shift) + nct.cdf(-reach, freedom, shift) >= wanted:
            return 2 * n
    return 8000


def summary(
    won: list[dict[str, Any]], alone: dict[str, Any], trl: list[list[dict[str, Any]]], start: float, rule: Rule
) -> dict[str, Any]:
    """Costs, powers and factors from what was measured."""
    from scipy.stats import chi2, ttest_ind

    pairs = np.concatenate([each["differences"] for each in won])
    truth, right = float(pairs.mean()), sum(each["verdict"].startswith("better") for each in won)
    chance = min(power(rule, truth / float(pairs.std(ddof=1))), 0.95)  # nobody plans for more
    scores = np.array([[run["accuracy"] for run in each] for each in trl])
    freedom = scores.shape[1] * 2 - 2
    spread = math.sqrt(float(scores.var(axis=1, ddof=1).mean()))
    ends = [spread * math.sqrt(freedom / float(chi2.ppf(tail, freedom))) for tail in (0.975, 0.025)]
    needed, least, most = (welch_runs(truth / each, chance) for each in (spread, *ends))
    run_s = float(np.mean([run["seconds"] for each in trl for run in each]))
    mine = float(np.mean([each["seconds"] for each in won]))
    together = mine / float(np.mean([each["runs"] for each in won]))
    one = alone["seconds"] / alone["runs"]
    runs = float(np.mean([each["runs"] for each in won]))
    return {
        "truth": truth,
        "truth_error": float(pairs.std(ddof=1) / math.sqrt(len(pairs))),
        "pair_spread": float(pairs.std(ddof=1)),
        "right": right,
        "wrong": sum(each["verdict"].startswith("worse") for each in won),
        "repeats": len(won),
        "power": chance,
        "seconds": [each["seconds"] for each in won],
        "mean_seconds": mine,
        "runs": runs,
        "trl": {
            "accuracy": scores.mean(axis=1).tolist(),
            "difference": float(scores[1].mean() - scores[0].mean()),
            "p": float(np.asarray(ttest_ind(scores[1], scores[0], equal_var=False))[1]),
            "spread": spread,
            "seconds": run_s,
            "start": start,
            "runs": needed,
            "runs_interval": [least, most],
            "cost": needed * run_s,
            "cost_interval": [least * run_s, most * run_s],
        },
        "factor": needed * run_s / mine,
        "factor_without_starts": needed * (run_s - start) / mine,
        "factor_interval": [least * run_s / mine, most * run_s / mine],
        "factors": {"a cheaper run": run_s / one, "lanes over one base": one / together, "fewer runs": needed / runs},
    }


def told(found: dict[str, Any]) -> str:
    """The race as text, with a bar for each factor."""
    trl = found["trl"]
    lines = [
        f"the difference: {100 * found['truth']:.1f} ± {100 * found['truth_error']:.1f} points over all pairs; "
        f"TRL's runs show {100 * trl['difference']:.1f} (Welch's p = {trl['p']:.2g})",
        f"retrain: right in {found['right']} of {found['repeats']}, wrong in {found['wrong']}; "
        f"{found['runs']:.1f} runs and {found['mean_seconds']:.0f} processor seconds on average "
        f"({min(found['seconds']):.0f} to {max(found['seconds']):.0f})",
        f"TRL: {trl['runs']} runs [{trl['runs_interval'][0]}, {trl['runs_interval'][1]}] at the same power of "
        f"{100 * found['power']:.0f} %, {trl['seconds']:.1f} s each: {trl['cost']:.0f} s "
        f"[{trl['cost_interval'][0]:.0f}, {trl['cost_interval'][1]:.0f}]; a run's standard deviation is "
        f"{100 * trl['spread']:.1f} points",
        f"without TRL's starts ({trl['start']:.1f} s of each run; ours counted) the factor is "
        f"{found['factor_without_starts']:.1f}",
        f"factor {found['factor']:.1f} [{found['factor_interval'][0]:.1f}, {found['factor_interval'][1]:.1f}], that is",
    ]
    widest = max(found["factors"].values())
    for name, value in found["factors"].items():
        lines.append(
            f"  {name:<20}{value:>6.2f}× {'█' * max(1, round(40 * math.log(value + 1) / math.log(widest + 1)))}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="the Python of an environment with TRL")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--trl-seeds", type=int, default=12, help="TRL's runs of each condition")
    parser.add_argument("--lower", type=float, default=LOWER, help="the learning rate that is worse; the other is 2e-3")
    parser.add_argument("--rule", default=RULE, help="lines of [campaign] that say how ours decides")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds that each of our campaigns plans")
    parser.add_argument("--out", type=Path, help="where the runs are kept; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        won = []
        for repeat in range(args.repeats):
            first = 1 + args.seeds * repeat
            won.append(ours(folder / f"ours_{repeat}", range(first, first + args.seeds), args.rule, args.lower))
            print(f"repetition {repeat}: {won[-1]['verdict']}", file=sys.stderr, flush=True)
        alone = ours(folder / "alone", (1, 2), "", args.lower, lanes="1")
        trl = [[theirs(folder, args.trl, rate, seed) for seed in range(1, args.trl_seeds + 1)]
               for rate in (args.lower, RATE)]  # fmt: skip
        config = plan(load(campaign_file(folder, range(1, args.seeds + 1), args.rule, args.lower)))[0].config
        starts = [theirs(folder, args.trl, RATE, seed, idle=True)["seconds"] for seed in (1, 2, 3)]
    rule = rule_of(config.campaign.model_dump(), 1, args.seeds, Measure())
    found = summary(won, alone, trl, float(np.median(starts)), rule)
    print(told(found))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
