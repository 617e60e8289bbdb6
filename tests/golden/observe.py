"""Turn what a scenario left behind into named values that can be compared one by one.

A name is ``FILE:KEY`` (``out/metrics.jsonl:[2].loss``), the exit status or output of a command
(``session.json:[0].stdout:[3]``), or an array of an archive (``final/adapter_model.safetensors:q_proj.lora_A``). What
may differ between two runs of the same version is left out by ``excluded.toml``.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Values = dict[str, Any]


@dataclass(frozen=True)
class Excluded:
    """``files`` are patterns of files whose content is not looked at, ``values`` of names that are left out, and
    ``texts`` pairs of a regular expression and what stands for it in every line of text."""

    files: tuple[str, ...]
    values: tuple[str, ...]
    texts: tuple[tuple[re.Pattern[str], str], ...]

    @classmethod
    def read(cls, path: Path = HERE / "excluded.toml") -> Excluded:
        content = tomllib.loads(path.read_text())
        texts = tuple((re.compile(entry["find"]), entry["replace"]) for entry in content["text"])
        return cls(
            tuple(name for entry in content["file"] for name in entry["names"]),
            tuple(name for entry in content["value"] for name in entry["names"]),
            texts,
        )

    def text(self, line: str) -> str:
        for pattern, replacement in self.texts:
            line = pattern.sub(replacement, line)
        return line


def observed(folder: Path, excluded: Excluded) -> Values:
    """Every value of every file below ``folder``."""
    values: Values = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name = excluded.text(path.relative_to(folder).as_posix())
        values[f"{name}:"] = "file"
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in excluded.files):
            for key, value in _content(path, excluded):
                values[f"{name}:{key}"] = value
    return {name: value for name, value in values.items() if not _is_excluded(_without_indices(name), excluded.values)}


def _content(path: Path, excluded: Excluded) -> Iterator[tuple[str, Any]]:
    match path.suffix:
        case ".json":
            yield from _flat(json.loads(path.read_text()), "", excluded)
        case ".jsonl":
            for number, line in enumerate(path.read_text().splitlines()):
                yield from _flat(json.loads(line), f"[{number}]", excluded)
        case ".safetensors":
            yield from _tensors(path)
        case ".npz":
            yield from _arrays(path)
        case ".html" | ".txt" | ".log" | ".toml" | ".md" | ".svg":
            yield from _lines(path.read_text(errors="replace"), "", excluded)
        case _:
            yield "sha256", hashlib.sha256(path.read_bytes()).hexdigest()


def _flat(value: Any, key: str, excluded: Excluded) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield f"{key}{{}}", list(value)  # the order of keys is what a reader sees
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name, excluded)
    elif isinstance(value, list):
        yield f"{key}[]", len(value)
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{number}]", excluded)
    elif isinstance(value, str) and value.startswith(("{\n", "[\n")) and (parsed := _parsed(value)) is not None:
        yield from _flat(parsed, f"{key}.json", excluded)
    elif isinstance(value, str) and "\n" in value:
        yield from _lines(value, key, excluded)
    else:
        yield key, excluded.text(value) if isinstance(value, str) else value


def _parsed(text: str) -> Any:
    """Return the JSON value that a command has printed, or None for other text."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _lines(text: str, key: str, excluded: Excluded) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines()):
        yield f"{key}:[{number}]", excluded.text(line)


def _tensors(path: Path) -> Iterator[tuple[str, str]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for key, value in sorted((file.metadata() or {}).items()):
            yield f"metadata.{key}", value
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            data = tensor.view(-1).view(dtype=__import__("torch").uint8).numpy().tobytes() if tensor.numel() else b""
            yield name, f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def _arrays(path: Path) -> Iterator[tuple[str, str]]:
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        for name in sorted(file.files):
            array = file[name]
            yield name, f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _without_indices(name: str) -> str:
    return re.sub(r"\[\d+\]", "[]", name)


@cache
def _is_excluded(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.replace("[]", "[[]]")) for pattern in patterns)
