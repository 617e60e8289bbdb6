"""Check a server under load: many clients at once lose no answer, and each answer equals the one without load.

    python -m tests.programs.serving_load [WHAT] --clients 200 --requests 10

WHAT is an argument of ``retrain serve``, by default tiny-reasoner; a campaign's directory has several adapters. Each
question is first asked without load. Then every client asks ``--requests`` questions in turn, with and without a
stream, and compares the answers. Prints one JSON line. The exit status is 1 when an answer was lost or when more than
one in a thousand differs: rounding may move a draw that falls between two tokens.
"""

import argparse
import asyncio
import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import psutil

TOLERANCE = 1e-4  # of log-probabilities


def resident_mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``retrain serve`` on a free port; yield the process and its address. SIGINT ends it."""
    command = [sys.executable, "-m", "retrain", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().rpartition(" at ")[2].strip()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def questions(models: list[str], count: int) -> list[dict[str, Any]]:
    """Return bodies that differ in model, length, sampling and seed."""
    return [
        {
            "model": models[k % len(models)], "prompt": f"<|user|>{10 + k * 7 % 89} + {11 + k * 13 % 88}<|assistant|>",
            "max_tokens": 16 + k * 5 % 80, "temperature": (1.0, 0.7, 1.3)[k % 3], "top_p": (1.0, 0.9)[k % 2], "seed": k,
            "logprobs": 0, "return_token_ids": True, "ignore_eos": k % 4 == 0,
        }
        for k in range(count)
    ]  # fmt: skip


async def ask(client: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> tuple[list[int], list[float], int]:
    """Return token ids, their log-probabilities, and how often the server was too busy (503)."""
    for retries in range(1000):
        answer = await client.post("/completions", json={**body, "stream": stream})
        if answer.status_code == 503:
            await asyncio.sleep(float(answer.headers["Retry-After"]))
            continue
        answer.raise_for_status()
        if not stream:
            [choice] = answer.json()["choices"]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"], retries
        *lines, end = [line for line in answer.text.split("\n\n") if line]
        assert end == "data: [DONE]"
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        token_ids = [token for choice in choices for token in choice["token_ids"]]
        return token_ids, [x for choice in choices for x in choice["logprobs"]["token_logprobs"]], retries
    raise RuntimeError("the server takes no requests")


async def load(url: str, pid: int, clients: int, requests: int) -> dict[str, Any]:
    """Ask without load, then with all clients; return the counts and times that the program prints."""
    secure = ssl.create_default_context()

    def new_client() -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, timeout=600, verify=secure)

    async with new_client() as client, AsyncExitStack() as stack:
        # One pool of connections per client: httpx takes longer to find a free one among two hundred than an answer.
        loaded = [await stack.enter_async_context(new_client()) for _ in range(clients)]
        models = [card["id"] for card in (await client.get("/models")).json()["data"]]
        bodies = questions(models, 60)
        begin = time.monotonic()
        unloaded = [await ask(client, body, False) for body in bodies]
        unloaded_seconds = time.monotonic() - begin
        lost: list[str] = []
        differ = tokens = retries = 0
        gap = 0.0
        seconds: list[float] = []

        async def run_client(number: int) -> None:
            nonlocal differ, tokens, retries, gap
            for turn in range(requests):
                k = (number * 17 + turn * 7) % len(bodies)
                started = time.monotonic()
                try:
                    token_ids, logprobs, busy = await ask(loaded[number], bodies[k], (number + turn) % 2 == 1)
                except (httpx.HTTPError, AssertionError, RuntimeError) as error:
                    lost.append(f"{type(error).__name__}: {error}")
                    continue
                seconds.append(time.monotonic() - started)
                tokens, retries = tokens + len(token_ids), retries + busy
                if token_ids != unloaded[k][0]:
                    differ += 1
                else:
                    gap = max(gap, *(abs(a - b) for a, b in zip(logprobs, unloaded[k][1], strict=True)))

        await asyncio.gather(*(run_client(number) for number in range(min(20, clients))))  # until memory has settled
        before, seconds[:] = resident_mib(pid), []
        differ = tokens = retries = 0
        begin = time.monotonic()
        await asyncio.gather(*(run_client(number) for number in range(clients)))
        took = time.monotonic() - begin
    wrong = bool(lost) or 1000 * differ > len(seconds) or gap > TOLERANCE
    return {
        "models": len(models), "clients": clients, "answers": len(seconds), "lost": len(lost), "first": lost[:1],
        "differ": differ, "largest_gap": float(f"{gap:.2g}"), "came_again": retries, "tokens": tokens,
        "tokens_per_second": round(tokens / took), "seconds": round(took, 1),
        "slowest_answer_s": round(max(seconds), 2), "alone_tokens_per_second": round(
            sum(len(each[0]) for each in unloaded) / unloaded_seconds),
        "memory_mib": {"before": round(before), "after": round(resident_mib(pid))}, "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="tiny-reasoner")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=10, help="of each client")
    parser.add_argument("--max-queue", type=int, default=4096)
    arguments = parser.parse_args()
    with served(arguments.what, "--max-queue", str(arguments.max_queue)) as (process, url):
        result = asyncio.run(load(url, process.pid, arguments.clients, arguments.requests))
    print(json.dumps(result | {"exit_status": process.returncode}))
    return int(result["wrong"] or process.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
