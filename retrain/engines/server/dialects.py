"""Writes requests for each kind of server and reads the answers: token ids in, token ids and log-probabilities out.

``vllm``: vLLM's ``/v1/completions`` and compatible servers (``retrain serve``). ``openai``: the same route with only
the keys of OpenAI's API, for servers that reject unknown keys; token ids come back in vLLM's field or as
``token_id:17``. ``sglang``: SGLang's ``/generate``. vLLM and SGLang load adapters by the same routes.

Every sampling parameter is always sent, also at its default, because servers take missing values from the model's
``generation_config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from retrain.tokenizer import Tokenizer
from retrain.types import Action, SampleRequest, StopReason

ABOVE_ZERO = 1e-6  # Rounding tolerance for log-probabilities above 0


class InvalidAnswer(Exception):
    """An answer that cannot be trained on; the message names the fault."""


@dataclass(frozen=True)
class CompletionRequest:
    request: SampleRequest
    model: str  # The server's name for the adapter, or for the base
    base: str  # The server's name for the base
    seed: int
    stop_ids: Sequence[int]


@dataclass(frozen=True)
class Answer:
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str
    model: str | None = None  # None if the server does not echo it
    prompt_ids: Sequence[int] | None = None  # None if the server does not echo the prompt


class Dialect(Protocol):
    """Requests and answers of one kind of server. ``adapter_prefix``: beginning of the routes that load and unload
    adapters."""

    completions: str
    adapter_prefix: str
    health: str

    def body(self, ask: CompletionRequest) -> dict[str, object]: ...

    def read(self, payload: Any) -> Answer: ...  # Raises InvalidAnswer

    def prompt_body(self, model: str, base: str, token_ids: Sequence[int]) -> dict[str, object]:
        """Return the body of a request for the log-probabilities of these tokens at temperature 1. ``model`` and
        ``base`` are as in ``CompletionRequest``."""
        ...

    def read_prompt(self, payload: Any) -> PromptLogprobs: ...  # Raises InvalidAnswer


@dataclass(frozen=True)
class PromptLogprobs:
    logprobs: Sequence[float | None]  # nats; None for the first token, which nothing predicts
    token_ids: Sequence[int] | None = None  # None if the server does not echo them


class OpenAI:
    """OpenAI's completions: only keys of its API, ``return_token_ids``, and top_k and min_p where they are set."""

    completions = "/v1/completions"
    adapter_prefix = "/v1"
    health = "/v1/models"
    seed_bits = 63

    def body(self, ask: CompletionRequest) -> dict[str, object]:
        request = ask.request
        body: dict[str, object] = {
            "model": ask.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "n": 1,
            "seed": ask.seed % 2**self.seed_bits,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "logprobs": 0,  # only those of sampled tokens: alternatives cost more
            "return_token_ids": True,
        }
        cuts = {"top_k": request.top_k, "min_p": request.min_p}
        # Servers that know only OpenAI's keys reject these two: they are sent only where they have an effect.
        return body | {key: value for key, value in cuts.items() if value}

    def read(self, payload: Any) -> Answer:
        with _expecting("completion with log-probabilities", payload):
            choice = payload["choices"][0]
            logprobs = choice["logprobs"]
            token_ids = choice.get("token_ids")
            if token_ids is None:
                token_ids = [_named_id(token) for token in logprobs["tokens"]]
            return Answer(
                token_ids,
                logprobs["token_logprobs"],
                str(choice.get("finish_reason")),
                payload.get("model"),
                choice.get("prompt_token_ids"),
            )

    def prompt_body(self, model: str, base: str, token_ids: Sequence[int]) -> dict[str, object]:
        return {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 0,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def read_prompt(self, payload: Any) -> PromptLogprobs:
        with _expecting("log-probabilities of the prompt", payload):
            choice = payload["choices"][0]
            return PromptLogprobs(choice["logprobs"]["token_logprobs"], choice.get("prompt_token_ids"))


class VLLM(OpenAI):
    """vLLM's completions: also sends end tokens, truncation and penalties."""

    health = "/health"

    def body(self, ask: CompletionRequest) -> dict[str, object]:
        return super().body(ask) | {
            "top_k": ask.request.top_k,
            "min_p": ask.request.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(ask.stop_ids),
            "skip_special_tokens": False,
        }


class SGLang:
    """SGLang's ``/generate``. Seeds have an effect only with ``--enable-deterministic-inference``."""

    completions = "/generate"
    adapter_prefix = ""
    health = "/health"
    seed_bits = 31

    def body(self, ask: CompletionRequest) -> dict[str, object]:
        request = ask.request
        return {
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                "max_new_tokens": request.max_tokens,
                "n": 1,
                "sampling_seed": ask.seed % 2**self.seed_bits,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k or -1,
                "min_p": request.min_p,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop_token_ids": list(ask.stop_ids),
                "skip_special_tokens": False,
                "no_stop_trim": True,  # keeps the end token, which trains too
            },
            "return_logprob": True,
            **({} if ask.model == ask.base else {"lora_path": ask.model}),
        }

    def read(self, payload: Any) -> Answer:
        with _expecting("completion with log-probabilities", payload):
            info = payload["meta_info"]
            sampled = info["output_token_logprobs"]
            finish = info["finish_reason"]
            kind = finish["type"] if isinstance(finish, Mapping) else finish
            return Answer([token[1] for token in sampled], [token[0] for token in sampled], str(kind))

    def prompt_body(self, model: str, base: str, token_ids: Sequence[int]) -> dict[str, object]:
        return {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({} if model == base else {"lora_path": model}),
        }

    def read_prompt(self, payload: Any) -> PromptLogprobs:
        with _expecting("log-probabilities of the prompt", payload):
            tokens = payload["meta_info"]["input_token_logprobs"]
            return PromptLogprobs([token[0] for token in tokens], [token[1] for token in tokens])


DIALECTS: Mapping[str, Dialect] = {"vllm": VLLM(), "openai": OpenAI(), "sglang": SGLang()}  # By `[inference] engine`


def _named_id(token: str) -> int:
    kind, _, number = token.partition(":")
    if kind != "token_id" or not number.isdigit():
        raise InvalidAnswer("the server returns the texts of tokens and not their ids (return_token_ids)")
    return int(number)


@contextmanager
def _expecting(what: str, payload: Any) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise InvalidAnswer(f"no {what}: {repr(payload)[:160]}") from error


# -- checks of answers ------------------------------------------------------------------------------------------------


def action_of(ask: CompletionRequest, answer: Answer, vocabulary: int, tokenizer: Tokenizer) -> Action:
    """Return the action of an answer. Raises InvalidAnswer with the first check that fails."""
    request, ids = ask.request, list(answer.token_ids)
    if answer.model is not None and answer.model != ask.model:
        raise InvalidAnswer(f"model {answer.model!r} answered, where {ask.model!r} was asked")
    if answer.prompt_ids is not None and list(answer.prompt_ids) != list(request.prompt_ids):
        raise InvalidAnswer(
            f"the prompt came back as {len(answer.prompt_ids)} other token ids: it was not read as sent"
        )
    if not 1 <= len(ids) <= request.max_tokens:
        raise InvalidAnswer(f"{len(ids)} tokens, where 1 to {request.max_tokens} were asked for")
    if wrong := [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]:
        raise InvalidAnswer(f"token id {wrong[0]!r}, outside the vocabulary of {vocabulary}")
    return Action(
        token_ids=ids,
        text=tokenizer.decode(ids),
        logprobs_T=checked_logprobs(answer.logprobs, len(ids)),
        entropy_T=None,
        stop_reason=_ending(ask, ids, answer.finish),
        policy_version=request.policy.version,
    )


def checked_logprobs(logprobs: Sequence[float | None], tokens: int) -> np.ndarray:
    """Return the log-probabilities, clipped at 0 because rounding may exceed it. Raises InvalidAnswer for a wrong
    number of them or invalid values."""
    if len(logprobs) != tokens:
        raise InvalidAnswer(f"{len(logprobs)} log-probabilities for {tokens} tokens")
    for value in logprobs:
        if type(value) not in (int, float) or value is None or not math.isfinite(value) or value > ABOVE_ZERO:
            raise InvalidAnswer(f"log-probability {value!r}")
    return np.minimum(np.asarray(logprobs, dtype=np.float64), 0.0)


def _ending(ask: CompletionRequest, ids: list[int], finish: str) -> StopReason:
    ends = set(ask.stop_ids)
    if passed := [token for token in ids[:-1] if token in ends]:
        raise InvalidAnswer(f"it went on after the end token {passed[0]}: the server does not stop at our end tokens")
    if finish == "stop":
        if ids[-1] not in ends:
            raise InvalidAnswer(
                f'it ended by "stop" with token {ids[-1]}, no end token: the server leaves the end token out'
            )
        return "stop"
    if finish != "length":
        raise InvalidAnswer(f'it ended by "{finish}"')
    if len(ids) < ask.request.max_tokens:
        raise InvalidAnswer(f'it ended by "length" after {len(ids)} tokens of {ask.request.max_tokens}')
    return "stop" if ids[-1] in ends else "length"
