"""Interim analysis: once half of the seeds have ended, a condition that is better or worse trains no further.

The result is written to the manifest before anything is stopped, and later processes decide from it: a resumed campaign
makes the same decisions as an uninterrupted one. A failed run that is retried later counts only at the planned end.
Runs that are not started because of a decision are listed as ``stopped`` with the reason.
"""

import math
from collections.abc import Container, Sequence
from itertools import product

import numpy as np

from retrain.campaign.planning.manifest import Manifest
from retrain.config.runs import RunSpec
from retrain.records.observer import Observer
from retrain.records.schema.campaign import ENDED, InterimAnalysis, RunEntry
from retrain.util.text import p_words
from retrain.verdicts.results import Measure, read_run
from retrain.verdicts.rule import interim_analysis, interim_seeds


class InterimMonitor:
    """Makes the interim analysis of a campaign when the runs of its first ``seeds`` have ended. ``specs`` are all runs
    in order. The declaration in the manifest counts: later changes of the file have no effect."""

    def __init__(self, manifest: Manifest, specs: Sequence[RunSpec], seeds: list[int], observer: Observer):
        self.manifest, self.specs, self.seeds, self.observer = manifest, specs, seeds, observer

    @classmethod
    def of(cls, manifest: Manifest, specs: Sequence[RunSpec], observer: Observer) -> "InterimMonitor | None":
        declared = manifest.declared
        count = interim_seeds(len(declared.seeds)) if len(declared.conditions) > 1 else None
        seeds = declared.seeds[:count] if count and declared.sequential != "off" else []
        return cls(manifest, specs, seeds, observer) if seeds else None

    def update(self, under_way: Container[str] = ()) -> set[str]:
        """Make the analysis if it is due, record it, and mark later runs of decided conditions as stopped. Unneeded
        runs that are ``under_way`` are returned instead of marked."""
        row = self.manifest.content.get("interim")
        record = InterimAnalysis.from_row(row) if row else self._analyse()
        return self._stop(record, under_way) if record is not None and record.decided else set()

    def _analyse(self) -> InterimAnalysis | None:
        declared, measure = self.manifest.declared, self._measure()
        others = [label for label in declared.conditions if label != declared.baseline]
        ended = {(entry.label, entry.seed): entry for entry in self.manifest.runs if entry.state in ENDED}
        if not ended.keys() >= set(product(declared.conditions, self.seeds)):
            return None
        values = {
            label: np.array([self._value(ended[label, seed], measure) for seed in self.seeds])
            for label in declared.conditions
        }
        differences = np.stack([values[label] - values[declared.baseline] for label in others])
        analyses = interim_analysis(differences, len(declared.seeds), declared.equivalence_margin)
        by_label = dict(zip(others, analyses, strict=True))
        record = InterimAnalysis(
            metric=measure.name,
            seeds=self.seeds,
            baseline=declared.baseline,
            differences={
                label: [None if math.isnan(difference) else difference for difference in row.tolist()]
                for label, row in zip(others, differences, strict=True)
            },
            p={label: analysis.p for label, analysis in by_label.items()},
            decided=[label for label, analysis in by_label.items() if analysis.is_decided],
        )
        self.manifest.note(interim=record.to_row())
        return record

    def _measure(self) -> Measure:
        evaluation, metric = self.specs[0].config.evaluation, self.manifest.declared.primary_metric
        if metric == "final" and evaluation.problems == 0:
            return Measure("final", "correct_rate")
        return Measure.parse(metric, *evaluation.names[:1])

    def _value(self, entry: RunEntry, measure: Measure) -> float:
        value = read_run(self.manifest.directory, entry).result(measure)
        return math.nan if value is None else value

    def _stop(self, record: InterimAnalysis, under_way: Container[str]) -> set[str]:
        unwanted = set[str]()
        are_all_decided = len(record.decided) == len(record.differences)
        planned = len(self.manifest.declared.seeds)
        for spec in self.specs:
            if spec.seed in record.seeds or not (spec.label in record.decided or are_all_decided):
                continue
            if self.manifest.run(spec.run_id).state in ENDED:
                continue
            if spec.run_id in under_way:
                unwanted.add(spec.run_id)
                continue
            reason = "interim analysis: every comparison is decided"
            if spec.label in record.decided:
                seen = f"after {len(record.seeds)} of {planned} seeds"
                reason = f"interim analysis: decided {seen}, {p_words(record.p[spec.label])}"
            self.manifest.update(spec.run_id, state="stopped", reason=reason)
            self.observer.run_finished(spec, "stopped", reason)
        return unwanted
