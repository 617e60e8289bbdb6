"""A toy OpenEnv server: guess a digit that the seed has picked. ``python toy_openenv.py PORT [SESSIONS] [SHAPE]``."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

SHAPE = sys.argv[3] if len(sys.argv) > 3 else "text"


class Guess(Action):
    guess: str


class Move(Action):
    row: int
    column: int


class Said(Observation):
    text: str = ""
    distance: int = -1
    correct: bool = False


class Digit(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Said:
        self.secret, self.count = random.Random(seed).randrange(10), 0
        return Said(text=f"Guess my digit, {seed}.")

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Said:
        guess = action.guess if SHAPE == "text" else str(action.row + action.column)
        if guess == "crash":
            os._exit(3)
        if guess == "sleep":
            time.sleep(60)
        self.count += 1
        distance = abs(int(guess) - self.secret)
        over = distance == 0 or self.count == 4
        told = Said(text=f"{distance} off.", distance=distance, reward=1.0 if distance == 0 else -0.1, done=over)
        told.correct = distance == 0 and self.count == 1
        return told

    @property
    def state(self) -> State:
        return State(step_count=self.count)


if __name__ == "__main__":
    sessions = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    app = create_fastapi_app(Digit, Guess if SHAPE == "text" else Move, Said, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
