"""The file of strategic grams: written by ``retrain mine``, read by ``[planning] grams``.

TOML, with one ``[[cluster]]`` for every group of grams that is kept. A person may edit it: what stands in it is what is
matched. ``[mined]`` says where it comes from, and has a digest of the grams, by which an edited file is told from one
that may be written anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from retrain.config.describe import toml
from retrain.errors import DataError, NotOurs
from retrain.files import write_text
from retrain.maths.grams import GramCluster
from retrain.maths.planning import RegexDetector
from retrain.plugins import existing_file

MINED = "mined"
HEAD = '# Strategic grams, by `retrain mine`. [planning] grams = "{name}" has them mark planning tokens.'


def grams_file(named: str, base_dir: Path | None) -> Path:
    """The file that ``[planning] grams`` names. Raises DataError where there is none."""
    return existing_file(named, base_dir, "[planning] grams =", DataError)


def read_grams(path: Path) -> tuple[str, ...]:
    """All grams of a file, each once. Raises DataError, with what is wrong, for what is no such file."""
    try:
        clusters = tomli.loads(path.read_text(encoding="utf-8"))["cluster"]
        grams = [gram for cluster in clusters for gram in cluster["grams"]]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not TOML: {error}") from error
    except (KeyError, TypeError) as error:
        raise DataError(f'{path} is no file of grams: it has no [[cluster]] with grams = ["let me check"]') from error
    wrong = next((gram for gram in grams if not isinstance(gram, str)), None)
    if wrong is not None:
        raise DataError(f"{path} has the gram {wrong!r}: grams are strings")
    try:
        return RegexDetector(tuple(dict.fromkeys(grams))).phrases
    except ValueError as error:
        raise DataError(f"{path} has no grams to match: {error}") from error


def write_grams(path: Path, about: Mapping[str, Any], clusters: Sequence[GramCluster], documents: int) -> None:
    """Write the clusters, in this order, with ``about`` as ``[mined]``; ``documents`` is the number that was read.

    Raises StorageError when it cannot be written, and ``path`` is then as it was.
    """
    lines = [HEAD.format(name=path.name), "", f"[{MINED}]"]
    lines += [f"{key} = {toml(value)}" for key, value in about.items()]
    lines.append(f"digest = {toml(_digest([cluster.grams for cluster in clusters]))}")
    for number, cluster in enumerate(clusters, start=1):
        lines += ["", "[[cluster]]", f"id = {number}", f"documents = {cluster.documents}"]
        lines += [f"share = {cluster.documents / documents:.4f}", "grams = ["]
        lines += [*(f"    {toml(gram)}," for gram in cluster.grams), "]"]
    write_text(path, "\n".join(lines) + "\n")


def check_writable(path: Path) -> None:
    """Raise NotOurs when ``path`` is something that ``write_grams`` did not write, or that was changed since."""
    if not path.exists():
        return
    advice = "give another file with --out"
    try:
        content = tomli.loads(path.read_text(encoding="utf-8"))
        digest, grams = content[MINED]["digest"], [cluster["grams"] for cluster in content.get("cluster", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotOurs(f"{path} was not written by retrain mine: {advice}") from error
    if digest != _digest(grams):
        raise NotOurs(f"{path} was edited since retrain mine wrote it: {advice}")


def _digest(grams: Sequence[Sequence[str]]) -> str:
    return hashlib.sha256("\n\n".join("\n".join(map(str, own)) for own in grams).encode()).hexdigest()
