"""verl/val/20.jsonl was written by ``PPOTrainer._write_generations`` of verl 0.9.1 (line 1226 of
verl/trainer/ppo/v1/trainer_base.py) with uids as line 193 of v1/agent_loop_tq.py makes them, verl/grpo_s1.jsonl by
``FileLogger`` (verl/utils/tracking.py, line 529). The rest of the package imports Ray and a server."""

import shutil
from pathlib import Path

import pytest

from retrain.errors import UsageError
from retrain.records.foreign.table import ReadRequest, ResultRow
from retrain.records.foreign.verl import FORMAT

DATA = Path(__file__).parents[3] / "data/foreign"
ANSWERS, LOGGED = DATA / "verl/val/20.jsonl", DATA / "verl/grpo_s1.jsonl"


def rows(path: Path, metric: str | None = None) -> list[ResultRow]:
    return list(FORMAT.rows(path, ReadRequest(metric=metric)))


def test_one_grade_for_each_session_and_metric():
    found = rows(ANSWERS, "acc")
    assert {(row.step, row.set, row.sample) for row in found} == {(20, "heldout", None)}
    grades = {problem: sorted(str(row.value) for row in found if row.problem == problem)
              for problem in {row.problem for row in found}}  # fmt: skip
    assert sorted(grades.values()) == [["0.0", "1.0"], ["0.0", "1.0"], ["0.0", "None"]]
    assert all(len(problem or "") == 16 for problem in grades)
    assert {row.metric for row in rows(ANSWERS)} == {"acc", "score", "reward"}
    assert FORMAT.recognises(ANSWERS)
    assert FORMAT.facts(ANSWERS)["acc"].unit == "share"


def test_of_several_outputs_of_a_session_the_last_counts_for_the_problem_of_the_first():
    lines = {row.line for row in rows(ANSWERS, "acc")}
    assert lines == {1, 2, 3, 4, 5, 7}  # lines 6 and 7 are outputs 0 and 1 of one session
    assert len({row.problem for row in rows(ANSWERS) if row.line in (5, 7)}) == 1


def test_the_step_of_a_file_whose_lines_have_none_is_in_its_name(tmp_path):
    (path := tmp_path / "140.jsonl").write_text('{"input": "a", "output": "b", "score": 1.0, "step": null}\n')
    (row,) = rows(path)
    assert (row.metric, row.value, row.step) == ("score", 1.0, 140)


def test_the_data_source_of_the_logger_is_the_set():
    found = {(row.set, row.metric, row.step): row.value for row in rows(LOGGED)}
    assert found == {
        ("openai/gsm8k", "acc/mean@2", 0): 0.25, ("openai/gsm8k", "acc/mean@2", 20): 0.45,
        ("openai/gsm8k", "acc/best@2/mean", 0): 0.5, ("openai/gsm8k", "acc/best@2/mean", 20): 0.5,
        ("openai/gsm8k", "reward/mean@2", 0): -0.5, ("openai/gsm8k", "reward/mean@2", 20): -0.5,
        ("math", "acc/mean@2", 0): 0.125, ("math", "acc/mean@2", 20): 0.125,
        ("heldout", "val-aux/num_turns/mean", 0): 2.5, ("heldout", "val-aux/num_turns/mean", 20): 2.5,
        ("train", "critic/score/mean", 20): 0.5, ("train", "actor/grad_norm", 20): None,
    }  # fmt: skip
    assert {row.set for row in rows(LOGGED, "acc/mean@2")} == {"openai/gsm8k", "math"}
    assert FORMAT.recognises(LOGGED)


def test_the_logger_may_be_writing_its_last_line_but_answers_must_be_complete(tmp_path):
    for source in (ANSWERS, LOGGED):
        shutil.copy(source, path := tmp_path / source.name)
        path.write_bytes(source.read_bytes()[:-20])
    assert {row.step for row in rows(tmp_path / LOGGED.name)} == {0}
    with pytest.raises(UsageError, match=r"20\.jsonl:7 is no JSON object"):
        rows(tmp_path / ANSWERS.name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a", "score": 1}', "20.jsonl:2 is no answer of verl, which has input, output, score, step"),
        ('{"input": "a", "output": "b", "score": 1, "step": "x"}', "20.jsonl:2: step is 'x'"),
        (
            '{"input": "a", "output": "b", "score": "good", "step": 2}',
            "20.jsonl:2: score is 'good', which is not a number",
        ),
        ("[1]", "20.jsonl:2 is no JSON object"),
    ],
)
def test_a_line_that_is_no_answer_is_refused_with_its_number(tmp_path, line, message):
    (path := tmp_path / "20.jsonl").write_text(f"{ANSWERS.read_text().splitlines()[0]}\n{line}\n")
    with pytest.raises(UsageError, match=message):
        rows(path, "score")


@pytest.mark.parametrize("text", ["", '{"step": 1, "loss": 2}\n', "no JSON\n", '{"step": 1, "data": 3}\n'])
def test_other_json_lines_are_not_recognised(tmp_path, text):
    (path := tmp_path / "metrics.jsonl").write_text(text)
    assert not FORMAT.recognises(path)
