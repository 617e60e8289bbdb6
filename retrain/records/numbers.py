"""How numbers are written for people: tables, sentences, charts' tables and the live view."""

from collections.abc import Mapping

NOTHING = "-"  # Shown where there is no value


def number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f}%"


def points(difference: float | None, digits: int = 1, sign: bool = True) -> str:
    """A difference of shares in percentage points, by default with its sign; a real minus."""
    return NOTHING if difference is None else minus(f"{100 * difference:{'+' if sign else ''}.{digits}f}")


def interval(found: Mapping[str, float | None] | None, digits: int, scale: float = 1.0) -> str:
    """An estimate with its ends, where it has any; ``found`` is a ``maths.statistics.Interval`` as plain data."""
    if found is None:
        return NOTHING
    estimate, low, high = (None if end is None else scale * end for end in map(found.get, ("estimate", "low", "high")))
    ends = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return minus(f"{number(estimate, digits)}{ends}")


def minus(text: str) -> str:
    """A number's text with a real minus sign."""
    return text.replace("-", "−")


def change(before: float | None, now: float | None) -> str:
    """``before → now`` in per cent; ``before`` alone as long as nothing was measured since."""
    return percent(before) if before is None or now is None else f"{100 * before:.0f} → {percent(now)}"


def short(value: float | None) -> str:
    """A count in at most five characters: 987, 12.3k, 4.5M."""
    if value is None:
        return NOTHING
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """``m:ss``, ``h:mm:ss`` or ``2d 3h``."""
    if seconds is None:
        return NOTHING
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600}h"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
