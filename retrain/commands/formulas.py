"""What a configuration computes, in words and as formulas, for ``explain``. Every mode has its line here."""

from __future__ import annotations

from typing import Any

ADVANTAGES = {
    "grpo": "(r − mean) / std of its group",
    "dr_grpo": "r − mean of its group",
    "rloo": "r − mean of the others in its group",
    "maxrl": "(r − mean) / mean of its group",
    "reinforce_pp": "r − mean of its group, whitened over the batch",
}

CREDITS = {
    "none": "every token alike",
    "gtpo": "uncertain tokens more",
    "gtpo_paper": "uncertain tokens more, added to the reward (Group Token Policy Optimization)",
    "gtpo_hicra": "uncertain tokens more, planning tokens amplified",
    "gtpo_hicra_placebo": "uncertain tokens more, random tokens amplified at the rate of planning tokens",
    "gtpo_sepa": "uncertain tokens more, execution tokens pooled step by step",
    "entropy_mask": "only the most uncertain tokens",
}

UNCERTAINTIES = {
    "surprisal": "h = −log p of the sampled token",
    "predictive_variance": "h = p(1 − p) of the sampled token",
    "shannon_entropy": "h = entropy of the whole distribution",
}

LOSSES = {
    "ppo": "ratio clipped",
    "reinforce": "ratio as a constant weight",
    "gspo": "ratio of the whole completion clipped",
    "cispo": "ratio as a constant weight, capped",
}

REWARDS = {
    "match": "1 where {answer} is the reference as text (42.0 = 42), else 0",
    "math": "1 where {answer} equals the reference mathematically, else 0",
    "format": "1 where an answer is marked (a closed box, or the data set's own ####), else 0",
}

DIVISORS = {
    "tokens": "all tokens",
    "sequences": "each completion's length and their number",
    "constant": "max_tokens and the number of completions",
}


def advantage_words(config: Any) -> str:
    """The credit of a completion with reward r."""
    mode = config.algorithm.advantage_mode
    return ADVANTAGES.get(mode, f"your own {mode}")


def credit_words(config: Any) -> str:
    """How a completion's credit is spread over its tokens."""
    mode = config.algorithm.transform_mode
    return CREDITS.get(mode, f"your own {mode}")


def credit_formula(config: Any) -> str:
    """The credit of a token as a formula of its completion's credit A, with the numbers of this run."""
    algorithm, gtpo = config.algorithm, config.gtpo
    mode = algorithm.transform_mode
    if mode == "none":
        return "A"
    uncertainty = UNCERTAINTIES.get(algorithm.uncertainty_kind, f"h = your own {algorithm.uncertainty_kind}")
    if mode == "entropy_mask":
        counted = {"kept": "the kept tokens", "all": "all tokens"}[algorithm.entropy_mask_denominator]
        share = f"{algorithm.entropy_mask_rho:.3g} of the batch's tokens, those of highest entropy"
        return f"A on {share}, 0 elsewhere; {counted} count in the divisor"
    if mode == "gtpo_paper":
        correct = f"{gtpo.alpha1:g}·r + {gtpo.alpha2:g}·d·h/Σh"
        wrong = f"−{gtpo.alpha1:g} − {gtpo.alpha2:g}·d·(1/h)/Σ(1/h)"
        return (
            f"{correct} where correct, {wrong} where wrong, then (x − mean)/std over the group's tokens; {uncertainty}"
        )
    if mode not in CREDITS:
        return f"your own {mode} of A, h and planning; {uncertainty}"
    weighted = f"A·max(0, 1 + {gtpo.beta:g}·(h/mean h − 1))"
    detector = {"regex": "phrases", "semantic": "sentence embeddings"}.get(
        config.planning.detector, f"your own {config.planning.detector}"
    )
    if mode in ("gtpo_hicra", "gtpo_hicra_placebo"):
        where = f"planning tokens ({detector})" if mode == "gtpo_hicra" else "as many random tokens"
        weighted = f"x + {config.hicra.alpha:g}·|x| on {where}, x elsewhere; x = {weighted}"
    elif mode == "gtpo_sepa":
        sepa = config.sepa
        rise = (
            f"λ 0 → 1 in {sepa.steps} steps" if sepa.schedule == "linear" else f"λ by variance and {sepa.steps} steps"
        )
        if sepa.delay_steps:
            rise += f" after {sepa.delay_steps}"
        if sepa.correct_rate_gate:
            rise += f" once {sepa.correct_rate_gate:.0%} are correct"
        pooled = f"h → λ·mean + (1 − λ)·h but on planning tokens ({detector}); {rise}"
        weighted = f"{weighted} with execution pooled: {pooled}"
    return f"{weighted}; {uncertainty}"


def loss_words(config: Any) -> str:
    """The loss of a run: its name, what it is divided by, and every term that is switched on."""
    algorithm = config.algorithm
    words = [f"{algorithm.loss} ({LOSSES.get(algorithm.loss, 'your own')})"]
    own = "" if algorithm.loss in LOSSES else f" of your own {algorithm.loss}"
    if algorithm.tis_cap is not None:
        words = [f"policy gradient{own} weighted by π/π_sampler up to {algorithm.tis_cap:g}"]
    elif algorithm.icepop_band is not None:
        low, high = algorithm.icepop_band
        words = [f"policy gradient{own} weighted by π/π_sampler where that is {low:g} to {high:g}"]
    words.append(f"divided by {DIVISORS[algorithm.loss_normalizer]}")
    if algorithm.dual_clip is not None:
        words.append(f"a negative advantage counts {algorithm.dual_clip:g} times at most")
    if algorithm.kl_coef > 0:
        words.append(f"plus {algorithm.kl_coef:g} × KL to the base")
    if algorithm.entropy_coef > 0:
        words.append(f"minus {algorithm.entropy_coef:g} × entropy")
    return ", ".join(words)


def reward_words(config: Any) -> str:
    """What a completion is worth: the kind of reward, or the sum of them, with its limits where it has any."""
    reward = config.reward
    if reward.type == "weighted":
        named = [(part, part.shown_name) for part in reward.components]
        sums = [
            f"{part.weight:g} × "
            + (f"({name} {'+' if part.offset > 0 else '−'} {abs(part.offset):g})" if part.offset else name)
            for part, name in named
        ]
        words = " + ".join(sums) + "; " + "; ".join(f"{name}: {_grader_words(part)}" for part, name in named)
    else:
        words = f"{reward.name or reward.type}: {_grader_words(reward)}"
    kinds = {reward.type, *(part.type for part in reward.components)}
    if kinds & {"math", "judge", "custom"}:
        words += f"; at most {reward.timeout_s:g} s for an answer, {reward.workers} at once"
    return words


def _grader_words(grader: Any) -> str:
    if grader.type == "judge":
        return f"0 to 1, as the model {grader.judge_model} at {grader.judge_url or 'its own address'} says"
    if grader.type == "custom":
        return f"your own {grader.custom_function} of {grader.custom_module}"
    answer = "the marked answer" if grader.strict else "the marked answer, or else the last number or line,"
    return REWARDS[grader.type].format(answer=answer)
