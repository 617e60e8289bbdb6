"""From a run's completions to its strategic grams: count, leave out what is contained, embed, group, keep the groups
that the most completions hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrain.errors import UsageError
from retrain.maths.grams import (
    WORDS,
    GramCluster,
    GramCounts,
    clustered,
    most_frequent,
    top_clusters,
    without_contained,
)
from retrain.maths.semantic import Embed
from retrain.mining.corpus import Completions
from retrain.wording import plural

CANDIDATES = 4000
"""Grams that are grouped at most; their distances take 64 MB."""
CLUSTERS = 100
Tell = Callable[[str, int, int], object]
"""Told of progress: what is done, how much of it, of how much."""


@dataclass(frozen=True)
class Wanted:
    """What is kept: of the grams in ``least`` of the completions the ``CANDIDATES`` most frequent, in ``clusters``
    groups, of which the ``top`` share stays. ``clusters`` None is a fifth as many as grams, ``CLUSTERS`` at most:
    of one gram each they would mean nothing."""

    clusters: int | None = None
    top: float = 0.2
    least: float = 0.01

    def groups(self, grams: int) -> int:
        """How many groups there may be of so many grams."""
        return min(CLUSTERS, -(-grams // 5)) if self.clusters is None else self.clusters


@dataclass(frozen=True)
class Mined:
    """The groups that are kept, and what there was: ``completions`` that were read, ``cut`` of them recorded without
    their ends, ``candidates`` grams in ``groups`` groups."""

    clusters: list[GramCluster]
    completions: int
    cut: int
    candidates: int
    groups: int

    def about(self, completions: Completions, wanted: Wanted, embedder: str, command: str) -> dict[str, Any]:
        """Where the grams come from, for their file."""
        return {
            "command": command,
            "run": completions.facts["run_id"],
            "inputs": completions.digest(),
            "completions": self.completions,
            "correct_only": completions.correct,
            "without_their_ends": self.cut,
            "words": list(WORDS),
            "least": wanted.least,
            "candidates": self.candidates,
            "embedder": embedder,
            "clusters": self.groups,
            "top": wanted.top,
        }


def mine(completions: Completions, embed: Embed, wanted: Wanted, tell: Tell = lambda what, done, of: None) -> Mined:
    """The strategic grams of these completions. They are read several times, and none is kept. Raises UsageError where
    too few completions have a gram in common."""
    total, cut = completions.count()
    counts = GramCounts()
    for done, document in enumerate(completions, start=1):
        counts.add(document)
        tell("counting", done, total)
    frequent = counts.frequent(completions, wanted.least, lambda done: tell("naming", done, total))
    grams = most_frequent(without_contained(frequent), CANDIDATES)
    if not grams:
        raise UsageError(
            f"no {WORDS[0]} words in a row stand in {wanted.least:.3g} of {plural(total, 'completion')} and in two at "
            "least: --least takes rarer ones, and --all wrong answers too"
        )
    every = clustered(
        counts, grams, embed, wanted.groups(len(grams)), completions, lambda done: tell("grouping", done, total)
    )
    kept = top_clusters([cluster.documents for cluster in every], wanted.top)
    return Mined([every[index] for index in kept], total, cut, len(grams), len(every))
