import numpy as np
import pytest
from helpers.pages import LABELS, OTHER, RUN, campaign, client_of, evaluation, get, row, trainer_state

from retrain.config.campaign import condition_name
from retrain.files import append_jsonl, jsonable, read_json, read_jsonl, write_json
from retrain.ui.decimation import Smoothing
from retrain.verdicts.evidence import curve, read_campaign
from retrain.verdicts.planning import pair_spread, seeds_needed
from retrain.verdicts.pooling import compare_directories
from retrain.verdicts.results import Measure


def rewritten(path, rows):
    """Replace the rows of a file."""
    path.unlink()
    append_jsonl(path, rows)


@pytest.fixture
def home(tmp_path):
    return campaign(tmp_path / "one", seeds=3)


def test_places_and_a_campaign_have_the_comparison_of_retrain_compare(tmp_path, home):
    client = client_of(tmp_path)
    while get(client, "/api/places")["reading"]["of"]:
        pass
    (one,) = get(client, "/api/places")["places"]  # asked after the last was read
    assert one["place"] == f"{tmp_path.name}/one"
    assert (one["kind"], one["source"], one["state"]) == ("campaign", "retrain", "done")
    assert one["runs"]["planned"] == one["runs"]["done"] == 6
    assert (one["seeds"], one["steps"]) == ({"planned": 3, "done": 3}, {"done": 36, "planned": 36})
    assert one["conditions"] == ["grpo+none", "maxrl+none"]
    assert one["device_hours"] == pytest.approx(6 * 6 * (0.5 + 1.0 / 2) / 3600)
    assert one["verdict"]["difference"] == pytest.approx(0.2)
    client = client_of(home)
    found = get(client, "/api/campaign", at="one", wait_ms=60_000)
    assert found["comparison"] == jsonable(compare_directories([home])) | {"directories": ["one"]}
    assert (found["fresh"], found["sets"], found["metric"]) == (True, ["heldout"], "eval/heldout/correct_rate")
    assert [run["place"] for run in found["runs"]] == [f"one/runs/{run.run_id}" for run in read_campaign(home).runs]
    assert found["checksums"]["data_hash"] == "d1"
    cost = found["cost"]
    assert [each["label"] for each in cost] == ["grpo+none", "maxrl+none"]
    assert (cost[1]["seconds_per_run"], cost[1]["tokens_per_run"]) == (pytest.approx(6.0), 600)
    assert cost[1]["typical_difference"] == found["comparison"]["conditions"][1]["typical_difference"]
    append_jsonl(home / "runs/maxrl+none_s1/evals.jsonl", [evaluation(6, 1.0)])
    after = get(client, "/api/campaign", at="one", wait_ms=60_000)["comparison"]
    assert after == jsonable(compare_directories([home])) | {"directories": ["one"]}
    assert after["conditions"][1]["difference"] > found["comparison"]["conditions"][1]["difference"]


def test_power_says_how_many_fresh_seeds_would_show_a_difference(home):
    """Differences of 0.05 and twice 0.2 between three pairs, of seeds that the plan names."""
    runs = read_json(home / "manifest.json")["runs"]
    plan = [{"run_id": run["run_id"], "config": {"training": {"seed": run["seed"]}}, "overrides": {}} for run in runs]
    append_jsonl(home / "runs/maxrl+none_s1/evals.jsonl", [evaluation(6, 0.5 + 1 / 64 + 0.05)])
    assert get(client_of(home), "/api/campaign", at="one", wait_ms=60_000)["power"] == [], "no plan: no seeds are known"
    write_json(home / "plan.json", {"runs": plan})
    found = get(client_of(home), "/api/campaign", at="one", wait_ms=60_000)
    (line,), (_, condition) = found["power"], found["comparison"]["conditions"]
    needed = seeds_needed(1, condition["typical_difference"] / pair_spread([condition["differences"]]))
    assert (line["label"], line["needed"]) == ("maxrl+none", needed)
    assert line["line"].endswith(f"so far, is found with 80 % probability by {needed} fresh seeds")
    assert line["toml"] == f"seeds = {list(range(4, 4 + needed))}"


def test_a_comparison_from_columns_is_the_one_from_rows(home, monkeypatch):
    """Runs whose rows would not fit in memory: only float32 is between the two."""
    monkeypatch.setattr("retrain.ui.measured.WHOLE_BYTES", 0)
    found = get(client_of(home), "/api/campaign", at="one", wait_ms=60_000)["comparison"]
    expected = jsonable(compare_directories([home]))
    for mine, its in zip(found["conditions"], expected["conditions"], strict=True):
        for key in ("after_values", "difference", "difference_interval", "verdict", "sentence", "tokens", "missing"):
            assert mine[key] == its[key], key


def test_curves_and_their_smoothing_are_the_report_s(home):
    values = np.random.default_rng(0).normal(size=6).tolist()
    rewritten(home / f"runs/{LABELS[0]}_s1/metrics.jsonl", [row(n, mean_reward=x) for n, x in enumerate(values)])
    read, client = read_campaign(home), client_of(home)
    for key in ("mean_reward", "correct_rate", "eval/heldout/correct_rate", "entropy"):
        found = get(client, "/api/curves", at="one", key=key)
        for index, label in enumerate(read.labels):
            expected = curve(label, index, read.of(label), Measure(key=key), smooth=False)
            mine = found["conditions"][index]
            assert condition_name(mine["label"]) == label
            assert np.array(mine["mean"]) == pytest.approx(np.array(expected["mean"]), rel=1e-6)
            assert np.array(mine["band"]) == pytest.approx(np.array(expected["band"]), rel=1e-6)
            assert np.array(mine["runs"][0]["points"]) == pytest.approx(
                np.array(expected["runs"][0]["points"]), rel=1e-6
            )
        assert found["differences"][0]["pairs"] == 3
    expected = [np.mean(values[max(0, i - 3) : i + 1]) for i in range(len(values))]
    points = get(client, "/api/curves", at=RUN, key="mean_reward", smooth=4)["conditions"][0]["runs"][0]["points"]
    assert [y for _, y in points] == pytest.approx(expected, abs=1e-5)
    (run,) = get(client, "/api/columns", at=RUN, key="mean_reward", smooth=4)["runs"]
    assert run["columns"]["mean_reward"]["y"] == pytest.approx(expected, abs=1e-5)


def test_differences_are_of_pairs_of_seeds(home):
    path = home / "runs/maxrl+none_s2/metrics.jsonl"
    rewritten(path, [each | {"mean_reward": each["mean_reward"] + 1.0} for each in read_jsonl(path)])
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


@pytest.mark.parametrize(("x", "each"), [("tokens", 100), ("wall", 2), ("device", 1)])
def test_axes(home, x, each):
    keys = ["mean_reward", "eval/heldout/correct_rate"]
    (found,) = get(client_of(home), "/api/columns", at=RUN, key=keys, x=x)["runs"]
    assert found["x"] == [each * steps for steps in range(1, 7)]
    assert found["columns"]["mean_reward"]["y"] == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    held_out = found["columns"]["eval/heldout/correct_rate"]
    assert (held_out["x"], held_out["y"]) == ([0, 6 * each], [0.25, 0.515625])


def test_columns_leave_out_rows_and_keep_extremes(tmp_path):
    home = campaign(tmp_path / "one", seeds=1, steps=2)
    rows = [
        {"step": step, "a": 100.0 if step == 777 else step % 2, "c": step / 10 if step % 10 == 3 else None}
        for step in range(1_000)
    ]
    rewritten(home / f"runs/{LABELS[0]}_s1/metrics.jsonl", rows)
    (run,) = get(client_of(home), "/api/columns", at=RUN, key=["a", "c"], points=10)["runs"]
    a, c = (run["columns"][key] for key in ("a", "c"))
    assert len(run["x"]) <= 10
    assert run["rows"] == 1_000
    assert a == {"y": [100.0 if x == 777 else x % 2 for x in run["x"]], "raw": None}
    assert {0, 777, 999} <= set(run["x"])
    assert c["y"] == [x / 10 for x in c["x"]], "few of the rows above have a value"
    assert (c["x"][0], c["x"][-1]) == (3, 993)
    curves = get(client_of(home), "/api/curves", at="one", key="a", smooth=1)
    assert [777.0, 100.0] in curves["conditions"][0]["runs"][0]["points"]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Two seeds of 4,000 steps, the second with another number of tokens in each; read at once."""
    home = campaign(tmp_path_factory.mktemp("long") / "one", seeds=2, steps=2)
    for path in home.glob("runs/*/metrics.jsonl"):
        more = 1 + path.parent.name.endswith("s2")
        rows = [row(n, mean_reward=float(n % 7), num_tokens=100 * more * (n + 1)) for n in range(4_000)]
        rewritten(path, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrain.ui.numbers.CACHED_FROM", 1 << 40)
        yield client_of(home)


def test_a_part_of_the_axis_comes_with_every_row_of_it(long):
    query = {"at": "one", "key": "mean_reward", "smooth": 1}
    whole = get(long, "/api/curves", **query)["conditions"][0]
    assert len(whole["runs"][0]["points"]) < 4_000
    found = get(long, "/api/curves", **query, **{"from": 2_000, "to": 2_099})
    first, expected = found["conditions"][0], [[step, step % 7] for step in range(1_999, 2_101)]  # one on either side
    assert first["mean"] == first["runs"][0]["points"] == expected
    assert found["differences"][0]["mean"] == [[step, 0] for step, _ in expected]
    assert (first["count"], first["of"]) == ([[1_999, 2], [2_100, 2]], whole["of"])
    query["x"] = "tokens"
    found = get(long, "/api/curves", **query, **{"from": 1_000, "to": 1_250.5})["conditions"][0]
    runs = [[x for x, _ in run["points"]] for run in found["runs"]]
    assert runs == [[900, 1_000, 1_100, 1_200, 1_300], [800, 1_000, 1_200, 1_400]]
    assert [x for x, _ in found["mean"]] == [900, 1_050, 1_200, 1_350]  # the mean of both runs' tokens
    (run,) = get(long, "/api/columns", at=RUN, key="mean_reward", x="tokens", **{"from": 1_000, "to": 1_250.5})["runs"]
    assert run["x"] == [900, 1_000, 1_100, 1_200, 1_300]
    error = get(long, "/api/curves", 400, at="one", key="mean_reward", **{"from": 5, "to": 4})["error"]
    assert "from is to be no more than to" in error


def test_rows_are_smoothed_before_some_are_left_out(long, home):
    """Smoothing counts steps, also where not every row has a value, and where only new rows are asked for."""
    (run,) = get(long, "/api/columns", at=OTHER, key="mean_reward", smooth=5)["runs"]
    values = run["columns"]["mean_reward"]["y"]
    assert 900 < len(run["x"]) == len(values) <= 1_000
    assert values == pytest.approx([np.mean([n % 7 for n in range(max(0, int(x) - 4), int(x) + 1)]) for x in run["x"]])
    smooth = {"at": "one", "key": "mean_reward", "smooth": 50}
    part = get(long, "/api/curves", **smooth, **{"from": 3_000, "to": 3_000})["conditions"][0]["mean"]
    assert part[1] == [3_000, pytest.approx(np.mean([n % 7 for n in range(2_951, 3_001)]))]  # also what lies before it
    some = [row(step, mean_reward=step if step % 5 == 0 else None) for step in range(21)]
    rewritten(home / f"runs/{LABELS[0]}_s1/metrics.jsonl", some)
    client, query = client_of(home), {"at": RUN, "smooth": 10}
    curve = get(client, "/api/curves", key="mean_reward", **query)["conditions"][0]
    assert curve["mean"] == [[0, 0], [5, 2.5], [10, 7.5], [15, 12.5], [20, 17.5]]
    held_out = "eval/heldout/correct_rate"
    (run,) = get(client, "/api/columns", key=["mean_reward", held_out], **query)["runs"]
    assert run["columns"]["mean_reward"]["y"][::5] == [0, 2.5, 7.5, 12.5, 17.5]
    assert run["columns"]["mean_reward"]["y"][1:5] == [None] * 4
    assert run["columns"][held_out]["y"] == [0.25, 0.515625]  # evaluations are not smoothed


def tensorboards(values, weight):
    """TensorBoard's smoothing, as its ``line_chart`` has it: NaN are passed on and do not count."""
    last, count, smoothed = 0.0, 0, []
    for value in values:
        if not np.isfinite(value):
            smoothed.append(np.nan)
            continue
        last = last * weight + (1 - weight) * value
        count += 1
        smoothed.append(last / (1 - weight**count))
    return smoothed


def test_exponential_smoothing_is_tensorboard_s_and_comes_with_the_own_values(long):
    draw = np.random.default_rng(1)
    values = np.where(draw.random(5_000) < 0.1, np.nan, draw.normal(size=5_000))
    for weight in (0.0, 0.5, 0.9, 0.999):
        ours, theirs = Smoothing.parse(f"ema:{weight:g}").of(np.arange(5_000), values), tensorboards(values, weight)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    own = np.arange(4_000) % 7
    expected = np.array(tensorboards(own.astype(float), 0.9))
    query = {"at": "one", "key": "mean_reward", "smooth": "ema:0.9"}
    for part in ({}, {"from": 3_000, "to": 3_020}):  # a part of the axis is smoothed with the rows before it
        found = get(long, "/api/curves", **query, **part)
        assert (found["smooth"], found["smoothing"]) == (1, "ema:0.9")
        condition = found["conditions"][0]
        steps = [int(x) for x, _ in condition["mean"]]
        assert len(steps) == 23 if part else len(steps) <= 320
        assert [y for _, y in condition["mean"]] == pytest.approx(expected[steps], abs=1e-6)
        assert condition["raw"] == own[steps].tolist()
        run = condition["runs"][1]
        assert run["raw"] == own[[int(x) for x, _ in run["points"]]].tolist()
        (run,) = get(long, "/api/columns", **query | {"at": RUN}, **part)["runs"]
        steps = [int(x) for x in run["x"]]
        assert len(steps) == 23 if part else 900 < len(steps) <= 1_000
        column = run["columns"]["mean_reward"]
        assert column["y"] == pytest.approx(expected[steps], abs=1e-6)
        assert column["raw"] == own[steps].tolist()


@pytest.mark.parametrize("smooth", ["ema:1", "ema:-0.5", "ema:", "mean:x", "mean:100001", "median:3", "ema:nan"])
def test_another_smoothing_is_refused(home, smooth):
    assert "smooth is none" in get(client_of(home), "/api/curves", 400, at="one", key="kl", smooth=smooth)["error"]


def test_only_new_rows_on_request_and_no_answer_that_is_known(home):
    client, query = client_of(home), {"at": RUN, "key": "mean_reward"}
    answer = client.get("/api/columns", params=query)
    again = client.get("/api/columns", params=query, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/api/metrics", params={"at": "one"}).headers["content-encoding"] == "gzip"
    append_jsonl(home / f"runs/{LABELS[0]}_s1/metrics.jsonl", [row(6), row(7)])
    (more,) = get(client, "/api/columns", **query, since=answer.json()["runs"][0]["rows"])["runs"]
    assert (more["x"], more["rows"], more["columns"]["mean_reward"]["y"]) == ([6, 7], 8, [0.6, 0.7])


def test_metrics_are_the_catalogue_s_and_others_stand_where_their_names_say(home):
    unknown = {"mine": 1.0, "game/score": 2.0, "game/board/left/size": 4.0}
    rows = [row(6, loss=1.0) | {"loss/policy_avg": 1.0} | unknown]
    append_jsonl(home / f"runs/{LABELS[0]}_s1/metrics.jsonl", rows)
    found = get(client_of(home), "/api/metrics", at="one")
    by_key = {metric["key"]: metric for metric in found["metrics"]}
    reward, match = by_key["mean_reward"], by_key["rewards/match/mean"]
    assert (reward["section"], reward["range"]) == ("Reward", {"min": 0, "max": 1, "invert": False})
    assert (match["section"], match["spread"]["std"], match["histogram"]) == ("Reward", "rewards/match/std", "match")
    assert by_key["entropy"]["healthy"]["text"]
    assert (found["tags"], found["watch"][0]) == (["easy"], "eval/heldout/correct_rate")
    assert not {"condition", "loss/policy_avg"} & set(by_key)  # other names are shown once
    assert {key: (by_key[key]["section"], by_key[key]["group"], by_key[key]["name"]) for key in unknown} == {
        "mine": ("General", "", "mine"),
        "game/score": ("game", "", "score"),
        "game/board/left/size": ("game", "board/left", "size"),
    }


def test_notes_reasons_and_two_runs_side_by_side(home):
    for label, line in zip(LABELS, ("+one", "+two"), strict=True):
        (home / f"runs/{label}_s1/code.diff").write_text(f"### repo: x\n{line}\n")
    client = client_of(home)
    notes = get(client, "/api/notes", at="one")
    assert notes["of"] == 12
    assert [note["step"] for note in notes["notes"]] == [4] * 6 + [2] * 6
    assert get(client, "/api/notes", at="one", level="warning", search="TRUNC")["total"] == 6
    why = get(client, "/api/why", at=RUN, key="val/ratio")
    assert [note["key"] for note in why["notes"]] == ["nothing_clipped"]  # its rule looks at val/ratio
    found = get(client, "/api/compare", a=RUN, b="one/runs/maxrl+none_s1")
    assert {"key": "algorithm.advantage_mode", "a": "grpo", "b": "maxrl"} in found["config"]
    assert "++two" in [line.replace(" ", "") for line in found["code"]["diff"]]
    assert {"name": "data_hash", "a": "d1", "b": "d1", "same": True} in found["hashes"]


def test_histograms_and_timelines(home):
    """A run with the rollouts of two steps, and the spans of five."""
    run = home / f"runs/{LABELS[0]}_s1"
    for step in (0, 3):
        rows = [
            {"group_idx": i // 4, "traj_idx": i % 4, "total_reward": float(i % 4 == step), "advantage": None,
             "trajectory_metrics": {"depth": i}, "steps": [{"ob_len": 5, "ac_len": i}, {"ac_len": 1}]} for i in range(8)
        ]  # fmt: skip
        append_jsonl(run / f"train_iteration_{step:06d}_rollout_summaries.jsonl", rows)
    for step in range(5):
        spans = [{"name": name, "wall_start": 10 * step + at, "wall_end": 10 * step + at + 4}
                 for at, name in ((0, "rollout"), (4, "update"))]  # fmt: skip
        append_jsonl(run / "timing_spans.jsonl", [{"step": step, "spans": spans}])
    client, query = client_of(home), {"at": RUN}
    found = get(client, "/api/histogram", **query, metric="reward", step=100)
    assert (found["step"], found["counts"], found["edges"]) == (3, [6, 2], [-0.5, 0.5, 1.5])
    assert [(each["group"], each["sample"]) for each in found["rollouts"] if each["value"] == 1] == [(0, 3), (1, 3)]
    assert found["names"] == ["reward", "advantage", "length", "prompt_length", "turns", "depth"]
    over = get(client, "/api/histogram", **query, metric="depth", over="steps")
    assert (over["steps"], over["counts"]) == ([0, 3], [[1] * 8] * 2)
    found = get(client, "/api/timeline", **query)
    assert (found["steps"], found["from"], found["to"], found["lanes"]) == (5, 0, 5, ["rollout", "update"])
    assert (found["shown"][1]["spans"], found["shown"][1]["seconds"]["rollout"]) == ([[0, 10, 14], [1, 14, 18]], 4)
    part = get(client, "/api/timeline", **query, **{"from": 2, "to": 4})
    assert [step["step"] for step in part["shown"]] == [2, 3]


def test_runs_of_several_campaigns_and_tools_are_grouped_by_their_settings(tmp_path):
    campaign(tmp_path / "one", seeds=3)
    campaign(tmp_path / "two", seeds=2, labels=("grpo+none",))
    for path in (tmp_path / "two/runs").iterdir():
        write_json(path / "config.json", read_json(path / "config.json") | {"lora": {"rank": 8}})
    for name in ("sft_s1", "sft_s2"):
        trainer_state(tmp_path / f"trl/{name}", 20)
    client, root = client_of(tmp_path), tmp_path.name
    one, two, trl = (f"{root}/{name}" for name in ("one", "two", "trl"))
    found = get(client, "/api/curves", at=[one, two, trl], key="mean_reward", smooth="none")
    assert [(each["label"], each["index"], each["n"]) for each in found["conditions"]] == [
        (f"{one} · grpo+none", 0, 3), (f"{one} · maxrl+none", 1, 3), (f"{two} · grpo+none", 2, 2),
        (f"{trl} · sft", 3, 2),
    ]  # fmt: skip
    assert found["conditions"][3]["mean"] == [[5, 0.5], [10, 1], [15, 1.5], [20, 2]]  # TRL's name of it is reward
    assert found["differences"] == []
    differ = {each["key"]: each["values"] for each in found["differ"]}
    assert differ["algorithm.advantage_mode"] == [["grpo"], ["maxrl"], ["grpo"], [None]]
    assert differ["lora.rank"] == [[None], [None], [8], [None]]
    assert not any(key.endswith("seed") for key in differ)
    assert {"condition", "campaign", "lora.rank", "training.seed"} <= set(found["keys"])
    found = get(client, "/api/curves", at=[one, two], key="mean_reward", group_by="algorithm.advantage_mode")
    assert [(each["group"], each["n"]) for each in found["conditions"]] == [
        ({"algorithm.advantage_mode": "grpo"}, 5), ({"algorithm.advantage_mode": "maxrl"}, 3),
    ]  # fmt: skip
    query = {"at": [f"{two}/runs/grpo+none_s2", one], "group_by": "training.seed", "band": "range"}
    first, second, third = get(client, "/api/curves", **query, key="eval/heldout/correct_rate")["conditions"]
    assert [each["group"]["training.seed"] for each in (first, second, third)] == [1, 2, 3]
    assert [len(each["places"]) for each in (first, second, third)] == [2, 3, 2]
    assert second["band"] == [[0, 0.25, 0.25], [6, 0.53125, 0.73125]]


def test_a_run_in_numbers_with_its_command_and_marks(tmp_path):
    home = campaign(tmp_path / "one", seeds=1, steps=6)
    run, client = home / "runs" / f"{LABELS[0]}_s1", client_of(home)
    assert get(client, "/api/run", at=RUN)["command"] is None
    log = "2026-01-01 00:00:00 info    continues at step 3\n2026-01-01 00:00:00 info    so: continues at step 4\n"
    (run / "run.log").write_text(log)
    append_jsonl(run / "checkpoints.jsonl", [{"name": name, "batch": step} for name, step in
                                             (("000003", 3), ("000006", 6), ("final", 6))])  # fmt: skip
    write_json(home / "plan.json", {"file": "my runs.toml", "folder": "/data", "sets": ["training.seed=1"]})
    found = get(client_of(home), "/api/run", at=RUN, x="tokens")
    assert found["command"] == f"retrain train '/data/my runs.toml' --out {home} --set training.seed=1"
    marks = [(mark["x"], mark["step"], mark["kind"]) for mark in found["marks"]]
    assert marks == [(0, 0, "evaluation"), (300, 3, "checkpoint"), (300, 3, "resume"), (600, 6, "checkpoint"),
                     (600, 6, "evaluation")]  # fmt: skip
    tiles = {tile["name"]: (tile["value"], tile["step"]) for tile in found["tiles"]}
    assert tiles == {"reward": (0.5, 5), "held-out": (0.515625, 6), "entropy": (0.5, 5)}
    held_out = found["tiles"][1]
    assert held_out["n"] == 64
    assert held_out["low"] < 0.515625 < held_out["high"]
    get(client, "/api/run", 404, at="one")  # a campaign of two runs
