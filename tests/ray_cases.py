"""A Ray cluster of several nodes in this machine, and workers on it that train nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import retrain.campaign.running.raycluster as raycluster
import retrain.campaign.running.rayconnect as rayconnect
import retrain.campaign.running.spawning as spawning

TESTS = Path(__file__).parent
STORE_BYTES = 80 << 20
TRIES = 4


class StubHost(raycluster.Host):
    """Its process is ``stubworker``; a directory that is not there is not waited for."""

    def __init__(self, seating: raycluster.Seating):
        stub = TESTS / "stubworker.py"
        spawning.BOOT = f"import runpy; runpy.run_path({str(stub)!r}, run_name='__main__')"
        rayconnect.SHARED_SECONDS = 1.0
        super().__init__(seating)


class Nodes:
    """The nodes of a cluster: a head that trains nothing, and those that were added, in their order."""

    def __init__(self, cluster: Any):
        self.cluster, self.address, self.members = cluster, str(cluster.address), []

    def add(self, **resources: Any) -> None:
        """Bring a node with these resources. Ray gives a node 30 seconds to start, on a busy machine too few."""
        for left in range(TRIES - 1, -1, -1):
            try:
                self.members.append(self.cluster.add_node(object_store_memory=STORE_BYTES, **resources))
                return
            except Exception as error:
                if not left or "timed out" not in str(error):
                    raise

    def of(self, pid: int) -> int:
        """The number of the node that has this process."""
        return next(self._that_have(pid))

    def has(self, pid: int) -> bool:
        """Whether a node has this process."""
        return next(self._that_have(pid), None) is not None

    def _that_have(self, pid: int) -> Iterator[int]:
        above = {process.pid for process in psutil.Process(pid).parents()}
        raylets = [node.all_processes["raylet"][0].process.pid for node in self.members]
        return (number for number, raylet in enumerate(raylets) if raylet in above)

    def remove(self, number: int) -> None:
        """Have a node vanish, as with its power cut."""
        self.cluster.remove_node(self.members.pop(number), allow_graceful=False)


def _head(kind: Any, arguments: dict[str, Any]) -> Any:
    """A cluster of a head alone."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return kind(initialize_head=True, head_node_args=arguments)
        except Exception as error:
            if not left or "timed out" not in str(error):
                raise
    raise AssertionError


@contextmanager
def cluster_of(*nodes: dict[str, Any]) -> Iterator[Nodes]:
    """A cluster with nodes of these resources, which know what lies beside the tests."""
    with_tests = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED")}
    os.environ |= {"PYTHONPATH": with_tests, "RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    made = Nodes(_head(Cluster, head))
    try:
        for node in nodes:
            made.add(**node)
        yield made
    finally:
        made.cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
