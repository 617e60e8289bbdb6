"""The servers of ``[inference] launch`` in a Ray cluster: Ray finds a node for each, and brings it back elsewhere.

An actor starts the server's process on its node, as ``engines.server.launch`` does here: watched, asked whether it
answers, started again when it dies or hangs, ended with the actor. The controller asks the actors how they are; one
that is gone, with its node perhaps, is replaced by another, and the workers are told the new address.
"""

import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from retrain.campaign.executors.ray_connection import last_line, ray_module, sees
from retrain.campaign.planning.plan import Plan
from retrain.config import Config
from retrain.engines.server.fleet import Notify, OnUrls, named, names_of
from retrain.engines.server.launch import Restarts, ServerProcess, identity_of, server_environment
from retrain.errors import RetrainError, plural
from retrain.ownership import claim

LOOK_SECONDS = 1.0
ROOM_SECONDS = 20.0  # Seconds without room for a server after which the user is notified
CLOSE_SECONDS = 30.0
PREFIX = "[inference] launch: "


@dataclass(frozen=True)
class ServerRequest:
    """Arguments of a server's actor: the ``name`` of its files, the command and the model in ``config``, the
    campaign's ``directory`` and its ``owner`` (the id in its mark), and the controller's working directory ``cwd``."""

    name: str
    config: Config
    directory: str
    owner: str
    cwd: str


class ServerHost:
    """Runs a server on this node and says how it is; what Ray makes an actor of."""

    def __init__(self, request: ServerRequest):
        self.said: list[tuple[str, str]] = []
        self.fault = ""
        self.server: ServerProcess | None = None
        try:
            self.server = self._start(request)
        except (RetrainError, OSError) as error:
            self.fault = str(error).removeprefix(PREFIX)

    def look(self) -> dict[str, Any]:
        """Return where it listens (``url``), for how many seconds it has answered (``answered_s``), its messages since
        the last call (``said``), and why it ``gave_up``, if it has."""
        said, self.said = self.said, []
        if (server := self.server) is None:
            return {"url": "", "answered_s": 0.0, "gave_up": self.fault, "said": said}
        return {"url": server.url, "answered_s": server.answered_s, "gave_up": server.gave_up, "said": said}

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
        return ServerProcess(
            config.inference.launch,
            named(config),
            directory,
            server_environment(visible),
            lambda text, level: self.said.append((text, level)),
            name=request.name,
            host=_host(ray),
        )


@dataclass(eq=False)
class ServerSlot:
    """One server of the fleet: its actor, the question that waits for an answer, and what was answered last."""

    number: int
    name: str  # Prefix of its file names
    actor: Any = None
    question: Any = None
    url: str = ""
    answered_s: float = 0.0
    gave_up: str = ""
    waits_since: float = 0.0
    told: bool = False
    restarts: Restarts = field(default_factory=Restarts)


class RayFleet:
    """See ``Fleet``: ``[inference] replicas`` servers, each with ``gpus`` GPUs and ``[ray] server_cpus`` CPUs."""

    def __init__(self, plan: Plan, gpus: float, tell: Notify):
        config = plan.specs[0].config
        self.config, self.directory, self.tell = config, str(plan.directory), tell
        self.resources = {"num_gpus": gpus, "num_cpus": config.ray.server_cpus}
        self._owner = claim(plan.directory).id
        self._places = [ServerSlot(*each) for each in enumerate(names_of(config.inference.replicas), start=1)]
        self._closing = threading.Event()
        for place in self._places:
            self._begin(place)
        self._watcher = threading.Thread(target=self._watch, name="servers", daemon=True)
        self._watcher.start()

    @property
    def urls(self) -> list[str]:
        return [place.url for place in self._places if place.url]

    @property
    def gave_up(self) -> str:
        return self._places[0].gave_up if all(place.gave_up for place in self._places) else ""

    def listen(self, on_urls: OnUrls) -> None:
        """Do nothing: the controller polls ``urls``."""

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
        actors = [place.actor for place in self._places if place.actor is not None]
        ending = [actor.close.remote() for actor in actors]
        with suppress(ray.exceptions.RayError):
            ray.wait(ending, num_returns=len(ending), timeout=CLOSE_SECONDS) if ending else None
        for actor in actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        for place in self._places:  # what one that was lost with its node has left
            identity_of(Path(self.directory), place.name).unlink(missing_ok=True)

    def _begin(self, place: ServerSlot) -> None:
        options = {**self.resources, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        request = ServerRequest(place.name, self.config, self.directory, self._owner, os.getcwd())
        place.actor = ray_module().remote(**options)(ServerHost).remote(request)
        place.question = place.actor.look.remote()
        place.waits_since, place.url, place.answered_s = time.monotonic(), "", 0.0

    def _watch(self) -> None:
        ray = ray_module()
        while not self._closing.wait(LOOK_SECONDS):
            pending = {place.question: place for place in self._places if place.question is not None}
            if not pending:
                continue
            answered, _ = ray.wait(list(pending), num_returns=len(pending), timeout=LOOK_SECONDS)
            for question in answered:
                self._hear(pending[question])
            for place in self._places:
                self._say_waits(place)

    def _hear(self, place: ServerSlot) -> None:
        """Take an answer, or find that there will be none."""
        ray = ray_module()
        try:
            answer = ray.get(place.question)
        except ray.exceptions.ActorUnavailableError:
            place.question = place.actor.look.remote()
            return
        except ray.exceptions.RuntimeEnvSetupError as error:
            self._give_up(place, f"Ray could not set a node up: {last_line(error)}")
            return
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                self._give_up(place, f"a node cannot run a server: {last_line(error)}")
            else:
                self._lost(place)
            return
        for text, level in answer["said"]:
            self.tell(f"server {place.number}: {text}", level)
        if answer["gave_up"]:
            self._give_up(place, answer["gave_up"])
            return
        place.url, place.answered_s = answer["url"], answer["answered_s"]
        place.question = place.actor.look.remote()

    def _give_up(self, place: ServerSlot, why: str) -> None:
        """It is not started again, which is said where others go on; where none does, whoever waits for one says it."""
        place.url, place.question, place.gave_up = "", None, why
        if not self.gave_up:
            self.tell(f"server {place.number} is given up: {why}", "warning")

    def _lost(self, place: ServerSlot) -> None:
        place.url, place.question = "", None
        how = f"server {place.number} was lost with its actor or its node"
        if place.restarts.count_end(place.answered_s):
            self._give_up(place, f"{how}, {place.restarts.count} times in a row")
            return
        self.tell(f"{how}, and is started elsewhere", "warning")
        self._begin(place)

    def _say_waits(self, place: ServerSlot) -> None:
        """Once, that there is no room for a server."""
        waits = place.question is not None and not place.url
        if waits and not place.told and time.monotonic() - place.waits_since > ROOM_SECONDS:
            place.told = True
            gpus, cpus = self.resources["num_gpus"], plural(int(self.resources["num_cpus"]), "CPU")
            asks = f"{gpus:g} GPU and {cpus}" if gpus else cpus
            self.tell(f"server {place.number} waits for room in the Ray cluster: it asks for {asks}", "warning")


def _host(ray: ModuleType) -> str:
    """Return the address on which a server listens: the loopback address where all nodes are on this machine."""
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return "127.0.0.1" if len(nodes) == 1 else ray.util.get_node_ip_address()
