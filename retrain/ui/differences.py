"""Compare two texts by words, in bounded time.

Computes a longest common subsequence; a row of its table is the bits of one integer (Hyyrö 2004, "Bit-parallel
LCS-length computation revisited"). 6,000 words against any 6,000 others take about 20 ms.
"""

import re
from collections.abc import Sequence

MOST_BITS = 200_000_000
"""Limit of words of one text times words of the other (25 MB of bits); longer texts are compared by lines."""
_WORDS = re.compile(r"(?:\w+|[^\w\s])\s*|\s+")

Change = tuple[str, int, int, int, int]
"""Kind ("equal", "replace", "delete" or "insert") and the ranges [from, to) in both texts, as in ``difflib``."""


def words_of(text: str) -> list[str]:
    """Return words and punctuation marks, each with the white space after it; joined, they are the text."""
    return _WORDS.findall(text)


def compared(first: str, second: str, most: int = MOST_BITS) -> tuple[list[str], list[str], list[Change], str]:
    """Return both texts in pieces, the changes, and what the pieces are: "words", or "lines" for long texts."""
    a, b = words_of(first), words_of(second)
    if _bits(a, b) <= most:
        return a, b, changes(a, b), "words"
    a, b = first.splitlines(keepends=True), second.splitlines(keepends=True)
    if _bits(a, b) <= most:
        return a, b, changes(a, b), "lines"
    begin, end = _ends(a, b)
    parts = [("equal", 0, begin, 0, begin), ("replace", begin, len(a) - end, begin, len(b) - end),
             ("equal", len(a) - end, len(a), len(b) - end, len(b))]  # fmt: skip
    return a, b, [part for part in parts if part[1] < part[2] or part[3] < part[4]], "lines"


def changes(a: Sequence[str], b: Sequence[str]) -> list[Change]:
    begin, end = _ends(a, b)
    pairs = [(i, i) for i in range(begin)]
    pairs += [(begin + i, begin + j) for i, j in _common(a[begin : len(a) - end], b[begin : len(b) - end])]
    pairs += [(len(a) - i, len(b) - i) for i in range(end, 0, -1)]
    parts: list[Change] = []
    i = j = 0
    for p, q in [*pairs, (len(a), len(b))]:
        if i < p or j < q:
            parts.append(("replace" if i < p and j < q else "delete" if i < p else "insert", i, p, j, q))
        if p < len(a):
            if parts and parts[-1][0] == "equal":
                parts[-1] = ("equal", parts[-1][1], p + 1, parts[-1][3], q + 1)
            else:
                parts.append(("equal", p, p + 1, q, q + 1))
        i, j = p + 1, q + 1
    return parts


def _ends(a: Sequence[str], b: Sequence[str]) -> tuple[int, int]:
    """Return the number of equal pieces at the beginning, and of equal pieces at the end of the rest."""
    least = min(len(a), len(b))
    begin = next((i for i in range(least) if a[i] != b[i]), least)
    end = next((i for i in range(least - begin) if a[-1 - i] != b[-1 - i]), least - begin)
    return begin, end


def _bits(a: Sequence[str], b: Sequence[str]) -> int:
    same = sum(_ends(a, b))
    return (len(a) - same) * (len(b) - same)


def _common(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Return the index pairs of a longest common subsequence (LCS). Bit i of row j is 0 if the LCS of ``b[:j]`` and
    ``a[: i + 1]`` is longer than that of ``b[:j]`` and ``a[:i]``."""
    places: dict[str, int] = {}
    for i, piece in enumerate(a):
        places[piece] = places.get(piece, 0) | 1 << i
    ones = (1 << len(a)) - 1
    rows = [ones]
    for piece in b:
        row = rows[-1]
        matches = row & places.get(piece, 0)
        rows.append((row + matches | row - matches) & ones if matches else row)
    pairs = []
    i, j = len(a), len(b)
    while i and j:
        if rows[j] >> i - 1 & 1:
            i -= 1
        elif rows[j - 1] >> i - 1 & 1:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        else:
            j -= 1
    return pairs[::-1]
