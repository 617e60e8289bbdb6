"""The server's socket, and its beginning and end."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from retrain.errors import UsageError

KEEP_ALIVE_S = 75
"""How long a connection may be idle: longer than clients keep one, so that none sends into one that is just closed."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket of this address, which nobody can connect to yet; port 0 is any that is free. Raises UsageError."""
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
    """What clients take as base_url."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class Server(uvicorn.Server):
    """Says when it is ready. The first signal lets it finish what it has begun, and return; the second one does not
    wait for that."""

    def __init__(self, app: ASGIApp, ready: Callable[[], None]):
        more = {"lifespan": "off", "ws": "none", "timeout_keep_alive": KEEP_ALIVE_S}
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, **more))
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hear signals while it serves; none of them is raised again."""
        before = {each: signal.signal(each, self._heard) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _heard(self, number: int, frame: Any) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
