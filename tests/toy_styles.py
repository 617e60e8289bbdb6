"""Toy environments as other trainers' documentation writes them, without their packages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def Sample(prompt: Any, answer: str, metadata: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(prompt=prompt, answer=answer, metadata=metadata or {})


def RewardResult(total: float, metrics: dict[str, float] | None = None, tags: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(total_reward=total, sample_metrics=metrics or {}, sample_tags=tags or {})


class Squares:
    """One turn."""

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = {"length": {"min": 0, "invert": True}}  # noqa: RUF012 (as it is written there)
    system_prompt, instruction_prompt = "You square.", "Only a number."

    def __init__(self, largest: int = 20):
        self.largest = largest

    def load_dataset(self, num_samples: int = -1) -> list[Any]:
        return [Sample(f"{n}²?", str(n * n), {"n": n}) for n in range(self.largest)]

    async def compute_reward(self, completion: str, sample: Any, eos_token: str = "") -> Any:
        right = float(int(completion) == sample.metadata["n"] ** 2)
        return RewardResult(
            right, {"length": len(completion)}, {"parity": "even" if sample.metadata["n"] % 2 == 0 else "odd"}
        )


class Echo:
    """Several turns: say the word that was asked for, three tries, one tool."""

    def load_dataset(self, num_samples: int = -1) -> list[Any]:
        return [Sample([{"role": "user", "content": f"say w{n}"}], f"w{n}") for n in range(4)]

    async def env_response(self, messages: list[dict[str, Any]], state: Any) -> list[dict[str, Any]]:
        state.custom["said"] = messages[-1]["content"] == state.sample.answer
        return (
            []
            if state.custom["said"]
            else [{"role": "user", "content": f"no, {len(messages)}", "turn_type": "feedback"}]
        )

    def is_done(self, state: Any) -> tuple[bool, str | None]:
        return state.custom["said"] or state.num_turns >= 3, "said" if state.custom["said"] else "max_turns"

    def get_tool_metrics(self, state: Any) -> dict[str, float]:
        return {"total_tool_calls": float(state.num_turns)}

    async def compute_reward(self, state: Any, eos_token: str = "") -> Any:
        return RewardResult(1 / state.num_turns if state.custom.get("said") else 0.0)
