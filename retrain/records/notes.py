"""Explain unusual numbers in the rows of a run by notes with a likely remedy. A run gets each note at most once.

``explain`` is a function of the rows and the configuration alone, so a resumed run makes the same notes as an
uninterrupted one.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from retrain.config import Config
from retrain.config.evaluation import HELDOUT
from retrain.config.modes import Need, credit_of
from retrain.records.schema.base import Values
from retrain.records.schema.rows import Note
from retrain.util.text import percent

WINDOW = 20  # Number of newest rows that the rules read, besides the run's first row

Finding = tuple[str, str] | None


@dataclass(frozen=True)
class Recent:
    """Input of a rule: the run's first row and its newest rows, in order, and the run's configuration."""

    rows: Sequence[Values]
    config: Config
    dtype: str

    @property
    def first(self) -> Values:
        return self.rows[0]

    @property
    def now(self) -> Values:
        return self.rows[-1]

    def last(self, key: str, count: int) -> list[float]:
        """Return the values of ``key`` in the last ``count`` rows; [] if there are fewer rows or a value is missing."""
        values = [value for row in self.rows[-count:] if (value := row.get(key)) is not None]
        return values if len(values) == count else []

    def cut_off(self) -> float:
        """Return the mean of ``max_token_hit_rate`` over the last 3 rows; 0 if there are fewer or a value is
        missing."""
        return _mean(self.last("max_token_hit_rate", 3) or [0.0])


@dataclass(frozen=True)
class Rule:
    """Rule that makes one kind of note. ``finding`` returns (text, remedy), or None if there is nothing to note.

    ``needs`` are pairs (key, count). ``finding`` is called only if each of the last ``count`` rows has a value of
    ``key``, for all pairs; its arguments are the ``Recent`` and one list of values per pair.
    """

    level: str
    finding: Callable[..., Finding]
    needs: tuple[tuple[str, int], ...] = ()


def explain(
    rows: Sequence[Values], config: Config, dtype: str = "float32", omitted: Collection[str] = ()
) -> list[Note]:
    """Return the notes about the newest row. ``rows`` begin with the run's first row and end with the newest.
    ``dtype`` is the model's; rules whose keys are in ``omitted`` are skipped, because their note was made before."""
    if not rows:
        return []
    recent, notes = Recent(rows, config, dtype), []
    skipped = {*omitted, *_inapplicable(config)}
    for key, rule in RULES.items():
        values = [recent.last(*need) for need in rule.needs]
        if key not in skipped and all(values) and (finding := rule.finding(recent, *values)):
            notes.append(Note(int(recent.now["step"]), key, rule.level, *finding))
    return notes


def _inapplicable(config: Config) -> set[str]:
    credit, keys = credit_of(config.algorithm.transform_mode), set[str]()
    if config.algorithm.critic:
        keys |= {"groups_uniform", "groups_hardly_mixed", "loss_near_zero"}
    if Need.PLANNING not in credit.needs:
        keys.add("no_planning_tokens")
    if not credit.pooled:
        keys |= {"sepa_never_opened", "sepa_too_late"}
    return keys


def note_line(note: Note) -> str:
    """Return a note as a line of ``run.log``. The remedy is capitalised unless it begins with a configuration key."""
    first = note.remedy.partition(" ")[0].rstrip(",:;")
    remedy = f"{note.remedy[:1].upper()}{note.remedy[1:]}" if first.isalpha() else note.remedy
    return f"step {note.step}: {note.text}. {remedy}."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def is_graded(row: Values) -> bool:
    """Return whether a step had rewards other than 0 and 1, as minimum, maximum, mean and variance show: rewards of 0
    and 1 with mean m have variance m · (1 − m)."""
    lowest, highest, mean, std = (row.get(key) for key in ("reward_min", "reward_max", "mean_reward", "reward_std"))
    if lowest is None or highest is None or mean is None or std is None:
        return False
    return not {lowest, highest} <= {0.0, 1.0} or abs(std**2 - mean * (1.0 - mean)) > 1e-6


# -- learning signal --------------------------------------------------------------------------------------------


CAUSES = {
    "judge": "a judge that cannot be reached, or that replies with something else than a number",
    "rubric": "a judge that cannot be reached, or that does not say of every criterion whether it is met",
    "custom": "a reward function that raises, returns no number or takes longer than [reward] timeout_s",
    "reward_model": "a conversation longer than the reward model's context, or a score that is not finite",
    "unit_tests": "a sandbox that cannot be started",
    "math": "answers that take longer than [reward] timeout_s to compare",
}


def _ungraded(recent: Recent) -> Finding:
    failed = recent.now.get("reward_failed")
    total = recent.now.get("env/all/total_episodes")
    if not failed or not total or failed / total < 0.2:
        return None
    reward = recent.config.reward
    causes = [CAUSES[part.type] for part in (reward, *reward.components) if part.type in CAUSES]
    reasons = f": {', or '.join(dict.fromkeys(causes))}" if causes else ""
    return (
        f"{failed} of {total} completions could not be graded; they count as not correct and do not train",
        f"run.log names the reasons{reasons}",
    )


def _graded(recent: Recent) -> Finding:
    if not is_graded(recent.now) or "reward" in recent.config.campaign.primary_metric:
        return None  # the primary metric is already one of the reward
    name = "reward_mean" if recent.config.evaluation.problems else "mean_reward"
    return (
        "the reward has values other than 0 and 1; training sees them, while accuracy counts an answer as correct or "
        f"not (what the reward says, else a reward above {recent.config.reward.correct_above:g})",
        f'to compare conditions by the whole reward, declare [campaign] primary_metric = "final:{name}"',
    )


def _format_never(recent: Recent, shares: list[float]) -> Finding:
    if max(shares) > 0.02:
        return None
    return (
        "hardly any completion of the last 3 steps has an answer in the expected format, so hardly any can be right",
        "look at the pages of the run, and ask for the format in [data] prompt_template or system_prompt"
        + (", or raise max_tokens: the answers are cut off" if recent.cut_off() > 0.5 else ""),
    )


def _all_uniform(recent: Recent, mixed: list[float]) -> Finding:
    if max(mixed) > 0:
        return None
    good = _mean([row.get("env/all/by_group/frac_all_good") or 0.0 for row in recent.rows[-3:]])
    formats = recent.last("env/all/format", 3)
    text = "for 3 steps the rewards within every group have been equal, so there is nothing to learn from"
    if good > 0.5:
        return f"{text}: the problems are too easy", "take harder problems, or stop here"
    if formats and max(formats) <= 0.02:
        return f"{text}: no answer matched the format", "ask for the format in [data] prompt_template or system_prompt"
    if recent.cut_off() > 0.9:
        return (
            f"{text}: the answers are cut off",
            f"raise [training] max_tokens above {recent.config.training.max_tokens}",
        )
    return (
        f"{text}: the problems are too hard",
        "take easier problems, a larger group_size, or a model that sometimes succeeds",
    )


def _few_mixed(recent: Recent, mixed: list[float]) -> Finding:
    if not 0 < _mean(mixed) < 0.1:
        return None
    return (
        f"in the last 10 steps only {percent(_mean(mixed))} of the groups had rewards that differ; only these train",
        "mix in problems of other difficulty, or raise group_size",
    )


def _unchanged(recent: Recent) -> Finding:
    rows = recent.rows[-5:]
    if any(row.get("optim/critic_grad_norm") for row in rows):
        return None  # the critic's warm-up
    if len(rows) < 5 or any((row.get("optim/grad_norm") or 0) > 0 and (row.get("optim/lr") or 0) > 0 for row in rows):
        return None
    if not any(row.get("num_datums") for row in rows):
        why, remedy = "no completion had anything to train on", "see why the groups were discarded (discarded_*_pct)"
    elif not any(row.get("optim/lr") for row in rows):
        why, remedy = "the learning rate is 0", "set [training] lr, or a shorter [optimizer] warmup_steps"
    elif all(row.get("optim/grad_norm") is None for row in rows):
        return None  # a backend that reports none, or a gradient that is not a number
    else:
        why, remedy = "the gradient is 0", "check the loss settings: a clip range or mask may leave no token"
    return f"the adapter has not changed for 5 steps: {why}", remedy


# -- the update -------------------------------------------------------------------------------------------------


def _loss_near_zero(recent: Recent, losses: list[float], norms: list[float]) -> Finding:
    if recent.now.get("loss_is_placeholder") or max(map(abs, losses)) > 1e-3 or min(norms) <= 1e-6:
        return None
    return (
        "the loss is near 0: on-policy that is normal, the advantages of a group cancel in its value",
        "nothing to do: the gradient does not cancel (optim/grad_norm); watch mean_reward",
    )


def _clip_zero(recent: Recent, shares: list[float], ratios: list[float]) -> Finding:
    training = recent.config.training
    several = training.several_updates or training.max_off_policy_steps
    if several or max(shares) > 0 or max(abs(ratio - 1) for ratio in ratios) > 1e-3:
        return None
    return (
        "no token is clipped: with one update per batch the importance ratio is 1, so that is normal",
        "nothing to do: the clip range only matters off-policy",
    )


def _engines_disagree(recent: Recent, values: list[float]) -> Finding:
    full = recent.dtype in ("float32", "float64") and recent.config.training.update_dtype == "model"
    (value,), limit = values, 1e-6 if full else 1e-3
    if value <= limit or recent.config.training.max_off_policy_steps:
        return None
    return (
        f"sampler and trainer disagree about the same tokens: kl_sample_train_v2 = {value:.2g}, above {limit:g}",
        "check that both use the same weights, dtype and temperature, or correct for the difference with "
        "[algorithm] tis_cap or icepop_band",
    )


def _ratio_off(recent: Recent, ratios: list[float]) -> Finding:
    if recent.config.training.max_off_policy_steps or min(abs(ratio - 1) for ratio in ratios) < 0.05:
        return None
    return (
        f"the mean importance ratio is {ratios[-1]:.3f}, not 1: the policy that trains is not the one that sampled",
        "fewer updates per batch or a lower lr; with a separate sampler, check that it gets the new weights",
    )


def _much_clipped(recent: Recent, shares: list[float]) -> Finding:
    if _mean(shares) <= 0.3:
        return None
    return (
        f"{percent(_mean(shares))} of the tokens were clipped in the last 5 steps, and clipped tokens do not train",
        "lower lr, or fewer updates per batch",
    )


def _grad_clipped(recent: Recent, flags: list[bool], norms: list[float]) -> Finding:
    if not all(flags):
        return None
    limit, middle = recent.config.optimizer.grad_clip_norm, sorted(norms)[5]
    return (
        f"the gradient was clipped in each of the last 10 steps (norm around {middle:.2g}, limit {limit:g}), so the "
        "step size is set by the limit",
        "raise [optimizer] grad_clip_norm, or a larger batch if the reward is noisy",
    )


def _no_gradient_number(recent: Recent) -> Finding:
    row = recent.now
    reported = any(each.get("optim/grad_norm") is not None for each in recent.rows)  # some backends report no norms
    missing = row.get("optim/grad_norm") is None and (reported or row.get("optim/skipped"))
    if not row.get("num_datums") or not missing:
        return None
    return (
        "the gradient is not a number (NaN or infinite)",
        'lower lr, check rewards and custom modes for extreme values, and try [inference] dtype = "float32"',
    )


# -- the policy -------------------------------------------------------------------------------------------------


def _entropy_collapse(recent: Recent, entropies: list[float], rates: list[float]) -> Finding:
    first = recent.first.get("entropy")
    if first is None or _mean(entropies) >= min(0.02, 0.2 * first) or _mean(rates) > 0.9:
        return None
    return (
        f"the policy has become nearly deterministic (entropy {_mean(entropies):.3f} nats, {first:.2f} at first) "
        f"while only {percent(_mean(rates))} is correct: groups will stop differing",
        "lower lr, a higher temperature, or [algorithm] entropy_coef or kl_coef above 0",
    )


def _entropy_growth(recent: Recent, entropies: list[float]) -> Finding:
    first = recent.first.get("entropy")
    if first is None or min(entropies) < 2 * first + 0.5:
        return None
    return (
        f"the entropy has grown from {first:.2f} to {entropies[-1]:.2f} nats: the text is becoming random",
        "lower lr; if an entropy bonus is set, lower [algorithm] entropy_coef",
    )


def _kl_blowup(recent: Recent, values: list[float]) -> Finding:
    if min(values) < 0.5:
        return None
    return (
        f"the policy is far from the base model: {values[-1]:.2f} nats of KL for every token",
        "lower lr or raise [algorithm] kl_coef, and read some completions",
    )


def _truncated(recent: Recent) -> Finding:
    share, limit = recent.cut_off(), recent.config.training.max_tokens
    if share < 0.5:
        return None
    what = "every completion" if share > 0.99 else f"{percent(share)} of the completions"
    return (
        f"{what} of the last 3 steps ended at max_tokens = {limit} before the answer",
        "raise [training] max_tokens, or ask for shorter answers",
    )


def _no_planning(recent: Recent, shares: list[float]) -> Finding:
    mode = recent.config.algorithm.transform_mode
    if max(shares) > 0:
        return None
    return (
        f"no planning token was found in 5 steps, so {mode} cannot tell planning from execution",
        "give phrases that this model writes in [logging] strategic_grams",
    )


def _sepa_shut(recent: Recent) -> Finding:
    if recent.now.get("sepa_gate_open") is not False:
        return None
    step, last = int(recent.now["step"]) + 1, recent.config.training.max_steps
    if step < min(50, max(5, last // 2)):
        return None
    gate = recent.config.sepa.correct_rate_gate
    return (
        f"SEPA has not begun after {step} steps: no batch has reached correct_rate_gate = {gate:g}, so λ is still 0 "
        "and the run equals plain GTPO",
        "lower [sepa] correct_rate_gate (0 is no gate), or take easier problems",
    )


def _sepa_too_late(recent: Recent) -> Finding:
    step, last = int(recent.now["step"]) + 1, recent.config.training.max_steps
    value = recent.now.get("sepa_lambda")
    if step != last or value is None or value >= 0.5 or _sepa_shut(recent):
        return None
    if value == 0 and recent.config.sepa.schedule == "linear":  # a linear λ never falls, so it was always 0
        return (
            f"SEPA's λ was 0 in every one of the {last} steps: the run equals plain GTPO",
            "raise max_steps, or lower [sepa] steps or delay_steps to fit it",
        )
    return (
        f"the run ended with SEPA's λ at {value:.2f}: most of it was plain GTPO",
        "lower [sepa] steps or delay_steps to fit max_steps",
    )


def _heldout_worse(recent: Recent) -> Finding:
    for name in [each.name for each in recent.config.evaluation.sets] or [HELDOUT]:
        first, now = recent.first.get(f"eval/{name}/ci_low"), recent.now.get(f"eval/{name}/ci_high")
        if first is None or now is None or len(recent.rows) < 2 or now >= first:
            continue
        rate = recent.now.get(f"eval/{name}/correct_rate") or 0.0
        before = recent.first.get(f"eval/{name}/correct_rate") or 0.0
        where = "" if name == HELDOUT else f" on {name}"
        return (
            f"held-out accuracy{where} has fallen from {percent(before)} to {percent(rate)}, beyond what chance "
            "explains",
            "lower lr or raise [algorithm] kl_coef; if the training reward rises meanwhile, read completions for what "
            "it rewards",
        )
    return None


RULES: dict[str, Rule] = {
    "not_graded": Rule("warning", _ungraded),
    "reward_graded": Rule("info", _graded),
    "format_never_matched": Rule("warning", _format_never, (("env/all/format", 3),)),
    "groups_uniform": Rule("warning", _all_uniform, (("env/all/by_group/frac_mixed", 3),)),
    "groups_hardly_mixed": Rule("warning", _few_mixed, (("env/all/by_group/frac_mixed", 10),)),
    "adapter_unchanged": Rule("warning", _unchanged),
    "loss_near_zero": Rule("info", _loss_near_zero, (("loss", 3), ("optim/grad_norm", 3))),
    "nothing_clipped": Rule("info", _clip_zero, (("clip_ratio/region_mean", 3), ("val/ratio", 3))),
    "sampler_and_trainer_disagree": Rule("warning", _engines_disagree, (("kl_sample_train_v2", 1),)),
    "ratio_off": Rule("warning", _ratio_off, (("val/ratio", 2),)),
    "much_clipped": Rule("warning", _much_clipped, (("policy/clipfrac_avg", 5),)),
    "gradient_always_clipped": Rule("warning", _grad_clipped, (("optim/grad_clipped", 10), ("optim/grad_norm", 10))),
    "gradient_not_a_number": Rule("warning", _no_gradient_number),
    "entropy_collapsed": Rule("warning", _entropy_collapse, (("entropy", 5), ("correct_rate", 5))),
    "entropy_growing": Rule("warning", _entropy_growth, (("entropy", 3),)),
    "kl_large": Rule("warning", _kl_blowup, (("kl", 2),)),
    "truncated": Rule("warning", _truncated),
    "no_planning_tokens": Rule("warning", _no_planning, (("planning_fraction", 5),)),
    "sepa_never_opened": Rule("warning", _sepa_shut),
    "sepa_too_late": Rule("warning", _sepa_too_late),
    "heldout_worse": Rule("warning", _heldout_worse),
}
