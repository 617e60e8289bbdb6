"""Where the base lives: which device a setting means, how a GPU is set up, and what it is called."""

import functools
import os
import sys
import time
from typing import Any

import torch

from retrain.errors import UsageError
from retrain.gpus import OWN_GPU, cpu_build, memory_share, nvidia_gpus

GAIN_TRIES = 9  # Products in each dtype that are timed for `bfloat16_gain`
WORTH_SAYING = 1.5  # Gain of products from which on a whole step is faster; what else a step does gains nothing
ALLOCATOR = "expandable_segments:True"
"""Segments that grow: batches that are compacted and admitted again leave holes in those of fixed size."""


def resolve_device(devices: str) -> torch.device:
    """``auto`` | ``cpu`` | ``gpu:N`` → torch device. A process that has been given its GPUs uses the first.

    Raises UsageError when that GPU is not there, or when a torch that was built for GPUs cannot use the machine's and
    nobody asked for the CPU.
    """
    if devices == "cpu":
        return torch.device("cpu")
    if os.environ.get(OWN_GPU):
        devices = "gpu:0"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count and devices == "auto":
        if not cpu_build() and (gpus := nvidia_gpus()):
            raise UsageError(
                f"this machine has a GPU ({gpus[0].name}, driver {gpus[0].driver}), but torch {torch.__version__} "
                'cannot use it: update the driver, or set [backend] devices = "cpu"'
            )
        return torch.device("cpu")
    index = int(devices.partition(":")[2] or 0)
    if index >= count:
        raise UsageError(f'devices = "{devices}": this machine shows {count} GPU(s); type devices = "auto" or "cpu"')
    return torch.device(f"cuda:{index}")


def total_memory(device: torch.device) -> int:
    """Bytes of memory that the device has for this process, used or not."""
    if device.type == "cuda":
        return int(memory_share() * torch.cuda.get_device_properties(device).total_memory)
    import psutil

    return int(memory_share() * psutil.virtual_memory().total)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU that computes in it, else float32. Raises UsageError for bfloat16 on a GPU that
    would emulate it."""
    native = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and native else torch.float32
    if dtype == "bfloat16" and not native:
        raise UsageError(f'{described(device)} has no bfloat16 arithmetic: type dtype = "float32" in [inference]')
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[dtype]


@functools.cache
def bfloat16_gain() -> float:
    """How many times as fast this machine's CPU multiplies matrices in bfloat16 as in float32: well above 1 where it
    has units for it, below 1 where it has none. By the fastest of a few products: what else runs only slows them."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(256, 512, dtype=dtype), torch.ones(2048, 512, dtype=dtype)
        took = []
        for _ in range(GAIN_TRIES):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            took.append(time.perf_counter() - begin)
        seconds[dtype] = min(took)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def bfloat16_advice(dtype: str) -> str | None:
    """What to say to someone who trains a larger model on a CPU with this ``[inference] dtype``; None: nothing."""
    if dtype == "auto" and (gain := bfloat16_gain()) >= WORTH_SAYING:
        return (
            f"this processor multiplies in bfloat16 {gain:.1f} times as fast as in float32: [inference] dtype = "
            '"bfloat16" is faster here, with results of another rounding'
        )
    if dtype == "bfloat16" and (gain := bfloat16_gain()) < 1:
        return (
            f"this processor multiplies in bfloat16 at {gain:.1f} of the speed of float32: [inference] dtype = "
            '"float32" is faster here'
        )
    return None


def update_advice(update_dtype: str) -> str | None:
    """What to say to someone who trains on a CPU with this ``[training] update_dtype``; None: nothing."""
    if update_dtype == "bfloat16" and (gain := bfloat16_gain()) < WORTH_SAYING:
        return (
            f"this processor multiplies in bfloat16 {gain:.1f} times as fast as in float32, which makes no update "
            'faster: [training] update_dtype = "model" is exact'
        )
    return None


def set_up(device: torch.device) -> None:
    """Make a GPU the one that this thread works on, before anything is allocated on it.

    Streams, graphs and their memory pools belong to the current device, not to that of the tensors (pytorch#87894).
    A process that shares the GPU runs out of memory at the end of its own share, and not where another one needs it.
    """
    if device.type != "cuda":
        return
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOCATOR)
    torch.cuda.set_device(device)
    if memory_share() < 1:
        torch.cuda.set_per_process_memory_fraction(memory_share(), device)


def described(device: torch.device) -> str:
    """What a device is called in records: the same card at another index has the same name."""
    if device.type != "cuda":
        return str(device)
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name} (compute capability {facts.major}.{facts.minor})"


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Under ``gpu``: the index of a GPU and the versions of what drives it, for ``config.json``; empty for a CPU."""
    if device.type != "cuda":
        return {}
    drivers = {gpu.driver for gpu in nvidia_gpus()}
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"gpu": {"index": device.index or 0, "driver": ", ".join(sorted(drivers)) or None, **versions}}
