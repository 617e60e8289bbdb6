import os
import socket

import pytest
from helpers.pages import HOST, campaign, client_of, cookbook_run, get

from retrain.errors import UsageError
from retrain.ui.answers import ApiError
from retrain.ui.places import Places

OURS = {"Origin": "http://127.0.0.1:8571", "Sec-Fetch-Site": "same-origin"}
FOREIGN = [
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://127.0.0.1:9", "Sec-Fetch-Site": "same-site"},
]  # fmt: skip


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return campaign(tmp_path_factory.mktemp("logs") / "one", seeds=1)


@pytest.fixture(scope="module")
def client(logs):
    return client_of(logs)


def test_only_this_machine_s_names_are_answered(client):
    for host in ("127.0.0.1:8571", "localhost:9000", "[::1]:8571", "127.0.0.1", "LOCALHOST:1"):
        assert client.get("/api/places", headers={"Host": host}).status_code == 200
    others = "evil.example 127.0.0.1.evil.example:8571 localhost.evil:8571 10.0.0.1 localhost:8571@evil"
    broken = "[::1 ::1 [::1]8571 [::1]:x [127.0.0.1 127.0.0.1: localhost:x"
    for host in ("", *others.split(), *broken.split()):
        for path in ("/api/places", "/", "/static/main.js"):
            answer = client.get(path, headers={"Host": host})
            assert (answer.status_code, "another name" in answer.json()["error"]) == (403, True), host


def test_it_only_reads(client):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        for path in ("/api/places", "/", "/api/nothing"):
            answer = client.request(method, path)
            assert (answer.status_code, "only reads" in answer.json()["error"]) == (405, True)


def test_every_answer_has_the_headers(client):
    answers = [client.get(path) for path in ("/", "/api/places", "/api/nothing", "/metrics/one", "/static/none")]
    answers.append(client.get("/", headers={"Host": "evil"}))
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers


def test_events_are_heard_by_this_page_or_a_program(client):
    for headers in ({}, OURS):
        assert client.get("/api/events?at=nowhere", headers=headers).status_code == 404  # no such place
    for headers in FOREIGN:
        assert client.get("/api/events?at=nowhere", headers=headers).status_code == 403


def test_a_token_in_the_address_becomes_a_cookie(logs):
    client = client_of(logs, host="0.0.0.0", port=8571, token="open-sesame")
    assert client.get("/api/places").status_code == 401
    assert client.get("/", params={"token": "wrong"}).status_code == 401
    answer = client.get("/metrics/one?key=a%2Fb&token=open-sesame", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/metrics/one?key=a%2Fb")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert get(client, "/api/places")["places"]
    fresh = client_of(logs, host="0.0.0.0", token="open-sesame")
    away = fresh.get(f"{HOST}//evil.example/?token=open-sesame", follow_redirects=False)
    assert away.headers["location"].startswith("/evil.example")
    # A public server answers to numbers and its own name alone:
    bearer = {"Authorization": "Bearer open-sesame"}
    for host, status in (("10.1.2.3:8571", 200), (socket.gethostname(), 200), ("rebound.example", 403)):
        assert fresh.get("/api/places", headers={"Host": host} | bearer).status_code == status


@pytest.mark.parametrize("query", [
    "at=" + "a" * 5000, "at=%00", "x=" + "a" * 17_000, "at=one&key=a&points=" + "9" * 200, "at=one&key=a&points=1e3",
    "at=one&key=a&points=-5", "at=one&key=a&x=moon", "at=one&key=a&since=%D9%A3", "at=%ff%fe&key=a", "key=a",
    "at=one&" + "&".join(f"key={i}" for i in range(40)),
])  # fmt: skip
def test_odd_queries_are_one_line_errors(client, query):
    answer = client.get(f"/api/columns?{query}")
    assert answer.status_code in (400, 404, 414)
    assert set(answer.json()) == {"error"}
    assert len(answer.text) < 500


def test_an_address_that_is_no_page_is_told_to_people_by_the_page_and_to_programs_in_json(client):
    person = client.get("/nothing", headers={"Accept": "text/html,*/*"})
    assert (person.status_code, "<main" in person.text) == (404, True)
    for path, accept in (("/nothing", "application/json"), ("/api/nothing", "text/html"), ("/static/x", "text/html")):
        answer = client.get(path, headers={"Accept": accept})
        assert (answer.status_code, list(answer.json())) == (404, ["error"])


def test_roots_have_names_of_their_own(tmp_path):
    for name in ("a/logs", "b/logs/x", "c/logs"):
        (tmp_path / name).mkdir(parents=True)
    places = Places([tmp_path / "a/logs", tmp_path / "b/logs", tmp_path / "c/logs", tmp_path / "a/logs"])
    assert list(places.roots) == ["logs", "logs-2", "logs-3"]
    assert places.find("logs-2/x") == tmp_path / "b/logs/x"
    assert places.location_of(tmp_path / "b/logs/x") == "logs-2/x"
    with pytest.raises(UsageError, match="type: retrain ui logs"):
        Places([tmp_path / "none"])


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
        with pytest.raises(ApiError) as refused:
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
    shown = get(client, "/api/campaign", at="logs/one", wait_ms=20_000)
    assert shown["fresh"]  # the comparison was made: its thread does not wait at a pipe
    assert "grpo+none_s1" not in [run["run_id"] for run in shown["runs"]]
    get(client, "/api/columns", 404, at="logs/one/runs/grpo+none_s1", key="stolen")
    get(client, "/api/notes", at="logs/one")


def test_a_link_that_leads_out_of_another_tools_run_is_not_read(tmp_path):
    outside = tmp_path / "outside.jsonl"
    outside.write_text('{"step": 0, "eval/stolen": 1}\n')
    (cookbook_run(tmp_path / "logs" / "math") / "evals.jsonl").symlink_to(outside)
    client = client_of(tmp_path / "logs")
    assert "stolen" not in client.get("/api/metrics", params={"at": "logs/math"}).text
    get(client, "/api/columns", 404, at="logs/math", key="step")
