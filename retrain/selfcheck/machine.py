"""The machine: whether torch uses the GPU that is there, and how fast it copies and multiplies."""

from __future__ import annotations

import time
from typing import Any

import torch

from retrain.gpus import build_fault, nvidia_gpus
from retrain.policy.device import gpu_facts
from retrain.record.environment import environment_facts
from retrain.selfcheck.results import Result, judged
from retrain.selfcheck.subject import Rates, Subject

REPEATS = 5
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Of each copy: more than any cache holds."""
SIDE = {"cpu": 1024, "cuda": 8192}


def device_and_build(subject: Subject) -> Result:
    """Whether this torch can use what is there."""
    facts: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    gpus, asked = nvidia_gpus(), subject.source.asked
    fault = build_fault(asked)
    if gpus and asked != "cpu" and not fault and not torch.cuda.is_available():
        fault = (
            f"{gpus[0].name} is here, and torch cannot use it: its CUDA {torch.version.cuda} wants a newer driver than "
            f"{gpus[0].driver}"
        )
    if not subject.on_gpu:
        machine = environment_facts()
        words = (
            f"torch {torch.__version__}, {machine['processor']}, {subject.workers.count} × {facts['threads']} threads"
        )
        return judged(subject.kinds, {}, words, fault=fault, **facts)
    gpu = torch.cuda.get_device_properties(subject.base.device)
    facts |= {
        "name": gpu.name,
        "memory_bytes": gpu.total_memory,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        **gpu_facts(subject.base.device)["gpu"],
    }
    words = (
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {facts['compute_capability']}, driver "
        f"{facts['driver']}, torch {torch.__version__}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}"
    )
    return judged(subject.kinds, {}, words, fault=fault, **facts)


def rates(subject: Subject) -> Result:
    """Bandwidth of a large copy and rate of large matrix products in the base's number format."""
    subject.rates = measured = measure(subject)
    values = {"bandwidth": measured.bandwidth / 1e9, "matrix_rate": measured.matrix / 1e9}
    return judged(subject.kinds, values, f"{subject.dtype}, best of {REPEATS}")


def measure(subject: Subject) -> Rates:
    """Both rates, all cores at work as they are when the model samples; the best of ``REPEATS``."""
    device, dtype, count = subject.base.device, subject.base.dtype, subject.workers.count
    numbers, side = COPY_BYTES[device.type] // 4 // count, SIDE[device.type]
    sources = [torch.ones(numbers, device=device) for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]
    factors = [torch.ones(side, side, dtype=dtype, device=device) for _ in range(count)]

    def best(work: Any, items: list[Any]) -> float:
        seconds = []
        for _ in range(REPEATS + 1):  # the first is not counted
            subject.synchronize()
            begin = time.perf_counter()
            subject.workers.map(work, items)
            subject.synchronize()
            seconds.append(time.perf_counter() - begin)
        return min(seconds[1:])

    copy = best(lambda pair: pair[0].copy_(pair[1]), list(zip(targets, sources, strict=True)))
    product = best(lambda x: torch.mm(x, x), factors)
    return Rates(2 * 4 * numbers * count / copy, 2 * side**3 * count / product)
