"""Gather the rows of other tools' results into a table for each run."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from retrain.config.comparing import Compare, Results
from retrain.errors import UsageError, listed
from retrain.records.foreign import condition_and_seed
from retrain.records.foreign.paths import NothingFound, ResultFile, RunFiles, find_runs, recognise
from retrain.records.foreign.table import Format, ReadRequest, ResultRow, RunState, RunTable, Steps

STEPS: dict[str, Steps] = {"final": "ends", "last3": "last3", "auc": "all"}  # Steps that a summary needs
STATES: tuple[RunState, ...] = ("unknown", "done", "unfinished", "failed")  # The last of these in its rows is a run's
NO_STEP = -1  # Step of rows that name none, until all rows are read
MOST_NAMES = 10

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
class _GatheredRun:
    """A run whose rows are being gathered."""

    table: RunTable
    # File, directory or pattern in which it was found
    origin: str
    values: dict[Place, float | None] = field(default_factory=dict)
    # Times of the values in formats in which the latest value counts
    times: dict[Place, float] = field(default_factory=dict)
    states: set[RunState] = field(default_factory=set)
    # Earliest time in the rows
    started: float = math.inf

    def add(self, place: Place, row: ResultRow, latest_counts: bool) -> bool:
        """Add a value. Return False if it contradicts an earlier value of the same place."""
        value = row.value if row.value is not None and math.isfinite(row.value) else None
        time = row.time if latest_counts else None
        if time is None:
            return self.values.setdefault(place, value) == value
        if time >= self.times.get(place, -math.inf):
            self.values[place], self.times[place] = value, time
        return True

    def finish(self, request: ReadRequest) -> RunTable:
        """Return the table, with the answers at the needed steps. Rows without a step are of step 0 if no row of the
        run has a step."""
        table, with_answers = self.table, dict[tuple[str, str], set[int]]()
        if {NO_STEP} < {place.step for place in self.values}:
            raise UsageError(f"{table.name} ({self.origin}): some rows name a step and some do not")
        for place in self.values:
            if place.problem is not None:
                with_answers.setdefault((place.set, place.metric), set()).add(place.step)
        needed = {key: request.needed_steps(steps) for key, steps in with_answers.items()}
        for place, value in sorted(self.values.items(), key=lambda item: item[0].sample):
            key, step = (place.set, place.metric), 0 if place.step == NO_STEP else place.step
            if place.problem is None:
                table.numbers.setdefault(key, {})[step] = value
            elif place.step in needed[key]:
                problems = table.answers.setdefault(key, {}).setdefault(step, {})
                problems.setdefault(place.problem, []).append(value)
        self.values.clear()
        table.state = max(self.states, key=STATES.index)
        table.has_times = math.isfinite(self.started)
        if table.has_times:
            table.started = self.started
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
    return [run.finish(collector.request) for _, run in runs]


class _Collector:
    def __init__(self, compare: Compare, sources: Sequence[RunFiles], steps: Steps):
        self.sources = sources
        self.request = ReadRequest(compare.measure[1], steps, compare.steps)
        self.runs: dict[RunKey, _GatheredRun] = {}
        # Sets and metrics of all runs
        self.keys: set[tuple[str, str]] = set()
        # Files that name no run and have no rows of the metric
        self.without_rows: list[str] = []

    def read(self, files: RunFiles) -> None:
        """Read the files of one source, and add their rows to its run or runs."""
        opened, runs = self._opened(files), dict[RunKey, _GatheredRun]()
        for form, file in opened:
            for place, row in self._rows(files, form, file):
                if place.run not in runs:
                    runs[place.run] = self._run(files, place.run, row.run)
                self._add(runs[place.run], place, row, form, file.path)
        if not runs:  # a run without rows
            if not (files.condition or files.run or files.fallback):
                self.without_rows.append(files.origin)
                return
            key = self._key(files, ResultRow("", None), Path(files.origin))
            runs[key] = self._run(files, key, None)
        facts = {name: fact for form, file in opened for name, fact in form.facts(file.path).items()}
        written = [file.path.stat().st_mtime for file in files.files]
        for run in runs.values():
            run.states.add("unknown" if opened else "failed")
            run.table.facts.update(facts)
            run.table.files += [file.path for _, file in opened]
            run.table.tool = opened[-1][0].tool if opened else ""
            run.table.started = min(written, default=None)

    def _add(self, run: _GatheredRun, place: Place, row: ResultRow, form: Format, path: Path) -> None:
        if row.time is not None and row.time < run.started:
            run.started = row.time
        run.states.add(row.state)
        if self.request.metric not in (None, place.metric, f"{place.set}/{place.metric}"):
            return
        self.keys.add((place.set, place.metric))
        if not run.add(place, row, form.latest_counts):
            first = next(where for other, where in self._places() if other == place)
            answer = "" if place.problem is None else f", problem {place.problem}, answer {place.sample}"
            step = "" if place.step == NO_STEP else f", step {place.step}"
            raise UsageError(
                f"{first} and {_where(path, row)} have different values of {place.metric} ({run.table.name}, set "
                f"{place.set}{step}{answer}); remove one of them, or, if they are of two runs, name the run or its "
                "seed in the path ({run}, {seed}) or in the rows"
            )

    def _opened(self, files: RunFiles) -> list[tuple[Format, ResultFile]]:
        """Return the files of a run to read, with their formats. Leaves out empty files, and files whose path names a
        step that is not needed."""
        steps: dict[str | None, set[int]] = {}
        for file in files.files:
            if file.step is not None:
                steps.setdefault(file.set, set()).add(file.step)
        needed = {name: self.request.needed_steps(of_set) for name, of_set in steps.items()}
        formats: dict[str, tuple[Format, dict[Path, ResultFile]]] = {}
        for file in files.files:
            is_needed = file.step is None or file.step in needed[file.set]
            if is_needed and (file.path.is_dir() or file.path.stat().st_size):
                form = files.format or recognise(file.path)
                formats.setdefault(form.tool, (form, {}))[1][file.path] = file
        return [(form, by_path[path]) for form, by_path in formats.values() for path in form.choose(list(by_path))]

    def _rows(self, files: RunFiles, form: Format, file: ResultFile) -> Iterator[tuple[Place, ResultRow]]:
        """Yield the rows of a file with their places. Step and set in the path come before those in the rows."""
        names, key, samples = None, None, Counter[Place]()
        request = replace(self.request, columns=files.entry.columns, where=files.entry.where)
        try:
            for row in form.rows(file.path, request):
                if key is None or names != (row.condition, row.seed, row.run):
                    names, key = (row.condition, row.seed, row.run), self._key(files, row, file.path)
                step = row.step if file.step is None else file.step
                if step is not None and step < 0:
                    raise UsageError(f"{_where(file.path, row)}: the step {step} is negative")
                step = NO_STEP if step is None else step
                place = Place(key, file.set or row.set, row.metric, step, row.problem, row.sample or 0)
                if row.sample is None:
                    samples[place] += 1
                    place = place._replace(sample=samples[place] - 1)
                yield place, row
        except RecursionError as error:  # JSON or YAML that a reader cannot hash or print
            raise UsageError(f"{file.path} is nested too deeply: give a path that excludes it") from error

    def _key(self, files: RunFiles, row: ResultRow, path: Path) -> RunKey:
        """Return condition, seed and name of the run to which a row belongs. Names in the path or the section come
        first, then those in the rows, then the name of the file or directory."""
        condition, run = files.condition or row.condition, files.run or row.run
        seed = row.seed if files.seed is None else files.seed
        if condition is None:
            names = [name for name in (run, files.fallback) if name and not name.isdigit()]
            has_seed = (name for name in names if condition_and_seed(name)[1] is not None)
            condition, of_name = condition_and_seed(next(has_seed, *names[:1]) if names else "")
            seed = of_name if seed is None else seed
        if not condition:
            raise UsageError(
                f"{path} names no condition: put {{condition}} into the path; or write into a file NAME.toml, below "
                f'[[results]], path = "{files.entry.path}" and condition = "…" or, for a table, columns = '
                '{ condition = "NAME OF ITS COLUMN" }, and type: retrain compare NAME.toml'
            )
        return condition, seed, "" if seed is not None else run or ""

    def _run(self, files: RunFiles, key: RunKey, of_row: str | None) -> _GatheredRun:
        """Return the run with this key. Raises UsageError if it was found elsewhere before."""
        condition, seed, _ = key
        name = files.run or of_row or (condition if seed is None else f"{condition} seed {seed}")
        known = self.runs.setdefault(key, _GatheredRun(RunTable(condition, seed, name), files.origin))
        if known.origin != files.origin or known.table.name != name:
            of_seed = "" if seed is None else f" with seed {seed}"
            places = f"{known.table.name} in {known.origin} and {name} in {files.origin}"
            raise UsageError(f"two runs of {condition}{of_seed}: {places}; name the one that counts")
        return known

    def _places(self) -> Iterator[tuple[Place, str]]:
        """Yield the places of all rows that were read, in the same order, with file and line."""
        for files in self.sources:
            for form, file in self._opened(files):
                for place, row in self._rows(files, form, file):
                    yield place, _where(file.path, row)

    def require_one_metric(self) -> None:
        """Raise UsageError unless the runs have exactly one set and metric of the requested name."""
        keys = self.keys
        if len(keys) == 1 and self.without_rows:
            raise UsageError(f"no rows that are asked for in {', '.join(self.without_rows)}")
        if len(keys) == 1:
            return
        if keys:
            options = listed([f"--metric {name}" for name in shortest(keys)], MOST_NAMES)
            raise UsageError(f"the results have {len(keys)} metrics; name one: {options}")
        wanted, self.request = self.request.metric, replace(self.request, metric=None)
        names = shortest({(place.set, place.metric) for place, _ in self._places()})
        if wanted is None or not names:
            raise UsageError(f"no results in {listed([files.origin for files in self.sources], 5)}")
        close = get_close_matches(wanted, names, n=3, cutoff=0.4) or names[:MOST_NAMES]
        raise UsageError(f"no file has the metric {wanted}; type --metric {' or --metric '.join(close)}")


def _where(path: Path, row: ResultRow) -> str:
    return f"{path}:{row.line}" if row.line else str(path)


def shortest(keys: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of metrics, with their set where several sets have the metric."""
    keys = sorted(set(keys))
    sets = Counter(metric for _, metric in keys)
    return sorted(metric if sets[metric] == 1 else f"{set_name}/{metric}" for set_name, metric in keys)
