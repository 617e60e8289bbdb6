"""A taskset of one turn, whose metric, and whose reward of weight 0, raise for one answer."""

import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.answer == "kaerb":
            raise RuntimeError("broken on purpose")

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def reversed(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ArithmeticError("no such number")
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def sweetness(self, trace: vf.Trace) -> float:
        if trace.last_reply == "mulp":
            raise ArithmeticError("too sweet")
        return 0.5

    @vf.reward(weight=0.0)
    async def ripeness(self, trace: vf.Trace) -> float:
        if trace.last_reply == "mulp":
            raise ArithmeticError("too ripe")
        return 0.5


class ReverseConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("apple", "pear", "plum")


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self):
        for word in self.config.words:
            yield ReverseTask(ReverseData(prompt=word, system_prompt="Reverse.", answer=word[::-1]), self.config.task)


__all__ = ["ReverseTaskset"]
