"""What can be known of GPUs without importing torch: which there are, whether torch was built for them, and whether an
error says that one is gone."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import DeviceLost

OWN_GPU = "RETRAIN_OWN_GPU"
"""Set in the environment of a process that has been given its GPUs, the only ones that it sees; a rank that it starts
is told which of them."""
MEMORY_SHARE = "RETRAIN_MEMORY_SHARE"
"""Set in the environment of a process that shares its device with others: the part of the device's memory, a GPU's or
the machine's, that it plans with, in (0, 1]."""
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
"""What the messages of sticky CUDA errors have in common (the CUDA driver's list of results): after one of them every
later call on the context fails too, and what lies in its memory may be wrong."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as ``nvidia-smi`` lists it."""

    name: str
    memory: str
    driver: str


def nvidia_gpus() -> list[Gpu]:
    """The GPUs that this process may see, as the driver's own tool lists them; none where it is missing or fails."""
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


def memory_share() -> float:
    """The part of its device's memory that this process plans with."""
    return float(os.environ.get(MEMORY_SHARE, "1"))


def torchrun_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return which of torchrun's processes this is; None for a process that torchrun has not started."""
    return int(environment["RANK"]) if "TORCHELASTIC_RUN_ID" in environment else None


def usable_gpu() -> str:
    """Name of the first GPU; "" without one that the installed torch can use."""
    gpus = nvidia_gpus()
    return gpus[0].name if gpus and not cpu_build() else ""


def cpu_build() -> str:
    """The version of an installed torch that was built without any GPU's code, "" of every other one.

    torch says so in a file of its own, which is read as text: importing it takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return ""
    values = dict(re.findall(r"^(\w+)[^=\n]*= *(.+?) *$", file.read_text(encoding="utf-8"), re.MULTILINE))
    built_for = [values.get(name, "None") for name in ("cuda", "hip", "rocm", "xpu")]
    return values.get("__version__", "").strip("'\"") if set(built_for) == {"None"} else ""


def build_fault(devices: str) -> str:
    """Why a GPU of this machine would stay unused without anybody having asked for that; "" where all is well."""
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
    """The error to raise instead where ``error``, or what it came from, says that the GPU's context is gone."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        words = str(error).lower()
        if isinstance(error, DeviceLost):
            return error
        if isinstance(error, RuntimeError) and "cuda" in words and any(sign in words for sign in LOST):
            return DeviceLost(str(error).strip().splitlines()[0])
        error = error.__cause__ or error.__context__
    return None
