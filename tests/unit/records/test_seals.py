"""Seals of evaluations: edits are named, and a kill is never taken for an edit."""

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import campaign, contents, differing, run_cli
from helpers.records import seal_of

from retrain.campaign.controller import launch, resume
from retrain.config import load
from retrain.files import read_json, read_jsonl, sha256, write_json
from retrain.records.observer import NullObserver, SpecLike
from retrain.records.seals import chained
from retrain.verdicts.pooling import compare_directories

RUN = "grpo+none_s1"


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    """A campaign of four runs with evaluations after 0, 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("sealed")
    assert launch(load(campaign(folder, model)), folder / "out", NullObserver()).exit_status == 0
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
    assert resume(out, NullObserver()).exit_status == 0
    assert differing(contents(out), contents(finished), runs=4) == []
    assert "deviation" not in remarks(out)


class KillAt(NullObserver):
    """Ends the process at the n-th call of a method."""

    def __init__(self, name: str, n: int):
        self.name, self.left = name, n

    def _count(self, name: str) -> None:
        self.left -= name == self.name
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluated(self, spec: SpecLike, name: str, row: Mapping[str, Any]) -> None:
        self._count("evaluated")

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        self._count("step")


@pytest.mark.parametrize(("name", "n"), [("evaluated", 3), ("evaluated", 6), ("evaluated", 11), ("step", 7)])
def test_killed_at_an_evaluation_the_seals_are_those_of_a_whole_campaign(finished, model, tmp_path, name, n):
    out = tmp_path / "out"
    child = os.fork()
    if not child:
        launch(load(campaign(tmp_path, model)), out, KillAt(name, n))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert "deviation" not in remarks(out)
    assert resume(out, NullObserver()).exit_status == 0
    assert differing(contents(out), contents(finished), runs=4) == []


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
    assert resume(out, NullObserver()).exit_status == 0
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
