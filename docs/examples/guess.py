"""An environment of one's own: a number is to be found in four guesses."""

from retrain import Observation, Problem, RewardResult, Step


class Guess:
    reward_range = (0.0, 1.0)

    def problems(self, split):  # "train", or the name of a held-out set
        numbers = [n for n in range(1, 41) if (n % 5 == 0) == (split != "train")]
        return [Problem(f"number {n}", "I think of a number from 1 to 40. Which is it?", str(n)) for n in numbers]

    def start(self, problem, seed):  # all randomness of an episode comes from the seed
        return Game(problem)


class Game:
    def __init__(self, problem):
        self.problem, self.guesses, self.found = problem, 0, False

    def observe(self):
        return Observation([{"role": "user", "content": self.problem.prompt}])

    def step(self, action):
        said, number = action.text.strip(), int(self.problem.answer)
        self.guesses, self.found = self.guesses + 1, said == self.problem.answer
        hint = "Say a number." if not said.isdecimal() else "Larger." if int(said) < number else "Smaller."
        return Step([{"role": "user", "content": hint}], done=self.found or self.guesses == 4)

    def result(self):
        return RewardResult(float(self.found), {"guesses": self.guesses})
