"""Which runs of a directory train together, and how they go on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from retrain.config.runs import RunSpec
from retrain.environments.build import Longest

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
    longest: Longest
    failed_at: dict[str, int] = field(default_factory=dict)
    together: bool = True
    accepted: list[str] = field(default_factory=list)
