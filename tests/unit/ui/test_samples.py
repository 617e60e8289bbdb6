"""The endpoints of rollouts, tokens, problems and the same prompt twice, over directories that a recorder wrote."""

from __future__ import annotations

import os
import shutil

import pytest
from sampled_cases import record
from ui_cases import client_of

from retrain.files import write_json


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A campaign of two conditions × two seeds."""
    root = tmp_path_factory.mktemp("samples")
    entries = []
    for label, solved in (("a", (0.0, 1.0)), ("b", (1.0, 0.0))):
        for seed in (1, 2):
            run = root / "logs" / "camp" / "runs" / f"{label}_s{seed}"
            record(run, solved, texts=("so 4", "it is five" if label == "a" else "it was five"))
            entries.append({"run_id": run.name, "label": label, "seed": seed, "state": "done", "reason": None,
                            "step": 3, "max_steps": 3, "path": f"runs/{run.name}"})  # fmt: skip
    manifest = {"format": 1, "name": "camp", "created": 1.0, "updated": 2.0, "runs": entries}
    write_json(root / "logs" / "camp" / "manifest.json", manifest)
    return root / "logs"


@pytest.fixture
def page(logs):
    return client_of(logs)


RUN = "logs/camp/runs/a_s1"


def got(page, url, **query):
    answer = page.get(f"/api/{url}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_iterations_and_their_rollouts(page):
    listed = got(page, "iterations", at=RUN)["iterations"]
    assert [(one["split"], one["iteration"], one["recorded"]) for one in listed] == [
        ("eval/heldout", 0, True), ("train", 0, True), ("train", 1, False), ("eval/heldout", 3, True),
        ("train", 2, False),
    ]  # fmt: skip
    newest = got(page, "rollouts", at=RUN)
    assert newest["about"]["iteration"] == 0  # the newest with tokens
    assert (newest["total"], newest["passing"]) == (5, 5)
    some = got(page, "rollouts", at=RUN, iteration=0, reward_min=0, reward_max="0.5", sort="length", down=1, count=1)
    assert [one["index"] for one in some["rollouts"]] == [4]
    assert some["passing"] == 3
    assert got(page, "rollouts", at=RUN, iteration=0, kept="discarded", errors=0)["passing"] == 2


def test_one_rollout_token_by_token(page):
    found = got(page, "rollout", at=RUN, iteration=0, index=0)
    assert found["pieces"] == [["so ", "4 ", ""]]
    assert found["numbers"]["surprisal"] == [1.0, 1.0, 1.0]
    assert got(page, "rollout", at=RUN, split="eval/heldout", iteration=3, index=1)["line"]["reward"] == 1.0


def test_problems_over_conditions_and_one_of_them(page):
    found = got(page, "problems", at="logs/camp")
    assert (found["sets"], found["conditions"]) == (["heldout"], ["a", "b"])
    assert found["problems"][0]["id"] == "p1"
    assert got(page, "problem", at="logs/camp", id="p1")["conditions"]["b"][0] == {"step": 0, "rate": 1.0, "answers": 2}


def test_the_same_prompt_under_two_conditions(page):
    found = got(page, "prompt", a=RUN, b="logs/camp/runs/b_s1", problem="p1")
    assert found["diverge"] == [0, 1]
    assert found["steps"] == {"a": [0, 3], "b": [0, 3]}
    assert (found["a"]["about"]["iteration"], found["a"]["samples"]) == (3, 1)
    first = got(page, "prompt", a=RUN, b=RUN, step_a=0, step_b=3)
    assert first["problem"] == "p0"


@pytest.mark.parametrize(
    ("url", "query", "status", "words"),
    [
        ("rollouts", {}, 400, "the query needs at="),
        ("rollouts", {"at": "logs/camp"}, 404, "there is nothing to show"),
        ("rollouts", {"at": RUN, "iteration": "x"}, 400, "iteration is a whole number"),
        ("rollouts", {"at": RUN, "iteration": 99}, 400, "has no iteration 99 of train"),
        ("rollouts", {"at": RUN, "split": "eval/../x"}, 400, "has sampled nothing as"),
        ("rollouts", {"at": RUN, "sort": "x"}, 400, "sort is one of index"),
        ("rollouts", {"at": RUN, "reward_min": "nan"}, 400, "reward_min is a number"),
        ("rollouts", {"at": RUN, "count": 100000}, 400, "count is a whole number"),
        ("rollout", {"at": RUN, "iteration": 0, "index": 99}, 400, "there is no 99"),
        ("problems", {"at": "logs/camp", "sort": "x"}, 400, "sort is one of differ"),
        ("problem", {"at": "logs/camp", "id": "nobody"}, 400, "has a problem 'nobody'"),
        ("prompt", {"a": RUN, "b": RUN, "problem": "nobody"}, 400, "has no sample 0"),
        ("prompt", {"a": RUN, "b": "logs/../etc"}, 404, "there is nothing to show"),
    ],
)
def test_what_cannot_be_answered_is_told_in_a_sentence(page, url, query, status, words):
    answer = page.get(f"/api/{url}", params=query)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text


def test_links_out_of_the_directory_are_not_followed(logs, tmp_path):
    secret = tmp_path / "secret"
    shutil.copytree(logs / "camp" / "runs" / "b_s1", secret)
    inside = tmp_path / "logs" / "run"
    shutil.copytree(logs / "camp" / "runs" / "a_s1", inside)
    for name in ("tokens_000000.safetensors", "emergence/generations.jsonl", "emergence/evaluations.jsonl"):
        (inside / name).unlink()
        os.symlink(secret / name, inside / name)
    page = client_of(tmp_path / "logs")
    found = got(page, "rollouts", at="logs/run", iteration=0)
    assert not any(one["text"] or one["whole"] for one in found["rollouts"])
    (inside / "iterations.jsonl").unlink()
    os.symlink(secret / "iterations.jsonl", inside / "iterations.jsonl")
    listed = client_of(tmp_path / "logs").get("/api/iterations", params={"at": "logs/run"}).json()["iterations"]
    assert all(one["rollouts"] is None for one in listed)  # by the names of files, not by a foreign index


def test_files_cut_under_the_page_cost_a_sentence_not_the_server(logs, tmp_path):
    run = tmp_path / "logs" / "run"
    shutil.copytree(logs / "camp" / "runs" / "a_s1", run)
    page = client_of(tmp_path / "logs")
    path = run / "tokens_000000.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        answer = page.get("/api/rollouts", params={"at": "logs/run", "iteration": 0})
        assert answer.status_code == 400
        assert "no file of tokens, or cut short" in answer.json()["error"]
    path.unlink()
    assert got(page, "rollouts", at="logs/run", iteration=0)["total"] == 5  # from the summaries
    (run / "iterations.jsonl").write_text("")
    assert got(page, "rollouts", at="logs/run", iteration=0)["total"] == 5
