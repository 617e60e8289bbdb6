"""``[compare]`` and ``[[results]]``: what ``retrain compare`` reads of other tools, and how it is judged."""

from typing import Annotated, Literal

from pydantic import Field

from retrain.config.base import INT_MAX, Role, Section

Pairing = Literal["seed", "none"]
Replicate = Literal["training", "none"]
Unit = Literal["share", "number"]
SUMMARIES = ("final", "last3", "auc")


class Compare(Section, role=Role.EVALUATES):
    metric: str | None = None
    """Name of the deciding metric in the files; `last3:NAME` for the mean over the last three evaluations, `auc:NAME`
    for the area under the curve, `SET/NAME` where several held-out sets have it. Required if the files have several."""
    higher_is_better: bool | None = None
    """Whether a larger value is an improvement. Required where neither retrain nor the files know."""
    unit: Unit | None = None
    """`share` for values from 0 to 1, whose differences are given in points; `number` for any other."""
    baseline: str | None = None
    """Condition that the others are compared with; by default the first of `conditions`."""
    conditions: list[str] | None = None
    """Conditions that are judged together, as one family; by default all that are found, sorted by name."""
    seeds: list[Annotated[int, Field(ge=0, le=INT_MAX)]] | None = None
    """Seeds of every condition; by default all that are found."""
    steps: Annotated[int, Field(ge=0)] | None = None
    """Number of updates after which a run must end; by default the largest that is found."""
    equivalence_margin: Annotated[float, Field(gt=0)] | None = None
    """Largest difference that counts as none, in the metric's unit."""
    replicate: Replicate = "training"
    """`training`: several training runs of each condition. `none`: one model of each, compared by problem."""
    pairing: Pairing = "seed"
    """`seed`: runs with the same seed are compared. `none`: the runs of two conditions have nothing in common."""
    problems: Literal["same", "common"] = "same"
    """`same`: other problems are refused. `common`: only those that all runs have are compared, without a verdict."""

    @property
    def measure(self) -> tuple[str, str | None]:
        """Summary of a run's curve, and name of the metric without it; None if the file names no metric."""
        summary, colon, name = (self.metric or "final").partition(":")
        if summary not in SUMMARIES:
            return "final", self.metric
        return summary, name if colon and name else None


class Results(Section, role=Role.NAMES):
    path: str
    """File, directory or pattern: `{condition}`, `{seed}` (digits), `{step}` (digits), `{run}` and `{set}` stand for
    parts of the path."""
    format: str | None = None
    """Format of the files, by default recognised; or `module:function` for a reader of one's own."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns of a table, by what they hold: `condition`, `run`, `seed`, `state`, `step`, `set`, `metric`, `value`,
    `problem`, `sample`, `time`."""
    where: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Values that columns must have in the rows of a table that are read."""
    condition: str | None = None
    """Condition of all runs of this path, if neither path nor files name it."""
    seed: int | None = None
    """Seed of the run at this path, if neither path nor files name it."""


class ComparisonFile(Section, role=Role.EVALUATES):
    compare: Compare = Compare()
    results: Annotated[list[Results], Field(min_length=1)]
