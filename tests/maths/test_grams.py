"""Strategic grams: which words make one, exact counts of documents, groups by Ward's method, the top share of them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.maths.grams import (
    GramCounts,
    cluster_documents,
    clustered,
    most_frequent,
    top_clusters,
    ward_labels,
    without_contained,
    word_runs,
)
from retrain.maths.planning import RegexDetector

DOCUMENTS = [
    ["Wait, let me check: 3+4=7."],
    ["So x. Let me\ncheck it"],
    ["let me verify it", "let me check"],
    ["we add 3 and let me", "check"],
]


def counted(documents, share=0.0, bits=16, sizes=(3, 4, 5)):
    counts = GramCounts(sizes, bits)
    for document in documents:
        counts.add(document)
    return counts.frequent(documents, share)


def by_hand(documents, least, sizes=(3, 4, 5)):
    """Every gram counted by name, once for each document."""
    counts = Counter()
    for document in documents:
        runs = [run for text in document for run in word_runs(text)]
        counts.update({" ".join(run[i : i + n]) for run in runs for n in sizes for i in range(len(run) - n + 1)})
    return {gram: count for gram, count in counts.items() if count >= least}


def test_runs_of_words_by_hand():
    assert word_runs("Wait, let me check: 3+4=7. That’s re-done!") == [
        ["wait", "let", "me", "check"],
        ["that's", "re", "done"],
    ]
    assert word_runs("let x2 me _so it") == [["let"], ["me"], ["it"]]
    assert word_runs("a 1 b") == [["a"], ["b"]]
    assert word_runs("") == []


def test_a_document_counts_once_and_turns_stand_alone():
    assert counted(DOCUMENTS) == {"let me check": 3}
    assert counted([["let me check let me check"]] * 2, sizes=(3,))["let me check"] == 2


def test_the_share_decides_and_two_documents_are_the_least():
    documents = [["a b c"]] * 4 + [["d e f"]] * 3 + [["g h i"]] * 3
    assert counted(documents, 0.4, sizes=(3,)) == {"a b c": 4}
    assert counted(documents, 0.3, sizes=(3,)) == {"a b c": 4, "d e f": 3, "g h i": 3}  # 0.3 · 10 is 3, not above
    assert counted([["a b c"], ["d e f"]]) == {}


words = st.lists(st.sampled_from(["let", "me", "it's", "so", "7", "x", "."]), max_size=9).map(" ".join)


@given(st.lists(st.lists(words, min_size=1, max_size=2), max_size=12), st.sampled_from([0.0, 0.25, 0.5]))
def test_counts_are_exact_however_small_the_table(documents, share):
    least = max(2, -(-len(documents) * int(share * 4) // 4))
    for bits in (1, 4, 16):
        assert counted(documents, share, bits) == by_hand(documents, least)


@given(st.lists(st.lists(words, min_size=1, max_size=2), max_size=8))
def test_the_detector_finds_every_gram_where_it_was_counted(documents):
    for gram, count in counted(documents).items():
        detector = RegexDetector([gram])
        assert sum(any(detector.char_spans(text) for text in document) for document in documents) >= count


def test_documents_that_changed_between_the_passes_are_told():
    counts = GramCounts((3,), 8)
    counts.add(["a b c"])
    with pytest.raises(ValueError, match="1 documents were counted, and now there are 2"):
        counts.frequent([["a b c"]] * 2, 0.0)
    with pytest.raises(ValueError, match="grams have 1 to 5 words"):
        GramCounts((3, 6))


def test_a_gram_that_only_stands_in_a_longer_one_is_left_out():
    counts = Counter({"me check it": 2, "let me check it": 2, "let me check": 3, "let me check it now": 1})
    assert without_contained(counts) == {"let me check it": 2, "let me check": 3, "let me check it now": 1}
    longest = Counter({"a b c d e": 2, "a b c d": 2, "b c d e": 2, "a b c": 2, "b c d": 2, "c d e": 2})
    assert without_contained(longest) == {"a b c d e": 2}


def test_the_most_frequent_of_equal_ones_by_the_alphabet():
    assert most_frequent(Counter({"b": 2, "a": 2, "c": 3, "d": 1}), 3) == ["c", "a", "b"]


def test_groups_of_like_direction_numbered_as_they_occur():
    angles = np.radians([90, 0, 91, 2, 180, 1])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.array([[5], [1], [1], [3], [1], [1]])
    assert ward_labels(rows, 3) == [0, 1, 0, 1, 2, 1]
    assert ward_labels(rows, 1) == [0] * 6
    assert ward_labels(rows[:1], 3) == [0]
    assert sorted(ward_labels(rows, 99)) == [0, 1, 2, 3, 4, 5]


def test_a_document_counts_once_for_a_group_with_any_of_its_grams():
    held = [{"a", "b"}, {"b"}, {"c", "z"}, set(), {"a", "c"}]
    assert cluster_documents(["a", "b", "c"], [0, 0, 1], held) == [3, 2]


def test_the_top_share_of_groups_and_ties_stay():
    assert top_clusters([7, 9, 1, 5, 3], 0.2) == [1]
    assert top_clusters([7, 9, 1, 7, 3], 0.4) == [1, 0, 3]
    assert top_clusters([7, 9, 1, 5, 3], 0.21) == [1, 0]
    assert top_clusters([1, 1], 1e-9) == [0, 1]
    assert top_clusters([], 0.5) == []
    order = top_clusters([3, 1, 4, 1, 5], 1.0)
    assert order == [4, 2, 0, 1, 3]
    assert all(a != b for a, b in pairwise(order))


def test_planted_phrases_of_one_meaning_come_first():
    """Each document has one of three phrases of checking; one in four has a phrase that says something else."""
    check = ["let me check", "let me verify", "double check that"]
    documents = [[f"we add 3. {check[i % 3]}: {i}. {'so it goes' if i % 4 == 0 else ''}"] for i in range(24)]
    counts = GramCounts(bits=12)
    for document in documents:
        counts.add(document)
    grams = most_frequent(without_contained(counts.frequent(documents, 0.1)), 50)
    assert sorted(grams) == sorted([*check, "so it goes"])
    told = []
    groups = clustered(
        counts, grams, lambda texts: np.array([[float(text in check), float(text not in check)] for text in texts]),
        2, documents, told.append,
    )  # fmt: skip
    assert [(sorted(group.grams), group.documents) for group in groups] == [(sorted(check), 24), (["so it goes"], 6)]
    assert told == list(range(1, 25))
