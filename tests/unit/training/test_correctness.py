import math
from pathlib import Path

import pytest
from helpers.campaigns import run_cli, toy_toml, train

from retrain.files import read_jsonl
from retrain.rewards import Grader, Reward, RewardResult
from retrain.types import Problem

REWARDS = '''
from retrain import RewardResult

def scaled(completion, answer):
    """Always far above 0.5; what is correct stands in a metric."""
    even = len(completion) % 2 == 0
    return RewardResult(10.0 + even, sample_metrics={"correct": float(even), "format": float(len(completion) % 3 == 0)})

def two(completion, answer):
    return 2.0
'''
ENVIRONMENT = """
from retrain import Observation, Problem, RewardResult, Step

class Game:
    def problems(self, split):
        return [Problem(f"{split}{i}", f"{split} {i}", "x") for i in range(4)]

    def start(self, problem, seed):
        return Episode()

class Episode:
    def observe(self):
        return Observation([{"role": "user", "content": "play"}])

    def step(self, action):
        self.solved = len(action.text) % 2 == 0
        return Step()

    def result(self):
        return RewardResult(5.0, {"solved": float(self.solved)})
"""


def write(folder: Path, text: str) -> Path:
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "games.py").write_text(ENVIRONMENT)
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def trained(folder: Path, model: Path, function: str, text: str = "") -> Path:
    reward = {"custom_module": "rewards.py", "custom_function": function}
    toy = toy_toml(model, reward=reward, training={"max_steps": 1}, evaluation={"problems": 8})
    train(write(folder, text + toy), folder / "out")
    return folder / "out"


def test_a_metric_named_correct_decides_in_every_file(tmp_path, model):
    run = trained(tmp_path, model, "scaled")
    (row,) = read_jsonl(run / "metrics.jsonl")
    share, formatted = row["rewards/correct/mean"], row["rewards/format/mean"]
    assert 0 < share < 1
    assert 0 < formatted < 1
    assert row["correct_rate"] == row["env/all/correct"] == row["running_correct_rate"] == share
    assert row["env/all/format"] == formatted
    lines = read_jsonl(run / "train_iteration_000000_rollout_summaries.jsonl")
    assert math.fsum(line["trajectory_metrics"]["correct"] for line in lines) / 12 == pytest.approx(share)
    assert math.fsum(line["trajectory_metrics"]["format"] for line in lines) / 12 == pytest.approx(formatted)
    (counts,) = read_jsonl(run / "emergence/steps.jsonl")
    assert counts["correct_count"] == round(12 * share)
    tree = (run / "train_iteration_000000_logtree.json").read_text()
    assert tree.count("correct: yes") == round(12 * share)
    for row in read_jsonl(run / "evals.jsonl"):
        answers = [line for line in read_jsonl(run / "emergence/evaluations.jsonl") if line["step"] == row["step"]]
        even = [len(line["completion"]) % 2 == 0 for line in answers]
        assert [line["correct"] for line in answers] == even
        assert row["eval/heldout/correct_rate"] == pytest.approx(sum(even) / 8)


def test_each_condition_has_its_own_threshold(tmp_path, model):
    conditions = "".join(
        f'[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n"reward.correct_above" = {above}\n'
        for above in (1.5, 2.5)
    )
    out = trained(tmp_path, model, "two", f"[campaign]\nseeds = [1]\n{conditions}")
    for above, share in ((1.5, 1.0), (2.5, 0.0)):
        run = out / "runs" / f"grpo+none~reward.correct_above={above}_s1"
        assert read_jsonl(run / "metrics.jsonl")[0]["correct_rate"] == share
        assert read_jsonl(run / "evals.jsonl")[-1]["eval/heldout/correct_rate"] == share


@pytest.mark.parametrize(("result", "correct"), [
    pytest.param(RewardResult(9.0, {"correct": 1.0}, correct=False), False, id="the reward itself"),
    pytest.param(RewardResult(9.0, {"correct": 0.0}), False, id="its metric"),
    pytest.param(RewardResult(0.0, {"correct": 0.0}, components={"correct": 1.0}), True, id="a component first"),
    pytest.param(RewardResult(0.9, {"correct": None}), True, id="a metric that does not apply"),
    pytest.param(RewardResult(0.5), False, id="the total at the threshold"),
    pytest.param(RewardResult(None, error="broken"), False, id="no grade"),
])  # fmt: skip
def test_what_decides(result, correct):
    class Fixed(Reward):
        def grade(self, problem, completion):
            return result

    (graded,) = Grader(Fixed()).grade([(Problem("p", "?", "x"), "y")])
    assert graded.is_correct is correct


@pytest.mark.parametrize(("text", "words"), [
    ("[reward]\ncorrect_above = 2\n", 'correct_above  has no effect: type = "match" itself decides'),
    ('[environment]\ncorrect_metric = "won"\n', "correct_metric  has no effect without a provider"),
    ('[environment]\nprovider = "games:Game"\ncorrect_metric = "won"\n',
     "there is no metric 'won' (correct_metric) among solved"),
])  # fmt: skip
def test_check_finds_what_could_decide_nothing(tmp_path, text, words):
    result = run_cli("check", write(tmp_path, text))
    assert result.exit_code == 2
    assert words in result.output
