"""Finds where the records of a campaign differ from its declaration (``declared`` in the manifest)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from retrain.config.runs import condition_hash
from retrain.errors import listed
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import RunEntry, Seal
from retrain.records.schema.layout import EVALS, METRICS
from retrain.records.seals import contradictions
from retrain.util.jsonl import last_row

NAMED_RUNS = 4
UNSEALED = "Not sealed: the runs were recorded without hashes, so that a change of their evaluations would not be seen."


def declared_entries(directory: Path, manifest: Values) -> list[Row]:
    """Return the manifest's runs in the declared order; declared runs that are not in it are added as "missing".

    A run whose state is "done" becomes "interrupted" if its records have fewer steps than were declared.
    """
    declared = manifest.get("declared") or {}
    order = [(label, seed) for seed in declared.get("seeds") or () for label in declared.get("conditions") or ()]
    places = {run: place for place, run in enumerate(order)}
    entries: list[Row] = []
    for entry in manifest["runs"]:
        planned = (declared.get("max_steps") or {}).get(entry["label"], 0)
        if entry["state"] == "done" and (steps := _recorded_steps(directory / entry["path"])) < planned:
            entry = {**entry, "state": "interrupted", "reason": f"there are records of {steps} of its {planned} steps"}
        entries.append(entry)
    for label, seed in places.keys() - {(entry["label"], entry["seed"]) for entry in entries}:
        run_id = f"{label}_s{seed}"
        lost = RunEntry(run_id, label, seed, "missing", "the manifest does not have it", path=f"runs/{run_id}")
        entries.append(lost.to_row())
    return sorted(entries, key=lambda entry: places.get((entry["label"], entry["seed"]), len(order)))


def _recorded_steps(run: Path) -> int:
    return max(last_row(run / METRICS).get("step", -1) + 1, last_row(run / EVALS).get("step", 0))


def deviations(
    directory: Path, declared: Values, entries: Sequence[Values], configs: Mapping[str, Values]
) -> list[str]:
    """Return a clause for each way in which runs differ from the declaration, with the runs that it concerns.

    ``configs`` are the contents of the runs' ``config.json``, by run id.
    """
    runs_of: dict[str, list[str]] = {}
    for entry in map(RunEntry.from_row, entries):
        for clause in _run_deviations(directory, entry, declared, configs.get(entry.run_id) or {}):
            runs_of.setdefault(clause, []).append(entry.run_id)
    return [f"{clause} ({listed(runs, NAMED_RUNS)})" for clause, runs in runs_of.items()]


def is_sealed(manifest: Values) -> bool:
    """Return whether the manifest holds the hashes of all finished runs."""
    return all(entry.get("seal") for entry in manifest["runs"] if entry["state"] == "done")


def _run_deviations(directory: Path, entry: RunEntry, declared: Values, config: Values) -> Sequence[str]:
    clauses = []
    settings, data = ((declared.get(key) or {}).get(entry.label) for key in ("settings", "data"))
    if config and settings and condition_hash(config) != settings:
        clauses.append("the settings are not those that were declared")
    if config and config.get("training", {}).get("seed", entry.seed) != entry.seed:
        clauses.append("the seed in the manifest is not that of the run")
    seal = Seal.from_row(entry.seal) if entry.seal else None
    if seal and data and seal.data != data:
        clauses.append("the problems are not those that were declared")
    if entry.state == "done":
        if settings and seal is None:
            clauses.append("the manifest has lost the hashes of its evaluations")
        clauses += contradictions(directory / entry.path, seal)
    return clauses
