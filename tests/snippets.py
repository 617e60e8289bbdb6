"""The fenced blocks of the documentation."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[Any]:
    """Every fenced block whose info string begins with ``language``, named by page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1].split()[:1] == [language]:
                line = text.count("\n", 0, match.start()) + 1
                yield pytest.param(match[2], id=f"{page.name}:{line}")
