"""A taskset whose environment has its agent try again until it is right: how often shows only when it runs."""

import verifiers.v1 as vf
from toy_reverse import ReverseTaskset


class TwiceEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        while (await agents.agent.run(task)).reward < 1:
            pass


__all__ = ["ReverseTaskset", "TwiceEnv"]
