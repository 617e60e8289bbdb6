"""One adapter of every condition: analysed and verified beside the first, and made up for after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from record_cases import config
from toymodels import qwen3_directory
from typer.testing import CliRunner

from retrain.campaign.judging.report import write_report
from retrain.campaign.running.controller import launch, resume
from retrain.cli import app
from retrain.config import load
from retrain.errors import UsageError
from retrain.files import read_json, write_json
from retrain.record.observer import NullObserver

TOML = """
[campaign]
seeds = [1]
max_steps = 1
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[[campaign.conditions]]
advantage_mode = "maxrl"
transform_mode = "none"
[model]
model = "{folder}/model"
lora_rank = 2
[training]
batch_size = 2
group_size = 2
max_tokens = 4
lr = 0.05
[evaluation]
problems = 2
[squeeze]
runs = "one per condition"
compress_to = 1
"""


def written(folder: Path) -> Path:
    """The file of a campaign of two conditions, with its model."""
    qwen3_directory(folder / "model", ["12+34=? the answer is \\boxed{46}"])
    (folder / "c.toml").write_text(TOML.format(folder=folder))
    return folder / "c.toml"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    path = written(tmp_path_factory.mktemp("squeezed"))
    assert launch(load(path), path.parent / "out", NullObserver()).exit_status == 0
    return path.parent / "out"


def test_every_condition_has_an_analysis_of_its_own(home):
    manifest = read_json(home / "manifest.json")
    first, others = manifest["squeeze"], manifest["squeezes"]
    assert (first["run_id"], list(others)) == ("grpo+none_s1", ["maxrl+none"])
    assert others["maxrl+none"]["run_id"] == "maxrl+none_s1"
    for place, report in (("squeeze", first), ("squeeze/maxrl+none", others["maxrl+none"])):
        assert read_json(home / place / "analysis.json") == report
        assert read_json(home / place / "verification.json") == report["verified"]
        assert [row["rank"] for row in report["verified"]["ranks"]] == [1]
        assert (home / place / "rank_1" / "adapter_model.safetensors").is_file()
    html = write_report(home).read_text()
    assert "<h3>grpo+none_s1</h3>" in html
    assert "<h3>maxrl+none_s1</h3>" in html
    told = CliRunner().invoke(app, ["explain", str(home.parent / "c.toml")]).output
    assert "after the first run of each condition" in told


@pytest.fixture
def out(home, tmp_path) -> Path:
    """Its directory as a process has left it that was killed after the first analysis."""
    folder = shutil.copytree(home, tmp_path / "out")
    manifest = read_json(folder / "manifest.json")
    del manifest["squeezes"]
    write_json(folder / "manifest.json", manifest)
    shutil.rmtree(folder / "squeeze/maxrl+none")
    return folder


def test_what_a_killed_process_left_out_is_made_up_for(home, out):
    """Also where the first analysis was written by a release that did not say whose it is."""
    before = read_json(out / "manifest.json")
    old = {key: value for key, value in before["squeeze"].items() if key not in ("label", "run_id")} | {"mark": 1}
    write_json(out / "manifest.json", before | {"squeeze": old})
    assert resume(out, NullObserver()).exit_status == 0
    after = read_json(out / "manifest.json")
    assert after["squeeze"] == old  # not made again
    assert list(after["squeezes"]) == ["maxrl+none"]
    rows = read_json(home / "manifest.json")["squeezes"]["maxrl+none"]["rows"]
    assert after["squeezes"]["maxrl+none"]["rows"] == rows  # as without the kill


def test_an_analysis_that_fails_is_told_once_and_tried_again_by_the_next_process(out):
    told = []

    class Heard(NullObserver):
        def message(self, text: str, level: str = "info") -> None:
            if "squeeze" in text:
                told.append(text)

    final = out / "runs/maxrl+none_s1/final"
    final.rename(out / "aside")
    shutil.copytree(out / "aside", final)
    (final / "adapter_model.safetensors").write_bytes(b"no adapter")
    assert resume(out, Heard()).exit_status == 0
    assert [text.split(":")[0] for text in told] == ["squeeze analysis of maxrl+none_s1 failed"]
    shutil.rmtree(final)
    (out / "aside").rename(final)
    assert resume(out, NullObserver()).exit_status == 0
    assert list(read_json(out / "manifest.json")["squeezes"]) == ["maxrl+none"]


def test_one_directory_has_room_for_one_adapter():
    with pytest.raises(UsageError, match="room for one adapter"):
        config(squeeze={"runs": "one per condition", "output_path": "small"})
