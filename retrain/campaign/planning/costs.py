"""What a campaign will cost, from the model's ``config.json`` and the TOML alone: no torch, no weights, no network.

Everything is an estimate with its assumptions in ``assumptions``; parameter counts of Llama-like models are exact up
to attention biases. Units: bytes, seconds, floating-point operations, tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from retrain.campaign.planning.architecture import Architecture
from retrain.campaign.planning.devices import Device
from retrain.config.modes import Need
from retrain.config.schedule import part_evaluations, whole_evaluations
from retrain.models.sizes import (
    LEAST_ROWS,
    LOGITS_COPIES,
    adapter_bytes,
    cpu_token_budget,
    critic_bytes,
    decoding_copies,
    gpu_token_budget,
    held_weights,
    quantized_bytes,
    update_copy,
)

if TYPE_CHECKING:
    from retrain.config import Config

PROMPT_TOKENS = {"arithmetic": 12}
"""Typical prompt length by data source, of the bundled model's tokenizer."""

OTHER_PROMPT_TOKENS = 128
"""Assumed where the length is not known: it needs the tokenizer and the data."""

ASSUMED_MICRO_BATCH_TOKENS = 4096
"""Assumed for ``micro_batch_tokens = "auto"`` on a GPU whose memory is not known, from which it follows."""

LOGITS_BYTES = {"cpu": 8 << 20, "gpu": 256 << 20}
"""Of a chunk of the vocabulary's logits: more never exist at a time; some copies of it do."""


@dataclass(frozen=True)
class Reached:
    """What of a device's peaks is reached: shares of its products and of its bandwidth, and the fixed ``layer_seconds``
    of one layer's forward pass for one decoded token, which go into launching its operations."""

    compute: float
    bandwidth: float
    layer_seconds: float

    @property
    def words(self) -> str:
        """In words, without the fixed costs."""
        return f"{self.compute:.0%} of peak compute and {self.bandwidth:.0%} of peak bandwidth are reached"


LIKELY = Reached(0.35, 0.5, 3e-4)
"""Of eager torch code."""
BEST, WORST = Reached(0.5, 0.8, 3e-5), Reached(0.15, 0.25, 6e-4)
"""Between these it should lie on a GPU: decode steps replayed as CUDA graphs and products of good shapes, and launching
that waits for a slow processor with products of bad ones. Nothing of this was measured."""

TRAINING_OPERATIONS, FORWARD_OPERATIONS = 4, 2
"""Per active parameter and token: a forward pass, and a backward pass to the inputs alone, because the base is frozen;
and of one forward pass more."""

PROCESS_BYTES = {"cpu": 500 << 20, "gpu": 0}
"""Of Python, torch and transformers themselves, measured after a first product; a GPU holds none of that."""


def scorings(config: Config) -> list[str]:
    """The forward passes that all rollouts go through before the first update of a step, in words."""
    needs = config.algorithm.needs | config.distillation.needs
    own = Need.LOGPROBS in needs or config.training.several_updates
    passes = {
        "the critic's values": Need.VALUES in needs,
        "the policy's own log-probabilities": own,
        "the base's": Need.REFERENCE in needs,
        "the teacher's": Need.TEACHER in needs and config.distillation.url is None,
    }
    return [words for words, made in passes.items() if made]


def _update_passes(config: Config, warming: bool = False) -> dict[str, int]:
    """Operations per active parameter and token in one pass over a batch, by what they are for, in words. While the
    critic is ``warming`` up it trains alone, with a shared adapter its head alone, which needs no backward pass."""
    passes: dict[str, int] = {}
    if not warming:
        passes["one forward, and one backward that makes no gradients of the base"] = TRAINING_OPERATIONS
        if config.algorithm.loss_kl_coef > 0 or config.logging.log_kl:
            passes["one of the base for the KL"] = FORWARD_OPERATIONS
        if config.distillation.whole:
            passes["one of the teacher for the loss"] = FORWARD_OPERATIONS
        if config.chooses_anew:
            passes["one before each update, for what m2po leaves out"] = FORWARD_OPERATIONS
        if config.algorithm.critic and not config.critic.share_adapter:
            passes["as many as these two for the critic"] = TRAINING_OPERATIONS
    elif config.critic.share_adapter:
        passes["one forward for the critic's head"] = FORWARD_OPERATIONS
    else:
        passes["one forward and one backward for the critic"] = TRAINING_OPERATIONS
    return passes


def training_operations(config: Config, warming: bool = False) -> int:
    """Operations per active parameter for all that a step does with one sampled token: scoring it once, and every pass
    over the batch. ``warming``: in a step in which the critic trains alone."""
    update = sum(_update_passes(config, warming).values())
    return FORWARD_OPERATIONS * len(scorings(config)) + config.training.num_iterations * update


def all_training_operations(config: Config) -> int:
    """The same, added up over all steps of a run."""
    steps = config.training.max_steps
    alone = min(config.critic.warmup_steps, steps) if config.algorithm.critic else 0
    return alone * training_operations(config, warming=True) + (steps - alone) * training_operations(config)


def assumptions(config: Config, memory: Memory | None = None) -> tuple[str, ...]:
    """What the estimates of one run take for granted, with what this ``memory`` of it does."""
    training, scored = config.training, scorings(config)
    every = "every completion at full length (most end earlier), no prompt left out of the update"
    if training.target_kl is not None and training.num_iterations > 1:
        every += ", every pass made (target_kl ends them earlier)"
    if training.dynamic_sampling:
        every += ", no prompt drawn again (dynamic_sampling)"
    operations = f"training a token costs {training_operations(config)} operations per active parameter: "
    if scored:
        each = " each" if len(scored) > 1 else ""
        operations += f"before the first update one forward{each} for {' and '.join(scored)}, then "
    if training.num_iterations > 1:
        operations += f"{training.num_iterations} times over "
    operations += ", and ".join(_update_passes(config))
    if config.algorithm.critic and config.critic.warmup_steps:
        operations += f" (in the first {config.critic.warmup_steps} steps {training_operations(config, warming=True)})"
    versions = config.published_versions
    published = "the published adapter" if versions == 1 else f"{versions} versions of the published adapter"
    kept = f"adapter, gradient, two Adam moments and {published} in fp32"
    if config.algorithm.critic:
        kept += ", and so the critic, which is not published"
    on_cpu = []
    if memory is not None and memory.head_copy:
        on_cpu.append("weights are copied for decoding, as with a torch that has oneDNN")
    if memory is not None and memory.process:
        on_cpu.append("what the system keeps of the model's file is not counted")
    elsewhere = []
    if config.inference.served:
        elsewhere.append("servers, which are not asked, sample as fast as this device would, in memory of their own")
    return (every, operations, LIKELY.words, kept, *on_cpu, *elsewhere)


@dataclass(frozen=True)
class Memory:
    """Bytes of one run. ``process`` (Python and torch, on a CPU), ``base`` with ``head_copy`` (its output layer as
    decoding reads it) and ``adapter`` (with critic and optimizers) stay; beside them there is either ``training``, what
    a micro-batch of ``micro_batch_tokens`` takes, or ``sampling``, what all sequences of a step take at once, with
    ``block_copy``, the weights that decoding on a CPU reads."""

    base: int
    adapter: int
    micro_batch_tokens: int
    training: int
    sampling: int
    process: int = 0
    head_copy: int = 0
    block_copy: int = 0
    update_copy: int = 0
    """The weights in bfloat16, as `update_dtype` has it; it stays as well."""

    def least(self, lanes: int = 1) -> int:
        """What ``lanes`` runs like this one need that step together; they train one after the other."""
        return self._staying(lanes) + max(self.training, self.block_copy)

    def peak(self, lanes: int = 1) -> int:
        """What they take where all sequences of a step decode at once."""
        return self._staying(lanes) + max(self.training, self.block_copy + lanes * self.sampling)

    def _staying(self, lanes: int) -> int:
        return self.process + self.base + self.head_copy + self.update_copy + lanes * self.adapter


def shared_memory(runs: Sequence[Memory]) -> Memory:
    """That of runs that step together over one base, each with what is its own."""
    return replace(
        runs[0],
        adapter=sum(run.adapter for run in runs),
        training=max(run.training for run in runs),
        sampling=sum(run.sampling for run in runs),
        update_copy=max(run.update_copy for run in runs),
    )


@dataclass(frozen=True)
class Estimate:
    """Costs of one run in seconds, and of the process that trains it in bytes (``memory``). ``critic_parameters`` are
    those of its head and, where it has one, its own adapter; 0 without a critic."""

    adapter_parameters: int
    critic_parameters: int
    memory: Memory
    seconds: float


@dataclass(frozen=True)
class Work:
    """What one run samples and trains on. ``rows`` are the completions of a step, ``evaluated`` those of a held-out
    evaluation, of which there are ``evaluations`` after the start and, with ``at_start``, one before it; there are
    ``parts`` more, of ``part`` completions each, for the curve alone. ``draws``: how often as many as a step's
    completions are sampled for it at most."""

    prompt: int
    tokens: int
    rows: int
    steps: int
    evaluated: int
    evaluations: int
    at_start: bool
    part: int = 0
    parts: int = 0
    draws: int = 1

    @property
    def length(self) -> int:
        """Tokens of a prompt and its completion."""
        return self.prompt + self.tokens

    @property
    def completions(self) -> int:
        """Completions of all steps."""
        return self.steps * self.rows

    @property
    def evaluation_completions(self) -> int:
        """Completions of all held-out evaluations."""
        return (self.at_start + self.evaluations) * self.evaluated + self.parts * self.part


def work_of(config: Config, prompt_tokens: int | None = None) -> Work:
    """The work of one resolved run configuration; prompts are taken to be typical where they were not measured."""
    training, evaluation = config.training, config.evaluation
    evaluated = sum(each.problems * each.samples for each in config.held_out)
    asked = (evaluation.schedule, training.max_steps, training.eval_every)
    return Work(
        prompt=prompt_tokens or PROMPT_TOKENS.get(config.data.source, OTHER_PROMPT_TOKENS),
        tokens=min(training.max_tokens * config.environment.turns, config.environment.max_episode_tokens or 2**62),
        rows=training.batch_size * training.group_size,
        draws=1 + training.dynamic_sampling,
        steps=training.max_steps,
        evaluated=evaluated,
        evaluations=len(whole_evaluations(*asked)) if evaluated else 0,
        at_start=evaluation.at_start and evaluated > 0,
        part=sum(each.part.problems * each.part.samples for each in config.held_out),
        parts=len(part_evaluations(*asked)) if evaluated else 0,
    )


def estimate_run(
    config: Config, architecture: Architecture, device: Device, prompt_tokens: int | None = None, lanes: int = 1
) -> Estimate:
    """Costs of one resolved run configuration, which steps together with others: there are so many ``lanes``."""
    work = work_of(config, prompt_tokens)
    width, weights = number_bytes(config, device), architecture.parameters()
    rank, targets = config.model.lora_rank, config.lora.target_modules
    adapter = architecture.adapter_parameters(rank, targets)
    critic = architecture.adapter_parameters(config.lane_ranks - rank, targets)
    critic += config.algorithm.critic * (architecture.hidden + 1)
    asked = config.training.micro_batch_tokens
    whole, parts = base_bytes(config, architecture, width), config.base_parts
    base = whole
    if parts > 1:
        layers = architecture.linear_parameters(architecture.experts) * width
        base = held_weights(base // parts, base - layers, layers // architecture.layers)
    stays = adapter_bytes(adapter, width, config.published_versions) + critic_bytes(critic)
    if device.kind == "cpu":
        budget = cpu_token_budget(whole)
    elif device.memory:
        room = max(0, device.memory - base - lanes * stays)
        budget = gpu_token_budget(room, architecture.kept_bytes(width))
    else:
        budget = ASSUMED_MICRO_BATCH_TOKENS
    micro_batch = min(work.rows * work.length, budget if asked == "auto" else asked)
    logits = LOGITS_COPIES * 4 * architecture.vocab
    block_copy = head_copy = 0
    served = config.inference.served
    if device.kind == "cpu" and parts == 1 and not config.model.quantized:
        blocks = architecture.dense * architecture.linear_parameters(architecture.experts)
        head = architecture.vocab * architecture.hidden
        block_copy, head_copy = decoding_copies(blocks, head, weights, width, device.memory)
    memory = Memory(
        base=base,
        adapter=stays,
        micro_batch_tokens=micro_batch,
        training=micro_batch * architecture.kept_bytes(width) + 4 * LOGITS_BYTES[device.kind],
        sampling=0 if served else work.rows * (work.length * architecture.cache_bytes(width) + logits),
        process=PROCESS_BYTES[device.kind],
        head_copy=head_copy,
        block_copy=0 if served else block_copy,
        update_copy=update_copy(weights, width, config.training.update_dtype),
    )
    return Estimate(
        adapter_parameters=adapter,
        critic_parameters=critic,
        memory=memory,
        seconds=cohort_seconds([config], architecture, device, prompt_tokens),
    )


@dataclass(frozen=True)
class CohortTime:
    """Seconds of runs that step together: sampling and training of all steps, and evaluating, of which ``at_start`` is
    the untrained model's, asked once for all of a process's cohorts."""

    steps: int
    sampling: float
    training: float
    evaluating: float
    at_start: float

    @property
    def seconds(self) -> float:
        """Of all that they do."""
        return self.sampling + self.training + self.evaluating + self.at_start

    @property
    def step(self) -> float:
        """Of one step, without evaluations."""
        return (self.sampling + self.training) / self.steps


def cohort_seconds(
    configs: Sequence[Config], architecture: Architecture, device: Device, prompt_tokens: int | None = None
) -> float:
    """Seconds of runs that step together, where all of their sequences decode at once."""
    return cohort_time(configs, architecture, device, prompt_tokens).seconds


def cohort_time(
    configs: Sequence[Config],
    architecture: Architecture,
    device: Device,
    prompt_tokens: int | None = None,
    rows: int = 0,
    reached: Reached = LIKELY,
) -> CohortTime:
    """Time of runs that step together: one decode batch for all of them, which reads the weights once, and one update
    after the other. They are taken to have equally many steps. ``rows`` sequences decode at once (0: all)."""
    runs = [work_of(config, prompt_tokens) for config in configs]
    flops, steps = device.flops * reached.compute, max(run.steps for run in runs)

    def decode(sequences: int) -> float:
        return decode_seconds(configs, architecture, device, sequences, prompt_tokens, rows, reached)

    training = sum(
        all_training_operations(config) * architecture.active_parameters * run.rows * run.length / flops
        for config, run in zip(configs, runs, strict=True)
    )
    evaluating = at_start = 0.0
    if evaluated := [run for run in runs if run.evaluated]:
        evaluating = evaluated[0].evaluations * decode(sum(run.evaluated for run in evaluated))
        if evaluated[0].parts:
            evaluating += evaluated[0].parts * decode(sum(run.part for run in evaluated))
        at_start = evaluated[0].at_start * decode(evaluated[0].evaluated)
    return CohortTime(steps, steps * decode(sum(run.rows for run in runs)), training, evaluating, at_start)


def decode_seconds(
    configs: Sequence[Config],
    architecture: Architecture,
    device: Device,
    sequences: int,
    prompt_tokens: int | None = None,
    rows: int = 0,
    reached: Reached = LIKELY,
) -> float:
    """Seconds of sampling so many ``sequences`` of these runs, at most ``rows`` at once (0: all), in batches of equal
    size. A token of all of them takes what reading the weights and keys and values does, or what multiplying does where
    that is more, and the fixed cost of every layer."""
    width, runs = number_bytes(configs[0], device), [work_of(config, prompt_tokens) for config in configs]
    longest, widest = max(run.tokens for run in runs), max(run.length for run in runs)
    batches = -(-sequences // rows) if rows else 1
    together = sequences / batches
    reading = base_bytes(configs[0], architecture, width) + together * widest / 2 * architecture.cache_bytes(width)
    computing = 2 * architecture.active_parameters * together
    token = max(reading / (device.bandwidth * reached.bandwidth), computing / (device.flops * reached.compute))
    return batches * longest * (token + architecture.layers * reached.layer_seconds)


def verified_ranks(config: Config) -> int:
    """At how many ranks at most an adapter's held-out accuracy is measured after its run: the recommended one, and
    those of the table."""
    squeeze, held_out = config.squeeze, config.decisive
    if not squeeze.enabled or squeeze.verify == "off" or held_out is None or held_out.problems < 2:
        return 0
    tabulated = len(squeeze.target_ranks) if squeeze.target_ranks else config.model.lora_rank.bit_length()
    return 1 + (tabulated if squeeze.verify == "all" else 0)


def least_cached_tokens(config: Config, prompt_tokens: int) -> int:
    """Tokens of a run whose keys and values have to fit beside its cohort, where sequences have ``prompt_tokens`` and
    as many more as may be sampled."""
    training = config.training
    sampled = max([training.max_tokens, *(each.sampling.max_tokens for each in config.held_out)])
    return min(LEAST_ROWS, training.batch_size * training.group_size) * (prompt_tokens + sampled)


def base_bytes(config: Config, architecture: Architecture, width: int) -> int:
    """Bytes of the base's weights, whose numbers take ``width`` bytes where they are not quantised. Experts are not:
    they are no linear layers of their own."""
    whole = architecture.parameters() * width
    if not (config.model.quantized and architecture.dense):
        return whole
    linear = architecture.linear_parameters(architecture.experts)
    return whole - linear * width + quantized_bytes(linear, architecture.hidden, width, config.model.quantize)


def number_bytes(config: Config, device: Device) -> int:
    """Bytes of one number of the base."""
    automatic = 4 if device.kind == "cpu" else 2
    return {"float64": 8, "float32": 4, "bfloat16": 2}.get(config.inference.dtype, automatic)
