"""Toy environments as other trainers' documentation writes them, without their packages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    prompt: Any
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardResult:
    total_reward: float
    sample_metrics: dict[str, float] = field(default_factory=dict)
    sample_tags: dict[str, str] = field(default_factory=dict)


class Squares:
    """One turn."""

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = {"length": {"min": 0, "invert": True}}  # noqa: RUF012 (as it is written there)
    system_prompt, instruction_prompt = "You square.", "Only a number."

    def __init__(self, largest: int = 20):
        self.largest = largest

    def load_dataset(self, num_samples: int = -1) -> list[Sample]:
        return [Sample(f"{n}²?", str(n * n), {"n": n}) for n in range(self.largest)]

    async def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        right = float(int(completion) == sample.metadata["n"] ** 2)
        return RewardResult(
            right, {"length": len(completion)}, {"parity": "even" if sample.metadata["n"] % 2 == 0 else "odd"}
        )


class Echo:
    """Several turns: say the word that was asked for, three tries, one tool."""

    max_turns = 3

    def load_dataset(self, num_samples: int = -1) -> list[Sample]:
        return [Sample([{"role": "user", "content": f"say w{n}"}], f"w{n}") for n in range(4)]

    async def env_response(self, messages: list[dict[str, Any]], state: Any) -> list[dict[str, Any]]:
        state.custom["said"] = messages[-1]["content"] == state.sample.answer
        return (
            []
            if state.custom["said"]
            else [{"role": "user", "content": f"no, {len(messages)}", "turn_type": "feedback"}]
        )

    def is_done(self, state: Any) -> tuple[bool, str | None]:
        return state.custom["said"] or state.num_turns >= self.max_turns, "said" if state.custom[
            "said"
        ] else "max_turns"

    def get_tool_metrics(self, state: Any) -> dict[str, float]:
        return {"total_tool_calls": float(state.num_turns)}

    async def compute_reward(self, state: Any, eos_token: str = "") -> RewardResult:
        return RewardResult(1 / state.num_turns if state.custom.get("said") else 0.0)
