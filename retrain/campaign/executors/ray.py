"""Run workers in a Ray cluster: Ray places an actor for each worker, which starts the worker's process on its node.

The separate process keeps Ray's libraries out of the worker. When a node is lost, Ray restarts its actors on other
nodes, where they start new workers. Actors are detached: they outlive a killed controller, and exit when their worker
has ended.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from retrain.campaign.executors.ray_connection import actor_gpus, amount, connect, last_line, ray_module, sees, slots_in
from retrain.campaign.executors.ray_servers import RayFleet
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running import protocol
from retrain.campaign.running.protocol import Message, WorkerDevice, WorkerEnd, command_of
from retrain.campaign.running.tasks import WORKERS, append, events_of, home_of, newest
from retrain.campaign.running.workers import CampaignWorkers
from retrain.errors import UsageError, plural
from retrain.ownership import claim
from retrain.util.processes import end_words, start_logged

ROOM_SECONDS = 20.0  # Seconds without room for a worker after which the user is notified
KILL_SECONDS = 20.0  # Seconds to wait for a killed worker before its node counts as lost
END_SECONDS = 5.0  # Seconds within which workers that released their leases must end
NAMESPACE = "retrain"  # Prefix of the names of detached actors


@dataclass(frozen=True)
class WorkerRequest:
    """Arguments of a worker's actor: the ``slot``; the campaign's ``directory`` and the ``folder`` of its TOML file,
    both relative to the controller's working directory ``cwd``; the ``owner`` of the directory (the id in its mark);
    the ``program`` to start; the worker's ``threads`` and its share of a GPU's ``memory``."""

    slot: int
    directory: str
    folder: str
    cwd: str
    owner: str
    program: Sequence[str]
    threads: str
    memory: float = 1.0


class WorkerHost:
    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.copy = os.getcwd()  # Ray's copy of the campaign file's folder on this node

    def run(self, request: WorkerRequest) -> str:
        """Start the worker's process and wait until it ends; return why it could not begin, or ""."""
        ray = ray_module()
        directory, node = Path(request.cwd, request.directory), ray.util.get_node_ip_address()
        if not sees(directory, request.owner):
            return f"node {node} ({socket.gethostname()}) does not see {directory}"
        folder = Path(request.cwd, request.folder)
        if os.path.isdir(request.cwd):
            os.chdir(request.cwd)
            directory = Path(request.directory)
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        device = f"gpu:{','.join(gpus)}" if gpus else "cpu"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus else ""
        device_info = WorkerDevice(f"{node} {device}", int(request.threads), visible, request.memory)
        more = ["--folder", str(folder if folder.is_dir() else self.copy), "--parent", str(os.getpid())]
        own = str(Path(ray.__file__).parent)  # excludes packages that belong to Ray's own processes
        path = [entry or os.getcwd() for entry in sys.path if not entry.startswith(own)]
        environment = device_info.environment | {
            "OMP_NUM_THREADS": request.threads,
            "PYTHONPATH": os.pathsep.join(path),
        }
        home = home_of(directory, request.slot)
        log, before = directory / WORKERS / f"worker_{request.slot}.log", newest(home)
        command = command_of(request.program, directory, request.slot, device_info.device, *more)
        self.process = start_logged(command, log, environment)
        status = self.process.wait()
        ending = end_words(status)
        if newest(home) > before:
            append(events_of(home, newest(home)), {"ended": ending, "in_order": status == 0})
            return ""
        return f"{ending}; what it printed is in {log} of node {node}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(eq=False)
class WorkerActor:
    handle: Any
    run: Any
    since: float


def _has_ended(actor: WorkerActor) -> bool:
    return bool(ray_module().wait([actor.run], timeout=0)[0])


class RayExecutor:
    """Starts an actor with ``gpus`` and ``cpus`` for each worker. ``ours``: this process opened the connection to the
    cluster, and closes it."""

    def __init__(self, plan: Plan, slots: int, gpus: float, cpus: int, ours: bool):
        self.plan, self.slots, self.gpus, self.cpus, self.ours = plan, slots, gpus, cpus, ours
        self._actors: dict[int, WorkerActor] = {}
        self._notified = False  # Whether the user was notified that workers wait for room

    @cached_property
    def owner(self) -> str:
        return claim(self.plan.directory).id

    def has_gpu(self) -> bool:
        return self.gpus > 0

    def start(self, slots: Sequence[int]) -> None:
        ray = ray_module()
        threads = os.environ.get("OMP_NUM_THREADS") or str(self.cpus)
        memory = min(1.0, self.gpus) if self.gpus else 1.0
        for slot in slots:
            request = WorkerRequest(
                slot, str(self.plan.directory), str(self.plan.folder), os.getcwd(), self.owner, protocol.PROGRAM,
                threads, memory,
            )  # fmt: skip
            self._remove(slot)
            host = ray.remote(
                num_gpus=self.gpus, num_cpus=self.cpus, scheduling_strategy="SPREAD", name=self._name(slot),
                namespace=NAMESPACE, lifetime="detached", get_if_exists=False, max_restarts=-1, max_task_retries=-1,
                concurrency_groups={"end": 1},
            )(WorkerHost)  # fmt: skip
            handle = host.remote()
            self._actors[slot] = WorkerActor(handle, handle.run.remote(request), time.monotonic())

    def look(self, slot: int) -> WorkerEnd | None:
        actor = self._actors.get(slot)
        if actor is None:
            return None
        ray = ray_module()
        try:
            if not _has_ended(actor):
                return None
            fault = ray.get(actor.run)
        except ray.exceptions.RuntimeEnvSetupError as error:
            fault = f"could not begin: Ray could not set a node up: {last_line(error)}"
        except ray.exceptions.RayActorError as error:
            self._remove(slot)
            if getattr(error, "actor_init_failed", False):
                return WorkerEnd(f"could not begin: a node cannot run a worker: {last_line(error)}", final=True)
            return WorkerEnd("was lost with its Ray actor")
        self._remove(slot)
        if fault:
            return WorkerEnd(f"gets no work: {fault}", final=True)
        return WorkerEnd("ended", excused=True)

    def notes(self) -> list[Message]:
        if self._notified:
            return []
        for slot, actor in self._actors.items():
            is_late = time.monotonic() - actor.since > ROOM_SECONDS
            if is_late and not newest(home_of(self.plan.directory, slot)) and not _has_ended(actor):
                self._notified = True
                return [Message(f"worker {slot} waits for room in the Ray cluster: {self._room()}", "warning")]
        return []

    def kill(self, slot: int) -> None:
        # If the node does not answer, the worker's lease expires
        ray, actor = ray_module(), self._actors.get(slot)
        if actor is None:
            return
        with suppress(ray.exceptions.RayError):
            ray.get(actor.handle.kill.options(concurrency_group="end").remote(), timeout=KILL_SECONDS)
        self._remove(slot)

    def close(self) -> None:
        ray = ray_module()
        if runs := [actor.run for actor in self._actors.values()]:
            with suppress(ray.exceptions.RayError):
                ray.wait(runs, num_returns=len(runs), timeout=END_SECONDS)
        for slot in range(1, self.slots + 1):
            self.kill(slot)
            self._remove(slot)
        if self.ours:
            ray.shutdown()

    def _remove(self, slot: int) -> None:
        ray = ray_module()
        self._actors.pop(slot, None)  # an earlier controller may have created it
        with suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(self._name(slot), namespace=NAMESPACE))

    def _name(self, slot: int) -> str:
        return f"{self.owner}-{slot}"

    def _room(self) -> str:
        total, free = ray_module().cluster_resources(), ray_module().available_resources()
        kinds = {"GPU": self.gpus, "CPU": self.cpus}
        asks = " and ".join(amount(count, kind) for kind, count in kinds.items() if count)
        has = ", ".join(f"{free.get(kind, 0):g} of {plural(int(total.get(kind, 0)), kind)}" for kind in kinds)
        return f"it asks for {asks}, and of what the cluster has are free: {has}"


def ray_workers(plan: Plan) -> CampaignWorkers:
    """Connect to the Ray cluster of ``[ray] address`` and return the plan's workers in it. Raises UsageError if no
    cluster answers, or if no node has the CPUs and GPUs of a worker."""
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
    executor = RayExecutor(plan, slots, actor_gpus(config) if gpus else 0, config.ray.cpus, ours)
    launches = config.inference.launch is not None
    fleet = partial(RayFleet, plan, config.ray.server_gpus if gpus else 0.0) if launches else None
    return CampaignWorkers(executor, plan.directory, fleet)
