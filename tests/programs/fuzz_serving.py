"""Send a real server requests that are wrong in every way, and see that it refuses them and stays as it was.

    python -m tests.programs.fuzz_serving --requests 10000 --seed 1

Every request is a well-formed one with one to four changes: other values at known and unknown fields, fields left out,
bodies that are cut, flipped or no JSON at all, other headers, other routes. Wrong is an answer of status 500 or above
that is not a 503 with Retry-After, an error in another shape than OpenAI's, no answer at all, a server that is gone, or
has more than ``MEMORY_MIB`` more memory at the end than after the first tenth.

Prints one JSON line; exit status 1 when something was wrong, with the first such request.
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from copy import deepcopy
from typing import Any, NamedTuple

import httpx

from tests.programs.serving_load import resident_mib, served

MEMORY_MIB = 64
CHAT = {"role": "user", "content": "12 + 34"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "a"}]
COMPLETION = {
    "prompt": [[5, 6], [7]], "max_tokens": 2, "n": 2, "seed": 1, "logprobs": 2, "stop": ["a"], "stop_token_ids": [5],
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "return_token_ids": True, "ignore_eos": True,
}  # fmt: skip
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
FILES = {"adapter_config.json": "e30=", "adapter_model.safetensors": "AAAA"}
WELL_FORMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "12 + 34", "max_tokens": 3}),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COMPLETION | STREAMED),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "echo": True, "logprobs": 1}),
    ("/v1/chat/completions", {"messages": [CHAT], "max_tokens": 3, "model": "tiny-reasoner"}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}, CHAT], "max_completion_tokens": 2,
                              "logprobs": True, "top_logprobs": 2, **STREAMED}),
    ("/v1/chat/completions", {"messages": [CHAT, *CALLED], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 2,
                              "chat_template_kwargs": {"thinking": False}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                              "max_tokens": 2}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere", "load_inplace": True}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "files": FILES}),
    ("/v1/unload_lora_adapter", {"lora_name": "x", "lora_int_id": 1}),
    ("/tokenize", {"prompt": "12 + 34", "add_special_tokens": True}),
    ("/tokenize", {"messages": [CHAT]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]  # fmt: skip
DEEP: Any = 1
for _ in range(60):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**63, -(2**63) - 1, 10**40, "", "a", "auto",
    "none", "\x00", "\ud800", "\U0010ffff", "é" * 50, "a" * 5000, "{{ 1 / 0 }}", "{% for i in range(9) %}", "<|end|>",
    "../..", "/dev/zero", "tiny-reasoner", [], [[]], [1], ["a"], [None], [[1], ["a"]], [True], [1.5], [2**70], [-1],
    {}, {"a": 1}, {"type": "text"}, {"type": "json_object"}, {"role": "user"}, {"function": {}}, {"function": None},
    {"": ""}, DEEP, float("nan"), float("inf"),
]  # fmt: skip
FIELDS = sorted({key for _, body in WELL_FORMED for key in body} | {
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens", "best_of",
    "suffix", "user", "response_format", "structured_outputs", "prompt_logprobs", "allowed_token_ids", "priority",
    "chat_template", "add_generation_prompt", "continue_final_message", "parallel_tool_calls", "truncate_prompt_tokens",
    "use_beam_search", "logprob_token_ids", "return_tokens_as_token_ids", "include_stop_str_in_output", "unknown",
})  # fmt: skip
NO_REQUESTS = [
    b"", b"null", b"3", b'"a"', b"[]", b"[" * 20_000, b'{"a":' * 20_000, b"\xff" * 99, b"{}" * 9,
    b'{"seed": ' + b"9" * 5000 + b"}",
]  # fmt: skip
TYPES = ["text/plain", "", "application/json; charset=latin-1", "json", "é"]
METHODS = ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]
PATHS = ["/", "/v1", "/v1/models", "/v1/completions/", "//v1/completions", "/v1/%00", "/health", "/é"]
HOSTS = ["evil.example", "127.0.0.1:99999", "[", "localhost:x", "a" * 300]


class Asked(NamedTuple):
    method: str
    path: str
    content: bytes
    headers: dict[str, str]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in inside for place in ((value, key), *places(each))]


def change(body: dict[str, Any], rng: random.Random) -> None:
    kind, found = rng.random(), places(body)
    value = deepcopy(rng.choice(VALUES))
    if kind < 0.25 or not found:
        body[rng.choice(FIELDS)] = value
        return
    container, key = rng.choice(found)
    if kind < 0.85:
        container[key] = value
    elif kind < 0.95:
        del container[key]
    else:
        container[key] = [container[key], value]


def request(rng: random.Random) -> Asked:
    """Return a request that is wrong, most likely."""
    path, body = deepcopy(rng.choice(WELL_FORMED))
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        change(body, rng)
    try:
        content = json.dumps(body, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
    except RecursionError:
        content = b"{}"
    headers, method = {"Content-Type": "application/json"}, "POST"
    kind = rng.random()
    if kind < 0.05:
        content = content[: rng.randrange(len(content) + 1)]
    elif kind < 0.12:
        flipped = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        content = bytes(flipped)
    elif kind < 0.14:
        content = rng.choice([*NO_REQUESTS, rng.randbytes(200)])
    elif kind < 0.16:
        headers["Content-Type"] = rng.choice(TYPES)
    elif kind < 0.18:
        method = rng.choice(METHODS)
    elif kind < 0.20:
        path = rng.choice(PATHS)
    elif kind < 0.21:
        headers["Host"] = rng.choice(HOSTS)
    return Asked(method, path, content, headers)


def fault(asked: Asked, answer: httpx.Response) -> str | None:
    """Return what is wrong with an answer, if anything."""
    status = answer.status_code
    if status == 503 and answer.headers.get("retry-after"):
        return None
    if status >= 500:
        return f"status {status}: {answer.text[:300]}"
    if "text/event-stream" in answer.headers.get("content-type", ""):
        return None if answer.text.endswith("data: [DONE]\n\n") else f"a stream without an end: {answer.text[-300:]}"
    if status >= 400 and asked.method != "HEAD":
        try:
            error = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            # What is not HTTP is refused before anybody looks at it.
            return None if answer.text == "Invalid HTTP request received." else f"no error of ours: {answer.text[:300]}"
        if set(error) != {"message", "type", "param", "code"} or error["code"] != status or not error["message"]:
            return f"an error of another shape: {answer.text[:300]}"
    elif status == 200 and asked.path.startswith("/v1/c"):
        json.loads(answer.text, parse_constant=lambda name: 1 / 0)
    return None


async def send(client: httpx.AsyncClient, asked: Asked) -> httpx.Response:
    headers = {key: value.encode("utf-8") for key, value in asked.headers.items()}
    return await client.request(asked.method, asked.path, content=asked.content, headers=headers)


async def fuzz(url: str, pid: int, count: int, seed: int, clients: int) -> dict[str, Any]:
    """Send ``count`` requests, ``clients`` at a time, to the server with this process id."""
    statuses: Counter[int] = Counter()
    faults: list[dict[str, Any]] = []
    memory: list[float] = []
    numbers = iter(range(count))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one_after_the_other() -> None:
            for number in numbers:
                asked = request(random.Random(f"{seed}/{number}"))
                try:
                    answer = await send(client, asked)
                    statuses[answer.status_code] += 1
                    wrong = fault(asked, answer)
                except (httpx.HTTPError, ArithmeticError) as error:
                    wrong = f"{type(error).__name__}: {error}"
                if wrong:
                    faults.append({"request": number, "wrong": wrong, "asked": repr(asked)[:600]})
                memory.append(resident_mib(pid))

        await asyncio.gather(*(one_after_the_other() for _ in range(clients)))
        good = await client.post("/v1/completions", json={"prompt": "1 + 1", "max_tokens": 4})
    grown = max(memory[-5:]) - memory[len(memory) // 10]
    return {
        "requests": sum(statuses.values()), "statuses": dict(sorted(statuses.items())), "faults": len(faults),
        "first": faults[:1], "memory_mib": {"at_the_end": round(memory[-1]), "grown": round(grown, 1)},
        "wrong": bool(faults) or good.status_code != 200 or grown > MEMORY_MIB,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    with served("tiny-reasoner") as (process, url):
        result = asyncio.run(fuzz(url.removesuffix("/v1"), process.pid, given.requests, given.seed, given.clients))
    print(json.dumps(result | {"exit_status": process.returncode}))
    return int(result["wrong"] or process.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
