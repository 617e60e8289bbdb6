"""Environments of verifiers up to 0.3, as users write them."""

import random

import verifiers as vf
from datasets import Dataset

SUMS = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(20)]
CAPITALS = {"France": "Paris", "Peru": "Lima"}


async def exact(completion, answer):
    return float((completion[-1]["content"] or "").strip() == answer)


def broken(completion):
    raise ArithmeticError("no such number")


def calculator(expression: str) -> str:
    """Compute an expression."""
    return str(eval(expression, {"__builtins__": {}}))


def solved(completion, answer):
    return float(f"\\boxed{{{answer}}}" in (completion[-1]["content"] or ""))


def capital(country: str) -> str:
    """The capital of a country."""
    return CAPITALS[country]


class Guess(vf.MultiTurnEnv):
    """Higher or lower; with ``fault`` the second guess breaks it."""

    fault = ""

    async def setup_state(self, state):
        state["number"] = random.randint(1, 1000)
        return state

    @vf.stop
    async def found(self, state):
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1]["content"] == str(state["number"])

    async def env_response(self, messages, state, **kwargs):
        if self.fault and len(state["trajectory"]) == 2:
            raise RuntimeError(self.fault)
        said = messages[-1]["content"]
        hint = "higher" if said.isdigit() and int(said) < state["number"] else "lower"
        return [{"role": "user", "content": f"{hint} ({random.random():.6f})"}]


class Forgetful(Guess):
    """Shows the last answer only, with a summary of what was before."""

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        said = state["trajectory"][-1]["completion"]
        return [
            {"role": "user", "content": f"{len(state['trajectory'])} so far."},
            *said,
            *await self.env_response(said, state),
        ]


def load_environment(kind="sums", fault="", max_turns=4):
    rubric = vf.Rubric(funcs=[exact])
    data = Dataset.from_list(SUMS)
    one = Dataset.from_list([{"question": "Guess.", "answer": "0"}])
    match kind:
        case "sums":
            return vf.SingleTurnEnv(dataset=data, eval_dataset=one, system_prompt="Answer.", rubric=rubric)
        case "untested":
            return vf.SingleTurnEnv(dataset=data, rubric=rubric)
        case "broken":
            return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[exact, broken], weights=[1.0, 0.5]))
        case "broken metric":
            return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[exact, broken], weights=[1.0, 0.0]))
        case "tools":
            asked = Dataset.from_list([{"question": f"Capital of {c}?", "answer": a} for c, a in CAPITALS.items()])
            return vf.ToolEnv(dataset=asked, tools=[capital], rubric=rubric, max_turns=max_turns)
        case "calculator":  # for the bundled tool user
            sums = [{"question": f"{n}*{n + 3}+101=?", "answer": str(n * (n + 3) + 101)} for n in range(12, 20)]
            return vf.ToolEnv(dataset=Dataset.from_list(sums), tools=[calculator], rubric=vf.Rubric(funcs=[solved]))
        case "group":

            def best(completions, **kwargs):
                return [1.0 for _ in completions]

            return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[best]))
    game = (Forgetful if kind == "forgetful" else Guess)(dataset=one, rubric=rubric, max_turns=max_turns)
    game.fault = fault
    return game
