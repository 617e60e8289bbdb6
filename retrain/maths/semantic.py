"""Which tokens plan, by meaning: sentences compared with examples of planning and of execution.

A text is cut into windows (sentences, lines), each is embedded, and one that lies nearer to the centroid of the
planning anchors than to that of the execution anchors plans, with all its tokens. Differences from the phrases of
``planning``: words that were never listed count too, and whole sentences are marked instead of a few words.

The embedding is a function from texts to vectors, so any model serves and the rest can be worked by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from retrain.maths.arrays import AnyTokenMask, Doubles_N, Doubles_ND, Offsets, Vectors_ND
from retrain.maths.planning import overlapping_tokens

PLANNING_ANCHORS: tuple[str, ...] = (
    "Wait, let me think about this again.",
    "Let me check that step once more.",
    "Let me verify whether this is right.",
    "That doesn't look right, so I should go back.",
    "I made a mistake, let me start over.",
    "Maybe there is another way to approach this problem.",
    "First I need a plan for how to solve the problem.",
    "The key insight is to look at it differently.",
)
"""Sentences in which somebody steers: reconsiders, checks, chooses a way."""

EXECUTION_ANCHORS: tuple[str, ...] = (
    "12 + 34 = 46.",
    "7 times 6 is 42, minus 5 is 37.",
    "Substituting x = 3 gives y = 11.",
    "Multiply both sides by 2 to get 4x = 20.",
    "The ones digit is 4, and 1 is carried.",
    "There are 5 apples and 3 oranges, which makes 8 pieces of fruit.",
    "Therefore the value of x is 5.",
    "The final answer is 42.",
)
"""Sentences in which somebody carries out: computes, substitutes, states a result."""

Embed = Callable[[list[str]], Vectors_ND]
"""Texts → their vectors [number of texts, D]; their lengths do not matter."""

_WINDOW_END = re.compile(r"(?<=[.!?;:])\s+|\n+")
_SOMETHING = re.compile(r"\S")


def windows(text: str, longest: int = 400) -> list[tuple[int, int]]:
    """Half-open character ranges of the sentences and lines of ``text``, in order, without the blanks around them.

    A window ends after ``. ! ? ; :`` before a blank, and at the end of a line; one of more than ``longest``
    characters is cut at a blank, so that the embedding model sees all of it.
    """
    edges = [0]
    for match in _WINDOW_END.finditer(text):
        edges += [match.start(), match.end()]
    edges.append(len(text))
    spans = []
    for start, end in zip(edges[0::2], edges[1::2], strict=True):
        while start < end:
            cut = end if end - start <= longest else text.rfind(" ", start + 1, start + longest)
            cut = start + longest if cut <= start else cut
            first = _SOMETHING.search(text, start, cut)
            if first is not None:
                spans.append((first.start(), first.start() + len(text[first.start() : cut].rstrip())))
            start = cut
    return spans


def unit_rows(vectors: Vectors_ND) -> Doubles_ND:
    """Rows scaled to length 1, float64 [N, D]; a row of zeros stays. Raises ValueError for NaN or a wrong shape."""
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"embeddings must have shape [texts, D]: got {rows.shape}")
    if not np.isfinite(rows).all():
        raise ValueError("an embedding holds NaN or infinity")
    norms = np.sqrt((rows * rows).sum(1, keepdims=True))
    return np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)


class SemanticDetector:
    """Marks the tokens of windows whose cosine to the planning centroid exceeds that to the execution centroid by
    more than ``threshold``.

    A centroid is the mean of its anchors' unit vectors, scaled to length 1. Raises ValueError for anchors that are
    missing, a threshold outside [−2, 2] and embeddings of the wrong number, shape or value.
    """

    def __init__(
        self,
        embed: Embed,
        planning: Sequence[str] = PLANNING_ANCHORS,
        execution: Sequence[str] = EXECUTION_ANCHORS,
        threshold: float = 0.02,
    ):
        if isinstance(planning, str) or isinstance(execution, str) or not planning or not execution:
            raise ValueError("planning and execution anchors must be non-empty lists of sentences")
        if not (math.isfinite(threshold) and -2.0 <= threshold <= 2.0):
            raise ValueError(f"the threshold is a difference of cosines, in [-2, 2]: got {threshold}")
        self.embed, self.threshold = embed, threshold
        anchors = self._unit([*planning, *execution])
        plan, execute = anchors[: len(planning)].mean(0), anchors[len(planning) :].mean(0)
        centroids = unit_rows(np.stack([plan, execute]))
        self._direction = centroids[0] - centroids[1]

    def margins(self, texts: Sequence[str]) -> Doubles_N:
        """cos(text, planning centroid) − cos(text, execution centroid) of every text, float64 [N]."""
        return self._unit(list(texts)) @ self._direction if texts else np.zeros(0)

    def token_masks(self, texts: Sequence[str], offsets: Sequence[Offsets]) -> list[AnyTokenMask]:
        """Which tokens of each completion lie in a planning window, bool [T] each; one embedding call for the batch.

        Raises ValueError when the lists differ in length or ``offsets`` are not pairs.
        """
        cut = [windows(text) for text in texts]
        sentences = {text[start:end]: 0 for text, spans in zip(texts, cut, strict=True) for start, end in spans}
        plans = dict(zip(sentences, self.margins(list(sentences)) > self.threshold, strict=True))
        masks = []
        for text, spans, pairs in zip(texts, cut, offsets, strict=True):
            planning = [(start, end) for start, end in spans if plans[text[start:end]]]
            masks.append(overlapping_tokens(planning, len(text), pairs))
        return masks

    def _unit(self, texts: list[str]) -> Doubles_ND:
        vectors = unit_rows(self.embed(texts))
        if len(vectors) != len(texts):
            raise ValueError(f"{len(texts)} texts were to be embedded and {len(vectors)} vectors came back")
        return vectors
