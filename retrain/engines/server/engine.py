"""Sampling from servers: ``[inference] engine = "vllm" | "sglang" | "openai"``.

One request for each completion, with a seed of its own from the named stream, so that what is sampled depends neither
on the batch nor on the address. Everything happens in the event loop of one thread; ``sample`` may be called from
several threads at once. An adapter is loaded at an address before the first request there that names it, again when
the server has forgotten it, and unloaded once it is retired and no request in flight names it.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from retrain.engines.protocol import EngineState, Finished
from retrain.engines.server.adapters import AdapterStore, LeftOver, Published
from retrain.engines.server.checks import action_of
from retrain.engines.server.client import Away, Refused, Server, Unknown, Unreached
from retrain.engines.server.dialects import Ask, Faulty
from retrain.engines.server.fleet import Fleet
from retrain.engines.server.pool import WAITS, Pool, Waits
from retrain.engines.slots import check_lengths
from retrain.errors import RunFailed, ServerFailed, UsageError
from retrain.policy.local import LocalSnapshot
from retrain.policy.protocol import PolicySnapshot
from retrain.rng import torch_seed
from retrain.tokenizer import Tokenizer
from retrain.types import Action, PolicyRef, SampleRequest

ATTEMPTS = 5
"""Times that one completion is asked for before the step is given up; waiting for a server that is away does not
count."""
WAKING_S = 20.0  # Seconds for waking servers at the end
RANK_HINT = "--max-lora-rank"  # vLLM's option for the largest rank, as it appears in the error message
Result = TypeVar("Result")


@dataclass(frozen=True)
class Vocabulary:
    """What an answer is checked against: token ids below ``size``, ends by ``end_ids``, at most ``context`` tokens with
    the prompt."""

    tokenizer: Tokenizer
    size: int
    end_ids: tuple[int, ...]
    context: int


class Trial(Protocol):
    """What a server is asked whose right answers are known: each request once. ``judge`` raises ModelError."""

    @property
    def requests(self) -> Sequence[SampleRequest]: ...

    @property
    def weights(self) -> LocalSnapshot: ...

    def judge(self, url: str, answers: Sequence[Action]) -> None: ...


@dataclass
class _Call:
    """One call of ``sample``: its requests, and the seconds that it has spent on loading adapters."""

    requests: Sequence[SampleRequest]
    used: Mapping[PolicyRef, Published]
    gate: asyncio.Semaphore | None
    at: Server | None
    loading_s: float = 0.0


class ServerEngine:
    """Samples with servers that hold the base ``model`` (as the configuration names it). Several versions of a run may
    be published at a time. ``tell(text, level)`` hears of servers that go and come back. ``fleet``: somebody keeps the
    servers alive, and says where they are; ``at`` makes the server of an address.

    ``close`` ends it, and lets go of the fleet.
    """

    gives_entropy = False
    exact = False

    def __init__(
        self,
        model: str,
        urls: Sequence[str],
        at: Callable[[str], Server],
        store: AdapterStore,
        vocabulary: Vocabulary,
        tell: Callable[[str, str], None] = lambda text, level: None,
        patience_s: float = 600.0,
        fleet: Fleet | None = None,
        sleeps: bool = False,
        waits: Waits = WAITS,
    ):
        self.model, self.store, self.vocabulary, self.fleet = model, store, vocabulary, fleet
        self.tell, self.sleeps, self.patience_s, self.waits = tell, sleeps, patience_s, waits
        self.beside = not sleeps  # servers that free their GPU for us take turns with us
        gave_up = (lambda: fleet.gave_up) if fleet is not None else (lambda: "")
        self.pool = Pool(urls, at, model, patience_s, lambda text, level: self.tell(text, level), gave_up, waits)
        self._published: dict[PolicyRef, Published] = {}
        self._dropping: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._calls: set[Future[Any]] = set()
        self._sleeping, self._sampling = False, 0
        self._turn = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        self._closed = False

    # -- beginning and end --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Wait until the servers are there, and learn how they call the base. Raises UsageError when none answers,
        ModelError when one does not hold a model of this tokenizer's context."""
        if self.fleet is not None:
            self.fleet.wait(self.patience_s)
            if not self.fleet.urls and not self.fleet.gave_up:
                raise UsageError(
                    f"[inference] launch: no server could be started within {self.patience_s:g} s (patience_s)"
                )
            self.fleet.listen(self._follow)  # first: what is told between the two would be missed
            self._run(self.pool.follow(self.fleet.urls))
        self._run(self._open())

    def _follow(self, urls: Sequence[str]) -> None:
        """The fleet has other addresses now; called from any thread."""
        with self._lock:
            if not self._closed:
                asyncio.run_coroutine_threadsafe(self.pool.follow(urls), self._loop)

    def close(self) -> None:
        """Take all adapters away, and end the server that was launched. What is being sampled is given up."""
        with self._lock:  # from here on nothing is given to the loop but its end
            if self._closed:
                return
            self._closed = True
        self.give_up()
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self.fleet is not None:
                self.fleet.close()
            self.store.close()

    def give_up(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work in the loop's thread and wait for it; whatever ends the waiting ends the work."""
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError("the engine is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._calls.discard(future)

    async def _open(self) -> None:
        patience = self.patience_s if self.fleet is not None else self.waits.start_s
        waited = 0.0
        await self.pool.open()
        left_over = await self._left_over()
        while True:
            servers = self.pool.servers
            there = await asyncio.gather(*(server.check() for server in servers))
            if (there and all(there)) or (any(there) and waited > self.waits.start_s):
                break
            if self.fleet is not None and self.fleet.gave_up:
                raise UsageError(f"[inference] launch: {self.fleet.gave_up}")
            if waited > patience:
                reasons = "\n".join(f"[inference] url {each.url}: {each.reason}" for each in servers)
                raise UsageError(f"no server answers after {patience:g} s:\n{reasons}")
            await asyncio.sleep(0.5)
            waited += 0.5
        for server, answers in zip(servers, there, strict=True):
            if not answers:
                self.pool.leave_out(server, server.reason)
                continue
            try:
                await server.look()
            except (Away, Unknown, Refused) as error:
                raise UsageError(f"[inference] url {server.url}: /v1/models: {error}") from error
        with suppress(TimeoutError):  # whoever is late is told when it is closed
            async with asyncio.timeout(self.waits.closing_s):
                there = [server.take_away() for server in self.pool.servers if server.alive]
                await asyncio.gather(*there, return_exceptions=True)
        for found in left_over:
            await asyncio.to_thread(found.remove)

    async def _left_over(self) -> list[LeftOver]:
        """What processes have left that were killed; servers are to let go of it."""
        left_over = await asyncio.to_thread(self.store.left_over)
        for name in (name for found in left_over for name in found.names):
            for server in self.pool.servers:
                server.leave(name)
        return left_over

    async def _close(self) -> None:
        try:
            with suppress(TimeoutError, ServerFailed):
                async with asyncio.timeout(WAKING_S):
                    await self._wake()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.waits.closing_s):
                    dropping = [asyncio.wrap_future(each) for each in self._dropping]
                    left_over = await self._left_over()
                    leaving = [server.unload_all() for server in self.pool.servers]
                    await asyncio.gather(*dropping, *leaving, return_exceptions=True)
                    for found in left_over:
                        await asyncio.to_thread(found.remove)
        finally:
            await self.pool.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    # -- weights ------------------------------------------------------------------------------------------------

    @property
    def sync_seconds(self) -> float | None:
        """Seconds in which the last ``sample`` of this thread waited for servers to load adapters."""
        return getattr(self._own, "loading_s", None)

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        """See ``Engine.publish``. Servers are told when they are first asked to sample with them."""
        if not isinstance(weights, LocalSnapshot):
            raise TypeError(f"servers sample with LoRA adapters, not with {type(weights).__name__}")
        with self._lock:
            before = self._published.get(ref)
            self._published[ref] = self.store.published(ref, weights)
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

    def _retire(self, published: Published) -> None:
        published.retired = True
        with self._lock:
            if self._closed:  # which takes away everything
                return
            dropping = asyncio.run_coroutine_threadsafe(self._drop_if_unused(published), self._loop)
            self._dropping = {each for each in self._dropping if not each.done()} | {dropping}

    async def _drop_if_unused(self, published: Published) -> None:
        if published.retired and not published.users:
            await self._drop(published)

    async def _drop(self, published: Published) -> None:
        await asyncio.gather(*(server.unload(published.name) for server in self.pool.servers))
        await asyncio.to_thread(self.store.remove, published.name)

    # -- state --------------------------------------------------------------------------------------------------

    def state(self) -> EngineState:
        return {}

    def restore(self, state: EngineState) -> None:
        """Do nothing: there is no state."""

    def forget_sequences(self) -> None:
        """See ``Engine.forget_sequences``; a server that shares its GPU sleeps until it is asked again."""
        self._run(self._rest())

    async def _rest(self) -> None:
        self.pool.forget_homes()
        async with self._turn:
            if self.sleeps and not self._sleeping and not self._sampling:
                for server in self.pool.servers:
                    await _told(server, "/sleep?level=1")
                self._sleeping = True

    async def _wake(self) -> None:
        async with self._turn:
            if self._sleeping:
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # the server takes back what it had left to us
                for server in self.pool.servers:
                    await _told(server, "/wake_up")
                self._sleeping = False

    # -- sampling -----------------------------------------------------------------------------------------------

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        max_rows: int | None = None,
        finished: Finished | None = None,
        at: Server | None = None,
    ) -> list[list[Action]]:
        """See ``Engine.sample``; all of it is sampled by the server ``at`` where one is given. Raises ModelError when a
        prompt and its completion exceed the model's context, RunFailed for weights that were not published,
        ServerFailed when servers stay away or stay wrong."""
        contexts = [server.context for server in self.pool.servers if server.context]
        holds = min([self.vocabulary.context, *contexts])
        check_lengths(requests, holds, "the server" if holds < self.vocabulary.context else self.model)
        with self._lock:
            used = {ref: self._weights(ref) for ref in dict.fromkeys(each.policy for each in requests)}
            for published in used.values():
                published.users += 1
        call = _Call(requests, used, asyncio.Semaphore(max_rows) if max_rows else None, at)
        try:
            return self._run(self._sample(call, finished))
        finally:
            self._own.loading_s = call.loading_s
            with self._lock:
                for published in used.values():
                    published.users -= 1
            for published in used.values():
                if published.retired:
                    self._retire(published)

    def _weights(self, ref: PolicyRef) -> Published:
        if ref not in self._published:
            known = sorted(each.version for each in self._published if each.run_id == ref.run_id)
            raise RunFailed(f"no weights were published as version {ref.version} of {ref.run_id}; there are {known}")
        return self._published[ref]

    async def _sample(self, call: _Call, finished: Finished | None) -> list[list[Action]]:
        done: list[list[Action | None]] = [[None] * request.samples for request in call.requests]
        left = [request.samples for request in call.requests]
        groups: list[list[Action]] = [[] for _ in call.requests]

        async def row(index: int, sample: int) -> None:
            request = call.requests[index]
            if call.gate is None:
                done[index][sample] = await self._completion(call, request, sample)
            else:
                async with call.gate:
                    done[index][sample] = await self._completion(call, request, sample)
            left[index] -= 1
            if not left[index]:
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
            except BaseException:
                for each in rows:
                    each.cancel()
                await asyncio.gather(*rows, return_exceptions=True)
                raise
        finally:
            self._sampling -= 1
        return groups

    async def _completion(self, call: _Call, request: SampleRequest, sample: int) -> Action:
        """One completion, asked for until it is right. Raises ServerFailed after the last attempt, or when it is
        refused."""
        published, faults, losses = call.used[request.policy], [], 0
        stream = request.streams[sample] if request.streams else (*request.stream, sample)
        seed = torch_seed(*stream, *([request.drawn] if request.drawn else []))
        while len(faults) < ATTEMPTS:
            if faults:
                await asyncio.sleep(self.waits.pause_s * 2 ** (len(faults) - 1))
            server = await self.pool.choose(_rollouts(request), call.at)
            server.waiting += 1
            try:
                async with server.slots:
                    loading_s = await server.require(published)
                    call.loading_s += loading_s
                    ask = Ask(request, published.name, server.base, seed, self.vocabulary.end_ids)
                    answer = await server.ask(ask)
                return action_of(ask, answer, self.vocabulary.size, self.vocabulary.tokenizer)
            except Unknown as unknown:
                server.forgot(published.name)
                faults.append(f"{server.url} does not know {published.name}: {unknown}")
            except Away as away:
                await self.pool.doubt(server, str(away))
                if server.alive:  # it is well, but not with this request
                    faults.append(f"{server.url}: {away}")
                elif not isinstance(away, Unreached):
                    losses += 1
                    if losses == self.waits.losses:
                        raise ServerFailed(
                            f"a completion after {len(request.prompt_ids)} tokens was under way {losses} times at a "
                            f"server that then went away, last {server.url}: {away}"
                        ) from away
            except Faulty as faulty:
                faults.append(f"{server.url}: {faulty}")
            except Refused as refused:
                raise ServerFailed(f"{server.url} refuses: {refused}{_hint(str(refused))}") from refused
            finally:
                server.waiting -= 1
        again = f" (and before: {'; '.join(dict.fromkeys(faults[:-1]))})" if set(faults[:-1]) - {faults[-1]} else ""
        last = f"{faults[-1]}{_hint(faults[-1])}"
        raise ServerFailed(f"a completion was asked for {ATTEMPTS} times, the last answer: {last}{again}")

    def wait_for_one(self) -> None:
        """Until a server is there. Raises ServerFailed when none comes."""
        self._run(self.pool.someone())

    # -- trials -------------------------------------------------------------------------------------------------

    def try_with(self, trials: Sequence[Trial]) -> None:
        """From now on, a server that comes back or joins late is used only after these have found nothing."""
        self._loop.call_soon_threadsafe(setattr, self.pool, "trials", [partial(self._tried, each) for each in trials])

    async def _tried(self, trial: Trial, server: Server) -> None:
        """Ask a server what a trial asks. Raises Away, and ModelError when the answer is another than it should be."""
        answers = []
        published = self.store.published(trial.requests[0].policy, trial.weights)
        try:
            await server.require(published)
            for request in trial.requests:
                seed = torch_seed(*request.stream)
                ask = Ask(request, published.name, server.base, seed, self.vocabulary.end_ids)
                answer = await server.ask(ask)
                answers.append(action_of(ask, answer, self.vocabulary.size, self.vocabulary.tokenizer))
        finally:
            await server.unload(published.name)  # done by the pool, before the server is used
            await asyncio.to_thread(self.store.remove, published.name)
        trial.judge(server.url, answers)


def _rollouts(request: SampleRequest) -> Hashable:
    """What all requests of one group's rollouts have in common, of the first turn and of later ones."""
    return request.sequences[0][:-1] if request.sequences else request.stream


def _hint(refused: str) -> str:
    words = refused.lower()
    if "401" in words or "403" in words:
        return "; name the variable with its key: [inference] api_key_env"
    if "no adapter found" in words or "holds no peft adapter" in words:
        return "; it does not see that path: give [inference] adapter_dir a directory that servers see too"
    if "cannot load the adapter" in words:
        words += " lora support"  # the route itself is not there
    if "rank" in words:
        return f"; start the server with a {RANK_HINT} that holds [model] lora_rank"
    if "lora" in words and ("enable" in words or "not allowed" in words or "support" in words):
        return (
            "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, SGLang with "
            "--enable-lora"
        )
    return ""


async def _told(server: Server, path: str) -> None:
    """Put a server to sleep or wake it. Raises ServerFailed when it cannot."""
    try:
        await server.post(path, {})
    except Away:
        return  # one that is started anew is awake
    except (Unknown, Refused, Faulty) as error:
        raise ServerFailed(
            f"{server.url} cannot {path.strip('/').partition('?')[0]}: {error}; start vLLM with --enable-sleep-mode "
            "and VLLM_SERVER_DEV_MODE=1 in its environment, or type: sleep = false"
        ) from error
