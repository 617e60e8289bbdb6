"""Devices: which one a setting means, how a GPU is set up, its memory, and errors for want of memory."""

import functools
import os
import sys
import time
import traceback
from typing import Any

import torch

from retrain.errors import RetrainError, UsageError
from retrain.gpus import OWN_GPU, cpu_build, memory_share, nvidia_gpus

GAIN_TRIES = 9  # Products in each dtype that are timed for `bfloat16_gain`
WORTH_SAYING = 1.5  # Gain of products from which on a whole step is faster; what else a step does gains nothing
ALLOCATOR = "expandable_segments:True"
"""Segments that grow: batches that are compacted and admitted again leave holes in those of fixed size."""

OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
"""Parts of the messages of allocators, drivers and libraries in a plain RuntimeError."""


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
    """Measure the speed of the CPU's bfloat16 products relative to float32: well above 1 with units for it, below 1
    without. The fastest of a few tries counts, because other programs only slow them."""
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
    """Return advice on ``[inference] dtype`` for training a larger model on a CPU."""
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
    """Return advice on ``[training] update_dtype`` for training on a CPU."""
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
    """Return the device's name in records, which does not depend on its index."""
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of the device or the host ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


def available_memory(device: torch.device | None = None) -> int:
    """Return the bytes that can still be allocated: on a GPU what is free or cached by torch, else the machine's
    memory, within this process's share."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        return min(free + torch.cuda.memory_reserved(device) - allocated, total_memory(device) - allocated)
    import psutil

    available = int(psutil.virtual_memory().available)
    if memory_share() == 1:
        return available
    return min(available, max(0, total_memory(torch.device("cpu")) - int(psutil.Process().memory_info().rss)))


def peak_memory_gib() -> float:
    """Highest memory use so far: of the GPU's allocator where one is in use, else of the process."""
    if torch.cuda.is_initialized():
        return max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def failure_text(error: BaseException) -> str:
    """Return the reason of a run's failure for its manifest. Out of memory becomes one line with the function that
    allocated and the settings to lower."""
    if isinstance(error, RetrainError):
        return str(error)
    if not is_out_of_memory(error):
        return f"{type(error).__name__}: {error}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames]
    where = next((f" in {module}.{name}" for module, name in reversed(names) if module.startswith("retrain.")), "")
    words = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"out of memory{where} ({words}): lower [training] batch_size, group_size or max_tokens, or [campaign] lanes"
