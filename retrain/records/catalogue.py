"""The one table of all metrics: key, definition, unit, healthy range, and the names other tools use for it.

``metrics.jsonl``, the trackers' names, the live view and ``docs/metrics.md`` are all made from ``METRICS``. A key with
``<name>`` or ``<tag>`` stands for one key per reward part, evaluation or tag. A metric with ``requires`` appears only
in rows of runs whose configuration switches that feature on; all other metrics appear in every row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from retrain.config.evaluation import Tool

# Tools whose metric names can be added to every row (``[logging] aliases``)
TOOLS: tuple[str, ...] = get_args(Tool)

# Aliases whose value differs from the metric's: (description, offset, factor), alias = offset + factor · value
SCALED_ALIASES: dict[str, tuple[str, float, float]] = {
    "stop_reason_length_pct": ("×100", 0.0, 100.0),
    "discarded_stop_reason_length_pct": ("×100", 0.0, 100.0),
    "frac_reward_zero_std": ("1 − value", 1.0, -1.0),
}


@dataclass(frozen=True)
class Metric:
    """Definition of one value in the row of a step.

    ``requires`` names a feature of ``RunContext.features``, or is "". ``aliases`` are the metric's names in other
    tools, by tool. ``wandb`` is its name in W&B, "" if that is ``key``.
    """

    key: str
    definition: str
    unit: str
    healthy: str
    requires: str
    wandb: str
    aliases: Mapping[str, tuple[str, ...]]


def _metric(
    key: str, definition: str, unit: str = "", healthy: str = "", requires: str = "", wandb: str = "", **aliases: str
) -> Metric:
    """Return one entry of ``SECTIONS``. Several aliases in one tool are separated by blanks."""
    named = {tool: tuple(names.split()) for tool, names in aliases.items()}
    return Metric(key, definition, unit, healthy, requires, wandb, named)


def _spread(pattern: str, quantity: str, unit: str = "", alias: str = "") -> list[Metric]:
    """Return the metrics of a quantity's mean, standard deviation, minimum and maximum. ``{}`` in ``pattern`` and
    ``alias`` becomes mean, std, min or max."""
    names = {"mean": "mean", "std": "standard deviation (population)", "min": "smallest", "max": "largest"}
    return [
        _metric(pattern.format(key), f"{name} {quantity}", unit, **({"telescope": alias.format(key)} if alias else {}))
        for key, name in names.items()
    ]


# Reason why an episode ended (``types.Ended``): (text for the metric's definition, healthy range)
ENDED = {
    "done": ("their environment said so", "near 1"),
    "max_turns": ("they had their turns (`max_turns`)", ""),
    "max_tokens": ("they had their tokens (`max_episode_tokens`, or the model's context)", "0"),
    "raised": ("their environment raised an error", "0"),
    "timeout": ("their environment took longer than `timeout_s`", "0"),
    "died": ("their environment's process ended", "0"),
    "flooded": ("their environment answered without end", "0"),
}

BESIDE = "ahead"  # Name of spans in which rollouts were sampled while earlier steps trained
# Parts of a step with metrics ``timing_<part>_total`` and ``timing_<part>_microbatch_mean``; null with a plug-in
# backend that does not report them
TIMED_PARTS = {
    "forward": "inside the update: forward passes",
    "backward": "inside the update: backward passes",
    "loss_computation": "inside the update: the loss and its statistics from the logprobs",
    "compute_kl": "KL to the base, with the base's forward passes: inside the update, and with a critic before it; 0 "
    "without `kl_coef`, `log_kl` and a critic",
    "compute_entropy": "inside the update: entropy of whole distributions and its gradient; 0 without `entropy_coef` "
    "(`entropy` itself comes from the sampler)",
    "data_to_device": "inside the update: copying micro-batches to the device",
    "prepare_tensors": "inside the update: padding and packing",
    "weight_sync_trainer": "inside the update: the optimizer's step, which writes the new weights where the sampler "
    "reads them; 0 when nothing trained",
    "weight_sync_inference": "inside the rollout: merging or stacking the new weights of all runs of the cohort for "
    "the decode batch",
}

# fmt: off
SECTIONS: dict[str, list[Metric]] = {
"General": [
    _metric("step", "optimizer step, from 0", "steps", tinker="progress/batch"),
    _metric("condition", "label of the condition"),
    _metric("advantage_mode", "how the rewards of a group become advantages"),
    _metric("transform_mode", "how an advantage is spread over the tokens"),
    _metric("progress/done_frac", "(step + 1) / max_steps", "share"),
    _metric("epoch", "passes over the training problems so far, this step's prompts included", "passes"),
    _metric("episode", "completions sampled so far, this step's included", "completions"),
    _metric("num_tokens", "prompt + completion tokens so far, the prompt counted once per completion", "tokens"),
    _metric("num_datums", "completions that trained", "completions", wandb="train/num_datums"),
    _metric("batch_size", "prompts in the step", "prompts", wandb="train/batch_size"),
    _metric("group_size", "completions per prompt", "completions", wandb="train/group_size"),
    _metric("skipped_prompts", "problems, training and held out, that are left out because their prompts are longer "
            "than `max_prompt_tokens`", "problems", "0"),
    _metric("cohort_size", "runs that took this step together, over one base model", "runs"),
],
"Loss and optimizer": [
    _metric("loss", "the loss that was differentiated, or the placeholder for it; null when no completion trained", "",
            "near 0 on-policy: the advantages of a group cancel, the gradient does not",
            wandb="train/loss", trl="loss/policy_avg"),
    _metric("reported_loss", "what the backend returned as its loss, placeholder or not: the same value as `loss` "
            "unless a backend of your own reports another under this name", wandb="train/reported_loss"),
    _metric("loss_is_placeholder", "true when a backend cannot report the loss of its step: what stands in `loss` and "
            "`reported_loss` is then not that loss, or null if it returned nothing", "boolean",
            wandb="train/loss_is_placeholder"),
    _metric("backend_reports_sync_loss", "the loss belongs to this very step", "boolean",
            wandb="train/backend/reports_sync_loss"),
    _metric("backend_preserves_token_advantages", "each token trains with its own advantage", "boolean",
            wandb="train/backend/preserves_token_advantages"),
    _metric("optim/lr", "learning rate of the update", "", trl="learning_rate lr",
            telescope="learning_rate", retrain="lr"),
    _metric("optim/grad_norm", "norm of the whole gradient before clipping", "", trl="grad_norm",
            telescope="grad_norm"),
    _metric("optim/skipped", "whether the update was left out because loss or gradient was not finite", "boolean",
            "false"),
    _metric("optim/grad_clipped", "whether the gradient was scaled down to `grad_clip_norm`; of several updates, that "
            "of any", "boolean"),
    _metric("optim/updates", "updates (optimizer steps) that the batch had, those of the critic alone included",
            "updates", "num_iterations × minibatches, fewer where `target_kl` ended the passes", requires="updates"),
    _metric("optim/lr_max", "largest learning rate of the step's updates; `optim/lr` is their mean", "",
            requires="updates"),
    _metric("optim/grad_norm_max", "largest gradient norm of the step's updates before clipping; `optim/grad_norm` is "
            "their mean", "", requires="updates"),
    _metric("optim/grad_clipped_frac", "share of the step's updates whose gradient was scaled down", "share",
            requires="updates"),
],
"Critic": [replace(metric, requires="critic") for metric in (
    _metric("loss/policy_avg", "mean policy loss of a trained token, without value loss, KL and entropy; of several "
            "updates, the mean over their tokens, as of all that follows here", ""),
    _metric("loss/value_avg", "mean of ½·max((V − R)², (clip(V) − R)²) over action tokens", "reward²", "falling"),
    _metric("val/clipfrac_avg", "share of action tokens whose clipped value has the larger error", "share",
            "0 with one update per batch"),
    _metric("critic/explained_variance", "1 − Var(R − V)/Var(R) over action tokens, V what the critic expected before "
            "the update and R what it trains towards; null where R does not vary", "",
            "rising towards 1; below 0 the critic is worse than a constant"),
    _metric("critic/value_mean", "mean of V over action tokens, before the update", "reward"),
    _metric("critic/target_mean", "mean of R over action tokens", "reward"),
    _metric("policy/entropy_avg", "mean full-vocabulary entropy of trained tokens in the forward passes of the "
            "updates", "nats", "falling slowly, not to 0"),
    _metric("optim/critic_lr", "learning rate of the critic's update", ""),
    _metric("optim/critic_grad_norm", "norm of the critic's gradient before clipping", ""),
)],

"Distillation": [replace(metric, requires="distillation") for metric in (
    _metric("distillation/reverse_kl", "mean of ln π − ln π_teacher over the sampled tokens, before the update: the "
            "reverse KL divergence of the student from the teacher (k1)", "nats", "falling towards 0"),
    _metric("distillation/reverse_kl_k3", "the same divergence as the mean of w − 1 − ln w, w = π_teacher/π: never "
            "negative and less noisy, but ruled by single tokens where the two are far apart", "nats",
            "falling towards 0"),
    _metric("distillation/divergence", "with `estimate = \"vocabulary\"` the mean of D_α between student and teacher "
            "over the trained tokens that have a teacher; null otherwise, as the other numbers here are with it",
            "nats", "falling towards 0"),
    _metric("distillation/taught_frac", "share of the completions with a reward that the teacher has scored; without a "
            "`context` all of them", "share", "not near 0"),
    _metric("distillation/teacher_logprob", "mean of ln π_teacher over the sampled tokens", "nats", "rising"),
    _metric("distillation/clamped_frac", "share of tokens whose difference was cut off at `clamp`", "share", "near 0"),
    _metric("distillation/advantage_std", "standard deviation over tokens of the teacher's advantage, its weight "
            "included"),
)],

"Reward": [
    _metric("mean_reward", "mean total reward over completions", "reward", "rising", wandb="train/rewards/mean_reward",
            tinker="env/all/reward/total reward/total", trl="reward objective/scores", telescope="reward_sum_mean"),
    _metric("reward_std", "standard deviation (population) of total reward over completions", "reward",
            telescope="reward_sum_std"),
    _metric("reward_min", "smallest total reward", "reward", telescope="reward_sum_min"),
    _metric("reward_max", "largest total reward", "reward", telescope="reward_sum_max"),
    _metric("reward_gini", "Gini coefficient of total reward within a group, sum of abs(x_i − x_j) / (2n²x̄) · "
            "n/(n − 1): the factor makes it 1 where one of the n completions has everything. Mean over the groups with "
            "at least two graded completions; equal rewards give 0, also when all are 0. Amounts are counted from 0; "
            "where rewards can be negative, from the `reward_min` that the reward or data source declares, or from the "
            "group's smallest where none is declared or it is not the smallest", "0 equal to 1 concentrated",
            telescope="reward_gini_mean"),
    *(
        _metric(f"reward_{name}", definition, unit)
        for name, definition, unit in (
            ("tie_eligible_groups", "groups with at least two rewards", "groups"),
            ("tie_groups", "of these: groups in which two rewards are equal", "groups"),
            ("tie_group_rate", "reward_tie_groups / reward_tie_eligible_groups", "share"),
            ("tie_pair_rate", "share of equal pairs among all pairs of rewards of a group, over all groups", "share"),
            ("uniform_groups", "groups of at least two rewards that are all equal", "groups"),
            ("uniform_group_rate", "reward_uniform_groups / reward_tie_eligible_groups", "share"),
            ("unique_fraction_mean", "mean over groups of different rewards / rewards", "share"),
        )
    ),
    _metric("reward_failed", "completions that could not be graded; they count as not correct and have no reward",
            "completions", "0"),
    _metric("rewards/<name>/mean", "mean of this reward component or sample metric over completions", "",
            tinker="env/all/<name>", telescope="reward_<name>_mean"),
    _metric("rewards/<name>/std", "standard deviation (population)", telescope="reward_<name>_std"),
    _metric("rewards/<name>/min", "smallest", telescope="reward_<name>_min"),
    _metric("rewards/<name>/max", "largest", telescope="reward_<name>_max"),
    _metric("rewards/<name>/gini", "mean over groups of the Gini coefficient, as in reward_gini; the smallest value is "
            "declared as `metrics_ranges.<name>.min`", "0 equal to 1 concentrated",
            telescope="reward_<name>_gini_mean"),
    _metric("correct_rate", "share of all sampled completions that are correct (by the rule in "
            "docs/rewards_environments.md, as everywhere)", "share", "rising",
            wandb="train/rewards/correct_rate", tinker="env/all/correct"),
    _metric("running_correct_rate", "share of correct completions over the whole run so far", "share",
            wandb="train/rewards/running_correct_rate"),
    _metric("env/all/format", "share of completions with a valid answer format, where one is defined", "share",
            "near 1"),
    _metric("env/all/by_group/frac_mixed", "groups whose rewards differ; only these give a gradient", "share",
            "above 0.2", trl="frac_reward_zero_std"),
    _metric("env/all/by_group/frac_all_good", "groups with all rewards equal and at least 0.5", "share",
            "below 0.5: above it the data is too easy"),
    _metric("env/all/by_group/frac_all_bad", "groups with all rewards equal and below 0.5", "share",
            "below 0.5: above it the data is too hard, or no answer matches the format"),
    _metric("env/all/total_episodes", "completions in the step", "completions"),
    _metric("env/all/ob_tokens_per_turn", "mean tokens that were read in a turn", "tokens"),
    _metric("env/all/ac_tokens_per_turn", "completion tokens in the step / turns in the step", "tokens",
            tinker="ac_tokens_per_turn"),
    _metric("env/all/total_turns", "turns in the step", "turns"),
    _metric("env/all/turns_per_episode", "mean turns of a completion; 1 in single-turn tasks", "turns"),
    _metric("env/all/episode_done_frac", "episodes that their environment ended, of all", "share", "near 1",
            requires="episodes"),
    *(_metric(f"env/all/ended_by/{reason}", f"episodes that ended because {why}", "share", healthy,
              requires="episodes") for reason, (why, healthy) in ENDED.items()),
    _metric("env/all/rewritten_frac", "turns before which the policy read the whole conversation anew", "share",
            requires="episodes"),
    _metric("env/all/total_ac_tokens", "completion tokens in the step", "tokens"),
    _metric("env/all/total_ob_tokens", "prompt tokens in the step, once per completion", "tokens"),
    _metric("env/<tag>/...", "`reward/total`, `correct`, `format`, `ac_tokens_per_turn`, `total_episodes`, "
            "`by_group/...` and every reward part for the completions with this tag, as soon as some tag was a "
            "strict subset of a step", "as above"),
],
"Advantage": _spread("advantage_{}", "advantage over the completions that trained", "reward"),
"Policy": [
    _metric("entropy", "mean full-vocabulary entropy over the tokens of all completions, of the distribution sampled "
            "from; null where the engine cannot give it", "nats", "falling slowly, not to 0", trl="policy/entropy_avg"),
    _metric("entropy_sampled", "minus the mean sampler logprob over the tokens of all completions", "nats",
            "close to entropy", tinker="optim/entropy"),
    _metric("kl_sample_train_v1", "mean of d = sampler logprob − trainer logprob over the tokens that the trainer ran, "
            "before the update: those that trained, or, where nothing trained, those of the first completions of the "
            "step (4, one of each group first), which it then scores by a forward pass; null with a backend of your "
            "own that does not report it", "nats", "near 0", tinker="optim/kl_sample_train_v1"),
    _metric("kl_sample_train_v2", "half the mean of d² over the same tokens, before the update", "nats²",
            "below 1e-6 in float32, below 1e-3 in bfloat16: more means that sampler and trainer disagree",
            tinker="optim/kl_sample_train_v2"),
    _metric("kl_divergence_inference", "mean of exp(−d) − 1 + d over the same tokens: k3 of the current policy against "
            "the rollout policy", "nats", "near 0 on-policy"),
    _metric("kl", "k3 to the frozen base over the same tokens; null unless `kl_coef` > 0 or `log_kl` is on", "nats",
            "rising slowly"),
    _metric("objective/entropy", "mean over all completions of Σ(−ln p) over their tokens, p the sampler's: per "
            "sequence, as in TRL's PPO (`entropy` and `entropy_sampled` are per token)", "nats"),
    _metric("objective/kl", "mean over completions of Σ KL to the base over their tokens: per sequence, as in TRL's "
            "PPO (`kl` is per token). Estimated as `kl_in_reward` does, else by k1. With a critic before the update "
            "and over all completions (without groups that are too old, where there are others); else in the update, "
            "over the completions that the trainer ran, and null unless `kl_coef` > 0 or `log_kl` is on", "nats",
            "rising slowly"),
    _metric("objective/non_score_reward", "with `kl_in_reward` −kl_coef · objective/kl; else −kl_coef · Σ of k3 to the "
            "base over a completion, mean over the completions that the trainer ran; 0 without `kl_coef`", "reward"),
    _metric("objective/rlhf_reward", "mean_reward + objective/non_score_reward", "reward"),
    _metric("policy/approxkl_avg", "half the mean squared log importance ratio over trained tokens; with several "
            "updates of a batch this and what follows compare with the trainer itself before the first of them, over "
            "the tokens of all of them", "nats²"),
    _metric("policy/clipfrac_avg", "share of trained tokens whose ratio was clipped", "share", "below 0.2",
            retrain="clip_fraction"),
    _metric("val/ratio", "mean importance ratio over trained tokens", "", "1 on-policy"),
    _metric("val/ratio_var", "variance of the importance ratio over trained tokens", "", "near 0 on-policy"),
    _metric("clip_ratio/low_mean", "share of trained tokens clipped from below (negative advantage)", "share"),
    _metric("clip_ratio/low_min", "the same in the completion where it is smallest", "share"),
    _metric("clip_ratio/high_mean", "share of trained tokens clipped from above (positive advantage)", "share"),
    _metric("clip_ratio/high_max", "the same in the completion where it is largest", "share"),
    _metric("clip_ratio/region_mean", "both sides together", "share", "0 with one update per batch", trl="clip_ratio"),
    _metric("rejected_tokens_frac", "share of all completions' tokens that were left out of the policy loss before the "
            "update: by `rejection`, by `m2po` (of several updates the mean, over completions with signal), and with "
            "`rejection_denominator` = kept by a correction's mask", "share", "below 0.1", requires="rejection"),
    _metric("rejected_sequences_frac", "share of completions of which no token was kept", "share", "below 0.1",
            requires="rejection"),
    _metric("off_policy_steps_mean", "mean age of the rollouts: how many steps the weights that drew the oldest token "
            "of each are behind those that train on it", "steps", "0 when synchronous"),
    _metric("off_policy_steps_max", "the age of the oldest", "steps", "0 when synchronous"),
],
"Token credit": [
    _metric("uncertainty_kind", "which uncertainty weighs the tokens", wandb="train/uncertainty_kind"),
    *(
        _metric(f"{part}_{kind}_{stat}", f"{word} {'uncertainty' if kind == 'entropy' else 'surprisal'} of {tokens} "
                f"tokens before pooling{mirror}", "nats", wandb=f"train/{kind}/{part}_{stat}")
        for kind, mirror in (
            ("surprisal", ""),
            ("entropy", "; repeats the surprisal unless the kind is shannon_entropy"),
        )
        for part, tokens in (("exec", "execution"), ("plan", "planning"))
        for stat, word in (("mean", "mean"), ("var", "variance of the"))
    ),
    _metric("planning_fraction", "share of sampled tokens that are marked as planning", "share"),
    *(
        _metric(f"{part}_weight_{stat}", f"{word} weight of {tokens} tokens, after pooling", "", requires="weights")
        for part, tokens in (("exec", "execution"), ("plan", "planning"))
        for stat, word in (("mean", "mean GTPO"), ("var", "variance of the GTPO"))
    ),
    _metric("exec_weight_var_unpooled", "that variance without pooling", "", requires="pooling"),
    _metric("plan_weight_change", "largest change of a planning token's weight by pooling", "",
            "rounding: pooling keeps every planning weight", requires="pooling"),
    _metric("sepa_lambda", "pooling strength λ of SEPA; 0 in other transform modes", "0 to 1",
            wandb="train/sepa_lambda"),
    _metric("sepa_gate_open", "whether the correct-rate gate of SEPA has opened; false in other transform modes",
            "boolean", wandb="train/sepa_gate_open"),
],
"Length": [
    _metric("max_token_hit_rate", "share of completions that ended by length", "share", "below 0.1",
            wandb="train/max_token_hit_rate", trl="completions/clipped_ratio", telescope="stop_reason_length_pct"),
    _metric("completions/mean_length", "mean tokens of a completion", "tokens", telescope="length_completion_mean"),
    _metric("completions/std_length", "standard deviation (population) of tokens of a completion", "tokens",
            telescope="length_completion_std"),
    _metric("completions/min_length", "fewest tokens", "tokens", telescope="length_completion_min"),
    _metric("completions/max_length", "most tokens", "tokens", telescope="length_completion_max"),
    *(
        _metric(f"completions/{stat}_terminated_length",
                f"{word} tokens over completions that ended by themselves; null if none did", "tokens")
        for stat, word in (("mean", "mean"), ("min", "fewest"), ("max", "most"))
    ),
    _metric("val/num_eos_tokens", "completions that ended with any of the model's end tokens", "completions"),
    *_spread("length_prompt_{}", "tokens of the prompt, over completions", "tokens"),
    *_spread("length_sum_{}", "tokens of prompt and completion together", "tokens"),
    _metric("group_length_gini_mean", "mean over groups of the Gini coefficient of completion length, as in "
            "reward_gini with its factor n/(n − 1)", "0 equal to 1 concentrated"),
    _metric("group_length_max_median_ratio_mean", "mean over groups of longest / median completion: how long a group "
            "waits for its straggler", "", "below 2"),
],
"Groups that did not train": [
    _metric("discarded_count", "groups that did not train", "groups"),
    _metric("discarded_zero_advantage_pct", "groups dropped because all their advantages are 0", "% of all groups",
            "below 80"),
    _metric("discarded_no_reward_pct", "groups dropped because none of their completions could be graded",
            "% of all groups", "0"),
    _metric("discarded_max_async_pct", "groups dropped because they were too old", "% of all groups",
            "0 when synchronous"),
    _metric("discarded_zero_advantage_all_zero_pct", "of the zero-advantage groups: all rewards 0", "%"),
    _metric("discarded_zero_advantage_all_positive_pct", "of the zero-advantage groups: all rewards above 0", "%"),
    _metric("discarded_zero_advantage_mean_reward", "mean reward in the zero-advantage groups", "reward"),
    *_spread("discarded_reward_{}", "total reward in the discarded groups", "reward", alias="discarded_reward_sum_{}"),
    *_spread("discarded_length_prompt_{}", "prompt tokens in the discarded groups", "tokens"),
    *_spread("discarded_length_completion_{}", "completion tokens in the discarded groups", "tokens"),
    *_spread("discarded_length_sum_{}", "prompt and completion tokens in the discarded groups", "tokens"),
    _metric("discarded_max_token_hit_rate", "share of their completions that ended by length", "share",
            telescope="discarded_stop_reason_length_pct"),
    _metric("discarded_group_length_gini_mean", "group_length_gini_mean of the discarded groups",
            "0 equal to 1 concentrated"),
    _metric("discarded_group_length_max_median_ratio_mean", "the straggler ratio of the discarded groups"),
],
"Prompts drawn again": [replace(metric, requires="dynamic") for metric in (
    _metric("dynamic/rounds", "rounds of further prompts that the step drew", "rounds"),
    _metric("dynamic/drawn", "groups that were sampled, those of the first round included", "groups"),
    _metric("dynamic/unfilled", "groups of the batch whose rewards are all alike: no others were found", "groups", "0"),
    *(_metric(f"dynamic/dropped_{reason}", f"groups that others were drawn in place of: {words}", "groups")
      for reason, words in (("all_right", "all their answers are right"), ("all_wrong", "all are wrong"),
                            ("alike", "all have the same reward, some are right"),
                            ("ungraded", "none could be graded"))),
    _metric("dynamic/dropped_tokens", "prompt and completion tokens of these groups, which `num_tokens` counts too",
            "tokens"),
    _metric("dynamic/correct_rate", "share of right answers in the first round; `correct_rate` is that of the batch, "
            "which was chosen", "share", "rising"),
)],
"Tools": [
    _metric("tools/total_tool_calls", "tool calls in the step", "calls", requires="tools"),
    _metric("tools/tool_success_rate", "share of tool calls that returned without an error", "share", requires="tools"),
    _metric("tools/tool_errors", "tool calls that failed, malformed ones and unknown tools among them", "calls",
            requires="tools"),
    _metric("tools/tool_time", "in tools, over all processes", "s", requires="tools"),
],
"Programs": [replace(metric, requires="unit_tests") for metric in (
    _metric("tests/passed", "share of passed tests of a program, mean over programs", "share", "rising"),
    _metric("tests/timeout", "share of programs that took longer than `timeout_s`", "share", "near 0"),
    _metric("tests/crash", "share of programs that ended early, exceeded another limit, or raised an error that no "
            "test expected", "share"),
    _metric("tests/syntax_error", "share of answers that are not valid Python", "share", "falling to 0"),
)],
"Back pressure": [
    _metric("bp_action", "hold, increase or throttle; off without back pressure", wandb="train/backpressure/action"),
    _metric("bp_regime", "warmup, optimal, retrograde, memory_bound or compute_bound; off without back pressure",
            wandb="train/backpressure/regime"),
    _metric("bp_p_star", "load, of those allowed, with the highest throughput that the fit predicts; like σ, κ and "
            "utilization null before there are 4 measurements at 3 loads. The load follows it once κ is certainly "
            "above 0 and loads on both sides of it were measured", "prompts", wandb="train/backpressure/p_star"),
    _metric("bp_sigma", "contention σ of the Universal Scalability Law", wandb="train/backpressure/sigma"),
    _metric("bp_kappa", "coherency κ of the Universal Scalability Law", wandb="train/backpressure/kappa"),
    _metric("bp_utilization", "throughput / best predicted throughput", "share of peak",
            wandb="train/backpressure/utilization"),
    _metric("bp_throughput", "measured decoding throughput", "tokens/s", wandb="train/backpressure/throughput"),
    _metric("bp_warmup", "still collecting loads for the fit", "boolean", wandb="train/backpressure/warmup"),
],
"Time and speed": [
    _metric("step_time_s", "wall clock of the whole step", "s", wandb="train/step_time_s",
            tinker="time/total", telescope="timing_step_total", trl="step_time"),
    _metric("timing_wall_clock", "seconds since the run's first step began, pauses between processes included", "s"),
    _metric("time/rollout", "sampling", "s", retrain="sample_time_s"),
    _metric("time/score", "grading", "s"),
    _metric("time/credit", "advantages and token credit", "s"),
    _metric("time/update", "forward, backward and optimizer", "s", retrain="train_time_s"),
    _metric("time/eval", "held-out evaluation", "s"),
    _metric("time/checkpoint", "saving", "s"),
    _metric("time/record", "writing records", "s"),
    _metric("time/cohort", "waiting for the credit and update of the other runs of a cohort", "s", "0 in a single run"),
    _metric("time/other", "the rest, so that the parts add up to step_time_s", "s", "below 2 % of the step"),
    _metric("timing_waiting_for_data", "seconds in which the trainer waited for graded rollouts: rollout + score in a "
            "synchronous loop", "s"),
    _metric("timing_step_active", "seconds of the step in which this run's trainer did not wait: step_time_s without "
            "timing_waiting_for_data and time/cohort", "s"),
    *(_metric(f"timing_{part}_total", words, "s") for part, words in TIMED_PARTS.items()),
    _metric("timing_microbatches", "micro-batches of the update, or of the forward pass where nothing trained",
            "micro-batches"),
    *(
        _metric(f"timing_{part}_microbatch_mean", f"timing_{part}_total / timing_microbatches", "s")
        for part in TIMED_PARTS
    ),
    _metric("perf/completion_tokens_per_s", "completion tokens / step_time_s", "tokens/s"),
    _metric("perf/tokens_per_s", "prompt and completion tokens / step_time_s", "tokens/s",
            telescope="tokens_per_second", retrain="tokens_per_second"),
    _metric("perf/episodes_per_s", "completions / step_time_s", "completions/s", trl="eps"),
    _metric("queue_depth", "batches of later steps that were sampled and graded when this one was taken", "batches",
            "0: the trainer waits for rollouts, max_off_policy_steps − 1 and more: they wait for it", requires="ahead"),
    _metric("time/overlap", "seconds of the step, once its rollouts were there, in which those of later steps were "
            "sampled; not one of the parts that add up to step_time_s", "s", requires="ahead"),
    _metric("perf/sampler_tokens_per_s", "completion tokens of the step / the seconds in which they were sampled",
            "tokens/s", requires="ahead"),
    _metric("perf/trainer_tokens_per_s", "prompt and completion tokens of the step / time/update", "tokens/s",
            requires="ahead"),
    _metric("perf/peak_memory_gib", "most memory in use so far: of the GPU's allocator, on the CPU of the process",
            "GiB"),
],
"Held-out evaluation": [replace(metric, requires="evaluation") for metric in (
    _metric("eval/<name>/step", "optimizer steps done when the evaluation ran", "steps"),
    _metric("eval/<name>/correct_rate", "share of correct answers; null on steps without an evaluation, and where no "
            "answer could be graded", "share", "rising"),
    _metric("eval/<name>/ci_low", "lower end of the 95 % interval of correct_rate, clustered by problem", "share"),
    _metric("eval/<name>/ci_high", "upper end of that interval", "share"),
    _metric("eval/<name>/reward_mean", "mean total reward", "reward"),
    _metric("eval/<name>/audit", "mean score of the audit, which never trains (with `[audit]`)", "reward", "rising"),
    _metric("eval/<name>/audit_failed", "answers that the audit could not grade (with `[audit]`)", "answers", "0"),
    _metric("eval/<name>/problems", "problems evaluated", "problems"),
    _metric("eval/<name>/failed", "answers that could not be graded; they count as not correct", "answers", "0"),
    _metric("eval/<name>/mean_length", "mean tokens of an answer", "tokens"),
    _metric("eval/<name>/max_token_hit_rate", "share of answers that ended by length", "share", "below 0.1"),
    _metric("eval/<name>/pass@<k>", "mean over problems of 1 − C(n−c, k)/C(n, k) with c correct ones of n samples: the "
            "probability that one of k samples is correct; k = 1, 2, 4, … up to n, and n; pass@1 is correct_rate",
            "share", "rising"),
    _metric("eval/<name>/pass@<k>/ci_low", "lower end of its 95 % interval over problems, for k > 1", "share"),
    _metric("eval/<name>/pass@<k>/ci_high", "upper end of that interval", "share"),
    _metric("eval/<name>/avg@<k>", "mean over problems of the share of correct ones among all k = n samples", "share",
            "rising"),
    _metric("eval/<name>/maj@<k>", "mean over problems of whether the most frequent answer of k samples is correct, "
            "over all disjoint blocks of k; tied leaders share, no answer is no vote; k = 4, 8, … up to n, and n "
            "from 3", "share", "rising"),
    _metric("eval/<name>/maj@<k>/ci_low", "lower end of its 95 % interval over problems", "share"),
    _metric("eval/<name>/maj@<k>/ci_high", "upper end of that interval", "share"),
    _metric("eval/<name>/<tag>/correct_rate", "share of correct answers among the problems with this tag", "share"),
    _metric("eval/<name>/<tag>/ci_low", "lower end of its 95 % interval, clustered by problem", "share"),
    _metric("eval/<name>/<tag>/ci_high", "upper end of that interval", "share"),
    _metric("eval/<name>/<tag>/pass@<k>", "pass@k of the problems with this tag, for k = n", "share"),
    _metric("eval/<name>/<tag>/maj@<k>", "maj@k of the problems with this tag, for k = n", "share"),
)],
# Only in ``warmup/<hash>/metrics.jsonl``, where ``step`` counts finished steps of the warm-up; row 0 is the base's
"Supervised warm-up": [replace(metric, requires="warmup") for metric in (
    _metric("sft/loss", "mean −log π of the completion tokens of the batch, before the step's update", "nats",
            "falling"),
    _metric("sft/token_accuracy", "share of completion tokens of the batch to which no other token is preferred",
            "share", "rising"),
    _metric("sft/heldout_loss", "sft/loss over `eval_source`, after the update; at the start, after every tenth of the "
            "steps and at the end, else null", "nats", "falling; rising is overfitting"),
    _metric("sft/heldout_token_accuracy", "sft/token_accuracy over `eval_source`", "share", "rising"),
    _metric("sft/lr", "learning rate: `[warmup] lr` with the schedule of `[optimizer]`", ""),
    _metric("sft/grad_norm", "norm of the gradient before clipping to `grad_clip_norm`", ""),
    _metric("sft/epoch", "passes over the examples so far", "passes"),
    _metric("sft/completion_tokens", "tokens of the batch that trained", "tokens"),
    _metric("sft/tokens", "tokens of the batch, prompts included", "tokens"),
    _metric("sft/step_time_s", "wall clock of the step, without the held-out loss", "s"),
    _metric("sft/tokens_per_s", "sft/tokens / sft/step_time_s", "tokens/s"),
)],
}
# fmt: on

METRICS: tuple[Metric, ...] = tuple(metric for metrics in SECTIONS.values() for metric in metrics)
WARMUP_METRICS = SECTIONS["Supervised warm-up"]
BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}


def wandb_name(key: str) -> str:
    metric = BY_KEY.get(key)
    return metric.wandb if metric and metric.wandb else key
