"""The registry of a folder of campaigns: a JSON-lines file with every declared comparison and every finished run.

Lines are only added. The registry therefore still shows a comparison whose directory was deleted, a comparison that was
declared again, and seeds that were declared after their results were known.
"""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from retrain.errors import NotOurs, StorageError, listed, plural
from retrain.files import append_jsonl, dumps, iter_jsonl, writing
from retrain.ownership import owner_of
from retrain.records.observer import Observer
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import RunEntry
from retrain.records.schema.layout import EVALS, REGISTRY
from retrain.records.schema.registry import Declaration, FinishedRun, RegistryLine
from retrain.util.jsonl import json_lines

# Values of ``registry`` in a manifest: OFF if the campaign is not registered, ON before its declaration is written;
# after that the value is the declaration's time
OFF, ON = "off", "on"
DECLARED = ("max_steps", "seeds", "baseline", "primary_metric", "equivalence_margin", "sequential")
NOT_REGISTERED = (
    f"Not registered (--no-registry, or {REGISTRY} could not be written): whether this comparison was declared before "
    "is not known."
)
ORDINALS = ("", "First", "Second", "Third", "Fourth", "Fifth", "Sixth", "Seventh", "Eighth", "Ninth")
NAMED_SEEDS, NAMED_DIRECTORIES = 8, 4


class Registry:
    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        self.path = self.directory.parent / REGISTRY
        self._own_lines: set[str] | None = None

    @property
    def owner(self) -> str:
        owner = owner_of(self.directory)
        return owner.id if owner else ""

    def check(self) -> None:
        """Raise NotOurs if the registry's path has a file of another program."""
        first = next((row for _, row in json_lines(self.path)), {})
        is_empty = not self.path.exists() or not self.path.stat().st_size
        if self.path.is_symlink() or not (is_empty or "owner" in first):
            advice = "move it away, or train with --no-registry, which every output says"
            raise NotOurs(f"{self.path} is not a registry of retrain: {advice}")

    def prepare(self, observer: Observer) -> str:
        """Create the file and return ON; warn and return OFF if it cannot be written."""
        try:
            with self._locked():
                return ON
        except StorageError as error:
            observer.message(f"{error}: the campaign is not registered", "warning")
            return OFF

    def declare(self, declared: Values, data: str) -> str:
        """Add a declaration, unless the campaign's last line is the same declaration; return the time in its line."""
        with self._locked():
            settings = {key: declared[key] for key in DECLARED}
            line = Declaration(**self._begin("declaration", data), conditions=declared["settings"], **settings)
            before = [other for other in self.lines() if other.owner == line.owner]
            if before and isinstance(before[-1], Declaration) and _content(before[-1]) == _content(line):
                return before[-1].time
            append_jsonl(self.path, [line.to_row()])
            return line.time

    def _begin(self, kind: str, data: str) -> Row:
        time = datetime.now(UTC).isoformat()
        return {"kind": kind, "time": time, "owner": self.owner, "directory": self.directory.name, "data": data}

    def finish(self, entry: RunEntry, declared: Values) -> None:
        """Add a line for a finished run, unless the same line exists: if the process was killed after adding it, this
        is called again on resume."""
        result: dict[str, float | None] = {}
        for row in iter_jsonl(self.directory / entry.path / EVALS):
            result[row["name"]] = row.get(f"eval/{row['name']}/correct_rate")
        seal = entry.seal or {}
        line = FinishedRun(
            **self._begin("run", seal.get("data", "")),
            run_id=entry.run_id,
            condition=declared["settings"].get(entry.label, ""),
            max_steps=entry.max_steps,
            seed=entry.seed or 0,
            result=result,
            sha256=seal.get("evaluations_sha256", ""),
        )
        with self._locked():
            if self._own_lines is None:  # read once: only this process adds lines of its campaign
                self._own_lines = {dumps(_content(other)) for other in self.lines() if other.owner == line.owner}
            if (content := dumps(_content(line))) not in self._own_lines:
                append_jsonl(self.path, [line.to_row()])
                self._own_lines.add(content)

    def lines(self) -> list[RegistryLine]:
        """Return all lines in the order of the file, without damaged ones."""
        kinds: Mapping[object, type[RegistryLine]] = {"declaration": Declaration, "run": FinishedRun}
        lines = []
        for _, row in json_lines(self.path):
            with suppress(TypeError):
                if kind := kinds.get(row.get("kind")):
                    lines.append(kind.from_row(row))
        return lines

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file for writing. Create it if it is missing; add a newline if a killed process left its last line
        half written."""
        with writing(self.path), open(self.path, "ab+") as file:
            with suppress(OSError):  # a file system without locks; each line is appended by one write
                fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, 2):
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
                    file.flush()
            yield


def _content(line: RegistryLine) -> Row:
    return line.to_row() | {"time": ""}


@dataclass(frozen=True)
class History:
    """Facts about a campaign from the registry: protocol deviations as clauses, notes as sentences."""

    deviations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def history(directory: Path, manifest: Values) -> History:
    """Return deviations and notes from the registry beside a campaign; none if a version without registry declared the
    campaign."""
    registered = manifest.get("registry")
    if not registered:
        return History()
    if registered == OFF:
        return History(notes=[NOT_REGISTERED])
    registry = Registry(directory)
    owner, lines = registry.owner, registry.lines()
    position = next((n for n, line in enumerate(lines) if line.owner == owner and isinstance(line, Declaration)), None)
    if position is None:
        begun = registered != ON
        return History(notes=[f"{REGISTRY} beside the directory does not have its declaration."] if begun else [])
    first = lines[position]
    assert isinstance(first, Declaration)
    before = [line for line in lines[:position] if line.owner != owner]
    mine = [line for line in lines[position + 1 :] if line.owner == owner]
    clauses = [*_declared_again(mine), *_seeds_known_before(first, before), *_other_than_finished(mine, manifest)]
    return History(clauses, _earlier_declarations(first, before, registry.path))


def _declared_again(mine: Sequence[RegistryLine]) -> list[str]:
    places = [n for n, line in enumerate(mine) if isinstance(line, Declaration)]
    finished = sum(isinstance(line, FinishedRun) for line in mine[: places[-1]]) if places else 0
    return [f"declared anew in its directory after {plural(finished, 'run')} had finished there"] if finished else []


def _seeds_known_before(first: Declaration, before: Sequence[RegistryLine]) -> list[str]:
    """Return a clause if some seeds were declared after runs with them had finished in other directories, under at
    least two of the conditions. A campaign with exactly the seeds of an earlier one repeats it without choosing seeds,
    so there is no clause."""
    if any(isinstance(line, Declaration) and first.repeats(line) for line in before):
        return []
    finished = [line for line in before if isinstance(line, FinishedRun) and line.belongs_to(first)]
    early = [seed for seed in first.seeds if len({line.condition for line in finished if line.seed == seed}) > 1]
    if not early:
        return []
    seeds = listed(list(map(str, sorted(early))), NAMED_SEEDS)
    directories = listed(list(dict.fromkeys(line.directory for line in finished)), NAMED_DIRECTORIES)
    return [f"seeds had finished before they were declared ({seeds}; in {directories})"]


def _other_than_finished(mine: Sequence[RegistryLine], manifest: Values) -> list[str]:
    entries = {row["run_id"]: RunEntry.from_row(row) for row in manifest["runs"]}
    finished: dict[str, list[FinishedRun]] = {}
    for line in mine:
        if isinstance(line, FinishedRun):
            finished.setdefault(line.run_id, []).append(line)
    clauses = []
    for run_id, lines in finished.items():
        last = lines[-1]
        if change := _change_since(last, entries.get(run_id)):
            result = ", ".join(f"{value:.4g}" for value in last.result.values() if value is not None)
            clauses.append(f"{run_id} had finished" + (f" with {result}" if result else "") + f" and {change}")
        if len({line.sha256 for line in lines if line.max_steps == last.max_steps}) > 1:
            clauses.append(f"{run_id} has finished more than once, with different evaluations")
    return clauses


def _change_since(last: FinishedRun, entry: RunEntry | None) -> str:
    if entry is None:
        return "is not in the manifest"
    if entry.max_steps > last.max_steps:  # continued with more steps
        return ""
    if entry.state in ("failed", "stopped"):
        return f"is {entry.state}"
    is_same = (entry.seal or {}).get("evaluations_sha256", "") == last.sha256
    return "" if entry.state != "done" or is_same else "has other evaluations"


def _earlier_declarations(first: Declaration, before: Sequence[RegistryLine], path: Path) -> list[str]:
    """Return a sentence that numbers this declaration among those of the same comparison and names the earlier ones;
    [] if it is the first."""
    earlier = {
        line.owner: line for line in before if isinstance(line, Declaration) and line.comparison == first.comparison
    }
    if not earlier:
        return []
    number = len(earlier) + 1
    ordinal = ORDINALS[number] if number < len(ORDINALS) else f"{number}th"
    names = []
    for owner, line in earlier.items():
        mark = owner_of(path.parent / line.directory)
        finished = sum(isinstance(run, FinishedRun) and run.owner == owner for run in before)
        gone = "" if mark and mark.id == owner else ", directory gone"
        names.append(f"{line.directory} ({plural(len(line.seeds), 'seed')}, {plural(finished, 'run')} finished{gone})")
    return [f"{ordinal} declaration of this comparison; before it: {listed(names, NAMED_DIRECTORIES)}."]
