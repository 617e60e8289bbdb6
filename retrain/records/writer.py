"""Files written by a thread: training hands its records over and goes on.

``Thread`` does pieces of work in order; ``RecordFiles`` is the files of one directory behind such a thread.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from retrain.errors import LeaseLost, RunFailed, StorageError
from retrain.files import append_bytes, append_jsonl, fsync, writing
from retrain.util.session import DirectoryIdentity

WAITING_STEPS = 16  # Events of a run that may wait for the disk; training waits while there are more
UNSYNCED = 256
"""Files that may wait for the disk itself: a run that saves no checkpoints names new ones with every step."""

Work = Callable[[], object]


class Thread:
    """Does pieces of work in order, on one thread that starts with the first of them.

    At most ``limit`` pieces wait. The first exception becomes ``error``; from then on only work put with ``always`` is
    done.
    """

    def __init__(self, name: str, limit: int):
        self.name = name
        self.error: Exception | None = None
        self._queue: queue.Queue[tuple[Work, bool] | None] = queue.Queue(limit)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, task: Work, always: bool = False, wait: bool = True) -> bool:
        """Do it after everything put before. While the queue is full this waits, or does nothing and returns False."""
        self._start()
        try:
            self._queue.put((task, always), block=wait)
        except queue.Full:
            return False
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything put so far is done, for at most ``timeout`` seconds; return whether it is."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        done = threading.Event()
        try:
            self._queue.put((done.set, True), timeout=timeout)
        except queue.Full:
            return False
        return done.wait(timeout)

    def close(self, last: Work = lambda: None) -> None:
        """Finish everything put, then ``last``, and end the thread if it has begun; putting more starts another."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put((last, False))
            self._queue.put(None)
            thread.join()

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None:
                # Daemonic: a tracker that hangs must not keep the process alive. Whoever needs the work done waits.
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            task, always = item
            if self.error is not None and not always:
                continue
            try:
                task()
            except Exception as error:  # reported by whoever owns the thread
                self.error = self.error or error


class RecordFiles:
    """The files of one run or campaign directory, written in order by one thread.

    ``write`` takes a function that calls ``append`` or whatever else writes files; it runs on the thread. A failure
    there is raised as RunFailed by the next ``write`` or ``flush``.

    Before each function and each append the thread calls ``guard`` (which raises LeaseLost once another process owns
    the directory) and checks that the directory is still the one of the first write. When either fails, nothing further
    is written.
    """

    def __init__(self, directory: Path, guard: Callable[[], None] = lambda: None):
        self.directory, self._guard = directory, guard
        self._identity: DirectoryIdentity | None = None
        self._thread = Thread(f"records of {directory.name}", WAITING_STEPS)
        self._unsynced: set[Path] = set()

    def write(self, task: Work, always: bool = False) -> None:
        """Do ``task`` on the thread; ``always``: also after a failure, which is then not raised here."""
        if not always:
            self.check()
        self._thread.put(partial(self._guarded, task), always)

    def append(self, name: str, rows: Iterable[object]) -> tuple[int, int]:
        """Add lines to ``name`` (on the thread); return the bytes [begin, end) that they take. After a failure none of
        them stays."""
        path = self.directory / name
        self.check_directory()
        with writing(path):
            place = append_jsonl(path, rows)
        self.wrote(path)
        return place

    def append_text(self, name: str, text: str) -> None:
        """Add text to ``name`` (on the thread)."""
        path = self.directory / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            append_bytes(path, text.encode("utf-8", "replace"))
        self.wrote(path)

    def wrote(self, *paths: Path) -> None:
        """Note files that were written (on the thread) without waiting for the disk: the next ``flush`` does."""
        self._unsynced.update(paths)
        if len(self._unsynced) > UNSYNCED:
            self._sync()

    def flush(self) -> None:
        """Wait until everything so far is on the disk itself. Raises RunFailed when it could not be written."""
        self._thread.put(partial(self._guarded, self._sync))
        self._thread.wait()
        self.check()

    def check(self) -> None:
        """Raise RunFailed when something could not be written."""
        error = self._thread.error
        if isinstance(error, StorageError | LeaseLost):
            raise error
        if isinstance(error, RunFailed):
            raise RunFailed(str(error)) from error
        if error is not None:
            raise RunFailed(f"the records could not be written: {type(error).__name__}: {error}") from error

    def close(self) -> bool:
        """Write and sync what is left and end the thread; return whether all of it could be written."""
        self._thread.close(last=self._sync)
        return self._thread.error is None

    def check_directory(self) -> None:
        """Raise LeaseLost or StorageError unless the directory is still this process's; any thread may call it."""
        if self._identity is None:
            with writing(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            self._identity = DirectoryIdentity(self.directory)
        self._identity.check()
        self._guard()

    def _guarded(self, task: Work) -> None:
        self.check_directory()
        task()

    def _sync(self) -> None:
        folders = set()
        for path in self._unsynced:
            if path.exists():  # a step's page may have been replaced or pruned since
                with writing(path):
                    fsync(path)
                folders.add(path.parent)
        for folder in folders:
            fsync(folder)
        self._unsynced.clear()
