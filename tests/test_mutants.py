"""The table of mutants and the patches fit the tree, and the script tells what was caught from what survived."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant, Patch, check, patches


def assert_tests_exist(tests: Iterable[str]) -> None:
    for test in tests:
        file, _, name = test.partition("::")
        functions = {node.name for node in ast.parse((ROOT / "tests" / file).read_text()).body
                     if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert not name or name in functions, test


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_a_line_that_is_there_and_names_tests_that_are_there(mutant):
    before = (ROOT / mutant.file).read_text()
    after = mutant.applied(before)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    assert_tests_exist(mutant.tests)


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.name)
def test_a_patch_changes_a_copy_of_the_tree_and_names_tests_that_exist(patch, tmp_path):
    for file in patch.files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    patch.apply(tmp_path)
    for file in patch.files:
        assert ast.dump(ast.parse((tmp_path / file).read_text())) != ast.dump(ast.parse((ROOT / file).read_text()))
    assert_tests_exist(patch.tests)


def test_mutants_have_names_of_their_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A module of two functions; one has a test that would notice a mistake."""
    root = tmp_path / "root"
    (root / "tests").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "sums.py").write_text("def total(a, b):\n    return a + b\n\n\ndef half(a):\n    return a / 2\n")
    (root / "tests/test_sums.py").write_text(
        "from sums import half, total\n\n\ndef test_total():\n    assert total(2, 3) == 5\n\n\n"
        "def test_half():\n    assert half(0) == 0\n"
    )
    return root


def test_what_is_caught_survives_or_cannot_be_tried(tree, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mutants, "SECONDS", 2)
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    tried = [
        Mutant("difference", "sums.py", "a + b", "a - b", ("test_sums.py",)),  # as long as what it replaces
        Mutant("product", "sums.py", "a + b", "a * b", ("test_sums.py::test_total",)),
        Mutant("third", "sums.py", "a / 2", "a / 3", ("test_sums.py::test_half",)),
        Mutant("for ever", "sums.py", "    return a / 2", "    while True:\n        pass", ("test_sums.py",)),
        Mutant("twice", "sums.py", "return", "yield", ("test_sums.py",)),
        Mutant("no module", "sums.py", "def half(", "def hal(", ("test_sums.py",)),
    ]
    assert not check(tree, tried, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    told = {name: text for name, _, text in (line.partition(": ") for line in lines)}
    assert told["difference"].startswith("caught by test_sums.py::test_total (")
    assert told["product"].startswith("caught by test_sums.py::test_total (")
    assert told["third"].startswith("SURVIVED (")
    assert told["for ever"].startswith("caught by test_sums.py::test_half (")
    assert told["twice"].startswith("BROKEN: twice: 'return' stands 2 times in sums.py")
    assert told["no module"].startswith("BROKEN: pytest ended with status 2:")
    assert lines[-1] == "3 of 6 mutants caught"
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"root"}


# Blank lines of the context stand without their blank, which git accepts.
PATCH = """\
{tests}
What goes wrong for the user.

diff --git a/sums.py b/sums.py
--- a/sums.py
+++ b/sums.py
@@ -1,5 +1,5 @@
 def {function}(a, b):
-    return a + b
+    return a - b


 def half(a):
"""


def test_patches_are_tried_like_mutants_also_inside_a_repository(tree, tmp_path, capsys):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    texts = {
        "caught": PATCH.format(tests="tests: tests/test_sums.py::test_half tests/test_sums.py", function="total"),
        "survives": PATCH.format(tests="tests: tests/test_sums.py::test_half", function="total"),
        "stale": PATCH.format(tests="tests: tests/test_sums.py", function="sum"),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.patch").write_text(text)
    before = (tree / "sums.py").read_text()
    assert not check(tree, [Patch(tmp_path / f"{name}.patch") for name in texts], tmp_path)
    caught, survives, stale, count = capsys.readouterr().out.splitlines()
    assert caught.startswith("caught: caught by test_sums.py::test_total (")
    assert survives.startswith("survives: SURVIVED (")
    assert stale.startswith("stale: BROKEN: stale: error: patch failed: sums.py:1")
    assert count == "1 of 3 mutants caught"
    assert (tree / "sums.py").read_text() == before
    (tmp_path / "nameless.patch").write_text(PATCH.format(tests="", function="total"))
    with pytest.raises(ValueError, match=r"nameless.patch:1: names no test: write tests: tests/FILE.py::NAME"):
        _ = Patch(tmp_path / "nameless.patch").tests


def test_all_caught_is_success_and_tests_that_fail_before_show_nothing(tree, capsys):
    good = Mutant("product", "sums.py", "a + b", "a * b", ("test_sums.py",))
    assert check(tree, [good])
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 mutants caught"
    (tree / "sums.py").write_text((tree / "sums.py").read_text().replace("a / 2", "a / 2 + 1"))
    assert not check(tree, [good])
    assert capsys.readouterr().out == "nothing was changed yet and test_sums.py::test_half fails\n"
