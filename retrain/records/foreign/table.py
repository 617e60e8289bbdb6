"""Results of other tools as one table: a row for each number of a run and for each graded answer.

Every module of ``FORMATS`` has a ``FORMAT``, which recognises the tool's files and yields their rows. ``collect``
(retrain.records.foreign.collect) finds the files of every run and gathers the rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

HELDOUT_SET = "heldout"  # Name of the held-out set where the tool names none
CORRECT = "correct"  # Metric of answers that are graded as right or wrong, where the tool has no name for it

RunState = Literal["done", "failed", "unfinished", "unknown"]
# "ends": the first and the last step of every run and set; "last3": also the two steps before the last; "all"
Steps = Literal["ends", "last3", "all"]

# Modules of this package by the name of their format, in the order in which files are tried
FORMATS = {
    "trl": "trl",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "lm-eval": "lm_eval",
    "inspect": "inspect_log",
    "verifiers": "verifiers",
    "nemo-gym": "nemo_gym",
    "nemo-rl": "nemo_rl",
    "skyrl": "skyrl",
    "verl": "verl",
    "wandb": "wandb_panel",
    "table": "tabular",
}


class ResultRow(NamedTuple):
    """One number of a run, or the grade of one answer to a problem."""

    # Name of the metric in the tool's files
    metric: str
    # None: the answer could not be graded, or the number is NaN
    value: float | None
    # Updates done; None if the file does not say
    step: int | None = None
    # Held-out set, task or data source
    set: str = HELDOUT_SET
    # Key of the problem, by which runs are paired; None for a number of the whole run
    problem: str | None = None
    # Which of the answers to the problem; None: they are numbered in the order of the file
    sample: int | None = 0
    # Condition, run and seed, as far as the file names them; None where the path or the configuration does
    condition: str | None = None
    run: str | None = None
    seed: int | None = None
    state: RunState = "unknown"
    # Unix time at which the number was written; None if the file does not say
    time: float | None = None
    # Line (1-based) of the file, or its number of the record, for messages
    line: int = 0


class MetricFacts(NamedTuple):
    """Direction and unit of a metric as the file or its tool states them; None where it does not."""

    higher_is_better: bool | None = None
    # "share": values lie in [0, 1]
    unit: Literal["share", "number"] | None = None


@dataclass(frozen=True)
class ReadRequest:
    """Metric and steps to read. Readers may yield other rows too."""

    # Name of the metric, as METRIC or SET/METRIC; None: all metrics
    metric: str | None = None
    steps: Steps = "all"
    # Step at which the run must end; None: its last one
    last_step: int | None = None
    # Columns of a table that hold the fields of ``ResultRow``, by field (format "table" alone)
    columns: Mapping[str, str] = field(default_factory=dict)
    # Values that columns of a table must have in the rows that are read
    where: Mapping[str, object] = field(default_factory=dict)

    def needs(self, metric: str) -> bool:
        return self.metric is None or self.metric == metric or self.metric.endswith(f"/{metric}")

    def needed_steps(self, steps: Iterable[int]) -> set[int]:
        """Return the first step and the last or the last three, or all. The last ones up to ``last_step`` are needed
        too."""
        ordered = sorted(set(steps))
        if self.steps == "all":
            return set(ordered)
        until_end = [step for step in ordered if self.last_step is None or step <= self.last_step]
        return {*ordered[:1], *until_end[-1 if self.steps == "ends" else -3 :], *ordered[-1:]}


@dataclass(frozen=True)
class Format:
    """One format of results. ``rows`` raises UsageError, with file and line, for content that is not in the format."""

    # Tool, as its users write it, for messages
    tool: str
    # Patterns (pathlib) of its files below a run's directory
    patterns: Sequence[str]
    # Return whether a file is in this format, by its name and its first bytes
    recognises: Callable[[Path], bool]
    rows: Callable[[Path, ReadRequest], Iterator[ResultRow]]
    # Choose among the files of one run those to read (a tool may write one state several times)
    choose: Callable[[Sequence[Path]], Sequence[Path]] = lambda files: files
    # Facts about metrics, by name; a name that ends in * holds for all that begin alike
    facts: Callable[[Path], Mapping[str, MetricFacts]] = lambda path: {}
    # Of several values of one metric and step, the latest by ``time`` counts (a resumed run wrote the step again)
    latest_counts: bool = False


def format_of(name: str) -> Format:
    """Return the format with this name. Raises KeyError for an unknown one."""
    return import_module(f"retrain.records.foreign.{FORMATS[name]}").FORMAT


@dataclass
class RunTable:
    """All results of one run, gathered from its rows. Steps are the numbers of updates done."""

    condition: str
    # None: no seed is known
    seed: int | None
    # Name for messages, by default condition and seed
    name: str
    state: RunState = "unknown"
    # Numbers of the whole run: (set, metric) → step → value; None where it is NaN
    numbers: dict[tuple[str, str], dict[int, float | None]] = field(default_factory=dict)
    # Graded answers: (set, metric) → step → problem → grades by sample; None where an answer was not graded
    answers: dict[tuple[str, str], dict[int, dict[str, list[float | None]]]] = field(default_factory=dict)
    # Facts about metrics that the files or the tool state
    facts: dict[str, MetricFacts] = field(default_factory=dict)
    # Unix time of the earliest result, by the times in the files, else of the files; and where the time was found
    started: float | None = None
    has_times: bool = False
    # Files that were read, and the tool that wrote them
    files: list[Path] = field(default_factory=list)
    tool: str = ""
