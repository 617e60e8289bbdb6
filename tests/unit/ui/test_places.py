"""Names of directories in addresses: what lies inside, and that nothing else is read."""

from __future__ import annotations

import os

import pytest
from ui_cases import campaign, client_of, cookbook_run, get

from retrain.errors import UsageError
from retrain.ui.answers import Refusal
from retrain.ui.places import Places


def test_roots_have_names_of_their_own(tmp_path):
    for name in ("a/logs", "b/logs/x", "c/logs"):
        (tmp_path / name).mkdir(parents=True)
    places = Places([tmp_path / "a/logs", tmp_path / "b/logs", tmp_path / "c/logs", tmp_path / "a/logs"])
    assert list(places.roots) == ["logs", "logs-2", "logs-3"]
    assert places.find("logs-2/x") == tmp_path / "b/logs/x"
    assert places.place_of(tmp_path / "b/logs/x") == "logs-2/x"
    assert places.place_of(tmp_path / "b/logs") == "logs-2"
    inner = Places([tmp_path / "b/logs", tmp_path / "b/logs/x"])
    assert inner.place_of(tmp_path / "b/logs/x") == "x"  # a root inside of another names what is below it
    (tmp_path / "file").write_text("")
    for name in ("none", "file"):
        with pytest.raises(UsageError, match="type: retrain ui logs"):
            Places([tmp_path / name])


OUTSIDE = [
    "logs/..", "logs/../secret", "logs/./x", "logs//x", "other", "logs/x\0", "/etc", "logs/link", "logs/linked/secret",
    "logs/file", "logs/" + "a" * 300, "logs/" + "a/" * 2500, "logs\\x",
]  # fmt: skip


def test_nothing_outside_is_found_or_read_by_an_endpoint(tmp_path):
    campaign(tmp_path / "secret" / "inner", seeds=1)
    (roots := tmp_path / "logs").mkdir()
    (roots / "link").symlink_to(tmp_path / "secret")
    (roots / "linked").symlink_to(tmp_path)
    (roots / "file").write_text("no directory")
    places, client = Places([roots]), client_of(roots)
    for place in ("", "/", ".", "..", "~", *OUTSIDE):
        with pytest.raises(Refusal) as refused:
            places.find(place)
        assert refused.value.status == 404
    for place in (*OUTSIDE, "logs/link/inner", "logs%2f..%2fsecret", "%2e%2e/secret"):
        for name in ("campaign", "lora", "timeline", "log", "notes", "events"):
            get(client, f"/api/{name}", 400 if len(place) > 4096 or "\0" in place else 404, at=place)
    (roots / "inside").symlink_to("file")
    (roots / "out").symlink_to(tmp_path / "secret/inner/manifest.json")
    os.mkfifo(roots / "pipe")
    assert places.file(roots, "inside") == roots / "file"
    for name in ("out", "pipe", "none", "link/inner/manifest.json", "a\0b"):
        assert places.file(roots, name) is None


def test_a_link_that_leads_out_or_a_pipe_hides_the_run_that_has_it(tmp_path):
    logs, outside = tmp_path / "logs", tmp_path / "outside.jsonl"
    home = campaign(logs / "one")
    outside.write_text('{"step": 0, "stolen": 1}\n')
    linked = home / "runs/grpo+none_s1/metrics.jsonl"
    linked.unlink()
    linked.symlink_to(outside)
    piped = [home / "runs/grpo+none_s2" / name for name in ("metrics.jsonl", "notes.jsonl")]
    for path in piped:
        path.unlink()
        os.mkfifo(path)  # it would stop whoever opens it
    client = client_of(logs)
    (place,) = get(client, "/api/places")["places"]
    assert place["runs"]["planned"] == 2
    assert place["missing"]
    assert "stolen" not in str(get(client, "/api/metrics", at="logs/one"))
    runs = get(client, "/api/campaign", at="logs/one", wait_ms=20_000)["runs"]
    assert "grpo+none_s1" not in [run["run_id"] for run in runs]
    get(client, "/api/columns", 404, at="logs/one/runs/grpo+none_s1", key="stolen")
    get(client, "/api/notes", at="logs/one")


@pytest.mark.parametrize("name", ["evals.jsonl", "metrics.f32"])
def test_a_link_that_leads_out_of_another_tools_run_is_not_read(tmp_path, name):
    outside = tmp_path / "outside.jsonl"
    outside.write_text('{"step": 0, "eval/stolen": 1}\n')
    (cookbook_run(tmp_path / "logs" / "math") / name).symlink_to(outside)
    client = client_of(tmp_path / "logs")
    assert "stolen" not in client.get("/api/metrics", params={"at": "logs/math"}).text
    get(client, "/api/columns", 404, at="logs/math", key="step")
