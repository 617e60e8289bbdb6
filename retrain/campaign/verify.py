"""Which rank is enough? The adapter is evaluated on the held-out problems at every candidate rank, and in full.

Energy does not answer that: 95 % of it is a 22 % error of the weights. All ranks get the same problems and the same
random numbers, and are compared with the full adapter problem by problem: the problem is the unit, because one run is
looked at. Candidates are judged from the largest rank down, as long as they keep what the full adapter has: in this
fixed order the chance of calling any rank enough wrongly stays that of one test (Westfall and Krishen 2001).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from retrain.campaign.plan import RunSpec
from retrain.errors import UsageError
from retrain.files import write_json
from retrain.maths.intervals import same_problems_interval
from retrain.maths.statistics import accuracy_interval
from retrain.record.numbers import percent, points

TOLERANCE = 0.02
"""A loss of accuracy up to this is called small."""


def verify_ranks(spec: RunSpec, folder: Path, full: Path, smaller: Sequence[Path], out: Path) -> dict[str, Any]:
    """Accuracy of an adapter and of its compressed forms on the run's held-out problems; also written to ``out``.

    Returns problems, samples, tolerance, ``full`` ({accuracy, low, high}), ``ranks``, the largest first, each {rank,
    accuracy, low, high, difference ({mean, low, high}: minus the full adapter, paired by problem), verdict ("kept",
    "lost", "unclear")}, ``enough`` (the smallest rank that with all larger ones is kept, or null) and ``sentence``.
    Raises UsageError for fewer than two held-out problems, RetrainError when model, data or grader cannot be used.
    """
    if spec.config.evaluation.problems < 2:
        raise UsageError("a compressed adapter is verified on held-out problems: set [evaluation] problems")
    correct, ranks = _evaluate(spec, folder, [full, *smaller])
    rows = [
        {"rank": rank, **_accuracy(marks), **_compared(marks, correct[0])}
        for rank, marks in zip(ranks[1:], correct[1:], strict=True)
    ]
    rows.sort(key=lambda row: -row["rank"])
    found: dict[str, Any] = {
        "problems": correct.shape[1],
        "samples": correct.shape[2],
        "tolerance": TOLERANCE,
        "full": {"rank": ranks[0], **_accuracy(correct[0])},
        "ranks": rows,
        "enough": enough(rows),
    }
    found["sentence"] = sentence(found)
    write_json(out, found)
    return found


def verdict(low: float | None, high: float | None) -> str:
    """ "kept": a loss above the tolerance is excluded; "lost": no loss is excluded; else "unclear"."""
    if low is None or high is None:
        return "unclear"
    if low >= -TOLERANCE:
        return "kept"
    return "lost" if high < 0.0 else "unclear"


def enough(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest rank that is kept with all those above it; ``rows`` from the largest rank down."""
    smallest = None
    for row in rows:
        if row["verdict"] != "kept":
            break
        smallest = row["rank"]
    return smallest


def sentence(found: Mapping[str, Any]) -> str:
    """The finding for a person."""
    small, full = f"a loss above {100 * TOLERANCE:g} points", found["full"]
    start = (
        f"Verified on {found['problems']} held-out problems × {found['samples']} ({percent(full['accuracy'], 1)} with "
        f"the full adapter of rank {full['rank']}): "
    )
    if found["enough"] is None:
        least = found["ranks"][0]["rank"]
        return f"{start}{small} is not excluded even at rank {least}; more held-out problems, or rank, would tell."
    row = next(row for row in found["ranks"] if row["rank"] == found["enough"])
    mean, low, high = (points(row["difference"][key]) for key in ("mean", "low", "high"))
    return (
        f"{start}rank {row['rank']} is enough, {percent(row['accuracy'], 1)}, {mean} points [{low}, {high}]: "
        f"{small} is excluded."
    )


def _accuracy(marks: np.ndarray) -> dict[str, float | None]:
    """Share of right answers [problems, samples] with its interval, clustered by problem."""
    clusters = np.arange(len(marks)).repeat(marks.shape[1])
    found = accuracy_interval(marks.ravel(), clusters.tolist())
    return {"accuracy": found.estimate, "low": found.low, "high": found.high}


def _compared(marks: np.ndarray, full: np.ndarray) -> dict[str, Any]:
    gain = same_problems_interval(marks.mean(axis=1) - full.mean(axis=1))
    difference = {"mean": gain.estimate, "low": gain.low, "high": gain.high}
    return {"difference": difference, "verdict": verdict(gain.low, gain.high)}


def _evaluate(spec: RunSpec, folder: Path, paths: Sequence[Path]) -> tuple[np.ndarray, list[int]]:
    """Marks of each adapter, [adapters, problems, samples] of 0 and 1, and the adapters' ranks.

    One adapter after the other: memory does not grow with their number.
    """
    from retrain.campaign.assemble import askable, data_of
    from retrain.engines.local import LocalEngine
    from retrain.engines.protocol import SampleRequest
    from retrain.environments.prompts import render
    from retrain.policy.adapter_io import read_adapter
    from retrain.policy.base import base_of
    from retrain.policy.lora import Lanes
    from retrain.policy.threads import workers_for
    from retrain.rewards import build_grader

    config = spec.config
    temperature, samples, max_tokens = config.evaluation_sampling
    correct, ranks = [], []
    with ExitStack() as stack:
        base = base_of(config)
        lanes = Lanes(base, config.lora.target_modules)
        stack.callback(lanes.detach)
        workers = workers_for(base)
        stack.callback(workers.close)
        longest = max(max_tokens, config.training.max_tokens)
        data = askable(data_of(config, folder), config, longest, base.tokenizer, base.context_length)
        prompts = [render(problem, base.tokenizer, config.data) for problem in data.heldout]
        requests = [
            SampleRequest(
                0, prompt.token_ids, samples, max_tokens, temperature,
                (config.campaign.seed, config.training.seed, "squeeze", i),
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        grader = stack.enter_context(build_grader(config.reward, folder))
        engine = LocalEngine(base, lanes, workers=workers)
        for path in paths:
            stored = read_adapter(path)
            ranks.append(stored.config["r"])
            adapter = lanes.new_adapter(ranks[-1], next(iter(stored.scales.values())) * ranks[-1])
            adapter.load(stored.tensors)
            sampled = engine.sample(requests, [adapter])
            items = [(p.problem, c.text) for p, answers in zip(prompts, sampled, strict=True) for c in answers]
            marks = [float(result.is_correct) for result in grader.grade(items)]
            correct.append(np.reshape(marks, (len(prompts), samples)))
    return np.stack(correct), ranks
