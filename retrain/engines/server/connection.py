"""Sends requests to one server over persistent connections.

A request returns an answer or raises a ``RequestFailed``: ``ServerUnavailable`` (no connection, a timeout, HTTP 429 or
5xx; may succeed later or elsewhere), ``ModelNotFound`` (the server has restarted and lost the adapter) or
``RequestRejected`` (will fail again).
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from retrain.errors import UsageError

if TYPE_CHECKING:
    import httpx

BUSY = (429, 500, 502, 503, 504)  # HTTP statuses after which the same request may succeed


def server_root(address: str) -> str:
    return address.rstrip("/").removesuffix("/v1")


def api_key(variable: str | None, section: str) -> str:
    """Return the value of the environment variable, "" if ``variable`` is None. Raises UsageError if it is not set."""
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise UsageError(f"{section} api_key_env: ${variable} is not set: export {variable}=…")
    return key


class RequestFailed(Exception):
    """A request got no usable answer."""


class ServerUnavailable(RequestFailed):
    """The server did not answer, or reports that it is overloaded or failing."""


class ServerUnreachable(ServerUnavailable):
    """No connection could be made: the request never reached the server."""


class ModelNotFound(RequestFailed):
    """The server has no model or adapter of this name."""


class RequestRejected(RequestFailed):
    """The server refused the request, and would refuse it again."""


class ServerConnection:
    """The connections to ``url``. A caller holds one of the ``max_in_flight`` ``slots`` while it waits for a
    completion."""

    def __init__(self, url: str, key: str, timeout_s: float, max_in_flight: int):
        self.url, self.timeout_s = url, timeout_s
        self._key, self._max_in_flight = key, max_in_flight
        self._http: httpx.AsyncClient | None = None

    async def open(self) -> None:
        self._http = self._client(keep_alive=self._max_in_flight)
        self.slots = asyncio.Semaphore(self._max_in_flight)

    def _client(self, keep_alive: int) -> httpx.AsyncClient:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # Eight more than completions, so that health checks do not wait for them.
        limits = httpx.Limits(max_connections=self._max_in_flight + 8, max_keepalive_connections=keep_alive)
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=self.timeout_s)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def post(self, path: str, body: dict[str, object], timeout_s: float | None = None) -> Any:
        return await self._send("POST", path, timeout_s, body)

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        return await self._send("GET", path, timeout_s)

    async def _send(self, method: str, path: str, limit: float | None, body: dict[str, object] | None = None) -> Any:
        import httpx

        if self._http is None or self._http.is_closed:
            raise ServerUnreachable("its connection was closed")
        limit = limit or self.timeout_s
        try:
            # httpx limits each read, not the request: an answer that trickles in would never time out.
            async with asyncio.timeout(limit):
                response = await self._request(self._http, method, path, body, limit)
        except (httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise ServerUnreachable(f"no connection within {limit:g} s") from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerUnavailable(f"no answer to {path} within {limit:g} s") from error
        except httpx.ConnectError as error:
            raise ServerUnreachable(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except httpx.RequestError as error:
            raise ServerUnavailable(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except httpx.InvalidURL as error:
            raise RequestRejected(f"not an address: {error}") from error
        status, text = response.status_code, self._error_text(response)
        if status in BUSY:
            raise ServerUnavailable(f"HTTP {status} {text}")
        if status == 404:
            raise ModelNotFound(text)
        if status >= 300:
            raise RequestRejected(f"HTTP {status} {text}")
        try:
            return response.json()
        except ValueError:
            return text

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, object] | None, timeout_s: float
    ) -> httpx.Response:
        """Return the response, from a new connection if a reused one was closed before the response began.

        Servers close idle connections after some seconds (vLLM: 5), and a request sent at that moment fails although
        the server is healthy. A request that fails on a new connection is not repeated: the server was lost.
        """
        import httpx

        is_fresh = has_response = False

        async def trace(event: str, info: object) -> None:
            nonlocal is_fresh, has_response
            is_fresh |= event == "connection.connect_tcp.started"
            has_response |= event == "http11.receive_response_headers.complete"

        try:
            return await client.request(method, path, json=body, timeout=timeout_s, extensions={"trace": trace})
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            if is_fresh or has_response:
                raise
        async with self._client(keep_alive=0) as client_once:
            return await client_once.request(method, path, json=body, timeout=timeout_s)

    def _error_text(self, response: httpx.Response) -> str:
        try:
            error = response.json()
            error = error.get("error", error)
            text = str(error.get("message") or error.get("detail") or error if isinstance(error, dict) else error)
        except (ValueError, AttributeError):
            text = response.text
        text = " ".join(text.split())[:300]
        # Some servers echo the key.
        return text.replace(self._key, "***") if self._key else text
