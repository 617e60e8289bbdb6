"""A teacher behind a server: log-probabilities of whole prompts, the student's samples among them.

Nothing is sampled there and no adapter is loaded: the server has the teacher under its own name. Each call asks in an
event loop of its own, so that several runs may ask at once. A server that is away is asked again until a patience ends;
then everything stops and is saved, as with servers that sample.
"""

import asyncio
import math
import os
import time
from collections.abc import Sequence

import numpy as np

from retrain.config import Config
from retrain.engines.server.checks import ABOVE_ZERO
from retrain.engines.server.client import Away, Refused, Server, Unknown
from retrain.engines.server.dialects import DIALECTS, Dialect, Faulty, Prompted
from retrain.errors import RunFailed, ServerFailed, UsageError
from retrain.policy.protocol import Policy
from retrain.types import Sample

PAUSE_S = (0.25, 5.0)  # Seconds between requests to an unavailable server: first, and most
ATTEMPTS = 3  # Most faulty answers before the step fails
START_PATIENCE_S = 20.0  # Seconds that it may take to answer for the first time, before anything is trained


class ServerTeacher:
    """The ``model`` at ``url``. ``first_s`` are the seconds that its first answer has taken."""

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
        """Ask for the first time. Raises UsageError where there is no such server, or no such model."""
        begin = time.perf_counter()
        try:
            asyncio.run(self._look())
            asyncio.run(self._all([(1, 2, 3)], min(self.patience_s, START_PATIENCE_S)))
        except (RunFailed, Away, Unknown, Refused) as error:
            raise UsageError(f'[distillation] url = "{self.url}", teacher = "{self.model}": {error}') from error
        self.first_s = time.perf_counter() - begin

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        """See ``Teacher.score``. Raises ServerFailed when it stays away, RunFailed when it refuses."""
        said = asyncio.run(self._all([sample.token_ids.tolist() for sample in samples], self.patience_s))
        return [row_L[sample.action_mask] for row_L, sample in zip(said, samples, strict=True)]

    async def _look(self) -> None:
        server = await self._opened()
        try:
            await server.look()
            self.base = server.base
        finally:
            await server.close()

    async def _opened(self) -> Server:
        server = Server(self.url, self.dialect, self._key, self._timeout_s, self._max_in_flight)
        server.model = self.model
        await server.open()
        return server

    async def _all(self, prompts: Sequence[Sequence[int]], patience_s: float) -> list[np.ndarray]:
        server = await self._opened()
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._one(server, prompt, patience_s)) for prompt in prompts]
        except* RunFailed as several:
            raise several.exceptions[0] from None
        finally:
            await server.close()
        return [task.result() for task in asked]

    async def _one(self, server: Server, token_ids: Sequence[int], patience_s: float) -> np.ndarray:
        """Log-probabilities [L] of these tokens, 0 for the first."""
        body = self.dialect.prompt_body(self.model, self.base, token_ids)
        since, pause, faulty = time.monotonic(), PAUSE_S[0], 0
        while True:
            try:
                async with server.slots:
                    payload = await server.post(self.dialect.completions, body)
                return checked_prompt(self.dialect.read_prompt(payload), token_ids)
            except Away as away:
                if time.monotonic() - since > patience_s:
                    raise ServerFailed(
                        f"the teacher's server {self.url} does not answer, for {patience_s:g} s now ([distillation] "
                        f"patience_s): {away}"
                    ) from away
            except Faulty as fault:
                faulty += 1
                if faulty == ATTEMPTS:
                    raise RunFailed(
                        f"the teacher's server {self.url} answers wrongly time and again: {fault}"
                    ) from fault
            except (Unknown, Refused) as no:
                raise RunFailed(f"the teacher's server {self.url} will not score {self.model}: {no}") from no
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_S[1])


def checked_prompt(said: Prompted, token_ids: Sequence[int]) -> np.ndarray:
    """The log-probabilities [L] that an answer has of these tokens, 0 for the first, which nothing predicts. Raises
    Faulty where it is about other tokens, or where one is no log-probability."""
    if said.token_ids is not None and list(said.token_ids) != list(token_ids):
        raise Faulty(f"the tokens came back as {len(said.token_ids)} other ids: they were not read as sent")
    if len(said.logprobs) != len(token_ids):
        raise Faulty(f"{len(said.logprobs)} log-probabilities for {len(token_ids)} tokens")
    found_L = np.zeros(len(token_ids))
    for place, value in enumerate(said.logprobs[1:], start=1):
        if type(value) not in (int, float) or value is None or not math.isfinite(value) or value > ABOVE_ZERO:
            raise Faulty(f"log-probability {value!r}")
        found_L[place] = min(value, 0.0)
    return found_L


def server_teacher(config: Config) -> ServerTeacher:
    """The teacher behind ``[distillation] url``, once it has answered. Raises UsageError when it does not."""
    own = config.distillation
    key = os.environ.get(own.api_key_env, "") if own.api_key_env else ""
    if own.api_key_env and not key:
        raise UsageError(f"[distillation] api_key_env: ${own.api_key_env} is not set: export {own.api_key_env}=…")
    url = (own.url or "").rstrip("/").removesuffix("/v1")
    dialect = DIALECTS[own.server]
    made = ServerTeacher(own.teacher or "", url, dialect, key, own.timeout_s, own.patience_s, own.max_in_flight)
    made.open()
    return made
