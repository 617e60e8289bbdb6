"""Describe a configuration's computation for ``explain``; formulas of modes are in ``config.modes``."""

import math
from collections.abc import Iterable, Mapping

from retrain.config import Config
from retrain.config.algorithm import Sepa
from retrain.config.modes import ADVANTAGES, LOSSES, TOKEN_CREDIT, UNCERTAINTIES, used_by
from retrain.config.tasks import JUDGED, RewardComponent, RewardSection
from retrain.config.training import Training
from retrain.errors import plural

REWARDS = {
    "match": "1 where {answer} is the reference as text (42.0 = 42), else 0",
    "math": "1 where {answer} equals the reference mathematically, else 0",
    "format": "1 where an answer is marked (a closed box, or the data set's own ####), else 0",
}

TESTS = {
    "share": "the share of passed tests of the program in the answer, run in a sandbox",
    "all": "1 where the program in the answer, run in a sandbox, passes all tests, else 0",
}

DIVISORS = {
    "tokens": "all tokens",
    "sequences": "each completion's length and their number",
    "constant": "max_tokens and the number of completions",
}

REJECTED = {
    "geometric": "completions left out whose mean ratio to the sampler is outside {low:g} to {high:g}",
    "k3": "completions left out whose k3 to the sampler is above {high:g}",
    "veto": "completions left out with a token whose ratio to the sampler is below {low:g}",
}
TERMS = {
    "dual_clip": "a negative advantage counts {algorithm.dual_clip:g} times at most",
    "loss_kl_coef": "plus {algorithm.loss_kl_coef:g} × KL to the base",
    "reward_kl_coef": "{algorithm.reward_kl_coef:g} × KL to the base ({algorithm.kl_in_reward}) taken from the reward "
    "of every token",
    "entropy_coef": "minus {algorithm.entropy_coef:g} × entropy",
}
"""Terms of the loss, by the property of [algorithm] that switches them on."""


def advantage_text(config: Config) -> str:
    mode = config.algorithm.advantage_mode
    if config.algorithm.critic:
        return _critic_advantage(config)
    return ADVANTAGES[mode].formula.format_map(dict(config)) if mode in ADVANTAGES else f"your own {mode}"


WHITENED = ", then whitened over the batch"


def _critic_advantage(config: Config) -> str:
    critic = config.critic
    lam = f"λ = {critic.policy_lambda:g}" if critic.lam_length is None else f"λ = 1 − 1/({critic.lam_length:g}·length)"
    if critic.lam_length is not None or critic.value_lambda != critic.policy_lambda:
        lam += f" ({critic.value_lambda:g} for what the critic learns)"
    formula = ADVANTAGES[config.algorithm.advantage_mode].formula.removesuffix(WHITENED)
    return f"{formula}, γ = {critic.gamma:g}, {lam}{WHITENED if critic.whiten else ''}"


def critic_text(config: Config) -> str:
    critic, training = config.critic, config.training
    if not config.algorithm.critic:
        return ""
    lr = f"lr {critic.lr or training.lr:g}"
    if critic.share_adapter:
        text = f"a value head ({lr}) on the policy's adapter, which learns both"
    else:
        text = f"a value head and an adapter of its own of rank {config.lane_ranks - config.model.lora_rank}, {lr}"
    loss = f"{critic.vf_coef:g} × squared error of the value"
    if critic.cliprange_value and training.several_updates:
        loss += f", or that of the value moved by {critic.cliprange_value:g} at most where that is more"
    alone = f"; trains alone in the first {plural(critic.warmup_steps, 'step')}" if critic.warmup_steps else ""
    return f"{text}; {loss}{alone}"


def distillation_text(config: Config) -> str:
    """Return how a teacher changes advantages, and the weight of the reward; "" without a teacher."""
    distillation = config.distillation
    if not distillation.active:
        return ""
    weight, alpha, most = distillation.weight, distillation.alpha, distillation.top_tokens
    reward = f"{distillation.reward_weight:g} × A" if distillation.reward_weight else ""
    where = "" if distillation.url is None else f" at {distillation.url}"
    shown = {"none": "", "answer": " that is shown the reference answer", "sibling": " that is shown a right sibling"}
    teacher = f"teacher {distillation.teacher}{where}{shown[distillation.context]}"
    if distillation.full_vocabulary:
        ends = {0.0: "KL(π_teacher ‖ π)", 1.0: "KL(π ‖ π_teacher)"}
        kind = ends.get(alpha, f"D_α(π_teacher, π) with α = {alpha:g}")
        tokens = f"the {most} likeliest tokens and the rest as one" if most else "the vocabulary"
        beside = reward or "no advantage; the reward is only recorded"
        return f"{weight:g} × {kind} over {tokens} at every token in the loss, {teacher}, beside {beside}"
    bound = "" if distillation.clamp is None else f", the difference cut off at ±{distillation.clamp:g},"
    formula = f"{weight:g} × (ln π_teacher − ln π){bound} of every token, {teacher}"
    return f"{formula}, {f'plus {reward}' if reward else 'in place of A; the reward is only recorded'}"


def credit_text(config: Config) -> str:
    mode = config.algorithm.transform_mode
    if config.algorithm.critic and mode == "none":
        return "every token its own"
    return TOKEN_CREDIT[mode].description if mode in TOKEN_CREDIT else f"your own {mode}"


def credit_formula(config: Config) -> str:
    """Return the credit of a token as a formula of its completion's advantage A, with this run's numbers."""
    kind, mode = config.algorithm.uncertainty_kind, config.algorithm.transform_mode
    uncertainty = UNCERTAINTIES[kind].formula if kind in UNCERTAINTIES else f"h = your own {kind}"
    if mode not in TOKEN_CREDIT:
        return f"your own {mode} of A, h and planning; {uncertainty}"
    detector = config.planning.detector
    values = {
        "detector": "phrases" if detector == "regex" else f"your own {detector}",
        "counted": {"kept": "the kept tokens", "all": "all tokens"}[config.algorithm.entropy_mask_denominator],
        "ramp": _ramp(config.sepa),
        "normalised": "(x − mean)/std" if config.gtpo.centred else "x/√(mean of x²)",
    }
    formula = TOKEN_CREDIT[mode].formula.format_map(dict(config) | values)
    return f"{formula}; {uncertainty}" if mode in used_by("transform_mode", "algorithm.uncertainty_kind") else formula


def _ramp(sepa: Sepa) -> str:
    text = f"λ 0 → 1 in {sepa.steps} steps" if sepa.schedule == "linear" else f"λ by variance and {sepa.steps} steps"
    if sepa.delay_steps:
        text += f" after {sepa.delay_steps}"
    if sepa.correct_rate_gate:
        text += f" once {sepa.correct_rate_gate:.0%} are correct"
    return text


def loss_text(config: Config) -> str:
    algorithm, several = config.algorithm, config.training.several_updates
    built_in = LOSSES.get(algorithm.loss)
    terms = [f"{algorithm.loss} ({_ratio_text(config, built_in.description) if built_in else 'your own'})"]
    weight = _mismatch_text(config)
    if weight and several:
        terms.append(weight)
    elif weight:
        terms = [f"policy gradient{'' if built_in else f' of your own {algorithm.loss}'} {weight}"]
    terms.append(f"divided by {DIVISORS[algorithm.loss_normalizer]}")
    low, high = algorithm.rejection_bounds
    terms += [text.format(low=low, high=high) for name, text in REJECTED.items() if algorithm.rejection == name]
    if algorithm.rejection_denominator == "kept":
        terms.append("what is left out does not count in the divisor")
    terms += [text.format_map({"algorithm": algorithm}) for key, text in TERMS.items() if getattr(algorithm, key)]
    parts = [", ".join(terms), *([_update_text(config.training)] if several else [])]
    if again := config.training.dynamic_sampling:
        rounds = plural(again, "round")
        parts.append(f"prompts whose answers all have the same reward are drawn again, {rounds} at most")
    if behind := config.training.max_off_policy_steps:
        parts.append(f"rollouts are drawn by the weights of {plural(behind, 'step')} before")
    return "; ".join(parts)


def _ratio_text(config: Config, description: str) -> str:
    """Return a loss's ``description`` for this configuration: "ratio" becomes "ratio π/π_old" if a batch has several
    updates, "clipped" becomes "not clipped" if ``clip_eps`` is 0."""
    if config.training.clip_eps == 0 and "training.clip_eps" in LOSSES[config.algorithm.loss].keys:
        description = description.replace("clipped", "not clipped")
    return description.replace("ratio", "ratio π/π_old", 1) if config.training.several_updates else description


def _mismatch_text(config: Config) -> str:
    algorithm = config.algorithm
    policy = "π_old" if config.training.several_updates else "π"
    if algorithm.weight is None:
        return ""
    kind, low, high = algorithm.weight
    ratio = f"Π {policy}/π_sampler of the completion" if kind.startswith("seq_") else f"{policy}/π_sampler"
    if kind == "icepop":
        return f"weighted by {ratio} where that is {low:g} to {high:g}"
    if kind in ("mis", "seq_mis"):
        return f"weighted by {ratio} where that is at most {high:g}"
    return f"weighted by {ratio}{f' up to {high:g}' if math.isfinite(high) else ''}"


def _update_text(training: Training) -> str:
    made = training.num_iterations
    text = f"{made} {'pass' if made == 1 else 'passes'}"
    if training.minibatches > 1:
        parts = "whole groups" if training.minibatch_by == "group" else "single completions"
        text += f" × {training.minibatches} minibatches of {parts}"
    text += f" = {training.updates} updates of a batch, π_old is from before the first"
    if training.target_kl is not None and made > 1:
        text += f"; no further pass once KL(π_old, π) exceeds {training.target_kl:g}"
    return text


def environment_text(config: Config) -> str:
    def names(entries: Iterable[str | Mapping[str, object]], key: str) -> str:
        return ", ".join(entry if isinstance(entry, str) else str(entry.get(key, "?")) for entry in entries)

    section = config.environment
    text = f"tools {names(section.tools, 'tool')}" if section.tools else section.provider or ""
    if section.id is not None:
        text += " " + names(section.id if isinstance(section.id, list) else [section.id], "name")
    tokens = f", {section.max_episode_tokens} tokens of an episode" if section.max_episode_tokens else ""
    turns = f"at most {plural(section.turns, 'turn')} of {config.training.max_tokens} sampled tokens{tokens}"
    return f"{text}; {turns}; in {section.workers} {'process' if section.workers == 1 else 'processes'} of its own"


def reward_text(config: Config) -> str:
    reward = config.reward
    if config.environment.provider is not None:
        return f"that of {config.environment.provider}"
    if reward.type == "weighted":
        sums, texts = [], []
        for part in reward.components:
            name = part.shown_name
            moved = f"({name} {'+' if part.offset > 0 else '−'} {abs(part.offset):g})" if part.offset else name
            sums.append(f"{part.weight:g} × {moved}")
            texts.append(f"{name}: {_grader_text(part, reward.tests_credit)}")
        text = f"{' + '.join(sums)}; {'; '.join(texts)}"
    else:
        text = f"{reward.name or reward.type}: {_grader_text(reward, reward.tests_credit)}"
    kinds = {reward.type, *(part.type for part in reward.components)}
    if kinds & {"math", *JUDGED, "custom"}:
        text += f"; at most {reward.timeout_s:g} s for an answer, {reward.workers} at once"
    return text


def _grader_text(grader: RewardSection | RewardComponent, tests_credit: str) -> str:
    judge = f"the model {grader.judge_model} at {grader.judge_url or 'its own address'}"
    if grader.type == "judge":
        return f"0 to 1, as {judge} says"
    if grader.type == "rubric":
        criteria = [f"{each.name} ({each.weight_number:g})" for each in grader.criteria]
        if grader.rubric_column is not None:
            criteria.append(f"those of the problem's {grader.rubric_column}")
        if grader.rubric == "implicit":
            return f"0 to 1, as {judge} says by {', '.join(criteria)}"
        return f"Σ weight · met / Σ |weight| over {', '.join(criteria)}, each of which {judge} finds met or not"
    if grader.type == "custom":
        functions = grader.custom_function if isinstance(grader.custom_function, list) else [grader.custom_function]
        return f"your own {' + '.join(functions)} of {grader.custom_module}"
    if grader.type == "reward_model":
        return f"the score that the reward model {grader.reward_model} gives to problem and answer"
    if grader.type == "unit_tests":
        return TESTS[tests_credit]
    answer = "the marked answer" if grader.strict else "the marked answer, or else the last number or line,"
    return REWARDS[grader.type].format(answer=answer)
