"""The executor of a Ray cluster: Ray places an actor for each worker, and beside the actor runs the worker's process.

The actor computes nothing: on its node it starts the process that ``processes`` starts here, and passes on what the
two ends say. So a worker ends as processes do, with an exit status or a signal that can be told, a context of the GPU
that ends with it, and a log of what libraries print; whoever kills it is found out by its parent, and Ray's own
libraries stay out of it. Ray restarts nothing: the scheduler has the job begun again, and leases in the directory,
which all nodes share, decide who writes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.processes import Process, Slot
from retrain.campaign.running.rayconnect import connect, first_line, last_line, ray_module, sees
from retrain.campaign.running.rayfleet import RayFleet
from retrain.campaign.running.workers import Workers
from retrain.config import Config
from retrain.errors import RetrainError, UsageError, plural
from retrain.ownership import claim

ROOM_SECONDS = 20.0  # Seconds without room for a worker after which the user is notified
KILL_SECONDS = 20.0  # Seconds to wait for a killed worker before its node counts as lost


@dataclass(frozen=True)
class Seating:
    """What a worker's actor has to know: its ``number``, the campaign's ``directory`` and its ``owner`` (the id in its
    mark), the controller's working directory ``cwd``, the worker's ``threads`` and its part of a GPU's ``memory``."""

    number: int
    directory: str
    owner: str
    cwd: str
    threads: str
    memory: float = 1.0


class Host:
    """Runs a worker's process on this node and speaks for it; what Ray makes an actor of.

    The process is begun by the thread that stays: the kernel tells it of the end of that one, not of this process.
    """

    def __init__(self, seating: Seating):
        self.seating, self.process = seating, None
        self.copy = os.getcwd()  # Ray's copy of the campaign file's folder on this node
        self.fault: dict[str, str] | None = None
        try:
            self.process = self._start(seating)
        except RetrainError as error:
            self.fault = {"kind": type(error).__name__, "text": str(error)}

    def begin(self) -> dict[str, Any]:
        """Return ``name``, ``pid`` and ``node`` of the worker, or, where there is none, the ``fault``."""
        if self.process is None:
            return {"fault": self.fault}
        node = ray_module().get_runtime_context().get_node_id()
        return {"name": self.process.name, "pid": self.process.process.pid, "node": node}

    def post(self, command: dict[str, Any]) -> None:
        if self.process is None:
            return
        if job := command.get("job"):
            cwd, folder = self.seating.cwd, os.path.join(self.seating.cwd, job["folder"])
            if not os.path.isdir(folder):
                job["folder"] = self.copy
            elif os.getcwd() != cwd:
                job["folder"] = folder
            if os.getcwd() != cwd:
                job["directory"] = os.path.join(cwd, job["directory"])
        self.process.post(command)

    def lines(self) -> Iterator[bytes]:
        if self.process is not None:
            yield from self.process.lines()

    def ended(self) -> str:
        return "" if self.process is None else self.process.ended()

    def release(self) -> None:
        if self.process is not None:
            self.process.release()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _start(self, seating: Seating) -> Process:
        ray = ray_module()
        directory = Path(seating.cwd, seating.directory)
        node = ray.util.get_node_ip_address()
        if not sees(directory, seating.owner):
            raise UsageError(
                f"node {node} ({socket.gethostname()}) does not see {directory}: a campaign on a Ray cluster needs "
                "a directory that all of its nodes share, at the same path: name one with --out"
            )
        if os.path.isdir(seating.cwd):
            os.chdir(seating.cwd)
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        device = f"gpu:{','.join(gpus)}" if gpus else "cpu"
        os.environ["OMP_NUM_THREADS"] = seating.threads
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus else ""
        own = str(Path(ray.__file__).parent)  # copies of packages there are for Ray's own processes
        sys.path[:] = [path for path in sys.path if not path.startswith(own)]
        slot = Slot(f"{node} {device}", int(seating.threads), visible, seating.memory)
        return Process(seating.number, slot, directory)


@dataclass
class Cluster:
    """The cluster that this process is connected to. ``gpus`` and ``cpus`` are what a worker asks for."""

    gpus: float
    cpus: int
    ours: bool  # Whether this executor opened the connection and must close it
    plan: Plan
    told: bool = field(default=False, init=False)  # Whether the user was notified that workers wait for room
    links: list[Actor] = field(default_factory=list, init=False)

    def start(self, slots: Sequence[int]) -> Iterator[tuple[int, Actor]]:
        owner = claim(self.plan.directory)
        threads = os.environ.get("OMP_NUM_THREADS") or str(self.cpus)
        for slot in slots:
            memory = min(1.0, self.gpus) if self.gpus else 1.0
            seating = Seating(slot + 1, str(self.plan.directory), owner.id, os.getcwd(), threads, memory)
            self.links.append(Actor(self, seating))
            yield slot, self.links[-1]

    def room(self) -> str:
        ray = ray_module()
        total, free = ray.cluster_resources(), ray.available_resources()
        kinds = {"GPU": self.gpus, "CPU": self.cpus}
        asks = " and ".join(_count(count, kind) for kind, count in kinds.items() if count)
        has = ", ".join(f"{free.get(kind, 0):g} of {plural(int(total.get(kind, 0)), kind)}" for kind in kinds)
        return f"it asks for {asks}, and of what the cluster has are free: {has}"

    def close(self) -> None:
        for link in self.links:
            link.wait(KILL_SECONDS)
        if self.ours:
            ray_module().shutdown()


class Actor:
    """See ``Link``: a worker on a node of the cluster."""

    def __init__(self, cluster: Cluster, seating: Seating):
        ray = ray_module()
        self.cluster = cluster
        self.name = str(seating.number)
        self.ready = False
        self._over = threading.Event()
        self._who: dict[str, Any] = {}
        self._how = ""
        options: dict[str, Any] = {"num_gpus": cluster.gpus, "num_cpus": cluster.cpus, "scheduling_strategy": "SPREAD"}
        options |= {"concurrency_groups": {"lines": 1, "end": 1}, "max_restarts": 0}
        self._actor = ray.remote(**options)(Host).remote(seating)

    def post(self, command: Mapping[str, Any]) -> None:
        with suppress(ray_module().exceptions.RayError):
            self._actor.post.remote(dict(command))

    def lines(self) -> Iterator[bytes]:
        """See ``Link.lines``; before it is placed they say what keeps it from that."""
        ray = ray_module()
        gone = ray.exceptions.RayError
        try:
            yield from self._place()
            if self.ready:
                for line in self._actor.lines.options(concurrency_group="lines", num_returns="streaming").remote():
                    yield ray.get(line)
                self._how = ray.get(self._actor.ended.remote())
        except gone:
            with suppress(gone):
                alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
                what = "Ray actor" if not self._who or self._who["node"] in alive else "node"
                self._how = f"{self._title()} was lost with its {what}"
        finally:
            with suppress(gone):
                ray.kill(self._actor)
            self._over.set()

    def _place(self) -> Iterator[bytes]:
        ray = ray_module()
        begun = self._actor.begin.remote()
        while not ray.wait([begun], timeout=ROOM_SECONDS)[0]:
            if not self.cluster.told and not self._over.is_set():
                self.cluster.told = True
                words = f"worker {self.name} waits for room in the Ray cluster: {self.cluster.room()}"
                yield _line(message=words, level="warning")
        try:
            self._who = ray.get(begun)
        except ray.exceptions.RuntimeEnvSetupError as error:
            yield _line(fault={"kind": "UsageError", "text": f"Ray could not set a node up: {first_line(error)}"})
        except ray.exceptions.RayActorError as error:
            if not error.actor_init_failed:
                raise
            yield _line(fault={"kind": "UsageError", "text": f"a node cannot run a worker: {last_line(error)}"})
        if fault := self._who.get("fault"):
            yield _line(fault=fault)
        elif self._who:
            self.name, self.ready = self._who["name"], True

    def _title(self) -> str:
        return f"worker {self.name}" + (f" (process {self._who['pid']})" if self._who else "")

    def ended(self, why: str = "") -> str:
        self._over.wait()
        return f"{self._title()} ended: {why}" if why else self._how

    def excused(self, begun: bool) -> bool:
        """See ``Link.excused``: Ray takes nothing away in order."""
        return False

    def release(self) -> None:
        ray = ray_module()
        with suppress(ray.exceptions.RayError):
            if self.ready:
                self._actor.release.remote()
            else:
                ray.kill(self._actor)

    def kill(self) -> None:
        """See ``Link.kill``; one whose node does not answer is left to the lease that it renews no more."""
        ray = ray_module()
        with suppress(ray.exceptions.RayError):
            if self.ready:
                ray.get(self._actor.kill.options(concurrency_group="end").remote(), timeout=KILL_SECONDS)
            ray.kill(self._actor)
        self._over.wait(KILL_SECONDS)

    def wait(self, seconds: float) -> bool:
        return self._over.wait(seconds)


def ray_workers(plan: Plan) -> Workers:
    """An executor whose workers are placed in the cluster of a plan's configuration. Raises UsageError when there is no
    such cluster, or nothing in it to train on."""
    config = plan.specs[0].config
    ours = not ray_module().is_initialized()
    if ours:
        connect(config, plan.folder)
    try:
        slots, gpus = slots_in(ray_module().nodes(), config)
    except UsageError:
        if ours:
            ray_module().shutdown()
        raise
    cluster = Cluster(_gpus_asked(config) if gpus else 0, config.ray.cpus, ours, plan)
    fleet = None
    if config.inference.launch is not None:
        fleet = partial(RayFleet, plan, config.ray.server_gpus if gpus else 0.0)
    return Workers(slots, gpus, cluster.start, cluster.close, fleet)


def slots_in(nodes: list[dict[str, Any]], config: Config) -> tuple[int, bool]:
    """How many workers there will be, and whether each has a GPU. ``nodes`` are as Ray lists them."""
    asked, devices, cpus = config.campaign.workers, config.backend.devices, config.ray.cpus
    everything = _resources(nodes)
    gpus = devices == "all" or (devices != "cpu" and any(int(each.get("GPU", 0)) for each in everything))
    left = _left_by_servers(everything, config) if config.inference.launch is not None else everything
    if not gpus and config.campaign.gpus_per_cohort != 1:
        raise UsageError(
            f"[campaign] gpus_per_cohort = {config.campaign.gpus_per_cohort:g} has no effect: the Ray cluster has no "
            "GPU; remove the line, or type --set campaign.gpus_per_cohort=1"
        )
    if asked != "auto":
        return asked, gpus
    if left is None:
        what = _asked_words(config.ray.server_cpus, config.ray.server_gpus if gpus else 0.0)
        raise UsageError(
            f"the Ray cluster has no room for {plural(config.inference.replicas, 'server')} of [inference] launch, "
            f"each of which asks for {what} ([ray] server_cpus, server_gpus); where nodes come when asked for, "
            "say how many workers: --workers 4"
        )
    count = sum(_room(each, config, gpus) for each in left)
    if not count and left is not everything and any(_room(each, config, gpus) for each in everything):
        raise UsageError(
            f"beside {plural(config.inference.replicas, 'server')} of [inference] launch the Ray cluster has no room "
            f"for a worker, which asks for {_asked_words(cpus, _gpus_asked(config) if gpus else 0.0)} ([ray] cpus, "
            "[backend] devices): add a node, or give the servers less ([ray] server_gpus, server_cpus)"
        )
    if not count:
        what = _asked_words(cpus, _gpus_asked(config) if gpus else 0.0)
        raise UsageError(
            f"no node of the Ray cluster has {what}, which is what a worker asks for ([ray] cpus, [backend] devices); "
            "where nodes come when they are asked for, say how many workers: --workers 4"
        )
    return count, gpus


def _room(node: dict[str, float], config: Config, gpus: bool) -> int:
    """How many workers fit on what a node has, with GPUs or without."""
    room = int(node.get("CPU", 0)) // config.ray.cpus
    if not gpus:
        return room
    whole, part = divmod(node.get("GPU", 0.0), 1)
    on_parts = int(part / _gpus_asked(config) + 1e-9) if config.gpus_per_worker == 1 else 0
    return min(room, config.campaign.workers_per_gpu * (int(whole) // config.gpus_per_worker) + on_parts)


def _left_by_servers(nodes: list[dict[str, float]], config: Config) -> list[dict[str, float]] | None:
    """What nodes have beside the servers that are to be launched, each where there is most room; None where one of
    them has none."""
    left, inference = [dict(node) for node in nodes], config.inference
    on_gpus = config.backend.devices != "cpu" and any(node.get("GPU", 0) for node in nodes)
    asks = {"CPU": float(config.ray.server_cpus), "GPU": config.ray.server_gpus if on_gpus else 0.0}
    for _ in range(inference.replicas):
        room = [node for node in left if all(node.get(kind, 0) >= count for kind, count in asks.items())]
        if not room:
            return None
        most = max(room, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
        for kind, count in asks.items():
            most[kind] = most.get(kind, 0) - count
    return left


def _gpus_asked(config: Config) -> float:
    return min(config.campaign.gpus_per_cohort, 1.0) if config.gpus_per_worker == 1 else config.gpus_per_worker


def _asked_words(cpus: int, gpus: float) -> str:
    return f"{plural(cpus, 'CPU')} and {_count(gpus, 'GPU')}" if gpus else plural(cpus, "CPU")


def _count(count: float, kind: str) -> str:
    return f"{count:g} of a {kind}" if count % 1 else plural(int(count), kind)


def _line(**facts: Any) -> bytes:
    return json.dumps({"id": None, **facts}).encode() + b"\n"


def _resources(nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [node["Resources"] for node in nodes if node["Alive"]]
