"""Continuous batching: the event loop selects the generations to decode, and one thread decodes them in short pieces.

A piece is one call of ``LocalEngine.sample``, which samples up to ``PIECE_TOKENS`` tokens for all running generations,
whatever their adapter and sampling. Between pieces, waiting generations are admitted, ended and cancelled ones are
removed, and new tokens are delivered. The engine keeps its caches and each generation its random stream between pieces,
so that the division into pieces does not change what is sampled.
"""

import asyncio
import itertools
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TypeVar

from retrain.engines.local import LocalEngine
from retrain.policy.lora import LoraWeights
from retrain.serving.schema import SamplingBody, ServingError
from retrain.tokenizer import Tokenizer
from retrain.types import Action, PolicyRef, SampleRequest

T = TypeVar("T")
# Tokens between two checks for new generations: on a CPU as many as a small model decodes in one call, on a GPU enough
# to amortise capturing the CUDA graph of a step again
PIECE_TOKENS = {"cpu": 16, "cuda": 64}
# Most rows of a decode batch per generation in it, padding included. A batch has one lane for each adapter, and all
# lanes have as many rows as the fullest one. Adapters that would exceed the limit are decoded in a separate batch.
LANES_WASTE = 2.0
BROKEN = "�"  # Replacement character, for incomplete bytes


@dataclass(frozen=True, eq=False)
class ServedWeights:
    """Weights served under a name. ``ref`` is new for every load, even under the same name. ``parent`` is the base's
    name, None for the base itself. ``root`` is the adapter's directory, "upload", or the base's name."""

    name: str
    ref: PolicyRef
    weights: LoraWeights
    root: str
    parent: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(eq=False)
class Piece:
    """Tokens of a generation since the last piece or, in ``GenerationState.total``, all its tokens.

    ``begin`` is the number of tokens before them. ``text`` is text that can no longer change; the reader sets it with
    ``GenerationState.new_text``. ``finish_reason`` is None while the generation continues. ``stop_reason`` is the stop
    text or token id that ended it.
    """

    begin: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(eq=False)
class GenerationState:
    """One sequence to sample after ``prompt_ids`` with the sampling and stop conditions of ``body``. ``stream`` is the
    key of its random numbers, ``deadline`` a time of ``time.monotonic``. ``total`` has all tokens so far; the queue
    ``pieces`` gets each new piece, or the error that ended the generation."""

    index: int
    served: ServedWeights
    prompt_ids: tuple[int, ...]
    body: SamplingBody
    max_tokens: int
    stream: tuple[int | str, ...]
    tokenizer: Tokenizer
    pieces: "asyncio.Queue[tuple[GenerationState, Piece | ServingError]]"
    deadline: float = float("inf")
    is_cancelled: bool = False
    total: Piece = field(default_factory=Piece)
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def remaining_tokens(self) -> int:
        return self.max_tokens - len(self.total.token_ids)

    def add(self, action: Action, tokenizer: Tokenizer) -> Piece:
        """Append the sampled tokens, truncated at a stop condition, and return them as a piece without text.
        ``tokenizer`` is the calling thread's."""
        total, body, before = self.total, self.body, len(self.total.token_ids)
        total.token_ids += action.token_ids
        stop = next((i for i in range(before, len(total.token_ids)) if total.token_ids[i] in body.stop_token_ids), None)
        if stop is not None:
            total.stop_reason = total.token_ids[stop]
            del total.token_ids[stop + 1 :]
        if body.stop:
            self._apply_stop_texts(before, tokenizer)
        has_ended = action.stop_reason == "stop" and not body.ignore_eos
        if has_ended or total.stop_reason is not None:
            total.finish_reason = "stop"
        elif self.remaining_tokens <= 0:
            total.finish_reason = "length"
        token_ids = total.token_ids[before:]
        logprobs = action.logprobs_T[: len(token_ids)].tolist()
        total.logprobs += logprobs
        return Piece(before, token_ids, logprobs, "", total.finish_reason, total.stop_reason)

    def deliver(self, piece: Piece | ServingError) -> None:
        self.pieces.put_nowait((self, piece))

    def _apply_stop_texts(self, before: int, tokenizer: Tokenizer) -> None:
        """Truncate after the token that completes the first stop text. The first ``before`` tokens complete none."""
        total = self.total

        def matches(end: int) -> list[tuple[int, str]]:
            text = tokenizer.decode(total.token_ids[:end])
            return [(text.find(stop), stop) for stop in self.body.stop if stop in text]

        if not matches(len(total.token_ids)):
            return
        end = next(end for end in range(before + 1, len(total.token_ids) + 1) if matches(end))
        total.stop_reason = min(matches(end), key=itemgetter(0))[1]
        del total.token_ids[end:]

    def new_text(self, piece: Piece) -> str:
        """Return the text that a piece adds, and append it to ``total``. Call it for pieces in their order. Text that
        may be the beginning of a stop text, and an incomplete character, are held back until the generation ends."""
        total, keeps_stop = self.total, self.body.include_stop_str_in_output
        hides_last = isinstance(piece.stop_reason, int) and not keeps_stop
        text = self.tokenizer.decode(total.token_ids[: piece.begin + len(piece.token_ids) - hides_last])
        end = len(text)
        if piece.finish_reason is None:
            held = max((len(stop) - 1 for stop in self.body.stop), default=0)
            end = max(len(total.text), len(text.rstrip(BROKEN)) - held)
        elif isinstance(piece.stop_reason, str):
            end = text.find(piece.stop_reason) + keeps_stop * len(piece.stop_reason)
        new = text[len(total.text) : end]
        total.text += new
        return new


class Batcher:
    """Decodes generations, at most ``max_rows`` at once. Call all methods but ``call`` on the event loop's thread."""

    def __init__(self, engine: LocalEngine, max_waiting: int, max_rows: int):
        self.engine, self.max_waiting, self.max_rows = engine, max_waiting, max_rows
        # Only the fast path keeps cache entries between pieces; without it they would have to be computed again.
        usual = PIECE_TOKENS.get(engine.base.device.type, PIECE_TOKENS["cuda"])
        self.piece_tokens = usual if engine.fast else 1 << 30
        engine.keeps_blocks = True
        self.failure = ""  # Error that ended decoding, if any
        self._waiting: deque[GenerationState] = deque()
        self._active: list[GenerationState] = []
        self._retired: list[PolicyRef] = []
        self._thread = ThreadPoolExecutor(1, "engine")
        self._task: asyncio.Task[None] | None = None

    @property
    def load(self) -> tuple[int, int]:
        return len(self._active), len(self._waiting)

    def stop(self) -> None:
        self._thread.shutdown()

    def submit(self, generations: Sequence[GenerationState]) -> None:
        """Queue all generations or none. Raises ServingError: 400 if they are more than the queue can hold, 503 if the
        queue is full or decoding has failed."""
        waiting, limit = len(self._waiting), self.max_waiting
        if len(generations) > limit:
            raise ServingError(400, f"{len(generations)} completions in one request; this server takes {limit}", "n")
        if self.failure:
            raise ServingError(503, "the server is stopping", retry_after=5)
        if waiting + len(generations) > limit:
            raise ServingError(503, f"{waiting} completions are waiting: try again later", retry_after=1)
        self._waiting.extend(generations)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def retire(self, ref: PolicyRef) -> None:
        """Free the weights of ``ref`` once no generation uses them."""
        self._retired.append(ref)
        self._free_retired()

    def call(self, task: Callable[[], T]) -> Future[T]:
        """Run ``task`` on the engine's thread between two pieces."""
        return self._thread.submit(task)

    async def _run(self) -> None:
        """Decode until no generation is left. An error fails all generations and is kept as ``failure``."""
        try:
            while self._active or self._waiting:
                self._drop_overdue()
                while self._waiting and len(self._active) < self.max_rows:
                    self._active.append(self._waiting.popleft())
                for batch in self._batches():
                    await self._decode(batch)
                self._free_retired()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            self._fail([*self._active, *self._waiting], 500, "the engine has failed")
            self._waiting.clear()

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        gone = {each for each in (*self._active, *self._waiting) if each.is_cancelled or each.deadline < now}
        self._waiting = deque(each for each in self._waiting if each not in gone)
        self._fail(gone, 504, "the completion has taken too long")

    def _fail(self, generations: Iterable[GenerationState], status: int, message: str) -> None:
        for generation in generations:
            generation.deliver(ServingError(status, message))
        self._remove(generations)

    def _remove(self, generations: Iterable[GenerationState]) -> None:
        removed = set(generations)
        self._active = [each for each in self._active if each not in removed]
        for each in removed:
            self.engine.sequence_cache.drop(each.served.ref, (each.number,))

    def _free_retired(self) -> None:
        used = {each.served.ref for each in (*self._active, *self._waiting)}
        for ref in [ref for ref in self._retired if ref not in used]:
            self._retired.remove(ref)
            self.call(lambda ref=ref: self.engine.retire(ref))

    async def _decode(self, batch: list[GenerationState]) -> None:
        try:
            requests = list(self._requests(batch))
            pieces = await asyncio.wrap_future(self.call(lambda: self._sample(requests)))
        except Exception:
            traceback.print_exc()
            self._fail(batch, 500, "sampling this batch failed: see the server's log")
            return
        for generation, piece in pieces:
            generation.deliver(piece)
        self._remove(each for each, piece in pieces if isinstance(piece, ServingError) or piece.finish_reason)

    def _sample(
        self, requests: Iterable[tuple[SampleRequest, list[GenerationState]]]
    ) -> list[tuple[GenerationState, Piece | ServingError]]:
        # On the engine's thread: finding stop texts decodes all tokens, which would block the event loop.
        answers = self.engine.sample([request for request, _ in requests])
        pieces: list[tuple[GenerationState, Piece | ServingError]] = []
        for (_, generations), actions in zip(requests, answers, strict=True):
            for generation, action in zip(generations, actions, strict=True):
                try:
                    pieces.append((generation, generation.add(action, self.engine.base.text)))
                except Exception:  # affects this generation only
                    traceback.print_exc()
                    pieces.append((generation, ServingError(500, "decoding this completion failed: see the log")))
        return pieces

    def _batches(self) -> list[list[GenerationState]]:
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
        """Yield (request, its generations). New generations with equal prompt, weights and sampling share a request."""
        alike: dict[object, tuple[SampleRequest, list[GenerationState]]] = {}
        for generation in batch:
            drawn, limit = generation.total.token_ids, min(generation.remaining_tokens, self.piece_tokens)
            sampling = {name: getattr(generation.body, name) for name in ("temperature", "top_p", "top_k", "min_p")}
            tokens = (*generation.prompt_ids, *drawn)
            request = SampleRequest(generation.served.ref, tokens, 1, limit, stream=(), drawn=len(drawn), **sampling)
            alike.setdefault(generation if drawn else request, (request, []))[1].append(generation)
        for request, members in alike.values():
            continues = any(request.max_tokens < each.remaining_tokens or each.body.ignore_eos for each in members)
            sequences = tuple((each.number,) for each in members) if continues and self.engine.fast else ()
            streams = tuple(each.stream for each in members)
            yield replace(request, samples=len(members), sequences=sequences, streams=streams), members
