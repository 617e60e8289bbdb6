"""An environment of several turns."""

import sys

from retrain.environments.protocol import Observation, Step
from retrain.types import RewardResult


class TwoTurns:
    """Asks for more, once by default; rewards the number of answers. An answer of "fail" is not foreseen."""

    exact = True

    def __init__(self, turns: int = 2):
        self.turns, self.ranges, self.graded, self.seeds = turns, {}, [], []

    def start(self, problem, seed):
        if problem.id == "unknown":
            raise LookupError("no such problem")
        self.seeds.append(seed)
        return TwoTurnsEpisode(problem, self.turns)

    def results(self, episodes):
        self.graded += [episode.problem.id for episode in episodes]
        return [RewardResult(float(len(episode.said))) for episode in episodes]


class TwoTurnsEpisode:
    def __init__(self, problem, turns):
        self.problem, self.turns, self.said = problem, turns, []

    def observe(self):
        return Observation(({"role": "user", "content": self.problem.prompt},))

    def step(self, action):
        if action.text == "fail":
            raise RuntimeError("an environment with a mistake")
        if action.text == "exit":
            sys.exit("enough")
        self.said.append(action.text)
        done = action.text == "last" or len(self.said) == self.turns
        return Step(() if done else ({"role": "user", "content": "more?"},), done)
