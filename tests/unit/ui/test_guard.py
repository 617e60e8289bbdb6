"""Who may ask, and for what."""

from __future__ import annotations

import gzip
import socket

import pytest
from ui_cases import HOST, campaign, client_of, get

from retrain.record.html import asset
from retrain.ui.server import STATIC

OURS = {"Origin": "http://127.0.0.1:8571", "Sec-Fetch-Site": "same-origin"}
FOREIGN = [
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://127.0.0.1:9", "Sec-Fetch-Site": "same-site"},
]  # fmt: skip
JSON = {"Content-Type": "application/json"}


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


def test_a_view_is_posted_and_events_are_heard_by_this_page_or_a_program(client):
    for headers in ({}, OURS):
        answer = client.post("/api/view", json={"url": "/metrics/one?key=loss"}, headers=headers)
        assert answer.json() == {"url": "/metrics/one?key=loss", "pages": 0}
        assert client.get("/api/events?at=nowhere", headers=headers).status_code == 404  # no such place
    for headers in FOREIGN:
        assert client.get("/api/events?at=nowhere", headers=headers).status_code == 403
    texts = [{"Content-Type": kind} for kind in ("text/plain", "application/x-www-form-urlencoded")]
    for headers, status in [*((JSON | headers, 403) for headers in FOREIGN), *((headers, 415) for headers in texts)]:
        answer = client.post("/api/view", content=b'{"url": "/"}', headers=headers)
        assert (answer.status_code, set(answer.json())) == (status, {"error"})


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"/"', b'{"url": 5}', b'{"url": ""}', b'{"url": "//evil.example"}', b'{"url": "http://evil"}',
     b'{"url": "javascript:x"}', b'{"url": "/\\\\evil"}', b'{"url": "/metrics/a b"}', b'{"url": "/metrics/a\\nb"}',
     b'{"url": "/api/places"}', b'{"url": "/metrics/' + b"a" * 9000 + b'"}', b"[" * 10_000, b" " * 20_000, b"\xff"],
)  # fmt: skip
def test_a_view_is_an_address_of_this_server(client, body):
    answer = client.post("/api/view", content=body, headers=JSON)
    assert answer.status_code in (400, 413)
    assert set(answer.json()) == {"error"}


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


@pytest.mark.parametrize(
    "query",
    ["at=" + "a" * 5000, "at=%00", "x=" + "a" * 17_000, "at=one&key=a&points=" + "9" * 200, "at=one&key=a&points=1e3",
     "at=one&key=a&points=-5", "at=one&key=a&x=moon", "at=one&key=a&since=%D9%A3", "at=%ff%fe&key=a", "key=a",
     "at=one&" + "&".join(f"key={i}" for i in range(40))],
)  # fmt: skip
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


def test_the_files_of_the_page_are_small():
    """As the server sends them: files of 2,000 bytes and more are compressed."""
    files = [path.read_bytes() for path in STATIC.rglob("*") if path.is_file() and path.name != "LICENSE"]
    files += [asset(name).encode() for name in ("base.css", "charts.css")]
    assert sum(len(gzip.compress(data, 3)) if len(data) >= 2_000 else len(data) for data in files) < 250_000
