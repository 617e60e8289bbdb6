"""An OpenEnv server: guess a digit that the seed has picked. ``python toy_openenv.py PORT [SESSIONS] [SHAPE]``.

SHAPE is that of an action: ``text``, ``nested`` (a field with a definition of its own), or ``tools`` (an MCP
environment).
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import BaseModel, Field

SHAPE = sys.argv[3] if len(sys.argv) > 3 else "text"


class Guess(Action):
    guess: str


class Place(BaseModel):
    row: int
    column: int


class Put(Action):
    place: Place
    pieces: list[Place] = Field(default_factory=list)


class Said(Observation):
    text: str = ""
    distance: int = -1
    correct: bool = False


class Game:
    SUPPORTS_CONCURRENT_SESSIONS = True
    secret = count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Said:
        self.secret, self.count = random.Random(seed).randrange(10), 0
        return Said(text=f"Guess my digit, {seed}.")

    @property
    def state(self) -> State:
        return State(step_count=self.count)


class Digit(Game, Environment):
    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Said:
        guess = action.guess if SHAPE == "text" else str(action.place.row + action.place.column)
        if guess == "crash":
            os._exit(3)
        if guess == "sleep":
            time.sleep(60)
        self.count += 1
        distance = abs(int(guess) - self.secret)
        reward, over = (1.0, True) if distance == 0 else (-0.1, self.count == 4)
        correct = distance == 0 and self.count == 1
        return Said(text=f"{distance} off.", distance=distance, reward=reward, done=over, correct=correct)


def tools_app(sessions: int) -> Any:
    """The same game by tools: ``guess`` a place whose row and column add up to the digit, or ask for a ``hint``."""
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Tools(Game, MCPEnvironment):
        def __init__(self) -> None:
            server = FastMCP("digit")

            @server.tool()
            def guess(place: Place) -> str:
                """Guess the digit by a place."""
                self.last = abs(place.row + place.column - self.secret)
                return f"{self.last} off."

            @server.tool()
            def hint() -> dict[str, bool]:
                """Say whether the digit is even."""
                return {"even": self.secret % 2 == 0}

            super().__init__(server)

        def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            raise NotImplementedError

        async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            self.count, self.last = self.count + 1, -1
            observation = await super().step_async(action, timeout_s, **kwargs)
            if self.last >= 0:
                observation.reward = 1.0 if self.last == 0 else -0.1
            observation.done = self.last == 0 or self.count == 4
            return observation

    return create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=sessions)


if __name__ == "__main__":
    sessions = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    if SHAPE == "tools":
        app = tools_app(sessions)
    else:
        kind = {"text": Guess, "nested": Put}[SHAPE]
        app = create_fastapi_app(Digit, kind, Said, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
