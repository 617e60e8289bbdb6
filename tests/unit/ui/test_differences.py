import random

import pytest

from retrain.ui.differences import changes, compared, words_of


def common(a, b):
    """Return the length of a longest common subsequence, by dynamic programming."""
    row = [0] * (len(b) + 1)
    for each in a:
        above, row = row, [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if each == other else max(above[j + 1], row[j]))
    return row[-1]


@pytest.mark.parametrize("seed", range(10))
def test_changes_make_one_of_the_other_and_keep_as_much_as_can_be(seed):
    draw = random.Random(seed)
    a, b = ([draw.choice("abcd"[: 2 + seed % 3]) for _ in range(draw.randrange(90))] for _ in range(2))
    made, kept, at = [], 0, (0, 0)
    for tag, i, p, j, q in changes(a, b):
        assert (i, j) == at  # nothing is left out, nothing comes twice
        at = p, q
        assert tag == "equal" or tag == ("replace" if i < p and j < q else "delete" if i < p else "insert")
        assert tag != "equal" or a[i:p] == b[j:q]
        kept += (p - i) * (tag == "equal")
        made += a[i:p] if tag == "equal" else b[j:q]
    assert at == (len(a), len(b))
    assert made == b
    assert kept == common(a, b)


def test_white_space_belongs_to_the_word_before_it():
    assert words_of("  so, the\n\nanswer is 4.\t") == ["  ", "so", ", ", "the\n\n", "answer ", "is ", "4", ".\t"]
    assert compared("it is five", "it was five") == (
        ["it ", "is ", "five"],
        ["it ", "was ", "five"],
        [("equal", 0, 1, 0, 1), ("replace", 1, 2, 1, 2), ("equal", 2, 3, 2, 3)],
        "words",
    )
    assert compared("", "") == ([], [], [], "words")


def test_what_is_longer_is_compared_by_lines_and_says_so():
    one = "".join(f"line {n} of it\n" for n in range(40))
    other = one.replace("line 7 of it", "a line that is new")
    a, b, found, unit = compared("begin\n" + one, other + "end\n", most=2_000)
    assert unit == "lines"
    assert "".join(a) + "".join(b) == "begin\n" + one + other + "end\n"
    assert [(tag, a[i:p], b[j:q]) for tag, i, p, j, q in found if tag != "equal"] == [
        ("delete", ["begin\n"], []),
        ("replace", ["line 7 of it\n"], ["a line that is new\n"]),
        ("insert", [], ["end\n"]),
    ]
    assert compared("a" + "{}" * 30_000, "b" + "][" * 30_000)[-1] == "lines"
