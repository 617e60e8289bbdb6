"""The fixtures have the format of NeMo RL 0.6.0: nemo_rl/algorithms/grpo.py, lines 1966 to 2003 (checkpoints) and 2349
to 2353 (validation); utils/logger.py, lines 1000 to 1006; utils/checkpoint.py, lines 179 to 192; evals/eval.py, lines
315 to 474 (standalone)."""

import json
from pathlib import Path

import pytest
from helpers.other_tools import write_other_tools

from retrain.errors import UsageError
from retrain.records.foreign.nemo_rl import FORMAT
from retrain.records.foreign.table import ReadRequest

DATA = Path(__file__).parents[3] / "data/foreign/nemo_rl"
VALIDATION = DATA / "exp_001/val_data_step20.jsonl"
STANDALONE = DATA / "evaluation/evaluation_data.json"
INFO = DATA / "checkpoints/step_20/training_info.json"


def answers(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(FORMAT.rows(path, ReadRequest()))


def line(*messages, reward=1.0):
    return {"content": [[{"role": role, "content": text} for role, text in messages]], "rewards": [reward], "idx": 0}


def test_answers_of_a_validation():
    rows = list(FORMAT.rows(VALIDATION, ReadRequest()))

    problems = list(dict.fromkeys(row.problem for row in rows))
    assert sorted((problems.index(row.problem), row.value) for row in rows) == [(0, 0.0), (0, 1.0), (1, 0.0)]
    assert {(row.metric, row.step, row.seed) for row in rows} == {("reward", 20, None)}


def test_turns_after_the_first_answer_do_not_change_the_problem(tmp_path):
    start = ("user", "2+3="), ("assistant", "6")
    other = ("system", "Think."), *start

    rows = answers(tmp_path / VALIDATION.name, line(*start), line(*start, ("user", "wrong")), line(*other))
    assert rows[0].problem == rows[1].problem != rows[2].problem


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (line(("user", ""), ("assistant", "")), "has no text of a prompt.*--metric accuracy"),  # of NeMo Gym
        ({**line(("user", "2+3=")), "rewards": [1.0, 0.0]}, "content and rewards are not lists of the same length"),
        (line(("user", "2+3="), reward="good"), "rewards is 'good', which is not a number"),
    ],
)
def test_damaged_line_is_refused_with_its_number(tmp_path, changed, message):
    """Environments of NeMo Gym log no text: nemo_rl/environments/nemo_gym.py, lines 203 to 221."""
    with pytest.raises(UsageError, match=rf"jsonl:2:? {message}"):
        answers(tmp_path / VALIDATION.name, line(("user", "2+3=")), changed)


def test_checkpoint_has_the_accuracy_and_the_training_seed():
    rows = list(FORMAT.rows(INFO, ReadRequest()))

    assert [(row.metric, row.value, row.step, row.seed) for row in rows] == [("accuracy", 0.33333334, 20, 42)]


def test_checkpoint_without_a_validation_has_no_accuracy(tmp_path):
    (path := tmp_path / "step_5" / INFO.name).parent.mkdir()
    path.write_text('{"total_steps": 5, "val_reward": -99999999.0, "train:loss": 0.5, "val:val_loss": 1.5}')

    assert [(row.metric, row.value, row.seed) for row in FORMAT.rows(path, ReadRequest())] == [("val_loss", 1.5, None)]
    path.with_name("config.yaml").write_text("grpo: [")
    with pytest.raises(UsageError, match=r"config\.yaml is no configuration of NeMo RL"):
        list(FORMAT.rows(path, ReadRequest()))


def test_standalone_evaluation_names_its_data_set_but_no_step_and_no_seed():
    rows = list(FORMAT.rows(STANDALONE, ReadRequest()))

    assert [(row.set, row.step, row.seed, row.value) for row in rows] == [
        ("sums", None, None, 1.0), ("sums", None, None, 0.0)
    ]  # fmt: skip
    assert len({row.problem for row in rows}) == 1


def test_files_are_recognised_and_those_of_other_tools_are_not(tmp_path):
    assert {path for pattern in FORMAT.patterns for path in DATA.glob(pattern)} == {VALIDATION, STANDALONE, INFO}
    assert all(map(FORMAT.recognises, (VALIDATION, STANDALONE, INFO)))
    assert not any(map(FORMAT.recognises, write_other_tools(tmp_path)))
