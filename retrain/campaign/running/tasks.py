"""Store a campaign's tasks as files that workers claim, and the workers' events.

The files are in ``workers/`` of the campaign's directory:

    tasks/<task>.todo               job as JSON; written by the controller
    tasks/<task>.<worker>.claimed   the same file, renamed by a worker; the controller removes it when the job has ended
    tasks/<task>.stop               request to save and end the job after its step
    tasks/closed                    there will be no further task
    servers.jsonl                   addresses and messages of launched servers
    worker_<slot>/events_<k>.jsonl  events of the slot's k-th process
    worker_<slot>/.lease            renewed by the process that has the slot

Renaming is atomic, also on network file systems. New files are found by listing the folder, because NFS may cache that
a name is absent.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.files import append_bytes, aside_of, read_json, write_json, writing
from retrain.records.schema.base import Row, Values

WORKERS = "workers"
_EVENTS = re.compile(r"events_(\d+)\.jsonl")
_TASK = re.compile(r"(\d+)\.(todo|stop|(.+)\.claimed)")


@dataclass(frozen=True)
class Tasks:
    folder: Path

    @classmethod
    def of(cls, directory: Path) -> "Tasks":
        return cls(directory / WORKERS / "tasks")

    def open(self) -> int:
        """Prepare the folder for a new controller: withdraw waiting tasks. Return the highest task number so far. A
        task's name is its priority, one digit, followed by its number."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "closed").unlink(missing_ok=True)
        for number, kind, _ in self._listed():
            if kind == "todo":
                self.withdraw(number)
        return max((int(number[1:]) for number, _, _ in self._listed()), default=0)

    def publish(self, task: str, content: Values) -> None:
        write_json(self.folder / f"{task}.todo", content)

    def withdraw(self, task: str) -> bool:
        aside = aside_of(self.folder / task)
        try:  # a worker may claim the task at the same time: only one of both renames it
            os.rename(self.folder / f"{task}.todo", aside)
        except FileNotFoundError:
            return False
        aside.unlink()
        return True

    def claim(self, worker: str) -> tuple[str, Row] | None:
        for number, kind, _ in self._listed():
            if kind != "todo":
                continue
            claimed = self.folder / f"{number}.{worker}.claimed"
            with suppress(FileNotFoundError):
                os.rename(self.folder / f"{number}.todo", claimed)
            if claimed.exists():  # NFS may report that a rename failed although it succeeded
                return number, read_json(claimed)
        return None

    def claims(self) -> dict[str, str]:
        return {number: worker for number, kind, worker in self._listed() if kind.endswith(".claimed")}

    def content(self, task: str, worker: str) -> Row:
        return read_json(self.folder / f"{task}.{worker}.claimed")

    def stop(self, task: str) -> None:
        with writing(self.folder):
            (self.folder / f"{task}.stop").touch()

    def stopped(self) -> frozenset[str]:
        return frozenset(number for number, kind, _ in self._listed() if kind == "stop")

    def forget(self, task: str, worker: str) -> None:
        for name in (f"{task}.{worker}.claimed", f"{task}.stop"):
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        with writing(self.folder):
            (self.folder / "closed").touch()

    def is_closed(self) -> bool:
        # A folder that was removed has no further task either
        try:
            return "closed" in os.listdir(self.folder)
        except FileNotFoundError:
            return True

    def _listed(self) -> Iterator[tuple[str, str, str]]:
        names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        for name in names:
            if match := _TASK.fullmatch(name):
                yield match[1], match[2], match[3] or ""


def home_of(directory: Path, slot: int) -> Path:
    return directory / WORKERS / f"worker_{slot}"


def events_of(home: Path, process: int) -> Path:
    return home / f"events_{process}.jsonl"


def newest(home: Path) -> int:
    """Return the number of the newest process that has begun in a slot; 0 before the first."""
    with suppress(FileNotFoundError):
        return max((int(match[1]) for name in os.listdir(home) if (match := _EVENTS.fullmatch(name))), default=0)
    return 0


def append(path: Path, line: Values) -> None:
    """Append ``line`` as JSON; on failure nothing is appended. Raises OSError."""
    append_bytes(path, json.dumps(line).encode() + b"\n")
