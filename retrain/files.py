"""Resolve configured paths, write files atomically, and read and write strict JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from retrain.errors import CheckpointError, NotReadable, RetrainError, StorageError, UsageError

_SURROGATES = re.compile("[\ud800-\udfff]")
_OBEYED = (*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPED = {code: f"\\u{code:04x}" for code in _OBEYED}
"""Characters that JSON allows unescaped, but that some readers treat as line ends and terminals as commands."""
ASIDE = ".retrain-tmp"  # Suffix of temporary files and directories, incomplete until they are renamed


def jsonable(value: Any) -> Any:
    """Return ``value`` as strict JSON: numpy scalars and arrays become plain, NaN and infinities become None."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATES.sub("?", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return jsonable(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def dumps(value: object, indent: int | None = None) -> str:
    """Return ``value`` as strict JSON text, with ``_ESCAPED`` characters escaped."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError):  # contains a value that is not plain or finite
        text = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False, indent=indent)
    plain = text.isascii() and "\x7f" not in text
    return text if plain else _SURROGATES.sub("?", text).translate(_ESCAPED)


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or the new and renamed entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prepare_directory(directory: Path) -> None:
    """Create ``directory`` and its parents. Raises UsageError if it cannot be created or written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write to {directory}: {reason}; give another directory") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {directory}: permission denied; give another directory")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of the file system to a StorageError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise StorageError(path, error) from error


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace ``path`` atomically: a reader sees the old text or the new text, also after a power cut.

    ``durable = False`` does not wait for the disk: after a power cut the file may be missing, but never half-written.
    Use it within a directory that ``publish_directory`` makes durable. Raises StorageError on failure and leaves
    ``path`` unchanged.
    """
    write_bytes(path, text.encode("utf-8"), durable)


def write_bytes(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace ``path`` atomically with ``data``. ``durable`` and errors: see ``write_text``."""
    aside = aside_of(path)
    durable = durable and not _is_aside(path.parent.name)  # ``publish_directory`` makes a temporary directory durable
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(aside, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        if durable:
            fsync(path.parent)


def aside_of(path: Path) -> Path:
    """Return the temporary path that is written first and then renamed to ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}{ASIDE}")


def _is_aside(name: str) -> bool:
    return name.startswith(".") and name.endswith(ASIDE)


def is_aside(name: str) -> bool:
    """Return whether ``name`` is a temporary file or directory of another process. This process's threads may still
    write its own."""
    return _is_aside(name) and not name.endswith(f".{os.getpid()}{ASIDE}")


def write_json(path: Path, value: object) -> None:
    write_text(path, dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Return the JSON value in ``path``. Raises ValueError for invalid JSON, also for nesting that is too deep."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def append_jsonl(path: Path, rows: Iterable[object]) -> tuple[int, int]:
    """Append one strict-JSON line per row (``append_bytes``); return the byte range [begin, end) that they occupy."""
    data = "".join(dumps(row) + "\n" for row in rows).encode()
    if not data:
        size = path.stat().st_size if path.exists() else 0
        return size, size
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = append_bytes(path, data)
    return begin, begin + len(data)


def append_bytes(path: Path, data: bytes) -> int:
    """Append ``data`` unbuffered; return the offset at which it begins. On failure, truncate the file to its former
    size and raise OSError."""
    with open(path, "ab", buffering=0) as file:
        begin, rest = file.tell(), memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # report the failed write itself
                file.truncate(begin)
            raise
    return begin


def iter_jsonl(path: Path) -> Iterator[Any]:
    """Yield all complete rows, none if the file is missing. Skips an incomplete last line, which a process killed while
    writing leaves. Raises CheckpointError, which names file and line, if another line is no JSON object;
    PermissionError if the file may not be read."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n") and line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(f"{path}:{number} is damaged ({error}): remove that line") from error
                if not isinstance(row, dict):
                    raise CheckpointError(f"{path}:{number} is damaged (it is no JSON object): remove that line")
                yield row


def read_jsonl(path: Path) -> list[Any]:
    return list(iter_jsonl(path))


def keep_rows(path: Path, keep: Callable[[Any], bool]) -> int:
    """Remove atomically the rows for which ``keep`` is false, and an incomplete last line; return the number of rows
    that stay."""
    if not path.exists():
        return 0
    rows = [row for row in read_jsonl(path) if keep(row)]
    text = "".join(dumps(row) + "\n" for row in rows).encode()
    if len(text) != path.stat().st_size:
        write_bytes(path, text)
    return len(rows)


def truncate_jsonl(path: Path, before_step: int, key: str = "step") -> int:
    """Remove the rows with ``row[key] >= before_step`` by ``keep_rows``; return the number of rows that stay. Rows
    without ``key`` stay."""
    return keep_rows(path, lambda row: row.get(key) is None or row[key] < before_step)


def read_json_if_present(path: Path) -> Any:
    """Return the JSON value in ``path``, or None if the file is missing or not JSON. Raises NotReadable if the
    operating system refuses to read it."""
    try:
        return read_json(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise NotReadable(path, error) from error


class Stamp(NamedTuple):
    """Identity and version of a file, compared to notice that it was replaced or rewritten."""

    inode: int
    size: int
    written: int  # Unix time in nanoseconds


def stamp_of(path: Path | None) -> Stamp | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return None if status is None else Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_directory(aside: Path, final: Path) -> None:
    """Rename the completely written directory ``aside`` to ``final``, replacing an older directory of that name.

    The content is on disk before the rename, and the rename is on disk when this returns. Raises StorageError.
    """
    with writing(final):
        for path in (*aside.rglob("*"), aside):
            if path.is_dir() or path.is_file():
                fsync(path)
        if final.exists():
            old = aside_of(final.with_name(f"{final.name}.old"))
            shutil.rmtree(old, ignore_errors=True)
            os.replace(final, old)
            os.replace(aside, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(aside, final)
        fsync(final.parent)


def search_folders(base_dir: Path | None) -> list[Path]:
    """Return the folders in which relative paths of a configuration are looked up: ``base_dir`` (the TOML's folder) and
    the current directory, both absolute."""
    return list(dict.fromkeys(folder.resolve() for folder in (base_dir, Path.cwd()) if folder is not None))


def existing_file(path: str, base_dir: Path | None, label: str, error: type[RetrainError]) -> Path:
    """Return the file that a configuration names, from the ``search_folders``. Raises ``error``, whose text begins with
    ``label``, if it is missing."""
    tried = [folder / Path(path).expanduser() for folder in search_folders(base_dir)]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    places = " and ".join(map(str, dict.fromkeys(tried)))
    raise error(f"{label} {path!r}: no such file (looked for {places})")
