"""Decode batches: the sequences of a batch with their settings and results (``BatchSequences``), and the batch of a
dense decoder (``SlotBatch``: lanes × slots), in which a waiting sequence takes the slot of a finished one.

Each lane owns an equal consecutive share of the rows, so that the LoRA product of all lanes is one batched matrix
product. A prompt is prefilled once for all of its samples that start together. When no sequence waits, or a lane has
no sequences left, the batch is compacted: lanes without work are removed and the others share its rows.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from retrain.engines.dense import Blocks, CachedSequence, DenseDecoder, KVCache, SequenceCache
from retrain.engines.graphs import StepGraphs
from retrain.engines.protocol import Finished
from retrain.engines.step import Rows, SampledTokens, StepPlan, draw_tokens, empty_record, select_rows, supports_of
from retrain.errors import ModelError, RunFailed
from retrain.policy.base import BaseModel
from retrain.rng import uniforms
from retrain.types import Action, PolicyRef, SampleRequest

# Share of the rows that must be idle before waiting sequences enter: a prefill costs as much as several steps
REFILL_SHARE = 0.125
# Steps per call of a small model; the call returns early when a sequence ends. A large model takes one step per call,
# so that Python handles signals in between
BURST = 16
IDLE_SHARE = 0.25  # Least share of the rows that must be freed to shrink the batch, which copies the cache

T = TypeVar("T")


@dataclass(frozen=True)
class LaneRequest(SampleRequest):
    lane: int = 0

    def uniforms_T(self, sample: int) -> np.ndarray:
        """Return the uniform numbers from which this sample's tokens are drawn, float64 [max_tokens]."""
        stream = self.streams[sample] if self.streams else (*self.stream, sample)
        return uniforms(self.drawn + self.max_tokens, *stream)[self.drawn :]

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class SampleIndex:
    request: int
    sample: int


def lanes_of(requests: Sequence[LaneRequest], indices: Sequence[SampleIndex]) -> list[int]:
    return sorted({requests[index.request].lane for index in indices})


def check_lengths(requests: Sequence[SampleRequest], context: int, owner: str) -> int:
    """Return the largest sum of a request's prompt tokens and ``max_tokens``. Raises ModelError if it exceeds
    ``context``, the limit of the model or server ``owner`` (a name for the message)."""
    longest, prompt, completion = max(
        ((len(r.prompt_ids) + r.max_tokens, len(r.prompt_ids), r.max_tokens) for r in requests), default=(0, 0, 0)
    )
    if longest > context:
        raise ModelError(
            f"the prompt has {prompt} tokens, and with max_tokens = {completion} that is more than the {context} that "
            f"{owner} holds: lower max_tokens"
        )
    return longest


class BatchSequences:
    """The sequences of a decode batch: settings on the host, uniform numbers and results on the device.

    ``requests`` and ``indices`` have one entry per sequence. Tensors have one entry more, for ``scratch``, the sequence
    that idle rows write to.
    """

    def __init__(self, base: BaseModel, requests: Sequence[LaneRequest], indices: Sequence[SampleIndex]):
        self.base, self.indices, self.scratch = base, indices, len(indices)
        self.requests = [requests[index.request] for index in indices]
        device, count, longest = base.device, self.scratch + 1, max(r.max_tokens for r in self.requests)
        uniforms_NT = np.zeros((count, longest))
        for i, (request, index) in enumerate(zip(self.requests, indices, strict=True)):
            uniforms_NT[i, : request.max_tokens] = request.uniforms_T(index.sample)
        real = torch.float64 if base.dtype == torch.float64 else torch.float32
        self.cuts = cuts_of(self.requests, base.vocab_size)
        self.sampled = SampledTokens(
            ends=torch.tensor(base.eos_ids, device=device),
            uniforms_NT=torch.from_numpy(uniforms_NT).to(device),
            tokens_NT=torch.full((count, longest), base.pad_id, dtype=torch.long, device=device),
            logprobs_NT=torch.zeros((count, longest), device=device, dtype=real),
            entropy_NT=torch.zeros((count, longest), device=device, dtype=real),
            support=None if self.cuts is None else empty_record(count, longest, int(self.cuts[:, 0].max()), device),
        )
        self.lengths = np.zeros(count, dtype=np.int64)
        self.limits = np.array([*(r.max_tokens for r in self.requests), 1])
        temperatures = [*(r.temperature for r in self.requests), 1.0]
        # Temperature 0 is greedy decoding; its log-probabilities are those at temperature 1.
        self.temperatures = np.array([t or 1.0 for t in temperatures])
        self.greedy = np.array([t == 0 for t in temperatures])

    def new_rows(self, sequence_R: np.ndarray) -> Rows:
        device, count, real = self.base.device, len(sequence_R), self.sampled.logprobs_NT.dtype
        has_temperatures, has_greedy = bool((self.temperatures != 1).any()), bool(self.greedy.any())
        index_R = torch.zeros(count, dtype=torch.long, device=device)
        rows = Rows(
            token_R=index_R,
            position_R=index_R.clone(),
            sampled_R=index_R.clone(),
            alive_R=index_R.bool(),
            sequence_R=torch.empty(count, dtype=torch.long, device=device),
            limit_R=torch.empty(count, dtype=torch.long, device=device),
            temperature_R1=torch.empty(count, 1, dtype=real, device=device) if has_temperatures else None,
            greedy_R1=torch.empty(count, 1, dtype=torch.bool, device=device) if has_greedy else None,
            cut_R3=None if self.cuts is None else torch.empty(count, 3, dtype=real, device=device),
        )
        self.bind(rows, sequence_R)
        return rows

    def bind(self, rows: Rows, sequence_R: np.ndarray) -> None:
        rows.sequence_R.copy_(torch.from_numpy(sequence_R))
        rows.limit_R.copy_(torch.from_numpy(self.limits[sequence_R]))
        if rows.temperature_R1 is not None:
            rows.temperature_R1.copy_(torch.from_numpy(self.temperatures[sequence_R]).unsqueeze(1))
        if rows.greedy_R1 is not None:
            rows.greedy_R1.copy_(torch.from_numpy(self.greedy[sequence_R]).unsqueeze(1))
        if rows.cut_R3 is not None and self.cuts is not None:
            rows.cut_R3.copy_(torch.from_numpy(self.cuts[sequence_R]))

    def reserve_draws(self, draws: int) -> bool:
        """Reserve space in the support record for the kept sets (of top-k, top-p or min-p) of ``draws`` more draws;
        return whether the record was reallocated. Waits for the device if the sampling is truncated."""
        record = self.sampled.support
        if record is None:
            return False
        used, size = int(record.used_1), len(record.ids_M)
        needed = used + draws * len(record.rank_K) + 1
        if needed <= size:
            return False
        wider = record.ids_M.new_empty(max(2 * size, needed))
        wider[:used] = record.ids_M[:used]
        self.sampled = self.sampled._replace(support=record._replace(ids_M=wider))
        return True

    def actions(self, request: int) -> list[Action]:
        sequences = [i for i, index in enumerate(self.indices) if index.request == request]
        index, lengths_N = torch.tensor(sequences, device=self.base.device), self.lengths[sequences]
        tokens_NT, logprobs_NT, entropy_NT = (
            table[index].cpu().numpy()
            for table in (self.sampled.tokens_NT, self.sampled.logprobs_NT, self.sampled.entropy_NT)
        )
        record = self.sampled.support
        supports_N = [None] * len(sequences) if record is None else supports_of(record, index, lengths_N)
        actions = []
        for i, (length, support) in enumerate(zip(lengths_N, supports_N, strict=True)):
            ids = tokens_NT[i, :length].tolist()
            actions.append(
                Action(
                    token_ids=ids,
                    text=self.base.text.decode(ids),
                    logprobs_T=logprobs_NT[i, :length].copy(),
                    entropy_T=entropy_NT[i, :length].copy(),
                    stop_reason="stop" if ids[-1] in self.base.eos_ids else "length",
                    support=support,
                )
            )
        return actions


def cuts_of(requests: Sequence[LaneRequest], vocabulary: int) -> np.ndarray | None:
    """Return top-k, top-p and min-p of each request, and last of the scratch sequence, float64 [N + 1, 3]; None if no
    request uses them."""
    cuts = [
        (min(r.top_k or vocabulary, vocabulary), r.top_p, r.min_p) if r.truncates else (0, 1.0, 0.0) for r in requests
    ]
    return np.array([*cuts, (0, 1.0, 0.0)], dtype=np.float64) if any(r.truncates for r in requests) else None


# -- the slots of a dense decoder ------------------------------------------------------------------------------------


class PartialPrefill(NamedTuple):
    row: int
    start: int  # Number of columns that are cached
    token_ids: tuple[int, ...]  # Prompt tokens after these columns


class SlotBatch:
    """Decodes the samples ``indices`` of ``requests``, at most ``max_rows`` at once but at least one of each lane.

    ``blocks`` are the decoder's blocks with the adapters of these samples' lanes, in ascending order of lanes.
    ``finished`` gets a request's number and actions as soon as all of its samples in ``indices`` have ended.
    """

    def __init__(
        self,
        decoder: DenseDecoder,
        requests: Sequence[LaneRequest],
        indices: Sequence[SampleIndex],
        blocks: Blocks,
        max_rows: int,
        finished: Finished,
        graphs: StepGraphs | None,
        cache: SequenceCache,
    ):
        base = decoder.base
        self.decoder, self.requests, self.blocks, self.max_rows = decoder, requests, blocks, max_rows
        self.finished, self.graphs, self.cache = finished, graphs, cache
        self.sequences = BatchSequences(base, requests, indices)
        self.lanes = lanes_of(requests, indices)
        self.waiting: dict[int, deque[int]] = {lane: deque() for lane in self.lanes}
        for sequence, request in enumerate(self.sequences.requests):
            self.waiting[request.lane].append(sequence)
        self.missing = Counter(index.request for index in indices)
        self.columns_by = decoder.settings.columns
        self.steps = BURST if base.is_small and self.columns_by == 1 else 1
        capacity = max(len(r.prompt_ids) + r.max_tokens for r in self.sequences.requests)
        self.capacity = -(-capacity // self.columns_by) * self.columns_by
        self.slots = max(1, min(max_rows // len(self.lanes), max(len(q) for q in self.waiting.values())))
        self._begin(len(self.lanes) * self.slots)

    def _begin(self, rows: int) -> None:
        self.kv_cache = KVCache(self.decoder, rows, self.capacity)
        self.sequence = np.full(rows, self.sequences.scratch)
        self.at = np.zeros(rows, dtype=np.int64)  # upper bound of each row's cache position
        self.rows = self.sequences.new_rows(self.sequence)

    def _reserve_draws(self, draws: int) -> None:
        # Graphs replay on fixed addresses, and the memory of the old record is free now.
        if self.sequences.reserve_draws(draws) and self.graphs is not None:
            self.graphs.forget()

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        calls = self.decoder.settings.calls
        self._admit()
        try:
            while self._reschedule():
                self._reserve_draws(calls * self.steps * len(self.sequence))
                for _ in range(calls):
                    self._step()
        finally:
            if self.graphs is not None:
                self.graphs.forget()

    def _step(self) -> None:
        held = self.sequence != self.sequences.scratch
        columns = int(self.at[held].max()) + 1
        if self.columns_by == 1:
            self.at += held * self._decode(columns, columns > int(self.at[held].min()) + 1, self.steps)
            return
        columns = min(
            self.capacity, -(-columns // self.columns_by) * self.columns_by
        )  # rows may have ended since the last synchronisation
        if self.graphs is None:
            self._decode(columns, True, 1)
        else:
            self.graphs.run(columns, lambda: self._decode(columns, True, 1))
        self.at += held

    def _decode(self, columns: int, ragged: bool, steps: int) -> int:
        sampled = self.sequences.sampled
        plan = StepPlan(columns, ragged, steps)
        return self.decoder.decode_steps(self.blocks, self.rows, sampled, self.kv_cache, plan)

    # -- which sequence has which row --------------------------------------------------------------------------------

    def _reschedule(self) -> bool:
        """Evict ended sequences, admit waiting ones, compact the batch; return False when all sequences have ended."""
        while True:
            alive = self.rows.alive_R.cpu().numpy()
            if self.graphs is not None and self.graphs.in_use:
                self._check_progress(alive)
            ended = np.flatnonzero((self.sequence != self.sequences.scratch) & ~alive)
            if len(ended):
                self._evict(ended)
            waiting = sum(map(len, self.waiting.values()))
            if not waiting and not alive.any():
                return False
            if len(ended) or waiting:
                self._compact(alive)
            if not waiting or not self._admit():  # admitted sequences may end with their first token: check again
                return True

    def _check_progress(self, alive: np.ndarray) -> None:
        # A graph that replays nothing would loop forever.
        stuck = alive & (self.rows.position_R.cpu().numpy() != self.at)
        if stuck.any():
            raise RunFailed(
                f"replaying the CUDA graph of a decode step moved {int(stuck.sum())} of {int(alive.sum())} sequences "
                "not at all, or too far"
            )

    def _evict(self, rows: np.ndarray) -> None:
        complete, index = [], torch.from_numpy(rows).to(self.decoder.device)
        # sampled_R is the index of the last token, hence + 1.
        self.sequences.lengths[self.sequence[rows]] = self.rows.sampled_R[index].cpu().numpy() + 1
        self._cache_sequences(rows)
        for sequence in self.sequence[rows]:
            request = self.sequences.indices[sequence].request
            self.missing[request] -= 1
            if self.missing[request] == 0:
                complete.append(request)
        self.sequence[rows], self.at[rows] = self.sequences.scratch, 0
        self.rows.sequence_R[index] = self.sequences.scratch
        self.rows.position_R[index], self.rows.sampled_R[index] = 0, 0
        for request in complete:
            self.finished(request, self.sequences.actions(request))

    def _cache_sequences(self, rows: np.ndarray) -> None:
        by_policy: dict[PolicyRef, list[int]] = {}
        for row, sequence in zip(rows.tolist(), self.sequence[rows].tolist(), strict=True):
            request = self.sequences.requests[sequence]
            if request.sequences:
                by_policy.setdefault(request.policy, []).append(row)
        for policy, policy_rows in by_policy.items():
            index = torch.tensor(policy_rows, device=self.decoder.device)
            sequences = self.sequence[policy_rows].tolist()
            sampled = self.sequences.sampled.tokens_NT[torch.tensor(sequences, device=index.device)].tolist()
            named = []
            for sequence, tokens in zip(sequences, sampled, strict=True):
                request, sample = self.sequences.requests[sequence], self.sequences.indices[sequence].sample
                # All but the last token, which has no keys and values yet.
                read = (*request.prompt_ids, *tokens[: self.sequences.lengths[sequence] - 1])
                named.append((request.sequences[sample], read))
            self.cache.put(policy, named, self.kv_cache.copy(index, max(len(read) for _, read in named)))

    def _admit(self) -> bool:
        """Admit waiting sequences to idle rows, if enough can enter to justify a prefill; return whether any was
        admitted."""
        admitted: list[tuple[int, int]] = []
        for i, lane in enumerate(self.lanes):
            lane_rows = range(i * self.slots, (i + 1) * self.slots)
            idle = [row for row in lane_rows if self.sequence[row] == self.sequences.scratch]
            admitted += zip(idle, list(self.waiting[lane])[: len(idle)], strict=False)
        waiting = sum(map(len, self.waiting.values()))
        busy = (self.sequence != self.sequences.scratch).any()
        if not admitted or (busy and len(admitted) < min(waiting, int(REFILL_SHARE * len(self.sequence)))):
            return False
        for _, sequence in admitted:
            self.waiting[self.sequences.requests[sequence].lane].popleft()
        self._prefill(admitted)
        return True

    def _prefill(self, admitted: Sequence[tuple[int, int]]) -> None:
        rows_of: list[dict[int, list[int]]] = [{} for _ in self.lanes]  # per lane the rows of each request
        for row, sequence in admitted:
            request = self.sequences.indices[sequence].request
            rows_of[row // self.slots].setdefault(request, []).append(row)
            self.sequence[row] = sequence
            self.at[row] = len(self.requests[request].prompt_ids)
        device = self.decoder.device
        rows = torch.tensor([row for row, _ in admitted], device=device)
        self.rows.position_R[rows] = torch.from_numpy(self.at).to(device)[rows]
        self.rows.sampled_R[rows], self.rows.alive_R[rows] = 0, True
        self.sequences.bind(self.rows, self.sequence)
        self._extend(self._restore(rows_of))
        prompts = [list(lane.items()) for lane in rows_of]
        if not any(prompts):
            return
        width = max(len(self.requests[request].prompt_ids) for lane in rows_of for request in lane)
        size = max(1, self.decoder.prefill_tokens // (len(prompts) * width))
        filler = next((request, []) for lane in rows_of for request in lane)
        for part, _ in lane_parts(prompts, size, filler):
            self._prefill_part(part)

    def _prefill_part(self, part: Sequence[tuple[int, Sequence[int]]]) -> None:
        device, prompts = self.decoder.device, [self.requests[request].prompt_ids for request, _ in part]
        ids = self._padded(prompts)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        filled = [(row, i) for i, (_, prompt_rows) in enumerate(part) for row in prompt_rows]
        rows, source = torch.tensor(filled, device=device).unbind(1)
        logits = self.decoder.prefill(ids, last, self.blocks, self.kv_cache, rows, source)
        self._first_token(logits[source], rows)

    def _restore(self, rows_of: list[dict[int, list[int]]]) -> list[list[PartialPrefill]]:
        """Copy cached sequences into the rows that continue them, and remove these rows from ``rows_of``. Return the
        rows of each lane that were removed, with the prompt tokens that are not cached."""
        continuations: list[list[PartialPrefill]] = []
        batches: dict[int, list[tuple[int, CachedSequence]]] = {}
        for lane_rows in rows_of:
            continuations.append([])
            for number, rows in list(lane_rows.items()):
                request = self.requests[number]
                if len(rows) > 1 or request.samples > 1 or not request.sequences:
                    continue
                cached = self.cache.take(request.policy, request.sequences[0], request.prompt_ids)
                if cached is not None:
                    start = len(cached.token_ids)
                    continuations[-1].append(PartialPrefill(rows[0], start, request.prompt_ids[start:]))
                    batches.setdefault(id(cached.batch), []).append((rows[0], cached))
                    del lane_rows[number]
        for restored in batches.values():
            rows = torch.tensor([row for row, _ in restored], device=self.decoder.device)
            self.kv_cache.restore(rows, [cached for _, cached in restored])
        return continuations

    def _extend(self, continuations: list[list[PartialPrefill]]) -> None:
        longest = max((len(new.token_ids) for lane in continuations for new in lane), default=0)
        if not longest:
            return
        device, size = self.decoder.device, self.decoder.prefill_tokens // (len(continuations) * longest)
        filler = next(new for lane in continuations for new in lane)
        for part, is_real in lane_parts(continuations, max(1, size), filler):
            ids = self._padded([new.token_ids for new in part])
            start = torch.tensor([new.start for new in part], device=device)
            last = torch.tensor([len(new.token_ids) - 1 for new in part], device=device)
            rows, real_R = [new.row for new in part], torch.tensor(is_real, device=device)
            logits = self.decoder.extend(ids, start, last, self.blocks, self.kv_cache, rows, real_R)
            self._first_token(logits[real_R], torch.tensor(rows, device=device)[real_R])

    def _padded(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        width, pad = max(map(len, texts)), self.decoder.base.pad_id
        return torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in texts], device=self.decoder.device)

    def _first_token(self, logits_SV: torch.Tensor, rows_S: torch.Tensor) -> None:
        rows, selected = self.rows, select_rows(self.rows, rows_S)
        self._reserve_draws(len(rows_S))
        draw_tokens(selected, self.sequences.sampled, logits_SV, self.decoder.exact_sums)
        rows.token_R[rows_S], rows.sampled_R[rows_S] = selected.token_R, selected.sampled_R
        rows.alive_R[rows_S] = selected.alive_R

    def _compact(self, alive: np.ndarray) -> None:
        count = len(self.sequence)
        lane_rows = np.arange(count).reshape(len(self.lanes), self.slots)
        living = {lane: rows[alive[rows]] for lane, rows in zip(self.lanes, lane_rows, strict=True)}
        needed = {lane: len(rows) + len(self.waiting[lane]) for lane, rows in living.items()}
        lanes = [lane for lane in self.lanes if needed[lane]]
        if not lanes:
            return
        slots = max(1, min(self.max_rows // len(lanes), max(needed[lane] for lane in lanes)))
        slots = max(slots, max(len(living[lane]) for lane in lanes))
        grows = len(lanes) < len(self.lanes) and slots > self.slots
        if not grows and len(lanes) * slots > (1 - IDLE_SHARE) * count:
            return
        idle = np.full(slots, -1)
        self._move_rows(np.concatenate([np.append(living[lane], idle)[:slots] for lane in lanes]))
        self.blocks = self.decoder.of_lanes(self.blocks, [self.lanes.index(lane) for lane in lanes], len(self.lanes))
        self.lanes, self.slots = lanes, slots

    def _move_rows(self, source: np.ndarray) -> None:
        """Replace the batch's rows by the rows with indices ``source``; −1 makes an idle row."""
        source, held = source.clip(0), source >= 0
        index, held_R = (torch.from_numpy(array).to(self.decoder.device) for array in (source, held))
        self.kv_cache.select(index)
        # Idle rows are copies: NaN of a diverged lane would reach their next sequence, because 0 · NaN is NaN.
        self.kv_cache.clear(~held_R)
        self.sequence = np.where(held, self.sequence[source], self.sequences.scratch)
        self.at = np.where(held, self.at[source], 0)
        before, self.rows = self.rows, self.sequences.new_rows(self.sequence)
        for table, moved in zip(self.rows[:4], before[:4], strict=True):  # the tables that change from step to step
            table.copy_(moved[index] * held_R)
        if self.graphs is not None:
            self.graphs.forget()


def lane_parts(lanes: Sequence[Sequence[T]], size: int, filler: T) -> Iterator[tuple[list[T], list[bool]]]:
    """Yield parts with equally many items of each lane (at most ``size``), and a mask of the real items. Lanes with
    fewer items are padded with ``filler``."""
    for begin in range(0, max(map(len, lanes)), size):
        parts = [items[begin : begin + size] for items in lanes]
        share = max(map(len, parts))
        part = [item for items in parts for item in [*items, *[filler] * (share - len(items))]]
        yield part, [i < len(items) for items in parts for i in range(share)]
