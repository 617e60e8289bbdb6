"""The files of a run, written by a thread: training hands its records over and goes on.

``Thread`` does pieces of work in order. ``RecordFiles`` is the files of one directory behind such a thread,
``RunFiles`` those of a run.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from retrain.errors import LeaseLost, RunFailed, StorageError
from retrain.files import append_jsonl, dumps, fsync, keep_rows, truncate_jsonl, write_text, writing
from retrain.ownership import DirectoryIdentity
from retrain.records.columns import ColumnWriter
from retrain.records.measure import RunContext
from retrain.records.reader import RunReader
from retrain.records.rollout_page import rollout_page
from retrain.records.rollouts import (
    TRAIN,
    Batch,
    TokenText,
    batch_name,
    generations,
    held_out_completions,
    logtree,
    summary_rows,
)
from retrain.records.schema import layout
from retrain.records.schema.base import Row
from retrain.records.schema.rows import Evaluation, Iteration, Note, StepSpans, StepSummary
from retrain.records.tokens import tokens_name, write_tokens
from retrain.types import CreditedGroup, EvalRecord, StepRecord

ROW_FILES = (layout.METRICS, layout.STEPS, layout.GENERATIONS, layout.SPANS)
"""Records in which every step has a row."""
EVALUATION_FILES = (layout.EVALS, layout.EVALUATIONS)
"""Records with the rows of evaluations."""
WAITING_STEPS = 16  # Events of a run that may wait for the disk; training waits while there are more
UNSYNCED = 256
"""Files that may wait for the disk itself: a run that saves no checkpoints names new ones with every step."""

Work = Callable[[], object]


class Thread:
    """Does pieces of work in order, on one thread that starts with the first of them.

    At most ``limit`` pieces wait. The first exception becomes ``error``; from then on only work put with ``always`` is
    done.
    """

    def __init__(self, name: str, limit: int):
        self.name = name
        self.error: Exception | None = None
        self._queue: queue.Queue[tuple[Work, bool] | None] = queue.Queue(limit)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, task: Work, always: bool = False, wait: bool = True) -> bool:
        """Do it after everything put before. While the queue is full this waits, or does nothing and returns False."""
        self._start()
        try:
            self._queue.put((task, always), block=wait)
        except queue.Full:
            return False
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything put so far is done, for at most ``timeout`` seconds; return whether it is."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        done = threading.Event()
        try:
            self._queue.put((done.set, True), timeout=timeout)
        except queue.Full:
            return False
        return done.wait(timeout)

    def close(self, last: Work = lambda: None) -> None:
        """Finish everything put, then ``last``, and end the thread if it has begun; putting more starts another."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put((last, False))
            self._queue.put(None)
            thread.join()

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None:
                # Daemonic: a tracker that hangs must not keep the process alive. Whoever needs the work done waits.
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            task, always = item
            if self.error is not None and not always:
                continue
            try:
                task()
            except Exception as error:  # reported by whoever owns the thread
                self.error = self.error or error


class RecordFiles:
    """The files of one run or campaign directory, written in order by one thread.

    ``write`` takes a function that calls ``append`` or whatever else writes files; it runs on the thread. A failure
    there is raised as RunFailed by the next ``write`` or ``flush``.

    Before each function and each append the thread calls ``guard`` (which raises LeaseLost once another process owns
    the directory) and checks that the directory is still the one of the first write. When either fails, nothing further
    is written.
    """

    def __init__(self, directory: Path, guard: Callable[[], None] = lambda: None):
        self.directory, self._guard = directory, guard
        self._identity: DirectoryIdentity | None = None
        self._thread = Thread(f"records of {directory.name}", WAITING_STEPS)
        self._unsynced: set[Path] = set()

    def write(self, task: Work, always: bool = False) -> None:
        """Do ``task`` on the thread; ``always``: also after a failure, which is then not raised here."""
        if not always:
            self.check()
        self._thread.put(partial(self._guarded, task), always)

    def append(self, name: str, rows: Iterable[object]) -> tuple[int, int]:
        """Add lines to ``name`` (on the thread); return the bytes [begin, end) that they take. After a failure none of
        them stays."""
        path = self.directory / name
        self.check_directory()
        with writing(path):
            place = append_jsonl(path, rows)
        self.wrote(path)
        return place

    def append_text(self, name: str, text: str) -> None:
        """Add text to ``name`` (on the thread)."""
        path = self.directory / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", errors="replace", newline="\n") as file:
                file.write(text)
        self.wrote(path)

    def wrote(self, *paths: Path) -> None:
        """Note files that were written (on the thread) without waiting for the disk: the next ``flush`` does."""
        self._unsynced.update(paths)
        if len(self._unsynced) > UNSYNCED:
            self._sync()

    def flush(self) -> None:
        """Wait until everything so far is on the disk itself. Raises RunFailed when it could not be written."""
        self._thread.put(partial(self._guarded, self._sync))
        self._thread.wait()
        self.check()

    def check(self) -> None:
        """Raise RunFailed when something could not be written."""
        error = self._thread.error
        if isinstance(error, StorageError | LeaseLost):
            raise error
        if isinstance(error, RunFailed):
            raise RunFailed(str(error)) from error
        if error is not None:
            raise RunFailed(f"the records could not be written: {type(error).__name__}: {error}") from error

    def close(self) -> bool:
        """Write and sync what is left and end the thread; return whether all of it could be written."""
        self._thread.close(last=self._sync)
        return self._thread.error is None

    def check_directory(self) -> None:
        """Raise LeaseLost or StorageError unless the directory is still this process's; any thread may call it."""
        if self._identity is None:
            with writing(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            self._identity = DirectoryIdentity(self.directory)
        self._identity.check()
        self._guard()

    def _guarded(self, task: Work) -> None:
        self.check_directory()
        task()

    def _sync(self) -> None:
        folders = set()
        for path in self._unsynced:
            if path.exists():  # a step's page may have been replaced or pruned since
                with writing(path):
                    fsync(path)
                folders.add(path.parent)
        for folder in folders:
            fsync(folder)
        self._unsynced.clear()


class RunFiles(RecordFiles):
    """The files in which one run records its steps and evaluations.

    ``token_text`` places a completion's tokens in its text, for the pages.
    """

    def __init__(
        self, directory: Path, context: RunContext, token_text: TokenText | None, guard: Callable[[], None]
    ) -> None:
        super().__init__(directory, guard)
        self.context, self._token_text = context, token_text
        self._columns = ColumnWriter(directory / layout.METRICS)

    @property
    def any_written(self) -> bool:
        """Return whether an earlier process has recorded anything here."""
        names = (*ROW_FILES, layout.NOTES, layout.EVALS, layout.CHECKPOINTS)
        return any((self.directory / name).exists() for name in names)

    def write_step(self, record: StepRecord, row: Row, notes: Sequence[Note]) -> None:
        """Write all files of one step (on the thread)."""
        self.append(layout.METRICS, [row])
        self.wrote(*self._columns.follow())
        self.append(layout.STEPS, [_step_summary(record, row)])
        lines = self.append(layout.GENERATIONS, generations(record))
        self.append(layout.SPANS, [_step_spans(record)])
        self.append(layout.NOTES, [note.to_row() for note in notes])
        tokens = self.context.keeps_tokens(record.step)
        self._write_rollouts(TRAIN, record.step, record.groups, record.step_start, tokens, lines)

    def write_evaluation(self, record: EvalRecord, row: Row, started: float) -> None:
        """Write all files of one evaluation (on the thread)."""
        sampling = {key: getattr(record, key) for key in Evaluation.field_names()}
        self.append(layout.EVALS, [sampling | row])
        config = self.context.config
        lines = self.append(layout.EVALUATIONS, held_out_completions(record, config.reward.strict_answers))
        groups, tokens = list(map(CreditedGroup.of, record.groups)), config.logging.rollouts_every > 0
        self._write_rollouts(f"eval/{record.name}", record.step, groups, started, tokens, lines)

    def _write_rollouts(
        self,
        split: str,
        iteration: int,
        groups: Sequence[CreditedGroup],
        started: float,
        tokens: bool,
        lines: tuple[int, int],
    ) -> None:
        """Write an iteration's rollouts, with ``tokens`` also its pages and tokens, and its line in the index.

        ``lines`` are the bytes [begin, end) of its completions in ``emergence/generations.jsonl``, of an evaluation in
        ``emergence/evaluations.jsonl``.
        """
        config, run, condition = self.context.config, self.context.run_id, self.context.condition
        weights = {part.shown_name: (part.weight, part.offset) for part in config.reward.components}
        batch = Batch(split, iteration, groups, run, condition, started, self._token_text, weights)
        self.check_directory()
        self.wrote(*write_rollouts(self.directory, batch, config.logging.num_groups_to_log if tokens else None))
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        totals = [reward.total_reward for reward in rewards if reward.total_reward is not None]
        line = Iteration(
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

    def truncate(self, step: int) -> dict[str, int]:
        """Remove everything at and after ``step`` (the next step to run) and lines torn by a kill. Return the rows that
        are left in each record."""
        self.flush()
        reader = RunReader(self.directory)
        # An evaluation or checkpoint numbered n was made at the end of step n - 1, before the state restored at n.
        done = step + 1 if step > 0 else 0
        for row in reader.iter_metrics():
            if row["step"] >= step:
                self._remove_rollouts(TRAIN, row["step"])
        for row in reader.evaluations():
            if row["step"] >= done:
                self._remove_rollouts(f"eval/{row['name']}", row["step"])
        counts = {name: truncate_jsonl(self.directory / name, step) for name in ROW_FILES}
        truncate_jsonl(self.directory / layout.NOTES, step)
        index = self.directory / layout.ITERATIONS
        keep_rows(index, lambda row: row["iteration"] < (step if row["split"] == TRAIN else done))
        self._columns.forget()
        counts |= {name: truncate_jsonl(self.directory / name, done) for name in EVALUATION_FILES}
        truncate_jsonl(self.directory / layout.CHECKPOINTS, done, key="batch")
        return counts

    def _remove_rollouts(self, split: str, iteration: int) -> None:
        for ending in (layout.SUMMARIES, layout.LOGTREE, layout.PAGE):
            (self.directory / f"{batch_name(split, iteration)}{ending}").unlink(missing_ok=True)
        (self.directory / tokens_name(split, iteration)).unlink(missing_ok=True)


def write_rollouts(directory: Path, batch: Batch, num_groups: int | None) -> list[Path]:
    """Write the summary lines and, unless ``num_groups`` is None, every token, and logtree and page with the texts of
    ``num_groups`` groups, without waiting for the disk; return the paths."""
    texts = {layout.SUMMARIES: "".join(dumps(row) + "\n" for row in summary_rows(batch))}
    if num_groups is not None:
        texts[layout.LOGTREE] = dumps(logtree(batch, num_groups)) + "\n"
        texts[layout.PAGE] = rollout_page(batch, num_groups)
    paths = {directory / f"{batch.name}{ending}": text for ending, text in texts.items()}
    for path, text in paths.items():
        write_text(path, text, durable=False)
    return [*paths, *([] if num_groups is None else [write_tokens(directory, batch)])]


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
