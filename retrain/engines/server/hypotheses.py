"""Computes the log-probabilities that a server with a known mistake would return.

The canary calls it before training, and ``training.watch`` during a run. A server that misreads an adapter does so
in one of a few ways; the hypothesis nearest to the server's log-probabilities is reported as the likely cause.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from retrain.engines.server.adapters import server_rank
from retrain.policy.backbone import collate, token_logprobs
from retrain.policy.base import BaseModel
from retrain.policy.lora import Lanes, LoraWeights
from retrain.types import Sample

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn"), ("gate_proj", "up_proj", "down_proj")
TOP_P = (0.95, 0.9, 0.8)  # Common top-p values in models' generation_config.json


@dataclass(frozen=True)
class ServedTokens:
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs_T: np.ndarray  # The server's, in nats

    def sample(self) -> Sample:
        return Sample.single_turn(self.prompt_ids, self.token_ids, self.logprobs_T, np.zeros(len(self.token_ids)))


@dataclass(frozen=True)
class Hypothesis:
    """A way in which the server may compute log-probabilities."""

    name: str
    weights: LoraWeights | None  # None: the base
    temperature: float
    top_p: float = 1.0  # Below 1: probabilities are renormalised over this nucleus


def distances(
    base: BaseModel, lanes: Lanes, served: Sequence[ServedTokens], hypotheses: Sequence[Hypothesis]
) -> list[float]:
    """Return, for each hypothesis, the root mean square difference (nats) of the served log-probabilities from it."""
    server_T = np.concatenate([completion.logprobs_T for completion in served])
    return [rms(server_T - trainer_logprobs(base, lanes, served, hypothesis)) for hypothesis in hypotheses]


def trainer_logprobs(
    base: BaseModel, lanes: Lanes, served: Sequence[ServedTokens], hypothesis: Hypothesis
) -> np.ndarray:
    """Return the log-probabilities (nats) of all served tokens, concatenated, by the trainer's forward pass under a
    hypothesis. Computes one completion at a time to limit memory."""
    parts = [np.zeros(0)]
    for completion in served:
        with torch.no_grad(), _active(lanes, hypothesis.weights):
            if hypothesis.top_p < 1:
                parts.append(_nucleus_logprobs(base, completion, hypothesis))
                continue
            batch = collate([completion.sample()], base).to(base.device)
            table_BT, _ = token_logprobs(base, batch, hypothesis.temperature)
            parts.append(table_BT[0].double().cpu().numpy())
    return np.concatenate(parts)


def next_tokens(
    base: BaseModel, lanes: Lanes, prompt: Sequence[int], last: int, weights: LoraWeights, temperature: float
) -> np.ndarray:
    """Return the log-probabilities [last, V] (nats) of the next token after each of the ``last`` longest prefixes of a
    prompt, the full prompt included."""
    ids = torch.tensor([list(prompt)], device=base.device)
    with torch.no_grad(), _active(lanes, weights):
        logits_TV = base.model(input_ids=ids).logits[0, -last:].double() / (temperature or 1.0)
        return torch.log_softmax(logits_TV, -1).float().cpu().numpy()


def rms(differences: np.ndarray) -> float:
    """Return the root mean square; infinite if a side gives a token probability 0, and 0 without tokens."""
    return float(np.sqrt(np.mean(differences**2))) if len(differences) else 0.0


def misreadings(weights: LoraWeights, temperature: float) -> Iterator[Hypothesis]:
    yield Hypothesis("the adapter never reached the model: it answers as the base", None, temperature)
    alpha = server_rank(weights.live_rank)  # as written for servers: B is already scaled
    factors = {
        "alpha is not divided by the rank": alpha,
        "alpha is divided by the square root of the rank (rsLoRA)": math.sqrt(alpha),
    }
    for name, factor in factors.items():
        scaled = LoraWeights(weights.shapes, weights.rank, weights.scale * factor, weights.live_rank, weights.flat)
        yield Hypothesis(name, scaled, temperature)
    for name, kinds in (("attention", ATTENTION), ("MLP", MLP), ("q_proj and v_proj", ("q_proj", "v_proj"))):
        chosen = [shape.name for shape in weights.shapes if shape.name.rpartition(".")[2] in kinds]
        if chosen and len(chosen) < len(weights.shapes):
            yield Hypothesis(
                f"only the adapters of {name} count (target modules)", with_layers(weights, chosen), temperature
            )
    yield from sampling_misreadings(weights, temperature)


def sampling_misreadings(weights: LoraWeights | None, temperature: float) -> Iterator[Hypothesis]:
    if temperature != 1:
        yield Hypothesis(f"log-probabilities are those of temperature 1, not {temperature:g}", weights, 1.0)
    for top_p in TOP_P:
        yield Hypothesis(f"the server samples with top_p = {top_p:g} of its own", weights, temperature, top_p)


def with_layers(weights: LoraWeights, names: Sequence[str]) -> LoraWeights:
    copied = weights.frozen()
    for shape in weights.shapes:
        if shape.name not in names:
            copied.B[shape.name].zero_()
    return copied


@contextmanager
def _active(lanes: Lanes, weights: LoraWeights | None) -> Iterator[None]:
    with nullcontext() if weights is None else lanes.single(weights):
        yield


def _nucleus_logprobs(base: BaseModel, served: ServedTokens, hypothesis: Hypothesis) -> np.ndarray:
    """Return log-probabilities (nats) [T], renormalised over the nucleus of ``top_p``; −inf for tokens outside it."""
    ids = torch.tensor([[*served.prompt_ids, *served.token_ids]], device=base.device)
    logits_TV = base.model(input_ids=ids).logits[0, len(served.prompt_ids) - 1 : -1].double() / hypothesis.temperature
    sorted_TV, order_TV = torch.softmax(logits_TV, -1).sort(-1, descending=True)
    in_nucleus_TV = sorted_TV.cumsum(-1) - sorted_TV < hypothesis.top_p
    kept_TV = torch.zeros_like(in_nucleus_TV).scatter(-1, order_TV, in_nucleus_TV)
    logprobs_TV = torch.log_softmax(logits_TV.masked_fill(~kept_TV, -math.inf), -1)
    chosen_T1 = torch.tensor(served.token_ids, device=base.device).unsqueeze(-1)
    return logprobs_TV.gather(-1, chosen_T1).squeeze(-1).cpu().numpy()
