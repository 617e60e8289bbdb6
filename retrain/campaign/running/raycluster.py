"""The executor of a Ray cluster: Ray places an actor for each worker, and beside the actor runs the worker's process.

The actor computes nothing: on its node it starts the process that ``processes`` starts here, and passes on what the
two ends say. So a worker ends as processes do, with an exit status or a signal that can be told, a context of the GPU
that ends with it, and a log of what libraries print; whoever kills it is found out by its parent, and Ray's own
libraries stay out of it. Ray restarts nothing: the scheduler has the job begun again, and leases in the directory,
which all nodes share, decide who writes.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import retrain
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.mirror import after
from retrain.campaign.running.processes import Process, Slot
from retrain.campaign.running.protocol import Job, from_json
from retrain.campaign.running.workers import Workers
from retrain.config import Config
from retrain.errors import RetrainError, UsageError
from retrain.extras import is_installed, missing
from retrain.ownership import Owner, claim, owner_of
from retrain.wording import plural

ROOM_SECONDS = 20.0
"""After so long without room for a worker the user is told."""
SHARED_SECONDS = 15.0
"""How long a node may take to see the campaign's directory: a network file system's caches lag behind."""
KILL_SECONDS = 20.0
"""How long a worker may take to be killed, before its node counts as gone."""
ANSWER_SECONDS = 10.0
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set for what ``ray job submit`` has started, whose own runtime_env holds."""
LEFT_OUT = [".git", ".venv", "__pycache__", "logs", "build", "*.safetensors", "*.gguf"]
"""What of the folder of a campaign's file is not sent to other machines."""


@dataclass(frozen=True)
class Seating:
    """What a worker's actor has to know: its ``number``, the campaign's ``directory`` and its ``owner`` (the id in its
    mark), the controller's working directory ``cwd``, the worker's ``threads``, its part of a GPU's ``memory``, and
    whether the directory has a copy (``copied``), so that nodes need not share it."""

    number: int
    directory: str
    owner: str
    cwd: str
    threads: str
    memory: float = 1.0
    copied: bool = False


class Host:
    """Runs a worker's process on this node and speaks for it; what Ray makes an actor of.

    The process is begun by the thread that stays: the kernel tells it of the end of that one, not of this process.
    """

    def __init__(self, seating: Seating):
        self.seating, self.process = seating, None
        self.copy = os.getcwd()
        """The folder of the campaign's file as Ray has brought it, where it has."""
        self.apart: Path | None = None
        """This node's own directory for the campaign, where it does not see that of the others."""
        self.fault: dict[str, str] | None = None
        try:
            self.process = self._start(seating)
        except RetrainError as error:
            self.fault = {"kind": type(error).__name__, "text": str(error)}

    def begin(self) -> dict[str, Any]:
        """Who the worker is: ``name``, ``pid``, ``node`` and whether it works ``apart``; or, where there is none, the
        ``fault``."""
        if self.process is None:
            return {"fault": self.fault}
        node = _ray().get_runtime_context().get_node_id()
        return {"name": self.process.name, "pid": self.process.process.pid, "node": node, "apart": bool(self.apart)}

    def post(self, command: dict[str, Any]) -> None:
        """See ``Link.post``. A job's files are looked for where they are on this node."""
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
            if self.apart is not None:
                job |= {"directory": str(self.apart), "apart": True}
        self.process.post(command)

    def lines(self) -> Iterator[bytes]:
        """See ``Link.lines``."""
        if self.process is not None:
            yield from self.process.lines()

    def ended(self) -> str:
        """See ``Link.ended``."""
        return "" if self.process is None else self.process.ended()

    def release(self) -> None:
        """See ``Link.release``."""
        if self.process is not None:
            self.process.release()

    def kill(self) -> None:
        """See ``Link.kill``."""
        if self.process is not None:
            self.process.kill()

    def _start(self, seating: Seating) -> Process:
        ray = _ray()
        directory = Path(seating.cwd, seating.directory)
        node = ray.util.get_node_ip_address()
        if not _sees(directory, seating.owner):
            if not seating.copied:
                raise UsageError(
                    f"node {node} ({socket.gethostname()}) does not see {directory}: a campaign on a Ray cluster needs "
                    "a directory that all of its nodes share, at the same path: name one with --out, or a URL where "
                    "it is copied with [logging] mirror"
                )
            directory = self.apart = Path(tempfile.gettempdir(), "retrain", seating.owner)
            claim(directory, Owner(seating.owner))
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


def _sees(directory: Path, owner: str) -> bool:
    """Whether this is the campaign's directory here too, soon."""
    pause = threading.Event()
    for _ in range(math.ceil(SHARED_SECONDS)):
        mark = owner_of(directory)
        if mark is not None and mark.id == owner:
            return True
        pause.wait(1.0)
    return False


@dataclass
class Cluster:
    """The cluster that this process is connected to. ``gpus`` and ``cpus`` are what a worker asks for."""

    gpus: float
    cpus: int
    ours: bool
    """Whether this executor has connected, and so disconnects."""
    plan: Plan
    told: bool = field(default=False, init=False)
    """Whether the user knows that workers wait for room."""
    links: list[Actor] = field(default_factory=list, init=False)

    def start(self, slots: Sequence[int]) -> Iterator[tuple[int, Actor]]:
        """Ask for the workers of these slots."""
        owner = claim(self.plan.directory)
        threads = os.environ.get("OMP_NUM_THREADS") or str(self.cpus)
        for slot in slots:
            copied = self.plan.specs[0].config.logging.mirror is not None
            memory = min(1.0, self.gpus) if self.gpus else 1.0
            seating = Seating(slot + 1, str(self.plan.directory), owner.id, os.getcwd(), threads, memory, copied)
            self.links.append(Actor(self, seating))
            yield slot, self.links[-1]

    def room(self) -> str:
        """What a worker asks for, and what there is."""
        ray = _ray()
        total, free = ray.cluster_resources(), ray.available_resources()
        kinds = {"GPU": self.gpus, "CPU": self.cpus}
        asks = " and ".join(_count(count, kind) for kind, count in kinds.items() if count)
        has = ", ".join(f"{free.get(kind, 0):g} of {plural(int(total.get(kind, 0)), kind)}" for kind in kinds)
        return f"it asks for {asks}, and of what the cluster has are free: {has}"

    def close(self) -> None:
        """Disconnect, once nobody listens to a worker any more."""
        for link in self.links:
            link.wait(KILL_SECONDS)
        if self.ours:
            _ray().shutdown()


class Actor:
    """See ``Link``: a worker on a node of the cluster."""

    def __init__(self, cluster: Cluster, seating: Seating):
        ray = _ray()
        self.cluster = cluster
        self.name = str(seating.number)
        self.ready = False
        self._over = threading.Event()
        self._who: dict[str, Any] = {}
        self._jobs: dict[str, Job] = {}
        self._how = ""
        options: dict[str, Any] = {"num_gpus": cluster.gpus, "num_cpus": cluster.cpus, "scheduling_strategy": "SPREAD"}
        options |= {"concurrency_groups": {"lines": 1, "end": 1}, "max_restarts": 0}
        self._actor = ray.remote(**options)(Host).remote(seating)

    def post(self, command: Mapping[str, Any]) -> None:
        """See ``Link.post``."""
        if "job" in command:
            self._jobs = {command["id"]: from_json(command["job"])}
        with suppress(_ray().exceptions.RayError):
            self._actor.post.remote(dict(command))

    def lines(self) -> Iterator[bytes]:
        """See ``Link.lines``; before it is placed they say what keeps it from that."""
        ray = _ray()
        gone = ray.exceptions.RayError
        try:
            yield from self._place()
            if self.ready:
                for line in self._actor.lines.options(concurrency_group="lines", num_returns="streaming").remote():
                    yield from self._brought(ray.get(line))
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
        """Wait until Ray has found room for it."""
        ray = _ray()
        begun = self._actor.begin.remote()
        while not ray.wait([begun], timeout=ROOM_SECONDS)[0]:
            if not self.cluster.told and not self._over.is_set():
                self.cluster.told = True
                words = f"worker {self.name} waits for room in the Ray cluster: {self.cluster.room()}"
                yield _line(message=words, level="warning")
        try:
            self._who = ray.get(begun)
        except ray.exceptions.RuntimeEnvSetupError as error:
            yield _line(fault={"kind": "UsageError", "text": f"Ray could not set a node up: {_first(error)}"})
        except ray.exceptions.RayActorError as error:
            if not error.actor_init_failed:
                raise
            yield _line(fault={"kind": "UsageError", "text": f"a node cannot run a worker: {_last(error)}"})
        if fault := self._who.get("fault"):
            yield _line(fault=fault)
        elif self._who:
            self.name, self.ready = self._who["name"], True

    def _brought(self, line: bytes) -> Iterator[bytes]:
        """What a worker says, once what it is about is here too."""
        if self._who["apart"]:
            answer = json.loads(line)
            job, event = self._jobs.get(answer["id"]), answer.get("event")
            try:
                if job is not None and event is not None:
                    after(job, from_json(event))
            except RetrainError as error:
                line = _line(fault={"kind": type(error).__name__, "text": str(error)})
        yield line

    def _title(self) -> str:
        return f"worker {self.name}" + (f" (process {self._who['pid']})" if self._who else "")

    def ended(self, why: str = "") -> str:
        """See ``Link.ended``."""
        self._over.wait()
        return f"{self._title()} ended: {why}" if why else self._how

    def excused(self, begun: bool) -> bool:
        """See ``Link.excused``: Ray takes nothing away in order."""
        return False

    def release(self) -> None:
        """See ``Link.release``."""
        ray = _ray()
        with suppress(ray.exceptions.RayError):
            if self.ready:
                self._actor.release.remote()
            else:
                ray.kill(self._actor)

    def kill(self) -> None:
        """See ``Link.kill``; one whose node does not answer is left to the lease that it renews no more."""
        ray = _ray()
        with suppress(ray.exceptions.RayError):
            if self.ready:
                ray.get(self._actor.kill.options(concurrency_group="end").remote(), timeout=KILL_SECONDS)
            ray.kill(self._actor)
        self._over.wait(KILL_SECONDS)

    def wait(self, seconds: float) -> bool:
        """See ``Link.wait``."""
        return self._over.wait(seconds)


def ray_workers(plan: Plan) -> Workers:
    """An executor whose workers are placed in the cluster of a plan's configuration. Raises UsageError when there is no
    such cluster, or nothing in it to train on."""
    config = plan.specs[0].config
    ours = not _ray().is_initialized()
    if ours:
        _connect(config, plan.folder)
    try:
        slots, gpus = slots_in(_ray().nodes(), config)
    except UsageError:
        if ours:
            _ray().shutdown()
        raise
    cluster = Cluster(_gpus_asked(config) if gpus else 0, config.ray.cpus, ours, plan)
    return Workers(slots, gpus, cluster.start, cluster.close)


def slots_in(nodes: list[dict[str, Any]], config: Config) -> tuple[int, bool]:
    """How many workers there will be, and whether each has a GPU. ``nodes`` are as Ray lists them."""
    asked, devices, cpus = config.campaign.workers, config.backend.devices, config.ray.cpus
    has = [(int(each.get("CPU", 0)) // cpus, int(each.get("GPU", 0))) for each in _resources(nodes)]
    each, size = config.campaign.workers_per_gpu, config.gpus_per_worker
    with_gpu = sum(min(room, each * (gpus // size)) for room, gpus in has)
    gpus = devices == "all" or (devices != "cpu" and any(gpus for _, gpus in has))
    if not gpus and config.campaign.gpus_per_cohort != 1:
        raise UsageError(
            f"[campaign] gpus_per_cohort = {config.campaign.gpus_per_cohort:g} has no effect: the Ray cluster has no "
            "GPU; remove the line, or type --set campaign.gpus_per_cohort=1"
        )
    if asked != "auto":
        return asked, gpus
    count = with_gpu if gpus else sum(room for room, _ in has)
    if not count:
        what = f"{plural(cpus, 'CPU')} and {_count(_gpus_asked(config), 'GPU')}" if gpus else plural(cpus, "CPU")
        raise UsageError(
            f"no node of the Ray cluster has {what}, which is what a worker asks for ([ray] cpus, [backend] devices); "
            "where nodes come when they are asked for, say how many workers: --workers 4"
        )
    return count, gpus


def _gpus_asked(config: Config) -> float:
    """What a worker asks for where there are GPUs."""
    return min(config.campaign.gpus_per_cohort, 1.0) if config.gpus_per_worker == 1 else config.gpus_per_worker


def _count(count: float, kind: str) -> str:
    return f"{count:g} of a {kind}" if count % 1 else plural(int(count), kind)


def _line(**facts: Any) -> bytes:
    """What is said about a worker that has no job yet."""
    return json.dumps({"id": None, **facts}).encode() + b"\n"


def _resources(nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [node["Resources"] for node in nodes if node["Alive"]]


def _ray() -> Any:
    """Ray, with nothing of it on standard output, and no report to its makers. Raises MissingExtra without it."""
    if not is_installed("ray"):
        raise missing('[campaign] executor = "ray"', "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # else what a lost node logged last is printed here
    import ray

    return ray


def _connect(config: Config, folder: Path) -> None:
    """Connect to the cluster; nodes on other machines get this code and the files of ``folder``."""
    ray, mine = _ray(), dict(config.ray.runtime_env)
    address = _found(config.ray.address)
    _init(address, mine)
    elsewhere = any(node["Alive"] and node["NodeManagerHostname"] != socket.gethostname() for node in ray.nodes())
    if elsewhere and config.ray.ship and JOB_CONFIG not in os.environ:
        ray.shutdown()
        package = str(Path(retrain.__file__).parent)
        shipped = {"py_modules": [package], "working_dir": str(folder.absolute()), "excludes": LEFT_OUT}
        _init(address, shipped | mine)


def _found(address: str) -> str:
    """The address of the head that is meant, once it answers; Ray itself would try for minutes. Raises UsageError."""
    advice = "type: ray start --head, or --address local to have a cluster started for this campaign"
    try:
        where = importlib.import_module("ray._private.services").canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError, OSError) as error:
        raise UsageError(f'there is no Ray cluster at address "{address}"; {advice}') from error
    if where is None:
        return address
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise UsageError(f'no Ray cluster answers at {where} (address "{address}"): {error}; {advice}') from error
    return where


def _init(address: str, runtime_env: dict[str, Any]) -> None:
    ray = _ray()
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            runtime_env=runtime_env or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
        raise UsageError(f'the Ray cluster at address "{address}" cannot be used: {_first(error)}') from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has put its own there


def _first(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last(error: Exception) -> str:
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
