"""A taskset whose environment plays the user."""

import verifiers.v1 as vf


class EchoData(vf.TaskData):
    phrases: list[str]


class EchoTask(vf.Task[EchoData]):
    @vf.reward
    async def echoed(self, trace: vf.Trace) -> float:
        said = [message.content for message in trace.assistant_messages]
        return sum(a == b for a, b in zip(said, self.data.phrases, strict=False)) / len(self.data.phrases)


class EchoEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for phrase in task.data.phrases:
                if (await interaction.turn(phrase)).terminated:
                    break


class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self):
        return [EchoTask(EchoData(system_prompt="Repeat.", phrases=["one", "two", "three"]))]


__all__ = ["EchoEnv", "EchoTaskset"]
