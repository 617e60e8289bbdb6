"""The copy of a directory behind a URL (``s3://``, ``gs://``, ``file://``, … by fsspec), kept while it is written.

Everything is written on a local disk first, as always, and copied from there. Whoever reads the copy, at any moment
and also after a kill, finds a state from which the run can go on:

- A file is replaced whole: an object store shows an upload when it is complete, elsewhere it is renamed into place.
- A checkpoint or adapter has its mark (see ``retrain.ownership``) there last, and loses it first.
- Records are copied before the checkpoints that follow from them, and the campaign's manifest after its runs.
- ``.mirror.json`` says what is there. It is written after what it names, and before anything is removed.

Only what retrain writes is copied, and nothing is replaced or removed there that it has not copied itself. Each
directory that grows (a campaign, each run) has an index of its own, with a token: who finds another's in it has been
followed by another process, and stops.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from retrain.campaign.planning.manifest import MANIFEST, read_manifest
from retrain.campaign.planning.outputs import run_place
from retrain.campaign.planning.plan import Plan, RunSpec
from retrain.campaign.running.protocol import CohortJob, Event, Job, JobEnded, RunEnded, SqueezeJob
from retrain.errors import LeaseLost, NotOurs, RetrainError, StorageError, UsageError
from retrain.files import ASIDE, aside_of, dumps, prepare_directory, publish_directory
from retrain.ownership import LAYOUT, MARK, Owner, check_claim, mark_of, owner_of, remove

INDEX = ".mirror.json"
NOT_COPIED = (".lease", "workers", "wandb", INDEX)
PERIOD_SECONDS = 30.0
"""How often is copied what has changed; less often where that takes longer than a tenth of it."""
TRIES, PAUSE_SECONDS = 5, 2.0
"""At the end: how often it is tried, and the pause after the first failure, which doubles."""
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""Protocols whose uploads are seen when they are complete."""
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}


class Store:
    """The files below a URL. Raises UsageError for a URL that nothing here can open; its methods raise StorageError."""

    def __init__(self, url: str):
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        protocol = self.url.partition("://")[0]
        try:
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            package = PACKAGES.get(protocol)
            how = f"type: pip install {package}" if package else str(error)
            raise UsageError(f'[logging] mirror = "{url}" needs a package that is not installed; {how}') from error
        except ValueError as error:
            raise UsageError(f'[logging] mirror = "{url}" cannot be opened: {error}') from error
        self._at_once = protocol in OBJECT_STORES

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        with self._working(name):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Replace a file, at once for whoever reads it."""
        with self._working(name):
            self._put(name, lambda path: self._fs.pipe_file(path, data))

    def upload(self, name: str, source: Path) -> None:
        """As ``write``, of a file that does not change meanwhile."""
        with self._working(name):
            self._put(name, lambda path: self._fs.put_file(str(source), path))

    def download(self, name: str, target: Path) -> bool:
        """Copy a file to ``target``; False where there is none."""
        with self._working(name):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(self._path(name), str(target))
            except FileNotFoundError:
                return False
            return True

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._working(name), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def is_empty(self, name: str) -> bool:
        """Whether nothing lies below ``name``."""
        with self._working(name):
            try:
                return not self._fs.find(self._path(name), maxdepth=1, withdirs=True)
            except FileNotFoundError:
                return True

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name not in ("", ".") else str(self._root)

    def _put(self, name: str, put: Callable[[str], object]) -> None:
        target = self._path(name)
        if self._at_once:
            put(target)
            return
        folder, _, last = target.rpartition("/")
        aside = f"{folder}/.{last}.{uuid.uuid4().hex}{ASIDE}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            put(aside)
            self._fs.mv(aside, target)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(aside)
            raise

    def _working(self, name: str) -> _Faults:
        return _Faults(f"{self.url}/{name}")


@dataclass
class _Faults:
    """What a file system raises inside, of whatever kind, becomes a StorageError that names ``path``."""

    path: str

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            text = str(error).strip().splitlines()
            raise StorageError(self.path, text[0] if text else type(error).__name__) from error


@dataclass(frozen=True)
class _File:
    """A file here: its name below the directory, and what tells whether it is the one that was copied."""

    name: str
    size: int
    mtime_ns: int

    @property
    def facts(self) -> list[int]:
        return [self.size, self.mtime_ns]


@dataclass
class Mirror:
    """The copy of one ``directory`` that grows, at ``place`` of a store."""

    store: Store
    place: str
    directory: Path
    marked: bool = True
    """Whether the directory has a mark of its own; else it belongs to the campaign around it, and all in it is copied,
    whatever its name."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)
    _known: dict[str, list[int]] | None = field(default=None, init=False)
    """What is there: size and time of change of each file, as they are here."""
    _told: dict[str, list[int]] | None = field(default=None, init=False)
    """What the index says is there."""
    _manifest: bytes | None = field(default=None, init=False)
    """The manifest that is there, if this process has written it."""

    def claim(self) -> None:
        """Make the copy this process's. Raises NotOurs when something else is there, StorageError."""
        known = read_index(self.store, self.place) or {}
        if self.marked:
            self._claim_mark()
        self._write_index(known)
        self._known = known

    def _claim_mark(self) -> None:
        owner = owner_of(self.directory)
        mark = self.store.read(self._name(MARK))
        if mark is None and not self.store.is_empty(self.place):
            raise NotOurs(
                f"{self._url()} holds what retrain did not copy there: name another place with [logging] mirror"
            )
        if mark is not None and _owner(mark) != owner:
            raise NotOurs(
                f"{self._url()} is the copy of another directory (says its {MARK}): name another place with [logging] "
                "mirror, or go on with that one: retrain resume " + self.store.url
            )
        self.store.write(self._name(MARK), (self.directory / MARK).read_bytes())

    def push(self, manifest: bytes | None = None) -> None:
        """Copy what has changed. ``manifest``: the campaign's as it was before its runs were copied.

        Raises LeaseLost when the copy is another process's now, StorageError.
        """
        if self._known is None:
            self.claim()
        assert self._known is not None
        self._check()
        if manifest is None:
            manifest = read_manifest_bytes(self.directory)
        growing, published = self._walk()
        for file in growing:
            if file.name not in (MARK, MANIFEST) and self._known.get(file.name) != file.facts:
                self._copy(file)
        for files in published:
            self._copy_published(files)
        if manifest is not None and manifest != self._manifest:
            self.store.write(self._name(MANIFEST), manifest)
            self._manifest = manifest
        here = {file.name for file in growing} | {file.name for files in published for file in files}
        if self.marked:
            self._known[MARK] = [0, 0]
        if manifest is not None:
            self._known[MANIFEST] = [0, 0]
        if self._known != self._told:
            self._write_index(self._known)
        gone = [name for name in self._known if name not in here and name not in (MARK, MANIFEST)]
        for name in sorted(gone, key=lambda name: PurePosixPath(name).name != MARK):
            self.store.remove(self._name(name))
            del self._known[name]
        if gone:
            self._write_index(self._known)

    def pull(self, owner: Owner) -> None:
        """Make ``directory`` what the copy is: files that differ are brought, and what ``owner`` has written there and
        the copy does not have is removed. Without a copy all stays as it is. Raises NotOurs, StorageError."""
        index = read_index(self.store, self.place)
        if index is None:
            return
        if self.marked:
            check_claim(self.directory, owner)
        prepare_directory(self.directory)
        there = {file.name: file for file in self._files()} if owner_of(self.directory) or not self.marked else {}
        marks = {PurePosixPath(name).parent for name in index if PurePosixPath(name).name == MARK and name != MARK}
        for name, facts in sorted(index.items(), key=lambda item: item[0] != MARK):  # first of all whose it is
            if not marks & {*PurePosixPath(name).parents} and not (name in there and there[name].facts == facts):
                self._bring(name, facts)
        for folder in sorted(marks):
            self._bring_published(folder.as_posix(), index, there, owner)
        for name in there.keys() - index.keys() - {MARK}:
            folder = next((each for each in PurePosixPath(name).parents if mark_of(self.directory / each)), None)
            if folder in (None, PurePosixPath(".")):
                (self.directory / name).unlink(missing_ok=True)
            else:
                remove(self.directory / folder, owner.at(folder.as_posix()))

    def _check(self) -> None:
        content = _json(self.store.read(self._name(INDEX)))
        if content.get("token") != self.token:
            raise LeaseLost(f"another process has taken over {self._url()}: this one stops without writing there")

    def _copy(self, file: _File) -> None:
        """Copy a file that may grow meanwhile, as long as it was."""
        assert self._known is not None
        with suppress(FileNotFoundError), open(self.directory / file.name, "rb") as source:
            self.store.write(self._name(file.name), source.read(file.size))
            self._known[file.name] = file.facts

    def _copy_published(self, files: Sequence[_File]) -> None:
        """Copy a directory that is complete here, its mark last."""
        assert self._known is not None
        changed = [file for file in files if self._known.get(file.name) != file.facts]
        mark = files[-1]
        if not changed:
            return
        if mark.name in self._known:
            self.store.remove(self._name(mark.name))
        try:
            for file in (*[file for file in changed if file is not mark], mark):
                self.store.upload(self._name(file.name), self.directory / file.name)
                self._known[file.name] = file.facts
        except StorageError:
            if all((self.directory / file.name).exists() for file in files):
                raise  # else it has been removed here meanwhile

    def _bring(self, name: str, facts: Sequence[int]) -> None:
        target = self.directory / name
        aside = aside_of(target)
        if self.store.download(self._name(name), aside):
            _keep_time(aside, facts)
            os.replace(aside, target)

    def _bring_published(self, folder: str, index: dict[str, list[int]], there: dict[str, _File], owner: Owner) -> None:
        """Bring a directory that is complete there, all of it or nothing."""
        names = [name for name in index if PurePosixPath(folder) in PurePosixPath(name).parents]
        if all(name in there and there[name].facts == index[name] for name in names):
            return
        target = self.directory / folder
        aside = aside_of(target)
        shutil.rmtree(aside, ignore_errors=True)
        whole = all(
            self.store.download(self._name(name), aside / PurePosixPath(name).relative_to(folder)) for name in names
        )
        if whole:
            for name in names:
                _keep_time(aside / PurePosixPath(name).relative_to(folder), index[name])
            remove(target, owner.at(folder))
            publish_directory(aside, target)
        shutil.rmtree(aside, ignore_errors=True)

    def _files(self) -> Iterator[_File]:
        growing, published = self._walk()
        yield from growing
        for files in published:
            yield from files

    def _walk(self) -> tuple[list[_File], list[list[_File]]]:
        """The files that may grow or be replaced, and those of each directory that is complete, its mark last. First
        the directories: what is complete now follows from records as they are after this."""
        layout = LAYOUT if self.marked else ("*",)
        tops = [top for top in self.directory.iterdir() if any(fnmatchcase(top.name, each) for each in layout)]
        paths = [top for top in tops if top.name not in NOT_COPIED]
        growing, published = list[Path](), list[list[_File]]()
        while paths:
            folder = paths.pop()
            if folder.is_symlink() or _is_aside(folder):
                continue
            if not folder.is_dir():
                growing.append(folder)
                continue
            mark = mark_of(folder)
            if mark is not None:
                if mark.files is None:
                    continue  # a run, which has an index of its own
                files = [file for name in (*mark.files, MARK) for file in self._file(folder / name)]
                if len(files) == len(mark.files) + 1:  # else it is just being removed
                    published.append(files)
                continue
            with suppress(FileNotFoundError):
                paths += folder.iterdir()
        return [file for path in sorted(growing) for file in self._file(path)], published

    def _file(self, path: Path) -> list[_File]:
        """The file, unless it is gone."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            return []
        return [_File(path.relative_to(self.directory).as_posix(), stat.st_size, stat.st_mtime_ns)]

    def _write_index(self, known: dict[str, list[int]]) -> None:
        self.store.write(self._name(INDEX), dumps({"token": self.token, "files": known}).encode())
        self._told = dict(known)

    def _name(self, name: str) -> str:
        return name if self.place in ("", ".") else f"{self.place}/{name}"

    def _url(self) -> str:
        return self.store.url if self.place in ("", ".") else f"{self.store.url}/{self.place}"


class Mirroring:
    """Copies of directories, kept up to date by a thread from ``__enter__`` to ``__exit__``, which copies once more.

    ``find`` says which directories there are by now: the campaign's own first. ``message`` hears of a store that
    does not answer, once each time; ``lost`` is called when another process has taken over. It is looked every
    ``period`` seconds. ``push`` and ``__exit__`` raise StorageError when it cannot be copied, LeaseLost when another
    process has taken over; ``advice`` is what a person reads then at the end.
    """

    def __init__(
        self, find: Callable[[], list[Mirror]], message: Callable[[str, str], None],
        lost: Callable[[], None] = lambda: None, period: float | None = None, advice: str = "",
    ):  # fmt: skip
        self._find, self._message, self._lost, self._period = find, message, lost, period or PERIOD_SECONDS
        self._advice = advice
        self._mirrors: dict[Path, Mirror] = {}
        self._ended, self._busy = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._fault: LeaseLost | None = None
        self._told = False

    def __enter__(self) -> Mirroring:
        self._each()
        for mirror in self._mirrors.values():
            mirror.claim()
        self._thread = threading.Thread(target=self._keep, name="mirror", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if error is None:
            self._push_last()
        elif isinstance(error, Exception) and not isinstance(error, LeaseLost):
            try:  # once: what is raised says what has happened
                self.check()
                self._push()
            except (RetrainError, OSError) as fault:
                self._message(f"{fault}; what was not copied is kept here", "warning")

    def _push_last(self) -> None:
        try:
            self.push()
        except StorageError as error:
            if self._advice:
                raise RetrainError(f"{error}\n{self._advice}") from error
            raise

    def push(self) -> None:
        """Copy what has changed by now, trying again for some time."""
        for attempt in range(TRIES):
            self.check()
            try:
                self._push()
                return
            except StorageError:
                if attempt + 1 == TRIES:
                    raise
            time.sleep(PAUSE_SECONDS * 2**attempt)

    def check(self) -> None:
        """Raise LeaseLost when the thread has found another process's token."""
        if self._fault is not None:
            raise self._fault

    def _keep(self) -> None:
        took = 0.0
        while not self._ended.wait(max(self._period, 10 * took)):
            begun = time.monotonic()
            try:
                self._push()
                self._told = False
            except LeaseLost as error:
                self._fault = error
                self._lost()
                return
            except (StorageError, OSError) as error:
                if not self._told:
                    self._message(f"{error}; all is kept here, and copied when that is possible again", "warning")
                self._told = True
            took = time.monotonic() - begun

    def _each(self) -> list[Mirror]:
        for mirror in self._find():
            self._mirrors.setdefault(mirror.directory, mirror)
        return list(self._mirrors.values())

    def _push(self) -> None:
        with self._busy:
            mirrors = self._each()
            manifest = read_manifest_bytes(mirrors[0].directory) if mirrors else None
            for mirror in reversed(mirrors):
                mirror.push(manifest if mirror is mirrors[0] else None)


@contextmanager
def mirroring(
    plan: Plan, message: Callable[[str, str], None], lost: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """While inside, what a plan's directory holds is copied to where its configuration says; else nothing is done.

    The workers of a Ray cluster copy their runs themselves (``of_job``). For the arguments see ``Mirroring``.
    """
    config = plan.specs[0].config
    url, others = config.logging.mirror, config.is_campaign and config.campaign.executor == "ray"
    if url is None:
        yield
        return
    store = Store(url)
    own = Mirror(store, ".", plan.directory)
    places = [run_place(spec) for spec in plan.specs if spec.is_campaign and not others]
    runs = [Mirror(store, place, plan.directory / place) for place in places]
    advice = f"All is in {plan.directory}. When the store answers, type: retrain resume {plan.directory}"
    with Mirroring(lambda: [own, *(run for run in runs if owner_of(run.directory))], message, lost, advice=advice):
        yield


@contextmanager
def of_job(job: Job, message: Callable[[str, str], None]) -> Iterator[Mirroring]:
    """While inside, what a job writes is copied, if it says where; whose directories they are has been settled before.

    ``apart``: the directory is this node's own. What the copies hold is brought before the job.
    """
    if not job.mirror:
        yield Mirroring(list, message)
        return
    store, directory = Store(job.mirror), Path(job.directory)
    owner = owner_of(directory)
    assert owner is not None
    specs = [RunSpec.from_json(run) for run in (job.runs if isinstance(job, CohortJob) else [job.run])]
    runs = {run_place(spec): Mirror(store, run_place(spec), directory / run_place(spec)) for spec in specs}
    if job.apart:
        for place, mirror in runs.items():
            mirror.pull(owner.at(place))
    mine = list(runs.values())
    if isinstance(job, SqueezeJob):
        mine = [Mirror(store, job.place, directory / job.place, marked=False)] if job.apart else []
        for mirror in mine:
            prepare_directory(mirror.directory)
    with Mirroring(lambda: mine, message) as copies:
        yield copies


def after(job: Job, event: Event) -> None:
    """Bring what an event of a job that was done ``apart`` is about: a run that has ended, and all of the job's."""
    directory = Path(job.directory)
    owner = owner_of(directory)
    assert owner is not None
    store = Store(job.mirror)
    if isinstance(event, JobEnded) and isinstance(job, SqueezeJob):
        Mirror(store, job.place, directory / job.place, marked=False).pull(owner)
    elif isinstance(event, RunEnded | JobEnded) and isinstance(job, CohortJob):
        for spec in map(RunSpec.from_json, job.runs):
            if isinstance(event, JobEnded) or spec.run_id == event.run_id:
                place = run_place(spec)
                Mirror(store, place, directory / place).pull(owner.at(place))


def fetch(url: str, directory: Path) -> None:
    """Bring the copy at ``url`` to a ``directory`` that is free. Raises UsageError, NotOurs, StorageError."""
    store = Store(url)
    mark = store.read(MARK)
    owner = None if mark is None else _owner(mark)
    if owner is None:
        raise UsageError(f"{url} holds no copy of a run or campaign: it has no {MARK}")
    if owner_of(directory) is not None:
        raise UsageError(f"{directory} is there already; type: retrain resume {directory}, or name another with --out")
    Mirror(store, ".", directory).pull(owner)
    for entry in read_manifest(directory)["runs"]:
        place = entry["path"]
        if place != "." and store.read(f"{place}/{MARK}") is not None:
            Mirror(store, place, directory / place).pull(owner.at(place))


def read_manifest_bytes(directory: Path) -> bytes | None:
    """A campaign's or run's manifest as it is now; None before there is one."""
    try:
        return (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None


def read_index(store: Store, place: str) -> dict[str, list[int]] | None:
    """What a copy holds; None where there is no copy."""
    data = store.read(INDEX if place in ("", ".") else f"{place}/{INDEX}")
    return None if data is None else {str(name): list(facts) for name, facts in _json(data).get("files", {}).items()}


def _json(data: bytes | None) -> dict[str, Any]:
    try:
        content = json.loads(data or b"{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _owner(mark: bytes) -> Owner | None:
    content = _json(mark)
    return Owner(content["owner"], content["place"]) if {"owner", "place"} <= content.keys() else None


def _keep_time(path: Path, facts: Sequence[int]) -> None:
    """Give a file that was brought the time of the one that was copied, if it is that one."""
    size, mtime_ns = facts
    if path.stat().st_size == size:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def _is_aside(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(ASIDE)
