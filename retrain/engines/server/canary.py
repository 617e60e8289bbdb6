"""Tests servers before training: an adapter of known effect must change their log-probabilities by that effect.

A server that ignores an adapter, scales it wrongly or applies it to half of the layers raises no error; the run would
train off-policy and learn little. So an adapter that changes the model a lot is loaded, tokens are sampled with it and
with the base, and all log-probabilities are compared with the trainer's. Seeds must repeat, and different seeds differ.
A server that fails is rejected with the numbers and the likely cause.

Each server is tested separately. A server that returns later is tested by ``ReturnTrial``, whose answers are computed
in advance, because the model is busy during training.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from retrain.engines.server.client import ServerClient
from retrain.engines.server.completions import ReturnTrial
from retrain.engines.server.engine import ServerEngine
from retrain.engines.server.hypotheses import (
    Hypothesis,
    ServedTokens,
    distances,
    misreadings,
    next_tokens,
    rms,
    sampling_misreadings,
    trainer_logprobs,
)
from retrain.errors import ModelError, ServerFailed
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Adapter, Lanes
from retrain.types import Action, PolicyRef, SampleRequest

TEXT = "The numbers 3, 14 and 15 are in a box. Take one, double it, and say what is left:"
TOKENS, SAMPLES, TRIES = 12, 4, 3
RETURN_TOKENS = 8  # Tokens requested from base and adapter when a server returns
EFFECT = 1.0  # Least root mean square change (nats) by the canary's adapter, far above every tolerance
IMPOSSIBLE = 1e-6  # Probability below which equal tokens from different seeds count as a fault
STREAM = ("canary",)


@dataclass(frozen=True)
class CanarySettings:
    """Settings of a test adapter. ``tolerance``: largest root mean square difference (nats) of a server's
    log-probabilities from the trainer's."""

    rank: int
    alpha: float
    temperature: float
    tolerance: float


@dataclass(frozen=True)
class CanaryResult:
    """The test of one server. ``base`` and ``adapter``: root mean square differences (nats) of its log-probabilities
    from the trainer's, without and with the adapter. ``effect``: how far the adapter moves the trainer's own (nats)."""

    base: float
    adapter: float
    effect: float
    tokens: int
    seconds: float
    where: str = ""

    @property
    def summary(self) -> str:
        return (
            f"canary{self.where}: base within {self.base:.1e} nats of our own, adapter within {self.adapter:.1e} "
            f"of an effect of {self.effect:.2g}, seeds repeat ({self.tokens} tokens, {self.seconds:.1f} s)"
        )


def run_canaries(
    engine: ServerEngine, base: BaseModel, lanes: Lanes, kinds: Sequence[CanarySettings]
) -> Iterator[CanaryResult]:
    """Test every available server with an adapter of each of ``kinds``, and yield the results. Servers that come later
    are tested before they are used.

    Raises ModelError, with the numbers and the likely cause, if log-probabilities differ by more than the tolerance or
    seeds do not repeat; ServerFailed if no server answers.
    """
    canaries = [Canary(base, lanes, kind) for kind in kinds]
    engine.set_trials([trial for canary in canaries for trial in canary.return_trials()])
    tested = set[ServerClient]()
    while not tested & set(engine.pool.servers):
        engine.wait_for_server()
        while untested := [server for server in engine.pool.servers if server.alive and server not in tested]:
            tested.add(untested[0])
            try:
                for canary in canaries:
                    yield canary.test(engine, untested[0])
            except ModelError:
                if untested[0] in engine.pool.servers:
                    raise  # else the fleet has replaced the server: test its replacement


class Canary:
    """A prompt, an adapter without effect (the base), and a random adapter whose effect is at least ``EFFECT``."""

    def __init__(self, base: BaseModel, lanes: Lanes, settings: CanarySettings):
        self.base, self.lanes, self.settings = base, lanes, settings
        self.prompt = tuple(base.tokenizer(TEXT)["input_ids"])
        zero, adapter = (lanes.new_adapter(settings.rank, settings.alpha) for _ in range(2))
        _grow(base, lanes, adapter, self.prompt)
        self.zero, self.adapter = zero.frozen(), adapter.frozen()

    def return_trials(self) -> Iterator[ReturnTrial]:
        prompt, temperature = self.prompt, self.settings.temperature
        for policy, weights in (("the base", self.zero), ("the adapter", self.adapter)):
            last, ref = min(RETURN_TOKENS, len(prompt)), PolicyRef("canary", 0)
            table_TV = next_tokens(self.base, self.lanes, prompt, last, weights, temperature)
            prefixes = [prompt[: len(prompt) - last + i + 1] for i in range(last)]
            requests = [
                SampleRequest(ref, prefix, 1, 1, temperature, (*STREAM, "again", policy, i))
                for i, prefix in enumerate(prefixes)
            ]
            yield ReturnTrial(requests, LocalSnapshot(weights), table_TV, policy, self.settings.tolerance)

    def test(self, engine: ServerEngine, server: ServerClient) -> CanaryResult:
        """Test one server. Raises ModelError if its log-probabilities or seeds are wrong, or it does not answer."""
        begin = time.perf_counter()
        refs = [PolicyRef("canary-base", 0), PolicyRef("canary", 0)]
        try:
            for ref, weights in zip(refs, (self.zero, self.adapter), strict=True):
                engine.publish(ref, LocalSnapshot(weights))
            served = [self._served_tokens(engine, server, ref) for ref in refs]
            for ref, name in zip(refs, ("the base", "an adapter"), strict=True):
                self._check_seeds(engine, server, ref, name)
            engine.forget_sequences()
        except ServerFailed as error:
            raise ModelError(f"{server.url} was tried before training, and failed: {error}") from error
        finally:
            for ref in refs:
                engine.retire(ref)
        base_rms, adapter_rms = self._compare(server.url, *served)
        ways = [Hypothesis("", weights, self.settings.temperature) for weights in (self.adapter, None)]
        with_adapter, with_base = (trainer_logprobs(self.base, self.lanes, served[1], way) for way in ways)
        tokens = sum(len(completion.token_ids) for completions in served for completion in completions)
        where = f" at {server.url}" if len(engine.pool.servers) > 1 else ""
        effect, seconds = rms(with_adapter - with_base), time.perf_counter() - begin
        return CanaryResult(base_rms, adapter_rms, effect, tokens, seconds, where)

    def _compare(
        self, url: str, from_base: Sequence[ServedTokens], from_adapter: Sequence[ServedTokens]
    ) -> tuple[float, float]:
        temperature, tolerance = self.settings.temperature, self.settings.tolerance
        (of_base,) = distances(self.base, self.lanes, from_base, [Hypothesis("base", None, temperature)])
        (of_adapter,) = distances(
            self.base, self.lanes, from_adapter, [Hypothesis("adapter", self.adapter, temperature)]
        )
        if of_base <= tolerance and of_adapter <= tolerance:
            return of_base, of_adapter
        numbers = (
            f"its log-probabilities of the base's tokens are {of_base:.2g} nats from our own (root mean square), those "
            f"of the adapter's {of_adapter:.2g}; {tolerance:g} is the limit ([inference] tolerance)"
        )
        if of_base > tolerance:
            cause = self._likeliest(from_base, list(sampling_misreadings(None, temperature)), of_base)
        else:
            cause = self._likeliest(from_adapter, list(misreadings(self.adapter, temperature)), of_adapter)
        raise ModelError(f"{url} does not compute what is trained here: {numbers}. {cause}")

    def _likeliest(self, served: Sequence[ServedTokens], ways: Sequence[Hypothesis], apart: float) -> str:
        far = distances(self.base, self.lanes, served, ways)
        best = min(range(len(ways)), key=lambda i: far[i])
        if far[best] < 0.25 * apart:
            return f"Likely cause: {ways[best].name} ({far[best]:.2g} nats away).{_advice(ways[best].name)}"
        others = f"nearest of {len(ways)} known mistakes: {ways[best].name}, {far[best]:.2g} nats away"
        if apart < 0.5:
            return (
                f"Likely cause: precision, or a quantised model ({others}). Serve it in the format of [inference] dtype"
            )
        return f"Likely cause: another base model, or other weights of it ({others}). Serve the model of [model] model"

    def _served_tokens(self, engine: ServerEngine, server: ServerClient, ref: PolicyRef) -> list[ServedTokens]:
        (actions,) = engine.sample([self._request(ref, ref.run_id)], at=server)
        return [ServedTokens(self.prompt, action.token_ids, action.logprobs_T) for action in actions]

    def _request(self, ref: PolicyRef, *stream: str | int) -> SampleRequest:
        return SampleRequest(ref, self.prompt, SAMPLES, TOKENS, self.settings.temperature, (*STREAM, *stream))

    def _check_seeds(self, engine: ServerEngine, server: ServerClient, ref: PolicyRef, name: str) -> None:
        if self.settings.temperature == 0:
            return
        for attempt in range(TRIES):
            request = self._request(ref, "seeds", attempt)
            (once,), (again,) = engine.sample([request], at=server), engine.sample([request], at=server)
            if [action.token_ids for action in once] == [action.token_ids for action in again]:
                _check_variety(once, server.url, name)
                return
        raise ModelError(
            f"{server.url}: its seeds do not repeat: {name} sampled {SAMPLES} times with the same seeds gave other "
            f"tokens in {TRIES} of {TRIES} tries. SGLang needs --enable-deterministic-inference"
        )


def _advice(name: str) -> str:
    if "temperature 1" in name:
        return " Start vLLM with --logprobs-mode processed_logprobs"
    if "top_p" in name:
        return " Start vLLM with --generation-config vllm"
    return ""


def _check_variety(actions: Sequence[Action], url: str, name: str) -> None:
    if len({tuple(action.token_ids) for action in actions}) > 1:
        return
    chance = float(np.exp((len(actions) - 1) * actions[0].logprobs_T.sum()))
    if chance < IMPOSSIBLE:
        raise ModelError(
            f"{url}: it does not use its seeds: {name} gave the same tokens with {len(actions)} different ones, "
            f"which happens by chance once in {1 / chance:.0e} times"
        )


def _grow(base: BaseModel, lanes: Lanes, adapter: Adapter, prompt: tuple[int, ...]) -> None:
    adapter.initialise(*STREAM)
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for shape in adapter.shapes:
            adapter.B[shape.name].copy_(torch.randn(shape.out_features, adapter.rank, generator=stream))
            adapter.B[shape.name].mul_(1e-3 / max(adapter.scale, 1e-6))
    reference = [ServedTokens(prompt[:4], prompt[4:], np.zeros(len(prompt) - 4))]
    before = trainer_logprobs(base, lanes, reference, Hypothesis("", None, 1.0))
    for _ in range(24):
        if rms(trainer_logprobs(base, lanes, reference, Hypothesis("", adapter.frozen(), 1.0)) - before) >= EFFECT:
            return
        with torch.no_grad():
            for shape in adapter.shapes:
                adapter.B[shape.name].mul_(1.5)
