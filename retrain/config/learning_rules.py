"""Check keys of several sections about learning: advantages, credit, losses, critic, teacher and steps.

``retrain.config.rules`` defines what a rule is.
"""

from __future__ import annotations

from collections.abc import Iterator

from retrain.config.base import ConfigIssue, is_plugin
from retrain.config.evaluation import CUTS
from retrain.config.modes import Need, advantage_of, credit_of
from retrain.config.root import Config, differs


def overlong_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report `overlong_tokens` above `max_tokens`, in episodes of several turns, or with advantages that are defined
    only for rewards in [0, 1]."""
    soft, longest, mode = config.reward.overlong_tokens, config.training.max_tokens, config.algorithm.advantage_mode
    if not soft:
        return
    if soft > longest:
        message, fix = f"is {soft}, more than max_tokens = {longest}", f"overlong_tokens = {max(1, longest // 5)}"
        yield ConfigIssue(("reward.overlong_tokens", "training.max_tokens"), message, fix)
    if config.environment.turns != 1:
        message = "is for single answers, and episodes may have several turns"
        yield ConfigIssue(("reward.overlong_tokens", "environment.max_turns"), message)
    if advantage_of(mode).unit_rewards:
        message = f'makes rewards below 0, for which advantage_mode = "{mode}" is not defined'
        yield ConfigIssue(("reward.overlong_tokens", "algorithm.advantage_mode"), message, 'advantage_mode = "grpo"')


def off_policy_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report stale rollouts without a declared correction or with a plug-in backend, and `swap = "in_flight"` if it has
    no effect."""
    steps, algorithm = config.training.max_off_policy_steps, config.algorithm
    if config.inference.swap == "in_flight" and (steps == 0 or config.environment.turns == 1):
        message = "no rollout is behind" if steps == 0 else "every episode has one turn"
        keys = ("inference.swap", "environment.max_turns" if steps else "training.max_off_policy_steps")
        yield ConfigIssue(keys, f'is "in_flight", which has no effect: {message}', 'swap = "between"')
    if steps == 0:
        return
    if is_plugin(config.backend.backend):
        message = f'is {steps}, and backend = "{config.backend.backend}" samples with the one version of its weights'
        yield ConfigIssue(("training.max_off_policy_steps", "backend.backend"), message, "max_off_policy_steps = 0")
    if algorithm.correction is None and algorithm.weight is None and not algorithm.from_sampler:
        message = f"is {steps}, and no correction of the loss is set"
        fix = 'correction = "tis", "icepop" or "decoupled", loss = "dppo", "vespo" or "m2po", or correction = "none"'
        yield ConfigIssue(("training.max_off_policy_steps", "algorithm.correction"), message, fix)


def anneal_rules(config: Config) -> Iterator[ConfigIssue]:
    step_before, rank_before = 0, config.model.lora_rank
    for step, rank in config.lora.anneal:
        if step <= step_before or rank >= rank_before:
            message = f"has the stage [{step}, {rank}] after rank {rank_before} at step {step_before}"
            fix = f"anneal = [[{step_before + 10}, {max(1, rank_before // 2)}]]"
            message += ": steps have to grow and ranks to fall"
            yield ConfigIssue(("lora.anneal", "model.lora_rank"), message, fix)
            return
        step_before, rank_before = step, rank
    if config.lora.anneal and step_before >= (steps := config.training.max_steps):
        message = f"has a stage at step {step_before}, and max_steps = {steps}: it has no effect"
        yield ConfigIssue(("lora.anneal", "training.max_steps"), message, f"max_steps = {2 * step_before}")
    if config.lora.anneal and is_plugin(config.backend.backend):
        message = f'has no effect with backend = "{config.backend.backend}": its weights are its own'
        yield ConfigIssue(("lora.anneal", "backend.backend"), message)


def group_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report group sizes that the advantage cannot use, and dynamic sampling where groups with equal rewards train."""
    size, algorithm, key = config.training.group_size, config.algorithm, "training.dynamic_sampling"
    mode, keys = algorithm.advantage_mode, ("training.group_size", "algorithm.advantage_mode")
    from_rewards = not config.distillation.teacher_only
    if from_rewards and size == 1 and Need.GROUP in advantage_of(mode).needs:
        message = "is 1: advantages compare the completions of a group, and with one of them all are 0"
        yield ConfigIssue(keys, message, "group_size = 8")
    if from_rewards and size == 2 and mode == "maxrl":
        message = "is 2: with two completions maxrl equals rloo in expectation"
        yield ConfigIssue(keys, message, "group_size = 8", warning=True)
    if not config.training.dynamic_sampling:
        return
    if size == 1:
        message = "has no effect: the rewards of a group of one answer are never different"
        yield ConfigIssue((key, "training.group_size"), message, "group_size = 8")
    if algorithm.critic:
        message = "drops groups with equal rewards, on which a critic trains too"
        yield ConfigIssue((key, "algorithm.advantage_mode"), message)
    if algorithm.turn_credit != "episode":
        message = f'judges whole episodes, and turn_credit = "{algorithm.turn_credit}" compares their turns'
        yield ConfigIssue((key, "algorithm.turn_credit"), message, 'turn_credit = "episode"')


def update_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report update settings that a plug-in backend ignores, and `rejection_denominator = "kept"` if masks change
    between the updates of a step."""
    if config.masks_per_update and config.algorithm.rejection_denominator == "kept":
        message = 'is "kept", and loss = "m2po" chooses what it leaves out before each of the step\'s several updates'
        fix = 'rejection_denominator = "all"'
        yield ConfigIssue(("algorithm.rejection_denominator", "algorithm.loss"), message, fix)
    backend = config.backend.backend
    if is_plugin(backend) and config.training.several_updates:
        several = "num_iterations" if config.training.num_iterations > 1 else "minibatches"
        message = f'has no effect with backend = "{backend}", which gets whole batches and decides how often it updates'
        yield ConfigIssue((f"training.{several}", "backend.backend"), message)


def critic_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report settings that conflict with a critic, which gives every token its own advantage."""
    algorithm, critic, mode = config.algorithm, config.critic, config.algorithm.transform_mode
    if not algorithm.critic:
        return
    named = ("algorithm.advantage_mode", "algorithm.transform_mode")
    if not is_plugin(mode) and credit_of(mode).own_advantage:
        message = 'makes its own advantages from the rewards, so those of advantage_mode = "gae" would have no effect'
        yield ConfigIssue(named[::-1], message, 'transform_mode = "none"')
    if algorithm.turn_credit != "episode":
        message = 'has no effect with advantage_mode = "gae": the last token of a turn has its reward'
        yield ConfigIssue(("algorithm.turn_credit", named[0]), message, 'turn_credit = "episode"')
    if is_plugin(config.backend.backend):
        message = f'is "gae", which backend = "{config.backend.backend}" has no critic for'
        yield ConfigIssue((named[0], "backend.backend"), message, 'advantage_mode = "grpo"')
    if critic.lam_policy is not None and critic.lam_value is not None and differs(config, "critic.lam"):
        message = "has no effect with lam_policy and lam_value"
        yield ConfigIssue(("critic.lam", "critic.lam_policy", "critic.lam_value"), message)
    if not algorithm.discard_group_zero_advantage:
        message = "has no effect with a critic: every completion with a reward trains"
        yield ConfigIssue(("algorithm.discard_group_zero_advantage", named[0]), message)
    clip, moves = critic.cliprange_value, config.training.several_updates or config.lora.dropout
    if clip and differs(config, "critic.cliprange_value") and not moves:
        message = f"is {clip:g}, but values move from the second update of a batch on, and it has one"
        yield ConfigIssue(("critic.cliprange_value", "training.num_iterations"), message, "num_iterations = 4")
    if critic.warmup_steps >= (steps := config.training.max_steps) > 0:
        message = f"is {critic.warmup_steps} of max_steps = {steps}: the policy would never train"
        yield ConfigIssue(("critic.warmup_steps", "training.max_steps"), message, f"warmup_steps = {steps // 10}")


def distillation_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report settings that conflict with a teacher, or have no effect if only the teacher gives advantages."""
    distillation, algorithm, training = config.distillation, config.algorithm, config.training
    if not distillation.active:
        return
    teacher = "distillation.teacher"
    if is_plugin(backend := config.backend.backend):
        message = f'is "{distillation.teacher}", and backend = "{backend}" gives no log-probabilities of sampled tokens'
        yield ConfigIssue((teacher, "backend.backend"), message)
    if training.dynamic_sampling:
        message = "drops groups with equal rewards, on which distillation trains too"
        yield ConfigIssue(("training.dynamic_sampling", teacher), message)
    if not algorithm.discard_group_zero_advantage:
        message = "has no effect with a teacher: every completion with a reward trains"
        yield ConfigIssue(("algorithm.discard_group_zero_advantage", teacher), message)
    if distillation.student == "sampler" and (training.max_off_policy_steps or config.inference.served):
        behind = "rollouts are behind the policy" if training.max_off_policy_steps else "servers sample"
        message = f'is "sampler", and {behind}: the teacher is compared with another policy than the one that trains'
        keys = ("distillation.student", "training.max_off_policy_steps", "inference.engine")
        yield ConfigIssue(keys, message, 'student = "trainer"', warning=True)
    if distillation.url is not None:
        yield from _served_teacher_issues(config)
    if distillation.full_vocabulary:
        yield from _vocabulary_issues(config)
    if distillation.context != "none" and (config.environment.hosted or config.environment.turns != 1):
        message = f'is "{distillation.context}", which only prompts of single answers can contain, and episodes may '
        message += "have several turns"
        yield ConfigIssue(("distillation.context", "environment.max_turns"), message, 'context = "none"')
    if distillation.context == "sibling" and training.group_size == 1:
        message = 'is "sibling", and with group_size = 1 no completion has one'
        yield ConfigIssue(("distillation.context", "training.group_size"), message, "group_size = 8")
    if distillation.teacher_only:
        yield from _unrewarded(config)


def _served_teacher_issues(config: Config) -> Iterator[ConfigIssue]:
    """Report truncated or tempered sampling: servers return a teacher's log-probabilities at temperature 1 only."""
    for key in ("temperature", *CUTS):
        if differs(config, f"training.{key}"):
            message = f"is {getattr(config.training, key):g}, and a server gives a teacher's log-probabilities "
            message += "untruncated and at temperature 1"
            fix = f'remove the line, or give the teacher\'s directory in place of url = "{config.distillation.url}"'
            yield ConfigIssue((f"training.{key}", "distillation.url"), message, fix)


def _vocabulary_issues(config: Config) -> Iterator[ConfigIssue]:
    """Report what full-vocabulary distillation does not support: a teacher on a server, sharding, truncated
    sampling."""
    estimate, fault = "distillation.estimate", 'is "vocabulary"'
    if config.distillation.url is not None:
        message = f"{fault}, and a server gives log-probabilities of sampled tokens only"
        yield ConfigIssue((estimate, "distillation.url"), message, 'estimate = "sampled"')
    if config.backend.shard != "none":
        message = f'{fault}, and with shard = "{config.backend.shard}" ranks have no teacher'
        yield ConfigIssue((estimate, "backend.shard"), message, 'estimate = "sampled"')
    for key in CUTS:
        if differs(config, f"training.{key}"):
            message = f"{fault}, and {key} leaves tokens out of what is sampled from"
            yield ConfigIssue((estimate, f"training.{key}"), message, 'estimate = "sampled"')


def _unrewarded(config: Config) -> Iterator[ConfigIssue]:
    algorithm, mode, weight = config.algorithm, config.algorithm.transform_mode, "distillation.reward_weight"
    if algorithm.critic:
        message = 'is "gae", and with reward_weight = 0 its critic trains for nothing'
        yield ConfigIssue(("algorithm.advantage_mode", weight), message, 'advantage_mode = "grpo"')
    if mode not in ("none", "entropy_mask"):
        message = f'is "{mode}", which has no effect with reward_weight = 0'
        yield ConfigIssue(("algorithm.transform_mode", weight), message, 'transform_mode = "none"')
    if algorithm.turn_credit != "episode":
        message = f'is "{algorithm.turn_credit}", which has no effect with reward_weight = 0'
        yield ConfigIssue(("algorithm.turn_credit", weight), message, 'turn_credit = "episode"')


def schedule_rules(config: Config) -> Iterator[ConfigIssue]:
    steps, warmup = config.training.max_steps, config.optimizer.warmup_steps
    if warmup >= steps > 0:
        message = f"is {warmup}: with max_steps = {steps} the warm-up never ends"
        yield ConfigIssue(("optimizer.warmup_steps", "training.max_steps"), message, f"warmup_steps = {steps // 10}")
    if config.training.eval_every and not config.evaluation.problems:
        message, fix = "has no effect with [evaluation] problems = 0", "remove the line, or problems = 128"
        yield ConfigIssue(("training.eval_every", "evaluation.problems"), message, fix)


def _flat_steps(config: Config) -> int:
    """Return the number of first steps in which λ is 0; the gate opens after one batch at the earliest."""
    return 1 + config.sepa.delay_steps + (config.sepa.correct_rate_gate > 0)


def lambda_stays_zero(config: Config) -> bool:
    """Return whether a gtpo_sepa run is too short for λ to rise above 0, so that it equals gtpo."""
    if not credit_of(config.algorithm.transform_mode).pooled:
        return False
    sepa, steps = config.sepa, config.training.max_steps
    observed = steps - 1 - sepa.warmup_steps  # updates of the running variance after its warm-up
    falls = sepa.schedule == "auto" and observed >= 0 and sepa.ema_decay**observed < sepa.threshold
    return steps <= _flat_steps(config) and not (falls and steps > sepa.delay_steps)


def sepa_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report SEPA whose λ stays 0 in the whole run, so that it equals GTPO. This is an error if λ would stay 0 in a run
    of any length, and a warning if the run is only short, as in a first try of a file."""
    if not credit_of(config.algorithm.transform_mode).pooled or not config.training.max_steps:
        return
    sepa, steps, flat = config.sepa, config.training.max_steps, _flat_steps(config)
    length = "training.max_steps" if config.campaign.max_steps is None else "campaign.max_steps"
    mode = "algorithm.transform_mode"
    if lambda_stays_zero(config):
        message = f"is {sepa.delay_steps} and max_steps is {steps}: λ is 0 for the whole run, which makes gtpo_sepa "
        message += "plain gtpo; enough to see it run, no test of SEPA, which takes"
        shorter = f"delay_steps = {steps // 10}, or " if flat - sepa.delay_steps + steps // 10 < steps else ""
        fix = f"{shorter}max_steps = {flat + max(sepa.steps, 1)}"
        yield ConfigIssue(("sepa.delay_steps", length, mode), message, fix, warning=True)
    if sepa.steps == 0 and sepa.schedule == "linear":
        message = "is 0: without a ramp λ would be 0 for the whole run, which makes gtpo_sepa plain gtpo"
        yield ConfigIssue(("sepa.steps", "sepa.schedule", mode), message, f"steps = {max(1, steps - flat)}")
    elif not lambda_stays_zero(config) and steps < flat + sepa.steps and sepa.schedule == "linear":
        message = f"is {sepa.steps}: in {steps} steps λ gets to {(steps - flat) / sepa.steps:.2f} at most"
        keys = ("sepa.steps", "sepa.delay_steps", length, mode)
        yield ConfigIssue(keys, message, f"steps = {steps - flat}", warning=True)


def maxrl_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report rewards outside [0, 1] with advantages that are defined for [0, 1] only, such as MaxRL."""
    reward, mode = config.reward, config.algorithm.advantage_mode
    key, fix = "algorithm.advantage_mode", 'advantage_mode = "grpo"'
    if not advantage_of(mode).unit_rewards:
        return
    if reward.type == "reward_model":
        message = f'is "reward_model", whose scores may lie outside [0, 1], for which {mode} is not defined'
        yield ConfigIssue(("reward.type", key), message, fix, warning=True)
    for table, grader in config.graders[:-1]:  # without the audit, which is never trained on
        if grader.type != "rubric" or grader.rubric != "explicit":
            continue
        if any(criterion.weight_number < 0 for criterion in grader.criteria):
            message = f"has negative weights: totals can lie below 0, for which {mode} is not defined"
            yield ConfigIssue((f"{table}.criteria", key), message, fix)
        elif grader.rubric_column is not None:
            message = f"may hold negative weights: totals would lie below 0, for which {mode} is not defined"
            yield ConfigIssue((f"{table}.rubric_column", key), message, fix, warning=True)
    parts = reward.components if reward.type == "weighted" else []
    total = sum(part.weight for part in parts)
    if total > 1 + 1e-9 or any(part.weight < 0 or part.offset != 0 for part in parts):
        message = f"can give totals outside [0, 1], for which {mode} is not defined"
        fix += ", or weights that add up to at most 1, without offset"
        yield ConfigIssue(("reward.components", key), message, fix)
