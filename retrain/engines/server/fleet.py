"""Fleets: the servers of ``[inference] launch``, kept alive by this process or by a campaign's controller.

A single process starts its own servers (``LocalFleet``). A campaign's workers share those of the controller, which
sends them the addresses whenever they change (``RemoteFleet``).
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from retrain.config import Config
from retrain.engines.server.launch import ServerProcess, server_environment
from retrain.models.directory import model_directory

Notify = Callable[[str, str], None]  # Called with a message and its level, "info" or "warning"
OnUrls = Callable[[Sequence[str]], object]  # Called with all addresses


class Fleet(Protocol):
    """Servers of one base model that are restarted when they die."""

    @property
    def urls(self) -> list[str]: ...

    @property
    def gave_up(self) -> str:
        """Return why no server will come back; "" while a server runs or may start."""
        ...

    def listen(self, on_urls: OnUrls) -> None:
        """Call ``on_urls``, from any thread, whenever the addresses change."""

    def wait(self, seconds: float) -> None:
        """Wait for the first address, or until ``gave_up`` is set, for at most ``seconds``."""

    def hold_restarts(self, held: bool) -> None:
        """While ``held``, do not restart servers that die, because the trainer is using the memory of the GPU they
        share."""

    def close(self) -> None: ...


class LocalFleet:
    """Starts ``[inference] replicas`` servers on this machine; their logs are in the run's or campaign's ``directory``.
    vLLM then asks for the API ``key``, if there is one. Raises UsageError when the command cannot be started."""

    def __init__(self, config: Config, directory: Path, notify: Notify, key: str = ""):
        settings = config.inference
        self._servers: list[ServerProcess] = []
        try:
            shares = gpu_shares(settings.launch_gpus, settings.replicas)
            for name, gpus in zip(names_of(settings.replicas), shares, strict=True):
                assert settings.launch is not None
                environment = server_environment(gpus, bool(settings.released), key)
                self._servers.append(
                    ServerProcess(settings.launch, model_argument(config), directory, environment, notify, name=name)
                )
        except BaseException:
            self.close()
            raise

    @property
    def urls(self) -> list[str]:
        # They never change: a restarted server keeps its address.
        return [server.url for server in self._servers]

    @property
    def gave_up(self) -> str:
        return self._servers[0].gave_up if all(server.gave_up for server in self._servers) else ""

    def listen(self, on_urls: OnUrls) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def hold_restarts(self, held: bool) -> None:
        for server in self._servers:
            server.hold_restarts(held)

    def close(self) -> None:
        for server in self._servers:
            server.close()


class RemoteFleet:
    """Servers that another process keeps alive. ``update`` sets their addresses; messages about them go to
    ``record``."""

    def __init__(self) -> None:
        self.record: Notify = lambda text, level: None
        self.urls: list[str] = []
        self.gave_up = ""
        self._changed = threading.Condition()
        self._on_urls: OnUrls = lambda urls: None

    def update(self, urls: Sequence[str], gave_up: str = "") -> None:
        with self._changed:
            self.urls, self.gave_up = list(urls), gave_up
            self._changed.notify_all()
            on_urls = self._on_urls
        # Outside the lock: the listener takes a lock of its own.
        on_urls(urls)

    def listen(self, on_urls: OnUrls) -> None:
        with self._changed:
            self._on_urls = on_urls

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.urls or self.gave_up, seconds)

    def hold_restarts(self, held: bool) -> None: ...  # servers of several processes do not sleep

    def close(self) -> None:
        self.listen(lambda urls: None)


def model_argument(config: Config) -> str:
    """Return the value of ``{model}`` in a command: the directory of the weights that are trained. A model of the hub
    is downloaded if it is not on this machine. Raises ModelError if that fails."""
    return str(model_directory(config.model.model, config.model.revision).absolute())


def names_of(replicas: int) -> list[str]:
    return ["server"] if replicas == 1 else [f"server_{number}" for number in range(1, replicas + 1)]


def gpu_shares(gpus: str | None, replicas: int) -> list[str | None]:
    """Return each server's equal share of ``gpus`` as a value of CUDA_VISIBLE_DEVICES; None for all GPUs."""
    if gpus is None:
        return [None] * replicas
    names = [name.strip() for name in gpus.split(",")]
    count = len(names) // replicas
    return [",".join(names[number * count : (number + 1) * count]) for number in range(replicas)]
