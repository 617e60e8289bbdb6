"""Checks a server's answer against its request before it becomes an action."""

import math

import numpy as np

from retrain.engines.server.dialects import Answer, CompletionRequest, InvalidAnswer
from retrain.tokenizer import Tokenizer
from retrain.types import Action, StopReason

ABOVE_ZERO = 1e-6  # Rounding tolerance for log-probabilities above 0


def stop_reason(ask: CompletionRequest, answer: Answer, vocabulary: int) -> StopReason:
    """Return how the completion ended. Raises InvalidAnswer with the first check that fails."""
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
    if len(answer.logprobs) != len(ids):
        raise InvalidAnswer(f"{len(answer.logprobs)} log-probabilities for {len(ids)} tokens")
    for value in answer.logprobs:
        if type(value) not in (int, float) or not math.isfinite(value) or value > ABOVE_ZERO:
            raise InvalidAnswer(f"log-probability {value!r}")
    return _ending(ask, ids, answer.finish)


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


def action_of(ask: CompletionRequest, answer: Answer, vocabulary: int, tokenizer: Tokenizer) -> Action:
    reason = stop_reason(ask, answer, vocabulary)
    ids = list(answer.token_ids)
    return Action(
        token_ids=ids,
        text=tokenizer.decode(ids),
        # Up to ABOVE_ZERO above 0 is the server's rounding.
        logprobs_T=np.minimum(np.asarray(answer.logprobs, dtype=np.float64), 0.0),
        entropy_T=None,
        stop_reason=reason,
        policy_version=ask.request.policy.version,
    )
