"""Episodes of verifiers 0.4.0 (verifiers/v1/episode.py, utils/trace_store.py) and the files of prime-rl 0.8.0.

``traces.jsonl`` was written by the package (test_written_evaluations.py). prime-rl is in no package index: its rows are
those of src/prime_rl/monitors/file.py, line 40, with the keys of orchestrator/metrics.py, line 385 (2026-08-21).
"""

import json
import shutil
from pathlib import Path

import pytest

from retrain.errors import UsageError
from retrain.records.foreign.table import MetricFacts, ReadRequest
from retrain.records.foreign.verifiers import FORMAT

TRACES = Path(__file__).parents[3] / "data" / "foreign" / "verifiers" / "traces.jsonl"


def traces(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(TRACES, path)
    return path


def metrics(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps({"step": 10, "time": 1795864032.5} | row) + "\n" for row in rows))
    return path


def test_reward_is_the_weighted_sum_of_the_scores():
    rows = list(FORMAT.rows(TRACES, ReadRequest()))
    assert [row.value for row in rows[:2]] == [0.6, 0.1]
    assert {(row.metric, row.set, row.problem, row.step) for row in rows} == {("reward", "sums", "sum-1:7f3a", None)}
    # The third episode has an error, the fourth no score, the fifth no trace
    assert [row.value for row in rows[2:]] == [None, None, None]
    assert FORMAT.facts(TRACES)["reward"] == MetricFacts(True, "number")


def test_step_is_that_of_the_directory(tmp_path):
    path = traces(tmp_path / "run" / "rollouts" / "step_20" / "eval" / "all" / "traces.jsonl")
    assert {row.step for row in FORMAT.rows(path, ReadRequest())} == {20}


def test_effective_episodes_and_training_are_not_read(tmp_path):
    step = tmp_path / "rollouts" / "step_20"
    kinds = ["eval/all", "eval/effective", "train/all", "train/effective"]
    files = [traces(step / kind / "traces.jsonl") for kind in kinds]
    assert FORMAT.choose(files) == files[:1]
    assert FORMAT.choose([TRACES]) == [TRACES]
    with pytest.raises(UsageError, match="eval/all"):
        FORMAT.choose(files[1:2])


def test_averages_of_prime_rl(tmp_path):
    path = metrics(
        tmp_path / "metrics.jsonl",
        {"train/agg/all/agent/rewards/right/mean": 0.4},
        {
            "eval/sums/all/agent/avg@4": 0.5,
            "eval/sums/effective/agent/avg@4": 0.75,
            "eval/sums/all/has_error/mean": 0.3,
        },
    )
    (row,) = FORMAT.rows(path, ReadRequest())
    assert (row.metric, row.value, row.step, row.set, row.line) == ("avg@4", 0.5, 10, "sums", 2)
    assert row.time == 1795864032.5
    assert FORMAT.facts(path)["avg@*"] == MetricFacts(True)


def test_averages_of_several_agents_have_their_names(tmp_path):
    row = {"eval/duel/all/proposer/avg@2": 0.5, "eval/duel/all/solver/avg@2": 0.25, "eval/sums/all/solver/avg@2": 1.0}
    rows = list(FORMAT.rows(metrics(tmp_path / "metrics.jsonl", row), ReadRequest()))
    assert [(row.set, row.metric) for row in rows] == [
        ("duel", "proposer/avg@2"), ("duel", "solver/avg@2"), ("sums", "avg@2"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["traces.jsonl", "rollouts/step_20/eval/all/traces.jsonl"])
def test_seed_is_that_of_the_run_and_not_of_a_part(tmp_path, name):
    path = traces(tmp_path / name)
    assert {row.seed for row in FORMAT.rows(path, ReadRequest())} == {None}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "rl.json").write_text('{"seed": 5, "inference": {"seed": 0}}')
    assert {row.seed for row in FORMAT.rows(path, ReadRequest())} == {5}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics.jsonl", '{"step": 0, "progress/batch": 0, "time/total": 3.1}'),  # Tinker cookbook
        ("traces.jsonl", '{"id": "a", "score": 1}'),
        ("10.jsonl", '{"input": "1+1=?", "score": 1.0, "step": 10}'),
    ],
)
def test_leaves_files_of_other_tools(tmp_path, name, line):
    (tmp_path / name).write_text(line + "\n")
    assert not FORMAT.recognises(tmp_path / name)


def test_leaves_metrics_of_retrain():
    paths = list((TRACES.parents[3] / "fixtures").rglob("metrics.jsonl"))
    assert paths
    assert not any(FORMAT.recognises(path) for path in paths)


def test_recognises_its_files(tmp_path):
    assert FORMAT.recognises(TRACES)
    assert FORMAT.recognises(metrics(tmp_path / "metrics.jsonl", {"perf/throughput": 1.0}))


def test_damaged_line_is_named(tmp_path):
    path = traces(tmp_path / "traces.jsonl")
    path.write_text('{"id": "a", "env": {}}\n')
    with pytest.raises(UsageError, match=r"traces\.jsonl:1 is not an episode of verifiers"):
        list(FORMAT.rows(path, ReadRequest()))


@pytest.mark.parametrize(("key", "value"), [("step", "x"), ("step", 1.5), ("time", "today")])
def test_steps_and_times_are_numbers(tmp_path, key, value):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "time": 2.0, "eval/math/all/solver/avg@1": 0.5, key: value}))
    with pytest.raises(UsageError, match=rf"metrics\.jsonl:1: {key} is {value!r}, which is not (a number|an integer)"):
        list(FORMAT.rows(path, ReadRequest()))
