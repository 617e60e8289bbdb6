"""The sequences of a decode batch: which sample of which request they are, their settings, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from retrain.engines.step import Rows, SampledTokens, SupportRecord
from retrain.errors import ModelError
from retrain.policy.base import BaseModel
from retrain.rng import uniforms
from retrain.types import Action, PolicyRef, SampleRequest, Support


@dataclass(frozen=True)
class LaneRequest(SampleRequest):
    """A request whose weights are lane ``lane`` of the decode batch."""

    lane: int = 0

    def uniforms_T(self, sample: int) -> np.ndarray:
        """Return the uniform numbers that draw this sample's tokens, float64 [max_tokens]."""
        stream = self.streams[sample] if self.streams else (*self.stream, sample)
        return uniforms(self.drawn + self.max_tokens, *stream)[self.drawn :]

    @property
    def truncates(self) -> bool:
        """Return whether completions are sampled from less than the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class SampleIndex:
    """One sequence to sample: sample ``sample`` of request ``request``."""

    request: int
    sample: int


def with_lanes(requests: Sequence[SampleRequest]) -> tuple[list[PolicyRef], list[LaneRequest]]:
    """Return the policies, which are the lanes of the batch, and the requests with their lanes."""
    policies = list(dict.fromkeys(request.policy for request in requests))
    return policies, [LaneRequest(**vars(request), lane=policies.index(request.policy)) for request in requests]


def lanes_of(requests: Sequence[LaneRequest], indices: Sequence[SampleIndex]) -> list[int]:
    return sorted({requests[index.request].lane for index in indices})


def indices_by_lane(requests: Sequence[LaneRequest]) -> list[SampleIndex]:
    """Return all samples of the requests, lane by lane."""
    order = sorted(range(len(requests)), key=lambda number: requests[number].lane)
    return [SampleIndex(number, sample) for number in order for sample in range(requests[number].samples)]


def check_lengths(requests: Sequence[SampleRequest], context: int, owner: str) -> int:
    """Return the tokens of the longest prompt with its completion. Raises ModelError when they exceed ``context``, the
    tokens that ``owner`` holds."""
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
    """The sequences of a decode batch: settings on the host, uniforms and results on the device.

    ``requests`` and ``indices`` have an entry per sequence, the tables one more: that of the sequence ``scratch``,
    which idle rows hold.
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
        """Return idle rows that hold these sequences."""
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
        """Write to the device which sequences the rows hold, and the settings of each."""
        rows.sequence_R.copy_(torch.from_numpy(sequence_R))
        rows.limit_R.copy_(torch.from_numpy(self.limits[sequence_R]))
        if rows.temperature_R1 is not None:
            rows.temperature_R1.copy_(torch.from_numpy(self.temperatures[sequence_R]).unsqueeze(1))
        if rows.greedy_R1 is not None:
            rows.greedy_R1.copy_(torch.from_numpy(self.greedy[sequence_R]).unsqueeze(1))
        if rows.cut_R3 is not None and self.cuts is not None:
            rows.cut_R3.copy_(torch.from_numpy(self.cuts[sequence_R]))

    def make_room(self, draws: int) -> bool:
        """Reserve space for the kept sets of so many more draws; return whether the record has moved. Waits for the
        device where sequences are truncated."""
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
        """Return the completions of a request: of each the first ``lengths`` tokens."""
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
    """Return ``cut_R3`` of these requests and of scratch, float64; None when none is truncated."""
    cuts = [
        (min(r.top_k or vocabulary, vocabulary), r.top_p, r.min_p) if r.truncates else (0, 1.0, 0.0) for r in requests
    ]
    return np.array([*cuts, (0, 1.0, 0.0)], dtype=np.float64) if any(r.truncates for r in requests) else None


def empty_record(count: int, longest: int, most: int, device: torch.device) -> SupportRecord:
    """Return the record of ``count`` sequences of at most ``longest`` tokens, each drawn from at most ``most`` ids."""
    return SupportRecord(
        ids_M=torch.empty(1, dtype=torch.int32, device=device),
        used_1=torch.zeros(1, dtype=torch.long, device=device),
        first_NT=torch.zeros(count, longest, dtype=torch.long, device=device),
        count_NT=torch.zeros(count, longest, dtype=torch.long, device=device),
        rank_K=torch.arange(most, device=device),
    )


def supports_of(record: SupportRecord, sequences: torch.Tensor, lengths_N: np.ndarray) -> list[Support | None]:
    """Return the kept set of every token of these sequences; None for a sequence that was not truncated."""
    first_NT, count_NT = (table[sequences].cpu().numpy() for table in (record.first_NT, record.count_NT))
    supports: list[Support | None] = []
    for first_T, count_T, length in zip(first_NT, count_NT, lengths_N, strict=True):
        first_T, count_T = first_T[:length], count_T[:length]
        if not count_T.any():
            supports.append(None)
            continue
        offsets = np.concatenate([[0], count_T.cumsum()])
        index = np.repeat(first_T - offsets[:-1], count_T) + np.arange(offsets[-1])
        ids = record.ids_M[torch.from_numpy(index).to(record.ids_M.device)]
        supports.append(Support(ids.cpu().numpy(), offsets))
    return supports


def select_rows(rows: Rows, index: torch.Tensor) -> Rows:
    """Return copies of some of the rows."""
    optional = (None if table is None else table[index] for table in (rows.temperature_R1, rows.greedy_R1, rows.cut_R3))
    return Rows(*(table[index] for table in rows[:6]), *optional)
