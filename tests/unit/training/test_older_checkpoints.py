"""A run that version 0.4 (commit c85a8ab) began and was killed at its third step, continued by this version."""

import tarfile
from pathlib import Path

import torch
from helpers.campaigns import run_cli
from safetensors.torch import load_file

from retrain.files import read_jsonl

ARCHIVE = Path(__file__).with_name("version_0.4.tar.xz")


def test_a_run_of_version_0_4_is_continued_from_its_checkpoint(tmp_path: Path):
    """Tokens and weights are compared by the golden runs alone: on another processor they differ by rounding."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    killed = tmp_path / "killed"
    (killed / ".lease").unlink()  # of another machine: 20 s are spent on watching whether it is renewed
    (run,) = (killed / "runs").iterdir()
    before = read_jsonl(run / "metrics.jsonl")[:2]
    result = run_cli("resume", killed, "--accept-changes")
    assert result.exit_code == 0, result.output
    rows = read_jsonl(run / "metrics.jsonl")
    assert rows[:2] == before
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["episode"] for row in rows] == [16, 32, 48, 64]  # the sums of the checkpoint
    assert [row["sepa_lambda"] for row in rows] == [0.0, 0.0, 0.01, 0.02]  # the gate that step 0 opened
    files = (run / at / "adapter_model.safetensors" for at in ("checkpoints/step_000002", "final"))
    saved, final = map(load_file, files)
    assert any(not torch.equal(saved[name], final[name]) for name in saved)
