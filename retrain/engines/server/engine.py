"""Samples from servers: ``[inference] engine = "vllm" | "sglang" | "openai"``.

Each completion is one request with its own seed from the named stream, so that samples depend neither on the batch nor
on the server. All requests run in the event loop of one thread; ``sample`` may be called from several threads. A server
loads an adapter before the first request that needs it, and again after a restart; it unloads the adapter once it is
retired and no request in flight uses it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from retrain.config import Config
from retrain.config.machine import Released
from retrain.engines.protocol import Engine, Finished
from retrain.engines.server.adapters import AbandonedAdapters, AdapterStore, PublishedAdapter
from retrain.engines.server.automatic import is_composed
from retrain.engines.server.client import ServerClient
from retrain.engines.server.completions import Completions, ReturnTrial, ServedModel
from retrain.engines.server.connection import RequestFailed, api_key, server_root
from retrain.engines.server.dialects import DIALECTS
from retrain.engines.server.fleet import Fleet, LocalFleet, names_of
from retrain.engines.server.pool import WAITS, ServerPool, Waits
from retrain.engines.server.sleep import SharedGpu
from retrain.engines.slots import check_lengths
from retrain.errors import RunFailed, ServerFailed, UsageError
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.protocol import PolicySnapshot
from retrain.types import Action, PolicyRef, SampleRequest

ADAPTERS = "adapters"  # Default for `adapter_dir`, below a run's or campaign's directory
WAKING_S = 20.0  # Most seconds for waking sleeping servers in ``close``

Result = TypeVar("Result")


@dataclass
class _Call:
    requests: Sequence[SampleRequest]
    used: Mapping[PolicyRef, PublishedAdapter]
    gate: asyncio.Semaphore | None
    at: ServerClient | None
    loading_s: float = 0.0  # Seconds of waiting for servers to load adapters


class ServerEngine(Engine):
    """Samples with servers that hold the base ``model``; several versions of a run may be published at the same time.

    ``new_client`` makes the client of an address. ``notify(text, level)`` is called when servers are lost or return. A
    ``fleet`` starts the servers and provides their addresses; ``close`` closes it too.
    """

    def __init__(
        self,
        model: ServedModel,
        urls: Sequence[str],
        new_client: Callable[[str], ServerClient],
        store: AdapterStore,
        notify: Callable[[str, str], None] = lambda text, level: None,
        fleet: Fleet | None = None,
        released: Released = "",
        waits: Waits = WAITS,
    ):
        self.model, self.store, self.fleet, self.waits = model, store, fleet, waits
        self.is_concurrent = not released  # sleeping servers and training take turns on the same GPU
        gave_up = (lambda: fleet.gave_up) if fleet is not None else (lambda: "")
        self.pool = ServerPool(urls, new_client, model.name, notify, gave_up, waits)
        self._completions = Completions(model, self.pool, waits)
        hold_restarts = fleet.hold_restarts if fleet is not None else lambda held: None
        self._gpu = SharedGpu(released, hold_restarts, lambda text, level: self.pool.notify(text, level))
        self._published: dict[PolicyRef, PublishedAdapter] = {}
        self._unloads: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._loop = LoopThread("servers")

    # -- beginning and end --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Wait for the servers and query their names for the base. Raises UsageError if none answers."""
        if self.fleet is not None:
            self.fleet.wait(self.waits.patience_s)
            if not self.fleet.urls and not self.fleet.gave_up:
                raise UsageError(
                    f"[inference] launch: no server could be started within {self.waits.patience_s:g} s (patience_s)"
                )
            # Before reading ``urls``, so that no change is missed.
            self.fleet.listen(lambda urls: self._loop.start(self.pool.follow(urls)))
            self._loop.run(self.pool.follow(self.fleet.urls))
        self._loop.run(self._open())

    def close(self) -> None:
        with ExitStack() as ends:
            ends.callback(self.store.close)
            if self.fleet is not None:
                ends.callback(self.fleet.close)
            if not self._loop.close(self._close()):
                ends.pop_all()  # it was closed before

    def cancel(self) -> None:
        self._loop.cancel()

    async def _open(self) -> None:
        await self.pool.open()
        abandoned = await self._find_abandoned()
        patience_s = self.waits.patience_s if self.fleet is not None else self.waits.start_s
        for server, answers in await self.pool.first_answers(patience_s):
            if not answers:
                self.pool.exclude(server, server.reason)
                continue
            try:
                await server.query_model()
            except RequestFailed as error:
                raise UsageError(f"[inference] url {server.url}: /v1/models: {error}") from error
        with suppress(TimeoutError):  # a slow server unloads them when the engine is closed
            async with asyncio.timeout(self.waits.closing_s):
                unloads = [server.adapters.unload_unused() for server in self.pool.servers if server.alive]
                await asyncio.gather(*unloads, return_exceptions=True)
        for adapters in abandoned:
            await asyncio.to_thread(adapters.remove)

    async def _find_abandoned(self) -> list[AbandonedAdapters]:
        abandoned = await asyncio.to_thread(self.store.abandoned)
        for name in (name for adapters in abandoned for name in adapters.names):
            for server in self.pool.servers:
                server.adapters.schedule_unload(name)
        return abandoned

    async def _close(self) -> None:
        try:
            with suppress(TimeoutError, ServerFailed):
                async with asyncio.timeout(WAKING_S):
                    await self._gpu.wake(self.pool.servers)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.waits.closing_s):
                    unloads = [asyncio.wrap_future(unload) for unload in self._unloads]
                    abandoned = await self._find_abandoned()
                    final_unloads = [server.adapters.unload_all() for server in self.pool.servers if server.alive]
                    await asyncio.gather(*unloads, *final_unloads, return_exceptions=True)
                    for adapters in abandoned:
                        await asyncio.to_thread(adapters.remove)
        finally:
            await self.pool.close()

    # -- weights ------------------------------------------------------------------------------------------------

    @property
    def sync_seconds(self) -> float | None:
        return getattr(self._local, "loading_s", None)

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        if not isinstance(weights, LocalSnapshot):
            raise TypeError(f"servers sample with LoRA adapters, not with {type(weights).__name__}")
        with self._lock:
            before = self._published.get(ref)
            self._published[ref] = self.store.new_adapter(ref, weights)
        if before is not None:
            self._retire(before)

    def retire(self, ref: PolicyRef) -> None:
        with self._lock:
            published = self._published.pop(ref, None)
        if published is not None:
            self._retire(published)

    def forget(self) -> None:
        for ref in list(self._published):
            self.retire(ref)

    def _retire(self, published: PublishedAdapter) -> None:
        published.retired = True
        unload = self._loop.start(self._unload_if_unused(published))
        if unload is not None:  # else ``close`` unloads everything
            with self._lock:
                self._unloads = {earlier for earlier in self._unloads if not earlier.done()} | {unload}

    async def _unload_if_unused(self, published: PublishedAdapter) -> None:
        if published.retired and not published.users:
            await asyncio.gather(*(server.adapters.unload(published.name) for server in self.pool.servers))
            await asyncio.to_thread(self.store.remove, published.name)

    # -- sampling -----------------------------------------------------------------------------------------------

    def forget_sequences(self) -> None:
        """Forget which server has which rollout. Servers on the trainer's GPU sleep until the next ``sample``."""
        self.pool.homes.clear()
        self._loop.run(self._gpu.sleep(self.pool.servers))

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        max_rows: int | None = None,
        finished: Finished | None = None,
        at: ServerClient | None = None,
    ) -> list[list[Action]]:
        """Sample as ``Engine.sample`` does, on the server ``at`` if not None. Raises ModelError if a prompt and its
        completion exceed the model's context, RunFailed for weights that were not published, ServerFailed if no server
        answers in time or answers stay invalid."""
        contexts = [server.context for server in self.pool.servers if server.context]
        context = min([self.model.context, *contexts])
        check_lengths(requests, context, "the server" if context < self.model.context else self.model.name)
        with self._lock:
            for ref in (request.policy for request in requests):
                if ref not in self._published:
                    versions = sorted(other.version for other in self._published if other.run_id == ref.run_id)
                    raise RunFailed(
                        f"no weights were published as version {ref.version} of {ref.run_id}; there are {versions}"
                    )
            used = {request.policy: self._published[request.policy] for request in requests}
            for published in used.values():
                published.users += 1
        call = _Call(requests, used, asyncio.Semaphore(max_rows) if max_rows else None, at)
        try:
            return self._loop.run(self._sample(call, finished))
        finally:
            self._local.loading_s = call.loading_s
            with self._lock:
                for published in used.values():
                    published.users -= 1
            for published in used.values():
                if published.retired:
                    self._retire(published)

    async def _sample(self, call: _Call, finished: Finished | None) -> list[list[Action]]:
        done: list[list[Action | None]] = [[None] * request.samples for request in call.requests]
        missing = [request.samples for request in call.requests]
        groups: list[list[Action]] = [[] for _ in call.requests]

        async def row(index: int, sample: int) -> None:
            request = call.requests[index]
            async with call.gate or nullcontext():
                published = call.used[request.policy]
                done[index][sample], loading_s = await self._completions.sample(request, sample, published, call.at)
            call.loading_s += loading_s
            missing[index] -= 1
            if not missing[index]:
                groups[index] = [action for action in done[index] if action is not None]
                if finished is not None:
                    finished(index, groups[index])

        async with self._gpu.awake(self.pool.servers):
            rows = [
                asyncio.ensure_future(row(index, sample))
                for index, request in enumerate(call.requests)
                for sample in range(request.samples)
            ]
            try:
                await asyncio.gather(*rows)
            # gather() leaves the other rows running when one fails.
            except BaseException:
                for task in rows:
                    task.cancel()
                await asyncio.gather(*rows, return_exceptions=True)
                raise
        return groups

    def wait_for_server(self) -> None:
        """Wait until a server answers. Raises ServerFailed when none does in time."""
        self._loop.run(self.pool.wait_for())

    # -- trials -------------------------------------------------------------------------------------------------

    def set_trials(self, trials: Sequence[ReturnTrial]) -> None:
        """Set the trials that a server must pass when it returns or joins late."""
        self.pool.trials = [partial(self._completions.run_trial, self.store, trial) for trial in trials]


def server_engine(
    config: Config,
    base: BaseModel,
    directory: Path,
    notify: Callable[[str, str], None] = lambda text, level: None,
    fleet: Fleet | None = None,
) -> ServerEngine:
    """Return the engine of ``config`` after its servers have answered. Without a ``fleet``, servers of ``[inference]
    launch`` are started; their logs are in ``directory``.

    Raises UsageError if an API key's variable is not set, the adapter directory cannot be made, or no server answers.
    """
    settings, model = config.inference, config.model.model
    key = api_key(settings.api_key_env, "[inference]")
    composed = is_composed(settings.launch)
    if composed and not key:
        key = secrets.token_urlsafe(24)  # other users of this machine cannot send requests
    adapter_directory = Path(settings.adapter_dir).expanduser() if settings.adapter_dir else directory / ADAPTERS
    store = AdapterStore(adapter_directory, model, base.dtype)
    engines: list[ServerEngine] = []

    def server_message(text: str, level: str) -> None:
        # The engine outlives the cohort that it is built for: its present ``notify`` is the later cohort's.
        (engines[0].pool.notify if engines else notify)(text, level)

    dialect = DIALECTS[settings.engine]
    engine = ServerEngine(
        ServedModel(model, base.text, base.vocab_size, base.eos_ids, base.context_length),
        [server_root(address) for address in settings.url or ()],
        lambda url: ServerClient(url, dialect, key, settings.timeout_s, settings.max_in_flight, settings.upload),
        store,
        notify,
        None if settings.launch is None else fleet or LocalFleet(config, directory, server_message, key),
        settings.released,
        replace(WAITS, patience_s=settings.patience_s),
    )
    engines.append(engine)
    begin = time.monotonic()
    if composed:
        logs = ", ".join(f"{directory / name}.log" for name in names_of(settings.replicas))
        notify(f"vLLM starts (log: {logs})", "info")
    try:
        engine.open()
    except BaseException:
        engine.close()
        raise
    if composed:
        notify(f"vLLM is ready after {time.monotonic() - begin:.0f} s", "info")
    return engine


# -- the event loop ---------------------------------------------------------------------------------------------------


class LoopThread:
    """An event loop in its own thread, to which other threads submit coroutines."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock, self._closed = threading.RLock(), False
        self._calls: set[Future[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result] | None:
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
