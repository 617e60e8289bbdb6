"""What is checked: base, lanes, engine and policies, made by the code that trains with them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from retrain.config import Config
from retrain.config.tasks import Data
from retrain.data.arithmetic import problems
from retrain.data.prompts import render
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import PolicyRef, SampleRequest
from retrain.maths.advantages import grpo
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes
from retrain.policy.memory import MemoryPlan
from retrain.policy.objective import Objective
from retrain.policy.protocol import Denominators, TrainBatch
from retrain.policy.threads import Workers, workers_for
from retrain.rng import generator
from retrain.selfcheck.source import Source
from retrain.types import Action, Sample

ADAPTER_SHARE = 0.1
"""What a trained adapter adds to a layer's output, against what the layer gives: enough that a mixed-up lane shows in
every token, and a model still speaks."""
LR = 1e-3
LARGE_PARAMETERS = 50_000_000
"""More than so many on a CPU, and the batches are smaller."""


@dataclass(frozen=True)
class Work:
    """How much is sampled: prompts of each lane, samples of each, and most tokens of one."""

    prompts: int = 4
    samples: int = 4
    tokens: int = 48


@dataclass
class Rates:
    """Bytes per second of a large copy (read and write counted) and operations per second of large matrix products, on
    all cores."""

    bandwidth: float
    matrix: float


@dataclass
class Subject:
    """The model under check. ``rates`` are known once they are measured; ``messages`` are the engine's."""

    source: Source
    config: Config
    base: BaseModel
    lanes: Lanes
    engine: LocalEngine
    workers: Workers
    messages: list[str] = field(default_factory=list)
    rates: Rates | None = None

    @classmethod
    @contextmanager
    def open(cls, source: Source) -> Iterator[Subject]:
        """The subject of this source, freed at the end. Raises ModelError when the model cannot be had."""
        # cuBLAS reads this when its first handle is made, and is repeatable only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which would tell when it starts and stops
        messages: list[str] = []
        with ExitStack() as stack:
            bases = stack.enter_context(source.bases())
            base, lanes, engine = bases.take(source.config, messages.append)
            workers = workers_for(base)
            stack.callback(workers.close)
            engine.workers = workers
            yield cls(source, source.config, base, lanes, engine, workers, messages)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        """Whether it is on a CUDA device."""
        return self.base.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """Number format of the base, as configurations name it."""
        return str(self.base.dtype).removeprefix("torch.")

    @property
    def kinds(self) -> tuple[str, str]:
        """What limits may differ by."""
        return self.dtype, self.base.device.type

    @cached_property
    def parameters(self) -> int:
        """Numbers in the base, adapters not counted."""
        return sum(weight.numel() for weight in self.base.model.parameters())

    @property
    def is_slow(self) -> bool:
        """Whether every token counts: a large model on a CPU."""
        return not self.on_gpu and self.parameters > LARGE_PARAMETERS

    @cached_property
    def work(self) -> Work:
        """Enough tokens for a percentile of differences, in seconds."""
        work = Work(2, 2, 8) if self.is_slow else Work()
        return Work(work.prompts, work.samples, min(work.tokens, self.config.training.max_tokens))

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Prompts of different lengths, through the model's own template."""
        asked = problems("train", 16, seed=0)
        ids = [render(problem, self.base.tokenizer, Data()).token_ids for problem in asked]
        return [tuple(token % self.base.vocab_size for token in prompt) for prompt in ids]

    # -- policies -----------------------------------------------------------------------------------------------

    def policy(self, lane: int, clipped: bool = True) -> LocalPolicy:
        """The policy of one lane, untrained; its updates leave the whole gradient where they are not ``clipped``."""
        config = self.config
        if not clipped:
            optimizer = config.optimizer.model_copy(update={"grad_clip_norm": 0.0})
            config = config.model_copy(update={"optimizer": optimizer})
        lora = config.lora.model_copy(update={"dropout": 0.0, "anneal": []})
        config = config.model_copy(update={"lora": lora})
        return LocalPolicy(self.base, self.lanes, config, (config.campaign.seed, lane), self.workers)

    def trained(self, lane: int, clipped: bool = True) -> LocalPolicy:
        """A policy whose adapter adds ``ADAPTER_SHARE`` to every layer, each lane's something else."""
        policy = self.policy(lane, clipped)
        adapter = policy.adapter
        with torch.no_grad():
            for shape in adapter.shapes:
                stream = torch.Generator().manual_seed(int(generator("doctor", lane, shape.name).integers(2**62)))
                # With A uniform within ±1/√in, A·x has 1/√3 of the spread of x, and W·x std(W)·√in times it.
                weight = self.base.model.get_submodule(shape.name).weight
                spread = float(weight.float().std()) if weight.is_floating_point() else 0.02
                size = ADAPTER_SHARE * spread * math.sqrt(3 * shape.in_features)
                size /= max(adapter.scale, 1e-6) * math.sqrt(adapter.rank)
                b = adapter.B[shape.name]
                b.copy_(torch.empty(b.shape).normal_(0.0, size, generator=stream))
        policy.version += 1
        return policy

    # -- sampling -----------------------------------------------------------------------------------------------

    def publish(self, policies: Sequence[LocalPolicy]) -> list[PolicyRef]:
        """Give the engine the weights of these lanes as they are now."""
        refs = [PolicyRef(f"lane {lane}", policy.version) for lane, policy in enumerate(policies)]
        for ref, policy in zip(refs, policies, strict=True):
            self.engine.publish(ref, policy.snapshot())
        return refs

    def requests(self, refs: Sequence[PolicyRef], step: int = 0, work: Work | None = None) -> list[SampleRequest]:
        """What is asked of each lane; every other prompt may have a third fewer tokens, so that rows fall idle."""
        work = work or self.work
        room = self.base.context_length - max(map(len, self.prompts))
        tokens = max(1, min(work.tokens, room))
        return [
            SampleRequest(
                ref,
                self.prompts[i % len(self.prompts)],
                work.samples,
                tokens - (i % 2) * (tokens // 3),
                1.0,
                ("doctor", ref.run_id, step, i),
            )
            for ref in refs
            for i in range(work.prompts)
        ]

    # -- training -----------------------------------------------------------------------------------------------

    def samples(self, requests: Sequence[SampleRequest], groups: Sequence[Sequence[Action]]) -> list[Sample]:
        """What is trained on: the reward of an answer is the share of its tokens that are odd, its advantage GRPO's."""
        samples = []
        for request, group in zip(requests, groups, strict=True):
            rewards = torch.tensor([float(np.mean(np.array(action.token_ids) % 2)) for action in group])
            for action, advantage in zip(group, grpo(rewards).tolist(), strict=True):
                advantages_T = np.full(len(action), advantage)
                samples.append(
                    Sample.single_turn(request.prompt_ids, action.token_ids, action.logprobs_T, advantages_T)
                )
        return samples

    def batch(self, samples: Sequence[Sample], step: int = 0) -> TrainBatch:
        """All samples as one optimizer step."""
        tokens = sum(int(sample.action_mask.sum()) for sample in samples)
        return TrainBatch(samples, Denominators(tokens, len(samples)), step, ("doctor",))

    def step(self, policies: Sequence[LocalPolicy], number: int) -> tuple[list[list[Action]], list[float]]:
        """One training step of these lanes, sampled in one batch, then updated; what was sampled, and the losses."""
        requests = self.requests(self.publish(policies), number)
        groups = self.engine.sample(requests)
        each, losses = len(requests) // len(policies), []
        for lane, policy in enumerate(policies):
            own = slice(lane * each, (lane + 1) * each)
            batch = self.batch(self.samples(requests[own], groups[own]), number)
            losses.append(policy.update(batch, Objective(), LR)["loss"])
        return groups, losses

    # -- the machinery ------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.base.device)

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """On a GPU deterministic kernels only, as with ``[training] deterministic``; on a CPU all are."""
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(before or self.on_gpu)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """All pieces of the engine's work in this thread, where profilers and hooks see them."""
        before, self.engine.workers = self.engine.workers, Workers()
        try:
            yield
        finally:
            self.engine.workers = before

    @contextmanager
    def memory_forgotten(self) -> Iterator[None]:
        """The engine has not yet learnt how many rows fit, and neither remembers nor tells what it learns inside."""
        before, self.engine.fitting, count = self.engine.fitting, None, len(self.messages)
        try:
            yield
        finally:
            self.engine.fitting = before
            del self.messages[count:]

    def token_budget(self) -> int:
        """Tokens of a micro-batch, as a run here has them."""
        asked = self.config.training.micro_batch_tokens
        return MemoryPlan.of(self.base).micro_batch_tokens if asked == "auto" else asked
