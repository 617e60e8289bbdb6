"""Where a campaign is probed: at the base, or at the weights of a checkpoint, run or adapter directory.

What is named is only read. The weights of a point are put on the lanes of all conditions; a checkpoint brings the
step, the place in the data and AdamW's second moments along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from retrain.checkpoints import STATE, checkpoint_directories, newest_whole, verify_checkpoint
from retrain.errors import CheckpointError, ModelError, UsageError
from retrain.files import read_json
from retrain.policy.adapter_io import read_adapter
from retrain.policy.critic import WEIGHTS as CRITIC
from retrain.policy.local import OPTIMIZER, LocalPolicy
from retrain.run import Run

BASE = "base"


@dataclass(frozen=True)
class Point:
    """One place in weight space. ``directory`` is None for the base; ``step`` is None where it is not known;
    ``checkpoint``: it holds more than the weights; ``beginning``: all runs of the file begin there; ``steps`` are the
    recorded steps whose rollouts are credited there, none where rollouts are sampled."""

    name: str
    directory: Path | None = None
    step: int | None = None
    checkpoint: bool = False
    beginning: bool = False
    steps: tuple[int, ...] = ()

    @property
    def typed(self) -> str:
        """What the user typed, for messages."""
        return f"[resume] from = {self.name}" if self.beginning else f"--at {self.name}"


def points_of(named: Sequence[str], begin: str | None = None) -> list[Point]:
    """The points that the user named; where none is, what the file begins with: ``begin``, its ``[resume] from``, else
    the base. Raises UsageError for what is none."""
    if named:
        return [_point(name, f"--at {name}") for name in dict.fromkeys(named)]
    if begin is None:
        return [Point(BASE, step=0)]
    point = replace(_point(begin, f"[resume] from = {begin}"), beginning=True)
    return [point if point.checkpoint else replace(point, step=0)]  # with weights alone a run counts from 0


def _point(name: str, typed: str) -> Point:
    directory = Path(name)
    if name == BASE and not directory.exists():
        return Point(BASE, step=0)
    if not directory.is_dir():
        raise UsageError(f"{typed} is not a directory: name a run, checkpoint or adapter directory, or base")
    if (directory / STATE).is_file():
        return checkpoint_point(directory, name)
    if checkpoint_directories(directory):
        reports: list[str] = []
        newest = newest_whole(directory, reports)
        if newest is None:
            raise CheckpointError(f"{directory} has no whole checkpoint: {'; '.join(reports)}")
        return checkpoint_point(newest, str(newest))
    if (directory / "adapter_config.json").is_file():
        return Point(name, directory, _final_step(directory))
    if (directory / "runs").is_dir():
        runs = sorted(path.name for path in (directory / "runs").iterdir() if path.is_dir())
        raise UsageError(f"{typed} is a campaign: name one of its runs, such as {directory / 'runs' / runs[0]}"
                         if runs else f"{typed} is a campaign without runs")  # fmt: skip
    raise UsageError(f"{typed} has neither a checkpoint nor an adapter: name a run, checkpoint or adapter directory")


def checkpoint_point(directory: Path, name: str) -> Point:
    """A checkpoint. Raises CheckpointError for one that is damaged."""
    verify_checkpoint(directory)
    return Point(name, directory, int(read_json(directory / STATE)["step"]), checkpoint=True)


def _final_step(directory: Path) -> int | None:
    """Updates behind the adapter that a finished run left in ``final``."""
    return _facts(directory.parent).get("training", {}).get("max_steps") if directory.name == "final" else None


def _facts(run: Path) -> dict[str, Any]:
    path = run / "config.json"
    return read_json(path) if path.is_file() else {}


@dataclass(frozen=True)
class Arrived:
    """What a point says besides the weights: the data cursor, the algorithm's state with the label of its condition,
    and AdamW's second moments [D], corrected for their start; each None where it is not known."""

    cursor: int | None = None
    algorithm: dict[str, Any] | None = None
    run_id: str = ""
    moments: torch.Tensor | None = None


def arrive(point: Point, runs: Sequence[Run]) -> Arrived:
    """Put the point's weights on the lanes of all runs. Raises CheckpointError, ModelError or UsageError when they are
    of another base, or of another shape."""
    directory, first = point.directory, runs[0]
    if directory is None:
        return Arrived()
    state = read_json(directory / STATE) if point.checkpoint else {}
    base = state["base"] if point.checkpoint else _facts(directory.parent).get("base", {}).get("fingerprint")
    if base is not None and base != first.base_id:
        raise CheckpointError(f"{point.typed} was trained on other base weights than those of this file")
    stored = read_adapter(directory)
    for run in runs:
        policy = run.policy
        assert isinstance(policy, LocalPolicy)
        stored.require_scale(policy.adapter.scale, point.typed)
        try:
            policy.adapter.load(stored.tensors, lowered=True)
        except ModelError as error:
            raise UsageError(f"{point.typed} does not fit {run.spec.label}: {error}") from error
        if policy.critic is not None and (directory / CRITIC).is_file():
            policy.critic.load(directory)
    if not point.checkpoint:
        return Arrived()
    return Arrived(state["cursor"], state["algorithm"], state["run_id"], _moments(directory, first))


def _moments(directory: Path, run: Run) -> torch.Tensor | None:
    from safetensors.torch import load_file

    stored = load_file(directory / OPTIMIZER)
    assert isinstance(run.policy, LocalPolicy)
    if "exp_avg_sq" not in stored or stored["exp_avg_sq"].numel() != run.policy.adapter.flat.numel():
        return None  # from before the first update, or of another rank
    beta2 = _facts(directory.parent.parent).get("optimizer", {}).get("beta2")  # of the run that made them
    return None if beta2 is None else stored["exp_avg_sq"] / (1.0 - beta2 ** float(stored["step"]))
