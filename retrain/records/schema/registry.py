"""``registry.jsonl`` beside the directories of campaigns."""

from dataclasses import dataclass

from retrain.records.schema.base import Record


@dataclass(frozen=True, kw_only=True)
class RegistryLine(Record):
    """What both kinds of lines have."""

    kind: str
    """`declaration` or `run`."""
    time: str
    """When it was written."""
    owner: str
    """Id in the `retrain.json` of the campaign's directory."""
    directory: str
    """Name of that directory."""
    data: str
    """Hash of the problems, training and held-out; of a declaration those of its first run."""


@dataclass(frozen=True, kw_only=True)
class Declaration(RegistryLine):
    """A comparison that was declared."""

    conditions: dict[str, str]
    """Hash of the settings of each condition, by label."""
    max_steps: dict[str, int]
    """Steps of each condition, by label."""
    seeds: list[int]
    """Seeds in their order."""
    baseline: str
    """Label of the baseline."""
    primary_metric: str
    """Metric that decides."""
    equivalence_margin: float | None
    """Margin."""
    sequential: str
    """`on` with an interim analysis."""

    @property
    def comparison(self) -> frozenset[tuple[str, int]]:
        """What is compared, whatever its name, metric and seeds: the conditions, as (hash of settings, steps)."""
        return frozenset((settings, self.max_steps[label]) for label, settings in self.conditions.items())


@dataclass(frozen=True, kw_only=True)
class FinishedRun(RegistryLine):
    """A run that has finished."""

    run_id: str
    """Name of the run."""
    condition: str
    """Hash of its settings."""
    max_steps: int
    """Its steps."""
    seed: int
    """Its seed."""
    result: dict[str, float | None]
    """Last accuracy on each held-out set."""
    sha256: str
    """Hash of its evaluations, as in its seal."""

    @property
    def subject(self) -> tuple[str, int]:
        """Condition and steps, as in ``Declaration.comparison``."""
        return self.condition, self.max_steps
