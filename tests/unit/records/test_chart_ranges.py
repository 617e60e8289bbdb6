"""Declared ranges of rewards and their numbers, as the page shows them."""

from __future__ import annotations

from pathlib import Path

from toymodels import train_quietly
from ui_cases import client_of, get

REWARDS = """
from retrain import RewardResult

def score(completion, answer):
    return RewardResult(len(completion) - 10.0, sample_metrics={"words": len(completion), "share": 0.5})

score.reward_min = -10
score.metrics_ranges = {"share": {"max": 1}}
"""
ENVIRONMENT = """
from retrain import Observation, Problem, RewardResult, Step

class Game:
    reward_range = (-2.0, None)
    metrics_ranges = {"moves": {"min": 0}}

    def problems(self, split):
        return [Problem(f"{split}{i}", f"{split} {i}", "x") for i in range(4)]

    def start(self, problem, seed):
        return Episode()

class Episode:
    def observe(self):
        return Observation([{"role": "user", "content": "play"}])

    def step(self, action):
        return Step()

    def result(self):
        return RewardResult(-1.0, {"moves": 1.0})
"""
TRAINING = """
[model]
model = "{model}"
lora_rank = 2
[training]
max_steps = 1
batch_size = 2
group_size = 2
max_tokens = 6
"""


def metrics_of(folder: Path, model: Path, text: str) -> dict[str, dict]:
    """Train a run with these sections; return the page's metrics by key."""
    train_quietly(folder, text + TRAINING.format(model=model))
    return {metric["key"]: metric for metric in get(client_of(folder / "out"), "/api/metrics", at="out")["metrics"]}


def ends(metric: dict) -> tuple[float | None, float | None]:
    return metric["range"]["min"], metric["range"]["max"]


def test_a_reward_and_its_sample_metrics_may_declare_one_end_each(tmp_path, model):
    (tmp_path / "rewards.py").write_text(REWARDS)
    text = '[reward]\ntype = "custom"\ncustom_module = "rewards.py"\nworkers = 1\nreward_max = 5\n'
    metrics = metrics_of(tmp_path, model, text + "metrics_ranges = { words = { min = 0 } }\n")
    assert ends(metrics["mean_reward"]) == ends(metrics["rewards/score/mean"]) == (-10, 5)
    assert ends(metrics["rewards/words/mean"]) == (0, None)
    assert ends(metrics["rewards/share/mean"]) == (None, 1)
    ginis = [key for key in metrics if "gini" in key and "length" not in key]  # one chart of each
    assert sorted(ginis) == ["reward_gini", "rewards/score/gini", "rewards/share/gini", "rewards/words/gini"]


def test_an_environment_may_declare_one_end(tmp_path, model):
    (tmp_path / "games.py").write_text(ENVIRONMENT)
    metrics = metrics_of(tmp_path, model, '[environment]\nprovider = "games:Game"\nworkers = 1\n')
    assert ends(metrics["mean_reward"]) == (-2, None)
    assert ends(metrics["rewards/moves/mean"]) == (0, None)
