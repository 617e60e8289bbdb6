"""What a run has sampled, iteration by iteration: the index of its files, and the rollouts of one of them.

A run that keeps ``iterations.jsonl`` is never listed; of one of an earlier release the names of the summary files say
what there is. A recorded iteration comes whole out of its file of tokens; of any other the summary lines and the
shortened texts of ``emergence/`` remain.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from retrain.errors import UsageError
from retrain.record.rollout_files import INDEX, SUMMARIES
from retrain.record.rollouts import TRAIN
from retrain.record.status import Tail
from retrain.record.tokens import TokenFile

Line = dict[str, Any]
GENERATIONS, EVALUATIONS = "emergence/generations.jsonl", "emergence/evaluations.jsonl"
TOOL_ERRORS = "tools/tool_errors"
MOST_LINES = 64 << 20
"""Bytes of the completions of one iteration that are read at most."""
_SUMMARY = re.compile(r"(train|eval_(.+))_iteration_(\d{6,})" + re.escape(SUMMARIES))


Find = Callable[[Path, str], Path | None]
"""The file of a name below a run's directory, where it may be read (``Places.file``)."""


def anywhere(directory: Path, name: str) -> Path | None:
    """The file of that name, for directories that are one's own."""
    path = directory / name
    return path if path.is_file() else None


@dataclass(frozen=True)
class Iteration:
    """A line of the index; the counts are None where a run of an earlier release left none."""

    split: str
    number: int
    name: str
    groups: int | None = None
    rollouts: int | None = None
    correct: int | None = None
    reward: float | None = None
    lines: tuple[int, int] | None = None
    tokens: str | None = None

    def as_json(self) -> Line:
        """As the page reads it."""
        keys = ("split", "groups", "rollouts", "correct", "reward")
        return {"iteration": self.number, "recorded": self.tokens is not None} | {k: getattr(self, k) for k in keys}


class Index:
    """The iterations of one run, read on as they come. Every ``refresh`` costs what is new; several threads may."""

    def __init__(self, run: Path, find: Find = anywhere):
        self.run = run
        self._find, self._lock = find, Lock()
        self._tail = Tail(run / INDEX)
        self._known: dict[tuple[str, int], Iteration] = {}

    def refresh(self) -> dict[tuple[str, int], Iteration]:
        """All iterations by split and number, in the order in which they were made."""
        with self._lock:
            if self.file(INDEX) is not None:
                replaced, rows = self._tail.rows()
                known = {} if replaced else dict(self._known)
                known |= {(one.split, one.number): one for row in rows if (one := _iteration(row)) is not None}
                self._known = known
            return self._known or self._listed()

    def file(self, name: str) -> Path | None:
        """A file of the run, where it is there and may be read."""
        return self._find(self.run, name)

    def tokens(self, one: Iteration) -> TokenFile | None:
        """The open file of a recorded iteration; None of another."""
        path = self.file(one.tokens) if one.tokens else None
        return TokenFile(path) if path is not None else None

    def get(self, split: str, number: int | None) -> Iteration:
        """An iteration; the newest recorded one for None, or the newest. Raises UsageError where there is none."""
        known = self.refresh()
        own = [one for one in known.values() if one.split == split]
        if not own:
            raise UsageError(f"{self.run.name} has sampled nothing as {split} yet")
        if number is None:
            return next((one for one in reversed(own) if one.tokens), own[-1])
        if (split, number) not in known:
            raise UsageError(f"{self.run.name} has no iteration {number} of {split}; the last is {own[-1].number}")
        return known[split, number]

    def _listed(self) -> dict[tuple[str, int], Iteration]:
        """From the names of files, for runs that keep no index."""
        found = []
        try:
            names = os.listdir(self.run)
        except OSError:
            return {}
        for file in names:
            if match := _SUMMARY.fullmatch(file):
                split = TRAIN if match[2] is None else f"eval/{match[2]}"
                found.append(Iteration(split, int(match[3]), file.removesuffix(SUMMARIES)))
        found.sort(key=lambda one: (one.number, one.split))
        return {(one.split, one.number): one for one in found}


def _iteration(row: Mapping[str, Any]) -> Iteration | None:
    """None of a line that names what lies elsewhere, or is no line of an index."""
    try:
        name, tokens, lines = str(row["name"]), row.get("tokens"), row.get("lines")
        if any("/" in each or each.startswith(".") for each in (name, str(tokens or "x"))):
            return None
        place = (int(lines[0]), int(lines[1])) if lines else None
        known = (row.get("groups"), row.get("rollouts"), row.get("correct"), row.get("reward"))
        return Iteration(str(row["split"]), int(row["iteration"]), name, *known, place, tokens and str(tokens))
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def rollouts_of(index: Index, one: Iteration) -> list[Line]:
    """Every rollout of an iteration as far as it is recorded, in sampling order: ``index``, ``group``, ``sample``,
    ``problem_id``, ``tags``, ``reward``, ``correct``, ``advantage``, ``length``, ``turns``, ``stop_reason``, ``ended``,
    ``discarded``, ``error``, ``metrics``, ``tool_errors``, ``text`` and whether it is ``whole``."""
    if (tokens := index.tokens(one)) is not None:
        with tokens as file:
            prompts = file.prompts()
            return [_of_tokens(i, line, prompts[line["group"]]) for i, line in enumerate(file.lines())]
    texts = _texts(index, one)
    return [_of_summary(i, row, texts) for i, row in enumerate(json_lines(index.file(f"{one.name}{SUMMARIES}")))]


def _of_tokens(index: int, line: Mapping[str, Any], prompt: Mapping[str, Any]) -> Line:
    keys = (
        "group",
        "sample",
        "reward",
        "correct",
        "advantage",
        "stop_reason",
        "ended",
        "discarded",
        "error",
        "metrics",
    )
    turns = line["turns"]
    return {key: line.get(key) for key in keys} | {
        "index": index,
        "problem_id": prompt["problem_id"],
        "tags": prompt["tags"],
        "length": sum(turn["tokens"] for turn in turns),
        "turns": len(turns),
        "tool_errors": int((line.get("metrics") or {}).get(TOOL_ERRORS) or 0),
        "text": "\n".join(turn["text"] for turn in turns),
        "whole": True,
    }


def _of_summary(index: int, row: Mapping[str, Any], texts: Mapping[tuple[int, int], Line]) -> Line:
    steps = row.get("steps") or []
    group, sample = row.get("group_idx", 0), row.get("traj_idx", 0)
    text = texts.get((group, sample), {})
    metrics = row.get("trajectory_metrics") or {}
    errors = [step.get("logs", {}).get("error") for step in steps]
    return {
        "index": index,
        "group": group,
        "sample": sample,
        "problem_id": row.get("problem_id"),
        "tags": row.get("tags") or [],
        "reward": row.get("total_reward"),
        "correct": bool(metrics.get("correct")),
        "advantage": row.get("advantage"),
        "length": sum(step.get("ac_len") or 0 for step in steps),
        "turns": len(steps),
        "stop_reason": row.get("stop_reason"),
        "ended": row.get("ended"),
        "discarded": row.get("discarded"),
        "error": next((error for error in errors if error), None),
        "metrics": metrics,
        "tool_errors": int(metrics.get(TOOL_ERRORS) or 0),
        "text": text.get("completion", ""),
        "whole": False,
    }


def _texts(index: Index, one: Iteration) -> dict[tuple[int, int], Line]:
    """The shortened completions of an iteration by group and sample, where the index says where they lie."""
    if one.lines is None:
        return {}
    found: dict[tuple[int, int], Line] = {}
    group, before = -1, None
    for row in json_lines(index.file(GENERATIONS if one.split == TRAIN else EVALUATIONS), *one.lines):
        if "group" not in row:  # an evaluation: groups follow each other, each from its first sample on
            group += row.get("sample", 0) == 0 or row.get("problem_id") != before
            before = row.get("problem_id")
        found[row.get("group", group), row.get("sample", 0)] = row
    return found


def json_lines(path: Path | None, begin: int = 0, end: int | None = None) -> Iterator[Line]:
    """The objects between two bytes of a file; lines that are none, and a file that is gone, give nothing."""
    if path is None:
        return
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(MOST_LINES if end is None else max(0, min(end - begin, MOST_LINES)))
    except OSError:
        return
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
