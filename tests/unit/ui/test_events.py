import contextlib
import shutil
import threading

import httpx
import pytest
from helpers.pages import campaign, client_of, evaluation, row

from retrain.files import append_jsonl, read_json, write_json
from retrain.serving.listening import HttpServer, listening_socket
from retrain.ui.context import ApiContext
from retrain.ui.events import changes, snapshot
from retrain.ui.library import Library
from retrain.ui.places import Places
from retrain.ui.server import app_of


@pytest.fixture
def library(tmp_path):
    campaign(tmp_path / "one", state="running")
    return Library(Places([tmp_path / "one"]), fresh_s=-1.0)


def test_a_new_comparison_is_told_and_made_when_its_files_change(library, tmp_path):
    context, run = ApiContext.over(library), tmp_path / "one/runs/grpo+none_s1"

    def finding():
        context.findings.comparison(library.home("one"), 60.0)
        return context.findings.last(library.home("one"))

    first = finding()
    append_jsonl(run / "metrics.jsonl", [row(6)])  # no comparison reads it
    assert finding() is first
    seen = snapshot(context, "one")
    append_jsonl(run / "evals.jsonl", [evaluation(6, 0.5)])
    assert finding() is not first
    found = changes(library, seen, snapshot(context, "one"))
    assert {"place": "one", "what": ["comparison"]} in found
    run_changes = next(each for each in found if each["place"] == "one/runs/grpo+none_s1")
    assert "evals" in run_changes["what"]
    manifest = read_json(tmp_path / "one/manifest.json")
    for key, value in (("interim", {"seeds": [1]}), ("declared", {"margin": 0.1}), ("notes", ["repeated"])):
        before = context.findings.signature(library.home("one"))
        write_json(tmp_path / "one/manifest.json", manifest := manifest | {key: value})
        assert context.findings.signature(library.home("one")) != before
    shutil.rmtree(run)
    found = changes(library, seen, snapshot(context, "one"))
    assert any(each["place"] == "one/runs/grpo+none_s1" for each in found)


@pytest.mark.parametrize("most", [0, 1])
def test_too_many_listeners_are_refused(monkeypatch, tmp_path, most):
    monkeypatch.setattr("retrain.ui.events.MOST_LISTENERS", most)
    client = client_of(campaign(tmp_path / "one"), closing=lambda: True)
    for _ in range(2):  # one after the other: a listener that has gone makes room
        answer = client.get("/api/events")
        assert answer.status_code == (200 if most else 503)
        assert answer.text == "retry: 2000\n\n" if most else "close some" in answer.text


def test_a_page_hears_a_row_over_http(tmp_path):
    home = campaign(tmp_path / "one", state="running")
    with listening_socket("127.0.0.1", 0) as bound:
        port, ready = bound.getsockname()[1], threading.Event()
        url = f"http://127.0.0.1:{port}"
        app = app_of(Library(Places([home])), port=port, closing=lambda: server.should_exit)
        server = HttpServer(app, ready.set)
        server.capture_signals = contextlib.nullcontext  # not the main thread
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        assert ready.wait(30)
        heard = []
        try:
            with httpx.stream("GET", f"{url}/api/events", params={"at": "one"}, timeout=30) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert "content-encoding" not in answer.headers
                for line in answer.iter_lines():
                    heard.append(line)
                    if line.startswith("retry"):
                        append_jsonl(home / "runs/grpo+none_s1/metrics.jsonl", [row(6)])
                    if '"metrics"' in line:
                        break
            assert heard[-2] == "event: changed"
        finally:
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive()
