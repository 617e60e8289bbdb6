"""Check keys of several sections about learning: advantages, credit, losses, critic, teacher and steps.

``retrain.config.rules`` defines what a rule is.
"""

from __future__ import annotations

from collections.abc import Iterator

from retrain.config.base import ConfigIssue, is_plugin
from retrain.config.evaluation import CUTS
from retrain.config.modes import Need, advantage_of, credit_of
from retrain.config.root import Config


def overlong_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report a length penalty above the token limit, in episodes of several turns, or with unit-reward advantages."""
    soft, longest, mode = config.reward.overlong_tokens, config.training.max_tokens, config.algorithm.advantage_mode
    if not soft:
        return
    if soft > longest:
        keys = ("reward.overlong_tokens", "training.max_tokens")
        yield ConfigIssue(
            keys, f"is {soft}, more than max_tokens = {longest}", f"overlong_tokens = {max(1, longest // 5)}"
        )
    if config.environment.turns != 1:
        keys = ("reward.overlong_tokens", "environment.max_turns")
        yield ConfigIssue(keys, "is for single answers, and episodes may have several turns", "remove the line")
    if advantage_of(mode).unit_rewards:
        keys = ("reward.overlong_tokens", "algorithm.advantage_mode")
        message = f'makes rewards below 0, for which advantage_mode = "{mode}" is not defined'
        yield ConfigIssue(keys, message, 'advantage_mode = "grpo"')


def off_policy_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report stale rollouts whose correction is not declared."""
    steps, algorithm = config.training.max_off_policy_steps, config.algorithm
    if config.inference.swap == "in_flight" and (steps == 0 or config.environment.turns == 1):
        message = "no rollout is behind" if steps == 0 else "every episode has one turn"
        keys = ("inference.swap", "environment.max_turns" if steps else "training.max_off_policy_steps")
        yield ConfigIssue(keys, f'is "in_flight", which has no effect: {message}', 'swap = "between"')
    if steps == 0:
        return
    if is_plugin(config.backend.backend):
        yield ConfigIssue(
            ("training.max_off_policy_steps", "backend.backend"),
            f'is {steps}, and backend = "{config.backend.backend}" samples with the one version of its weights',
            "max_off_policy_steps = 0",
        )
    if algorithm.correction is None and not algorithm.corrects and not algorithm.from_sampler:
        yield ConfigIssue(
            ("training.max_off_policy_steps", "algorithm.correction"),
            f"is {steps}, and no correction of the loss is set",
            'correction = "tis", "icepop" or "decoupled", loss = "dppo", "vespo" or "m2po", or correction = "none"',
        )


def anneal_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report rank stages that do not fall in order within the run."""
    step_before, rank_before = 0, config.model.lora_rank
    for step, rank in config.lora.anneal:
        if step <= step_before or rank >= rank_before:
            yield ConfigIssue(
                ("lora.anneal", "model.lora_rank"),
                f"has the stage [{step}, {rank}] after rank {rank_before} at step {step_before}: steps have to grow "
                "and ranks to fall",
                f"anneal = [[{step_before + 10}, {max(1, rank_before // 2)}]]",
            )
            return
        step_before, rank_before = step, rank
    if config.lora.anneal and step_before >= config.training.max_steps:
        yield ConfigIssue(
            ("lora.anneal", "training.max_steps"),
            f"has a stage at step {step_before}, and max_steps = {config.training.max_steps}: it has no effect",
            f"max_steps = {2 * step_before}",
        )
    if config.lora.anneal and is_plugin(config.backend.backend):
        yield ConfigIssue(
            ("lora.anneal", "backend.backend"),
            f'has no effect with backend = "{config.backend.backend}": its weights are its own',
            "remove the line",
        )


def group_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report groups that are too small for the advantage."""
    size, mode = config.training.group_size, config.algorithm.advantage_mode
    if config.distillation.teacher_only:
        return  # only the teacher gives advantages
    if size == 1 and Need.GROUP in advantage_of(mode).needs:
        yield ConfigIssue(
            ("training.group_size", "algorithm.advantage_mode"),
            "is 1: advantages compare the completions of a group, and with one of them all are 0",
            "group_size = 8",
        )
    if size == 2 and mode == "maxrl":
        yield ConfigIssue(
            ("training.group_size", "algorithm.advantage_mode"),
            "is 2: with two completions maxrl equals rloo in expectation",
            "group_size = 8",
            warning=True,
        )


def dynamic_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report dynamic sampling where group rewards do not decide the signal."""
    training, algorithm = config.training, config.algorithm
    if not training.dynamic_sampling:
        return
    if training.group_size == 1:
        keys = ("training.dynamic_sampling", "training.group_size")
        yield ConfigIssue(
            keys, "has no effect: the rewards of a group of one answer are never different", "group_size = 8"
        )
    if algorithm.critic:
        keys = ("training.dynamic_sampling", "algorithm.advantage_mode")
        yield ConfigIssue(keys, "drops groups with equal rewards, on which a critic trains too", "remove the line")
    if algorithm.turn_credit != "episode":
        keys = ("training.dynamic_sampling", "algorithm.turn_credit")
        message = f'judges whole episodes, and turn_credit = "{algorithm.turn_credit}" compares their turns'
        yield ConfigIssue(keys, message, 'turn_credit = "episode"')


def update_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report update settings that a plug-in backend ignores, and `kept` where masks change between updates."""
    if config.masks_per_update and config.algorithm.rejection_denominator == "kept":
        message = 'is "kept", and loss = "m2po" chooses what it leaves out before each of the step\'s several updates'
        keys = ("algorithm.rejection_denominator", "algorithm.loss")
        yield ConfigIssue(keys, message, 'rejection_denominator = "all"')
    backend = config.backend.backend
    if is_plugin(backend) and config.training.several_updates:
        several = "num_iterations" if config.training.num_iterations > 1 else "minibatches"
        message = f'has no effect with backend = "{backend}", which gets whole batches and decides how often it updates'
        yield ConfigIssue((f"training.{several}", "backend.backend"), message, "remove the line")


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
    default = type(critic).model_fields["lam"].default
    if critic.lam_policy is not None and critic.lam_value is not None and critic.lam != default:
        message = "has no effect with lam_policy and lam_value"
        yield ConfigIssue(("critic.lam", "critic.lam_policy", "critic.lam_value"), message, "remove the line")
    if not algorithm.discard_group_zero_advantage:
        message = "has no effect with a critic: every completion with a reward trains"
        yield ConfigIssue(("algorithm.discard_group_zero_advantage", named[0]), message, "remove the line")
    clip = critic.cliprange_value
    if clip not in (0.0, type(critic).model_fields["cliprange_value"].default) and not (
        config.training.several_updates or config.lora.dropout
    ):
        message = f"is {clip:g}, but values move from the second update of a batch on, and it has one"
        yield ConfigIssue(("critic.cliprange_value", "training.num_iterations"), message, "num_iterations = 4")
    if critic.warmup_steps >= config.training.max_steps:
        message = f"is {critic.warmup_steps} of max_steps = {config.training.max_steps}: the policy would never train"
        keys = ("critic.warmup_steps", "training.max_steps")
        yield ConfigIssue(keys, message, f"warmup_steps = {config.training.max_steps // 10}")


def distillation_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report settings that conflict with a teacher, or have no effect when it alone gives advantages."""
    distillation, algorithm, training = config.distillation, config.algorithm, config.training
    if not distillation.active:
        return
    teacher = "distillation.teacher"
    if is_plugin(config.backend.backend):
        backend = config.backend.backend
        message = f'is "{distillation.teacher}", and backend = "{backend}" gives no log-probabilities of sampled tokens'
        yield ConfigIssue((teacher, "backend.backend"), message, "remove the line")
    if training.dynamic_sampling:
        keys = ("training.dynamic_sampling", teacher)
        yield ConfigIssue(keys, "drops groups with equal rewards, on which distillation trains too", "remove the line")
    if not algorithm.discard_group_zero_advantage:
        keys = ("algorithm.discard_group_zero_advantage", teacher)
        yield ConfigIssue(
            keys, "has no effect with a teacher: every completion with a reward trains", "remove the line"
        )
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
        message = (
            f'is "{distillation.context}", which only prompts of single answers can contain, and episodes may have '
            "several turns"
        )
        yield ConfigIssue(("distillation.context", "environment.max_turns"), message, 'context = "none"')
    if distillation.context == "sibling" and training.group_size == 1:
        keys = ("distillation.context", "training.group_size")
        yield ConfigIssue(keys, 'is "sibling", and with group_size = 1 no completion has one', "group_size = 8")
    if distillation.teacher_only:
        yield from _unrewarded(config)


def _served_teacher_issues(config: Config) -> Iterator[ConfigIssue]:
    """Report truncated or tempered sampling: servers return a teacher's log-probabilities at temperature 1 only."""
    training = config.training
    for key in ("temperature", *CUTS):
        value = getattr(training, key)
        if value != type(training).model_fields[key].default:
            message = f"is {value:g}, and a server gives a teacher's log-probabilities untruncated and at temperature 1"
            fix = f'remove the line, or give the teacher\'s directory in place of url = "{config.distillation.url}"'
            yield ConfigIssue((f"training.{key}", "distillation.url"), message, fix)


def _vocabulary_issues(config: Config) -> Iterator[ConfigIssue]:
    """Report full-vocabulary distillation without an unsharded teacher and untruncated sampling in this process."""
    estimate, fault = "distillation.estimate", 'is "vocabulary"'
    if config.distillation.url is not None:
        message = f"{fault}, and a server gives log-probabilities of sampled tokens only"
        yield ConfigIssue((estimate, "distillation.url"), message, 'estimate = "sampled"')
    if config.backend.shard != "none":
        message = f'{fault}, and with shard = "{config.backend.shard}" ranks have no teacher'
        yield ConfigIssue((estimate, "backend.shard"), message, 'estimate = "sampled"')
    for key in CUTS:
        if getattr(config.training, key) != type(config.training).model_fields[key].default:
            message = f"{fault}, and {key} leaves tokens out of what is sampled from"
            yield ConfigIssue((estimate, f"training.{key}"), message, 'estimate = "sampled"')


def _unrewarded(config: Config) -> Iterator[ConfigIssue]:
    """Report credit settings that have no effect with reward_weight = 0."""
    algorithm, mode, weight = config.algorithm, config.algorithm.transform_mode, "distillation.reward_weight"
    if algorithm.critic:
        keys = ("algorithm.advantage_mode", weight)
        yield ConfigIssue(
            keys, 'is "gae", and with reward_weight = 0 its critic trains for nothing', 'advantage_mode = "grpo"'
        )
    if mode not in ("none", "entropy_mask"):
        keys = ("algorithm.transform_mode", weight)
        yield ConfigIssue(keys, f'is "{mode}", which has no effect with reward_weight = 0', 'transform_mode = "none"')
    if algorithm.turn_credit != "episode":
        keys = ("algorithm.turn_credit", weight)
        message = f'is "{algorithm.turn_credit}", which has no effect with reward_weight = 0'
        yield ConfigIssue(keys, message, 'turn_credit = "episode"')


def schedule_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report warm-up or evaluation that does not fit into the run."""
    steps = config.training.max_steps
    if config.optimizer.warmup_steps >= steps:
        yield ConfigIssue(
            ("optimizer.warmup_steps", "training.max_steps"),
            f"is {config.optimizer.warmup_steps}: with max_steps = {steps} the warm-up never ends",
            f"warmup_steps = {steps // 10}",
        )
    if config.training.eval_every and not config.evaluation.problems:
        yield ConfigIssue(
            ("training.eval_every", "evaluation.problems"),
            "has no effect with [evaluation] problems = 0",
            "remove the line, or problems = 128",
        )


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
    """Report SEPA with λ = 0 throughout, which equals GTPO: an error if no length of run could change it, a warning if
    the run is only short, as in a first try of a file."""
    if not credit_of(config.algorithm.transform_mode).pooled:
        return
    sepa, steps, flat = config.sepa, config.training.max_steps, _flat_steps(config)
    length = "training.max_steps" if config.campaign.max_steps is None else "campaign.max_steps"
    if lambda_stays_zero(config):
        shorter = f"delay_steps = {steps // 10}, or " if flat - sepa.delay_steps + steps // 10 < steps else ""
        yield ConfigIssue(
            ("sepa.delay_steps", length, "algorithm.transform_mode"),
            f"is {sepa.delay_steps} and max_steps is {steps}: λ is 0 for the whole run, which makes gtpo_sepa plain "
            "gtpo; enough to see it run, no test of SEPA, which takes",
            f"{shorter}max_steps = {flat + max(sepa.steps, 1)}",
            warning=True,
        )
    if sepa.steps == 0 and sepa.schedule == "linear":
        yield ConfigIssue(
            ("sepa.steps", "sepa.schedule", "algorithm.transform_mode"),
            "is 0: without a ramp λ would be 0 for the whole run, which makes gtpo_sepa plain gtpo",
            f"steps = {max(1, steps - flat)}",
        )
    elif not lambda_stays_zero(config) and steps < flat + sepa.steps and sepa.schedule == "linear":
        yield ConfigIssue(
            ("sepa.steps", "sepa.delay_steps", length, "algorithm.transform_mode"),
            f"is {sepa.steps}: in {steps} steps λ gets to {(steps - flat) / sepa.steps:.2f} at most",
            f"steps = {steps - flat}",
            warning=True,
        )


def maxrl_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report rewards outside [0, 1] with advantages that are defined for [0, 1] only, such as MaxRL."""
    reward, mode = config.reward, config.algorithm.advantage_mode
    if not advantage_of(mode).unit_rewards:
        return
    if reward.type == "reward_model":
        message = f'is "reward_model", whose scores may lie outside [0, 1], for which {mode} is not defined'
        yield ConfigIssue(("reward.type", "algorithm.advantage_mode"), message, 'advantage_mode = "grpo"', warning=True)
    yield from _rubric_weight_issues(config)
    if reward.type != "weighted":
        return
    if any(part.weight < 0 or part.offset != 0 for part in reward.components) or (
        sum(part.weight for part in reward.components) > 1 + 1e-9
    ):
        yield ConfigIssue(
            ("reward.components", "algorithm.advantage_mode"),
            f"can give totals outside [0, 1], for which {mode} is not defined",
            'advantage_mode = "grpo", or weights that add up to at most 1, without offset',
        )


def _rubric_weight_issues(config: Config) -> Iterator[ConfigIssue]:
    """Report negative criterion weights, which make totals below 0."""
    mode = config.algorithm.advantage_mode
    for table, grader in config.graders:
        if table == "audit" or grader.type != "rubric" or grader.rubric != "explicit":
            continue
        if any(criterion.weight_number < 0 for criterion in grader.criteria):
            message = f"has negative weights: totals can lie below 0, for which {mode} is not defined"
            yield ConfigIssue((f"{table}.criteria", "algorithm.advantage_mode"), message, 'advantage_mode = "grpo"')
        elif grader.rubric_column is not None:
            message = f"may hold negative weights: totals would lie below 0, for which {mode} is not defined"
            keys = (f"{table}.rubric_column", "algorithm.advantage_mode")
            yield ConfigIssue(keys, message, 'advantage_mode = "grpo"', warning=True)
