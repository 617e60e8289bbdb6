"""Names of directories in addresses: what lies inside, and that nothing else is found."""

from __future__ import annotations

import os

import pytest
from foreign_cases import cookbook_run
from ui_cases import campaign, client_of, get

from retrain.errors import UsageError
from retrain.ui.answers import Refusal
from retrain.ui.places import Places


def test_roots_have_names_of_their_own(tmp_path):
    for name in ("a/logs", "b/logs", "c/logs"):
        (tmp_path / name).mkdir(parents=True)
    places = Places([tmp_path / "a/logs", tmp_path / "b/logs", tmp_path / "c/logs", tmp_path / "a/logs"])
    assert list(places.roots) == ["logs", "logs-2", "logs-3"]
    (tmp_path / "b/logs/x").mkdir()
    assert places.find("logs-2/x") == tmp_path / "b/logs/x"
    assert places.place_of(tmp_path / "b/logs/x") == "logs-2/x"
    assert places.place_of(tmp_path / "b/logs") == "logs-2"


def test_a_root_inside_of_another_names_what_is_below_it(tmp_path):
    (tmp_path / "logs/one").mkdir(parents=True)
    places = Places([tmp_path / "logs", tmp_path / "logs/one"])
    assert places.place_of(tmp_path / "logs/one") == "one"


@pytest.mark.parametrize("given", ["none", "file"])
def test_what_is_no_directory_is_refused_with_the_line_to_type(tmp_path, given):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="type: retrain ui logs"):
        Places([tmp_path / given])


HOSTILE = [
    "",
    "/",
    ".",
    "..",
    "logs/..",
    "logs/../secret",
    "logs/./x",
    "logs//x",
    "other",
    "logs/x\0",
    "/etc",
    "logs/link",
    "logs/linked/secret",
    "logs/file",
    "logs/" + "a" * 300,
    "logs/" + "a/" * 2500,
    "~",
    "logs\\x",
]


@pytest.fixture
def roots(tmp_path):
    secret, logs = tmp_path / "secret", tmp_path / "logs"
    campaign(secret / "inner")
    logs.mkdir()
    (logs / "link").symlink_to(secret)
    (logs / "linked").symlink_to(tmp_path)
    (logs / "file").write_text("no directory")
    return logs


@pytest.mark.parametrize("place", HOSTILE)
def test_what_leads_out_is_nothing(roots, place):
    with pytest.raises(Refusal) as refused:
        Places([roots]).find(place)
    assert refused.value.status == 404


def test_files_outside_over_links_and_pipes_are_none(roots, tmp_path):
    places = Places([roots])
    (roots / "inside").symlink_to("file")
    (roots / "out").symlink_to(tmp_path / "secret/inner/manifest.json")
    os.mkfifo(roots / "pipe")
    assert places.file(roots, "inside") == roots / "file"
    assert [places.file(roots, name) for name in ("out", "pipe", "none", "link/inner/manifest.json", "a\0b")] == [
        None
    ] * 5
    assert places.inside(roots / "none")
    assert not places.inside(roots / "out")


@pytest.mark.parametrize("place", [*HOSTILE[3:], "logs/link/inner", "logs%2f..%2fsecret", "%2e%2e/secret"])
@pytest.mark.parametrize(
    "path", ["/api/campaign", "/api/lora", "/api/timeline", "/api/log", "/api/notes", "/api/events"]
)
def test_no_endpoint_reads_outside(roots, path, place):
    get(client_of(roots), path, 400 if len(place) > 4096 or "\0" in place else 404, at=place)


def test_a_link_that_leads_out_hides_the_run_that_has_it(tmp_path):
    logs = tmp_path / "logs"
    home = campaign(logs / "one")
    outside = tmp_path / "outside.jsonl"
    outside.write_text('{"step": 0, "stolen": 1}\n')
    odd = home / "runs/grpo+none_s1"
    (odd / "metrics.jsonl").unlink()
    (odd / "metrics.jsonl").symlink_to(outside)
    client = client_of(logs)
    (place,) = get(client, "/api/places")["places"]
    assert place["runs"]["planned"] == 3
    assert place["missing"]
    assert "stolen" not in str(get(client, "/api/metrics", at="logs/one"))
    found = get(client, "/api/campaign", at="logs/one", wait_ms=20_000)
    assert "grpo+none_s1" not in [run["run_id"] for run in found["runs"]]
    get(client, "/api/columns", 404, at="logs/one/runs/grpo+none_s1", key="stolen")


def test_a_pipe_in_the_place_of_a_file_does_not_stop_the_server(tmp_path):
    home = campaign(tmp_path / "logs/one")
    for name in ("metrics.jsonl", "notes.jsonl"):
        path = home / "runs/grpo+none_s2" / name
        path.unlink()
        os.mkfifo(path)
    client = client_of(tmp_path / "logs")
    assert get(client, "/api/places")["places"][0]["runs"]["planned"] == 3
    get(client, "/api/notes", at="logs/one")


@pytest.mark.parametrize("name", ["evals.jsonl", "metrics.f32"])
def test_a_link_that_leads_out_of_another_tools_run_is_not_read(tmp_path, name):
    outside = tmp_path / "outside.jsonl"
    outside.write_text('{"step": 0, "eval/stolen": 1}\n')
    run = cookbook_run(tmp_path / "logs" / "math")
    (run / name).symlink_to(outside)
    client = client_of(tmp_path / "logs")
    assert "stolen" not in client.get("/api/metrics", params={"at": "logs/math"}).text
    get(client, "/api/columns", 404, at="logs/math", key="step")
