"""The words in which two texts differ: as many equal as there can be, and soon, whatever the texts are."""

from __future__ import annotations

import random
import time

import pytest

from retrain.ui.differences import changes, compared, words


def common(a, b):
    """The length of a longest common subsequence, by the table of it."""
    row = [0] * (len(b) + 1)
    for each in a:
        above, row = row, [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if each == other else max(above[j + 1], row[j]))
    return row[-1]


@pytest.mark.parametrize("seed", range(60))
def test_changes_make_one_of_the_other_and_keep_as_much_as_can_be(seed):
    draw = random.Random(seed)
    a, b = ([draw.choice("abcd"[: 2 + seed % 3]) for _ in range(draw.randrange(90))] for _ in range(2))
    made, kept, at = [], 0, (0, 0)
    for tag, i, p, j, q in changes(a, b):
        assert (i, j) == at  # nothing is left out, nothing comes twice
        at = p, q
        if tag == "equal":
            assert a[i:p] == b[j:q]
            kept += p - i
        else:
            assert tag == ("replace" if i < p and j < q else "delete" if i < p else "insert")
            assert i < p or j < q
        made += a[i:p] if tag == "equal" else b[j:q]
    assert at == (len(a), len(b))
    assert made == b
    assert kept == common(a, b)


def test_white_space_belongs_to_the_word_before_it():
    text = "  so, the\n\nanswer is 4.\t"
    assert words(text) == ["  ", "so", ", ", "the\n\n", "answer ", "is ", "4", ".\t"]
    assert compared("it is five", "it was five") == (
        ["it ", "is ", "five"],
        ["it ", "was ", "five"],
        [("equal", 0, 1, 0, 1), ("replace", 1, 2, 1, 2), ("equal", 2, 3, 2, 3)],
        "words",
    )
    assert compared("", "") == ([], [], [], "words")


def test_six_thousand_quite_different_words_are_compared_at_once():
    draw = random.Random(0)
    known = [f"word{n}" for n in range(500)]
    one, other = (" ".join(draw.choice(known) for _ in range(6_000)) for _ in range(2))
    begin = time.process_time()
    a, b, found, by = compared(one, other)
    assert time.process_time() - begin < 0.5
    assert (by, len(a), len(b)) == ("words", 6_000, 6_000)
    assert sum(p - i for tag, i, p, _, _ in found if tag == "equal") > 400


def test_what_is_longer_is_compared_by_lines_and_says_so():
    one = "".join(f"line {n} of it\n" for n in range(40))
    other = one.replace("line 7 of it", "a line that is new")
    a, b, found, by = compared(one, other, most=20)
    assert by == "words"  # what is the same at both ends is not compared
    a, b, found, by = compared("begin\n" + one, other + "end\n", most=2_000)
    assert by == "lines"
    assert "".join(a) + "".join(b) == "begin\n" + one + other + "end\n"
    assert [(tag, a[i:p], b[j:q]) for tag, i, p, j, q in found if tag != "equal"] == [
        ("delete", ["begin\n"], []),
        ("replace", ["line 7 of it\n"], ["a line that is new\n"]),
        ("insert", [], ["end\n"]),
    ]
    a, b, found, by = compared("x\n" * 3 + "y\n" * 50 + "w\n", "x\n" * 3 + "z\n" * 50 + "w\n", most=5)
    assert (by, found) == ("lines", [("equal", 0, 3, 0, 3), ("replace", 3, 53, 3, 53), ("equal", 53, 54, 53, 54)])


def test_a_page_of_signs_is_no_worse():
    begin = time.process_time()
    *_, by = compared("a" + "{}" * 30_000, "b" + "][" * 30_000)
    assert by == "lines"
    assert time.process_time() - begin < 1.0
