"""Check sampling: replayed against eager steps, sampler against trainer, lanes in a batch against single lanes."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from retrain.doctor.results import SKIP, Result, judged
from retrain.doctor.subject import DoctorModel, Sizes
from retrain.types import Action, Want

LANES = 5


class Agreement(NamedTuple):
    """Agreement of two samplings. ``parted``: number of sequences that differ. ``tokens``: tokens before the first
    difference in each sequence; ``p99`` and ``largest``: absolute differences of their log-probabilities (nats),
    infinite without tokens."""

    summary: str
    tokens: int
    parted: int
    parted_per_token: float
    p99: float
    largest: float


def agreement(groups: Sequence[Sequence[Action]], others: Sequence[Sequence[Action]]) -> Agreement:
    parted, gaps = 0, []
    for group, other_group in zip(groups, others, strict=True):
        for action, other in zip(group, other_group, strict=True):
            pairs = zip(action.token_ids, other.token_ids, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(action), len(other)))
            difference = action.logprobs_T[:common].astype(np.float64) - other.logprobs_T[:common]
            gaps.append(np.abs(difference))
            parted += action.token_ids != other.token_ids
    gaps_N = np.concatenate(gaps)
    tokens = len(gaps_N)
    p99, largest = (float(np.quantile(gaps_N, 0.99)), float(gaps_N.max())) if tokens else (math.inf, math.inf)
    exactly = ", bit for bit" if not parted and largest == 0 else ""
    summary = f"{len(gaps) - parted} of {len(gaps)} sequences equal{exactly}"
    return Agreement(summary, tokens, parted, parted / max(1, tokens), p99, largest)


def graph_equals_eager(subject: DoctorModel) -> Result:
    engine, graphs = subject.engine, subject.engine.graphs
    captures_steps = graphs is not None and graphs.new_capture is not None
    if not captures_steps and not subject.on_gpu:
        return Result(SKIP, "CUDA graphs are a GPU's")
    if not engine.fast:
        return Result(SKIP, "this model decodes without graphs, through transformers' own forward pass")
    if graphs is None or not captures_steps:  # capturing has failed before
        return judged(subject.kinds, {"captures": 0}, messages=list(subject.messages))
    requests = subject.requests(subject.publish([subject.trained(lane) for lane in range(2)]))
    captures = graphs.captures
    with_graphs = engine.sample(requests)
    captures = graphs.captures - captures if graphs.new_capture is not None else 0
    with patch.object(engine, "graphs", None):
        agreed = agreement(with_graphs, engine.sample(requests))
    values = {"captures": captures, "graph_parted": agreed.parted_per_token, "graph_gap": agreed.largest}
    return judged(subject.kinds, values, agreed.summary, messages=list(subject.messages))


def sampler_against_trainer(subject: DoctorModel) -> Result:
    policies = [subject.trained(lane) for lane in range(2)]
    requests = subject.requests(subject.publish(policies))
    samples = subject.samples(requests, subject.engine.sample(requests))
    per_lane, gaps = len(samples) // len(policies), []
    for lane, policy in enumerate(policies):
        lane_samples = samples[lane * per_lane : (lane + 1) * per_lane]
        scored = policy.score(lane_samples, frozenset({Want.LOGPROBS})).logprobs or []
        for sample, logprobs_T in zip(lane_samples, scored, strict=True):
            gaps.append(np.asarray(logprobs_T, dtype=np.float64) - sample.logprobs[sample.action_mask])
    gaps_N = np.concatenate(gaps)
    ratio_N = np.exp(gaps_N)
    values = {
        "ratio_off": abs(float(ratio_N.mean()) - 1),
        "k3": float((np.expm1(gaps_N) - gaps_N).mean()),
        "p99": float(np.quantile(np.abs(gaps_N), 0.99)),
    }
    facts = {"tokens": len(gaps_N), "largest": float(np.abs(gaps_N).max()), "variance": float(ratio_N.var())}
    return judged(subject.kinds, values, f"{len(gaps_N)} tokens of 2 trained lanes", **facts)


def lane_alone(subject: DoctorModel) -> Result:
    refs = subject.publish([subject.trained(lane) for lane in range(LANES)])
    sizes = Sizes(max(1, subject.sizes.prompts // 2), subject.sizes.samples, subject.sizes.tokens)
    requests = subject.requests(refs, sizes=sizes)
    in_batch, separate = subject.engine.sample(requests), []
    for ref in refs:
        separate += subject.engine.sample([request for request in requests if request.policy == ref])
    agreed = agreement(in_batch, separate)
    values = {"lane_parted": agreed.parted_per_token, "lane_p99": agreed.p99}
    facts = {"tokens": agreed.tokens, "parted": agreed.parted, "largest": agreed.largest}
    return judged(subject.kinds, values, f"{LANES} lanes, {agreed.summary}", **facts)
