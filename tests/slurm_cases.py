"""A cluster for tests: Slurm's commands on PATH, as ``slurm_standin`` plays them, or submitit's local jobs."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

from retrain.campaign.running.slurm_task import Pace

PROGRAM = Path(__file__).with_name("slurm_standin.py")
STUB = Path(__file__).with_name("stubworker.py")
STUB_BOOT = f"import runpy; runpy.run_path({str(STUB)!r}, run_name='__main__')"
"""For ``processes.BOOT``: workers that train nothing."""
FAST = Pace(poll=0.1, beat=0.5, patience=5.0, kill=30.0)
COMMANDS = ("sbatch", "srun", "scancel", "scontrol", "sacct")


class Standin:
    """The commands of a Slurm with one machine; ``close`` ends all that runs there."""

    def __init__(self, folder: Path, monkeypatch):
        import submitit

        watcher = submitit.SlurmJob.watcher  # which remembers the ends of jobs by their ids
        watcher.clear()
        watcher._registered.clear()
        self.home, programs = folder / "standin", folder / "bin"
        self.home.mkdir()
        programs.mkdir()
        for name in COMMANDS:
            path = programs / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} {name} "$@"\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("STANDIN", str(self.home))
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def room(self, tasks: int) -> None:
        """How many tasks may run at a time."""
        (self.home / "room").write_text(str(tasks))

    def calls(self, name: str) -> list[list[str]]:
        """What a command was asked, each time."""
        path = self.home / "calls"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [words[1:] for words in lines if words[0] == name]

    def script(self, job: int = 4711) -> list[str]:
        """The lines of what sbatch was given."""
        return (self.home / f"script_{job}.sh").read_text().splitlines()

    def state(self, task: str) -> str:
        """What Slurm says of a task; nothing while it does not know it."""
        path = self.home / f"state_{task}"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """End all."""
        (self.home / "at_once").touch()
        os.system(f"scancel {' '.join(path.name[6:] for path in self.home.glob('state_*'))} 2>/dev/null")
        eventually(lambda: not list(self.home.glob("pid_*")), 30)
        shutil.rmtree(self.home, ignore_errors=True)


def eventually(happens: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something; AssertionError when it does not happen."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
