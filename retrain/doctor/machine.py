"""Check the machine: torch and its GPU, bandwidth and matrix products, code paths, and speed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar
from unittest.mock import patch

import torch

from retrain.device import build_fault, gpu_facts, nvidia_gpus
from retrain.doctor.results import Result, judged
from retrain.doctor.subject import DoctorModel, Sizes
from retrain.engines.local import is_supported
from retrain.policy.backbone import backbone_of
from retrain.policy.base import cache_bytes
from retrain.records.environment import environment_facts
from retrain.threads import Workers
from retrain.types import Action, SampleRequest

T = TypeVar("T")
REPEATS = 5
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}  # Size of a copy: more than any cache holds
SIDE = {"cpu": 1024, "cuda": 8192}
KERNELS = ("cudnn", "flash", "efficient", "math")  # Parts of the names of torch's attention operators
GPU_CACHE_BYTES = 1 << 28
"""Bytes of weights below which a model stays in a GPU's cache. Kernel launches then bound its speed: it reaches 0.001
of the roofline with the bundled model on an H200."""
WIDE = {"cpu": 8, "cuda": 32}  # Samples of each prompt when speed is measured: the batch of a small run
FORWARD_OPS, UPDATE_OPS = 2, 4
"""Operations per weight and token of a forward pass, and of a forward pass with a backward pass to activations only,
because the base is frozen."""


def device_and_build(subject: DoctorModel) -> Result:
    facts: dict[str, object] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    gpus, asked = nvidia_gpus(), subject.source.requested_device
    fault = build_fault(asked)
    if gpus and asked != "cpu" and not fault and not torch.cuda.is_available():
        fault = f"{gpus[0].name} is here, and torch cannot use it: its CUDA {torch.version.cuda} wants a newer driver "
        fault += f"than {gpus[0].driver}"
    if subject.on_gpu:
        gpu = torch.cuda.get_device_properties(subject.base.device)
        capability = f"{gpu.major}.{gpu.minor}"
        facts |= {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": capability}
        facts |= gpu_facts(subject.base.device)["gpu"]
        summary = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {capability}, driver "
        summary += f"{facts['driver']}, torch {torch.__version__}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}"
    else:
        processor = environment_facts()["processor"]
        summary = f"torch {torch.__version__}, {processor}, {subject.workers.count} × {facts['threads']} threads"
    return judged(subject.kinds, {}, summary, fault=fault, **facts)


def rates(subject: DoctorModel) -> Result:
    """Measure the rates of a large copy and of large matrix products in the base's number format."""
    subject.rates = measured = measure(subject)
    values = {"bandwidth": measured["bandwidth"] / 1e9, "matrix_rate": measured["matrix"] / 1e9}
    return judged(subject.kinds, values, f"{subject.dtype}, best of {REPEATS}")


def measure(subject: DoctorModel) -> dict[str, float]:
    """Return the best of ``REPEATS`` on all cores: bytes per second of a copy (reads and writes), and operations per
    second of matrix products."""
    device, count = subject.base.device, subject.workers.count
    numbers, side = COPY_BYTES[device.type] // 4 // count, SIDE[device.type]
    pairs = [(torch.empty(numbers, device=device), torch.ones(numbers, device=device)) for _ in range(count)]
    factors = [torch.ones(side, side, dtype=subject.base.dtype, device=device) for _ in range(count)]

    def best(task: Callable[[T], object], items: list[T]) -> float:
        seconds = [timed(subject, lambda: subject.workers.map(task, items))[0] for _ in range(REPEATS + 1)]
        return min(seconds[1:])  # the first is a warm-up

    copy = best(lambda pair: pair[0].copy_(pair[1]), pairs)
    product = best(lambda x: torch.mm(x, x), factors)
    return {"bandwidth": 2 * 4 * numbers * count / copy, "matrix": 2 * side**3 * count / product}


def timed(subject: DoctorModel, task: Callable[[], T]) -> tuple[float, T]:
    synchronize = torch.cuda.synchronize if subject.on_gpu else lambda _: None
    synchronize(subject.base.device)
    begin = time.perf_counter()
    result = task()
    synchronize(subject.base.device)
    return time.perf_counter() - begin, result


def paths(subject: DoctorModel) -> Result:
    """Report which fast code paths are used; fail if a supported model, or a GPU's attention, misses one."""
    backbone, model_type = backbone_of(subject.base), subject.base.model.config.model_type
    fast_paths = {
        "dense decoder": subject.engine.fast,
        "packed update": backbone.packs,
        "split head": backbone.head is not None,
    }
    missing = [name for name, is_taken in fast_paths.items() if not is_taken]
    fault = ""
    if missing and is_supported(subject.base):
        fault = f"a {model_type} model should take the {' and the '.join(missing)}, and a probe of it gave other "
        fault += "numbers than the model's own forward pass: report it with --json"
    policy = subject.trained(0, clipped=False)
    policy.workers = Workers()
    requests = subject.requests(subject.publish([policy]), sizes=Sizes(2, 2, 6))
    with patch.object(subject.engine, "workers", Workers()):  # the profiler sees this thread only
        sampling, groups = _attention_kernels(lambda: subject.engine.sample(requests))
    samples = subject.samples(requests, groups)
    updating, _ = _attention_kernels(lambda: subject.update(policy, samples))
    if subject.on_gpu and "math" in {*sampling, *updating} and not fault:
        fix = "report it with --json" if subject.dtype == "bfloat16" else 'write [inference] dtype = "bfloat16"'
        fault = f"attention takes the plain formula, whose memory grows with the square of the length; {fix}"
    taken = ", ".join(f"{name} {'yes' if is_taken else 'no'}" for name, is_taken in fast_paths.items())
    kernels = f"{' '.join(sampling) or 'unseen'} in sampling, {' '.join(updating) or 'unseen'} in the update"
    facts: dict[str, object] = {name.replace(" ", "_"): is_taken for name, is_taken in fast_paths.items()}
    facts |= {"attention": [sampling, updating], "notes": list(backbone.notes)}
    return judged(subject.kinds, {}, f"{taken}, attention {kernels}", fault=fault, **facts)


def _attention_kernels(task: Callable[[], T]) -> tuple[list[str], T]:
    """Return the attention kernels that ``task`` calls in this thread, and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        result = task()
    names = " ".join(event.key for event in profile.key_averages() if "scaled_dot_product" in event.key)
    return [kernel for kernel in KERNELS if f"_{kernel}" in names], result


def speed(subject: DoctorModel) -> Result:
    """Time decoding and an update, each after a warm-up, and compare both with the roofline of the measured rates."""
    rates = subject.rates or measure(subject)
    policies = [subject.trained(lane) for lane in range(2)]
    kind = subject.base.device.type
    sizes = subject.sizes if subject.is_slow else replace(subject.sizes, samples=WIDE[kind])
    requests = subject.requests(subject.publish(policies), sizes=sizes)
    subject.engine.sample(requests)
    seconds, groups = timed(subject, lambda: subject.engine.sample(requests))
    sampled = sum(len(action) for group in groups for action in group)
    decode = _decode_roofline(subject, requests, groups, rates, len(policies)) / seconds
    per_lane = len(requests) // len(policies)
    samples = subject.samples(requests[:per_lane], groups[:per_lane])
    subject.update(policies[0], samples)
    update_seconds, _ = timed(subject, lambda: subject.update(policies[0], samples))
    # The update computes a prompt once for all of its samples.
    prompt_tokens = sum(len(request.prompt_ids) for request in requests[:per_lane])
    trained = sum(len(action) for group in groups[:per_lane] for action in group)
    update = (prompt_tokens + trained) * UPDATE_OPS * _multiplied_weights(subject) / rates["matrix"] / update_seconds
    values = {"decode_share": decode, "update_share": update}
    if subject.on_gpu and subject.base.weight_bytes < GPU_CACHE_BYTES:
        values = {}
    elif subject.on_gpu:
        values["kernel_share"] = _kernel_share(subject, lambda: subject.engine.sample(requests))
    rows, decoded, updated = sum(map(len, groups)), sampled / seconds, trained / update_seconds
    summary = f"decode {decoded:,.0f} tokens/s in {rows} rows, update {updated:,.0f} tokens/s"
    summary += "" if values else "; too small a model to compare with a GPU's roofline"
    return judged(
        subject.kinds, values, summary, decode_tokens_per_s=decoded, update_tokens_per_s=updated, roofline=rates,
        seconds=[seconds, update_seconds],
    )  # fmt: skip


def _multiplied_weights(subject: DoctorModel) -> int:
    """Return the number of weights that a token is multiplied with; the embedding counts only as an output layer."""
    model = subject.base.model
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return matrices - (0 if embedding is head else embedding.numel())


def _decode_roofline(
    subject: DoctorModel,
    requests: Sequence[SampleRequest],
    groups: Sequence[Sequence[Action]],
    rates: Mapping[str, float],
    lanes: int,
) -> float:
    """Return the least seconds for decoding: the longer of reading memory (weights and adapters once per step, a
    sequence's cache once per token) and computing the operations of all tokens."""
    pairs = zip(requests, groups, strict=True)
    lengths = [(len(request.prompt_ids), len(action)) for request, group in pairs for action in group]
    steps, tokens = max(count for _, count in lengths), sum(count for _, count in lengths)
    weights = _multiplied_weights(subject)
    adapter = sum(shape.in_features + shape.out_features for shape in subject.lanes.shapes)
    adapter *= subject.config.model.lora_rank
    cache = sum(count * (prompt + count / 2) for prompt, count in lengths) * cache_bytes(subject.base)
    moved = steps * (weights + lanes * adapter) * subject.base.dtype.itemsize + cache
    return max(moved / rates["bandwidth"], FORWARD_OPS * tokens * (weights + adapter) / rates["matrix"])


def _kernel_share(subject: DoctorModel, task: Callable[[], object]) -> float:
    """Return the share of the time of ``task`` in which at least one kernel runs."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        seconds, _ = timed(subject, task)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return union_length(spans) / 1e6 / seconds


def union_length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans that are sorted by their begin."""
    total, end = 0.0, float("-inf")
    for first, last in spans:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
