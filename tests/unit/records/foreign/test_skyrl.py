"""The fixture has the format of SkyRL 0.4.0: skyrl/train/utils/trainer_utils.py, lines 325 to 375, and evaluate.py,
lines 239 to 275."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.other_tools import write_other_tools

from retrain.errors import UsageError
from retrain.records.foreign.skyrl import FORMAT
from retrain.records.foreign.table import ReadRequest

DUMP = Path(__file__).parents[3] / "data/foreign/skyrl/dumped_evals/global_step_20_evals"
ANSWERS = DUMP / "openai_gsm8k.jsonl"
ANSWER = {"input_prompt": "2+3=", "output_response": "5", "score": 1.0, "stop_reason": "stop", "env_extras": {}}


def answers(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return list(FORMAT.rows(path, ReadRequest()))


def test_numbers_of_all_data_sources_and_of_each():
    rows = list(FORMAT.rows(DUMP / "aggregated_results.jsonl", ReadRequest()))

    numbers = {(row.set, row.metric): row.value for row in rows}
    assert numbers["openai_gsm8k", "score"] == numbers["openai_gsm8k", "avg_score"] == 0.625
    assert [name for name, metric in numbers if metric == "score"] == ["openai_gsm8k"]
    assert numbers["openai_gsm8k", "pass_at_2"] == 1.0
    assert numbers["all", "generate/avg_num_tokens"] == 2.25
    assert {(row.step, row.seed) for row in rows} == {(20, None)}


def test_scores_of_tokens_are_summed():
    rows = list(FORMAT.rows(ANSWERS, ReadRequest("score")))

    problems = list(dict.fromkeys(row.problem for row in rows))
    assert sorted((problems.index(row.problem), row.value) for row in rows) == [(0, 0.0), (0, 1.0), (1, 0.5), (1, 1.0)]
    assert {(row.set, row.metric, row.step) for row in rows} == {("openai_gsm8k", "score", 20)}


def test_evaluation_outside_of_training_has_no_step(tmp_path):
    shutil.copytree(DUMP, tmp_path / "eval_only")

    assert {row.step for row in FORMAT.rows(tmp_path / "eval_only" / ANSWERS.name, ReadRequest())} == {None}


def test_problems_are_named_by_their_id_but_not_by_the_number_of_a_row(tmp_path):
    named, *numbered = [{**ANSWER, "env_extras": {"id": name}} for name in ("algebra-17", 17, "18")]

    first, *others = [row.problem for row in answers(tmp_path / "math.jsonl", named, *numbered)]
    assert first == "algebra-17"
    assert others[0] == others[1] != first


def test_scores_that_are_null_or_nan_are_not_graded(tmp_path):
    scores = [None, float("nan"), 10**400, [0.5, float("nan")], [], 0.25]

    rows = answers(tmp_path / "math.jsonl", *({**ANSWER, "score": score} for score in scores))
    assert [row.value for row in rows] == [None] * 5 + [0.25]


def test_steps_of_answers_are_no_answers(tmp_path):
    """``evaluate_step_wise`` (evaluate.py) writes a line for each step, with the extras of the answer."""
    shutil.copytree(DUMP, tmp_path, dirs_exist_ok=True)
    path = tmp_path / ANSWERS.name
    lines = path.read_text().splitlines(keepends=True)

    with pytest.raises(UsageError, match=r"mean of the scores is 0\.5, but avg_score .* is 0\.625.*--metric avg_score"):
        answers(path, *lines, {**ANSWER, "score": 0.0})
    assert not list(FORMAT.rows(path, ReadRequest("avg_score")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**ANSWER, "score": "good"}, "score is 'good', which is not a number"),
        ('{"input_prompt": "2', "is no JSON object"),
    ],
)
def test_damaged_line_is_refused_with_its_number(tmp_path, line, message):
    with pytest.raises(UsageError, match=rf"math\.jsonl:2:? {message}"):
        answers(tmp_path / "math.jsonl", ANSWER, line)


def test_files_are_recognised_and_those_of_other_tools_are_not(tmp_path):
    assert sorted(path for pattern in FORMAT.patterns for path in DUMP.parent.glob(pattern)) == sorted(DUMP.iterdir())
    assert all(map(FORMAT.recognises, DUMP.iterdir()))
    assert not any(map(FORMAT.recognises, write_other_tools(tmp_path)))
