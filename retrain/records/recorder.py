"""Everything a run leaves behind, written as it happens: one line per event, flushed, strict JSON.

Rows are made where they are recorded and written by a thread, in order; ``flush`` waits until they are on the disk.
A row depends on what happened and on the recorder's saved state only, so a resumed run continues its files exactly:
``truncate`` removes what came after the restored step and ``restore`` brings back the running sums.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

from retrain.clock import timestamp
from retrain.files import truncate_jsonl, write_json
from retrain.records.columns import ColumnWriter
from retrain.records.completions import generations, held_out_completions
from retrain.records.context import RunContext
from retrain.records.environment import SystemInfo
from retrain.records.evaluation import eval_row
from retrain.records.measure import Totals, step_row, tags_to_show
from retrain.records.notes import WINDOW, explain
from retrain.records.reader import RunReader
from retrain.records.rollout_files import index_line, remove_files, truncate_index, write_files
from retrain.records.rollouts import TRAIN, Batch, TokenText
from retrain.records.samples import collect, everything
from retrain.records.schema import layout
from retrain.records.schema.base import Row, Values
from retrain.records.schema.rows import Checkpoint, Evaluation, Note, RecorderState, StepSpans, StepSummary
from retrain.records.text import without_keys
from retrain.records.timeline import write_timeline
from retrain.records.trackers import Tracker, make_trackers, without_evaluations
from retrain.records.writer import RecordFiles, Reporter
from retrain.types import CreditedGroup, EvalRecord, StepRecord

ROW_FILES = (layout.METRICS, layout.STEPS, layout.GENERATIONS, layout.SPANS)
"""Records in which every step has a row."""
EVALUATION_FILES = tuple(Path(name).name for name in (layout.EVALS, layout.EVALUATIONS))
"""Names of the records with the rows of evaluations: ``evals.jsonl`` and ``emergence/evaluations.jsonl``."""
STEP_FILES = (*ROW_FILES, layout.NOTES)  # Records whose rows belong to a step
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
        self.directory = Path(run_dir)
        self.context = context
        self._show = warn
        self._reader = RunReader(self.directory)
        self._files = RecordFiles(self.directory, guard)
        self._columns = ColumnWriter(self.directory / layout.METRICS)
        if trackers is None:
            trackers = make_trackers(context, self.directory, self._warn)
        self._reporters = [Reporter(name, tracker, self._warn) for name, tracker in trackers.items()]
        self._state = RecorderState(totals=asdict(Totals()), known_keys=[], known_tags=[], evaluations={})
        self._finished = 0  # steps that earlier processes have recorded
        self._unsent: dict[int, Row] = {}  # evaluations by step, until the row that they come with
        self._token_text = token_text
        self._rows: list[Row] = []  # the first row and the newest, for remarks
        self._noted: set[str] = set()
        self._dtype = "float32"
        self._started = False

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.log_error(error)
        if not self.close(failed=error is not None) and error is None:
            self._files.check()

    def start(self, facts: Values | None = None, system: SystemInfo | None = None) -> None:
        """Write ``config.json`` (``facts`` as given) and the files of ``system``, and start the trackers; a second call
        does nothing."""
        if self._started:
            return
        self._started = True
        if facts is not None:
            self._files.write(lambda: write_json(self.directory / layout.CONFIG, facts))
            self._dtype = (facts.get("built") or {}).get("dtype") or self._dtype
        if system is not None:
            self._files.write(lambda: system.write(self.directory))
        self.log(f"start {self.context.run_id}: {self.context.condition}, seed {self.context.seed}")
        for reporter in self._reporters:
            reporter.start(self.context)
            if self._finished:
                reporter.send_history(self._history)

    @property
    def begun(self) -> bool:
        """Return whether an earlier process has recorded anything here."""
        return any((self.directory / name).exists() for name in (*STEP_FILES, layout.EVALS, layout.CHECKPOINTS))

    def record_step(self, record: StepRecord) -> Row:
        """Return the step's row, and have everything about the step written."""
        self.start()
        state, samples = self._state, collect(record.groups)
        totals, tags = Totals(**state.totals), sorted({*state.known_tags, *tags_to_show(samples, self.context)})
        row = step_row(record, self.context, totals, tuple(tags), state.evaluations, samples)
        for key in sorted(state.known_keys):
            row.setdefault(key, None)
        self._state = replace(
            state,
            totals=asdict(totals.plus(everything(record, samples), record.step_start, record.step_end)),
            known_keys=list(dict.fromkeys([*state.known_keys, *row])),
            known_tags=tags,
            evaluations={},
            rows=_sum(state.rows, dict.fromkeys(ROW_FILES, 1) | {layout.GENERATIONS: len(samples)}),
        )
        notes = self._remarks(row)
        self._files.write(lambda: self._write_step(record, row, notes))
        self._report({record.step: row})
        return row

    def _report(self, rows: Mapping[int, Row]) -> None:
        """Hand rows and the evaluations so far to the trackers, in the order of their steps."""
        evaluations, self._unsent = self._unsent, {}
        for step in sorted({*evaluations, *rows}):
            for reporter in self._reporters:
                if step in evaluations:
                    reporter.log(step, evaluations[step])
                if step in rows:
                    reporter.log(step, without_evaluations(rows[step]))

    def _history(self, first: int) -> Iterator[tuple[int, Row]]:
        """Yield step and numbers of the rows and evaluations that earlier processes have recorded, from step ``first``
        on, in the order in which a tracker got them or should have got them."""
        evaluations: dict[int, Row] = {}
        for line in self._reader.evaluations():
            if first <= line["step"] <= self._finished:
                numbers = {key: value for key, value in line.items() if key.startswith("eval/")}
                evaluations.setdefault(line["step"], {}).update(numbers)
        for row in self._reader.iter_metrics():
            if row["step"] >= self._finished:
                break
            if row["step"] >= first:
                if row["step"] in evaluations:
                    yield row["step"], evaluations.pop(row["step"])
                yield row["step"], without_evaluations(row)
        yield from evaluations.items()

    def _remarks(self, row: Row) -> list[Note]:
        """Log and return the notes that this row gives rise to; warn of those with something to do."""
        self._rows = [*self._rows[:1], *self._rows[1:][-WINDOW:], row]
        notes = explain(self._rows, self.context.config, self._dtype, self._noted)
        for note in notes:
            self._noted.add(note.key)
            say = self._warn if note.level == "warning" else self.log
            say(f"step {note.step}: {note}")
        return notes

    def _write_step(self, record: StepRecord, row: Row, notes: Sequence[Note]) -> None:
        """Write all files of one step; runs on the files' thread."""
        self._files.append(layout.METRICS, [row])
        self._files.wrote(*self._columns.follow())
        self._files.append(layout.STEPS, [_step_summary(record, row)])
        lines = self._files.append(layout.GENERATIONS, generations(record))
        self._files.append(layout.SPANS, [_step_spans(record)])
        self._files.append(layout.NOTES, [note.to_row() for note in notes])
        batch = self._batch(TRAIN, record.step, record.groups, record.step_start)
        self._write_rollouts(batch, self.keeps_tokens(record.step), lines)

    def keeps_tokens(self, step: int) -> bool:
        """Return whether the rollouts of this step are recorded token by token, with their pages."""
        every = self.context.config.logging.rollouts_every
        return every > 0 and (step % every == 0 or step + 1 == self.context.max_steps)

    def _batch(self, split: str, iteration: int, groups: Sequence[CreditedGroup], started: float) -> Batch:
        run, condition = self.context.run_id, self.context.condition
        weights = {part.shown_name: (part.weight, part.offset) for part in self.context.config.reward.components}
        return Batch(split, iteration, groups, run, condition, started, self._token_text, weights)

    def _write_rollouts(self, batch: Batch, pages: bool, lines: tuple[int, int]) -> None:
        num_groups = self.context.config.logging.num_groups_to_log if pages else None
        self.check_directory()
        self._files.wrote(*write_files(self.directory, batch, num_groups))
        self._files.append(layout.ITERATIONS, [index_line(batch, num_groups, lines)])

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
        self._unsent.setdefault(record.step, {}).update(row)
        started = timestamp() - record.seconds
        self._files.write(lambda: self._write_eval(record, row, started))
        return row

    def _write_eval(self, record: EvalRecord, row: Row, started: float) -> None:
        """Write all files of one evaluation; runs on the files' thread."""
        sampling = {key: getattr(record, key) for key in Evaluation.field_names()}
        self._files.append(layout.EVALS, [sampling | row])
        strict, pages = self.context.config.reward.strict_answers, self.context.config.logging.rollouts_every > 0
        lines = self._files.append(layout.EVALUATIONS, held_out_completions(record, strict))
        groups = list(map(CreditedGroup.of, record.groups))
        self._write_rollouts(self._batch(f"eval/{record.name}", record.step, groups, started), pages, lines)

    def record_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Append one line to ``checkpoints.jsonl``, after all earlier records, and wait until all are on the disk. Call
        it when the checkpoint's directory is complete."""
        self._files.write(lambda: self._files.append(layout.CHECKPOINTS, [checkpoint.to_row()]))
        self.flush()
        self._files.write(lambda: write_timeline(self.directory))  # so that a killed run has one too

    def flush(self) -> None:
        """Wait until everything recorded so far is on the disk; call it before a checkpoint gets its name. Any thread
        may. Raises RunFailed when something could not be written."""
        self._files.flush()

    def check_directory(self) -> None:
        """Raise LeaseLost or StorageError unless the run's directory is still this process's."""
        self._files.check_directory()

    def log(self, text: str, level: str = "info") -> None:
        """Add time-stamped lines to ``run.log``; never raises."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {level:<7} {line}\n" for line in without_keys(text).splitlines() or [""])
        self._files.write(lambda: self._files.append_text(layout.LOG, lines), always=True)

    def record_server(self, step: int, text: str, level: str = "info") -> None:
        """Log what happened to a server that a run samples from, and note it unless ``level`` is info. Any thread may;
        never raises."""
        self.log(text, level)
        if level != "info":
            note = Note(step, "server", level, without_keys(text), SERVER_REMEDY)
            self._files.write(lambda: self._files.append(layout.NOTES, [note.to_row()]), always=True)

    def log_error(self, error: BaseException) -> None:
        self.log("".join(traceback.format_exception(error)), level="error")

    def truncate(self, step: int) -> None:
        """Remove everything at and after ``step`` (the next step to run) and lines torn by a kill."""
        self.flush()
        # An evaluation or checkpoint numbered n was made at the end of step n - 1, before the state restored at n.
        done = step + 1 if step > 0 else 0
        for row in self._reader.iter_metrics():
            if row["step"] >= step:
                remove_files(self.directory, TRAIN, row["step"])
        for row in self._reader.evaluations():
            if row["step"] >= done:
                remove_files(self.directory, f"eval/{row['name']}", row["step"])
        counts = {name: truncate_jsonl(self.directory / name, step) for name in ROW_FILES}
        truncate_jsonl(self.directory / layout.NOTES, step)
        truncate_index(self.directory, step, done)
        self._columns.forget()
        for name in (layout.EVALS, layout.EVALUATIONS):
            counts[name] = truncate_jsonl(self.directory / name, done)
        self._state = replace(self._state, rows=counts)
        truncate_jsonl(self.directory / layout.CHECKPOINTS, done, key="batch")
        rows = self._reader.metrics()
        self._rows = [*rows[:1], *rows[1:][-WINDOW:]]
        self._noted = {note.key for note in self._reader.notes()}
        self._finished = step
        self.log(f"records truncated to the {step} finished steps")

    def state(self) -> Row:
        """Return what must be saved for an exact continuation (``RecorderState``), as JSON."""
        trackers = self._state.trackers | {reporter.name: reporter.state for reporter in self._reporters}
        sent = self._state.sent | {reporter.name: reporter.sent for reporter in self._reporters}
        return replace(self._state, trackers=trackers, sent=sent).to_row()

    def restore(self, state: Values) -> None:
        """Restore a saved ``state()``; call before ``start``."""
        self._set_state(RecorderState.from_row(state))

    def begin_own_records(self) -> None:
        """Start records and trackers of its own after ``restore`` of another run's state. Call before ``start``."""
        self._set_state(replace(self._state, rows={}, trackers={}, sent={}))

    def _set_state(self, state: RecorderState) -> None:
        self._state = state
        for reporter in self._reporters:
            reporter.state, reporter.sent = state.trackers.get(reporter.name), state.sent.get(reporter.name, 0)

    def close(self, failed: bool = False) -> bool:
        """Finish the trackers and write what is left; whether everything could be written. Raises nothing."""
        if self._started:
            self._started = False
            self._report({})
            for reporter in self._reporters:
                reporter.finish(failed)
            self._files.write(lambda: write_timeline(self.directory), always=True)
            self.log("failed" if failed else "closed")
        return self._files.close()

    def _warn(self, text: str) -> None:
        self.log(text, level="warning")
        self._show(text)


def _sum(rows: Mapping[str, int], added: Mapping[str, int]) -> dict[str, int]:
    return {**rows, **{name: rows.get(name, 0) + count for name, count in added.items()}}


def _step_summary(record: StepRecord, row: Row) -> Row:
    """Return the step's line of ``emergence/steps.jsonl``."""
    rewards = [rollout.reward for group in record.groups for rollout in group.rollouts]
    summary = StepSummary(
        step=record.step,
        mean_reward=row["mean_reward"],
        correct_count=sum(reward.is_correct for reward in rewards),
        total_count=len(rewards),
        condition=row["condition"],
        uncertainty_kind=row["uncertainty_kind"],
    )
    return summary.to_row() | {key: row[key] for key in row if key.startswith(("exec_", "plan_"))}


def _step_spans(record: StepRecord) -> Row:
    """Return the step's line of ``timing_spans.jsonl``; wall clock in seconds since the epoch."""
    spans = [
        {"name": name, "duration": end - start, "wall_start": start, "wall_end": end}
        for name, start, end in record.spans
    ]
    return StepSpans(record.step, spans).to_row()
