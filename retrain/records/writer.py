"""Write the files of a directory on a thread, so that training continues meanwhile."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from retrain.errors import RunFailed
from retrain.files import append_bytes, append_jsonl, fsync, writing
from retrain.threads import Thread, Work
from retrain.util.session import DirectoryIdentity

WAITING_STEPS = 16  # Writes of a run that may be queued; with more, training waits for the disk
# Most unsynced files, with more all are synced: a run without checkpoints adds files with every step
UNSYNCED = 256


class RecordFiles:
    """Writer of the files of one run's or campaign's directory, in order, on one thread.

    ``write`` takes a function that writes files, for example with ``append``, and runs it on the thread. If the
    function fails, the next ``write`` or ``flush`` raises RunFailed.

    Before each function and each append, the thread calls ``guard``, which raises LeaseLost if another process owns
    the directory, and checks that the directory is still that of the first write. If it is not, or if ``guard``
    raises, nothing further is written.
    """

    def __init__(self, directory: Path, guard: Callable[[], None] = lambda: None):
        self.directory, self._guard = directory, guard
        self._identity: DirectoryIdentity | None = None
        self._thread = Thread(f"records of {directory.name}", WAITING_STEPS)
        self._unsynced: set[Path] = set()

    def write(self, task: Work, always: bool = False) -> None:
        """Run ``task`` on the thread. With ``always``, it runs even after a failure, and the failure is not raised."""
        if not always:
            self.check()
        self._thread.put(partial(self._guarded, task), always)

    def append(self, name: str, rows: Iterable[object]) -> tuple[int, int]:
        """Add lines to the file ``name``; return their byte range [begin, end). If it fails, none of them is left in
        the file. Call it on the thread."""
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
        """Register files that were written but not synced; the next ``flush`` syncs them. Call it on the thread."""
        self._unsynced.update(paths)
        if len(self._unsynced) > UNSYNCED:
            self._sync()

    def flush(self) -> None:
        """Wait until all writes so far are synced to disk. Raises RunFailed if one failed."""
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
        """Finish and sync all queued writes and end the thread; return whether no write has failed."""
        self._thread.close(last=self._sync)
        return self._thread.error is None

    def check_directory(self) -> None:
        """Raise LeaseLost or StorageError if the directory was replaced or belongs to another process. The first call
        creates the directory. Any thread may call it."""
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
