"""Memory of the runs of a cohort beside their base, and the threads that update them."""

from collections.abc import Sequence

from retrain.config import Config
from retrain.config.runs import RunSpec
from retrain.device import available_memory
from retrain.models.layers import LEAST_ROWS, USABLE_SHARE, adapter_bytes, critic_bytes, fitting_lanes, update_copy
from retrain.policy.arithmetic import copied_bytes
from retrain.policy.base import BaseModel, cache_bytes, kept_bytes, workers_for
from retrain.policy.lora import Lanes
from retrain.threads import Workers


class DoesNotFit(Exception):
    """The runs of a cohort do not fit into memory together; ``lanes`` of them do (0: not even one)."""

    def __init__(self, lanes: int, message: str):
        super().__init__(lanes, message)
        self.lanes = lanes

    def __str__(self) -> str:
        return self.args[1]


def workers_of(base: BaseModel, specs: Sequence[RunSpec]) -> Workers:
    """Return the threads that update the runs of a cohort in parallel; one where a run has dropout, which draws from
    torch's global random stream."""
    return Workers() if any(spec.config.lora.dropout > 0 for spec in specs) else workers_for(base)


def lane_bytes(base: BaseModel, lanes: Lanes, specs: Sequence[RunSpec]) -> int:
    """Return the bytes of adapters, critics and optimizers of these runs, for the layers that the adapters really have."""
    features = sum(shape.in_features + shape.out_features for shape in lanes.shapes)
    total = 0
    for spec in specs:
        rank = spec.config.model.lora_rank
        total += adapter_bytes(rank * features, base.dtype.itemsize, spec.config.published_versions)
        total += critic_bytes((spec.config.lane_ranks - rank) * features)
    return total


def least_cached_tokens(config: Config, prompt_tokens: int) -> int:
    """Return the fewest tokens that the KV cache must hold for a run, with prompts of ``prompt_tokens``."""
    training = config.training
    sampled = max([training.max_tokens, *(each.sampling.max_tokens for each in config.held_out)])
    return min(LEAST_ROWS, training.batch_size * training.group_size) * (prompt_tokens + sampled)


def check_memory(
    base: BaseModel, lanes: Lanes, specs: Sequence[RunSpec], prompt_tokens: int, decodes: bool = True
) -> None:
    """Raise DoesNotFit when adapters and optimizers of these runs, and beside them either their caches or one update,
    exceed the free memory beside the base, with the number of runs that do fit. Sequences have ``prompt_tokens``, those
    of the longest prompt, and as many more as may be sampled; there are no caches unless this process ``decodes``."""
    # One sequence's update at a time is the least that has to fit beside the lanes; no cache is there then.
    longest = prompt_tokens + max(spec.config.training.max_tokens for spec in specs)
    update = longest * kept_bytes(base)
    usable = int(USABLE_SHARE * max(0, available_memory(base.device) - base.gathered_bytes))
    weights, width = base.weight_bytes // base.dtype.itemsize, base.dtype.itemsize
    copy = max(update_copy(weights, width, spec.config.training.update_dtype) for spec in specs)
    copy = max(0, copy - copied_bytes(base.model))  # what earlier cohorts have copied is not free any more
    own = [lane_bytes(base, lanes, [spec]) for spec in specs]
    caches = [decodes * least_cached_tokens(spec.config, prompt_tokens) * cache_bytes(base) for spec in specs]
    fitting = fitting_lanes(usable, copy, update, zip(own, caches, strict=True))
    if fitting < len(specs):
        gib = 2**30
        raise DoesNotFit(
            fitting,
            f"{len(specs)} runs need {(copy + sum(own) + max(sum(caches), update)) / gib:.1f} GiB beside {base.name}, "
            f"{usable / gib:.1f} GiB are usable: {fitting} fit",
        )
