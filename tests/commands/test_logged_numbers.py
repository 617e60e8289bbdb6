import time
from dataclasses import replace
from itertools import count

import pytest
from helpers.campaigns import train_quietly
from helpers.models import TINY_RUN
from helpers.records import context, group, step

from retrain.config.describe import document
from retrain.files import read_jsonl
from retrain.records.recorder import RunRecorder

UNIFORM = {"training": {"max_steps": 2, "batch_size": 3, "group_size": 4, "max_tokens": 24},
           "backend": {"devices": "cpu"}}  # fmt: skip


def test_uniform_groups_are_measured_and_take_part_in_the_step_where_they_are_kept(tmp_path):
    module = tmp_path / "constant.py"
    module.write_text("def score(completion, answer):\n    return -0.5\n")
    rows = {}
    reward = {"type": "custom", "custom_module": str(module)}
    for discard in (True, False):
        (tmp_path / str(discard)).mkdir()
        algorithm = {"advantage_mode": "grpo", "discard_group_zero_advantage": discard}
        toml = document({"algorithm": algorithm, "reward": reward, **UNIFORM})
        rows[discard] = train_quietly(tmp_path / str(discard), toml)
    for row in rows[True]:
        assert (row["num_datums"], row["discarded_count"], row["loss"], row["grad_norm"]) == (0, 3, None, None)
        assert row["val/ratio"] is None
        assert 0 <= row["kl_divergence_inference"] < 1e-6
        assert (row["objective/non_score_reward"], row["objective/rlhf_reward"]) == (0.0, -0.5)
    for row in rows[False]:
        assert (row["num_datums"], row["discarded_count"], row["loss"], row["grad_norm"]) == (12, 0, 0.0, 0.0)
        assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)
    for row in rows[True] + rows[False]:
        assert row["kl_sample_train_v2"] < 1e-6
        assert row["entropy"] == rows[True][row["step"]]["entropy"] > 0


def test_updates_compute_over_the_kept_tokens_unless_told_otherwise(tmp_path):
    """The same tokens are sampled either way. Over the full vocabulary each has a lower probability than among the kept
    tokens it was drawn from."""
    rows = {}
    for replay in (True, False):
        training = {**UNIFORM["training"], "max_steps": 1, "top_p": 0.7, "replay_truncation": replay}
        (tmp_path / str(replay)).mkdir()
        toml = document({**UNIFORM, "training": training, "algorithm": {"discard_group_zero_advantage": False}})
        (rows[replay],) = train_quietly(tmp_path / str(replay), toml)
    assert rows[True]["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert rows[False]["val/ratio"] < 0.99
    assert rows[True]["kl_sample_train_v2"] < 1e-6 < 1e-3 < rows[False]["kl_sample_train_v2"]
    assert rows[True]["reward"] == rows[False]["reward"]
    assert rows[True]["val/num_eos_tokens"] == rows[False]["val/num_eos_tokens"]


SEPA = {
    "algorithm": {"transform_mode": "gtpo_sepa"}, "gtpo": {"beta": 0.5}, "sepa": {"steps": 2, "correct_rate_gate": 0.0},
    "training": {"max_steps": 3, "batch_size": 4, "group_size": 4, "max_tokens": 40}, "backend": {"devices": "cpu"},
}  # fmt: skip


def test_pooling_changes_no_planning_weight_in_the_logs(tmp_path):
    """λ follows its ramp, pooling shrinks the variance of execution weights by (1 − λ)², planning weights stay."""
    train_quietly(tmp_path, document(SEPA))
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [row["sepa_lambda"] for row in rows] == [0.0, 0.5, 1.0]
    for row in rows:
        assert row["plan_weight_mean"] > 0
        assert row["plan_weight_change"] < 1e-12  # the identity
    # Within a completion pooled deviations are (1 − λ) times the raw ones; what is left at λ = 1 lies between them.
    assert rows[0]["exec_weight_var"] == rows[0]["exec_weight_var_unpooled"]
    assert rows[1]["exec_weight_var"] < rows[1]["exec_weight_var_unpooled"]
    assert rows[2]["exec_weight_var"] < 0.5 * rows[2]["exec_weight_var_unpooled"]


MONTH = 30 * 24 * 3600.0


def test_durations_are_right_while_the_clock_is_set_back(tmp_path, model, monkeypatch):
    clock, calls = time.time, count()
    monkeypatch.setattr(time, "time", lambda: clock() - MONTH * (next(calls) // 3))  # a month back at every third look
    rows = train_quietly(tmp_path, TINY_RUN.format(model=model) + "max_tokens = 6\n")
    monkeypatch.undo()
    for row in rows:
        seconds = {key: row[key] for key in row if key.startswith(("time/", "timing_")) or key == "step_time_s"}
        assert all(0 <= value < 1000 for value in seconds.values() if value is not None), seconds
        assert row["time/rollout"] > 0
    for row in read_jsonl(tmp_path / "out/timing_spans.jsonl"):
        for span in row["spans"]:
            assert 0 <= span["duration"] < 1000
            assert abs(span["wall_start"] - clock()) < 1000  # still stamps of the wall clock


def test_durations_are_right_where_the_clock_is_set_back_between_two_processes(tmp_path):
    first = RunRecorder(tmp_path, context(), trackers={})
    first.record_step(step([group([1.0, 0.0], [2, 3])], 0))  # from 1000 to 1004 s
    state = first.state()
    first.close()
    again = RunRecorder(tmp_path, context(), trackers={})
    again.restore(state)
    back = step([group([1.0, 0.0], [2, 3])], 1)
    again.record_step(replace(back, step_start=10.0, step_end=13.0, spans=[]))
    again.close()
    assert [row["timing_wall_clock"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [4.0, 7.0]
