"""Write all records of a run as they arise: one line of strict JSON per event, flushed.

Rows are computed on the calling thread and written by another thread, in order; ``flush`` waits until they are on disk.
A row depends only on the event and on the recorder's saved state, so a resumed run continues its files exactly:
``truncate`` removes the rows from the restored step on and ``restore`` restores the running sums.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from retrain.device import timestamp
from retrain.files import dumps, iter_jsonl, keep_rows, read_jsonl, truncate_jsonl, write_bytes, write_json, write_text
from retrain.records.columns import BLOCK, ColumnWriter
from retrain.records.context import RunContext
from retrain.records.measure import measure_step
from retrain.records.notes import WINDOW, explain, note_line
from retrain.records.pages.rollouts import rollout_page
from retrain.records.pages.timeline import write_timeline
from retrain.records.reporter import Reporter, make_trackers
from retrain.records.rollouts import (
    Batch,
    TokenText,
    batch_name,
    generations,
    held_out_completions,
    logtree,
    summary_rows,
)
from retrain.records.schema import layout
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import Seal
from retrain.records.schema.rows import (
    START,
    Checkpoint,
    Evaluation,
    IterationFiles,
    Note,
    RecorderState,
    StepSpans,
    StepSummary,
)
from retrain.records.scores import eval_row, evaluation_keys
from retrain.records.seals import chained
from retrain.records.tokens import tokens_name, write_tokens
from retrain.records.trackers import Tracker
from retrain.records.writer import RecordFiles
from retrain.threads import Work
from retrain.types import CreditedGroup, EvalRecord, StepRecord
from retrain.util.text import without_keys

# Records in which every step has rows
ROW_FILES = (layout.METRICS, layout.STEPS, layout.GENERATIONS, layout.SPANS)
EMPTY = dict.fromkeys(layout.EVALUATION_FILES, "")  # Hashes of the files of evaluations before their first row
SERVER_REMEDY = "requests wait for a server, or go to the others; a launched one says more in server.log"


class RunRecorder(RecordFiles):
    """Writer of one run's directory.

    Order of calls: ``RunRecorder(…)``, on resume ``restore(state)`` and ``truncate(step)``, then ``start(facts)``; per
    step ``record_eval`` for its evaluations, then ``record_step``; ``close`` at the end. ``flush`` makes sure that all
    records so far survive the process.

    ``start`` starts the trackers and raises RetrainError if one cannot start. A later failure of a tracker is reported
    once through ``warn`` and in ``run.log``, and so are notes of level warning. Any call raises RunFailed, or its
    subclass StorageError, if an earlier record could not be written.

    ``token_text`` locates a completion's tokens in its text, for the pages. ``guard`` is called before every write and
    raises LeaseLost if another process may be writing the directory.
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
        super().__init__(Path(run_dir), guard)
        self.context, self._token_text, self._show_warning = context, token_text, warn
        self._columns = ColumnWriter(self.directory / layout.METRICS, self.directory / layout.COLUMNS)
        if trackers is None:
            trackers = make_trackers(context, self.directory, self._warn)
        self._reporters = [Reporter(name, tracker, self._warn) for name, tracker in trackers.items()]
        self._state = replace(START, sha256=EMPTY)
        self._data = ""  # hash of the problems, training and held-out
        self._finished = 0  # steps that earlier processes have recorded
        self._rows: list[Row] = []  # the first row and the newest, for notes
        self._noted: set[str] = set()
        self._evaluation_keys = evaluation_keys(context)
        self._dtype = "float32"
        self._started = False

    @property
    def any_written(self) -> bool:
        names = (*ROW_FILES, layout.NOTES, layout.EVALS, layout.CHECKPOINTS)
        return any((self.directory / name).exists() for name in names)

    def start(self, facts: Values | None = None, system: Mapping[str, bytes] | None = None) -> None:
        """Write ``config.json`` (``facts``, unless None) and the files ``system`` (contents by name), and start the
        trackers. A second call does nothing."""
        if self._started:
            return
        self._started = True
        if facts is not None:
            self.write(lambda: write_json(self.directory / layout.CONFIG, facts))
            problems = dumps([facts.get("data_hash"), facts.get("heldout_hashes")])
            self._data = hashlib.sha256(problems.encode()).hexdigest()[:16]
            self._dtype = (facts.get("built") or {}).get("dtype") or self._dtype
        for name, data in (system or {}).items():
            self.write(partial(write_bytes, self.directory / name, data))
        self.log(f"start {self.context.run_id}: {self.context.condition}, seed {self.context.seed}")
        for reporter in self._reporters:
            reporter.start(self.context)
            if self._finished:
                reporter.send_history(self.directory, self._finished)

    def keeps_tokens(self, step: int) -> bool:
        """Return whether the tokens, the logtree and the page of this step's rollouts are written."""
        every = self.context.config.logging.rollouts_every
        return every > 0 and (step % every == 0 or step + 1 == self.context.max_steps)

    def record_step(self, record: StepRecord) -> Row:
        self.start()
        row, state = measure_step(record, self.context, self._state, self._evaluation_keys)
        completions = sum(len(group.rollouts) for group in record.groups)
        rows = _sum(state.rows, dict.fromkeys(ROW_FILES, 1) | {layout.GENERATIONS: completions})
        self._state = replace(state, rows=rows)
        self._rows = [*self._rows[:1], *self._rows[1:][-WINDOW:], row]
        notes = explain(self._rows, self.context.config, self._dtype, self._noted)
        for note in notes:
            self._noted.add(note.key)
            say = self._warn if note.level == "warning" else self.log
            say(note_line(note))
        keeps_tokens = self.keeps_tokens(record.step)
        self.write(lambda: self._write_step(record, row, notes, keeps_tokens))
        for reporter in self._reporters:
            reporter.log_row(record.step, row)
        return row

    def record_eval(self, record: EvalRecord) -> Row:
        """Write one evaluation to ``evals.jsonl``; its keys join the metrics row of the next ``record_step``.

        ``record.step`` counts the optimizer steps done, so the untrained model is step 0 and the evaluation after the
        update of row n has step n + 1. Row 0 can therefore get two evaluations, before and after the first update; it
        has the values of the second.
        """
        self.start()
        config = self.context.config
        row = eval_row(record, self.context.tags_of(record.name), config.reward.strict_answers, config.audit.is_enabled)
        recorded = {
            layout.EVALS: [{key: getattr(record, key) for key in Evaluation.field_names()} | row],
            layout.EVALUATIONS: held_out_completions(record, config.reward.strict_answers),
        }
        self._state = replace(
            self._state,
            evaluations=self._state.evaluations | row,
            rows=_sum(self._state.rows, {name: len(rows) for name, rows in recorded.items()}),
            sha256={name: chained(digest, recorded[name]) for name, digest in self._state.sha256.items()},
        )
        for reporter in self._reporters:
            reporter.log_evaluation(record.step, row)
        started = timestamp() - record.seconds

        def write() -> None:
            self.append(layout.EVALS, recorded[layout.EVALS])
            lines = self.append(layout.EVALUATIONS, recorded[layout.EVALUATIONS])
            groups, tokens = list(map(CreditedGroup.of, record.groups)), config.logging.rollouts_every > 0
            self._write_rollouts(f"eval/{record.name}", record.step, groups, started, tokens, lines)

        self.write(write)
        return row

    def evaluations(self) -> list[Row]:
        return read_jsonl(self.directory / layout.EVALS)

    def seal(self) -> Row:
        """Return the ``Seal`` of all evaluations so far; {} if a version without seals has recorded some of them."""
        if not self._state.sha256:
            return {}
        rows, sha256 = self._state.rows, self._state.sha256
        return Seal(
            data=self._data,
            evaluations=rows.get(layout.EVALS, 0),
            evaluations_sha256=sha256[layout.EVALS],
            completions=rows.get(layout.EVALUATIONS, 0),
            completions_sha256=sha256[layout.EVALUATIONS],
        ).to_row()

    def record_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Append one line to ``checkpoints.jsonl``, after all earlier records, and wait until all of them are on disk.
        Call it when the checkpoint's directory is complete."""
        self.write(lambda: self.append(layout.CHECKPOINTS, [checkpoint.to_row()]))
        self.flush()
        self.write(lambda: write_timeline(self.directory, self.check_directory))  # in case the run is killed later

    def log(self, text: str, level: str = "info") -> None:
        """Add time-stamped lines to ``run.log``; never raises."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {level:<7} {line}\n" for line in without_keys(text).splitlines() or [""])
        self.write(lambda: self.append_text(layout.LOG, lines), always=True)

    def log_error(self, error: BaseException) -> None:
        self.log("".join(traceback.format_exception(error)), level="error")

    def record_server(self, step: int, text: str, level: str = "info") -> None:
        """Log an event of a server that the run samples from, and add a note unless ``level`` is info. Thread-safe;
        never raises."""
        self.log(text, level)
        if level != "info":
            note = Note(step, "server", level, without_keys(text), SERVER_REMEDY)
            self.write(lambda: self.append(layout.NOTES, [note.to_row()]), always=True)

    def truncate(self, step: int) -> None:
        """Remove everything at and after ``step`` (the next step to run), and lines that a killed process left half
        written."""
        self.flush()
        # An evaluation or checkpoint numbered n was made at the end of step n - 1, before the state restored at n.
        done = step + 1 if step > 0 else 0
        for row in iter_jsonl(self.directory / layout.METRICS):
            if row["step"] >= step:
                _remove_rollouts(self.directory, layout.TRAIN, row["step"])
        for row in read_jsonl(self.directory / layout.EVALS):
            if row["step"] >= done:
                _remove_rollouts(self.directory, f"eval/{row['name']}", row["step"])
        counts = {name: truncate_jsonl(self.directory / name, step) for name in ROW_FILES}
        truncate_jsonl(self.directory / layout.NOTES, step)
        index = self.directory / layout.ITERATIONS
        keep_rows(index, lambda row: row["iteration"] < (step if row["split"] == layout.TRAIN else done))
        self._columns.forget()
        counts |= {name: truncate_jsonl(self.directory / name, done) for name in layout.EVALUATION_FILES}
        truncate_jsonl(self.directory / layout.CHECKPOINTS, done, key="batch")
        self._state = replace(self._state, rows=counts)
        rows = read_jsonl(self.directory / layout.METRICS)
        self._rows = [*rows[:1], *rows[1:][-WINDOW:]]
        self._noted = {note["key"] for note in iter_jsonl(self.directory / layout.NOTES)}
        self._finished = step
        self.log(f"records truncated to the {step} finished steps")

    def state(self) -> Row:
        """Return the state that a checkpoint saves for an exact continuation (``RecorderState``), as JSON."""
        trackers = self._state.trackers | {reporter.name: reporter.state for reporter in self._reporters}
        sent = self._state.sent | {reporter.name: reporter.sent for reporter in self._reporters}
        return replace(self._state, trackers=trackers, sent=sent).to_row()

    def restore(self, state: Values) -> None:
        self._state = RecorderState.from_row(state)
        for reporter in self._reporters:
            reporter.state = self._state.trackers.get(reporter.name)
            reporter.sent = self._state.sent.get(reporter.name, 0)

    def begin_own_records(self) -> None:
        """Reset rows, hashes and trackers after ``restore`` of another run's state. Call before ``start``."""
        self.restore(replace(self._state, rows={}, sha256=EMPTY, trackers={}, sent={}).to_row())

    def close(self, failed: bool = False) -> bool:
        """Finish the trackers and write what is pending; return whether everything could be written. Never raises."""
        if self._started:
            self._started = False
            for reporter in self._reporters:
                reporter.finish(failed)
            self.write(lambda: write_timeline(self.directory, self.check_directory), always=True)
            self.log("failed" if failed else "records closed")
        return super().close()

    def _warn(self, text: str) -> None:
        self.log(text, level="warning")
        self._show_warning(f"{self.context.run_id}: {text}")

    def _write_step(self, record: StepRecord, row: Row, notes: Sequence[Note], keeps_tokens: bool) -> None:
        """Write all files of one step; runs on the writing thread."""
        self.append(layout.METRICS, [row])
        if (record.step + 1) % BLOCK == 0:  # the columns gain whole blocks only
            self.wrote(*self._columns.follow())
        rewards = [rollout.reward for group in record.groups for rollout in group.rollouts]
        summary = StepSummary(
            step=record.step,
            mean_reward=row["mean_reward"],
            correct_count=sum(reward.is_correct for reward in rewards),
            total_count=len(rewards),
            condition=row["condition"],
            uncertainty_kind=row["uncertainty_kind"],
        )
        credit = {key: value for key, value in row.items() if key.startswith(("exec_", "plan_"))}
        self.append(layout.STEPS, [summary.to_row() | credit])
        lines = self.append(layout.GENERATIONS, generations(record))
        spans = [
            {"name": name, "duration": end - start, "wall_start": start, "wall_end": end}
            for name, start, end in record.spans
        ]
        self.append(layout.SPANS, [StepSpans(record.step, spans).to_row()])
        self.append(layout.NOTES, [note.to_row() for note in notes])
        self._write_rollouts(layout.TRAIN, record.step, record.groups, record.step_start, keeps_tokens, lines)

    def _write_rollouts(
        self,
        split: str,
        iteration: int,
        groups: Sequence[CreditedGroup],
        started: float,
        tokens: bool,
        lines: tuple[int, int],
    ) -> None:
        """Write the summaries of an iteration's rollouts and its line in the index; with ``tokens`` also its tokens,
        logtree and page.

        ``lines`` is the byte range [begin, end) of the iteration's completions in ``emergence/generations.jsonl`` or,
        for an evaluation, in ``emergence/evaluations.jsonl``.
        """
        config, run, condition = self.context.config, self.context.run_id, self.context.condition
        weights = {part.shown_name: (part.weight, part.offset) for part in config.reward.components}
        batch = Batch(split, iteration, groups, run, condition, started, self._token_text, weights)
        num_groups = config.logging.num_groups_to_log if tokens else None
        self.wrote(*write_rollouts(self.directory, batch, num_groups, self.check_directory))
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        totals = [reward.total_reward for reward in rewards if reward.total_reward is not None]
        line = IterationFiles(
            split=split,
            iteration=iteration,
            groups=len(groups),
            rollouts=len(rewards),
            correct=sum(reward.is_correct for reward in rewards),
            reward=sum(totals) / len(totals) if totals else None,
            lines=lines,
            name=batch.name,
            tokens=tokens_name(split, iteration) if tokens else None,
        )
        self.append(layout.ITERATIONS, [line.to_row()])


class NullRecorder(RunRecorder):
    """Recorder of ranks other than 0: it measures and writes nothing and has no tracker. ``any_written`` is true, so
    that these ranks restore a run from its checkpoint as rank 0 does."""

    any_written = True  # pyright: ignore[reportAssignmentType]

    def __init__(self, run_dir: Path, context: RunContext):
        super().__init__(run_dir, context, trackers={})

    def check_directory(self) -> None: ...

    def write(self, task: Work, always: bool = False) -> None: ...

    def flush(self) -> None: ...

    def record_step(self, record: StepRecord) -> Row:
        return {}

    def record_eval(self, record: EvalRecord) -> Row:
        return {}

    def evaluations(self) -> list[Row]:
        return []

    def seal(self) -> Row:
        return {}

    def truncate(self, step: int) -> None: ...


def _sum(rows: Mapping[str, int], added: Mapping[str, int]) -> dict[str, int]:
    return {**rows, **{name: rows.get(name, 0) + count for name, count in added.items()}}


def _remove_rollouts(directory: Path, split: str, iteration: int) -> None:
    for ending in (layout.SUMMARIES, layout.LOGTREE, layout.PAGE):
        (directory / f"{batch_name(split, iteration)}{ending}").unlink(missing_ok=True)
    (directory / tokens_name(split, iteration)).unlink(missing_ok=True)


def write_rollouts(
    directory: Path, batch: Batch, num_groups: int | None, check: Callable[[], None] = lambda: None
) -> list[Path]:
    """Write the summaries of a batch and, unless ``num_groups`` is None, all tokens, and a logtree and a page with the
    texts of ``num_groups`` groups; return the paths. Does not wait for the disk. ``check`` is called before the first
    file is written; if it raises, nothing is written."""
    texts = {layout.SUMMARIES: "".join(dumps(row) + "\n" for row in summary_rows(batch))}
    if num_groups is not None:
        texts[layout.LOGTREE] = dumps(logtree(batch, num_groups)) + "\n"
        texts[layout.PAGE] = rollout_page(batch, num_groups)
    paths = {directory / f"{batch.name}{ending}": text for ending, text in texts.items()}
    check()
    for path, text in paths.items():
        write_text(path, text, durable=False)
    return [*paths, *([] if num_groups is None else [write_tokens(directory, batch)])]
