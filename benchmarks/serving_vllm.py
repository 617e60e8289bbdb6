"""Our server beside a real vLLM: the same requests, and where the answers differ.

    python benchmarks/serving_vllm.py OURS THEIRS ADAPTER

OURS and THEIRS are base_urls (…/v1) of servers of ``tiny-reasoner`` under that name, vLLM's started with
``--enable-lora --logprobs-mode processed_logprobs --generation-config vllm``; ADAPTER is an adapter's directory. What
is asked draws no random numbers, so texts, tokens, log-probabilities, ends and counts must be the same. Prints one JSON
line: the largest difference of log-probabilities, every other difference, statuses that differ for malformed requests
(ours takes no texts for numbers); exit status 1 when an answer differs.
"""

import json
import sys
from typing import Any

import httpx

PROMPT = "<|user|>115-30=?<|assistant|>"
CHAT = [{"role": "user", "content": "115-30=?"}]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40}
COMPLETIONS: list[dict[str, Any]] = [
    {**GREEDY, "logprobs": 2, "return_token_ids": True},
    {**GREEDY, "logprobs": 0, "stop": ["\n"], "return_token_ids": True},
    {**GREEDY, "stop_token_ids": [203], "return_token_ids": True},
    {**GREEDY, "stop": "=", "include_stop_str_in_output": True},
    {**GREEDY, "max_tokens": 3, "echo": True, "logprobs": 1},
    {**GREEDY, "temperature": 0.7, "top_k": 1, "max_tokens": 10, "echo": True, "logprobs": 2},
    {**GREEDY, "prompt": [3, 21, 22, 4], "return_tokens_as_token_ids": True, "logprobs": 1, "ignore_eos": True},
    {**GREEDY, "prompt": [PROMPT, "12 + 34"], "max_tokens": 20},
]
CHATS: list[dict[str, Any]] = [
    {"messages": CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {"messages": CHAT, "temperature": 0, "max_tokens": 5},
]
MALFORMED: list[dict[str, Any]] = [
    {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": 3}, {"prompt": [1, "a"]}, {"prompt": [99999]},
    {"prompt": [-1]}, {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": "9"}, {"max_tokens": 10**6}, {"n": 0},
    {"n": 2, "temperature": 0}, {"temperature": -1}, {"temperature": "1"}, {"top_p": 0}, {"top_p": 2}, {"top_k": -2},
    {"min_p": 2}, {"seed": 2**63}, {"logprobs": -1}, {"logprobs": 21}, {"stop": 3}, {"stop": [""]}, {"stream": "yes"},
    {"stream_options": {"include_usage": True}}, {"model": "nobody"},
]  # fmt: skip
IGNORED = {"id", "created", "refusal", "max_model_len", "owned_by", "root"}


class Comparison:
    """What differs."""

    def __init__(self) -> None:
        self.gap, self.differences = 0.0, list[str]()

    def look(self, ours: Any, theirs: Any, where: str) -> None:
        """Fields that only one has may be null in the other's place."""
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for key in (ours.keys() | theirs.keys()) - IGNORED:
                one, other = ours.get(key), theirs.get(key)
                if key in ours or (key in ("token_ids", "prompt_token_ids") and other is not None):
                    self.look(one, other, f"{where}.{key}")
        elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                self.look(one, other, f"{where}[{place}]")
        elif isinstance(ours, float) and isinstance(theirs, float):
            self.gap = max(self.gap, abs(ours - theirs))
        elif ours != theirs:
            self.differences.append(f"{where}: {str(ours)[:80]} here, {str(theirs)[:80]} there")


def main() -> int:
    """The command line."""
    urls, adapter = sys.argv[1:3], sys.argv[3]
    found, statuses, asked = Comparison(), [], 0
    with httpx.Client(timeout=120) as client:

        def both(path: str, body: dict[str, Any]) -> list[httpx.Response]:
            return [client.post(url + path, json=body) for url in urls]

        loaded = {"lora_name": "adapter", "lora_path": adapter}
        for status in (200, 400):  # the second time the name is taken
            for answer in both("/load_lora_adapter", loaded):
                if answer.status_code != status:
                    raise SystemExit(f"loading {adapter}: {answer.text}")
        for path, bodies in (("/completions", COMPLETIONS), ("/chat/completions", CHATS)):
            for model in ("tiny-reasoner", "adapter"):
                for body in bodies:
                    ours, theirs = (each.raise_for_status().json() for each in both(path, {**body, "model": model}))
                    found.look(ours, theirs, f"{model} {json.dumps(body)[:80]}")
                    asked += 1
        for body in MALFORMED:
            one, other = both("/completions", {"model": "adapter", "prompt": [5, 6], "max_tokens": 1, **body})
            if one.status_code != other.status_code:
                statuses.append(f"{json.dumps(body)}: {one.status_code} here, {other.status_code} there")
        for status in (200, 404):
            for answer in both("/unload_lora_adapter", {"lora_name": "adapter"}):
                if answer.status_code != status:
                    found.differences.append(f"unloading: {answer.text}")
    told = {"requests": asked, "logprob_gap": float(f"{found.gap:.2g}"), "differences": found.differences}
    print(json.dumps(told | {"malformed": len(MALFORMED), "statuses_that_differ": statuses}))
    return int(bool(found.differences) or found.gap > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
