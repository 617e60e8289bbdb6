"""From what happened in a step to its row: every number of the catalogue, strict JSON, before any filtering.

Numbers that only the policy or a controller knows come in ``StepRecord.update`` and ``.state`` under their catalogue
keys; everything that follows from the completions themselves is computed here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from retrain.files import jsonable
from retrain.records.catalogue import BESIDE, METRICS, TIMED_PARTS, alias_values, row_metrics
from retrain.records.context import RunContext
from retrain.records.evaluation import empty_evaluation
from retrain.records.samples import Samples, collect, everything, group_shares, mean, mean_gini, spread, ties
from retrain.records.schema.base import Row
from retrain.types import CreditedGroup, Ended, StepRecord

_OFF = {"sepa_lambda": 0.0, "sepa_gate_open": False, "bp_action": "off", "bp_regime": "off"}
"""Values in the row of a run without that controller."""

PART_METRICS = [metric for metric in METRICS if metric.key.startswith("rewards/<name>/")]


@dataclass
class Totals:
    """Running sums of a run; part of its saved state."""

    episodes: int = 0
    correct: int = 0
    tokens: int = 0
    began: float | None = None  # Unix time at which the first step began
    ended: float | None = None  # Unix time at which the last step ended

    def plus(self, samples: Samples, start: float, end: float) -> Totals:
        """Return the sums with one more step from ``start`` to ``end``. Where the clock was set back since the last
        step, in an earlier process, ``began`` is moved with it, so that ``end − began`` keeps growing."""
        tokens = self.tokens + int((samples.length_N + samples.prompt_length_N).sum())
        correct = self.correct + int(samples.correct_N.sum())
        began = start if self.began is None else self.began
        if self.ended is not None and start < self.ended:
            began -= self.ended - start
        return Totals(self.episodes + len(samples), correct, tokens, began, end)


def step_row(
    record: StepRecord,
    context: RunContext,
    totals: Totals | None = None,
    known_tags: tuple[str, ...] = (),
    evaluations: Row | None = None,
    samples: Samples | None = None,
) -> Row:
    """Return the row of one step: every key that the configuration defines, aliases included, None where undefined.

    ``totals`` are the run's sums *before* this step, ``known_tags`` the tags shown in earlier steps, ``evaluations``
    the eval keys of this step (``eval_row``), ``samples`` its completions where they have been collected already.
    Keys stand in the order of the catalogue, then further ones by name.
    """
    samples = collect(record.groups) if samples is None else samples
    values = _values(record, context, totals or Totals(), samples)
    row = _catalogue_keys(values, context)
    names = tuple(sorted({*context.reward_names, *samples.parts}))
    _add_parts(row, samples, names, context)
    for tag in sorted({*known_tags, *tags_to_show(samples, context)}):
        tagged = samples.tagged(tag)
        row.update({f"env/{tag}/{key}": value for key, value in env_metrics(tagged).items()})
        for name in names:
            row.setdefault(f"env/{tag}/{name}", mean(tagged.parts[name]) if name in tagged.parts else None)
    row.update(empty_evaluation(context) | (evaluations or {}))
    row.update({key: values[key] for key in sorted(values) if key not in row})
    return jsonable(row)


def _values(record: StepRecord, context: RunContext, totals: Totals, samples: Samples) -> Row:
    """Return every number of the step by its key: those that follow from the completions, then the reported ones."""
    sampled, features = everything(record, samples), context.features
    sums = totals.plus(sampled, record.step_start, record.step_end)
    values: Row = {
        **_general(record, context, samples, sums),
        **_OFF,
        **_rewards(samples, context),
        **(_episodes(record.groups) if "episodes" in features else {}),
        **(_tools(samples) if "tools" in features else {}),
        **_spread("advantage_{}", samples.advantage_N[samples.trained_N]),
        **_policy(record, context, samples),
        **_credit(record, context),
        **_lengths(samples),
        **_discarded(record.groups, samples),
        **_times(record, samples, sampled, "ahead" in features),
        "timing_wall_clock": record.step_end - (sums.began or record.step_start),
    }
    scalars = (bool, int, float, str, np.generic, type(None))
    reported = {key: value for key, value in {**record.state, **record.update}.items() if isinstance(value, scalars)}
    if values.get("planning_fraction") is not None:
        reported.pop("planning_fraction", None)  # ours counts what was sampled, the update's what was graded
    values.update({key: value for key, value in reported.items() if value is not None or key not in values})
    values = _microbatch_means(values) | values
    if not values["num_datums"]:
        values["loss"] = values["reported_loss"] = None  # nothing was differentiated
    return values


def _catalogue_keys(values: Row, context: RunContext) -> Row:
    """Take the metrics of this run out of ``values``; return them with their aliases, in the catalogue's order."""
    row: Row = {}
    metrics = row_metrics(context)
    keys = {metric.key for metric in metrics}
    for metric in metrics:
        row[metric.key] = values.pop(metric.key, None)
        aliases = alias_values(metric, row[metric.key], context.config.logging.aliases)
        row.update({alias: value for alias, value in aliases if alias not in keys})
    return row


def tags_to_show(samples: Samples, context: RunContext) -> list[str]:
    """Tags with keys of their own: all of them, as soon as one covers only a part of what is sampled."""
    counts = Counter(tag for tags in samples.tags for tag in tags)
    if len(context.tags) > 1 or any(count < len(samples) for count in counts.values()):
        return sorted({*counts, *context.tags} - {"all"})  # env/all means every completion
    return []


def env_metrics(samples: Samples) -> Row:
    """Return the numbers of ``env/<tag>/…`` for one selection of completions."""
    shares = group_shares(samples.by_group(samples.reward_N))
    return {
        "reward/total": mean(samples.reward_N),
        "correct": float(samples.correct_N.mean()) if len(samples) else None,
        "format": mean(samples.format_N),
        "ac_tokens_per_turn": samples.per_turn(samples.length_N),
        "total_episodes": len(samples),
        **{f"by_group/{name}": share for name, share in shares.items()},
    }


def _episodes(groups: Sequence[CreditedGroup]) -> Row:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    ended = Counter(rollout.ended for rollout in rollouts)
    shares = {reason: ended[reason] / len(rollouts) if rollouts else None for reason in get_args(Ended)}
    return {
        "env/all/episode_done_frac": shares["done"],
        **{f"env/all/ended_by/{reason}": share for reason, share in shares.items()},
        "env/all/rewritten_frac": sum(turn.fresh for turn in turns) / len(turns) if turns else None,
    }


def _tools(samples: Samples) -> Row:
    names = ("total_tool_calls", "tool_errors", "tool_time")
    sums = {name: float(np.nansum(samples.parts.get(f"tools/{name}", np.zeros(0)))) for name in names}
    calls = sums["total_tool_calls"]
    return {
        "tools/total_tool_calls": int(calls),
        "tools/tool_errors": int(sums["tool_errors"]),
        "tools/tool_success_rate": 1 - sums["tool_errors"] / calls if calls else None,
        "tools/tool_time": sums["tool_time"],
    }


def _general(record: StepRecord, context: RunContext, samples: Samples, totals: Totals) -> Row:
    sizes = [len(group.rollouts) for group in record.groups]
    return {
        "step": record.step,
        "condition": context.condition,
        "advantage_mode": context.config.algorithm.advantage_mode,
        "transform_mode": context.config.algorithm.transform_mode,
        "progress/done_frac": (record.step + 1) / context.max_steps if context.max_steps else None,
        "episode": totals.episodes,
        "num_tokens": totals.tokens,
        "num_datums": int(samples.trained_N.sum()),
        "batch_size": len(sizes),
        "group_size": max(sizes, default=0),
        "skipped_prompts": context.skipped_prompts,
        "running_correct_rate": totals.correct / totals.episodes if totals.episodes else None,
    }


def _rewards(samples: Samples, context: RunContext) -> Row:
    by_group = samples.by_group(samples.reward_N)
    everyone = env_metrics(samples)
    return {
        "mean_reward": everyone.pop("reward/total"),
        **_spread("reward_{}", samples.reward_N, ("std", "min", "max")),
        "reward_gini": mean_gini(by_group, context.lowest("reward")),
        **{f"reward_{key}": value for key, value in ties(by_group).items()},
        "reward_failed": int(np.isnan(samples.reward_N).sum()),
        "correct_rate": everyone.pop("correct"),
        **{f"env/all/{key}": value for key, value in everyone.items()},
        "env/all/ob_tokens_per_turn": samples.per_turn(samples.prompt_length_N),
        "env/all/total_turns": int(samples.turns_N.sum()),
        "env/all/turns_per_episode": mean(samples.turns_N),
        "env/all/total_ac_tokens": int(samples.length_N.sum()),
        "env/all/total_ob_tokens": int(samples.prompt_length_N.sum()),
    }


def _policy(record: StepRecord, context: RunContext, samples: Samples) -> Row:
    """Return the entropy of all sampled tokens as the sampler reported it, their staleness, and the score with its KL
    penalty."""
    rollouts = [rollout for group in record.groups for rollout in group.rollouts]
    staleness = [rollout.staleness for rollout in rollouts]
    entropies = [entropy_T for rollout in rollouts if (entropy_T := rollout.entropy_T) is not None]
    logprob = _mean_of([rollout.logprobs_T for rollout in rollouts])
    surprisals_N = np.array([-float(rollout.logprobs_T.sum()) for rollout in rollouts if len(rollout)])
    return {
        "objective/entropy": mean(surprisals_N),
        "entropy": _mean_of(entropies) if len(entropies) == len(rollouts) else None,
        "entropy_sampled": None if logprob is None else -logprob,
        "off_policy_steps_mean": sum(staleness) / len(staleness) if staleness else None,
        "off_policy_steps_max": max(staleness, default=None),
        **_penalised_score(record, context, mean(samples.reward_N)),
    }


def _penalised_score(record: StepRecord, context: RunContext, score: float | None) -> Row:
    penalty = {**record.state, **record.update}.get("objective/non_score_reward")
    if penalty is None and not context.config.algorithm.kl_coef:
        penalty = 0.0
    return {
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": None if penalty is None or score is None else score + penalty,
    }


def _credit(record: StepRecord, context: RunContext) -> Row:
    """Return the kind of uncertainty, the surprisal under its entropy_* names too, and the share of planning tokens."""
    kind = record.state.get("uncertainty_kind") or context.config.algorithm.uncertainty_kind
    row: Row = {"uncertainty_kind": kind}
    if kind != "shannon_entropy":
        for name in ("exec_{}_mean", "exec_{}_var", "plan_{}_mean", "plan_{}_var"):
            if (value := record.state.get(name.format("surprisal"))) is not None:
                row[name.format("entropy")] = value
    masks = [rollout.planning_T for group in record.groups for rollout in group.rollouts]
    known_masks = [mask_T for mask_T in masks if mask_T is not None]
    if known_masks and len(known_masks) == len(masks):
        tokens = sum(map(len, known_masks))
        row["planning_fraction"] = float(sum(int(mask_T.sum()) for mask_T in known_masks) / tokens) if tokens else None
    return row


def _lengths(samples: Samples) -> Row:
    ended_N = samples.length_N[samples.stopped_N]
    return {
        **_spread("completions/{}_length", samples.length_N),
        **_spread("completions/{}_terminated_length", ended_N, ("mean", "min", "max")),
        "max_token_hit_rate": samples.cut_off,
        "val/num_eos_tokens": int(samples.stopped_N.sum()),
        **_spread("length_prompt_{}", samples.prompt_length_N),
        **_spread("length_sum_{}", samples.length_N + samples.prompt_length_N),
        **_stragglers("group_length_{}", samples),
    }


def _stragglers(pattern: str, samples: Samples) -> Row:
    groups = samples.by_group(samples.length_N)
    ratios = [float(lengths.max() / np.median(lengths)) for lengths in groups if np.median(lengths) > 0]
    return {
        pattern.format("gini_mean"): mean_gini(groups),
        pattern.format("max_median_ratio_mean"): float(np.mean(ratios)) if ratios else None,
    }


def _discarded(groups: Sequence[CreditedGroup], samples: Samples) -> Row:
    reasons = [group.discarded for group in groups]
    dropped = samples.where(np.array([reasons[g] is not None for g in samples.group_N], dtype=bool))
    zero = samples.where(np.array([reasons[g] == "zero_advantage" for g in samples.group_N], dtype=bool))
    zero_groups = zero.by_group(zero.reward_N)
    row: Row = {"discarded_count": sum(reason is not None for reason in reasons)}
    for reason in sorted({"zero_advantage", "no_reward", "max_async", *filter(None, reasons)}):
        row[f"discarded_{reason}_pct"] = _percentage([given == reason for given in reasons])
    return row | {
        "discarded_zero_advantage_all_zero_pct": _percentage([bool((r == 0).all()) for r in zero_groups]),
        "discarded_zero_advantage_all_positive_pct": _percentage([bool((r > 0).all()) for r in zero_groups]),
        "discarded_zero_advantage_mean_reward": mean(zero.reward_N),
        **_spread("discarded_reward_{}", dropped.reward_N),
        **_spread("discarded_length_prompt_{}", dropped.prompt_length_N),
        **_spread("discarded_length_completion_{}", dropped.length_N),
        **_spread("discarded_length_sum_{}", dropped.length_N + dropped.prompt_length_N),
        "discarded_max_token_hit_rate": dropped.cut_off,
        **_stragglers("discarded_group_length_{}", dropped),
    }


def _times(record: StepRecord, samples: Samples, everyone: Samples, ahead: bool) -> Row:
    """Seconds by part within the step; ``time/other`` is what is left, so that the parts add up to the step. What was
    sampled beside other parts is none of them; with ``ahead`` the speed of both sides is told. ``samples`` are those of
    the batch, ``everyone`` all that were sampled."""
    total = record.step_end - record.step_start
    row: Row = {"step_time_s": total}
    for name in ("rollout", "score", "credit", "update", "eval", "checkpoint", "record", "cohort"):
        row[f"time/{name}"] = 0.0
    ahead_seconds = [end - start for name, start, end in record.spans if name == BESIDE]
    for name, start, end in record.spans:
        if name == BESIDE:
            continue
        inside = max(0.0, min(end, record.step_end) - max(start, record.step_start))
        row[f"time/{name}"] = row.get(f"time/{name}", 0.0) + inside
    spent = sum(value for key, value in row.items() if key.startswith("time/"))
    row["time/other"] = max(0.0, total - spent)
    row["timing_waiting_for_data"] = row["time/rollout"] + row["time/score"]
    row["timing_step_active"] = max(0.0, total - row["timing_waiting_for_data"] - row["time/cohort"])
    if total > 0:
        tokens = float(everyone.length_N.sum())
        row["perf/completion_tokens_per_s"] = tokens / total
        row["perf/tokens_per_s"] = (tokens + float(everyone.prompt_length_N.sum())) / total
        row["perf/episodes_per_s"] = len(everyone) / total
    if ahead:
        sampled, trained = float(everyone.length_N.sum()), float((samples.length_N + samples.prompt_length_N).sum())
        seconds = sum(ahead_seconds) or row["time/rollout"]
        row["perf/sampler_tokens_per_s"] = sampled / seconds if seconds > 0 else None
        row["perf/trainer_tokens_per_s"] = trained / row["time/update"] if row["time/update"] > 0 else None
    return row


def _microbatch_means(values: Row) -> Row:
    count = values.get("timing_microbatches")
    totals = {part: values.get(f"timing_{part}_total") for part in TIMED_PARTS}
    return {
        f"timing_{part}_microbatch_mean": total / count for part, total in totals.items() if count and total is not None
    }


def _add_parts(row: Row, samples: Samples, names: tuple[str, ...], context: RunContext) -> None:
    """``rewards/<name>/…`` and their aliases; an alias never replaces a key that already stands in the row."""
    for name in names:
        values_N = samples.parts.get(name, np.full(len(samples), math.nan))
        by_group = samples.by_group(values_N)
        numbers: Row = {**spread(values_N), "gini": mean_gini(by_group, context.lowest(name))}
        for metric in PART_METRICS:
            value = numbers[metric.key.rsplit("/", 1)[1]]
            row[metric.key.replace("<name>", name)] = value
            for alias, own in alias_values(metric, value, context.config.logging.aliases, name):
                row.setdefault(alias, own)


def _spread(pattern: str, values_N: np.ndarray, names: tuple[str, ...] = ("mean", "std", "min", "max")) -> Row:
    """Return these statistics of a column, each under the key that ``pattern`` makes of its name."""
    numbers = spread(values_N)
    return {pattern.format(name): numbers[name] for name in names}


def _mean_of(arrays: list[np.ndarray]) -> float | None:
    count = sum(len(array) for array in arrays)
    return float(sum(float(np.asarray(a, dtype=np.float64).sum()) for a in arrays) / count) if count else None


def _percentage(flags: list[bool]) -> float | None:
    return 100.0 * sum(flags) / len(flags) if flags else None
