"""The in-process engine: one decode batch for every prompt of every run of a cohort.

Dense decoders run through ``engines.dense`` and ``engines.slots``; every other decoder that transformers loads goes
through the model's own forward pass (``engines.grid``), slower and in waves. Each sequence draws one uniform number
per token from its own stream and inverts the cumulative distribution: batching never changes what is sampled.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from retrain.device import is_out_of_memory
from retrain.engines.dense import Blocks, DenseDecoder, dense_decoder
from retrain.engines.graphs import StepGraphs
from retrain.engines.grid import Grid
from retrain.engines.kept import KeptSequences
from retrain.engines.protocol import Finished, PolicyRef, SampleRequest, check_lengths
from retrain.engines.rows import LaneRequest, Row
from retrain.engines.slots import COLUMNS, SlotBatch
from retrain.errors import RunFailed
from retrain.models.layers import GPU_MOST_ROWS, LOGITS_COPIES
from retrain.policy.arithmetic import FULL
from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.memory import MemoryPlan, cache_bytes
from retrain.policy.protocol import PolicySnapshot
from retrain.threads import Workers
from retrain.types import Action

MOST_ROWS = {"cpu": 1024, "cuda": GPU_MOST_ROWS}
"""Upper bound on the rows of a decode batch; beyond it decoding is compute-bound."""
KEPT_SHARE = 0.25  # Share of decoding memory for sequences that continue in a later call
LEAST_PIECE_ROWS = 32
"""Sequences that a piece of the decode batch has at least: what smaller ones gain by a core each, they pay for by a
prefill and a step of their own (``benchmarks/decode.py``, beside ``--least-piece-rows 4``)."""


class LocalEngine:
    """Samples with the base model and lanes that also train.

    ``fast`` tells whether the model decodes through ``engines.dense``; ``dense=False`` forces the slow path. A batch
    has the rows that ``decode_bytes`` hold; one that runs out of memory all the same goes on with half of them.
    ``fitting`` remembers how many did fit, ``tell`` hears of it.
    """

    gives_entropy = True
    exact = True
    beside = False

    def __init__(
        self,
        base: BaseModel,
        lanes: Lanes,
        workers: Workers | None = None,
        dense: bool = True,
        tell: Callable[[str], None] = lambda line: None,
    ):
        self.base, self.lanes, self.workers, self.tell = base, lanes, workers or Workers(), tell
        self.begin(MemoryPlan.of(base))
        self._syncs: list[float] = []
        self.graphs = StepGraphs(None, tell) if base.passes else StepGraphs.of(base.device, tell)
        self.decoder = dense_decoder(base) if dense else None
        if self.decoder is None and base.dtype not in FULL:
            backbone_of(base)  # the grid takes its output layer; examined while no lane is active
        self._published: dict[PolicyRef, LoraWeights] = {}
        self.keeps_blocks = False
        """Whether the products of base and adapters stay in memory from one ``sample`` to the next."""
        self._blocks: tuple[list[LoraWeights], Blocks] | None = None

    @property
    def fast(self) -> bool:
        """Whether the model decodes as plain matrix products."""
        return self.decoder is not None

    @property
    def sync_seconds(self) -> float:
        """Seconds in which the last ``sample`` merged or stacked the adapters' weights, over all threads."""
        return sum(self._syncs)

    @property
    def side_by_side(self) -> int:
        """How many pieces of a batch are decoded at once."""
        return self.workers.count

    def begin(self, plan: MemoryPlan) -> None:
        self.plan, self.decode_bytes = plan, plan.decode_bytes
        self.kept = KeptSequences(int(KEPT_SHARE * plan.decode_bytes))
        self.fitting: int | None = None

    def state(self) -> dict[str, Any]:
        return {"decode_bytes": self.decode_bytes, "fitting": self.fitting}

    def restore(self, state: Mapping[str, Any]) -> None:
        before, self.fitting = state["decode_bytes"], state["fitting"]
        self.decode_bytes = self.plan.kept_decode_bytes(before)
        if self.decode_bytes != before:
            gib = 2**30
            self.tell(
                f"decode batches of {before / gib:.1f} GiB do not fit in this device's memory: they have "
                f"{self.decode_bytes / gib:.1f} GiB from now on, so what follows is rounded differently"
            )

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        if not isinstance(weights, LocalSnapshot):
            raise TypeError(f"this engine samples with LoRA adapters, not with {type(weights).__name__}")
        self._published[ref] = weights.weights
        self.kept.clear()
        self._blocks = None

    def retire(self, ref: PolicyRef) -> None:
        self._published.pop(ref, None)
        self.kept.clear()
        self._blocks = None

    def forget_sequences(self) -> None:
        self.kept.clear()

    def give_up(self) -> None:
        """See ``Engine.give_up``: this process samples in one thread."""

    def forget(self) -> None:
        self._published.clear()
        self._blocks = None

    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        """See ``Engine.sample``; the lanes of the batch are the policies in the order of their first requests.

        Raises ModelError when a prompt and its completion exceed the model's context, RunFailed for weights that were
        not published.
        """
        longest = check_lengths(requests, self.base.context_length, self.base.name)
        lanes = {ref: lane for lane, ref in enumerate(dict.fromkeys(request.policy for request in requests))}
        weights = [self.weights_of(ref) for ref in lanes]
        asked = [LaneRequest(**vars(request), lane=lanes[request.policy]) for request in requests]
        done: list[list[Action]] = [[] for _ in asked]
        self._syncs = []

        def keep(request: int, actions: list[Action]) -> None:
            version = asked[request].policy.version
            done[request] = [replace(action, policy_version=version) for action in actions]
            if finished is not None:
                finished(request, done[request])

        work = [
            Row(index, sample)
            for lane in range(len(lanes))
            for index, request in enumerate(asked)
            if request.lane == lane
            for sample in range(request.samples)
        ]
        going_on = any(request.sequences for request in requests)
        affordable = self.affordable_rows(longest, any(request.truncates for request in requests), going_on)
        rows = min(bound for bound in (affordable, max_rows, self.fitting) if bound)
        while True:
            try:
                self._decode(asked, work, weights, rows, keep)
                return done
            except RuntimeError as error:
                if not is_out_of_memory(error) or rows <= len(lanes):
                    raise
                rows = self.fitting = max(len(lanes), min(rows, len(work)) // 2)
                self.kept.clear()
                self.tell(f"out of memory while decoding: goes on with {rows} sequences at once")
            work = [row for row in work if not done[row.request]]

    def weights_of(self, ref: PolicyRef) -> LoraWeights:
        """What was published under this name. Raises RunFailed where nothing was."""
        if ref not in self._published:
            there = ", ".join(str(each.version) for each in self._published if each.run_id == ref.run_id)
            raise RunFailed(
                f"no weights were published as version {ref.version} of {ref.run_id}; there is {there or None}"
            )
        return self._published[ref]

    def _decode(
        self,
        requests: Sequence[LaneRequest],
        work: list[Row],
        weights: Sequence[LoraWeights],
        rows: int,
        keep: Finished,
    ) -> None:
        """Decode the sequences, at most ``rows`` at once, in pieces side by side."""
        if not work:
            return
        pieces = self._pieces(requests, work, min(rows, len(work)) // LEAST_PIECE_ROWS)
        lanes = sorted({requests[row.request].lane for row in work})
        self.decode_pieces(requests, pieces, weights, lanes, rows // len(pieces), keep)

    def decode_pieces(
        self,
        requests: Sequence[LaneRequest],
        pieces: Sequence[list[Row]],
        weights: Sequence[LoraWeights],
        lanes: list[int],
        rows: int,
        keep: Finished,
    ) -> None:
        """Decode pieces of the work side by side, each at most ``rows`` sequences at once; ``lanes`` are those of the
        whole work."""
        if self.decoder is not None:
            begin = time.perf_counter()
            blocks = self._blocks_of(self.decoder, [weights[lane] for lane in lanes])
            self._synced(begin)
            self.workers.map(lambda piece: self._dense(requests, piece, lanes, blocks, rows, keep), pieces)
        else:
            waves = [wave for piece in pieces for wave in _waves(requests, piece, rows)]
            self.workers.map(lambda wave: self._plain(requests, wave, weights, keep), waves)

    def _blocks_of(self, decoder: DenseDecoder, weights: list[LoraWeights]) -> Blocks:
        if self._blocks is not None and self._blocks[0] == weights:
            return self._blocks[1]
        self._blocks = None  # not two at once
        with torch.no_grad():
            blocks = decoder.blocks(weights)
        if self.keeps_blocks:
            self._blocks = weights, blocks
        return blocks

    def _dense(
        self,
        requests: Sequence[LaneRequest],
        work: list[Row],
        lanes: list[int],
        blocks: Blocks,
        rows: int,
        keep: Finished,
    ) -> None:
        assert self.decoder is not None
        used = sorted({requests[row.request].lane for row in work})
        own = self.decoder.of_lanes(blocks, [lanes.index(lane) for lane in used], len(lanes))
        with torch.no_grad():
            SlotBatch(self.base, self.decoder, requests, work, used, own, rows, keep, self.graphs, self.kept).run()

    def _plain(
        self, requests: Sequence[LaneRequest], wave: list[Row], weights: Sequence[LoraWeights], keep: Finished
    ) -> None:
        used = sorted({requests[row.request].lane for row in wave})
        begin = time.perf_counter()
        with torch.no_grad(), self.lanes.stacked([weights[lane] for lane in used]):
            self._synced(begin)
            grid = Grid(self.base, requests, wave, used)
            logits = grid.prefill()
            for step in range(grid.max_tokens):
                grid.draw(logits, step)
                if grid.compact_or_finished(step):
                    break
                logits = grid.forward(step)
            actions = grid.actions()
        for request in dict.fromkeys(row.request for row in wave):
            keep(request, [action for row, action in actions if row.request == request])

    def _synced(self, begin: float) -> None:
        """Note that the adapters' weights are there, asked for at ``begin``."""
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        self._syncs.append(time.perf_counter() - begin)

    def _pieces(self, requests: Sequence[LaneRequest], work: list[Row], most: int) -> list[list[Row]]:
        """The work cut into one piece per worker, ``most`` at most, of whole requests: each lane's are dealt out
        evenly, because every lane has as many rows of a batch as the one with most."""
        of_lane: dict[int, dict[int, list[Row]]] = {}
        for row in work:
            of_lane.setdefault(requests[row.request].lane, {}).setdefault(row.request, []).append(row)
        pieces: list[list[Row]] = [[] for _ in range(max(1, min(self.side_by_side, most)))]
        dealt = 0
        for own in of_lane.values():
            share = -(-len(own) // len(pieces))
            groups = list(own.values())
            for begin in range(0, len(groups), share):
                pieces[dealt % len(pieces)] += [row for group in groups[begin : begin + share] for row in group]
                dealt += 1
        return [piece for piece in pieces if piece]

    def affordable_rows(self, length: int, truncated: bool = False, going_on: bool = False) -> int:
        """Rows of ``length`` tokens whose cache and logits ``decode_bytes`` hold, beside sequences that go on."""
        kind, layers = self.base.device.type, self.base.model.config.get_text_config().num_hidden_layers
        columns = COLUMNS.get(kind, COLUMNS["cuda"])
        # Where truncated, what is left of the mass, twice.
        logits = (LOGITS_COPIES + 2 * truncated) * 4 * self.base.vocab_size
        room = self.decode_bytes - going_on * self.kept.limit
        held = -(-length // columns) * columns * cache_bytes(self.base)
        # One layer's cache once more, because a batch that is resized copies layer by layer.
        fitting = room // (held + held // (2 * layers) + logits)
        return max(1, min(MOST_ROWS.get(kind, MOST_ROWS["cuda"]), fitting))


def _waves(requests: Sequence[LaneRequest], work: list[Row], rows: int) -> list[list[Row]]:
    """Whole requests in batches of about ``rows`` rows, as many from each lane as it has."""
    by_lane: dict[int, list[int]] = {}
    for request in dict.fromkeys(row.request for row in work):
        by_lane.setdefault(requests[request].lane, []).append(request)
    most = max(requests[row.request].samples for row in work)
    each = max(1, rows // len(by_lane) // most)
    longest = max(map(len, by_lane.values()))
    each = -(-longest // -(-longest // each))  # waves of equal size
    waves = []
    for start in range(0, longest, each):
        chosen = {request for own in by_lane.values() for request in own[start : start + each]}
        waves.append([row for row in work if row.request in chosen])
    return waves
