import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.records import config, context, evaluation, group, step

from retrain.cli.run_status import read_status
from retrain.config import parse_dict
from retrain.errors import CheckpointError
from retrain.files import read_jsonl
from retrain.ownership import claim
from retrain.records.catalogue import METRICS
from retrain.records.environment import environment_facts, package_versions, run_facts
from retrain.records.recorder import RunRecorder
from retrain.records.schema.rows import Checkpoint
from retrain.types import RewardResult
from retrain.util.jsonl import last_row

ROWS = (
    "metrics.jsonl", "emergence/steps.jsonl", "emergence/generations.jsonl", "timing_spans.jsonl", "evals.jsonl",
    "emergence/evaluations.jsonl",
)  # fmt: skip


def strict(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file in which every line is complete and strict JSON."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n")[:-1]]


def play(recorder: RunRecorder, first: int, last: int) -> None:
    """Steps with growing rewards; a further metric turns up in step 1, tags in step 2, an evaluation every 2."""
    for number in range(first, last):
        if number == 0:
            recorder.record_eval(evaluation([group([0.0, 0.0], [3, 4], tags=("easy",))], number=0))
        reward = RewardResult(float(number % 2), sample_metrics={"depth": 1.0} if number == 1 else {})
        tags = ("hard",) if number == 2 else ()
        groups = [group([reward, 0.0], [4, 5 + number], tags=tags), group([0.0, None], [2, 3])]
        if number % 2 == 1:
            recorder.record_eval(evaluation([group([1.0, 0.0], [3, 4], tags=("easy",))], number=number + 1))
        recorder.record_step(step(groups, number, {"loss": 0.1 * number}, sepa_lambda=0.1 * number))


def test_one_row_per_step_in_every_file(tmp_path):
    with closing(RunRecorder(tmp_path, context())) as recorder:
        play(recorder, 0, 4)
        recorder.record_checkpoint(Checkpoint("000004", 4, 3, "a", "b", 0))
    rows = strict(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["eval/heldout/step"] for row in rows] == [0, 2, None, 4]
    assert rows[2]["eval/heldout/easy/correct_rate"] is rows[3]["rewards/depth/mean"] is None
    assert [row["episode"] for row in rows] == [4, 8, 12, 16]
    assert rows[3]["running_correct_rate"] == 2 / 16
    assert set(rows[1]) <= set(rows[2]) <= set(rows[3])
    second = strict(tmp_path / "emergence" / "steps.jsonl")[1]
    assert (second["correct_count"], second["total_count"], second["condition"]) == (1, 4, "grpo+none")
    assert len(strict(tmp_path / "emergence" / "generations.jsonl")) == 16
    assert [row["step"] for row in strict(tmp_path / "evals.jsonl")] == [0, 2, 4]
    evaluated = strict(tmp_path / "emergence" / "evaluations.jsonl")
    assert list(dict.fromkeys(row["step"] for row in evaluated)) == [0, 2, 4]
    assert strict(tmp_path / "checkpoints.jsonl")[0]["batch"] == 4


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file, without the times at which pages were made."""
    times = re.compile(rb'"started_at": "[^"]*"|Generated [^<]*')
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name not in ("run.log", "timeline.html"))
    return {str(path.relative_to(directory)): times.sub(b"", path.read_bytes()) for path in paths}


@pytest.mark.parametrize("kept", [3, 4])  # before step 4 there was an evaluation
def test_resuming_gives_the_same_bytes_as_never_stopping(tmp_path, monkeypatch, kept):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for module in ("columns", "recorder"):
        monkeypatch.setattr(f"retrain.records.{module}.BLOCK", 4)  # rows
    settings = context(max_steps=8, config=config(logging={"rollouts_every": 2, "num_groups_to_log": 1}))
    with closing(RunRecorder(whole, settings)) as recorder:
        play(recorder, 0, 8)
    first = RunRecorder(broken, settings)
    play(first, 0, kept)
    saved = json.loads(json.dumps(first.state()))
    play(first, kept, 6)  # lost work: the process is killed in the middle of a line
    first.flush()
    for name in ROWS:
        with open(broken / name, "a", encoding="utf-8") as file:
            file.write('{"step": 6, "torn')
    with closing(RunRecorder(broken, settings)) as second:
        second.restore(saved)
        second.truncate(kept)
        assert f"train_iteration_{kept:06d}_rollout_summaries.jsonl" not in contents(broken)
        play(second, kept, 8)
    expected, resumed = contents(whole), contents(broken)
    assert {*ROWS, "metrics.f32", "notes.jsonl", "iterations.jsonl", "tokens_000006.safetensors"} <= set(expected)
    pages = [name for name in sorted(expected) if name.startswith("train") and name.endswith("html")]
    assert pages == [f"train_iteration_{number:06d}.html" for number in (0, 2, 4, 6, 7)]
    assert set(resumed) == set(expected)
    for name, data in expected.items():
        assert resumed[name] == data, name


def test_the_catalogue_is_one_table():
    keys = {metric.key for metric in METRICS}
    aliases = [alias for m in METRICS for alias in {name for names in m.aliases.values() for name in names}]
    assert (len(keys), len(aliases)) == (len(METRICS), len(set(aliases)))
    # With a critic TRL's names have definitions of their own, which then stand in place of the aliases.
    assert set(aliases) & keys <= {metric.key for metric in METRICS if metric.requires == "critic"}
    assert all(metric.definition for metric in METRICS)


@pytest.mark.parametrize("text", ["nonsense\n", "[1]\n"])
def test_damaged_rows_are_named_in_one_line(tmp_path, text):
    claim(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl is damaged \(") as raised:
        read_status(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl", "checkpoints.jsonl"])
def test_a_row_that_is_no_object_is_named(tmp_path, name):
    (tmp_path / name).write_text('{"step": 0}\n[1]\n')
    with pytest.raises(CheckpointError, match=f"{name}:2 is damaged .it is no JSON object.: remove that line"):
        read_jsonl(tmp_path / name)


def test_the_last_row_of_a_long_file_with_a_torn_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) == {}
    for text, step_number in (
        ('{"step": 0', None),
        ('{"step": 0}\n', 0),
        ("".join(json.dumps({"step": n, "pad": "x" * 50_000}) + "\n" for n in range(9)) + '{"step": 9, "to', 8),
        (json.dumps({"step": 1, "pad": "x" * 400_000}) + "\n", 1),
    ):
        path.write_text(text)
        assert last_row(path).get("step") == step_number
    path.write_bytes(b'{"step": 1}\n\0\0\0\n')
    with pytest.raises(CheckpointError, match=r"the last line of .* is damaged"):
        last_row(path)


def test_facts_hold_types_and_versions_and_no_environment_variables(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret")
    facts = run_facts(parse_dict({"training": {"lr": 1e-4, "seed": 1}}), run_id="a_s1")
    types = {"training.lr": "float", "training.seed": "int", "training.clip_eps_high": "null", "lora.anneal": "list"}
    assert types.items() <= facts["types"].items()
    assert (facts["run_id"], facts["training"]["lr"]) == ("a_s1", 1e-4)
    assert facts["packages"]["numpy"] == package_versions()["numpy"]
    assert environment_facts()["cpu_count"] >= 1
    assert "sk-very-secret" not in json.dumps([facts, environment_facts()])
