"""The decode batch of a dense decoder: lanes × slots, and a finished sequence's slot goes to the next one waiting.

Each lane owns an equal consecutive share of the rows, so that the LoRA product of all lanes is one batched matrix
product. A prompt is prefilled once for all of its samples that start together. When no sequence waits, or a lane has
run out of work, the batch is cut anew: lanes without work leave and the others share its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from retrain.engines.dense import Additions, DenseDecoder, KeyValues
from retrain.engines.draw import draw
from retrain.engines.graphs import StepGraphs
from retrain.engines.protocol import Finished, SampleRequest
from retrain.engines.rows import IDLE_SHARE, Row, completions_of
from retrain.policy.base import BaseModel
from retrain.rng import uniforms
from retrain.types import Completion

REFILL_SHARE = 0.125
"""Waiting sequences enter when they can fill this share of the rows: a prefill costs as much as several steps."""
CHECK = {"cpu": 1, "cuda": 8}
"""Tokens between looks at the device's answer, each of which waits for it."""
COLUMNS = {"cpu": 1, "cuda": 128}
"""What the number of cache columns that are read is a multiple of, so that one graph serves many steps."""


class SlotBatch:
    """Decodes the given sequences, at most ``max_rows`` at once; ``run`` returns them all.

    ``lanes_used`` are the lanes of ``work`` in order, ``added`` what their adapters add (see ``DenseDecoder``).
    ``finished`` is called with every request as soon as all of its samples in ``work`` have ended.
    """

    def __init__(
        self,
        base: BaseModel,
        decoder: DenseDecoder,
        requests: Sequence[SampleRequest],
        work: Sequence[Row],
        lanes_used: Sequence[int],
        added: Additions,
        max_rows: int,
        finished: Finished,
        graphs: StepGraphs,
    ):
        self.base, self.decoder, self.requests, self.work = base, decoder, requests, work
        self.lanes, self.added, self.max_rows, self.finished = list(lanes_used), added, max_rows, finished
        self.waiting: dict[int, deque[int]] = {lane: deque() for lane in lanes_used}
        self.missing: dict[int, int] = {}
        for sequence, row in enumerate(work):
            self.waiting[requests[row.request].lane].append(sequence)
            self.missing[row.request] = self.missing.get(row.request, 0) + 1
        used = [requests[row.request] for row in work]
        self.capacity = max(len(r.prompt_ids) + r.max_tokens for r in used)
        self.graphs, self.columns_by = graphs, COLUMNS[base.device.type]
        self.capacity = -(-self.capacity // self.columns_by) * self.columns_by
        self._new_outputs(used)
        self.slots = max(1, min(max_rows // len(self.lanes), max(len(q) for q in self.waiting.values())))
        self._new_rows(len(self.lanes) * self.slots)

    def _new_outputs(self, used: Sequence[SampleRequest]) -> None:
        """Per sequence what is drawn with and what is drawn; one more row takes what idle rows write."""
        device, count, longest = self.base.device, len(used), max(r.max_tokens for r in used)
        draws = np.zeros((count + 1, longest))
        for i, (request, row) in enumerate(zip(used, self.work, strict=True)):
            draws[i, : request.max_tokens] = uniforms(request.max_tokens, *request.stream, row.sample)
        self.uniforms_NT = torch.from_numpy(draws).to(device)
        real = torch.float64 if self.base.dtype == torch.float64 else torch.float32
        self.tokens_NT = torch.full((count + 1, longest), self.base.pad_id, dtype=torch.long, device=device)
        self.logprobs_NT = torch.zeros((count + 1, longest), device=device, dtype=real)
        self.entropy_NT = torch.zeros((count + 1, longest), device=device, dtype=real)
        self.lengths = np.zeros(count + 1, dtype=np.int64)
        self.scratch = count
        self.limits = np.array([*(r.max_tokens for r in used), 1])
        temperatures = [*(r.temperature for r in used), 1.0]
        # Temperature 0 is greedy decoding; its log-probabilities are those at temperature 1.
        self.temperatures = np.array([t or 1.0 for t in temperatures])
        self.greedy = np.array([t == 0 for t in temperatures])
        self.plain_temperature, self.any_greedy = bool((self.temperatures == 1).all()), bool(self.greedy.any())
        self.eos = torch.tensor(self.base.eos_ids, device=device)

    def _new_rows(self, rows: int) -> None:
        """All rows idle. The host keeps which sequence a row holds and an upper bound of its cache position."""
        device = self.base.device
        self.memory = KeyValues(self.decoder, rows, self.capacity)
        self.sequence = np.full(rows, self.scratch)
        self.at = np.zeros(rows, dtype=np.int64)
        self.sequence_R = torch.full((rows,), self.scratch, dtype=torch.long, device=device)
        self.token_R = torch.zeros(rows, dtype=torch.long, device=device)
        self.position_R = torch.zeros(rows, dtype=torch.long, device=device)
        self.drawn_R = torch.zeros(rows, dtype=torch.long, device=device)
        self.alive_R = torch.zeros(rows, dtype=torch.bool, device=device)
        self.limit_R = torch.zeros(0, device=device)
        self._settings()

    def _settings(self) -> None:
        """Per row what belongs to its sequence and never changes while it is there."""
        limit = torch.from_numpy(self.limits[self.sequence])
        if self.limit_R.shape != limit.shape:
            device, rows = self.base.device, len(limit)
            self.limit_R = torch.empty(rows, dtype=torch.long, device=device)
            self.temperature_R1 = torch.empty(rows, 1, dtype=self.logprobs_NT.dtype, device=device)
            self.greedy_R1 = torch.empty(rows, 1, dtype=torch.bool, device=device)
        self.limit_R.copy_(limit)
        self.temperature_R1.copy_(torch.from_numpy(self.temperatures[self.sequence]).unsqueeze(1))
        self.greedy_R1.copy_(torch.from_numpy(self.greedy[self.sequence]).unsqueeze(1))

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Decode until every sequence has ended."""
        self._fill()
        try:
            while self._settle():
                for _ in range(CHECK[self.base.device.type]):
                    self._step()
        finally:
            self.graphs.forget()

    def _step(self) -> None:
        """One token for every row."""
        held = self.sequence != self.scratch
        columns = int(self.at[held].max()) + 1
        ragged = columns > int(self.at[held].min()) + 1
        columns = min(self.capacity, -(-columns // self.columns_by) * self.columns_by)  # rows may have ended unseen
        ragged = ragged or self.columns_by > 1
        self.graphs.run((columns, ragged), lambda: self._advance(columns, ragged))
        self.at += held

    def _advance(self, columns: int, ragged: bool) -> None:
        """The device's part of a step, all in place: reads ``columns`` of the cache, of which some rows have not
        written all when ``ragged``."""
        bias = None
        if ragged:
            column_K = torch.arange(columns, device=self.base.device)
            unwritten_RK = column_K > self.position_R[:, None]
            bias = torch.zeros(unwritten_RK.shape, device=self.base.device, dtype=self.decoder.dtype)
            bias = bias.masked_fill_(unwritten_RK, -torch.inf)[:, None, None]
        logits_RV = self.decoder.step(self.token_R, self.position_R, self.memory, columns, bias, self.added)
        self.position_R.add_(self.alive_R)
        self._draw(logits_RV, None)

    def _draw(self, logits_RV: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Draw the next token of the given rows (None: of all) and note it.

        ``drawn_R`` counts a row's tokens before the one being drawn; it stands still once a sequence has ended.
        """
        every = slice(None) if rows is None else rows
        sequence, drawn, alive = self.sequence_R[every], self.drawn_R[every], self.alive_R[every]
        temperature = None if self.plain_temperature else self.temperature_R1[every]
        greedy = self.greedy_R1[every] if self.any_greedy else None
        longest = self.tokens_NT.shape[1]
        # What an idle row draws goes to the scratch row.
        place = sequence.masked_fill(~alive, self.scratch) * longest + drawn
        token, logprob, entropy = draw(logits_RV, self.uniforms_NT.view(-1)[place], temperature, greedy)
        for store, value in ((self.tokens_NT, token), (self.logprobs_NT, logprob), (self.entropy_NT, entropy)):
            store.view(-1).index_copy_(0, place, value)
        going_on = alive & (drawn + 1 < self.limit_R[every]) & (token.unsqueeze(1) != self.eos).all(1)
        if rows is None:
            self.token_R.copy_(token)
            self.drawn_R.add_(going_on)
            self.alive_R.copy_(going_on)
        else:
            self.token_R[rows], self.drawn_R[rows], self.alive_R[rows] = token, drawn + going_on, going_on

    # -- who sits where -----------------------------------------------------------------------------------------

    def _settle(self) -> bool:
        """Take out what has ended, seat what waits, resize; False when all work is done."""
        while True:
            alive = self.alive_R.cpu().numpy()
            ended = np.flatnonzero((self.sequence != self.scratch) & ~alive)
            if len(ended):
                self._take_out(ended)
            waiting = sum(map(len, self.waiting.values()))
            if not waiting and not alive.any():
                return False
            if len(ended) or waiting:
                self._resize(alive)
            if not waiting or not self._fill():  # a sequence may end with its very first token: look again
                return True

    def _take_out(self, rows: np.ndarray) -> None:
        """Free the rows and report requests that are complete."""
        complete, index = [], torch.from_numpy(rows).to(self.base.device)
        self.lengths[self.sequence[rows]] = self.drawn_R[index].cpu().numpy() + 1
        for sequence in self.sequence[rows]:
            request = self.work[sequence].request
            self.missing[request] -= 1
            if self.missing[request] == 0:
                complete.append(request)
        self.sequence[rows], self.at[rows] = self.scratch, 0
        self.sequence_R[index], self.position_R[index], self.drawn_R[index] = self.scratch, 0, 0
        for request in complete:
            self.finished(request, self._completions(request))

    def _fill(self) -> bool:
        """Seat waiting sequences in idle rows when it is worth a prefill; True when some were seated."""
        seats: list[tuple[int, int]] = []
        for place, lane in enumerate(self.lanes):
            own = range(place * self.slots, (place + 1) * self.slots)
            idle = [row for row in own if self.sequence[row] == self.scratch]
            seats += zip(idle, list(self.waiting[lane])[: len(idle)], strict=False)
        waiting = sum(map(len, self.waiting.values()))
        busy = (self.sequence != self.scratch).any()
        if not seats or (busy and len(seats) < min(waiting, int(REFILL_SHARE * len(self.sequence)))):
            return False
        for _, sequence in seats:
            self.waiting[self.requests[self.work[sequence].request].lane].popleft()
        self._prefill(seats)
        return True

    def _prefill(self, seats: Sequence[tuple[int, int]]) -> None:
        """Run each distinct prompt once, spread its cache over its samples, and draw their first tokens."""
        distinct: list[list[int]] = [[] for _ in self.lanes]
        for row, sequence in seats:
            own, request = distinct[row // self.slots], self.work[sequence].request
            if not own or own[-1] != request:
                own.append(request)
        share = max(map(len, distinct))
        filler = next(own[0] for own in distinct if own)
        order = [request for own in distinct for request in own + [filler] * (share - len(own))]
        place = {(i // share, request): i for i, request in reversed(list(enumerate(order)))}
        source = [place[row // self.slots, self.work[sequence].request] for row, sequence in seats]
        device = self.base.device
        prompts = [self.requests[request].prompt_ids for request in order]
        width = max(map(len, prompts))
        ids = torch.tensor([[*p, *[self.base.pad_id] * (width - len(p))] for p in prompts], device=device)
        last = torch.tensor([len(p) - 1 for p in prompts], device=device)
        logits, states = self.decoder.prefill(ids, last, self.added)
        rows, from_ = (torch.tensor(index, device=device) for index in ([row for row, _ in seats], source))
        for layer, (keys, values) in enumerate(states):
            self.memory.keys[layer][rows, :, :width] = keys[from_]
            self.memory.values[layer][rows, :, :width] = values[from_]
        for row, sequence in seats:
            self.sequence[row] = sequence
            self.at[row] = len(self.requests[self.work[sequence].request].prompt_ids)
        self.sequence_R.copy_(torch.from_numpy(self.sequence))
        self.position_R[rows] = torch.from_numpy(self.at).to(device)[rows]
        self.drawn_R[rows] = 0
        self.alive_R[rows] = True
        self._settings()
        self._draw(logits[from_], rows)

    def _resize(self, alive: np.ndarray) -> None:
        """Cut the batch anew when rows stand idle that nobody waits for, or lanes have run out of work."""
        living = {lane: self._own(place)[alive[self._own(place)]] for place, lane in enumerate(self.lanes)}
        needed = {lane: len(rows) + len(self.waiting[lane]) for lane, rows in living.items()}
        lanes = [lane for lane in self.lanes if needed[lane]]
        if not lanes:
            return
        slots = max(1, min(self.max_rows // len(lanes), max(needed[lane] for lane in lanes)))
        slots = max(slots, max(len(living[lane]) for lane in lanes))
        count, now = len(lanes) * slots, len(self.sequence)
        grows = len(lanes) < len(self.lanes) and slots > self.slots
        if not grows and count > (1 - IDLE_SHARE) * now:
            return
        keep = []
        for lane in lanes:
            rows = living[lane].tolist()
            keep += [*rows, *[-1] * (slots - len(rows))]
        kept = np.array(keep)
        index = torch.from_numpy(kept.clip(0)).to(self.base.device)
        seated = torch.from_numpy(kept >= 0).to(self.base.device)
        self.memory.select(index)
        self.sequence = np.where(kept >= 0, self.sequence[kept.clip(0)], self.scratch)
        self.at = np.where(kept >= 0, self.at[kept.clip(0)], 0)
        self.token_R, self.drawn_R = self.token_R[index] * seated, self.drawn_R[index] * seated
        self.position_R, self.alive_R = self.position_R[index] * seated, self.alive_R[index] & seated
        self.sequence_R = torch.from_numpy(self.sequence).to(self.base.device)
        self.added = self.decoder.of_lanes(self.added, [self.lanes.index(lane) for lane in lanes], len(self.lanes))
        self.lanes, self.slots = lanes, slots
        self.graphs.forget()
        self._settings()

    def _own(self, place: int) -> np.ndarray:
        """Row numbers of the lane at this place."""
        return np.arange(place * self.slots, (place + 1) * self.slots)

    def _completions(self, request: int) -> list[Completion]:
        """What was sampled for a request, by sample."""
        own = [i for i, row in enumerate(self.work) if row.request == request]
        index = torch.tensor(own, device=self.base.device)
        tokens, logprobs, entropy = (
            state[index].cpu().numpy() for state in (self.tokens_NT, self.logprobs_NT, self.entropy_NT)
        )
        return completions_of(self.base, tokens, logprobs, entropy, self.lengths[own])
