"""Held-out evaluations as rows: scores with intervals clustered by problem, and what became of every problem.

The problem is the unit: its samples are not independent, so every score is first made for each problem and the
interval is over problems. What a vote is about is the answer that a completion gives, found as the run's reward finds
it (one that looks for none: as ``match`` with ``strict = false``) and brought to one spelling as ``match`` does; two
spellings that this does not unite are two answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.files import jsonable
from retrain.maths.evaluation import majority, majority_ks, pass_at_k, sensible_ks
from retrain.maths.statistics import Interval, accuracy_interval
from retrain.record.catalogue import EVAL_STATISTICS
from retrain.record.context import RunContext
from retrain.record.samples import Samples, collect, mean
from retrain.rewards.extract import normalise
from retrain.rewards.rules import answer_text
from retrain.types import EvalRecord, Group, Rollout

Row = dict[str, Any]

NO_INTERVAL = Interval(float("nan"), None, None)
SHOWN = 1000
"""Characters of a completion in ``emergence/evaluations.jsonl``; of a longer one the beginning and the end."""
SHOWN_END = 300
VOTED = 1000
"""Characters of an answer that a vote compares."""


def eval_row(record: EvalRecord, tags: tuple[str, ...] = (), strict: bool = True) -> Row:
    """The numbers of one held-out evaluation under ``eval/<name>/…``, intervals clustered by problem.

    ``tags`` are those that the data may have: their keys are there even when no problem has them. ``strict`` says
    which answers a vote counts (``answer_of``).
    """
    samples = collect(record.groups)
    prefix = f"eval/{record.name}"
    ungraded_N = np.isnan(samples.reward_N) & ~samples.correct_N
    told = len(samples) > 0 and not ungraded_N.all()  # a judge that never answered says nothing about the model
    accuracy = _accuracy(samples) if told else NO_INTERVAL
    numbers: Row = {
        "step": record.step,
        "correct_rate": accuracy.estimate,
        "ci_low": accuracy.low,
        "ci_high": accuracy.high,
        "reward_mean": mean(samples.reward_N),
        "problems": len(record.groups),
        "failed": int(np.isnan(samples.reward_N).sum()),
        "mean_length": mean(samples.length_N),
        "max_token_hit_rate": float((~samples.stopped_N).mean()) if len(samples) else None,
    }
    row: Row = {f"{prefix}/{name}": numbers[name] for name in EVAL_STATISTICS}
    n = min((len(group.rollouts) for group in record.groups), default=record.samples)
    row |= {f"{prefix}/{key}": value for key, value in _at_k(record.groups if told else [], n, strict).items()}
    for tag in sorted({*tags, *(tag for found in samples.tags for tag in found)}):
        tagged_N = np.array([tag in found for found in samples.tags], dtype=bool)
        chosen = samples.where(tagged_N)
        groups = [record.groups[g] for g in dict.fromkeys(chosen.group_N.tolist())] if told else []
        rate = _accuracy(chosen) if told and len(chosen) else NO_INTERVAL
        row |= {
            f"{prefix}/{tag}/correct_rate": rate.estimate,
            f"{prefix}/{tag}/ci_low": rate.low,
            f"{prefix}/{tag}/ci_high": rate.high,
        }
        at_most = {key: value for key, value in _at_k(groups, n, strict).items() if key in tag_keys(n)}
        row |= {f"{prefix}/{tag}/{key}": value for key, value in at_most.items()}
    return jsonable(row)


def empty_evaluation(context: RunContext) -> Row:
    """The eval keys of a step without evaluation, all None; empty where the configuration evaluates nothing."""
    row: Row = {}
    for name, n in context.evaluations.items():
        keys = [*EVAL_STATISTICS, *_at_k([], n, strict=True)]
        of_tag = ("correct_rate", "ci_low", "ci_high", *tag_keys(n))
        keys += [f"{tag}/{key}" for tag in sorted(context.tags_of(name)) for key in of_tag]
        row |= dict.fromkeys(f"eval/{name}/{key}" for key in keys)
    return row


def tag_keys(samples: int) -> list[str]:
    """What is said of each tag besides its accuracy: pass@k and maj@k with the largest k."""
    return [f"{kind}@{samples}" for kind, least in (("pass", 2), ("maj", 3)) if samples >= least]


def answer_of(rollout: Rollout, strict: bool) -> str | None:
    """The answer that a rollout gives, in one spelling; None when it gives none, which is no vote.

    ``strict`` as in ``rules.answer_text``.
    """
    found = answer_text(rollout.text, rollout.prompt.problem, strict)
    return normalise(found[:VOTED]) or None if found is not None else None


def _accuracy(samples: Samples) -> Interval:
    return accuracy_interval(samples.correct_N, samples.group_N.tolist())


def _at_k(groups: Sequence[Group], n: int, strict: bool) -> Row:
    """pass@k, avg@n and maj@k over problems with n samples each; every value None without groups."""
    right = [[rollout.reward.is_correct for rollout in group.rollouts] for group in groups]
    row: Row = {}

    def put(key: str, scores: list[float], with_interval: bool) -> None:
        found = accuracy_interval(np.array(scores), range(len(scores))) if scores else NO_INTERVAL
        row[key] = found.estimate if scores else None
        if with_interval:
            row[f"{key}/ci_low"], row[f"{key}/ci_high"] = found.low, found.high

    for k in sensible_ks(n):
        put(f"pass@{k}", [pass_at_k(len(marks), sum(marks), k) for marks in right], k > 1)
    put(f"avg@{n}", [sum(marks) / len(marks) for marks in right], False)
    for k in majority_ks(n):
        votes = [[answer_of(rollout, strict) for rollout in group.rollouts] for group in groups]
        put(f"maj@{k}", [majority(v, marks, k) for v, marks in zip(votes, right, strict=True)], True)
    return row


def shortened(text: str) -> str:
    """The text, or its beginning and end where it is long: an answer stands at the end."""
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN - SHOWN_END]} […] {text[-SHOWN_END:]}"
