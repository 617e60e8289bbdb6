"""Four ways to a LoRA adapter of rank 1 in the same number of updates (LoRA-Squeeze, arXiv 2602.10993).

    python benchmarks/squeeze_modes.py [--seeds 12] [--steps 48] [--last 12] [--out DIR] [--json FILE]
    python benchmarks/squeeze_modes.py --tune

    direct     rank 1 from the first update on
    post       rank 16, then compressed to rank 1, not trained any further
    continue   rank 16, compressed to rank 1 `--last` updates before the end, and trained on
    anneal     rank 16, lowered to 8, 4, 2 and 1 at equal distances, rank 1 for the `--last` updates

Beside them stands `full`, rank 16 to the end. All start from the bundled reasoner, share problems, held-out problems
and, by seed, the random numbers, and are compared by paired seeds. The paper's table for rank 1 has post 77.3, direct
90.1, continue 90.1, anneal 90.5. `--tune` trains direct, full and anneal with every rate of a grid on other seeds; post
and continue come from the runs of `full`, and train on at its rate. `--out` keeps the runs; what is there is only read.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from windtunnel import accuracies, train

from retrain.files import write_json
from retrain.maths.intervals import mean_interval
from retrain.verdicts.results import RunResult, read_run
from retrain.verdicts.rule import judge

STAGES = (8, 4, 2, 1)
MODES = ("post", "direct", "continue", "anneal")
GRID = (3e-4, 1e-3, 3e-3, 1e-2)
RATES = {"direct": 1e-3, "full": 3e-3, "anneal": 3e-3}
"""The best of ``GRID`` on the seeds of ``--tune``."""
TUNING_SEEDS = (101, 102, 103)
PROBLEMS, SAMPLES = 256, 2


def condition(mode: str, rate: float, steps: int, last: int) -> dict[str, Any]:
    """One way to train, as a condition of a campaign."""
    own = {"direct": {"model.lora_rank": 1}, "full": {}, "anneal": {"lora.anneal": anneal_stages(steps, last)}}[mode]
    return {"advantage_mode": "grpo", "transform_mode": "none", "training.lr": rate, **own}


def anneal_stages(steps: int, last: int) -> list[list[int]]:
    """[[step, rank], …]: every rank above 1 lasts as long as the others, rank 1 the ``last`` updates."""
    share = (steps - last) / len(STAGES)
    return [[round(share * (i + 1)), rank] for i, rank in enumerate(STAGES)]


def runs_of(
    folder: Path, conditions: Sequence[dict[str, Any]], seeds: Sequence[int], steps: int, last: int
) -> list[RunResult]:
    """The runs of these conditions, with a checkpoint where ``continue`` begins; what is there is only read."""
    sets = [f"training.{key}={last}" for key in ("save_every", "keep_every")]
    sets += [f"evaluation.problems={PROBLEMS}", f"evaluation.samples={SAMPLES}"]
    return train(folder, conditions, seeds=seeds, steps=steps, batch_size=4, sets=sets)


def compressed_accuracy(campaign: Path, run: Path, out: Path) -> float:
    """Held-out accuracy of a run's adapter, compressed to rank 1 and not trained on."""
    from retrain.adapters.squeeze import compress_adapter
    from retrain.adapters.verify import verify_ranks
    from retrain.campaign.planning.manifest import read_plan
    from retrain.config.runs import run_directory
    from retrain.environments.build import longest_completions
    from retrain.training.bases import Bases

    plan = read_plan(campaign)
    spec = next(spec for spec in plan.specs if run_directory(campaign, spec) == run)
    small = compress_adapter(run / "final", 1, out)
    longest = longest_completions(each.config for each in plan.specs)
    with Bases() as bases:
        report = verify_ranks(spec, plan.folder, run / "final", [small], out.with_suffix(".json"), longest, bases)
    return float(report["ranks"][0]["accuracy"])


def continued(run: Path, steps: int, last: int, out: Path) -> RunResult:
    """The run that was compressed to rank 1 ``last`` updates before its end and trained on."""
    from retrain.adapters.continuing import continuation
    from retrain.campaign.controller import launch
    from retrain.records.observer import NullObserver

    before = run / f"checkpoints/step_{steps - last:06d}"
    outcome = launch(*continuation(before, 1, last, out), NullObserver())
    return read_run(outcome.directory, outcome.summary["runs"][0])


def measure(out: Path, seeds: Sequence[int], steps: int, last: int) -> dict[str, list[float]]:
    """Held-out accuracy of every mode, by seed."""
    conditions = [condition(mode, rate, steps, last) for mode, rate in RATES.items()]
    runs = runs_of(out, conditions, seeds, steps, last)
    found = dict(zip(RATES, accuracies(runs).tolist(), strict=True))
    full = runs[list(RATES).index("full")].label
    sources = [run.path for run in runs if run.label == full]
    found["post"] = [compressed_accuracy(out / "runs", run, out / "post" / run.name) for run in sources]
    found["continue"] = accuracies([continued(run, steps, last, out / "continue" / run.name) for run in sources])[
        0
    ].tolist()
    return found


def tune(out: Path, steps: int, last: int) -> dict[str, list[float]]:
    """Mean held-out accuracy of each mode that trains from the start, for every rate of ``GRID``."""
    found = {}
    for mode in RATES:
        conditions = [condition(mode, rate, steps, last) for rate in GRID]
        found[mode] = accuracies(runs_of(out / mode, conditions, TUNING_SEEDS, steps, last)).mean(axis=1).tolist()
    return found


def compare(found: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Paired differences between all modes, with intervals and p for all of them together."""
    pairs = list(combinations(MODES, 2))
    differences = np.array([np.subtract(found[other], found[one]) for one, other in pairs])
    return [
        {"difference": f"{other} − {one}", "mean": each.mean, "low": each.low, "high": each.high, "p": each.p}
        for (one, other), each in zip(pairs, judge(differences), strict=True)
    ]


def told(found: Mapping[str, Sequence[float]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Both tables, as Markdown."""
    lines = ["| mode | held-out accuracy | 95 % interval | seeds |", "|---|--:|---|--:|"]
    for mode in ("full", *MODES):
        level = mean_interval(found[mode], share=True, resolution=1.0 / (PROBLEMS * SAMPLES))
        lines.append(f"| {mode} | {_percent(level.estimate)} | {_percent(level.low)} to {_percent(level.high)} | "
                     f"{len(found[mode])} |")  # fmt: skip
    lines += ["", "| difference | points | 95 % interval | p |", "|---|--:|---|--:|"]
    for row in rows:
        low, high = (_percent(row[end], "+") for end in ("low", "high"))
        mean = _percent(row["mean"], "+")
        lines.append(f"| {row['difference']} | {mean} | {low} to {high} | {row['p']:.3g} |")
    return "\n".join(lines)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.1f}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=48, help="updates of every mode, all together")
    parser.add_argument("--last", type=int, default=12, help="how many of them are at rank 1 in continue and anneal")
    parser.add_argument("--tune", action="store_true", help="print the accuracy of every rate instead")
    parser.add_argument("--out", type=Path, help="where the runs are kept; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        if args.tune:
            for mode, accuracies in tune(out, args.steps, args.last).items():
                print(f"{mode:<8}" + "  ".join(f"{r:g}: {100 * a:.1f}%" for r, a in zip(GRID, accuracies, strict=True)))
            return
        found = measure(out, range(1, args.seeds + 1), args.steps, args.last)
    rows = compare(found)
    print(told(found, rows))
    if args.json:
        write_json(args.json, {"accuracies": found, "differences": rows})


if __name__ == "__main__":
    main()
