"""Check memory: predicted against measured sizes, and recovery from simulated and real shortages."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from retrain.device import available_memory
from retrain.doctor.results import SKIP, Result, judged
from retrain.doctor.sampling import Agreement, agreement
from retrain.doctor.subject import DoctorModel, Sizes
from retrain.policy.backbone import backbone_of
from retrain.policy.base import MemoryPlan, cache_bytes, kept_bytes
from retrain.policy.packing import Budget
from retrain.rng import generator
from retrain.threads import Workers
from retrain.types import Sample, SampleRequest

LENGTHS = {"cpu": (64, 320), "cuda": (128, 640)}
"""Token limits of the two measurements. Their difference is a multiple of the sizes to which caches are rounded."""
SEQUENCES = 16
UPDATE_SHARE = 0.3  # Share of the available memory that the measured updates may take
WIDE = 32  # Samples of each prompt when a GPU is filled
FULL = "a full GPU"


def predicted_against_measured(subject: DoctorModel) -> Result:
    """Compare predicted and measured growth of memory from shorter to longer sequences, in which constant parts cancel:
    the sampling cache, what an update keeps for its backward pass, and the update's peak."""
    short, long = LENGTHS[subject.base.device.type]
    context = subject.base.context_length - max(map(len, subject.prompts)) - 1
    sequences = SEQUENCES
    if subject.is_slow:
        short, long, sequences = 8, 24, 4
    elif long > context:
        short, long = context // 4, context
    per_token = kept_bytes(subject.base)
    sequences = min(sequences, 2 * int(UPDATE_SHARE * available_memory(subject.base.device) / (2 * long * per_token)))
    if not sequences:
        needed = 2 * long * per_token / 2**30
        return Result(SKIP, f"an update of two sequences of {long} tokens takes {needed:.1f} GiB, which are not free")
    sampling = [_sampling_peak(subject, tokens, sequences) for tokens in (short, long)]
    saved, peaks = zip(*(_update_memory(subject, tokens, sequences) for tokens in (short, long)), strict=True)
    tokens_more = sequences * (long - short)
    predicted_cache, predicted_kept = tokens_more * cache_bytes(subject.base), tokens_more * per_token
    values = {
        "cache_growth": (sampling[1] - sampling[0]) / predicted_cache,
        "kept_growth": (saved[1] - saved[0]) / predicted_kept,
        "peak_growth": (peaks[1] - peaks[0]) / predicted_kept,
    }
    facts = {
        "sampling_peak_bytes": sampling, "update_kept_bytes": saved, "update_peak_bytes": peaks,
        "predicted_cache_bytes": predicted_cache, "predicted_kept_bytes": predicted_kept,
    }  # fmt: skip
    return judged(subject.kinds, values, f"{sequences} sequences of {short} and {long} tokens", **facts)


def _sampling_peak(subject: DoctorModel, tokens: int, sequences: int) -> int:
    refs = subject.publish([subject.trained(0)])
    request = subject.requests(refs, sizes=Sizes(1, sequences // 2, tokens))[0]
    with patch.object(subject.engine, "workers", Workers()):
        return peak(subject, lambda: subject.engine.sample([request] * 2, max_rows=sequences))


def _update_memory(subject: DoctorModel, tokens: int, sequences: int) -> tuple[int, int]:
    """Return the bytes that an update keeps for its backward pass, and those at its peak."""
    policy = subject.trained(0, clipped=False)
    policy.workers, policy.budget = Workers(), Budget(1 << 30)
    noise = generator("doctor", "memory", tokens)
    samples = []
    for _ in range(sequences):  # distinct prompts, so that nothing is shared
        ids = noise.integers(0, subject.base.vocab_size, tokens + 1).tolist()
        samples.append(Sample.single_turn(ids[:1], ids[1:], np.zeros(tokens), noise.normal(size=tokens)))
    weights = {policy.adapter.flat.untyped_storage().data_ptr()}
    weights |= {weight.untyped_storage().data_ptr() for weight in subject.base.model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        highest = peak(subject, lambda: subject.update(policy, samples))
    if policy.budget.learnt:
        raise RuntimeError("memory ran out while it was measured")
    return sum(saved.values()), highest


def peak(subject: DoctorModel, task: Callable[[], object]) -> int:
    """Return the peak of bytes allocated by ``task``: by the GPU's allocator, or on a CPU by this thread, as the sum of
    all allocations and releases."""
    if subject.on_gpu:
        device = subject.base.device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        task()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    profiler: Any = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    with profiler:  # torch.profiler.profile would also parse every operation, which takes most of the time
        task()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(max(0, changes.cumsum().max())) if len(changes) else 0


def out_of_memory_drills(subject: DoctorModel) -> Result:
    """Simulate running out of memory in a prefill, a decode step and an update, and on a GPU exhaust it; the recovery
    must give the result of a batch that was smaller from the start."""
    policies = [subject.trained(lane) for lane in range(2)]
    refs = subject.publish(policies)
    requests = subject.requests(refs)
    decoder, model = subject.engine.decoder, subject.base.model
    prefill = (model, "forward", 1) if decoder is None else (decoder, "prefill", 1)
    decode = (model, "forward", 2) if decoder is None else (decoder, "decode_steps", 1)
    drills = {name: _drill(subject, requests, fails_at(*at)) for name, at in (("prefill", prefill), ("decode", decode))}
    lost = [name for name, agreed in drills.items() if agreed is None]
    if subject.on_gpu:
        wide = subject.requests(refs, sizes=replace(subject.sizes, samples=WIDE))
        drills[FULL] = _drill(subject, wide, _full(subject, wide, len(policies)))
    agreements = {name: agreed for name, agreed in drills.items() if agreed is not None}
    gradient_off, shrunk = _update_drill(subject)
    if not shrunk:
        lost.append("update")
    values = {
        "not_recovered": len(lost),
        "drill_parted": max((agreed.parted_per_token for agreed in agreements.values()), default=float("nan")),
        "drill_gradient": gradient_off,
    }
    differences = {name: {"parted": agreed.parted, "largest": agreed.largest} for name, agreed in agreements.items()}
    not_reached = [FULL] if subject.on_gpu and FULL not in agreements else []
    words = f"in {', '.join([*agreements, 'update'])}"
    return judged(subject.kinds, values, words, lost=lost, sampling=differences, not_reached=not_reached)


def _drill(
    subject: DoctorModel, requests: Sequence[SampleRequest], shortage: AbstractContextManager[None]
) -> Agreement | None:
    """Return how samples of a batch that shrank in the shortage agree with those of a batch that had this size from the
    start; None if the engine did not notice the shortage."""
    engine, messages = subject.engine, len(subject.messages)
    with patch.object(engine, "fitting", None):
        with shortage:
            sampled = engine.sample(requests)
        rows, engine.fitting = engine.fitting, None
        agreed = None if rows is None else agreement(sampled, engine.sample(requests, max_rows=rows))
    del subject.messages[messages:]  # suppresses messages about shortages that the check causes
    return agreed


@contextmanager
def fails_at(owner: object, name: str, call: int) -> Iterator[None]:
    method, calls = getattr(owner, name), count(1)

    @functools.wraps(method)
    def short_of_memory(*args: object, **options: object) -> object:
        if next(calls) == call:
            raise torch.OutOfMemoryError("out of memory (a drill)")
        return method(*args, **options)

    with patch.object(owner, name, short_of_memory):
        yield


@contextmanager
def _full(subject: DoctorModel, requests: Sequence[SampleRequest], lanes: int) -> Iterator[None]:
    """Limit torch to memory half-way between what a few rows and all rows need."""
    device = subject.base.device
    few = peak(subject, lambda: subject.engine.sample(requests, max_rows=2 * lanes))
    all_rows = peak(subject, lambda: subject.engine.sample(requests))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved(device) + (few + all_rows) // 2
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        torch.cuda.empty_cache()


def _update_drill(subject: DoctorModel) -> tuple[float, bool]:
    """Return the relative difference of the gradient after a shortage, and whether micro-batches became smaller."""
    policy, short = subject.trained(0, clipped=False), subject.trained(0, clipped=False)
    samples = subject.sampled(policy)
    tokens = subject.config.training.micro_batch_tokens
    tokens = MemoryPlan.of(subject.base).micro_batch_tokens if tokens == "auto" else tokens
    policy.budget, short.budget = Budget(tokens), Budget(tokens)
    expected = subject.update(policy, samples)
    with fails_at(backbone_of(subject.base).decoder or subject.base.model, "forward", 1):
        gradient = subject.update(short, samples)
    return float((gradient - expected).norm() / expected.norm()), short.budget.learnt
