"""Write the files of a directory on a thread, so that training continues meanwhile."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from retrain.errors import RunFailed
from retrain.files import append_bytes, append_jsonl, fsync, writing
from retrain.threads import Thread, Work
from retrain.util.session import DirectoryIdentity

WAITING_STEPS = 16  # Events of a run that may wait for the disk; training waits while there are more
# Files that may be unsynced before all are synced: a run without checkpoints adds files with every step
UNSYNCED = 256


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
        """Run ``task`` on the thread; ``always``: also after a failure, which is then not raised here."""
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
        """Raise the error of an earlier write as StorageError, LeaseLost or RunFailed."""
        error = self._thread.error
        if isinstance(error, RunFailed):
            raise error
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
