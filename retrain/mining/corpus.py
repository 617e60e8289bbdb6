"""The completions that a run recorded, read one by one: whole where a step's tokens were recorded
(``tokens_<n>.safetensors``), else their first characters (``emergence/generations.jsonl``)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.errors import CheckpointError, UsageError
from retrain.files import read_json, sha256
from retrain.record.recorder import COMPLETION_CHARACTERS
from retrain.record.tokens import TokenFile

GENERATIONS = "emergence/generations.jsonl"
_TOKENS = r"tokens_(\d+)\.safetensors"


@dataclass(frozen=True)
class Completions:
    """What a run sampled in training, as documents: the texts of a completion's turns.

    ``correct``: of right answers alone. ``facts`` is the run's ``config.json``. ``files`` hold whole completions, by
    step. An evaluation's answers are none of them.
    """

    directory: Path
    facts: dict[str, Any]
    correct: bool
    files: dict[int, Path]

    def __iter__(self) -> Iterator[list[str]]:
        """Every document. Raises CheckpointError for a damaged file."""
        for texts, _ in self._recorded():
            yield texts

    def count(self) -> tuple[int, int]:
        """How many documents there are, and how many of them were recorded without their ends."""
        cut = [cut for _, cut in self._recorded()]
        return len(cut), sum(cut)

    def digest(self) -> str:
        """Hash of all that is read."""
        paths = [self.directory / GENERATIONS, *self.files.values()]
        hashes = [f"{path.name}\0{sha256(path)}\n" for path in paths if path.is_file()]
        return hashlib.sha256("".join([f"correct\0{self.correct}\n", *hashes]).encode()).hexdigest()

    def _recorded(self) -> Iterator[tuple[list[str], bool]]:
        """(texts, whether cut) of every document."""
        for step in sorted(self.files):
            with TokenFile(self.files[step]) as file:
                for line in file.lines():
                    if line.get("correct") or not self.correct:
                        yield [turn["text"] for turn in line["turns"]], False
        for row in _rows(self.directory / GENERATIONS):
            if row["step"] not in self.files and (row["correct"] or not self.correct):
                yield [row["completion"]], len(row["completion"]) >= COMPLETION_CHARACTERS


def completions_of(directory: Path, correct: bool = True) -> Completions:
    """The completions of a run directory. Raises UsageError for what is none, or has none."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory: name a run directory")
    if (directory / "runs").is_dir():
        runs = sorted(path for path in (directory / "runs").iterdir() if path.is_dir())
        raise UsageError(f"{directory} is a campaign: name one of its runs, such as {runs[0]}" if runs
                         else f"{directory} is a campaign without runs")  # fmt: skip
    try:
        facts = read_json(directory / "config.json")
        facts["run_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{directory} is no run directory: it has no config.json of a run") from error
    found = {int(m[1]): path for path in directory.iterdir() if (m := re.fullmatch(_TOKENS, path.name))}
    every = Completions(directory, facts, False, found)
    if next(iter(every), None) is None:
        raise UsageError(f"{directory} has no completions: neither {GENERATIONS} nor tokens_<n>.safetensors has any")
    completions = Completions(directory, facts, correct, found)
    if next(iter(completions), None) is None:
        raise UsageError(f"{directory} has no right answer among its completions: --all takes wrong ones too")
    return completions


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of completions, one by one; a torn last line is left out."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
                known = isinstance(row["step"], int) and isinstance(row["completion"], str) and "correct" in row
            except (ValueError, RecursionError, KeyError, TypeError) as error:
                raise CheckpointError(f"{path}:{number} is damaged ({error!r}): remove that line") from error
            if not known:
                raise CheckpointError(f"{path}:{number} is no line of a completion: remove that line")
            yield row
