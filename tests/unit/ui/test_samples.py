import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from helpers.pages import client_of, get, manifest, record
from helpers.records import context, evaluation, group, with_action
from scipy.stats import binomtest

from retrain.records.recorder import RunRecorder
from retrain.ui.iterations import Index
from retrain.ui.library import Library
from retrain.ui.places import Places
from retrain.ui.problems import matrix, matrix_of

RUN, CAMPAIGN = "logs/camp/runs/a_s1", "logs/camp"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A campaign of two conditions × two seeds, of which one solves its second problem at the end."""
    home = tmp_path_factory.mktemp("samples") / CAMPAIGN
    solved = {"a_s1": (0.0, 1.0), "a_s2": (0.0, 0.0), "b_s1": (1.0, 0.0), "b_s2": (1.0, 0.0)}
    for run_id, rates in solved.items():
        text = "it is five" if run_id.startswith("a") else "it was five"
        record(home / "runs" / run_id, rates, texts=("so 4", text))
    return manifest(home, [(run_id, run_id[0], int(run_id[-1])) for run_id in solved], steps=3).parent


@pytest.fixture
def page(logs):
    return client_of(logs)


def test_iterations_with_and_without_recorded_tokens(page):
    listed = get(page, "/api/iterations", at=RUN)["iterations"]
    assert [(one["split"], one["iteration"], one["recorded"]) for one in listed] == [
        ("eval/heldout", 0, True), ("train", 0, True), ("train", 1, False), ("eval/heldout", 3, True),
        ("train", 2, False),
    ]  # fmt: skip
    recorded = get(page, "/api/rollouts", at=RUN)
    plain = get(page, "/api/rollouts", at=RUN, iteration=1)
    assert recorded["about"]["iteration"] == 0  # the newest with tokens
    assert [row["length"] for row in recorded["rollouts"]] == [3, 5, 2, 2, 7]
    for row, other in zip(recorded["rollouts"], plain["rollouts"], strict=True):
        assert (row["whole"], other["whole"]) == (True, False)
        assert row == other | {"whole": True, "text": row["text"]}
    assert (recorded["rollouts"][2]["error"], recorded["rollouts"][1]["tool_errors"]) == ("timed out", 2)
    assert plain["rollouts"][0]["text"] == "so \\boxed{4}"


@pytest.mark.parametrize(("query", "shown"), [
    ({"reward_min": 0, "reward_max": 0.5, "sort": "length", "down": 1}, [4, 1, 3]),
    ({"length_min": 3, "length_max": 5}, [0, 1]),
    ({"group": 1}, [3, 4]),
    ({"kept": "discarded", "errors": 0}, [3, 4]),
    ({"text": "FIVE"}, [1, 2, 3, 4]),
    ({"sort": "reward", "down": 1}, [0, 1, 3, 4, 2]),  # those without a number last
])  # fmt: skip
def test_rollouts_are_filtered_and_sorted(page, query, shown):
    found = get(page, "/api/rollouts", at=RUN, iteration=0, **query)
    assert [each["index"] for each in found["rollouts"]] == shown
    assert found["total"] == 5
    assert found["histogram"] == {"ends": [], "counts": [3, 1], "at": [0.0, 1.0], "absent": 1}  # of all of them
    assert [len(each["samples"]) for each in found["groups"]] == [3, 2]


def test_a_rollout_is_shown_token_by_token_with_what_credit_changed(page):
    found = get(page, "/api/rollout", at=RUN, iteration=0, index=1)
    assert found["pieces"] == [["it ", "is ", "five ", "", ""]]
    numbers = found["numbers"]
    assert numbers["surprisal"] == numbers["credit"] == numbers["trained"] == [1] * 5
    assert all(isinstance(each, int) for name in ("trained", "version") for each in numbers[name])
    assert "mismatch" not in numbers  # no trainer has scored these
    assert [each["index"] for each in found["siblings"]] == [0, 1, 2]
    assert "advantage" not in get(page, "/api/rollout", at=RUN, iteration=0, index=2)["numbers"]  # it had no reward
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
        assert ends_of(found) == {"a": (0.0, 0.5, 2), "b": (1.0, 0.0, 2)}
        wilson = binomtest(1, 2).proportion_ci(method="wilson")
        assert found["problems"][0]["rates"]["a"]["rates"]["after"] == {
            "rate": 0.5, "n": 2, "low": pytest.approx(wilson.low), "high": pytest.approx(wilson.high),
        }  # fmt: skip
        assert (found["few"], found["of_tag"]) == (True, {"hard": 1})
        assert found["overall"]["b"]["after"]["rate"] == 0.5
        for query, ids in (({"sort": "worse"}, ["p1", "p0"]), ({"tag": "hard"}, ["p1"]), ({"text": "IS P0"}, ["p0"])):
            assert [row["id"] for row in get(page, "/api/problems", at=CAMPAIGN, **query)["problems"]] == ids
        evolved = get(page, "/api/problem", at=CAMPAIGN, id="p1")["conditions"]
        shown = {label: [(each["step"], each["rate"], each["n"]) for each in rows] for label, rows in evolved.items()}
        assert shown == {"a": [(0, 0.0, 2), (3, 0.5, 2)], "b": [(0, 1.0, 2), (3, 0.0, 2)]}
        assert evolved["a"][1]["low"] == pytest.approx(wilson.low)
        answers.append(found)
    assert answers[0] == answers[1]


def test_the_same_prompt_twice_names_the_words_and_the_first_token_that_differ(page):
    query = {"a": RUN, "b": "logs/camp/runs/b_s1"}
    found = get(page, "/api/prompt", **query, problem="p1")
    assert "siblings" not in found["a"], "the view shows one rollout of each side"
    assert (found["diverge"], found["steps"]) == ([0, 1], {"a": [0, 3], "b": [0, 3]})
    assert (found["a"]["about"]["iteration"], found["a"]["samples"]) == (3, 1)
    assert found["a"]["pieces"][0][:3] == ["it ", "is ", "five "]
    changed = [(tag, found["words"][0][a:b], found["words"][1][c:d]) for tag, a, b, c, d in found["changes"]]
    assert [each for each in changed if each[0] != "equal"] == [("replace", ["is "], ["was "])]
    assert get(page, "/api/prompt", **query, problem="p0")["diverge"] is None
    assert get(page, "/api/prompt", a=RUN, b=RUN, step_a=0, step_b=3)["problem"] == "p0"


@pytest.mark.parametrize(("url", "query", "status", "words"), [
    ("rollouts", {}, 400, "the query needs at="),
    ("rollouts", {"at": RUN, "iteration": 99}, 400, "has no iteration 99 of train; the last is 2"),
    ("rollouts", {"at": RUN, "split": "eval/../x"}, 400, "has sampled nothing as"),
    ("rollouts", {"at": RUN, "reward_min": "nan"}, 400, "reward_min is a number"),
    ("rollout", {"at": RUN, "iteration": 0, "index": 99}, 400, "there is no 99"),
    ("problem", {"at": CAMPAIGN, "id": "nobody"}, 400, "has a problem 'nobody'"),
    ("prompt", {"a": RUN, "b": "logs/../etc"}, 404, "there is nothing to show"),
])  # fmt: skip
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
    assert [(one["text"], one["whole"]) for one in found["rollouts"]] == [("", False)] * 5
    (inside / "iterations.jsonl").unlink()
    os.symlink(secret / "iterations.jsonl", inside / "iterations.jsonl")
    listed = get(client_of(tmp_path / "logs"), "/api/iterations", at="logs/run")["iterations"]
    assert [one["rollouts"] for one in listed] == [None] * 5  # by the names of files, not by a foreign index


def ends_of(found):
    """Return the first problem's rates before and after training, and the answers after it, by condition."""
    rates = {label: each["rates"] for label, each in found["problems"][0]["rates"].items()}
    return {label: (own["before"]["rate"], own["after"]["rate"], own["after"]["n"]) for label, own in rates.items()}


def evaluated(folder, rates):
    """A run whose one problem was solved so at these steps."""
    with closing(RunRecorder(folder, context(max_steps=20), {})) as one:
        for number, rate in rates.items():
            one.record_eval(evaluation([group([rate], [3], problem_id="p0")], number))
    return Index(folder, Places([folder]).file, folder.name)


def test_conditions_that_go_on_are_compared_at_a_step_that_all_have(tmp_path):
    done = evaluated(tmp_path / "done", {0: 0.0, 5: 1.0, 10: 0.0})
    begun = evaluated(tmp_path / "b3", {0: 1.0})
    first, second = evaluated(tmp_path / "b1", {0: 0.0, 5: 1.0, 7: 0.0}), evaluated(tmp_path / "b2", {0: 0.0, 5: 1.0})
    runs = {"a": [done, evaluated(tmp_path / "a2", {0: 1.0, 5: 1.0})], "b": [first, second, begun]}
    going = {index.run for several in runs.values() for index in several} - {done.run}
    found = matrix(runs, "heldout", going).selection()
    assert found["common"] == 5
    assert found["taken"] == {
        "a": {"runs": 1, "of": "finished", "before": [0], "after": [5]},
        "b": {"runs": 2, "of": "all", "before": [0], "after": [5]},  # not the one that has begun just now
    }
    assert ends_of(found) == {"a": (0.0, 1.0, 1), "b": (0.0, 1.0, 2)}
    early = matrix({"a": [begun]}, "heldout").selection()  # what is after training is not what was before
    assert ends_of(early) == {"a": (1.0, None, 0)}
    assert early["taken"]["a"] == {"runs": 1, "of": "finished", "before": [0], "after": []}


class Meeting(Index):
    """Waits in its first reading for a second one, which must not come."""

    meeting = threading.Barrier(2)

    def completions(self, *where):
        with suppress(threading.BrokenBarrierError):
            self.meeting.wait(0.5)
        return super().completions(*where)


def test_requests_that_come_while_a_matrix_is_computed_wait_for_it(logs):
    places = Places([logs])
    home = Library(places).home(CAMPAIGN)
    runs = {"a": [Meeting(home.runs[0].path, places.file, RUN)]}
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: matrix_of(home, runs, "heldout"), range(2))
    assert one is other


def answered(folder, before, after, said="so"):
    """A run that solved problems with these rewards before and after training; ``said`` is what it answered before."""
    with closing(RunRecorder(folder, context(max_steps=20), {})) as one:
        for number, rewards in ((0, before), (10, after)):
            groups = [with_action(group([float(reward)], [3], problem_id=f"p{i}"), text=said)
                      for i, reward in enumerate(rewards)]  # fmt: skip
            one.record_eval(evaluation(groups, number))
    return Index(folder, Places([folder]).file, folder.name)


def test_problems_that_got_worse_are_tested_over_seeds(tmp_path):
    """Seven seeds: the first problem is always lost, the second in four of them, the third never solved."""
    runs = {"base": [], "other": []}
    for seed in range(7):
        lost = float(seed >= 4)
        own = [answered(tmp_path / f"{label}{seed}", [1, 1, 0], after, f"draw {seed}")
               for label, after in (("base", [1, 1, 0]), ("other", [0, lost, 0]))]  # fmt: skip
        runs["base"].append(own[0])
        runs["other"].append(own[1])
    seeds = {run.run: seed for own in runs.values() for seed, run in enumerate(own)}
    runs["other"].reverse()  # they are paired by their seeds
    found = matrix(runs, "heldout", (), seeds).selection("worse")
    assert [row["id"] for row in found["problems"]] == ["p0", "p1", "p2"]
    tests = [row["rates"]["other"]["tests"] for row in found["problems"]]
    for against in ("before", "baseline"):
        assert [test[against]["p"] for test in tests] == [1 / 2**7, 1 / 2**4, 1.0]
        assert [test[against]["holm"] for test in tests] == [3 / 2**7, 2 / 2**4, 1.0]
        assert [test[against]["n"] for test in tests] == [7] * 3
    assert [(test["label"], test["against"], test["worse"]) for test in found["tests"]] == [
        ("base", "before", 0), ("other", "before", 1), ("other", "baseline", 1),
    ]  # fmt: skip
    assert "1 problem of 3 worse than under the baseline over 7 runs" in found["tests"][2]["words"]
    few = matrix({"other": runs["other"][:3]}, "heldout").selection("worse")
    assert few["tests"][0]["least_holm"] == 3 / 8
    assert "nothing can be shown" in few["tests"][0]["words"]


def test_one_draw_before_training_is_no_draw_for_each_seed(tmp_path):
    """retrain samples the untrained model once for all runs: a problem that it solved by luck did not get worse."""
    runs = {"a": [answered(tmp_path / str(seed), [1], [0]) for seed in range(9)]}
    found = matrix(runs, "heldout").selection()
    assert found["tests"][0]["shared"]
    assert found["problems"][0]["rates"]["a"]["tests"]["before"]["p"] == 1 / 10
    assert "share one draw before training" in found["tests"][0]["words"]


def test_all_steps_of_a_campaign_are_searched(page, monkeypatch):
    found = get(page, "/api/search", at=CAMPAIGN, text="WAS five", count=3)
    assert [(each["place"][-4:], each["split"], each["iteration"]) for each in found["rollouts"][:3]] == [
        ("b_s1", "eval/heldout", 3), ("b_s2", "eval/heldout", 3), ("b_s1", "eval/heldout", 0),
    ]  # fmt: skip
    assert all("was five" in each["text"] for each in found["rollouts"])  # only in what was recorded token by token
    assert found["next"] < found["of"] == 4 * 5
    rest = get(page, "/api/search", at=CAMPAIGN, text="WAS five", first=found["next"])
    assert (rest["next"], rest["searched"]) == (None, 20)
    assert {each["place"][-4:] for each in rest["rollouts"]} <= {"b_s1", "b_s2"}
    found = get(page, "/api/search", at=RUN, split="train", sort="length", count=2, text="is p0")  # in the prompt
    assert [(each["length"], each["iteration"]) for each in found["rollouts"]] == [(7, 2), (7, 1)]
    assert (found["passing"], found["next"]) == (15, None)
    least = get(page, "/api/search", at=RUN, sort="advantage", down=0, kept="trained", count=1)["rollouts"][0]
    assert least["advantage"] == -0.5
    monkeypatch.setattr("retrain.ui.api.rollouts.SEARCH_S", 0.0)
    found = get(page, "/api/search", at=CAMPAIGN, text="nowhere")
    assert (found["rollouts"], found["searched"], found["next"]) == ([], 1, 1)
