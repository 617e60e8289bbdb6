"""An executor that does every job in a process of its own; events come back as JSON lines through a pipe."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator

from retrain.campaign.running.executor import InProcess
from retrain.campaign.running.protocol import Event, Job, from_json, to_json
from retrain.errors import RetrainError


class Child:
    """A process that does one job. It goes on when an event was heard, and stops at the end of its standard input."""

    id = "1"

    def __init__(self, job: Job):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], **pipes, start_new_session=True)
        print(json.dumps(to_json(job)), file=self.process.stdin, flush=True)
        self.stop = self.process.stdin.close


class Processes:
    slots = 1

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.has_gpu = lambda: False

    def submit(self, job: Job) -> Child:
        self.children.append(Child(job))
        return self.children[-1]

    def events(self) -> Generator[Event, None, None]:
        while self.children:
            with self.children.pop(0).process as process:
                try:
                    for line in process.stdout:
                        yield from_json(json.loads(line))
                        if not process.stdin.closed:
                            print(file=process.stdin, flush=True)
                    if process.wait():
                        raise RetrainError(f"the child ended with status {process.returncode}")
                finally:
                    process.kill()

    def close(self) -> None:
        """Children end with their events."""


if __name__ == "__main__":
    executor = InProcess()
    handle = executor.submit(from_json(json.loads(sys.stdin.readline())))
    for event in executor.events():
        print(json.dumps(to_json(event)), flush=True)
        if not sys.stdin.readline():
            handle.stop()
