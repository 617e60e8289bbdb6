import pytest
from helpers.pages import campaign, client_of, cookbook_run, get, trainer_state


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


def test_a_trl_run_from_its_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("retrain.ui.library.FRESH_S", -1.0)
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


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"log_history": 5}', '{"log_history": [5, {"step": "x", "loss": "y"}]}',
     '{"log_history": [{"step": 1e400, "loss": 1}]}', "[" * 100_000],
)  # fmt: skip
def test_a_damaged_state_stops_nothing(tmp_path, content):
    (home := tmp_path / "run").mkdir()
    (home / "trainer_state.json").write_text(content)
    client = client_of(home)
    assert len(get(client, "/api/places")["places"]) == 1
    for path in ("/api/campaign", "/api/metrics", "/api/notes", "/api/lora"):
        get(client, path, at="run")
    assert get(client, "/api/columns", at="run", key="loss")["runs"][0]["x"] in ([], [0])
    get(client, "/api/histogram", 404, at="run", metric="reward")
