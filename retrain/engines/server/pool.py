"""Several servers that share the load: whole rollouts go to the one with least to do, and stay there.

A server that does not answer is left out and asked from time to time whether it is back. Where none is left, requests
wait for the first that comes back, up to a patience.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence

from retrain.engines.server.client import Server
from retrain.errors import ServerFailed

PROBE_S = (0.5, 10.0)
"""Seconds between two looks at a server that is away: at first, and at most."""


class Pool:
    """The servers of an engine; all methods belong to its event loop. ``gave_up`` says why waiting is no use any more
    (a launched server that cannot be kept alive), "" while it is."""

    def __init__(
        self,
        servers: Sequence[Server],
        patience_s: float,
        tell: Callable[[str, str], None],
        gave_up: Callable[[], str] = lambda: "",
    ):
        self.servers, self.patience_s, self.tell, self.gave_up = list(servers), patience_s, tell, gave_up
        self._homes: dict[Hashable, Server] = {}
        self._probes: dict[Server, asyncio.Task[None]] = {}
        self._back = asyncio.Condition()

    async def choose(self, key: Hashable) -> Server:
        """The server for the rollouts of this key: the one they had, else the one with least to do. Raises
        ServerFailed when none comes back in time."""
        await self._someone()
        home = self._homes.get(key)
        if home is None or not home.alive:
            home = min((each for each in self.servers if each.alive), key=lambda each: each.waiting)
            self._homes[key] = home
        return home

    def forget_homes(self) -> None:
        """No rollout of those so far goes on."""
        self._homes.clear()

    async def doubt(self, server: Server, reason: str) -> None:
        """A request failed: unless the server says that it is well, it is left out until it is."""
        if not server.alive or await server.check():
            return
        if not server.alive:  # found out by another request meanwhile
            return
        server.lost()
        self.tell(f"{server.url} is left out: {reason}", "warning")
        self._probes[server] = asyncio.create_task(self._probe(server))

    async def _probe(self, server: Server) -> None:
        pause = PROBE_S[0]
        while not await server.check():
            await asyncio.sleep(pause)
            pause = min(2 * pause, PROBE_S[1])
        await server.found()
        self.tell(f"{server.url} is back", "info")
        async with self._back:
            self._back.notify_all()

    async def _someone(self) -> None:
        """Wait until a server is there."""
        begin = time.monotonic()
        while not any(server.alive for server in self.servers):
            if why := self.gave_up():
                raise ServerFailed(why)
            if time.monotonic() - begin > self.patience_s:
                reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
                raise ServerFailed(
                    f"no server answers, for {self.patience_s:g} s now ([inference] patience_s): {reasons}"
                )
            async with self._back:
                try:
                    async with asyncio.timeout(0.5):
                        await self._back.wait()
                except TimeoutError:
                    continue

    async def close(self) -> None:
        """End the probes and the connections."""
        for probe in self._probes.values():
            probe.cancel()
        for server in self.servers:
            await server.close()
