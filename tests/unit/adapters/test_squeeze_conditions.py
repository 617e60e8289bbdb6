"""One adapter of every condition: analysed and verified beside the first, and made up for after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from record_cases import config
from toymodels import qwen3_directory
from typer.testing import CliRunner

from retrain.campaign.adapters import squeeze
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


class Killed(BaseException):
    """As if the process had ended here."""


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


def test_what_a_killed_process_left_out_is_made_up_for(home, tmp_path, monkeypatch):
    """Also where the first analysis was written by a release that did not say whose it is."""
    out, compressed, real = tmp_path / "out", [], squeeze.compress_adapter
    path = written(tmp_path)

    def compress(adapter: Path, *given: Any) -> Path:
        compressed.append(adapter.parent.name)
        return real(adapter, *given)

    def dies_at_the_second(adapter: Path, *given: Any) -> Path:
        if adapter.parent.name == "maxrl+none_s1":
            raise Killed
        return compress(adapter, *given)

    monkeypatch.setattr(squeeze, "compress_adapter", dies_at_the_second)
    with pytest.raises(Killed):
        launch(load(path), out, NullObserver())
    before = read_json(out / "manifest.json")
    assert [run["state"] for run in before["runs"]] == ["done", "done"]
    assert "squeezes" not in before
    old = {key: value for key, value in before["squeeze"].items() if key not in ("label", "run_id")} | {"mark": 1}
    write_json(out / "manifest.json", before | {"squeeze": old})
    compressed.clear()
    monkeypatch.setattr(squeeze, "compress_adapter", compress)
    assert resume(out, NullObserver()).exit_status == 0
    after = read_json(out / "manifest.json")
    assert after["squeeze"] == old  # not made again
    assert set(compressed) == {"maxrl+none_s1"}
    assert list(after["squeezes"]) == ["maxrl+none"]
    rows = read_json(home / "manifest.json")["squeezes"]["maxrl+none"]["rows"]
    assert after["squeezes"]["maxrl+none"]["rows"] == rows  # as without the kill


def test_an_analysis_that_fails_is_told_once_and_tried_again_by_the_next_process(tmp_path, monkeypatch):
    path, tried, told, real = written(tmp_path), [], [], squeeze.compress_adapter
    path.write_text(path.read_text().replace("max_steps = 1\n", "max_steps = 1\nlanes = 1\n"))

    def fails(adapter: Path, *given: Any) -> Path:
        tried.append(adapter.parent.name)
        raise UsageError("this adapter cannot be compressed")

    class Heard(NullObserver):
        def message(self, text: str, level: str = "info") -> None:
            if "squeeze" in text:
                told.append(text)

    monkeypatch.setattr(squeeze, "compress_adapter", fails)
    assert launch(load(path), tmp_path / "out", Heard()).exit_status == 0
    assert tried == ["grpo+none_s1", "maxrl+none_s1"]  # the first not after the second run again, nor at the end
    assert [text.split(":")[0] for text in told] == [f"squeeze analysis of {name} failed" for name in tried]
    monkeypatch.setattr(squeeze, "compress_adapter", real)
    assert resume(tmp_path / "out", NullObserver()).exit_status == 0
    manifest = read_json(tmp_path / "out" / "manifest.json")
    assert (manifest["squeeze"]["run_id"], list(manifest["squeezes"])) == ("grpo+none_s1", ["maxrl+none"])


def test_one_directory_has_room_for_one_adapter():
    with pytest.raises(UsageError, match="room for one adapter"):
        config(squeeze={"runs": "one per condition", "output_path": "small"})
