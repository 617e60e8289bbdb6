import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.campaigns import FENCE, ROOT

from retrain.models.directory import find_file

CHECKOUTS = ROOT / "build" / "start"
TYPED = re.compile(r"make demo$|source |pip install |python \w+\.py$|retrain (init|check|explain|try|train)\b")
NAMED = re.compile(r"# (\w+\.(?:py|toml))\n")
SHORT = " --set campaign.max_steps=1 --set evaluation.problems=8"
"""For campaigns that take long; ``make demo`` trains the short one as it is."""


def commands(page: str) -> Iterator[str]:
    """What to type, line by line; no training of a model that is not on this machine."""
    for match in FENCE.finditer((ROOT / page).read_text(encoding="utf-8")):
        for line in match[2].splitlines() if match[1] == "bash" else ():
            if not TYPED.match(line):
                continue
            if trained := re.match(r"retrain train (campaigns/)?(\w+\.toml)", line):
                shipped = ROOT / "campaigns" / trained[2]
                if shipped.is_file():
                    campaign = tomllib.loads(shipped.read_text(encoding="utf-8"))
                    if find_file(campaign["model"]["model"], "config.json") is None:
                        continue
                line += SHORT if trained[1] else ""
            yield line


def write_named_files(page: str, directory: Path) -> None:
    """Write the blocks of a page that begin with a comment naming their file."""
    for match in FENCE.finditer((ROOT / page).read_text(encoding="utf-8")):
        if name := NAMED.match(match[2]):
            (directory / name[1]).write_text(match[2], encoding="utf-8")


def checkout(name: str) -> Path:
    """A copy of the files that are or would be under version control."""
    copy = CHECKOUTS / name
    shutil.rmtree(copy, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for path in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (ROOT / path).is_file():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, copy / path)
    return copy


@pytest.mark.skipif(not os.environ.get("RETRAIN_START"), reason="installs everything: make test-start")
@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_the_commands_of_a_page_work_in_a_fresh_checkout(page):
    typed = list(commands(page))
    for command in ("make demo", "pip install", "retrain init", "retrain check", "retrain explain", "retrain train"):
        assert any(line.startswith(command) for line in typed), command
    copy = checkout(Path(page).stem)
    write_named_files(page, copy)
    mine = ("MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHONPATH", "RETRAIN")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    done = subprocess.run(["bash", "-exc", "\n".join(typed)], cwd=copy, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, "the last command of the output above"
    shutil.rmtree(copy)
