import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from helpers.campaigns import run_cli
from helpers.pages import campaign

from retrain.ui.server import STATIC, static_version

ROOT = Path(__file__).parents[2]


@contextmanager
def typed(*arguments):
    """The process of a command, and the first line that it prints; stopped as Ctrl-C stops it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": "/nonexistent/cache"}
    command = [sys.executable, "-m", "retrain", "ui", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        process.error = error


def test_it_serves_its_page_and_ends_with_ctrl_c(tmp_path):
    home = campaign(tmp_path / "one")
    with typed(home, "--port", "0") as (process, line):
        assert line.startswith("retrain ui at http://127.0.0.1:")
        with httpx.Client(base_url=line.split()[-1]) as client:
            assert client.get("/api/places").json()["places"][0]["place"] == "one"
            assert client.get("/metrics/one?key=loss").headers["content-type"].startswith("text/html")
            files = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()]
            assert len(files) > 20
            for name in files:  # for ever, under its version
                answer = client.get(f"/static/{static_version()}/{name}")
                assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True), name
                assert answer.content == (STATIC / name).read_bytes()
            assert client.get(f"/static/{files[0]}").headers["cache-control"] == "no-cache"
            for name in ("../server.py", "%2e%2e/server.py", "..%2fserver.py", "/etc/passwd", "app.js%00", ""):
                assert client.get(f"/static/{name}").status_code == 404, name
            with client.stream("GET", "/api/events") as answer:  # a page that stays open
                assert answer.status_code == 200
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 0
    assert process.error == ""


@pytest.mark.parametrize("given", ["nowhere", "file", "one"])
def test_mistakes_are_lines_with_what_to_type(tmp_path, given):
    """No directory, a file, and a port that is in use."""
    (tmp_path / "file").write_text("")
    campaign(tmp_path / "one")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = run_cli("ui", tmp_path / given, "--port", listener.getsockname()[1])
    assert (result.exit_code, result.stdout, "type" in result.stderr) == (2, "", True)
    assert isinstance(result.exception, SystemExit)


def test_another_address_has_a_token(tmp_path):
    with typed(campaign(tmp_path / "one"), "--port", "0", "--host", "0.0.0.0") as (_, line):
        url = httpx.URL(line.split()[-1])
        assert url.host == socket.gethostname()
        token, here = url.params["token"], f"http://127.0.0.1:{url.port}"
        assert len(token) >= 32
        assert httpx.get(f"{here}/api/places").status_code == 401
        with httpx.Client(follow_redirects=True) as client:
            assert client.get(f"{here}/", params={"token": token}).status_code == 200
            assert client.get(f"{here}/api/places").status_code == 200
