"""Map locations in URLs to directories; nothing outside the given directories is ever opened.

A location is ``<root>/<relative path>``, where the root is the name of a directory given on the command line. A path
that leads out of its root, by ``..`` or a symbolic link, is treated as missing.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.schema.layout import (
    CODE_DIFF,
    COLUMNS,
    CONFIG,
    EMERGENCE,
    ENVIRONMENT,
    EVALS,
    EVALUATIONS,
    GENERATIONS,
    LOG,
    METRICS,
    NOTES,
    SPANS,
)
from retrain.ui.answers import ApiError

MOST = 4096  # Characters of a location

READ = (METRICS, COLUMNS, EVALS, CONFIG, ENVIRONMENT, CODE_DIFF, NOTES, LOG, SPANS, EVALUATIONS, GENERATIONS)
"""Files of a run that code outside ``retrain.ui`` opens; none of them may lead out of the given directories."""


class Places:
    """The directories of the command line (``roots``), by unique name. Raises UsageError if one is no directory."""

    def __init__(self, directories: Sequence[Path]):
        self.roots: dict[str, Path] = {}
        for directory in directories:
            if not directory.is_dir():
                problem = "is not a directory" if directory.exists() else "does not exist"
                raise UsageError(f"{directory} {problem}; type: retrain ui logs, or the directory of a campaign or run")
            real = Path(os.path.realpath(directory))
            if real not in self.roots.values():
                self.roots[_unused(real.name or "root", self.roots)] = real

    def find(self, location: str) -> Path:
        """Return the resolved directory of a location. Raises ApiError (404) for anything that is no directory."""
        parts = location.split("/")
        odd = not location or len(location) > MOST or "\0" in location or any(part in ("", ".", "..") for part in parts)
        root = self.roots.get(parts[0])
        if odd or root is None:
            raise nothing(location)
        path = self._real(root.joinpath(*parts[1:]))
        if path is None or not path.is_dir():
            raise nothing(location)
        return path

    def file(self, directory: Path, name: str) -> Path | None:
        """Return the resolved path of a regular file below ``directory``; None if it is missing, outside the roots, or
        no regular file (opening a pipe could block forever)."""
        path = self._real(directory / name)
        try:
            return path if path is not None and stat.S_ISREG(path.stat().st_mode) else None
        except OSError:
            return None

    def folder(self, directory: Path, name: str) -> Path | None:
        path = self._real(directory / name)
        return path if path is not None and path.is_dir() else None

    def inside(self, path: Path) -> bool:
        """Return whether a path, links followed, is inside a root; True also if nothing is there."""
        return not os.path.lexists(path) or self._real(path) is not None

    def location_of(self, path: Path) -> str:
        near = [(len(root.parts), name, root) for name, root in self.roots.items() if path.is_relative_to(root)]
        _, name, root = max(near)
        relative = path.relative_to(root).as_posix()
        return name if relative == "." else f"{name}/{relative}"

    def with_places(self, text: str) -> str:
        """Return a text with locations in place of paths of this machine."""
        for name, root in sorted(self.roots.items(), key=lambda each: -len(each[1].parts)):
            text = text.replace(str(root), name)
        return text

    def _real(self, path: Path) -> Path | None:
        try:
            real = Path(os.path.realpath(path, strict=True))
        except (OSError, ValueError):
            return None
        return real if any(real.is_relative_to(root) for root in self.roots.values()) else None


def stays_inside(run: Path, places: Places) -> bool:
    """Return whether a run and its files of ``READ`` are inside the given directories; False also if one is a pipe."""
    if not places.inside(run) or not places.inside(run / EMERGENCE):
        return False
    return all(_is_plain(run, name, places) for name in READ)


def _is_plain(run: Path, name: str, places: Places) -> bool:
    try:
        mode = (run / name).lstat().st_mode
    except OSError:
        return True
    return stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and places.file(run, name) is not None)


def nothing(location: str) -> ApiError:
    return ApiError(404, f"there is nothing to show at {location[:200]!r}")


def _unused(name: str, roots: Mapping[str, Path]) -> str:
    numbered = (f"{name}-{number}" for number in count(2))
    return name if name not in roots else next(each for each in numbered if each not in roots)
