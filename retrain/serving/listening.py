"""Open the server's socket, start the server and shut it down."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from retrain.errors import UsageError

KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle: longer than clients keep one, so that they close it first."""
ARRIVAL_S, ARRIVAL_RATE = 30.0, 100_000
"""Seconds within which a request must arrive, plus one second per ``ARRIVAL_RATE`` bytes."""


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


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request does not arrive in time.

    uvicorn limits only the time between two requests: an incomplete or slow request would hold its connection forever.
    """

    def __init__(self, arrival_s: float, **connection: Any):
        super().__init__(**connection)
        self._arrival_s, self._began, self._received = arrival_s, 0.0, 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self._began = self.loop.time()
        self._received += len(data)
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def _update_deadline(self) -> None:
        state = self.conn.their_state
        arriving = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
        if not arriving:
            self._expect_nothing()
        elif self._deadline is None:
            self._expect_request()

    def _expect_request(self) -> None:
        self._began = self.loop.time()
        self._deadline = self.loop.call_later(self._arrival_s, self._check_deadline)

    def _expect_nothing(self) -> None:
        self._received = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_deadline(self) -> None:
        left_s = self._began + self._arrival_s + self._received / ARRIVAL_RATE - self.loop.time()
        if left_s > 0:
            self._deadline = self.loop.call_later(left_s, self._check_deadline)
        else:
            self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn server that reports when it is ready. The first signal lets it finish its requests and return; the second
    one does not wait for them. A request that does not arrive within ``arrival_s`` seconds is dropped."""

    def __init__(self, app: ASGIApp, ready: Callable[[], None], arrival_s: float = ARRIVAL_S):
        protocol: Any = partial(TimedProtocol, arrival_s)  # uvicorn calls it like a class
        more: dict[str, Any] = {"lifespan": "off", "ws": "none", "timeout_keep_alive": KEEP_ALIVE_S}
        super().__init__(uvicorn.Config(app, http=protocol, log_level="warning", access_log=False, **more))
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving, without raising them again afterwards."""
        before = {each: signal.signal(each, self._heard) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _heard(self, number: int, frame: Any) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
