"""The environment of a run: package versions, code state, hardware. No heavy package is imported to find out.

Environment variables are not written, so that no secret gets into a run directory. Git is only read: neither the index
nor the object store of a repository is written to. New files become part of the patch of uncommitted changes through an
index of our own, a copy in a temporary directory.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from retrain import __version__
from retrain.config import Config
from retrain.config.base import is_plugin
from retrain.config.root import flat, value_at
from retrain.device import nvidia_gpus
from retrain.files import sha256, write_bytes, write_json
from retrain.models.directory import files_digest, find_file, local_directory
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import CODE_DIFF, ENVIRONMENT, MANIFEST, PLAN
from retrain.util.text import without_keys

# fmt: off
PACKAGES = (
    "accelerate", "datasets", "flash-attn", "math-verify", "numpy", "peft", "pydantic", "retrain", "rich",
    "safetensors", "scipy", "tokenizers", "torch", "transformers", "triton", "typer", "vllm", "wandb",
)
SECRET_NAMES = (
    "*.env", ".env*", "*.pem", "*.key", "*.p12", "*secret*", "*credential*", "cred.*", "creds*", "*passw*",
    "*token*.txt", ".netrc", "*id_rsa*", "*id_ed25519*",
)
"""Files whose content never goes into a run directory."""
DIFF = ("diff", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
PATCH = (
    *DIFF, "--patch", "--binary", "--full-index", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/",
    "--submodule=short",
)
"""A patch that ``git apply`` takes, whatever the user's configuration says of diffs."""
# fmt: on
MAX_FILE_BYTES = 200_000  # A changed file that is larger, on the disk or in the commit, is named without its content
MAX_DIFF_BYTES = 2_000_000  # Of one repository; files that no longer fit are named without their content
GIT_SECONDS = 20.0
FOREIGN_VARIABLES = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX",
})  # fmt: skip
"""Variables that git sets for its hooks; here every repository is found by its path."""
KEYS = (
    "algorithm.advantage_mode",
    "algorithm.transform_mode",
    "algorithm.uncertainty_kind",
    "algorithm.loss",
    "planning.detector",
    "backend.backend",
)
"""Keys that name code which runs in the training process."""
SOURCES = ("data.source", "data.eval_source")
SET_SOURCE = "evaluation.sets.{}.source"


def run_facts(config: Config, **facts: object) -> Row:
    """Return the content of ``config.json``: the resolved configuration, then what it ran with.

    ``types`` has the type of every value under its dotted key; ``facts`` are further entries, such as the data's hash.
    """
    sections = config.to_dict()
    return {
        **sections,
        "types": {key: "null" if value is None else type(value).__name__ for key, value in flat(sections)},
        "packages": package_versions(),
        "code": code_version(),
        "git": git_state(Path.cwd()),
        **facts,
    }


@functools.cache
def code_version() -> dict[str, str]:
    """Return version and content hash of the retrain that runs: two installations with the same hash do the same."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return {"version": __version__, "sha256": digest.hexdigest()}


def module_hashes(config: Config, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the source of every module of the user's that a configuration names, without importing
    any, and of the files of every reward model.

    Modules are looked up in ``folder``, the working directory and on the import path, reward models in the first two
    and in the hub's cache; others are left out.
    """
    named, hashes = set(), dict[str, str]()
    for name in config.reward_models:
        cached = find_file(name, "config.json")
        if directory := local_directory(name, folder, Path.cwd()) or (cached and cached.parent):
            hashes[name] = files_digest(directory)
    for key, value in _texts(config.model_dump(mode="json", by_alias=True)):
        if key == "custom_module":
            named.add(value)
        elif re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value) and not value.startswith("gpu:"):
            named.add(value.partition(":")[0])
    for name in sorted(named):
        file = name if name.endswith(".py") else name.replace(".", "/") + ".py"
        package = name.replace(".", "/") + "/__init__.py"
        for path in (Path(place) / each for place in (folder, Path.cwd(), *sys.path) for each in (file, package)):
            if path.is_file():
                hashes[name] = sha256(path)
                break
    return hashes


def named_code(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, ``module:function``) of all code besides rewards that a configuration names."""
    for key in (*KEYS, *SOURCES):
        if is_plugin(value := value_at(config, key)):
            yield key, value
    for index, each in enumerate(config.evaluation.sets):
        if each.source is not None and is_plugin(each.source):
            yield SET_SOURCE.format(index), each.source


def is_source(key: str) -> bool:
    return key in SOURCES or key.startswith("evaluation.sets.")


def _texts(tree: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (last key, text) of every text in nested data."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _texts(value, str(name))
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value, key)
    elif isinstance(tree, str):
        yield key, tree


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the installed versions of ``PACKAGES``; those that are absent are left out."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@functools.cache
def all_packages() -> dict[str, str]:
    """Return the versions of all installed distributions by name; reading them takes half a second."""
    versions = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return dict(sorted(versions.items(), key=lambda item: (item[0] or "").lower()))


def environment_facts() -> Row:
    """Return the content of ``environment.json``."""
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": usable_cpus(),
        "memory_gib": _memory_gib(),
        "gpus": [asdict(gpu) for gpu in nvidia_gpus()],
        "python": sys.version,
        "executable": sys.executable,
        "argv": [without_keys(argument) for argument in sys.argv],
        "packages": all_packages(),
        "git": git_state(Path.cwd()),
    }


@dataclass(frozen=True)
class SystemInfo:
    """The content of ``environment.json`` and of ``code.diff``."""

    facts: Values
    diff: str

    @classmethod
    def now(cls, folder: Path) -> SystemInfo:
        """Read both, with the code around the current directory, ``folder`` (of the TOML file) and retrain's own."""
        places = (Path.cwd(), folder, own_checkout())
        return cls(environment_facts(), code_diff(*(place for place in places if place is not None)))

    def write(self, directory: Path) -> None:
        write_json(directory / ENVIRONMENT, self.facts)
        write_bytes(directory / CODE_DIFF, self.diff.encode("utf-8", "surrogateescape"))


def usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor() -> str:
    """Return the CPU's name; on Linux /proc is more precise than ``platform``."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 2)


# -- repositories -----------------------------------------------------------------------------------------------


def git_state(path: Path) -> Row | None:
    """Return root, revision and whether there are changes, of the repository around ``path``; None without one."""
    root = _text(_git(path, "rev-parse", "--show-toplevel"))
    if root is None:
        return None
    changes = _git(Path(root), "status", "--porcelain")
    return {
        "root": root,
        "revision": _text(_git(Path(root), "rev-parse", "HEAD")),
        "changed": None if changes is None else bool(changes.strip()),
    }


def code_diff(*places: Path) -> str:
    """Return ``### repo: <root> @ <sha>`` and the uncommitted changes as one patch, for each repository around
    ``places``.

    The patch holds every difference of the working tree from the commit, staged or not, and new files that git does not
    ignore; ``git apply`` in the root at that commit restores the tree. Files that are large, named like a secret,
    written by runs, or beyond 2 MB are named in a line that begins with ``###``; access keys are replaced. Bytes that
    are not UTF-8 are surrogate escapes.
    """
    parts = {}
    for place in places:
        state = git_state(place)
        if state is not None and state["root"] not in parts:
            head = f"### repo: {state['root']} @ {state['revision'] or 'no commit yet'}\n"
            parts[state["root"]] = head + _changes(Path(state["root"]), state["revision"])
    return "".join(parts.values()) or f"### no git repository around {places[0]}\n"


def own_checkout() -> Path | None:
    """Return the directory of retrain's source if it is under version control, as after ``pip install -e``."""
    source = Path(__file__).parent
    return source if _git(source, "ls-files", "--error-unmatch", Path(__file__).name) is not None else None


def _changes(root: Path, revision: str | None) -> str:
    base = revision or _text(_git(root, "hash-object", "-t", "tree", "--stdin", data=b""))
    objects, index = (_text(_git(root, "rev-parse", "--git-path", name)) for name in ("objects", "index"))
    if not (base and objects and index):
        return "### the changes cannot be read\n"
    quoted = str(root / objects).replace("\\", "\\\\").replace('"', '\\"')  # as git reads it in a list with colons
    with tempfile.TemporaryDirectory(prefix="retrain-") as aside:
        variables = {
            "GIT_INDEX_FILE": f"{aside}/index",
            "GIT_OBJECT_DIRECTORY": f"{aside}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{quoted}"',
        }
        Path(variables["GIT_OBJECT_DIRECTORY"]).mkdir()
        if (root / index).is_file():
            # With its time: by that git knows which files may have changed since without looking different.
            shutil.copy2(root / index, variables["GIT_INDEX_FILE"])
        left_out = _add_new_files(root, variables) | _unwanted_changes(root, base, variables)
        hidden = [f":(top,exclude,literal){name}" for name in left_out]
        patch = _git(root, *PATCH, base, "--", ".", *hidden, variables=variables)
    notes = [f"### {_printable(name)}: left out, {reason}\n" for name, reason in left_out.items()]
    if patch is None:
        return "".join([*notes, f"### the changes could not be read within {GIT_SECONDS:g} seconds\n"])
    return "".join([*_fitting(patch), *notes])


def _add_new_files(root: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Make new files part of our own index; return those that stay out with the reason."""
    listed = _names(_git(root, "ls-files", "--others", "--exclude-standard", "-z"))
    new = [name for name in listed if not _is_of_a_run(root, name)]
    left_out = {name: reason for name in new if (reason := _unwanted(root / name))}
    added = [name for name in new if name not in left_out and not name.endswith("/")]
    data = b"\0".join(map(os.fsencode, added))
    if added and _git(root, "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul",
                       data=data, variables={**variables, "GIT_LITERAL_PATHSPECS": "1"}) is None:  # fmt: skip
        left_out |= dict.fromkeys(added, "cannot be read")
    return left_out


def _unwanted_changes(root: Path, base: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the changed files whose content stays out, with the reason."""
    changed = _names(_git(root, *DIFF, "--name-only", "-z", base, variables=variables))
    sizes = _sizes(root, base) if changed else {}
    return {name: reason for name in changed if (reason := _unwanted(root / name, sizes.get(name, 0)))}


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _fitting(patch: bytes) -> Iterator[str]:
    """Yield the patch file by file, without keys, as far as there is room."""
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

    A key in an added line is replaced. If a line of the commit has one, the whole patch would no longer apply: then the
    file's part is commented out.
    """
    if "\nGIT binary patch\n" in part:
        return part
    lines = part.split("\n")
    clean = [without_keys(line) for line in lines]
    if any(line != kept and not line.startswith("+") for line, kept in zip(lines, clean, strict=True)):
        return "### a key is left out, this part is no patch:\n" + "".join(f"### {line}\n" for line in clean if line)
    return "\n".join(clean)


def _unwanted(path: Path, committed_bytes: int = 0) -> str:
    """Return the reason for which a file's content stays out; "" when it does not."""
    if any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in SECRET_NAMES):
        return "named like a secret"
    size = path.lstat().st_size if os.path.lexists(path) and not path.is_dir() else 0
    return "too large" if max(size, committed_bytes) > MAX_FILE_BYTES else ""


def _is_of_a_run(root: Path, name: str) -> bool:
    """Return whether a run or campaign wrote the file, or is about to: its directory has a plan and a manifest."""
    folders = [folder for folder in (root / name).parents if root in folder.parents]
    return any((folder / PLAN).is_file() and (folder / MANIFEST).is_file() for folder in folders)


def _sizes(root: Path, tree: str) -> dict[str, int]:
    """Return the bytes of every file of the commit."""
    sizes = {}
    for entry in _names(_git(root, "ls-tree", "-r", "-l", "-z", "--full-tree", tree)):
        facts, _, name = entry.partition("\t")
        size = facts.split()[-1]
        sizes[name] = int(size) if size.isdigit() else 0
    return sizes


def _names(listed: bytes | None) -> list[str]:
    return [os.fsdecode(name) for name in (listed or b"").split(b"\0") if name]


def _text(answer: bytes | None) -> str | None:
    """Return the one line of an answer; None for no answer or an empty one."""
    return os.fsdecode(answer).removesuffix("\n") or None if answer is not None else None


def _git(
    path: Path, *arguments: str, data: bytes | None = None, variables: Mapping[str, str] | None = None
) -> bytes | None:
    """Return the output of a git command, or None when git, the repository or the answer is missing."""
    kept: Iterable[tuple[str, str]] = (item for item in os.environ.items() if item[0] not in FOREIGN_VARIABLES)
    environment = dict(kept) | {"GIT_OPTIONAL_LOCKS": "0"} | dict(variables or {})
    command = ("git", "-C", str(path), "-c", "core.fsmonitor=false", *arguments)
    try:
        done = subprocess.run(
            command, input=data, stdin=subprocess.DEVNULL if data is None else None, capture_output=True,
            timeout=GIT_SECONDS, check=True, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout
