"""Build responses in OpenAI's format with vLLM's additions."""

import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from retrain.serving.adapters import ServedWeights
from retrain.serving.scoring import Tops

LEAST_LOGPROB = -9999.0  # Stands for −∞, which JSON does not have


def model_card(served: ServedWeights, context: int) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "retrain",
        "root": served.root,
        "parent": served.parent,
        "max_model_len": context,
    }


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def head(kind: str, name: str, model: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def finite(logprob: float) -> float:
    """Return a log-probability as a number that JSON can represent."""
    return max(float(logprob), LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB


def token_text(tokenizer: Any, token_id: int, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else tokenizer.decode([token_id], skip_special_tokens=False)


def completion_logprobs(
    tokenizer: Any,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Tops | None] | None,
    as_ids: bool,
    offset: int = 0,
) -> dict[str, Any]:
    """Return ``logprobs`` of a completion's choice; the sampled token is among the top ones, as in OpenAI's API.
    ``offset``: characters before the first token. A log-probability of None marks a token without context."""
    names = [token_text(tokenizer, token, as_ids) for token in token_ids]
    offsets, best = [], []
    for index, (name, logprob) in enumerate(zip(names, logprobs, strict=True)):
        offsets.append(offset)
        offset += len(name)
        if logprob is None:
            best.append(None)
            continue
        best.append({name: finite(logprob)})
        for token, other in (tops[index] or ()) if tops is not None else ():
            best[-1].setdefault(token_text(tokenizer, token, as_ids), finite(other))
    return {
        "text_offset": offsets,
        "token_logprobs": [None if logprob is None else finite(logprob) for logprob in logprobs],
        "tokens": names,
        "top_logprobs": best,
    }


def chat_logprobs(
    tokenizer: Any, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Tops] | None, as_ids: bool
) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        name = token_text(tokenizer, token_id, as_ids)
        text = token_text(tokenizer, token_id, False)
        return {"token": name, "logprob": finite(logprob), "bytes": list(text.encode(errors="replace"))}

    content = []
    for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        best = [entry(*each) for each in tops[place]] if tops is not None else []
        content.append(entry(token_id, logprob) | {"top_logprobs": best})
    return {"content": content, "refusal": None}


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


END = b"data: [DONE]\n\n"  # The last event of a stream
