"""An event loop in its own thread, to which other threads submit coroutines. The server engine uses it."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock, self._closed = threading.RLock(), False
        self._calls: set[Future[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result] | None":
        """Start a coroutine and return its future. Once the loop is closed, return None and run nothing."""
        with self._lock:  # nothing may enter a loop that is about to stop
            if self._closed:
                coroutine.close()
                return None
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result. An exception that interrupts the wait also cancels the coroutine.
        Raises RuntimeError once the loop is closed."""
        with self._lock:  # ``close`` cancels all calls that have started
            future = self.start(coroutine)
            if future is None:
                raise RuntimeError("the engine is closed")
            self._calls.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._calls.discard(future)

    def cancel(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def close(self, last: Coroutine[Any, Any, None]) -> bool:
        """Cancel all calls, run ``last``, cancel other tasks and stop. Return False if it was already closed."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            last.close()
            return False
        self.cancel()
        try:
            asyncio.run_coroutine_threadsafe(_finish(last), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        return True


async def _finish(last: Coroutine[Any, Any, None]) -> None:
    try:
        await last
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
