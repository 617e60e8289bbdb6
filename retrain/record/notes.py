"""What odd numbers mean: from the rows of a run to remarks in words, each told once with the likely remedy.

``explain`` is a function of the rows and the configuration alone, so a resumed run says what an uninterrupted one
would. A rule looks at the newest rows and answers with (text, remedy) or None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retrain.record.context import setting

WINDOW = 20
"""Rows that the rules look at: the newest ones, and besides them the first row of the run."""

NEEDS_PLANNING = ("gtpo_hicra", "gtpo_hicra_placebo", "gtpo_sepa")
"""Credit modes in which planning tokens decide."""

Row = Mapping[str, Any]
Finding = tuple[str, str] | None


@dataclass(frozen=True)
class Note:
    """One remark. ``level`` is info where the number is harmless, warning where something should be done."""

    step: int
    key: str
    level: str
    text: str
    remedy: str

    def as_dict(self) -> dict[str, Any]:
        """JSON form, a line of ``notes.jsonl``."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy[:1].upper()}{self.remedy[1:]}."


def explain(rows: Sequence[Row], config: Any, dtype: str = "float32", told: Collection[str] = ()) -> list[Note]:
    """Remarks that the newest row gives rise to; ``rows`` are in order, the first of them the run's first.

    ``dtype`` is what the model computes in; ``told`` are keys of remarks that were made before.
    """
    if not rows:
        return []
    notes = []
    for key, (level, rule) in RULES.items():
        if key not in told and (found := rule(rows, config, dtype)):
            notes.append(Note(int(rows[-1]["step"]), key, level, *found))
    return notes


def newest(rows: Sequence[Row], key: str, count: int) -> list[Any]:
    """The last ``count`` values of ``key``; empty when there are fewer rows or one of the values is None."""
    values = [row.get(key) for row in rows[-count:]]
    return values if len(values) == count and all(value is not None for value in values) else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# -- learning signal --------------------------------------------------------------------------------------------


def _ungraded(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    failed = rows[-1].get("reward_failed")
    total = rows[-1].get("env/all/total_episodes")
    if not failed or not total or failed / total < 0.2:
        return None
    return (
        f"{failed} of {total} completions could not be graded; they count as not correct and do not train",
        "run.log names the reasons: a judge that cannot be reached, a grader that fails or takes too long",
    )


def _format_never(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    shares = newest(rows, "env/all/format", 3)
    if not shares or max(shares) > 0.02:
        return None
    return (
        "hardly any completion of 3 steps has an answer in the expected format, so hardly any can be right",
        "look at the pages of the run, and ask for the format in [data] prompt_template or system_prompt"
        + (", or raise max_tokens: the answers are cut off" if _cut_off(rows, 3) > 0.5 else ""),
    )


def _all_uniform(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    mixed = newest(rows, "env/all/by_group/frac_mixed", 3)
    if not mixed or max(mixed) > 0:
        return None
    good = _mean([row.get("env/all/by_group/frac_all_good") or 0.0 for row in rows[-3:]])
    formats = newest(rows, "env/all/format", 3)
    text = "for 3 steps the rewards within every group have been equal, so there is nothing to learn from"
    if good > 0.5:
        return f"{text}: the problems are too easy", "take harder problems, or stop here"
    if formats and max(formats) <= 0.02:
        return f"{text}: no answer matched the format", "ask for the format in [data] prompt_template or system_prompt"
    if _cut_off(rows, 3) > 0.9:
        return f"{text}: the answers are cut off", f"raise [training] max_tokens above {_max_tokens(config)}"
    return (
        f"{text}: the problems are too hard",
        "take easier problems, a larger group_size, or a model that sometimes succeeds",
    )


def _few_mixed(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    mixed = newest(rows, "env/all/by_group/frac_mixed", 10)
    if not mixed or not 0 < _mean(mixed) < 0.1:
        return None
    return (
        f"in the last 10 steps only {100 * _mean(mixed):.0f} % of the groups had rewards that differ; only these train",
        "mix problems of other difficulty, or raise group_size",
    )


def _unchanged(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    recent = rows[-5:]
    if len(recent) < 5 or any(
        (row.get("optim/grad_norm") or 0) > 0 and (row.get("optim/lr") or 0) > 0 for row in recent
    ):
        return None
    if not any(row.get("num_datums") for row in recent):
        why, remedy = "no completion had anything to train on", "see why the groups were discarded (discarded_*_pct)"
    elif not any(row.get("optim/lr") for row in recent):
        why, remedy = "the learning rate is 0", "set [training] lr, or a shorter [optimizer] warmup_steps"
    else:
        why, remedy = "the gradient is 0", "check the loss settings: a clip range or mask may leave no token"
    return f"the adapter has not changed for 5 steps: {why}", remedy


# -- the update -------------------------------------------------------------------------------------------------


def _loss_near_zero(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    losses, norms = newest(rows, "loss", 3), newest(rows, "optim/grad_norm", 3)
    if not losses or not norms or max(map(abs, losses)) > 1e-3 or min(norms) <= 1e-6:
        return None
    return (
        "the loss is near 0: on-policy that is normal, the advantages of a group cancel in its value",
        "nothing to do: the gradient does not cancel (optim/grad_norm); watch mean_reward",
    )


def _clip_zero(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    shares, ratios = newest(rows, "clip_ratio/region_mean", 3), newest(rows, "val/ratio", 3)
    if not shares or not ratios or max(shares) > 0 or max(abs(ratio - 1) for ratio in ratios) > 1e-3:
        return None
    return (
        "no token is clipped: with one update per batch the importance ratio is 1, so that is normal",
        "nothing to do: the clip range only matters off-policy",
    )


def _engines_disagree(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    value, limit = rows[-1].get("kl_sample_train_v2"), 1e-6 if dtype in ("float32", "float64") else 1e-3
    if value is None or value <= limit:
        return None
    return (
        f"sampler and trainer disagree about the same tokens: kl_sample_train_v2 = {value:.2g}, above {limit:g}",
        "they should compute alike: the same weights, dtype and temperature; or correct for it with "
        "[algorithm] tis_cap or icepop_band",
    )


def _ratio_off(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    ratios = newest(rows, "val/ratio", 2)
    if not ratios or min(abs(ratio - 1) for ratio in ratios) < 0.05:
        return None
    return (
        f"the mean importance ratio is {ratios[-1]:.3f}, not 1: the policy that trains is not the one that sampled",
        "fewer updates per batch or a lower lr; with a separate sampler, check that it gets the new weights",
    )


def _much_clipped(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    shares = newest(rows, "policy/clipfrac_avg", 5)
    if not shares or _mean(shares) <= 0.3:
        return None
    return (
        f"{100 * _mean(shares):.0f} % of the tokens were clipped in the last 5 steps, and clipped tokens do not train",
        "lower lr, or fewer updates per batch",
    )


def _grad_clipped(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    flags, norms = newest(rows, "optim/grad_clipped", 10), newest(rows, "optim/grad_norm", 10)
    if not flags or not norms or not all(flags):
        return None
    limit, middle = setting(config, "optimizer.grad_clip_norm", 1.0), sorted(norms)[5]
    return (
        f"the gradient was clipped in each of the last 10 steps (norm around {middle:.2g}, limit {limit:g}), so the "
        "step size is set by the limit",
        "raise [optimizer] grad_clip_norm, or a larger batch if the reward is noisy",
    )


def _no_gradient_number(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    row = rows[-1]
    if not row.get("num_datums") or "optim/grad_norm" not in row or row["optim/grad_norm"] is not None:
        return None
    return (
        "the gradient is not a number (NaN or infinite)",
        'lower lr, check rewards and custom modes for extreme values, and try [inference] dtype = "float32"',
    )


# -- the policy -------------------------------------------------------------------------------------------------


def _entropy_collapse(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    entropies, rates = newest(rows, "entropy", 5), newest(rows, "correct_rate", 5)
    first = rows[0].get("entropy")
    if not entropies or not rates or first is None or _mean(entropies) >= min(0.02, 0.2 * first) or _mean(rates) > 0.9:
        return None
    return (
        f"the policy has become nearly deterministic (entropy {_mean(entropies):.3f} nats, {first:.2f} at first) "
        f"while only {100 * _mean(rates):.0f} % is correct: groups will stop to differ",
        "lower lr, a higher temperature, or [algorithm] entropy_coef or kl_coef above 0",
    )


def _entropy_growth(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    entropies, first = newest(rows, "entropy", 3), rows[0].get("entropy")
    if not entropies or first is None or min(entropies) < 2 * first + 0.5:
        return None
    return (
        f"the entropy has grown from {first:.2f} to {entropies[-1]:.2f} nats: the text is dissolving",
        "lower lr; if an entropy bonus is set, lower [algorithm] entropy_coef",
    )


def _kl_blowup(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    values = newest(rows, "kl", 2)
    if not values or min(values) < 0.5:
        return None
    return (
        f"the policy is far from the base model: {values[-1]:.2f} nats of KL for every token",
        "lower lr or raise [algorithm] kl_coef, and read some completions",
    )


def _truncated(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    share, limit = _cut_off(rows, 3), _max_tokens(config)
    if share < 0.5:
        return None
    what = "every completion" if share > 0.99 else f"{100 * share:.0f} % of the completions"
    return (
        f"{what} of the last 3 steps ended at max_tokens = {limit} before the answer",
        "raise [training] max_tokens, or ask for shorter answers",
    )


def _no_planning(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    mode = setting(config, "algorithm.transform_mode", "none")
    shares = newest(rows, "planning_fraction", 5)
    if mode not in NEEDS_PLANNING or not shares or max(shares) > 0:
        return None
    return (
        f"no planning token was found in 5 steps, so {mode} has nothing to tell apart",
        "give phrases that this model writes in [logging] strategic_grams",
    )


def _sepa_shut(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    if not _uses_sepa(config) or rows[-1].get("sepa_gate_open") is not False:
        return None
    step, last = int(rows[-1]["step"]) + 1, setting(config, "training.max_steps", 0)
    if step < min(50, max(5, last // 2)):
        return None
    gate = setting(config, "sepa.correct_rate_gate", 0.1)
    return (
        f"SEPA has not begun after {step} steps: no batch has reached correct_rate_gate = {gate:g}, so λ is still 0 "
        "and the run equals plain GTPO",
        "lower [sepa] correct_rate_gate (0 is no gate), or take easier problems",
    )


def _sepa_too_late(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    step, last = int(rows[-1]["step"]) + 1, setting(config, "training.max_steps", 0)
    value = rows[-1].get("sepa_lambda")
    if not _uses_sepa(config) or step != last or last < 2:
        return None
    if value is None or value >= 0.5 or rows[-1].get("sepa_gate_open") is False:
        return None
    return (
        f"the run ended with SEPA's λ at {value:.2f}: most of it was plain GTPO",
        "lower [sepa] steps or delay_steps to fit max_steps",
    )


def _heldout_worse(rows: Sequence[Row], config: Any, dtype: str) -> Finding:
    first, now = rows[0].get("eval/heldout/ci_low"), rows[-1].get("eval/heldout/ci_high")
    if first is None or now is None or len(rows) < 2 or now >= first:
        return None
    rate = rows[-1].get("eval/heldout/correct_rate") or 0.0
    before = rows[0].get("eval/heldout/correct_rate") or 0.0
    return (
        f"held-out accuracy has fallen from {100 * before:.0f} % to {100 * rate:.0f} %, beyond what chance explains",
        "lower lr or raise [algorithm] kl_coef; if the training reward rises meanwhile, read completions for what it "
        "rewards",
    )


def _cut_off(rows: Sequence[Row], count: int) -> float:
    shares = newest(rows, "max_token_hit_rate", count)
    return _mean(shares) if shares else 0.0


def _uses_sepa(config: Any) -> bool:
    return setting(config, "algorithm.transform_mode", "none") == "gtpo_sepa"


def _max_tokens(config: Any) -> Any:
    return setting(config, "training.max_tokens", "?")


RULES: dict[str, tuple[str, Callable[[Sequence[Row], Any, str], Finding]]] = {
    "not_graded": ("warning", _ungraded),
    "format_never_matched": ("warning", _format_never),
    "groups_uniform": ("warning", _all_uniform),
    "groups_hardly_mixed": ("warning", _few_mixed),
    "adapter_unchanged": ("warning", _unchanged),
    "loss_near_zero": ("info", _loss_near_zero),
    "nothing_clipped": ("info", _clip_zero),
    "sampler_and_trainer_disagree": ("warning", _engines_disagree),
    "ratio_off": ("warning", _ratio_off),
    "much_clipped": ("warning", _much_clipped),
    "gradient_always_clipped": ("warning", _grad_clipped),
    "gradient_not_a_number": ("warning", _no_gradient_number),
    "entropy_collapsed": ("warning", _entropy_collapse),
    "entropy_growing": ("warning", _entropy_growth),
    "kl_large": ("warning", _kl_blowup),
    "truncated": ("warning", _truncated),
    "no_planning_tokens": ("warning", _no_planning),
    "sepa_never_opened": ("warning", _sepa_shut),
    "sepa_too_late": ("warning", _sepa_too_late),
    "heldout_worse": ("warning", _heldout_worse),
}
"""Remarks by key: how serious, and when."""
