"""A race to one answer: which of two learning rates is better? `retrain train` against TRL's runs, one after the other.

    python benchmarks/race.py --trl build/environments/trl/bin/python [--seeds 12] [--out DIR]

Two questions, an easy one (2e-3 or 1e-3) and a hard one (2e-3 or 1.6e-3), after 16 steps of 6 × 8 answers. Both sides
have the same model, problems, prompts, grader, adapter, batch and steps; by seed, the runs of a side share the order of
problems. Ours is one campaign from the command line to the verdict, TRL's are runs of GRPOTrainer, one process after
the other, as a shell script would start them. Both are judged by the same rule on differences paired by seed.

Time is processor time of whole processes on one core, starts and evaluations included, so that other work on the
machine does not count. "Seeds" are those with which the rule finds the difference with 80 % probability, given the
spread of a side's own pairs. The difference is once that of our runs and once that of TRL's: the smallest factor stands
first.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.files import read_json, read_jsonl, write_json
from retrain.verdicts.planning import power, seeds_needed
from retrain.verdicts.rule import interim_analysis, interim_seeds, judge

HERE = Path(__file__).resolve().parent
RATE, LOWER = 2e-3, {"easy": 1e-3, "hard": 1.6e-3}
SIMULATED = 400
# Model, data and reward are the defaults: tiny-reasoner, arithmetic, match
CAMPAIGN = """\
[campaign]
seeds = {seeds}
max_steps = 16
lanes = {lanes}
sequential = "off"
{conditions}
[model]
lora_rank = 16
[training]
batch_size = 6
group_size = 8
max_tokens = 64
save_every = 0
[evaluation]
problems = 256
at_start = false
[squeeze]
enabled = false
"""


def campaign_file(path: Path, rates: Sequence[float], seeds: int, lanes: str = '"auto"') -> Path:
    row = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\nlr = {:g}\n'
    conditions = "".join(row.format(rate) for rate in rates)
    path.write_text(CAMPAIGN.format(seeds=list(range(1, seeds + 1)), lanes=lanes, conditions=conditions))
    return path


def timed(command: Sequence[str | Path]) -> tuple[str, float]:
    """Return what a process printed and its processor seconds, those of its children included.

    Raises SystemExit with the end of its error output if it fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ours(folder: Path, rates: Sequence[float], seeds: int, lanes: str = '"auto"') -> dict[str, Any]:
    """Train one campaign; return accuracies [rates, seeds] and processor seconds of a run. Read if it is there."""
    kept = folder / "result.json"
    if kept.is_file():
        return read_json(kept)
    folder.mkdir(parents=True, exist_ok=True)
    file = campaign_file(folder / "race.toml", rates, seeds, lanes)
    _, seconds = timed([sys.executable, "-m", "retrain", "train", file, "--out", folder / "runs", "--plain"])
    runs = [
        folder / "runs" / "runs" / f"grpo+none~lr={rate:g}_s{seed}" for rate in rates for seed in range(1, seeds + 1)
    ]
    values = [read_jsonl(run / "evals.jsonl")[-1]["eval/heldout/correct_rate"] for run in runs]
    result = {"accuracies": np.reshape(values, (len(rates), seeds)).tolist(), "seconds": seconds / len(runs)}
    write_json(kept, result)
    return result


def theirs(folder: Path, python: Path, rates: Sequence[float], seeds: int) -> dict[str, Any]:
    """Train TRL's runs one by one; return accuracies [rates, seeds] and processor seconds of a run. A run that is there
    is read."""
    folder.mkdir(parents=True, exist_ok=True)
    file, runs = campaign_file(folder / "race.toml", rates, seeds), []
    for rate in rates:
        for seed in range(1, seeds + 1):
            kept = folder / f"lr_{rate:g}_seed_{seed}.json"
            if not kept.is_file():
                text, seconds = timed([python, HERE / "race_trl.py", file, "--lr", f"{rate:g}", "--seed", str(seed)])
                write_json(kept, json.loads(text.splitlines()[-1]) | {"seconds": seconds})
                print(f"TRL lr={rate:g} seed={seed}: {seconds:.0f} s", file=sys.stderr, flush=True)
            runs.append(read_json(kept))
    accuracies = np.reshape([run["accuracy"] for run in runs], (len(rates), seeds)).tolist()
    return {"accuracies": accuracies, "seconds": float(np.mean([run["seconds"] for run in runs]))}


@dataclass(frozen=True)
class Side:
    """``differences``: of paired runs, the higher rate against the lower one. ``seconds``: processor time of a run."""

    differences: np.ndarray
    seconds: float

    @property
    def difference(self) -> float:
        return float(self.differences.mean())

    @property
    def spread(self) -> float:
        return float(self.differences.std(ddof=1))

    @property
    def verdict(self) -> str:
        (analysis,) = judge(self.differences[None], None)
        return f"{analysis.outcome or 'no difference shown'}, p = {analysis.p:.3g}"

    def seeds(self, difference: float) -> int | None:
        """Return the fewest seeds that find ``difference``; None if more than the tables of power hold."""
        return seeds_needed(1, abs(difference) / self.spread)


def share_trained(seeds: int, effect: float) -> float:
    """Return the share of planned seeds that campaigns with an interim analysis train on average, where one condition
    differs by ``effect`` pair spreads; by simulation."""
    interim = interim_seeds(seeds)
    if interim is None:
        return 1.0
    pairs = np.random.default_rng(40).normal(effect, 1.0, (SIMULATED, 1, interim))
    stopped = np.mean([interim_analysis(each, seeds)[0].is_decided for each in pairs])
    return float(1 - stopped * (1 - interim / seeds))


def factors(mine: Side, trl: Side, alone_s: float, difference: float, seeds: tuple[int, int]) -> dict[str, float]:
    """Return the factors by which TRL takes longer to find ``difference``, and their product. ``seeds``: of ours and of
    TRL's, those that find it."""
    parts = {
        "a run": trl.seconds / alone_s,
        "lanes": alone_s / mine.seconds,
        "pairs": seeds[1] / seeds[0],
        "early stopping": 1 / share_trained(seeds[0], abs(difference) / mine.spread),
    }
    return parts | {"altogether": float(np.prod(list(parts.values())))}


def answer(name: str, difference: float, mine: Side, trl: Side, alone_s: float) -> tuple[float, str]:
    """Return how many times as long TRL takes to find ``difference``, infinity if no number of seeds finds it, and the
    line that says so."""
    my_seeds, trl_seeds = mine.seeds(difference), trl.seeds(difference)
    if my_seeds is None or trl_seeds is None:
        told = [f"{count or 'no number of'} seeds" for count in (my_seeds, trl_seeds)]
        return np.inf, f"  for {name} difference: {told[0]} of ours, {told[1]} of TRL's"
    parts = factors(mine, trl, alone_s, difference, (my_seeds, trl_seeds))
    mine_found, trl_found = (
        100 * power(count, 1, abs(difference) / side.spread) for count, side in ((my_seeds, mine), (trl_seeds, trl))
    )
    times = parts.pop("altogether")
    return times, (
        f"  for {name} difference: {my_seeds} seeds of ours ({mine_found:.0f} % probability), {trl_seeds} of TRL's "
        f"({trl_found:.0f} %); TRL takes {times:.1f} times as long = "
        + " × ".join(f"{part} {value:.2f}" for part, value in parts.items())
    )


def report(question: str, mine: Side, trl: Side, alone_s: float) -> str:
    lines = [f"{question} question: 2e-3 or {LOWER[question]:g}?"]
    for name, side in (("retrain", mine), ("TRL", trl)):
        lines.append(
            f"  {name:<8}{100 * side.difference:+5.1f} points, pair spread {100 * side.spread:.1f}, "
            f"{len(side.differences)} pairs: {side.verdict}; {side.seconds:.1f} processor seconds a run"
        )
    answers = [answer(name, side.difference, mine, trl, alone_s) for name, side in (("ours", mine), ("TRL's", trl))]
    return "\n".join([*lines, *(line for _, line in sorted(answers))])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/race.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl", type=Path, required=True, help="Python of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=12, help="seeds of each side and rate (%(default)s)")
    parser.add_argument("--out", type=Path, help="where runs are kept, and read if they are there")
    args = parser.parse_args()
    rates = [RATE, *LOWER.values()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        lanes = ours(folder / "ours", rates, args.seeds)
        alone = ours(folder / "alone", [RATE], 2, lanes="1")
        trl = theirs(folder / "trl", args.trl, rates, args.seeds)
    for number, question in enumerate(LOWER, start=1):
        mine, other = (Side(differences_of(each, number), each["seconds"]) for each in (lanes, trl))
        print(report(question, mine, other, alone["seconds"]))


def differences_of(measured: Mapping[str, Any], number: int) -> np.ndarray:
    accuracies = np.array(measured["accuracies"])
    return accuracies[0] - accuracies[number]


if __name__ == "__main__":
    main()
