"""Launch the servers of ``[inference] launch`` in a Ray cluster, and restart them elsewhere when a node is lost.

An actor runs the server's process on its node, as ``engines.server.launch`` does locally: it checks the server's
health, restarts it when it dies or hangs, and ends it. The controller polls the actors, replaces lost ones, and sends
new addresses to the workers.
"""

import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.campaign.executors.ray_connection import last_line, ray_module, sees
from retrain.campaign.planning.plan import Plan
from retrain.config import Config
from retrain.engines.server.fleet import Notify, OnUrls, model_argument, names_of
from retrain.engines.server.launch import Restarts, ServerProcess, identity_of, server_environment
from retrain.errors import RetrainError, plural
from retrain.ownership import claim
from retrain.records.schema.base import Row

LOOK_SECONDS = 1.0
ROOM_SECONDS = 20.0  # Seconds without room for a server after which the user is notified
CLOSE_SECONDS = 30.0
PREFIX = "[inference] launch: "


@dataclass(frozen=True)
class ServerRequest:
    """Arguments of a server's actor: the ``name`` of its files, the ``config`` with command and model, the campaign's
    ``directory`` and the directory's ``owner`` (the id in its mark), and the controller's working directory ``cwd``."""

    name: str
    config: Config
    directory: str
    owner: str
    cwd: str


class ServerHost:
    def __init__(self, request: ServerRequest):
        self.messages: list[tuple[str, str]] = []
        self.fault = ""
        self.server: ServerProcess | None = None
        try:
            self.server = self._start(request)
        except (RetrainError, OSError) as error:
            self.fault = str(error).removeprefix(PREFIX)

    def status(self) -> Row:
        """Return the server's address (``url``), for how many seconds it has answered (``answered_s``), its messages
        since the last call (``messages``), and why it was given up (``gave_up``; "" if it was not)."""
        messages, self.messages = self.messages, []
        if (server := self.server) is None:
            return {"url": "", "answered_s": 0.0, "gave_up": self.fault, "messages": messages}
        return {"url": server.url, "answered_s": server.answered_s, "gave_up": server.gave_up, "messages": messages}

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    def _start(self, request: ServerRequest) -> ServerProcess:
        ray = ray_module()
        config, directory = request.config, Path(request.cwd, request.directory)
        if not sees(directory, request.owner):
            directory = Path(tempfile.gettempdir(), "retrain", request.owner, "servers")
        if os.path.isdir(request.cwd):
            os.chdir(request.cwd)
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus else None
        assert config.inference.launch is not None
        # If all nodes are on this machine, servers need not be open to others
        nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        return ServerProcess(
            config.inference.launch,
            model_argument(config),
            directory,
            server_environment(visible),
            lambda text, level: self.messages.append((text, level)),
            name=request.name,
            host="127.0.0.1" if len(nodes) == 1 else ray.util.get_node_ip_address(),
        )


@dataclass(eq=False)
class ServerSlot:
    number: int
    name: str  # Prefix of the names of the server's files
    actor: Any = None
    question: Any = None
    url: str = ""
    answered_s: float = 0.0
    gave_up: str = ""
    waits_since: float = 0.0
    notified: bool = False
    restarts: Restarts = field(default_factory=Restarts)


class RayFleet:
    """``Fleet`` of ``[inference] replicas`` servers, each with ``gpus`` GPUs and ``[ray] server_cpus`` CPUs."""

    def __init__(self, plan: Plan, gpus: float, notify: Notify):
        config = plan.specs[0].config
        self.config, self.directory, self.notify = config, str(plan.directory), notify
        self.resources = {"num_gpus": gpus, "num_cpus": config.ray.server_cpus}
        self._owner = claim(plan.directory).id
        self._places = [ServerSlot(*each) for each in enumerate(names_of(config.inference.replicas), start=1)]
        self._closing = threading.Event()
        for slot in self._places:
            self._begin(slot)
        self._watcher = threading.Thread(target=self._watch, name="servers", daemon=True)
        self._watcher.start()

    @property
    def urls(self) -> list[str]:
        return [slot.url for slot in self._places if slot.url]

    @property
    def gave_up(self) -> str:
        return self._places[0].gave_up if all(slot.gave_up for slot in self._places) else ""

    def listen(self, on_urls: OnUrls) -> None: ...  # the controller polls ``urls``

    def hold_restarts(self, held: bool) -> None: ...  # these servers do not sleep to share a GPU with the trainer

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not (self.urls or self.gave_up) and time.monotonic() < deadline:
            time.sleep(0.1)

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._watcher.join()
        ray = ray_module()
        actors = [slot.actor for slot in self._places if slot.actor is not None]
        ending = [actor.close.remote() for actor in actors]
        with suppress(ray.exceptions.RayError):
            ray.wait(ending, num_returns=len(ending), timeout=CLOSE_SECONDS) if ending else None
        for actor in actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        for slot in self._places:  # left by a server that was lost with its node
            identity_of(Path(self.directory), slot.name).unlink(missing_ok=True)

    def _begin(self, slot: ServerSlot) -> None:
        options = {**self.resources, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        request = ServerRequest(slot.name, self.config, self.directory, self._owner, os.getcwd())
        slot.actor = ray_module().remote(**options)(ServerHost).remote(request)
        slot.question = slot.actor.status.remote()
        slot.waits_since, slot.url, slot.answered_s = time.monotonic(), "", 0.0

    def _watch(self) -> None:
        ray = ray_module()
        while not self._closing.wait(LOOK_SECONDS):
            pending = {slot.question: slot for slot in self._places if slot.question is not None}
            if not pending:
                continue
            answered, _ = ray.wait(list(pending), num_returns=len(pending), timeout=LOOK_SECONDS)
            for question in answered:
                self._hear(pending[question])
            for slot in self._places:
                self._say_waits(slot)

    def _hear(self, slot: ServerSlot) -> None:
        ray = ray_module()
        try:
            answer = ray.get(slot.question)
        except ray.exceptions.ActorUnavailableError:
            slot.question = slot.actor.status.remote()
            return
        except ray.exceptions.RuntimeEnvSetupError as error:
            self._give_up(slot, f"Ray could not set a node up: {last_line(error)}")
            return
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                self._give_up(slot, f"a node cannot run a server: {last_line(error)}")
            else:
                self._lost(slot)
            return
        for text, level in answer["messages"]:
            self.notify(f"server {slot.number}: {text}", level)
        if answer["gave_up"]:
            self._give_up(slot, answer["gave_up"])
            return
        slot.url, slot.answered_s = answer["url"], answer["answered_s"]
        slot.question = slot.actor.status.remote()

    def _give_up(self, slot: ServerSlot, why: str) -> None:
        # If no server is left, the waiting caller reports that
        slot.url, slot.question, slot.gave_up = "", None, why
        if not self.gave_up:
            self.notify(f"server {slot.number} is given up: {why}", "warning")

    def _lost(self, slot: ServerSlot) -> None:
        slot.url, slot.question = "", None
        how = f"server {slot.number} was lost with its actor or its node"
        if slot.restarts.count_end(slot.answered_s):
            self._give_up(slot, f"{how}, {slot.restarts.count} times in a row")
            return
        self.notify(f"{how}, and is started elsewhere", "warning")
        self._begin(slot)

    def _say_waits(self, slot: ServerSlot) -> None:
        waits = slot.question is not None and not slot.url
        if waits and not slot.notified and time.monotonic() - slot.waits_since > ROOM_SECONDS:
            slot.notified = True
            gpus, cpus = self.resources["num_gpus"], plural(int(self.resources["num_cpus"]), "CPU")
            asks = f"{gpus:g} GPU and {cpus}" if gpus else cpus
            self.notify(f"server {slot.number} waits for room in the Ray cluster: it asks for {asks}", "warning")
