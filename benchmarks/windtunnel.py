"""The wind tunnel: campaigns of the bundled model small enough to be trained by the dozen, and what they scored."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.campaign.controller import launch
from retrain.config import load
from retrain.records.observer import NullObserver
from retrain.verdicts.results import Measure, RunResult, read_run

PROBLEMS = 128
"""Held out; one answer each."""
CAMPAIGN = """
[campaign]
seeds = {seeds}
max_steps = {steps}
lanes = {lanes}
{conditions}
[model]
model = "tiny-reasoner"
lora_rank = 16
[data]
source = "arithmetic"
[reward]
type = "match"
[training]
batch_size = {batch_size}
group_size = 8
max_tokens = 64
lr = 2e-3
save_every = 0
[evaluation]
problems = {problems}
at_start = false
[squeeze]
enabled = false
"""


def train(
    folder: Path,
    conditions: Sequence[Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    steps: int,
    batch_size: int,
    lanes: str = '"auto"',
    sets: Sequence[str] = (),
) -> list[RunResult]:
    """The runs of each condition, over these seeds; those that ``folder`` holds are only read.

    A condition is its keys and values as in a campaign file; ``sets`` are ``section.key=value`` for all of them.
    """
    tables = "".join(
        "[[campaign.conditions]]\n"
        + "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in condition.items())
        for condition in conditions
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "campaign.toml"
    asked = {"seeds": list(seeds), "steps": steps, "lanes": lanes, "batch_size": batch_size, "problems": PROBLEMS}
    file.write_text(CAMPAIGN.format(conditions=tables, **asked))
    outcome = launch(load(file, sets), folder / "runs", NullObserver())
    return [read_run(outcome.directory, run) for run in outcome.summary["runs"]]


def accuracies(runs: Sequence[RunResult]) -> np.ndarray:
    """Held-out accuracy after the last update, by label and seed: [conditions, seeds].

    Raises SystemExit, with the reason, when a run has none: a missing run would bias what is measured.
    """
    by_label: dict[str, list[float]] = {}
    for run in runs:
        value = run.value(Measure())
        if value is None:
            raise SystemExit(f"{run.run_id} has no held-out accuracy: {run.state}, {run.reason}")
        by_label.setdefault(run.label, []).append(value)
    return np.array(list(by_label.values()))
