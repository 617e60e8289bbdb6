"""Read the state of git repositories: revision, and uncommitted changes as a patch.

Neither index nor object store of a repository is written: new files enter the patch through a copy of the index.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from retrain.util.text import without_keys

SECRET_NAMES = (
    "*.env", ".env*", "*.pem", "*.key", "*.p12", "*secret*", "*credential*", "cred.*", "creds*", "*passw*",
    "*token*.txt", ".netrc", "*id_rsa*", "*id_ed25519*",
)  # fmt: skip
"""Patterns of files whose content is never copied into a run directory."""
DIFF = ("diff", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
PATCH = (
    *DIFF, "--patch", "--binary", "--full-index", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/",
    "--submodule=short",
)  # fmt: skip
"""Arguments for a patch that ``git apply`` accepts, whatever the user's diff settings."""
MAX_FILE_BYTES = 200_000  # Larger changed files, on disk or in the commit, are listed without content
MAX_DIFF_BYTES = 2_000_000  # Per repository; files beyond it are listed without content
GIT_SECONDS = 20.0
FOREIGN_VARIABLES = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX",
})  # fmt: skip
"""Variables that git sets for hooks; they would override the path of the repository."""


class GitState(TypedDict):
    root: str
    revision: str | None
    changed: bool | None


def git_state(path: Path) -> GitState | None:
    """Return root, revision and whether anything is uncommitted in the repository around ``path``; None outside of
    any."""
    root = _text(_git(path, "rev-parse", "--show-toplevel"))
    if root is None:
        return None
    changes = _git(Path(root), "status", "--porcelain")
    return {
        "root": root,
        "revision": _text(_git(Path(root), "rev-parse", "HEAD")),
        "changed": None if changes is None else bool(changes.strip()),
    }


def code_diff(*paths: Path, is_record: Callable[[Path], bool] = lambda folder: False) -> str:
    """Return ``### repo: <root> @ <sha>`` and a patch of the uncommitted changes for each repository around ``paths``.

    The patch has all differences from the commit, staged or not, and new files that git does not ignore, except those
    in folders for which ``is_record`` returns True; ``git apply`` at that commit restores the working tree. Files that
    are large, named like a secret, or beyond 2 MB in total are only listed, in lines that begin with ``###``. Access
    keys are replaced. Bytes that are not UTF-8 become surrogate escapes.
    """
    parts = {}
    for path in paths:
        state = git_state(path)
        if state is not None and state["root"] not in parts:
            head = f"### repo: {state['root']} @ {state['revision'] or 'no commit yet'}\n"
            parts[state["root"]] = head + _changes(Path(state["root"]), state["revision"], is_record)
    return "".join(parts.values()) or f"### no git repository around {paths[0]}\n"


def own_checkout() -> Path | None:
    source = Path(__file__).parent
    return source if _git(source, "ls-files", "--error-unmatch", Path(__file__).name) is not None else None


def _changes(root: Path, revision: str | None, is_record: Callable[[Path], bool]) -> str:
    base = revision or _text(_git(root, "hash-object", "-t", "tree", "--stdin", data=b""))
    objects, index = (_text(_git(root, "rev-parse", "--git-path", name)) for name in ("objects", "index"))
    if not (base and objects and index):
        return "### the changes cannot be read\n"
    # Quoted as git requires in a list that is separated by colons.
    quoted = str(root / objects).replace("\\", "\\\\").replace('"', '\\"')
    with tempfile.TemporaryDirectory(prefix="retrain-") as aside:
        variables = {
            "GIT_INDEX_FILE": f"{aside}/index",
            "GIT_OBJECT_DIRECTORY": f"{aside}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{quoted}"',
        }
        Path(variables["GIT_OBJECT_DIRECTORY"]).mkdir()
        if (root / index).is_file():
            # copy2 keeps the modification time, by which git decides which files it must read again.
            shutil.copy2(root / index, variables["GIT_INDEX_FILE"])
        left_out = _add_new_files(root, variables, is_record) | _unwanted_changes(root, base, variables)
        hidden = [f":(top,exclude,literal){name}" for name in left_out]
        patch = _git(root, *PATCH, base, "--", ".", *hidden, variables=variables)
    notes = [f"### {_printable(name)}: left out, {reason}\n" for name, reason in left_out.items()]
    if patch is None:
        return "".join([*notes, f"### the changes could not be read within {GIT_SECONDS:g} seconds\n"])
    return "".join([*_fitting(patch), *notes])


def _add_new_files(root: Path, variables: Mapping[str, str], is_record: Callable[[Path], bool]) -> dict[str, str]:
    """Add new files to the temporary index; return the reason for each file that is left out, by its name."""

    def is_recorded(name: str) -> bool:
        return any(is_record(folder) for folder in (root / name).parents if root in folder.parents)

    listed = _names(_git(root, "ls-files", "--others", "--exclude-standard", "-z"))
    new = [name for name in listed if not is_recorded(name)]
    left_out = {name: reason for name in new if (reason := _unwanted(root / name))}
    added = [name for name in new if name not in left_out and not name.endswith("/")]
    data = b"\0".join(map(os.fsencode, added))
    if added and _git(root, "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul",
                       data=data, variables={**variables, "GIT_LITERAL_PATHSPECS": "1"}) is None:  # fmt: skip
        left_out |= dict.fromkeys(added, "cannot be read")
    return left_out


def _unwanted_changes(root: Path, base: str, variables: Mapping[str, str]) -> dict[str, str]:
    changed = _names(_git(root, *DIFF, "--name-only", "-z", base, variables=variables))
    sizes = _sizes(root, base) if changed else {}
    return {name: reason for name in changed if (reason := _unwanted(root / name, sizes.get(name, 0)))}


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _fitting(patch: bytes) -> Iterator[str]:
    room = MAX_DIFF_BYTES
    for part in re.split(rb"^(?=diff --git )", patch, flags=re.MULTILINE):
        text = part.decode("utf-8", "surrogateescape")
        if len(part) <= room:
            room -= len(part)
            yield _without_keys(text)
        else:
            heading = text.partition("\n")[0]
            yield f"### no room for: {heading}\n"


def _without_keys(part: str) -> str:
    """Return one file's patch without access keys.

    Keys in added lines are replaced. If a context line or a removed line has a key, the patch would not apply without
    the key, so the file's whole patch is commented out.
    """
    if "\nGIT binary patch\n" in part:
        return part
    lines = part.split("\n")
    clean = [without_keys(line) for line in lines]
    if any(line != cut and not line.startswith("+") for line, cut in zip(lines, clean, strict=True)):
        return "### a key is left out, this part is no patch:\n" + "".join(f"### {line}\n" for line in clean if line)
    return "\n".join(clean)


def _unwanted(path: Path, committed_bytes: int = 0) -> str:
    """Return why a file's content is left out of the patch; "" if it is not."""
    if any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in SECRET_NAMES):
        return "named like a secret"
    size = path.lstat().st_size if os.path.lexists(path) and not path.is_dir() else 0
    return "too large" if max(size, committed_bytes) > MAX_FILE_BYTES else ""


def _sizes(root: Path, tree: str) -> dict[str, int]:
    sizes = {}
    for entry in _names(_git(root, "ls-tree", "-r", "-l", "-z", "--full-tree", tree)):
        facts, _, name = entry.partition("\t")
        size = facts.split()[-1]
        sizes[name] = int(size) if size.isdigit() else 0
    return sizes


def _names(listed: bytes | None) -> list[str]:
    return [os.fsdecode(name) for name in (listed or b"").split(b"\0") if name]


def _text(output: bytes | None) -> str | None:
    return os.fsdecode(output).removesuffix("\n") or None if output is not None else None


def _git(
    path: Path, *arguments: str, data: bytes | None = None, variables: Mapping[str, str] | None = None
) -> bytes | None:
    """Return the output of a git command; None if git is missing, or the command fails or times out."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", **(variables or {})}
    command = ("git", "-C", str(path), "-c", "core.fsmonitor=false", *arguments)
    try:
        done = subprocess.run(
            command, input=data, stdin=subprocess.DEVNULL if data is None else None, capture_output=True,
            timeout=GIT_SECONDS, check=True, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout
