"""Gather the rows of other tools' results into a table for each run."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple, TypeVar

from retrain.config.comparing import Compare, Results
from retrain.errors import UsageError, listed
from retrain.records.foreign import condition_and_seed
from retrain.records.foreign.paths import NothingFound, ResultFile, RunFiles, find_runs, recognise
from retrain.records.foreign.table import HELDOUT_SET, Format, Request, ResultRow, RunState, RunTable, Steps
from retrain.records.schema.base import Values

STEPS: dict[str, Steps] = {"final": "ends", "last3": "last3", "auc": "all"}  # Steps that a summary needs
STATES: tuple[RunState, ...] = ("done", "unfinished", "failed")  # The last of these in a run's rows is its state
NO_STEP = -1  # Step of rows that name none, until all rows are read
MISSING = math.nan  # In place of an answer that no row has; NaN in the files becomes None
MOST_SAMPLES = 100_000
MOST_NAMES = 10

Name = TypeVar("Name", str, int)
RunKey = tuple[str, int | None, str]  # Condition, seed, and the name of a run without a seed


class Place(NamedTuple):
    """Identity of one value in the results."""

    run: RunKey
    set: str
    metric: str
    step: int
    problem: str | None
    sample: int


@dataclass
class _Run:
    """A run whose rows are being gathered."""

    table: RunTable
    # File, directory or pattern in which it was found
    origin: str
    # Steps whose answers are kept, and the step at which the run must end
    steps: Steps
    end: int | None
    states: set[RunState] = field(default_factory=set)
    # Times of the values in formats in which the latest value counts
    times: dict[Place, float] = field(default_factory=dict)
    # Earliest time in the rows
    started: float = math.inf
    # All its files, also those of steps that are not read
    matched: list[Path] = field(default_factory=list)

    def add(self, place: Place, row: ResultRow, latest_counts: bool) -> bool:
        """Add a value. Return False if it contradicts an earlier value of the same place."""
        value = row.value if row.value is not None and math.isfinite(row.value) else None
        key, time = (place.set, place.metric), row.time if latest_counts else None
        if place.problem is None:
            values, index = self.table.numbers.setdefault(key, {}), place.step
            old = values.get(index, MISSING)
        else:
            values, index = self._grades(key, place), place.sample
            if values is None:
                return True
            old = values[index]
        if old is None or not math.isnan(old):
            if old != value and time is None:
                return False
            if time is not None and time < self.times.get(place, -math.inf):
                return True
        values[index] = value
        if time is not None:
            self.times[place] = time
        return True

    def _grades(self, key: tuple[str, str], place: Place) -> list[float | None] | None:
        """Return the grades of the place's problem, with room for its sample; None if its step is not needed."""
        steps = self.table.answers.setdefault(key, {})
        if place.step not in steps:
            needed = needed_steps((*steps, place.step), self.steps, self.end)
            if place.step not in needed:
                return None
            for step in steps.keys() - needed:
                del steps[step]
            steps[place.step] = {}
        grades = steps[place.step].setdefault(str(place.problem), [])
        grades.extend([MISSING] * (place.sample + 1 - len(grades)))
        return grades

    def finish(self) -> RunTable:
        """Return the table. Rows without a step are of step 0 if no row of the run has a step."""
        table = self.table
        by_step: list[dict[int, object]] = [*table.numbers.values(), *table.answers.values()]  # pyright: ignore
        if {NO_STEP} < {step for values in by_step for step in values}:
            raise UsageError(f"{table.name} ({self.origin}): some rows name a step and some do not")
        for values in by_step:
            if NO_STEP in values:
                values[0] = values.pop(NO_STEP)
        for steps in table.answers.values():
            for problems in steps.values():
                for problem, grades in problems.items():
                    problems[problem] = [grade for grade in grades if grade is None or not math.isnan(grade)]
        for state in STATES:
            if state in self.states:
                table.state = state
        table.has_times = math.isfinite(self.started)
        written = [path.stat().st_mtime for path in self.matched]
        table.started = self.started if table.has_times else min(written, default=None)
        return table


def collect(
    results: Sequence[Results], compare: Compare, base: Path, *, allow_missing: bool = False, every_step: bool = False
) -> list[RunTable]:
    """Return a table for each run, sorted by condition and seed, with the values of the deciding metric.

    ``base``: directory to which the paths of ``results`` are relative. All tables have one set and one metric. Answers
    are kept at the steps that the metric needs, or at ``every_step``. Raises UsageError for paths that match nothing
    (not with ``allow_missing``), unknown formats, contradictions, and a metric that is missing or ambiguous.
    """
    sources: list[RunFiles] = []
    for entry in results:
        try:
            sources += find_runs(entry, base)
        except NothingFound:
            if not allow_missing:
                raise
    collector = _Collector(compare, sources, "all" if every_step else STEPS[compare.measure[0]])
    for files in sources:
        collector.read(files)
    if not allow_missing or collector.keys:
        collector.require_one_metric()
    runs = sorted(collector.runs.items(), key=lambda item: (item[0][0], -1 if item[0][1] is None else item[0][1]))
    return [run.finish() for _, run in runs]


class _Collector:
    def __init__(self, compare: Compare, sources: Sequence[RunFiles], steps: Steps):
        self.compare, self.sources = compare, sources
        self.steps: Steps = steps
        self.metric = compare.measure[1]
        self.runs: dict[RunKey, _Run] = {}
        # Files that name no run and have no rows of the metric
        self.without_rows: list[str] = []

    def read(self, files: RunFiles) -> None:
        """Read the files of one source, and add their rows to its run or runs."""
        of_source: dict[RunKey, _Run] = {}
        opened, has_empty = self._opened(files)
        form, config = None, dict[str, object]()
        for form, file in opened:
            config, of_file = form.config(file.path), dict[RunKey, _Run]()
            for place, row in self._rows(files, form, file, config):
                if place.run not in of_file:
                    of_file[place.run] = self._run(files, place.run, row)
                self._add(of_file[place.run], place, row, form, file.path)
            facts = form.facts(file.path)
            for run in of_file.values():
                run.states.add(config.get("state", "unknown"))
                run.table.facts.update(facts)
                run.table.config = {**run.table.config, **config}
                run.table.files.append(file.path)
                run.table.tool = form.tool
            of_source |= of_file
        if not of_source and (files.is_named or files.fallback):  # a run without rows
            row = ResultRow("", None)
            key = self._key(files, row, Path(files.origin), form, config)
            of_source[key] = self._run(files, key, row)
        elif not of_source:
            self.without_rows.append(files.origin)
        for run in of_source.values():
            run.matched += [file.path for file in files.files]
            run.states.add("failed" if has_empty or not opened else "unknown")

    def _add(self, run: _Run, place: Place, row: ResultRow, form: Format, path: Path) -> None:
        if not 0 <= row.sample <= MOST_SAMPLES:
            raise UsageError(f"{path}:{row.line}: sample {row.sample} is no index among the answers to a problem")
        if row.time is not None and row.time < run.started:
            run.started = row.time
        run.states.add(row.state)
        if self._is_needed(place) and not run.add(place, row, form.latest_counts):
            first = next(where for other, where in self._places() if other == place)
            answer = "" if place.problem is None else f", problem {place.problem}, answer {place.sample}"
            step = "" if place.step == NO_STEP else f", step {place.step}"
            raise UsageError(
                f"{first} and {place_of(path, row)} have different values of {place.metric} ({run.table.name}, set "
                f"{place.set}{step}{answer}); remove one of them, or, if they are of two runs, name the "
                "run or its seed in the path ({run}, {seed}) or in the rows"
            )

    def _is_needed(self, place: Place) -> bool:
        return self.metric is None or self.metric in (place.metric, f"{place.set}/{place.metric}")

    def _opened(self, files: RunFiles) -> tuple[list[tuple[Format, ResultFile]], bool]:
        """Return the files of a run that are read, with their formats, and whether one at these steps is empty."""
        at_steps = self._at_needed_steps(files.files)
        by_path = {file.path: file for file in at_steps if file.path.is_dir() or file.path.stat().st_size}
        formats: dict[str, tuple[Format, list[Path]]] = {}
        for path in by_path:
            form = files.format or recognise(path)
            formats.setdefault(form.tool, (form, []))[1].append(path)
        opened = [(form, by_path[path]) for form, paths in formats.values() for path in form.choose(paths)]
        return opened, len(by_path) < len(at_steps)

    def _at_needed_steps(self, files: Sequence[ResultFile]) -> list[ResultFile]:
        """Leave out files whose path names a step that is not needed."""
        steps: dict[str | None, set[int]] = {}
        for file in files:
            if file.step is not None:
                steps.setdefault(file.set, set()).add(file.step)
        needed = {name: needed_steps(of_set, self.steps, self.compare.steps) for name, of_set in steps.items()}
        return [file for file in files if file.step is None or file.step in needed.get(file.set, ())]

    def _rows(
        self, files: RunFiles, form: Format, file: ResultFile, config: Values
    ) -> Iterator[tuple[Place, ResultRow]]:
        """Yield the rows of a file with their places."""
        metric = None if self.metric and "/" in self.metric else self.metric  # a slash may divide set and metric
        columns, where = files.entry.columns, files.entry.where
        request = Request(metric, self.steps, self.compare.steps, self.metric, columns, where)
        names, key = None, None
        for row in form.rows(file.path, request):
            if key is None or names != (row.condition, row.seed, row.run):
                names, key = (row.condition, row.seed, row.run), self._key(files, row, file.path, form, config)
            set_name, step = row.set, row.step
            if file.set is not None and set_name != file.set:
                set_name = agreed("set", file.set, None if set_name == HELDOUT_SET else set_name, file.path, row)
            if step != file.step:
                step = agreed("step", file.step, step, file.path, row)
            if step is not None and step < 0:
                raise UsageError(f"{file.path}:{row.line}: the step {step} is negative")
            step = NO_STEP if step is None else step
            yield Place(key, str(set_name), row.metric, step, row.problem, row.sample), row

    def _key(self, files: RunFiles, row: ResultRow, path: Path, form: Format | None, config: Values) -> RunKey:
        """Return condition, seed and name of the run to which a row belongs.

        The path and the rows come first, then what the section says, the name of directory or file, and the settings.
        """
        of_row = None if files.condition and form and form.names_models else row.condition
        condition = agreed("condition", files.condition, of_row, path, row) or files.entry.condition
        seed = agreed("seed", files.seed, row.seed, path, row)
        seed = files.entry.seed if seed is None else seed
        run = agreed("run", files.run, row.run, path, row)
        if form and form.names_models and condition and condition == row.condition and "seed" not in config:
            condition, of_name = condition_and_seed(condition)
            seed = of_name if seed is None else seed
        if condition is None:
            names = [name for name in (run, files.fallback) if name and not name.isdigit()]
            has_seed = (name for name in names if condition_and_seed(name)[1] is not None)
            condition, of_name = condition_and_seed(next(has_seed, *names[:1]) if names else "")
            seed = of_name if seed is None else seed
        if not condition:
            columns = form.columns(path) if form else ()
            of_table = ""
            if columns:
                of_table = f' or, of {listed(columns, MOST_NAMES)}, columns = {{ condition = "{columns[0]}" }}'
            raise UsageError(
                f"{path} names no condition: put {{condition}} into the path; or write into a file NAME.toml, below "
                f'[[results]], path = "{files.entry.path}" and condition = "…"{of_table}, and type: '
                "retrain compare NAME.toml"
            )
        seed = config.get("seed") if seed is None else seed
        return condition, seed, "" if seed is not None else run or ""

    def _run(self, files: RunFiles, key: RunKey, row: ResultRow) -> _Run:
        """Return the run with this key. Raises UsageError if it was found elsewhere before."""
        condition, seed, _ = key
        run = files.run or row.run
        name = run or (condition if seed is None else f"{condition} seed {seed}")
        end = self.compare.steps
        known = self.runs.setdefault(key, _Run(RunTable(condition, seed, name), files.origin, self.steps, end))
        if known.origin != files.origin or known.table.name != name:
            same = known.origin == files.origin
            places = (known.table.name, f"{name} in {files.origin}") if same else (known.origin, files.origin)
            of_seed = "" if seed is None else f" with seed {seed}"
            raise UsageError(f"two runs of {condition}{of_seed}: {' and '.join(places)}; name the one that counts")
        return known

    def _places(self) -> Iterator[tuple[Place, str]]:
        """Yield the places of all rows that were read, in the same order, with file and line."""
        for files in self.sources:
            for form, file in self._opened(files)[0]:
                for place, row in self._rows(files, form, file, form.config(file.path)):
                    yield place, place_of(file.path, row)

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Sets and metrics of all runs."""
        return {key for run in self.runs.values() for key in (*run.table.numbers, *run.table.answers)}

    def require_one_metric(self) -> None:
        """Raise UsageError unless the runs have exactly one set and metric of the requested name."""
        keys = self.keys
        if len(keys) == 1 and self.without_rows:
            raise UsageError(f"no rows that are asked for in {', '.join(self.without_rows)}")
        if len(keys) == 1:
            return
        if keys:
            names = shortest(keys)
            options = ", ".join(f"--metric {name}" for name in names[:MOST_NAMES])
            others = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            raise UsageError(f"the results have {len(names)} metrics; name one: {options}{others}")
        wanted, self.metric = self.metric, None
        names = shortest({(place.set, place.metric) for place, _ in self._places()})
        if wanted is None or not names:
            raise UsageError(f"no results in {listed([files.origin for files in self.sources], 5)}")
        close = get_close_matches(wanted, names, n=3, cutoff=0.4) or names[:MOST_NAMES]
        raise UsageError(f"no file has the metric {wanted}; type --metric {' or --metric '.join(close)}")


def needed_steps(steps: Iterable[int], keep: Steps, end: int | None) -> set[int]:
    """Return the first step and the last or the last three, or all. With ``end``, the last ones up to it also count."""
    ordered = sorted(set(steps))
    if keep == "all":
        return set(ordered)
    number = 1 if keep == "ends" else 3
    until_end = [step for step in ordered if end is None or step <= end]
    return {*ordered[:1], *until_end[-number:], ordered[-1]}


def place_of(path: Path, row: ResultRow) -> str:
    return f"{path}:{row.line}" if row.line else str(path)


def agreed(field: str, of_path: Name | None, of_row: Name | None, path: Path, row: ResultRow) -> Name | None:
    """Return what path or row says. Raises UsageError if they contradict each other."""
    if of_path is not None and of_row is not None and of_path != of_row:
        raise UsageError(f"{place_of(path, row)}: the path names the {field} {of_path}, and the file {of_row}")
    return of_row if of_path is None else of_path


def shortest(keys: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of metrics, with their set where several sets have the metric."""
    sets: dict[str, set[str]] = {}
    for set_name, metric in keys:
        sets.setdefault(metric, set()).add(set_name)
    return sorted(
        metric if len(of_metric) == 1 else f"{set_name}/{metric}"
        for metric, of_metric in sets.items()
        for set_name in of_metric
    )
