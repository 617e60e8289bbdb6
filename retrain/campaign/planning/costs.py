"""What a campaign will cost, from the model's ``config.json`` and the TOML alone: no torch, no weights, no network.

Everything is an estimate with its assumptions in ``assumptions``; parameter counts of Llama-like models are exact up
to attention biases. Units: bytes, seconds, floating-point operations, tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from retrain.config.modes import Need
from retrain.config.schedule import part_evaluations, whole_evaluations
from retrain.files import read_json
from retrain.gpus import usable_gpu
from retrain.models import find_file
from retrain.models.sizes import (
    LOGITS_COPIES,
    adapter_bytes,
    cpu_token_budget,
    critic_bytes,
    decoding_copies,
    kept_bytes,
    update_copy,
)
from retrain.models.targets import DENSE_FAMILIES, targeted

if TYPE_CHECKING:
    from retrain.config import Config

PROMPT_TOKENS = {"arithmetic": 12}
"""Typical prompt length by data source, of the bundled model's tokenizer."""

OTHER_PROMPT_TOKENS = 128
"""Assumed where the length is not known: it needs the tokenizer and the data."""

GPU_MICRO_BATCH_TOKENS = 4096
"""Assumed for ``micro_batch_tokens = "auto"``, which on a GPU follows from its memory."""

LOGITS_BYTES = {"cpu": 8 << 20, "gpu": 256 << 20}
"""Of a chunk of the vocabulary's logits: more never exist at a time; some copies of it do."""

COMPUTE_SHARE, BANDWIDTH_SHARE = 0.35, 0.5
"""Shares of the peak that eager torch code reaches."""

LAYER_SECONDS = {"cpu": 3e-4, "gpu": 3e-4}
"""Fixed cost of one layer's forward pass for one decoded token: launching its operations."""

GPU_PEAKS = {"H200": (989, 4800), "H100": (989, 3350), "A100": (312, 2039), "L40S": (362, 864), "4090": (165, 1008)}
"""bf16 TFLOP/s and GB/s by a part of the GPU's name, from the makers' data sheets."""

TRAINING_OPERATIONS, FORWARD_OPERATIONS = 4, 2
"""Per active parameter and token: a forward pass, and a backward pass to the inputs alone, because the base is frozen;
and of one forward pass more."""

PROCESS_BYTES = {"cpu": 500 << 20, "gpu": 0}
"""Of Python, torch and transformers themselves, measured after a first product; a GPU holds none of that."""


def scorings(config: Config) -> list[str]:
    """The forward passes that all rollouts go through before the first update of a step, in words."""
    needs = config.algorithm.needs
    own = Need.LOGPROBS in needs or config.training.several_updates
    passes = {
        "the critic's values": Need.VALUES in needs,
        "the policy's own log-probabilities": own,
        "the base's": Need.REFERENCE in needs,
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
    reached = f"{COMPUTE_SHARE:.0%} of peak compute and {BANDWIDTH_SHARE:.0%} of peak bandwidth are reached"
    on_cpu = []
    if memory is not None and memory.head_copy:
        on_cpu.append("weights are copied for decoding, as with a torch that has oneDNN")
    if memory is not None and memory.process:
        on_cpu.append("what the system keeps of the model's file is not counted")
    elsewhere = []
    if config.inference.served:
        elsewhere.append("servers, which are not asked, sample as fast as this device would, in memory of their own")
    return (every, operations, reached, kept, *on_cpu, *elsewhere)


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer, as far as its costs depend on them."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool
    mlp_matrices: int = 3
    experts: int = 1
    active_experts: int = 1
    head_norms: bool = False
    dense: bool = True
    """Whether it decodes as plain matrix products, which on a CPU may read copies of the weights."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture | None:
        """Read a ``transformers`` config.json; None when it is no decoder whose sizes we can read."""
        config = config.get("text_config", config)

        def first(*names: str) -> Any:
            return next((config[name] for name in names if config.get(name) is not None), None)

        layers, heads = first("num_hidden_layers", "n_layer"), first("num_attention_heads", "n_head")
        hidden, vocab = first("hidden_size", "n_embd"), first("vocab_size")
        if not (layers and hidden and vocab and heads):
            return None
        experts = first("num_experts", "num_local_experts", "n_routed_experts") or 1
        old_style = "n_embd" in config
        return cls(
            layers=layers,
            hidden=hidden,
            vocab=vocab,
            heads=heads,
            kv_heads=first("num_key_value_heads") or heads,
            head_dim=first("head_dim") or hidden // heads,
            intermediate=(first("moe_intermediate_size") if experts > 1 else None)
            or first("intermediate_size", "n_inner")
            or 4 * hidden,
            tied=bool(config.get("tie_word_embeddings", old_style)),
            mlp_matrices=2 if old_style else 3,
            experts=experts,
            active_experts=first("num_experts_per_tok") or 1,
            head_norms=str(config.get("model_type", "")).startswith("qwen3"),
            dense=config.get("model_type") in DENSE_FAMILIES,
        )

    @property
    def attention_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the attention's linear layers, by their usual names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
        }

    @property
    def mlp_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of one expert's linear layers, by their usual names."""
        up = {"gate_proj": (self.hidden, self.intermediate)} if self.mlp_matrices == 3 else {}
        return {**up, "up_proj": (self.hidden, self.intermediate), "down_proj": (self.intermediate, self.hidden)}

    def parameters(self, experts: int | None = None) -> int:
        """Number of parameters, or of those that one token meets when ``experts`` is given."""
        experts = self.experts if experts is None else experts
        router = self.hidden * self.experts if self.experts > 1 else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.linear_parameters(experts) + self.layers * (router + norms) + embeddings + self.hidden

    def linear_parameters(self, experts: int) -> int:
        """Numbers in the linear layers of all blocks, with so many experts."""
        attention = sum(a * b for a, b in self.attention_shapes.values())
        mlp = experts * sum(a * b for a, b in self.mlp_shapes.values())
        return self.layers * (attention + mlp)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with; with dense models nearly all."""
        return self.parameters(self.active_experts)

    def adapter_parameters(self, rank: int, target_modules: str | Sequence[str]) -> int:
        """LoRA parameters at ``rank``: rank·(inputs + outputs) of every adapted linear layer."""
        attention = {f"self_attn.{name}": sum(sizes) for name, sizes in self.attention_shapes.items()}
        mlp = {f"mlp.{name}": self.experts * sum(sizes) for name, sizes in self.mlp_shapes.items()}
        return rank * sum(
            features
            for layer in range(self.layers)
            for name, features in (attention | mlp).items()
            if targeted(f"model.layers.{layer}.{name}", target_modules)
        )

    def cache_bytes(self, bytes_per_number: int) -> int:
        """Bytes of keys and values that one token occupies."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def kept_bytes(self, bytes_per_number: int) -> int:
        """Bytes that one token's forward pass keeps for its backward pass."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = self.active_experts * self.intermediate
        return self.layers * kept_bytes(self.hidden, queries, keys, wide, self.head_norms, bytes_per_number)


@dataclass(frozen=True)
class Device:
    """Where the campaign would run and how fast that is at best. ``memory`` (bytes) is that of a CPU's machine, which
    decides what is copied; for a GPU it is not asked."""

    kind: str
    name: str
    flops: float
    bandwidth: float
    memory: int = 0


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


QWEN3 = {
    "0.6B": (28, 1024, 16, 3072, True),
    "1.7B": (28, 2048, 16, 6144, True),
    "4B": (36, 2560, 32, 9728, True),
    "8B": (36, 4096, 32, 12288, False),
    "14B": (40, 5120, 40, 17408, False),
    "32B": (64, 5120, 64, 25600, False),
}
"""Layers, hidden, heads, intermediate, tied of the published dense models, so that the shipped GPU campaigns can be
explained on a machine that has never met a hub."""


def architecture_of(model: str, revision: str | None = None) -> Architecture | None:
    """Sizes of ``model``, or None when its config.json is not on this machine or is of an unknown form."""
    path = find_file(model, "config.json", revision)
    if path is not None:
        return Architecture.from_config(read_json(path))
    sizes = QWEN3.get(model.removeprefix("Qwen/Qwen3-").removesuffix("-Base")) if model.startswith("Qwen/") else None
    if sizes is None:
        return None
    layers, hidden, heads, intermediate, tied = sizes
    return Architecture(layers, hidden, 151_936, heads, 8, 128, intermediate, tied, head_norms=True)


def find_device(devices: str, peak_gflops: float = 0, peak_bandwidth_gb_s: float = 0) -> Device:
    """The device that ``[backend] devices`` would use here; peaks given in ``[backpressure]`` win over the table."""
    gpu = "" if devices == "cpu" else usable_gpu()
    if gpu:
        tflops, gigabytes = next((peaks for part, peaks in GPU_PEAKS.items() if part in gpu), (150, 900))
        kind, name, flops, bandwidth, memory = "gpu", gpu, tflops * 1e12, gigabytes * 1e9, 0
    else:
        import psutil

        cores, memory = os.cpu_count() or 1, int(psutil.virtual_memory().total)
        kind, name, flops, bandwidth = "cpu", f"{cores} CPU cores", cores * 60e9, 20e9
    return Device(kind, name, peak_gflops * 1e9 or flops, peak_bandwidth_gb_s * 1e9 or bandwidth, memory)


def reference_gpu() -> Device:
    """An H100, to say what a file would take there when this machine has no GPU."""
    tflops, gigabytes = GPU_PEAKS["H100"]
    return Device("gpu", "one H100", tflops * 1e12, gigabytes * 1e9)


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
    config: Config, architecture: Architecture, device: Device, prompt_tokens: int | None = None
) -> Estimate:
    """Costs of one resolved run configuration."""
    work = work_of(config, prompt_tokens)
    width, weights = _width(config, device), architecture.parameters()
    rank, targets = config.model.lora_rank, config.lora.target_modules
    adapter = architecture.adapter_parameters(rank, targets)
    critic = architecture.adapter_parameters(config.lane_ranks - rank, targets)
    critic += config.algorithm.critic * (architecture.hidden + 1)
    asked = config.training.micro_batch_tokens
    budget = cpu_token_budget(width * weights) if device.kind == "cpu" else GPU_MICRO_BATCH_TOKENS
    micro_batch = min(work.rows * work.length, budget if asked == "auto" else asked)
    logits = LOGITS_COPIES * 4 * architecture.vocab
    block_copy = head_copy = 0
    served = config.inference.served
    if device.kind == "cpu":
        blocks = architecture.dense * architecture.linear_parameters(architecture.experts)
        head = architecture.vocab * architecture.hidden
        block_copy, head_copy = decoding_copies(blocks, head, weights, width, device.memory)
    memory = Memory(
        base=weights * width,
        adapter=adapter_bytes(adapter, width, config.published_versions) + critic_bytes(critic),
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


def cohort_seconds(
    configs: Sequence[Config], architecture: Architecture, device: Device, prompt_tokens: int | None = None
) -> float:
    """Seconds of runs that step together: one decode batch for all of them, which reads the weights once, and one
    update after the other. They are taken to have equally many steps."""
    width, runs = _width(configs[0], device), [work_of(config, prompt_tokens) for config in configs]
    longest, widest = max(run.tokens for run in runs), max(run.length for run in runs)

    def decode(sequences: int) -> float:
        reading = architecture.parameters() * width + sequences * widest / 2 * architecture.cache_bytes(width)
        computing = 2 * architecture.active_parameters * sequences
        token = max(reading / (device.bandwidth * BANDWIDTH_SHARE), computing / (device.flops * COMPUTE_SHARE))
        return longest * (token + architecture.layers * LAYER_SECONDS[device.kind])

    seconds = max(run.steps for run in runs) * decode(sum(run.rows for run in runs))
    for config, run in zip(configs, runs, strict=True):
        operations = all_training_operations(config) * architecture.active_parameters * run.rows * run.length
        seconds += operations / (device.flops * COMPUTE_SHARE)
    evaluated = [run for run in runs if run.evaluated]
    if evaluated:
        seconds += evaluated[0].evaluations * decode(sum(run.evaluated for run in evaluated))
        if evaluated[0].parts:
            seconds += evaluated[0].parts * decode(sum(run.part for run in evaluated))
        seconds += evaluated[0].at_start * decode(evaluated[0].evaluated)  # of the base, once for all
    return seconds


def _width(config: Config, device: Device) -> int:
    """Bytes of one number of the base."""
    automatic = 4 if device.kind == "cpu" else 2
    return {"float64": 8, "float32": 4, "bfloat16": 2}.get(config.inference.dtype, automatic)
