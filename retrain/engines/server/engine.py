"""Samples from servers: ``[inference] engine = "vllm" | "sglang" | "openai"``.

Each completion is one request with its own seed from the named stream, so that samples depend neither on the batch nor
on the server. All requests run in the event loop of one thread; ``sample`` may be called from several threads. A server
loads an adapter before the first request that needs it, and again after a restart; it unloads the adapter once it is
retired and no request in flight uses it.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from retrain.engines.protocol import EngineState, Finished
from retrain.engines.server.adapters import AbandonedAdapters, AdapterStore, PublishedAdapter
from retrain.engines.server.checks import action_of
from retrain.engines.server.client import (
    ModelNotFound,
    RequestFailed,
    RequestRejected,
    ServerClient,
    ServerUnavailable,
    ServerUnreachable,
)
from retrain.engines.server.dialects import CompletionRequest, InvalidAnswer
from retrain.engines.server.fleet import Fleet
from retrain.engines.server.pool import WAITS, ServerPool, Waits
from retrain.engines.slots import check_lengths
from retrain.errors import RunFailed, ServerFailed, UsageError
from retrain.policy.local import LocalSnapshot
from retrain.policy.protocol import PolicySnapshot
from retrain.rng import torch_seed
from retrain.tokenizer import Tokenizer
from retrain.types import Action, PolicyRef, SampleRequest

ATTEMPTS = 5  # Requests for one completion before the step fails; lost servers do not count
WAKING_S = 20.0  # Seconds for waking servers at the end
RANK_HINT = "--max-lora-rank"  # vLLM's option for the largest rank, as it appears in the error message
Result = TypeVar("Result")


@dataclass(frozen=True)
class ServedModel:
    """The base that servers must hold: ``name`` in the configuration, token ids below ``size``, end tokens ``end_ids``,
    and ``context``, the most tokens of prompt and completion."""

    name: str
    tokenizer: Tokenizer
    size: int
    end_ids: tuple[int, ...]
    context: int


class Trial(Protocol):
    """A test of a server: the answers to ``requests`` under ``weights`` are known. ``judge`` raises ModelError."""

    @property
    def requests(self) -> Sequence[SampleRequest]: ...

    @property
    def weights(self) -> LocalSnapshot: ...

    def judge(self, url: str, answers: Sequence[Action]) -> None: ...


@dataclass
class _Call:
    requests: Sequence[SampleRequest]
    used: Mapping[PolicyRef, PublishedAdapter]
    gate: asyncio.Semaphore | None
    at: ServerClient | None
    loading_s: float = 0.0  # Seconds of waiting for servers to load adapters


class ServerEngine:
    """Samples with servers that hold the base ``model``; several versions of a run may be published at a time.

    ``new_client`` makes the client of an address. ``notify(text, level)`` is called when servers are lost or return. A
    ``fleet`` starts the servers and provides their addresses; ``close`` closes it too.
    """

    gives_entropy = False
    exact = False

    def __init__(
        self,
        model: ServedModel,
        urls: Sequence[str],
        new_client: Callable[[str], ServerClient],
        store: AdapterStore,
        notify: Callable[[str, str], None] = lambda text, level: None,
        fleet: Fleet | None = None,
        sleeps: bool = False,
        waits: Waits = WAITS,
    ):
        self.model, self.store, self.fleet = model, store, fleet
        self.notify, self.sleeps, self.waits = notify, sleeps, waits
        self.is_concurrent = not sleeps  # sleeping servers and training take turns on the same GPU
        gave_up = (lambda: fleet.gave_up) if fleet is not None else (lambda: "")
        self.pool = ServerPool(
            urls, new_client, model.name, lambda text, level: self.notify(text, level), gave_up, waits
        )
        self._published: dict[PolicyRef, PublishedAdapter] = {}
        self._unloads: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._calls: set[Future[Any]] = set()
        self._sleeping, self._sampling = False, 0
        self._sleep_lock = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        self._closed = False

    # -- beginning and end --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Wait for the servers and query the name that they give the base. Raises UsageError when none answers."""
        if self.fleet is not None:
            self.fleet.wait(self.waits.patience_s)
            if not self.fleet.urls and not self.fleet.gave_up:
                raise UsageError(
                    f"[inference] launch: no server could be started within {self.waits.patience_s:g} s (patience_s)"
                )
            self.fleet.listen(self._follow)  # before reading ``urls``, so that no change is missed
            self._run(self.pool.follow(self.fleet.urls))
        self._run(self._open())

    def _follow(self, urls: Sequence[str]) -> None:
        with self._lock:
            if not self._closed:
                asyncio.run_coroutine_threadsafe(self.pool.follow(urls), self._loop)

    def close(self) -> None:
        with self._lock:  # from here on, only the closing coroutine enters the loop
            if self._closed:
                return
            self._closed = True
        self.cancel()
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self.fleet is not None:
                self.fleet.close()
            self.store.close()

    def cancel(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop's thread; an exception that interrupts the wait cancels it."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError("the engine is closed")
            # Under the lock under which close() sets _closed: nothing may enter a loop that is about to stop.
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._calls.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._calls.discard(future)

    async def _open(self) -> None:
        await self.pool.open()
        abandoned = await self._find_abandoned()
        for server, answers in await self._wait_for_answers():
            if not answers:
                self.pool.exclude(server, server.reason)
                continue
            try:
                await server.query_model()
            except RequestFailed as error:
                raise UsageError(f"[inference] url {server.url}: /v1/models: {error}") from error
        with suppress(TimeoutError):  # a slow server unloads them when the engine is closed
            async with asyncio.timeout(self.waits.closing_s):
                unloads = [server.unload_unused() for server in self.pool.servers if server.alive]
                await asyncio.gather(*unloads, return_exceptions=True)
        for adapters in abandoned:
            await asyncio.to_thread(adapters.remove)

    async def _wait_for_answers(self) -> list[tuple[ServerClient, bool]]:
        """Return each server and whether it answers: once all do, or any after ``start_s``. Raises UsageError."""
        patience = self.waits.patience_s if self.fleet is not None else self.waits.start_s
        waited = 0.0
        while True:
            servers = self.pool.servers
            answers = await asyncio.gather(*(server.check() for server in servers))
            if (answers and all(answers)) or (any(answers) and waited > self.waits.start_s):
                return list(zip(servers, answers, strict=True))
            if self.fleet is not None and self.fleet.gave_up:
                raise UsageError(f"[inference] launch: {self.fleet.gave_up}")
            if waited > patience:
                reasons = "\n".join(f"[inference] url {server.url}: {server.reason}" for server in servers)
                raise UsageError(f"no server answers after {patience:g} s:\n{reasons}")
            await asyncio.sleep(0.5)
            waited += 0.5

    async def _find_abandoned(self) -> list[AbandonedAdapters]:
        abandoned = await asyncio.to_thread(self.store.abandoned)
        for name in (name for adapters in abandoned for name in adapters.names):
            for server in self.pool.servers:
                server.schedule_unload(name)
        return abandoned

    async def _close(self) -> None:
        try:
            with suppress(TimeoutError, ServerFailed):
                async with asyncio.timeout(WAKING_S):
                    await self._wake()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.waits.closing_s):
                    unloads = [asyncio.wrap_future(unload) for unload in self._unloads]
                    abandoned = await self._find_abandoned()
                    final_unloads = [server.unload_all() for server in self.pool.servers]
                    await asyncio.gather(*unloads, *final_unloads, return_exceptions=True)
                    for adapters in abandoned:
                        await asyncio.to_thread(adapters.remove)
        finally:
            await self.pool.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

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
        with self._lock:
            if self._closed:  # ``close`` unloads everything
                return
            unload = asyncio.run_coroutine_threadsafe(self._drop_if_unused(published), self._loop)
            self._unloads = {earlier for earlier in self._unloads if not earlier.done()} | {unload}

    async def _drop_if_unused(self, published: PublishedAdapter) -> None:
        if published.retired and not published.users:
            await self._drop(published)

    async def _drop(self, published: PublishedAdapter) -> None:
        await asyncio.gather(*(server.unload(published.name) for server in self.pool.servers))
        await asyncio.to_thread(self.store.remove, published.name)

    # -- state --------------------------------------------------------------------------------------------------

    def state(self) -> EngineState:
        return {}

    def restore(self, state: EngineState) -> None: ...

    def forget_sequences(self) -> None:
        """Forget which server has which rollout; servers that share the trainer's GPU sleep until the next sample."""
        self._run(self._sleep())

    async def _sleep(self) -> None:
        self.pool.forget_homes()
        async with self._sleep_lock:
            if self.sleeps and not self._sleeping and not self._sampling:
                for server in self.pool.servers:
                    await _post_sleep(server, "/sleep?level=1")
                self._sleeping = True

    async def _wake(self) -> None:
        async with self._sleep_lock:
            if self._sleeping:
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # the server needs the memory that its sleep had freed
                for server in self.pool.servers:
                    await _post_sleep(server, "/wake_up")
                self._sleeping = False

    # -- sampling -----------------------------------------------------------------------------------------------

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        max_rows: int | None = None,
        finished: Finished | None = None,
        at: ServerClient | None = None,
    ) -> list[list[Action]]:
        """Sample as ``Engine.sample`` does, on the server ``at`` if not None. Raises ModelError when a prompt and its
        completion exceed the model's context, RunFailed for weights that were not published, ServerFailed when no
        server answers in time or answers stay invalid."""
        contexts = [server.context for server in self.pool.servers if server.context]
        context = min([self.model.context, *contexts])
        check_lengths(requests, context, "the server" if context < self.model.context else self.model.name)
        with self._lock:
            used = {ref: self._weights(ref) for ref in dict.fromkeys(request.policy for request in requests)}
            for published in used.values():
                published.users += 1
        call = _Call(requests, used, asyncio.Semaphore(max_rows) if max_rows else None, at)
        try:
            return self._run(self._sample(call, finished))
        finally:
            self._local.loading_s = call.loading_s
            with self._lock:
                for published in used.values():
                    published.users -= 1
            for published in used.values():
                if published.retired:
                    self._retire(published)

    def _weights(self, ref: PolicyRef) -> PublishedAdapter:
        if ref not in self._published:
            versions = sorted(other.version for other in self._published if other.run_id == ref.run_id)
            raise RunFailed(f"no weights were published as version {ref.version} of {ref.run_id}; there are {versions}")
        return self._published[ref]

    async def _sample(self, call: _Call, finished: Finished | None) -> list[list[Action]]:
        done: list[list[Action | None]] = [[None] * request.samples for request in call.requests]
        missing = [request.samples for request in call.requests]
        groups: list[list[Action]] = [[] for _ in call.requests]

        async def row(index: int, sample: int) -> None:
            request = call.requests[index]
            if call.gate is None:
                done[index][sample] = await self._completion(call, request, sample)
            else:
                async with call.gate:
                    done[index][sample] = await self._completion(call, request, sample)
            missing[index] -= 1
            if not missing[index]:
                groups[index] = [action for action in done[index] if action is not None]
                if finished is not None:
                    finished(index, groups[index])

        self._sampling += 1
        try:
            await self._wake()
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
        finally:
            self._sampling -= 1
        return groups

    async def _completion(self, call: _Call, request: SampleRequest, sample: int) -> Action:
        published, faults, losses = call.used[request.policy], [], 0
        stream = request.streams[sample] if request.streams else (*request.stream, sample)
        seed = torch_seed(*stream, *([request.drawn] if request.drawn else []))
        while len(faults) < ATTEMPTS:
            if faults:
                await asyncio.sleep(self.waits.pause_s * 2 ** (len(faults) - 1))
            server = await self.pool.choose(_group_key(request), call.at)
            server.waiting += 1
            try:
                async with server.slots:
                    loading_s = await server.require(published)
                    call.loading_s += loading_s
                    ask = CompletionRequest(request, published.name, server.base, seed, self.model.end_ids)
                    answer = await server.ask(ask)
                return action_of(ask, answer, self.model.size, self.model.tokenizer)
            except ModelNotFound as unknown:
                server.mark_unloaded(published.name)
                faults.append(f"{server.url} does not know {published.name}: {unknown}")
            except ServerUnavailable as unavailable:
                await self.pool.recheck(server, str(unavailable))
                if server.alive:  # healthy: this request is at fault
                    faults.append(f"{server.url}: {unavailable}")
                elif not isinstance(unavailable, ServerUnreachable):
                    losses += 1
                    if losses == self.waits.losses:
                        raise ServerFailed(
                            f"a completion after {len(request.prompt_ids)} tokens was under way {losses} times at a "
                            f"server that then went away, last {server.url}: {unavailable}"
                        ) from unavailable
            except InvalidAnswer as invalid:
                faults.append(f"{server.url}: {invalid}")
            except RequestRejected as rejected:
                raise ServerFailed(f"{server.url} refuses: {rejected}{_hint(str(rejected))}") from rejected
            finally:
                server.waiting -= 1
        again = f" (and before: {'; '.join(dict.fromkeys(faults[:-1]))})" if set(faults[:-1]) - {faults[-1]} else ""
        last = f"{faults[-1]}{_hint(faults[-1])}"
        raise ServerFailed(f"a completion was asked for {ATTEMPTS} times, the last answer: {last}{again}")

    def wait_for_server(self) -> None:
        """Wait until a server answers. Raises ServerFailed when none does in time."""
        self._run(self.pool.wait_for())

    # -- trials -------------------------------------------------------------------------------------------------

    def set_trials(self, trials: Sequence[Trial]) -> None:
        """Set the trials that a server must pass when it returns or joins late."""
        runs = [partial(self._run_trial, trial) for trial in trials]
        # The pool belongs to the loop's thread.
        self._loop.call_soon_threadsafe(setattr, self.pool, "trials", runs)

    async def _run_trial(self, trial: Trial, server: ServerClient) -> None:
        answers = []
        published = self.store.new_adapter(trial.requests[0].policy, trial.weights)
        try:
            await server.require(published)
            for request in trial.requests:
                seed = torch_seed(*request.stream)
                ask = CompletionRequest(request, published.name, server.base, seed, self.model.end_ids)
                answer = await server.ask(ask)
                answers.append(action_of(ask, answer, self.model.size, self.model.tokenizer))
        finally:
            await server.unload(published.name)  # the pool does so before the server is used
            await asyncio.to_thread(self.store.remove, published.name)
        trial.judge(server.url, answers)


def _group_key(request: SampleRequest) -> Hashable:
    # The same for all turns of a group's rollouts, whose prompts their server has cached.
    return request.sequences[0][:-1] if request.sequences else request.stream


def _hint(error: str) -> str:
    text = error.lower()
    if re.search(r"\bhttp 40[13]\b", text):  # not any 401 or 403, which a port or an id may hold
        return "; name the variable with its key: [inference] api_key_env"
    if "no adapter found" in text or "holds no peft adapter" in text:
        return "; it does not see that path: give [inference] adapter_dir a directory that servers see too"
    if "cannot load the adapter" in text:
        text += " lora support"  # the server has no such route
    if "rank" in text:
        return f"; start the server with a {RANK_HINT} that holds [model] lora_rank"
    if "lora" in text and ("enable" in text or "not allowed" in text or "support" in text):
        return (
            "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, SGLang with "
            "--enable-lora"
        )
    return ""


async def _post_sleep(server: ServerClient, path: str) -> None:
    try:
        await server.post(path, {})
    except ServerUnavailable:
        return  # a restarted server is awake
    except (RequestFailed, InvalidAnswer) as error:
        raise ServerFailed(
            f"{server.url} cannot {path.strip('/').partition('?')[0]}: {error}; start vLLM with --enable-sleep-mode "
            "and VLLM_SERVER_DEV_MODE=1 in its environment, or type: sleep = false"
        ) from error
