"""The documents say what is: every snippet loads, every command and option exists, every link leads somewhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from snippets import FENCE, PAGES, blocks

from retrain.cli import app
from retrain.config import load

ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_command(app)


def command_lines() -> Iterator[Any]:
    """Every line of a ``bash`` block, and every ``retrain …`` between backquotes that is a whole command."""
    for block in blocks("bash"):
        for line in block.values[0].splitlines():
            for part in line.split("#")[0].split("&&"):
                if part.strip():
                    yield pytest.param(part.strip().removeprefix("$ "), id=f"{block.id} {part.strip()}")


@pytest.mark.parametrize("language", ["toml", "python", "bash", "text"])
def test_there_are_snippets_to_test(language):
    assert len(list(blocks(language))) > 1


@pytest.mark.parametrize("text", list(blocks("toml")))
def test_toml_snippets_load(text, tmp_path):
    file = tmp_path / "snippet.toml"
    file.write_text(text, encoding="utf-8")
    load(file)


def test_the_oracles_that_are_named_exist():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))
    named = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named |= set(re.findall(r"`(test_\w+)`", text))
        for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / path).is_file(), path
    assert len(named) > 20
    assert named <= defined


@pytest.mark.parametrize("text", list(blocks("python")))
def test_python_snippets_parse(text):
    ast.parse(text)


@pytest.mark.parametrize("line", list(command_lines()))
def test_commands_exist(line):
    words = shlex.split(line)
    words[0] = words[0].removeprefix("build/browser/bin/")  # what make test-ui makes
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "retrain":
        if words[1:] == ["--version"]:
            return
        command = GROUP.commands[words[1]]
        command.make_context(words[1], words[2:])
    elif words[0] == "python":
        assert words[1].startswith("-") or (ROOT / words[1]).is_file()
    elif words[0] == "source":
        assert words[1:] == [".venv/bin/activate"]  # what the Makefile makes
    else:
        assert words[0] in {"git", "pip", "cd", ".", "tar", "torchrun"}


def test_every_command_and_option_is_documented():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, command in GROUP.commands.items():
        assert f"`retrain {name}" in text, name
        row = next(line for line in text.splitlines() if line.startswith(f"| `retrain {name}"))
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert f"`{option}" in row, f"retrain {name} {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


def test_the_readme_s_tree_is_the_tree():
    """Every path of the README's tree exists, and every module and top-level directory stands in it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = next(match[2] for match in FENCE.finditer(readme) if match[1] == "text tree")
    named, parents = set(), []
    for line in tree.splitlines():
        match = re.match(r"( *)(\S+)", line)
        assert match
        depth = len(match[1]) // 2
        parents = [*parents[:depth], match[2]]
        path = "".join(parents)
        assert (ROOT / path).exists(), path
        named.add(path.rstrip("/"))
    modules = {path.name for path in (ROOT / "retrain").iterdir() if not path.name.startswith("_")} - {"py.typed"}
    assert modules <= {path.removeprefix("retrain/") for path in named}


def test_makefile_help_names_every_target():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()) - {"help"}
    told = set(re.findall(r"^# make ([\w-]+)|make ([\w-]+)(?: [A-Z]+=[A-Z]+)?  ", text, re.MULTILINE))
    assert targets <= {name for pair in told for name in pair}


PHONY = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("target", PHONY)
def test_makefile_knows_how_to_make_every_target(target):
    given = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    words = ["make", "--dry-run", "--always-make", target]
    done = subprocess.run(words, cwd=ROOT, env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no rule takes the place of another
    assert [line for line in done.stdout.splitlines() if line and not line.startswith("make:")]
