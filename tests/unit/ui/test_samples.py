"""Rollouts, tokens, problems and the same prompt twice, out of the files that a recorder writes."""

from __future__ import annotations

import os
import shutil

import pytest
from record_cases import context, evaluation, group
from sampled_cases import record, written
from ui_cases import client_of, get

from retrain.files import append_jsonl, dumps, read_jsonl, write_json
from retrain.record.recorder import RunRecorder
from retrain.record.tokens import TokenFile
from retrain.ui.histograms import rewards
from retrain.ui.iterations import Index
from retrain.ui.problems import SORTS, Matrices, matrix, twice
from retrain.ui.rollouts import whole

RUN, CAMPAIGN = "logs/camp/runs/a_s1", "logs/camp"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A campaign of two conditions × two seeds, of which one solves its second problem at the end."""
    root = tmp_path_factory.mktemp("samples")
    entries = []
    for label, seed, solved in (("a", 1, (0.0, 1.0)), ("a", 2, (0.0, 0.0)), ("b", 1, (1.0, 0.0)), ("b", 2, (1.0, 0.0))):
        run = root / CAMPAIGN / "runs" / f"{label}_s{seed}"
        record(run, solved, texts=("so 4", "it is five" if label == "a" else "it was five"))
        entries.append({"run_id": run.name, "label": label, "seed": seed, "state": "done", "reason": None,
                        "step": 3, "max_steps": 3, "path": f"runs/{run.name}"})  # fmt: skip
    manifest = {"format": 1, "name": "camp", "created": 1.0, "updated": 2.0, "runs": entries}
    write_json(root / CAMPAIGN / "manifest.json", manifest)
    return root / "logs"


@pytest.fixture
def page(logs):
    return client_of(logs)


def indices(answer):
    return [each["index"] for each in answer["rollouts"]]


def test_iterations_with_and_without_recorded_tokens(page):
    listed = get(page, "/api/iterations", at=RUN)["iterations"]
    assert [(one["split"], one["iteration"], one["recorded"]) for one in listed] == [
        ("eval/heldout", 0, True), ("train", 0, True), ("train", 1, False), ("eval/heldout", 3, True),
        ("train", 2, False),
    ]  # fmt: skip
    recorded, plain = (get(page, "/api/rollouts", at=RUN, **query) for query in ({}, {"iteration": 1}))
    assert recorded["about"]["iteration"] == 0  # the newest with tokens
    assert [row["length"] for row in recorded["rollouts"]] == [3, 5, 2, 2, 7]
    for row, other in zip(recorded["rollouts"], plain["rollouts"], strict=True):
        assert (row["whole"], other["whole"]) == (True, False)
        own = {"whole", "text"}
        assert {k: v for k, v in row.items() if k not in own} == {k: v for k, v in other.items() if k not in own}
    assert (recorded["rollouts"][2]["error"], recorded["rollouts"][1]["tool_errors"]) == ("timed out", 2)
    assert plain["rollouts"][0]["text"] == "so \\boxed{4}"


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ({"reward_min": 0.5}, [0]),
        ({"reward_max": 0}, [1, 3, 4]),
        ({"reward_min": 0, "reward_max": 0.5, "sort": "length", "down": 1}, [4, 1, 3]),
        ({"length_min": 3, "length_max": 5}, [0, 1]),
        ({"group": 1}, [3, 4]),
        ({"kept": "discarded", "errors": 0}, [3, 4]),
        ({"kept": "trained"}, [0, 1, 2]),
        ({"errors": 1}, [1, 2]),
        ({"text": "FIVE"}, [1, 2, 3, 4]),
        ({"stop": "length"}, []),
        ({"tag": "nowhere"}, []),
        ({"sort": "reward", "down": 1}, [0, 1, 3, 4, 2]),  # those without a number last
        ({"sort": "length"}, [2, 3, 0, 1, 4]),
        ({"sort": "length", "first": 1, "count": 2}, [3, 0]),
    ],
)
def test_rollouts_are_filtered_and_sorted(page, query, shown):
    found = get(page, "/api/rollouts", at=RUN, iteration=0, **query)
    assert indices(found) == shown
    assert found["total"] == 5
    assert found["histogram"] == {"ends": [], "counts": [3, 1], "at": [0.0, 1.0], "absent": 1}  # of all of them
    assert [len(each["samples"]) for each in found["groups"]] == [3, 2]


def test_a_rollout_is_shown_token_by_token_with_what_credit_changed(page):
    found = get(page, "/api/rollout", at=RUN, iteration=0, index=1)
    assert found["pieces"] == [["it ", "is ", "five ", "", ""]]
    numbers = found["numbers"]
    assert numbers["surprisal"] == numbers["credit"] == numbers["trained"] == [1] * 5
    assert "mismatch" not in numbers  # no trainer has scored these
    assert [each["index"] for each in found["siblings"]] == [0, 1, 2]
    assert get(page, "/api/rollout", at=RUN, iteration=0, index=2)["numbers"]["advantage"] is None  # it had no reward
    plain = get(page, "/api/rollout", at=RUN, iteration=1, index=1)
    assert (plain["pieces"], plain["line"]["turns"][0]["text"]) == (None, "so \\boxed{4}")
    assert get(page, "/api/rollout", at=RUN, split="eval/heldout", iteration=3, index=1)["line"]["reward"] == 1.0


def test_problems_show_who_solves_what_and_how_that_has_changed(logs, tmp_path):
    copy = tmp_path / "logs"
    shutil.copytree(logs, copy)
    for path in copy.rglob("iterations.jsonl"):
        path.unlink()  # a run of an earlier release has no index
    answers = []
    for page in (client_of(logs), client_of(copy)):
        found = get(page, "/api/problems", at=CAMPAIGN)
        assert (found["sets"], found["conditions"]) == (["heldout"], ["a", "b"])
        assert found["steps"] == {"a": [0, 3], "b": [0, 3]}
        assert [row["id"] for row in found["problems"]] == ["p1", "p0"]  # differ most first
        assert found["problems"][0]["rates"] == {
            "a": {"before": 0.0, "after": 0.5, "answers": 2},
            "b": {"before": 1.0, "after": 0.0, "answers": 2},
        }
        for query, ids in (({"sort": "worse"}, ["p1", "p0"]), ({"tag": "hard"}, ["p1"]), ({"text": "IS P0"}, ["p0"])):
            assert [row["id"] for row in get(page, "/api/problems", at=CAMPAIGN, **query)["problems"]] == ids
        evolved = get(page, "/api/problem", at=CAMPAIGN, id="p1")["conditions"]
        assert evolved["a"] == [{"step": 0, "rate": 0.0, "answers": 2}, {"step": 3, "rate": 0.5, "answers": 2}]
        assert evolved["b"] == [{"step": 0, "rate": 1.0, "answers": 2}, {"step": 3, "rate": 0.0, "answers": 2}]
        answers.append(found)
    assert answers[0] == answers[1]


def test_the_same_prompt_twice_names_the_words_and_the_first_token_that_differ(page):
    query = {"a": RUN, "b": "logs/camp/runs/b_s1"}
    found = get(page, "/api/prompt", **query, problem="p1")
    assert (found["diverge"], found["steps"]) == ([0, 1], {"a": [0, 3], "b": [0, 3]})
    assert (found["a"]["about"]["iteration"], found["a"]["samples"]) == (3, 1)
    assert found["a"]["pieces"][0][:3] == ["it ", "is ", "five "]
    changed = [(tag, found["words"][0][a:b], found["words"][1][c:d]) for tag, a, b, c, d in found["changes"]]
    assert [each for each in changed if each[0] != "equal"] == [("replace", ["is "], ["was "])]
    assert get(page, "/api/prompt", **query, problem="p0")["diverge"] is None
    assert get(page, "/api/prompt", a=RUN, b=RUN, step_a=0, step_b=3)["problem"] == "p0"


@pytest.mark.parametrize(
    ("url", "query", "status", "words"),
    [
        ("rollouts", {}, 400, "the query needs at="),
        ("rollouts", {"at": CAMPAIGN}, 404, "there is nothing to show"),
        ("rollouts", {"at": RUN, "iteration": "x"}, 400, "iteration is a whole number"),
        ("rollouts", {"at": RUN, "iteration": 99}, 400, "has no iteration 99 of train; the last is 2"),
        ("rollouts", {"at": RUN, "split": "eval/../x"}, 400, "has sampled nothing as"),
        ("rollouts", {"at": RUN, "sort": "x"}, 400, "sort is one of index"),
        ("rollouts", {"at": RUN, "reward_min": "nan"}, 400, "reward_min is a number"),
        ("rollouts", {"at": RUN, "count": 100000}, 400, "count is a whole number"),
        ("rollout", {"at": RUN, "iteration": 0, "index": 99}, 400, "there is no 99"),
        ("rollout", {"at": RUN, "iteration": 1, "index": 99}, 400, "there is no 99"),
        ("problems", {"at": CAMPAIGN, "sort": "x"}, 400, "sort is one of differ"),
        ("problem", {"at": CAMPAIGN, "id": "nobody"}, 400, "has a problem 'nobody'"),
        ("prompt", {"a": RUN, "b": RUN, "problem": "nobody"}, 400, "has no sample 0"),
        ("prompt", {"a": RUN, "b": "logs/../etc"}, 404, "there is nothing to show"),
    ],
)
def test_what_cannot_be_answered_is_told_in_a_sentence(page, url, query, status, words):
    assert words in get(page, f"/api/{url}", status, **query)["error"]


def test_links_and_names_that_lead_out_of_the_directory_are_not_followed(logs, tmp_path):
    secret, inside = tmp_path / "secret", tmp_path / "logs" / "run"
    shutil.copytree(logs / "camp" / "runs" / "b_s1", secret)
    shutil.copytree(logs / "camp" / "runs" / "a_s1", inside)
    for name in ("tokens_000000.safetensors", "emergence/generations.jsonl", "emergence/evaluations.jsonl"):
        (inside / name).unlink()
        os.symlink(secret / name, inside / name)
    with open(inside / "iterations.jsonl", "a") as file:
        for name, tokens in (("../secret", "null"), ("x", '"../../etc/passwd"'), ("/etc/x", "null"), (".x", "null")):
            file.write(f'{{"split": "train", "iteration": 50, "name": "{name}", "tokens": {tokens}}}\n')
        file.write('[1]\n{"split": "train"}\n{"split": "train", "iteration": "x", "name": "a"}\n')
    page = client_of(tmp_path / "logs")
    assert max(one["iteration"] for one in get(page, "/api/iterations", at="logs/run")["iterations"]) == 3
    found = get(page, "/api/rollouts", at="logs/run", iteration=0)
    assert not any(one["text"] or one["whole"] for one in found["rollouts"])
    (inside / "iterations.jsonl").unlink()
    os.symlink(secret / "iterations.jsonl", inside / "iterations.jsonl")
    listed = get(client_of(tmp_path / "logs"), "/api/iterations", at="logs/run")["iterations"]
    assert all(one["rollouts"] is None for one in listed)  # by the names of files, not by a foreign index


def test_files_cut_under_the_page_cost_a_sentence_not_the_server(logs, tmp_path):
    run = tmp_path / "logs" / "run"
    shutil.copytree(logs / "camp" / "runs" / "a_s1", run)
    page, path = client_of(tmp_path / "logs"), run / "tokens_000000.safetensors"
    data = path.read_bytes()
    for size in (0, 7, 100, len(data) - 1):
        path.write_bytes(data[:size])
        error = get(page, "/api/rollouts", 400, at="logs/run", iteration=0)["error"]
        assert "no file of tokens, or cut short" in error
    path.unlink()
    assert get(page, "/api/rollouts", at="logs/run", iteration=0)["total"] == 5  # from the summaries
    (run / "iterations.jsonl").write_text("")
    assert get(page, "/api/rollouts", at="logs/run", iteration=0)["total"] == 5


@pytest.fixture
def wide(tmp_path):
    """Evaluations of 60 problems with four answers each."""
    with RunRecorder(tmp_path, context(max_steps=20), {}, token_text=lambda ids: written(ids, ("so 4", "five"))) as one:
        for number in (0, 3):
            groups = [group([1.0] * 4, [3] * 4, problem_id=f"p{n}") for n in range(60)]
            one.record_eval(evaluation(groups, number))
    return Index(tmp_path)


def test_a_rollout_reads_its_group_and_not_the_whole_iteration(wide, monkeypatch):
    one, read, lines = wide.get("eval/heldout", 0), [], TokenFile._line
    monkeypatch.setattr(TokenFile, "_line", lambda self, kind, i: read.append(kind) or lines(self, kind, i))
    assert [each["index"] for each in whole(wide, one, 121)["siblings"]] == [120, 121, 122, 123]
    assert len(read) < 20
    twice((wide, one), (wide, one), "p7")  # the problems of a file are looked through once
    read.clear()
    for problem in (0, 31, 59):
        found = twice((wide, one), (wide, one), f"p{problem}", sample=2)
        assert (found["a"]["index"], found["a"]["samples"]) == (4 * problem + 2, 4)
    assert len(read) < 3 * 2 * 20


def test_a_matrix_is_made_once_for_all_orders(wide, tmp_path, monkeypatch):
    made, lines = [], Index.completions
    monkeypatch.setattr(Index, "completions", lambda self, *given: made.append(given) or lines(self, *given))
    kept, runs = Matrices(), {"a": [wide]}
    shown = [kept.of("camp", runs, "heldout").shown(sort, first=5, count=2) for sort in SORTS]
    assert [[row["id"] for row in each["problems"]] for each in shown] == [["p5", "p6"]] * len(SORTS)
    assert len(made) == 2  # the evaluation before, and that after
    assert kept.of("camp", runs, "heldout", {tmp_path}).ends["a"].of == "all"  # it goes on after all
    append_jsonl(tmp_path / "emergence/evaluations.jsonl", [{"name": "heldout", "step": 9, "problem_id": "p0"}])
    kept.of("camp", runs, "heldout", {tmp_path})
    assert len(made) == 6


def test_an_index_is_the_same_table_until_it_grows(wide, tmp_path):
    known = wide.refresh()
    assert wide.refresh() is known
    line = dumps(read_jsonl(tmp_path / "iterations.jsonl")[-1] | {"iteration": 6})
    with open(tmp_path / "iterations.jsonl", "a") as file:
        file.write(line + "\n")
    assert (len(known), len(wide.refresh())) == (2, 3)  # whoever goes through the first is not disturbed
    (tmp_path / "iterations.jsonl").unlink()
    assert sorted(number for _, number in wide.refresh()) == [0, 3]  # by the names of files
    (tmp_path / "iterations.jsonl").write_text(line + "\n")
    assert sorted(number for _, number in wide.refresh()) == [6]


def evaluated(folder, rates):
    """A run whose one problem was solved so at these steps."""
    with RunRecorder(folder, context(max_steps=20), {}) as one:
        for number, rate in rates.items():
            one.record_eval(evaluation([group([rate], [3], problem_id="p0")], number))
    return Index(folder)


def test_conditions_that_go_on_are_compared_at_a_step_that_all_have(tmp_path):
    done = evaluated(tmp_path / "done", {0: 0.0, 5: 1.0, 10: 0.0})
    begun = evaluated(tmp_path / "b3", {0: 1.0})
    first, second = evaluated(tmp_path / "b1", {0: 0.0, 5: 1.0, 7: 0.0}), evaluated(tmp_path / "b2", {0: 0.0, 5: 1.0})
    runs = {"a": [done, evaluated(tmp_path / "a2", {0: 1.0, 5: 1.0})], "b": [first, second, begun]}
    going = {index.run for several in runs.values() for index in several} - {done.run}
    found = matrix(runs, "heldout", going).shown()
    assert found["common"] == 5
    assert found["taken"] == {
        "a": {"runs": 1, "of": "finished", "before": [0], "after": [5]},
        "b": {"runs": 2, "of": "all", "before": [0], "after": [5]},  # not the one that has begun just now
    }
    assert found["problems"][0]["rates"] == {
        "a": {"before": 0.0, "after": 1.0, "answers": 1},
        "b": {"before": 0.0, "after": 1.0, "answers": 2},
    }
    ended = matrix(runs, "heldout", going - {first.run}).shown()
    assert (ended["common"], ended["steps"]) == (None, {"a": [0, 10], "b": [0, 7]})
    assert [each["runs"] for each in ended["taken"].values()] == [1, 1]
    early = matrix({"a": [begun]}, "heldout").shown()  # what is after training is not what was before
    assert early["problems"][0]["rates"]["a"] == {"before": 1.0, "after": None, "answers": 0}
    assert early["taken"]["a"] == {"runs": 1, "of": "finished", "before": [0], "after": []}


def test_histograms():
    many = rewards([float(n) for n in range(100)] + [None])
    assert (sum(many["counts"]), many["absent"], len(many["ends"])) == (100, 1, len(many["counts"]) + 1)
    assert rewards([]) == {"ends": [], "counts": [], "at": None, "absent": 0}
