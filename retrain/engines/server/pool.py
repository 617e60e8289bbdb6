"""Balances rollouts over the servers of an engine: a rollout goes to the least loaded server and stays there.

A server that does not answer is excluded and probed until it answers; it passes the trials before it is used again,
because a restarted server may serve another model. Without any server, requests wait up to ``patience_s``.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass

from retrain.engines.server.client import ServerClient
from retrain.engines.server.connection import ServerUnavailable
from retrain.errors import ServerFailed, ServerNotStarted


@dataclass(frozen=True)
class Waits:
    patience_s: float = 600.0  # For any server to answer; then the run stops
    pause_s: float = 0.25  # Before the second attempt at a completion; doubled before each later one
    probe_s: tuple[float, float] = (0.5, 10.0)  # Between probes of an unavailable server: first, and most
    start_s: float = 20.0  # For the first answer of a server that retrain did not start
    closing_s: float = 5.0  # To unload all adapters at the end; the rest stay on the server
    losses: int = 10  # Servers lost during one completion, after which the completion counts as the cause


WAITS = Waits()


class ServerPool:
    """The servers of an engine, initially at ``urls``; ``new_client`` makes the client of an address. All coroutines
    run in the engine's event loop. ``gave_up`` returns why no server will come back, or "". A server must pass
    ``trials``, which raise if its log-probabilities are wrong."""

    def __init__(
        self,
        urls: Sequence[str],
        new_client: Callable[[str], ServerClient],
        model: str,
        notify: Callable[[str, str], None],
        gave_up: Callable[[], str],
        waits: Waits,
    ):
        self.servers = [new_client(url) for url in dict.fromkeys(urls)]
        self._new_client, self._model = new_client, model
        self.notify, self.gave_up, self.waits = notify, gave_up, waits
        self._is_open = False
        self.trials: list[Callable[[ServerClient], Awaitable[None]]] = []
        self.homes: dict[Hashable, ServerClient] = {}  # The server of each rollout that may continue
        self._probes: dict[ServerClient, asyncio.Task[None]] = {}
        self._back = asyncio.Condition()

    async def open(self) -> None:
        self._is_open = True
        for server in self.servers:
            await self._opened(server)

    async def first_answers(self, patience_s: float) -> list[tuple[ServerClient, bool]]:
        """Return every server and whether it answers. Waits until all answer; if only some do, for ``start_s``. Raises
        ServerNotStarted if none answers within ``patience_s``, or the fleet gives up."""
        waited = 0.0
        while True:
            servers = self.servers
            answers = await asyncio.gather(*(server.check() for server in servers))
            if (answers and all(answers)) or (any(answers) and waited > self.waits.start_s):
                return list(zip(servers, answers, strict=True))
            if why := self.gave_up():
                raise ServerNotStarted(f"[inference] launch: {why}")
            if waited > patience_s:
                reasons = "\n".join(f"[inference] url {server.url}: {server.reason}" for server in servers)
                raise ServerNotStarted(f"no server answers after {patience_s:g} s:\n{reasons}")
            await asyncio.sleep(0.5)
            waited += 0.5

    async def follow(self, urls: Sequence[str]) -> None:
        """Change to the servers at ``urls``: close missing ones; use new ones once they answer and pass the trials."""
        present = {server.url for server in self.servers}
        new = [self._new_client(url) for url in dict.fromkeys(urls) if url not in present]
        gone = [server for server in self.servers if server.url not in urls]
        self.servers = [server for server in self.servers if server not in gone] + new
        for server in gone:
            server.mark_lost()
            if probe := self._probes.pop(server, None):
                probe.cancel()
            await server.connection.close()
        for server in new if self._is_open else ():
            await self._opened(server)
            server.mark_lost()
            self._probes[server] = asyncio.create_task(self._probe(server, "has joined"))

    async def _opened(self, server: ServerClient) -> None:
        server.model = self._model
        await server.connection.open()

    async def choose(self, key: Hashable, at: ServerClient | None = None) -> ServerClient:
        """Return the server for the rollouts of this key: ``at`` if not None, else the server of their earlier turns,
        else the least loaded one. Raises ServerFailed if none answers in time."""
        await self.wait_for(at)
        if at is not None:
            return at
        home = self.homes.get(key)
        if home is None or not home.alive or home not in self.servers:
            home = min((server for server in self.servers if server.alive), key=lambda server: server.waiting)
            self.homes[key] = home
        return home

    async def recheck(self, server: ServerClient, reason: str) -> None:
        """Exclude the server after a failed request, unless it passes a health check now."""
        if not server.alive or await server.check():
            return
        if server.alive:  # another request may have excluded it during the check
            self.exclude(server, reason)

    def exclude(self, server: ServerClient, reason: str) -> None:
        server.mark_lost()
        if server not in self.servers:
            return  # removed by ``follow``
        self.notify(f"{server.url} is left out: {reason}", "warning")
        self._probes[server] = asyncio.create_task(self._probe(server, "is back"))

    async def _probe(self, server: ServerClient, then: str) -> None:
        (pause, longest), reported = self.waits.probe_s, ""
        while not await self._usable(server):
            if server.refused not in ("", reported):
                reported = server.refused
                self.notify(f"{server.url} answers, and stays left out: {reported}", "warning")
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
        server.alive = True
        self.notify(f"{server.url} {then}", "info")
        async with self._back:
            self._back.notify_all()

    async def _usable(self, server: ServerClient) -> bool:
        server.refused = ""
        try:
            if not await server.check():
                return False
            await server.readmit()
            for trial in list(self.trials):
                await trial(server)
            await server.adapters.unload_unused()  # last, so that the trials' adapters are unloaded too
        except ServerUnavailable as away:
            server.reason = str(away)
            return False
        except Exception as error:  # any fault excludes only this server; it is probed again
            server.reason = server.refused = str(error) or type(error).__name__
            return False
        return True

    async def wait_for(self, server: ServerClient | None = None) -> None:
        """Wait until ``server`` answers, or any server if it is None. Raises ServerFailed if none does in time, or if
        ``server`` was removed."""
        begin = time.monotonic()
        while True:
            if server is not None and server not in self.servers:
                raise ServerFailed(f"{server.url} is gone")
            candidates = self.servers if server is None else [server]
            if any(candidate.alive for candidate in candidates):
                return
            if why := self.gave_up():
                raise ServerFailed(why)
            if time.monotonic() - begin > self.waits.patience_s:
                reasons = "; ".join(f"{candidate.url}: {candidate.reason}" for candidate in candidates)
                raise ServerFailed(
                    f"no server answers, for {self.waits.patience_s:g} s now ([inference] patience_s): {reasons}"
                )
            async with self._back:
                try:
                    # Without a notification too: the fleet may have given up.
                    async with asyncio.timeout(0.5):
                        await self._back.wait()
                except TimeoutError:
                    continue

    async def close(self) -> None:
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*(server.connection.close() for server in self.servers), return_exceptions=True)
