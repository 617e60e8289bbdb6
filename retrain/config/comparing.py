"""``[compare]`` and ``[[results]]``: what ``retrain compare`` reads of other tools, and how it is judged."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from retrain.config.base import INT_MAX, Role, Section
from retrain.config.checking import KeyLocations, located
from retrain.config.describe import kind, show
from retrain.config.evaluation import SUMMARIES
from retrain.config.loading import apply_sets, key_lines, read_toml
from retrain.config.problems import Mistake, nearest, wrong_value
from retrain.config.root import fields_of
from retrain.errors import ConfigError

Pairing = Literal["seed", "none"]
Replicate = Literal["training", "none"]
Unit = Literal["share", "number"]


class Compare(Section, role=Role.EVALUATES):
    metric: str | None = None
    """Name of the deciding metric in the files; `last3:NAME` for the mean over the last three evaluations, `auc:NAME`
    for the area under the curve, `SET/NAME` where several held-out sets have it. Required if the files have several."""
    higher_is_better: bool | None = None
    """True if a larger value is an improvement. Required where neither retrain nor the files know."""
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
        """``metric`` as (summary of a run's curve, metric key); the key is None if the file names no metric."""
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
    """Condition of all runs of this path, unless its placeholder names it. It comes before what the rows say."""
    seed: int | None = None
    """Seed of the run at this path, unless its placeholder names it. It comes before what the rows say."""


class ComparisonFile(Section, role=Role.EVALUATES):
    compare: Compare = Compare()
    results: Annotated[list[Results], Field(min_length=1)]


def is_comparison_file(path: FilePath) -> bool:
    """Return whether a file is TOML with [compare] or [[results]], also if it has mistakes."""
    if path.suffix != ".toml" or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    return re.search(r"^\s*\[\[?\s*(compare|results)\s*\]", text, re.MULTILINE) is not None


def load_comparison(path: FilePath, sets: Sequence[str] = ()) -> ComparisonFile:
    """Read a comparison file and apply ``section.key=value`` settings. Raises ConfigError with every mistake."""
    text, data = read_toml(path)
    return parse_comparison(data, KeyLocations(path.name, key_lines(text)), sets)


def parse_comparison(data: dict[str, Any], locations: KeyLocations, sets: Sequence[str] = ()) -> ComparisonFile:
    """Return the comparison in plain data. Raises ConfigError with every mistake."""
    wrong = apply_sets(data, sets, locations)
    try:
        file = ComparisonFile.model_validate(data)
    except ValidationError as error:
        wrong += [_mistake(details, data) for details in error.errors(include_url=False)]
        file = None
    if wrong or file is None:
        raise ConfigError(located({mistake.path: mistake for mistake in reversed(wrong)}.values(), locations))
    return file


def _mistake(details: ErrorDetails, data: Mapping[str, Any]) -> Mistake:
    section, *below = location = details["loc"]
    is_list = section == "results"
    table = "[[results]]" if is_list else "[compare]"
    path, inside = tuple(location[: 2 + is_list]), tuple(location[2 + is_list :])
    if section not in ComparisonFile.model_fields:
        return Mistake(path, "is no section of a comparison file", "the sections are [compare] and [[results]]")
    if (details["type"] == "missing" and not below) or details["type"] == "too_short":
        return Mistake(("results",), "is missing", '[[results]] and below it path = "outputs/{condition}/seed{seed}"')
    if len(path) < 2 + is_list:
        value = details["input"]
        must = "a list of tables" if is_list and not below else "a table"
        return Mistake(path, f"is {show(value)}, {kind(value)}, but must be {must}", table)
    fields = fields_of(Results if is_list else Compare)
    key = str(path[-1])
    if details["type"] == "extra_forbidden":
        return Mistake(path, f"is not a key of {table}", nearest(key, fields, details["input"]))
    if details["type"] == "missing":
        return Mistake(path, "is missing", f'{key} = "outputs/{{condition}}/seed{{seed}}"')
    value: Any = data
    for part in path:
        value = value[part]
    return wrong_value(path, fields[key], value, inside)
