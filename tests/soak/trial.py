"""One campaign that is killed and continued until it ends: what is done to its processes, and what is counted."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.soak.traps import CONTROLLER, FOLDER, IN_CONTROLLERS, IN_TRAINING, TRAINING

ROOT = Path(__file__).parents[2]
ACTS_ON_ONE = {"controller": 2, "controller, terminated": 1}
"""What happens to a campaign that its controller trains, and how often in proportion; it starts with a trap."""
ACTS_ON_WORKERS = {
    "trap": 14, "worker": 6, "worker, suspended": 2, "worker, terminated": 2, "controller": 4,
    "controller, suspended": 2, "controller, worker suspended": 3, "controller and worker": 3, "all": 1,
}  # fmt: skip
ACTS_ON_SLURM = {act: often for act, often in ACTS_ON_WORKERS.items() if act != "worker, terminated"}
"""One that is terminated waits for Slurm to end it, which has not been asked to."""
ACTS_ON_CLUSTER = ACTS_ON_WORKERS | {"actor": 4, "node": 5, "node, suspended": 2}
SUSPENDED_SECONDS = {"worker": 6.0, "controller": 6.0, "node": 45.0}  # Ray gives a node up after about 20 s
LIFE_SECONDS, END_SECONDS = 300.0, 15.0  # most of an undisturbed campaign, and of its processes after that


def processes_of(folder: Path, words: str = "") -> list[int]:
    """Return the running processes of the campaigns in a folder that have ``words`` in their command line."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(FOLDER) == str(folder):
                pids += [process.pid] * (words in " ".join(process.cmdline()))
    return pids


@dataclass
class Trial:
    """A campaign while it is disturbed; ``executor`` says who trains it, ``nodes`` are those of a Ray cluster."""

    toml: Path
    out: Path
    executor: str
    chance: random.Random
    tried: Counter[str]  # how often each place had a trap, over all campaigns
    most_kills: int
    sets: Sequence[str] = ()
    nodes: Any = None
    killed: Counter[str] = field(default_factory=Counter[str])
    besides: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list)
    _suspended: dict[int, float] = field(default_factory=dict)
    _deaths: int = 0

    def run(self) -> None:
        """Train to the end, with about ``most_kills`` on the way."""
        of_executor = {"inprocess": ACTS_ON_ONE, "ray": ACTS_ON_CLUSTER, "slurm": ACTS_ON_SLURM}
        acts = of_executor.get(self.executor, ACTS_ON_WORKERS)
        pace = 30.0 if self.executor == "inprocess" else 8.0  # one process usually dies in its trap before
        self._start("train", self.toml, "--out", self.out)
        while not self.wrong:
            if self.killed.total() < self.most_kills:
                if self._lives_on(self.chance.uniform(0.0, pace)):
                    self._act(self.chance.choices([*acts], [*acts.values()])[0])
            elif self._lives_on(LIFE_SECONDS):
                self.wrong.append(f"{self.out}: no end after {LIFE_SECONDS:g} s without any kill")
            if (status := self._count()) == 0:
                break
            if status is not None:  # both commands continue a campaign
                begun = (self.out / "plan.json").is_file() and self.chance.random() < 0.5
                self._start(*(("resume", self.out) if begun else ("train", self.toml, "--out", self.out)))
        self._end()

    def _start(self, *words: object) -> None:
        if self.executor == "inprocess" and self.killed.total() < self.most_kills:
            self._lay_trap(CONTROLLER, IN_TRAINING + IN_CONTROLLERS)
        sets = [word for text in self.sets if words[0] == "train" for word in ("--set", text)]
        environment = os.environ | {FOLDER: str(self.toml.parent), "PYTHONPATH": str(ROOT)}
        with open(self.toml.parent / "lives.log", "ab") as log:
            self.controller = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.traps", *map(str, words), *sets, "--plain"],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _lives_on(self, seconds: float) -> bool:
        """Let it train for so long; return whether its controller still runs."""
        end = time.monotonic() + seconds
        while self.controller.poll() is None and time.monotonic() < end:
            for pid in [pid for pid, when in self._suspended.items() if when <= time.monotonic()]:
                del self._suspended[pid]
                self._send(pid, signal.SIGCONT)
            time.sleep(0.02)
        return self.controller.poll() is None

    def _act(self, what: str) -> None:
        who, _, how = what.partition(", ")
        workers = processes_of(self.toml.parent, "retrain.campaign.worker")
        worker = self.chance.choice(workers or [0])
        pid = worker if who == "worker" else self.controller.pid
        if what == "trap":
            self._lay_trap(TRAINING, IN_TRAINING)
            self._lay_trap(CONTROLLER, IN_CONTROLLERS)
        elif what == "actor":
            actor = self.chance.choice(processes_of(self.toml.parent, "ray::Host") or [0])
            self.killed["actor"] += self._send(actor, signal.SIGKILL)
        elif who == "node":
            self._disturb_node(workers, how)
        elif how == "suspended":
            self._suspend(what, pid)
        elif how == "terminated":
            self.besides[what] += self._send(pid, signal.SIGTERM)
            if pid == self.controller.pid and self._lives_on(0.1 + self.chance.random()):
                self.controller.kill()
        else:
            if how == "worker suspended":
                self._suspend("worker, suspended", worker)
            both = {"all": [pid, *workers], "controller and worker": [pid, worker]}.get(who, [pid])
            for victim in self.chance.sample(both, len(both)):
                sent = self._send(victim, signal.SIGKILL)
                self.killed["worker, any moment"] += sent and victim != self.controller.pid  # which _count counts

    def _send(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal; return whether there was such a process."""
        if not pid or (pid == self.controller.pid and self.controller.poll() is not None):
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _suspend(self, name: str, *pids: int) -> None:
        self.besides[name] += any(pids)
        end = time.monotonic() + self.chance.uniform(0.1, SUSPENDED_SECONDS[name.partition(",")[0]])
        self._suspended |= {pid: end for pid in pids if self._send(pid, signal.SIGSTOP)}

    def _disturb_node(self, workers: Sequence[int], how: str) -> None:
        busy = [number for pid in workers for number in self.nodes.that_have(pid)]
        number = self.chance.choice(busy or range(len(self.nodes.members)))
        if how == "suspended":
            raylet = psutil.Process(self.nodes.raylet(number).pid)
            self._suspend("node, suspended", *[each.pid for each in (raylet, *raylet.children(recursive=True))])
        else:
            self._replace(self.killed, "node", number)

    def _replace(self, counts: Counter[str], name: str, number: int) -> None:
        counts[name] += 1
        self.nodes.remove(number)
        self._lives_on(self.chance.uniform(0.0, 2.0))
        self.nodes.add(num_cpus=1)

    def _count(self) -> int | None:
        """Count the deaths since the last time; return how the controller has ended, None where it runs."""
        path = self.toml.parent / "deaths"
        rows = [line.split(" ", 1) for line in path.read_text().splitlines()] if path.exists() else []
        places = {int(pid): place for pid, place in rows[self._deaths :]}
        self._deaths, status = len(rows), self.controller.poll()
        if status == -signal.SIGKILL:
            self.killed["controller, " + places.pop(self.controller.pid, "any moment")] += 1
        elif status and not (status in (130, -signal.SIGTERM) and self.besides["controller, terminated"]):
            self.wrong.append(f"{self.out}: the controller ended with {status}")
        self.killed += Counter(f"worker, {place}" for place in places.values())
        for number in range(len(self.nodes.members) if self.nodes and not self._suspended else 0):
            if self.nodes.raylet(number).poll() is not None:  # one that Ray gave up ends when it comes back
                self._replace(self.besides, "node, given up", number)
        return status

    def _end(self) -> None:
        """Continue what is suspended; no process of the campaign may run some seconds later."""
        for pid in self._suspended:
            self._send(pid, signal.SIGCONT)
        deadline = time.monotonic() + END_SECONDS
        while (left := processes_of(self.toml.parent)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            self.wrong.append(f"{self.out}: process {pid} still runs")
            self._send(pid, signal.SIGKILL)
        for pattern in ("taken_*", "trap_*", "deaths"):
            for path in self.toml.parent.glob(pattern):
                path.unlink()

    def _lay_trap(self, name: str, places: Sequence[str]) -> None:
        """Have the next process of that kind die in a place."""
        fewest = min(self.tried[place] for place in places)
        place = self.chance.choice([place for place in places if self.tried[place] == fewest])
        self.tried[place] += 1
        aside = self.toml.parent / "new"
        aside.write_text(json.dumps([place, self.chance.random() ** 3]))  # mostly one of the next times
        aside.rename(self.toml.parent / name)
