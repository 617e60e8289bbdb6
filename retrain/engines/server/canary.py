"""Before anything is trained: an adapter whose effect is known has to change a server's log-probabilities by it.

An adapter that a server ignores, reads with another scale or applies to half of the layers shows in no error: training
goes on, off-policy, and learns little or nothing. So one that changes the model a lot is loaded, tokens are sampled
with it and with the base, and every log-probability is compared with our own. Samples are taken twice with the same
seeds, and with other ones. What does not agree is refused, with the numbers and the likely cause.

Every server is tried by itself. One that is away meanwhile, or goes away later, is tried when it comes back: while the
model trains nothing of ours can be computed, so what it should say of one next token is computed beforehand.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from retrain.engines.server.client import Server
from retrain.engines.server.engine import ServerEngine
from retrain.engines.server.own import Hypothesis, Said, distances, misreadings, next_tokens, ours, rms
from retrain.errors import ModelError, ServerFailed
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.types import Action, PolicyRef, SampleRequest

TEXT = "The numbers 3, 14 and 15 are in a box. Take one, double it, and say what is left:"
TOKENS, SAMPLES, TRIES = 12, 4, 3
AGAIN = 8  # Tokens requested from base and adapter when a server returns
EFFECT = 1.0
"""Root mean square (nats) by which the canary's adapter changes the log-probabilities of the base's own tokens, at
least: far above every tolerance."""
IMPOSSIBLE = 1e-6  # Probability below which equal tokens from different seeds count as a fault
STREAM = ("canary",)


@dataclass(frozen=True)
class Canary:
    """What was found to agree: root mean squares in nats of the base's and the adapter's log-probabilities, the effect
    of the adapter itself, and the seconds that it took."""

    base: float
    adapter: float
    effect: float
    tokens: int
    seconds: float
    where: str = ""

    @property
    def words(self) -> str:
        return (
            f"canary{self.where}: base within {self.base:.1e} nats of our own, adapter within {self.adapter:.1e} "
            f"of an effect of {self.effect:.2g}, seeds repeat ({self.tokens} tokens, {self.seconds:.1f} s)"
        )


@dataclass(frozen=True)
class Again:
    """The canary for a server that comes back: one token after each of some prompts, whose log-probabilities under
    ``weights`` are ``logprobs_TV`` (nats)."""

    requests: Sequence[SampleRequest]
    weights: LocalSnapshot
    logprobs_TV: np.ndarray
    what: str
    tolerance: float

    def judge(self, url: str, answers: Sequence[Action]) -> None:
        said_T = np.array([action.logprobs_T[0] for action in answers])
        right_T = np.array(
            [row_V[action.token_ids[0]] for row_V, action in zip(self.logprobs_TV, answers, strict=True)]
        )
        if (far := rms(said_T - right_T)) > self.tolerance:
            raise ModelError(
                f"{url} does not compute what is trained here: its log-probabilities of {self.what}'s tokens are "
                f"{far:.2g} nats from our own (root mean square); {self.tolerance:g} is the limit ([inference] "
                "tolerance)"
            )


def canaries(
    engine: ServerEngine, base: BaseModel, lanes: Lanes, kinds: Sequence[tuple[int, float, float, float]]
) -> Iterator[Canary]:
    """Try every server that is there by itself with adapters of these kinds: rank, alpha, temperature, tolerance (nats,
    root mean square). Those that come later are tried before they are used.

    Raises ModelError when log-probabilities differ by more than the tolerance, with the numbers and the cause that
    fits them best, or when seeds do not repeat; ServerFailed when no server comes.
    """
    prompt = tuple(base.tokenizer(TEXT)["input_ids"])
    tries: list[Again] = []
    for rank, alpha, temperature, tolerance in kinds:
        nothing, known = lanes.new_adapter(rank, alpha), lanes.new_adapter(rank, alpha)
        _grow(base, lanes, known, prompt)
        for what, adapter in (("the base", nothing), ("the adapter", known)):
            weights = adapter.frozen()
            last = min(AGAIN, len(prompt))
            table_TV = next_tokens(base, lanes, prompt, last, weights, temperature)
            ref = PolicyRef("canary", 0)
            asked = [
                SampleRequest(ref, prompt[: len(prompt) - last + i + 1], 1, 1, temperature, (*STREAM, "again", what, i))
                for i in range(last)
            ]
            tries.append(Again(asked, LocalSnapshot(weights, {}), table_TV, what, tolerance))
    engine.try_with(tries)
    tried = set[Server]()
    while not tried & set(engine.pool.servers):
        engine.wait_for_one()
        while left := [each for each in engine.pool.servers if each.alive and each not in tried]:
            tried.add(left[0])
            try:
                for kind in kinds:
                    yield canary(engine, base, lanes, *kind, left[0])
            except ModelError:
                if left[0] in engine.pool.servers:
                    raise  # else whoever keeps the servers has given it up, and another one is there or comes


def canary(
    engine: ServerEngine,
    base: BaseModel,
    lanes: Lanes,
    rank: int,
    alpha: float,
    temperature: float,
    tolerance: float,
    server: Server | None = None,
) -> Canary:
    """Try one server (the first, where none is named) with an adapter of one kind. Raises as ``canaries``."""
    begin = time.perf_counter()
    at = server or engine.pool.servers[0]
    prompt = tuple(base.tokenizer(TEXT)["input_ids"])
    nothing, known = lanes.new_adapter(rank, alpha), lanes.new_adapter(rank, alpha)
    _grow(base, lanes, known, prompt)
    refs = [PolicyRef("canary-base", 0), PolicyRef("canary", 0)]
    weights = [nothing.frozen(), known.frozen()]
    try:
        for ref, each in zip(refs, weights, strict=True):
            engine.publish(ref, LocalSnapshot(each, {}))
        said = [_said(engine, at, ref, prompt, temperature) for ref in refs]
        for ref, name in zip(refs, ("the base", "an adapter"), strict=True):
            _seeds(engine, at, ref, prompt, temperature, name)
        engine.forget_sequences()
    except ServerFailed as error:
        raise ModelError(f"{at.url} was tried before training, and failed: {error}") from error
    finally:
        for ref in refs:
            engine.retire(ref)
    apart = _compared(base, lanes, at.url, said, weights[1], temperature, tolerance)
    plain = Hypothesis("", None, temperature)
    effect = rms(
        ours(base, lanes, said[1], Hypothesis("", weights[1], temperature)) - ours(base, lanes, said[1], plain)
    )
    tokens = sum(len(each.token_ids) for own in said for each in own)
    where = f" at {at.url}" if len(engine.pool.servers) > 1 else ""
    return Canary(apart[0], apart[1], effect, tokens, time.perf_counter() - begin, where)


def _compared(
    base: BaseModel,
    lanes: Lanes,
    url: str,
    said: Sequence[Sequence[Said]],
    weights: LoraWeights,
    temperature: float,
    tolerance: float,
) -> tuple[float, float]:
    """How far the base's and the adapter's log-probabilities are from ours. Raises ModelError with the cause."""
    plain, right = Hypothesis("base", None, temperature), Hypothesis("adapter", weights, temperature)
    (of_base,), (of_adapter,) = distances(base, lanes, said[0], [plain]), distances(base, lanes, said[1], [right])
    if of_base <= tolerance and of_adapter <= tolerance:
        return of_base, of_adapter
    numbers = (
        f"its log-probabilities of the base's tokens are {of_base:.2g} nats from our own (root mean square), those of "
        f"the adapter's {of_adapter:.2g}; {tolerance:g} is the limit ([inference] tolerance)"
    )
    if of_base > tolerance:
        cause = _of_base(base, lanes, said[0], temperature, of_base)
    else:
        cause = _nearest(base, lanes, said[1], list(misreadings(weights, temperature)), of_adapter)
    raise ModelError(f"{url} does not compute what is trained here: {numbers}. {cause}")


def _of_base(base: BaseModel, lanes: Lanes, said: Sequence[Said], temperature: float, apart: float) -> str:
    ways = [
        Hypothesis(f"the server samples with top_p = {p:g} of its own", None, temperature, p) for p in (0.95, 0.9, 0.8)
    ]
    if temperature != 1:
        ways.append(Hypothesis(f"log-probabilities are those of temperature 1, not {temperature:g}", None, 1.0))
    return _nearest(base, lanes, said, ways, apart)


def _nearest(base: BaseModel, lanes: Lanes, said: Sequence[Said], ways: Sequence[Hypothesis], apart: float) -> str:
    """The hypothesis that fits best, where it fits well; else what is left."""
    far = distances(base, lanes, said, ways)
    best = min(range(len(ways)), key=lambda i: far[i])
    if far[best] < 0.25 * apart:
        return f"Likely cause: {ways[best].name} ({far[best]:.2g} nats away).{_advice(ways[best].name)}"
    others = f"nearest of {len(ways)} known mistakes: {ways[best].name}, {far[best]:.2g} nats away"
    if apart < 0.5:
        return f"Likely cause: precision, or a quantised model ({others}). Serve it in the format of [inference] dtype"
    return f"Likely cause: another base model, or other weights of it ({others}). Serve the model of [model] model"


def _advice(name: str) -> str:
    if "temperature 1" in name:
        return " Start vLLM with --logprobs-mode processed_logprobs"
    if "top_p" in name:
        return " Start vLLM with --generation-config vllm"
    return ""


def _said(engine: ServerEngine, at: Server, ref: PolicyRef, prompt: tuple[int, ...], temperature: float) -> list[Said]:
    request = SampleRequest(ref, prompt, SAMPLES, TOKENS, temperature, (*STREAM, ref.run_id))
    (actions,) = engine.sample([request], at=at)
    return [Said(prompt, action.token_ids, action.logprobs_T) for action in actions]


def _seeds(
    engine: ServerEngine, at: Server, ref: PolicyRef, prompt: tuple[int, ...], temperature: float, name: str
) -> None:
    """The same seed gives the same tokens, another one others. Raises ModelError."""
    if temperature == 0:
        return
    for attempt in range(TRIES):
        request = SampleRequest(ref, prompt, SAMPLES, TOKENS, temperature, (*STREAM, "seeds", attempt))
        (once,), (again,) = engine.sample([request], at=at), engine.sample([request], at=at)
        if [action.token_ids for action in once] == [action.token_ids for action in again]:
            _differ(once, at.url, name)
            return
    raise ModelError(
        f"{at.url}: its seeds do not repeat: {name} sampled {SAMPLES} times with the same seeds gave other "
        f"tokens in {TRIES} of {TRIES} tries. SGLang needs --enable-deterministic-inference"
    )


def _differ(actions: Sequence[Action], url: str, name: str) -> None:
    """Samples with seeds of their own are not all the same, unless that is likely."""
    if len({tuple(action.token_ids) for action in actions}) > 1:
        return
    chance = float(np.exp((len(actions) - 1) * actions[0].logprobs_T.sum()))
    if chance < IMPOSSIBLE:
        raise ModelError(
            f"{url}: it does not use its seeds: {name} gave the same tokens with {len(actions)} different ones, "
            f"which happens by chance once in {1 / chance:.0e} times"
        )


def _grow(base: BaseModel, lanes: Lanes, adapter: Adapter, prompt: tuple[int, ...]) -> None:
    """Random weights, as large as it takes for the effect to be unmistakable."""
    adapter.initialise(*STREAM)
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for shape in adapter.shapes:
            adapter.B[shape.name].copy_(torch.randn(shape.out_features, adapter.rank, generator=stream))
            adapter.B[shape.name].mul_(1e-3 / max(adapter.scale, 1e-6))
    drawn = [Said(prompt[:4], prompt[4:], np.zeros(len(prompt) - 4))]
    before = ours(base, lanes, drawn, Hypothesis("", None, 1.0))
    for _ in range(24):
        if rms(ours(base, lanes, drawn, Hypothesis("", adapter.frozen(), 1.0)) - before) >= EFFECT:
            return
        with torch.no_grad():
            for shape in adapter.shapes:
                adapter.B[shape.name].mul_(1.5)
