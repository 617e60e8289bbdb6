"""Several servers that share the load: whole rollouts go to the one with least to do, and stay there.

A server that does not answer is left out and asked from time to time whether it is back; it is tried before it is used
again, because what comes back may be another. Where none is left, requests wait for the first that comes back, up to a
patience.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass

from retrain.engines.server.client import Away, Server
from retrain.errors import ServerFailed


@dataclass(frozen=True)
class Waits:
    """Limits of an engine's patience with its servers."""

    pause_s: float = 0.25  # Before the second attempt at a completion; doubled before each later one
    probe_s: tuple[float, float] = (0.5, 10.0)  # Between probes of an unavailable server: first, and most
    start_s: float = 20.0  # For the first answer of a server that retrain did not start
    closing_s: float = 5.0  # To unload all adapters at the end; the rest stay on the server
    losses: int = 10  # Times that a server goes away during the same completion, which then counts as the cause


WAITS = Waits()


class Pool:
    """The servers of an engine, at first those of ``urls``; ``at`` makes one, ``model`` is what they serve. All methods
    belong to the engine's event loop. ``gave_up`` says why waiting is no use any more (launched servers that cannot be
    kept alive), "" while it is. ``trials`` raise for a server that computes otherwise than those that were tried at the
    start."""

    def __init__(
        self,
        urls: Sequence[str],
        at: Callable[[str], Server],
        model: str,
        patience_s: float,
        tell: Callable[[str, str], None],
        gave_up: Callable[[], str],
        waits: Waits,
    ):
        self.servers, self._at, self._model = [at(url) for url in dict.fromkeys(urls)], at, model
        self.patience_s, self.tell, self.gave_up, self.waits = patience_s, tell, gave_up, waits
        self._is_open = False
        self.trials: list[Callable[[Server], Awaitable[None]]] = []
        self._homes: dict[Hashable, Server] = {}
        self._probes: dict[Server, asyncio.Task[None]] = {}
        self._back = asyncio.Condition()

    async def open(self) -> None:
        self._is_open = True
        for server in self.servers:
            await self._opened(server)

    async def follow(self, urls: Sequence[str]) -> None:
        """These are the servers from now on: one that is new is used when it answers and has been tried, and one that
        is not among them any more is let go."""
        known = {server.url for server in self.servers}
        new = [self._at(url) for url in dict.fromkeys(urls) if url not in known]
        gone = [server for server in self.servers if server.url not in urls]
        self.servers = [server for server in self.servers if server not in gone] + new
        for server in gone:
            server.lost()
            if probe := self._probes.pop(server, None):
                probe.cancel()
            await server.close()
        for server in new if self._is_open else ():
            await self._opened(server)
            server.lost()
            self._probes[server] = asyncio.create_task(self._probe(server, "has joined"))

    async def _opened(self, server: Server) -> None:
        server.model = self._model
        await server.open()

    async def choose(self, key: Hashable, at: Server | None = None) -> Server:
        """The server for the rollouts of this key: ``at`` where it is given, the one they had, else the one with least
        to do. Raises ServerFailed when none comes back in time."""
        await self.someone(at)
        if at is not None:
            return at
        home = self._homes.get(key)
        if home is None or not home.alive or home not in self.servers:
            home = min((each for each in self.servers if each.alive), key=lambda each: each.waiting)
            self._homes[key] = home
        return home

    def forget_homes(self) -> None:
        self._homes.clear()

    async def doubt(self, server: Server, reason: str) -> None:
        """A request failed: unless the server says that it is well, it is left out until it is."""
        if not server.alive or await server.check():
            return
        if server.alive:  # and no other request has found it out meanwhile
            self.leave_out(server, reason)

    def leave_out(self, server: Server, reason: str) -> None:
        server.lost()
        if server not in self.servers:
            return  # whoever keeps them has let go of it
        self.tell(f"{server.url} is left out: {reason}", "warning")
        self._probes[server] = asyncio.create_task(self._probe(server, "is back"))

    async def _probe(self, server: Server, then: str) -> None:
        (pause, longest), told = self.waits.probe_s, ""
        while not await self._usable(server):
            if server.refused not in ("", told):
                told = server.refused
                self.tell(f"{server.url} answers, and stays left out: {told}", "warning")
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
        server.alive = True
        self.tell(f"{server.url} {then}", "info")
        async with self._back:
            self._back.notify_all()

    async def _usable(self, server: Server) -> bool:
        """Whether it answers, and computes what is trained here."""
        server.refused = ""
        try:
            if not await server.check():
                return False
            await server.found()
            for trial in list(self.trials):
                await trial(server)
            await server.take_away()  # last: nothing is between this and its use
        except Away as away:
            server.reason = str(away)
            return False
        except Exception as error:  # whatever it says: it is asked again
            server.reason = server.refused = str(error) or type(error).__name__
            return False
        return True

    async def someone(self, one: Server | None = None) -> None:
        """Wait until some server is there, or this one. Raises ServerFailed when none comes in time, or this one is
        none of them any more."""
        begin = time.monotonic()
        while True:
            if one is not None and one not in self.servers:
                raise ServerFailed(f"{one.url} is gone")
            servers = self.servers if one is None else [one]
            if any(server.alive for server in servers):
                return
            if why := self.gave_up():
                raise ServerFailed(why)
            if time.monotonic() - begin > self.patience_s:
                reasons = "; ".join(f"{server.url}: {server.reason}" for server in servers)
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
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*(server.close() for server in self.servers), return_exceptions=True)
