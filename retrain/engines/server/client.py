"""The client of one server: sends requests, checks whether it answers, and tracks the adapters that it has loaded.

A request returns an answer or raises a ``RequestFailed``: ``ServerUnavailable`` (no connection, a timeout, HTTP 429 or
5xx; may succeed later or elsewhere), ``ModelNotFound`` (the server has restarted and lost the adapter) or
``RequestRejected`` (will fail again).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.engines.server.adapters import PublishedAdapter
from retrain.engines.server.dialects import Answer, CompletionRequest, Dialect, InvalidAnswer
from retrain.errors import UsageError

if TYPE_CHECKING:
    import httpx

HEALTH_TIMEOUT_S, UNLOAD_TIMEOUT_S = 5.0, 10.0
BUSY = (429, 500, 502, 503, 504)  # HTTP statuses after which the same request may succeed


def server_root(address: str) -> str:
    return address.rstrip("/").removesuffix("/v1")


def api_key(variable: str | None, section: str) -> str:
    """Return the value of an environment variable, "" without a variable. Raises UsageError when it is not set."""
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise UsageError(f"{section} api_key_env: ${variable} is not set: export {variable}=…")
    return key


class RequestFailed(Exception):
    """A request without an answer that can be used."""


class ServerUnavailable(RequestFailed):
    """The server did not answer, or reports that it is overloaded or failing."""


class ServerUnreachable(ServerUnavailable):
    """There was no connection: the request never reached the server."""


class ModelNotFound(RequestFailed):
    """The server has no model or adapter of this name."""


class RequestRejected(RequestFailed):
    """The server answered that it will not do this."""


class ServerClient:
    """The client of one address. ``waiting`` counts rows sent and not yet answered; ``alive`` is False from a failed
    health check until the next answer. ``upload``: send the adapters' files instead of their path."""

    def __init__(
        self, url: str, dialect: Dialect, key: str, timeout_s: float, max_in_flight: int, upload: bool = False
    ):
        self.url, self.dialect, self.timeout_s, self.upload = url, dialect, timeout_s, upload
        self._key, self._max_in_flight = key, max_in_flight
        self.alive, self.reason, self.refused, self.waiting = True, "", "", 0
        self.model = self.base = ""
        self.context: int | None = None
        self._adapters: dict[str, asyncio.Task[float]] = {}
        self._maybe_loaded: set[str] = set()  # loaded before the server was lost, and still in use
        self._to_unload: set[str] = set()  # may be loaded, and no longer in use
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

    # -- requests -----------------------------------------------------------------------------------------------

    async def ask(self, ask: CompletionRequest) -> Answer:
        """Return one completion. Raises RequestFailed, InvalidAnswer."""
        return self.dialect.read(await self.post(self.dialect.completions, self.dialect.body(ask)))

    async def post(self, path: str, body: dict[str, object], timeout_s: float | None = None) -> Any:
        return await self._send("POST", path, timeout_s, body)

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        return await self._send("GET", path, timeout_s)

    async def _send(
        self, method: str, path: str, timeout_s: float | None, body: dict[str, object] | None = None
    ) -> Any:
        import httpx

        if self._http is None or self._http.is_closed:
            raise ServerUnreachable("its connection was closed")
        limit = timeout_s or self.timeout_s
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
        except ValueError as error:
            if path == self.dialect.completions:
                raise InvalidAnswer(f"no JSON: {text}") from error
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

    # -- availability -------------------------------------------------------------------------------------------

    async def check(self) -> bool:
        """Return whether the server answers now; if not, ``reason`` says why."""
        try:
            await self.get(self.dialect.health, HEALTH_TIMEOUT_S)
        except RequestFailed as error:
            self.reason = str(error) or type(error).__name__
            return False
        return True

    def mark_lost(self) -> None:
        """Count the server as unavailable. A restarted one has no adapters, the same one still has all of them."""
        self.alive = False
        self._maybe_loaded |= self._adapters.keys()
        self._adapters.clear()

    async def readmit(self) -> None:
        """Prepare a server that answers again: unload adapters that are no longer in use. Raises RequestFailed."""
        await self.query_model()
        await self.unload_unused()

    async def query_model(self) -> None:
        """Set ``base``, the server's name of ``model``, and ``context``, its longest sequence. Raises RequestFailed."""
        listed = await self.get("/v1/models", HEALTH_TIMEOUT_S)
        data = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
            raise RequestRejected(
                f"{repr(listed)[:80]} is no list of models: it is no server of the kind that [inference] engine names, "
                "or this is not its url"
            )
        models = [entry for entry in data if not entry.get("parent") and isinstance(entry.get("id"), str)]
        if not models:
            raise RequestRejected("it lists no model")
        named = next((entry for entry in models if self.model in (entry["id"], entry.get("root"))), models[0])
        longest = named.get("max_model_len")
        self.base, self.context = named["id"], longest if type(longest) is int else None

    # -- adapters -----------------------------------------------------------------------------------------------

    async def require(self, published: PublishedAdapter) -> float:
        """Load the adapter unless it is loaded; return the seconds, 0 if another call loads it. Raises
        RequestFailed."""
        name = published.name
        loading = self._adapters.get(name)
        if loading is not None:
            # A cancelled caller must not cancel a load that other requests wait for.
            await asyncio.shield(loading)
            return 0.0
        loading = self._adapters[name] = asyncio.create_task(self._load(published))
        loading.add_done_callback(lambda task: self._on_load_ended(name, task))
        return await asyncio.shield(loading)

    def _on_load_ended(self, name: str, task: asyncio.Task[float]) -> None:
        # After a failed load, or one that ended when the server had been lost, the server may or may not have the
        # adapter. Callers of ``require`` get the error from the task.
        failed = task.cancelled() or task.exception() is not None
        if failed and self._adapters.get(name) is task:
            del self._adapters[name]
        if self._adapters.get(name) is None and name not in self._to_unload:
            self._maybe_loaded.add(name)

    async def _load(self, published: PublishedAdapter) -> float:
        begin = time.perf_counter()
        # In a thread: writing files would hold up every request of the loop.
        path = await asyncio.to_thread(published.write)
        body: dict[str, object] = {"lora_name": published.name}
        if self.upload:
            body["files"] = await asyncio.to_thread(_encoded, path)
        else:
            body["lora_path"] = str(path)
        try:
            await self.post(f"{self.dialect.adapter_prefix}/load_lora_adapter", body)
        except RequestRejected as refused:
            if "already" not in str(refused):  # a name is never reused, so these are the same weights
                raise
        except ModelNotFound as unknown:
            raise RequestRejected(f"it cannot load the adapter at {path}: {unknown}") from unknown
        return time.perf_counter() - begin

    def schedule_unload(self, name: str) -> None:
        self._to_unload.add(name)

    def mark_unloaded(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._maybe_loaded.discard(name)

    async def unload(self, name: str) -> None:
        """Unload the adapter; on an unavailable server, when it is readmitted. Errors are ignored."""
        loading = self._adapters.get(name)
        if loading is None and name not in self._maybe_loaded and name not in self._to_unload:
            return
        self._to_unload.add(name)
        if loading is not None and not loading.done():
            await asyncio.wait([loading])
        self._adapters.pop(name, None)
        self._maybe_loaded.discard(name)
        if self.alive:
            with contextlib.suppress(ServerUnavailable):
                await self._unload_now(name)

    async def unload_all(self) -> None:
        """Unload all adapters that this client loaded. Raises ServerUnavailable."""
        await asyncio.gather(*(self.unload(name) for name in {*self._adapters, *self._maybe_loaded}))
        if self.alive:
            await self.unload_unused()

    async def unload_unused(self) -> None:
        """Unload the adapters that are no longer in use. Raises ServerUnavailable."""
        # No ``for``: the set changes while a request is awaited.
        while self._to_unload:
            await self._unload_now(next(iter(self._to_unload)))

    async def _unload_now(self, name: str) -> None:
        with contextlib.suppress(ModelNotFound, RequestRejected):
            route = f"{self.dialect.adapter_prefix}/unload_lora_adapter"
            await self.post(route, {"lora_name": name}, UNLOAD_TIMEOUT_S)
        self._to_unload.discard(name)


def _encoded(directory: Path) -> dict[str, str]:
    return {path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(directory.iterdir())}
