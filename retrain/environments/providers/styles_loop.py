"""Methods that may be async, called from code that is not."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Awaitable
from typing import Any

from retrain.errors import PluginError


class Loop:
    """One event loop for all calls, so that what one of them opens the next one can use."""

    def __init__(self, owner: str):
        self.owner = owner
        self._runner = asyncio.Runner()
        self.close = weakref.finalize(self, _closed, self._runner)

    def run(self, value: Any) -> Any:
        """``value``, or what it gives when it is awaited; raises what it raises. PluginError within another loop."""
        if not inspect.isawaitable(value):
            return value
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(_awaited(value))
        if inspect.iscoroutine(value):
            value.close()  # it would warn that nobody awaited it
        raise PluginError(f"{self.owner} is async and cannot be called within another event loop")


def _closed(runner: asyncio.Runner) -> None:
    """Close a runner, which garbage collection may ask for while another loop runs in this thread: then in one of its
    own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        runner.close()
        return
    thread = threading.Thread(target=runner.close)
    thread.start()
    thread.join()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
