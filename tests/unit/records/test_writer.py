import json
import os
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.records import context, evaluation, group, step

from retrain.errors import RunFailed
from retrain.files import append_jsonl, read_jsonl
from retrain.records import reporter, writer
from retrain.records.recorder import RunRecorder
from retrain.records.schema.rows import Checkpoint


def record(recorder: RunRecorder, first: int, last: int, evaluated: bool = False) -> None:
    """Record steps, perhaps with an evaluation before the first and after every second."""
    for number in range(first, last):
        if evaluated and number == 0:
            recorder.record_eval(evaluation([group([1.0], [3])], 0))
        if evaluated and number % 2:
            recorder.record_eval(evaluation([group([1.0], [3])], number + 1))
        recorder.record_step(step([group([1.0, 0.0], [4, 5])], number, {"loss": number / 8}))


def test_training_goes_on_while_the_disk_is_slow_and_flush_waits(tmp_path, monkeypatch):
    gate = threading.Event()

    def append(path: Path, rows: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert gate.wait(30)
        append_jsonl(path, rows)

    monkeypatch.setattr(writer, "append_jsonl", append)
    recorder = RunRecorder(tmp_path, context())
    record(recorder, 0, 5, evaluated=True)  # returns although nothing can be written
    assert not (tmp_path / "metrics.jsonl").exists()
    threading.Timer(0.1, gate.set).start()
    recorder.flush()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    recorder.record_checkpoint(Checkpoint("000005", 5, 4, "a", "a", 0))
    assert [row["batch"] for row in read_jsonl(tmp_path / "checkpoints.jsonl")] == [5]
    assert recorder.close()


def test_a_barrier_syncs_every_file_that_was_written(tmp_path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink().name))
    recorder = RunRecorder(tmp_path / "run", context())
    record(recorder, 0, 2, evaluated=True)
    recorder.flush()
    written = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert written | {"run"} <= {*synced}
    synced.clear()
    recorder.flush()
    assert synced == []
    recorder.close()


def test_what_cannot_be_written_fails_the_run_at_its_next_record(tmp_path):
    (tmp_path / "emergence").write_text("a file where a folder must be")
    recorder = RunRecorder(tmp_path, context())
    record(recorder, 0, 1)
    with pytest.raises(RunFailed, match=r"emergence/steps\.jsonl cannot be written: .*"):
        recorder.flush()
    with pytest.raises(RunFailed, match="cannot be written"):
        record(recorder, 1, 2)
    with pytest.raises(RunFailed, match="cannot be written"):
        recorder.record_checkpoint(Checkpoint("000001", 1, 0, "a", "a", 0))
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1  # nothing is written past a gap
    assert not (tmp_path / "checkpoints.jsonl").exists()
    recorder.log_error(RunFailed("told"))
    assert not recorder.close(failed=True)
    assert "RunFailed: told" in (tmp_path / "run.log").read_text()


class Collecting:
    """A tracker that records its calls, hangs until ``gate`` opens and raises ``error`` in ``log`` or ``start``."""

    def __init__(self, gate: threading.Event | None = None, error: BaseException | None = None, hangs_in: str = "log"):
        self.gate, self.error, self.hangs_in = gate, error, hangs_in
        self.rows: list[tuple[int, str]] = []
        self.state: Any = None
        self.failed: list[bool] = []
        self.threads: set[str] = set()

    def _call(self, method: str) -> None:
        self.threads.add(threading.current_thread().name)
        if method == self.hangs_in:
            assert self.gate is None or self.gate.wait(30)
            if self.error is not None:
                raise self.error

    def start(self, run: Any, state: Any) -> dict[str, Any]:
        self.state = state
        self._call("start")
        return {"run_id": (state or {}).get("run_id", "abc")}

    def log(self, step: int, values: Any) -> None:
        self._call("log")
        is_evaluation = "eval/heldout/step" in values
        assert is_evaluation or values["train/loss"] == step / 8
        self.rows.append((step, "eval" if is_evaluation else "row"))

    def finish(self, failed: bool = False) -> None:
        self._call("finish")
        self.failed.append(failed)


def test_a_slow_tracker_holds_back_neither_training_nor_files(tmp_path):
    gate = threading.Event()
    tracker = Collecting(gate)
    recorder = RunRecorder(tmp_path, context(), trackers={"slow": tracker})
    record(recorder, 0, 6)
    recorder.flush()
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 6
    assert tracker.rows == []
    gate.set()
    recorder.close()
    assert tracker.rows == [(number, "row") for number in range(6)]
    assert tracker.failed == [False]
    assert tracker.threads == {"tracker slow"}  # libraries keep the current run in thread-local storage


@pytest.mark.parametrize(("limits", "tracker", "steps", "warning"), [
    ({"WAITING_ROWS": 3, "FINISH_SECONDS": 0.1}, {"gate": threading.Event()}, 8,
     "slow is 3 rows behind; it gets no further rows, training goes on"),
    ({"FINISH_SECONDS": 0.1}, {"gate": threading.Event()}, 1, "slow has not finished after 0.1 s"),
    ({}, {"error": ConnectionError("gone")}, 4,
     "slow failed in log: ConnectionError('gone'); it gets no further rows, training goes on"),
], ids=["never answers", "does not finish", "fails"])  # fmt: skip
def test_a_tracker_that_hangs_or_fails_is_left_behind_with_one_warning(
    tmp_path, monkeypatch, limits, tracker, steps, warning
):
    for name, limit in limits.items():
        monkeypatch.setattr(reporter, name, limit)
    warnings: list[str] = []
    recorder = RunRecorder(tmp_path, context(), trackers={"slow": Collecting(**tracker)}, warn=warnings.append)
    record(recorder, 0, steps)
    begin = time.monotonic()
    recorder.close()
    assert time.monotonic() - begin < 10
    if gate := tracker.get("gate"):
        gate.set()
    (line,) = [line for line in warnings if ": slow " in line]
    assert line.startswith(f"grpo+none_s1: {warning}")
    assert (tmp_path / "run.log").read_text().count(warning) == 1
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == steps


def test_training_does_not_wait_for_a_tracker_that_starts_slowly(tmp_path, monkeypatch):
    monkeypatch.setattr(reporter, "START_SECONDS", 0.1)
    gate, warnings = threading.Event(), list[str]()
    tracker = Collecting(gate, hangs_in="start")
    recorder = RunRecorder(tmp_path, context(), trackers={"slow": tracker}, warn=warnings.append)
    record(recorder, 0, 2)
    expected = ["grpo+none_s1: slow has not started after 0.1 s; training goes on, and its rows wait"]
    assert [line for line in warnings if ": slow " in line] == expected
    gate.set()
    assert recorder.close()
    assert tracker.rows == [(0, "row"), (1, "row")]


def test_a_tracker_gets_the_rows_that_a_killed_process_had_not_sent(tmp_path):
    """The first process dies while its tracker hangs; rows and evaluations have the steps of the files."""
    gate, second = threading.Event(), Collecting()
    first = RunRecorder(tmp_path, context(), trackers={"slow": Collecting(gate)})
    record(first, 0, 4, evaluated=True)
    state = json.loads(json.dumps(first.state()))
    record(first, 4, 6, evaluated=True)
    first.flush()
    with closing(RunRecorder(tmp_path, context(), trackers={"slow": second})) as resumed:
        resumed.restore(state)
        resumed.truncate(4)
        record(resumed, 4, 6, evaluated=True)
    assert second.state == {"run_id": "abc"}
    assert second.rows == [
        (0, "eval"), (0, "row"), (1, "row"), (2, "eval"), (2, "row"), (3, "row"), (4, "eval"), (4, "row"), (5, "row"),
        (6, "eval"),
    ]  # fmt: skip
    gate.set()
    first.close()


def test_what_was_sent_is_not_sent_again(tmp_path):
    first, second, new = Collecting(), Collecting(), Collecting()
    recorder = RunRecorder(tmp_path, context(), trackers={"mine": first})
    record(recorder, 0, 4, evaluated=True)
    assert recorder.close()  # everything has been sent
    with closing(RunRecorder(tmp_path, context(), trackers={"mine": second, "new": new})) as resumed:
        resumed.restore(recorder.state())
        resumed.truncate(4)
        record(resumed, 4, 5, evaluated=True)
    assert first.rows[-2:] == [(3, "row"), (4, "eval")]
    assert second.rows == [(4, "eval"), (4, "row")]  # an evaluation may come twice
    assert [entry for entry in new.rows if entry[1] == "row"] == [(number, "row") for number in range(5)]
