"""Evaluate an adapter on the held-out problems at every candidate rank, to find which rank is enough.

Energy does not answer that: 95 % of it is a 22 % error of the weights. All ranks get the same problems and random
numbers, and are compared with the full adapter by problem, which is the unit because there is one run; conclusions hold
for this adapter and similar problems. A loss is excluded by Tango's score interval, which is not overconfident when all
answers agree. The full adapter's answers are those of the run's final evaluation if it had the same sampling, so that
there is one accuracy. Candidates are tested from the largest rank down, while they keep the full adapter's accuracy:
this fixed order keeps the error of calling any rank enough at that of one test (Westfall and Krishen 2001).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from retrain.config import Config
from retrain.config.evaluation import HeldOut
from retrain.config.runs import RunSpec
from retrain.data.dataset import content_hash
from retrain.data.prompts import Renderer
from retrain.environments.build import CompletionLengths, askable, data_of, environments_of, episode_limits
from retrain.errors import UsageError, plural
from retrain.files import sha256, write_json
from retrain.maths.bounded import same_problems_interval
from retrain.maths.statistics import accuracy_interval
from retrain.policy.adapter_io import read_adapter
from retrain.policy.base import workers_for
from retrain.policy.local import LocalSnapshot
from retrain.records.reader import RunReader, read_object
from retrain.records.schema.layout import ADAPTER_WEIGHTS, FINAL
from retrain.rewards import build_grader
from retrain.training.bases import Bases
from retrain.training.evaluation import EvaluatedPolicy, Evaluator
from retrain.types import PolicyRef, Problem
from retrain.util.text import percent, points

TOLERANCE = 0.02  # Largest loss of accuracy that counts as small


def verify_ranks(
    spec: RunSpec,
    folder: Path,
    full: Path,
    smaller: Sequence[Path],
    out: Path,
    longest: CompletionLengths,
    bases: Bases,
) -> dict[str, Any]:
    """Return the accuracy of an adapter and of its compressed forms on the run's decisive held-out set; also write it
    to ``out``.

    ``longest`` are the longest completions of the plan's runs, which decide what problems can be asked; ``bases`` has
    the base in memory, or loads it.

    Returns problems, samples, tolerance, ``set`` (its name), ``adapter`` (SHA-256 of the full one's weights), ``full``
    ({rank, accuracy, low, high, sampled_anew}), ``ranks``, the largest first, each {rank, accuracy, low, high,
    difference ({mean, low, high}: minus the full adapter, paired by problem), verdict ("kept", "lost", "unclear")},
    ``enough`` (the smallest rank that with all larger ones is kept, or null) and ``sentence``.
    Raises UsageError for fewer than two held-out problems, RetrainError when model, data or grader cannot be used.
    """
    held_out = spec.config.decisive
    if held_out is None or held_out.problems < 2:
        raise UsageError("a compressed adapter is verified on held-out problems: set [evaluation] problems")
    correct, ranks, anew = _evaluate(spec, folder, held_out, [full, *smaller], longest, bases, out.parent)
    rows = [
        {"rank": rank, **_accuracy(marks), **_compared(marks, correct[0])}
        for rank, marks in zip(ranks[1:], correct[1:], strict=True)
    ]
    rows.sort(key=lambda row: -row["rank"])
    verification: dict[str, Any] = {
        "problems": correct.shape[1],
        "samples": correct.shape[2],
        "tolerance": TOLERANCE,
        "set": held_out.name,
        "adapter": sha256(full / ADAPTER_WEIGHTS),
        "full": {"rank": ranks[0], **_accuracy(correct[0]), "sampled_anew": anew},
        "ranks": rows,
        "enough": enough(rows),
    }
    verification["sentence"] = sentence(verification)
    write_json(out, verification)
    return verification


def read_verification(path: Path, adapter: Path) -> dict[str, Any] | None:
    """Return the content of ``path`` that ``verify_ranks`` wrote, if it is about these very weights; else None."""
    content = read_object(path)
    return content if content and content.get("adapter") == sha256(adapter / ADAPTER_WEIGHTS) else None


def verdict(low: float | None, high: float | None) -> str:
    """Return "kept" if a loss above the tolerance is excluded, "lost" if the interval lies below 0, else "unclear"."""
    if low is None or high is None:
        return "unclear"
    if low >= -TOLERANCE:
        return "kept"
    return "lost" if high < 0.0 else "unclear"


def enough(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the smallest rank that is kept with all those above it; ``rows`` are sorted from the largest rank down."""
    smallest = None
    for row in rows:
        if row["verdict"] != "kept":
            break
        smallest = row["rank"]
    return smallest


def sentence(verification: Mapping[str, Any]) -> str:
    """Return the smallest sufficient rank in words, with its accuracy and the full adapter's."""
    full, tolerance = verification["full"], f"{100 * TOLERANCE:g} points"
    accuracy = percent(full["accuracy"], 1) + (", sampled again" if full.get("sampled_anew") else "")
    problems = f"On {plural(verification['problems'], 'held-out problem')}"
    if verification["samples"] > 1:
        problems += f" with {verification['samples']} samples each"
    if verification["enough"] is None:
        largest = verification["ranks"][0]["rank"]
        return (
            f"{problems}, a loss of more than {tolerance} against rank {full['rank']} ({accuracy}) cannot be ruled out "
            f"even at rank {largest}; more problems would narrow the interval."
        )
    row = next(row for row in verification["ranks"] if row["rank"] == verification["enough"])
    mean, low, high = (points(row["difference"][key]) for key in ("mean", "low", "high"))
    return (
        f"{problems}, the smallest rank that is at most {tolerance} worse than rank {full['rank']} is {row['rank']}: "
        f"{percent(row['accuracy'], 1)} against {accuracy}, difference {mean} points [{low}, {high}], for this adapter."
    )


def _accuracy(marks: np.ndarray) -> dict[str, float | None]:
    """Return the share of correct answers [problems, samples] with its interval, clustered by problem."""
    clusters = np.arange(len(marks)).repeat(marks.shape[1])
    interval = accuracy_interval(marks.ravel(), clusters.tolist())
    return {"accuracy": interval.estimate, "low": interval.low, "high": interval.high}


def _compared(marks: np.ndarray, full: np.ndarray) -> dict[str, Any]:
    gain = same_problems_interval(marks.mean(axis=1) - full.mean(axis=1))
    difference = {"mean": gain.estimate, "low": gain.low, "high": gain.high}
    return {"difference": difference, "verdict": verdict(gain.low, gain.high)}


def _evaluate(
    spec: RunSpec,
    folder: Path,
    held_out: HeldOut,
    paths: Sequence[Path],
    longest: CompletionLengths,
    bases: Bases,
    directory: Path,
) -> tuple[np.ndarray, list[int], bool]:
    """Return marks [adapters, problems, samples] of 0 and 1, the adapters' ranks, and whether the first adapter, the
    run's own, was sampled again.

    Adapters are evaluated one after another, so that memory does not grow with their number. Servers of the run's
    configuration use ``directory``.
    """
    config = spec.config
    files = bases.model_files(config)
    data = askable(data_of(config, folder), config, longest, files.tokenizer, files.context)
    full = _final_marks(paths[0], config, held_out, data.sets[held_out.name])
    correct, ranks = [], []
    with ExitStack() as stack:
        if config.inference.served:
            base, lanes, engine = bases.with_servers(config, directory)
        else:
            base, lanes, engine = bases.with_engine(config)
            engine.workers = workers_for(base)
            stack.callback(engine.workers.close)
        grader = stack.enter_context(build_grader(config.reward, folder, lambda: base.device))
        environment = environments_of(config, data, grader, folder)[held_out.name]
        renderer = Renderer(base.tokenizer, held_out.data, config.environment.tools_prompt)
        evaluator = Evaluator(engine, renderer, [held_out], limits=episode_limits(config, base.context_length))
        stream = config.stream("sampling")
        for path in paths:
            stored = read_adapter(path)
            ranks.append(stored.config["r"])
            if path == paths[0] and full is not None:
                correct.append(full)
                continue
            adapter = lanes.new_adapter(ranks[-1], next(iter(stored.scales.values())) * ranks[-1])
            adapter.load(stored.tensors)
            engine.publish(ref := PolicyRef(f"rank {ranks[-1]}", 0), LocalSnapshot(adapter.frozen()))
            # The streams of the run's final evaluation: common random numbers with it.
            subject = EvaluatedPolicy(ref, {held_out.name: environment}, stream, config.training.max_steps)
            (record,) = evaluator.evaluate(held_out, [subject])
            engine.forget()
            if record.error is not None:
                raise record.error
            marks = [[float(one.reward.is_correct) for one in group.rollouts] for group in record.groups]
            correct.append(np.array(marks))
    return np.stack(correct), ranks, full is None


def _final_marks(adapter: Path, config: Config, held_out: HeldOut, problems: Sequence[Problem]) -> np.ndarray | None:
    """Return marks [problems, samples] of the run's final evaluation; None if it was not of this adapter on these
    problems with this sampling."""
    steps = config.training.max_steps
    reader = RunReader(adapter.parent)
    facts = reader.config() if adapter.name == FINAL else {}
    if facts.get("heldout_hashes", {}).get(held_out.name) != content_hash((), problems):
        return None
    rows = reader.evaluations(held_out.name)
    sampling = {"samples": held_out.samples, **vars(held_out.sampling.requested)}
    if not rows or rows[-1]["step"] != steps or any(rows[-1].get(key) != value for key, value in sampling.items()):
        return None
    rows = [row for row in reader.held_out_completions(held_out.name) if row["step"] == steps]
    asked = [(problem.id, sample) for problem in problems for sample in range(held_out.samples)]
    if [(row["problem_id"], row["sample"]) for row in rows] != asked:
        return None
    return np.reshape([float(row["correct"]) for row in rows], (len(problems), held_out.samples))
