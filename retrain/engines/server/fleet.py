"""Who keeps the servers of ``[inference] launch`` alive, and where they are.

One process alone starts its servers itself (``Launches``). The workers of a campaign share those of its controller,
which tells them the addresses (``Told``), as often as these change.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from retrain.config import Config
from retrain.engines.server.launch import Launched
from retrain.models.directory import local_directory

Tell = Callable[[str, str], None]  # Called with a message and its level, "info" or "warning"
Hear = Callable[[Sequence[str]], None]  # Called with all addresses


class Fleet(Protocol):
    """Servers of one base model that somebody keeps alive."""

    @property
    def urls(self) -> list[str]: ...

    @property
    def gave_up(self) -> str:
        """Why there will be no server any more; "" while one is there or may come."""
        ...

    def listen(self, hear: Hear) -> None:
        """Call this, from any thread, when the addresses have changed."""

    def wait(self, seconds: float) -> None:
        """Until an address is known or there will be none, or for so long."""

    def close(self) -> None:
        """They are needed no more."""


class Launches:
    """Servers of this machine, ``[inference] replicas`` of them, which this process starts in a run's or campaign's
    ``directory``. Raises UsageError when the command cannot be started."""

    def __init__(self, config: Config, directory: Path, tell: Tell):
        asked = config.inference
        self._servers: list[Launched] = []
        try:
            for name, gpus in zip(names_of(asked.replicas), shares(asked.launch_gpus, asked.replicas), strict=True):
                assert asked.launch is not None
                one = Launched(asked.launch, named(config), directory, gpus, asked.sleep, tell, name=name)
                self._servers.append(one)
        except BaseException:
            self.close()
            raise

    @property
    def urls(self) -> list[str]:
        """See ``Fleet.urls``: a server that is started again has the address that it had."""
        return [each.url for each in self._servers]

    @property
    def gave_up(self) -> str:
        return self._servers[0].gave_up if all(each.gave_up for each in self._servers) else ""

    def listen(self, hear: Hear) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None:
        for each in self._servers:
            each.close()


class Told:
    """Servers that another process keeps, as that one tells with ``tell``. ``record`` gets what it says happened to
    them."""

    def __init__(self) -> None:
        self.record: Tell = lambda text, level: None
        self.urls: list[str] = []
        self.gave_up = ""
        self._changed = threading.Condition()
        self._hear: Hear = lambda urls: None

    def tell(self, urls: Sequence[str], gave_up: str = "") -> None:
        with self._changed:
            self.urls, self.gave_up = list(urls), gave_up
            self._changed.notify_all()
            hear = self._hear
        hear(urls)

    def listen(self, hear: Hear) -> None:
        with self._changed:
            self._hear = hear

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.urls or self.gave_up, seconds)

    def close(self) -> None:
        self.listen(lambda urls: None)


def named(config: Config) -> str:
    """What ``{model}`` stands for: the model's directory on this machine, else its name."""
    path = local_directory(config.model.model)
    return str(path.absolute()) if path else config.model.model


def names_of(replicas: int) -> list[str]:
    return ["server"] if replicas == 1 else [f"server_{number}" for number in range(1, replicas + 1)]


def shares(gpus: str | None, replicas: int) -> list[str | None]:
    """The GPUs of each server, as CUDA_VISIBLE_DEVICES has them; None leaves all that there are."""
    if gpus is None:
        return [None] * replicas
    names = [name.strip() for name in gpus.split(",")]
    each = len(names) // replicas
    return [",".join(names[number * each : (number + 1) * each]) for number in range(replicas)]
