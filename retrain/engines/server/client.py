"""The client of one server: requests completions, checks the server's health, and tracks the adapters it has loaded."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from pathlib import Path

from retrain.engines.server.adapters import PublishedAdapter
from retrain.engines.server.connection import (
    ModelNotFound,
    RequestFailed,
    RequestRejected,
    ServerConnection,
    ServerUnavailable,
)
from retrain.engines.server.dialects import Answer, CompletionRequest, Dialect

HEALTH_TIMEOUT_S, UNLOAD_TIMEOUT_S = 5.0, 10.0


class ServerClient:
    """The client of one address. ``waiting``: completions that have not been answered. ``alive``: False from a failed
    health check until the pool readmits the server. ``upload``: send the adapters' files instead of their path."""

    def __init__(
        self, url: str, dialect: Dialect, key: str, timeout_s: float, max_in_flight: int, upload: bool = False
    ):
        self.url, self.dialect = url, dialect
        self.connection = ServerConnection(url, key, timeout_s, max_in_flight)
        self.adapters = LoadedAdapters(self, upload)
        self.alive, self.reason, self.refused, self.waiting = True, "", "", 0
        self.model = self.base = ""
        self.context: int | None = None

    async def ask(self, ask: CompletionRequest) -> Answer:
        """Return one completion. Raises RequestFailed, InvalidAnswer."""
        answer = await self.connection.post(self.dialect.completions, self.dialect.body(ask))
        return self.dialect.read(answer)

    async def check(self) -> bool:
        """Return whether the server answers now; if not, ``reason`` says why."""
        try:
            await self.connection.get(self.dialect.health, HEALTH_TIMEOUT_S)
        except RequestFailed as error:
            self.reason = str(error) or type(error).__name__
            return False
        return True

    def mark_lost(self) -> None:
        """Mark the server as unavailable. It may return restarted, without its adapters, or with all of them."""
        self.alive = False
        self.adapters.mark_lost()

    async def readmit(self) -> None:
        """Prepare a server that answers again: unload adapters that are no longer used. Raises RequestFailed."""
        await self.query_model()
        await self.adapters.unload_unused()

    async def query_model(self) -> None:
        """Set ``base``, the server's name for ``model``, and ``context`` (tokens; None: unknown). Raises
        RequestFailed."""
        listed = await self.connection.get("/v1/models", HEALTH_TIMEOUT_S)
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


class LoadedAdapters:
    """The adapters that one server has loaded. ``upload``: send the adapters' files instead of their path."""

    def __init__(self, server: ServerClient, upload: bool):
        self.server, self.upload = server, upload
        self._loads: dict[str, asyncio.Task[float]] = {}
        self._maybe_loaded: set[str] = set()  # perhaps loaded (server lost or load failed), and still in use
        self._to_unload: set[str] = set()  # perhaps loaded, and no longer in use

    def mark_lost(self) -> None:
        self._maybe_loaded |= self._loads.keys()
        self._loads.clear()

    async def require(self, published: PublishedAdapter) -> float:
        """Load the adapter if necessary. Return the seconds, 0 if another call loads it. Raises RequestFailed."""
        name = published.name
        loading = self._loads.get(name)
        if loading is not None:
            # A cancelled caller must not cancel a load that other requests wait for.
            await asyncio.shield(loading)
            return 0.0
        loading = self._loads[name] = asyncio.create_task(self._load(published))
        loading.add_done_callback(lambda task: self._on_load_ended(name, task))
        return await asyncio.shield(loading)

    def _on_load_ended(self, name: str, task: asyncio.Task[float]) -> None:
        # After a failed load, or one that ended when the server had been lost, the server may or may not have the
        # adapter. Callers of ``require`` get the error from the task.
        failed = task.cancelled() or task.exception() is not None
        if failed and self._loads.get(name) is task:
            del self._loads[name]
        if self._loads.get(name) is None and name not in self._to_unload:
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
            await self._post("load_lora_adapter", body)
        except RequestRejected as refused:
            if "already" not in str(refused):  # a name is never reused, so these are the same weights
                raise
        except ModelNotFound as unknown:
            raise RequestRejected(f"it cannot load the adapter at {path}: {unknown}") from unknown
        return time.perf_counter() - begin

    def schedule_unload(self, name: str) -> None:
        self._to_unload.add(name)

    def mark_unloaded(self, name: str) -> None:
        self._loads.pop(name, None)
        self._maybe_loaded.discard(name)

    async def unload(self, name: str) -> None:
        """Unload the adapter; from a server that is lost, at the next ``unload_unused``. Ignores errors."""
        loading = self._loads.get(name)
        if loading is None and name not in self._maybe_loaded and name not in self._to_unload:
            return
        self._to_unload.add(name)
        if loading is not None and not loading.done():
            await asyncio.wait([loading])
        self.mark_unloaded(name)
        if self.server.alive:  # it may have been lost during the load
            with contextlib.suppress(ServerUnavailable):
                await self._unload_now(name)

    async def unload_all(self) -> None:
        """Unload all adapters that this client has loaded. Raises ServerUnavailable."""
        await asyncio.gather(*(self.unload(name) for name in {*self._loads, *self._maybe_loaded}))
        if self.server.alive:
            await self.unload_unused()

    async def unload_unused(self) -> None:
        """Unload the adapters that are no longer used. Raises ServerUnavailable."""
        # No ``for``: the set changes while a request is awaited.
        while self._to_unload:
            await self._unload_now(next(iter(self._to_unload)))

    async def _unload_now(self, name: str) -> None:
        with contextlib.suppress(ModelNotFound, RequestRejected):
            await self._post("unload_lora_adapter", {"lora_name": name}, UNLOAD_TIMEOUT_S)
        self._to_unload.discard(name)

    async def _post(self, route: str, body: dict[str, object], timeout_s: float | None = None) -> None:
        await self.server.connection.post(f"{self.server.dialect.adapter_prefix}/{route}", body, timeout_s)


def _encoded(directory: Path) -> dict[str, str]:
    return {path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(directory.iterdir())}
