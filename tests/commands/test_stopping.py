import io
import os
import signal
import subprocess
import sys
import time

import pytest

from retrain.cli.console import PlainConsole
from retrain.records.observer import NullObserver
from retrain.util.session import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_request_is_haste_and_hangups_are_none(number):
    stop = StopRequest()
    with stop.listening(NullObserver().message):
        for sent in (signal.SIGHUP, signal.SIGHUP, number, signal.SIGHUP):  # of kernel, shell and service manager
            os.kill(os.getpid(), sent)
            assert stop.signal == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.listening(NullObserver().message):
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stream_without_a_reader_loses_what_is_written_and_fails_nobody():
    code = """
import sys
from retrain.cli.console import lasting_streams
with lasting_streams():
    sys.stdin.read()  # until the reader of our output is gone
    print("to nobody", flush=True)
    print("nor this")
print("nor this, when the process ends")
print("done", file=sys.stderr)
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "done\n"
    assert process.returncode == 0


class Interrupting(io.RawIOBase):
    def __init__(self):
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        if b"step" in bytes(data) and b"finishing" not in bytes(data):
            os.kill(os.getpid(), signal.SIGINT)
        self.written += bytes(data)
        return len(data)


def test_a_signal_in_the_middle_of_a_write_is_heard_and_answered():
    """A handler that wrote to the same stream would begin a buffered write within itself, which ended the run."""
    raw, stop = Interrupting(), StopRequest()
    observer = PlainConsole(io.TextIOWrapper(io.BufferedWriter(raw)))
    with stop.listening(observer.message):
        observer.message("step 1")
        deadline = time.monotonic() + 20
        while b"finishing" not in raw.written and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stop.signal == signal.SIGINT
    assert b"step 1" in raw.written
    assert b"finishing the step and saving" in raw.written
