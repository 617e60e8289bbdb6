"""What a check comes to: numbers beside their limits, one line of it for people, all of it for ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from retrain.selfcheck.limits import LIMITS


class Status(StrEnum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True)
class Measure:
    """One number of ``LIMITS`` and the ends that it has to be within."""

    key: str
    value: float
    least: float
    most: float

    @property
    def ok(self) -> bool:
        """Whether the number is within its ends; what is not a number is not."""
        return self.least <= self.value <= self.most

    def text(self) -> str:
        """As on the line: ``k3 1.2e-13 (at most 1e-09)``."""
        limit = LIMITS[self.key]
        ends = [
            f"{word} {_short(end)}"
            for word, end in (("at least", self.least), ("at most", self.most))
            if abs(end) != float("inf")
        ]
        unit = f" {limit.unit}" if limit.unit else ""
        return f"{limit.name} {_short(self.value)}{unit} ({', '.join(ends)})"

    def to_json(self) -> dict[str, Any]:
        """Return the number with its limit."""
        limit = LIMITS[self.key]
        ends = {name: end for name, end in (("least", self.least), ("most", self.most)) if abs(end) != float("inf")}
        return {"name": self.key, "value": self.value, **ends, "unit": limit.unit, "ok": self.ok}


@dataclass(frozen=True)
class Result:
    """``words`` stand on the line before the numbers, ``todo`` after them; ``facts`` only in the file."""

    status: Status
    words: str = ""
    measures: tuple[Measure, ...] = ()
    todo: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """What there is to say, on one line."""
        text = ", ".join([*([self.words] if self.words else []), *(measure.text() for measure in self.measures)])
        return f"{text} → {self.todo}" if self.todo else text


@dataclass(frozen=True)
class Finding:
    """A check's result, and the seconds that it took: of the clock, and of this process's processors."""

    name: str
    result: Result
    seconds: float
    processor_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        result = self.result
        return {
            "name": self.name,
            "status": str(result.status),
            "words": result.words,
            "measures": [measure.to_json() for measure in result.measures],
            "todo": result.todo,
            "facts": dict(result.facts),
            "seconds": self.seconds,
            "processor_seconds": self.processor_seconds,
        }


def judged(
    kinds: tuple[str, ...], values: Mapping[str, float], words: str = "", *, fault: str = "", **facts: Any
) -> Result:
    """PASS when every number is within its limit for these kinds (number format, device) and there is no ``fault``;
    else FAIL with what to do."""
    measures = tuple(Measure(key, float(value), *LIMITS[key].ends(kinds)) for key, value in values.items())
    fixes = [*([fault] if fault else []), *(LIMITS[measure.key].fix for measure in measures if not measure.ok)]
    status = Status.FAIL if fixes else Status.PASS
    return Result(status, words, measures, "; ".join(dict.fromkeys(fixes)), facts)


def skipped(reason: str) -> Result:
    """Not done here, and why."""
    return Result(Status.SKIP, reason)


def raised(error: BaseException) -> Result:
    """A check that ended with an exception."""
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return Result(Status.FAIL, what, todo="report it with --json")


def _short(value: float) -> str:
    return f"{value:.3g}"
