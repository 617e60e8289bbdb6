"""The decode batch of a dense decoder: lanes × slots, and a finished sequence's slot goes to the next one waiting.

Each lane owns an equal consecutive share of the rows, so that the LoRA product of all lanes is one batched matrix
product. A prompt is prefilled once for all of its samples that start together. When no sequence waits, or a lane has
run out of work, the batch is cut anew: lanes without work leave and the others share its rows.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from retrain.engines.dense import Blocks, DenseDecoder, KVCache
from retrain.engines.graphs import StepGraphs
from retrain.engines.kept import Kept, KeptSequences
from retrain.engines.protocol import Finished, PolicyRef
from retrain.engines.rows import IDLE_SHARE, LaneRequest, Row, actions_of
from retrain.engines.step import Rows, Sampled, note
from retrain.engines.truncation import Keeper, cuts_of
from retrain.errors import RunFailed
from retrain.models.layers import GPU_COLUMNS
from retrain.policy.base import BaseModel
from retrain.types import Action

REFILL_SHARE = 0.125
"""Waiting sequences enter when they can fill this share of the rows: a prefill costs as much as several steps."""
CHECK = {"cpu": 1, "cuda": 8}  # Decode calls between synchronisations with the device
COLUMNS = {"cpu": 1, "cuda": GPU_COLUMNS}
"""What the number of cache columns that are read is a multiple of, so that one graph serves many steps."""
PREFILL_BYTES = 1 << 29
"""Activations of the prompts that are prefilled at once, beside the cache. A matrix product of fewer tokens than this
holds of a large model is not slower; how many it holds depends on shapes alone."""
BURST = 16
"""Steps of one call of a small model; the first sequence that ends also ends the call. With a large one, Python has
time between its steps to hear of a signal."""


class SlotBatch:
    """Decodes the given sequences, at most ``max_rows`` at once; ``run`` returns them all.

    ``lanes_used`` are the lanes of ``work`` in order, ``blocks`` the decoder's with their adapters.
    ``finished`` is called with every request as soon as all of its samples in ``work`` have ended.
    """

    def __init__(
        self,
        base: BaseModel,
        decoder: DenseDecoder,
        requests: Sequence[LaneRequest],
        work: Sequence[Row],
        lanes_used: Sequence[int],
        blocks: Blocks,
        max_rows: int,
        finished: Finished,
        graphs: StepGraphs,
        kept: KeptSequences,
    ):
        self.kept = kept
        self.base, self.decoder, self.requests, self.work = base, decoder, requests, work
        self.lanes, self.blocks, self.max_rows, self.finished = list(lanes_used), blocks, max_rows, finished
        self.waiting: dict[int, deque[int]] = {lane: deque() for lane in lanes_used}
        self.missing: dict[int, int] = {}
        for sequence, row in enumerate(work):
            self.waiting[requests[row.request].lane].append(sequence)
            self.missing[row.request] = self.missing.get(row.request, 0) + 1
        used = [requests[row.request] for row in work]
        self.capacity = max(len(r.prompt_ids) + r.max_tokens for r in used)
        self.graphs, self.columns_by = graphs, COLUMNS[base.device.type]
        self.steps = BURST if base.small and self.columns_by == 1 else 1
        self.capacity = -(-self.capacity // self.columns_by) * self.columns_by
        self._new_outputs(used)
        self.slots = max(1, min(max_rows // len(self.lanes), max(len(q) for q in self.waiting.values())))
        self._new_rows(len(self.lanes) * self.slots)

    def _new_outputs(self, used: Sequence[LaneRequest]) -> None:
        """Uniforms and results per sequence; the last row is scratch, which idle rows write to."""
        device, count, longest = self.base.device, len(used), max(r.max_tokens for r in used)
        draws = np.zeros((count + 1, longest))
        for i, (request, row) in enumerate(zip(used, self.work, strict=True)):
            draws[i, : request.max_tokens] = request.uniforms_T(row.sample)
        real = torch.float64 if self.base.dtype == torch.float64 else torch.float32
        cuts = cuts_of(used, self.base.vocab_size)
        self.cuts = None if cuts is None else np.concatenate([cuts, [[0, 1, 0]]])
        self.keeper = None if cuts is None else Keeper(count + 1, longest, int(cuts[:, 0].max()), device)
        self.sampled = Sampled(
            ends=torch.tensor(self.base.eos_ids, device=device),
            uniforms_NT=torch.from_numpy(draws).to(device),
            tokens_NT=torch.full((count + 1, longest), self.base.pad_id, dtype=torch.long, device=device),
            logprobs_NT=torch.zeros((count + 1, longest), device=device, dtype=real),
            entropy_NT=torch.zeros((count + 1, longest), device=device, dtype=real),
            kept=self.keeper and self.keeper.kept,
        )
        self.lengths = np.zeros(count + 1, dtype=np.int64)
        self.scratch = count
        self.limits = np.array([*(r.max_tokens for r in used), 1])
        temperatures = [*(r.temperature for r in used), 1.0]
        # Temperature 0 is greedy decoding; its log-probabilities are those at temperature 1.
        self.temperatures = np.array([t or 1.0 for t in temperatures])
        self.greedy = np.array([t == 0 for t in temperatures])
        self.plain_temperature, self.any_greedy = bool((self.temperatures == 1).all()), bool(self.greedy.any())

    def _new_rows(self, rows: int) -> None:
        """All rows idle. The host keeps which sequence a row holds and an upper bound of its cache position."""
        self.kv_cache = KVCache(self.decoder, rows, self.capacity)
        self.sequence = np.full(rows, self.scratch)
        self.at = np.zeros(rows, dtype=np.int64)
        index = torch.zeros(rows, dtype=torch.long, device=self.base.device)
        self.rows = self._rows(index, index.clone(), index.clone(), index.bool())

    def _rows(
        self, token_R: torch.Tensor, position_R: torch.Tensor, sampled_R: torch.Tensor, alive_R: torch.Tensor
    ) -> Rows:
        device, rows = self.base.device, len(token_R)
        real = self.sampled.logprobs_NT.dtype
        made = Rows(
            token_R=token_R,
            position_R=position_R,
            sampled_R=sampled_R,
            alive_R=alive_R,
            sequence_R=torch.empty(rows, dtype=torch.long, device=device),
            limit_R=torch.empty(rows, dtype=torch.long, device=device),
            temperature_R1=None if self.plain_temperature else torch.empty(rows, 1, dtype=real, device=device),
            greedy_R1=torch.empty(rows, 1, dtype=torch.bool, device=device) if self.any_greedy else None,
            cut_R3=None if self.cuts is None else torch.empty(rows, 3, dtype=real, device=device),
        )
        self._bind(made)
        return made

    def _bind(self, rows: Rows) -> None:
        """Tell the device which sequences the rows hold, and what belongs to each and never changes."""
        rows.sequence_R.copy_(torch.from_numpy(self.sequence))
        rows.limit_R.copy_(torch.from_numpy(self.limits[self.sequence]))
        if rows.temperature_R1 is not None:
            rows.temperature_R1.copy_(torch.from_numpy(self.temperatures[self.sequence]).unsqueeze(1))
        if rows.greedy_R1 is not None:
            rows.greedy_R1.copy_(torch.from_numpy(self.greedy[self.sequence]).unsqueeze(1))
        if rows.cut_R3 is not None and self.cuts is not None:
            rows.cut_R3.copy_(torch.from_numpy(self.cuts[self.sequence]))

    def _make_room(self, draws: int) -> None:
        """Before so many draws of truncated distributions."""
        if self.keeper is not None and self.keeper.make_room(draws):
            self.sampled = self.sampled._replace(kept=self.keeper.kept)
            self.graphs.forget()

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Decode until every sequence has ended."""
        self._admit()
        try:
            while self._reschedule():
                self._make_room(CHECK[self.base.device.type] * self.steps * len(self.sequence))
                for _ in range(CHECK[self.base.device.type]):
                    self._step()
        finally:
            self.graphs.forget()

    def _step(self) -> None:
        """One token for every row, or several where the decoder takes several steps at once."""
        held = self.sequence != self.scratch
        columns = int(self.at[held].max()) + 1
        if self.columns_by == 1:
            self.at += held * self._decode(columns, columns > int(self.at[held].min()) + 1, self.steps)
            return
        columns = min(self.capacity, -(-columns // self.columns_by) * self.columns_by)  # rows may have ended unseen
        self.graphs.run(columns, lambda: self._decode(columns, True, 1))
        self.at += held

    def _decode(self, columns: int, ragged: bool, steps: int) -> int:
        return self.decoder.decode_steps(self.blocks, self.rows, self.sampled, self.kv_cache, columns, ragged, steps)

    # -- which sequence has which row --------------------------------------------------------------------------------

    def _reschedule(self) -> bool:
        """Evict sequences that have ended, admit those that wait, compact the batch; False when all work is done."""
        while True:
            alive = self.rows.alive_R.cpu().numpy()
            if self.graphs.in_use:
                self._check_progress(alive)
            ended = np.flatnonzero((self.sequence != self.scratch) & ~alive)
            if len(ended):
                self._evict(ended)
            waiting = sum(map(len, self.waiting.values()))
            if not waiting and not alive.any():
                return False
            if len(ended) or waiting:
                self._compact(alive)
            if not waiting or not self._admit():  # a sequence may end with its very first token: look again
                return True

    def _check_progress(self, alive: np.ndarray) -> None:
        """Rows that are alive have taken every step. Raises RunFailed when they have not: a replay that does nothing
        would go on for ever."""
        stuck = alive & (self.rows.position_R.cpu().numpy() != self.at)
        if stuck.any():
            raise RunFailed(
                f"replaying the CUDA graph of a decode step moved {int(stuck.sum())} of {int(alive.sum())} sequences "
                "not at all, or too far"
            )

    def _evict(self, rows: np.ndarray) -> None:
        """Free the rows and report requests that are complete."""
        complete, index = [], torch.from_numpy(rows).to(self.base.device)
        self.lengths[self.sequence[rows]] = self.rows.sampled_R[index].cpu().numpy() + 1
        self._keep(rows)
        for sequence in self.sequence[rows]:
            request = self.work[sequence].request
            self.missing[request] -= 1
            if self.missing[request] == 0:
                complete.append(request)
        self.sequence[rows], self.at[rows] = self.scratch, 0
        self.rows.sequence_R[index], self.rows.position_R[index], self.rows.sampled_R[index] = self.scratch, 0, 0
        for request in complete:
            self.finished(request, self._actions(request))

    def _keep(self, rows: np.ndarray) -> None:
        """Keep what was computed of ended sequences that may go on: of all their tokens but the last, which nothing has
        read."""
        by_policy: dict[PolicyRef, list[int]] = {}
        for row, sequence in zip(rows.tolist(), self.sequence[rows].tolist(), strict=True):
            request = self.requests[self.work[sequence].request]
            if request.sequences:
                by_policy.setdefault(request.policy, []).append(row)
        for ref, own in by_policy.items():
            index, sequences = torch.tensor(own, device=self.base.device), self.sequence[own].tolist()
            sampled = self.sampled.tokens_NT[torch.tensor(sequences, device=index.device)].tolist()
            named = []
            for sequence, tokens in zip(sequences, sampled, strict=True):
                work = self.work[sequence]
                request = self.requests[work.request]
                read = (*request.prompt_ids, *tokens[: self.lengths[sequence] - 1])
                named.append((request.sequences[work.sample], read))
            self.kept.put(ref, named, self.kv_cache.copy(index, max(len(read) for _, read in named)))

    def _admit(self) -> bool:
        """Admit waiting sequences to idle rows when it is worth a prefill; True when some were admitted."""
        admitted: list[tuple[int, int]] = []
        for place, lane in enumerate(self.lanes):
            own = range(place * self.slots, (place + 1) * self.slots)
            idle = [row for row in own if self.sequence[row] == self.scratch]
            admitted += zip(idle, list(self.waiting[lane])[: len(idle)], strict=False)
        waiting = sum(map(len, self.waiting.values()))
        busy = (self.sequence != self.scratch).any()
        if not admitted or (busy and len(admitted) < min(waiting, int(REFILL_SHARE * len(self.sequence)))):
            return False
        for _, sequence in admitted:
            self.waiting[self.requests[self.work[sequence].request].lane].popleft()
        self._prefill(admitted)
        return True

    def _prefill(self, admitted: Sequence[tuple[int, int]]) -> None:
        """Run each distinct prompt once, spread its cache over its samples, and draw their first tokens: of every lane
        as many prompts at a time as ``PREFILL_BYTES`` allow."""
        asked: list[dict[int, list[int]]] = [{} for _ in self.lanes]  # per lane the rows of each request
        for row, sequence in admitted:
            asked[row // self.slots].setdefault(self.work[sequence].request, []).append(row)
            self.sequence[row] = sequence
            self.at[row] = len(self.requests[self.work[sequence].request].prompt_ids)
        device = self.base.device
        rows = torch.tensor([row for row, _ in admitted], device=device)
        self.rows.position_R[rows] = torch.from_numpy(self.at).to(device)[rows]
        self.rows.sampled_R[rows], self.rows.alive_R[rows] = 0, True
        self._bind(self.rows)
        self._extend(asked)
        distinct = [list(own.items()) for own in asked]
        if not any(distinct):
            return
        filler = next((request, []) for own in asked for request in own)
        width = max(len(self.requests[request].prompt_ids) for own in asked for request in own)
        size = max(1, PREFILL_BYTES // (len(distinct) * width * self.decoder.prefill_bytes))
        for begin in range(0, max(map(len, distinct)), size):
            parts = [own[begin : begin + size] for own in distinct]
            share = max(map(len, parts))
            self._prefill_part([each for part in parts for each in part + [filler] * (share - len(part))])

    def _extend(self, asked: list[dict[int, list[int]]]) -> None:
        """Go on with the sequences that were kept, and take their requests out of ``asked``: only what is new of a
        prompt is computed."""
        going: list[list[tuple[int, int, Kept]]] = []  # per lane rows, their requests, and what was kept
        for own in asked:
            taken = []
            for request, rows in list(own.items()):
                given = self.requests[request]
                if len(rows) == 1 and given.samples == 1 and given.sequences:
                    kept = self.kept.take(given.policy, given.sequences[0], given.prompt_ids)
                    if kept is not None:
                        taken.append((rows[0], request, kept))
                        del own[request]
            going.append(taken)
        batches: dict[int, list[tuple[int, Kept]]] = {}
        for row, _, kept in (each for taken in going for each in taken):
            batches.setdefault(id(kept.batch), []).append((row, kept))
        for own in batches.values():
            rows = torch.tensor([row for row, _ in own], device=self.base.device)
            self.kv_cache.put_back(rows, [kept for _, kept in own])
        if not batches:
            return
        new = {
            row: self.requests[request].prompt_ids[len(kept.token_ids) :] for own in going for row, request, kept in own
        }
        size = max(1, PREFILL_BYTES // (len(going) * max(map(len, new.values())) * self.decoder.prefill_bytes))
        filler = next(each for taken in going for each in taken)
        for begin in range(0, max(map(len, going)), size):
            parts = [taken[begin : begin + size] for taken in going]
            share = max(map(len, parts))
            part = [each for own in parts for each in own + [filler] * (share - len(own))]
            real = [i < len(own) for own in parts for i in range(share)]
            self._extend_part([(row, len(kept.token_ids), new[row]) for row, _, kept in part], real)

    def _extend_part(self, part: Sequence[tuple[int, int, Sequence[int]]], real: list[bool]) -> None:
        """Read new tokens into rows that hold so many already, lane by lane equally many; those that are not real fill
        a lane's share up."""
        device, width = self.base.device, max(len(new) for _, _, new in part)
        ids = torch.tensor([[*new, *[self.base.pad_id] * (width - len(new))] for _, _, new in part], device=device)
        start = torch.tensor([start for _, start, _ in part], device=device)
        last = torch.tensor([len(new) - 1 for _, _, new in part], device=device)
        rows, real_R = [row for row, _, _ in part], torch.tensor(real, device=device)
        logits = self.decoder.extend(ids, start, last, self.blocks, self.kv_cache, rows, real_R)
        self._first_token(logits[real_R], torch.tensor(rows, device=device)[real_R])

    def _prefill_part(self, part: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Prefill requests, lane by lane equally many, each with the rows that begin with its prompt."""
        device, prompts = self.base.device, [self.requests[request].prompt_ids for request, _ in part]
        width = max(map(len, prompts))
        ids = torch.tensor([[*p, *[self.base.pad_id] * (width - len(p))] for p in prompts], device=device)
        last = torch.tensor([len(p) - 1 for p in prompts], device=device)
        filled = [(row, place) for place, (_, own) in enumerate(part) for row in own]
        rows, source = torch.tensor(filled, device=device).unbind(1)
        logits = self.decoder.prefill(ids, last, self.blocks, self.kv_cache, rows, source)
        self._first_token(logits[source], rows)

    def _first_token(self, logits_SV: torch.Tensor, rows_S: torch.Tensor) -> None:
        """Draw and note the next token of some of the rows."""
        rows, own = self.rows, [None if given is None else given[rows_S] for given in self.rows]
        own = Rows(*cast("Any", own))
        self._make_room(len(rows_S))
        note(own, self.sampled, logits_SV, self.decoder.in_any_order)
        rows.token_R[rows_S], rows.sampled_R[rows_S], rows.alive_R[rows_S] = own.token_R, own.sampled_R, own.alive_R

    def _compact(self, alive: np.ndarray) -> None:
        """Drop rows that nothing waits for and lanes that have run out of work, and give their room to the others."""
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
        taken = torch.from_numpy(kept >= 0).to(self.base.device)
        self.kv_cache.select(index)
        # Idle rows are copies: NaN of a lane that has diverged would reach the next sequence there, as 0 · NaN is NaN.
        self.kv_cache.clear(~taken)
        self.sequence = np.where(kept >= 0, self.sequence[kept.clip(0)], self.scratch)
        self.at = np.where(kept >= 0, self.at[kept.clip(0)], 0)
        old = self.rows
        token_R, position_R, sampled_R = (
            given[index] * taken for given in (old.token_R, old.position_R, old.sampled_R)
        )
        self.rows = self._rows(token_R, position_R, sampled_R, old.alive_R[index] & taken)
        self.blocks = self.decoder.of_lanes(self.blocks, [self.lanes.index(lane) for lane in lanes], len(self.lanes))
        self.lanes, self.slots = lanes, slots
        self.graphs.forget()

    def _own(self, place: int) -> np.ndarray:
        """Row numbers of the lane at this place."""
        return np.arange(place * self.slots, (place + 1) * self.slots)

    def _actions(self, request: int) -> list[Action]:
        own = [i for i, row in enumerate(self.work) if row.request == request]
        index = torch.tensor(own, device=self.base.device)
        tokens, logprobs, entropy = (
            state[index].cpu().numpy()
            for state in (self.sampled.tokens_NT, self.sampled.logprobs_NT, self.sampled.entropy_NT)
        )
        supports = self.keeper and self.keeper.supports(own, self.lengths[own].tolist())
        return actions_of(self.base, tokens, logprobs, entropy, self.lengths[own], supports)
