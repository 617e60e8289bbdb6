"""What a probe costs beside training: nine conditions' credit, gradients and inner products against nine updates.

    python benchmarks/probe.py [--setting 256x64] [--quick]

The model, and how much is sampled, are those of ``benchmarks/step.py`` (``workload.py``); rewards alternate within a
group. Both sides credit the same rollouts with the same functions; one then takes an optimizer step, the other keeps
the gradient, and in the end compares all of them. Processor time, the two in turn, medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from commandline import machine, opened, parser_of
from workload import RANK, Setting, model_directory, rewards

from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.assemble import assemble
from retrain.campaign.running.protocol import CohortJob
from retrain.config import load
from retrain.policy.local import LocalPolicy
from retrain.policy.protocol import TrainBatch, samples_of
from retrain.probe.rollouts import credited, gradient_of, sample_batches
from retrain.probe.store import Rows, Scaling, layers_of, products
from retrain.record.observer import NullObserver
from retrain.run import Run
from retrain.types import Group, RewardResult

CONDITIONS = (
    ("grpo", "none"), ("dr_grpo", "none"), ("rloo", "none"), ("maxrl", "none"), ("maxrl", "gtpo"),
    ("maxrl", "gtpo_hicra"), ("maxrl", "gtpo_hicra_placebo"), ("grpo", "gtpo_paper"), ("grpo", "entropy_mask"),
)  # fmt: skip
BATCHES = 2
"""Batches of the measured comparison; each has one gradient of every condition."""


def campaign(folder: Path, model: Path, setting: Setting) -> Path:
    """The file of nine conditions on a random-weight model."""
    lines = ["[campaign]", "seeds = [1]", "max_steps = 4"]
    for advantage, credit in CONDITIONS:
        lines += ["[[campaign.conditions]]", f'advantage_mode = "{advantage}"', f'transform_mode = "{credit}"']
    lines += ["[model]", f'model = "{model}"', f"lora_rank = {RANK}", "[data]", 'source = "arithmetic"']
    lines += ["[reward]", 'type = "match"', "[training]", f"batch_size = {setting.prompts}"]
    lines += [f"group_size = {setting.samples}", f"max_tokens = {setting.new_tokens}", "[evaluation]", "problems = 0"]
    path = folder / "nine.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def updates(runs: list[Run], groups: list[Group]) -> float:
    """Processor seconds of one credited update of every run."""
    begin = time.process_time()
    for run in runs:
        own = credited(run, groups, 0, run.algorithm.state())
        batch = TrainBatch(samples_of(own.groups), own.credit.denominators, 0, run.stream)
        run.policy.update(batch, run.objective, 1e-6)
    return time.process_time() - begin


def gradients(runs: list[Run], batches: list[list[Group]]) -> float:
    """Processor seconds, for each batch, of crediting and comparing the gradients of all runs."""
    first = runs[0].policy
    assert isinstance(first, LocalPolicy)
    begin = time.process_time()
    rows = Rows(len(runs) * len(batches), first.adapter.flat.numel())
    for number, run in enumerate(runs):
        for i, groups in enumerate(batches):
            own = credited(run, groups, 0, run.algorithm.state())
            rows.put(number * len(batches) + i, gradient_of(run, own, 0))
    products(rows, layers_of(first.adapter), len(batches), [Scaling(1e-4, 1.0, 1e-8)] * len(runs))
    rows.close()
    return (time.process_time() - begin) / len(batches)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--setting", type=Setting.parse, default=Setting.parse("256x64"))
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    setting = Setting("tiny", 8, 2, 4) if asked.quick else asked.setting
    repeats = 1 if asked.quick else asked.repeats
    with opened(asked) as options, tempfile.TemporaryDirectory() as aside, ExitStack() as stack:
        import torch

        torch.set_num_threads(options.threads)
        folder = Path(aside)
        plan = Plan.of(
            load(campaign(folder, model_directory(options.models, setting.shape), setting), ()), folder / "out"
        )
        cohort = assemble(CohortJob.of(plan, plan.specs), NullObserver(), lambda: False, stack)
        runs = cohort.runs
        batches = sample_batches(cohort.engine, runs[0], BATCHES, lambda text: None)
        for groups in batches:
            for group in groups:
                for rollout, reward in zip(group.rollouts, rewards(len(group.rollouts)), strict=True):
                    rollout.reward = RewardResult(reward)
        updates(runs, batches[0])  # warm
        gradients(runs, batches)
        taken = [(updates(runs, batches[0]), gradients(runs, batches)) for _ in range(repeats)]
        first, second = (statistics.median(side) for side in zip(*taken, strict=True))
        print(
            f"{setting.rows} completions of {setting.new_tokens} tokens, shape {setting.shape}: {len(runs)} "
            f"updates {first:.2f} s, probe {second:.2f} s, {second / first:.2f} times as long"
        )
        if not asked.quick:
            print(machine())


if __name__ == "__main__":
    main()
