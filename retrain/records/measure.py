"""Compute the metrics row of a step: every number of the catalogue, as strict JSON.

Numbers that only the policy or a controller knows come in ``StepRecord.update`` and ``.state`` under their catalogue
keys; all others are computed here from columns over the completions, those of discarded groups included. The suffix
``_N`` marks an array with one entry per completion of the step, in sampling order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import get_args

import numpy as np

from retrain.files import jsonable
from retrain.maths.statistics import gini
from retrain.records.catalogue import BESIDE, METRICS, SCALED_ALIASES, TIMED_PARTS, Metric
from retrain.records.context import RunContext
from retrain.records.schema.base import Row
from retrain.records.schema.rows import RecorderState, Totals
from retrain.types import CreditedGroup, Ended, RewardResult, StepRecord

EQUAL_REWARDS = 1e-8  # Rewards of a group whose standard deviation is below this count as equal (float noise)
_OFF = {"sepa_lambda": 0.0, "sepa_gate_open": False, "bp_action": "off", "bp_regime": "off"}
PART_METRICS = [metric for metric in METRICS if metric.key.startswith("rewards/<name>/")]


@dataclass(frozen=True)
class Samples:
    """Columns over the N completions of a step; NaN means that a completion has no value."""

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
        return float((~self.stopped_N).mean()) if len(self) else None

    def per_turn(self, values_N: np.ndarray) -> float | None:
        return float(values_N.sum() / self.turns_N.sum()) if self.turns_N.any() else None

    def by_group(self, values_N: np.ndarray) -> list[np.ndarray]:
        """Split ``values_N`` by group. NaN is left out, and groups without any other value."""
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
    """Return components and sample metrics by sorted name, float64 [N] each. If a component and a sample metric have
    the same name, the component is returned."""
    merged: list[Mapping[str, float | None]] = [{**reward.sample_metrics, **reward.components} for reward in rewards]
    names = sorted({name for values in merged for name in values})
    return {name: _floats(values.get(name) for values in merged) for name in names}


def _floats(values: Iterable[float | int | bool | None]) -> np.ndarray:
    array = np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)
    array[~np.isfinite(array)] = math.nan
    return array


def mean(values: np.ndarray) -> float | None:
    return spread(values)["mean"]


def spread(values: np.ndarray) -> dict[str, float | None]:
    """Return mean, population standard deviation, minimum and maximum by name, ignoring NaN; all are None if there are
    no other values."""
    known = values[~np.isnan(values)]
    return {name: float(getattr(known, name)()) if len(known) else None for name in ("mean", "std", "min", "max")}


def mean_gini(groups: Sequence[np.ndarray], lowest: float | None = None) -> float | None:
    """Return the mean Gini coefficient over the groups for which it is defined; None if there are none. ``lowest`` is
    the smallest possible value if values can be negative (see ``maths.statistics.gini``)."""
    known = [value for value in (gini(group, lowest) for group in groups) if value is not None]
    return float(np.mean(known)) if known else None


def ties(groups: Sequence[np.ndarray]) -> dict[str, float | int | None]:
    """Return the catalogue's metrics of equal rewards, without the prefix ``reward_``, over groups of at least two
    rewards. Rewards are equal if they agree to 8 decimals."""
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


def measure_step(
    record: StepRecord, context: RunContext, state: RecorderState, evaluation_keys: Collection[str] = ()
) -> tuple[Row, RecorderState]:
    """Return the row of one step and the recorder's state after it.

    The row has every key that the configuration defines or that an earlier row had, aliases included; undefined values
    are None. The keys of the catalogue come first, in its order. ``evaluation_keys`` are the keys of the held-out
    evaluations, which also appear in rows of steps without one.
    """
    samples = collect(record.groups)
    sampled = collect([*record.groups, *map(CreditedGroup.of, record.dropped)]) if record.dropped else samples
    totals = _with_step(Totals(**state.totals), sampled, record.step_start, record.step_end)
    tags = sorted({*state.known_tags, *tags_to_show(samples, context)})
    values = _values(record, context, totals, samples, sampled)
    row = _catalogue_keys(values, context)
    names = tuple(sorted({*context.reward_names, *samples.parts}))
    _add_parts(row, samples, names, context)
    for tag in tags:
        tagged = samples.tagged(tag)
        row.update({f"env/{tag}/{key}": value for key, value in env_metrics(tagged).items()})
        for name in names:
            row.setdefault(f"env/{tag}/{name}", mean(tagged.parts[name]) if name in tagged.parts else None)
    row.update(dict.fromkeys(evaluation_keys) | state.evaluations)
    row.update({key: values[key] for key in sorted(values) if key not in row})
    row = jsonable(row)
    for key in sorted(state.known_keys):
        row.setdefault(key, None)
    keys = list(dict.fromkeys([*state.known_keys, *row]))
    return row, replace(state, totals=asdict(totals), known_keys=keys, known_tags=tags, evaluations={})


def _with_step(totals: Totals, samples: Samples, start: float, end: float) -> Totals:
    """Return the totals with one more step, which ran from ``start`` to ``end`` (Unix seconds). If the clock was set
    back since the last step ended, ``began`` is moved back by the same time, so that ``ended − began`` does not
    shrink."""
    tokens = totals.tokens + int((samples.length_N + samples.prompt_length_N).sum())
    correct = totals.correct + int(samples.correct_N.sum())
    began = start if totals.began is None else totals.began
    if totals.ended is not None and start < totals.ended:
        began -= totals.ended - start
    return Totals(totals.episodes + len(samples), correct, tokens, began, end)


def _values(record: StepRecord, context: RunContext, totals: Totals, samples: Samples, sampled: Samples) -> Row:
    """Return every number of the step by key: what is computed from the completions, then what policy and controllers
    reported, which replaces computed values.

    ``samples`` are the completions of the batch; ``sampled`` also has those of groups that dynamic sampling dropped.
    """
    features = context.features
    values: Row = {
        **_general(record, context, samples, totals),
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
        "timing_wall_clock": record.step_end - (totals.began or record.step_start),
    }
    scalars = (bool, int, float, str, np.generic, type(None))
    reported = {key: value for key, value in {**record.state, **record.update}.items() if isinstance(value, scalars)}
    if values.get("planning_fraction") is not None:  # over all sampled completions; the reported one is over the graded
        reported.pop("planning_fraction", None)
    values.update({key: value for key, value in reported.items() if value is not None or key not in values})
    for part in TIMED_PARTS if (microbatches := values.get("timing_microbatches")) else ():
        if (seconds := values.get(f"timing_{part}_total")) is not None:
            values.setdefault(f"timing_{part}_microbatch_mean", seconds / microbatches)
    if not values["num_datums"]:
        values["loss"] = values["reported_loss"] = None  # nothing was differentiated
    return values


def _catalogue_keys(values: Row, context: RunContext) -> Row:
    """Move the catalogue's metrics for this run from ``values`` to a new row, in the catalogue's order, each followed
    by its aliases. Metrics that ``values`` lacks are None in the row."""
    features, tools = context.features, context.config.logging.aliases
    metrics = [m for m in METRICS if "<" not in m.key and (not m.requires or m.requires in features)]
    keys = {metric.key for metric in metrics}
    row: Row = {}
    for metric in metrics:
        row[metric.key] = values.pop(metric.key, None)
        row.update({alias: value for alias, value in _aliases(metric, row[metric.key], tools) if alias not in keys})
    return row


def _aliases(
    metric: Metric, value: float | None, tools: Sequence[str], name: str = ""
) -> Iterator[tuple[str, float | None]]:
    """Yield (alias, value) for the metric's names in ``tools``; the value is converted where the tool uses another
    scale. ``name`` replaces ``<name>`` in aliases."""
    for alias in (alias for tool in tools for alias in metric.aliases.get(tool, ())):
        scaled = value
        if alias in SCALED_ALIASES and value is not None:
            _, offset, factor = SCALED_ALIASES[alias]
            scaled = offset + factor * value
        yield alias.replace("<name>", name), scaled


def tags_to_show(samples: Samples, context: RunContext) -> list[str]:
    """Return the tags that get keys in the row: all tags if the data source declares several or if some tag covers only
    part of the completions, else []."""
    counts = Counter(tag for tags in samples.tags for tag in tags)
    if len(context.tags) > 1 or any(count < len(samples) for count in counts.values()):
        return sorted({*counts, *context.tags} - {"all"})  # env/all means every completion
    return []


def env_metrics(samples: Samples) -> Row:
    groups = samples.by_group(samples.reward_N)
    mixed = sum(float(rewards.std()) >= EQUAL_REWARDS for rewards in groups)
    good = sum(float(rewards.std()) < EQUAL_REWARDS and float(rewards.mean()) >= 0.5 for rewards in groups)
    counts = {"frac_mixed": mixed, "frac_all_good": good, "frac_all_bad": len(groups) - mixed - good}
    return {
        "reward/total": mean(samples.reward_N),
        "correct": float(samples.correct_N.mean()) if len(samples) else None,
        "format": mean(samples.format_N),
        "ac_tokens_per_turn": samples.per_turn(samples.length_N),
        "total_episodes": len(samples),
        **{f"by_group/{name}": count / len(groups) if groups else None for name, count in counts.items()},
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
        "reward_gini": mean_gini(by_group, _lowest("reward", context)),
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
    rollouts = [rollout for group in record.groups for rollout in group.rollouts]
    staleness = [rollout.staleness for rollout in rollouts]
    entropies = [entropy_T for rollout in rollouts if (entropy_T := rollout.entropy_T) is not None]
    logprob = _mean_of([rollout.logprobs_T for rollout in rollouts])
    surprisals_N = np.array([-float(rollout.logprobs_T.sum()) for rollout in rollouts if len(rollout)])
    score, penalty = mean(samples.reward_N), _kl_penalty(record, context)
    return {
        "objective/entropy": mean(surprisals_N),
        "entropy": _mean_of(entropies) if len(entropies) == len(rollouts) else None,
        "entropy_sampled": None if logprob is None else -logprob,
        "off_policy_steps_mean": sum(staleness) / len(staleness) if staleness else None,
        "off_policy_steps_max": max(staleness, default=None),
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": None if penalty is None or score is None else score + penalty,
    }


def _kl_penalty(record: StepRecord, context: RunContext) -> float | None:
    """Return ``objective/non_score_reward`` as the policy reported it. If it did not, return 0 without ``kl_coef`` and
    None with it."""
    without_report = None if context.config.algorithm.kl_coef else 0.0
    penalty = {**record.state, **record.update}.get("objective/non_score_reward")
    return without_report if penalty is None else penalty


def _credit(record: StepRecord, context: RunContext) -> Row:
    """Return the uncertainty kind, the share of planning tokens and, unless the kind is shannon_entropy, the statistics
    of the surprisal under the keys for entropy."""
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
        "val/num_eos_tokens": int(samples.stopped_N.sum()),
        **_sizes(samples),
    }


def _sizes(samples: Samples, prefix: str = "") -> Row:
    """Return the length metrics that are recorded both for all completions and, with the prefix ``discarded_``, for
    those of discarded groups."""
    groups = samples.by_group(samples.length_N)
    ratios = [float(lengths.max() / np.median(lengths)) for lengths in groups if np.median(lengths) > 0]
    return {
        f"{prefix}max_token_hit_rate": samples.cut_off,
        **_spread(prefix + "length_prompt_{}", samples.prompt_length_N),
        **_spread(prefix + "length_sum_{}", samples.length_N + samples.prompt_length_N),
        f"{prefix}group_length_gini_mean": mean_gini(groups),
        f"{prefix}group_length_max_median_ratio_mean": float(np.mean(ratios)) if ratios else None,
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
        **_spread("discarded_length_completion_{}", dropped.length_N),
        **_sizes(dropped, "discarded_"),
    }


def _times(record: StepRecord, samples: Samples, everyone: Samples, ahead: bool) -> Row:
    """Return the seconds of each part of the step and its speeds. ``time/other`` is the time outside all parts, so that
    the parts add up to the step.

    Sampling for later steps overlaps other parts and is not counted. With ``ahead``, the run samples for later steps,
    and the row also has separate speeds of sampler and trainer. ``samples`` are the completions of the batch;
    ``everyone`` also has those of dropped groups.
    """
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


def _add_parts(row: Row, samples: Samples, names: tuple[str, ...], context: RunContext) -> None:
    """Add the keys ``rewards/<name>/…`` and their aliases to ``row``; an alias never replaces an existing key."""
    for name in names:
        values_N = samples.parts.get(name, np.full(len(samples), math.nan))
        by_group = samples.by_group(values_N)
        numbers: Row = {**spread(values_N), "gini": mean_gini(by_group, _lowest(name, context))}
        for metric in PART_METRICS:
            value = numbers[metric.key.rsplit("/", 1)[1]]
            row[metric.key.replace("<name>", name)] = value
            for alias, own in _aliases(metric, value, context.config.logging.aliases, name):
                row.setdefault(alias, own)


def _lowest(name: str, context: RunContext) -> float | None:
    return context.ranges.get(name, {}).get("min")


def _spread(pattern: str, values_N: np.ndarray, names: tuple[str, ...] = ("mean", "std", "min", "max")) -> Row:
    numbers = spread(values_N)
    return {pattern.format(name): numbers[name] for name in names}


def _mean_of(arrays: list[np.ndarray]) -> float | None:
    count = sum(len(array) for array in arrays)
    return float(sum(float(np.asarray(a, dtype=np.float64).sum()) for a in arrays) / count) if count else None


def _percentage(flags: list[bool]) -> float | None:
    return 100.0 * sum(flags) / len(flags) if flags else None
