"""The fixture has the format of NeMo Gym 0.7.0: nemo_gym/rollout_collection.py, lines 168 to 194 and 2596 to 2716, for
failures 1624 to 1643; for the numbers lines 3049 to 3057; nemo_gym/path_utils.py for the names of the files."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.other_tools import write_other_tools

from retrain.errors import UsageError
from retrain.files import read_jsonl
from retrain.records.foreign.nemo_gym import FORMAT
from retrain.records.foreign.table import ReadRequest

DATA = Path(__file__).parents[3] / "data/foreign/nemo_gym"
ROLLOUTS, FAILURES = "rollouts.jsonl", "rollouts_failures.jsonl"
PLANNED, AGGREGATED = "rollouts_materialized_inputs.jsonl", "rollouts_aggregate_metrics.json"


@pytest.fixture
def output(tmp_path):
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    return tmp_path / ROLLOUTS


def answers(path):
    """Return the grades of every problem, and the states of the run's rows."""
    rows = [row for row in FORMAT.rows(path, ReadRequest("reward")) if row.problem is not None]
    grades: dict[str, list[str]] = {}
    for row in rows:
        grades.setdefault(str(row.problem), []).append(str(row.value))
    return {problem: sorted(values) for problem, values in sorted(grades.items())}, {row.state for row in rows}


def change(path, edit):
    """Write the lines of a file again, after ``edit`` has changed every object; None leaves a line out."""
    edited = [row for row in map(edit, read_jsonl(path)) if row is not None]
    path.write_text("".join(json.dumps(row) + "\n" for row in edited))


def test_failures_are_not_graded_and_retried_rollouts_count_once(output):
    grades, states = answers(output)

    assert sorted(grades.values()) == [["0.0", "1.0"], ["1.0", "1.0"], ["None", "None"]]
    assert states == {"unknown"}


def test_problems_do_not_depend_on_task_indices(output):
    before, _ = answers(output)

    for name in (ROLLOUTS, FAILURES, PLANNED):
        change(output.with_name(name), lambda row: {**row, "_ng_task_index": 2 - row["_ng_task_index"]})
    assert answers(output)[0] == before


def test_problems_are_the_same_with_and_without_the_planned_inputs(output):
    """NeMo Gym adds default values to the prompts of rollouts, and a seed to each with num_repeats_add_seed."""
    before, _ = answers(output)
    output.with_name(PLANNED).unlink()
    with pytest.raises(UsageError, match=r"no file has the prompt of task 2.*restore rollouts_materialized_inputs"):
        answers(output)
    output.with_name(FAILURES).unlink()

    assert answers(output)[0] == {key: values for key, values in before.items() if "None" not in values}


def test_prompts_that_an_agent_changed_are_those_that_were_planned(output):
    before, _ = answers(output)

    def append(row):
        row["responses_create_params"]["input"].append({"role": "assistant", "content": f"{row['reward']}"})
        return row

    change(output, append)
    assert answers(output)[0] == before


def test_planned_rollout_in_no_file_makes_the_run_unfinished(output):
    before, _ = answers(output)
    change(output.with_name(FAILURES), lambda row: None if row["_ng_rollout_index"] == 1 else row)

    assert answers(output) == (before, {"unknown", "unfinished"})


def test_masked_rollouts_and_those_without_a_reward_are_not_graded(output):
    change(output, lambda row: {**row, "mask_sample": True} if row["_ng_task_index"] else {**row, "reward": None})

    assert list(answers(output)[0].values()) == [["None", "None"]] * 3


def test_joined_outputs_are_refused(output):
    row = read_jsonl(output)[0]
    row["responses_create_params"]["input"] = "another data set"
    with open(output, "a") as file:
        file.write(json.dumps(row) + "\n")

    with pytest.raises(UsageError, match=r"rollouts\.jsonl:5 has the task and the rollout of line 1 with another"):
        answers(output)


def test_reward_that_is_text_is_refused_with_its_line(output):
    change(output, lambda row: {**row, "reward": "good"})

    with pytest.raises(UsageError, match=r"rollouts\.jsonl:1: reward is 'good', which is not a number"):
        answers(output)


def test_numbers_of_the_tool_without_the_failures():
    rows = list(FORMAT.rows(DATA / AGGREGATED, ReadRequest()))
    beside = [row for row in FORMAT.rows(DATA / ROLLOUTS, ReadRequest("reward")) if row.problem is None]

    assert {row.metric: row.value for row in rows} == {
        "mean/reward": 0.75, "max/reward": 1.0, "min/reward": 0.0, "reward": 0.75,
    }  # fmt: skip
    assert [(row.metric, row.set, row.value) for row in beside if row.metric == "reward"] == [
        ("reward", "sums_agent", 0.75)
    ]


def test_files_beside_the_rollouts_are_read_with_them(tmp_path):
    files = [DATA / name for name in (AGGREGATED, FAILURES, PLANNED, ROLLOUTS)]

    assert all(map(FORMAT.recognises, files))
    assert FORMAT.choose(files) == [DATA / ROLLOUTS]
    assert FORMAT.choose([DATA / AGGREGATED]) == [DATA / AGGREGATED]
    assert not any(map(FORMAT.recognises, write_other_tools(tmp_path)))
