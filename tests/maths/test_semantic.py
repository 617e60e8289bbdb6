"""Planning by meaning, with embeddings that can be worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.maths.semantic import SemanticDetector, unit_rows, windows

WORDS = ("think", "again", "add", "carry")


def counts(texts: list[str]) -> np.ndarray:
    """How often each of four words stands in a text: two of planning, two of execution."""
    return np.array([[text.lower().count(word) for word in WORDS] for text in texts], dtype=np.float32)


DETECTOR = SemanticDetector(counts, ["think", "again"], ["add", "carry"], threshold=0.1)


def test_margins_by_hand():
    """Centroids (1,1,0,0)/√2 and (0,0,1,1)/√2; a text of one word is at 45° of its own, a mixed one between them."""
    margins = DETECTOR.margins(["think", "carry", "think add", "think think add", "none"])
    root2, root5 = math.sqrt(2), math.sqrt(5)
    assert margins == pytest.approx([1 / root2, -1 / root2, 0, (2 - 1) / (root2 * root5), 0])


def test_the_length_of_a_vector_does_not_matter():
    twice = SemanticDetector(lambda texts: 7 * counts(texts), ["think", "again"], ["add", "carry"])
    assert twice.margins(["think add add"]) == pytest.approx(DETECTOR.margins(["think add add"]))


def test_windows_are_sentences_and_lines():
    text = "Let me think. 3.5 + 1 = 4.5!  Is it?\n\n x = 4; so y\nend"
    assert [text[a:b] for a, b in windows(text)] == [
        "Let me think.", "3.5 + 1 = 4.5!", "Is it?", "x = 4;", "so y", "end",
    ]  # fmt: skip
    assert windows("") == windows(" \n ") == []


def test_exactly_the_tokens_of_planning_windows_are_marked():
    text = "add 3. Think again! carry 1"
    offsets = [(0, 3), (3, 5), (5, 6), (6, 12), (12, 18), (18, 19), (19, 25), (25, 27), (27, 27)]
    masks = DETECTOR.token_masks([text, "", "add"], [offsets, [], [(0, 3)]])
    assert masks[0].tolist() == [False, False, False, True, True, True, False, False, False]
    assert [mask.tolist() for mask in masks[1:]] == [[], [False]]


def test_a_text_of_neither_kind_does_not_plan_at_threshold_zero():
    detector = SemanticDetector(counts, ["think", "again"], ["add", "carry"], threshold=0.0)
    masks = detector.token_masks(["none", "think"], [[(0, 4)], [(0, 5)]])
    assert [mask.tolist() for mask in masks] == [[False], [True]]


def test_a_batch_is_embedded_in_one_call_without_repetitions():
    seen: list[list[str]] = []

    def embed(texts: list[str]) -> np.ndarray:
        seen.append(list(texts))
        return counts(texts)

    detector = SemanticDetector(embed, ["think"], ["add"])
    detector.token_masks(["think. add.", "add. think."], [[(0, 6)], [(0, 4)]])
    assert seen[1:] == [["think.", "add."]]


@given(st.text(alphabet="ab .!?;\n\té日", max_size=120), st.integers(5, 40))
def test_windows_cover_all_but_blanks_once(text, longest):
    spans = windows(text, longest)
    covered = np.zeros(len(text), dtype=int)
    for start, end in spans:
        assert 0 < end - start <= longest
        covered[start:end] += 1
        assert text[start:end] == text[start:end].strip()
    assert covered.max(initial=0) <= 1
    assert all(char.isspace() for char, n in zip(text, covered, strict=True) if not n)
    assert spans == sorted(spans)


@given(st.lists(st.sampled_from([*WORDS, "of", "."]), max_size=20).map(" ".join), st.floats(-1.5, 1.5))
def test_a_higher_threshold_marks_a_subset(text, threshold):
    offsets = [(i, i + 1) for i in range(len(text))]

    def mask(limit: float) -> np.ndarray:
        return SemanticDetector(counts, ["think"], ["add"], limit).token_masks([text], [offsets])[0]

    assert not (mask(threshold + 0.3) & ~mask(threshold)).any()
    assert not mask(2.0).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(planning=[]), "non-empty lists"),
        (dict(execution="add"), "non-empty lists"),
        (dict(threshold=math.nan), "difference of cosines"),
        (dict(threshold=3.0), "difference of cosines"),
        (dict(embed=lambda texts: counts(texts)[:1]), "2 texts were to be embedded and 1 vectors"),
        (dict(embed=lambda texts: counts(texts)[0]), r"shape \[texts, D\]"),
        (dict(embed=lambda texts: counts(texts) * np.nan), "NaN or infinity"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_an_error(arguments, message):
    given = {"embed": counts, "planning": ["think"], "execution": ["add"]} | arguments
    with pytest.raises(ValueError, match=message):
        SemanticDetector(**given)


def test_zero_vectors_have_no_direction():
    assert unit_rows(np.zeros((2, 3))).tolist() == [[0, 0, 0]] * 2
