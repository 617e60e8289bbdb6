"""Everything a run leaves behind, written as it happens: one line per event, flushed, strict JSON.

Rows are made where they are recorded and written by a thread, in order; ``flush`` waits until they are on the disk.
A row depends on what happened and on the recorder's saved state only, so a resumed run continues its files exactly:
``truncate`` removes what came after the restored step and ``restore`` brings back the running sums.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from retrain.clock import timestamp
from retrain.config.upkeep import trackers as tracker_names
from retrain.files import write_json
from retrain.records.environment import SystemInfo
from retrain.records.measure import START, RunContext, measure_step
from retrain.records.notes import WINDOW, explain, note_line
from retrain.records.reader import RunReader
from retrain.records.reporter import Reporter, make_trackers
from retrain.records.rollouts import TokenText
from retrain.records.samples import eval_row
from retrain.records.schema import layout
from retrain.records.schema.base import Row, Values
from retrain.records.schema.rows import Checkpoint, Note, RecorderState
from retrain.records.text import without_keys
from retrain.records.timeline import write_timeline
from retrain.records.trackers import Tracker
from retrain.records.writer import ROW_FILES, RunFiles
from retrain.types import EvalRecord, StepRecord

SERVER_REMEDY = "requests wait for a server, or go to the others; a launched one says more in server.log"


class RunRecorder:
    """Writes one run's directory.

    Order of calls: ``RunRecorder(…)``, on resume ``restore(state)`` and ``truncate(step)``, then ``start(facts)``; per
    step ``record_eval`` for the evaluations that belong to it, then ``record_step``; ``flush`` before what is recorded
    must outlive the process; ``close`` at the end. Trackers start in ``start`` and stop the run there when they cannot
    (``RetrainError``); a later failure of one is reported once through ``warn`` and in ``run.log``, as are odd numbers
    that need attention. Any call raises RunFailed (of a disk, StorageError) when an earlier record could not be
    written. ``token_text`` places a completion's tokens in its text, for the pages. ``guard`` raises LeaseLost once
    another process may write the directory; it is called before every write.
    """

    def __init__(
        self,
        run_dir: Path,
        context: RunContext,
        trackers: Mapping[str, Tracker] | None = None,
        warn: Callable[[str], None] = lambda text: None,
        token_text: TokenText | None = None,
        guard: Callable[[], None] = lambda: None,
    ):
        self.directory, self.context = Path(run_dir), context
        self.files = RunFiles(self.directory, context, token_text, guard)
        self._show = warn
        logging = context.config.logging
        if trackers is None and tracker_names(logging.report_to, logging.wandb_project):
            trackers = make_trackers(context, self.directory, self._warn)
        self._reporters = [Reporter(name, tracker, self._warn) for name, tracker in (trackers or {}).items()]
        self._state = START
        self._finished = 0  # steps that earlier processes have recorded
        self._rows: list[Row] = []  # the first row and the newest, for notes
        self._noted: set[str] = set()
        self._dtype = "float32"
        self._started = False

    def start(self, facts: Values | None = None, system: SystemInfo | None = None) -> None:
        """Write ``config.json`` (``facts`` as given) and the files of ``system``, and start the trackers; a second call
        does nothing."""
        if self._started:
            return
        self._started = True
        if facts is not None:
            self.files.write(lambda: write_json(self.directory / layout.CONFIG, facts))
            self._dtype = (facts.get("built") or {}).get("dtype") or self._dtype
        if system is not None:
            self.files.write(lambda: system.write(self.directory))
        self.log(f"start {self.context.run_id}: {self.context.condition}, seed {self.context.seed}")
        for reporter in self._reporters:
            reporter.start(self.context)
            if self._finished:
                reporter.send_history(self.directory, self._finished)

    def record_step(self, record: StepRecord) -> Row:
        """Return the step's row, and have everything about the step written."""
        self.start()
        row, state = measure_step(record, self.context, self._state)
        completions = sum(len(group.rollouts) for group in record.groups)
        rows = _sum(state.rows, dict.fromkeys(ROW_FILES, 1) | {layout.GENERATIONS: completions})
        self._state = replace(state, rows=rows)
        self._rows = [*self._rows[:1], *self._rows[1:][-WINDOW:], row]
        notes = explain(self._rows, self.context.config, self._dtype, self._noted)
        for note in notes:
            self._noted.add(note.key)
            say = self._warn if note.level == "warning" else self.log
            say(note_line(note))
        self.files.write(lambda: self.files.write_step(record, row, notes))
        for reporter in self._reporters:
            reporter.log_row(record.step, row)
        return row

    def record_eval(self, record: EvalRecord) -> Row:
        """Write one evaluation to ``evals.jsonl``; its keys join the metrics row of the next ``record_step``.

        ``record.step`` counts the optimizer steps done, so the untrained model is step 0 and the evaluation after
        the update of row n has step n + 1. When two of them meet in one row (the first), the later one stands there.
        """
        self.start()
        config = self.context.config
        row = eval_row(record, self.context.tags_of(record.name), config.reward.strict_answers, config.audit.wanted)
        answers = sum(len(group.rollouts) for group in record.groups)
        rows = _sum(self._state.rows, {layout.EVALS: 1, layout.EVALUATIONS: answers})
        self._state = replace(self._state, evaluations=self._state.evaluations | row, rows=rows)
        for reporter in self._reporters:
            reporter.log_evaluation(record.step, row)
        started = timestamp() - record.seconds
        self.files.write(lambda: self.files.write_evaluation(record, row, started))
        return row

    def record_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Append one line to ``checkpoints.jsonl``, after all earlier records, and wait until all are on the disk. Call
        it when the checkpoint's directory is complete."""
        self.files.write(lambda: self.files.append(layout.CHECKPOINTS, [checkpoint.to_row()]))
        self.flush()
        self.files.write(lambda: write_timeline(self.directory))  # so that a killed run has one too

    def flush(self) -> None:
        """Wait until everything recorded so far is on the disk; call it before a checkpoint gets its name. Any thread
        may. Raises RunFailed when something could not be written."""
        self.files.flush()

    def log(self, text: str, level: str = "info") -> None:
        """Add time-stamped lines to ``run.log``; never raises."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {level:<7} {line}\n" for line in without_keys(text).splitlines() or [""])
        self.files.write(lambda: self.files.append_text(layout.LOG, lines), always=True)

    def log_error(self, error: BaseException) -> None:
        self.log("".join(traceback.format_exception(error)), level="error")

    def record_server(self, step: int, text: str, level: str = "info") -> None:
        """Log what happened to a server that a run samples from, and note it unless ``level`` is info. Any thread may;
        never raises."""
        self.log(text, level)
        if level != "info":
            note = Note(step, "server", level, without_keys(text), SERVER_REMEDY)
            self.files.write(lambda: self.files.append(layout.NOTES, [note.to_row()]), always=True)

    def truncate(self, step: int) -> None:
        """Remove everything at and after ``step`` (the next step to run) and lines torn by a kill."""
        self._state = replace(self._state, rows=self.files.truncate(step))
        reader = RunReader(self.directory)
        rows = reader.metrics()
        self._rows = [*rows[:1], *rows[1:][-WINDOW:]]
        self._noted = {note.key for note in reader.notes()}
        self._finished = step
        self.log(f"records truncated to the {step} finished steps")

    def state(self) -> Row:
        """Return what must be saved for an exact continuation (``RecorderState``), as JSON."""
        trackers = self._state.trackers | {reporter.name: reporter.state for reporter in self._reporters}
        sent = self._state.sent | {reporter.name: reporter.sent for reporter in self._reporters}
        return replace(self._state, trackers=trackers, sent=sent).to_row()

    def restore(self, state: Values) -> None:
        """Restore a saved ``state()``; call before ``start``."""
        self._state = RecorderState.from_row(state)
        for reporter in self._reporters:
            reporter.state = self._state.trackers.get(reporter.name)
            reporter.sent = self._state.sent.get(reporter.name, 0)

    def begin_own_records(self) -> None:
        """Start records and trackers of its own after ``restore`` of another run's state. Call before ``start``."""
        self.restore(replace(self._state, rows={}, trackers={}, sent={}).to_row())

    def close(self, failed: bool = False) -> bool:
        """Finish the trackers and write what is left; whether everything could be written. Raises nothing."""
        if self._started:
            self._started = False
            for reporter in self._reporters:
                reporter.finish(failed)
            self.files.write(lambda: write_timeline(self.directory), always=True)
            self.log("failed" if failed else "closed")
        return self.files.close()

    def _warn(self, text: str) -> None:
        self.log(text, level="warning")
        self._show(text)


def _sum(rows: Mapping[str, int], added: Mapping[str, int]) -> dict[str, int]:
    return {**rows, **{name: rows.get(name, 0) + count for name, count in added.items()}}
