import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from helpers.records import context, evaluation, group, step

from retrain.cli.run_status import read_status
from retrain.cli.status import Follower, JsonLines
from retrain.files import write_json
from retrain.records.recorder import RunRecorder
from retrain.util.jsonl import Tail


def test_a_tail_gives_every_complete_row_once_and_reads_only_what_is_new(tmp_path):
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.rows() == (False, [])
    path.write_bytes(b'{"n": 0, "pad": "' + b"x" * 200 + b'"}\n{"n": 1}\n{"n": ')
    assert [row["n"] for row in tail.rows()[1]] == [0, 1]
    assert tail.rows() == (False, [])
    with open(path, "r+b") as file:
        file.write(b"\xff" * 50)  # unreadable now, if it were read again
    with open(path, "ab") as file:
        file.write(b'2}\n"text"\n{"n": 3, "to\xc3\n\0\0\0\n{"n": 4}\n')
    assert tail.rows() == (False, [{"n": 2}, {"n": 4}])  # a damaged line costs itself only
    path.unlink()
    assert tail.rows() == (True, [])
    assert tail.rows() == (False, [])
    path.write_bytes(b'{"n": 5}\n')
    assert tail.rows() == (False, [{"n": 5}])


class Campaign:
    """Two runs whose files grow as the test says."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.runs: list[dict[str, Any]] = [
            {"run_id": f"a_s{n}", "label": "a", "seed": n, "state": "pending", "reason": None, "step": 0,
             "max_steps": 4, "path": f"runs/a_s{n}"} for n in (1, 2)
        ]  # fmt: skip
        directory.mkdir(parents=True, exist_ok=True)
        self.recorders = [RunRecorder(directory / run["path"], context(run_id=run["run_id"])) for run in self.runs]
        self.lock: Any = None
        self.write()

    def write(self, **facts: Any) -> None:
        write_json(self.directory / "manifest.json", {"runs": self.runs, **facts})

    def hold(self) -> None:
        self.lock = open(self.directory / ".lock", "a")  # noqa: SIM115
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def state(self, index: int, state: str, reason: str | None = None) -> None:
        self.runs[index] |= {"state": state, "reason": reason}
        self.write()

    def steps(self, index: int, first: int, last: int) -> None:
        for number in range(first, last):
            self.recorders[index].record_step(step([group([1.0, 0.0], [2, 2])], number))
        self.recorders[index].flush()


def events(stream: io.StringIO) -> list[str]:
    """Return what was reported since the last call, one word per fact."""
    reported = []
    for line in stream.getvalue().splitlines():
        event = json.loads(line)
        detail = event.get("step", event.get("status", event.get("text", "")))
        reported.append(f"{event['event']} {event.get('run', '')} {detail}".strip())
    stream.seek(0)
    stream.truncate()
    return reported


def test_a_campaign_from_its_first_to_its_last_step(tmp_path):
    campaign, stream = Campaign(tmp_path / "c"), io.StringIO()
    follower = Follower(tmp_path / "c", JsonLines(stream))
    assert not follower.poll()
    assert events(stream) == ["plan"]
    campaign.hold()
    campaign.runs[0]["worker"] = "2 gpu:1"
    campaign.state(0, "running")
    campaign.recorders[0].record_eval(evaluation([group([1.0, 0.0], [2, 2])]))
    campaign.steps(0, 0, 2)
    follower.poll()
    assert '"worker": "2 gpu:1"' in stream.getvalue()
    assert events(stream) == ["worker a_s1", "start a_s1 1", "eval a_s1", "step a_s1 1"]
    assert read_status(tmp_path / "c" / "runs" / "a_s1")["runs"][0]["state"] == "running"
    follower.poll()
    assert events(stream) == []
    campaign.steps(0, 2, 4)
    campaign.state(0, "done")
    campaign.write(squeeze={"recommended_rank": 4})
    follower.poll()
    message = f"message  {tmp_path / 'c'}: recommended rank 4"
    assert events(stream) == ["step a_s1 2", "step a_s1 3", "end a_s1 done", message]
    campaign.state(1, "running")
    campaign.recorders[1].record_eval(evaluation([group([1.0, 0.0], [2, 2])]))
    campaign.steps(1, 0, 3)
    follower.poll()
    campaign.lock.close()  # killed
    assert read_status(tmp_path / "c" / "runs" / "a_s2")["runs"][0]["state"] == "interrupted"
    assert not follower.poll()
    assert events(stream)[-1] == "end a_s2 interrupted"
    campaign.hold()  # resumed from a checkpoint at step 1
    campaign.recorders[1].truncate(1)  # the evaluation comes again, and is not reported twice
    campaign.steps(1, 1, 2)
    follower.poll()
    assert events(stream) == ["start a_s2 1", "step a_s2 1"]
    campaign.steps(1, 2, 4)
    campaign.state(1, "failed", "RunFailed: loss is not finite")
    campaign.lock.close()
    assert follower.poll()
    assert events(stream) == ["step a_s2 2", "step a_s2 3", "end a_s2 failed"]


def test_several_directories_and_files_that_go(tmp_path):
    for name in ("one", "two"):
        campaign = Campaign(tmp_path / name)
        campaign.state(0, "done")
        campaign.steps(0, 0, 1)
    stream = io.StringIO()
    follower = Follower(tmp_path, JsonLines(stream))
    follower.poll()
    assert {"step one/a_s1 0", "end two/a_s1 done"} <= {*events(stream)}
    shutil.rmtree(tmp_path / "two")
    follower.poll()
    assert sorted(events(stream)) == ["end two/a_s1 interrupted", "end two/a_s2 interrupted"]
    (tmp_path / "one" / "manifest.json").write_text('{"runs": [{"half')
    assert not follower.poll()
    assert not Follower(tmp_path / "gone", JsonLines(stream)).poll()


def test_the_command_ends_with_the_runs_and_quietly_with_ctrl_c(tmp_path):
    campaign = Campaign(tmp_path)
    for index in (0, 1):
        campaign.steps(index, 0, 4)
        campaign.state(index, "done")
    command = [sys.executable, "-m", "retrain", "status", str(tmp_path), "--watch"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout.splitlines()[2])["row"]["mean_reward"] == 0.5
    campaign.state(1, "interrupted")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while not process.stdout.readline().startswith("end run=a_s2 status=interrupted"):
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, rest, errors) == (0, "", "")
