"""Memory planning: bytes per token, sizes of decode batches and micro-batches, and what happens if memory runs out.

These sizes affect rounding, so they follow from the device's total memory and from shapes, never from free memory, and
checkpoints keep them. A step that does not fit is repeated with half the tokens, down to one sequence at a time; then
decoder layers are recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from retrain.device import is_out_of_memory, total_memory
from retrain.errors import RunFailed
from retrain.models import layers
from retrain.policy.base import BaseModel
from retrain.types import Sample

S = TypeVar("S", bound=Sized)
T = TypeVar("T")
SAMPLING_SHARE = {"cpu": 0.25, "cuda": layers.GPU_SAMPLING_SHARE}
"""Share of the memory beside base and lanes for the keys, values and logits of a decode batch. The rest is for prefill
states, fragmentation, and on a CPU for other programs."""
LARGEST_SHARE = 0.95
"""Up to this share of the memory beside base and lanes, sizes planned on a larger device are kept on a smaller one."""


def head_size(config: Any) -> int:
    """Return the width of a head, from a text model's configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _key_width(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_size(config)


def cache_bytes(base: BaseModel) -> int:
    """Return the bytes of one token's keys and values, over all layers."""
    config = base.model.config.get_text_config()
    return 2 * config.num_hidden_layers * _key_width(config) * base.dtype.itemsize


def kept_bytes(base: BaseModel) -> int:
    """Return the bytes that one token's forward pass keeps for its backward pass, over all layers."""
    config = base.model.config.get_text_config()
    wide = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return config.num_hidden_layers * layers.kept_bytes(
        config.hidden_size,
        config.num_attention_heads * head_size(config),
        _key_width(config),
        experts * int(wide or 4 * config.hidden_size),
        any(name.endswith("q_norm") for name, _ in base.model.named_modules()),
        base.dtype.itemsize,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes for the runs of a cohort on this device. In bytes: ``room`` is the memory beside base and lanes,
    ``decode_bytes`` a decode batch's share of it, ``kept_bytes`` the activations of a token in training."""

    room: int
    decode_bytes: int
    micro_batch_tokens: int
    kept_bytes: int

    @classmethod
    def of(cls, base: BaseModel, lane_bytes: int = 0) -> MemoryPlan:
        """Plan for lanes that take ``lane_bytes`` in total."""
        kind = base.device.type
        room, per_token = max(0, total_memory(base.device) - base.held_bytes - lane_bytes), kept_bytes(base)
        if kind == "cpu":
            tokens = layers.cpu_token_budget(base.weight_bytes)
        else:
            tokens = layers.gpu_token_budget(room, per_token)
        return cls(room, int(SAMPLING_SHARE.get(kind, SAMPLING_SHARE["cuda"]) * room), tokens, per_token)

    def kept_decode_bytes(self, before: int) -> int:
        """Return ``before``, the bytes of a decode batch so far, or the plan's if these do not fit."""
        return before if before <= max(self.decode_bytes, LARGEST_SHARE * self.room) else self.decode_bytes

    def kept_micro_batch_tokens(self, before: int) -> int:
        """Return ``before``, the tokens of a micro-batch so far, or the plan's if these do not fit."""
        fitting = max(self.micro_batch_tokens, LARGEST_SHARE * self.room / self.kept_bytes)
        return before if before <= fitting else self.micro_batch_tokens


@dataclass
class Budget:
    """``tokens`` of a micro-batch, and whether layers are computed twice (``checkpointing``).

    ``plan`` is None where the user has set the tokens; ``notes`` are lines for the run's log.
    """

    tokens: int
    checkpointing: bool = False
    learnt: bool = False
    plan: MemoryPlan | None = None
    notes: list[str] = field(default_factory=list)
    noted: set[str] = field(default_factory=set)

    def note(self, *lines: str) -> None:
        self.notes += [line for line in lines if line not in self.noted]
        self.noted.update(lines)

    def take_notes(self) -> list[str]:
        taken, self.notes = self.notes, []
        return taken

    def fit(
        self,
        samples: Sequence[Sample],
        split: Callable[[], Sequence[S]],
        compute: Callable[[Sequence[S]], T],
        recomputes: bool = False,
    ) -> T:
        """Return ``compute(split())``, with smaller micro-batches of ``samples`` while memory runs out.

        Raises the error where a single sample does not fit, also by recomputing layers if ``recomputes``.
        """
        while True:
            parts = split()
            sizes = [len(part) for part in parts]
            try:
                return compute(parts)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or (max(sizes) == 1 and not recomputes):
                    raise
                reason = str(error)  # the error itself would keep every tensor of the failed pass in memory
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self.shrink(sizes, [len(sample) for sample in samples], reason)

    def shrink(self, sizes: Sequence[int], lengths: Sequence[int], reason: str) -> None:
        """Reduce the memory of a step whose micro-batches of ``sizes`` sequences did not fit; ``lengths`` are all
        sequences' tokens. Raises RunFailed when nothing is left to reduce."""
        summary = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        if max(sizes) > 1:
            self.tokens = max(1, min(self.tokens, sum(lengths)) // 2)
            self.note(f"out of memory: the step is made again with {self.tokens} tokens in a micro-batch ({summary})")
        elif not self.checkpointing:
            self.checkpointing = True
            self.note(
                f"out of memory with one sequence at a time: layers are now computed twice instead of kept ({summary})"
            )
        else:
            raise RunFailed(
                f"one sequence of {max(lengths)} tokens does not fit in memory, even with layers computed twice: lower "
                f"[training] max_tokens or [model] lora_rank, or take a smaller model ({summary})"
            )
        self.learnt = True

    def state(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "planned": self.plan is not None,
            "learnt": self.learnt,
            "checkpointing": self.checkpointing,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore an earlier process's plan, if it fits this device, and what it learnt. A smaller setting of the user
        stays."""
        before = state["tokens"]
        if self.plan is not None and state["planned"]:
            self.tokens = self.plan.kept_micro_batch_tokens(before)
            if self.tokens != before:
                self.note(
                    f"micro-batches of {before} tokens do not fit in this device's memory: they have {self.tokens} "
                    "from now on, so what follows is rounded differently"
                )
        elif state["learnt"]:
            self.tokens = min(self.tokens, before)
        if state["learnt"]:
            self.checkpointing, self.learnt = state["checkpointing"], True
