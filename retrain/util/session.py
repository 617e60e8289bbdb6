"""Lease of a process on the directory that it writes, and requests to stop.

A file lock ends with its process, but network file systems may grant it to two machines. So the owner also writes a
lease, ``.lease``, and renews it; another process takes over the lease of a dead owner. Clocks of machines are never
compared: a process on the owner's machine checks the owner's process id, a process on another machine watches the
lease for changes.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from retrain.device import torchrun_rank
from retrain.errors import LeaseLost, NotOurs, NotReadable, StorageError, UsageError, listed, plural
from retrain.files import dumps, prepare_directory, read_json_if_present, write_json, writing
from retrain.ownership import MARK, Owner, claim, machine, mark_of, process_start

LOCK, LEASE = ".lock", ".lease"
LOCK_TRIES = 5
LOOK_SECONDS = 0.2
REPLACE_SECONDS = 0.05
BEAT_SECONDS = 5.0
WATCH_SECONDS = 20.0
"""Seconds that a lease from another machine must stay unchanged before its owner counts as dead: four heartbeats."""
ECHO_SECONDS = 3.0
"""Under torchrun, signals within this time count as one: torchrun forwards a Ctrl-C that the terminal has also sent."""
ABANDON_SECONDS = 8.0
"""Seconds after a second signal within which the process exits, whatever it is doing."""


class DirectoryIdentity:
    """Identity of the directory that this process writes.

    It consists of the owner's id, which is in the directory's mark, and of device and inode, which are only in memory.
    So a moved, copied or restored directory can be resumed, but a process that began before a move cannot write into
    the directory that has replaced its own.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._mark, self._inode = mark_of(directory), _inode_of(directory)

    def check(self) -> None:
        """Raise StorageError if the directory has vanished, LeaseLost if another directory has replaced it."""
        try:
            inode = _inode_of(self.directory)
        except FileNotFoundError as error:
            raise StorageError(self.directory, "the directory has vanished") from error
        except OSError as error:
            raise StorageError(self.directory, error) from error
        if inode != self._inode:
            raise LeaseLost(
                f"{self.directory} is another directory than the one that this process began to write: it was moved or "
                "replaced meanwhile. This process stops without writing"
            )
        try:
            mark = mark_of(self.directory)
        except NotReadable as error:
            raise StorageError(self.directory, str(error)) from error
        if mark != self._mark:
            raise LeaseLost(
                f"{self.directory / MARK} is missing or names another run: the files in this directory were replaced "
                "while this process wrote it. This process stops without writing"
            )


def _inode_of(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


class DirectoryLock:
    """Lock of a directory for one process: a file lock, and a lease that is renewed every ``beat`` seconds.

    Entering raises NotOurs if the directory is marked for another owner than ``owner`` (None: a new owner), UsageError
    if another process holds the lock. ``message`` receives lines about waiting. ``check`` raises LeaseLost if another
    process has taken over, for example while this process was suspended. The lock file names the last process that had
    the lease, so that a suspended process can name its successor even if the successor has ended.
    """

    def __init__(
        self, directory: Path, message: Callable[[str], None] = lambda text: None, *, beat: float = BEAT_SECONDS,
        watch: float = WATCH_SECONDS, owner: Owner | None = None,
    ):  # fmt: skip
        self.owner = owner
        self.directory, self.message, self.beat, self.watch = Path(directory), message, beat, watch
        self.token = uuid.uuid4().hex
        self.lost = False
        self._identity: DirectoryIdentity | None = None
        self._file = -1
        self._count = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> DirectoryLock:
        prepare_directory(self.directory)
        self._lock()
        try:
            # Claim first: if this process is killed, the directory must have its mark.
            claim(self.directory, self.owner)
            self._identity = DirectoryIdentity(self.directory)
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
        with suppress(NotReadable):
            if (lease_of(self.directory) or {}).get("token") == self.token:
                (self.directory / LEASE).unlink(missing_ok=True)
        os.close(self._file)

    def lose(self) -> None:
        self.lost = True

    def check(self) -> None:
        """Raise LeaseLost if another process owns the directory, StorageError if the lease cannot be read."""
        if self.lost:
            raise LeaseLost(f"another process has taken over {self.directory}: this process stops without writing")
        if self._identity is not None:
            self._identity.check()
            try:
                self._check_lease()
            except NotReadable as error:
                raise StorageError(self.directory / LEASE, str(error)) from error

    def _check_lease(self) -> None:
        lease = lease_of(self.directory)
        if lease is None:  # some network file systems replace a file in two steps
            time.sleep(REPLACE_SECONDS)
            lease = lease_of(self.directory)
        if lease is not None and lease.get("token") == self.token:
            return
        successor = lease or _last_holder(self.directory / LOCK)
        if successor.get("token") in (None, self.token):
            raise LeaseLost(
                f"{self.directory / LEASE} was removed while this process wrote the directory, so another process may "
                "be writing it: this process stops without writing"
            )
        raise LeaseLost(
            f"process {successor.get('pid')} on {successor.get('host')} has taken over {self.directory}: this process "
            "stops without writing"
        )

    def _lock(self) -> None:
        path = self.directory / LOCK
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise StorageError(path, error) from error
        for attempt in range(LOCK_TRIES):  # ``status`` takes the lock for a moment
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
        lease = lease_of(self.directory)
        if lease is not None and self._alive(lease):
            raise UsageError(
                f"another retrain process ({lease.get('host')}, process {lease.get('pid')}) is writing "
                f"{self.directory}: wait for it, or use --out"
            )
        self._write()
        if lease is not None and not is_here(lease):
            self._ended.wait(self.beat / 5)  # if two processes take over at once, the later writer wins
        if (lease_of(self.directory) or {}).get("token") != self.token:
            raise UsageError(f"another retrain process has just taken {self.directory}: wait for it, or use --out")
        if os.fstat(self._file).st_size == 0 or _last_holder(self.directory / LOCK):  # empty or retrain's
            holder = {"token": self.token, "pid": os.getpid(), "host": machine()["host"]}
            with writing(self.directory / LOCK):
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, dumps(holder).encode(), 0)

    def _alive(self, lease: dict[str, object]) -> bool:
        if is_here(lease):
            return _runs_here(lease)
        self.message(
            f"{self.directory} was being written by {lease.get('host')}: watching {self.watch:g} s whether it still is"
        )
        end = time.monotonic() + self.watch
        while time.monotonic() < end:
            time.sleep(min(self.beat, self.watch) / 5)
            now = lease_of(self.directory)
            if now is None or (now.get("token"), now.get("count")) != (lease.get("token"), lease.get("count")):
                return now is not None
        return False

    def _write(self) -> None:
        self._count += 1
        pid = os.getpid()
        holder = {"token": self.token, "pid": pid, "process_start": process_start(pid), **machine()}
        beat = {"count": self._count, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_json(self.directory / LEASE, holder | beat)

    def _renew(self) -> None:
        while not self._ended.wait(self.beat):
            try:
                self.check()
                self._write()
            except LeaseLost:  # the next ``check`` of the run reports it
                return
            except StorageError:  # such as a full disk, which the records' own writes report
                continue


def wait_for_writers(
    directories: Sequence[Path], message: Callable[[str], None] = lambda text: None, watch: float = WATCH_SECONDS
) -> None:
    """Wait until no process holds a lease of these directories, because workers of an ended campaign still finish their
    step. A worker on another machine counts as dead if its lease has not changed for ``watch`` seconds."""
    watches, notified = [LeaseWatch(directory, watch) for directory in directories], False
    while True:
        leases = [(each, lease_of(each.directory)) for each in watches]
        writing = [lease for each, lease in leases if lease is not None and each.is_alive()]
        if not writing:
            return
        if not notified:
            who = sorted({f"process {lease.get('pid')} on {lease.get('host')}" for lease in writing})
            message(f"waiting for {listed(who, 4)} to finish the step of {plural(len(writing), 'run')}")
            notified = True
        time.sleep(LOOK_SECONDS)


@contextmanager
def leases_of(places: Sequence[tuple[Path, Owner]]) -> Iterator[dict[Path, DirectoryLock]]:
    """Wait for earlier writers, then hold the leases of these directories and mark each with its owner."""
    while True:
        wait_for_writers([directory for directory, _ in places])
        with ExitStack() as stack:
            try:
                locks = {place: stack.enter_context(DirectoryLock(place, owner=owner)) for place, owner in places}
            except UsageError as error:
                if isinstance(error, NotOurs):
                    raise
                time.sleep(LOOK_SECONDS)  # another process has just taken it
                continue
            yield locks
            return


class LeaseWatch:
    """Watches whether the holder of a directory's lease is alive. A holder on this machine is checked by its process
    id; another one counts as alive if the lease has changed within ``patience`` seconds. A missing lease counts as
    unchanged."""

    def __init__(self, directory: Path, patience: float = WATCH_SECONDS):
        self.directory, self.patience = directory, patience
        self._count: object = None
        self._seen = time.monotonic()

    def is_alive(self) -> bool:
        now = time.monotonic()
        try:
            lease = lease_of(self.directory)
        except NotReadable:  # a network file system may fail to answer for a moment
            return now - self._seen < self.patience
        if lease is not None and is_here(lease):
            return _runs_here(lease)
        count = None if lease is None else (lease.get("token"), lease.get("count"))
        if count is not None and count != self._count:
            self._count, self._seen = count, now
        return now - self._seen < self.patience


def lease_of(directory: Path) -> dict[str, object] | None:
    """Return the content of a directory's lease; None if there is none. Raises NotReadable."""
    lease = read_json_if_present(directory / LEASE)
    return lease if isinstance(lease, dict) else None


def _last_holder(lock: Path) -> dict[str, object]:
    holder = read_json_if_present(lock)
    return holder if isinstance(holder, dict) and "token" in holder else {}


def is_here(lease: dict[str, object]) -> bool:
    """Return whether the lease's owner runs on this machine, where its process id can be checked."""
    return {key: lease.get(key) for key in ("host", "boot")} == machine()


def _runs_here(lease: dict[str, object]) -> bool:
    pid = lease.get("pid")
    return isinstance(pid, int) and pid != os.getpid() and process_start(pid) == lease.get("process_start")


class Ending(NamedTuple):
    """End of the program after a signal: exit status and reason in the manifest. ``urgent``: a second signal of this
    kind ends the program at once (not SIGHUP, because a closing terminal sends several, also after a SIGTERM)."""

    status: int
    reason: str
    urgent: bool


ENDINGS = {
    signal.SIGINT: Ending(130, "stopped by the user", urgent=True),
    signal.SIGTERM: Ending(130, "stopped by SIGTERM", urgent=True),
    signal.SIGHUP: Ending(129, "stopped by SIGHUP, as when a terminal closes", urgent=False),
}


class StopRequest:
    """Request to stop, by the user or by preemption. The first SIGINT, SIGTERM or SIGHUP stops the run after its step;
    a second signal, if urgent (``Ending``), stops it within seconds.

    Python handlers run only between bytecodes of the main thread, which may wait minutes inside a kernel or be in the
    middle of a write. So a thread also receives every signal (through the wakeup descriptor): it prints what will
    happen, and ends the process if the second signal has no effect in time.
    """

    def __init__(self, lock: DirectoryLock | None = None):
        self.lock = lock
        self.echo_seconds = 0.0 if torchrun_rank() is None else ECHO_SECONDS
        self.signal: signal.Signals | None = None  # First signal received, if any

    def is_due(self) -> bool:
        """Return whether to stop after the current steps. Raises LeaseLost if another process owns the directory."""
        if self.lock is not None:
            self.lock.check()
        return self.signal is not None

    @contextmanager
    def listening(self, message: Callable[[str, str], None]) -> Iterator[StopRequest]:
        """Handle signals within the context (main thread only); ignored signals stay ignored, as nohup requires."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        urged: float | None = None

        def handle(number: int, frame: object) -> None:
            nonlocal urged
            came, now = signal.Signals(number), time.monotonic()
            if urged is not None and ENDINGS[came].urgent and now - urged >= self.echo_seconds:
                raise KeyboardInterrupt
            if urged is None and ENDINGS[came].urgent:
                urged = now
            if self.signal is None:
                self.signal = came

        heeded = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in heeded}
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ours, ended, message), name="signals", daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            ended.set()
            signal.set_wakeup_fd(wakeup)
            theirs.close()
            watcher.join()
            ours.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, descriptor: socket.socket, ended: threading.Event, message: Callable[[str, str], None]) -> None:
        heard, announced, first = 0, False, None
        while heard < 2:
            received = descriptor.recv(64)
            if not received:
                return
            if not announced and any(number in ENDINGS for number in received):
                announced = True
                with suppress(OSError, ValueError):  # nobody may read the output
                    message("finishing the step and saving; once more to stop without saving", "warning")
            urgent = sum(ending.urgent * received.count(number) for number, ending in ENDINGS.items())
            now = time.monotonic()
            if urgent and first is None:
                first, heard = now, 1 if self.echo_seconds else urgent
            elif first is not None and now - first >= self.echo_seconds:
                heard += urgent
        if not ended.wait(ABANDON_SECONDS):
            where = f" Type: retrain resume {self.lock.directory}" if self.lock else ""
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"stopped at the last checkpoint.{where}\n".encode())
            os._exit(ENDINGS[signal.SIGINT].status)
