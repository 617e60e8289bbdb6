"""Everything a run leaves behind, written as it happens: one line per event, flushed, strict JSON.

Rows are made where they are recorded and written by a thread, in order; ``flush`` waits until they are on the disk.
A row depends on what happened and on the recorder's saved state only, so a resumed run continues its files exactly:
``truncate`` removes what came after the restored step and ``restore`` brings back the running sums.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from retrain.errors import StorageError
from retrain.files import read_jsonl, truncate_jsonl, write_json
from retrain.record.columns import METRICS, ColumnWriter
from retrain.record.context import RunContext
from retrain.record.environment import SystemInfo
from retrain.record.evaluation import answer_of, eval_row
from retrain.record.measure import Row, Totals, step_row, tags_to_show
from retrain.record.notes import WINDOW, Note, explain
from retrain.record.rollout_files import INDEX, index_line, remove_files, truncate_index, write_files
from retrain.record.rollouts import TRAIN, Batch, TokenText, conversation_of
from retrain.record.samples import collect, everything
from retrain.record.secrets import without_keys
from retrain.record.timeline import write_timeline
from retrain.record.trackers import Tracker, make_trackers
from retrain.record.writer import RecordFiles, Reporter
from retrain.types import EvalRecord, Rollout, StepRecord

PROMPT_CHARACTERS = 200
COMPLETION_CHARACTERS = 500
SHOWN = 1000
"""Characters of a completion in ``emergence/evaluations.jsonl``; of a longer one the beginning and the end."""
SHOWN_END = 300
ROW_FILES = ("metrics.jsonl", "emergence/steps.jsonl", "emergence/generations.jsonl", "timing_spans.jsonl")
"""Records in which every step has a row."""
STEP_FILES = (*ROW_FILES, "notes.jsonl")
"""Records whose rows belong to a step."""


SERVER_REMEDY = "requests wait for a server, or go to the others; a launched one says more in server.log"


class RunRecorder:
    """Writes one run's directory.

    Order of calls: ``RunRecorder(…)``, on resume ``restore(state)`` and ``truncate(step)``, then ``start(facts)``; per
    step ``record_eval`` for the evaluations that belong to it, then ``record_step``; ``flush`` before what is recorded
    must outlive the process; ``close`` at the end. Trackers start in ``start`` and stop the run there when they cannot
    (``RetrainError``); a later failure of one is reported once through ``warn`` and in ``run.log``, as are odd numbers
    that need attention. Any call raises RunFailed (of a disk, StorageError) when an earlier record could not be
    written. ``token_text`` places a completion's tokens in its text, for the pages.
    """

    def __init__(
        self,
        run_dir: Path,
        context: RunContext,
        trackers: Mapping[str, Tracker] | None = None,
        warn: Callable[[str], None] = lambda text: None,
        token_text: TokenText | None = None,
    ):
        self.directory = Path(run_dir)
        self.context = context
        self.totals = Totals()
        self._show = warn
        self._files = RecordFiles(self.directory)
        self._columns = ColumnWriter(self.directory / METRICS)
        wanted = make_trackers(context, self.directory) if trackers is None else trackers
        self._reporters = [Reporter(name, tracker, self._warn) for name, tracker in wanted.items()]
        self._known_keys: dict[str, None] = {}
        self._known_tags: tuple[str, ...] = ()
        self._evaluations: Row = {}
        self._tracker_state: dict[str, Any] = {}
        self._token_text = token_text
        self._rows: list[Row] = []  # the first row and the newest, for remarks
        self._noted: set[str] = set()
        self._dtype = "float32"
        self._started = False
        self._marker = self.directory

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.log_error(error)
        if not self.close(failed=error is not None) and error is None:
            self._files.check()

    def start(self, facts: Mapping[str, Any] | None = None, system: SystemInfo | None = None) -> None:
        """Have ``config.json`` (``facts`` as given) and the files of ``system`` written, and start the trackers;
        a second call does nothing."""
        if self._started:
            return
        self._started = True
        self.directory.mkdir(parents=True, exist_ok=True)
        if facts is not None:
            self._marker = marker = self.directory / "config.json"
            self._files.write(lambda: write_json(marker, facts))
            self._dtype = (facts.get("built") or {}).get("dtype") or self._dtype
        if system is not None:
            self._files.write(lambda: system.write(self.directory))
        self.log(f"start {self.context.run_id}: {self.context.condition}, seed {self.context.seed}")
        for reporter in self._reporters:
            earlier = self._tracker_state.get(reporter.name)
            self._tracker_state[reporter.name] = reporter.start(self.context, earlier)

    @property
    def begun(self) -> bool:
        """Whether an earlier process has recorded anything here."""
        return any((self.directory / name).exists() for name in (*STEP_FILES, "evals.jsonl", "checkpoints.jsonl"))

    def record_step(self, record: StepRecord) -> Row:
        """Make the step's row, which is returned, and have everything about the step written."""
        self.start()
        samples = collect(record.groups)
        self._known_tags = tuple(sorted({*self._known_tags, *tags_to_show(samples, self.context)}))
        row = step_row(record, self.context, self.totals, self._known_tags, self._evaluations, samples)
        self.totals = self.totals.plus(everything(record, samples), record.step_start)
        self._evaluations = {}
        for key in sorted(self._known_keys):
            row.setdefault(key, None)
        self._known_keys.update(dict.fromkeys(row))
        notes = self._remarks(row)
        self._files.write(lambda: self._write_step(record, row, notes))
        for reporter in self._reporters:
            reporter.log(record.step, row)
        return row

    def _remarks(self, row: Row) -> list[Note]:
        """What is odd about this row and was not noted before; logged, and a warning if something is to be done."""
        self._rows = [*self._rows[:1], *self._rows[1:][-WINDOW:], row]
        notes = explain(self._rows, self.context.config, self._dtype, self._noted)
        for note in notes:
            self._noted.add(note.key)
            say = self._warn if note.level == "warning" else self.log
            say(f"step {note.step}: {note}")
        return notes

    def _write_step(self, record: StepRecord, row: Row, notes: Sequence[Note]) -> None:
        """All files of one step; runs on the files' thread."""
        self._check_directory()
        self._files.append(METRICS, [row])
        self._files.wrote(*self._columns.follow())
        self._files.append("emergence/steps.jsonl", [emergence_step(record, row)])
        lines = self._files.append("emergence/generations.jsonl", generations(record))
        self._files.append("timing_spans.jsonl", [timing_spans(record)])
        self._files.append("notes.jsonl", map(asdict, notes))
        batch = Batch(TRAIN, record.step, record.groups, *self._named, record.step_start)
        self._write_rollouts(batch, self.keeps_tokens(record.step), lines)

    def keeps_tokens(self, step: int) -> bool:
        """Whether the rollouts of this step are recorded token by token, with their pages."""
        every = self.context.config.logging.rollouts_every
        return every > 0 and (step % every == 0 or step + 1 == self.context.max_steps)

    @property
    def _named(self) -> tuple[str, str]:
        return self.context.run_id, self.context.condition

    def _write_rollouts(self, batch: Batch, pages: bool, lines: tuple[int, int]) -> None:
        config = self.context.config
        weights = {part.shown_name: (part.weight, part.offset) for part in config.reward.components}
        batch = replace(batch, token_text=self._token_text, weights=weights)
        shown = config.logging.num_groups_to_log if pages else None
        self._files.wrote(*write_files(self.directory, batch, shown))
        self._files.append(INDEX, [index_line(batch, shown, lines)])

    def record_eval(self, record: EvalRecord) -> Row:
        """Write one evaluation to ``evals.jsonl``; its keys join the metrics row of the next ``record_step``.

        ``record.step`` counts the optimizer steps done, so the untrained model is step 0 and the evaluation after
        the update of row n has step n + 1. When two of them meet in one row (the first), the later one stands there.
        """
        self.start()
        config = self.context.config
        row = eval_row(record, self.context.tags_of(record.name), config.reward.strict_answers, config.audit.wanted)
        self._evaluations.update(row)
        started = time.time() - record.seconds
        self._files.write(lambda: self._write_eval(record, row, started))
        return row

    def _write_eval(self, record: EvalRecord, row: Row, started: float) -> None:
        """All files of one evaluation; runs on the files' thread."""
        self._check_directory()
        sampling = ("step", "name", "temperature", "top_p", "top_k", "min_p", "max_tokens", "samples", "seconds")
        self._files.append("evals.jsonl", [{key: getattr(record, key) for key in sampling} | row])
        strict, pages = self.context.config.reward.strict_answers, self.context.config.logging.rollouts_every > 0
        lines = self._files.append("emergence/evaluations.jsonl", evaluated(record, strict))
        batch = Batch(f"eval/{record.name}", record.step, record.groups, *self._named, started)
        self._write_rollouts(batch, pages, lines)

    def record_checkpoint(self, row: Mapping[str, Any]) -> None:
        """Append one line to ``checkpoints.jsonl``, after all earlier records, and wait until all are on the disk.

        Call it when the checkpoint's directory is complete. ``row`` has ``name``, ``batch`` (next step to run),
        ``state_path``, ``sampler_path`` and any loop state.
        """
        line = dict(row)
        self._files.write(lambda: self._files.append("checkpoints.jsonl", [line]))
        self.flush()
        self._files.write(lambda: write_timeline(self.directory))  # so that a killed run has one too

    def flush(self) -> None:
        """Wait until everything recorded so far is on the disk; call it before a checkpoint gets its name.

        Any thread may. Raises RunFailed when something could not be written.
        """
        self._files.flush()

    def _check_directory(self) -> None:
        """Raise StorageError when the directory has vanished: making it again would hide that records are lost."""
        if not self._marker.exists():
            raise StorageError(self.directory, "the directory has vanished")

    def log(self, text: str, level: str = "info") -> None:
        """One time-stamped line (or several) in ``run.log``; never raises."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {level:<7} {line}\n" for line in without_keys(text).splitlines() or [""])
        self._files.write(lambda: self._files.append_text("run.log", lines), always=True)

    def record_server(self, step: int, text: str, level: str = "info") -> None:
        """Log what happened to a server that a run samples from, and note it unless ``level`` is info. Any thread may;
        never raises."""
        self.log(text, level)
        if level != "info":
            note = Note(step, "server", level, without_keys(text), SERVER_REMEDY)
            self._files.write(lambda: self._files.append("notes.jsonl", [asdict(note)]), always=True)

    def log_error(self, error: BaseException) -> None:
        """The error with its traceback in ``run.log``."""
        self.log("".join(traceback.format_exception(error)), level="error")

    def truncate(self, step: int) -> None:
        """Remove everything at and after ``step`` (the next step to run) and lines torn by a kill."""
        self.flush()
        # An evaluation or checkpoint numbered n was made at the end of step n - 1, before the state restored at n.
        done = step + 1 if step > 0 else 0
        for row in read_jsonl(self.directory / "metrics.jsonl"):
            if row["step"] >= step:
                remove_files(self.directory, TRAIN, row["step"])
        for row in read_jsonl(self.directory / "evals.jsonl"):
            if row["step"] >= done:
                remove_files(self.directory, f"eval/{row['name']}", row["step"])
        for name in STEP_FILES:
            truncate_jsonl(self.directory / name, step)
        truncate_index(self.directory, step, done)
        self._columns.forget()
        truncate_jsonl(self.directory / "evals.jsonl", done)
        truncate_jsonl(self.directory / "emergence/evaluations.jsonl", done)
        truncate_jsonl(self.directory / "checkpoints.jsonl", done, key="batch")
        rows = read_jsonl(self.directory / "metrics.jsonl")
        self._rows = [*rows[:1], *rows[1:][-WINDOW:]]
        self._noted = {row["key"] for row in read_jsonl(self.directory / "notes.jsonl")}
        self.log(f"records truncated to the {step} finished steps")

    def state(self) -> dict[str, Any]:
        """What must be saved for an exact continuation, as JSON."""
        return {
            "totals": asdict(self.totals),
            "known_keys": list(self._known_keys),
            "known_tags": list(self._known_tags),
            "evaluations": dict(self._evaluations),
            "trackers": dict(self._tracker_state),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved ``state()``; call before ``start``."""
        self.totals = Totals(**state["totals"])
        self._known_keys = dict.fromkeys(state["known_keys"])
        self._known_tags = tuple(state["known_tags"])
        self._evaluations = dict(state["evaluations"])
        self._tracker_state = dict(state["trackers"])

    def begin_trackers_anew(self) -> None:
        """Report as a run of its own: the restored state is another run's. Call before ``start``."""
        self._tracker_state = {}

    def close(self, failed: bool = False) -> bool:
        """Finish the trackers and write what is left; whether everything could be written. Raises nothing."""
        if self._started:
            self._started = False
            for reporter in self._reporters:
                reporter.finish(failed)
            self._files.write(lambda: write_timeline(self.directory), always=True)
            self.log("failed" if failed else "closed")
        return self._files.close()

    def _warn(self, text: str) -> None:
        self.log(text, level="warning")
        self._show(text)


def emergence_step(record: StepRecord, row: Row) -> Row:
    """One line of ``emergence/steps.jsonl``."""
    rewards = [rollout.reward for group in record.groups for rollout in group.rollouts]
    return {
        "step": record.step,
        "mean_reward": row["mean_reward"],
        "correct_count": sum(reward.is_correct for reward in rewards),
        "total_count": len(rewards),
        "condition": row["condition"],
        "uncertainty_kind": row["uncertainty_kind"],
        **{key: row[key] for key in row if key.startswith(("exec_", "plan_"))},
    }


def generations(record: StepRecord) -> list[Row]:
    """Every completion of the step, for ``emergence/generations.jsonl``."""
    return [
        rollout_facts(record.step, rollout)
        | {
            "reference": rollout.prompt.problem.answer[:PROMPT_CHARACTERS],
            "group": index,
            "sample": sample,
            "advantage": rollout.advantage,
        }
        for index, group in enumerate(record.groups)
        for sample, rollout in enumerate(group.rollouts)
    ]


def evaluated(record: EvalRecord, strict: bool = True) -> list[Row]:
    """Every completion of the evaluation, for ``emergence/evaluations.jsonl``; ``step`` counts the updates done.

    ``strict`` says what counts as its answer (``answer_of``).
    """
    return [
        rollout_facts(record.step, rollout)
        | {
            "completion": shortened(rollout.text),
            "name": record.name,
            "sample": sample,
            "tags": list(rollout.prompt.problem.tags),
            "reference": rollout.prompt.problem.answer[:PROMPT_CHARACTERS],
            "answer": answer_of(rollout, strict),
        }
        for group in record.groups
        for sample, rollout in enumerate(group.rollouts)
    ]


def shortened(text: str) -> str:
    """The text, or its beginning and end where it is long: an answer stands at the end."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - SHOWN_END]} […] {text[-SHOWN_END:]}"


def rollout_facts(step: int, rollout: Rollout) -> Row:
    """What both kinds of lines say of one rollout, its texts shortened; ``prompt`` is the last message, with ``[data]
    prompt_template`` and without chat markup."""
    reward, messages = rollout.reward, conversation_of(rollout.prompt)
    return {
        "step": step,
        "prompt": (messages[-1]["content"] if messages else rollout.prompt.text)[:PROMPT_CHARACTERS],
        "completion": rollout.text[:COMPLETION_CHARACTERS],
        "reward": reward.total_reward,
        "num_tokens": len(rollout),
        "stop_reason": rollout.stop_reason,
        "correct": reward.is_correct,
        "problem_id": rollout.prompt.problem.id,
        **({"error": without_keys(reward.error)} if reward.error else {}),
    }


def timing_spans(record: StepRecord) -> Row:
    """One line of ``timing_spans.jsonl``; wall clock in seconds since the epoch."""
    spans = [
        {"name": name, "duration": end - start, "wall_start": start, "wall_end": end}
        for name, start, end in record.spans
    ]
    return {"step": record.step, "spans": spans}
