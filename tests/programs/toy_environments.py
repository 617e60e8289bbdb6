"""Environments as a user writes them, in worker processes: good ones and such as go wrong when they are told to."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import ClassVar

from retrain import Action, Observation, Problem, RewardResult, Step


class Echo:
    """Answers with the words so far; the action says what goes wrong. ``turns`` actions end the episode."""

    metrics_ranges: ClassVar = {"words": {"min": 0, "max": 9}}
    reward_range = (0.0, 9.0)

    def __init__(self, turns: int = 2, exact: bool = True):
        self.turns, self.exact = turns, exact

    def problems(self, split: str) -> Sequence[Problem]:
        count = {"train": 6, "heldout": 2, "empty": 0}[split]
        return [Problem(f"{split}{i}", f"Say {split} {i}", "x", ("toy",), {"i": i}) for i in range(count)]

    def start(self, problem: Problem, seed: int) -> EchoEpisode:
        if problem.prompt == "no":
            raise ValueError("no such problem")
        return EchoEpisode(self, problem, seed)


class EchoEpisode:
    def __init__(self, environment: Echo, problem: Problem, seed: int):
        self.environment, self.problem, self.seed, self.words = environment, problem, seed, []

    def observe(self) -> Observation:
        return Observation([{"role": "user", "content": str(self.problem.prompt)}])

    def step(self, action: Action) -> Step:
        if action.text == "raise":
            raise RuntimeError("an environment with a mistake")
        if action.text == "hang":
            time.sleep(60)
        if action.text == "die":
            os._exit(3)
        if action.text == "flood":
            return Step([{"role": "user", "content": "x" * 2_000_000}], done=False)
        self.words.append(action.text)
        answer = [{"role": "user", "content": f"{self.seed % 7}: {' '.join(self.words)}"}]
        return Step(answer, len(self.words) == self.environment.turns, float(len(self.words)), {"length": 1.0})

    def result(self) -> RewardResult:
        return RewardResult(float(len(self.words)), {"words": float(len(self.words))}, correct="right" in self.words)
