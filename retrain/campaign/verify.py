"""Is a recommended rank enough? The compressed adapter is evaluated on the held-out problems, beside the full one.

Energy does not answer that: 95 % of it is a 22 % error of the weights. Both adapters get the same problems and the
same random numbers, and are compared problem by problem: the problem is the unit, because one run is looked at.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from retrain.campaign.plan import RunSpec
from retrain.campaign.words import probability
from retrain.errors import UsageError
from retrain.files import write_json
from retrain.maths.statistics import accuracy_interval, cluster_interval, sampled_sign_flip_p
from retrain.record.numbers import percent, points

TOLERANCE = 0.02
"""A loss of accuracy up to this is called small."""


def verify_compression(spec: RunSpec, folder: Path, full: Path, compressed: Path, out: Path) -> dict[str, Any]:
    """Accuracy of both adapters on the run's held-out problems, and the verdict; also written to ``out``.

    Returns rank, problems, samples, ``full`` and ``compressed`` ({accuracy, low, high}), ``difference`` ({mean, low,
    high}, compressed − full, paired by problem), ``p``, ``verdict`` ("kept", "lost", "unclear") and ``sentence``.
    Raises UsageError for fewer than two held-out problems, RetrainError when model, data or grader cannot be used.
    """
    if spec.config.evaluation.problems < 2:
        raise UsageError("a compressed adapter is verified on held-out problems: set [evaluation] problems")
    correct, problems, rank = _evaluate_both(spec, folder, full, compressed)
    samples = len(correct[0]) // len(set(problems))
    gained = [float(b) - float(a) for a, b in zip(*correct, strict=True)]
    difference = cluster_interval(gained, problems)
    by_problem: dict[str, float] = {}
    for name, value in zip(problems, gained, strict=True):
        by_problem[name] = by_problem.get(name, 0.0) + value
    found: dict[str, Any] = {
        "rank": rank,
        "problems": len(by_problem),
        "samples": samples,
        "p": sampled_sign_flip_p(list(by_problem.values())),
        "difference": {"mean": difference.estimate, "low": difference.low, "high": difference.high},
        "tolerance": TOLERANCE,
    }
    for name, marks in zip(("full", "compressed"), correct, strict=True):
        interval = accuracy_interval(marks, problems)
        found[name] = {"accuracy": interval.estimate, "low": interval.low, "high": interval.high}
    found["verdict"] = verdict(difference.low, difference.high)
    found["sentence"] = sentence(found)
    write_json(out, found)
    return found


def verdict(low: float | None, high: float | None) -> str:
    """ "kept": a loss above the tolerance is excluded; "lost": some loss is certain; else "unclear"."""
    if low is None or high is None:
        return "unclear"
    if low >= -TOLERANCE:
        return "kept"
    return "lost" if high < 0.0 else "unclear"


def sentence(found: dict[str, Any]) -> str:
    """The finding for a person."""
    accuracies = [percent(found[name]["accuracy"], 1) for name in ("compressed", "full")]
    low, high, mean = (points(found["difference"][key]) for key in ("low", "high", "mean"))
    words = {
        "kept": f"the rank is enough: a loss above {100 * TOLERANCE:g} points is excluded",
        "lost": "accuracy is lost: train on at this rank, or keep more of it",
        "unclear": f"a loss above {100 * TOLERANCE:g} points is not excluded: more held-out problems would tell",
    }[found["verdict"]]
    return (
        f"Verified at rank {found['rank']}: held-out accuracy {accuracies[0]} against {accuracies[1]} with the full "
        f"adapter, {mean} points [{low}, {high}], p = {probability(found['p'])}, {found['problems']} problems × "
        f"{found['samples']}: {words}."
    )


def _evaluate_both(
    spec: RunSpec, folder: Path, full: Path, compressed: Path
) -> tuple[list[list[bool]], list[str], int]:
    """Marks of the full and of the compressed adapter, answer by answer; the problem of each answer; the rank."""
    from retrain.engines.local import LocalEngine
    from retrain.engines.protocol import SampleRequest
    from retrain.environments import load_data
    from retrain.environments.prompts import render
    from retrain.policy.adapter_io import read_adapter
    from retrain.policy.base import base_of
    from retrain.policy.lora import Lanes
    from retrain.rewards import build_grader

    config = spec.config
    with ExitStack() as stack:
        base = base_of(config)
        lanes = Lanes(base, config.lora.target_modules)
        stack.callback(lanes.detach)
        adapters, ranks = [], []
        for path in (full, compressed):
            stored = read_adapter(path)
            rank, scale = stored.config["r"], next(iter(stored.scales.values()))
            adapter = lanes.new_adapter(rank, scale * rank)
            adapter.load(stored.tensors)
            adapters.append(adapter)
            ranks.append(rank)
        data = load_data(
            config.data, config.evaluation.problems, config.training.max_examples, config.campaign.seed, folder
        )
        prompts = [render(problem, base.tokenizer, config.data) for problem in data.heldout]
        training, evaluation = config.training, config.evaluation
        temperature = training.temperature if evaluation.temperature is None else evaluation.temperature
        requests = [
            SampleRequest(
                lane, prompt.token_ids, evaluation.samples, evaluation.max_tokens or training.max_tokens, temperature,
                (config.campaign.seed, training.seed, "squeeze", i),
            )
            for lane in (0, 1)
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        sampled = LocalEngine(base, lanes).sample(requests, adapters)
        grader = stack.enter_context(build_grader(config.reward, folder))
        both = [*prompts, *prompts]
        items = [(p.problem, c.text) for p, answers in zip(both, sampled, strict=True) for c in answers]
        marks = [result.is_correct for result in grader.grade(items)]
    half = len(marks) // 2
    names = [prompt.problem.id for prompt in prompts for _ in range(evaluation.samples)]
    return [marks[:half], marks[half:]], names, ranks[1]
