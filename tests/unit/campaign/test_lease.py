import fcntl
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from retrain.errors import LeaseLost, UsageError
from retrain.files import read_json, write_json
from retrain.ownership import MARK, claim
from retrain.util.session import LEASE, DirectoryLock, machine, process_start, wait_for_writers

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
ELSEWHERE = {"host": "another-machine", "boot": "another-start"}


def lock(directory: Path, **changes) -> DirectoryLock:
    return DirectoryLock(directory, **({"beat": 0.05, "watch": 0.3} | changes))


def lease(directory: Path, **changes) -> None:
    claim(directory)
    write_json(directory / LEASE, {"token": "other", "pid": 1, "process_start": "0", "count": 3, **ELSEWHERE} | changes)


def test_a_second_owner_is_refused_and_nothing_is_left(tmp_path):
    with lock(tmp_path / "run") as first:
        with pytest.raises(UsageError, match="another retrain process is writing"), lock(tmp_path / "run"):
            pass
        assert read_json(tmp_path / "run" / LEASE)["token"] == first.token
        first.check()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", MARK}


@contextmanager
def sleeping(seconds: float) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lease_of(directory: Path, process: subprocess.Popen) -> None:
    lease(directory, pid=process.pid, process_start=process_start(process.pid), **machine())


def test_where_file_locks_do_not_work_the_lease_decides(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(37, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with sleeping(60) as other:
        lease_of(tmp_path, other)
        with pytest.raises(UsageError, match=f"process {other.pid}"), lock(tmp_path):
            pass
    with lock(tmp_path) as mine:  # the owner is dead: taken over at once
        assert read_json(tmp_path / LEASE)["token"] == mine.token


def test_a_lease_from_another_machine_is_watched_and_its_times_are_not_read(tmp_path):
    told: list[str] = []
    lease(tmp_path, time="2999-01-01T00:00:00+0000")
    with lock(tmp_path, message=told.append):
        pass
    assert "another-machine" in told[0]
    lease(tmp_path, time="1970-01-01T00:00:00+0000")
    ended = threading.Event()

    def beat() -> None:
        for count in itertools.count(4):
            lease(tmp_path, count=count)
            if ended.wait(0.03):
                return

    with ThreadPoolExecutor(1) as pool:
        pool.submit(beat)
        try:
            with pytest.raises(UsageError, match="another-machine"), lock(tmp_path):
                pass
        finally:
            ended.set()


def test_the_lease_is_renewed_and_a_clock_that_jumps_back_changes_nothing(tmp_path, monkeypatch):
    with lock(tmp_path) as mine:
        monkeypatch.setattr(time, "time", lambda: 0.0)
        first = read_json(tmp_path / LEASE)["count"]
        while read_json(tmp_path / LEASE)["count"] < first + 2:
            time.sleep(0.02)
        mine.check()


def test_a_process_whose_lease_was_taken_stops_and_names_its_successor(tmp_path):
    with lock(tmp_path) as mine:
        lease(tmp_path)
        with pytest.raises(LeaseLost, match=r"process 1 on another-machine has taken over .*: this process stops"):
            mine.check()
    assert read_json(tmp_path / LEASE)["token"] == "other"  # not ours to remove


def test_a_removed_lease_is_not_made_again(tmp_path):
    with lock(tmp_path) as mine:
        (tmp_path / LEASE).unlink()
        time.sleep(0.2)  # several beats
        assert not (tmp_path / LEASE).exists()
        with pytest.raises(LeaseLost, match=r"\.lease was removed"):
            mine.check()


def test_a_damaged_lease_and_that_of_an_ended_process_hold_nothing_up(tmp_path):
    lease(tmp_path, pid=os.getppid(), process_start="-1", **machine())  # a process number that was given again
    with lock(tmp_path):
        pass
    for text in ("", "{", "[]", '{"pid": "x"}', "\x00\xff"):
        (tmp_path / LEASE).write_text(text)
        with lock(tmp_path):
            assert read_json(tmp_path / LEASE)["pid"] == os.getpid()


STUCK = """
import hashlib
from retrain.util import session
from retrain.records.observer import NullObserver
session.ABANDON_SECONDS = 0.5
with session.StopRequest().listening(NullObserver().message) as stop:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)  # minutes inside one call, no bytecode in between
"""


def test_a_second_signal_ends_a_process_that_is_stuck_in_a_long_call():
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", STUCK], text=True, env=ENVIRONMENT, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None  # the first one waits for the step
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "stopped at the last checkpoint" in errors


def test_writers_that_live_on_are_waited_for(tmp_path):
    """Of four leases one is a living process's, which ends by itself; those of the dead hold nothing up."""
    with sleeping(0) as dead:
        lease_of(tmp_path / "dead", dead)
    lease(tmp_path / "elsewhere")  # stands still
    told: list[str] = []
    with sleeping(0.7) as other, ThreadPoolExecutor(1) as pool:
        lease_of(tmp_path / "other", other)
        pool.submit(other.wait)
        wait_for_writers([tmp_path / name for name in ("other", "dead", "free", "elsewhere")], told.append, watch=0.3)
        assert process_start(other.pid) is None
    (message,) = told
    assert f"process {other.pid} on {machine()['host']} to finish the step of 2 runs" in message
