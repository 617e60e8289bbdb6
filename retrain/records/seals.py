"""Seals of a run's evaluations: a SHA-256 over all rows so far, extended by each evaluation and kept in the manifest.

A row's hash covers the hash of the row before it, so that a seal of constant size covers the whole file and an
evaluation costs its own rows only. Seconds are left out: an interrupted run has the seal of one that was not.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from retrain.errors import plural
from retrain.files import dumps, iter_jsonl, read_jsonl, stamp_of
from retrain.records.schema.base import Values
from retrain.records.schema.campaign import Seal
from retrain.records.schema.layout import EVALS, EVALUATION_FILES, EVALUATIONS
from retrain.util.text import percent

SAME_RATE = 1e-6  # Rounding tolerance between a recorded accuracy and the mean of its grades
CHECKED_RUNS = 4096


def chained(digest: str, rows: Iterable[Values]) -> str:
    """Return the hash of a file whose rows so far have this one, with these rows behind them."""
    for row in rows:
        text = dumps({key: value for key, value in row.items() if key != "seconds"})
        digest = hashlib.sha256(f"{digest}{text}".encode()).hexdigest()
    return digest


def contradictions(run: Path, seal: Seal | None) -> tuple[str, ...]:
    """Return what contradicts the evaluations of a finished run, one clause for each fault.

    Rows are compared with the seal, accuracies with the grades of the completions; the latter needs no seal. Files are
    read again only after they have changed.
    """
    return _contradictions(run, tuple(stamp_of(run / name) for name in EVALUATION_FILES), seal)


@lru_cache(CHECKED_RUNS)
def _contradictions(run: Path, stamps: object, seal: Seal | None) -> tuple[str, ...]:
    rows, digest, count = read_jsonl(run / EVALS), "", 0
    grades: dict[tuple[int, str], list[bool]] = defaultdict(list)
    for row in iter_jsonl(run / EVALUATIONS):
        grades[row["step"], row["name"]].append(row["correct"])
        digest, count = chained(digest, [row]) if seal else "", count + 1
    faults = []
    if seal is not None:
        faults += _fault(EVALS, len(rows), seal.evaluations, chained("", rows) == seal.evaluations_sha256)
        faults += _fault(EVALUATIONS, count, seal.completions, digest == seal.completions_sha256)
    for row in rows:
        name, step = str(row.get("name")), int(row["step"])
        rate, correct = row.get(f"eval/{name}/correct_rate"), grades.get((step, name))
        if rate is None or not correct:
            continue
        share = sum(correct) / len(correct)
        if not math.isclose(rate, share, abs_tol=SAME_RATE):
            said, graded = percent(rate), percent(share)
            faults.append(
                f"its accuracy on {name} after step {step} is {said}, and its completions were graded {graded}"
            )
    return tuple(faults)


def _fault(name: str, rows: int, sealed: int, is_same: bool) -> list[str]:
    if rows != sealed:
        return [f"{name} has {plural(rows, 'row')} of {sealed} that were recorded"]
    return [] if is_same else [f"{name} is not what was recorded"]
