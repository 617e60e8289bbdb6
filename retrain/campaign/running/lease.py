"""Who may write a directory: one process at a time, also where file locks do not work.

A file lock ends with the process that holds it, however it dies, but network file systems may grant it to two
machines. So the owner also writes a lease, ``.lease``, and renews it; a lease of a dead process is taken over. No
clock is compared with another: on the owner's machine its process is looked for, from another machine the lease is
watched for a while to see whether it changes.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.errors import LeaseLost, StorageError, UsageError
from retrain.files import prepare_directory, read_json, write_json
from retrain.ownership import claim, machine, process_start

LOCK, LEASE = ".lock", ".lease"
LOCK_TRIES = 5
BEAT_SECONDS = 5.0
WATCH_SECONDS = 20.0
"""How long a lease from another machine must stand still before its owner counts as dead: four beats."""


class DirectoryLock:
    """One process at a time writes a directory: a file lock, and a lease that is renewed every few seconds. The
    directory gets its owner's mark; NotOurs is raised where it is somebody else's (see ``retrain.ownership``).

    ``message`` gets what is waited for. ``check`` raises LeaseLost once another process has taken over, which can
    only happen to one that was suspended.
    """

    def __init__(
        self, directory: Path, message: Callable[[str], None] = lambda text: None, *, beat: float = BEAT_SECONDS,
        watch: float = WATCH_SECONDS,
    ):  # fmt: skip
        self.directory, self.message, self.beat, self.watch = Path(directory), message, beat, watch
        self.token = uuid.uuid4().hex
        self.lost = False
        self._file = -1
        self._count = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> DirectoryLock:
        prepare_directory(self.directory)
        self._lock()
        try:
            claim(self.directory)  # first of all: a process that is killed here leaves a directory that is known
            self._take_lease()
        except BaseException:
            os.close(self._file)
            raise
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if (self._read() or {}).get("token") == self.token:
            (self.directory / LEASE).unlink(missing_ok=True)
        os.close(self._file)

    def check(self) -> None:
        """Raise LeaseLost when this process does not own the directory any more."""
        if self.lost:
            raise LeaseLost(f"another process has taken over {self.directory}: this one stops without writing")

    def _lock(self) -> None:
        path = self.directory / LOCK
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise StorageError(path, error) from error
        for attempt in range(LOCK_TRIES):  # ``status`` looks at the lock for a moment
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt + 1 < LOCK_TRIES:
                    time.sleep(0.1)
            except OSError:  # a file system without locks: the lease alone decides
                return
        os.close(self._file)
        raise UsageError(f"another retrain process is writing {self.directory}: wait for it, or use --out")

    def _take_lease(self) -> None:
        lease = self._read()
        if lease is not None and self._alive(lease):
            raise UsageError(
                f"another retrain process ({lease.get('host')}, process {lease.get('pid')}) is writing "
                f"{self.directory}: wait for it, or use --out"
            )
        self._write()
        if lease is not None and not self._same_machine(lease):
            self._ended.wait(self.beat / 5)  # two that take over at once: the later writer wins
        if (self._read() or {}).get("token") != self.token:
            raise UsageError(f"another retrain process has just taken {self.directory}: wait for it, or use --out")

    def _same_machine(self, lease: dict[str, Any]) -> bool:
        return {key: lease.get(key) for key in ("host", "boot")} == machine()

    def _alive(self, lease: dict[str, Any]) -> bool:
        """Whether the owner of this lease still runs."""
        if self._same_machine(lease):
            pid = lease.get("pid")
            return isinstance(pid, int) and pid != os.getpid() and process_start(pid) == lease.get("process_start")
        self.message(
            f"{self.directory} was being written by {lease.get('host')}: watching {self.watch:g} s whether it still is"
        )
        end = time.monotonic() + self.watch
        while time.monotonic() < end:
            time.sleep(min(self.beat, self.watch) / 5)
            now = self._read()
            if now is None or (now.get("token"), now.get("count")) != (lease.get("token"), lease.get("count")):
                return now is not None
        return False

    def _read(self) -> dict[str, Any] | None:
        try:
            lease = read_json(self.directory / LEASE)
        except (OSError, ValueError):
            return None
        return lease if isinstance(lease, dict) else None

    def _write(self) -> None:
        self._count += 1
        pid = os.getpid()
        write_json(
            self.directory / LEASE,
            {
                "token": self.token,
                "pid": pid,
                "process_start": process_start(pid),
                **machine(),
                "count": self._count,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            },
        )

    def _renew(self) -> None:
        """Renew the lease until the end; stop when it belongs to another."""
        while not self._ended.wait(self.beat):
            lease = self._read()
            if lease is not None and lease.get("token") != self.token:
                self.lost = True
                return
            if lease is None and not self.directory.is_dir():
                continue  # vanished: whoever records next finds out and says so
            try:
                self._write()
            except StorageError:  # a full disk: the records' own writes report it; the next beat tries again
                continue
