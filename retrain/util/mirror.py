"""Upload a campaign's directory to a URL of fsspec (``s3://``, ``gs://``, ``file://``, …) while it is written.

The campaign can be resumed from the copy at any time, also after a kill, because of the order of uploads: records, the
checkpoints that need these records, the manifest, and last the index, which lists the files of the copy. The index
also has the token of its writer: a writer stops when it finds the token of another process, which has resumed the copy.
"""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from retrain.errors import LeaseLost, NotOurs, RetrainError, StorageError, UsageError, first_line
from retrain.files import ASIDE, aside_of, dumps, prepare_directory, publish_directory
from retrain.ownership import LAYOUT, MARK, mark_of, owner_of
from retrain.util.jsonl import Row

INDEX = ".mirror_index.json"
MANIFEST = "manifest.json"
NOT_UPLOADED = (".lease", "workers", "wandb", INDEX)
# URL schemes of stores that replace files atomically; on others a file gets a temporary name and is renamed
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory")


class Mirror:
    """The copy of ``directory`` at ``url``. Raises UsageError for a URL that cannot be opened."""

    def __init__(self, url: str, directory: Path):
        self.url, self.directory, self.token = url.rstrip("/"), directory, uuid.uuid4().hex
        self.owner = owner.id if (owner := owner_of(directory)) else None
        try:
            store, root = url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UsageError(f'[logging] mirror = "{url}" cannot be opened: {error}') from error
        self.store: Any = DirFileSystem(root, store)
        self._uploaded: dict[str, list[int]] = {}  # size and modification time (ns) of the local files
        self._indexed: dict[str, list[int]] = {}  # content of the index in the store
        self._manifest = b""

    def claim(self) -> None:
        """Make this process the writer. Raises NotOurs if the URL holds anything but a copy of this directory."""
        with self._storage_errors():
            index = self.index()
            if index["owner"] != self.owner and (index["owner"] or self.store.find("", maxdepth=1, withdirs=True)):
                raise NotOurs(f"{self.url} is not a copy of {self.directory}: name another URL with [logging] mirror")
            self._uploaded = index["files"]
            self._write_index(index["files"])

    def push(self) -> None:
        """Upload changed files. Raises LeaseLost if another process has claimed the copy, StorageError if it fails."""
        with self._storage_errors():
            if self.index()["token"] != self.token:
                raise LeaseLost(f"another process writes {self.url} now: this one stops without writing there")
            path = self.directory / MANIFEST  # read before the runs' files, which may be newer than it
            manifest = path.read_bytes() if path.is_file() else b""
            listed = sorted(self._groups(self.directory), key=len)  # records come before checkpoints
            groups = [self._facts(names) for names in listed]  # stat after listing: records may only have grown
            facts = {name: each for group in groups for name, each in group.items()}
            changed = [list(group) for group in groups if not group.items() <= self._uploaded.items()]
            for name in self._upload_groups(changed, facts):
                del facts[name]
            if manifest != self._manifest:
                self._write(MANIFEST, manifest)
                self._manifest = manifest
            facts |= {MANIFEST: [0, 0]} if manifest else {}
            if facts != self._indexed:
                self._write_index(facts)
            for name in self._uploaded.keys() - facts.keys():
                with suppress(FileNotFoundError):
                    self.store.rm_file(name)
            self._uploaded = facts

    def _upload_groups(self, groups: list[list[str]], facts: dict[str, list[int]]) -> list[str]:
        """Upload each group of files; return the files of groups from which a file was removed meanwhile. ``facts``:
        size and modification time by file (``_facts``)."""
        replaced = {name for names in groups if len(names) > 1 for name in names}
        if replaced & self._indexed.keys():
            self._write_index({name: each for name, each in self._indexed.items() if name not in replaced})
        missing: list[str] = []
        for names in groups:
            is_uploaded = self._upload(names)
            missing += [] if is_uploaded else names
            self._uploaded |= {name: facts[name] if is_uploaded else [0, 0] for name in names}
        return missing

    def _upload(self, names: list[str]) -> bool:
        """Upload a group of files; return False if one of them was removed meanwhile."""
        try:
            for name in names:
                self._write(name, self.directory / name)
        except Exception:
            if all((self.directory / name).exists() for name in names):
                raise
            return False
        return True

    def fetch(self) -> None:
        """Download the copy to ``directory``, which must not exist. Raises UsageError, StorageError."""
        with self._storage_errors():
            files, aside = self.index()["files"], aside_of(self.directory)
            if MARK not in files:
                raise UsageError(f"{self.url} holds no copy of a run or campaign")
            if self.directory.exists():
                raise UsageError(f"{self.directory} exists: resume that directory, or name another one with --out")
            try:
                for name, (_, mtime_ns) in files.items():
                    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                        raise UsageError(f"{self.url}/{INDEX} is damaged: it names {name}")
                    prepare_directory((aside / name).parent)
                    self.store.get_file(name, str(aside / name))
                    os.utime(aside / name, ns=(mtime_ns, mtime_ns))  # so that it is not uploaded again
                publish_directory(aside, self.directory)
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def index(self) -> Row:
        try:
            return json.loads(self.store.cat_file(INDEX))
        except FileNotFoundError:
            return {"owner": None, "token": None, "files": {}}

    def _groups(self, folder: Path) -> Iterator[list[str]]:
        """Yield groups of the files below ``folder``. A file that may change is a group of its own; the files of a
        complete directory, such as a checkpoint, form one group."""
        base, mark = folder.relative_to(self.directory), mark_of(folder)
        if mark and mark.files is not None:
            yield [(base / name).as_posix() for name in (*mark.files, MARK)]
        elif mark is None or mark.owner.id == self.owner:
            for path in sorted(folder.glob("*")):
                ours = any(fnmatchcase(path.name, pattern) for pattern in LAYOUT) and path.name not in NOT_UPLOADED
                if path.is_symlink() or path.name.endswith(ASIDE) or (mark and not ours):
                    continue
                if path != self.directory / MANIFEST:
                    yield from self._groups(path) if path.is_dir() else [[(base / path.name).as_posix()]]

    def _facts(self, names: list[str]) -> dict[str, list[int]]:
        """Return [size, modification time (ns)] by file; {} if a file has been removed."""
        try:
            status = [(self.directory / name).stat() for name in names]
        except FileNotFoundError:
            return {}
        return {name: [each.st_size, each.st_mtime_ns] for name, each in zip(names, status, strict=True)}

    def _write_index(self, files: dict[str, list[int]]) -> None:
        self._write(INDEX, dumps({"owner": self.owner, "token": self.token, "files": files}).encode())
        self._indexed = dict(files)

    def _write(self, name: str, source: bytes | Path) -> None:
        target = name if self.url.partition("://")[0] in OBJECT_STORES else f"{name}{ASIDE}"
        if target != name:
            self.store.makedirs(str(PurePosixPath(name).parent), exist_ok=True)
        self.store.pipe_file(target, source) if isinstance(source, bytes) else self.store.put_file(str(source), target)
        if target != name:
            self.store.mv(target, name)

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # every store has its own types of errors
            if isinstance(error, RetrainError):
                raise
            raise StorageError(self.url, first_line(error)) from error


@contextmanager
def uploading(
    mirror: Mirror, message: Callable[[str, str], None], lost: Callable[[], None], period: float = 30.0,
    pauses: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0),
) -> Iterator[None]:  # fmt: skip
    """Upload in a thread every ``period`` seconds, and a last time when the context ends.

    The last upload is retried after each of ``pauses`` (seconds); if it still fails, RetrainError is raised. If another
    process has claimed the copy, ``lost`` is called and LeaseLost is raised at the end of the context.
    """
    ended = threading.Event()
    advice = f"All files are in {mirror.directory}. When the store answers, type: retrain resume {mirror.directory}"

    def upload() -> None:
        attempts, failed = [0.0, *pauses], False
        while True:
            if last := ended.wait(period):
                time.sleep(attempts.pop(0))
            try:
                mirror.push()
                failed = False
                if last:
                    return
            except LeaseLost:
                lost()
                raise
            except RetrainError as error:
                if not attempts:
                    raise RetrainError(f"upload failed ({error})\n{advice}") from error
                if not failed:
                    message(f"upload failed ({error}); keeping local files and retrying", "warning")
                failed = True

    mirror.claim()
    with ThreadPoolExecutor(1, "mirror") as pool:
        uploads = pool.submit(upload)
        try:
            yield
        finally:
            ended.set()
    uploads.result()
