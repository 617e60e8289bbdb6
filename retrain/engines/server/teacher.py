"""Scores the student's samples with a teacher on a server, which returns the log-probabilities of prompts.

The server serves the teacher under its own name: nothing is sampled and no adapter is loaded. Each call has its own
event loop, so that several runs may score at the same time. An unavailable server is retried for ``patience_s``; then
the run stops and is saved, as with servers that sample.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from retrain.config import Config
from retrain.engines.server.client import ServerClient
from retrain.engines.server.connection import RequestFailed, ServerUnavailable, api_key, server_root
from retrain.engines.server.dialects import DIALECTS, Dialect, InvalidAnswer, PromptLogprobs, checked_logprobs
from retrain.errors import RunFailed, ServerFailed, UsageError
from retrain.policy.protocol import Policy
from retrain.types import Sample

PAUSE_S = (0.25, 5.0)  # Seconds between requests to an unavailable server: first, and most
ATTEMPTS = 3  # Invalid answers after which the step fails
START_PATIENCE_S = 20.0  # Seconds to wait for the first answer, before training


class ServerTeacher:
    """The teacher ``model`` on the server at ``url``. ``first_s``: seconds that its first answer took."""

    def __init__(
        self,
        model: str,
        url: str,
        dialect: Dialect,
        key: str = "",
        timeout_s: float = 600.0,
        patience_s: float = 600.0,
        max_in_flight: int = 64,
    ):
        self.model, self.url, self.dialect, self.patience_s = model, url, dialect, patience_s
        self._key, self._timeout_s, self._max_in_flight = key, timeout_s, max_in_flight
        self.identity = f"server's {model}"
        self.base, self.first_s = model, 0.0

    def open(self) -> None:
        """Send a first request. Raises UsageError if the server does not answer or does not have the model."""
        begin = time.perf_counter()
        try:
            asyncio.run(self._query_base())
            asyncio.run(self._score_all([(1, 2, 3)], min(self.patience_s, START_PATIENCE_S)))
        except (RunFailed, RequestFailed) as error:
            raise UsageError(f'[distillation] url = "{self.url}", teacher = "{self.model}": {error}') from error
        self.first_s = time.perf_counter() - begin

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Score the samples as ``Teacher.score`` does. Raises ServerFailed when the server does not answer in time,
        RunFailed when it rejects a request or answers wrongly."""
        scores = asyncio.run(self._score_all([sample.token_ids.tolist() for sample in samples], self.patience_s))
        return [row_L[sample.action_mask] for row_L, sample in zip(scores, samples, strict=True)]

    async def _query_base(self) -> None:
        server = await self._new_client()
        try:
            await server.query_model()
            self.base = server.base
        finally:
            await server.connection.close()

    async def _new_client(self) -> ServerClient:
        server = ServerClient(self.url, self.dialect, self._key, self._timeout_s, self._max_in_flight)
        server.model = self.model
        await server.connection.open()
        return server

    async def _score_all(self, prompts: Sequence[Sequence[int]], patience_s: float) -> list[np.ndarray]:
        server = await self._new_client()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score_prompt(server, prompt, patience_s)) for prompt in prompts]
        except* RunFailed as several:
            raise several.exceptions[0] from None
        finally:
            await server.connection.close()
        return [task.result() for task in tasks]

    async def _score_prompt(self, server: ServerClient, token_ids: Sequence[int], patience_s: float) -> np.ndarray:
        body = self.dialect.prompt_body(self.model, self.base, token_ids)
        since, pause, faults = time.monotonic(), PAUSE_S[0], 0
        while True:
            try:
                async with server.connection.slots:
                    payload = await server.connection.post(self.dialect.completions, body)
                return checked_prompt(self.dialect.read_prompt(payload), token_ids)
            except ServerUnavailable as away:
                if time.monotonic() - since > patience_s:
                    raise ServerFailed(
                        f"the teacher's server {self.url} does not answer, for {patience_s:g} s now ([distillation] "
                        f"patience_s): {away}"
                    ) from away
            except InvalidAnswer as fault:
                faults += 1
                if faults == ATTEMPTS:
                    raise RunFailed(
                        f"the teacher's server {self.url} answers wrongly time and again: {fault}"
                    ) from fault
            except RequestFailed as rejected:
                raise RunFailed(
                    f"the teacher's server {self.url} will not score {self.model}: {rejected}"
                ) from rejected
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_S[1])


def checked_prompt(answer: PromptLogprobs, token_ids: Sequence[int]) -> np.ndarray:
    """Return the log-probabilities [L] of these tokens, 0 for the first, which nothing predicts. Raises InvalidAnswer
    if the answer is for other tokens, or contains a value that is no log-probability."""
    if answer.token_ids is not None and list(answer.token_ids) != list(token_ids):
        raise InvalidAnswer(f"the tokens came back as {len(answer.token_ids)} other ids: they were not read as sent")
    logprobs = [0.0, *answer.logprobs[1:]] if answer.logprobs else []
    return checked_logprobs(logprobs, len(token_ids))


def server_teacher(config: Config) -> ServerTeacher:
    """Return the teacher at ``[distillation] url`` after its first answer. Raises UsageError if it does not answer."""
    settings = config.distillation
    key, url = api_key(settings.api_key_env, "[distillation]"), server_root(settings.url or "")
    dialect = DIALECTS[settings.server]
    teacher = ServerTeacher(
        settings.teacher or "", url, dialect, key, settings.timeout_s, settings.patience_s, settings.max_in_flight
    )
    teacher.open()
    return teacher
