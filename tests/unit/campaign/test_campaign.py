import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.campaigns import StopAfter, campaign, completions_of, continue_training, rows_of, runs_of, timeless, train

from retrain.files import read_json, read_jsonl, write_json
from retrain.ownership import claim
from retrain.records.observer import NullObserver

UNVERIFIED = 'squeeze.verify="off"'


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("campaign")
    train(campaign(folder, model), folder / "out", UNVERIFIED)
    return folder / "out"


def test_a_campaign_ends_with_everything_written(finished):
    manifest = read_json(finished / "manifest.json")
    assert [run["state"] for run in manifest["runs"]] == ["done"] * 4
    assert manifest["comparison"]["conditions"][1]["pairs"] == 2
    assert "cannot tell" in manifest["comparison"]["conditions"][1]["verdict"]
    assert manifest["squeeze"]["recommended_rank"] in range(1, 5)
    for run in manifest["runs"]:
        folder = finished / run["path"]
        rows = rows_of(folder)
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert all(abs(row["val/ratio"] - 1) < 1e-5 for row in rows if row["val/ratio"] is not None)
        assert any(row["optim/grad_norm"] for row in rows)
        assert [row["name"] for row in read_jsonl(folder / "checkpoints.jsonl")] == ["000002", "000004", "final"]
        assert [row["step"] for row in read_jsonl(folder / "evals.jsonl")] == [0, 2, 4]
        assert (len(completions_of(folder)), len(read_jsonl(folder / "emergence" / "steps.jsonl"))) == (4 * 12, 4)
    texts = {run.name: [row["completion"] for row in completions_of(run)[:12]] for run in (finished / "runs").iterdir()}
    assert texts["grpo+none_s1"] == texts["rloo+gtpo_hicra_placebo_s1"] != texts["grpo+none_s2"]
    configs = [(run["seed"], read_json(finished / run["path"] / "config.json")) for run in manifest["runs"]]
    initial = {(seed, config["initial_adapter"]) for seed, config in configs}
    assert len(initial) == 2  # the seed decides it, and no condition


def test_interrupted_and_resumed_equals_uninterrupted(finished, model, tmp_path):
    again = tmp_path / "out"
    train(campaign(tmp_path, model), again, UNVERIFIED, observer=StopAfter(9), status=130)
    assert {run["state"] for run in read_json(again / "manifest.json")["runs"]} == {"interrupted"}
    continue_training(again)
    for run in (finished / "runs").iterdir():
        mine = again / "runs" / run.name
        assert timeless(mine / "metrics.jsonl") == timeless(run / "metrics.jsonl")
        for name in ("final/adapter_model.safetensors", "emergence/generations.jsonl", "notes.jsonl"):
            assert (mine / name).read_bytes() == (run / name).read_bytes(), name


def test_a_crash_after_the_last_checkpoint_is_finished_by_resume(finished, tmp_path):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    manifest = read_json(out / "manifest.json")
    manifest["runs"][1]["state"] = "running"
    write_json(out / "manifest.json", manifest)
    folder = out / manifest["runs"][1]["path"]
    shutil.rmtree(folder / "final")
    lines = (folder / "checkpoints.jsonl").read_text().splitlines(keepends=True)
    (folder / "checkpoints.jsonl").write_text("".join(lines[:-1]))
    metrics = (folder / "metrics.jsonl").read_bytes()
    continue_training(out)
    assert read_json(out / "manifest.json")["runs"][1]["state"] == "done"
    assert (folder / "final" / "adapter_model.safetensors").is_file()
    assert (folder / "checkpoints.jsonl").read_text() == "".join(lines)
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def test_a_failing_run_leaves_the_others_alone(model, tmp_path):
    """One whose reward raises at every step, and one whose records cannot be written."""
    out, ends = tmp_path / "out", []
    blocked = out / "runs/grpo+none_s1/emergence"

    class Plants(NullObserver):
        def plan(self, specs):
            claim(blocked.parent, claim(out).at("runs/grpo+none_s1"))
            blocked.write_text("a file where a folder must be")

        def run_finished(self, spec, status, message=""):
            ends.append(spec.run_id)

    path = campaign(tmp_path, model, condition='reward = {custom_function = "fragile"}')
    sets = [UNVERIFIED, "evaluation.at_start=false"]
    train(path, out, *sets, observer=Plants(), status=1)
    assert len(ends) == len({*ends}) == 4  # the end of each once
    runs = {run["run_id"]: run for run in read_json(out / "manifest.json")["runs"]}
    assert runs.pop("grpo+none_s2")["state"] == "done"
    assert {run["state"] for run in runs.values()} == {"failed"}
    assert re.search(r"emergence/\w+\.jsonl cannot be written: file exists", runs.pop("grpo+none_s1")["reason"])
    for run in runs.values():
        assert "3 steps in a row" in run["reason"]
        assert "this grader is broken" in run["reason"]
        assert [row["mean_reward"] for row in rows_of(out / run["path"])] == [None, None]
    logs = [out / run["log"] for run in runs.values()]
    before = [log.read_text().count("Traceback") for log in logs]
    assert min(before) > 0
    train(path, out, *sets, status=1)
    assert [log.read_text().count("Traceback") for log in logs] == before
    blocked.unlink()
    continue_training(out, retry_failed=True, status=1)
    assert [log.read_text().count("Traceback") for log in logs] > before
    states = {run["run_id"]: run["state"] for run in read_json(out / "manifest.json")["runs"]}
    assert states["grpo+none_s1"] == "done"


def test_parameters_of_a_condition_reach_its_runs_in_a_cohort(mixed_campaign, tmp_path):
    train(mixed_campaign / "mixed.toml", tmp_path / "alone", "campaign.lanes=1")
    together, alone = runs_of(mixed_campaign / "out"), runs_of(tmp_path / "alone")
    for key, run in together.items():
        changed = key[0] > 0
        rows, completions, rows_alone = rows_of(run), completions_of(run), rows_of(alone[key])
        assert (rows[0]["cohort_size"], rows_alone[0]["cohort_size"]) == (4, 1)
        assert read_json(run / "config.json")["training"]["temperature"] == (0.7 if changed else 1.0)
        ratios = [row["val/ratio"] for row in rows if row["val/ratio"] is not None]
        assert max(abs(ratio - 1) for ratio in ratios) < 1e-5
        assert {row["optim/lr"] for row in rows} == {0.002 if changed else 0.01}
        assert len(completions) == 3 * (2 * 6 if changed else 3 * 4)
        assert max(one["num_tokens"] for one in completions) == (5 if changed else 10)
        assert read_json(run / "final/adapter_config.json")["r"] == (2 if changed else 4)
        assert [one["completion"] for one in completions] == [one["completion"] for one in completions_of(alone[key])]
        for name in ("loss", "optim/grad_norm"):
            values = ([row[name] or 0.0 for row in each] for each in (rows, rows_alone))
            np.testing.assert_allclose(*values, rtol=1e-6, atol=1e-9)
