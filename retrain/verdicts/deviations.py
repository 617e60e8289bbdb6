"""Differences between the records of a campaign and its declaration, and between evaluations and their seals."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from retrain.config.runs import condition_hash
from retrain.errors import listed, plural
from retrain.files import iter_jsonl, stamp_of
from retrain.records.reader import evaluation_rows
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import RunEntry, Seal
from retrain.records.schema.layout import EVALS, EVALUATIONS, METRICS
from retrain.records.seals import chained
from retrain.util.jsonl import last_row
from retrain.util.text import percent

SAME_RATE = 1e-6  # Rounding tolerance between a recorded accuracy and the mean of its grades
CHECKED_RUNS = 4096
NAMED_RUNS = 4


@lru_cache(CHECKED_RUNS)
def _contradictions(run: Path, stamps: object, seal: Seal | None) -> tuple[str, ...]:
    """Return one clause for each fault in the evaluations of a finished run: rows that differ from the seal, accuracies
    that differ from the grades of the completions. ``stamps`` of the files are only a part of the cache key, so that
    files are read again after they have changed."""
    rows, digest, count = evaluation_rows(run), "", 0
    grades: dict[tuple[int, str], list[bool]] = defaultdict(list)
    for row in iter_jsonl(run / EVALUATIONS):
        grades[row["step"], row["name"]].append(row["correct"])
        digest, count = chained(digest, [row]) if seal else "", count + 1
    faults = []
    if seal is not None:
        sealed = (
            (EVALS, len(rows), seal.evaluations, chained("", rows) == seal.evaluations_sha256),
            (EVALUATIONS, count, seal.completions, digest == seal.completions_sha256),
        )
        for file, there, recorded, is_same in sealed:
            if there != recorded:
                faults.append(f"{file} has {plural(there, 'row')} of {recorded} that were recorded")
            elif not is_same:
                faults.append(f"{file} is not what was recorded")
    for row in rows:
        name, step = str(row.get("name")), int(row["step"])
        rate, correct = row.get(f"eval/{name}/correct_rate"), grades.get((step, name))
        if rate is None or not correct:
            continue
        share = sum(correct) / len(correct)
        if not math.isclose(rate, share, abs_tol=SAME_RATE):
            said = f"its accuracy on {name} after step {step} is {percent(rate)}"
            faults.append(f"{said}, and its completions were graded {percent(share)}")
    return tuple(faults)


def declared_entries(directory: Path, manifest: Values) -> list[Row]:
    """Return the manifest's runs in the declared order; declared runs that are not in it are added as "missing".

    A run whose state is "done" becomes "interrupted" if its records have fewer steps than were declared.
    """
    declared = manifest.get("declared") or {}
    order = [(label, seed) for seed in declared.get("seeds") or () for label in declared.get("conditions") or ()]
    places = {run: place for place, run in enumerate(order)}
    entries: list[Row] = []
    for entry in manifest["runs"]:
        planned, run = (declared.get("max_steps") or {}).get(entry["label"], 0), directory / entry["path"]
        if entry["state"] == "done":
            steps = max(last_row(run / METRICS).get("step", -1) + 1, last_row(run / EVALS).get("step", 0))
            if steps < planned:
                reason = f"there are records of {steps} of its {planned} steps"
                entry = {**entry, "state": "interrupted", "reason": reason}
        entries.append(entry)
    for label, seed in places.keys() - {(entry["label"], entry["seed"]) for entry in entries}:
        run_id = f"{label}_s{seed}"
        lost = RunEntry(run_id, label, seed, "missing", "the manifest does not have it", path=f"runs/{run_id}")
        entries.append(lost.to_row())
    return sorted(entries, key=lambda entry: places.get((entry["label"], entry["seed"]), len(order)))


def deviations(
    directory: Path, declared: Values, entries: Sequence[Values], configs: Mapping[str, Values]
) -> list[str]:
    """Return a clause for each way in which runs differ from the declaration, with the ids of these runs.

    ``configs`` are the contents of the runs' ``config.json``, by run id.
    """
    runs_of: dict[str, list[str]] = {}
    for entry in map(RunEntry.from_row, entries):
        for clause in _run_deviations(directory, entry, declared, configs.get(entry.run_id) or {}):
            runs_of.setdefault(clause, []).append(entry.run_id)
    return [f"{clause} ({listed(runs, NAMED_RUNS)})" for clause, runs in runs_of.items()]


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
        run = directory / entry.path
        clauses += _contradictions(run, (stamp_of(run / EVALS), stamp_of(run / EVALUATIONS)), seal)
    return clauses


def seal_notes(manifest: Values) -> list[str]:
    """Return a warning if a finished run has no hashes of its evaluations."""
    if all(row["state"] != "done" or row.get("seal") for row in manifest["runs"]):
        return []
    return [
        "Not sealed: the runs were recorded without hashes, so that a change of their evaluations would not be seen."
    ]
