"""Rules between sections. A rule gets a whole configuration, as one run, and yields what it finds; what is wrong within
one section its own ``findings`` say."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from retrain.config.base import Finding, is_plugin
from retrain.config.describe import no_effect, toml
from retrain.config.distillation import distillation_rules
from retrain.config.evaluation import CUTS, evaluation_rules
from retrain.config.modes import MODES, Need, advantage_of, credit_of, mode_of
from retrain.config.schedule import deciding_rules
from retrain.config.slurm import slurm_rules
from retrain.config.tasks import MARKED, Reward, has_configurations

if TYPE_CHECKING:
    from retrain.config.root import Config


def environment_rules(config: Config) -> Iterator[Finding]:
    """An environment of its own brings problems and rewards; turns are credited where there are several."""
    provider = config.environment.provider
    if provider is not None:
        for key, value, default in (
            ("data.source", config.data.source, "arithmetic"),
            ("reward.type", config.reward.type, "match"),
            ("audit.type", config.audit.type, "off"),
        ):
            if value != default:
                what = "problems" if key == "data.source" else "rewards"
                message = f'is "{value}", but provider = "{provider}" brings its own {what}'
                yield Finding((key, "environment.provider"), message, "remove one of the two")
    if config.algorithm.turn_credit != "episode":
        keys = ("algorithm.turn_credit", "environment.max_turns")
        if config.environment.turns == 1:
            yield Finding(keys, "has no effect: every episode has one turn", 'turn_credit = "episode"')
        elif credit_of(config.algorithm.transform_mode).own_advantage:
            mode = config.algorithm.transform_mode
            keys = ("algorithm.turn_credit", "algorithm.transform_mode")
            yield Finding(keys, f'has no effect: transform_mode = "{mode}" makes its own', 'turn_credit = "episode"')
        if config.algorithm.turn_credit == "state" and advantage_of(config.algorithm.advantage_mode).whitened:
            mode = config.algorithm.advantage_mode
            what = f'beside advantage_mode = "{mode}", which would whiten two kinds of advantages together'
            yield Finding(("algorithm.turn_credit", "algorithm.advantage_mode"), what, 'turn_credit = "turn"')


def correctness_rules(config: Config) -> Iterator[Finding]:
    """A threshold or a metric decides what is correct only where the reward does not say so for every answer."""
    reward, provider = config.reward, config.environment.provider
    default = Reward.model_fields["correct_above"].default
    if provider == "reasoning_gym":
        if config.environment.correct_metric is not None:
            yield no_effect("environment.correct_metric", "environment.provider", provider)
        if reward.correct_above != default:
            yield no_effect("reward.correct_above", "environment.provider", provider)
    elif provider is None and reward.correct_above != default:
        parts = reward.components if reward.type == "weighted" else [reward]
        if kind := next((part.type for part in parts if part.type in MARKED), None):
            words = f'has no effect: type = "{kind}" says itself which answers are correct'
            yield Finding(("reward.correct_above", "reward.type"), words, "remove the line")


def overlong_rules(config: Config) -> Iterator[Finding]:
    """A punishment of long answers fits their limit, one answer to a rollout, and what the advantage is defined for."""
    soft, longest, mode = config.reward.overlong_tokens, config.training.max_tokens, config.algorithm.advantage_mode
    if not soft:
        return
    if soft > longest:
        keys = ("reward.overlong_tokens", "training.max_tokens")
        yield Finding(keys, f"is {soft}, more than max_tokens = {longest}", f"overlong_tokens = {max(1, longest // 5)}")
    if config.environment.turns != 1:
        keys = ("reward.overlong_tokens", "environment.max_turns")
        yield Finding(keys, "is for single answers, and episodes may have several turns", "remove the line")
    if advantage_of(mode).unit_rewards:
        keys = ("reward.overlong_tokens", "algorithm.advantage_mode")
        what = f'makes rewards below 0, for which advantage_mode = "{mode}" is not defined'
        yield Finding(keys, what, 'advantage_mode = "grpo"')


def model_rules(config: Config) -> Iterator[Finding]:
    """A backend of the user's own decides itself how it runs."""
    backend = config.backend.backend
    if is_plugin(backend) and config.backpressure.enabled:
        yield Finding(
            ("backpressure.enabled", "backend.backend"),
            f'has no effect with backend = "{backend}": it decides itself how much it decodes at once',
            "enabled = false",
        )
    if config.model.quantized:
        yield from _quantize_findings(config)
    if config.training.update_dtype != "model":
        dtype, keys = config.inference.dtype, ("training.update_dtype", "inference.dtype")
        if is_plugin(backend):
            message = f'has no effect with backend = "{backend}": it decides itself what it computes in'
            yield Finding(("training.update_dtype", "backend.backend"), message, "remove the line")
        elif dtype == "bfloat16":
            yield Finding(keys, "has no effect over a base in bfloat16", "remove the line")
        elif dtype == "float64":
            message = "is bfloat16, and a base in float64 is there for its digits"
            yield Finding(keys, message, 'update_dtype = "model"')


def _quantize_findings(config: Config) -> Iterator[Finding]:
    """What a base in 8 or 4 bits goes with: retrain's own engine and update, and every rank's own base."""
    what, backend, fix = f'is "{config.model.quantize}"', config.backend.backend, 'quantize = "none"'
    if is_plugin(backend):
        words = f"{what}, and {backend} has a model of its own"
        yield Finding(("model.quantize", "backend.backend"), words, fix)
    if config.inference.served:
        words = f"{what}, and a server samples with a base of its own: other weights than those that are trained"
        yield Finding(("model.quantize", "inference.engine"), words, f'{fix}, or engine = "local"')
    if config.backend.shard == "fsdp2":
        words = f"{what}, and fsdp2 cuts weights in the base's number format alone"
        yield Finding(("model.quantize", "backend.shard"), words, f'{fix}, or shard = "dp"')
    if config.training.update_dtype == "bfloat16":
        words = f'{what}, and update_dtype = "bfloat16" keeps a copy of every weight'
        yield Finding(("model.quantize", "training.update_dtype"), words, 'update_dtype = "model"')


def executor_rules(config: Config) -> Iterator[Finding]:
    """Several devices take several processes, these do not share servers, and Ray itself chooses among GPUs."""
    executor, backend = config.campaign.executor, config.backend
    if backend.several and executor == "inprocess" and backend.shard == "none":
        one = backend.named_gpus[0] if backend.named_gpus else "auto"
        words = f"is {toml(backend.devices)}, and one process trains on one device"
        fix = f'devices = "{one}"'
        if config.is_campaign:
            fix += ', or executor = "processes" in [campaign]'
        yield Finding(("backend.devices", "campaign.executor"), words, fix)
    if executor != "inprocess" and backend.devices == "cpu" and config.campaign.gpus_per_cohort != 1:
        keys, fix = (
            ("campaign.gpus_per_cohort", "backend.devices"),
            "remove the line; workers says how many share a CPU",
        )
        yield Finding(keys, 'has no effect with devices = "cpu"', fix)
    if executor == "ray" and backend.named_gpus:
        words = f'is {toml(backend.devices)}, and with executor = "ray" the cluster says which GPU a worker has'
        yield Finding(("backend.devices", "campaign.executor"), words, 'devices = "all", and [campaign] workers = 4')
    inference = config.inference
    if executor == "slurm" and inference.launch is not None:
        what = 'starts servers where retrain was started, and with executor = "slurm" that is no node with a GPU'
        yield Finding(("inference.launch", "campaign.executor"), what, "url, with the addresses of servers of your own")
    if executor == "ray" and inference.launch_gpus is not None:
        what = f'is "{inference.launch_gpus}", and with executor = "ray" the cluster says which GPUs a server has'
        yield Finding(("inference.launch_gpus", "campaign.executor"), what, "[ray] server_gpus = 1")
    if executor != "inprocess" and inference.sleep:
        what = f'has servers sleep while one process trains, and executor = "{executor}" has several'
        yield Finding(("inference.sleep", "campaign.executor"), what, "sleep = false")


def shard_rules(config: Config) -> Iterator[Finding]:
    """Ranks compute with retrain's own base, and have their GPUs for themselves."""
    backend, executor = config.backend, config.campaign.executor
    if backend.shard == "none":
        if config.gpus_per_worker > 1:
            words = f'is {config.gpus_per_worker}, and with shard = "none" a cohort trains on one GPU'
            yield Finding(("campaign.gpus_per_cohort", "backend.shard"), words, '[backend] shard = "dp"')
        return
    what = f'is "{backend.shard}"'
    each, keys = config.campaign.gpus_per_cohort, ("backend.ranks", "campaign.gpus_per_cohort")
    if executor != "inprocess" and config.gpus_per_worker == 1:
        words = f'{what}, and each worker of executor = "{executor}" has one device: there is nothing to divide'
        fix = "[campaign] gpus_per_cohort = 2, or ranks = 2 on CPUs"
        yield Finding(("backend.shard", "campaign.gpus_per_cohort"), words, fix)
    elif executor != "inprocess" and backend.ranks != "auto" and each not in (1, backend.ranks):
        words = f"is {backend.ranks}, and gpus_per_cohort = {each:g}: each rank of a worker has one GPU"
        yield Finding(keys, words, f"gpus_per_cohort = {backend.ranks}")
    if is_plugin(backend.backend):
        words = f"{what}, and {backend.backend} computes its updates itself"
        yield Finding(("backend.shard", "backend.backend"), words, 'shard = "none"')
    if config.inference.launch and executor == "inprocess":
        words = f"{what}, and servers that are launched here would share GPUs with the ranks"
        fix = 'give the url of servers that run elsewhere, or shard = "none"'
        yield Finding(("backend.shard", "inference.launch"), words, fix)
    if backend.shard == "fsdp2" and config.training.update_dtype == "bfloat16" and config.inference.dtype != "bfloat16":
        words = f'{what}, and update_dtype = "bfloat16" keeps a copy of every weight on every rank'
        fix = 'update_dtype = "model", or shard = "dp"'
        yield Finding(("backend.shard", "training.update_dtype"), words, fix)


def off_policy_rules(config: Config) -> Iterator[Finding]:
    """Rollouts behind the policy are corrected for, or it is said that they are not."""
    steps, algorithm = config.training.max_off_policy_steps, config.algorithm
    if config.inference.swap == "in_flight" and (steps == 0 or config.environment.turns == 1):
        what = "no rollout is behind" if steps == 0 else "every episode has one turn"
        keys = ("inference.swap", "environment.max_turns" if steps else "training.max_off_policy_steps")
        yield Finding(keys, f'is "in_flight", which has no effect: {what}', 'swap = "between"')
    if steps == 0:
        return
    if is_plugin(config.backend.backend):
        yield Finding(
            ("training.max_off_policy_steps", "backend.backend"),
            f'is {steps}, and backend = "{config.backend.backend}" samples with the one version of its weights',
            "max_off_policy_steps = 0",
        )
    if algorithm.correction is None and not algorithm.corrects and not algorithm.from_sampler:
        yield Finding(
            ("training.max_off_policy_steps", "algorithm.correction"),
            f"is {steps}, and nothing says how the loss corrects for it",
            'correction = "tis", "icepop" or "decoupled", loss = "dppo", "vespo" or "m2po", or correction = "none"',
        )


def server_rules(config: Config) -> Iterator[Finding]:
    """What servers do not say, and what they decide themselves."""
    inference, engine = config.inference, ("inference.engine",)
    if not inference.served:
        return
    if is_plugin(config.backend.backend):
        what = f'is "{inference.engine}", but backend = "{config.backend.backend}" samples itself'
        yield Finding((*engine, "backend.backend"), what, 'engine = "local"')
    if config.backpressure.enabled:
        what = (
            f'has no effect with engine = "{inference.engine}": servers decide themselves how much they decode at once'
        )
        yield Finding(("backpressure.enabled", *engine), what, "enabled = false, and [inference] max_in_flight = 64")
    whole = type(config.training).model_fields
    for key in CUTS:
        if getattr(config.training, key) != whole[key].default:
            what = (
                f"is {getattr(config.training, key):g}, but a server does not say which tokens were left to sample "
                "from, and without that importance ratios would be wrong"
            )
            yield Finding((f"training.{key}", *engine), what, 'remove the line, or engine = "local"')
    for key in MODES:
        mode = getattr(config.algorithm, key)
        if Need.ENTROPY in mode_of(key, mode).needs:
            what = f'is "{mode}", which needs full-vocabulary entropies, and servers do not give them'
            yield Finding((f"algorithm.{key}", *engine), what, 'engine = "local"')


def anneal_rules(config: Config) -> Iterator[Finding]:
    """Stages lower the rank, one after the other, while the run lasts."""
    step_before, rank_before = 0, config.model.lora_rank
    for step, rank in config.lora.anneal:
        if step <= step_before or rank >= rank_before:
            yield Finding(
                ("lora.anneal", "model.lora_rank"),
                f"has the stage [{step}, {rank}] after rank {rank_before} at step {step_before}: steps have to grow "
                "and ranks to fall",
                f"anneal = [[{step_before + 10}, {max(1, rank_before // 2)}]]",
            )
            return
        step_before, rank_before = step, rank
    if config.lora.anneal and step_before >= config.training.max_steps:
        yield Finding(
            ("lora.anneal", "training.max_steps"),
            f"has a stage at step {step_before}, and max_steps = {config.training.max_steps}: it has no effect",
            f"max_steps = {2 * step_before}",
        )
    if config.lora.anneal and is_plugin(config.backend.backend):
        yield Finding(
            ("lora.anneal", "backend.backend"),
            f'has no effect with backend = "{config.backend.backend}": its weights are its own',
            "remove the line",
        )


def group_rules(config: Config) -> Iterator[Finding]:
    """What an advantage needs of its group."""
    size, mode = config.training.group_size, config.algorithm.advantage_mode
    if config.distillation.alone:
        return  # nothing is compared
    if size == 1 and Need.GROUP in advantage_of(mode).needs:
        yield Finding(
            ("training.group_size", "algorithm.advantage_mode"),
            "is 1: advantages compare the completions of a group, and with one of them all are 0",
            "group_size = 8",
        )
    if size == 2 and mode == "maxrl":
        yield Finding(
            ("training.group_size", "algorithm.advantage_mode"),
            "is 2: with two completions maxrl equals rloo in expectation",
            "group_size = 8",
            warning=True,
        )


def dynamic_rules(config: Config) -> Iterator[Finding]:
    """Prompts are drawn again for the sake of groups whose answers are compared with each other, whole."""
    training, algorithm = config.training, config.algorithm
    if not training.dynamic_sampling:
        return
    if training.group_size == 1:
        keys = ("training.dynamic_sampling", "training.group_size")
        yield Finding(keys, "has only groups of one answer to choose from, which are all alike", "group_size = 8")
    if algorithm.critic:
        keys = ("training.dynamic_sampling", "algorithm.advantage_mode")
        yield Finding(keys, "drops groups from which a critic learns as from all others", "remove the line")
    if algorithm.turn_credit != "episode":
        keys = ("training.dynamic_sampling", "algorithm.turn_credit")
        what = f'judges whole episodes, and turn_credit = "{algorithm.turn_credit}" compares their turns'
        yield Finding(keys, what, 'turn_credit = "episode"')


def update_rules(config: Config) -> Iterator[Finding]:
    """How often a batch is trained on is up to a backend of the user's own, and divisors are counted once."""
    if config.chooses_anew and config.algorithm.rejection_denominator == "kept":
        what = 'is "kept", and loss = "m2po" chooses what it leaves out before each of the step\'s several updates'
        keys = ("algorithm.rejection_denominator", "algorithm.loss")
        yield Finding(keys, what, 'rejection_denominator = "all"')
    backend = config.backend.backend
    if is_plugin(backend) and config.training.several_updates:
        several = "num_iterations" if config.training.num_iterations > 1 else "minibatches"
        what = f'has no effect with backend = "{backend}", which gets whole batches and updates as often as it likes'
        yield Finding((f"training.{several}", "backend.backend"), what, "remove the line")


def critic_rules(config: Config) -> Iterator[Finding]:
    """What goes together with a critic, which gives every token an advantage of its own."""
    algorithm, critic, mode = config.algorithm, config.critic, config.algorithm.transform_mode
    if not algorithm.critic:
        return
    named = ("algorithm.advantage_mode", "algorithm.transform_mode")
    if not is_plugin(mode) and credit_of(mode).own_advantage:
        what = 'makes its own advantages from the rewards, so those of advantage_mode = "gae" would have no effect'
        yield Finding(named[::-1], what, 'transform_mode = "none"')
    if algorithm.turn_credit != "episode":
        what = 'has no effect with advantage_mode = "gae": the last token of a turn has its reward'
        yield Finding(("algorithm.turn_credit", named[0]), what, 'turn_credit = "episode"')
    if is_plugin(config.backend.backend):
        what = f'is "gae", which backend = "{config.backend.backend}" has no critic for'
        yield Finding((named[0], "backend.backend"), what, 'advantage_mode = "grpo"')
    whole = type(critic).model_fields["lam"].default
    if critic.lam_policy is not None and critic.lam_value is not None and critic.lam != whole:
        what = "has no effect with lam_policy and lam_value"
        yield Finding(("critic.lam", "critic.lam_policy", "critic.lam_value"), what, "remove the line")
    if not algorithm.discard_group_zero_advantage:
        what = "has no effect with a critic: every completion with a reward trains"
        yield Finding(("algorithm.discard_group_zero_advantage", named[0]), what, "remove the line")
    clip = critic.cliprange_value
    if clip not in (0.0, type(critic).model_fields["cliprange_value"].default) and not (
        config.training.several_updates or config.lora.dropout
    ):
        what = f"is {clip:g}, but values move from the second update of a batch on, and it has one"
        yield Finding(("critic.cliprange_value", "training.num_iterations"), what, "num_iterations = 4")
    if critic.warmup_steps >= config.training.max_steps:
        what = f"is {critic.warmup_steps} of max_steps = {config.training.max_steps}: the policy would never train"
        keys = ("critic.warmup_steps", "training.max_steps")
        yield Finding(keys, what, f"warmup_steps = {config.training.max_steps // 10}")


def schedule_rules(config: Config) -> Iterator[Finding]:
    """Warm-up and evaluation must fall inside the run."""
    steps = config.training.max_steps
    if config.optimizer.warmup_steps >= steps:
        yield Finding(
            ("optimizer.warmup_steps", "training.max_steps"),
            f"is {config.optimizer.warmup_steps}: with max_steps = {steps} the warm-up never ends",
            f"warmup_steps = {steps // 10}",
        )
    if config.training.eval_every and not config.evaluation.problems:
        yield Finding(
            ("training.eval_every", "evaluation.problems"),
            "has no effect with [evaluation] problems = 0",
            "remove the line, or problems = 128",
        )


def _flat_steps(config: Config) -> int:
    """First steps of a run in which the ramp of λ has not begun: a batch has to open the gate."""
    return 1 + config.sepa.delay_steps + (config.sepa.correct_rate_gate > 0)


def lambda_stays_zero(config: Config) -> bool:
    """Whether a run trains with gtpo_sepa and is too short for λ to leave 0, so that it equals gtpo."""
    if not credit_of(config.algorithm.transform_mode).pooled:
        return False
    sepa, steps = config.sepa, config.training.max_steps
    observed = steps - 1 - sepa.warmup_steps  # batches that the last step's running variance has beyond its reference
    falls = sepa.schedule == "auto" and observed >= 0 and sepa.ema_decay**observed < sepa.threshold
    return steps <= _flat_steps(config) and not (falls and steps > sepa.delay_steps)


def sepa_rules(config: Config) -> Iterator[Finding]:
    """SEPA with λ = 0 throughout is plain GTPO under another name: a mistake where it could never be anything else, a
    note where the run is short, as a first try of a file with few steps is."""
    if not credit_of(config.algorithm.transform_mode).pooled:
        return
    sepa, steps, flat = config.sepa, config.training.max_steps, _flat_steps(config)
    length = "training.max_steps" if config.campaign.max_steps is None else "campaign.max_steps"
    if lambda_stays_zero(config):
        shorter = f"delay_steps = {steps // 10}, or " if flat - sepa.delay_steps + steps // 10 < steps else ""
        yield Finding(
            ("sepa.delay_steps", length, "algorithm.transform_mode"),
            f"is {sepa.delay_steps} and max_steps is {steps}: λ is 0 for the whole run, which makes gtpo_sepa plain "
            "gtpo; enough to see it run, no test of SEPA, which takes",
            f"{shorter}max_steps = {flat + max(sepa.steps, 1)}",
            warning=True,
        )
    if sepa.steps == 0 and sepa.schedule == "linear":
        yield Finding(
            ("sepa.steps", "sepa.schedule", "algorithm.transform_mode"),
            "is 0: without a ramp λ would be 0 for the whole run, which makes gtpo_sepa plain gtpo",
            f"steps = {max(1, steps - flat)}",
        )
    elif not lambda_stays_zero(config) and steps < flat + sepa.steps and sepa.schedule == "linear":
        yield Finding(
            ("sepa.steps", "sepa.delay_steps", length, "algorithm.transform_mode"),
            f"is {sepa.steps}: in {steps} steps λ gets to {(steps - flat) / sepa.steps:.2f} at most",
            f"steps = {steps - flat}",
            warning=True,
        )


def data_rules(config: Config) -> Iterator[Finding]:
    """Levels are those of generated problems, configurations those of data sets that people made."""
    data = config.data
    sources = (data.source, data.eval_source, *(each.source for each in config.evaluation.sets))
    if data.subset is not None and not any(has_configurations(source) for source in sources):
        yield no_effect("data.subset", "data.source", data.source, 'remove the line, or source = "owner/name"')
    if data.levels is not None and "arithmetic" not in sources:
        yield no_effect("data.levels", "data.source", data.source, 'remove the line, or source = "arithmetic"')


def audit_rules(config: Config) -> Iterator[Finding]:
    """The audit's score has its name for itself."""
    if config.audit.wanted and "audit" in {part.shown_name for part in (config.reward, *config.reward.components)}:
        yield Finding(
            ("reward.name", "audit.type"), 'is "audit", which is what the score of [audit] is called', 'name = "own"'
        )


def maxrl_rules(config: Config) -> Iterator[Finding]:
    """Some advantages, such as MaxRL, are defined for rewards in [0, 1] alone."""
    reward, mode = config.reward, config.algorithm.advantage_mode
    if not advantage_of(mode).unit_rewards:
        return
    if reward.type == "reward_model":
        what = f'is "reward_model", whose scores may lie outside [0, 1], for which {mode} is not defined'
        yield Finding(("reward.type", "algorithm.advantage_mode"), what, 'advantage_mode = "grpo"', warning=True)
    for table, each in config.graders:
        if table == "audit" or each.type != "rubric" or each.rubric != "explicit":
            continue
        if any(criterion.weight_number < 0 for criterion in each.criteria):
            what = f"has negative weights: totals can lie below 0, for which {mode} is not defined"
            yield Finding((f"{table}.criteria", "algorithm.advantage_mode"), what, 'advantage_mode = "grpo"')
        elif each.rubric_column is not None:
            what = f"may hold negative weights: totals would lie below 0, for which {mode} is not defined"
            keys = (f"{table}.rubric_column", "algorithm.advantage_mode")
            yield Finding(keys, what, 'advantage_mode = "grpo"', warning=True)
    if reward.type != "weighted":
        return
    if any(part.weight < 0 or part.offset != 0 for part in reward.components) or (
        sum(part.weight for part in reward.components) > 1 + 1e-9
    ):
        yield Finding(
            ("reward.components", "algorithm.advantage_mode"),
            f"can give totals outside [0, 1], for which {mode} is not defined",
            'advantage_mode = "grpo", or weights that add up to at most 1, without offset',
        )


def backpressure_rules(config: Config) -> Iterator[Finding]:
    """Adapting the batch size changes the learning problem."""
    if config.backpressure.target == "batch_size":
        if "campaign" in config.model_fields_set and not config.campaign.allow_confounded:
            message = (
                'is "batch_size": batch sizes would differ between the conditions that are compared, each with '
                "another learning problem"
            )
        else:
            message = 'is "batch_size", which changes the learning problem and is not available'
        yield Finding(("backpressure.target", "campaign.allow_confounded"), message, 'target = "concurrency"')


def squeeze_rules(config: Config) -> Iterator[Finding]:
    """Nothing can be compressed to more than it has."""
    rank, squeeze = config.model.lora_rank, config.squeeze
    if squeeze.compress_to is not None and squeeze.compress_to > rank:
        yield Finding(
            ("squeeze.compress_to", "model.lora_rank"),
            f"is {squeeze.compress_to}, above lora_rank = {rank}",
            f"compress_to = {rank}",
        )
    if squeeze.target_ranks and max(squeeze.target_ranks) > rank:
        fitting = [k for k in squeeze.target_ranks if k <= rank] or [rank]
        yield Finding(
            ("squeeze.target_ranks", "model.lora_rank"),
            f"has {max(squeeze.target_ranks)}, above lora_rank = {rank}",
            f"target_ranks = {fitting}",
        )


def declared_rules(config: Config) -> Iterator[Finding]:
    """What is declared as deciding can be measured with the evaluation that is asked for."""
    if not config.is_campaign:
        return
    metric, evaluation = config.campaign.primary_metric, config.evaluation
    summary, _, key = ("final", ":", metric) if metric.startswith("eval/") else metric.partition(":")
    at_k = re.search(r"(?:pass|avg|maj)@(\d+)$", key)
    measured = metric in ("auc", "last3") or key.startswith("eval/") or at_k is not None
    if measured and evaluation.problems == 0:
        yield Finding(
            ("campaign.primary_metric", "evaluation.problems"),
            f'is "{metric}", which needs held-out problems',
            "problems = 128",
        )
    elif (
        summary == "auc"
        and (measured or "/" not in key)
        and config.training.eval_every == 0
        and evaluation.problems
        and evaluation.schedule == "every"
    ):
        yield Finding(
            ("campaign.primary_metric", "training.eval_every"),
            f'is "{metric}": the area under a curve needs evaluations while training, not only before and after',
            f"eval_every = {max(1, config.training.max_steps // 5)}",
        )
    if not evaluation.names:
        return
    name = key.split("/")[1] if key.startswith("eval/") else evaluation.names[0]
    if name not in evaluation.names:
        meant = difflib.get_close_matches(name, evaluation.names, n=1, cutoff=0.0)[0]
        yield Finding(
            ("campaign.primary_metric", "evaluation.sets"),
            f'is "{metric}", and the held-out sets are {", ".join(evaluation.names)}',
            f'primary_metric = "{metric.replace(f"eval/{name}", f"eval/{meant}", 1)}"',
        )
        return
    samples = next(each.samples for each in config.held_out if each.name == name)
    if at_k is not None and int(at_k[1]) > samples:
        own = next((f".sets.{i}" for i, each in enumerate(evaluation.sets) if each.name == name and each.samples), "")
        yield Finding(
            ("campaign.primary_metric", f"evaluation{own}.samples"),
            f'is "{metric}", which needs {at_k[1]} samples of each held-out problem and has {samples}',
            f"samples = {at_k[1]}",
        )


RULES = (
    environment_rules,
    model_rules,
    executor_rules,
    shard_rules,
    overlong_rules,
    correctness_rules,
    slurm_rules,
    off_policy_rules,
    server_rules,
    anneal_rules,
    group_rules,
    dynamic_rules,
    update_rules,
    critic_rules,
    distillation_rules,
    schedule_rules,
    sepa_rules,
    data_rules,
    maxrl_rules,
    audit_rules,
    evaluation_rules,
    backpressure_rules,
    squeeze_rules,
    declared_rules,
    deciding_rules,
)
