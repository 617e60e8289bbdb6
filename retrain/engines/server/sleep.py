"""Lets vLLM free its GPU while this process trains on the same one.

Servers are awake from the first call that samples until ``SharedGpu.sleep``, which does nothing while a call samples.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import torch

from retrain.engines.server.client import ServerClient
from retrain.engines.server.connection import RequestFailed, ServerUnavailable
from retrain.errors import ServerFailed


class SharedGpu:
    """Lets servers sleep while this process uses the GPU that they share. Without ``is_shared`` nothing is done. All
    methods run in one event loop, and raise ServerFailed if a server cannot sleep or wake.

    ``hold_restarts(held)``: while ``held``, a server that dies is not started again, because it would find no memory.
    """

    def __init__(self, is_shared: bool, hold_restarts: Callable[[bool], None]):
        self.is_shared, self._hold_restarts = is_shared, hold_restarts
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
            if self.is_shared and not self._sleeping and not self._users:
                self._sleeping = True  # before the first one sleeps: after a failure or a stop, ``wake`` wakes it
                self._hold_restarts(True)
                for server in servers:
                    await _post(server, "/sleep?level=1")

    async def wake(self, servers: Sequence[ServerClient]) -> None:
        async with self._lock:
            if self._sleeping:
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # the server needs the memory that its sleep had freed
                self._hold_restarts(False)
                for server in servers:
                    await _post(server, "/wake_up")
                self._sleeping = False


async def _post(server: ServerClient, path: str) -> None:
    try:
        await server.connection.post(path, {})
    except ServerUnavailable:
        return  # a restarted server is awake
    except RequestFailed as error:
        raise ServerFailed(
            f"{server.url} cannot {path.strip('/').partition('?')[0]}: {error}; start vLLM with --enable-sleep-mode "
            "and VLLM_SERVER_DEV_MODE=1 in its environment, or type: sleep = false"
        ) from error
