"""Results of lm-eval 0.4.13 (lm_eval/loggers/evaluation_tracker.py; samples: evaluator.py, lines 634 to 674).

The fixtures were written by the package (test_written_evaluations.py); settings and environment were cut out.
"""

import json
import shutil
from pathlib import Path

import pytest

from retrain.errors import UsageError
from retrain.records.foreign.lm_eval import FORMAT
from retrain.records.foreign.table import MetricFacts, ReadRequest

DATA = Path(__file__).parents[3] / "data" / "foreign" / "lm_eval"
RESULTS, SAMPLES = (next(DATA.glob(pattern)) for pattern in ("results_*", "samples_*"))


def changed(tmp_path: Path, **changes) -> Path:
    """Return a copy of the results file in which keys have other values."""
    path = tmp_path / RESULTS.name
    path.write_text(json.dumps(json.loads(RESULTS.read_text()) | changes))
    return path


def samples(tmp_path: Path, *, filter_name: str = "", **changes) -> Path:
    """Return a copy of the samples file: the documents of one filter, in which keys have other values."""
    rows = map(json.loads, SAMPLES.read_text().splitlines())
    path = tmp_path / SAMPLES.name
    path.write_text("".join(json.dumps(row | changes) + "\n" for row in rows if filter_name in ("", row["filter"])))
    return path


def test_numbers_of_the_run_have_filter_and_task():
    rows = list(FORMAT.rows(RESULTS, ReadRequest()))

    assert {row.metric: row.value for row in rows} == {"exact_match,strict": 1 / 3, "exact_match,flexible": 1.0}
    assert {(row.set, row.condition, row.state, row.step) for row in rows} == {("sums", "org/grpo", "done", None)}
    assert {row.time for row in rows} == {json.loads(RESULTS.read_text())["date"]}


def test_each_document_is_graded_once_for_a_filter():
    rows = list(FORMAT.rows(SAMPLES, ReadRequest("exact_match,strict")))

    assert [(row.value, row.line) for row in rows] == [(0, 1), (1, 2), (0, 3)]
    assert len({row.problem for row in rows}) == 3
    assert {(row.metric, row.set, row.condition) for row in rows} == {("exact_match,strict", "sums", "org/grpo")}
    flexible = list(FORMAT.rows(SAMPLES, ReadRequest("exact_match,flexible")))
    assert [row.problem for row in flexible] == [row.problem for row in rows]


def test_the_seed_is_that_in_the_name_of_the_model_and_not_that_of_the_evaluation(tmp_path):
    assert {row.seed for path in (RESULTS, SAMPLES) for row in FORMAT.rows(path, ReadRequest())} == {1}
    path = tmp_path / RESULTS.name
    path.write_text(RESULTS.read_text().replace("org/grpo_s1", "org/opus4"))
    assert {(row.condition, row.seed) for row in FORMAT.rows(path, ReadRequest())} == {("org/opus4", None)}


def test_texts_are_no_numbers(tmp_path):
    run = changed(tmp_path, results={"sums": {"acc,none": "N/A", "acc_norm,none": 0.5, "acc_stderr,none": 0.1}})
    assert [row.metric for row in FORMAT.rows(run, ReadRequest())] == ["acc_norm,none"]


def test_values_that_are_no_grades_of_one_answer_are_left_out(tmp_path):
    answers = samples(tmp_path, metrics=["exact_match", "word_perplexity"], word_perplexity=[-3.2, 4])
    assert {row.metric for row in FORMAT.rows(answers, ReadRequest())} == {"exact_match,strict", "exact_match,flexible"}


def test_answer_without_a_grade_is_kept(tmp_path):
    answers = samples(tmp_path, filter_name="strict", exact_match=float("nan"))
    assert [row.value for row in FORMAT.rows(answers, ReadRequest())] == [None] * 3


def test_directions_are_in_the_file(tmp_path):
    assert FORMAT.facts(SAMPLES) == {"exact_match,*": MetricFacts(True)}
    found = FORMAT.facts(changed(tmp_path, higher_is_better={"a": {"acc": True, "perplexity": False}}))
    assert found == {"acc,*": MetricFacts(True), "perplexity,*": MetricFacts(False)}
    assert FORMAT.facts(changed(tmp_path, higher_is_better={"a": None})) == {}


def test_answers_without_the_file_of_the_run(tmp_path):
    shutil.copy(SAMPLES, tmp_path)
    assert {row.condition for row in FORMAT.rows(tmp_path / SAMPLES.name, ReadRequest())} == {None}
    assert FORMAT.facts(tmp_path / SAMPLES.name) == {}


def test_recognises_its_files_alone(tmp_path):
    other = tmp_path / "results_2026.json"
    other.write_text('{"config_general": {}, "results": {}}')
    assert FORMAT.recognises(RESULTS)
    assert FORMAT.recognises(SAMPLES)
    assert not FORMAT.recognises(other)


@pytest.mark.parametrize("content", ["[]", "{}", '{"results": {"sums": 5}}'])
def test_results_of_another_shape_are_refused(tmp_path, content):
    (path := tmp_path / RESULTS.name).write_text(content)
    with pytest.raises(UsageError, match=r"results_.*json (is no JSON object|has no object \"results\")"):
        list(FORMAT.rows(path, ReadRequest()))


def test_damaged_line_is_named(tmp_path):
    path = tmp_path / SAMPLES.name
    first = SAMPLES.read_text().splitlines()[0]
    path.write_text(f'{first}\n{{"doc_id": 1, "doc": {{}}}}\n')
    with pytest.raises(UsageError, match=r"jsonl:2 lacks doc_id, doc_hash, filter or metrics"):
        list(FORMAT.rows(path, ReadRequest()))
