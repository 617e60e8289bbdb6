"""The record of runs while it is written: what the file says, what an event costs, whatever the number of runs."""

from __future__ import annotations

import random
import threading

from toymodels import campaign_head

from retrain.campaign.planning import manifest as manifests
from retrain.campaign.planning import pieces
from retrain.campaign.planning.manifest import MANIFEST, Manifest
from retrain.campaign.planning.plan import plan
from retrain.config import load
from retrain.files import dumps, read_json


def entries(count: int) -> list[dict]:
    return [{"run_id": f"a_s{i}", "label": "a", "seed": i, "state": "pending", "reason": None, "step": 0, "path": "é"}
            for i in range(count)]  # fmt: skip


def test_the_text_in_pieces_is_the_json_of_the_whole():
    draw = random.Random(0)
    content = {"format": 1, "runs": entries(5), "name": "new\nline \u2028 ä", "empty": {}, "none": []}
    mine, known = pieces.Pieces(), {run["run_id"]: run for run in content["runs"]}
    mine.change({key: value for key, value in content.items() if key != "runs"}, known)
    for number in range(50):
        assert mine.text(content, known) == dumps(content, indent=2) + "\n"
        run = draw.choice(content["runs"])
        run.update(
            state=draw.choice(["running", "done"]), step=number, reason=draw.choice([None, 'a "b"\n\tc', float("nan")])
        )
        content[f"fact{number % 7}"] = {"deep": [[1, None], {"a": [draw.random(), "x\ny"]}]}
        mine.change({f"fact{number % 7}": content[f"fact{number % 7}"]}, {run["run_id"]: run})
    assert mine.text({"runs": []}, []) == dumps({"runs": []}, indent=2) + "\n"
    assert mine.text({"unheard": 1, "runs": []}, []) == dumps({"runs": []}, indent=2) + "\n"


def test_what_was_changed_is_in_the_file_whoever_writes_meanwhile(tmp_path):
    with Manifest(tmp_path, {"runs": entries(40), "cohorts": []}) as manifest:
        for number in range(400):
            name = f"a_s{number % 40}"
            manifest.step(name, number)
            if number % 3 == 0:
                manifest.update(name, state="running", worker=f"{number} cpu")
            if number % 5 == 0:
                manifest.note(cohorts=[[name]], lanes=number)
            if number % 7 == 0:
                manifest.update(name, without=["worker"], state="done")
                assert "worker" not in manifest.run(name)
        manifest.content.pop("lanes")
        manifest.note(slots=2)
        manifest.files.flush()
        assert read_json(tmp_path / MANIFEST) == manifest.content
        assert (tmp_path / MANIFEST).read_text() == dumps(manifest.content, indent=2) + "\n"
        assert "lanes" not in manifest.content
        assert manifest.run("a_s0") is manifest.content["runs"][0]


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


def test_an_event_makes_one_run_into_text_whatever_the_number_of_runs(tmp_path, monkeypatch):
    made = []

    def counted(value, indent=None):
        made.append(value)
        return dumps(value, indent)

    with Manifest(tmp_path, {"runs": entries(300), "sequential": {"values": []}}) as manifest:
        manifest.write()
        manifest.files.flush()
        monkeypatch.setattr(pieces, "dumps", counted)
        manifest.update("a_s7", state="running")
        manifest.files.flush()
    assert [value["run_id"] for value in made if isinstance(value, dict)] == ["a_s7"]
    assert [value for value in made if not isinstance(value, dict)] == ["updated", manifest.content["updated"]]


def test_runs_added_to_a_plan_are_known_by_name(tmp_path):
    path = tmp_path / "more.toml"
    for seeds in ([1], [1, 2]):
        path.write_text(campaign_head(("grpo", "none"), ("rloo", "none"), seeds=seeds, max_steps=1))
        specs = plan(load(path))
        with Manifest.open(tmp_path / "out", "more", specs) as manifest:
            manifest.update(specs[-1].run_id, state="running")
    assert [run["state"] for run in read_json(tmp_path / "out" / MANIFEST)["runs"]] == ["pending", "running"] * 2
