"""What the API says of a campaign, beside what the functions of ``retrain compare`` and of the report say."""

from __future__ import annotations

import fcntl
import math
import threading

import numpy as np
import pytest
from ui_cases import LABELS, campaign, client_of, evaluation, get, row

from retrain.campaign.judging.evidence import curve, read_campaign, smoothed
from retrain.campaign.judging.pooling import compare_directories
from retrain.config.campaign import condition_name
from retrain.files import append_jsonl, dumps, jsonable, read_json, read_jsonl, write_json, write_text
from retrain.ui.answers import plain
from retrain.ui.api import curves as curves_api
from retrain.ui.api.columns import columns_of
from retrain.ui.decimation import extremes, last_of_stretches
from retrain.ui.library import Library
from retrain.ui.measured import _graded_row
from retrain.ui.numbers import Pool, own_seconds
from retrain.ui.places import Places


@pytest.fixture
def home(tmp_path):
    return campaign(tmp_path / "one", seeds=3)


def test_places_lists_what_is_there(tmp_path, home):
    client = client_of(tmp_path)
    while get(client, "/api/places")["reading"]["of"]:
        pass
    (one,) = get(client, "/api/places")["places"]  # asked after the last was read
    assert (one["place"], one["kind"], one["source"], one["state"]) == (
        f"{tmp_path.name}/one",
        "campaign",
        "retrain",
        "done",
    )
    assert one["runs"]["planned"] == one["runs"]["done"] == 6
    assert one["seeds"] == {"planned": 3, "done": 3}
    assert one["steps"] == {"done": 36, "planned": 36}
    assert one["conditions"] == ["grpo+none", "maxrl+none"]
    assert one["device_hours"] == pytest.approx(6 * 6 * (0.5 + 1.0 / 2) / 3600)
    assert one["note"]["level"] == "warning"
    verdict = one["verdict"]
    assert verdict["difference"] == pytest.approx(0.2)
    assert verdict["word"].startswith("cannot tell")


def test_a_campaign_has_the_comparison_of_retrain_compare(home):
    client = client_of(home)
    found = get(client, "/api/campaign", at="one", wait_ms=60_000)
    expected = jsonable(compare_directories([home])) | {"directories": ["one"]}
    assert found["comparison"] == expected
    assert found["fresh"] is True
    assert found["sets"] == ["heldout"]
    assert found["metric"] == "eval/heldout/correct_rate"
    assert [run["place"] for run in found["runs"]] == [f"one/runs/{run.run_id}" for run in read_campaign(home).runs]
    assert found["checksums"]["data_hash"] == "d1"
    assert [cost["label"] for cost in found["cost"]] == ["grpo+none", "maxrl+none"]


def test_runs_name_the_worker_that_trains_them_now(tmp_path, monkeypatch):
    monkeypatch.setattr("retrain.ui.library.FRESH_S", -1.0)
    home = campaign(tmp_path / "one", seeds=3, state="running")
    manifest, client = read_json(home / "manifest.json"), client_of(home)
    workers = ["10 gpu:1", "9 gpu:0", {"no": "text"}, "10 gpu:1", "3 <b>gpu</b>", "4 cpu"]
    for entry, worker in zip(manifest["runs"], workers, strict=True):
        entry["worker"] = worker
    manifest["runs"][5]["state"] = "done"
    write_json(home / "manifest.json", manifest)

    def told():
        found = get(client, "/api/campaign", at="one")
        return [run["worker"] for run in found["runs"]], found["summary"]["workers"]

    with open(home / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        named = ["10 gpu:1", "9 gpu:0", None, "10 gpu:1", "3 <b>gpu</b>", None]  # text, which the page shows as text
        assert told() == (named, ["3 <b>gpu</b>", "9 gpu:0", "10 gpu:1"])
        assert get(client, "/api/places")["places"][0]["workers"] == told()[1]
    assert told() == ([None] * 6, [])  # nobody is there any more: what the manifest says was so at a kill


def test_a_campaign_has_all_that_its_pictures_draw(home):
    """What a table of the forest and of the cost chart has to hold, row by row."""
    found = get(client_of(home), "/api/campaign", at="one", wait_ms=60_000)
    comparison = found["comparison"]
    assert comparison.keys() >= {"baseline", "margin", "metric", "share", "conditions"}
    for index, one in enumerate(comparison["conditions"]):
        assert len(one["after_values"]) == len(one["finished"]) == 3
        assert one["interval"][0] < one["after_mean"] < one["interval"][1]
        assert set(one["finished"]) <= set(one["seeds"])
        if index:
            assert len(one["differences"]) == len(one["paired_seeds"]) == one["pairs"] == 3
            assert one["difference_interval"][0] <= one["difference"] <= one["difference_interval"][1]
            assert one["verdict"]
            assert "difference_new_problems" in one
    costs = {each["label"]: each for each in found["cost"]}
    assert list(costs) == [one["label"] for one in comparison["conditions"]]
    for label, cost in costs.items():
        assert (cost["seconds_per_run"], cost["tokens_per_run"]) == (pytest.approx(6.0), 600), label
    other = comparison["conditions"][1]
    assert costs[other["label"]]["difference"] == other["difference"]
    assert costs[other["label"]]["difference_interval"] == other["difference_interval"]


def test_a_comparison_from_columns_is_the_one_from_rows(home, monkeypatch, tmp_path):
    """Runs whose rows would not fit in memory: only float32 is between the two."""
    monkeypatch.setattr("retrain.ui.measured.WHOLE_BYTES", 0)
    found = get(client_of(home), "/api/campaign", at="one", wait_ms=60_000)["comparison"]
    expected = jsonable(compare_directories([home]))
    for mine, its in zip(found["conditions"], expected["conditions"], strict=True):
        for key in ("after_values", "difference", "difference_interval", "verdict", "sentence", "tokens", "missing"):
            assert mine[key] == its[key], key
        assert mine["seconds"] == pytest.approx(its["seconds"])
    assert found["warnings"] == expected["warnings"]


def test_a_changed_evaluation_changes_the_comparison(home):
    client = client_of(home)
    before = get(client, "/api/campaign", at="one", wait_ms=60_000)["comparison"]
    append_jsonl(home / "runs/maxrl+none_s1/evals.jsonl", [evaluation(6, 1.0)])
    after = get(client, "/api/campaign", at="one", wait_ms=60_000)["comparison"]
    assert after == jsonable(compare_directories([home])) | {"directories": ["one"]}
    assert after["conditions"][1]["difference"] > before["conditions"][1]["difference"]


@pytest.mark.parametrize("key", ["mean_reward", "correct_rate", "eval/heldout/correct_rate", "entropy"])
def test_curves_are_the_report_s(home, key):
    found = get(client_of(home), "/api/curves", at="one", key=key)
    read = read_campaign(home)
    share = key.endswith("correct_rate")
    for index, label in enumerate(read.labels):
        expected = curve(label, index, read.of(label), key, share=share, smooth=False)
        mine = found["conditions"][index]
        assert condition_name(mine["label"]) == label
        assert np.array(mine["mean"]) == pytest.approx(np.array(expected.points), rel=1e-6)
        assert np.array(mine["band"]) == pytest.approx(np.array(expected.band), rel=1e-6)
        assert np.array(mine["runs"][0]["points"]) == pytest.approx(np.array(expected.thin[0]), rel=1e-6)
    (difference,) = found["differences"]
    assert difference["pairs"] == 3
    assert found["about"]["key"] == key


def test_smoothing_is_the_report_s(tmp_path):
    home = campaign(tmp_path / "one", seeds=1, steps=500)
    path = home / "runs/grpo+none_s1/metrics.jsonl"
    path.unlink()
    values = np.random.default_rng(0).normal(size=500)
    append_jsonl(path, [row(step, mean_reward=value) for step, value in enumerate(values.tolist())])
    expected = np.array([y for _, y in smoothed(list(enumerate(values.tolist())), 7)])
    curves = get(client_of(home), "/api/curves", at="one", key="mean_reward", smooth=7)["conditions"][0]
    assert np.array(curves["runs"][0]["points"])[:, 1] == pytest.approx(expected, abs=1e-5)
    (run, _) = get(client_of(home), "/api/columns", at="one", key="mean_reward", smooth=7)["runs"]
    assert np.array(run["columns"]["mean_reward"]["y"]) == pytest.approx(expected, abs=1e-5)


def test_differences_are_of_pairs_of_seeds(home):
    path = home / "runs/maxrl+none_s2/metrics.jsonl"
    rows = [each | {"mean_reward": each["mean_reward"] + 1.0} for each in read_jsonl(path)]
    path.unlink()
    append_jsonl(path, rows)
    (difference,) = get(client_of(home), "/api/curves", at="one", key="mean_reward")["differences"]
    assert [y for _, y in difference["mean"]] == pytest.approx([1 / 3] * 6)
    low, high = difference["band"][0][1:]
    assert (low, high) == pytest.approx((1 / 3 - 4.302653 / 3, 1 / 3 + 4.302653 / 3), rel=1e-4)  # t(0.975, 2), s = √3/3


def test_a_curve_of_runs_that_go_on_is_as_long_as_all_of_them(tmp_path):
    home = campaign(tmp_path / "one", state="running", steps=4)
    append_jsonl(home / "runs/grpo+none_s1/metrics.jsonl", [row(4), row(5)])
    found = get(client_of(home), "/api/curves", at="one", key="mean_reward")["conditions"][0]
    assert found["of"] == "all"
    assert [x for x, _ in found["mean"]] == [0, 1, 2, 3]
    assert [len(run["points"]) for run in found["runs"]] == [6, 4]
    assert found["count"] == [[0, 2], [4, 1], [5, 1]]


@pytest.mark.parametrize(
    ("x", "expected"),
    [("step", [0, 1, 2, 3, 4, 5]), ("tokens", [100, 200, 300, 400, 500, 600]), ("wall", [2, 4, 6, 8, 10, 12]),
     ("device", [1, 2, 3, 4, 5, 6])],
)  # fmt: skip
def test_axes(home, x, expected):
    client, run = client_of(home), "one/runs/grpo+none_s1"
    (found,) = get(client, "/api/columns", at=run, key=["mean_reward", "eval/heldout/correct_rate"], x=x)["runs"]
    assert found["x"] == expected
    assert found["columns"]["mean_reward"]["y"] == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    held_out = found["columns"]["eval/heldout/correct_rate"]
    assert held_out["x"] == [0, expected[-1] if x != "step" else 6]
    assert held_out["y"] == [0.25, 0.515625]
    curves = get(client, "/api/curves", at=run, key="mean_reward", x=x, smooth=1)
    assert [point[0] for point in curves["conditions"][0]["mean"]] == expected


def test_rows_without_a_wall_clock_are_left_out_of_it(tmp_path):
    """A run that an earlier release began: its clock starts with the resume."""
    home = campaign(tmp_path / "one", seeds=1, steps=2)
    for number, path in enumerate(sorted(home.glob("runs/*/metrics.jsonl"))):
        path.unlink()
        clock = [{} if number == 0 and n < 4 else {"timing_wall_clock": 10.0 * n} for n in range(8)]
        append_jsonl(path, [row(n, **clock[n]) for n in range(8)])
        append_jsonl(path.with_name("evals.jsonl"), [evaluation(6, 0.75)])
    client = client_of(home)
    keys = {"at": "one/runs/grpo+none_s1", "key": ["mean_reward", "eval/heldout/correct_rate"]}
    (run,) = get(client, "/api/columns", **keys, x="wall")["runs"]
    assert (run["x"], run["rows"]) == ([40, 50, 60, 70], 8)
    assert run["columns"]["mean_reward"]["y"] == [0.4, 0.5, 0.6, 0.7]
    assert run["columns"]["eval/heldout/correct_rate"]["x"] == [50]  # those after 0 and 2 updates have no place
    assert run["note"].startswith("there are 4 rows of an earlier release")
    (more,) = get(client, "/api/columns", **keys, x="wall", since=6)["runs"]
    assert (more["x"], more["note"]) == ([60, 70], None)
    (over,) = get(client, "/api/columns", **keys, x="step")["runs"]
    assert (len(over["x"]), over["note"]) == (8, None)
    curves = get(client, "/api/curves", at="one", key="mean_reward", x="wall", smooth=1)
    (points,) = [each["points"] for each in curves["conditions"][0]["runs"]]
    assert points == [[40, 0.4], [50, 0.5], [60, 0.6], [70, 0.7]]
    assert len(curves["conditions"][1]["mean"]) == 8
    assert curves["note"].startswith("1 of 2 runs have rows of an earlier release")
    assert get(client, "/api/curves", at="one", key="mean_reward")["note"] is None


@pytest.mark.parametrize("way", ["own_seconds", "graded", "columns", "curves"])
def test_columns_that_are_taken_together_have_the_same_rows(tmp_path, monkeypatch, way):
    """However a file is cut between two of them."""
    home = campaign(tmp_path / "one", seeds=1, steps=300)
    graded = {"reward_min": 0.0, "reward_max": 1.0, "mean_reward": 0.5, "reward_std": 0.5}
    for path in home.glob("runs/*/metrics.jsonl"):
        path.unlink()
        append_jsonl(path, [row(n, **graded) | {"time/rollout": float(n)} for n in range(300)])
        append_jsonl(path, [row(300, **graded) | {"reward_std": 0.1}])
    library = Library(Places([home]), Pool())
    run = library.home("one").runs[0]
    numbers, path = library.numbers(run), run.path / "metrics.jsonl"
    rows, column, cut = read_jsonl(path), numbers.column, []

    def cutting(key):
        found = column(key)
        if not cut:
            cut.append(threading.Thread(target=lambda: (write_text(path, dumps(rows[0]) + "\n"), numbers.refresh())))
            cut[0].start()
            cut[0].join(0.3)
        return found

    monkeypatch.setattr(numbers, "column", cutting)
    if way == "own_seconds":
        assert own_seconds(numbers)[:300] == pytest.approx(0.5 + np.arange(300) / 2)
    elif way == "graded":
        assert _graded_row(numbers) == pytest.approx(graded | {"reward_std": 0.1})
    elif way == "columns":
        found = columns_of(library, run, ["entropy", "mean_reward"], "device", 1_000, 0)
        assert {len(each["y"]) for each in found["columns"].values()} == {len(found["x"])} == {301}
    else:
        line = curves_api.line_of(library, run, "mean_reward", "tokens")
        assert len(line.xs) == len(line.values) == 301
    cut[0].join(20)
    assert len(numbers) == 1


def test_columns_leave_out_rows_and_keep_extremes(tmp_path):
    home = campaign(tmp_path / "one", seeds=1, steps=2)
    path = home / "runs/grpo+none_s1/metrics.jsonl"
    path.unlink()
    append_jsonl(path, [{"step": step, "a": 100.0 if step == 777 else step % 2, "b": None,
                         "c": step / 10 if step % 10 == 3 else None} for step in range(1_000)])  # fmt: skip
    (run,) = get(client_of(home), "/api/columns", at="one/runs/grpo+none_s1", key=["a", "b", "c"], points=10)["runs"]
    assert (run["x"], run["rows"]) == (list(range(99, 1_000, 100)), 1_000)
    a = run["columns"]["a"]
    assert a == {"y": [1] * 10, "low": [0] * 10, "high": [1] * 7 + [100] + [1] * 2}, "each is of its step"
    assert run["columns"]["b"]["y"] == [None] * 10
    c = run["columns"]["c"]
    assert (c["x"], c["y"][0]) == (list(range(93, 1_000, 100)), 9.3), "no last row of a stretch has one"
    points = get(client_of(home), "/api/curves", at="one", key="a", smooth=1)["conditions"][0]["runs"][0]["points"]
    assert [777.0, 100.0] in points


@pytest.fixture
def long(tmp_path, monkeypatch):
    """Two seeds of 10,000 steps, the second with another number of tokens in each; read at once."""
    monkeypatch.setattr("retrain.ui.numbers.CACHED_FROM", 1 << 40)
    home = campaign(tmp_path / "one", seeds=2, steps=2)
    for path in home.glob("runs/*/metrics.jsonl"):
        path.unlink()
        more = 1 + path.parent.name.endswith("s2")
        append_jsonl(path, [row(n, mean_reward=float(n % 7), num_tokens=100 * more * (n + 1)) for n in range(10_000)])
    return home


def test_a_part_of_the_axis_comes_with_every_row_of_it(long):
    client = client_of(long)
    query = {"at": "one", "key": "mean_reward", "smooth": 1}
    whole = get(client, "/api/curves", **query)["conditions"][0]
    assert len(whole["mean"]) == 160
    assert len(whole["runs"][0]["points"]) < 10_000
    found = get(client, "/api/curves", **query, **{"from": 4_000, "to": 4_099})
    first = found["conditions"][0]
    expected = [[step, step % 7] for step in range(3_999, 4_101)]  # and one on either side
    assert first["mean"] == first["runs"][0]["points"] == expected
    assert found["differences"][0]["mean"] == [[step, 0] for step, _ in expected]
    assert (first["count"], first["of"]) == ([[3_999, 2], [4_100, 2]], whole["of"])
    assert {**found, "conditions": 0, "differences": 0} == {
        **get(client, "/api/curves", **query), "conditions": 0, "differences": 0,
    }  # fmt: skip


def test_a_part_is_one_of_the_chosen_axis_and_may_be_open(long):
    client = client_of(long)
    query = {"at": "one", "key": "mean_reward", "smooth": 1, "x": "tokens"}
    found = get(client, "/api/curves", **query, **{"from": 1_000, "to": 1_250.5})["conditions"][0]
    runs = [[x for x, _ in run["points"]] for run in found["runs"]]
    assert runs == [[900, 1_000, 1_100, 1_200, 1_300], [800, 1_000, 1_200, 1_400]]
    assert [x for x, _ in found["mean"]] == [900, 1_050, 1_200, 1_350]  # the mean of both runs' tokens
    last = get(client, "/api/curves", **query, **{"from": 999_900})["conditions"][0]["runs"][0]["points"]
    assert [x for x, _ in last] == [999_800, 999_900, 1_000_000]
    none = get(client, "/api/curves", **query, **{"from": 10**9})["conditions"][0]
    assert [len(run["points"]) for run in none["runs"]] == [1, 1]  # the one point on this side
    smooth = {"at": "one", "key": "mean_reward", "smooth": 50}
    part = get(client, "/api/curves", **smooth, **{"from": 5_000, "to": 5_000})["conditions"][0]["mean"]
    assert part[1] == [5_000, pytest.approx(np.mean([n % 7 for n in range(4_951, 5_001)]))]  # also what lies before it


def test_a_run_of_any_condition_has_the_rows_of_a_part(long):
    """Alone, as its own page shows it."""
    for label in LABELS:
        query = {"at": f"one/runs/{label}_s1", "key": "mean_reward", "from": 4_000, "to": 4_099}
        found = get(client_of(long), "/api/curves", **query, smooth=1)
        (condition,) = found["conditions"]
        assert condition["label"] == label
        assert condition["runs"][0]["points"] == [[step, step % 7] for step in range(3_999, 4_101)]
        assert found["differences"] == []


def test_rows_are_smoothed_before_some_are_left_out(long):
    """Over as many steps as were asked for, whatever the number of points, also where only new rows are asked for."""
    (run,) = get(client_of(long), "/api/columns", at="one/runs/maxrl+none_s2", key="mean_reward", smooth=5)["runs"]
    values = run["columns"]["mean_reward"]["y"]
    assert len(run["x"]) == len(values) == 1_000
    assert values == pytest.approx([np.mean([n % 7 for n in range(int(x) - 4, int(x) + 1)]) for x in run["x"]])
    newest = {"at": "one/runs/maxrl+none_s2", "key": "mean_reward", "smooth": 5, "since": 9_999}
    (run,) = get(client_of(long), "/api/columns", **newest)["runs"]
    assert (run["x"], run["columns"]["mean_reward"]["y"]) == ([9_999], [values[-1]])


def test_smoothing_counts_steps_and_leaves_evaluations(tmp_path):
    """Of a metric that every fifth row has, 10 steps are two values."""
    home = campaign(tmp_path / "one", seeds=1, steps=2)
    path = home / "runs/grpo+none_s1/metrics.jsonl"
    path.unlink()
    append_jsonl(path, [row(step, mean_reward=step if step % 5 == 0 else None) for step in range(21)])
    client, query = client_of(home), {"at": "one/runs/grpo+none_s1", "smooth": 10}
    curve = get(client, "/api/curves", key="mean_reward", **query)["conditions"][0]
    assert curve["mean"] == [[0, 0], [5, 2.5], [10, 7.5], [15, 12.5], [20, 17.5]]
    held_out = "eval/heldout/correct_rate"
    (run,) = get(client, "/api/columns", key=["mean_reward", held_out], **query)["runs"]
    assert run["columns"]["mean_reward"]["y"][::5] == [0, 2.5, 7.5, 12.5, 17.5]
    assert run["columns"]["mean_reward"]["y"][1:5] == [None] * 4
    mean = get(client, "/api/curves", key=held_out, **query)["conditions"][0]["mean"]
    assert run["columns"][held_out]["y"] == [y for _, y in mean] == [0.25, 0.515625]


@pytest.mark.parametrize(
    ("part", "words"),
    [({"from": "x"}, "from is a number"), ({"to": "inf"}, "to is a number"), ({"to": "nan"}, "to is a number"),
     ({"from": 5, "to": 4}, "from is to be no more than to")],
)  # fmt: skip
def test_a_part_that_is_none_is_refused(home, part, words):
    assert words in get(client_of(home), "/api/curves", 400, at="one", key="mean_reward", **part)["error"]


def test_only_new_rows_on_request(home):
    client, path = client_of(home), home / "runs/grpo+none_s1/metrics.jsonl"
    query = {"at": "one/runs/grpo+none_s1", "key": "mean_reward"}
    (first,) = get(client, "/api/columns", **query)["runs"]
    append_jsonl(path, [row(6), row(7)])
    (more,) = get(client, "/api/columns", **query, since=first["rows"])["runs"]
    assert (more["x"], more["rows"], more["columns"]["mean_reward"]["y"]) == ([6, 7], 8, [0.6, 0.7])
    (none,) = get(client, "/api/columns", **query, since=10**9)["runs"]
    assert (none["x"], none["columns"]["mean_reward"]["y"]) == ([], [])


def test_metrics_are_the_catalogue_s(home):
    found = get(client_of(home), "/api/metrics", at="one")
    by_key = {metric["key"]: metric for metric in found["metrics"]}
    reward = by_key["mean_reward"]
    assert reward["section"] == "Reward"
    assert reward["range"] == {"min": 0, "max": 1, "invert": False}
    match = by_key["rewards/match/mean"]
    assert match["sample"]
    assert match["spread"]["std"] == "rewards/match/std"
    assert match["histogram"] == "match"
    assert by_key["entropy"]["healthy"]["text"]
    assert found["tags"] == ["easy"]
    assert found["watch"][0] == "eval/heldout/correct_rate"
    assert "condition" not in by_key


def test_other_names_are_shown_once(tmp_path):
    home = campaign(tmp_path / "one", seeds=1)
    append_jsonl(home / "runs/grpo+none_s1/metrics.jsonl", [row(6, loss=1.0) | {"loss/policy_avg": 1.0}])
    keys = [metric["key"] for metric in get(client_of(home), "/api/metrics", at="one")["metrics"]]
    assert "loss" in keys
    assert "loss/policy_avg" not in keys


def test_a_key_that_the_catalogue_does_not_know_stands_where_its_name_says(tmp_path):
    home = campaign(tmp_path / "one", seeds=1)
    unknown = {"mine": 1.0, "game/score": 2.0, "game/board/size": 3.0, "game/board/left/size": 4.0}
    append_jsonl(home / "runs/grpo+none_s1/metrics.jsonl", [row(6) | unknown])
    found = {metric["key"]: metric for metric in get(client_of(home), "/api/metrics", at="one")["metrics"]}
    assert {key: (found[key]["section"], found[key]["group"], found[key]["name"]) for key in unknown} == {
        "mine": ("General", "", "mine"),
        "game/score": ("game", "", "score"),
        "game/board/size": ("game", "board", "size"),
        "game/board/left/size": ("game", "board/left", "size"),
    }
    assert (found["mine"]["definition"], found["mine"]["healthy"]) == ("", None)
    assert found["rewards/match/mean"]["section"] == "Reward"


@pytest.mark.parametrize(("text", "low", "high"), [("below 0.1", None, 0.1), ("0", 0, 0), ("0 to 1", 0, 1),
                                                    ("0 with one update per batch", 0, 0), ("1 on-policy", 1, 1),
                                                    ("rising", None, None), ("below 2 % of the step", None, None),
                                                    ("0 equal to 1 concentrated", None, None)])  # fmt: skip
def test_healthy_ranges(text, low, high):
    from retrain.record.catalogue import Metric
    from retrain.ui.metrics import healthy_of

    found = healthy_of(Metric("k", "", "", text, "", "", {}))
    assert found is not None
    assert (found["low"], found["high"]) == (low, high)


def test_notes_and_why(home):
    client = client_of(home)
    notes = get(client, "/api/notes", at="one")
    assert notes["of"] == 12
    assert [note["step"] for note in notes["notes"]] == [4] * 6 + [2] * 6
    assert get(client, "/api/notes", at="one", level="warning", search="TRUNC")["total"] == 6
    why = get(client, "/api/why", at="one/runs/grpo+none_s1", key="val/ratio")
    assert [note["key"] for note in why["notes"]] == ["nothing_clipped"]  # its rule looks at val/ratio
    assert why["metric"]["definition"]
    assert get(client, "/api/why", at="one/runs/grpo+none_s1", key="step_time_s")["value"] == 2.0


def test_two_runs_are_compared(home):
    run = home / "runs/maxrl+none_s1"
    (run / "code.diff").write_text("### repo: x\n+two\n")
    (home / "runs/grpo+none_s1/code.diff").write_text("### repo: x\n+one\n")
    found = get(client_of(home), "/api/compare", a="one/runs/grpo+none_s1", b="one/runs/maxrl+none_s1")
    assert {"key": "algorithm.advantage_mode", "a": "grpo", "b": "maxrl"} in found["config"]
    assert "+ +two".replace(" ", "") in [line.replace(" ", "") for line in found["code"]["diff"]]
    assert {"name": "data_hash", "a": "d1", "b": "d1", "same": True} in found["hashes"]


def test_numbers_for_json():
    values = np.array([0.1, 1 / 3, np.nan, np.inf, -np.inf, 0, 12345678.0, 1e-30, -2.5e30], np.float32)
    found = plain(values)
    assert found[0] == 0.1
    assert found[1] == 0.3333333
    assert found[2:5] == [None] * 3
    assert found[5:7] == [0, 12345678]
    assert found[7] == pytest.approx(1e-30)
    assert found[8] == pytest.approx(-2.5e30)
    assert all(value is None or math.isfinite(value) for value in found)


@pytest.mark.parametrize("most", [4, 10, 101])
def test_decimation_keeps_ends_and_extremes(most):
    y = np.random.default_rng(1).normal(size=10_000)
    y[::7] = np.nan
    places = extremes(y, most)
    assert len(places) <= most
    assert len(places) > most - 4  # an even number beside the ends
    assert list(places) == sorted(set(places))
    assert {int(np.nanargmax(y)), int(np.nanargmin(y)), 1, 9_999} <= set(places.tolist())
    assert np.isfinite(y[places]).all()
    _, places, low, high = last_of_stretches(y, most - 2)
    assert (np.nanmin(low), np.nanmax(high)) == (np.nanmin(y), np.nanmax(y))
    assert (low <= y[places]).all()
    assert len(places) == most - 2


def test_an_answer_that_is_known_is_not_sent_again(home):
    client = client_of(home)
    first = client.get("/api/columns", params={"at": "one", "key": "mean_reward"})
    again = client.get(
        "/api/columns", params={"at": "one", "key": "mean_reward"}, headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/api/metrics", params={"at": "one"}).headers["content-encoding"] == "gzip"


@pytest.fixture
def sampled(home):
    """A run with the rollouts of two steps, and the spans of five."""
    run = home / "runs/grpo+none_s1"
    for step in (0, 3):
        rows = [
            {"group_idx": i // 4, "traj_idx": i % 4, "total_reward": float(i % 4 == step), "advantage": None,
             "trajectory_metrics": {"depth": i}, "steps": [{"ob_len": 5, "ac_len": i}, {"ac_len": 1}]} for i in range(8)
        ]  # fmt: skip
        append_jsonl(run / f"train_iteration_{step:06d}_rollout_summaries.jsonl", rows)
    spans = [
        {"step": step, "spans": [{"name": name, "wall_start": 10 * step + at, "wall_end": 10 * step + at + 4}
                                 for at, name in ((0, "rollout"), (4, "update"))]} for step in range(5)
    ]  # fmt: skip
    append_jsonl(run / "timing_spans.jsonl", spans)
    return run


def test_histograms(home, sampled):
    client, query = client_of(home), {"at": "one/runs/grpo+none_s1"}
    found = get(client, "/api/histogram", **query, metric="reward", step=100)
    assert (found["step"], found["counts"], found["edges"]) == (3, [6, 2], [-0.5, 0.5, 1.5])
    assert [(each["group"], each["sample"]) for each in found["rollouts"] if each["value"] == 1] == [(0, 3), (1, 3)]
    assert found["names"] == ["reward", "advantage", "length", "prompt_length", "turns", "depth"]
    assert sum(get(client, "/api/histogram", **query, metric="length", step=0)["counts"]) == 8
    over = get(client, "/api/histogram", **query, metric="depth", over="steps")
    assert over["steps"] == [0, 3]
    assert over["counts"] == [[1] * 8] * 2
    assert get(client, "/api/histogram", **query, metric="advantage")["counts"] == [0]


def test_a_timeline_is_read_step_by_step(home, sampled):
    client, query = client_of(home), {"at": "one/runs/grpo+none_s1"}
    found = get(client, "/api/timeline", **query)
    assert (found["steps"], found["from"], found["to"], found["lanes"]) == (5, 0, 5, ["rollout", "update"])
    assert found["shown"][1]["spans"] == [[0, 10, 14], [1, 14, 18]]
    assert found["shown"][1]["seconds"]["rollout"] == 4
    part = get(client, "/api/timeline", **query, **{"from": 2, "to": 4})
    assert [step["step"] for step in part["shown"]] == [2, 3]
    (sampled / "timing_spans.jsonl").write_text('{"step": 0, "spans": [{"name": "x"}]}\nnone\n')
    again = get(client, "/api/timeline", **query)
    assert (again["steps"], again["shown"]) == (2, [])


def test_what_was_sampled_and_timed_may_be_missing(home):
    client = client_of(home)
    assert get(client, "/api/timeline", at="one/runs/maxrl+none_s2")["shown"] == []
    assert (
        "no files of rollouts" in get(client, "/api/histogram", 404, at="one/runs/maxrl+none_s2", metric="x")["error"]
    )
