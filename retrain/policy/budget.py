"""How many tokens a micro-batch may have, and what a step that ran out of memory teaches about it.

A step that does not fit is made again with half the tokens, down to one sequence at a time; then decoder layers are
computed a second time in the backward pass instead of being kept. Micro-batching changes neither loss nor gradient
beyond rounding, so the step made again is the step that failed; and because it does change rounding, what was planned
and what was learnt is kept in checkpoints.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from retrain.errors import RetrainError, RunFailed
from retrain.policy.memory import MemoryPlan

OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
"""What allocators, drivers and libraries that allocate for themselves say in a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the device or of the host, is used up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


def failure_text(error: BaseException) -> str:
    """Return the reason of a run's failure for its manifest. Out of memory becomes one line with the function that
    allocated and the settings to lower."""
    if isinstance(error, RetrainError):
        return str(error)
    if not is_out_of_memory(error):
        return f"{type(error).__name__}: {error}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames]
    where = next((f" in {module}.{name}" for module, name in reversed(names) if module.startswith("retrain.")), "")
    words = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"out of memory{where} ({words}): lower [training] batch_size, group_size or max_tokens, or [campaign] lanes"


@dataclass
class Budget:
    """``tokens`` of a micro-batch, and whether layers are computed twice (``checkpointing``).

    ``plan`` is what the tokens were planned by, None where the user has set them; ``notes`` are lines for the run's log
    that nobody has taken yet.
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

    def shrink(self, sizes: Sequence[int], lengths: Sequence[int], reason: str) -> None:
        """Make room after micro-batches of so many sequences (``sizes``) did not fit; ``lengths`` are all sequences'
        tokens. Raises RunFailed when nothing is left to give up."""
        words = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        if max(sizes) > 1:
            self.tokens = max(1, min(self.tokens, sum(lengths)) // 2)
            self.note(f"out of memory: the step is made again with {self.tokens} tokens in a micro-batch ({words})")
        elif not self.checkpointing:
            self.checkpointing = True
            self.note(
                f"out of memory with one sequence at a time: layers are now computed twice instead of kept ({words})"
            )
        else:
            raise RunFailed(
                f"one sequence of {max(lengths)} tokens does not fit in memory, even with layers computed twice: lower "
                f"[training] max_tokens or [model] lora_rank, or take a smaller model ({words})"
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
        """Go on with what an earlier process planned, if this device holds it, and with what it learnt. A setting of
        the user's stays where it is smaller."""
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
