"""A run, and each of its steps as a row: every number of the catalogue, strict JSON, before any filtering.

Numbers that only the policy or a controller knows come in ``StepRecord.update`` and ``.state`` under their catalogue
keys; everything that follows from the completions themselves is computed here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

import numpy as np

from retrain.config import Config
from retrain.config.evaluation import PART
from retrain.config.modes import credit_of
from retrain.files import jsonable
from retrain.records.catalogue import BESIDE, METRICS, SCALED_ALIASES, TIMED_PARTS, Metric
from retrain.records.samples import Samples, collect, eval_row, group_shares, mean, mean_gini, spread, ties
from retrain.records.schema.base import Row, Values
from retrain.records.schema.rows import RecorderState
from retrain.types import CreditedGroup, Ended, EvalRecord, StepRecord

_OFF = {"sepa_lambda": 0.0, "sepa_gate_open": False, "bp_action": "off", "bp_regime": "off"}
"""Values in the row of a run without that controller."""

PART_METRICS = [metric for metric in METRICS if metric.key.startswith("rewards/<name>/")]


@dataclass(frozen=True)
class RunContext:
    """One run as its records name it.

    ``tags`` are those that the data source may give a problem, ``reward_names`` the reward's parts and known sample
    metrics: their keys stand in the first row already; others join the row from the step where they first appear.
    """

    condition: str
    run_id: str
    seed: int
    config: Config
    max_steps: int
    is_campaign: bool = False
    tags: tuple[str, ...] = ()
    set_tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tags of each held-out set that differ from ``tags``."""
    reward_names: tuple[str, ...] = ()
    ranges: Mapping[str, Values] = field(default_factory=dict)
    """For charts: ``{"min", "max", "invert"}`` of the total reward (as ``reward``) and of other numbers by name."""
    skipped_prompts: int = 0  # Problems left out because their prompts are too long
    folder: Path | None = None  # The folder of the TOML file, where modules that it names are looked up first

    def lowest(self, name: str) -> float | None:
        """Return the smallest value that ``ranges`` declares for this number; None where it declares none."""
        return self.ranges.get(name, {}).get("min")

    def tags_of(self, name: str) -> tuple[str, ...]:
        return self.set_tags.get(name.removesuffix(PART), self.tags)

    def keeps_tokens(self, step: int) -> bool:
        """Return whether the rollouts of this step are recorded token by token, with their pages."""
        every = self.config.logging.rollouts_every
        return every > 0 and (step % every == 0 or step + 1 == self.max_steps)

    @cached_property
    def evaluation_keys(self) -> tuple[str, ...]:
        """The keys of all evaluations, which stand in every row; none where the configuration evaluates nothing."""
        keys: list[str] = []
        for each in self.config.evaluated:
            nothing = EvalRecord(each.recorded_name, 0, [], each.sampling.temperature, each.samples, seconds=0.0)
            keys += eval_row(nothing, self.tags_of(each.recorded_name), audited=self.config.audit.wanted)
        return tuple(keys)

    @cached_property
    def features(self) -> frozenset[str]:
        """The features that the configuration switches on, as named by ``Metric.requires``."""
        config, algorithm = self.config, self.config.algorithm
        switches = {
            "evaluation": config.held_out,
            "episodes": config.environment.hosted,
            "tools": config.environment.tools,
            "updates": config.training.several_updates,
            "critic": algorithm.critic,
            "ahead": config.training.max_off_policy_steps,
            "rejection": algorithm.chooses_before or algorithm.rejection_denominator == "kept",
            "distillation": config.distillation.active,
            "dynamic": config.training.dynamic_sampling,
        }
        return credit_of(algorithm.transform_mode).features | {name for name, is_on in switches.items() if is_on}


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


START = RecorderState(totals=asdict(Totals()), known_keys=[], known_tags=[], evaluations={})
"""State of the records before the first step."""


def measure_step(record: StepRecord, context: RunContext, state: RecorderState) -> tuple[Row, RecorderState]:
    """Return the row of one step, and the state of the records after it.

    The row has every key that the configuration defines or an earlier row had, aliases included, None where undefined.
    Keys stand in the order of the catalogue, then further ones by name.
    """
    samples = collect(record.groups)
    sampled = collect([*record.groups, *map(CreditedGroup.of, record.dropped)]) if record.dropped else samples
    totals = Totals(**state.totals).plus(sampled, record.step_start, record.step_end)
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
    row.update(dict.fromkeys(context.evaluation_keys) | state.evaluations)
    row.update({key: values[key] for key in sorted(values) if key not in row})
    row = jsonable(row)
    for key in sorted(state.known_keys):
        row.setdefault(key, None)
    keys = list(dict.fromkeys([*state.known_keys, *row]))
    return row, replace(state, totals=asdict(totals), known_keys=keys, known_tags=tags, evaluations={})


def _values(record: StepRecord, context: RunContext, totals: Totals, samples: Samples, sampled: Samples) -> Row:
    """Return every number of the step by its key: those that follow from the completions, then the reported ones.

    ``samples`` are the completions of the batch, ``sampled`` also those of the groups that it dropped.
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
    if values.get("planning_fraction") is not None:
        reported.pop("planning_fraction", None)  # ours counts what was sampled, the update's what was graded
    values.update({key: value for key, value in reported.items() if value is not None or key not in values})
    values = _microbatch_means(values) | values
    if not values["num_datums"]:
        values["loss"] = values["reported_loss"] = None  # nothing was differentiated
    return values


def _catalogue_keys(values: Row, context: RunContext) -> Row:
    """Take the metrics of this run out of ``values``; return them with their aliases, in the catalogue's order."""
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
    """Yield the metric's names in the chosen tools with the value that it has there; ``name`` fills ``<name>``."""
    for alias in (alias for tool in tools for alias in metric.aliases.get(tool, ())):
        scaled = value
        if alias in SCALED_ALIASES and value is not None:
            _, offset, factor = SCALED_ALIASES[alias]
            scaled = offset + factor * value
        yield alias.replace("<name>", name), scaled


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
            for alias, own in _aliases(metric, value, context.config.logging.aliases, name):
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
