"""Estimates samples and memory of a plan's runs from the TOML file, the data and the model's ``config.json``.

Neither torch nor weights are read. Parameter counts of Llama-like models are exact up to attention biases. Units:
bytes, tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from retrain.config import Config
from retrain.config.evaluation import HeldOut, part_evaluations, whole_evaluations
from retrain.models.layers import (
    COPY_SHARE,
    LOGITS_COPIES,
    NF4_BLOCK,
    SMALL_MODEL_BYTES,
    TRAINED_BYTES,
    Architecture,
    adapter_bytes,
    cpu_token_budget,
    gpu_token_budget,
    held_weights,
    update_copy,
)

ASSUMED_PROMPT_TOKENS = 128  # Assumed where prompts were not measured: that needs the data and the tokenizer

# Assumed for ``micro_batch_tokens = "auto"`` on a GPU of unknown memory
ASSUMED_MICRO_BATCH_TOKENS = 4096

# Largest chunk of vocabulary logits that is computed at a time; a few copies of it exist together
LOGITS_BYTES = {"cpu": 8 << 20, "gpu": 256 << 20}

# Memory of Python, torch and transformers, measured after a first matrix product; none of it is on the GPU
PROCESS_BYTES = {"cpu": 500 << 20, "gpu": 0}


@dataclass(frozen=True)
class RunSize:
    """The number of completions and tokens of one run.

    A step trains on ``rows`` completions of at most ``tokens`` tokens; dynamic sampling samples up to ``draws`` times
    as many. ``evaluations`` counts full evaluations after the start, each with ``evaluated`` completions of at most
    ``evaluated_tokens`` tokens in total. ``parts`` counts evaluations of a part of the problems, each with ``part``
    completions of at most ``part_tokens`` tokens in total.
    """

    prompt: int
    tokens: int
    rows: int
    steps: int
    updates: int
    evaluated: int
    evaluated_tokens: int
    evaluations: int
    at_start: bool
    part: int = 0
    part_tokens: int = 0
    parts: int = 0
    draws: int = 1

    @property
    def length(self) -> int:
        return self.prompt + self.tokens

    @property
    def completions(self) -> int:
        return self.steps * self.rows

    @property
    def evaluation_completions(self) -> int:
        return (self.at_start + self.evaluations) * self.evaluated + self.parts * self.part

    @property
    def evaluation_tokens(self) -> int:
        return (self.at_start + self.evaluations) * self.evaluated_tokens + self.parts * self.part_tokens


def held_out_sets(config: Config, sizes: Mapping[str, int] | None = None) -> list[HeldOut]:
    """Return the held-out sets. ``sizes``: number of problems that the data have for each set; None if not read."""
    real_sizes = sizes or {}
    return [
        replace(held_out, problems=real_sizes.get(held_out.name, held_out.problems)) for held_out in config.held_out
    ]


def run_size(config: Config, prompt_tokens: int | None = None, sizes: Mapping[str, int] | None = None) -> RunSize:
    training, evaluation, environment = config.training, config.evaluation, config.environment
    schedule = (evaluation.schedule, training.max_steps, training.eval_every)
    sets = held_out_sets(config, sizes)
    parts = [each.part for each in sets]
    most = environment.max_episode_tokens or 2**62

    def completions(of: Sequence[HeldOut]) -> int:
        return sum(each.problems * each.samples for each in of)

    def tokens(of: Sequence[HeldOut]) -> int:
        turns = environment.turns
        return sum(each.problems * each.samples * min(each.sampling.max_tokens * turns, most) for each in of)

    return RunSize(
        prompt=prompt_tokens or ASSUMED_PROMPT_TOKENS,
        tokens=min(training.max_tokens * environment.turns, most),
        rows=training.batch_size * training.group_size,
        draws=1 + training.dynamic_sampling,
        steps=training.max_steps,
        updates=training.max_steps * training.updates,
        evaluated=completions(sets),
        evaluated_tokens=tokens(sets),
        evaluations=sum(map(len, whole_evaluations(*schedule))) if sets else 0,
        at_start=evaluation.at_start and bool(sets),
        part=completions(parts),
        part_tokens=tokens(parts),
        parts=part_evaluations(*schedule) if sets else 0,
    )


def sampled_evaluations(configs: Sequence[Config], sizes: Sequence[RunSize]) -> int:
    """Return the number of held-out completions that all runs of a plan sample.

    Runs with the same held-out sets and rewards share the evaluation of the untrained model, which counts once.
    """
    total, untrained = 0, dict[str, int]()
    for i, (config, size) in enumerate(zip(configs, sizes, strict=True)):
        at_start = size.at_start * size.evaluated
        total += size.evaluation_completions - at_start
        resumed = i if config.resume.from_ else None  # does not start from the base
        audit = config.audit.model_dump_json() if config.audit.is_enabled else None
        measured, grading = config.environment.measured, config.reward.grading
        key = (resumed, config.held_out, measured, grading, config.campaign.seed, audit)
        untrained[repr(key)] = at_start
    return total + sum(untrained.values())


@dataclass(frozen=True)
class Device:
    kind: Literal["cpu", "gpu"]
    memory: int = 0  # Bytes of the GPU (0: unknown), or of the machine for a CPU


@dataclass(frozen=True)
class Memory:
    """Bytes of one run, or of a cohort.

    Always in memory: ``process`` (Python and torch, on a CPU), ``base``, ``head_copy`` (output layer, copied for
    decoding), ``update_copy`` (bfloat16 weights, for ``update_dtype``) and ``adapter`` (with critic and optimizers). In
    addition either ``training`` (for a micro-batch of ``micro_batch_tokens``), or ``sampling`` (for all sequences of a
    step) and ``block_copy`` (weights copied for decoding on a CPU).
    """

    base: int
    adapter: int
    micro_batch_tokens: int
    training: int
    sampling: int
    process: int = 0
    head_copy: int = 0
    block_copy: int = 0
    update_copy: int = 0

    @property
    def least(self) -> int:
        """Return the memory needed if sequences decode a few at a time."""
        return self._resident + max(self.training, self.block_copy)

    @property
    def peak(self) -> int:
        """Return the memory used if all sequences of a step decode at once."""
        return self._resident + max(self.training, self.block_copy + self.sampling)

    @property
    def _resident(self) -> int:
        return self.process + self.base + self.head_copy + self.update_copy + self.adapter


def cohort_memory(runs: Sequence[Memory]) -> Memory:
    """Return the memory of runs that step together over one base and train one after the other."""
    return replace(
        runs[0],
        adapter=sum(run.adapter for run in runs),
        micro_batch_tokens=max(run.micro_batch_tokens for run in runs),
        training=max(run.training for run in runs),
        sampling=sum(run.sampling for run in runs),
        update_copy=max(run.update_copy for run in runs),
    )


def trained_parameters(config: Config, architecture: Architecture) -> tuple[int, int]:
    """Return the numbers of trained parameters of the policy's adapter and of the critic (its head and, if it has one,
    its adapter; 0 without a critic)."""
    rank, targets = config.model.lora_rank, config.lora.target_modules
    critic = architecture.adapter_parameters(config.lane_ranks - rank, targets)
    critic += config.algorithm.critic * (architecture.hidden + 1)
    return architecture.adapter_parameters(rank, targets), critic


def run_memory(
    config: Config, architecture: Architecture, device: Device, prompt_tokens: int | None = None, lanes: int = 1
) -> Memory:
    size = run_size(config, prompt_tokens)
    width, weights = number_bytes(config, device), architecture.parameters()
    adapter, critic = trained_parameters(config, architecture)
    micro_batch_tokens = config.training.micro_batch_tokens
    full_base, parts = base_bytes(config, architecture, width), config.base_parts
    base = full_base
    if parts > 1:
        layers = architecture.linear_parameters(architecture.experts) * width
        base = held_weights(base // parts, base - layers, layers // architecture.layers)
    stays = adapter_bytes(adapter, width, config.published_versions) + critic * TRAINED_BYTES
    if device.kind == "cpu":
        budget = cpu_token_budget(full_base)
    elif device.memory:
        room = max(0, device.memory - base - lanes * stays)
        budget = gpu_token_budget(room, architecture.kept_bytes(width))
    else:
        budget = ASSUMED_MICRO_BATCH_TOKENS
    micro_batch = min(size.rows * size.length, budget if micro_batch_tokens == "auto" else micro_batch_tokens)
    logits = LOGITS_COPIES * 4 * architecture.vocab
    block_copy = head_copy = 0
    served = config.inference.served
    if device.kind == "cpu" and parts == 1 and not config.model.quantized:
        block_copy, head_copy = decoding_copies(architecture, width, device.memory)
    return Memory(
        base=base,
        adapter=stays,
        micro_batch_tokens=micro_batch,
        training=micro_batch * architecture.kept_bytes(width) + 4 * LOGITS_BYTES[device.kind],
        sampling=0 if served else size.rows * (size.length * architecture.cache_bytes(width) + logits),
        process=PROCESS_BYTES[device.kind],
        head_copy=head_copy,
        block_copy=0 if served else block_copy,
        update_copy=update_copy(weights, width, config.training.update_dtype),
    )


def decoding_copies(architecture: Architecture, width: int, total_memory: int) -> tuple[int, int]:
    """Return the bytes of the weight copies for decoding on a CPU: of the blocks (kept during a call) and of the output
    layer (kept for good).

    The copy of a large model is packed for matrix products, except in fp64. Other copies have the adapter merged in;
    bf16 has no such copy. Weights that take more than ``COPY_SHARE`` of the memory are not copied.
    """
    weights = architecture.parameters() * width
    if weights > COPY_SHARE * total_memory:
        return 0, 0
    packed, merged = width <= 4 and weights > SMALL_MODEL_BYTES, width >= 4
    blocks = architecture.dense * architecture.linear_parameters(architecture.experts) * width
    return (packed or merged) * blocks, packed * architecture.vocab * architecture.hidden * width


def verified_ranks(config: Config) -> int:
    """Return the largest number of LoRA ranks that squeeze verifies on held-out problems; 0 without verification."""
    squeeze, held_out = config.squeeze, config.decisive
    if not squeeze.enabled or squeeze.verify == "off" or held_out is None or held_out.problems < 2:
        return 0
    tabulated = len(squeeze.target_ranks) if squeeze.target_ranks else config.model.lora_rank.bit_length()
    return 1 + (tabulated if squeeze.verify == "all" else 0)


def base_bytes(config: Config, architecture: Architecture, width: int) -> int:
    """Return the bytes of the base's weights. ``width``: bytes of a number that is not quantised, as in fused experts
    and outside linear layers."""
    unquantized = architecture.parameters() * width
    if not (config.model.quantized and architecture.dense):
        return unquantized
    linear = architecture.linear_parameters(architecture.experts)
    in_8_bits, in_4_bits = linear + linear // architecture.hidden * width, linear // 2 + linear // NF4_BLOCK * 4
    return unquantized - linear * width + (in_8_bits if config.model.quantize == "int8" else in_4_bits)


def number_bytes(config: Config, device: Device) -> int:
    automatic = 4 if device.kind == "cpu" else 2
    return {"float64": 8, "float32": 4, "bfloat16": 2}.get(config.inference.dtype, automatic)
