"""Facts about the machine: its GPUs, the torch device that a setting selects, memory, and a steady clock.

Functions that need torch import it themselves, which takes seconds; finding GPUs and torch's build does not need it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.errors import DeviceLost, RetrainError, UsageError, first_line, plural

if TYPE_CHECKING:
    import torch

OWN_GPU = "RETRAIN_OWN_GPU"
"""Environment variable, set for a worker whose CUDA_VISIBLE_DEVICES has only the GPUs assigned to it."""
MEMORY_SHARE = "RETRAIN_MEMORY_SHARE"
"""Environment variable of a process that shares its device: share of the device's memory it may use, in (0, 1]."""
TOOL_SECONDS = 20.0
LOST = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "invalid address space",
    "hardware stack error",
    "unspecified launch failure",
    "uncorrectable",
    "launch timed out",
    "unknown error",
    "device is lost",
    "gpu is lost",
    "driver shutting down",
    "context is destroyed",
)
"""Parts of the messages of sticky CUDA errors (from the CUDA driver's list of results): after one of them, every later
call on the context fails and its memory may be corrupt."""
GAIN_TRIES = 9  # Matrix products that `bfloat16_gain` times per dtype
NOTABLE_GAIN = 1.5  # Speed-up of matrix products from which a training step is faster in bfloat16
ALLOCATOR = "expandable_segments:True"
"""Value of PYTORCH_ALLOC_CONF: segments that grow. Segments of fixed size become fragmented when decode batches are
compacted and refilled."""
OWN_ALLOCATOR = "RETRAIN_OWN_ALLOCATOR"
"""Environment variable, set if retrain has set PYTORCH_ALLOC_CONF, not the user."""

OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
"""Parts of the messages by which allocators, drivers and libraries report out of memory in a plain RuntimeError."""
_LIMIT: int | None = None  # Bytes of ``limit_memory``
_BEGIN = time.time() - time.monotonic()


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: str
    driver: str


def nvidia_gpus() -> list[Gpu]:
    """Return the GPUs that ``nvidia-smi`` lists; [] when it fails or CUDA_VISIBLE_DEVICES hides them."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, timeout=TOOL_SECONDS, check=True, encoding="utf-8", errors="replace"
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == 3]


def usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def memory_share() -> float:
    return float(os.environ.get(MEMORY_SHARE, "1"))


def cpu_build() -> str:
    """Return the version of the installed torch if it is a CPU-only build, else "".

    Reads torch/version.py as text: importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return ""
    values = dict(re.findall(r"^(\w+)[^=\n]*= *(.+?) *$", file.read_text(encoding="utf-8"), re.MULTILINE))
    built_for = [values.get(name, "None") for name in ("cuda", "hip", "rocm", "xpu")]
    return values.get("__version__", "").strip("'\"") if set(built_for) == {"None"} else ""


def build_fault(devices: str) -> str:
    """Return the message for a machine with a GPU and a CPU-only torch; "" if there is nothing to report."""
    if devices == "cpu":
        return ""
    version, gpus = cpu_build(), nvidia_gpus()
    if not (version and gpus):
        return ""
    return (
        f"this machine has a GPU ({gpus[0].name}), but torch {version} is built for CPUs alone: install a CUDA build "
        f"(pip install --force-reinstall torch=={version.partition('+')[0]} --index-url "
        'https://download.pytorch.org/whl/cu130), or set [backend] devices = "cpu"'
    )


def lost(error: BaseException | None) -> DeviceLost | None:
    """Return DeviceLost if ``error`` or one of its causes is a CUDA error that destroys the context, else None."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error).lower()
        if isinstance(error, DeviceLost):
            return error
        if isinstance(error, RuntimeError) and "cuda" in text and any(sign in text for sign in LOST):
            return DeviceLost(str(error).strip().splitlines()[0])
        error = error.__cause__ or error.__context__
    return None


def visible_gpus() -> list[tuple[str, str]]:
    """Return (``gpu:<index>``, name in ``CUDA_VISIBLE_DEVICES``) of every GPU that this process sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [(f"gpu:{index}", given[index] if given else str(index)) for index in range(count)]


def gpus_of(devices: str | Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (``gpu:<index>``, name in ``CUDA_VISIBLE_DEVICES``) of the GPUs that [backend] ``devices`` selects; [] for
    a CPU. ``names``: the ``gpu:<index>`` that ``devices`` lists; empty selects all. A worker to which GPUs are assigned
    (``OWN_GPU``) uses exactly these. Raises UsageError for a missing GPU."""
    is_assigned = bool(os.environ.get(OWN_GPU))
    if devices == "cpu":
        return []
    there = visible_gpus()
    count = len(there)
    if not count and (is_assigned or not names):
        if devices == "all":
            raise UsageError('devices = "all": this machine shows no GPU; type devices = "auto" or "cpu"')
        resolve_device("auto")  # raises UsageError if the machine has a GPU that torch cannot use
        return []
    meant = (not is_assigned and names) or [name for name, _ in there]
    if missing := [name for name in meant if int(name.removeprefix("gpu:")) >= count]:
        raise UsageError(f"devices has {missing[0]}: this machine shows {plural(count, 'GPU')}")
    return [there[int(name.removeprefix("gpu:"))] for name in meant]


def resolve_device(devices: str) -> torch.device:
    """Return the torch device of ``auto``, ``cpu`` or ``gpu:N``. A worker with assigned GPUs uses the first.

    Raises UsageError when that GPU is missing, or with ``auto`` when a CUDA build of torch cannot use the machine's
    GPU.
    """
    import torch

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
    """Return the bytes of the device's memory, or of this process's part of it."""
    share = int(memory_share() * physical_memory(device))
    return share if _LIMIT is None or device.type != "cuda" else min(share, _LIMIT)


def physical_memory(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    return psutil.virtual_memory().total


def limit_memory(device: torch.device, most: int | None) -> None:
    """Limit this process to ``most`` bytes of a GPU that it shares: an allocation beyond them is an out-of-memory error
    here, from which training recovers, and leaves the other process its memory. None lifts the limit."""
    import torch

    global _LIMIT
    _LIMIT = most
    torch.cuda.set_per_process_memory_fraction(total_memory(device) / physical_memory(device), device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype; ``auto`` is bfloat16 on a GPU with bfloat16 arithmetic, else float32. Raises UsageError
    for bfloat16 on a GPU that would emulate it."""
    import torch

    native = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and native else torch.float32
    if dtype == "bfloat16" and not native:
        raise UsageError(f'{described(device)} has no bfloat16 arithmetic: type dtype = "float32" in [inference]')
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[dtype]


@functools.cache
def bfloat16_gain() -> float:
    """Measure the speed of the CPU's bfloat16 matrix products relative to float32: well above 1 on a CPU with bfloat16
    units, below 1 on others. The fastest of a few tries counts, because other programs can only slow a try."""
    import torch

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
    """Return advice on ``[inference] dtype`` for training a larger model on a CPU; None if the setting is good."""
    if dtype == "auto" and (gain := bfloat16_gain()) >= NOTABLE_GAIN:
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
    """Return advice on ``[training] update_dtype`` for training on a CPU; None if the setting is good."""
    if update_dtype == "bfloat16" and (gain := bfloat16_gain()) < NOTABLE_GAIN:
        return (
            f"this processor multiplies in bfloat16 {gain:.1f} times as fast as in float32, which makes no update "
            'faster: [training] update_dtype = "model" is exact'
        )
    return None


def set_up(device: torch.device) -> None:
    """Make a GPU the current device of this thread; call it before anything is allocated there. No-op for a CPU.

    Streams, graphs and their memory pools belong to the current device, not to that of the tensors (pytorch#87894). A
    process that shares the GPU is limited to its share of the memory.
    """
    import torch

    if device.type != "cuda":
        return
    if sys.platform == "linux" and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ |= {"PYTORCH_ALLOC_CONF": ALLOCATOR, OWN_ALLOCATOR: "1"}
    torch.cuda.set_device(device)
    if memory_share() < 1:
        torch.cuda.set_per_process_memory_fraction(memory_share(), device)


def described(device: torch.device) -> str:
    """Return the device's name for records, without its index."""
    import torch

    if device.type != "cuda":
        return str(device)
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name} (compute capability {facts.major}.{facts.minor})"


def torchrun_rank() -> int | None:
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def gpu_facts(device: torch.device) -> dict[str, dict[str, object]]:
    """Return index, driver, CUDA and cuDNN of a GPU under the key ``gpu``, for ``config.json``; {} for a CPU."""
    import torch

    if device.type != "cuda":
        return {}
    drivers = {gpu.driver for gpu in nvidia_gpus()}
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"gpu": {"index": device.index or 0, "driver": ", ".join(sorted(drivers)) or None, **versions}}


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


def available_memory(device: torch.device | None = None) -> int:
    """Return the bytes that can still be allocated, within this process's share: on a GPU the memory that is free or
    cached by torch, else the machine's available memory. Within a limit of ``limit_memory`` all of it counts, because
    what is free depends on what the other process uses at the moment."""
    import torch

    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        if _LIMIT is not None:
            return total_memory(device) - allocated
        return min(free + torch.cuda.memory_reserved(device) - allocated, total_memory(device) - allocated)
    import psutil

    available = int(psutil.virtual_memory().available)
    if memory_share() == 1:
        return available
    return min(available, max(0, total_memory(torch.device("cpu")) - int(psutil.Process().memory_info().rss)))


def free_cached_memory() -> None:
    """Give memory that torch caches back to the GPU, for larger blocks or for other processes."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def peak_memory_gib() -> float:
    """Return the peak GiB that torch allocated on any GPU; if CUDA is unused, the peak GiB of the process."""
    import torch

    if torch.cuda.is_initialized():
        return max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def failure_text(error: BaseException) -> str:
    """Return the reason of a run's failure for its manifest. An out-of-memory error becomes one line with the function
    that allocated and the settings to lower."""
    if isinstance(error, RetrainError):
        return str(error)
    if not is_out_of_memory(error):
        return f"{type(error).__name__}: {error}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames]
    where = next((f" in {module}.{name}" for module, name in reversed(names) if module.startswith("retrain.")), "")
    lower = "lower [training] batch_size, group_size or max_tokens, or [campaign] lanes"
    return f"out of memory{where} ({first_line(error)}): {lower}"


def timestamp() -> float:
    """Return seconds since the epoch: the wall clock at the start of the process, continued by the monotonic clock. So
    differences are durations even if the machine's clock is set."""
    return _BEGIN + time.monotonic()
