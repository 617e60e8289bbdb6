"""A taskset for the bundled tool user: products that it computes with a tool, named as it knows it."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Compute an expression."""
        return str(eval(expression, {"__builtins__": {}}))


class ProductData(vf.TaskData):
    answer: str


class ProductTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ProductTask(vf.Task[ProductData, vf.State, ProductTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.tools)]

    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        return float(f"\\boxed{{{self.data.answer}}}" in (trace.last_reply or ""))


class ProductConfig(vf.TasksetConfig):
    task: ProductTaskConfig = ProductTaskConfig()


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    def load(self):
        for a in range(12, 20):
            data = ProductData(prompt=f"{a}*{a + 3}+101=?", answer=str(a * (a + 3) + 101))
            yield ProductTask(data, self.config.task)


__all__ = ["ProductTaskset"]

if __name__ == "__main__":
    Calculator.run()
