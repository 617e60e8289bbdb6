"""Format numbers for people, and remove secrets and control characters from text of models, files and plug-ins."""

import html
import os
import re
from collections.abc import Mapping

NOTHING = "-"  # Shown where there is no value
KEYS = re.compile(r"\b(?:sk|hf|gh[opsu]|glpat|xox[abp])[-_][A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b")
SECRET_VARIABLES = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
_UNSEEN = (
    *range(0x7F, 0xA0),  # delete and the C1 controls
    *(0xAD, 0x61C, 0x180E, 0x3164, 0xFEFF),  # soft hyphen, Arabic letter mark, invisible letters, byte order mark
    *range(0x200B, 0x2010),  # zero-width characters and direction marks
    *range(0x2028, 0x202F),  # line and paragraph separators, direction overrides
    *range(0x2060, 0x2070),  # invisible operators and direction isolates
    *range(0xD800, 0xE000),  # lone surrogates
    *range(0xFDD0, 0xFDF0),  # noncharacters
    *(0xFFFE, 0xFFFF),
    *range(0xE0000, 0xE0080),  # invisible tags
)
SHOWN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    **dict.fromkeys(_UNSEEN, "\N{REPLACEMENT CHARACTER}"),
    0x7F: "\N{SYMBOL FOR DELETE}",
}
"""Control and invisible characters → one visible character each; tabs and line feeds stay."""


def visible(text: str) -> str:
    """Replace every control, direction or invisible character and lone surrogate by one visible character. Does not
    escape HTML."""
    return text if text.isascii() and text.isprintable() else text.translate(SHOWN)


def escape(text: str) -> str:
    """Return HTML text or an attribute value: markup is escaped, invisible characters become visible."""
    return html.escape(visible(str(text)), quote=True)


def without_keys(text: str) -> str:
    values = {value for name, value in os.environ.items() if SECRET_VARIABLES.search(name) and len(value) >= 8}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "[key left out]")
    return KEYS.sub("[key left out]", text)


def number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def plain(value: float | None, sign: bool = False) -> str:
    """Format a number with three significant digits, from a thousand on without decimals: −2.5, 0.0123, 1,235."""
    if value is None:
        return NOTHING
    return minus(f"{value:{'+' if sign else ''}{',.0f' if 999.5 <= abs(value) < 1e9 else '.3g'}}")


def percent(share: float | None, digits: int = 0) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f}%"


def points(difference: float | None, digits: int = 1, sign: bool = True) -> str:
    return NOTHING if difference is None else minus(f"{100 * difference:{'+' if sign else ''}.{digits}f}")


def interval(bounds: Mapping[str, float | None] | None, digits: int) -> str:
    if bounds is None:
        return NOTHING
    estimate, low, high = map(bounds.get, ("estimate", "low", "high"))
    ends = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return minus(f"{number(estimate, digits)}{ends}")


def minus(text: str) -> str:
    return text.replace("-", "−")


def change(before: float | None, now: float | None) -> str:
    if before is None or now is None:
        return percent(now if before is None else before)
    return f"{100 * before:.0f} → {percent(now)}"


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


def probability(p: float) -> str:
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def p_words(p: float) -> str:
    """Format a p-value for a sentence: `p = 0.017`, or `p < 0.0001`."""
    return f"p {'= ' if p >= 1e-4 else ''}{probability(p)}"


def count(number: float) -> str:
    """Format 1234567 as "1.2 M"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def size(number: float) -> str:
    """Format bytes as "1.5 GiB"."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number / 2**10:.3g} KiB"


def approximate_duration(seconds: float) -> str:
    """Format seconds as "40 s", "12 min", "3.5 h" or "12 days"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in (*range(0x20), *_UNSEEN)}


def one_line(text: str) -> str:
    """Return ``text`` on one line, safe for a terminal: control and invisible characters are escaped."""
    return text.translate(_ESCAPES)
