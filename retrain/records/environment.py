"""The environment of a run: package versions, code state, hardware. No heavy package is imported to find out.

Environment variables are not written, so that no secret gets into a run directory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from retrain import __version__
from retrain.config import Config
from retrain.config.base import is_plugin
from retrain.config.root import flat, value_at
from retrain.device import nvidia_gpus, processor, usable_cpus
from retrain.files import dumps, sha256
from retrain.models.directory import files_digest, find_file, local_directory
from retrain.records.schema.base import Row
from retrain.records.schema.layout import CODE_DIFF, ENVIRONMENT, MANIFEST, PLAN
from retrain.util.repository import code_diff, git_state, own_checkout
from retrain.util.text import without_keys

PACKAGES = (
    "accelerate", "datasets", "flash-attn", "math-verify", "numpy", "peft", "pydantic", "retrain", "rich",
    "safetensors", "scipy", "tokenizers", "torch", "transformers", "triton", "typer", "vllm", "wandb",
)  # fmt: skip
# Keys whose values may name code that runs in the training process
KEYS = (
    "algorithm.advantage_mode",
    "algorithm.transform_mode",
    "algorithm.uncertainty_kind",
    "algorithm.loss",
    "planning.detector",
    "backend.backend",
)
SOURCES = ("data.source", "data.eval_source", "warmup.source", "warmup.eval_source")
SET_SOURCE = "evaluation.sets.{}.source"


def run_facts(config: Config, **facts: object) -> Row:
    """Return the content of ``config.json``: the resolved configuration, then versions of packages and code.

    The entry ``types`` maps every dotted key to the type of its value. ``facts`` are further entries, such as the
    hash of the data.
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
    """Return version and SHA-256 of the sources of the running retrain; equal hashes mean equal code."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return {"version": __version__, "sha256": digest.hexdigest()}


def module_hashes(config: Config, folder: Path) -> dict[str, str]:
    """Return SHA-256 hashes by name: of the source of every user module that a configuration names, and of the files of
    every reward model. Modules are not imported.

    Modules are looked up in ``folder``, in the working directory and on the import path; reward models in ``folder``,
    in the working directory and in the Hugging Face cache. Names that are not found are left out.
    """
    named, hashes = set(), dict[str, str]()
    for name in config.reward_models:
        cached = find_file(name, "config.json")
        if directory := local_directory(name, folder, Path.cwd()) or (cached and cached.parent):
            hashes[name] = files_digest(directory)
    for key, value in _texts(config.model_dump(mode="json", by_alias=True)):
        if key == "custom_module":
            named.add(value)
        elif is_plugin(value) and not value.startswith("gpu:"):
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
    """Yield (dotted key, ``module:function``) for all user code that a configuration names, rewards excepted."""
    for key in (*KEYS, *SOURCES):
        if is_plugin(value := value_at(config, key)):
            yield key, value
    for index, each in enumerate(config.evaluation.sets):
        if each.source is not None and is_plugin(each.source):
            yield SET_SOURCE.format(index), each.source


def is_source(key: str) -> bool:
    return key in SOURCES or key.startswith("evaluation.sets.")


def _texts(tree: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) for every text in nested data; the key is that of the innermost mapping."""
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
    import psutil

    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": usable_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 2),
        "gpus": [asdict(gpu) for gpu in nvidia_gpus()],
        "python": sys.version,
        "executable": sys.executable,
        "argv": [without_keys(argument) for argument in sys.argv],
        "packages": all_packages(),
        "git": git_state(Path.cwd()),
    }


def system_files(folder: Path) -> dict[str, bytes]:
    """Return file contents by name: ``environment.json``, which describes this machine, and ``code.diff``, the
    uncommitted changes in the repositories of the current directory, of ``folder`` and of retrain."""
    places = [place for place in (Path.cwd(), folder, own_checkout()) if place is not None]
    facts, diff = dumps(environment_facts(), indent=2) + "\n", code_diff(*places, is_record=holds_records)
    return {ENVIRONMENT: facts.encode(), CODE_DIFF: diff.encode("utf-8", "surrogateescape")}


def holds_records(directory: Path) -> bool:
    return (directory / PLAN).is_file() and (directory / MANIFEST).is_file()
