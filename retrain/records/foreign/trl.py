"""Runs of TRL and of transformers' Trainer: the ``log_history`` of ``trainer_state.json``.

The Trainer writes the file with each checkpoint. The output directory itself has one only if the script calls
``save_state()``. With several evaluation sets the Trainer logs a line for each set, and TRL's own metrics have the same
names in all these lines, such as ``eval_reward``. Only the key ``eval_<set>_runtime`` shows the set of a line.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign import NO_VERDICT, DirectoryReader, FindFile, ForeignRun, integer
from retrain.records.foreign.json_files import json_object, numbers
from retrain.records.foreign.table import HELDOUT_SET, Format, MetricFacts, ReadRequest, ResultRow
from retrain.records.reader import read_object
from retrain.records.schema import layout
from retrain.records.schema.base import Row, Values

STATE = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
PROGRESS = frozenset({"step", "epoch"})  # Keys of a line that are no metrics


class TrlReader(DirectoryReader):
    tool = "trl"
    missing = (
        NO_VERDICT,
        "numbers of every step: the Trainer logs every logging_steps, and writes them with a checkpoint",
        "rollouts, token files, notes and spans of time",
    )

    def newest(self, directory: Path, find: FindFile) -> Path | None:
        try:
            names = [name for entry in directory.iterdir() if CHECKPOINT.fullmatch(name := entry.name)]
        except OSError:
            return None
        found = (find(directory, name) for name in (STATE, *(f"{name}/{STATE}" for name in names)))
        return newest_state([path for path in found if path is not None])

    def progress(self, directory: Path, find: FindFile) -> tuple[int, int, int | None]:
        state = read_object(self.newest(directory, find))
        return integer(state.get("global_step")), integer(state.get("max_steps")), None

    def rows(self, run: ForeignRun, find: FindFile) -> list[Row] | None:
        state = read_object(self.newest(run.directory, find))
        lines = steps_and_lines(state.get("log_history"))
        return rows_by_step((step, line) for _, step, line in lines) if state else None

    def config(self, run: ForeignRun, find: FindFile) -> Row:
        """Return the scalars of the trainer's state, and the configurations of the model and the adapter. The pickled
        training arguments are not read."""
        newest = self.newest(run.directory, find)
        state = {key: value for key, value in read_object(newest).items() if not isinstance(value, list | dict)}
        folder = newest.parent if newest is not None else run.directory
        parts = {name: read_object(find(folder, f"{name}.json")) for name in ("config", "adapter_config")}
        return {"trainer_state": state, **{name: part for name, part in parts.items() if part}}


def newest_state(files: Sequence[Path]) -> Path | None:
    """Return the state of a run with the most steps. The output directory's takes precedence over a checkpoint's of the
    same step, because a script saves it after the last evaluation."""

    def progress(path: Path) -> tuple[int, bool]:
        match = CHECKPOINT.fullmatch(path.parent.name)
        return int(match[1]) if match else integer(read_object(path).get("global_step")), match is None

    return max(files, key=progress, default=None)


def named_metrics(line: Values, prefix: str = "eval_") -> Iterator[tuple[str | None, str, object]]:
    """Yield (set, metric, value) for each entry of a line. Metrics of evaluations, which begin with ``prefix``, have no
    set in their name: ``eval_<set>_loss`` becomes ``eval_loss``. The set is None if the line names none, and ``train``
    for all other metrics."""
    names = (match[1] for key in line if (match := re.fullmatch(f"{prefix}(.+)_runtime", key)))
    name = None if f"{prefix}runtime" in line else next(names, None)
    for key, value in line.items():
        if not key.startswith(prefix):
            yield layout.TRAIN, key, value
        elif name is None:
            yield None, key, value
        else:
            yield name, prefix + key.removeprefix(f"{prefix}{name}_").removeprefix(prefix), value


def rows_by_step(lines: Iterable[tuple[int, Values]], prefix: str = "eval_") -> list[Row]:
    """Merge the lines of each step to one row. Metrics of a named set have the set in their name:
    ``eval_<set>_reward``."""
    rows: dict[int, Row] = {}
    for step, line in lines:
        row = rows.setdefault(step, {})
        for name, key, value in named_metrics(line, prefix):
            is_named = name not in (None, layout.TRAIN)
            row[f"{prefix}{name}_{key.removeprefix(prefix)}" if is_named else key] = value
    return [rows[step] | {"step": step} for step in sorted(rows)]


def steps_and_lines(history: object) -> Iterator[tuple[int, int, Row]]:
    """Yield (number, step, line) of a log; a line without a step belongs to the step of the line before."""
    step = 0
    for number, line in enumerate(history if isinstance(history, list) else (), start=1):
        if isinstance(line, dict):
            step = integer(line.get("step"), step)
            yield number, step, line


def evaluations(
    lines: Iterable[tuple[int, int, Values]], request: ReadRequest, path: Path, prefix: str = "eval_"
) -> Iterator[ResultRow]:
    """Yield one row per step, set and metric of (number, step, line). If a step was logged repeatedly, the last line
    counts."""
    rows = dict[tuple[str, str, int], ResultRow]()
    for number, step, line in lines:
        for name, key, content in named_metrics(line, prefix):
            for metric, value in numbers([(key, content)], request, f"{path}:{number}"):
                if metric not in PROGRESS:
                    held_out = name or HELDOUT_SET
                    rows[held_out, metric, step] = ResultRow(metric, value, step, held_out, line=number)
    yield from rows.values()


def _result_rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    """Yield the numbers of the log; their line is the number of the entry in ``log_history``."""
    state = json_object(path)
    if not isinstance(state.get("log_history"), list):
        raise UsageError(f"{path} is no state of a Trainer: remove its checkpoint, or name another file in path")
    is_done = 0 < integer(state.get("max_steps")) <= integer(state.get("global_step"))
    for row in evaluations(steps_and_lines(state["log_history"]), request, path):
        yield row._replace(state="done" if is_done else "unfinished")


FORMAT = Format(
    tool="TRL or transformers' Trainer",
    patterns=(STATE, f"checkpoint-*/{STATE}"),
    recognises=lambda path: path.name == STATE,
    rows=_result_rows,
    choose=lambda files: [path for path in [newest_state(files)] if path is not None],
    facts=lambda path: dict.fromkeys(("eval_reward", "eval_rewards/*"), MetricFacts(higher_is_better=True)),
)
