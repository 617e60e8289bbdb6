"""Reward functions as users have them: written for TRL, asynchronous, as classes, several at once."""

import json
from pathlib import Path

import pytest
from helpers.campaigns import run_cli, toy_toml, train_quietly

from retrain.campaign.planning import references
from retrain.config import tasks
from retrain.files import read_jsonl
from retrain.rewards import RewardResult, build_grader
from retrain.rewards.base import CompletionText
from retrain.types import Problem

MODULE = '''
import asyncio
from retrain import RewardResult

def lengths(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def spoken(prompts, completions, **kwargs):
    """Conversations: lists of messages."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float("yes" in completion[0]["content"]) for completion in completions]

def referenced(completions, ground_truth, **kwargs):
    return [float(text == truth) for text, truth in zip(completions, ground_truth)]

def sums(prompts, completions, task, **kwargs):
    return [float(len(text)) if kind == "sum" else None for text, kind in zip(completions, task)]

async def later(prompts, completions, task, **kwargs):
    await asyncio.sleep(0.01)
    return [-1.0 if kind == "poem" else None for kind in task]

def logging(completions, log_extra=None, log_metric=None, trainer_state=None, **kwargs):
    log_extra("words", [len(text.split()) for text in completions])
    log_extra("texts", list(completions))
    log_metric("batch", len(completions))
    return (0.5 for _ in completions)

def every(completions, **kwargs):
    return [float(len(kwargs))] * len(completions)

def too_few(completions, **kwargs):
    return [1.0]

def no_number(completions, **kwargs):
    return ["good"] * len(completions)

class Counts:
    """Made without arguments; its state lasts."""
    def __init__(self):
        self.weight = 2.0
    def __call__(self, completion, answer):
        return self.weight * len(completion)

class NeedsArguments:
    def __init__(self, weight):
        pass
    def __call__(self, completion):
        return 1.0

both = [Counts(), lengths]

def parts(completion, answer):
    return RewardResult(1.5, components={"accuracy <b>": 1.0, "brevity": 0.5}, sample_metrics={"n": 1.0})

def mixed_up(completion, target):
    return 1.0

def of_the_trainer(completions, trainer_state):
    return [1.0]

def positional(text, reference_text):
    return float(text == reference_text)
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(MODULE)
    return path


def graded(module: Path, function, items, **keys) -> list[RewardResult]:
    section = {"type": "custom", "custom_module": str(module), "custom_function": function, "workers": 1, **keys}
    with build_grader(tasks.RewardSection.model_validate(section)) as grader:
        return grader.grade(items)


def asked(task: str = "sum", number: int = 0) -> Problem:
    return Problem(f"p{number}", f"question {number}", "42", metadata={"task": task, "ground_truth": "yes"})


def totals(results) -> list[float | None]:
    return [result.total_reward for result in results]


TALK = Problem("p", ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}), "42")
TALKS = [(TALK, "yes"), (TALK, "no")]
TEXTS = [(asked(), CompletionText("yes", [1, 2, 3])), (asked(), CompletionText("no", [4]))]


@pytest.mark.parametrize(("function", "items", "expected"), [
    ("lengths", TEXTS, [3.0, 1.0]),
    ("referenced", TEXTS, [1.0, 0.0]),
    # prompts, completion_ids, log_extra, log_metric; answer, tags and the two columns
    ("every", TEXTS, [8.0, 8.0]),
    ("spoken", TALKS, [1.0, 0.0]),
    ("Counts", TEXTS, [6.0, 4.0]),
    ("both", TEXTS, [9.0, 5.0]),
])  # fmt: skip
def test_functions_of_trl_classes_objects_and_lists_are_rewards(module, function, items, expected):
    assert totals(graded(module, function, items)) == expected


def test_a_call_has_all_completions_of_a_problem(module):
    items = [(asked(number=n), "text") for n in (0, 0, 0, 1, 1)]
    results = graded(module, "logging", items)
    assert [result.sample_metrics for result in results] == [{"batch": n, "words": 1.0} for n in (3, 3, 3, 2, 2)]
    assert totals(results) == [0.5] * 5


def test_what_does_not_apply_is_left_out_of_the_sum(module):
    items = [(asked("sum"), "four"), (asked("poem", 1), "roses"), (asked("other", 2), "x")]
    results = graded(module, ["sums", "later"], items)
    assert totals(results) == [4.0, -1.0, None]
    assert [tuple(result.components.values()) for result in results] == [(4.0, None), (None, -1.0), (None, None)]
    assert [result.error for result in results] == [None, None, "no reward applies to this completion"]


@pytest.mark.parametrize(("function", "reason"), [
    ("too_few", "returned 1 rewards, not a list of 2"), ("no_number", "returned str, not a number"),
])  # fmt: skip
def test_a_function_that_goes_wrong_costs_the_answers_of_its_call(module, function, reason):
    results = graded(module, function, [(asked(), "a"), (asked(), "b")])
    assert totals(results) == [None, None]
    assert all(reason in (result.error or "") for result in results)


FAULTS = {
    "mixed_up": "parameter 'target' is unknown; a reward takes any of: problem, prompt, completion, response, answer,",
    "of_the_trainer": "parameter 'trainer_state' is TRL's trainer's and not available here: give it a default",
    "NeedsArguments": "the class 'NeedsArguments' cannot be made without arguments",
    "referenced": "its parameter 'ground_truth' is no column of the training problems, which have answer, tags",
}


def written(folder: Path, module: Path, function: str | list[str]) -> Path:
    (folder / "problems.jsonl").write_text("".join(f'{{"prompt": "{i}+1", "answer": {i + 1}}}\n' for i in range(20)))
    (folder / "mine.py").write_text(module.read_text())
    file = folder / "run.toml"
    file.write_text(
        f'[data]\nsource = "problems.jsonl"\n[reward]\ntype = "custom"\ncustom_module = "mine"\ncustom_function = '
        f"{json.dumps(function)}\n"
    )
    return file


@pytest.mark.parametrize("function", FAULTS)
def test_check_finds_what_is_wrong_with_parameters(tmp_path, module, function):
    result = run_cli("check", written(tmp_path, module, function))
    assert result.exit_code == 2
    assert FAULTS[function] in result.output
    (line,) = result.output.splitlines()
    assert line.startswith("run.toml:")


def test_good_functions_pass_the_check(tmp_path, module):
    for function in (["lengths", "every"], "positional"):
        result = run_cli("check", written(tmp_path, module, function))
        assert result.exit_code == 0, result.output


def test_a_module_that_is_slow_to_import_is_named_meanwhile(tmp_path, module, monkeypatch):
    file = written(tmp_path, module, "positional")
    assert "importing" not in run_cli("check", file).output
    monkeypatch.setattr(references, "SLOW_IMPORT_S", 0.1)
    (tmp_path / "mine.py").write_text(f"import time\ntime.sleep(1)\n{module.read_text()}")
    result = run_cli("check", file)
    assert result.exit_code == 0, result.output
    assert (
        result.stderr
        == f"note: importing {tmp_path}/mine.py takes more than 0.1 s; retrain makes up to 3 attempts of 60 s\n"
    )


def test_functions_of_trl_and_parts_of_a_result_are_recorded_by_name(tmp_path, module, model):
    (tmp_path / "mine.py").write_text(module.read_text())
    rows = [{"prompt": f"{i}?", "answer": i, "task": ("sum", "poem")[i % 2]} for i in range(20)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["sums", "later", "lengths", "parts"]
    sections = {"data": {"source": "problems.jsonl", "tags_column": "task"}, "logging": {"rollouts_every": 1}}
    sections |= {"training": {"max_steps": 1, "batch_size": 4, "group_size": 2, "max_tokens": 6}}
    sections |= {"evaluation": {"problems": None}, "squeeze": {"enabled": None}}  # train_quietly has them
    reward = {"custom_module": "mine", "custom_function": names}
    train_quietly(tmp_path, toy_toml(model, reward=reward, **sections))
    run = tmp_path / "out"
    (row,) = read_jsonl(run / "metrics.jsonl")
    lines = read_jsonl(run / "train_iteration_000000_rollout_summaries.jsonl")
    assert len(lines) == 8
    for line in lines:
        own = line["trajectory_metrics"]
        assert own["lengths"] == line["steps"][0]["ac_len"]
        assert (own["sums"] is None) == (line["tags"] == ["poem"])
        assert (own["later"] is None) == (line["tags"] == ["sum"])
        assert line["total_reward"] == pytest.approx(sum(own[name] or 0.0 for name in names))
    assert row["rewards/lengths/mean"] == row["completions/mean_length"]
    assert row["rewards/later/mean"] in (-1.0, None)  # over those to which it applies
    assert row["reward_failed"] == 0
    components = {"accuracy <b>": 1.0, "brevity": 0.5, "parts": 1.5}
    assert {name: row[f"rewards/{name}/mean"] for name in components} == components
    page = (run / "train_iteration_000000.html").read_text()
    assert "accuracy &lt;b&gt; 1" in page
    assert "brevity 0.5" in page
