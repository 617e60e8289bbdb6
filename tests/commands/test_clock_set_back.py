"""Durations are right although the machine's clock is set back: while a run trains, and between two processes."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count

from record_cases import context, group, step
from toymodels import TINY_RUN, train_quietly

from retrain.files import read_jsonl
from retrain.record.recorder import RunRecorder

MONTH = 30 * 24 * 3600.0


def test_while_a_run_trains(tmp_path, model, monkeypatch):
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


def test_between_two_processes(tmp_path):
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
