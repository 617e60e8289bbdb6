"""Tells the workers of a campaign where its launched servers are, through ``workers/servers.jsonl``."""

import queue
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from retrain.campaign.running.protocol import Message
from retrain.campaign.running.tasks import WORKERS
from retrain.engines.server.fleet import Fleet, Tell
from retrain.files import writing
from retrain.records.schema.layout import SERVER_NEWS
from retrain.util.event_file import append


class ServerNews:
    """Starts the servers of a campaign's ``directory`` and keeps the workers informed of them.

    ``launch`` starts the servers; None where the campaign launches none.
    """

    def __init__(self, directory: Path, launch: Callable[[Tell], Fleet] | None):
        self.path, self.launch = directory / WORKERS / SERVER_NEWS, launch
        self._fleet: Fleet | None = None
        self._written: dict[str, Any] = {}
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def update(self) -> None:
        """Start the servers on the first call; write their addresses whenever they have changed."""
        if self.launch is None:
            return
        if self._fleet is None:
            self.path.unlink(missing_ok=True)  # addresses of an earlier controller's servers
            self._fleet = self.launch(lambda text, level: self._messages.put(Message(text, level)))
        state = {"urls": self._fleet.urls, "gave_up": self._fleet.gave_up}
        if state != self._written:
            self._written = state
            self._append(state)

    def messages(self) -> Iterator[Message]:
        """Yield what happened to the servers; the workers get it too, for the records of their runs."""
        while not self._messages.empty():
            message = self._messages.get()
            self._append({"message": message.text, "level": message.level})
            yield message

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def _append(self, facts: Mapping[str, Any]) -> None:
        with writing(self.path):
            append(self.path, facts)
