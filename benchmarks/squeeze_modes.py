"""Four ways to a LoRA adapter of rank 1 in the same number of updates (LoRA-Squeeze, arXiv 2602.10993).

    python benchmarks/squeeze_modes.py [--seeds 12] [--steps 48] [--last 12] [--out DIR] [--json FILE]

    direct     rank 1 from the first update on
    post       rank 16, then compressed to rank 1, not trained any further
    continue   rank 16, compressed to rank 1 `--last` updates before the end, and trained on
    anneal     rank 16, lowered to 8, 4, 2 and 1 at equal distances, rank 1 for the `--last` updates

`full` is rank 16 to the end. All start from the bundled reasoner, share problems, held-out problems and, by seed, the
random numbers, and are compared by paired seeds. The paper's table for rank 1 has post 77.3, direct 90.1, continue
90.1, anneal 90.5. Post and continue come from the runs of `full` and have its rate. `--out` keeps the runs; finished
ones are only read.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from retrain.adapters.continuing import continuation
from retrain.adapters.squeeze import compress_adapter
from retrain.adapters.verify import verify_ranks
from retrain.campaign.controller import launch
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.running.rank_evaluation import evaluate_ranks
from retrain.config import load
from retrain.config.runs import run_directory
from retrain.environments.build import longest_completions
from retrain.files import write_json
from retrain.maths.intervals import mean_interval
from retrain.records.observer import NullObserver
from retrain.records.schema.campaign import RunEntry
from retrain.training.bases import Bases
from retrain.verdicts.results import Measure, RunResult, read_run
from retrain.verdicts.rule import judge

STAGES = (8, 4, 2, 1)
MODES = ("post", "direct", "continue", "anneal")
RATES = {"direct": 1e-3, "full": 3e-3, "anneal": 3e-3}
"""The best of 3e-4, 1e-3, 3e-3 and 1e-2 on three other seeds."""
PROBLEMS, SAMPLES = 256, 2
CAMPAIGN = """
[campaign]
seeds = {seeds}
max_steps = {steps}
{conditions}
[model]
model = "tiny-reasoner"
lora_rank = 16
[data]
source = "arithmetic"
[reward]
type = "match"
[training]
batch_size = 4
group_size = 8
max_tokens = 64
save_every = {last}
keep_every = {last}
[evaluation]
problems = {problems}
samples = {samples}
at_start = false
[squeeze]
enabled = false
"""


def condition(mode: str, rate: float, steps: int, last: int) -> str:
    """Return one way to train as a condition of the file."""
    keys: dict[str, Any] = {"advantage_mode": "grpo", "transform_mode": "none", "training.lr": rate}
    keys |= {"direct": {"model.lora_rank": 1}, "full": {}, "anneal": {"lora.anneal": anneal_stages(steps, last)}}[mode]
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(["[[campaign.conditions]]", *lines])


def anneal_stages(steps: int, last: int) -> list[list[int]]:
    """Return [[step, rank], …]: every rank above 1 lasts as long as the others, rank 1 the ``last`` updates."""
    share = (steps - last) / len(STAGES)
    return [[round(share * (i + 1)), rank] for i, rank in enumerate(STAGES)]


def accuracies(runs: Sequence[RunResult]) -> list[float]:
    """Return held-out accuracy after the last update; SystemExit for a run without one, whose absence would bias."""
    values = [run.value(Measure()) for run in runs]
    for run, value in zip(runs, values, strict=True):
        if value is None:
            raise SystemExit(f"{run.run_id} has no held-out accuracy: {run.state}, {run.reason}")
    return [value for value in values if value is not None]


def compressed_accuracy(campaign: Path, run: Path, out: Path) -> float:
    """Return the held-out accuracy of a run's adapter, compressed to rank 1 and not trained on."""
    plan = read_plan(campaign)
    spec = next(spec for spec in plan.specs if run_directory(campaign, spec) == run)
    small = compress_adapter(run / "final", 1, out)
    longest = longest_completions(spec.config for spec in plan.specs)
    with Bases() as bases:
        evaluate = partial(evaluate_ranks, spec, plan.folder, longest, bases, out.parent)
        report = verify_ranks(spec, run / "final", [small], out.with_suffix(".json"), evaluate)
    return float(report["ranks"][0]["accuracy"])


def continued(run: Path, steps: int, last: int, out: Path) -> RunResult:
    """Return the run that was compressed to rank 1 ``last`` updates before its end and trained on."""
    before = run / f"checkpoints/step_{steps - last:06d}"
    outcome = launch(*continuation(before, 1, last, out), NullObserver())
    return read_run(outcome.directory, RunEntry.from_row(outcome.summary["runs"][0]))


def measure(out: Path, seeds: Sequence[int], steps: int, last: int) -> dict[str, list[float]]:
    """Return the held-out accuracy of every mode, by seed."""
    out.mkdir(parents=True, exist_ok=True)
    conditions = "\n".join(condition(mode, rate, steps, last) for mode, rate in RATES.items())
    keys = {"seeds": list(seeds), "steps": steps, "last": last, "problems": PROBLEMS, "samples": SAMPLES}
    (out / "campaign.toml").write_text(CAMPAIGN.format(conditions=conditions, **keys))
    outcome = launch(load(out / "campaign.toml"), out / "runs", NullObserver())
    by_label: dict[str, list[RunResult]] = {}
    for entry in outcome.summary["runs"]:
        run = read_run(outcome.directory, RunEntry.from_row(entry))
        by_label.setdefault(run.label, []).append(run)
    by_mode = dict(zip(RATES, by_label.values(), strict=True))
    values = {mode: accuracies(runs) for mode, runs in by_mode.items()}
    sources = [run.path for run in by_mode["full"]]
    values["post"] = [compressed_accuracy(out / "runs", run, out / "post" / run.name) for run in sources]
    values["continue"] = accuracies([continued(run, steps, last, out / "continue" / run.name) for run in sources])
    return values


def compare(values: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return paired differences between all modes, with intervals and p for all of them together."""
    pairs = list(combinations(MODES, 2))
    differences = np.array([np.subtract(values[other], values[one]) for one, other in pairs])
    return [
        {"difference": f"{other} − {one}", "mean": each.mean, "low": each.low, "high": each.high, "p": each.p}
        for (one, other), each in zip(pairs, judge(differences), strict=True)
    ]


def report(values: Mapping[str, Sequence[float]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return both tables as Markdown."""
    lines = ["| mode | held-out accuracy | 95 % interval | seeds |", "|---|--:|---|--:|"]
    for mode in ("full", *MODES):
        level = mean_interval(values[mode], share=True, resolution=1.0 / (PROBLEMS * SAMPLES))
        lines.append(f"| {mode} | {_percent(level.estimate)} | {_percent(level.low)} to {_percent(level.high)} | "
                     f"{len(values[mode])} |")  # fmt: skip
    lines += ["", "| difference | points | 95 % interval | p |", "|---|--:|---|--:|"]
    for row in rows:
        low, high = (_percent(row[end], "+") for end in ("low", "high"))
        mean = _percent(row["mean"], "+")
        lines.append(f"| {row['difference']} | {mean} | {low} to {high} | {row['p']:.3g} |")
    return "\n".join(lines)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=48, help="updates of every mode, all together")
    parser.add_argument("--last", type=int, default=12, help="how many of them are at rank 1 in continue and anneal")
    parser.add_argument("--out", type=Path, help="where the runs are kept; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        values = measure(out, range(1, args.seeds + 1), args.steps, args.last)
    rows = compare(values)
    print(report(values, rows))
    if args.json:
        write_json(args.json, {"accuracies": values, "differences": rows})


if __name__ == "__main__":
    main()
