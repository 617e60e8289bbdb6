"""Hand-made steps for the tests of the record layer: small enough to work every number by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.config import Config, parse_dict
from retrain.record.context import RunContext
from retrain.types import Action, EvalRecord, Group, Problem, Prompt, RewardResult, StepRecord, single_turn


def completion(length: int, text: str = "so \\boxed{4}", stop: bool = True, entropy: float | None = 0.5) -> Action:
    """``length`` tokens of logprob −1 each."""
    entropy_T = None if entropy is None else np.full(length, entropy, dtype=np.float32)
    return Action(list(range(length)), text, np.full(length, -1.0), entropy_T, "stop" if stop else "length")


def group(
    rewards: Sequence[float | RewardResult | None],
    lengths: list[int],
    prompt_length: int = 3,
    tags: tuple[str, ...] = (),
    stops: list[bool] | None = None,
    discarded: str | None = None,
    problem_id: str = "p0",
) -> Group:
    """A group whose advantages are reward − mean, NaN where there is no reward."""
    results = [r if isinstance(r, RewardResult) else RewardResult(r, error=None if r is not None else "timed out")
               for r in rewards]  # fmt: skip
    totals_N = np.array([np.nan if r.total_reward is None else r.total_reward for r in results])
    known = totals_N[~np.isnan(totals_N)]
    problem = Problem(problem_id, f"What is {problem_id}?", "4", tags)
    found = single_turn(
        Prompt(problem, f"<user>{problem.prompt}", tuple(range(prompt_length))),
        [completion(n, stop=(stops or [True] * len(lengths))[i]) for i, n in enumerate(lengths)],
        results,
    )
    for rollout, total in zip(found.rollouts, totals_N, strict=True):
        rollout.advantage = float(total - (known.mean() if len(known) else 0.0))
    found.discarded = discarded
    return found


def step(groups: list[Group], number: int = 0, update: dict[str, Any] | None = None, **state: Any) -> StepRecord:
    """A step of 4 seconds after the one before it: 2 rollout, 1 update, 1 that no span names."""
    start = 1000.0 + 4.0 * number
    spans = [("rollout", start, start + 2.0), ("update", start + 2.0, start + 3.0)]
    return StepRecord(number, groups, update or {}, state, spans, start, start + 4.0)


def evaluation(groups: list[Group], number: int = 0, name: str = "heldout") -> EvalRecord:
    """An evaluation after ``number`` updates."""
    return EvalRecord(name, number, groups, temperature=1.0, samples=1, seconds=0.5)


def config(**sections: dict[str, Any]) -> Config:
    """A configuration with these sections."""
    base: dict[str, dict[str, Any]] = {
        "logging": {"aliases": ["tinker", "trl", "telescope", "retrain"], "report_to": []},
        "algorithm": {"advantage_mode": "grpo", "transform_mode": "none", "uncertainty_kind": "surprisal"},
        "evaluation": {"problems": 4},
        "reward": {"type": "match"},
        "training": {"lr": 1e-4, "batch_size": 2, "group_size": 4, "max_tokens": 16, "temperature": 1.0},
        "model": {"model": "tiny-reasoner", "lora_rank": 8},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return parse_dict(base)


def context(**changes: Any) -> RunContext:
    """A run of 10 steps."""
    values = {"condition": "grpo+none", "run_id": "grpo+none_s1", "seed": 1, "config": config(), "max_steps": 10}
    return RunContext(**{**values, **changes})


def find_conversations(node: Any) -> list[dict[str, Any]]:
    """Conversations of a logtree, as in the cookbook's documentation."""
    results: list[dict[str, Any]] = []
    if isinstance(node, dict):
        if node.get("data", {}).get("type") == "conversation":
            results.append(node["data"])
        for child in node.get("children", []):
            if isinstance(child, dict):
                results.extend(find_conversations(child))
    return results
