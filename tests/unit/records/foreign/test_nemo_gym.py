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
from retrain.records.foreign.table import Request

DATA = Path(__file__).parents[3] / "data/foreign/nemo_gym"
ROLLOUTS, FAILURES = "rollouts.jsonl", "rollouts_failures.jsonl"
PLANNED, AGGREGATED = "rollouts_materialized_inputs.jsonl", "rollouts_aggregate_metrics.json"


@pytest.fixture
def output(tmp_path):
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    return tmp_path / ROLLOUTS


def answers(path):
    """Return the grades of every problem, and the states of the run's rows."""
    rows = [row for row in FORMAT.rows(path, Request(metric="reward")) if row.problem is not None]
    grades: dict[str, dict[int, float | None]] = {}
    for row in rows:
        assert row.sample not in grades.setdefault(row.problem or "", {})
        grades[row.problem or ""][row.sample] = row.value
    return grades, {row.state for row in rows}


def change(path, edit):
    """Write the lines of a file again, after ``edit`` has changed every object; None leaves a line out."""
    edited = [row for row in map(edit, read_jsonl(path)) if row is not None]
    path.write_text("".join(json.dumps(row) + "\n" for row in edited))


def test_failures_are_not_graded_and_retried_rollouts_count_once(output):
    grades, states = answers(output)

    assert list(grades.values()) == [{0: 1.0, 1: 1.0}, {0: 0.0, 1: 1.0}, {0: None, 1: None}]
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
    output.with_name(FAILURES).unlink()

    after, _ = answers(output)
    assert after == dict(list(before.items())[:2])


def test_prompts_that_an_agent_changed_are_those_that_were_planned(output):
    before, _ = answers(output)

    def append(row):
        row["responses_create_params"]["input"].append({"role": "assistant", "content": f"{row['reward']}"})
        return row

    change(output, append)
    assert answers(output)[0] == before


def test_tasks_with_the_same_prompt_differ_in_their_columns(output):
    change(
        output.with_name(PLANNED),
        lambda row: {**row, "responses_create_params": {"input": "Play."}, "game": row["_ng_task_index"]},
    )

    assert len(answers(output)[0]) == 3


def test_failed_task_without_any_prompt_is_refused(output):
    output.with_name(PLANNED).unlink()

    with pytest.raises(UsageError, match=r"no file has the prompt of task 2.*restore rollouts_materialized_inputs"):
        answers(output)


def test_planned_rollout_in_no_file_makes_the_run_unfinished(output):
    change(output.with_name(FAILURES), lambda row: None if row["_ng_rollout_index"] == 1 else row)

    grades, states = answers(output)
    assert list(grades.values())[2] == {0: None, 1: None}
    assert states == {"unknown", "unfinished"}


def test_masked_rollouts_and_those_without_a_reward_are_not_graded(output):
    change(output, lambda row: {**row, "mask_sample": True} if row["_ng_task_index"] else {**row, "reward": None})

    assert {value for grades in answers(output)[0].values() for value in grades.values()} == {None}


def test_joined_outputs_are_refused(output):
    row = read_jsonl(output)[0]
    row["responses_create_params"]["input"] = "another data set"
    with open(output, "a") as file:
        file.write(json.dumps(row) + "\n")

    with pytest.raises(UsageError, match=r"rollouts\.jsonl:5 has task 1, rollout 0 with another prompt"):
        answers(output)


def test_reward_that_is_text_is_refused_with_its_line(output):
    change(output, lambda row: {**row, "reward": "good"})

    with pytest.raises(UsageError, match=r"rollouts\.jsonl:1 reward is 'good', not a number"):
        answers(output)


def test_numbers_of_the_tool_without_the_failures():
    named = {row.metric: row.value for row in FORMAT.rows(DATA / AGGREGATED, Request())}
    beside = [row for row in FORMAT.rows(DATA / ROLLOUTS, Request()) if row.problem is None]

    assert named == {"mean/reward": 0.75, "max/reward": 1.0, "min/reward": 0.0}
    assert [(row.metric, row.set, row.value) for row in beside] == [("reward", "sums_agent", 0.75)]


def test_files_beside_the_rollouts_are_no_runs(tmp_path):
    files = [DATA / name for name in (AGGREGATED, FAILURES, PLANNED, ROLLOUTS)]

    assert FORMAT.choose(files) == [DATA / ROLLOUTS]
    assert FORMAT.choose([DATA / AGGREGATED]) == [DATA / AGGREGATED]
    assert [path.name for path in files if FORMAT.recognises(path)] == [AGGREGATED, ROLLOUTS]
    with pytest.raises(UsageError, match="is no run"):
        list(FORMAT.rows(DATA / FAILURES, Request()))


def test_direction_is_known_and_the_unit_is_not():
    assert FORMAT.facts(DATA / ROLLOUTS)["reward"] == (True, None)


def test_files_of_other_tools_are_not_recognised(tmp_path):
    assert not any(map(FORMAT.recognises, write_other_tools(tmp_path)))
