"""Requests completions from servers: again after faults that may pass, and from another server if one is lost."""

import asyncio
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.engines.server.adapters import AdapterStore, PublishedAdapter
from retrain.engines.server.client import ServerClient
from retrain.engines.server.connection import ModelNotFound, RequestRejected, ServerUnavailable, ServerUnreachable
from retrain.engines.server.dialects import CompletionRequest, InvalidAnswer, action_of
from retrain.engines.server.hypotheses import rms
from retrain.engines.server.pool import ServerPool, Waits
from retrain.errors import ModelError, ServerFailed
from retrain.policy.local import LocalSnapshot
from retrain.rng import torch_seed
from retrain.tokenizer import Tokenizer
from retrain.types import Action, SampleRequest

ATTEMPTS = 5  # Requests for one completion before the step fails; lost servers do not count
RANK_HINT = "--max-lora-rank"  # vLLM's option for the largest rank, named in the error message


@dataclass(frozen=True)
class ServedModel:
    """The base that servers must hold. ``name``: in the configuration. ``size``: token ids are below it. ``end_ids``:
    end tokens. ``context``: most tokens of a prompt and its completion."""

    name: str
    tokenizer: Tokenizer
    size: int
    end_ids: tuple[int, ...]
    context: int


@dataclass(frozen=True)
class ReturnTrial:
    """Tests a server that comes back or joins late: each request samples one token, whose log-probability must be the
    trainer's. ``logprobs_TV``: the trainer's (nats) for all tokens with ``weights``, one row per request. ``policy``:
    "the base" or "the adapter", for messages."""

    requests: Sequence[SampleRequest]
    weights: LocalSnapshot
    logprobs_TV: np.ndarray
    policy: str
    tolerance: float

    def judge(self, url: str, answers: Sequence[Action]) -> None:
        served_T = np.array([action.logprobs_T[0] for action in answers])
        right_T = np.array(
            [row_V[action.token_ids[0]] for row_V, action in zip(self.logprobs_TV, answers, strict=True)]
        )
        if (difference := rms(served_T - right_T)) > self.tolerance:
            raise ModelError(
                f"{url} does not compute what is trained here: its log-probabilities of {self.policy}'s tokens are "
                f"{difference:.2g} nats from our own (root mean square); {self.tolerance:g} is the limit ([inference] "
                "tolerance)"
            )


class Completions:
    def __init__(self, model: ServedModel, pool: ServerPool, waits: Waits):
        self.model, self.pool, self.waits = model, pool, waits

    async def answer(self, server: ServerClient, request: SampleRequest, name: str, seed: int) -> Action:
        """Sample one completion on ``server`` with the adapter ``name``. Raises RequestFailed, InvalidAnswer."""
        ask = CompletionRequest(request, name, server.base, seed, self.model.end_ids)
        return action_of(ask, await server.ask(ask), self.model.size, self.model.tokenizer)

    async def sample(
        self, request: SampleRequest, sample: int, published: PublishedAdapter, at: ServerClient | None
    ) -> tuple[Action, float]:
        """Return completion number ``sample`` of the request, and the seconds for which it waited for its adapter to
        load. ``at``: the server to use; None for any. Raises ServerFailed."""
        faults: list[str] = []
        loading_s, losses = 0.0, 0
        stream = request.streams[sample] if request.streams else (*request.stream, sample)
        seed = torch_seed(*stream, *([request.drawn] if request.drawn else []))
        while len(faults) < ATTEMPTS:
            if faults:
                await asyncio.sleep(self.waits.pause_s * 2 ** (len(faults) - 1))
            server = await self.pool.choose(_group_key(request), at)
            server.waiting += 1
            try:
                async with server.connection.slots:
                    loading_s += await server.adapters.require(published)
                    return await self.answer(server, request, published.name, seed), loading_s
            except ModelNotFound as unknown:
                server.adapters.mark_unloaded(published.name)
                faults.append(f"{server.url} does not know {published.name}: {unknown}")
            except ServerUnavailable as unavailable:
                await self.pool.recheck(server, str(unavailable))
                if server.alive:  # healthy: this request is at fault
                    faults.append(f"{server.url}: {unavailable}")
                elif not isinstance(unavailable, ServerUnreachable):
                    losses += 1
                    if losses == self.waits.losses:
                        raise ServerFailed(
                            f"a completion after {len(request.prompt_ids)} tokens was under way {losses} times at a "
                            f"server that then went away, last {server.url}: {unavailable}"
                        ) from unavailable
            except InvalidAnswer as invalid:
                faults.append(f"{server.url}: {invalid}")
            except RequestRejected as rejected:
                raise ServerFailed(f"{server.url} refuses: {rejected}{_hint(str(rejected))}") from rejected
            finally:
                server.waiting -= 1
        again = f" (and before: {'; '.join(dict.fromkeys(faults[:-1]))})" if set(faults[:-1]) - {faults[-1]} else ""
        last = f"{faults[-1]}{_hint(faults[-1])}"
        raise ServerFailed(f"a completion was asked for {ATTEMPTS} times, the last answer: {last}{again}")

    async def run_trial(self, store: AdapterStore, trial: ReturnTrial, server: ServerClient) -> None:
        """Run a trial on one server. Raises ModelError if it fails the trial, RequestFailed, InvalidAnswer."""
        published = store.new_adapter(trial.requests[0].policy, trial.weights)
        try:
            await server.adapters.require(published)
            answers = [
                await self.answer(server, request, published.name, torch_seed(*request.stream))
                for request in trial.requests
            ]
        finally:
            await server.adapters.unload(published.name)  # if it is lost, the pool does so before it is used again
            await asyncio.to_thread(store.remove, published.name)
        trial.judge(server.url, answers)


def _group_key(request: SampleRequest) -> Hashable:
    # The same for all turns of a group's rollouts, whose prompts their server has cached.
    return request.sequences[0][:-1] if request.sequences else request.stream


def _hint(error: str) -> str:
    text = error.lower()
    if re.search(r"\bhttp 40[13]\b", text):  # not any 401 or 403, which a port or an id may hold
        return "; name the variable with its key: [inference] api_key_env"
    if "no adapter found" in text or "holds no peft adapter" in text:
        return "; it does not see that path: give [inference] adapter_dir a directory that servers see too"
    if "cannot load the adapter" in text:
        text += " lora support"  # the server has no such route
    if "rank" in text:
        return f"; start the server with a {RANK_HINT} that holds [model] lora_rank"
    if "lora" in text and ("enable" in text or "not allowed" in text or "support" in text):
        return (
            "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, SGLang with "
            "--enable-lora"
        )
    return ""
