import shutil
from pathlib import Path

import pytest
from helpers.campaigns import run_cli
from helpers.models import campaign_head
from helpers.pages import client_of, get

from retrain.files import read_json, read_jsonl

FIXTURE = Path(__file__).parents[1] / "fixtures" / "removed_keys"
NOTE = "settings that this version of retrain no longer has are ignored: planning.grams"
FIRST, SECOND = "maxrl+gtpo_hicra", "maxrl+gtpo_hicra~planning.grams=other_grams.toml"


@pytest.fixture
def directory(tmp_path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "old"))


def run(*arguments: str | Path):
    result = run_cli(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr.count(NOTE) == 1, result.stderr
    return result


def test_an_interrupted_campaign_is_resumed(directory):
    run("resume", directory, "--accept-changes")
    manifest = read_json(directory / "manifest.json")
    assert [(entry["label"], entry["state"]) for entry in manifest["runs"]] == [(FIRST, "done"), (SECOND, "done")]
    settings = read_json(directory / "runs" / f"{SECOND}_s1" / "config.json")
    assert settings["planning"] == {"detector": "regex"}
    assert [row["step"] for row in read_jsonl(directory / "runs" / f"{SECOND}_s1" / "metrics.jsonl")] == [0, 1]


def test_every_command_reads_the_directory(directory, tmp_path):
    assert FIRST in run("compare", directory, "--json").stdout
    assert "recommended" in run("squeeze", directory).stdout
    run("squeeze", directory, "--to", "1", "--continue", "1", "--out", tmp_path / "on")
    assert read_json(tmp_path / "on" / "manifest.json")["runs"][0]["state"] == "done"
    client = client_of(directory)
    notes = get(client, "/api/notes", at="old")["notes"]
    assert [note["text"] for note in notes if note["key"] == "removed_keys"] == [NOTE]
    places = [f"old/runs/{label}_s1" for label in (FIRST, SECOND)]
    assert get(client, "/api/compare", a=places[0], b=places[1])["config"]


@pytest.mark.parametrize("name", ['"planning.grams"', "planning_grams", "grams"])
def test_a_condition_with_one_is_told_what_to_use(name, tmp_path):
    (tmp_path / "f.toml").write_text(campaign_head(("grpo", "none")) + f'{name} = "g.toml"\n')
    result = run_cli("check", tmp_path / "f.toml")
    assert result.exit_code == 2
    assert 'files of mined phrases are no longer read: [logging] strategic_grams = ["let me check"]' in result.stderr
