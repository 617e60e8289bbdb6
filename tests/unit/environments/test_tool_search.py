import json
import math
import os
import re
import sys
from collections import Counter

import pytest

from retrain.environments.tools import ToolError, search
from retrain.environments.tools.calls import Call, answer
from retrain.environments.tools.search import Search, passage, split_words
from retrain.errors import DataError, MissingExtra, UsageError
from retrain.extras import install_line, is_installed

needs_bm25s = pytest.mark.skipif(not is_installed("bm25s"), reason=f"bm25s is not installed: {install_line('bm25s')}")
ANIMALS = [
    {"id": "cat", "title": "Cats", "text": "The cat sat on the mat and slept."},
    {"id": "dog", "text": "A dog chased the cat down the street."},
    {"id": "fish", "title": "Fish", "text": "Fish swim. Fish eat. Fish sleep with open eyes."},
    {"text": "Nothing about animals, but 7 words here."},
]


@pytest.fixture
def corpus(tmp_path):
    def write(rows, name="corpus.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    yield write
    search._read.cache_clear()


def ids(answer: str) -> list[str]:
    return re.findall(r"^\[\d+\] (\S+)", answer, re.MULTILINE)


@needs_bm25s
def test_what_fits_best_comes_first(corpus, tmp_path):
    find = Search(corpus(ANIMALS))
    assert find("fish") == "[1] fish Fish\nFish swim. Fish eat. Fish sleep with open eyes."
    assert ids(find("CAT on a mat?")) == ["cat", "dog"]
    assert ids(find("7")) == ["4"]  # a document without an id has its line's number
    assert find("unicorn") == "[Nothing found]"
    assert ids(find("cats")) == ["cat"]  # by its title
    assert ids(find("mat " * 100_000)) == ["cat"]
    assert ids(find("\0 \ud800 mat")) == ["cat"]
    with pytest.raises(ToolError, match="query has no words"):
        find(" ?! ")
    other = Search(corpus(['{"text": "Größe \\ud800 naïve Москва"}', {"text": "else"}]))
    assert answer(Call("search", {}), other("москва"))["content"] == "[1] 1\nGröße ? naïve Москва"
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "one.txt").write_text("apples and pears")
    (tmp_path / "two.md").write_text("# Plums\nplums and pears")
    (tmp_path / "three.py").write_text("pears = 1")
    assert ids(Search(str(tmp_path))("pears")) == ["below/one.txt", "two.md"]


@needs_bm25s
def test_the_order_is_that_of_bm25(corpus):
    """Against the formula (Robertson's with Lucene's idf), over a corpus of 60 documents."""
    texts = [" ".join(f"w{(i * j) % 17}" for j in range(1, 5 + i % 9)) for i in range(60)]
    find = Search(corpus([{"id": i, "text": text} for i, text in enumerate(texts)]), k=60)
    counts = [Counter(split_words(text)) for text in texts]
    mean = sum(sum(count.values()) for count in counts) / len(counts)

    def score(count, query, k1=1.5, b=0.75):
        total = 0.0
        for word in query:
            holding = sum(word in other for other in counts)
            idf = math.log(1 + (len(counts) - holding + 0.5) / (holding + 0.5))
            total += idf * count[word] / (count[word] + k1 * (1 - b + b * sum(count.values()) / mean))
        return total

    for query in ("w3", "w1 w5", "w0 w2 w16 w9"):
        scores = [score(count, query.split()) for count in counts]
        expected = sorted((i for i in range(60) if scores[i] > 0), key=lambda i: (-round(scores[i], 5), i))
        assert ids(find(query)) == [str(i) for i in expected]


@needs_bm25s
def test_documents_of_the_same_score_come_by_id(corpus):
    names = ["b", 10, "a", 9, "c", 2]
    for order in (names, names[::-1]):
        path = corpus([{"id": name, "text": "the same words"} for name in order], f"{order[0]}.jsonl")
        assert ids(Search(path, k=10)("same")) == ["2", "9", "10", "a", "b", "c"]
        assert ids(Search(path, k=4)("same")) == ["2", "9", "10", "a"]


@pytest.mark.parametrize(("wanted", "characters", "shown"), [
    (["one"], 100, "one two three four five two six"), (["one"], 8, "one two …"), (["six"], 10, "… two six"),
    (["two", "five"], 13, "… five two six"), (["none"], 7, "one two …"), (["two"], 3, "… two …"),
])  # fmt: skip
def test_passages(wanted, characters, shown):
    assert passage(" one two three four five two six ", wanted, characters) == shown
    long = "alpha beta gamma delta " * 10_000
    assert passage(long + "omega", ["alpha", "beta", "omega"], 500).endswith("omega")


@needs_bm25s
def test_the_index_is_made_once_and_again_when_the_file_changes(corpus):
    path = corpus(ANIMALS)
    first, second = Search(path), Search(path, k=1)
    assert first._index is second._index
    corpus([{"text": "only zebras"}])
    os.utime(path, ns=(1, 1))
    assert ids(Search(path)("zebras")) == ["1"]
    assert ids(first("mat")) == ["cat"]  # an episode keeps what it began with


@pytest.mark.parametrize(("lines", "error"), [
    ([{"text": "a"}, "{"], r"corpus\.jsonl:2 is no JSON"),
    ([{"text": "a"}, "", "[1]"], r"corpus\.jsonl:3 is no document .*valid dictionary"),
    ([{"title": "a"}], r'corpus\.jsonl:1 is no document .*"text": Field required'),
    ([{"text": "a", "id": 2}, {"text": "b"}], r"corpus\.jsonl:2 has the id '2' of line 1"),
    ([{"text": "?!"}], "has no words"),
    (["[" * 100_000], r"corpus\.jsonl:1 is no JSON"),
])  # fmt: skip
@needs_bm25s
def test_a_corpus_that_is_none(corpus, lines, error):
    with pytest.raises(DataError, match=error):
        Search(corpus(lines))


@needs_bm25s
def test_a_corpus_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist"):
        Search(str(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match=r"without \.txt or \.md files"):
        Search(str(tmp_path))
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"neither a \.jsonl file nor a directory"):
        Search(str(tmp_path / "table.csv"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8"):
        Search(str(tmp_path))


def test_without_bm25s(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="k = 0 must be at least 1"):
        Search("anything", k=0)
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingExtra, match=r"tool search needs the package bm25s: pip install '\.\[search\]'"):
        Search(str(tmp_path))
