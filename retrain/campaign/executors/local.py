"""Run workers as processes of this machine, each with a log of its output."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from retrain.campaign.running import protocol
from retrain.campaign.running.protocol import Message, WorkerDevice, WorkerEnd, command_of
from retrain.campaign.running.tasks import WORKERS
from retrain.util.processes import end_words, start_logged, with_imports

END_SECONDS = 5.0


class Local:
    def __init__(self, devices: Sequence[WorkerDevice], directory: Path):
        self.devices, self.directory, self.slots = devices, directory, len(devices)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def has_gpu(self) -> bool:
        return any(device.visible for device in self.devices)

    def start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            device, log = self.devices[slot - 1], self._log(slot)
            command = command_of(protocol.PROGRAM, self.directory, slot, device.device)
            self._processes[slot] = start_logged(command, log, with_imports(device.environment))

    def look(self, slot: int) -> WorkerEnd | None:
        process = self._processes.get(slot)
        if process is None or (status := process.poll()) is None:
            return None
        printed = "" if status < 0 else f"; what it printed is in {self._log(slot)}"
        return WorkerEnd(f"{end_words(status)}{printed}", excused=status == 0)

    def notes(self) -> list[Message]:
        return []

    def kill(self, slot: int) -> None:
        if process := self._processes.get(slot):
            process.kill()
            process.wait()

    def close(self) -> None:
        for slot, process in self._processes.items():
            try:
                process.wait(END_SECONDS)  # a worker that has released its lease is about to end
            except subprocess.TimeoutExpired:
                self.kill(slot)

    def _log(self, slot: int) -> Path:
        return self.directory / WORKERS / f"worker_{slot}.log"
