"""Fixtures that several files of the system suite share."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_cases import LOSSES
from slurm_cases import Standin


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A directory with the loss functions of ``rank_cases``."""
    folder = tmp_path_factory.mktemp("losses")
    (folder / "ranklosses.py").write_text(LOSSES)
    return folder


@pytest.fixture
def standin(tmp_path_factory, monkeypatch):
    """Programs in the place of Slurm's."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    played = Standin(tmp_path_factory.mktemp("slurm"), monkeypatch)
    yield played
    played.close()
