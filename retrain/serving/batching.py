"""Continuous batching: one thread owns the engine and decodes all generations in short pieces.

A piece is one call of ``LocalEngine.sample`` with ``PIECE_TOKENS`` tokens for all running generations, whatever their
adapter and sampling. Between pieces, waiting generations are admitted, ended and cancelled ones removed, and new tokens
delivered. The engine keeps its caches, and each generation its random stream, so that pieces do not change what is
sampled.
"""

import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from retrain.engines.local import LocalEngine
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import LoraWeights
from retrain.serving.adapters import ServedWeights
from retrain.serving.refusal import ServingError
from retrain.types import Action, PolicyRef, SampleRequest

T = TypeVar("T")
PIECE_TOKENS = {"cpu": 16, "cuda": 64}
"""Tokens between two checks for arrivals: on a CPU as many as a small model decodes in one call, on a GPU enough to
amortise capturing the step again."""
MAX_ROWS = 256  # Most generations decoded at once; the others wait
LANES_WASTE = 2.0
"""Lanes of a decode batch have as many rows as the busiest one; adapters are decoded in separate batches if padding
would raise the rows to this multiple."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a generation, and its stop conditions besides the model's end tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    @property
    def truncates(self) -> bool:
        """True if tokens are drawn from less than the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(eq=False)
class Piece:
    """Tokens of a generation since the last piece, or all of them. ``finish_reason`` is None while it continues;
    ``failed`` is the error that ended it. ``stop_reason`` is the requested stop text or token that ended it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    failed: ServingError | None = None

    def add(self, piece: "Piece") -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


@dataclass(eq=False)
class GenerationState:
    """One sequence to sample after ``prompt_ids``; ``stream`` identifies its random numbers. The engine's thread calls
    ``deliver`` with every piece; the last one has a ``finish_reason`` or has failed. ``deadline`` refers to
    ``time.monotonic``."""

    served: ServedWeights
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: tuple[int | str, ...]
    deliver: Callable[[Piece], None]
    deadline: float = float("inf")
    cancelled: bool = False
    token_ids: list[int] = field(default_factory=list)
    number: int = field(default_factory=itertools.count().__next__)

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def remaining_tokens(self) -> int:
        return self.sampling.max_tokens - len(self.token_ids)


class Batcher:
    """Thread that owns the engine; at most ``max_waiting`` generations wait."""

    def __init__(self, engine: LocalEngine, max_waiting: int, max_rows: int = MAX_ROWS):
        self.engine, self.max_waiting, self.max_rows = engine, max_waiting, max_rows
        # Entries that are dropped between pieces would have to be computed again.
        usual = PIECE_TOKENS.get(engine.base.device.type, PIECE_TOKENS["cuda"])
        self.piece_tokens = usual if engine.fast else 1 << 30
        engine.keeps_blocks = True
        self.failure: str = ""  # Error that ended the engine's thread, if any
        self._waiting: deque[GenerationState] = deque()
        self._active: list[GenerationState] = []
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._retired: list[PolicyRef] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish all generations, then stop."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def load(self) -> tuple[int, int]:
        return len(self._active), len(self._waiting)

    def submit(self, generations: Sequence[GenerationState]) -> None:
        """Queue generations, all or none. Raises ServingError: 400 if they never fit, 503 when full or stopping."""
        if len(generations) > self.max_waiting:
            raise ServingError(
                400, f"{len(generations)} completions in one request; this server takes {self.max_waiting}", "n"
            )
        with self._changed:
            if self._stopping or self.failure:
                raise ServingError(503, "the server is stopping", retry_after=5)
            if len(self._waiting) + len(generations) > self.max_waiting:
                raise ServingError(503, f"{len(self._waiting)} completions are waiting: try again later", retry_after=1)
            self._waiting.extend(generations)
            self._changed.notify()

    def publish(self, ref: PolicyRef, weights: LoraWeights) -> Future[None]:
        return self.call(lambda: self.engine.publish(ref, LocalSnapshot(weights)))

    def retire(self, ref: PolicyRef) -> None:
        """Free weights once no generation uses them."""
        with self._changed:
            self._retired.append(ref)
            self._changed.notify()

    def call(self, task: Callable[[], T]) -> Future[T]:
        """Run ``task`` on the engine's thread between two pieces."""
        future: Future[T] = Future()
        with self._changed:
            if self._stopping or self.failure:
                raise ServingError(503, "the server is stopping", retry_after=5)
            self._tasks.append((task, future))
            self._changed.notify()
        return future

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._admit():
                self._drop()
                self._withdraw()
                if self._active:
                    self._draw()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            with self._changed:
                unfinished = [*self._active, *self._waiting]
                tasks = list(self._tasks)
                self._active, self._waiting, self._tasks = [], deque(), deque()
            _fail(unfinished, 500, "the engine has failed")
            for _, future in tasks:
                if future.set_running_or_notify_cancel():
                    future.set_exception(ServingError(500, "the engine has failed"))

    def _admit(self) -> bool:
        """Wait for work, run the tasks and admit generations. Return False when stopped."""
        with self._changed:
            while not (self._active or self._waiting or self._tasks or self._retired):
                if self._stopping:
                    return False
                self._changed.wait()
            tasks = list(self._tasks)
            self._tasks.clear()
            while self._waiting and len(self._active) < self.max_rows:
                self._active.append(self._waiting.popleft())
        for task, future in tasks:
            if not future.set_running_or_notify_cancel():  # the caller has cancelled; after this call it cannot
                continue
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)
        return True

    def _drop(self) -> None:
        """Drop generations that were cancelled or have passed their deadline."""
        now = time.monotonic()
        with self._changed:  # includes generations that have not begun
            gone = {each for each in (*self._active, *self._waiting) if each.cancelled or each.deadline < now}
            self._waiting = deque(each for each in self._waiting if each not in gone)
        _fail((each for each in gone if not each.cancelled), 504, "the completion has taken too long")
        self._leave(gone)

    def _leave(self, gone: Iterable[GenerationState]) -> None:
        removed = set(gone)
        self._active = [each for each in self._active if each not in removed]
        for each in removed:
            self.engine.sequence_cache.drop(each.served.ref, (each.number,))

    def _withdraw(self) -> None:
        with self._changed:
            used = {each.served.ref for each in (*self._active, *self._waiting)}
            done = [ref for ref in self._retired if ref not in used]
            self._retired = [ref for ref in self._retired if ref in used]
        for ref in done:
            self.engine.retire(ref)

    def _draw(self) -> None:
        for batch in self._batches():
            try:
                requests = list(self._requests(batch))
                answers = self.engine.sample([request for request, _ in requests])
            except Exception:
                traceback.print_exc()
                _fail(batch, 500, "sampling this batch failed: see the server's log")
                self._leave(batch)
                continue
            ended = []
            for (_, generations), actions in zip(requests, answers, strict=True):
                for generation, action in zip(generations, actions, strict=True):
                    try:
                        piece = self._piece(generation, action)
                    except Exception:  # affects this generation only
                        traceback.print_exc()
                        _fail([generation], 500, "decoding this completion failed: see the log")
                        ended.append(generation)
                        continue
                    if piece.finish_reason is not None:
                        ended.append(generation)
                    generation.deliver(piece)
            self._leave(ended)

    def _batches(self) -> list[list[GenerationState]]:
        """Return the running generations in batches whose lanes are about equally full."""
        lanes: dict[PolicyRef, list[GenerationState]] = {}
        for generation in self._active:
            lanes.setdefault(generation.served.ref, []).append(generation)
        batches: list[list[GenerationState]] = []
        busiest = count = 0
        for members in sorted(lanes.values(), key=len, reverse=True):
            if not batches or busiest * (count + 1) > LANES_WASTE * (len(batches[-1]) + len(members)):
                batches.append([])
                busiest, count = len(members), 0
            batches[-1] += members
            count += 1
        return batches

    def _requests(self, batch: Sequence[GenerationState]) -> Iterable[tuple[SampleRequest, list[GenerationState]]]:
        """Yield the engine's requests; generations with equal prompts and sampling share one."""
        alike: dict[Any, list[GenerationState]] = {}
        for generation in batch:
            sampling = generation.sampling
            limit = min(generation.remaining_tokens, self.piece_tokens)
            distribution = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
            begins = (generation.served.ref, generation.prompt_ids, limit, distribution)
            alike.setdefault(generation if generation.token_ids else begins, []).append(generation)
        for generations in alike.values():
            first = generations[0]
            sampling, limit = first.sampling, min(first.remaining_tokens, self.piece_tokens)
            go_on = any(limit < each.remaining_tokens or each.sampling.ignore_eos for each in generations)
            sequences = tuple((each.number,) for each in generations) if go_on and self.engine.fast else ()
            request = SampleRequest(
                first.served.ref,
                (*first.prompt_ids, *first.token_ids),
                len(generations),
                limit,
                sampling.temperature,
                (),
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                sequences=sequences,
                streams=tuple(each.stream for each in generations),
                drawn=len(first.token_ids),
            )
            yield request, generations

    def _piece(self, generation: GenerationState, action: Action) -> Piece:
        """Append an action to its generation and return the piece, truncated where the generation ends."""
        sampling, before = generation.sampling, len(generation.token_ids)
        generation.token_ids += action.token_ids
        reason: str | None = None
        stop: int | str | None = None
        named = next((i for i, token in enumerate(action.token_ids) if token in sampling.stop_token_ids), None)
        if named is not None:
            del generation.token_ids[before + named + 1 :]
            reason, stop = "stop", action.token_ids[named]
        if sampling.stops and (found := self._stopped(generation, before, sampling.stops)) is not None:
            reason, stop = "stop", found
        if reason is None and action.stop_reason == "stop" and not sampling.ignore_eos:
            reason = "stop"
        if reason is None and generation.remaining_tokens <= 0:
            reason = "length"
        new = generation.token_ids[before:]
        return Piece(new, action.logprobs_T[: len(new)].tolist(), reason, stop)

    def _stopped(self, generation: GenerationState, before: int, stops: Sequence[str]) -> str | None:
        """Return the stop that the new tokens complete, if any, and remove the tokens after it."""
        decode = self.engine.base.text.decode
        text = decode(generation.token_ids)
        if not any(stop in text for stop in stops):
            return None
        for end in range(before + 1, len(generation.token_ids) + 1):
            text = decode(generation.token_ids[:end])
            matches = [(text.find(stop), stop) for stop in stops if stop in text]
            if matches:
                del generation.token_ids[end:]
                return min(matches, key=lambda each: each[0])[1]
        return None


def _fail(generations: Iterable[GenerationState], status: int, message: str) -> None:
    """Deliver an error as the last piece of the generations."""
    for generation in generations:
        generation.deliver(Piece(failed=ServingError(status, message)))
