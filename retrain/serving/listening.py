"""Open the server's socket, start the server and shut it down."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from retrain.errors import UsageError

KEEP_ALIVE_S = 75  # Seconds that a connection may be idle: clients keep it open for less, and so close it first
# A request must arrive within ``ARRIVAL_S`` seconds, plus one second per ``ARRIVAL_RATE`` bytes
ARRIVAL_S, ARRIVAL_RATE = 30.0, 100_000


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address, not yet listening; port 0 selects a free one. Raises UsageError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot listen at {host}, port {port}: {reason.lower()}; type --port 0 for a free one"
        ) from error
    return bound


def url_of(bound: socket.socket, name: str | None = None) -> str:
    """Return the server's URL. ``name`` replaces the host of a server that listens on all interfaces."""
    host, port = bound.getsockname()[:2]
    if name is not None and host in ("0.0.0.0", "::"):
        host = name
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request does not arrive in time.

    uvicorn limits only the time between two requests: an incomplete or slow request would hold its connection forever.
    """

    def __init__(self, arrival_s: float, **connection: Any):
        super().__init__(**connection)
        self._arrival_s, self._began, self._received = arrival_s, self.loop.time(), 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._check_arrival()

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self._began = self.loop.time()
        self._received += len(data)
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # also if a request was refused before all of it arrived
            self._received = len(self.conn.trailing_data[0])

    def on_response_complete(self) -> None:
        self._began, self._received = self.loop.time(), len(self.conn.trailing_data[0])
        super().on_response_complete()

    def _check_arrival(self) -> None:
        """Close the connection if a request has been arriving for too long; check again after a while."""
        state, is_first = self.conn.their_state, self.cycle is None
        is_arriving = state is h11.SEND_BODY or (state is h11.IDLE and (self._received or is_first))
        if is_arriving and self.loop.time() > self._began + self._arrival_s + self._received / ARRIVAL_RATE:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(min(1.0, self._arrival_s / 4), self._check_arrival)


class HttpServer(uvicorn.Server):
    """uvicorn server that calls ``ready`` when it listens. After the first signal it finishes its requests and returns;
    after the second it returns at once. A request that does not arrive within ``arrival_s`` seconds is dropped."""

    def __init__(self, app: ASGIApp, ready: Callable[[], None], arrival_s: float = ARRIVAL_S):
        protocol: Any = partial(TimedProtocol, arrival_s)  # uvicorn calls it like a class
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S, log_level="warning",
                access_log=False,
            )
        )  # fmt: skip
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own method would also raise the signal again at the end.
        self.force_exit = self.should_exit
        self.should_exit = True
