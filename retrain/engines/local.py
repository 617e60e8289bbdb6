"""The in-process engine: one decode batch for every prompt of every run of a cohort.

Dense decoders run through ``engines.dense`` and ``engines.slots``. Every other decoder that transformers loads goes
through the model's own forward pass (``engines.grid``), slower, in one batch after the other. Each sequence draws one
uniform number per token from its own stream and inverts the cumulative distribution: batching never changes samples.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from retrain.device import is_out_of_memory
from retrain.engines.dense import Blocks, DenseDecoder, KVCache, SequenceCache
from retrain.engines.graphs import StepGraphs, cuda_capture
from retrain.engines.grid import Grid
from retrain.engines.protocol import Engine, EngineState, Finished
from retrain.engines.slots import LaneRequest, SampleIndex, SlotBatch, check_lengths, lanes_of
from retrain.engines.step import ACTIVATIONS, CPU_DECODING, GPU_DECODING, DecodeSettings, draw, forward, logits
from retrain.errors import RunFailed
from retrain.models.layers import DENSE_FAMILIES, GPU_MOST_ROWS, LOGITS_COPIES
from retrain.policy.arithmetic import FULL
from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel, MemoryPlan, cache_bytes
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.protocol import PolicySnapshot
from retrain.rng import generator
from retrain.threads import Workers
from retrain.types import Action, PolicyRef, SampleRequest

MOST_ROWS = {"cpu": 1024, "cuda": GPU_MOST_ROWS}  # Most rows of a decode batch: more are compute-bound
CACHE_SHARE = 0.25  # Share of decoding memory for sequences that continue in a later call
# Least sequences of a piece of the decode batch: smaller pieces use more cores, but each piece adds a prefill and a
# step (docs/records/performance.md)
LEAST_PIECE_ROWS = 32
PROBE_ROWS, PROBE_WIDTH, PROBE_STEPS = 4, 48, 3  # Rows, tokens per row, and decode steps
# Largest root mean square difference of log-probabilities, relative to the spread of the logits, at which the dense
# decoder is used. Even in fp64, transformers computes norms and angles in fp32
PROBE_LIMITS = {torch.float64: 1e-5, torch.float32: 1e-4}
# The same limit in half precision for one layer; layers round independently, so it grows with the square root of their
# number. Differences measured, divided by that root: 0.0001 to 0.0025 on random models, 0.0006 on the bundled model;
# at least 0.02 if the scaling of attention is wrong by 10 %
PROBE_HALF_LIMIT = 0.006
# Largest difference of a logit from the output layer's product, relative to the largest logit; half precision: 2⁻⁷
PROBE_HEAD_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}


class LocalEngine(Engine):
    """Samples in this process with the base model and the LoRA lanes that are also trained here.

    ``fast``: the model decodes through ``engines.dense``; ``dense=False`` forces the slow path. A batch has as many
    rows as fit in ``decode_bytes``. If memory runs out, decoding continues with half as many rows, ``fitting`` stores
    this number, and ``notify`` is called.
    """

    gives_entropy = True
    exact = True

    def __init__(
        self,
        base: BaseModel,
        lanes: Lanes,
        workers: Workers | None = None,
        dense: bool = True,
        notify: Callable[[str], None] = lambda line: None,
        settings: DecodeSettings | None = None,
    ):
        self.base, self.lanes, self.workers, self.notify = base, lanes, workers or Workers(), notify
        self.settings = settings or (CPU_DECODING if base.device.type == "cpu" else GPU_DECODING)
        self._cache_bytes = cache_bytes(base)
        self.begin(MemoryPlan.of(base))
        self._syncs: list[float] = []
        self.graphs: StepGraphs | None = None
        if base.device.type == "cuda" and not base.is_streamed:
            self.graphs = StepGraphs(partial(cuda_capture, base.device), notify)
        self.decoder = dense_decoder(base, self.settings) if dense else None
        if self.decoder is None and base.dtype not in FULL:
            backbone_of(base)  # found by trial passes, which must run while no lane is active
        self._published: dict[PolicyRef, LoraWeights] = {}
        self.keeps_blocks = False  # Keep blocks with adapters in memory between calls of ``sample``
        self._blocks: tuple[list[LoraWeights], Blocks] | None = None

    @property
    def fast(self) -> bool:
        return self.decoder is not None

    @property
    def sync_seconds(self) -> float:
        return sum(self._syncs)

    def begin(self, plan: MemoryPlan) -> None:
        self.plan, self.decode_bytes = plan, plan.decode_bytes
        self.sequence_cache = SequenceCache(int(CACHE_SHARE * plan.decode_bytes))
        self.fitting: int | None = None

    def state(self) -> EngineState:
        return {"decode_bytes": self.decode_bytes, "fitting": self.fitting}

    def restore(self, state: EngineState) -> None:
        before, self.fitting = state.get("decode_bytes", self.decode_bytes), state.get("fitting")
        self.decode_bytes = self.plan.kept_decode_bytes(before)
        if self.decode_bytes != before:
            gib = 2**30
            self.notify(
                f"decode batches of {before / gib:.1f} GiB do not fit in this device's memory: they have "
                f"{self.decode_bytes / gib:.1f} GiB from now on, so what follows is rounded differently"
            )

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None:
        if not isinstance(weights, LocalSnapshot):
            raise TypeError(f"this engine samples with LoRA adapters, not with {type(weights).__name__}")
        self._published[ref] = weights.weights
        self.sequence_cache.clear()
        self._blocks = None

    def retire(self, ref: PolicyRef) -> None:
        self._published.pop(ref, None)
        self.sequence_cache.clear()
        self._blocks = None

    def forget_sequences(self) -> None:
        self.sequence_cache.clear()

    def forget(self) -> None:
        self._published.clear()
        self._blocks = None

    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        """Implement ``Engine.sample`` with one lane per policy.

        Raises ModelError if a prompt and its completion exceed the model's context, RunFailed for weights that were not
        published.
        """
        longest = check_lengths(requests, self.base.context_length, self.base.name)
        policies, in_lanes = with_lanes(requests)
        weights = [self._weights_of(ref) for ref in policies]
        done: list[list[Action]] = [[] for _ in requests]
        self._syncs = []

        def keep(request: int, actions: list[Action]) -> None:
            version = requests[request].policy.version
            done[request] = [replace(action, policy_version=version) for action in actions]
            if finished is not None:
                finished(request, done[request])

        continues = any(request.sequences for request in requests)
        affordable = self.affordable_rows(longest, any(request.truncates for request in in_lanes), continues)
        rows = min(filter(None, (affordable, max_rows, self.fitting)))
        indices = indices_by_lane(in_lanes)
        while indices:
            try:
                pieces = pieces_of(
                    in_lanes, indices, min(self.workers.count, min(rows, len(indices)) // LEAST_PIECE_ROWS)
                )
                lanes = lanes_of(in_lanes, indices)
                self._decode_pieces(in_lanes, pieces, weights, lanes, rows // len(pieces), keep)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error) or rows <= len(policies):
                    raise
                # Every lane needs at least one row.
                rows = self.fitting = max(len(policies), min(rows, len(indices)) // 2)
                self.sequence_cache.clear()
                self.notify(f"out of memory while decoding: continuing with {rows} sequences at once")
            indices = [index for index in indices if not done[index.request]]
        return done

    def _weights_of(self, ref: PolicyRef) -> LoraWeights:
        if ref not in self._published:
            versions = ", ".join(str(other.version) for other in self._published if other.run_id == ref.run_id)
            raise RunFailed(
                f"no weights were published as version {ref.version} of {ref.run_id}; there is {versions or None}"
            )
        return self._published[ref]

    def _decode_pieces(
        self,
        requests: Sequence[LaneRequest],
        pieces: Sequence[list[SampleIndex]],
        weights: Sequence[LoraWeights],
        lanes: list[int],
        rows: int,
        keep: Finished,
    ) -> None:
        if self.decoder is not None:
            begin = time.perf_counter()
            blocks = self._blocks_of(self.decoder, [weights[lane] for lane in lanes])
            self._synced(begin)
            self.workers.map(lambda piece: self._dense(requests, piece, lanes, blocks, rows, keep), pieces)
        else:
            waves = [wave for piece in pieces for wave in waves_of(requests, piece, rows)]
            self.workers.map(lambda wave: self._plain(requests, wave, weights, keep), waves)

    def _blocks_of(self, decoder: DenseDecoder, weights: list[LoraWeights]) -> Blocks:
        if self._blocks is not None and self._blocks[0] == weights:
            return self._blocks[1]
        self._blocks = None  # frees the memory before the new ones are made
        with torch.no_grad():
            blocks = decoder.blocks(weights)
        if self.keeps_blocks:
            self._blocks = weights, blocks
        return blocks

    def _dense(
        self,
        requests: Sequence[LaneRequest],
        piece: list[SampleIndex],
        lanes: list[int],
        blocks: Blocks,
        rows: int,
        keep: Finished,
    ) -> None:
        assert self.decoder is not None
        places = [lanes.index(lane) for lane in lanes_of(requests, piece)]
        blocks = self.decoder.of_lanes(blocks, places, len(lanes))
        with torch.no_grad():
            SlotBatch(self.decoder, requests, piece, blocks, rows, keep, self.graphs, self.sequence_cache).run()

    def _plain(
        self, requests: Sequence[LaneRequest], wave: list[SampleIndex], weights: Sequence[LoraWeights], keep: Finished
    ) -> None:
        begin, stacked = time.perf_counter(), [weights[lane] for lane in lanes_of(requests, wave)]
        with torch.no_grad(), self.lanes.stacked(stacked):
            self._synced(begin)
            Grid(self.base, requests, wave, self.settings.calls).run(keep)

    def _synced(self, begin: float) -> None:
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        self._syncs.append(time.perf_counter() - begin)

    def affordable_rows(self, length: int, truncated: bool = False, continues: bool = False) -> int:
        """Return the number of rows of ``length`` tokens, 1 to ``MOST_ROWS``, whose cache and logits fit in
        ``decode_bytes``. ``truncated``: top-k, top-p or min-p is used. ``continues``: reserve memory for
        ``sequence_cache``."""
        kind, layers = self.base.device.type, self.base.model.config.get_text_config().num_hidden_layers
        columns = self.settings.columns
        # Truncated sampling holds two more tensors of this size, for the probabilities inside the kept set.
        logits_bytes = (LOGITS_COPIES + 2 * truncated) * 4 * self.base.vocab_size
        budget = self.decode_bytes - continues * self.sequence_cache.limit
        held = -(-length // columns) * columns * self._cache_bytes
        # Resizing a batch copies its cache layer by layer, so one layer's cache is held twice.
        fitting = budget // (held + held // (2 * layers) + logits_bytes)
        return max(1, min(MOST_ROWS.get(kind, MOST_ROWS["cuda"]), fitting))


def with_lanes(requests: Sequence[SampleRequest]) -> tuple[list[PolicyRef], list[LaneRequest]]:
    policies = list(dict.fromkeys(request.policy for request in requests))
    return policies, [LaneRequest(**vars(request), lane=policies.index(request.policy)) for request in requests]


def indices_by_lane(requests: Sequence[LaneRequest]) -> list[SampleIndex]:
    order = sorted(range(len(requests)), key=lambda number: requests[number].lane)
    return [SampleIndex(number, sample) for number in order for sample in range(requests[number].samples)]


def pieces_of(requests: Sequence[LaneRequest], indices: Sequence[SampleIndex], count: int) -> list[list[SampleIndex]]:
    """Cut the samples into at most ``count`` pieces (at least one) of whole requests. Every piece gets about as many
    requests of each lane, because every lane of a batch has as many rows as the lane that needs most."""
    by_lane: dict[int, dict[int, list[SampleIndex]]] = {}
    for index in indices:
        by_lane.setdefault(requests[index.request].lane, {}).setdefault(index.request, []).append(index)
    pieces: list[list[SampleIndex]] = [[] for _ in range(max(1, count))]
    dealt = 0
    for by_request in by_lane.values():
        groups, share = list(by_request.values()), -(-len(by_request) // len(pieces))
        for begin in range(0, len(groups), share):
            pieces[dealt % len(pieces)] += [index for group in groups[begin : begin + share] for index in group]
            dealt += 1
    return [piece for piece in pieces if piece]


def waves_of(requests: Sequence[LaneRequest], indices: Sequence[SampleIndex], rows: int) -> list[list[SampleIndex]]:
    """Cut the samples into batches of whole requests, with about ``rows`` rows and equally many from every lane."""
    by_lane: dict[int, list[int]] = {}
    for request in dict.fromkeys(index.request for index in indices):
        by_lane.setdefault(requests[request].lane, []).append(request)
    most = max(requests[index.request].samples for index in indices)
    per_lane = max(1, rows // len(by_lane) // most)
    longest = max(map(len, by_lane.values()))
    per_lane = -(-longest // -(-longest // per_lane))  # waves of equal size
    waves = []
    for begin in range(0, longest, per_lane):
        chosen = {request for lane in by_lane.values() for request in lane[begin : begin + per_lane]}
        waves.append([index for index in indices if index.request in chosen])
    return waves


# -- which models decode through engines.dense -----------------------------------------------------------------------


def is_supported(base: BaseModel) -> bool:
    """Return whether the model is a plain decoder: of a known family, with full attention and unquantised weights."""
    config = base.model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = str(rope.get("rope_type", rope.get("type", "default")))
    # Mistral windows every layer when a window is set; other families name windowed layers in layer_types.
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (
        config.model_type in DENSE_FAMILIES
        and type(base.model).__name__.removesuffix("ForCausalLM").lower() == config.model_type
        and kinds == {"full_attention"}
        and not (windowed and config.model_type == "mistral")
        and config.hidden_act in ACTIVATIONS
        # Angles that depend on the length of the sequence do not fit one table.
        and "dynamic" not in rope_type
        and rope_type != "longrope"
        and not getattr(config, "quantization_config", None)
    )


def dense_decoder(base: BaseModel, settings: DecodeSettings) -> DenseDecoder | None:
    if not is_supported(base):
        return None
    decoder = DenseDecoder(base, settings)
    return decoder if reproduces(decoder, base) else None


def reproduces(decoder: DenseDecoder, base: BaseModel) -> bool:
    """Run random tokens through the decoder and through the model's own forward pass; return whether the
    log-probabilities of drawn tokens agree within ``PROBE_LIMITS``. No lane may be active."""
    noise, device = generator("probe of the dense decoder"), base.device
    shape = (PROBE_ROWS, min(PROBE_WIDTH, base.context_length))
    ids_RT = torch.from_numpy(noise.integers(0, base.vocab_size, shape)).to(device)
    gaps, spreads = [], []
    with torch.no_grad():
        hidden_RTH, last_RV = _model_forward(base, ids_RT)
        for got_NV, index in _probe(decoder, ids_RT):
            want_NV = decoder.output(hidden_RTH[index])
            uniforms_N = torch.from_numpy(noise.random(len(want_NV))).to(device)
            token_N, want_N, _, _ = draw(want_NV, uniforms_N, exact_sums=decoder.exact_sums)
            gaps.append(got_NV.log_softmax(-1).gather(1, token_N.unsqueeze(1)).squeeze(1) - want_N)
            spreads.append(want_NV.var(-1))
        last_gap = (last_RV - decoder.output(hidden_RTH[:, -1])).abs().max() / last_RV.abs().max()
    gap, spread = torch.cat(gaps).square().mean().sqrt(), torch.cat(spreads).mean().sqrt()
    limit = PROBE_LIMITS.get(base.dtype, PROBE_HALF_LIMIT * math.sqrt(len(decoder.layers)))
    return bool(gap <= limit * spread) and bool(last_gap <= PROBE_HEAD_LIMITS.get(base.dtype, 2**-7))


def _model_forward(base: BaseModel, ids_RT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of the model's output layer [R, T, H] and the logits [R, V] of the last column."""
    seen: list[torch.Tensor] = []
    hook = base.model.model.register_forward_hook(lambda body, args, output: seen.append(output.last_hidden_state))
    try:
        logits_R1V = base.model(input_ids=ids_RT, use_cache=False, logits_to_keep=1).logits
    finally:
        hook.remove()
    return seen[0], logits_R1V[:, -1]


def _probe(
    decoder: DenseDecoder, ids_RT: torch.Tensor
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the decoder's logits [N, V] with their rows and columns in ``ids_RT``: by prefill, then by decode steps."""
    rows, width = ids_RT.shape
    read = width - PROBE_STEPS
    row_R = torch.arange(rows, device=ids_RT.device)
    blocks: Any = decoder.blocks([])  # a list or an iterable: ``forward`` iterates over them once
    kv_cache = KVCache(decoder, rows, width)
    x_RTH = decoder.hidden(ids_RT[:, :read], blocks, kv_cache, row_R, row_R)
    for row in row_R:
        columns = torch.arange(read, device=ids_RT.device)
        yield logits(decoder.frame, x_RTH[row]), (row.expand(read), columns)
    frame, start_R = decoder.frame_of(width), (row_R + 1) * read // rows
    for step in range(PROBE_STEPS):
        index = (row_R, start_R + step)
        yield forward(frame, blocks, ids_RT[index], index[1], kv_cache.keys, kv_cache.values, width, True), index
