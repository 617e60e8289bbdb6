"""Declared ranges of numbers: also with one end alone, and of the reward under its own name."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from toymodels import train_quietly
from ui_cases import client_of, get

ROOT = Path(__file__).parents[3]
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
CUSTOM = '[reward]\ntype = "custom"\ncustom_module = "rewards.py"\nworkers = 1\n'
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


def trained(folder: Path, model: Path, text: str) -> dict[str, dict]:
    """The metrics of the page of a run with these sections, by key."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "games.py").write_text(ENVIRONMENT)
    train_quietly(folder, text + TRAINING.format(model=model))
    return {metric["key"]: metric for metric in get(client_of(folder / "out"), "/api/metrics", at="out")["metrics"]}


def ends(metric: dict) -> tuple[float | None, float | None] | None:
    return metric["range"] and (metric["range"]["min"], metric["range"]["max"])


@pytest.fixture(scope="module")
def custom(tmp_path_factory, model):
    text = CUSTOM + "metrics_ranges = { words = { min = 0 } }\n"
    return trained(tmp_path_factory.mktemp("custom"), model, text)


def test_a_reward_has_its_range_under_its_own_name(custom):
    assert ends(custom["mean_reward"]) == ends(custom["rewards/score/mean"]) == (-10, None)
    assert ends(custom["rewards/words/mean"]) == (0, None)
    assert ends(custom["rewards/share/mean"]) == (None, 1)


def test_the_gini_coefficient_has_one_chart_and_its_factor_is_told(custom):
    ginis = [key for key in custom if "gini" in key and "length" not in key]
    assert sorted(ginis) == ["reward_gini", "rewards/score/gini", "rewards/share/gini", "rewards/words/gini"]
    assert "n/(n − 1)" in custom["reward_gini"]["definition"]
    assert "n/(n − 1)" in (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def test_an_end_in_the_file_counts_for_the_reward_and_its_name(tmp_path, model):
    found = trained(tmp_path, model, CUSTOM + "reward_max = 5\n")
    assert ends(found["mean_reward"]) == ends(found["rewards/score/mean"]) == (-10, 5)


def test_an_environment_may_declare_one_end(tmp_path, model):
    found = trained(tmp_path, model, '[environment]\nprovider = "games:Game"\nworkers = 1\n')
    assert ends(found["mean_reward"]) == (-2, None)
    assert ends(found["rewards/moves/mean"]) == (0, None)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_chart_of_the_declared_range_reaches_the_end_that_is_declared():
    module = (ROOT / "retrain/ui/static/charts/plot.js").as_uri()
    script = f"""
    const {{Plot}} = await import({json.dumps(module)});
    const shown = (range, full) => Plot.prototype.yRange.call({{options: {{range, full}}}}, 4, 6);
    console.log(JSON.stringify([shown({{min: 0, max: null}}, true), shown({{min: null, max: 10}}, true),
      shown({{min: 0, max: null}}, false)]));
    """
    done = subprocess.run(["node", "--input-type=module", "--eval", script], capture_output=True, text=True, timeout=60)
    low, high, free = json.loads(done.stdout)
    assert low[0] == 0
    assert low[1] > 6
    assert high[1] == 10
    assert high[0] < 4
    assert free[0] > 3
