"""Mark directories with their owner: a run never removes or overwrites files that it did not write.

Every directory that retrain writes has a mark, ``retrain.json``. It names the owner (a random id, made when a campaign
or run is started for the first time) and the directory's path relative to the campaign's or run's own directory. There
are two kinds of marks:

- A directory that grows (a campaign, a run) is claimed before anything else is written. The claim is refused if a file
  with one of the names to be written exists. Then these names belong to the owner, also after a kill.
- A directory that is complete when it appears (a checkpoint, an adapter) lists its files in the mark. Only the owner
  replaces or removes them, and only them; files of others in the directory stay.

A name proves nothing: ``checkpoints/step_000002`` without the run's mark belongs to somebody else.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from retrain.errors import NotOurs, NotReadable, UsageError, listed
from retrain.files import is_aside, publish_directory, read_json, read_json_if_present, write_bytes, write_json, writing

MARK = "retrain.json"
LAYOUT = (
    MARK, ".lease", "manifest.json", "plan.json", "config.json", "code.diff", "environment.json", "runs", "base",
    "evaluation.json", "squeeze", "comparison.json", "report.html", "metrics.jsonl", "metrics.f32", "evals.jsonl",
    "checkpoints.jsonl", "timing_spans.jsonl", "notes.jsonl", "emergence", "timeline.html", "run.log",
    "checkpoints", "final", "iterations.jsonl", "workers", "tokens_*", "train_iteration_*", "eval_*_iteration_*",
    "tensorboard", "wandb", "warmup",
)  # fmt: skip
"""Patterns of the names that a campaign or run writes directly in its directory."""
NAMED_FILES = 4
ELSEWHERE = "give another directory with --out"


@dataclass(frozen=True)
class Owner:
    """Writer of a directory. ``id``: random id of the campaign or run; ``place``: path of the directory, relative to
    the campaign's or run's own directory."""

    id: str
    place: str = "."

    def at(self, path: str) -> Owner:
        """Return the owner of the directory ``path`` below this owner's directory; "." is the same directory."""
        return Owner(self.id, (PurePosixPath(self.place) / path).as_posix())


@dataclass(frozen=True)
class Mark:
    """Content of ``retrain.json``. ``files``: the files that the owner published; None for a directory that grows (a
    campaign, a run)."""

    owner: Owner
    files: tuple[str, ...] | None


def mark_of(directory: Path) -> Mark | None:
    """Return the mark of a directory, or None if there is no valid one. Raises NotReadable."""
    path = directory / MARK
    try:
        content: Any = None if path.is_symlink() else read_json_if_present(path)
    except PermissionError as error:
        raise NotReadable(path, error) from error
    try:
        owner, files = Owner(content["owner"], content["place"]), content["files"]
    except (KeyError, TypeError):
        return None
    names = [owner.id, owner.place, *(files or ())]
    if not all(isinstance(name, str) for name in names) or any(not _is_inside(name) for name in files or ()):
        return None
    return Mark(owner, None if files is None else tuple(files))


def owner_of(directory: Path) -> Owner | None:
    mark = mark_of(directory)
    return mark.owner if mark else None


def is_whole(directory: Path, owner: Owner | None) -> bool:
    """Return whether ``owner`` published ``directory`` as complete; always True if ``owner`` is None."""
    mark = None if directory.is_symlink() else mark_of(directory)
    return owner is None or (mark is not None and mark.files is not None and mark.owner == owner)


def check_claim(directory: Path, owner: Owner | None = None, advice: str = ELSEWHERE) -> None:
    """Raise NotOurs unless ``directory`` belongs to ``owner``, or has no mark and no names of ``LAYOUT``. Without
    ``owner``, the directory of any campaign or run is accepted. Nothing is written."""
    mark = mark_of(directory)
    if mark is not None:
        if mark.files is None and (mark.owner.place == "." if owner is None else mark.owner == owner):
            return
        what = f"{mark.owner.place} of another directory" if mark.owner.place != "." else "another run's directory"
        raise NotOurs(f"{directory} is {what} (says its {MARK}), nothing is written there: {advice}")
    occupied = [
        path.name
        for path in (sorted(directory.iterdir()) if directory.is_dir() else ())
        if any(fnmatchcase(path.name, pattern) for pattern in LAYOUT) and not _is_empty(path)
    ]
    if occupied:
        raise NotOurs(f"{directory} holds {listed(occupied, NAMED_FILES)}, which retrain did not write there: {advice}")


def claim(directory: Path, owner: Owner | None = None) -> Owner:
    """Mark ``directory`` before anything else is written in it, unless it is marked already; return its owner, a new
    one if ``owner`` is None.

    Raises NotOurs as ``check_claim`` does, StorageError when the mark cannot be written.
    """
    check_claim(directory, owner)
    mark = mark_of(directory)
    if mark is not None:
        return mark.owner
    owner = owner or Owner(uuid.uuid4().hex)
    _write_mark(directory, owner, None)
    return owner


def check_publish(target: Path, names: Iterable[str], owner: Owner | None, advice: str = ELSEWHERE) -> None:
    """Raise NotOurs if ``target`` is a file, or files with these ``names`` would replace others' files in it."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise NotOurs(f"{target} is a file, no directory: {advice}")
    mark = mark_of(target)
    mine = set(mark.files or ()) if mark is not None and mark.owner == owner else set[str]()
    occupied = [] if mark is not None and mark.owner == owner else [MARK] * os.path.lexists(target / MARK)
    occupied += [name for name in names if name not in mine and _is_occupied(target, name)]
    if occupied:
        raise NotOurs(f"{target} holds {listed(occupied, NAMED_FILES)}, which this run did not write: {advice}")


def publish(aside: Path, target: Path, owner: Owner | None) -> None:
    """Rename the completely written directory ``aside`` to ``target``, with the owner's mark (none without owner).

    Replaces the owner's earlier directory as a whole, or file by file if it also contains others' files, which stay.
    Raises NotOurs if a file of others would be replaced, StorageError if the file system refuses.
    """
    target = target.resolve() if target.is_symlink() else target
    names = files_in(aside)
    check_publish(target, names, owner)
    mark = mark_of(target)
    if target.is_dir() and {*files_in(target)} - {*(mark.files or () if mark else ())}:
        install(aside, target, owner)
        shutil.rmtree(aside, ignore_errors=True)
        return
    if owner is not None:
        _write_mark(aside, owner, names)
    publish_directory(aside, target)


def install(source: Path, target: Path, owner: Owner | None) -> None:
    """Write every file below ``source`` into ``target``, and remove the files that ``owner`` published there before.
    Others' files stay. Raises as ``publish``."""
    names = files_in(source)
    check_publish(target, names, owner)
    mark = mark_of(target)
    before = mark.files or () if mark else ()
    if owner is not None:  # before the files: after a kill they belong to the owner
        _write_mark(target, owner, sorted({*before, *names}))
    for name in names:
        write_bytes(target / name, (source / name).read_bytes())
    for name in {*before} - {*names}:
        (target / name).unlink(missing_ok=True)
    if owner is not None:
        _write_mark(target, owner, names)


def remove(directory: Path, owner: Owner | None) -> bool:
    """Remove the files that the owner published in ``directory``, the mark last. Others' files in it stay. Returns
    False, without changes, for other directories."""
    mark = None if directory.is_symlink() else mark_of(directory)
    if mark is None or owner is None or mark.files is None or mark.owner != owner:
        return False
    with writing(directory):
        for name in mark.files:
            if not _leads_elsewhere(directory, name):
                (directory / name).unlink(missing_ok=True)
        (directory / MARK).unlink()
        for folder in sorted({Path(name).parent for name in mark.files}, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # others' files are in it
                (directory / folder).rmdir()
    return True


def files_in(directory: Path) -> list[str]:
    """Return the paths of all files below a directory, sorted, without the mark."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in paths if (name := path.relative_to(directory).as_posix()) != MARK)


def remove_leftovers(directory: Path) -> None:
    """Delete temporaries of killed processes in an owner's directory and its runs.

    Skips directories of other owners below it (a run that continues from a compressed adapter): a process may be
    writing there.
    """
    owner = owner_of(directory)
    for folder, folders, files in os.walk(directory):
        for name in [name for name in folders if is_aside(name)]:
            if not os.path.islink(os.path.join(folder, name)):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        for name in filter(is_aside, files):
            Path(folder, name).unlink(missing_ok=True)
        there = {name: owner_of(Path(folder, name)) for name in folders}
        folders[:] = [name for name, other in there.items() if other is None or (owner and other.id == owner.id)]


def refuse_links(directory: Path) -> None:
    """Raise UsageError if a path that a run writes or rereads is a symbolic link, through which writes could leave
    ``directory``. ``directory`` itself may be a link, or lie behind one."""
    for folder, folders, files in os.walk(directory):
        names = sorted([*folders, *files])
        if Path(folder) == directory:
            names = [name for name in names if any(fnmatchcase(name, pattern) for pattern in LAYOUT)]
        elif os.path.basename(folder) == "wandb":  # wandb creates its own links, at any depth
            names = []
        for path in (os.path.join(folder, name) for name in names):
            if os.path.islink(path):
                raise UsageError(
                    f"{path} is a symbolic link: nothing is written through links inside a run directory; "
                    "put what it points to in its place (the whole directory may be a link)"
                )
        folders[:] = sorted({*folders} & {*names})


def not_readable(path: Path, error: Exception, advice: str) -> UsageError:
    """Return the error for an unusable ``manifest.json`` or ``plan.json``: unreadable, damaged, or not written by
    retrain."""
    if isinstance(error, OSError):
        return NotReadable(path, error)
    try:
        content: Any = read_json(path)
        ours = isinstance(content, dict) and {"format", "runs"} <= content.keys()
    except (OSError, ValueError):
        ours = mark_of(path.parent) is not None
    if ours:
        return UsageError(f"{path} is damaged ({error!r}): {advice}")
    return NotOurs(f"{path} is not retrain's: give the directory of a run or campaign, or move that file away")


def machine() -> dict[str, str]:
    """Return hostname and boot id. A process id identifies a process only together with these two."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return {"host": socket.gethostname(), "boot": boot}


def process_start(pid: int) -> str | None:
    """Return the start time of a process of this machine in the kernel's units, to compare with later calls; None if it
    has ended, "" if it runs on a machine without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        import psutil

        return "" if psutil.pid_exists(pid) else None  # no /proc: only whether the process lives is known
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def this_process() -> dict[str, object]:
    """Return a record of this process, from which other processes find out by ``has_ended`` whether it still runs.
    ``numbers``: the process-id namespace (containers have their own); "" if unknown."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    pid = os.getpid()
    return {**machine(), "numbers": numbers, "pid": pid, "process_start": process_start(pid)}


def has_ended(process: object) -> bool:
    """Return whether the recorded process ran on this machine and has ended; False if that cannot be known."""
    if not isinstance(process, dict) or type(process.get("pid")) is not int:
        return False
    here = this_process()
    is_here = all(process.get(key) == here[key] for key in ("host", "boot", "numbers"))
    return is_here and process_start(process["pid"]) != process.get("process_start")


def _write_mark(directory: Path, owner: Owner, files: Sequence[str] | None) -> None:
    write_json(directory / MARK, {"owner": owner.id, "place": owner.place, "files": files})


def _is_inside(name: str) -> bool:
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not files_in(path)


def _is_occupied(target: Path, name: str) -> bool:
    """Return whether ``name`` cannot be created in ``target``: it exists, or a parent of it is not a directory."""
    return os.path.lexists(target / name) or _leads_elsewhere(target, name)


def _leads_elsewhere(target: Path, name: str) -> bool:
    folders = [target / parent for parent in Path(name).parents if parent.name]
    return any(os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()) for folder in folders)
