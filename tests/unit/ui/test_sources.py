import json

import pytest
from helpers.pages import campaign, client_of, cookbook_run, get, trackio_project, trainer_state


def test_a_cookbook_run(tmp_path):
    client = client_of(cookbook_run(tmp_path / "math_rl"))
    (place,) = get(client, "/api/places")["places"]
    assert (place["kind"], place["source"], place["name"], place["state"]) == ("run", "cookbook", "math_rl", "done")
    assert place["verdict"] is None
    assert any("verdict" in line for line in place["missing"])
    found = get(client, "/api/metrics", at="math_rl")
    metrics = {metric["key"]: metric for metric in found["metrics"]}
    reward, correct = "env/all/reward/total", "test/env/all/correct"
    assert metrics[reward]["alias_of"] == "mean_reward"
    assert metrics[reward]["definition"]
    assert reward in found["watch"]
    assert found["tags"] == ["math"]
    (run,) = get(client, "/api/columns", at="math_rl", key=[reward, correct], x="wall")["runs"]
    assert run["columns"][reward]["y"] == [0, 0.1, 0.2, 0.3, None]
    assert run["columns"][correct]["y"] == [None] * 4 + [0.25]
    assert run["x"] == [2, 4, 6, 8, 8]
    found = get(client, "/api/campaign", at="math_rl", wait_ms=20_000)
    assert found["comparison"] is None
    assert "nothing is tested" in found["why"]
    assert "error" in get(client, "/api/columns", at="math_rl", key="optim/lr", x="tokens")["runs"][0]


def test_a_folder_of_cookbook_runs_is_a_campaign(tmp_path):
    for name, shift in (("ppo-seed1", 0.0), ("ppo-seed2", 0.1), ("grpo_s1", 0.5), ("grpo_s2", 0.7)):
        cookbook_run(tmp_path / "sweep" / name, shift=shift)
    client, home = client_of(tmp_path), f"{tmp_path.name}/sweep"
    (place,) = get(client, "/api/places")["places"]
    assert (place["kind"], place["conditions"], place["seeds"]["planned"]) == ("campaign", ["grpo", "ppo"], 2)
    found = get(client, "/api/curves", at=home, key="env/all/reward/total", smooth=1)
    assert [mean[1] for mean in found["conditions"][0]["mean"]] == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert [mean[1] for mean in found["differences"][0]["mean"]] == pytest.approx([-0.55] * 4)
    (run,) = get(client, "/api/campaign", at=f"{home}/ppo-seed2")["runs"]
    assert (run["label"], run["seed"], run["index"]) == ("ppo", 2, 1)
    assert get(client, "/api/compare", a=f"{home}/ppo-seed2", b=f"{home}/grpo_s1")["config"] == []


def test_runs_of_other_tools_beside_ours_and_an_empty_directory(tmp_path):
    ours = campaign(tmp_path / "logs/ours")
    for name in "ab":
        cookbook_run(tmp_path / "logs" / name)
    places = get(client_of(tmp_path / "logs"), "/api/places")["places"]
    found = sorted((place["place"], place["source"]) for place in places)
    assert found == [("logs/a", "cookbook"), ("logs/b", "cookbook"), ("logs/ours", "retrain")]
    client = client_of(ours / "runs/maxrl+none_s2")  # a run of ours without its campaign
    (place,) = get(client, "/api/places")["places"]
    assert (place["source"], place["kind"], place["conditions"]) == ("retrain", "run", ["maxrl+none"])
    found = get(client, "/api/campaign", at="maxrl+none_s2")
    assert (found["runs"][0]["seed"], found["runs"][0]["max_steps"], found["runs"][0]["step"]) == (2, 6, 6)
    assert found["comparison"] is None
    (empty := tmp_path / "empty").mkdir()
    assert get(client_of(empty), "/api/places") == {"places": [], "reading": {"done": 0, "of": 0}}


def test_a_trl_run_from_its_newest_checkpoint(tmp_path):
    home = tmp_path / "grpo_out"
    trainer_state(home / "checkpoint-5", 5)
    trainer_state(home / "checkpoint-10", 10)
    client = client_of(home)
    (place,) = get(client, "/api/places")["places"]
    assert (place["source"], place["kind"], place["state"]) == ("trl", "run", "running")
    assert place["steps"] == {"done": 10, "planned": 20}
    query = {"at": "grpo_out", "key": ["reward", "eval_reward"], "x": "tokens"}
    (run,) = get(client, "/api/columns", **query)["runs"]
    assert (run["x"], run["rows"]) == ([250, 500], 2)
    assert run["columns"]["eval_reward"]["y"] == [None, 0.75]
    trainer_state(home / "checkpoint-20", 20)
    (run,) = get(client, "/api/columns", **query)["runs"]
    assert run["columns"]["reward"]["y"] == [0.5, 1, 1.5, 2]
    assert get(client, "/api/places")["places"][0]["state"] == "done"
    (home / "checkpoint-20/trainer_state.json").write_text('{"log_history": [')  # just being written
    assert get(client, "/api/columns", **query)["runs"][0]["rows"] == 4
    metrics = {metric["key"]: metric for metric in get(client, "/api/metrics", at="grpo_out")["metrics"]}
    assert metrics["reward"]["alias_of"] == "mean_reward"


def test_several_evaluation_sets_of_a_trl_step_are_kept_apart(tmp_path):
    """TRL names its numbers alike in all sets; the Trainer puts the name of the set into its own."""
    history = [{"loss": 0.5, "reward": 0.25, "step": 10, "epoch": 0.5}]
    for name, reward in (("math", 0.75), ("code_easy", 0.5)):
        history.append({f"eval_{name}_loss": 0.1, "eval_reward": reward, "eval_completions/mean_length": 20.0,
                        f"eval_{name}_runtime": 2.0, "step": 10, "epoch": 0.5})  # fmt: skip
    history += [{"eval_math_runtime": 2.0, "eval_reward": 1.0, "step": 20}, {"train_runtime": 3.0}]
    (home := tmp_path / "run").mkdir()
    (home / "trainer_state.json").write_text(json.dumps({"global_step": 20, "max_steps": 20, "log_history": history}))
    keys = ["reward", "eval_math_reward", "eval_code_easy_reward", "eval_code_easy_loss",
            "eval_math_completions/mean_length"]  # fmt: skip
    (run,) = get(client_of(home), "/api/columns", at="run", key=keys)["runs"]
    values = [run["columns"][key]["y"] for key in keys]
    assert (run["x"], values) == ([10, 20], [[0.25, None], [0.75, 1], [0.5, None], [0.1, None], [20, None]])


def test_a_trackio_project_is_read_while_it_is_written_and_stays_as_it_is(tmp_path):
    (home := tmp_path / "trackio").mkdir()
    runs = [("grpo_s1", {"lr": 1e-5}), ("a/b", {"_Group": "rloo", "seed": 7}), ("grpo_s2", {"lr": 1e-5})]
    writer = trackio_project(home / "lab.db", runs, 3)
    before = {path: path.read_bytes() for path in home.iterdir() if path.suffix != ".db-shm"}
    assert before[home / "lab.db-wal"]  # nothing of it is in the file itself yet
    client = client_of(home)
    (place,) = get(client, "/api/places")["places"]
    assert (place["source"], place["kind"], place["conditions"], place["state"]) == (
        "trackio", "campaign", ["grpo", "rloo"], "done",
    )  # fmt: skip
    found = get(client, "/api/campaign", at="trackio")["runs"]
    assert [(run["run_id"], run["seed"], run["step"]) for run in found] == [
        ("grpo_s1", 1, 3), ("a_b", 7, 3), ("grpo_s2", 2, 3),
    ]  # fmt: skip
    query = {"at": "trackio/a_b", "key": ["train/reward", "train/loss"]}
    (run,) = get(client, "/api/columns", **query)["runs"]
    assert run["columns"]["train/reward"]["y"] == [1, 1.1, 1.2]
    assert run["columns"]["train/loss"]["y"] == [0.5, None, 0.5]
    assert get(client, "/api/compare", a="trackio/grpo_s1", b="trackio/a_b")["config"][0]["key"] == "lr"
    assert {path: path.read_bytes() for path in home.iterdir() if path.suffix != ".db-shm"} == before
    row = (f"{1:032x}", "2026-01-01T00:00:09+00:00", "a/b", 3, b'{"train/reward":5.0}')
    writer.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?, ?, NULL, NULL)", row)
    writer.commit()
    assert get(client, "/api/columns", **query)["runs"][0]["columns"]["train/reward"]["y"] == [1, 1.1, 1.2, 5]
    writer.close()  # the log goes into the file
    assert get(client, "/api/columns", **query)["runs"][0]["rows"] == 4
    trackio_project(home / "other.db", runs[:1], 1).close()
    (place,) = get(client, "/api/places")["places"]
    assert place["conditions"] == ["lab: grpo", "lab: rloo", "other: grpo"]
    assert get(client, "/api/columns", at="trackio/other/grpo_s1", key="train/reward")["runs"][0]["rows"] == 1
    (home / "other.db").write_bytes(b"no database")
    assert get(client, "/api/places")["places"][0]["conditions"][:2] == ["lab: grpo", "lab: rloo"]


@pytest.mark.parametrize("content", [
    "", "[]", '{"log_history": 5}', '{"log_history": [5, {"step": "x", "loss": "y"}]}',
    '{"log_history": [{"step": 1e400, "loss": 1}]}', "[" * 100_000,
])  # fmt: skip
def test_a_damaged_state_stops_nothing(tmp_path, content):
    (home := tmp_path / "run").mkdir()
    (home / "trainer_state.json").write_text(content)
    client = client_of(home)
    assert len(get(client, "/api/places")["places"]) == 1
    for path in ("/api/campaign", "/api/metrics", "/api/notes", "/api/lora"):
        get(client, path, at="run")
    assert get(client, "/api/columns", at="run", key="loss")["runs"][0]["x"] in ([], [0])
    get(client, "/api/histogram", 404, at="run", metric="reward")
