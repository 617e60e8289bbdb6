"""The completions of a step or an evaluation as flat columns, their statistics, and the scores of an evaluation.

Suffixes: ``_N`` all completions of the step in sampling order, ``_G`` one entry per group.

The unit of an evaluation is the problem: its samples are not independent, so every score is first made for each problem
and the interval is over problems. A vote is for the answer that a completion gives, extracted as the run's reward
extracts it (a reward that looks for none: as ``match`` with ``strict = false``) and normalised as ``match`` does; two
spellings that this does not unite are two answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.files import jsonable
from retrain.maths.bounded import bounded_mean_interval
from retrain.maths.statistics import Interval, accuracy_interval, gini, majority, majority_ks, pass_at_k, sensible_ks
from retrain.records.catalogue import EVAL_STATISTICS
from retrain.records.schema.base import Row
from retrain.rewards.base import AUDIT, answer_text, normalise
from retrain.types import CreditedGroup, EvalRecord, Group, RewardResult, Rollout

EQUAL_REWARDS = 1e-8  # Rewards of a group whose standard deviation is below this count as equal (float noise)
NO_INTERVAL = Interval(float("nan"), None, None)
VOTE_CHARACTERS = 1000  # Characters of an answer that a vote compares


@dataclass(frozen=True)
class Samples:
    """Columns over the N completions; NaN stands for "has no value"."""

    group_N: np.ndarray
    reward_N: np.ndarray
    correct_N: np.ndarray
    format_N: np.ndarray
    advantage_N: np.ndarray
    trained_N: np.ndarray
    length_N: np.ndarray
    prompt_length_N: np.ndarray
    turns_N: np.ndarray
    stopped_N: np.ndarray
    tags: list[tuple[str, ...]]
    parts: dict[str, np.ndarray]  # Each reward component and sample metric by name, float64 [N]

    def __len__(self) -> int:
        return len(self.group_N)

    def where(self, chosen_N: np.ndarray) -> Samples:
        columns = {name: values_N[chosen_N] for name, values_N in vars(self).items() if name.endswith("_N")}
        tags = [tags for tags, chosen in zip(self.tags, chosen_N, strict=True) if chosen]
        return Samples(**columns, tags=tags, parts={name: part_N[chosen_N] for name, part_N in self.parts.items()})

    def tagged(self, tag: str) -> Samples:
        return self.where(np.array([tag in tags for tags in self.tags], dtype=bool))

    @property
    def cut_off(self) -> float | None:
        """Share of completions that ended by length; None without any."""
        return float((~self.stopped_N).mean()) if len(self) else None

    def per_turn(self, values_N: np.ndarray) -> float | None:
        """Divide the sum over the completions by the number of their turns; None without any."""
        return float(values_N.sum() / self.turns_N.sum()) if len(self) else None

    def by_group(self, values_N: np.ndarray) -> list[np.ndarray]:
        """Split ``values_N`` by group, without NaN and empty groups."""
        known_N = ~np.isnan(values_N)
        group_N, values_N = self.group_N[known_N], values_N[known_N]
        if not len(values_N):
            return []
        return np.split(values_N, np.flatnonzero(np.diff(group_N)) + 1)


def collect(groups: Sequence[CreditedGroup]) -> Samples:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    sizes = [len(group.rollouts) for group in groups]
    advantage_N = _floats(rollout.advantage for rollout in rollouts)
    kept_N = np.repeat(np.array([group.discarded is None for group in groups], dtype=bool), sizes)
    return Samples(
        group_N=np.repeat(np.arange(len(groups)), sizes),
        reward_N=_floats(reward.total_reward for reward in rewards),
        correct_N=np.array([reward.is_correct for reward in rewards], dtype=bool),
        format_N=_floats(reward.format_ok for reward in rewards),
        advantage_N=advantage_N,
        trained_N=kept_N & np.isfinite(advantage_N),
        length_N=_floats(map(len, rollouts)),
        prompt_length_N=_floats(rollout.observation_tokens for rollout in rollouts),
        turns_N=_floats(len(rollout.turns) for rollout in rollouts),
        stopped_N=np.array([rollout.stop_reason == "stop" for rollout in rollouts], dtype=bool),
        tags=[tuple(dict.fromkeys((*rollout.prompt.problem.tags, *rollout.reward.tags))) for rollout in rollouts],
        parts=_parts(rewards),
    )


def _parts(rewards: Sequence[RewardResult]) -> dict[str, np.ndarray]:
    """Return components and sample metrics by sorted name; a component wins over a sample metric of its name."""
    merged: list[Mapping[str, float | None]] = [{**reward.sample_metrics, **reward.components} for reward in rewards]
    names = sorted({name for values in merged for name in values})
    return {name: _floats(values.get(name) for values in merged) for name in names}


def _floats(values: Iterable[float | int | bool | None]) -> np.ndarray:
    """Return float64 [N]; None and infinities become NaN."""
    array = np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)
    array[~np.isfinite(array)] = math.nan
    return array


def mean(values: np.ndarray) -> float | None:
    """Return the mean over what is not NaN; None when nothing is."""
    return spread(values)["mean"]


def spread(values: np.ndarray) -> dict[str, float | None]:
    """Return mean, population standard deviation, minimum and maximum over what is not NaN."""
    known = values[~np.isnan(values)]
    return {name: float(getattr(known, name)()) if len(known) else None for name in ("mean", "std", "min", "max")}


def mean_gini(groups: Sequence[np.ndarray], lowest: float | None = None) -> float | None:
    """Return the mean over the groups where the coefficient exists; ``lowest`` as in ``gini``."""
    known = [value for value in (gini(group, lowest) for group in groups) if value is not None]
    return float(np.mean(known)) if known else None


def group_shares(groups: Sequence[np.ndarray]) -> dict[str, float | None]:
    """Return the shares of groups with unequal rewards, all equal and ≥ 0.5, all equal and < 0.5 (up to noise)."""
    mixed = sum(float(rewards.std()) >= EQUAL_REWARDS for rewards in groups)
    good = sum(float(rewards.std()) < EQUAL_REWARDS and float(rewards.mean()) >= 0.5 for rewards in groups)
    counts = {"frac_mixed": mixed, "frac_all_good": good, "frac_all_bad": len(groups) - mixed - good}
    return {name: count / len(groups) if groups else None for name, count in counts.items()}


def ties(groups: Sequence[np.ndarray]) -> dict[str, float | int | None]:
    """Count equal rewards within groups (up to float noise); groups of one reward are left out."""
    sizes = [len(rewards) for rewards in groups if len(rewards) > 1]
    counts = [np.unique(np.round(rewards, 8), return_counts=True)[1] for rewards in groups if len(rewards) > 1]
    tied = sum(int(count * (count - 1) // 2) for values in counts for count in values)
    pairs = sum(size * (size - 1) // 2 for size in sizes)
    tie_groups = sum(len(values) < size for values, size in zip(counts, sizes, strict=True))
    uniform = sum(len(values) == 1 for values in counts)
    unique = [len(values) / size for values, size in zip(counts, sizes, strict=True)]
    return {
        "tie_eligible_groups": len(sizes),
        "tie_groups": tie_groups,
        "tie_group_rate": tie_groups / len(sizes) if sizes else None,
        "tie_pair_rate": tied / pairs if pairs else None,
        "uniform_groups": uniform,
        "uniform_group_rate": uniform / len(sizes) if sizes else None,
        "unique_fraction_mean": float(np.mean(unique)) if unique else None,
    }


# -- evaluations ------------------------------------------------------------------------------------------------


def eval_row(record: EvalRecord, tags: tuple[str, ...] = (), strict: bool = True, audited: bool = False) -> Row:
    """Return the numbers of one held-out evaluation under ``eval/<name>/…``, intervals clustered by problem.

    ``tags`` are those that the data may have: their keys are there even when no problem has them. ``strict`` says
    which answers a vote counts (``answer_of``), ``audited`` whether there is a second grader.
    """
    samples = collect(list(map(CreditedGroup.of, record.groups)))
    prefix = f"eval/{record.name}"
    ungraded_N = np.isnan(samples.reward_N) & ~samples.correct_N
    graded = not ungraded_N.all()  # a judge that never answered says nothing about the model
    accuracy = _accuracy(samples) if graded else NO_INTERVAL
    numbers: Row = {
        "step": record.step,
        "correct_rate": accuracy.estimate,
        "ci_low": accuracy.low,
        "ci_high": accuracy.high,
        "reward_mean": mean(samples.reward_N),
        "problems": len(record.groups),
        "failed": int(np.isnan(samples.reward_N).sum()),
        "mean_length": mean(samples.length_N),
        "max_token_hit_rate": samples.cut_off,
    }
    row: Row = {f"{prefix}/{name}": numbers[name] for name in EVAL_STATISTICS}
    if audited:
        scores_N = samples.parts.get(AUDIT, np.empty(0))
        row |= {f"{prefix}/{AUDIT}": mean(scores_N), f"{prefix}/{AUDIT}_failed": int(np.isnan(scores_N).sum())}
    n = min((len(group.rollouts) for group in record.groups), default=record.samples)
    row |= {f"{prefix}/{key}": value for key, value in _at_k(record.groups if graded else [], n, strict).items()}
    for tag in sorted({*tags, *(tag for own in samples.tags for tag in own)}):
        chosen = samples.tagged(tag)
        groups = [record.groups[g] for g in dict.fromkeys(chosen.group_N.tolist())] if graded else []
        row |= {f"{prefix}/{tag}/{key}": value for key, value in _tag_scores(chosen, groups, n, strict).items()}
    return jsonable(row)


def _tag_scores(samples: Samples, groups: Sequence[Group], n: int, strict: bool) -> Row:
    """Return the numbers of the problems with one tag: of pass@k and maj@k those with the largest k only."""
    rate = _accuracy(samples) if groups else NO_INTERVAL
    at_k = _at_k(groups, n, strict)
    scores: Row = {"correct_rate": rate.estimate, "ci_low": rate.low, "ci_high": rate.high}
    scores |= {f"pass@{n}": at_k[f"pass@{n}"]} if n >= 2 else {}
    return scores | ({f"maj@{n}": at_k[f"maj@{n}"]} if n >= 3 else {})


def answer_of(rollout: Rollout, strict: bool) -> str | None:
    """Return the answer that a rollout gives, normalised; None when it gives none, which is no vote.

    ``strict`` as in ``rules.answer_text``.
    """
    answer = answer_text(rollout.text, rollout.prompt.problem, strict)
    return None if answer is None else normalise(answer[:VOTE_CHARACTERS]) or None


def _accuracy(samples: Samples) -> Interval:
    return accuracy_interval(samples.correct_N, samples.group_N.tolist())


def _at_k(groups: Sequence[Group], n: int, strict: bool) -> Row:
    """Return pass@k, avg@n and maj@k over problems with n samples each; every value None without groups.

    Scores of problems are shares of samples, which spread less than right and wrong: their own spread counts.
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
