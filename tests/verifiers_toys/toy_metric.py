"""A taskset whose metric, and whose reward of weight 0, raise for one answer."""

import verifiers.v1 as vf
from toy_reverse import ReverseConfig, ReverseData, ReverseTask


class MetricTask(ReverseTask):
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


class MetricTaskset(vf.Taskset[MetricTask, ReverseConfig]):
    def load(self):
        for word in self.config.words:
            yield MetricTask(ReverseData(prompt=word, answer=word[::-1]), self.config.task)


__all__ = ["MetricTaskset"]
