import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.algorithms import STRATEGIC_GRAMS, RegexDetector
from retrain.tokenizer import text_and_offsets

DETECTOR = RegexDetector()


def found(text: str, detector: RegexDetector = DETECTOR) -> list[str]:
    return [text[start:end] for start, end in detector.char_spans(text)]


def words(text: str) -> list[tuple[int, int]]:
    """Offsets as byte-level tokenizers cut: a word with the space before it; suffixes and signs apart."""
    return [match.span() for match in re.finditer(r" ?[A-Za-z]+|['’]\w+| ?[^\sA-Za-z]|\s+", text)]


def marked(text: str) -> list[str]:
    offsets = words(text)
    return [text[a:b] for (a, b), yes in zip(offsets, DETECTOR.token_mask(text, offsets), strict=True) if yes]


@pytest.mark.parametrize("phrase", STRATEGIC_GRAMS)
def test_every_built_in_phrase(phrase):
    for text in (phrase, phrase.upper(), f"So, {phrase}.", f"({phrase})", phrase.replace(" ", "\n  ")):
        assert [s.lower().split() for s in found(text)] == [phrase.split()]
    assert found(f"x{phrase} {phrase}x") == []


def test_token_oracles():
    text, pieces = "that's not right", [(0, 4), (4, 6), (6, 10), (10, 16)]
    assert text[4:6] == "'s"
    assert DETECTOR.token_mask(text, pieces).tolist() == [True] * 4
    assert marked("so x = notice that") == [" notice", " that"]
    assert marked("a b c d e f the key is g") == [" the", " key", " is"]
    assert marked("ok wait let me check now") == [" wait", " let", " me", " check"]  # two phrases overlap


@pytest.mark.parametrize(("text", "phrases"), [
    ("That’s not right", ["That’s not right"]),
    ("that`s not right, THAT'S\nNOT RIGHT", ["that`s not right", "THAT'S\nNOT RIGHT"]),
    ("double-check; double\u2011check", ["double-check", "double\u2011check"]),
    ("Wait, let me see", ["Wait, let me"]),
    ("wait. let me see", []),
    ("the monkey is here, the keys are; the key island, breathe key is", []),
    ("wait let me check", ["wait let me", "let me check"]),
    ("İİİ Notice That ok", ["Notice That"]),  # whose lower case is longer
])  # fmt: skip
def test_apostrophes_hyphens_breaks_and_words(text, phrases):
    assert found(text) == phrases


def test_own_phrases():
    detector = RegexDetector(["Plan B", "(aha)", "c'est ça"])
    assert found("plan b and (AHA)! C’EST ÇA; plan bee", detector) == ["plan b", "(AHA)", "C’EST ÇA"]


@given(
    st.lists(st.sampled_from([*STRATEGIC_GRAMS, "so", "x = 3", "monkey is", "İ", "\n", "😀"]), max_size=8), st.data()
)
def test_tokens_are_marked_iff_they_overlap(parts, data):
    text = " ".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    offsets = list(zip([0, *cuts], [*cuts, len(text)], strict=True))
    spans = DETECTOR.char_spans(text)
    expected = [any(max(a, s) < min(b, e) for s, e in spans) for a, b in offsets]
    assert DETECTOR.token_mask(text, offsets).tolist() == expected
    assert len(spans) >= sum(part in STRATEGIC_GRAMS for part in parts)


def test_offsets_of_split_characters():
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], b"", b"\xff", "’s".encode()]
    text, offsets = text_and_offsets(pieces)
    assert text == "aé\udcff’s"
    assert offsets.tolist() == [[0, 1], [1, 2], [1, 2], [2, 2], [2, 3], [3, 5]]
    assert text_and_offsets([])[1].shape == (0, 2)


@pytest.mark.parametrize(("offsets", "message"), [
    ([(0, 2, 4)], "token offsets must be (start, end) pairs"),
    (np.zeros((2, 3), dtype=np.int64), "token offsets must have shape [T, 2]: got (2, 3)"),
    (np.zeros(4, dtype=np.int64), "token offsets must have shape [T, 2]: got (4,)"),
], ids=["list", "columns", "axes"])  # fmt: skip
def test_offsets_are_pairs(offsets, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DETECTOR.token_mask("notice that", offsets)
