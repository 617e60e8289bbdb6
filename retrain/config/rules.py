"""Check keys of several sections against each other. A rule gets the configuration of one run and yields the issues
that it finds. Keys of one section are checked by the section's method ``issues``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from retrain.config import learning_rules
from retrain.config.base import ConfigIssue, Section, is_plugin
from retrain.config.describe import no_effect, toml
from retrain.config.evaluation import CUTS, DECIDING, EvaluationSet, last_evaluations, too_early
from retrain.config.machine import GPU_OPTIONS
from retrain.config.modes import MODES, Need, advantage_of, credit_of, mode_of
from retrain.config.root import Config, differing, differs, sections, value_at
from retrain.config.tasks import FILE_ENDINGS, MARKED, has_configurations


def environment_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report data and reward settings that an environment replaces, and turn credit in episodes of one turn."""
    provider, algorithm, key = config.environment.provider, config.algorithm, "algorithm.turn_credit"
    for brought, what in (("data.source", "problems"), ("reward.type", "rewards"), ("audit.type", "rewards")):
        if provider is not None and differs(config, brought):
            message = f'is "{value_at(config, brought)}", but provider = "{provider}" brings its own {what}'
            yield ConfigIssue((brought, "environment.provider"), message, "remove one of the two")
    if algorithm.turn_credit != "episode" and config.environment.turns == 1:
        message = "has no effect: every episode has one turn"
        yield ConfigIssue((key, "environment.max_turns"), message, 'turn_credit = "episode"')
    elif algorithm.turn_credit != "episode" and credit_of(algorithm.transform_mode).own_advantage:
        message = f'has no effect: transform_mode = "{algorithm.transform_mode}" makes its own'
        yield ConfigIssue((key, "algorithm.transform_mode"), message, 'turn_credit = "episode"')
    if algorithm.turn_credit == "state" and advantage_of(mode := algorithm.advantage_mode).whitened:
        message = f'beside advantage_mode = "{mode}", which would whiten two kinds of advantages together'
        yield ConfigIssue((key, "algorithm.advantage_mode"), message, 'turn_credit = "turn"')


def warmup_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report a warm-up that the backend cannot train, or whose prompts lack what the environment adds to them."""
    backend, warmup, environment = config.backend.backend, config.warmup, config.environment
    if not warmup.active:
        return
    if is_plugin(backend):
        message = f'has no effect with backend = "{backend}": it computes its updates itself'
        yield ConfigIssue(("warmup.source", "backend.backend"), message, "remove the section")
    if environment.hosted:
        named = f'provider = "{environment.provider}"' if environment.provider else "tools"
        message = f"has prompts as [data] renders them, without what {named} adds to them in training"
        yield ConfigIssue(("warmup.source", "environment.tools"), message, "write it into the examples", warning=True)


def correctness_rules(config: Config) -> Iterator[ConfigIssue]:
    reward, provider = config.reward, config.environment.provider
    if provider == "reasoning_gym":
        for key in ("environment.correct_metric", "reward.correct_above"):
            if differs(config, key):
                yield no_effect(key, "environment.provider", provider)
    elif provider is None and differs(config, "reward.correct_above"):
        parts = reward.components if reward.type == "weighted" else [reward]
        if kind := next((part.type for part in parts if part.type in MARKED), None):
            message = f'has no effect: type = "{kind}" itself decides which answers are correct'
            yield ConfigIssue(("reward.correct_above", "reward.type"), message)


def model_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report settings that a plug-in backend ignores, and number formats that do not fit together."""
    backend, dtype, keys = config.backend.backend, config.inference.dtype, ("training.update_dtype", "inference.dtype")
    if is_plugin(backend) and config.backpressure.enabled:
        message = f'has no effect with backend = "{backend}": it decides itself how much it decodes at once'
        yield ConfigIssue(("backpressure.enabled", "backend.backend"), message, "enabled = false")
    if config.model.quantized:
        yield from _quantize_issues(config)
    if config.training.update_dtype == "model":
        return
    if is_plugin(backend):
        message = f'has no effect with backend = "{backend}": it decides itself what it computes in'
        yield ConfigIssue(("training.update_dtype", "backend.backend"), message)
    elif dtype == "bfloat16":
        yield ConfigIssue(keys, "has no effect over a base in bfloat16")
    elif dtype == "float64":
        message = "is bfloat16, and a base in float64 is there for its digits"
        yield ConfigIssue(keys, message, 'update_dtype = "model"')


def _quantize_issues(config: Config) -> Iterator[ConfigIssue]:
    """Report what a base in 8 or 4 bits does not support: servers, plug-in backends, fsdp2, updates in bfloat16."""
    fault, backend, fix = f'is "{config.model.quantize}"', config.backend.backend, 'quantize = "none"'
    if is_plugin(backend):
        message = f"{fault}, and {backend} has a model of its own"
        yield ConfigIssue(("model.quantize", "backend.backend"), message, fix)
    if config.inference.served:
        message = f"{fault}, and a server samples with a base of its own: other weights than those that are trained"
        yield ConfigIssue(("model.quantize", "inference.engine"), message, f'{fix}, or engine = "local"')
    if config.backend.shard == "fsdp2":
        message = f"{fault}, and fsdp2 cuts weights in the base's number format alone"
        yield ConfigIssue(("model.quantize", "backend.shard"), message, f'{fix}, or shard = "dp"')
    if config.training.update_dtype == "bfloat16":
        message = f'{fault}, and update_dtype = "bfloat16" keeps a copy of every weight'
        yield ConfigIssue(("model.quantize", "training.update_dtype"), message, 'update_dtype = "model"')


def start_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report runs with neither steps nor a warm-up, campaigns without steps, and two sources of initial weights."""
    if not config.training.max_steps and not config.warmup.active:
        length = "training.max_steps" if config.campaign.max_steps is None else "campaign.max_steps"
        message = "is 0, but must be an integer ≥ 1: only with a [warmup] is there something to train"
        yield ConfigIssue((length, "warmup.source"), message, "max_steps = 100")
    elif not config.training.max_steps and config.is_campaign:
        message = "is 0, and the seeds of a campaign share their warm-up: equal runs are no replicates to compare"
        yield ConfigIssue(("training.max_steps", "warmup.source"), message, "a file without [campaign] for each run")
    if config.resume.from_ and config.warmup.active:
        message = f"is {toml(config.resume.from_)}, whose weights would replace those of the warm-up"
        yield ConfigIssue(("resume.from", "warmup.source"), message, "remove one of the two")


def executor_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report several devices without several processes, and GPUs that Ray would choose itself."""
    executor, backend = config.campaign.executor, config.backend
    if backend.several and executor == "inprocess" and backend.shard == "none":
        message = f"is {toml(backend.devices)}, and one process trains on one device"
        fix = f'devices = "{backend.device}"'
        fix += ', or executor = "processes" in [campaign]' if config.is_campaign else ""
        yield ConfigIssue(("backend.devices", "campaign.executor"), message, fix)
    if executor != "inprocess" and backend.devices == "cpu" and config.campaign.gpus_per_cohort != 1:
        fix = "remove the line; workers is the number that share a CPU"
        yield no_effect("campaign.gpus_per_cohort", "backend.devices", "cpu", fix)
    if executor == "ray" and backend.named_gpus:
        message = f'is {toml(backend.devices)}, and with executor = "ray" the cluster assigns GPUs to workers'
        fix = 'devices = "all", and [campaign] workers = 4'
        yield ConfigIssue(("backend.devices", "campaign.executor"), message, fix)


def server_executor_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report servers that several training processes would share, and server GPUs that a cluster chooses."""
    executor, inference = config.campaign.executor, config.inference
    if executor == "slurm" and inference.launch is not None:
        message = 'starts servers where retrain was started, and with executor = "slurm" that is no node with a GPU'
        fix = "url, with the addresses of servers of your own"
        yield ConfigIssue(("inference.launch", "campaign.executor"), message, fix)
    if executor == "ray" and inference.launch_gpus is not None:
        message = f'is "{inference.launch_gpus}", and with executor = "ray" the cluster assigns GPUs to servers'
        yield ConfigIssue(("inference.launch_gpus", "campaign.executor"), message, "[ray] server_gpus = 1")


def worker_server_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report servers that a worker cannot start on its own GPU, and shared servers that would sleep."""
    executor, inference = config.campaign.executor, config.inference
    if executor == "inprocess":
        return
    launch, beside = ("inference.launch", "campaign.executor"), inference.beside_trainer
    if inference.launch == "auto" and executor != "processes":
        message = f'is "auto", which starts vLLM on GPUs of this machine, and executor = "{executor}" trains on others'
        yield ConfigIssue(launch, message, 'launch = "vllm serve {model} --enable-lora", or url')
    elif inference.launch == "auto" and inference.launch_gpus is not None:
        message = (
            'is "auto", which starts a vLLM on the GPU of every worker, and launch_gpus names GPUs for all of them'
        )
        yield ConfigIssue(launch, message, 'remove launch_gpus, or launch = "vllm serve {model} --enable-lora"')
    elif inference.released and (executor != "processes" or not beside):
        message = f'has servers sleep while one process trains, and executor = "{executor}" has several'
        yield ConfigIssue(("inference.sleep", "campaign.executor"), message, "sleep = false")
    share = config.campaign.gpus_per_cohort
    gpus = share if share < 1 else config.gpus_per_worker
    if (beside or inference.launch == "auto") and gpus != 1:
        message = f"is {gpus:g}, and a server that a worker starts beside itself needs one whole GPU"
        yield ConfigIssue(("campaign.gpus_per_cohort", "inference.launch"), message, "gpus_per_cohort = 1")


def shard_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report settings that ranks do not support, and servers that would share GPUs with ranks."""
    backend, executor = config.backend, config.campaign.executor
    if backend.shard == "none":
        if config.gpus_per_worker > 1:
            message = f'is {config.gpus_per_worker}, and with shard = "none" a cohort trains on one GPU'
            yield ConfigIssue(("campaign.gpus_per_cohort", "backend.shard"), message, '[backend] shard = "dp"')
        return
    fault = f'is "{backend.shard}"'
    gpus, keys = config.campaign.gpus_per_cohort, ("backend.ranks", "campaign.gpus_per_cohort")
    if executor != "inprocess" and config.gpus_per_worker == 1:
        message = f'{fault}, and each worker of executor = "{executor}" has one device: there is nothing to divide'
        fix = "[campaign] gpus_per_cohort = 2, or ranks = 2 on CPUs"
        yield ConfigIssue(("backend.shard", "campaign.gpus_per_cohort"), message, fix)
    elif executor != "inprocess" and backend.ranks != "auto" and gpus not in (1, backend.ranks):
        message = f"is {backend.ranks}, and gpus_per_cohort = {gpus:g}: each rank of a worker has one GPU"
        yield ConfigIssue(keys, message, f"gpus_per_cohort = {backend.ranks}")
    if is_plugin(backend.backend):
        message = f"{fault}, and {backend.backend} computes its updates itself"
        yield ConfigIssue(("backend.shard", "backend.backend"), message, 'shard = "none"')
    if config.inference.launch and executor == "inprocess":
        message = f"{fault}, and servers that are launched here would share GPUs with the ranks"
        fix = 'give the url of servers that run elsewhere, or shard = "none"'
        yield ConfigIssue(("backend.shard", "inference.launch"), message, fix)
    if backend.shard == "fsdp2" and config.training.update_dtype == "bfloat16" and config.inference.dtype != "bfloat16":
        message = f'{fault}, and update_dtype = "bfloat16" keeps a copy of every weight on every rank'
        fix = 'update_dtype = "model", or shard = "dp"'
        yield ConfigIssue(("backend.shard", "training.update_dtype"), message, fix)


def server_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report settings of sampling that servers do not support, or decide themselves."""
    inference, engine = config.inference, ("inference.engine",)
    if not inference.served:
        return
    if is_plugin(config.backend.backend):
        message = f'is "{inference.engine}", but backend = "{config.backend.backend}" samples itself'
        yield ConfigIssue((*engine, "backend.backend"), message, 'engine = "local"')
    if inference.launch == "auto" and inference.dtype == "float64":
        message = 'is "float64", which vLLM does not compute in'
        yield ConfigIssue(("inference.dtype", *engine), message, 'dtype = "float32", or engine = "local"')
    if config.backpressure.enabled:
        message = f'has no effect with engine = "{inference.engine}"'
        message += ": servers decide themselves how much they decode at once"
        fix = "enabled = false, and [inference] max_in_flight = 64"
        yield ConfigIssue(("backpressure.enabled", *engine), message, fix)
    for key in CUTS:
        if differs(config, f"training.{key}"):
            message = f"is {getattr(config.training, key):g}, but a server does not say which tokens were left to "
            message += "sample from, and without that importance ratios would be wrong"
            yield ConfigIssue((f"training.{key}", *engine), message, 'remove the line, or engine = "local"')
    for key in MODES:
        mode = getattr(config.algorithm, key)
        if Need.ENTROPY in mode_of(key, mode).needs:
            message = f'is "{mode}", which needs full-vocabulary entropies, and servers do not give them'
            yield ConfigIssue((f"algorithm.{key}", *engine), message, 'engine = "local"')


def data_rules(config: Config) -> Iterator[ConfigIssue]:
    data = config.data
    sources = (data.source, data.eval_source, *(each.source for each in config.evaluation.sets))
    if data.subset is not None and not any(has_configurations(source) for source in sources):
        yield no_effect("data.subset", "data.source", data.source, 'remove the line, or source = "owner/name"')
    if data.levels is not None and "arithmetic" not in sources:
        yield no_effect("data.levels", "data.source", data.source, 'remove the line, or source = "arithmetic"')


def audit_rules(config: Config) -> Iterator[ConfigIssue]:
    if config.audit.is_enabled and "audit" in {part.shown_name for part in (config.reward, *config.reward.components)}:
        message = 'is "audit", which is what the score of [audit] is called'
        yield ConfigIssue(("reward.name", "audit.type"), message, 'name = "own"')


def backpressure_rules(config: Config) -> Iterator[ConfigIssue]:
    if config.backpressure.target == "batch_size":
        message = 'is "batch_size", which changes the learning problem and is not available'
        if config.is_campaign and not config.campaign.allow_confounded:
            message = 'is "batch_size": batch sizes would differ between the conditions that are compared, each with '
            message += "another learning problem"
        yield ConfigIssue(("backpressure.target", "campaign.allow_confounded"), message, 'target = "concurrency"')


def squeeze_rules(config: Config) -> Iterator[ConfigIssue]:
    rank, squeeze = config.model.lora_rank, config.squeeze
    if squeeze.compress_to is not None and squeeze.compress_to > rank:
        message = f"is {squeeze.compress_to}, above lora_rank = {rank}"
        yield ConfigIssue(("squeeze.compress_to", "model.lora_rank"), message, f"compress_to = {rank}")
    if squeeze.target_ranks and (most := max(squeeze.target_ranks)) > rank:
        fix = f"target_ranks = {[k for k in squeeze.target_ranks if k <= rank] or [rank]}"
        yield ConfigIssue(("squeeze.target_ranks", "model.lora_rank"), f"has {most}, above lora_rank = {rank}", fix)


def slurm_rules(config: Config) -> Iterator[ConfigIssue]:
    slurm, campaign, devices = config.slurm, config.campaign, config.backend.devices
    if campaign.executor != "slurm":
        return
    if campaign.workers == "auto":
        keys = ("campaign.workers", "campaign.executor")
        yield ConfigIssue(keys, 'is "auto": say how many are asked of Slurm', "workers = 4, or --workers 4")
    if devices not in ("auto", "cpu"):
        message = f"is {toml(devices)}: each worker has the GPU that Slurm gives it"
        yield ConfigIssue(("backend.devices", "campaign.executor"), message, 'devices = "auto"')
    if slurm.cluster == "local" and devices == "auto":
        message = 'is "local": workers of this machine without Slurm share its CPU'
        yield ConfigIssue(("slurm.cluster", "backend.devices"), message, 'cluster = "slurm", or devices = "cpu"')
    if slurm.notice_s >= 60 * slurm.minutes:
        message = f"is {slurm.notice_s}, and the time limit of {slurm.time} is {60 * slurm.minutes} s"
        fix = f"notice_s = {15 * slurm.minutes}, or a longer time"
        yield ConfigIssue(("slurm.notice_s", "slurm.time"), message, fix)
    if slurm.gpu_type is not None and (options := [name for name in GPU_OPTIONS if name in slurm.extra]):
        message = f"has no effect with {options[0]} in extra"
        yield ConfigIssue(("slurm.gpu_type", "slurm.extra"), message, "remove one of the two")
    if devices == "cpu" and slurm.gpu_type is not None:
        yield no_effect("slurm.gpu_type", "backend.devices", "cpu", "remove one of the two")


def idle_slurm(config: Config) -> Iterator[ConfigIssue]:
    """Report keys of [slurm] with another executor. Planned runs are exempt: they may return to Slurm."""
    for key in differing(config) if config.campaign.executor != "slurm" else ():
        if key.startswith("slurm."):
            fix = 'remove the line, or executor = "slurm"'
            yield no_effect(key, "campaign.executor", config.campaign.executor, fix)


def evaluation_rules(config: Config) -> Iterator[ConfigIssue]:
    evaluation = config.evaluation
    if evaluation.sets and config.data.eval_source is not None and all(each.source for each in evaluation.sets):
        message = "has no effect: every one of [[evaluation.sets]] has its own source"
        yield ConfigIssue(("data.eval_source", "evaluation.sets"), message)
    for index, each in enumerate(evaluation.sets):
        yield from _set_data_issues(config, each, f"evaluation.sets.{index}")
    yield from _cut_issues(config)
    for index, held_out in enumerate(config.held_out):
        if held_out.samples > 1 and held_out.sampling.temperature == 0:
            own = evaluation.sets[index] if evaluation.sets else None
            path = "evaluation" if own is None or own.samples is None else f"evaluation.sets.{index}"
            greedy = "evaluation" if own is None or own.temperature is None else f"evaluation.sets.{index}"
            message = f"is {held_out.samples} at temperature 0: all samples of a problem are the same"
            yield ConfigIssue((f"{path}.samples", f"{greedy}.temperature"), message, "samples = 1")


def _cut_issues(config: Config) -> Iterator[ConfigIssue]:
    greedy = [held_out.sampling.temperature == 0 for held_out in config.held_out]
    tables: list[tuple[str, Section, bool]] = [("evaluation", config.evaluation, all(greedy) and bool(greedy))]
    # Not strict: without named sets, ``greedy`` has one entry, that of the unnamed set.
    for index, (own, is_greedy) in enumerate(zip(config.evaluation.sets, greedy, strict=False)):
        tables.append((f"evaluation.sets.{index}", own, is_greedy))
    for path, table, is_greedy in tables:
        for key in CUTS:
            if is_greedy and getattr(table, key) is not None:
                message = "has no effect at temperature 0, which is greedy"
                yield ConfigIssue((f"{path}.{key}", f"{path}.temperature"), message)


def _set_data_issues(config: Config, held_out: EvaluationSet, path: str) -> Iterator[ConfigIssue]:
    source = held_out.source or config.data.eval_source or config.data.source
    if held_out.split is not None and (source == "arithmetic" or source.endswith(FILE_ENDINGS)):
        yield no_effect(f"{path}.split", f"{path}.source", source)
    if held_out.levels is not None and source != "arithmetic":
        fix = 'remove the line, or source = "arithmetic"'
        yield no_effect(f"{path}.levels", f"{path}.source", source, fix)
    if held_out.subset is not None and held_out.source is not None and not has_configurations(source):
        yield no_effect(f"{path}.subset", f"{path}.source", source)
    for key in ("subset", "prompt_column", "answer_column", "tags_column"):
        if getattr(held_out, key) is not None and held_out.source is None:
            message = "has no effect without a source of the set's own: the problems are those of [data]"
            yield ConfigIssue((f"{path}.{key}", path), message, f"remove the line, or set {key} in [data]")


def declared_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report a primary metric that is never evaluated, or too rarely."""
    if not config.is_campaign:
        return
    metric, evaluation = config.campaign.primary_metric, config.evaluation
    summary, key, at_k = _declared_metric(metric)
    measured = metric in ("auc", "last3") or key.startswith("eval/") or at_k is not None
    is_curve = summary == "auc" and (measured or "/" not in key)
    if measured and evaluation.problems == 0:
        message = f'is "{metric}", which needs held-out problems'
        yield ConfigIssue(("campaign.primary_metric", "evaluation.problems"), message, "problems = 128")
    elif is_curve and config.training.eval_every == 0 and evaluation.problems and evaluation.schedule == "every":
        message = f'is "{metric}": the area under a curve needs evaluations while training, not only before and after'
        fix = f"eval_every = {max(1, config.training.max_steps // 5)}"
        yield ConfigIssue(("campaign.primary_metric", "training.eval_every"), message, fix)


def _declared_metric(metric: str) -> tuple[str, str, re.Match[str] | None]:
    """Return the summary and the key of a metric, and the match whose first group is k (None without @k)."""
    summary, _, key = ("final", ":", metric) if metric.startswith("eval/") else metric.partition(":")
    return summary, key, re.search(r"(?:pass|avg|maj)@(\d+)$", key)


def declared_set_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report a primary metric of a missing held-out set, or with too few samples."""
    metric, evaluation = config.campaign.primary_metric, config.evaluation
    if not config.is_campaign or not evaluation.names:
        return
    _, key, at_k = _declared_metric(metric)
    name = key.split("/")[1] if key.startswith("eval/") else evaluation.names[0]
    if name not in evaluation.names:
        meant = difflib.get_close_matches(name, evaluation.names, n=1, cutoff=0.0)[0]
        message = f'is "{metric}", and the held-out sets are {", ".join(evaluation.names)}'
        fix = f'primary_metric = "{metric.replace(f"eval/{name}", f"eval/{meant}", 1)}"'
        yield ConfigIssue(("campaign.primary_metric", "evaluation.sets"), message, fix)
        return
    samples = next(each.samples for each in config.held_out if each.name == name)
    if at_k is not None and int(at_k[1]) > samples:
        own = next((f".sets.{i}" for i, each in enumerate(evaluation.sets) if each.name == name and each.samples), "")
        message = f'is "{metric}", which needs {at_k[1]} samples of each held-out problem and has {samples}'
        yield ConfigIssue(("campaign.primary_metric", f"evaluation{own}.samples"), message, f"samples = {at_k[1]}")


SHORT = r"(correct_rate|reward_mean|mean_length|(pass|avg|maj)@\d+|[^/]+/correct_rate)?"
"""Metrics of held-out problems that may be named without their set."""


def deciding_rules(config: Config) -> Iterator[ConfigIssue]:
    """Report schedule = "verdict" without held-out problems or with a primary `auc`, and a primary `last3` of a
    training metric or without three evaluations near the end."""
    schedule, training = config.evaluation.schedule, config.training
    if schedule == "verdict" and not config.evaluation.problems:
        yield no_effect("evaluation.schedule", "evaluation.problems", 0, "remove the line, or problems = 128")
        return
    if not config.is_campaign:
        return
    metric = config.campaign.primary_metric
    summary, _, key = metric.partition(":")
    held_out = key.startswith("eval/") or re.fullmatch(SHORT, key) is not None
    if summary == "auc" and held_out and schedule == "verdict":
        message = (
            f'is "{metric}", the area under a curve for which schedule = "verdict" asks only a part of the problems'
        )
        fix = f'primary_metric = "{metric.replace("auc", "last3", 1)}", or schedule = "every"'
        yield ConfigIssue(("campaign.primary_metric", "evaluation.schedule"), message, fix)
    if summary != "last3":
        return
    if not held_out:
        message = f'is "{metric}", the mean of three held-out evaluations, and {key} is a number of training, whose '
        message += "final value is its mean over the last tenth of the steps"
        yield ConfigIssue(("campaign.primary_metric",), message, f'primary_metric = "final:{key}"')
    elif config.evaluation.problems:
        yield from _last3_issues(metric, schedule, training.max_steps, training.eval_every)


def _last3_issues(metric: str, schedule: str, max_steps: int, eval_every: int) -> Iterator[ConfigIssue]:
    steps = last_evaluations(schedule, max_steps, eval_every)
    if max_steps < DECIDING:
        message = f'is "{metric}", the mean of three evaluations, and there are fewer steps: max_steps = {max_steps}'
        yield ConfigIssue(("campaign.primary_metric", "training.max_steps"), message, 'primary_metric = "final"')
        return
    keys = ("campaign.primary_metric", "training.eval_every")
    fix = f'[evaluation] schedule = "verdict", or eval_every = {max(1, max_steps // 10)}'
    if len(steps) < DECIDING:
        done = " and ".join(map(str, steps))
        message = f'is "{metric}", the mean of three evaluations, and after the start there'
        message += f" {'is that' if len(steps) == 1 else 'are those'} after {done} of {max_steps} steps"
        yield ConfigIssue(keys, message, fix)
    elif too_early(steps[0], max_steps):
        first, second, last = steps
        message = f'is "{metric}", here the mean of those after {first}, {second} and {last} of {max_steps} steps: '
        yield ConfigIssue(keys, f"{message}not of the end of training alone; for that type", fix, warning=True)


RULES = (
    environment_rules,
    model_rules,
    start_rules,
    executor_rules,
    server_executor_rules,
    worker_server_rules,
    shard_rules,
    learning_rules.overlong_rules,
    warmup_rules,
    correctness_rules,
    slurm_rules,
    learning_rules.off_policy_rules,
    server_rules,
    learning_rules.anneal_rules,
    learning_rules.group_rules,
    learning_rules.update_rules,
    learning_rules.critic_rules,
    learning_rules.distillation_rules,
    learning_rules.schedule_rules,
    learning_rules.sepa_rules,
    data_rules,
    learning_rules.maxrl_rules,
    audit_rules,
    evaluation_rules,
    backpressure_rules,
    squeeze_rules,
    declared_rules,
    declared_set_rules,
    deciding_rules,
)


def rule_issues(config: Config) -> Iterator[ConfigIssue]:
    """Yield the issues of all sections, and of the rules between them, for this configuration as a single run."""
    for section in sections():
        yield from getattr(config, section).issues()
    for rule in RULES:
        yield from rule(config)
