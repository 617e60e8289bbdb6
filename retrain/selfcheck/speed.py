"""Tokens per second beside the roofline of this machine's own rates, and how much of the GPU's time kernels fill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from retrain.policy.memory import cache_bytes
from retrain.policy.objective import Objective
from retrain.selfcheck.machine import measure
from retrain.selfcheck.results import Result, judged
from retrain.selfcheck.subject import LR, Rates, Subject
from retrain.types import Action

WIDE = {"cpu": 8, "cuda": 32}
"""Samples of each prompt: a batch like that of a small run."""
FORWARD, TRAINED = 2, 4
"""Operations per weight and token: of a forward pass, and of one with the backward pass to its inputs, because the base
is frozen."""


def speed(subject: Subject) -> Result:
    """Decoding and an update, each done once before it is timed."""
    rates = subject.rates or measure(subject)
    policies = [subject.trained(lane) for lane in range(2)]
    kind = subject.base.device.type
    work = subject.work if subject.is_slow else replace(subject.work, samples=WIDE[kind])
    requests = subject.requests(subject.publish(policies), work=work)
    subject.engine.sample(requests)
    seconds, groups = _timed(subject, lambda: subject.engine.sample(requests))
    sampled = sum(len(action) for group in groups for action in group)
    decode = _decode_roofline(subject, requests, groups, rates, len(policies)) / seconds
    each = len(requests) // len(policies)
    batch = subject.batch(subject.samples(requests[:each], groups[:each]))
    policies[0].update(batch, Objective(), LR)
    update_seconds, _ = _timed(subject, lambda: policies[0].update(batch, Objective(), LR))
    read = sum(len(request.prompt_ids) for request in requests[:each])  # a prompt is computed once for its samples
    trained = sum(len(action) for group in groups[:each] for action in group)
    update = (read + trained) * TRAINED * _multiplied(subject) / rates.matrix / update_seconds
    values = {"decode_share": decode, "update_share": update}
    facts: dict[str, Any] = {"decode_tokens_per_s": sampled / seconds, "update_tokens_per_s": trained / update_seconds}
    if subject.on_gpu:
        values["kernel_share"] = _kernel_share(subject, lambda: subject.engine.sample(requests))
    words = (
        f"decode {sampled / seconds:,.0f} tokens/s in {sum(map(len, groups))} rows, "
        f"update {trained / update_seconds:,.0f} tokens/s"
    )
    return judged(subject.kinds, values, words, **facts, roofline=vars(rates), seconds=[seconds, update_seconds])


def _timed(subject: Subject, work: Callable[[], Any]) -> tuple[float, Any]:
    subject.synchronize()
    begin = time.perf_counter()
    given = work()
    subject.synchronize()
    return time.perf_counter() - begin, given


def _multiplied(subject: Subject) -> int:
    """Weights that a token is multiplied with: matrices, the embedding only where it is the output layer too."""
    model = subject.base.model
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return matrices - (0 if embedding is head else embedding.numel())


def _decode_roofline(
    subject: Subject, requests: Sequence[Any], groups: Sequence[Sequence[Action]], rates: Rates, lanes: int
) -> float:
    """Seconds that decoding takes at least: weights and adapters read once per step, every sequence's cache once per
    token, or the operations of all tokens."""
    lengths = [(len(request.prompt_ids), len(action)) for request, group in zip(requests, groups, strict=True)
               for action in group]  # fmt: skip
    steps, tokens = max(count for _, count in lengths), sum(count for _, count in lengths)
    weights, item = _multiplied(subject), subject.base.dtype.itemsize
    adapter = sum(shape.in_features + shape.out_features for shape in subject.lanes.shapes)
    adapter *= subject.config.model.lora_rank
    cache = sum(count * (read + count / 2) for read, count in lengths) * cache_bytes(subject.base)
    moved = steps * (weights + lanes * adapter) * item + cache
    return max(moved / rates.bandwidth, FORWARD * tokens * (weights + adapter) / rates.matrix)


def _kernel_share(subject: Subject, work: Callable[[], Any]) -> float:
    """The part of the time of ``work`` in which at least one kernel runs."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        seconds, _ = _timed(subject, work)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return covered(spans) / 1e6 / seconds


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of these spans, which are sorted by their begin."""
    total, end = 0.0, float("-inf")
    for first, last in spans:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
