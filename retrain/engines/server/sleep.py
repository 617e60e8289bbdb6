"""Lets vLLM free its GPU while this process trains on the same one.

Servers are awake from the first call that samples until ``SharedGpu.sleep``, which does nothing while a call samples.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from retrain.config.machine import Released
from retrain.device import free_cached_memory
from retrain.engines.server.client import ServerClient
from retrain.engines.server.connection import ModelNotFound, RequestFailed, ServerUnavailable
from retrain.errors import ServerFailed

RELEASE = "/release_kv_cache_memory"  # vLLM 0.31 to 0.33
# Proposed for later versions (vllm#42658), where tags take precedence over the level. Other versions ignore the tags
# and free the weights too.
TAGGED = "/sleep?level=1&tags=kv_cache"
SLEEP = "/sleep?level=1"


class SharedGpu:
    """Lets servers free what ``released`` names while this process uses the GPU that they share. With "" nothing is
    done. All methods run in one event loop, and raise ServerFailed if a server cannot sleep or wake.

    The order of a step is: wake, load adapters, sample, sleep, update. No request is sent to a sleeping server, and
    ``sleep`` returns only when all memory is free.

    ``hold_restarts(held)``: while ``held``, a server that dies is not started again, because it would find no memory.
    ``notify(text, level)`` is called once, with the route by which the KV cache alone is freed.
    """

    def __init__(self, released: Released, hold_restarts: Callable[[bool], None], notify: Callable[[str, str], None]):
        self.released, self._hold_restarts, self._notify = released, hold_restarts, notify
        self._route = RELEASE if released == "kv" else SLEEP
        self._notified = False
        self._sleeping, self._users = False, 0
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def awake(self, servers: Sequence[ServerClient]) -> AsyncIterator[None]:
        self._users += 1
        try:
            await self.wake(servers)
            yield
        finally:
            self._users -= 1

    async def sleep(self, servers: Sequence[ServerClient]) -> None:
        async with self._lock:
            if self.released and not self._sleeping and not self._users:
                self._sleeping = True  # before the first one sleeps: after a failure or a stop, ``wake`` wakes it
                self._hold_restarts(True)
                for server in servers:
                    await self._put_to_sleep(server)

    async def _put_to_sleep(self, server: ServerClient) -> None:
        text = f"{server.url} frees its KV cache by {RELEASE}"
        # The cache can be released once no request is left, for which "wait" waits.
        if self._route == RELEASE and not (await _post(server, "/pause?mode=wait") and await _post(server, RELEASE)):
            self._route = TAGGED
            text = f"{server.url} has no route {RELEASE}: it sleeps by {TAGGED}, and if it does not know tags, frees "
            text += "its weights too"
        if self._route != RELEASE and not await _post(server, self._route):
            raise _failed(server, "/sleep", "it has no such route")
        if self.released == "kv" and not self._notified:
            self._notified = True
            self._notify(text, "info")

    async def wake(self, servers: Sequence[ServerClient]) -> None:
        async with self._lock:
            if self._sleeping:
                free_cached_memory()  # the server needs the memory that its sleep had freed
                self._hold_restarts(False)
                for server in servers:
                    if not await _post(server, "/wake_up"):
                        raise _failed(server, "/wake_up", "it has no such route")
                self._sleeping = False


async def _post(server: ServerClient, path: str) -> bool:
    """Send the request; return False if the server has no such route. Raises ServerFailed if it refuses."""
    try:
        await server.connection.post(path, {})
    except ModelNotFound:
        return False
    except ServerUnavailable as error:
        # A server that has died frees everything, and is awake when it is started again.
        if path != "/wake_up" and await server.check():
            raise _failed(server, path, str(error)) from error
    except RequestFailed as error:
        raise _failed(server, path, str(error)) from error
    return True


def _failed(server: ServerClient, path: str, reason: str) -> ServerFailed:
    return ServerFailed(
        f"{server.url} cannot {path.strip('/').partition('?')[0]}: {reason}; start vLLM with --enable-sleep-mode and "
        "VLLM_SERVER_DEV_MODE=1 in its environment, or type: sleep = false"
    )
