import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import FENCE, PAGES, blocks

from retrain.cli.app import FUNCTIONS, command_of
from retrain.config import load
from retrain.config.comparing import is_comparison_file, load_comparison

ROOT = Path(__file__).parents[2]


def command_lines() -> Iterator[Any]:
    """Every line of a ``bash`` block, and every ``retrain …`` between backquotes that is a whole command."""
    for block in blocks("bash"):
        for line in block.values[0].splitlines():
            for part in line.split("#")[0].split("&&"):
                if part.strip():
                    yield pytest.param(part.strip().removeprefix("$ "), id=f"{block.id} {part.strip()}")


def load_any(file: Path, sets: Sequence[str] = ()) -> None:
    """Load a file of runs or a comparison file. Raises ConfigError for its mistakes."""
    load_comparison(file, sets) if is_comparison_file(file) else load(file, sets)


def test_snippets_load(tmp_path):
    for text in blocks("python"):
        ast.parse(text.values[0], text.id)
    file = tmp_path / "snippet.toml"
    for text in blocks("toml"):
        file.write_text(text.values[0], encoding="utf-8")
        load_any(file)


def test_the_oracles_that_are_named_exist():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"`(test_\w+)`", text)) <= defined, page
        for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("line", list(command_lines()))
def test_commands_exist(line):
    words = shlex.split(line)
    words[0] = words[0].removeprefix("build/browser/bin/")  # what make test-ui makes
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "retrain":
        if words[1:] != ["--version"]:
            given = command_of(words[1]).make_context(words[1], words[2:]).params
            if str(given.get("file") or "").startswith(("campaigns/", "docs/examples/")):
                load_any(ROOT / given["file"], given.get("sets") or ())
    elif words[0] == "python":
        named = {match[1] for block in blocks("python") if (match := re.match(r"# (\S+\.py)\n", block.values[0]))}
        assert words[1].startswith("-") or words[1] in named or (ROOT / words[1]).is_file()
    elif words[0] == "source":
        assert words[1:] == [".venv/bin/activate"]  # what the Makefile makes
    else:
        assert words[0] in {"git", "pip", "cd", ".", "tar", "torchrun"}


def test_every_command_and_option_is_documented():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in FUNCTIONS:
        assert f"`retrain {name}" in text, name
        row = next(line for line in text.splitlines() if line.startswith(f"| `retrain {name}"))
        for parameter in command_of(name).params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert f"`{option}" in row, f"retrain {name} {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_makefile_knows_how_to_make_every_target():
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for target in targets:
        command = ["make", "--dry-run", "--always-make", target]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""  # no rule takes the place of another
        assert [line for line in done.stdout.splitlines() if line and not line.startswith("make:")], target
