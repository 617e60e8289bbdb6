"""The inputs of a cohort: its runs and how they go on, and how base, data and machine differ from what the records say.
Nothing of torch is imported here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.config.root import flat
from retrain.config.runs import RunSpec

if TYPE_CHECKING:
    from retrain.environments.build import CompletionLengths

BASE_WEIGHTS = "weights of the base model"


Guard = Callable[[Path], Callable[[], None]]
"""Returns what is called before each write into a run's directory; that raises LeaseLost once another process may write
there."""


def allow_all(directory: Path) -> Callable[[], None]:
    """Return the check of a directory that nobody else writes."""
    return lambda: None


@dataclass(frozen=True)
class CohortJob:
    """Train these runs together, from where their checkpoints are.

    ``directory`` is the campaign's, ``folder`` that of its TOML file; ``longest`` are the longest completions of all
    runs of the plan.
    ``failed_at``: those that had failed before, with the steps they had done. ``together``: all go on from the newest
    step that they have in common, else each from its own newest. ``accepted``: differences from the runs' records
    with which they may go on.
    """

    directory: Path
    folder: Path
    runs: Sequence[RunSpec]
    longest: CompletionLengths
    failed_at: dict[str, int] = field(default_factory=dict)
    together: bool = True
    accepted: list[str] = field(default_factory=list)


def change_line(name: str, old: Any, new: Any) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in (old, new)]
    return f"{name}: {' → '.join(texts)}"


def world_changes(facts: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences in what has to be loaded to be known: weights and tokenizer of the base, the teacher, and the data.

    ``now`` is nested as in config.json.
    """
    names = {"base.fingerprint": BASE_WEIGHTS, "base.tokenizer": "tokenizer of the base model", "data_hash": "data"}
    return _differences(facts, now, names | {"taught_by": "weights of the teacher", "rubrics": "rubrics of the data"})


def machine_changes(facts: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences in what only rounding depends on, which no one need accept: device and what drives it, number format,
    threads. The same kind of GPU at another index is none."""
    names = {"device": "device", "dtype": "number format", "threads.workers": "workers", "threads.torch": "threads"}
    names |= {"gpu.driver": "GPU driver", "gpu.cuda": "CUDA", "gpu.cudnn": "cuDNN"}
    return _differences(facts, now, {f"built.{key}": name for key, name in names.items()})


def _differences(facts: Mapping[str, Any], now: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    before, after = dict(flat(facts)), dict(flat(now))
    return [
        change_line(name, before[key], after[key])
        for key, name in names.items()
        if key in before and key in after and before[key] != after[key]
    ]
