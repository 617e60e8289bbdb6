"""One server at one address: requests, whether it is there, and which adapters it has.

What a request comes to is one of four: an answer; ``Away`` (no connection, no answer in time, 5xx, 429: to be tried
again, here or elsewhere); ``Unknown`` (the server does not know the adapter: it has been started anew); ``Refused`` (it
will not do this, now or later).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.engines.server.adapters import Published
from retrain.engines.server.dialects import Answer, Ask, Dialect, Faulty

if TYPE_CHECKING:
    import httpx

HEALTH_TIMEOUT_S, UNLOAD_TIMEOUT_S = 5.0, 10.0
BUSY = (429, 500, 502, 503, 504)  # HTTP statuses after which the same request may succeed


class Away(Exception):
    """The server did not answer, or says that it cannot at the moment."""


class Unreached(Away):
    """No connection: the request never reached the server."""


class Unknown(Exception):
    """The server has no model or adapter of this name."""


class Refused(Exception):
    """The server understood the request and will not do it."""


class Server:
    """One address. ``waiting`` counts the rows that are given to it and not yet answered; ``alive`` is False from when
    it was found away until it answers again. ``upload``: adapters are sent, not named by their place."""

    def __init__(
        self, url: str, dialect: Dialect, key: str, timeout_s: float, max_in_flight: int, upload: bool = False
    ):
        self.url, self.dialect, self.timeout_s, self.upload = url, dialect, timeout_s, upload
        self._key, self._max_in_flight = key, max_in_flight
        self.alive, self.reason, self.refused, self.waiting = True, "", "", 0
        self.model = self.base = ""
        self.context: int | None = None
        self._adapters: dict[str, asyncio.Task[float]] = {}
        self._perhaps: set[str] = set()  # it had them before it was away, and they are wanted
        self._leave: set[str] = set()  # it may have them, and nobody wants them
        self._http: httpx.AsyncClient | None = None

    async def open(self) -> None:
        self._http = self._client(keep_alive=self._max_in_flight)
        self.slots = asyncio.Semaphore(self._max_in_flight)

    def _client(self, keep_alive: int) -> httpx.AsyncClient:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self._max_in_flight + 8, max_keepalive_connections=keep_alive)
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=self.timeout_s)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    # -- requests -----------------------------------------------------------------------------------------------

    async def ask(self, ask: Ask) -> Answer:
        """One completion. Raises Away, Unknown, Refused, Faulty."""
        return self.dialect.read(await self.post(self.dialect.completions, self.dialect.body(ask)))

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """The JSON of the answer, its text where it is none."""
        return await self._send("POST", path, timeout_s, body)

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        return await self._send("GET", path, timeout_s)

    async def _send(self, method: str, path: str, timeout_s: float | None, body: dict[str, Any] | None = None) -> Any:
        import httpx

        if self._http is None or self._http.is_closed:
            raise Unreached("whoever keeps the servers has let go of it")
        limit = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(limit):
                response = await self._request(self._http, method, path, body, limit)
        except (httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Unreached(f"no connection within {limit:g} s") from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise Away(f"no answer to {path} within {limit:g} s") from error
        except httpx.ConnectError as error:
            raise Unreached(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except httpx.RequestError as error:
            raise Away(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except httpx.InvalidURL as error:
            raise Refused(f"not an address: {error}") from error
        status, text = response.status_code, self._said(response)
        if status in BUSY:
            raise Away(f"HTTP {status} {text}")
        if status == 404:
            raise Unknown(text)
        if status >= 300:
            raise Refused(f"HTTP {status} {text}")
        try:
            return response.json()
        except ValueError as error:
            if path == self.dialect.completions:
                raise Faulty(f"no JSON: {text}") from error
            return text

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> httpx.Response:
        """Return the response, from a second connection where a reused one was closed before any byte of it came.

        A server closes connections that were idle for some seconds (vLLM for 5), and a request that is sent at that
        moment fails although the server is well. One on a fresh connection is not repeated: that is a real loss.
        """
        import httpx

        is_fresh = has_response = False

        async def trace(event: str, info: Any) -> None:
            nonlocal is_fresh, has_response
            is_fresh |= event == "connection.connect_tcp.started"
            has_response |= event == "http11.receive_response_headers.complete"

        try:
            return await client.request(method, path, json=body, timeout=timeout_s, extensions={"trace": trace})
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            if is_fresh or has_response:
                raise
        async with self._client(keep_alive=0) as once:
            return await once.request(method, path, json=body, timeout=timeout_s)

    def _said(self, response: httpx.Response) -> str:
        """The server's words, without the key, which some servers repeat."""
        try:
            found = response.json()
            found = found.get("error", found)
            text = str(found.get("message") or found.get("detail") or found if isinstance(found, dict) else found)
        except (ValueError, AttributeError):
            text = response.text
        text = " ".join(text.split())[:300]
        return text.replace(self._key, "***") if self._key else text

    # -- whether it is there ------------------------------------------------------------------------------------

    async def check(self) -> bool:
        """Whether it answers now; ``reason`` says why not."""
        try:
            await self.get(self.dialect.health, HEALTH_TIMEOUT_S)
        except (Away, Unknown, Refused) as error:
            self.reason = str(error) or type(error).__name__
            return False
        return True

    def lost(self) -> None:
        """It is away. What comes back may be another process, without adapters, or the same, which has them all."""
        self.alive = False
        self._perhaps |= self._adapters.keys()
        self._adapters.clear()

    async def found(self) -> None:
        """It is back: adapters that nobody wants any more are taken away before it is used, should it still have them;
        those that are wanted stay. Raises Away, Unknown, Refused."""
        await self.look()
        await self.take_away()

    async def look(self) -> None:
        """Learn how the server calls the base (``model``, as the configuration does) and how long its context is.
        Raises Away, Unknown, Refused."""
        listed = await self.get("/v1/models", HEALTH_TIMEOUT_S)
        data = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(data, list) or not all(isinstance(each, dict) for each in data):
            raise Refused(
                f"{repr(listed)[:80]} is no list of models: it is no server of the kind that [inference] engine names, "
                "or this is not its url"
            )
        models = [each for each in data if not each.get("parent") and isinstance(each.get("id"), str)]
        if not models:
            raise Refused("it lists no model")
        named = next((each for each in models if self.model in (each["id"], each.get("root"))), models[0])
        longest = named.get("max_model_len")
        self.base, self.context = named["id"], longest if type(longest) is int else None

    # -- adapters -----------------------------------------------------------------------------------------------

    async def require(self, published: Published) -> float:
        """Have the adapter loaded, once for all that ask; the seconds that it took this caller's load, 0 where another
        has loaded it. Raises as ``post``."""
        name = published.name
        loading = self._adapters.get(name)
        if loading is not None:
            await asyncio.shield(loading)
            return 0.0
        loading = self._adapters[name] = asyncio.create_task(self._load(published))
        loading.add_done_callback(lambda task: self._ended(name, task))
        return await asyncio.shield(loading)

    def _ended(self, name: str, task: asyncio.Task[float]) -> None:
        """An adapter that could not be loaded counts as not there; whoever waits for it has heard why. Whether it is
        there is not known, as with one that was loaded while the server was given up."""
        failed = task.cancelled() or task.exception() is not None
        if failed and self._adapters.get(name) is task:
            del self._adapters[name]
        if self._adapters.get(name) is None and name not in self._leave:
            self._perhaps.add(name)

    async def _load(self, published: Published) -> float:
        begin = time.perf_counter()
        path = await asyncio.to_thread(published.written)
        body: dict[str, Any] = {"lora_name": published.name}
        if self.upload:
            body["files"] = await asyncio.to_thread(_encoded, path)
        else:
            body["lora_path"] = str(path)
        try:
            await self.post(f"{self.dialect.adapter_prefix}/load_lora_adapter", body)
        except Refused as refused:
            if "already" not in str(refused):  # of this very name, which no other weights have
                raise
        except Unknown as unknown:
            raise Refused(f"it cannot load the adapter at {path}: {unknown}") from unknown
        return time.perf_counter() - begin

    def leave(self, name: str) -> None:
        """An adapter that another process may have loaded: to be taken away."""
        self._leave.add(name)

    def forgot(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._perhaps.discard(name)

    async def unload(self, name: str) -> None:
        """Have the adapter taken away; a server that is away or does not know it is content. One that is away is told
        when it is back."""
        loading = self._adapters.get(name)
        if loading is None and name not in self._perhaps and name not in self._leave:
            return
        self._leave.add(name)
        if loading is not None and not loading.done():
            await asyncio.wait([loading])
        self._adapters.pop(name, None)
        self._perhaps.discard(name)
        if self.alive:
            with contextlib.suppress(Away):
                await self._take(name)

    async def unload_all(self) -> None:
        """Have everything taken away that it was given here. Raises Away."""
        await asyncio.gather(*(self.unload(name) for name in {*self._adapters, *self._perhaps}))
        if self.alive:
            await self.take_away()

    async def take_away(self) -> None:
        """Unload all that nobody wants. Raises Away."""
        while self._leave:
            await self._take(next(iter(self._leave)))

    async def _take(self, name: str) -> None:
        with contextlib.suppress(Unknown, Refused):
            route = f"{self.dialect.adapter_prefix}/unload_lora_adapter"
            await self.post(route, {"lora_name": name}, UNLOAD_TIMEOUT_S)
        self._leave.discard(name)


def _encoded(directory: Path) -> dict[str, str]:
    """The files of a PEFT directory in base64, by name."""
    return {path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(directory.iterdir())}
