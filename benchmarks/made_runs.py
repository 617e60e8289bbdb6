"""A campaign as large as one gets, made without training: the files that `retrain ui` reads, with plausible numbers.

    python benchmarks/made_runs.py OUT [--runs 40] [--steps 10000] [--no-columns]

Four conditions, the runs in order of seeds; every key of the catalogue in every row, held-out evaluations, columns,
notes, and of the first run spans of time and summaries of rollouts.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from retrain.files import write_json
from retrain.records.catalogue import METRICS
from retrain.records.columns import ColumnWriter

CONDITIONS = ("grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_sepa")
TEXTS = {"condition", "advantage_mode", "transform_mode", "uncertainty_kind", "bp_action", "bp_regime"}
TAGS = ("easy", "medium", "hard")
EVAL_EVERY, PROBLEMS, BEGAN = 100, 512, 1_790_000_000.0
SPANS = ("rollout", "score", "credit", "update", "record")


def make(out: Path, runs: int, steps: int, columns: bool = True) -> None:
    """Write the whole campaign to ``out``, which is made."""
    out.mkdir(parents=True)
    entries = []
    shared = list(_shared(steps))
    for number in range(runs):
        label, seed = CONDITIONS[number % len(CONDITIONS)], number // len(CONDITIONS) + 1
        run_id = f"{label}_s{seed}"
        folder = out / "runs" / run_id
        folder.mkdir(parents=True)
        _run(folder, run_id, label, seed, shared)
        if columns:
            ColumnWriter(folder / "metrics.jsonl", folder / "metrics.f32").follow()
        entries.append({"run_id": run_id, "label": label, "seed": seed, "state": "done", "reason": None, "step": steps,
                        "max_steps": steps, "path": f"runs/{run_id}"})  # fmt: skip
    first = out / "runs" / entries[0]["run_id"]
    _spans(first, steps)
    _rollouts(first, range(0, steps, max(1, steps // 20)))
    content = {"format": 1, "name": out.name, "created": BEGAN, "updated": BEGAN + 5.0 * steps, "runs": entries}
    write_json(out / "manifest.json", content)


def _shared(steps: int) -> Iterator[str]:
    """What the rows of one step have in common in all runs, as the inside of a JSON object: most of the keys."""
    numbers = random.Random(0)
    own = {"step", "mean_reward", "correct_rate", "entropy", "completions/mean_length", "step_time_s", *TEXTS}
    keys = [metric.key for metric in METRICS if "<" not in metric.key and metric.key not in own]
    keys += [name for metric in METRICS for names in metric.aliases.values() for name in names if "<" not in name]
    keys += [f"env/{tag}/{name}" for tag in TAGS for name in ("reward/total", "correct", "format", "total_episodes")]
    keys = [key for key in dict.fromkeys(keys) if key not in own]
    for step in range(steps):
        row = {key: round(numbers.random(), 12) for key in keys}
        row |= {"num_tokens": 40_000 * (step + 1), "cohort_size": 4, "progress/done_frac": (step + 1) / steps}
        yield json.dumps(row)[1:-1]


def _run(folder: Path, run_id: str, label: str, seed: int, shared: list[str]) -> None:
    """One run's rows, evaluations and small files."""
    draw = np.random.default_rng([seed, CONDITIONS.index(label)])
    steps = len(shared)
    rise = 1.0 - np.exp(-3.0 * np.arange(steps) / steps)
    correct = np.clip(0.2 + (0.5 + 0.02 * CONDITIONS.index(label)) * rise + draw.normal(0, 0.05, steps), 0, 1)
    length, seconds = 300 + 200 * rise + draw.normal(0, 20, steps), 4.0 + draw.random(steps)
    modes = dict(zip(("advantage_mode", "transform_mode"), label.split("+"), strict=True))
    with open(folder / "metrics.jsonl", "w") as file:
        for step, rest in enumerate(shared):
            row = {"step": step, "condition": label, **modes, "mean_reward": correct[step],
                   "correct_rate": correct[step],
                   "entropy": 0.5 - 0.4 * rise[step], "completions/mean_length": length[step],
                   "step_time_s": seconds[step]}  # fmt: skip
            file.write(f"{json.dumps(row)[:-1]}, {rest}}}\n")
    with open(folder / "evals.jsonl", "w") as file:
        for step in range(0, steps + 1, min(EVAL_EVERY, steps)):
            rate = float(np.clip(correct[min(step, steps - 1)] + draw.normal(0, 0.01), 0, 1))
            rate = round(rate * PROBLEMS) / PROBLEMS
            row = {"name": "heldout", "step": step, "samples": 1, "eval/heldout/step": step,
                   "eval/heldout/correct_rate": rate, "eval/heldout/reward_mean": rate,
                   "eval/heldout/problems": PROBLEMS}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    training = {"seed": seed, "max_steps": steps, "eval_every": EVAL_EVERY}
    write_json(folder / "config.json", {"run_id": run_id, "condition": label, "training": training,
                                        "campaign": {"seed": 0}, "evaluation": {"problems": PROBLEMS}})  # fmt: skip
    note = {"step": 2, "key": "nothing_clipped", "level": "info", "text": "no token is clipped", "remedy": ""}
    (folder / "notes.jsonl").write_text(json.dumps(note) + "\n")
    (folder / "run.log").write_text(f"2026-09-21 12:00:00 info    start {run_id}\n")


def _spans(folder: Path, steps: int) -> None:
    with open(folder / "timing_spans.jsonl", "w") as file:
        for step in range(steps):
            begin = BEGAN + 5.0 * step
            spans = [{"name": name, "duration": 1.0, "wall_start": begin + i, "wall_end": begin + i + 1.0}
                     for i, name in enumerate(SPANS)]  # fmt: skip
            file.write(json.dumps({"step": step, "spans": spans}) + "\n")


def _rollouts(folder: Path, steps: range) -> None:
    draw = random.Random(1)
    for step in steps:
        with open(folder / f"train_iteration_{step:06d}_rollout_summaries.jsonl", "w") as file:
            for group in range(64):
                for sample in range(8):
                    reward = float(draw.random() < 0.5)
                    row = {"split": "train", "iteration": step, "group_idx": group, "traj_idx": sample,
                           "total_reward": reward, "advantage": reward - 0.5, "problem_id": f"made/{group}",
                           "stop_reason": "stop", "discarded": None, "trajectory_metrics": {"match": reward},
                           "steps": [{"ob_len": 50, "ac_len": draw.randrange(10, 600)}]}  # fmt: skip
                    file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--no-columns", action="store_true", help="leave out metrics.f32: a page makes its own")
    options = parser.parse_args()
    make(options.out, options.runs, options.steps, not options.no_columns)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {options.runs} runs × {options.steps} steps, {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
