"""Interim analysis: once half of the seeds have ended, a condition that is better or worse trains no further.

The result is written to the manifest before anything is stopped, and later processes decide from it: a resumed campaign
makes the same decisions as an uninterrupted one. A failed run that is retried later counts only at the planned end.
Runs that are not started because of a decision are listed as ``stopped`` with the reason.
"""

import math
from collections.abc import Container, Mapping, Sequence

import numpy as np

from retrain.campaign.planning.manifest import Manifest
from retrain.config.runs import RunSpec
from retrain.records.observer import Observer
from retrain.records.schema.campaign import ENDED, InterimAnalysis
from retrain.util.text import p_words
from retrain.verdicts.results import Measure, read_run
from retrain.verdicts.rule import interim_analysis, interim_seeds


class InterimMonitor:
    """Analyses one campaign when the runs of its first ``seeds`` have ended. ``specs`` are all runs in order. Uses the
    declaration in the manifest: later changes of the file have no effect."""

    def __init__(self, manifest: Manifest, specs: Sequence[RunSpec], seeds: list[int], observer: Observer):
        self.manifest, self.specs, self.seeds, self.observer = manifest, specs, seeds, observer

    @classmethod
    def of(cls, manifest: Manifest, specs: Sequence[RunSpec], observer: Observer) -> "InterimMonitor | None":
        """Return the monitor of a campaign; None where no interim analysis was declared."""
        declared = manifest.content["declared"]
        count = interim_seeds(len(declared["seeds"])) if len(declared["conditions"]) > 1 else None
        seeds = declared["seeds"][:count] if count and declared.get("sequential", "off") != "off" else []
        return cls(manifest, specs, seeds, observer) if seeds else None

    def update(self, under_way: Container[str] = ()) -> set[str]:
        """Analyse if due, record the result, and stop decided conditions. Returns the unneeded runs that are
        ``under_way``, which are not marked as stopped."""
        row = self.manifest.content.get("interim")
        record = InterimAnalysis.from_row(row) if row else self._analyse()
        return self._stop(record, under_way) if record is not None and record.decided else set()

    def _analyse(self) -> InterimAnalysis | None:
        """Return the analysis once all runs of the first seeds have ended; None before."""
        declared = self.manifest.content["declared"]
        baseline, labels, seeds = declared["baseline"], declared["conditions"], self.seeds
        entries = {
            (entry["label"], entry["seed"]): entry
            for entry in self.manifest.content["runs"]
            if entry["seed"] in seeds and entry["label"] in labels
        }
        if len(entries) < len(labels) * len(seeds) or any(entry["state"] not in ENDED for entry in entries.values()):
            return None
        measure = self._measure(declared)
        values = {
            label: np.array([self._value(entries[label, seed], measure) for seed in seeds], dtype=np.float64)
            for label in labels
        }
        others = [label for label in labels if label != baseline]
        differences = np.stack([values[label] - values[baseline] for label in others])
        analysis = interim_analysis(differences, len(declared["seeds"]), declared.get("equivalence_margin"))
        record = InterimAnalysis(
            metric=measure.name,
            seeds=seeds,
            baseline=baseline,
            differences={
                label: [None if math.isnan(difference) else difference for difference in row.tolist()]
                for label, row in zip(others, differences, strict=True)
            },
            p={label: each.p for label, each in zip(others, analysis, strict=True)},
            decided=[label for label, each in zip(others, analysis, strict=True) if each.is_decided],
        )
        self.manifest.note(interim=record.to_row())
        return record

    def _measure(self, declared: Mapping[str, str]) -> Measure:
        evaluation, metric = self.specs[0].config.evaluation, declared["primary_metric"]
        if metric == "final" and evaluation.problems == 0:
            return Measure("final", "correct_rate")
        return Measure.parse(metric, *evaluation.names[:1])

    def _value(self, entry: Mapping[str, str], measure: Measure) -> float:
        value = read_run(self.manifest.directory, entry).result(measure)
        return math.nan if value is None else value

    def _stop(self, record: InterimAnalysis, under_way: Container[str]) -> set[str]:
        """Mark unneeded runs of later seeds as stopped; return those that are under way instead of marking them."""
        unwanted = set[str]()
        are_all_decided = len(record.decided) == len(record.differences)
        planned = len(self.manifest.content["declared"]["seeds"])
        for spec in self.specs:
            if spec.seed in record.seeds or not (spec.label in record.decided or are_all_decided):
                continue
            if self.manifest.run(spec.run_id)["state"] in ENDED:
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
