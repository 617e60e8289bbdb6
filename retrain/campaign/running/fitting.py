"""How many runs of a campaign share the memory: what a lane takes, measured against what is free beside the base."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.campaign.planning.plan import RunSpec
from retrain.policy.base import BaseModel
from retrain.policy.lora import Lanes
from retrain.policy.memory import available_memory, cache_bytes, kept_bytes

USABLE_SHARE = 0.85
"""Of the memory that is free once the base is loaded; the rest is for what allocators lose between blocks."""
OPTIMIZER_BYTES = 16
"""Per adapter weight: fp32 master, gradient and the two moments of AdamW."""
LEAST_ROWS = 8
"""Sequences of a lane whose cache has to fit: with fewer at once, decoding would be bound by reading the weights."""


class DoesNotFit(Exception):
    """The runs of a cohort do not fit into memory together; ``lanes`` of them do (0: not even one)."""

    def __init__(self, lanes: int, message: str):
        super().__init__(message)
        self.lanes = lanes


def check_memory(base: BaseModel, lanes: Lanes, specs: Sequence[RunSpec], prompt_tokens: int) -> None:
    """Raise DoesNotFit when the adapters, optimizers and caches of these runs exceed the free memory beside the base,
    with the number of runs that do fit. Sizes are those of the layers that the adapters really have, and of sequences
    of ``prompt_tokens``, those of the longest prompt, and as many more as may be sampled."""
    needs = []
    for spec in specs:
        training, rank = spec.config.training, spec.config.model.lora_rank
        weights = sum(rank * (shape.in_features + shape.out_features) for shape in lanes.shapes)
        rows = min(LEAST_ROWS, training.batch_size * training.group_size)
        sampled = max([training.max_tokens, *(each.sampling.max_tokens for each in spec.config.held_out)])
        cache = rows * (prompt_tokens + sampled) * cache_bytes(base)
        needs.append(weights * (OPTIMIZER_BYTES + base.dtype.itemsize) + cache)
    # One sequence's update at a time is the least that has to fit beside the lanes.
    longest = prompt_tokens + max(spec.config.training.max_tokens for spec in specs)
    update = longest * kept_bytes(base)
    free = int(USABLE_SHARE * available_memory(base.device)) - update
    fitting, taken = 0, 0
    for need in needs:
        taken += need
        fitting += taken <= free
    if fitting < len(specs):
        gib = 2**30
        raise DoesNotFit(
            fitting,
            f"{len(specs)} runs need {sum(needs) / gib:.1f} GiB beside {base.name}, {max(0, free) / gib:.1f} GiB are "
            f"usable: {fitting} fit",
        )
