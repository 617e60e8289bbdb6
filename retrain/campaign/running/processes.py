"""The executor of worker processes on this machine: two pipes to each, and a log of what it prints."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import retrain.campaign.running.spawning as spawning
from retrain.campaign.running.spawning import end_words, spawn, write_all
from retrain.campaign.running.workers import Workers
from retrain.device import MEMORY_SHARE, OWN_GPU
from retrain.engines.server.fleet import Fleet, Tell
from retrain.errors import StorageError

FOLDER = "workers"  # Folder of a campaign's directory for its workers' output


@dataclass(frozen=True)
class Slot:
    """Where a worker computes: ``device`` is "cpu" or GPUs such as "gpu:1" and "gpu:2,3", ``visible`` these as
    ``CUDA_VISIBLE_DEVICES`` has them, ``threads`` its share of the cores, ``memory`` its part of the
    device's memory."""

    device: str
    threads: int
    visible: str = ""
    memory: float = 1.0

    @property
    def environment(self) -> dict[str, str]:
        """What a worker has in its environment. A number of threads that the user has set stays."""
        own = {"OMP_NUM_THREADS": str(self.threads)} | dict(os.environ) | {MEMORY_SHARE: f"{self.memory:g}"}
        return own | {"CUDA_VISIBLE_DEVICES": self.visible, OWN_GPU: "1"} if self.visible else own


class Process:
    """See ``Link``: a process of this machine. Raises StorageError when its log cannot be written."""

    ready = True

    def __init__(self, number: int, slot: Slot, directory: Path):
        self.name = f"{number} {slot.device}"
        self.log = directory / FOLDER / f"worker_{number}.log"
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "ab") as output:
                # A session of its own: Ctrl-C reaches the controller only.
                spawned = spawn(output, spawning.BOOT, sys.path, start_new_session=True, env=slot.environment)
        except OSError as error:
            raise StorageError(self.log, error) from error
        self.process, self.commands, self.answers = spawned

    def post(self, command: Mapping[str, Any]) -> None:
        write_all(self.commands, json.dumps(command).encode() + b"\n")

    def lines(self) -> Iterator[bytes]:
        """See ``Link.lines``; half a line at the end, of one that was killed, is left out."""
        with os.fdopen(self.answers, "rb") as answers:
            for line in answers:
                if line.endswith(b"\n"):
                    yield line

    def ended(self, why: str = "") -> str:
        status = self.process.wait()
        who = f"worker {self.name} (process {self.process.pid})"
        if why:
            return f"{who} ended: {why}"
        return f"{who} {end_words(status)}" + ("" if status < 0 else f"; what it printed is in {self.log}")

    def excused(self, begun: bool) -> bool:
        return not begun and self.process.wait() == 0

    def release(self) -> None:
        with suppress(OSError):
            os.close(self.commands)
        self.commands = -1

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None


def processes(slots: Sequence[Slot], directory: Path, fleet: Callable[[Tell], Fleet] | None = None) -> Workers:
    """An executor with one process for each of ``slots``. ``directory`` is the campaign's, for the workers' logs.
    ``fleet``: see ``Workers``."""
    on_gpu = any(slot.visible for slot in slots)

    def start(numbers: Sequence[int]) -> Iterator[tuple[int, Process]]:
        for number in numbers:
            yield number, Process(number + 1, slots[number], directory)

    return Workers(len(slots), on_gpu, start, fleet=fleet)
