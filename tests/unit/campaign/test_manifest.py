from __future__ import annotations

import threading

from toymodels import campaign_head

from retrain.campaign.planning import manifest as manifests
from retrain.campaign.planning.manifest import MANIFEST, Manifest
from retrain.campaign.planning.plan import plan
from retrain.config import load
from retrain.files import dumps, read_json

REASONS = (None, 'a "b"\n\tc', "new\nline \u2028 ä", float("nan"))


def entries(count: int) -> list[dict]:
    return [{"run_id": f"a_s{i}", "label": "a", "seed": i, "state": "pending", "reason": None, "step": 0, "path": "é"}
            for i in range(count)]  # fmt: skip


def test_what_was_changed_is_in_the_file_whoever_writes_meanwhile(tmp_path):
    with Manifest(tmp_path, {"runs": entries(40), "cohorts": []}) as manifest:
        for number in range(200):
            name = f"a_s{number % 40}"
            manifest.step(name, number)
            if number % 3 == 0:
                manifest.update(name, state="running", worker=f"{number} cpu", reason=REASONS[number % 4])
            if number % 5 == 0:
                manifest.note(cohorts=[[name]], lanes=number)
            if number % 7 == 0:
                manifest.update(name, without=["worker"], state="done")
                assert "worker" not in manifest.run(name)
        manifest.files.flush()
        assert (tmp_path / MANIFEST).read_text() == dumps(manifest.content, indent=2) + "\n"


def test_one_write_takes_all_that_came_while_another_was_under_way(tmp_path, monkeypatch):
    """The number of writes follows from how quick the disk is, not from the number of events."""
    under_way, go_on, written = threading.Event(), threading.Event(), []

    def slow(path, text):
        written.append(text)
        under_way.set()
        assert go_on.wait(10)
        path.write_text(text)

    monkeypatch.setattr(manifests, "write_text", slow)
    with Manifest(tmp_path, {"runs": entries(3)}) as manifest:
        manifest.update("a_s0", state="running")
        assert under_way.wait(10)
        for number in range(1000):
            manifest.update("a_s1", step=number)
        go_on.set()
    assert len(written) == 2
    assert read_json(tmp_path / MANIFEST)["runs"][1]["step"] == 999


def test_runs_added_to_a_plan_are_known_by_name(tmp_path):
    path = tmp_path / "more.toml"
    for seeds in ([1], [1, 2]):
        path.write_text(campaign_head(("grpo", "none"), ("rloo", "none"), seeds=seeds, max_steps=1))
        specs = plan(load(path))
        with Manifest.open(tmp_path / "out", "more", specs) as manifest:
            manifest.update(specs[-1].run_id, state="running")
    assert [run["state"] for run in read_json(tmp_path / "out" / MANIFEST)["runs"]] == ["pending", "running"] * 2
