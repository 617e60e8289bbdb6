"""Seals of evaluations: edits are named, and a kill is never taken for an edit."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.campaigns import campaign, contents, continue_training, differing, run_cli, train
from helpers.records import seal_of

from retrain.files import read_json, read_jsonl, sha256, write_json
from retrain.records.seals import chained
from retrain.verdicts.pooling import compare_directories

RUN = "grpo+none_s1"


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    """A campaign of four runs with evaluations after 0, 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("sealed")
    train(campaign(folder, model), folder / "out")
    return folder / "out"


def first_rows(path: Path, count: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def remarks(out: Path) -> str:
    report = compare_directories([out])
    text = run_cli("compare", out).output
    assert report["note"] in text.replace("\n", " ")
    return f"{report['note']} {[reason for each in report['conditions'] for reason in each['standing_reasons']]}"


def test_rows_that_are_added_extend_the_hash_without_reading_the_others(finished):
    rows = read_jsonl(finished / "runs" / RUN / "evals.jsonl")
    assert chained(chained("", rows[:2]), rows[2:]) == chained("", rows)
    assert chained("", [row | {"seconds": 9.0} for row in rows]) == chained("", rows)
    digests = {chained("", [rows[k], rows[1 - k]]) for k in (0, 1)} | {chained("", [rows[0] | {"samples": 9}])}
    assert len(digests) == 3
    entries = read_json(finished / "manifest.json")["runs"]
    for entry in entries:
        assert entry["seal"] | {"data": "data"} == seal_of(finished / entry["path"])
        assert (entry["seal"]["evaluations"], entry["seal"]["completions"]) == (3, 15)


@pytest.mark.parametrize(("rows", "sealed"), [(3, 2), (2, 3), (2, 2), (3, 3)])
def test_a_kill_between_row_event_and_manifest_is_no_edit(finished, tmp_path, rows, sealed):
    """The last evaluation's row and the manifest's seal may each be there or not; a resume evaluates again."""
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    manifest = read_json(out / "manifest.json")
    for entry in manifest["runs"]:
        run = out / entry["path"]
        entry.update(state="running", step=3, seal=seal_of(run, sealed) | {"data": entry["seal"]["data"]})
        shutil.rmtree(run / "checkpoints/step_000004")
        shutil.rmtree(run / "final")
        first_rows(run / "metrics.jsonl", 3)
        first_rows(run / "evals.jsonl", rows)
        first_rows(run / "emergence/evaluations.jsonl", 5 * rows)
    write_json(out / "manifest.json", manifest)
    before = remarks(out)
    assert "recorded" not in before
    assert "deviation" not in before
    continue_training(out)
    assert differing(contents(out), contents(finished), runs=4) == []
    assert "deviation" not in remarks(out)


def test_a_run_that_an_earlier_version_began_is_not_sealed_and_says_so_once(finished, tmp_path):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    manifest = read_json(out / "manifest.json")
    for key in ("settings", "data"):
        del manifest["declared"][key]
    for entry in manifest["runs"]:
        del entry["seal"]
        entry.update(state="interrupted", step=2)
        shutil.rmtree(out / entry["path"] / "checkpoints/step_000004")
        saved = out / entry["path"] / "checkpoints/step_000002"
        state = read_json(saved / "state.json")
        del state["recorder"]["sha256"]
        write_json(saved / "state.json", state)
        files = read_json(saved / "manifest.json")
        files["sha256"]["state.json"] = sha256(saved / "state.json")
        write_json(saved / "manifest.json", files)
    write_json(out / "manifest.json", manifest)
    continue_training(out)
    manifest = read_json(out / "manifest.json")
    assert not any("seal" in entry for entry in manifest["runs"])
    assert "settings" not in manifest["declared"]
    found = remarks(out)
    assert found.count("Not sealed: the runs were recorded without hashes") == 1
    assert "deviation" not in found
    row = json.loads((out / "runs" / RUN / "evals.jsonl").read_text().splitlines()[-1])
    path = out / "runs" / RUN / "evals.jsonl"
    path.write_text(path.read_text().replace(json.dumps(row["eval/heldout/correct_rate"]), "0.9"))
    assert f"its completions were graded {100 * row['eval/heldout/correct_rate']:.0f}" in remarks(out)
