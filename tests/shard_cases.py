"""A campaign of the bundled model that several ranks train, and how far two of its directories differ."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
from worker_cases import contents

from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.config import load

TOML = """
[campaign]
seeds = [1]
max_steps = 3
lanes = 2
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
kl_coef = 0.01
[[campaign.conditions]]
advantage_mode = "gae"
transform_mode = "none"
num_iterations = 2
critic = { lora_rank = 2 }
[model]
lora_rank = 4
[training]
batch_size = 8
group_size = 8
max_tokens = 16
lr = 0.002
save_every = 1
eval_every = 1
micro_batch_tokens = 400
[evaluation]
problems = 40
[squeeze]
enabled = false
"""
"""Two lanes, one with a reference model, one with a critic and several updates; 128 rollouts a step, which decode in
several pieces, and more micro-batches than ranks."""


SMALL = 0.01


def on_ranks(count: int, shard: str = "dp") -> list[str]:
    """The settings for so many ranks."""
    return [f'backend.shard="{shard}"', f"backend.ranks={count}"] if count > 1 else ['backend.shard="none"']


def planned(out: Path, sets: list[str]) -> Plan:
    """The campaign, with these settings changed."""
    file = out.parent / f"{out.name}.toml"
    file.write_text(TOML)
    return check(Plan.of(load(file, sets), out))


def left_by(out: Path) -> dict[str, Any]:
    """What no clock and no number of ranks has part in."""
    found = {name: value for name, value in contents(out).items() if not name.endswith("config.json")}
    return {name.removeprefix("runs/"): value for name, value in found.items() if name != "cohorts"}


def distance(one: Any, other: Any) -> float:
    """The largest relative difference of numbers that stand at the same place, infinite where anything else differs;
    of tensors that of their norms. Small numbers are compared with ``SMALL``: some metrics measure rounding."""
    if one == other:
        return 0.0
    if isinstance(one, float) and isinstance(other, float | int) and not isinstance(other, bool):
        return abs(one - other) / max(abs(one), abs(other), SMALL)
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], bytes):
        return max(_tensors_apart(*pair) for pair in zip(_tensors(one), _tensors(other), strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((distance(value, other[key]) for key, value in one.items()), default=0.0)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return max((distance(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    return math.inf


def _tensors(file: tuple[dict[str, Any], bytes]) -> list[tuple[str, str, bytes]]:
    """Name, type and bytes of every tensor of a safetensors file."""
    places = sorted((name, facts) for name, facts in file[0].items() if name != "__metadata__")
    return [(name, facts["dtype"], file[1][slice(*facts["data_offsets"])]) for name, facts in places]


def _tensors_apart(one: tuple[str, str, bytes], other: tuple[str, str, bytes]) -> float:
    if one == other:
        return 0.0
    if one[:2] != other[:2] or one[1] != "F32":
        return math.inf
    first, second = (np.frombuffer(each[2], np.float32).astype(np.float64) for each in (one, other))
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


def anywhere_free() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
