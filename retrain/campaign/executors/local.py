"""The executor of worker processes on this machine, each with a log of what it prints."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from retrain.campaign.running import launching
from retrain.campaign.running.launching import Slot, command_of, end_words, with_imports
from retrain.campaign.running.protocol import Message, WorkerEnd
from retrain.campaign.running.tasks import WORKERS
from retrain.errors import StorageError

END_SECONDS = 5.0


class Local:
    """One process for each of ``places``, of the campaign in ``directory``. See ``Executor``."""

    def __init__(self, places: Sequence[Slot], directory: Path):
        self.places, self.directory, self.slots = places, directory, len(places)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def has_gpu(self) -> bool:
        return any(place.visible for place in self.places)

    def start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            place, log = self.places[slot - 1], self._log(slot)
            command = command_of(launching.PROGRAM, self.directory, slot, place.device)
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with open(log, "ab") as output:
                    self._processes[slot] = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=with_imports(place.environment),
                        start_new_session=True,  # Ctrl-C reaches the controller only
                    )
            except OSError as error:
                raise StorageError(log, error) from error

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
                process.wait(END_SECONDS)  # they have been told; what has let go of its lease is about to end
            except subprocess.TimeoutExpired:
                self.kill(slot)

    def _log(self, slot: int) -> Path:
        return self.directory / WORKERS / f"worker_{slot}.log"
