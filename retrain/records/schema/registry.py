"""``registry.jsonl`` beside the directories of campaigns."""

from dataclasses import dataclass
from typing import Annotated

from retrain.records.schema.base import Record


@dataclass(frozen=True, kw_only=True)
class RegistryLine(Record):
    """Keys that the lines of declarations and of finished runs have in common."""

    kind: Annotated[str, "`declaration` or `run`."]
    time: Annotated[str, "When it was written."]
    owner: Annotated[str, "Id in the `retrain.json` of the campaign's directory."]
    directory: Annotated[str, "Name of that directory."]
    data: Annotated[str, "Hash of the problems, training and held-out; of a declaration those of its first run."]


@dataclass(frozen=True, kw_only=True)
class Declaration(RegistryLine):
    """A comparison that was declared."""

    conditions: Annotated[dict[str, str], "Hash of the settings of each condition, by label."]
    max_steps: Annotated[dict[str, int], "Steps of each condition, by label."]
    seeds: Annotated[list[int], "Seeds in their order."]
    baseline: Annotated[str, "Label of the baseline."]
    primary_metric: Annotated[str, "Metric that decides."]
    equivalence_margin: Annotated[
        float | None, "Accuracies closer than this count as alike, null where none was declared."
    ]
    sequential: Annotated[str, "`on` with an interim analysis."]

    @property
    def comparison(self) -> frozenset[tuple[str, int]]:
        """The conditions as pairs (hash of settings, steps). They identify the comparison whatever its labels, seeds
        and metric are."""
        return frozenset((settings, self.max_steps[label]) for label, settings in self.conditions.items())

    def repeats(self, earlier: "Declaration") -> bool:
        """Return whether at least two conditions are also in ``earlier``, and the seeds are exactly the same."""
        return len(earlier.comparison & self.comparison) > 1 and set(earlier.seeds) == set(self.seeds)


@dataclass(frozen=True, kw_only=True)
class FinishedRun(RegistryLine):
    """A run and its result, written when it ends as `done`."""

    run_id: Annotated[str, "Name of the run."]
    condition: Annotated[str, "Hash of its settings."]
    max_steps: Annotated[int, "Steps that were trained."]
    seed: Annotated[int, "Seed of the run."]
    result: Annotated[dict[str, float | None], "Last accuracy on each held-out set."]
    sha256: Annotated[str, "Hash of its evaluations, as in its seal."]

    def belongs_to(self, declaration: Declaration) -> bool:
        """Return whether the declaration has the run's condition, problems and seed."""
        is_compared = (self.condition, self.max_steps) in declaration.comparison
        return is_compared and self.data == declaration.data and self.seed in declaration.seeds
