"""Runs of TRL and of transformers' Trainer: the ``log_history`` of ``trainer_state.json``.

The Trainer writes the file with each checkpoint. The output directory itself has one only if the script calls
``save_state()``. With several evaluation sets the Trainer logs a line for each set, and TRL's own metrics have the same
names in all these lines, such as ``eval_reward``. Only the key ``eval_<set>_runtime`` shows the set of a line.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from retrain.errors import NotReadable, UsageError, first_line
from retrain.files import read_json
from retrain.records.foreign import NO_VERDICT, DirectoryReader, FindFile, ForeignRun, integer, numbers
from retrain.records.foreign.table import HELDOUT_SET, Format, MetricFacts, Request, ResultRow
from retrain.records.reader import read_object
from retrain.records.schema import layout
from retrain.records.schema.base import Row, Values

STATE = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
REWARD = re.compile(r"eval_(reward|rewards/.+/mean)")
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
        names.sort(key=lambda name: -int(name.partition("-")[2]))
        last = next((path for name in names if (path := find(directory, f"{name}/{STATE}")) is not None), None)
        return newest_state([path for path in (find(directory, STATE), last) if path is not None])

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
        state = scalars(read_object(newest))
        folder = newest.parent if newest is not None else run.directory
        parts = {name: read_object(find(folder, f"{name}.json")) for name in ("config", "adapter_config")}
        return {"trainer_state": state, **{name: part for name, part in parts.items() if part}}


def newest_state(files: Sequence[Path]) -> Path | None:
    """Return the state with the most steps among those of one run: the output directory's, unless a checkpoint has
    more steps."""
    checkpoints = [path for path in files if CHECKPOINT.fullmatch(path.parent.name)]
    last = max(checkpoints, key=_checkpoint_steps, default=None)
    first = next((path for path in files if path not in checkpoints), last)
    if first is None or last is None:
        return first
    return last if _checkpoint_steps(last) > integer(read_object(first).get("global_step")) else first


def _checkpoint_steps(path: Path) -> int:
    return int(path.parent.name.partition("-")[2])


def scalars(state: Values) -> Row:
    return {key: value for key, value in state.items() if not isinstance(value, list | dict)}


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


def _state(path: Path) -> Row:
    """Return the trainer's state. Raises UsageError if the file has none."""
    try:
        state = read_json(path)
        if not isinstance(state["log_history"], list):
            raise TypeError("log_history is no list")
    except OSError as error:
        raise NotReadable(path, error) from None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        advice = "remove its checkpoint, or name another file in path"
        raise UsageError(f"{path} is no state of a Trainer ({first_line(error)}): {advice}") from error
    return state


def _result_rows(path: Path, request: Request) -> Iterator[ResultRow]:
    """Yield one row per step, set and metric. If a step was evaluated repeatedly, the last line counts."""
    state, rows = _state(path), dict[tuple[str, str, int], ResultRow]()
    done = 0 < integer(state.get("max_steps")) <= integer(state.get("global_step"))
    for number, step, line in steps_and_lines(state["log_history"]):
        where = f"{path}, entry {number} of log_history"
        for name, key, content in named_metrics(line):
            for metric, value in numbers([(key, content)], request.metric, where) if key not in PROGRESS else ():
                held_out = name or HELDOUT_SET
                row = ResultRow(metric, value, step, held_out, state="done" if done else "unfinished", line=number)
                rows[held_out, metric, step] = row
    yield from rows.values()


def _facts(path: Path) -> Mapping[str, MetricFacts]:
    """Return that larger rewards are better; losses of GRPO say nothing."""
    names = {
        metric for _, _, line in steps_and_lines(_state(path)["log_history"]) for _, metric, _ in named_metrics(line)
    }
    return {name: MetricFacts(higher_is_better=True) for name in names if REWARD.fullmatch(name)}


def _choose(files: Sequence[Path]) -> Sequence[Path]:
    newest = newest_state(files)
    return [] if newest is None else [newest]


FORMAT = Format(
    tool="TRL or transformers' Trainer",
    patterns=(STATE, f"checkpoint-*/{STATE}"),
    recognises=lambda path: path.name == STATE,
    rows=_result_rows,
    choose=_choose,
    facts=_facts,
    config=lambda path: {"trainer_state": scalars(_state(path))},
)
