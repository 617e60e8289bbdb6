"""Sends many questions concurrently to a language model behind an OpenAI-compatible endpoint.

A request has a limit on its total duration (against a server that sends one byte a second) and is retried with growing
pauses when the server is busy, broken or unreachable. After the last attempt the answer is a fault; after several
consecutive faults the rest of the batch is not tried.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.errors import UsageError
from retrain.plugins import described

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "https://api.openai.com/v1"
MAX_BODY = 1 << 20
MAX_TOKENS = 2048
REQUESTS_PER_WORKER = 8  # requests wait on a network, not on a core
FAILURES_IN_A_ROW = 4
RETRIED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class JudgeAnswer:
    text: str = ""
    fault: str = ""  # Why there is no text


class JudgeUnavailable(Exception):
    """The endpoint could not be reached or did not answer properly, after all attempts."""


class JudgeEndpoint:
    """The judge ``model`` behind ``url`` (the part before ``/chat/completions``; OpenAI's by default).

    The key is read once, from the environment variable ``api_key_env``, and never written anywhere. ``timeout_s``
    limits one request. A question is sent up to ``attempts`` times, with a first pause of ``pause_s`` seconds that
    doubles each time. ``table``: TOML section, for messages. Raises UsageError if the variable is not set.
    """

    def __init__(
        self,
        model: str,
        url: str | None = None,
        api_key_env: str | None = None,
        workers: int = 2,
        timeout_s: float = 10.0,
        attempts: int = 3,
        pause_s: float = 0.5,
        table: str = "reward",
    ):
        self.model, self.url = model, (url or DEFAULT_URL).rstrip("/") + "/chat/completions"
        self.concurrency = REQUESTS_PER_WORKER * workers
        self.timeout_s, self.attempts, self.pause_s = timeout_s, attempts, pause_s
        self._key = os.environ.get(api_key_env, "") if api_key_env else ""
        if api_key_env and not self._key:
            raise UsageError(f"[{table}] judge_api_key_env: ${api_key_env} is not set: export {api_key_env}=…")

    def ask_all(self, questions: Sequence[Messages]) -> list[JudgeAnswer]:
        """Return the answers in order, each a text or a fault. The API key, which some servers echo, is replaced."""
        with ThreadPoolExecutor(1, "judge") as pool:  # the caller may run in an event loop (a notebook)
            return pool.submit(asyncio.run, self._ask_all(questions)).result()

    async def _ask_all(self, questions: Sequence[Messages]) -> list[JudgeAnswer]:
        import httpx

        slots = asyncio.Semaphore(self.concurrency)
        failures: list[str] = []  # in a row
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self.concurrency)

        async def answer(question: Messages) -> JudgeAnswer:
            async with slots:
                # An endpoint that is down would cost every question of the batch all attempts and pauses.
                if len(failures) >= FAILURES_IN_A_ROW:
                    return JudgeAnswer(fault=f"not tried after {FAILURES_IN_A_ROW} failures in a row: {failures[-1]}")
                try:
                    text = await self._reply(client, question)
                except JudgeUnavailable as error:
                    failures.append(str(error))
                    return JudgeAnswer(fault=failures[-1])
                except Exception as error:  # only this question fails: HTTP 400, a reply that is not a chat completion
                    return JudgeAnswer(fault=self._without_key(described(error)))
                failures.clear()
                return JudgeAnswer(self._without_key(text))

        async with httpx.AsyncClient(headers=headers, timeout=self.timeout_s, limits=limits) as client:
            return list(await asyncio.gather(*map(answer, questions)))

    async def _reply(self, client: httpx.AsyncClient, messages: Messages) -> str:
        import httpx

        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        reason, pause = "", 0.0
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(max(pause, self.pause_s * 2 ** (attempt - 1)))
            try:
                async with asyncio.timeout(self.timeout_s):
                    status, headers, text = await self._post(client, body)
            except (TimeoutError, httpx.TransportError) as error:
                late = f"no answer within {self.timeout_s:g} s (timeout_s)"
                reason, pause = late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}", 0.0
                continue
            if status == 200:
                return _content(text)
            reason = f"HTTP {status} {text[:120]}"
            if status not in RETRIED_STATUS:
                raise ValueError(f"the judge at {self.url} answered {reason}")
            wanted = headers.get("retry-after", "")  # seconds, or a date, which is not followed
            pause = min(float(wanted), self.timeout_s) if wanted.isdecimal() else 0.0
        fault = f"the judge at {self.url} failed {self.attempts} times, last: {reason}"
        raise JudgeUnavailable(self._without_key(fault))

    async def _post(self, client: httpx.AsyncClient, body: Mapping[str, object]) -> tuple[int, httpx.Headers, str]:
        content = json.dumps(body)  # ASCII, so that lone surrogates in a completion travel too
        async with client.stream("POST", self.url, content=content, headers={"Content-Type": "application/json"}) as r:
            received = bytearray()
            async for part in r.aiter_bytes():
                received += part
                if len(received) > MAX_BODY:
                    raise ValueError(f"the judge at {self.url} sent more than {MAX_BODY} bytes")
            return r.status_code, r.headers, received.decode("utf-8", "replace")

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _content(body: str) -> str:
    try:
        choice = json.loads(body)["choices"][0]
        content, ended = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"the judge's reply is not a chat completion: {body[:80]!r}") from None
    if ended == "length":
        raise ValueError(f"the judge's reply was cut off ({MAX_TOKENS} tokens at most)")
    return content if isinstance(content, str) else ""
