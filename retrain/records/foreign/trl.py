"""Runs of TRL and of transformers' Trainer: the ``log_history`` of ``trainer_state.json``.

The file is read from the output directory, where the Trainer writes it at the end of training, or else from the
checkpoint with the largest number. All lines of a step become one row. With several evaluation sets the Trainer logs a
line for each set, and TRL's own metrics have the same names in all these lines, such as ``eval_reward``. Only the key
``eval_<set>_runtime`` shows to which set a line belongs.
"""

import re
from pathlib import Path

from retrain.records.foreign import NO_VERDICT, DirectoryReader, FindFile, ForeignRun, integer
from retrain.records.reader import read_object
from retrain.records.schema.base import Row, Values

STATE = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
SET = re.compile(r"eval_(.+)_runtime")


class TrlReader(DirectoryReader):
    tool = "trl"
    missing = (
        NO_VERDICT,
        "numbers of every step: the Trainer logs every logging_steps, and writes them with a checkpoint",
        "rollouts, token files, notes and spans of time",
    )

    def newest(self, directory: Path, find: FindFile) -> Path | None:
        """Return ``trainer_state.json`` in the directory itself, else in the checkpoint with the largest number."""
        if (own := find(directory, STATE)) is not None:
            return own
        try:
            names = [name for entry in directory.iterdir() if CHECKPOINT.fullmatch(name := entry.name)]
        except OSError:
            return None
        names.sort(key=lambda name: -int(name.partition("-")[2]))
        return next((path for name in names if (path := find(directory, f"{name}/{STATE}")) is not None), None)

    def progress(self, directory: Path, find: FindFile) -> tuple[int, int, int | None]:
        state = read_object(self.newest(directory, find))
        return integer(state.get("global_step")), integer(state.get("max_steps")), None

    def rows(self, run: ForeignRun, find: FindFile) -> list[Row] | None:
        state = read_object(self.newest(run.directory, find))
        return _rows(state.get("log_history")) if state else None

    def config(self, run: ForeignRun, find: FindFile) -> Row:
        """Return the scalars of the trainer's state, and the configurations of the model and the adapter. The pickled
        training arguments are not read."""
        newest = self.newest(run.directory, find)
        state = {key: value for key, value in read_object(newest).items() if not isinstance(value, list | dict)}
        folder = newest.parent if newest is not None else run.directory
        parts = {name: read_object(find(folder, f"{name}.json")) for name in ("config", "adapter_config")}
        return {"trainer_state": state, **{name: part for name, part in parts.items() if part}}


def _rows(history: object) -> list[Row]:
    """Return one row per step; a line without a step belongs to the step of the line before."""
    rows: dict[int, Row] = {}
    step = 0
    for line in history if isinstance(history, list) else ():
        if isinstance(line, dict):
            step = integer(line.get("step"), step)
            rows.setdefault(step, {}).update(_named_by_set(line))
    return [rows[step] | {"step": step} for step in sorted(rows)]


def _named_by_set(line: Values) -> Row:
    """Return a line of an evaluation with the set in all keys: ``eval_reward`` becomes ``eval_<set>_reward``. Lines
    that name no set are returned unchanged."""
    name = next((match[1] for key in line if (match := SET.fullmatch(key))), None)
    if name is None:
        return dict(line)

    def named(key: str) -> str:
        is_general = key.startswith("eval_") and not key.startswith(f"eval_{name}_")
        return f"eval_{name}_{key.removeprefix('eval_')}" if is_general else key

    return {named(key): value for key, value in line.items()}
