"""The scores of an evaluation.

The samples of one problem are not independent. Every score is therefore first computed for each problem, and intervals
are over problems. In maj@k, a completion votes for its answer. The answer is extracted as the run's reward extracts it
(as ``match`` with ``strict = false`` if the reward extracts none) and normalised as ``match`` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.config.tasks import AUDIT
from retrain.files import jsonable
from retrain.maths.bounded import bounded_mean_interval
from retrain.maths.statistics import Interval, accuracy_interval, majority, majority_ks, pass_at_k, sensible_ks
from retrain.records.context import RunContext
from retrain.records.measure import Samples, collect, mean
from retrain.records.schema.base import Row
from retrain.types import CreditedGroup, EvalRecord, Group, Rollout
from retrain.util.answers import answer_text, normalise

NO_INTERVAL = Interval(float("nan"), None, None)
VOTE_CHARACTERS = 1000  # Characters of an answer that a vote compares


def evaluation_keys(context: RunContext) -> tuple[str, ...]:
    """Return the keys of all held-out evaluations, which every row of metrics has."""
    keys: list[str] = []
    for each in context.config.evaluated:
        nothing = EvalRecord(each.recorded_name, 0, [], each.sampling.temperature, each.samples, seconds=0.0)
        keys += eval_row(nothing, context.tags_of(each.recorded_name), audited=context.config.audit.is_enabled)
    return tuple(keys)


def eval_row(record: EvalRecord, tags: tuple[str, ...] = (), strict: bool = True, audited: bool = False) -> Row:
    """Return the numbers of one held-out evaluation under ``eval/<name>/…``, intervals clustered by problem.

    ``tags`` are the tags that the data source may give: they have keys even if no problem has them. ``strict`` is
    passed to ``answer_of``. ``audited`` says whether ``[audit]`` configures a second grader.
    """
    samples = collect(list(map(CreditedGroup.of, record.groups)))
    prefix = f"eval/{record.name}"
    ungraded_N = np.isnan(samples.reward_N) & ~samples.correct_N
    graded = not ungraded_N.all()  # a judge that never answered says nothing about the model
    accuracy = _accuracy(samples) if graded else NO_INTERVAL
    row: Row = {
        f"{prefix}/step": record.step,
        f"{prefix}/correct_rate": accuracy.estimate,
        f"{prefix}/ci_low": accuracy.low,
        f"{prefix}/ci_high": accuracy.high,
        f"{prefix}/reward_mean": mean(samples.reward_N),
        f"{prefix}/problems": len(record.groups),
        f"{prefix}/failed": int(np.isnan(samples.reward_N).sum()),
        f"{prefix}/mean_length": mean(samples.length_N),
        f"{prefix}/max_token_hit_rate": samples.cut_off,
    }
    if audited:
        scores_N = samples.parts.get(AUDIT, np.empty(0))
        row |= {f"{prefix}/{AUDIT}": mean(scores_N), f"{prefix}/{AUDIT}_failed": int(np.isnan(scores_N).sum())}
    n = min((len(group.rollouts) for group in record.groups), default=record.samples)
    row |= {f"{prefix}/{key}": value for key, value in _at_k(record.groups if graded else [], n, strict).items()}
    for tag in sorted({*tags, *(tag for own in samples.tags for tag in own)}):
        chosen = samples.tagged(tag)
        groups = [record.groups[g] for g in dict.fromkeys(chosen.group_N.tolist())] if graded else []
        rate, at_k = _accuracy(chosen) if groups else NO_INTERVAL, _at_k(groups, n, strict)
        scores: Row = {"correct_rate": rate.estimate, "ci_low": rate.low, "ci_high": rate.high}
        scores |= {key: at_k[key] for key, least in ((f"pass@{n}", 2), (f"maj@{n}", 3)) if n >= least}
        row |= {f"{prefix}/{tag}/{key}": value for key, value in scores.items()}
    return jsonable(row)


def answer_of(rollout: Rollout, strict: bool) -> str | None:
    """Return the normalised answer of a rollout, which is its vote in maj@k; None if it has no answer.

    ``strict`` is passed to ``util.answers.answer_text``.
    """
    problem = rollout.prompt.problem
    answer = answer_text(rollout.text, problem.answer, str(problem.metadata.get("solution", "")), strict)
    return None if answer is None else normalise(answer[:VOTE_CHARACTERS]) or None


def _accuracy(samples: Samples) -> Interval:
    return accuracy_interval(samples.correct_N, samples.group_N.tolist())


def _at_k(groups: Sequence[Group], n: int, strict: bool) -> Row:
    """Return pass@k, avg@n and maj@k over problems with n samples each; every value is None if there are no groups.

    Intervals are computed from the scores of the problems. Such a score is a mean over samples, so it varies less than
    single answers do.
    """
    right = [[rollout.reward.is_correct for rollout in group.rollouts] for group in groups]
    row: Row = {}

    def put(key: str, scores: list[float], with_interval: bool) -> None:
        interval = bounded_mean_interval(scores, 0.0, 1.0, t=True) if scores else NO_INTERVAL
        row[key] = interval.estimate if scores else None
        if with_interval:
            row[f"{key}/ci_low"], row[f"{key}/ci_high"] = interval.low, interval.high

    for k in sensible_ks(n):
        put(f"pass@{k}", [pass_at_k(len(marks), sum(marks), k) for marks in right], k > 1)
    put(f"avg@{n}", [sum(marks) / len(marks) for marks in right], False)
    for k in majority_ks(n):
        votes = [[answer_of(rollout, strict) for rollout in group.rollouts] for group in groups]
        put(f"maj@{k}", [majority(v, marks, k) for v, marks in zip(votes, right, strict=True)], True)
    return row
