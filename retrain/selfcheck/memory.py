"""Memory: what is predicted beside what is measured, and shortages on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from retrain.engines.protocol import SampleRequest
from retrain.policy.backbone import backbone_of
from retrain.policy.budget import Budget
from retrain.policy.local import LocalPolicy
from retrain.policy.memory import available_memory, cache_bytes, kept_bytes
from retrain.policy.objective import Objective
from retrain.policy.threads import Workers
from retrain.rng import generator
from retrain.selfcheck.agreement import Agreement, agreement
from retrain.selfcheck.results import Result, judged, skipped
from retrain.selfcheck.subject import LR, Subject, Work
from retrain.types import Sample

LENGTHS = {"cpu": (64, 320), "cuda": (128, 640)}
"""Most tokens of the two measurements. Their difference is a multiple of what caches are rounded to."""
SEQUENCES = 16
UNBOUNDED = 1 << 30
UPDATE_ROOM = 0.3
"""Share of the available memory that the measured updates may take."""
WIDE = 32
"""Samples of each prompt where a GPU is to be filled for real."""
FULL = "a full GPU"


# -- predicted against measured ---------------------------------------------------------------------------------


def predicted_against_measured(subject: Subject) -> Result:
    """Growth from one length to another, which leaves out what does not depend on it: of the cache in sampling, and of
    what an update keeps for its backward pass and takes at its peak."""
    short, long, sequences = _sizes(subject)
    room, each = UPDATE_ROOM * available_memory(subject.base.device), long * kept_bytes(subject.base)
    sequences = min(sequences, 2 * int(room / each / 2))
    if not sequences:
        return skipped(
            f"an update of two sequences of {long} tokens takes {2 * each / 2**30:.1f} GiB, which are not free"
        )
    sampling = [_sampling_peak(subject, tokens, sequences) for tokens in (short, long)]
    kept, peaks = zip(*(_update(subject, tokens, sequences) for tokens in (short, long)), strict=True)
    more = sequences * (long - short)
    predicted_cache, predicted_kept = more * cache_bytes(subject.base), more * kept_bytes(subject.base)
    values = {
        "cache_growth": (sampling[1] - sampling[0]) / predicted_cache,
        "kept_growth": (kept[1] - kept[0]) / predicted_kept,
        "peak_growth": (peaks[1] - peaks[0]) / predicted_kept,
    }
    return judged(
        subject.kinds, values, f"{sequences} sequences of {short} and {long} tokens", sampling_peak_bytes=sampling,
        update_kept_bytes=kept, update_peak_bytes=peaks, predicted_cache_bytes=predicted_cache,
        predicted_kept_bytes=predicted_kept,
    )  # fmt: skip


def _sizes(subject: Subject) -> tuple[int, int, int]:
    """The two lengths, as far as the model's context and a CPU's patience go, and the number of sequences."""
    short, long = LENGTHS[subject.base.device.type]
    if subject.is_slow:
        return 8, 24, 4
    room = subject.base.context_length - max(map(len, subject.prompts)) - 1
    return (short, long, SEQUENCES) if long <= room else (room // 4, room, SEQUENCES)


def _sampling_peak(subject: Subject, tokens: int, sequences: int) -> int:
    """Bytes at the highest moment of sampling so many tokens at most, above those before."""
    work = Work(2, sequences // 2, tokens)
    asked = [subject.requests(subject.publish([subject.trained(0)]), work=work)[0]] * 2
    with subject.one_thread():
        return peak(subject, lambda: subject.engine.sample(asked, max_rows=sequences))


def _update(subject: Subject, tokens: int, sequences: int) -> tuple[int, int]:
    """Bytes that an update on sequences of so many tokens keeps for its backward pass, and at its peak."""
    policy = subject.trained(0, clipped=False)
    policy.workers, policy.budget = Workers(), Budget(UNBOUNDED)
    noise = generator("doctor", "memory", tokens)
    samples = []
    for _ in range(sequences):  # each with a prompt of its own, so that nothing is shared
        ids = noise.integers(0, subject.base.vocab_size, tokens + 1).tolist()
        advantages_T = noise.normal(size=tokens)
        samples.append(Sample.single_turn(ids[:1], ids[1:], np.zeros(tokens), advantages_T))
    batch = subject.batch(samples)
    known = {policy.adapter.flat.untyped_storage().data_ptr()}
    known |= {weight.untyped_storage().data_ptr() for weight in subject.base.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def work() -> None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.update(batch, Objective(), LR)

    highest = peak(subject, work)
    if policy.budget.learnt:
        raise RuntimeError("memory ran out while it was measured")
    return sum(kept.values()), highest


def peak(subject: Subject, work: Callable[[], Any]) -> int:
    """Bytes allocated at the highest moment of ``work``, in this thread, above those before: by the GPU's allocator, or
    by every allocation and release that the CPU's reports."""
    if subject.on_gpu:
        device = subject.base.device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    made: Any = profile.profiler
    events = [event for event in made.kineto_results.events() if event.name() == "[memory]"]
    changes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(max(0, changes.cumsum().max())) if len(changes) else 0


# -- shortages --------------------------------------------------------------------------------------------------


def out_of_memory_drills(subject: Subject) -> Result:
    """Memory runs out in a prefill, in a decode step, in an update, and on a GPU for real: each is recovered from, and
    comes to the same as a batch that was smaller from the start."""
    policies = [subject.trained(lane) for lane in range(2)]
    requests = subject.requests(subject.publish(policies))
    lost: list[str] = []
    agreements: dict[str, Agreement] = {}
    for name, call in (("prefill", 1), ("decode", 2)):
        if (drilled := _drill(subject, requests, _once(subject, call))) is None:
            lost.append(name)
        else:
            agreements[name] = drilled
    if subject.on_gpu:
        wide = subject.requests(subject.publish(policies), work=replace(subject.work, samples=WIDE))
        drilled = _drill(subject, wide, _full(subject, wide, len(policies)))
        agreements |= {} if drilled is None else {FULL: drilled}
    gradient_off, shrunk = _update_drill(subject)
    if not shrunk:
        lost.append("update")
    values = {
        "not_recovered": len(lost),
        "drill_parted": max((each.parted_per_token for each in agreements.values()), default=float("nan")),
        "drill_gradient": gradient_off,
    }
    not_reached = [FULL] if subject.on_gpu and FULL not in agreements else []
    differences = {name: {"parted": each.parted, "largest": each.largest} for name, each in agreements.items()}
    return judged(
        subject.kinds, values, f"in {', '.join([*agreements, 'update'])}", lost=lost, sampling=differences,
        not_reached=not_reached,
    )  # fmt: skip


def _drill(
    subject: Subject, requests: Sequence[SampleRequest], shortage: AbstractContextManager[None]
) -> Agreement | None:
    """What is sampled inside the shortage beside what as many rows give without one; None where it was not noticed."""
    with subject.memory_forgotten():
        with shortage:
            sampled = subject.engine.sample(requests)
        rows = subject.engine.fitting
    if rows is None:
        return None
    with subject.memory_forgotten():
        return agreement(sampled, subject.engine.sample(requests, max_rows=rows))


@contextmanager
def _once(subject: Subject, call: int) -> Iterator[None]:
    """Inside, the ``call``-th pass of sampling (1: a prefill, 2: the first step after it) finds no memory, once."""
    decoder, seen = subject.engine.decoder, [0]

    def count() -> None:
        seen[0] += 1
        if seen[0] == call:
            raise torch.OutOfMemoryError("out of memory (a drill)")

    if decoder is None:
        hook = subject.base.model.register_forward_pre_hook(lambda *_: count())
        try:
            yield
        finally:
            hook.remove()
        return
    name = "prefill" if call == 1 else "decode_steps"
    method, seen[0] = getattr(decoder, name), call - 1

    def short(*given: Any, **options: Any) -> Any:
        count()
        return method(*given, **options)

    setattr(decoder, name, short)
    try:
        yield
    finally:
        delattr(decoder, name)


@contextmanager
def _full(subject: Subject, requests: Sequence[SampleRequest], lanes: int) -> Iterator[None]:
    """Inside, torch may take no more of the GPU than half-way between what a few rows need and what all of them do."""
    device = subject.base.device
    few, all_rows = (
        peak(subject, lambda rows=rows: subject.engine.sample(requests, max_rows=rows)) for rows in (2 * lanes, None)
    )
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(device) + (few + all_rows) // 2) / total, device
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        torch.cuda.empty_cache()


def _update_drill(subject: Subject) -> tuple[float, bool]:
    """Relative difference of the gradient after memory ran out once, and whether micro-batches became smaller."""
    policy = subject.trained(0, clipped=False)
    requests = subject.requests(subject.publish([policy]))
    samples = subject.samples(requests, subject.engine.sample(requests))
    free = _gradient(subject, policy, samples)
    short = subject.trained(0, clipped=False)
    model = backbone_of(subject.base).decoder or subject.base.model
    seen: list[int] = []

    def refuse(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 1:
            raise torch.OutOfMemoryError("out of memory (a drill)")

    hook = model.register_forward_pre_hook(refuse)
    try:
        again = _gradient(subject, short, samples)
    finally:
        hook.remove()
    return float((again - free).norm() / free.norm()), short.budget.learnt


def _gradient(subject: Subject, policy: LocalPolicy, samples: Sequence[Sample]) -> torch.Tensor:
    policy.budget = Budget(subject.token_budget())
    policy.update(subject.batch(samples), Objective(), LR)
    assert policy.adapter.flat.grad is not None
    return policy.adapter.flat.grad.double()
