"""Evaluate an adapter on the held-out problems at every candidate rank, to find which rank is enough.

The energy that a rank keeps cannot tell, because 95 % energy is a 22 % error of the weights. All ranks get the same
problems and random numbers, and are compared with the full adapter problem by problem, because there is only one run;
conclusions hold for this adapter and similar problems. Tango's score interval, which is not overconfident when all
answers agree, decides whether a loss of accuracy is excluded. The full adapter's answers are those of the run's final
evaluation if it had the same sampling, so that only one accuracy is reported. Candidates are tested from the largest
rank down until one fails. This fixed order keeps the probability of wrongly calling any rank enough at that of a single
test (Westfall and Krishen 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from retrain.config.runs import RunSpec
from retrain.errors import UsageError, plural
from retrain.files import sha256, write_json
from retrain.maths.bounded import bounded_mean_interval
from retrain.maths.statistics import accuracy_interval
from retrain.records.reader import read_object
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import ADAPTER_WEIGHTS
from retrain.util.text import percent, points

TOLERANCE = 0.02  # Largest loss of accuracy that counts as small


class RankMarks(NamedTuple):
    """Correct (1) and wrong (0) answers of adapters to the same problems.

    ``marks`` is float64 [adapters, problems, samples]. ``sampled_anew``: whether the answers of the first adapter, the
    uncompressed one, were sampled for this comparison instead of taken from its run's final evaluation.
    """

    marks: np.ndarray
    ranks: list[int]
    sampled_anew: bool


Evaluate = Callable[[Sequence[Path]], RankMarks]


def verify_ranks(spec: RunSpec, full: Path, smaller: Sequence[Path], out: Path, evaluate: Evaluate) -> Row:
    """Return the accuracy of an adapter and of its compressed forms on the run's decisive held-out set; also write it
    to ``out``.

    Returns problems, samples, tolerance, ``set`` (its name), ``adapter`` (SHA-256 of the full one's weights), ``full``
    ({rank, accuracy, low, high, sampled_anew}), ``ranks``, the largest first, each {rank, accuracy, low, high,
    difference ({mean, low, high}: minus the full adapter, paired by problem), verdict ("kept", "lost", "unclear")},
    ``enough`` (the smallest rank for which it and all larger ranks are kept, or null) and ``sentence``. Raises
    UsageError for fewer than two held-out problems, and errors of ``evaluate``.
    """
    held_out = spec.config.decisive
    if held_out is None or held_out.problems < 2:
        raise UsageError("a compressed adapter is verified on held-out problems: set [evaluation] problems")
    correct, ranks, sampled_anew = evaluate([full, *smaller])
    rows = [
        {"rank": rank, **_accuracy(marks), **_compared(marks, correct[0])}
        for rank, marks in zip(ranks[1:], correct[1:], strict=True)
    ]
    rows.sort(key=lambda row: -row["rank"])
    verification: Row = {
        "problems": correct.shape[1],
        "samples": correct.shape[2],
        "tolerance": TOLERANCE,
        "set": held_out.name,
        "adapter": sha256(full / ADAPTER_WEIGHTS),
        "full": {"rank": ranks[0], **_accuracy(correct[0]), "sampled_anew": sampled_anew},
        "ranks": rows,
        "enough": sufficient_rank(rows),
    }
    verification["sentence"] = sentence(verification)
    write_json(out, verification)
    return verification


def read_verification(path: Path, adapter: Path) -> Row | None:
    """Return the content of ``path``, written by ``verify_ranks``, if it is about this adapter's weights; else None."""
    content = read_object(path)
    return content if content and content.get("adapter") == sha256(adapter / ADAPTER_WEIGHTS) else None


def verdict(low: float | None, high: float | None) -> str:
    """Return "kept" if a loss above the tolerance is excluded, "lost" if the interval lies below 0, else "unclear"."""
    if low is None or high is None:
        return "unclear"
    if low >= -TOLERANCE:
        return "kept"
    return "lost" if high < 0.0 else "unclear"


def sufficient_rank(rows: Sequence[Values]) -> int | None:
    """Return the smallest rank for which it and all larger ranks are kept, or None; ``rows`` begin with the largest
    rank."""
    smallest = None
    for row in rows:
        if row["verdict"] != "kept":
            break
        smallest = row["rank"]
    return smallest


def sentence(verification: Values) -> str:
    full, tolerance = verification["full"], f"{100 * TOLERANCE:g} points"
    accuracy = percent(full["accuracy"], 1) + (", sampled again" if full.get("sampled_anew") else "")
    problems = f"On {plural(verification['problems'], 'held-out problem')}"
    if verification["samples"] > 1:
        problems += f" with {verification['samples']} samples each"
    if verification["enough"] is None:
        largest = verification["ranks"][0]["rank"]
        return (
            f"{problems}, a loss of more than {tolerance} against rank {full['rank']} ({accuracy}) cannot be ruled out "
            f"even at rank {largest}; more problems would narrow the interval."
        )
    row = next(row for row in verification["ranks"] if row["rank"] == verification["enough"])
    mean, low, high = (points(row["difference"][key]) for key in ("mean", "low", "high"))
    return (
        f"{problems}, the smallest rank that is at most {tolerance} worse than rank {full['rank']} is {row['rank']}: "
        f"{percent(row['accuracy'], 1)} against {accuracy}, difference {mean} points [{low}, {high}], for this adapter."
    )


def _accuracy(marks: np.ndarray) -> dict[str, float | None]:
    clusters = np.arange(len(marks)).repeat(marks.shape[1])
    interval = accuracy_interval(marks.ravel(), clusters.tolist())
    return {"accuracy": interval.estimate, "low": interval.low, "high": interval.high}


def _compared(marks: np.ndarray, full: np.ndarray) -> Row:
    gain = bounded_mean_interval(marks.mean(axis=1) - full.mean(axis=1), -1.0, 1.0)
    difference = {"mean": gain.estimate, "low": gain.low, "high": gain.high}
    return {"difference": difference, "verdict": verdict(gain.low, gain.high)}
