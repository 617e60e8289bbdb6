"""``FILE.toml.lock``: the declaration of a comparison of results that retrain did not make.

A verdict needs a declaration that is older than the first result of every declared run. The times of results are those
in the files or else the files' own, which anyone can set: a lock records an intention, it proves nothing.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from os.path import lexists
from pathlib import Path

from pydantic import TypeAdapter

from retrain.config.comparing import Compare, ComparisonFile
from retrain.errors import StorageError, UsageError, listed
from retrain.files import read_json, write_json
from retrain.records.foreign.table import MetricFacts, RunTable
from retrain.records.schema.base import Record, Row
from retrain.verdicts.declaration import DEVIATION, Standing
from retrain.verdicts.table_measure import metric_facts

UNDECLARED = Standing(("nothing was declared before the results",))
NAMED_RUNS, NAMED_KEYS = 6, 8
REQUIRED = {
    "metric": 'metric = "acc"',
    "conditions": 'conditions = ["grpo", "rloo"]',
    "seeds": "seeds = [1, 2, 3, 4, 5, 6]",
    "higher_is_better": "higher_is_better = true",
    "unit": 'unit = "share"',
}


@dataclass(frozen=True, kw_only=True)
class Lock(Record):
    """Content of a lock: the comparison as declared, and a SHA-256 over all of its other fields."""

    format: int = 1
    # Time of the declaration: ISO 8601, and in seconds since the epoch
    time: str
    unix: float
    compare: Row
    results: list[Row]
    # Names of the runs that had results at the time of the declaration
    runs_before: list[str] = field(default_factory=list)
    sha256: str = ""

    @classmethod
    def of(cls, file: ComparisonFile, unix: float, runs_before: Sequence[str] = ()) -> "Lock":
        tables = file.model_dump(mode="json", exclude_none=True)
        time = datetime.fromtimestamp(unix, UTC).isoformat(timespec="seconds")
        lock = cls(time=time, unix=unix, runs_before=list(runs_before), **tables)
        return replace(lock, sha256=lock.digest)

    @property
    def digest(self) -> str:
        content = json.dumps(self.to_row() | {"sha256": ""}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def lock_path(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")


def read_lock(file: Path) -> Lock | None:
    """Return the lock of a comparison file; None if there is none. Raises UsageError for a damaged one."""
    path = lock_path(file)
    if not path.is_file():
        return None
    try:
        lock = TypeAdapter(Lock).validate_python(read_json(path))
        _declared(lock)
        datetime.fromtimestamp(lock.unix, UTC)
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{path} is not the lock of a comparison: delete it to compare without a declaration"
        ) from error
    return lock


def declare(path: Path, file: ComparisonFile, tables: Sequence[RunTable], unix: float) -> list[str]:
    """Write the lock of the comparison file at ``path`` and return lines that say so. ``tables`` are the results that
    exist already; ``unix`` is the time.

    Raises UsageError if there is a lock, or if the file lacks a key that a declaration needs.
    """
    target = lock_path(path)
    if lexists(target):
        raise UsageError(f"{target} exists: a declaration is not changed; delete the lock or use another file name")
    if missing := _missing_keys(file.compare, tables):
        keys = listed([REQUIRED[key] for key in missing], NAMED_KEYS)
        raise UsageError(f"{path} declares no {' and no '.join(missing)}; add below [compare]: {keys}")
    before = [table.name for table in _with_results(file.compare, tables)]
    try:
        write_json(target, Lock.of(file, unix, before).to_row())
    except StorageError as error:
        raise UsageError(f"{error}; put the file where it can be written") from error
    lines = [f"{target}: declared; a verdict needs results that are newer"]
    if file.compare.steps is None and file.compare.replicate == "training":
        lines.append(
            "steps is not declared: a run counts as finished at the last step that is found, also if it trains on"
        )
    if before:
        lines.append(f"there are results already: {listed(before, NAMED_RUNS)} stay exploratory")
    return lines


def _missing_keys(compare: Compare, tables: Sequence[RunTable]) -> list[str]:
    """Return the keys that a declaration lacks. It needs no facts about the metric that retrain or the results know,
    and no seeds if one model of each condition is compared."""
    _, metric = compare.measure
    needless = {"seeds"} if compare.replicate == "none" else set[str]()
    for key in MetricFacts._fields:
        if metric is None or getattr(metric_facts(metric, tables), key) is not None:
            needless.add(key)
    return [key for key in REQUIRED if getattr(compare, key) in (None, []) and key not in needless]


def standing_of(lock: Lock | None, file: ComparisonFile, tables: Sequence[RunTable]) -> Standing:
    """Return the status of the comparison ``file`` of the results in ``tables``, given its lock."""
    if lock is None:
        return UNDECLARED
    reasons = []
    if lock.sha256 != lock.digest:
        reasons.append(f"{DEVIATION}: the lock was edited (its SHA-256 is another one)")
    declared = _declared(lock)
    changed = [
        f"[compare] {key}"
        for key in Compare.model_fields
        if getattr(declared.compare, key) != getattr(file.compare, key)
    ]
    if declared.results != file.results:
        changed.append("[[results]]")
    if changed:
        reasons.append(f"{DEVIATION}: changed after the declaration: {listed(changed, NAMED_KEYS)}")
    runs = _with_results(file.compare, tables)
    if undated := [run.name for run in runs if run.started is None]:
        reasons.append(f"the time of the results is not known ({listed(undated, NAMED_RUNS)})")
    early = [run.name for run in runs if run.name in lock.runs_before or (run.started or lock.unix) < lock.unix]
    if early:
        reasons.append(f"there were results before the declaration ({listed(early, NAMED_RUNS)})")
    return Standing(tuple(reasons))


def lock_note(lock: Lock, file: ComparisonFile, tables: Sequence[RunTable]) -> str:
    """Return a sentence that says when the comparison was declared, and where the times of the results are from."""
    text = f"Declared on {datetime.fromtimestamp(lock.unix, UTC):%Y-%m-%d %H:%M} UTC"
    if all(run.has_times for run in _with_results(file.compare, tables)):
        return f"{text}; the times of the results are those in the files, which anyone can write."
    return f"{text}; the times of the results are those of the files, which copying changes and anyone can set."


def _declared(lock: Lock) -> ComparisonFile:
    """Raises ValueError if the lock holds no comparison."""
    return ComparisonFile.model_validate({"compare": lock.compare, "results": lock.results})


def _with_results(compare: Compare, tables: Sequence[RunTable]) -> list[RunTable]:
    """Return the runs of the declared conditions and seeds that have results."""
    return [
        table
        for table in tables
        if (table.numbers or table.answers)
        and (compare.conditions is None or table.condition in compare.conditions)
        and (compare.seeds is None or table.seed is None or table.seed in compare.seeds)
    ]
