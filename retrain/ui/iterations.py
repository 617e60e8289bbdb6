"""Index the iterations (training steps and evaluations) of a run, and read the rollouts of one iteration.

The index is ``iterations.jsonl``. Runs of earlier releases have none; their index is made from the names of their
summary files. A recorded iteration has all of its rollouts in a file of tokens. Other iterations have summary lines and
the shortened texts of ``emergence/``.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock

from retrain.errors import CheckpointError, UsageError
from retrain.files import Stamp, dumps, stamp_of
from retrain.records import kinds
from retrain.records.foreign import FindFile
from retrain.records.kinds import FieldKinds, checked
from retrain.records.reader import summary_files
from retrain.records.schema.base import Row
from retrain.records.schema.layout import EVALUATIONS, GENERATIONS, ITERATIONS, SUMMARIES, TRAIN
from retrain.records.tokens import TokenFile
from retrain.util.jsonl import Tail, json_lines

TOOL_ERRORS = "tools/tool_errors"
CACHED_FILES = 16  # Recorded iterations whose groups by problem are cached
_COMPLETION: FieldKinds = {kinds.is_count: "step group sample", kinds.are_texts: "tags", kinds.is_text: "completion"}
_ROLLOUT: FieldKinds = {
    kinds.is_count: "group_idx traj_idx",
    kinds.is_number: "total_reward advantage",
    kinds.is_object: "trajectory_metrics",
    kinds.are_texts: "tags",
    kinds.are_objects: "steps",
    kinds.is_text: "stop_reason ended",
}
_STEP: FieldKinds = {kinds.is_number: "ac_len ob_len", kinds.is_object: "logs"}
ROLLOUT_KEYS = (
    "group", "sample", "reward", "correct", "advantage", "stop_reason", "ended", "discarded", "error", "metrics",
)  # fmt: skip
_COUNTS = {"groups": kinds.is_count, "rollouts": kinds.is_count, "correct": kinds.is_count, "reward": kinds.is_number}


@dataclass(frozen=True)
class IterationEntry:
    """A line of the index. ``lines``: byte range of its shortened texts; ``tokens``: name of its file of tokens. Both,
    and the counts, are None if the index does not have them."""

    split: str
    number: int
    name: str
    groups: int | None = None
    rollouts: int | None = None
    correct: int | None = None
    reward: float | None = None
    lines: tuple[int, int] | None = None
    tokens: str | None = None

    def as_json(self) -> Row:
        keys = ("split", "groups", "rollouts", "correct", "reward")
        return {"iteration": self.number, "recorded": self.tokens is not None} | {k: getattr(self, k) for k in keys}


class Index:
    """Iterations of one run; thread-safe. ``refresh`` reads only what is new.

    ``location`` is the name of the run's directory in errors.
    """

    def __init__(self, run: Path, find: FindFile, location: str):
        self.run, self.location = run, location
        self._find, self._lock = find, Lock()
        self._tail = Tail(run / ITERATIONS)
        self._iterations: dict[tuple[str, int], IterationEntry] = {}

    def refresh(self) -> Mapping[tuple[str, int], IterationEntry]:
        """Return all iterations by split and number, in the order in which they were made. The mapping is never
        mutated."""
        with self._lock:
            if self.file(ITERATIONS) is None:
                self._tail, self._iterations = Tail(self.run / ITERATIONS), {}
                return self._listed()
            replaced, rows = self._tail.rows()
            if replaced or rows:
                read = {(one.split, one.number): one for row in rows if (one := _iteration(row)) is not None}
                self._iterations = read if replaced else self._iterations | read
            return self._iterations or self._listed()

    def of_split(self, split: str) -> list[IterationEntry]:
        return [iteration for iteration in self.refresh().values() if iteration.split == split]

    def file(self, name: str) -> Path | None:
        return self._find(self.run, name)

    def tokens(self, iteration: IterationEntry) -> TokenFile | None:
        path = self.file(iteration.tokens) if iteration.tokens else None
        return TokenFile(path, f"{self.location}/{iteration.tokens}") if path is not None else None

    def groups(self, iteration: IterationEntry, problem: str) -> Sequence[int]:
        path = self.file(iteration.tokens) if iteration.tokens else None
        if path is None:
            return ()
        return _groups(path, f"{self.location}/{iteration.tokens}", stamp_of(path)).get(problem, ())

    def lines(self, name: str, fields: FieldKinds, begin: int = 0, end: int | None = None) -> Iterator[Row]:
        """Yield the JSON objects between two bytes of a file; skips other lines, yields nothing if the file is missing.
        Raises CheckpointError if a value does not have the kind that ``fields`` says."""
        for at, row in json_lines(self.file(name), begin, end):
            try:
                yield checked(row, {}, fields)
            except ValueError as error:
                raise CheckpointError(f"{self.location}/{name} is damaged: the line at byte {at}: {error}") from error

    def summaries(self, iteration: IterationEntry) -> Iterator[Row]:
        name = f"{iteration.name}{SUMMARIES}"
        for row in self.lines(name, _ROLLOUT):
            try:
                row["steps"] = [checked(step, {}, _STEP) for step in row.get("steps") or ()]
            except ValueError as error:
                raise CheckpointError(f"{self.location}/{name} is damaged: in a step, {error}") from error
            yield row

    def completions(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[Row]:
        return self.lines(name, _COMPLETION, begin, end)

    def get(self, split: str, number: int | None) -> IterationEntry:
        """Return the iteration ``number``; for None the newest recorded iteration, or the newest one if none is
        recorded. Raises UsageError if it does not exist."""
        iterations = {iteration.number: iteration for iteration in self.of_split(split)}
        if not iterations:
            raise UsageError(f"{self.run.name} has sampled nothing as {split} yet")
        *_, newest = iterations.values()
        if number is None:
            return next((each for each in reversed(iterations.values()) if each.tokens), newest)
        if number not in iterations:
            raise UsageError(f"{self.run.name} has no iteration {number} of {split}; the last is {newest.number}")
        return iterations[number]

    def _listed(self) -> dict[tuple[str, int], IterationEntry]:
        files = summary_files(self.run)
        return {(split, step): IterationEntry(split, step, name.removesuffix(SUMMARIES)) for split, step, name in files}


def _iteration(row: Row) -> IterationEntry | None:
    try:
        name, tokens, lines = str(row["name"]), row.get("tokens"), row.get("lines")
        if any("/" in each or each.startswith(".") for each in (name, str(tokens or "x"))):
            return None
        ends = (lines[0], lines[1]) if lines and all(kinds.is_count(each) for each in lines[:2]) else None
        counts = {key: value for key, kind in _COUNTS.items() if kind(value := row.get(key))}
        number = row["iteration"]
        iteration = IterationEntry(str(row["split"]), number, name, lines=ends, tokens=tokens and str(tokens), **counts)
        return iteration if kinds.is_count(number) else None
    except (KeyError, TypeError, IndexError):
        return None


def rollouts_of(index: Index, iteration: IterationEntry) -> list[Row]:
    """Return all rollouts of an iteration in sampling order, as far as they are recorded. ``whole``: their ``prompt``
    and ``text`` are complete."""
    if (tokens := index.tokens(iteration)) is not None:
        with tokens as file:
            prompt = cache(file.prompt)
            return [_of_tokens(i, line, prompt(line["group"])) for i, line in enumerate(file.lines())]
    texts = _texts(index, iteration)
    return [_of_summary(i, row, texts) for i, row in enumerate(index.summaries(iteration))]


@lru_cache(CACHED_FILES)
def _groups(path: Path, name: str, stamp: Stamp | None) -> Mapping[str, Sequence[int]]:
    by_problem: dict[str, list[int]] = defaultdict(list)
    with TokenFile(path, name) as file:
        for group, prompt in enumerate(file.prompts()):
            by_problem[prompt["problem_id"]].append(group)
    return dict(by_problem)


def _of_tokens(index: int, line: Row, prompt: Row) -> Row:
    turns = line["turns"]
    return {key: line.get(key) for key in ROLLOUT_KEYS} | {
        "index": index,
        "problem_id": prompt["problem_id"],
        "tags": prompt["tags"],
        "length": sum(turn["tokens"] for turn in turns),
        "turns": len(turns),
        "tool_errors": _tool_errors(line["metrics"]),
        "prompt": "\n".join(_content(message) for message in prompt["messages"]),
        "text": "\n".join(turn["text"] for turn in turns),
        "whole": True,
    }


def _of_summary(index: int, row: Row, texts: Mapping[tuple[int, int], Row]) -> Row:
    steps = row.get("steps") or []
    group, sample = row.get("group_idx", 0), row.get("traj_idx", 0)
    text = texts.get((group, sample), {})
    metrics = row.get("trajectory_metrics") or {}
    errors = [(step.get("logs") or {}).get("error") for step in steps]
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
        "tool_errors": _tool_errors(metrics),
        "prompt": str(text.get("prompt") or ""),
        "text": text.get("completion", ""),
        "whole": False,
    }


def _content(message: Row) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else dumps(content)


def _tool_errors(metrics: Row) -> int:
    value = metrics.get(TOOL_ERRORS)
    return int(value) if kinds.is_number(value) else 0


def _texts(index: Index, iteration: IterationEntry) -> dict[tuple[int, int], Row]:
    """Return the shortened completions of an iteration by group and sample; {} if the index does not locate them."""
    if iteration.lines is None:
        return {}
    texts: dict[tuple[int, int], Row] = {}
    group, before = -1, None
    for row in index.completions(GENERATIONS if iteration.split == TRAIN else EVALUATIONS, *iteration.lines):
        if row.get("group") is None:  # an evaluation: a group begins at a first sample
            group += not row.get("sample") or row.get("problem_id") != before
            before = row.get("problem_id")
        texts[group if row.get("group") is None else row["group"], row.get("sample") or 0] = row
    return texts
