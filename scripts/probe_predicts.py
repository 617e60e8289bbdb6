"""Does a probe predict? What probes expected against what their campaigns found.

    python scripts/probe_predicts.py FILE.probe.json LABEL=POINTS … [FILE.probe.json LABEL=POINTS …]

A label with the difference that the campaign found, in points, follows the probe of its file. Printed are, for each,
the predicted gain of a step beyond the baseline's at every point of the probe, whether it is told from 0,
and over all of them Spearman's rank correlation of the mean prediction with what was found, with a bootstrap interval;
once for steps as they are, and once for steps of the baseline's length, where learning rates make no difference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.files import read_json
from retrain.maths.statistics import paired_bootstrap_ci
from retrain.probe.words import LEAST_GAIN
from retrain.record.numbers import minus

READINGS = {"beyond_baseline": "steps as they are", "versus_baseline": "steps of the baseline's length"}
"""Which number of a probe is the prediction, and what it is called."""
NOTHING = 1e-6
"""Points that are rounding."""


def ranks(values: np.ndarray) -> np.ndarray:
    """Average ranks along the last axis."""
    below = (values[..., None, :] < values[..., :, None]).sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).sum(-1)
    return below + (equal + 1) / 2


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rank correlation along the last axis, 0 where one side is all equal."""
    x, y = (ranks(each) - ranks(each).mean(-1, keepdims=True) for each in (a, b))
    size = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return np.divide((x * y).sum(-1), size, out=np.zeros_like(size), where=size > 0)


def predictions(report: dict[str, Any], label: str, reading: str) -> list[tuple[str, dict[str, float]]]:
    """What the probe says of this condition at each of its points: place and interval, in points a step."""
    found = []
    for point in report["points"]:
        condition = next((each for each in point["conditions"] if each["label"] == label), None)
        if condition is None:
            raise SystemExit(f"{report['file']} has no condition {label}: {', '.join(report['conditions'])}")
        if label == report["baseline"]:
            raise SystemExit(f"{label} is the baseline of {report['file']}: name another condition")
        interval = (condition["alignment"] or {}).get(reading)
        place = "start" if not point["step"] else f"step {point['step']}"
        if interval is None:
            raise SystemExit(f"{report['file']} predicts nothing at {place}: probe again without --problems 0")
        if interval["low"] is None:
            why = "probe again with more --batches or --problems"
            raise SystemExit(f"{report['file']} has no interval for {label} at {place}: {why}")
        found.append((place, {key: _points(value) for key, value in interval.items()}))
    return found


def _told(one: dict[str, float]) -> bool:
    """By its interval, and more than nothing: for steps of one length a sentence of the probe says so."""
    return not one["low"] <= 0 <= one["high"] and abs(one["estimate"]) >= 100 * LEAST_GAIN


def _points(share: float) -> float:
    """In points, rounding errors taken for 0."""
    return 0.0 if abs(100 * share) < NOTHING else 100 * share


def main(given: Sequence[str]) -> None:
    """Read the probes, print both tables and their correlations."""
    asked = list(_asked(given))
    for reading, words in READINGS.items():
        print(f"{words}:")
        _table([(label, predictions(report, label, reading), gained) for report, label, gained in asked])


def _asked(given: Sequence[str]) -> Iterator[tuple[dict[str, Any], str, float]]:
    """The probe, the label and the points of every difference."""
    report: dict[str, Any] = {}
    for each in given:
        if each.endswith(".json"):
            report = read_json(Path(each))
            continue
        label, _, points = each.rpartition("=")
        if not report or not label:
            raise SystemExit(f"{each} does not follow: type FILE.probe.json first, then LABEL=POINTS")
        try:
            yield report, label, float(points)
        except ValueError:
            raise SystemExit(f"{each} ends in no number of points: type LABEL=POINTS, such as {label}=-1.4") from None


def _table(rows: Sequence[tuple[str, list[tuple[str, dict[str, float]]], float]]) -> None:
    """A line for every difference, and the correlation."""
    for label, found, gained in rows:
        words = [
            f"{place} {one['estimate']:+.2f} [{one['low']:+.2f}, {one['high']:+.2f}]{' (told)' if _told(one) else ''}"
            for place, one in found
        ]
        print(minus(f"{label}: {', '.join(words)}; found {gained:+.1f}"))
    expected = [float(np.mean([one["estimate"] for _, one in found])) for _, found, _ in rows]
    if len(rows) > 2:
        measured = [gained for *_, gained in rows]
        interval = paired_bootstrap_ci(expected, measured, np.random.default_rng(0), spearman)
        ends = f" [{interval.low:+.2f}, {interval.high:+.2f}]" if interval.low is not None else ""
        print(minus(f"rank correlation over {len(rows)} differences: {interval.estimate:+.2f}{ends}"))


if __name__ == "__main__":
    main(sys.argv[1:])
