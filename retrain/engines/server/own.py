"""What our own model says of tokens that a server sampled, as it should be and as known mistakes would have it.

A server that reads an adapter differently is wrong in one of a few ways. Each is computed, and the one that is nearest
to what the server said is the likely cause: nobody has to guess from a number that is merely large.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
CLEAR = 5.0
"""A log-likelihood ratio (nats) above which earlier weights explain what a server says better than the current ones:
148 to 1."""
LEAST = 1e-9  # Smallest distance (nats) that counts as different from 0
TOP_P = (0.95, 0.9, 0.8)  # Common top-p values in models' generation_config.json


@dataclass(frozen=True)
class Said:
    """Tokens that a server sampled after a prompt, and the log-probabilities [T] (nats) that it gave."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs_T: np.ndarray

    def sample(self) -> Sample:
        """The same laid flat, as the trainer reads it."""
        return Sample.single_turn(self.prompt_ids, self.token_ids, self.logprobs_T, np.zeros(len(self.token_ids)))


@dataclass(frozen=True)
class Hypothesis:
    """A way in which the server may compute. ``weights`` None is the base alone; ``top_p`` below 1: log-probabilities
    among the most probable tokens that hold this share."""

    name: str
    weights: LoraWeights | None
    temperature: float
    top_p: float = 1.0


def distances(base: BaseModel, lanes: Lanes, said: Sequence[Said], hypotheses: Sequence[Hypothesis]) -> list[float]:
    """How far (root mean square, nats) what was said is from each hypothesis."""
    theirs = np.concatenate([each.logprobs_T for each in said])
    return [rms(theirs - ours(base, lanes, said, hypothesis)) for hypothesis in hypotheses]


def ours(base: BaseModel, lanes: Lanes, said: Sequence[Said], hypothesis: Hypothesis) -> np.ndarray:
    """Our own log-probabilities [all tokens] under a hypothesis, by the forward pass that trains; one text at a time,
    so that this takes no more memory than a server's answer needs."""
    parts = [np.zeros(0)]
    for each in said:
        with torch.no_grad(), _wearing(lanes, hypothesis.weights):
            if hypothesis.top_p < 1:
                parts.append(_cut(base, each, hypothesis))
                continue
            batch = collate([each.sample()], base).to(base.device)
            table_BT, _ = token_logprobs(base, batch, hypothesis.temperature)
            parts.append(table_BT[0].double().cpu().numpy())
    return np.concatenate(parts)


def next_tokens(
    base: BaseModel, lanes: Lanes, prompt: Sequence[int], last: int, weights: LoraWeights, temperature: float
) -> np.ndarray:
    """Log-probabilities [last, V] of the token after each of the ``last`` longest beginnings of a prompt, itself the
    longest."""
    ids = torch.tensor([list(prompt)], device=base.device)
    with torch.no_grad(), _wearing(lanes, weights):
        logits_TV = base.model(input_ids=ids).logits[0, -last:].double() / (temperature or 1.0)
        return torch.log_softmax(logits_TV, -1).float().cpu().numpy()


def rms(differences: np.ndarray) -> float:
    """Root mean square; infinite where a token is impossible under what it is compared with."""
    return float(np.sqrt(np.mean(differences**2))) if len(differences) else 0.0


def misreadings(weights: LoraWeights, temperature: float) -> Iterator[Hypothesis]:
    """Known ways of reading an adapter, or of giving log-probabilities, differently."""
    yield Hypothesis("the adapter never reached the model: it answers as the base", None, temperature)
    rank, scale = weights.rank, weights.scale
    scales = {
        "alpha/rank is left out (scale 1)": 1.0,
        "alpha is not divided by the rank": scale * rank,
        "alpha is divided by the square root of the rank (rsLoRA)": scale * math.sqrt(rank),
        "alpha is divided by the padded rank alone": scale * rank / server_rank(rank),
        "the scale counts twice": scale * scale,
    }
    for name, other in scales.items():
        if not math.isclose(other, scale):
            yield Hypothesis(name, scaled(weights, other), temperature)
    for name, kinds in (("attention", ATTENTION), ("MLP", MLP), ("q_proj and v_proj", ("q_proj", "v_proj"))):
        chosen = [shape.name for shape in weights.shapes if shape.name.rpartition(".")[2] in kinds]
        if chosen and len(chosen) < len(weights.shapes):
            yield Hypothesis(f"only the adapters of {name} count (target modules)", only(weights, chosen), temperature)
    if temperature != 1:
        yield Hypothesis(f"log-probabilities are those of temperature 1, not {temperature:g}", weights, 1.0)
    for top_p in TOP_P:
        yield Hypothesis(f"the server samples with top_p = {top_p:g} of its own", weights, temperature, top_p)


def scaled(weights: LoraWeights, scale: float) -> LoraWeights:
    return LoraWeights(weights.shapes, weights.rank, scale, weights.live_rank, weights.flat)


def only(weights: LoraWeights, names: Sequence[str]) -> LoraWeights:
    """The same where the other layers add nothing."""
    kept = LoraWeights(weights.shapes, weights.rank, weights.scale, weights.live_rank, weights.flat.clone())
    for shape in weights.shapes:
        if shape.name not in names:
            kept.B[shape.name].zero_()
    return kept


def likely_cause(
    base: BaseModel,
    lanes: Lanes,
    samples: Sequence[Sample],
    current: LoraWeights,
    earlier: Mapping[str, LoraWeights],
    temperature: float,
) -> str:
    """Return why a server's log-probabilities differ from the trainer's while it trains, in words and numbers: a stale
    adapter, or none, when earlier weights explain them better than the current ones; else its precision.

    ``earlier`` maps names to weights. The log-probabilities of a stale adapter are nearer to every earlier version than
    to the current one, also where the version that the server has is no longer known here.
    """
    said = [
        Said(sample.token_ids[: sample.prefix].tolist(), sample.token_ids[sample.action_mask].tolist(), own)
        for sample in samples
        for own in [sample.logprobs[sample.action_mask]]
        if sample.action_mask[sample.prefix :].all()  # of one turn
    ]
    if not said:
        return "it cannot be told from these rollouts, which have several turns"
    served_T = np.concatenate([each.logprobs_T for each in said])
    ends = np.cumsum([len(each.logprobs_T) for each in said])[:-1]

    def residuals(weights: LoraWeights | None) -> np.ndarray:
        return served_T - ours(base, lanes, said, Hypothesis("", weights, temperature))

    now = np.split(residuals(current), ends)
    others = {name: np.split(residuals(weights), ends) for name, weights in {**earlier, "the base": None}.items()}
    likeliest = max(others, key=lambda name: _evidence(now, others[name]))
    if _evidence(now, others[likeliest]) < CLEAR:
        apart, other_apart = rms(np.concatenate(now)), rms(np.concatenate(others[likeliest]))
        fit = "is nearest" if apart <= other_apart else f"fits no worse than {likeliest}"
        numbers = f"({apart:.2g} nats away, {likeliest} {other_apart:.2g})"
        return f"it looks like precision: the current version {fit} {numbers}"
    nearer = [i for i, other_T in enumerate(others[likeliest]) if rms(other_T) < rms(now[i])]
    apart, other_apart = (rms(np.concatenate([each[i] for i in nearer])) for each in (now, others[likeliest]))
    exact = other_apart < 0.5 * apart
    if likeliest != "the base":
        cause = f"a stale adapter: {likeliest}{'' if exact else ' or an earlier one'}"
    elif exact:
        cause = "no adapter at all: it answers as the base"
    else:
        cause = "a stale adapter, of an early version: it answers more like the base"
    where = "" if len(nearer) == len(now) else f" in {len(nearer)} of {len(now)} rollouts"
    return f"it looks like {cause} ({other_apart:.2g} nats away{where}, the current version {apart:.2g})"


def _evidence(current: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Return the log-likelihood ratio (nats) of two explanations from their residuals by rollout, for normal noise of
    unknown size: over all rollouts together, or over those alone that the other explanation fits better, because one of
    several servers may be the only one at fault."""

    def ratio(current_T: np.ndarray, other_T: np.ndarray) -> float:
        return (len(current_T) - 1) * math.log(max(rms(current_T), LEAST) / max(rms(other_T), LEAST))

    by_rollout = sum(max(0.0, ratio(*pair)) for pair in zip(current, other, strict=True))
    return max(by_rollout, ratio(np.concatenate(current), np.concatenate(other)))


@contextmanager
def _wearing(lanes: Lanes, weights: LoraWeights | None) -> Iterator[None]:
    with nullcontext() if weights is None else lanes.single(weights):
        yield


def _cut(base: BaseModel, said: Said, hypothesis: Hypothesis) -> np.ndarray:
    """Log-probabilities among the tokens that ``top_p`` leaves; −inf for one that it does not."""
    ids = torch.tensor([[*said.prompt_ids, *said.token_ids]], device=base.device)
    logits_TV = base.model(input_ids=ids).logits[0, len(said.prompt_ids) - 1 : -1].double() / hypothesis.temperature
    sorted_TV, order_TV = torch.softmax(logits_TV, -1).sort(-1, descending=True)
    left_TV = sorted_TV.cumsum(-1) - sorted_TV < hypothesis.top_p
    kept_TV = torch.zeros_like(left_TV).scatter(-1, order_TV, left_TV)
    logprobs_TV = torch.log_softmax(logits_TV.masked_fill(~kept_TV, -math.inf), -1)
    chosen_T1 = torch.tensor(said.token_ids, device=base.device).unsqueeze(-1)
    return logprobs_TV.gather(-1, chosen_T1).squeeze(-1).cpu().numpy()
