"""Planning tokens: phrases matched on the decoded text, marked through character offsets.

Text is matched as a reader sees it, so sub-word splits, capitals, straight or curly apostrophes and hyphens or line
breaks between words do not matter; phrases begin and end at word boundaries ("the key is" is not in "the key island").
Overlapping phrases both count. Each text is decoded and searched once; no Python loop over tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from retrain.algorithms.algorithm import CreditStep, StepContext
from retrain.errors import PluginError
from retrain.maths.arrays import AnyTokenMask, Offsets, TokenMask, TokenNumbers, plugin_name
from retrain.tokenizer import Tokenizer
from retrain.types import CreditedBatch, CreditedRollout

# The built-in planning phrases
STRATEGIC_GRAMS: tuple[str, ...] = (
    "wait let me",
    "let me think",
    "on second thought",
    "let me check",
    "let me verify",
    "is this right",
    "double check",
    "try another approach",
    "go back and",
    "start over",
    "that's not right",
    "that doesn't work",
    "another way to",
    "or we could",
    "what if we",
    "notice that",
    "the key is",
    "the key insight",
)

APOSTROPHES = "'\u2019\u2018\u02bc\u0060\u00b4"
HYPHENS = "-\u2010\u2011\u2012\u2013"
BETWEEN_WORDS = rf"(?:[{HYPHENS}\s]+|,\s+)"  # What may stand between two words of a phrase


def _phrase_pattern(phrase: str) -> re.Pattern[str]:
    """Return a pattern that finds a phrase in lower-case text, with any separators between its words.

    The pattern opens with a plain literal, which ``re`` searches several times faster than an alternation or a
    look-behind; the left word boundary is therefore checked just after that literal.
    """
    phrase_words = [word for word in re.split(rf"[{HYPHENS}\s]+", phrase.strip().lower()) if word]
    if not phrase_words:
        raise ValueError("a planning phrase is empty")
    head = re.escape(re.split(f"[{APOSTROPHES}]", phrase_words[0])[0])
    body = BETWEEN_WORDS.join(
        f"[{APOSTROPHES}]".join(re.escape(part) for part in re.split(f"[{APOSTROPHES}]", word)) for word in phrase_words
    )
    left = rf"(?<!\w{head})" if head and phrase_words[0][0].isalnum() else ""
    right = r"(?!\w)" if phrase_words[-1][-1].isalnum() else ""
    return re.compile(head + left + body[len(head) :] + right)


def lowered(text: str) -> str:
    """Return the text in lower case. A character such as "İ", whose lower case has two characters, is kept, so that
    character positions stay valid."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


def overlapping_tokens(spans: Sequence[tuple[int, int]], length: int, offsets: Offsets) -> TokenMask:
    """Return which tokens overlap one of the character ranges ``spans`` of a text of ``length`` characters, bool [T].

    Raises ValueError when ``offsets`` are not pairs.
    """
    if not spans or not len(offsets):
        return np.zeros(len(offsets), dtype=bool)
    starts_T, ends_T = _columns(offsets)
    # covered[i] = how many of the first i characters lie in a range; a token overlaps when it gains any.
    marked = np.zeros(length + 1, dtype=bool)
    for start, end in spans:
        marked[start + 1 : end + 1] = True
    covered = np.cumsum(marked, dtype=np.int32)
    return covered[np.clip(ends_T, 0, length)] > covered[np.clip(starts_T, 0, length)]


class Detector(Protocol):
    def token_masks(self, texts: Sequence[str], offsets: Sequence[Offsets]) -> list[AnyTokenMask]:
        """Return the mask of planning tokens of each completion, bool [T] each."""
        ...


PlanningFunction = Callable[[Sequence[str], Sequence[TokenNumbers]], Iterable[object]]


class PluginDetector:
    """A user's ``function(texts, offsets)``, which returns one entry per token for every completion, true for planning
    tokens.

    ``texts`` are the completions of a batch, ``offsets`` their tokens' character ranges, int64 [T, 2] each.
    """

    def __init__(self, function: PlanningFunction):
        self.function = function
        self.name = plugin_name(function)

    def token_masks(self, texts: Sequence[str], offsets: Sequence[Offsets]) -> list[AnyTokenMask]:
        """Return the function's masks, bool [T] each.

        Raises PluginError naming the plug-in when their number or a length is wrong, or an entry is neither true nor
        false (0 and 1 count as such).
        """
        pairs = [np.asarray(one, dtype=np.int64).reshape(-1, 2) for one in offsets]
        masks = list(self.function(list(texts), pairs))
        if len(masks) != len(pairs):
            raise PluginError(
                f"planning detector {self.name} returned {len(masks)} masks for {len(pairs)} completions: return one "
                "for each"
            )
        return [self._checked(mask, len(own)) for mask, own in zip(masks, pairs, strict=True)]

    def _checked(self, mask: object, length: int) -> TokenMask:
        values_T = np.asarray(mask)
        if values_T.shape != (length,):
            raise PluginError(
                f"planning detector {self.name} returned shape {values_T.shape} for a completion of {length} tokens: "
                "return one entry per token"
            )
        if values_T.size and (values_T.dtype.kind not in "biuf" or not np.isin(values_T, (0, 1)).all()):
            raise PluginError(f"planning detector {self.name} returned something else than true and false")
        return values_T.astype(bool)


class RegexDetector:
    """Marks the tokens that overlap a planning phrase. Raises ValueError for an empty phrase or an empty list."""

    def __init__(self, phrases: Sequence[str] = STRATEGIC_GRAMS):
        if isinstance(phrases, str) or not phrases:
            raise ValueError("planning phrases must be a non-empty list of strings")
        self.phrases = tuple(phrases)
        self._patterns = tuple(_phrase_pattern(phrase) for phrase in dict.fromkeys(phrases))

    def char_spans(self, text: str) -> list[tuple[int, int]]:
        """Return half-open character ranges of the phrases in ``text``, in order, possibly overlapping."""
        text = lowered(text)
        return sorted(match.span() for pattern in self._patterns for match in pattern.finditer(text))

    def token_mask(self, text: str, offsets: Offsets) -> TokenMask:
        """Return which tokens overlap a phrase, bool [T]. Tokens of width 0 (end tokens) never do.

        Raises ValueError when ``offsets`` are not pairs.
        """
        return overlapping_tokens(self.char_spans(text), len(text), offsets)

    def token_masks(self, texts: Sequence[str], offsets: Sequence[Offsets]) -> list[AnyTokenMask]:
        return [self.token_mask(text, pairs) for text, pairs in zip(texts, offsets, strict=True)]


def _columns(offsets: Offsets) -> tuple[TokenNumbers, TokenNumbers]:
    if isinstance(offsets, np.ndarray):
        if offsets.ndim != 2 or offsets.shape[1] != 2:
            raise ValueError(f"token offsets must have shape [T, 2]: got {offsets.shape}")
        return offsets[:, 0], offsets[:, 1]
    # Several times faster than np.array() of a list of pairs.
    flat = np.fromiter(chain.from_iterable(offsets), dtype=np.int64)
    if flat.size != 2 * len(offsets):
        raise ValueError("token offsets must be (start, end) pairs")
    return flat[0::2], flat[1::2]


@dataclass(frozen=True)
class PlanningTokens(CreditStep):
    """Marks the planning tokens of every rollout. Turns are searched one by one: no phrase spans two of them."""

    detector: Detector
    tokenizer: Tokenizer

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        return self.mark(batch)

    def mark(self, batch: CreditedBatch) -> CreditedBatch:
        rollouts = batch.rollouts
        decoded = [self.tokenizer.offsets(turn.action.token_ids) for rollout in rollouts for turn in rollout.turns]
        masks = iter(self.detector.token_masks([text for text, _ in decoded], [offsets for _, offsets in decoded]))
        return batch.with_fields(rollouts, ({"planning_T": _joined(rollout, masks)} for rollout in rollouts))


def _joined(rollout: CreditedRollout, masks: Iterator[AnyTokenMask]) -> np.ndarray:
    parts = [np.asarray(next(masks), dtype=bool) for _ in rollout.turns]
    return np.concatenate([np.zeros(0, dtype=bool), *parts])
