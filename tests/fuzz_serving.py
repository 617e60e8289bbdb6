"""Send a real server requests that are wrong in every way, and see that it refuses them and stays as it was.

    python -m tests.fuzz_serving --requests 10000 --seed 1

Every request is a well-formed one with one to four changes: other values at known and unknown fields, fields left out,
bodies that are cut, flipped or no JSON at all, other headers, other routes. Wrong is an answer of status 500 or above
that is not a 503 with Retry-After, an error in another shape than OpenAI's, no answer at all, a server that is gone, or
has more than ``MEMORY_MIB`` more memory at the end than after the first tenth.

Prints one JSON line; exit status 1 when something was wrong, with the first such request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import httpx

MEMORY_MIB = 64
CHAT = {"role": "user", "content": "12 + 34"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
WELL_FORMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "12 + 34", "max_tokens": 3, "seed": 1}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 2, "n": 2, "stop": ["a"], "top_p": 0.9}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "temperature": 0.5, "top_k": 5}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "echo": True, "logprobs": 1, "min_p": 0.1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stop_token_ids": [5], "return_token_ids": True,
                         "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": [CHAT], "max_tokens": 3, "model": "tiny-reasoner"}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}, CHAT], "max_completion_tokens": 2,
                              "logprobs": True, "top_logprobs": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": [CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                           {"role": "tool", "tool_call_id": "a", "content": "3"}],
                              "tools": [TOOL], "tool_choice": "auto", "max_tokens": 2,
                              "chat_template_kwargs": {"thinking": False}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                              "max_tokens": 2}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere", "load_inplace": True}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "files": {"adapter_config.json": "e30=",
                                                           "adapter_model.safetensors": "AAAA"}}),
    ("/v1/unload_lora_adapter", {"lora_name": "x", "lora_int_id": 1}),
    ("/tokenize", {"prompt": "12 + 34", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": [CHAT]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]  # fmt: skip
DEEP: Any = 1
for _ in range(60):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**63, -(2**63) - 1, 10**40, "", "a",
    "auto", "none", "\x00", "\ud800", "\U0010ffff", "é" * 50, "a" * 5000, "{{ 1 / 0 }}", "{% for i in range(9) %}",
    "<|end|>", "<|user|>", "../..", "/", "/dev/zero", "tiny-reasoner", [], [[]], [1], [1, 2, 3], ["a"], [None],
    [[1], ["a"]], [True], {}, {"a": 1}, {"type": "text"}, {"type": "json_object"}, {"role": "user"}, {"function": {}},
    {"function": None}, DEEP, [1.5], [2**70], [-1], {"": ""}, float("nan"), float("inf"),
]  # fmt: skip
FIELDS = sorted({key for _, body in WELL_FORMED for key in body} | {
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens", "best_of",
    "suffix", "user", "response_format", "structured_outputs", "prompt_logprobs", "allowed_token_ids", "priority",
    "chat_template", "add_generation_prompt", "continue_final_message", "parallel_tool_calls", "truncate_prompt_tokens",
    "use_beam_search", "logprob_token_ids", "return_tokens_as_token_ids", "include_stop_str_in_output", "unknown",
})  # fmt: skip


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    content: bytes
    headers: dict[str, str]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something to change."""
    found = [path] if path else []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        found += places(each, (*path, key))
    return found


def changed(body: dict[str, Any], rng: random.Random) -> None:
    """One change."""
    kind = rng.random()
    if kind < 0.25:
        body[rng.choice(FIELDS)] = deepcopy(rng.choice(VALUES))
        return
    found = places(body)
    if not found:
        return
    *path, last = rng.choice(found)
    target: Any = body
    for key in path:
        target = target[key]
    if kind < 0.85:
        target[last] = deepcopy(rng.choice(VALUES))
    elif kind < 0.95:
        del target[last]
    else:
        target[last] = [target[last], deepcopy(rng.choice(VALUES))]


def request(rng: random.Random) -> Asked:
    """A request that is wrong, most likely."""
    path, body = rng.choice(WELL_FORMED)
    body = deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        changed(body, rng)
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
            if flipped:
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        content = bytes(flipped)
    elif kind < 0.14:
        content = rng.choice([b"", b"null", b"3", b'"a"', b"[]", b"[" * 20_000, b'{"a":' * 20_000, b"\xff" * 99,
                              b'{"seed": ' + b"9" * 5000 + b"}", rng.randbytes(200), b"{}" * 9])  # fmt: skip
    elif kind < 0.16:
        headers["Content-Type"] = rng.choice(["text/plain", "", "application/json; charset=latin-1", "json", "é"])
    elif kind < 0.18:
        method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
    elif kind < 0.20:
        path = rng.choice(
            ["/", "/v1", "/v1/models", "/v1/completions/", "//v1/completions", "/v1/%00", "/health", "/é"]
        )
    elif kind < 0.21:
        headers["Host"] = rng.choice(["evil.example", "127.0.0.1:99999", "[", "localhost:x", "a" * 300])
    return Asked(method, path, content, headers)


def fault(asked: Asked, answer: httpx.Response) -> str | None:
    """What is wrong with an answer, if anything."""
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


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server of its own, and its address."""
    command = [sys.executable, "-m", "retrain", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("serving "):
        raise RuntimeError(f"the server did not start: {line!r}")
    return process, line.rpartition(" at ")[2].strip().removesuffix("/v1")


def stopped(process: subprocess.Popen[str]) -> int:
    """End it as a person would; its exit status."""
    process.send_signal(signal.SIGINT)
    return process.wait(60)


async def fuzz(url: str, pid: int, count: int, seed: int, clients: int) -> dict[str, Any]:
    """Send so many requests, ``clients`` at a time."""
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
                if number % max(1, count // 100) == 0:
                    memory.append(resident_mib(pid))

        await asyncio.gather(*(one_after_the_other() for _ in range(clients)))
        alive = (await client.get("/health")).status_code == 200
        good = await client.post("/v1/completions", json={"prompt": "1 + 1", "max_tokens": 4})
    tenth = memory[len(memory) // 10]
    grown = max(memory[-5:]) - tenth
    wrong = bool(faults) or not alive or good.status_code != 200 or grown > MEMORY_MIB
    return {
        "requests": sum(statuses.values()), "statuses": dict(sorted(statuses.items())), "faults": len(faults),
        "first": faults[:1], "alive": alive, "memory_mib": {"after_a_tenth": round(tenth), "grown": round(grown, 1)},
        "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    process, url = started("tiny-reasoner")
    begin = time.monotonic()
    try:
        told = asyncio.run(fuzz(url, process.pid, given.requests, given.seed, given.clients))
    finally:
        status = stopped(process)
    told |= {"exit_status": status, "seconds": round(time.monotonic() - begin, 1)}
    print(json.dumps(told))
    return int(told["wrong"] or status != 0)


if __name__ == "__main__":
    sys.exit(main())
