"""Strategic grams (HICRA, arXiv 2509.03646): phrases of a few words that recur over many solutions.

Word n-grams are counted by document (solution), embedded, grouped by meaning, and the groups that the most documents
hold are kept. Differences from the paper, which has no published code: a gram is a phrase that ``RegexDetector`` can
find again, so it crosses no punctuation but a comma and holds no digit; one that only ever stands inside a longer one
is left out; groups are those of Ward's method, which minimises what k-means does and needs no random start.

Documents are lists of texts (the turns of an episode). They are read several times and never held.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.maths.arrays import Vectors_ND
from retrain.maths.planning import APOSTROPHES, BETWEEN_WORDS, lowered
from retrain.maths.semantic import Embed, unit_rows

WORDS = (3, 4, 5)
"""Words of a gram."""
TABLE_BITS = 26
"""The table of approximate counts has 2^26 entries of 4 bytes."""

Document = Sequence[str]
Progress = Callable[[int], object]
"""Told how many documents of a pass have been read."""

_WORD = rf"[^\W\d_]+(?:[{APOSTROPHES}][^\W\d_]+)*"
_RUN = re.compile(rf"(?<!\w){_WORD}(?:{BETWEEN_WORDS}{_WORD})*(?!\w)")
_SEPARATOR = re.compile(BETWEEN_WORDS)
_APOSTROPHE = re.compile(f"[{APOSTROPHES}]")
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD],
                dtype=np.uint64)  # fmt: skip


@dataclass(frozen=True)
class GramCluster:
    """Grams of one meaning, the most frequent first, and how many documents hold any of them."""

    grams: tuple[str, ...]
    documents: int


def word_runs(text: str) -> list[list[str]]:
    """The words of ``text`` in lower case, cut wherever a phrase could not go on: at punctuation other than a comma or
    hyphen, and around words with digits, which are left out."""
    lower = _APOSTROPHE.sub("'", lowered(text))
    return [_SEPARATOR.split(run) for run in _RUN.findall(lower)]


class GramCounts:
    """How many documents hold each gram, exactly for all that at least some share of the documents hold.

    A first pass (``add``) counts hashes in a table of fixed size, whose entries are never below the truth. A second
    (``frequent``) counts by name those grams alone whose entry reaches the limit: at most (grams of a document) / share
    of them, plus those that share an entry with others.
    """

    def __init__(self, sizes: Sequence[int] = WORDS, bits: int = TABLE_BITS):
        if not 1 <= min(sizes) <= max(sizes) <= len(_ODD):
            raise ValueError(f"grams have 1 to {len(_ODD)} words: got {tuple(sizes)}")
        self.sizes, self.documents, self.least = tuple(sizes), 0, 2
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, dtype=np.uint32)

    def add(self, document: Document) -> None:
        """Count one document of the first pass."""
        self.documents += 1
        _, entries = self._entries(document)
        self._table[np.concatenate([places for _, _, places in entries])] += 1  # once, however often it is named

    def frequent(self, documents: Iterable[Document], share: float, tell: Progress = lambda done: None) -> Counter[str]:
        """Grams in ``share`` of the documents, and in two at least, with their number of documents; ``documents`` are
        those of the first pass again. Raises ValueError when their number is another."""
        self.least = max(2, math.ceil(share * self.documents - 1e-9))
        counts: Counter[str] = Counter()
        seen = 0
        for seen, document in enumerate(documents, start=1):
            counts.update(self.grams_of(document))
            tell(seen)
        if seen != self.documents:
            raise ValueError(f"{self.documents} documents were counted, and now there are {seen}")
        return Counter({gram: count for gram, count in counts.items() if count >= self.least})

    def grams_of(self, document: Document) -> set[str]:
        """The document's grams that enough documents may hold."""
        words, entries = self._entries(document)
        return {
            " ".join(words[start : start + size])
            for size, starts, places in entries
            for start in starts[self._table[places] >= self.least].tolist()
        }

    def _entries(self, document: Document) -> tuple[list[str], list[tuple[int, np.ndarray, np.ndarray]]]:
        """The document's words, and for every size of gram the first word of each and its entry of the table."""
        runs = [run for text in document for run in word_runs(text)]
        words = [word for run in runs for word in run]
        run_W = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        code_W = np.array([zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words], dtype=np.uint64)
        entries = []
        for size in self.sizes:
            count = max(0, len(words) - size + 1)
            starts = np.flatnonzero(run_W[:count] == run_W[len(words) - count :])
            mixed = np.full(len(starts), size, dtype=np.uint64)
            for place in range(size):
                mixed = (mixed ^ (code_W[starts + place] + _ODD[place])) * _ODD[place]
                mixed ^= mixed >> np.uint64(29)
            entries.append((size, starts, (mixed * _ODD[0]) >> self._shift))
        return words, entries


def without_contained(counts: Counter[str]) -> Counter[str]:
    """The grams that some document holds outside of a longer one. A gram that as many documents hold as a gram of one
    word more, of which it is part, says nothing of its own; no document is lost with it."""
    contained = set[str]()
    for gram, count in counts.items():
        for part in (gram.partition(" ")[2], gram.rpartition(" ")[0]):
            if counts.get(part) == count:
                contained.add(part)
    return Counter({gram: count for gram, count in counts.items() if gram not in contained})


def most_frequent(counts: Counter[str], limit: int) -> list[str]:
    """The ``limit`` grams that the most documents hold, of equal ones the first in the alphabet."""
    return sorted(counts, key=lambda gram: (-counts[gram], gram))[:limit]


def ward_labels(vectors: Vectors_ND, count: int) -> list[int]:
    """Which of at most ``count`` groups each row belongs to, int [N], numbered as they first occur.

    Ward's method on rows of length 1. Takes N² · 4 bytes of distances. Raises ValueError as ``unit_rows``.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    rows = unit_rows(vectors)
    if len(rows) < 2 or count < 2:
        return [0] * len(rows)
    raw = fcluster(linkage(rows, method="ward"), t=count, criterion="maxclust").tolist()
    names = {label: number for number, label in enumerate(dict.fromkeys(raw))}
    return [names[label] for label in raw]


def cluster_documents(grams: Sequence[str], labels: Sequence[int], documents: Iterable[set[str]]) -> list[int]:
    """How many documents hold any gram of each group, int [K]; ``documents`` are the grams of each."""
    label_of = dict(zip(grams, labels, strict=True))
    counts = [0] * (max(labels, default=-1) + 1)
    for held in documents:
        for label in {label_of[gram] for gram in held if gram in label_of}:
            counts[label] += 1
    return counts


def top_clusters(documents: Sequence[int], share: float) -> list[int]:
    """The ``share`` of the groups that the most documents hold, most first; groups equal to the last one stay too."""
    order = sorted(range(len(documents)), key=lambda group: -documents[group])
    if not order:
        return []
    last = order[max(1, math.ceil(share * len(order) - 1e-9)) - 1]
    return [group for group in order if documents[group] >= documents[last]]


def clustered(
    counts: GramCounts,
    grams: Sequence[str],
    embed: Embed,
    clusters: int,
    documents: Iterable[Document],
    tell: Progress = lambda done: None,
) -> list[GramCluster]:
    """The grams in at most ``clusters`` groups of like embedding, those in the most documents first."""

    def held() -> Iterable[set[str]]:
        for done, document in enumerate(documents, start=1):
            yield counts.grams_of(document)
            tell(done)

    labels = ward_labels(np.asarray(embed(list(grams))), clusters) if grams else []
    frequencies = cluster_documents(grams, labels, held())
    return [
        GramCluster(
            tuple(gram for gram, label in zip(grams, labels, strict=True) if label == group), frequencies[group]
        )
        for group in top_clusters(frequencies, 1.0)
    ]
