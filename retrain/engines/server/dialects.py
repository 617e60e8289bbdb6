"""What each kind of server is sent, and how its answer is read: token ids in, token ids and log-probabilities out.

``vllm``: vLLM's ``/v1/completions`` and whatever speaks it (``retrain serve`` does). ``openai``: the same route with
the keys of OpenAI's API alone, for servers that refuse what they do not know; token ids come back under vLLM's name for
them or as ``token_id:17``. ``sglang``: SGLang's own ``/generate``. Adapters are loaded by the routes that vLLM and
SGLang have in common.

All that shapes a distribution is always sent, also where it is the default: servers take missing values from the
model's ``generation_config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retrain.types import SampleRequest


class Faulty(Exception):
    """An answer that no training may use; the text says what is wrong with it."""


@dataclass(frozen=True)
class Ask:
    """One completion: ``model`` is the name under which the server has base or adapter, ``base`` that of the base."""

    request: SampleRequest
    model: str
    base: str
    seed: int
    stop_ids: Sequence[int]


@dataclass(frozen=True)
class Answer:
    """What a server sampled. ``model`` and ``prompt_ids`` are None where it does not repeat them."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str
    model: str | None = None
    prompt_ids: Sequence[int] | None = None


class Dialect(Protocol):
    """How to talk to one kind of server. ``adapter_prefix`` is that of the routes that load and unload adapters."""

    completions: str
    adapter_prefix: str
    health: str

    def body(self, ask: Ask) -> dict[str, Any]: ...

    def read(self, payload: Any) -> Answer:
        """The completion in the server's answer. Raises Faulty when there is none."""
        ...

    def prompt_body(self, model: str, base: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """The request for the log-probabilities of these tokens themselves, at temperature 1, under the names of an
        ``Ask``."""
        ...

    def read_prompt(self, payload: Any) -> Prompted:
        """What the server says of them. Raises Faulty when it says nothing."""
        ...


@dataclass(frozen=True)
class Prompted:
    """What a server says of the tokens of a prompt, in order; of the first, which nothing predicts, None. ``token_ids``
    are None where it does not repeat them."""

    logprobs: Sequence[float | None]
    token_ids: Sequence[int] | None = None


class OpenAI:
    """OpenAI's completions, with no keys but its own and the one that asks for token ids."""

    completions = "/v1/completions"
    adapter_prefix = "/v1"
    health = "/v1/models"
    seed_bits = 63

    def body(self, ask: Ask) -> dict[str, Any]:
        """See ``Dialect.body``; ``top_k`` and ``min_p`` only where they cut something."""
        request = ask.request
        asked: dict[str, Any] = {
            "model": ask.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "n": 1,
            "seed": ask.seed % 2**self.seed_bits,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "logprobs": 0,  # those of what is sampled, without the likeliest others, which cost more
            "return_token_ids": True,
        }
        cuts = {"top_k": request.top_k, "min_p": request.min_p}
        return asked | {key: value for key, value in cuts.items() if value}

    def read(self, payload: Any) -> Answer:
        try:
            choice = payload["choices"][0]
            given = choice["logprobs"]
            token_ids = choice.get("token_ids")
            if token_ids is None:
                token_ids = [_named_id(token) for token in given["tokens"]]
            return Answer(
                token_ids,
                given["token_logprobs"],
                str(choice.get("finish_reason")),
                payload.get("model"),
                choice.get("prompt_token_ids"),
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Faulty(f"no completion with log-probabilities: {_clipped(payload)}") from error

    def prompt_body(self, model: str, base: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """See ``Dialect.prompt_body``: the prompt is repeated, and nothing follows it."""
        return {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 0,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def read_prompt(self, payload: Any) -> Prompted:
        try:
            choice = payload["choices"][0]
            return Prompted(choice["logprobs"]["token_logprobs"], choice.get("prompt_token_ids"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Faulty(f"no log-probabilities of the prompt: {_clipped(payload)}") from error


class VLLM(OpenAI):
    """vLLM's completions: our end tokens, and every cut and penalty by its number."""

    health = "/health"

    def body(self, ask: Ask) -> dict[str, Any]:
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
    """SGLang's ``/generate``. Seeds count only where the server runs with ``--enable-deterministic-inference``."""

    completions = "/generate"
    adapter_prefix = ""
    health = "/health"
    seed_bits = 31

    def body(self, ask: Ask) -> dict[str, Any]:
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
                "no_stop_trim": True,
            },
            "return_logprob": True,
            **({} if ask.model == ask.base else {"lora_path": ask.model}),
        }

    def read(self, payload: Any) -> Answer:
        """See ``Dialect.read``; SGLang repeats neither the adapter's name nor the prompt."""
        try:
            about = payload["meta_info"]
            drawn = about["output_token_logprobs"]
            finish = about["finish_reason"]
            kind = finish["type"] if isinstance(finish, Mapping) else finish
            return Answer([each[1] for each in drawn], [each[0] for each in drawn], str(kind))
        except (KeyError, IndexError, TypeError) as error:
            raise Faulty(f"no completion with log-probabilities: {_clipped(payload)}") from error

    def prompt_body(self, model: str, base: str, token_ids: Sequence[int]) -> dict[str, Any]:
        return {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({} if model == base else {"lora_path": model}),
        }

    def read_prompt(self, payload: Any) -> Prompted:
        try:
            given = payload["meta_info"]["input_token_logprobs"]
            return Prompted([each[0] for each in given], [each[1] for each in given])
        except (KeyError, IndexError, TypeError) as error:
            raise Faulty(f"no log-probabilities of the prompt: {_clipped(payload)}") from error


DIALECTS: Mapping[str, Dialect] = {"vllm": VLLM(), "openai": OpenAI(), "sglang": SGLang()}  # By `[inference] engine`


def _named_id(token: str) -> int:
    kind, _, number = token.partition(":")
    if kind != "token_id" or not number.isdigit():
        raise Faulty("the server returns the texts of tokens and not their ids (return_token_ids)")
    return int(number)


def _clipped(payload: Any) -> str:
    return repr(payload)[:160]
