"""The soaks of ``make test-soak``, for a few kills each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_a_short_soak(tmp_path):
    """``python -m tests.soak`` for a few kills: the long one is run by hand."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.soak", "--kills", "3", "--minutes", "1", "--seed", "5", "--dir", tmp_path]
    done = subprocess.run(
        [str(part) for part in command], cwd=root, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wrong"] == []
    assert report["kills"] >= 1


@pytest.mark.timeout(600)
def test_a_short_soak_of_workers(tmp_path):
    """``python -m tests.soak --executor processes`` for a few kills: the long one is run by hand."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.soak", "--executor", "processes", "--kills", "3", "--seed", "5"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)], cwd=root, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["wrong"], report["runs"]) == ([], 8 * report["campaigns"])
    assert report["kills"] >= 3
