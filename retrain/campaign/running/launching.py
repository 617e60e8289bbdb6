"""The command of a worker's process, its environment, and how it ended in words."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.device import MEMORY_SHARE, OWN_GPU

PROGRAM = ("-m", "retrain.campaign.worker")


@dataclass(frozen=True)
class WorkerDevice:
    """Device of a worker: ``device`` is "cpu" or GPUs such as "gpu:1" and "gpu:2,3"; ``visible`` is the value of
    ``CUDA_VISIBLE_DEVICES``; ``threads`` is its share of the cores, ``memory`` its share of the device's memory."""

    device: str
    threads: int
    visible: str = ""
    memory: float = 1.0

    @classmethod
    def of(cls, gpus: Sequence[tuple[str, str]], threads: int, memory: float) -> "WorkerDevice":
        """Return the device of these GPUs (name, name for ``CUDA_VISIBLE_DEVICES``)."""
        names = ",".join(name.removeprefix("gpu:") for name, _ in gpus)
        return cls(f"gpu:{names}", threads, ",".join(visible for _, visible in gpus), memory)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the worker. A number of threads that the user has set is kept."""
        own = {"OMP_NUM_THREADS": str(self.threads)} | dict(os.environ) | {MEMORY_SHARE: f"{self.memory:g}"}
        return own | {"CUDA_VISIBLE_DEVICES": self.visible, OWN_GPU: "1"} if self.visible else own


def command_of(program: Sequence[str], directory: Path, slot: int | str, device: str, *more: str) -> list[str]:
    """Return the command line of a worker."""
    # -P: modules of the working directory do not shadow installed ones, and child processes do not inherit the option.
    return [sys.executable, "-P", *program, str(directory), "--slot", str(slot), "--device", device, *more]
