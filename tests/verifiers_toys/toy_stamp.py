"""A taskset with a tool, which runs in a process of its own, and state that the two share."""

import verifiers.v1 as vf


class Stamps(vf.State):
    count: int = 0


class Stamp(vf.Toolset[vf.ToolsetConfig, Stamps]):
    TOOL_PREFIX = "stamp"

    @vf.tool
    def back(self, message: str) -> str:
        """Give the message back, stamped."""
        self.state.count += 1
        return f"{message} [stamp {self.state.count}]"


class StampTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class StampTask(vf.Task[vf.TaskData, Stamps, StampTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Stamp(config.tools)]

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.state.count >= 3

    @vf.reward
    async def stamped(self, trace: vf.Trace) -> float:
        return trace.state.count / 3


class StampConfig(vf.TasksetConfig):
    task: StampTaskConfig = StampTaskConfig()


class StampTaskset(vf.Taskset[StampTask, StampConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield StampTask(vf.TaskData(prompt=f"Stamp word {number}."), self.config.task)
            number += 1


__all__ = ["StampTaskset"]

if __name__ == "__main__":
    Stamp.run()
