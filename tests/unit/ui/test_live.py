import json
import shutil
import threading
import time

import pytest
from helpers.pages import OTHER, RUN, campaign, client_of, get, record, row

from retrain.files import append_jsonl, read_json, read_jsonl, write_json
from retrain.records.columns import ColumnWriter
from retrain.ui.library import Library
from retrain.ui.places import Places

# Endpoints that read rows of numbers and settings, and those that read rollouts and times.
ROWS = {
    "/api/places": {}, "/api/campaign": {"at": "one", "wait_ms": 2_000}, "/api/metrics": {"at": "one"},
    "/api/curves": {"at": "one", "key": "mean_reward"}, "/api/columns": {"at": "one", "key": "mean_reward"},
    "/api/notes": {"at": "one"}, "/api/log": {"at": RUN}, "/api/compare": {"a": RUN, "b": OTHER},
    "/api/why": {"at": RUN, "key": "kl"}, "/api/lora": {"at": "one"}, "/api/run": {"at": RUN}, "/api/runs": {"at": RUN},
}  # fmt: skip
SAMPLES = {
    "/api/places": {}, "/api/timeline": {"at": RUN}, "/api/histogram": {"at": RUN, "metric": "reward"},
    "/api/iterations": {"at": RUN}, "/api/rollouts": {"at": RUN, "sort": "reward"},
    "/api/rollout": {"at": RUN, "index": 1}, "/api/problems": {"at": "one"}, "/api/problem": {"at": "one", "id": "p1"},
    "/api/prompt": {"a": RUN, "b": OTHER},
}  # fmt: skip
SAMPLED = ("iterations.jsonl", "timing_spans.jsonl", "emergence/*", "tokens_*", "*_rollout_summaries.jsonl")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return record(tmp_path_factory.mktemp("made"))


@pytest.fixture
def home(tmp_path, made):
    """A campaign whose runs have rollouts."""
    home = campaign(tmp_path / "one")
    for run in (home / "runs").iterdir():
        for path in (path for pattern in SAMPLED for path in made.glob(pattern)):
            target = run / path.relative_to(made)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    return home


def ask(client, endpoints, *statuses):
    """Ask all these endpoints; each answer is JSON with one of these statuses, or a whole one; return them by path."""
    answers = {}
    for path, query in endpoints.items():
        answer = client.get(path, params=query)
        assert answer.status_code in (200, *statuses), (path, answer.text)
        answers[path] = answer.json()
        assert answer.status_code == 200 or set(answers[path]) == {"error"}
    return answers


def rewards(client, place=RUN):
    (run,) = get(client, "/api/columns", at=place, key="mean_reward", points=10_000)["runs"]
    return run["columns"]["mean_reward"]["y"]


DEEP = b"[" * 100_000 + b"\n"
ODD_SAMPLES = [
    None, b"", b"\0" * 1000, b"{", b"[1, 2]\n", DEEP,
    b'{"steps": [1], "turns": [1], "lines": [1], "split": "train", "iteration": 0, "name": "heldout", "step": 0}\n',
    b'{"steps": 1, "tags": 5, "problem_id": [], "step": [], "group_idx": {}, "total_reward": "x", "name": "heldout"}\n',
    b'{"trajectory_metrics": [], "steps": [{"ac_len": "x", "logs": 7}], "iteration": 1e400, "split": 1, "name": "a"}\n',
    b'{"total_reward": 1' + b"0" * 400 + b', "tags": [{}], "lines": [-1, 1e300], "split": "train", "iteration": 0,'
    b' "name": "train_iteration_000000", "rollouts": "many", "step": -1}\n',
]  # fmt: skip
ODD_ROWS = [
    None, b"", b"\0" * 1000, b"{", b"[1, 2]\n", b"\xff\xfe\n", DEEP, b'{"step": "x"}\n',
    b'{"step": 1e400, "mean_reward": {}}\n', b'{"training": 5, "ranges": [], "base": 7, "evaluation": null}',
]  # fmt: skip
ODD_MANIFESTS = [
    b"", b"{", b"[]", DEEP, b'{"runs": 5}', b'{"runs": [{"run_id": "../x", "path": ".."}]}',
    b'{"runs": [{"run_id": "x", "path": "/etc", "label": "x", "state": "done", "step": 1}]}',
]  # fmt: skip


def replaced(path, contents):
    """Put each of these in the place of the file, or nothing for None."""
    for content in contents:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        yield content


@pytest.mark.parametrize(("name", "recorded"), [
    ("iterations.jsonl", True), ("timing_spans.jsonl", True), ("tokens_000000.safetensors", True),
    ("emergence/evaluations.jsonl", False), ("emergence/generations.jsonl", False),
    ("train_iteration_000000_rollout_summaries.jsonl", False),
])  # fmt: skip
def test_damaged_rollouts_cost_a_sentence(home, tmp_path, name, recorded):
    run = home / "runs/grpo+none_s1"
    if not recorded:  # what then remains is read
        for path in run.glob("tokens_*"):
            path.unlink()
        if name != "emergence/generations.jsonl":
            (run / "iterations.jsonl").unlink()
    client = client_of(home)
    answers = ask(client, SAMPLES, 400, 404)
    if recorded:
        assert answers["/api/rollout"]["pieces"]
        assert answers["/api/problems"]["problems"]
        assert answers["/api/prompt"]["a"]["pieces"]
    for _ in replaced(run / name, ODD_SAMPLES):
        answers = ask(client, SAMPLES, 400, 404)
        assert str(tmp_path) not in json.dumps(answers)
        assert answers["/api/places"]["places"][0]["runs"]["planned"] == 4


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "evals.jsonl", "config.json", "notes.jsonl", "run.log", "checkpoints.jsonl"]
)
def test_a_damaged_file_stops_nothing(home, name):
    client = client_of(home)
    for _ in replaced(home / "runs/grpo+none_s1" / name, ODD_ROWS):
        answers = ask(client, ROWS, 404)
        assert answers["/api/places"]["places"][0]["runs"]["planned"] == 4
        assert len(rewards(client, OTHER)) == 6


def test_a_damaged_manifest_says_so(home):
    client = client_of(home)
    for content in replaced(home / "manifest.json", ODD_MANIFESTS):
        (place,) = get(client, "/api/places")["places"]
        assert place["missing"][0].startswith("one/manifest.json "), content
        assert str(home) not in json.dumps(ask(client, ROWS | SAMPLES, 400, 404))


def test_rows_that_are_torn_cut_and_written_otherwise(home):
    client, path = client_of(home), home / "runs/grpo+none_s1/metrics.jsonl"
    text = json.dumps(row(6))
    with open(path, "a") as file:
        file.write(text[:40])
    assert rewards(client) == [0, 0.1, 0.2, 0.3, 0.4, 0.5]  # a torn row is not shown until it is whole
    with open(path, "a") as file:
        file.write(text[40:] + "\n")
    assert len(rewards(client)) == 7
    rows = read_jsonl(path)[:3]
    path.unlink()
    append_jsonl(path, [*rows, row(3, mean_reward=9.0)])
    assert rewards(client) == [0, 0.1, 0.2, 9]
    path.write_text("")
    assert rewards(client) == []
    ask(client, ROWS, 404)


def test_a_campaign_that_ends_is_taken_away_and_comes_back(tmp_path):
    home = campaign(tmp_path / "logs/one", state="running")
    client = client_of(tmp_path / "logs")
    assert get(client, "/api/places")["places"][0]["state"] == "interrupted"  # no process holds the lock
    manifest = read_json(home / "manifest.json")
    for entry in manifest["runs"]:
        entry["state"] = "done"
    write_json(home / "manifest.json", manifest)
    assert get(client, "/api/places")["places"][0]["state"] == "done"
    comparison = get(client, "/api/campaign", at="logs/one", wait_ms=20_000)["comparison"]
    assert comparison["conditions"][1]["pairs"] == 2
    shutil.move(home, tmp_path / "away")
    assert get(client, "/api/places")["places"] == []
    for path, query in (ROWS | SAMPLES).items():
        moved = {name: f"logs/{value}" if name in ("at", "a", "b") else value for name, value in query.items()}
        get(client, path, 200 if path == "/api/places" else 404, **moved)
    shutil.move(tmp_path / "away", home)
    assert rewards(client, f"logs/{RUN}")[-1] == 0.5


@pytest.fixture
def cached(monkeypatch):
    """Columns are cached from a thousand bytes on."""
    monkeypatch.setattr("retrain.ui.numbers.CACHED_FROM", 1_000)


def until_read(client):
    while get(client, "/api/places")["reading"]["of"]:
        time.sleep(0.01)


def test_columns_of_a_long_run_are_made_in_the_cache_and_nothing_beside_it(tmp_path, cached):
    home = campaign(tmp_path / "one", seeds=1, steps=300)
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    client = client_of(home, cache=tmp_path / "cache")
    until_read(client)
    assert rewards(client)[-1] == 29.9
    ask(client, ROWS, 400, 404)
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before
    assert len(list((tmp_path / "cache").glob("*.f32"))) == 2
    library = Library(Places([home]), tmp_path / "cache", fresh_s=-1.0)
    assert [len(library.numbers(run)) for run in library.home("one").runs] == [300, 300]  # at once, as they are cached
    again = client_of(home, cache=tmp_path / "cache")
    assert rewards(again) == rewards(client)
    append_jsonl(home / "runs/grpo+none_s1/metrics.jsonl", [row(step) for step in range(300, 500)])
    assert len(rewards(client)) == len(rewards(again)) == 500
    (tmp_path / "file").write_text("")
    without = client_of(home, cache=tmp_path / "file")  # a cache that cannot be written
    until_read(without)
    assert len(rewards(without)) == 500


def test_a_long_run_without_columns_is_read_beside_what_is_asked(tmp_path, cached, monkeypatch):
    home = campaign(tmp_path / "one", seeds=1, steps=200)
    go_on, follow = threading.Event(), ColumnWriter.follow
    monkeypatch.setattr(ColumnWriter, "follow", lambda self: go_on.wait(60) and follow(self))
    client = client_of(home, cache=tmp_path / "cache")
    (run,) = get(client, "/api/columns", at=RUN, key="mean_reward", x="tokens")["runs"]
    assert (run["reading"], run["rows"], run["x"]) == (True, 0, [])
    ask(client, ROWS, 400, 404)
    assert get(client, "/api/places")["reading"]["of"] > 0
    go_on.set()
    until_read(client)
    assert len(rewards(client)) == 200


def test_a_log_is_read_from_its_end(home):
    path = home / "runs/grpo+none_s1/run.log"
    lines = [f"2026-01-01 00:00:00 info    line {n} {'x' * (n % 300)}" for n in range(3_000)]
    path.write_text("\n".join(lines) + "\nhalf a line")
    client, shown, before = client_of(home), [], -1
    while before is not None:
        page = get(client, "/api/log", at=RUN, before=before)
        shown, before = [line["text"] for line in page["lines"]] + shown, page["before"]
    assert shown == [*lines, "half a line"]
    page = get(client, "/api/log", at=RUN, search="LINE 299")
    assert [line["text"].split()[4] for line in page["lines"]] == ["299", *map(str, range(2990, 3000))]
    assert (page["before"], page["lines"][0]["level"]) == (None, "info")
