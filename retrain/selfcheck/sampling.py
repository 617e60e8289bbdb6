"""Sampling: replayed steps against eager ones, sampler against trainer, a lane among others against the lane alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrain.engines.graphs import Capture, StepGraphs
from retrain.policy.protocol import Want
from retrain.selfcheck.agreement import agreement
from retrain.selfcheck.results import Result, judged, skipped
from retrain.selfcheck.subject import Subject, Work

LANES = 5


def graph_equals_eager(subject: Subject) -> Result:
    """The same requests with steps that are replayed from CUDA graphs and with steps that run one by one."""
    if not subject.on_gpu:
        return skipped("CUDA graphs are a GPU's")
    return replayed(subject)


def replayed(subject: Subject) -> Result:
    """As ``graph_equals_eager``, on any device that the engine makes graphs on."""
    graphs, captures = subject.engine.graphs, []
    if not subject.engine.fast:
        return skipped("this model decodes without graphs, through transformers' own forward pass")
    new_capture = graphs.new_capture
    if new_capture is None:  # given up before
        return judged(subject.kinds, {"captures": 0}, messages=list(subject.messages))
    requests = subject.requests(subject.publish([subject.trained(lane) for lane in range(2)]))

    def counted() -> Capture:
        capture = new_capture()

        def captured(step: Any) -> Any:
            captures.append(step)
            return capture(step)

        return captured

    graphs.new_capture = counted
    try:
        with_graphs = subject.engine.sample(requests)
    finally:
        worked = graphs.new_capture is not None
        graphs.new_capture = new_capture if worked else None
    subject.engine.graphs = StepGraphs(None, subject.messages.append)
    try:
        eager = subject.engine.sample(requests)
    finally:
        subject.engine.graphs = graphs
    agreed = agreement(with_graphs, eager)
    count = len(captures) if worked else 0
    values = {"captures": count, "graph_parted": agreed.parted_per_token, "graph_gap": agreed.largest}
    return judged(subject.kinds, values, agreed.words, messages=list(subject.messages))


def sampler_against_trainer(subject: Subject) -> Result:
    """Log-probabilities of what two trained lanes sampled, as the engine and as a fresh pass of the trainer say."""
    policies = [subject.trained(lane) for lane in range(2)]
    requests = subject.requests(subject.publish(policies))
    groups = subject.engine.sample(requests)
    each, gaps = len(requests) // len(policies), [np.zeros(0)]
    for lane, policy in enumerate(policies):
        own = slice(lane * each, (lane + 1) * each)
        samples = subject.samples(requests[own], groups[own])
        scored = policy.score(samples, frozenset({Want.LOGPROBS})).logprobs or []
        for sample, logprobs_T in zip(samples, scored, strict=True):
            gaps.append(np.asarray(logprobs_T, dtype=np.float64) - sample.logprobs[sample.action_mask])
    gaps_N = np.concatenate(gaps)
    ratio_N = np.exp(gaps_N)
    values = {
        "ratio_off": abs(float(ratio_N.mean()) - 1),
        "k3": float((np.expm1(gaps_N) - gaps_N).mean()),
        "p99": float(np.quantile(np.abs(gaps_N), 0.99)),
    }
    return judged(
        subject.kinds, values, f"{len(gaps_N)} tokens of 2 trained lanes", tokens=len(gaps_N),
        largest=float(np.abs(gaps_N).max()), variance=float(ratio_N.var()),
    )  # fmt: skip


def lane_alone(subject: Subject) -> Result:
    """Five lanes in one batch, and each of them by itself."""
    policies = [subject.trained(lane) for lane in range(LANES)]
    refs = subject.publish(policies)
    work = Work(max(1, subject.work.prompts // 2), subject.work.samples, subject.work.tokens)
    requests = subject.requests(refs, work=work)
    together = subject.engine.sample(requests)
    alone = []
    for ref in refs:
        alone += subject.engine.sample([request for request in requests if request.policy == ref])
    agreed = agreement(together, alone)
    values = {"lane_parted": agreed.parted_per_token, "lane_p99": agreed.p99}
    return judged(
        subject.kinds, values, f"{LANES} lanes, {agreed.words}", tokens=agreed.tokens, parted=agreed.parted,
        largest=agreed.largest,
    )  # fmt: skip
