"""An executor that does every job in a process of its own; events come back as JSON lines through a pipe."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from select import select

from retrain.campaign.running.executor import InProcess
from retrain.campaign.running.protocol import Event, Job, from_json, to_json
from retrain.errors import UsageError


class Child:
    """A process that does one job; at the end of its standard input it is asked to stop."""

    id = "1"

    def __init__(self, job: Job):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], **pipes, start_new_session=True)
        self.process.stdin.write(json.dumps(to_json(job)) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.stdin.close()


class Processes:
    def __init__(self) -> None:
        self.children: list[Child] = []

    def has_gpu(self) -> bool:
        return False

    def submit(self, job: Job) -> Child:
        self.children.append(Child(job))
        return self.children[-1]

    def events(self) -> Generator[Event, None, None]:
        while self.children:
            with self.children.pop(0).process as process:
                try:
                    yield from (from_json(json.loads(line)) for line in process.stdout)
                    if process.wait():
                        raise UsageError(f"the child ended with status {process.returncode}")
                finally:
                    process.kill()

    def close(self) -> None:
        """Children end with their events."""


if __name__ == "__main__":
    executor = InProcess()
    handle = executor.submit(from_json(json.loads(sys.stdin.readline())))
    for event in executor.events():
        print(json.dumps(to_json(event)), flush=True)
        if select([sys.stdin], [], [], 0)[0]:
            handle.stop()
