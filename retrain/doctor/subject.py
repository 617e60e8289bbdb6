"""Load the model under check: base, lanes, engine and policies, built as training builds them.

It is the model that a campaign names if its weights are on this machine, else random weights at its shapes with four
layers. Nothing is downloaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from retrain.algorithms import grpo
from retrain.algorithms.losses import PPO
from retrain.campaign.planning.plan import Plan
from retrain.config import Config, load, parse_dict
from retrain.config.tasks import Data
from retrain.data.arithmetic import arithmetic_problems
from retrain.data.prompts import render
from retrain.device import available_memory, resolve_device, resolve_dtype, set_up
from retrain.engines.local import LocalEngine
from retrain.errors import ModelError, UsageError, first_line
from retrain.models.directory import directory_fault, find_file, local_directory, model_fault
from retrain.models.layers import Architecture, model_config
from retrain.policy.base import BaseModel, workers_for
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes
from retrain.policy.objective import Objective, PolicyTerm
from retrain.records.schema.base import Row, Values
from retrain.rng import generator
from retrain.threads import Workers
from retrain.tokenizer import ByteTokenizer
from retrain.training.bases import Bases
from retrain.types import Action, Denominators, PolicyRef, Sample, SampleRequest, StepBatch

LAYERS = 4  # Layers of a model of random weights: all do the same, and errors grow visibly over four
GPU_SHAPES = "Qwen/Qwen3-8B"  # Model whose shapes are checked on a GPU if no file names one
LOGITS_SPREAD = 6.0
"""Standard deviation of the logits of random weights, as peaked as those of a trained model. After a fresh
initialisation all tokens are nearly equal, and rounding decides which one is drawn."""
WEIGHTS_SHARE = 0.5  # Share of the available memory that random weights may take
ADAPTER_SHARE = 0.1
"""Size of a trained adapter's contribution relative to its layer's output: large enough that a mixed-up lane shows in
every token, small enough that the model still works."""
LR = 1e-3
LARGE_PARAMETERS = 50_000_000  # Parameters above which a model on a CPU is checked with smaller batches


@dataclass(frozen=True)
class ModelSource:
    """The model to check. ``config``: resolved configuration of the file's first run. ``shapes``: a transformers
    config.json for random weights; None to load the configured model. ``requested_device``: the device as typed."""

    config: Config
    shapes: Values | None
    requested_device: str

    @classmethod
    def of(cls, file: Path | None, device: str) -> ModelSource:
        """Return the model of a campaign file, or without one the bundled model on a CPU and Qwen3-8B on a GPU.

        Raises UsageError and ConfigError for a file or device that cannot be used, ModelError for a model whose shapes
        are unknown.
        """
        devices = _devices(device)
        if file is None:
            on_gpu = devices != "cpu"
            config = parse_dict({"model": {"model": GPU_SHAPES}} if on_gpu else {})
            return cls(_on_device(config, devices), shapes_of(config) if on_gpu else None, device)
        config = Plan.of(load(file)).specs[0].config
        if config.backend.backend != "local":
            raise UsageError(f"{file} trains with {config.backend.backend}: there is nothing of retrain's own to check")
        model = config.model
        # A faulty directory is loaded too, so that its fault is reported as in training.
        fault = model_fault(model.model, trust_remote_code=model.trust_remote_code)
        cached = find_file(model.model, "config.json", model.revision)
        is_cached = cached is not None and not directory_fault(cached.parent, trust_remote_code=model.trust_remote_code)
        has_weights = fault or local_directory(model.model) or is_cached
        return cls(_on_device(config, devices), None if has_weights else shapes_of(config), device)


def _devices(device: str) -> str:
    if device == "auto":
        return "gpu:0" if torch.cuda.is_available() else "cpu"
    number = device.removeprefix("gpu:")
    if device != "cpu" and not (number != device and number.isdecimal()):
        message = f"--device {device!r} is none of auto, cpu, gpu:0, gpu:1 …; type: retrain doctor --device auto"
        raise UsageError(message)
    resolve_device(device)
    return device


def _on_device(config: Config, devices: str) -> Config:
    """Return the configuration for this device, without access to the hub."""
    data = config.model_dump(mode="json", by_alias=True)
    data["backend"]["devices"] = devices
    data["model"]["local_files_only"] = True
    return parse_dict(data)


def shapes_of(config: Config) -> Row:
    """Return the config.json of the configured model with at most ``LAYERS`` layers. Raises ModelError if unknown."""
    content = model_config(config.model.model, config.model.revision)
    if content is None:
        raise ModelError(
            f"neither weights nor config.json of {config.model.model!r} are on this machine, and nothing is "
            "downloaded: download it first, or give a file with a local directory"
        )
    shapes = dict(content.get("text_config", content))
    for key in ("num_hidden_layers", "n_layer"):
        if key in shapes:
            shapes[key] = min(LAYERS, shapes[key])
    if shapes.get("layer_types"):
        shapes["layer_types"] = shapes["layer_types"][:LAYERS]
    shapes.pop("quantization_config", None)
    # With random weights, a tied output layer would predict the input token again.
    return {**shapes, "tie_word_embeddings": False}


def random_base(shapes: Values, config: Config) -> BaseModel:
    """Return a model with random weights and a byte tokenizer, the same in every process on the same device. Raises
    ModelError if it does not fit in memory or transformers cannot make it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = resolve_device(config.backend.device)
    set_up(device)
    dtype = resolve_dtype(config.inference.dtype, device)
    sizes = Architecture.from_config(shapes)
    needed, available = (sizes.parameters() if sizes else 0) * dtype.itemsize, available_memory(device)
    if needed > WEIGHTS_SHARE * available:
        raise ModelError(
            f"random weights at the shapes of {config.model.model} take {needed / 2**30:.1f} GiB of "
            f"{available / 2**30:.1f} that are free: give --file with a smaller model, or another --device"
        )
    try:
        model_config = AutoConfig.for_model(**{key: value for key, value in shapes.items() if key != "dtype"})
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device), torch.no_grad():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(model_config, dtype=dtype).eval()
            ids = torch.arange(1, 65)[None] % int(shapes["vocab_size"])
            spread = float(model(input_ids=ids, use_cache=False).logits.float().std())
            model.get_output_embeddings().weight.mul_(round(LOGITS_SPREAD / spread, 2))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"no random weights can be made at the shapes of {config.model.model}: {first_line(error)}"
        raise ModelError(message) from error
    model.to(device).eval().requires_grad_(False)
    ends = shapes.get("eos_token_id")
    eos_ids = (int(shapes["vocab_size"]) - 1,) if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    name = f"{config.model.model} (shapes)"
    return BaseModel(name, model, ByteTokenizer(), device, dtype, eos_ids, 0, "random weights")


@dataclass(frozen=True)
class Sizes:
    prompts: int = 4
    samples: int = 4
    tokens: int = 48


@dataclass
class DoctorModel:
    """The loaded model. ``rates`` are set by the check that measures them; ``messages`` are the engine's."""

    source: ModelSource
    config: Config
    base: BaseModel
    lanes: Lanes
    engine: LocalEngine
    workers: Workers
    messages: list[str] = field(default_factory=list)
    rates: Mapping[str, float] | None = None

    @classmethod
    @contextmanager
    def open(cls, source: ModelSource) -> Iterator[DoctorModel]:
        # cuBLAS reads this when its first handle is made, and is repeatable only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
        messages: list[str] = []
        shapes = source.shapes
        with ExitStack() as stack:
            bases = stack.enter_context(Bases(None if shapes is None else lambda config: random_base(shapes, config)))
            base, lanes, engine = bases.with_engine(source.config, messages.append)
            workers = workers_for(base)
            stack.callback(workers.close)
            engine.workers = workers
            yield cls(source, source.config, base, lanes, engine, workers, messages)

    def __post_init__(self) -> None:
        self.on_gpu = self.base.device.type == "cuda"
        self.dtype = str(self.base.dtype).removeprefix("torch.")
        self.kinds = (self.dtype, self.base.device.type)  # keys by which limits differ
        self.parameters = sum(weight.numel() for weight in self.base.model.parameters())
        self.is_slow = not self.on_gpu and self.parameters > LARGE_PARAMETERS
        sizes = Sizes(2, 2, 8) if self.is_slow else Sizes()
        self.sizes = replace(sizes, tokens=min(sizes.tokens, self.config.training.max_tokens))
        problems = arithmetic_problems("train", 16, seed=0)
        rendered = [render(problem, self.base.tokenizer, Data()).token_ids for problem in problems]
        self.prompts = [tuple(token % self.base.vocab_size for token in prompt) for prompt in rendered]

    def policy(self, lane: int, clipped: bool = True) -> LocalPolicy:
        """Return the untrained policy of a lane, with gradient clipping as configured or without."""
        lora = self.config.lora.model_copy(update={"dropout": 0.0, "anneal": []})
        optimizer = self.config.optimizer.model_copy(update={} if clipped else {"grad_clip_norm": 0.0})
        config = self.config.model_copy(update={"lora": lora, "optimizer": optimizer})
        return LocalPolicy(self.base, self.lanes, config, (config.campaign.seed, lane), self.workers)

    def trained(self, lane: int, clipped: bool = True) -> LocalPolicy:
        """Return the policy of a lane (see ``policy``) with a random adapter that changes every layer's output by about
        ``ADAPTER_SHARE`` of its size."""
        policy = self.policy(lane, clipped)
        adapter = policy.adapter
        with torch.no_grad():
            for shape in adapter.shapes:
                stream = torch.Generator().manual_seed(int(generator("doctor", lane, shape.name).integers(2**62)))
                # With A uniform within ±1/√in, A·x has 1/√3 of the spread of x, and W·x has std(W)·√in times it.
                weight = self.base.model.get_submodule(shape.name).weight
                spread = float(weight.float().std()) if weight.is_floating_point() else 0.02
                size = ADAPTER_SHARE * spread * math.sqrt(3 * shape.in_features)
                size /= max(adapter.scale, 1e-6) * math.sqrt(adapter.rank)
                b = adapter.B[shape.name]
                b.copy_(torch.empty(b.shape).normal_(0.0, size, generator=stream))
        policy.version += 1
        return policy

    def publish(self, policies: Sequence[LocalPolicy]) -> list[PolicyRef]:
        refs = [PolicyRef(f"lane {lane}", policy.version) for lane, policy in enumerate(policies)]
        for ref, policy in zip(refs, policies, strict=True):
            self.engine.publish(ref, policy.snapshot())
        return refs

    def requests(self, refs: Sequence[PolicyRef], step: int = 0, sizes: Sizes | None = None) -> list[SampleRequest]:
        """Return requests, lane by lane; every other prompt has a lower token limit, so that rows leave the batch."""
        sizes = sizes or self.sizes
        tokens = max(1, min(sizes.tokens, self.base.context_length - max(map(len, self.prompts))))
        requests = []
        for ref, i in product(refs, range(sizes.prompts)):
            prompt, limit = self.prompts[i % len(self.prompts)], tokens - i % 2 * (tokens // 3)
            requests.append(SampleRequest(ref, prompt, sizes.samples, limit, 1.0, ("doctor", ref.run_id, step, i)))
        return requests

    def samples(self, requests: Sequence[SampleRequest], groups: Sequence[Sequence[Action]]) -> list[Sample]:
        """Return training samples: an answer's reward is the share of its tokens that are odd, its advantage GRPO's."""
        samples = []
        for request, group in zip(requests, groups, strict=True):
            rewards = torch.tensor([float(np.mean(np.array(action.token_ids) % 2)) for action in group])
            for action, advantage in zip(group, grpo(rewards).tolist(), strict=True):
                credited = action.token_ids, action.logprobs_T, np.full(len(action), advantage)
                samples.append(Sample.single_turn(request.prompt_ids, *credited))
        return samples

    def sampled(self, policy: LocalPolicy, sizes: Sizes | None = None) -> list[Sample]:
        requests = self.requests(self.publish([policy]), sizes=sizes)
        return self.samples(requests, self.engine.sample(requests))

    def train(self, policy: LocalPolicy, samples: Sequence[Sample], step: int = 0, lr: float = LR) -> float:
        tokens = sum(int(sample.action_mask.sum()) for sample in samples)
        batch = StepBatch(samples, Denominators(tokens, len(samples)), step, ("doctor",))
        return policy.update(batch, Objective((PolicyTerm(PPO()),)), lr).metrics["loss"]

    def update(self, policy: LocalPolicy, samples: Sequence[Sample], lr: float = LR) -> torch.Tensor:
        """Update the policy once; return the gradient of its adapter, flat, in float64."""
        self.train(policy, samples, lr=lr)
        assert policy.adapter.flat.grad is not None
        return policy.adapter.flat.grad.double()
