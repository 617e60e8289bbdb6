"""Numbers and lists in sentences for people."""

from collections.abc import Sequence


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def listed(texts: Sequence[str], most: int) -> str:
    """The first ``most`` of these texts, and how many there are besides."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
