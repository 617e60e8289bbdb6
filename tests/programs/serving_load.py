"""A server under load: so many clients at once, nothing lost, every answer the one that its seed has alone.

    python -m tests.programs.serving_load [WHAT] --clients 200 --requests 10

WHAT is what ``retrain serve`` takes (a campaign's directory has several adapters); without it tiny-reasoner alone.
Every question is first asked alone. Then every client asks ``--requests`` of them, one after the other, with and
without a stream, and compares what it reads. Prints one JSON line; exit status 1 when an answer was lost, or more than
one in a thousand is another than alone (rounding moves a draw that falls on the edge between two tokens).
"""

import argparse
import asyncio
import json
import re
import signal
import ssl
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

TOLERANCE = 1e-4
"""Of log-probabilities."""


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def questions(models: list[str], count: int) -> list[dict[str, Any]]:
    """Bodies that differ in model, length, sampling and seed."""
    return [
        {
            "model": models[k % len(models)],
            "prompt": f"<|user|>{10 + k * 7 % 89} + {11 + k * 13 % 88}<|assistant|>",
            "max_tokens": 16 + k * 5 % 80,
            "temperature": (1.0, 0.7, 1.3)[k % 3],
            "top_p": (1.0, 0.9)[k % 2],
            "seed": k,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": k % 4 == 0,
        }
        for k in range(count)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> tuple[list[int], list[float], int]:
    """Token ids, their log-probabilities, and how often it had to come again."""
    for again in range(1000):
        answer = await client.post("/completions", json={**body, "stream": stream})
        if answer.status_code == 503:
            await asyncio.sleep(float(answer.headers["Retry-After"]))
            continue
        answer.raise_for_status()
        if not stream:
            [choice] = answer.json()["choices"]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"], again
        *lines, end = [line for line in answer.text.split("\n\n") if line]
        assert end == "data: [DONE]"
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        token_ids = [token for choice in choices for token in choice["token_ids"]]
        return token_ids, [x for choice in choices for x in choice["logprobs"]["token_logprobs"]], again
    raise RuntimeError("the server takes no requests")


async def load(url: str, pid: int, clients: int, requests: int) -> dict[str, Any]:
    """The measurement."""
    secure = ssl.create_default_context()

    def new_client() -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, timeout=600, verify=secure)

    async with new_client() as client, AsyncExitStack() as stack:
        # A pool of connections each: looking for a free one among two hundred takes httpx longer than an answer.
        each = [await stack.enter_async_context(new_client()) for _ in range(clients)]
        models = [card["id"] for card in (await client.get("/models")).json()["data"]]
        asked = questions(models, 60)
        begin = time.monotonic()
        alone = [await ask(client, body, False) for body in asked]
        alone_seconds = time.monotonic() - begin
        lost: list[str] = []
        differ = tokens = again = 0
        gap = 0.0
        seconds: list[float] = []

        async def one(number: int) -> None:
            nonlocal differ, tokens, again, gap
            for place in range(requests):
                k = (number * 17 + place * 7) % len(asked)
                started = time.monotonic()
                try:
                    token_ids, logprobs, came_again = await ask(each[number], asked[k], (number + place) % 2 == 1)
                except (httpx.HTTPError, AssertionError, RuntimeError) as error:
                    lost.append(f"{type(error).__name__}: {error}")
                    continue
                seconds.append(time.monotonic() - started)
                tokens, again = tokens + len(token_ids), again + came_again
                if token_ids != alone[k][0]:
                    differ += 1
                else:
                    gap = max(gap, *(abs(a - b) for a, b in zip(logprobs, alone[k][1], strict=True)))

        await asyncio.gather(*(one(number) for number in range(min(20, clients))))  # until memory has settled
        before, seconds[:] = resident_mib(pid), []
        differ = tokens = again = 0
        begin = time.monotonic()
        await asyncio.gather(*(one(number) for number in range(clients)))
        took = time.monotonic() - begin
    wrong = bool(lost) or 1000 * differ > len(seconds) or gap > TOLERANCE
    return {
        "models": len(models), "clients": clients, "answers": len(seconds), "lost": len(lost), "first": lost[:1],
        "differ": differ, "largest_gap": float(f"{gap:.2g}"), "came_again": again, "tokens": tokens,
        "tokens_per_second": round(tokens / took), "seconds": round(took, 1),
        "slowest_answer_s": round(max(seconds), 2), "alone_tokens_per_second": round(
            sum(len(each[0]) for each in alone) / alone_seconds),
        "memory_mib": {"before": round(before), "after": round(resident_mib(pid))}, "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="tiny-reasoner")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=10, help="of each client")
    parser.add_argument("--max-queue", type=int, default=4096)
    given = parser.parse_args()
    command = [sys.executable, "-m", "retrain", "serve", given.what, "--port", "0", "--max-queue", str(given.max_queue)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().rpartition(" at ")[2].strip()
        told = asyncio.run(load(url, process.pid, given.clients, given.requests))
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(60)
    print(json.dumps(told | {"exit_status": status}))
    return int(told["wrong"] or status != 0)


if __name__ == "__main__":
    sys.exit(main())
