"""Who may ask, and for what."""

from __future__ import annotations

import pytest
from ui_cases import HOST, campaign, client_of, get

from retrain.ui.guard import name_in


@pytest.fixture
def logs(tmp_path):
    return campaign(tmp_path / "one")


@pytest.mark.parametrize("host", ["127.0.0.1:8571", "localhost:9000", "[::1]:8571", "127.0.0.1", "LOCALHOST:1"])
def test_this_machine_s_names_are_ours(logs, host):
    assert client_of(logs).get("/api/places", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example:8571",
        "localhost.evil:8571",
        "",
        "10.0.0.1",
        "localhost:8571@evil",
        "[::1",
        "::1",
        "[::1]8571",
        "[::1]:x",
        "[127.0.0.1",
        "127.0.0.1:",
        "localhost:x",
    ],
)
def test_other_names_are_refused(logs, host):
    client = client_of(logs)
    for path in ("/api/places", "/", "/static/main.js"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 403, host
        assert "another name" in answer.json()["error"]


def test_names_without_ports():
    assert [name_in(host) for host in ("A.b:80", "a", "[::1]:2", "a:b", "a.:1", "[::1")] == [
        "a.b", "a", "::1", "", "a", "",
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
@pytest.mark.parametrize("path", ["/api/places", "/", "/api/nothing", "/api/columns"])
def test_it_only_reads(logs, method, path):
    answer = client_of(logs).request(method, path)
    assert answer.status_code == 405
    assert "only reads" in answer.json()["error"]


def test_every_answer_has_the_headers(logs):
    client = client_of(logs)
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


def test_a_view_is_posted_by_this_page_or_a_program(logs):
    client = client_of(logs)
    ours = {"Origin": "http://127.0.0.1:8571", "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, ours):
        answer = client.post("/api/view", json={"url": "/metrics/one?key=loss"}, headers=headers)
        assert answer.json() == {"url": "/metrics/one?key=loss", "pages": 0}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ],
)
def test_a_view_is_not_posted_by_others(logs, headers):
    given = {"Content-Type": "application/json"} | headers
    answer = client_of(logs).post("/api/view", content=b'{"url": "/"}', headers=given)
    assert answer.status_code in (403, 415)
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_events_are_not_listened_to_by_others(logs, headers):
    client = client_of(logs)
    assert client.get("/api/events?at=nowhere", headers=headers).status_code == 403
    ours = {"Origin": "http://127.0.0.1:8571", "Sec-Fetch-Site": "same-origin"}
    for allowed in ({}, ours):
        assert client.get("/api/events?at=nowhere", headers=allowed).status_code == 404  # no such place


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"/"',
        b'{"url": 5}',
        b'{"url": "//evil.example"}',
        b'{"url": "http://evil"}',
        b'{"url": ""}',
        b'{"url": "javascript:x"}',
        b'{"url": "/\\\\evil"}',
        b'{"url": "/metrics/a b"}',
        b'{"url": "/metrics/a\\nb"}',
        b'{"url": "/api/places"}',
        b'{"url": "/metrics/' + b"a" * 9000 + b'"}',
        b"[" * 10_000,
        b" " * 20_000,
        b"\xff",
    ],
)
def test_a_view_is_an_address_of_this_server(logs, body):
    answer = client_of(logs).post("/api/view", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413)
    assert set(answer.json()) == {"error"}


def test_a_token_in_the_address_becomes_a_cookie(logs):
    client = client_of(logs, host="0.0.0.0", port=8571, token="open-sesame")
    assert client.get("/api/places").status_code == 401
    assert client.get("/", params={"token": "wrong"}).status_code == 401
    answer = client.get("/metrics/one?key=a%2Fb&token=open-sesame", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/metrics/one?key=a%2Fb"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert get(client, "/api/places")["places"]
    fresh = client_of(logs, host="0.0.0.0", token="open-sesame")
    assert fresh.get("/api/places", headers={"Authorization": "Bearer open-sesame"}).status_code == 200
    away = fresh.get(f"{HOST}//evil.example/?token=open-sesame", follow_redirects=False)
    assert away.headers["location"].startswith("/evil.example")


def test_a_public_server_answers_to_numbers_and_its_own_name_alone(logs):
    import socket

    client = client_of(logs, host="0.0.0.0", token="t")
    token = {"Authorization": "Bearer t"}
    for host, status in (("10.1.2.3:8571", 200), (socket.gethostname(), 200), ("rebound.example", 403)):
        assert client.get("/api/places", headers={"Host": host} | token).status_code == status


@pytest.mark.parametrize(
    "query",
    [
        "at=" + "a" * 5000,
        "at=%00",
        "x=" + "a" * 17_000,
        "at=one&key=a&points=" + "9" * 200,
        "at=one&key=a&points=1e3",
        "at=one&key=a&points=-5",
        "at=one&key=a&x=moon",
        "at=one&key=a&since=%D9%A3",
        "at=one&" + "&".join(f"key={i}" for i in range(40)),
        "at=%ff%fe&key=a",
        "key=a",
    ],
)
def test_odd_queries_are_one_line_errors(logs, query):
    answer = client_of(logs).get(f"/api/columns?{query}")
    assert answer.status_code in (400, 404, 414)
    assert set(answer.json()) == {"error"}
    assert len(answer.text) < 500
