"""Numbers as text for people: in tables, sentences, charts and the live view."""

from collections.abc import Mapping

NOTHING = "-"  # Shown where there is no value


def number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f}%"


def points(difference: float | None, digits: int = 1, sign: bool = True) -> str:
    """Return a difference of shares in percentage points."""
    return NOTHING if difference is None else minus(f"{100 * difference:{'+' if sign else ''}.{digits}f}")


def interval(bounds: Mapping[str, float | None] | None, digits: int, scale: float = 1.0) -> str:
    """Return an estimate with its ends, where it has any; ``bounds`` is a ``maths.statistics.Interval`` as JSON."""
    if bounds is None:
        return NOTHING
    estimate, low, high = (None if end is None else scale * end for end in map(bounds.get, ("estimate", "low", "high")))
    ends = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return minus(f"{number(estimate, digits)}{ends}")


def minus(text: str) -> str:
    return text.replace("-", "−")


def change(before: float | None, now: float | None) -> str:
    """Return ``before → now`` in per cent, or ``before`` as long as nothing was measured since."""
    return percent(before) if before is None or now is None else f"{100 * before:.0f} → {percent(now)}"


def short(value: float | None) -> str:
    """Return a count in at most five characters: 987, 12.3k, 4.5M."""
    if value is None:
        return NOTHING
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Return ``m:ss``, ``h:mm:ss`` or ``2d 3h``."""
    if seconds is None:
        return NOTHING
    total = round(seconds)
    if total >= 86400:
        return f"{total // 86400}d {total % 86400 // 3600}h"
    hours, minutes = total // 3600, total % 3600 // 60
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"
