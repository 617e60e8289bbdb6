"""Kill the workers, actors and nodes of a campaign that a Ray cluster trains, and its controller.

    python -m tests.soak --executor ray --kills 100 --minutes 60

As ``tests.soak_workers``, with a cluster of three nodes in this machine, one CPU each, beside a head that trains
nothing. Besides what happens there an actor is killed, a node vanishes as with its power cut (another comes), or all of
a node stands still for some time, as with a network that is gone: after long enough Ray takes it for dead, and it
comes back to a cluster that has gone on.

The nodes are children of a process of their own, started by ``python -m tests.soak_ray NODES``, which does what it is
told on standard input: this one forks, and Ray's threads do not live through that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests import soak
from tests.soak_workers import ACTS, FOLDER, Campaign, Executor, marked, workers_in

ROOT = Path(__file__).parents[1]
NODES = 3
ACTS_OF_CLUSTERS = ACTS | {"actor": 4, "node": 5, "node, suspended": 2}
ABSENT_SECONDS = 45.0
"""Most that a node stands still; Ray takes one for dead that has not answered for about twenty seconds."""


class Cluster:
    """The nodes, asked and told through the process that has started them."""

    def __init__(self, log: Path):
        with open(log, "ab") as file:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "tests.soak_ray", str(NODES)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self.address = self._ask("address")

    def raylets(self) -> list[int]:
        """The process that is a node, of each; 0 where it has ended."""
        return [int(pid) for pid in self._ask("raylets").split()]

    def remove(self, number: int) -> None:
        """Have a node vanish."""
        self._ask(f"remove {number}")

    def mend(self) -> None:
        """Bring a node for each that has gone."""
        self._ask("mend")

    def close(self) -> None:
        """End all nodes."""
        with suppress(OSError):
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
        self._keeper.wait()

    def _ask(self, words: str) -> str:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(words + "\n")
        self._keeper.stdin.flush()
        answer = self._keeper.stdout.readline()
        if not answer:
            raise RuntimeError(f"the cluster's keeper has ended, asked for: {words}")
        return answer.strip()


@dataclass
class InCluster(Campaign):
    """A campaign whose workers are actors of a cluster."""

    cluster: Cluster | None = field(default=None, kw_only=True)

    def act(self, what: str) -> None:
        """See ``Campaign.act``."""
        assert self.cluster is not None
        who, _, how = what.partition(", ")
        if who == "actor":
            actors = [pid for pid in marked(self.folder) if _title(pid).startswith("ray::Host")]
            if actors and self._send(self.chance.choice(sorted(actors)), signal.SIGKILL):
                self.killed["actor"] += 1
            return
        if who != "node":
            super().act(what)
            return
        number, raylet = self._node()
        if how == "suspended":
            self.others[what] += 1
            with suppress(psutil.Error):
                below = [process.pid for process in psutil.Process(raylet).children(recursive=True)]
                self._suspend([raylet, *below], ABSENT_SECONDS)
            return
        self.cluster.remove(number)
        self.killed["node"] += 1
        self.lives_on(self.chance.uniform(0.0, 2.0))
        self.cluster.mend()

    def count(self) -> None:
        """See ``Campaign.count``; a node that Ray has given up ends when it comes back."""
        super().count()
        assert self.cluster is not None
        if not self._suspended and not all(self.cluster.raylets()):
            self.others["node, given up"] += 1
            self.cluster.mend()

    def _node(self) -> tuple[int, int]:
        """A node's number and process: one with a worker, where there is such a one."""
        assert self.cluster is not None
        raylets, busy = self.cluster.raylets(), set[int]()
        for pid in workers_in(self.folder):
            with suppress(psutil.Error):
                busy |= {each.pid for each in psutil.Process(pid).parents()} & {*raylets}
        raylet = self.chance.choice(sorted(busy) or [pid for pid in raylets if pid])
        return raylets.index(raylet), raylet


def _title(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


@contextmanager
def ray(folder: Path) -> Iterator[Executor]:
    """A cluster for campaigns in ``folder``."""
    cluster = Cluster(folder / "cluster.log")
    env_vars = f'{FOLDER} = "{folder}", {soak.DEATHS} = "{folder / "deaths"}"'
    sets = [
        "campaign.executor=ray",
        f"ray.address={cluster.address}",
        f"ray.runtime_env={{ env_vars = {{ {env_vars} }} }}",
    ]
    try:
        yield Executor(sets, ACTS_OF_CLUSTERS, lambda *parts: InCluster(*parts, cluster=cluster))
    finally:
        cluster.close()


def keep(count: int) -> None:
    """Keep a cluster of so many nodes until standard input ends; one line of answer for each line of it."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints
    from tests.ray_cases import cluster_of

    node = {"num_cpus": 1}
    with cluster_of(*[node] * count) as nodes:

        def raylet(member: object) -> subprocess.Popen[bytes]:
            return member.all_processes["raylet"][0].process  # type: ignore[attr-defined]

        for line in sys.stdin:
            words, answer = line.split(), "done"
            if words[0] == "address":
                answer = nodes.address
            elif words[0] == "raylets":
                answer = " ".join(str(each.pid if each.poll() is None else 0) for each in map(raylet, nodes.members))
            elif words[0] == "remove":
                nodes.remove(int(words[1]))
            else:
                for number in reversed(range(len(nodes.members))):
                    if raylet(nodes.members[number]).poll() is not None:
                        nodes.remove(number)
                while len(nodes.members) < count:
                    nodes.add(**node)
            answers.write(answer + "\n")


if __name__ == "__main__":
    keep(int(sys.argv[1]))
