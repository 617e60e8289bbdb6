"""``retrain ui`` as a person types it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from ui_cases import campaign

ROOT = Path(__file__).parents[2]


@contextmanager
def typed(*arguments, cache=None):
    """The process of a command, and the first line that it prints; stopped as Ctrl-C stops it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache or "/nonexistent/cache")}
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


def test_it_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    home = campaign(tmp_path / "one")
    with typed(home, "--port", "0") as (process, line):
        assert line.startswith("retrain ui at http://127.0.0.1:")
        url = line.split()[-1]
        assert httpx.get(f"{url}api/places").json()["places"][0]["place"] == "one"
        page = httpx.get(f"{url}metrics/one?key=loss")
        assert page.headers["content-type"].startswith("text/html")
        with httpx.stream("GET", f"{url}api/events") as answer:  # a page that stays open
            assert answer.status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
    assert process.error == ""


def test_every_file_of_the_page_is_served_for_ever_under_its_version(tmp_path):
    from retrain.ui.server import STATIC, static_version

    with (
        typed(campaign(tmp_path / "one"), "--port", "0") as (_, line),
        httpx.Client(base_url=line.split()[-1]) as client,
    ):
        files = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()]
        assert len(files) > 20
        for name in files:
            kept = client.get(f"/static/{static_version()}/{name}")
            assert (kept.status_code, "immutable" in kept.headers["cache-control"]) == (200, True), name
            assert kept.content == (STATIC / name).read_bytes()
            if name.endswith(".js"):
                assert kept.headers["content-type"].startswith("text/javascript")
        assert client.get(f"/static/{files[0]}").headers["cache-control"] == "no-cache"
        for name in ("../server.py", "%2e%2e/server.py", "..%2fserver.py", "/etc/passwd", ".hidden", "app.js%00", ""):
            assert client.get(f"/static/{name}").status_code == 404, name


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


@pytest.mark.parametrize("given", ["nowhere", "file", "one"])
def test_mistakes_are_lines_with_what_to_type(tmp_path, given):
    (tmp_path / "file").write_text("")
    campaign(tmp_path / "one")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.listen()
        with typed(tmp_path / given, "--port", taken.getsockname()[1]) as (process, line):
            assert line == ""
            assert process.wait(60) == 2
    assert "type" in process.error
    assert "Traceback" not in process.error


def test_nothing_of_it_is_imported_by_other_commands():
    code = (
        "from retrain.cli import app\nimport sys\napp(['--help'], standalone_mode=False)\n"
        "found = {'starlette', 'uvicorn', 'jinja2', 'retrain.ui.server', 'numpy'} & set(sys.modules)\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named(monkeypatch):
    from retrain.commands import ui
    from retrain.errors import MissingExtra

    monkeypatch.setattr(ui, "is_installed", lambda module: module != "uvicorn")
    with pytest.raises(MissingExtra, match=r"pip install '\.\[ui\]'"):
        ui.ui([Path()])
