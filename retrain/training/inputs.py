"""The job of a cohort, and the differences of base, data and machine from the runs' records. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.config.root import flat
from retrain.config.runs import RunSpec

if TYPE_CHECKING:
    from retrain.environments.build import CompletionLengths

BASE_WEIGHTS = "weights of the base model"


# Maps a run's directory to a check that is called before each write there. The check raises LeaseLost once another
# process may write to the directory
Guard = Callable[[Path], Callable[[], None]]


def allow_all(directory: Path) -> Callable[[], None]:
    return lambda: None


@dataclass(frozen=True)
class CohortJob:
    """Runs to train together, starting from their checkpoints.

    ``directory``: the campaign's directory. ``folder``: the folder of its TOML file. ``longest``: the longest
    completions of all runs of the plan. ``failed_at``: steps done by failed runs, by run id. ``same_step``: all runs
    resume from their newest common step; if false, each run from its newest checkpoint. ``accepted``: differences from
    the runs' records that the user accepts.
    """

    directory: Path
    folder: Path
    runs: Sequence[RunSpec]
    longest: CompletionLengths
    failed_at: dict[str, int] = field(default_factory=dict)
    same_step: bool = True
    accepted: list[str] = field(default_factory=list)


def change_line(name: str, old: object, new: object) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in (old, new)]
    return f"{name}: {' → '.join(texts)}"


def world_changes(facts: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return one line for each fact that differs from a run's record: weights and tokenizer of the base, data, teacher,
    rubrics, warm-up.

    ``facts`` (the record) and ``now`` are nested as in config.json.
    """
    names = {"base.fingerprint": BASE_WEIGHTS, "base.tokenizer": "tokenizer of the base model", "data_hash": "data"}
    names |= {"taught_by": "weights of the teacher", "rubrics": "rubrics of the data", "warmup_hash": "warm-up"}
    return _differences(facts, now, names)


def machine_changes(facts: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return one line for each difference that affects only rounding: device and drivers, dtype, threads. The user need
    not accept these; the index of a GPU does not count."""
    names = {"device": "device", "dtype": "number format", "threads.workers": "workers", "threads.torch": "threads"}
    names |= {"gpu.driver": "GPU driver", "gpu.cuda": "CUDA", "gpu.cudnn": "cuDNN"}
    return _differences(facts, now, {f"built.{key}": name for key, name in names.items()})


def _differences(facts: Mapping[str, object], now: Mapping[str, object], names: Mapping[str, str]) -> list[str]:
    before, after = dict(flat(facts)), dict(flat(now))
    return [
        change_line(name, before[key], after[key])
        for key, name in names.items()
        if key in before and key in after and before[key] != after[key]
    ]
