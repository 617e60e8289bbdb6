"""A taskset of verifiers, evaluated against a server: the library asks, counts and grades.

    retrain serve logs/quickstart --port 8000 &
    python docs/examples/serve_verifiers.py http://127.0.0.1:8000/v1 tiny-reasoner grpo+none_s1

``pip install '.[verifiers]'`` (0.4 or newer). The agent that asks is the plainest there is; any harness of the library
takes the same client.
"""

import asyncio
import importlib
import sys

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

from retrain.data.arithmetic import arithmetic_problems


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.rstrip().endswith(rf"\boxed{{{self.data.answer}}}"))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for problem in arithmetic_problems("heldout", 60, seed=1):
            yield SumTask(SumData(prompt=problem.prompt, answer=problem.answer), self.config.task)


__all__ = ["Sums"]


async def evaluated(url: str, model: str) -> float:
    """The mean reward of a model."""
    sys.modules["retrain_chat"] = importlib.import_module("retrain.environments.providers.chat_loop")
    sys.modules["serve_verifiers"] = sys.modules["__main__"]
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "retrain-chat"}}
    environment = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "serve-verifiers"}, "agent": agent}))
    context = vf.ModelContext(model=model, client=vf.EvalClientConfig(base_url=url, api_key_var="UNSET"))
    async with environment.serving():
        episodes = await asyncio.gather(*(environment.run_episode(task, context) for task in environment.taskset))
    rewards = [trace.reward for episode in episodes for trace in episode.traces]
    faults = [error for each in episodes for part in (each, *each.traces) for error in part.errors]
    if faults or len(rewards) != 60:
        raise RuntimeError(f"{len(rewards)} rollouts, {len(faults)} faults: {faults[:1]}")
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(f"{name:<24} {asyncio.run(evaluated(sys.argv[1], name)):.1%}")
