"""Writes, verifies and loads the checkpoints of a run. Writing is atomic: files are hashed, synced, then renamed."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from retrain.config.training import Training
from retrain.errors import CheckpointError, NotReadable, UsageError
from retrain.files import aside_of, iter_jsonl, read_json, sha256, write_bytes, write_json, writing
from retrain.ownership import Owner, install, is_whole, owner_of, publish, remove
from retrain.policy.protocol import Policy, PolicySnapshot
from retrain.records.reader import recorded_checkpoints
from retrain.records.recorder import RunRecorder
from retrain.records.schema.campaign import CheckpointFiles
from retrain.records.schema.layout import EVALUATION_FILES, MANIFEST, SAVED, STATE
from retrain.records.schema.rows import Checkpoint
from retrain.training.state import RunState

FORMAT = 3


@dataclass(frozen=True)
class Snapshot:
    step: int
    policy: PolicySnapshot
    state: str  # ``RunState`` as JSON
    earlier: Mapping[int, PolicySnapshot] = field(default_factory=dict)  # Weights that still sample, by earlier step
    cursor: int = 0  # Training problems taken so far


def write_checkpoint(directory: Path, saved: Snapshot, guard: Callable[[], None] = lambda: None) -> None:
    """Write the snapshot as one directory, atomically.

    ``guard`` is called before the final rename; an exception from it prevents the rename. Raises StorageError for a
    failed write, NotOurs when ``directory`` belongs to another owner, and CheckpointError when the policy wrote a
    symbolic link; partial files are removed.
    """
    aside = aside_of(directory)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with writing(aside):
            aside.mkdir(parents=True)
        saved.policy.write(aside)
        for step, weights in saved.earlier.items():
            target = earlier_weights_directory(aside, step)
            target.mkdir(parents=True)
            weights.export(target, aside)
        write_bytes(aside / STATE, saved.state.encode())
        files = [path for path in sorted(aside.rglob("*")) if path.is_symlink() or not path.is_dir()]
        if links := [path for path in files if path.is_symlink()]:
            raise CheckpointError(f"the backend saved a link, {links[0].name}: a checkpoint holds its own files")
        hashes = {path.relative_to(aside).as_posix(): sha256(path) for path in files}
        write_json(aside / MANIFEST, CheckpointFiles(FORMAT, hashes).to_row())
        guard()
        publish(aside, directory, _owner(directory))
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def verify_checkpoint(directory: Path) -> None:
    """Raise CheckpointError unless every file of the manifest exists with its hash and is no link.

    Raises NotReadable for a file that cannot be read (it may be intact), UsageError for another layout version.
    """
    try:
        manifest = read_json(directory / MANIFEST)
        hashes, written = manifest["sha256"].items(), manifest["format"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory} has no valid {MANIFEST}") from error
    except OSError as error:
        raise NotReadable(directory / MANIFEST, error) from error
    if written != FORMAT:
        raise UsageError(
            f"{directory} is a checkpoint of layout {written}, this version of retrain reads layout {FORMAT}: continue "
            "it with the version that wrote it, or begin anew with another --out"
        )
    if STATE not in {name for name, _ in hashes}:
        raise CheckpointError(f"{directory / MANIFEST} does not name {STATE}")
    for name, digest in hashes:
        path = directory / name
        if Path(name).is_absolute() or path.resolve() != directory.resolve() / name:  # "..", links on the way
            raise CheckpointError(f"{path} is not a file of this checkpoint")
        try:
            undamaged = path.is_file() and sha256(path) == digest
        except OSError as error:
            raise NotReadable(path, error) from error
        if not undamaged:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}")


def load_checkpoint(directory: Path, policy: Policy) -> dict[str, Any]:
    """Verify the checkpoint, load the policy's tensors in place, and return the run's other state as JSON."""
    verify_checkpoint(directory)
    policy.load(directory)
    return read_json(directory / STATE)


def earlier_weights_directory(checkpoint: Path, step: int) -> Path:
    return checkpoint / "earlier" / f"step_{step:06d}"


def checkpoint_directory(run_directory: Path, step: int) -> Path:
    return run_directory / SAVED / f"step_{step:06d}"


def checkpoint_directories(run_directory: Path) -> list[Path]:
    """Return the directories of the run's own checkpoints, oldest first, without verifying their files.

    If the run directory has no owner mark, checkpoints of unknown owner are returned too. ``remove`` leaves them alone.
    """
    folder = run_directory / SAVED
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:  # there may be checkpoints: do not start again from step 0
        raise NotReadable(folder, error) from error
    named = (folder / name for name in names if name.startswith("step_") and name[5:].isdecimal())
    marked = owner_of(run_directory) is not None
    return sorted((path for path in named if is_whole(path, _owner(path) if marked else None)), key=checkpoint_step)


def _owner(directory: Path) -> Owner | None:
    run = owner_of(directory.parent.parent)
    return run and run.at(f"checkpoints/{directory.name}")


def checkpoint_step(directory: Path) -> int:
    return int(directory.name[5:])


def missing_rows(run_directory: Path, step: int) -> list[str]:
    """Return one sentence for each record file that lacks rows which it had when the checkpoint of ``step`` was
    written.

    The checkpoint holds the number of rows of each file. Damaged files are skipped, because resuming reports them.
    """
    saved = read_json(checkpoint_directory(run_directory, step) / STATE)
    missing = []
    for name, expected in saved["recorder"]["rows"].items():
        with suppress(CheckpointError):
            if (found := count_rows(run_directory, name, step)) < expected:
                missing.append(f"{name} has {found} of its {expected} rows")
    return missing


def count_rows(run_directory: Path, name: str, step: int) -> int:
    """Return the number of rows of a record that belong to the first ``step`` steps of its run."""
    end = step + 1 if name in EVALUATION_FILES else step
    return sum(row.get("step", -1) < end for row in iter_jsonl(run_directory / name))


@dataclass(frozen=True)
class CommonStep:
    step: int
    missing_rows: list[list[str]]  # For each run, the sentences of ``missing_rows``


def newest_undamaged(run_directory: Path, report: list[str]) -> Path | None:
    """Return the newest undamaged checkpoint, or None; append a line to ``report`` for each damaged, newer one."""
    checkpoints = reversed(checkpoint_directories(run_directory))
    return next((path for path in checkpoints if _is_undamaged(path, report)), None)


def _is_undamaged(checkpoint: Path, report: list[str]) -> bool:
    try:
        verify_checkpoint(checkpoint)
    except CheckpointError as error:
        report.append(f"skipped a damaged checkpoint: {error}")
        return False
    return True


def common_step(runs: Sequence[tuple[Path, int]], reports: Sequence[list[str]]) -> CommonStep:
    """Return the newest step at which every run of a cohort has an undamaged checkpoint; step 0, the start, if there is
    none.

    ``runs`` are (directory, max_steps). A run that has ended by a step only needs the checkpoint of its last step. A
    step at which a run's records lack rows is passed over for an earlier step with all rows. If every step lacks rows,
    the newest is returned with its missing rows, and the caller decides. Damaged checkpoints and passed-over steps are
    appended to the run's report. Checkpoints of step 0 are ignored.
    """
    newest: CommonStep | None = None
    for candidate in _whole_steps(runs, reports):
        if not any(candidate.missing_rows):
            for report, lines in zip(reports, newest.missing_rows if newest else (), strict=False):
                report += [f"went back to step {candidate.step}, the newest with all rows: {line}" for line in lines]
            return candidate
        newest = newest or candidate
    return newest or CommonStep(0, [[] for _ in runs])


def _whole_steps(runs: Sequence[tuple[Path, int]], reports: Sequence[list[str]]) -> Iterator[CommonStep]:
    of_runs = [{checkpoint_step(path): path for path in checkpoint_directories(directory)} for directory, _ in runs]
    undamaged: list[dict[int, bool]] = [{} for _ in runs]  # By step, of each run
    for step in sorted({*chain(*of_runs)} - {0}, reverse=True):
        ends = [min(step, last) for _, last in runs]
        for checkpoints, end, verified, report in zip(of_runs, ends, undamaged, reports, strict=True):
            if end in checkpoints and end not in verified:
                verified[end] = _is_undamaged(checkpoints[end], report)
        if all(verified.get(end) for verified, end in zip(undamaged, ends, strict=True)):
            places = zip(runs, ends, strict=True)
            yield CommonStep(step, [missing_rows(directory, end) for (directory, _), end in places])


def delete_checkpoints_after(run_directory: Path, step: int) -> None:
    for directory in checkpoint_directories(run_directory):
        if checkpoint_step(directory) > step:
            remove(directory, _owner(directory))


def prune(run_directory: Path, keep_last: int, keep_every: int = 0) -> None:
    """Delete the run's own checkpoints except the last ``keep_last`` (0 keeps all) and those at multiples of
    ``keep_every`` (0: no exception)."""
    for directory in checkpoint_directories(run_directory)[:-keep_last] if keep_last else []:
        if not (keep_every and checkpoint_step(directory) % keep_every == 0):
            remove(directory, _owner(directory))


class Checkpoints:
    """Writes and loads the checkpoints of one run. ``base_id``: fingerprint of the frozen weights;
    ``accept_other_base``: checkpoints of other weights may be loaded; ``problems``: number of training problems;
    ``export``: a directory for a copy of the final adapter."""

    def __init__(
        self,
        recorder: RunRecorder,
        training: Training,
        base_id: str,
        accept_other_base: bool,
        problems: int,
        export: Path | None,
    ):
        self.directory, self.recorder, self.training = recorder.directory, recorder, training
        self.base_id, self.accept_other_base, self.problems, self.export = base_id, accept_other_base, problems, export
        self.loaded: RunState | None = None  # Of the checkpoint that this process began with (its own or another run's)
        self.restored_step: int | None = None  # Step of the run's own checkpoint that this process continued from

    @property
    def any_written(self) -> bool:
        return bool(checkpoint_directories(self.directory))

    def write(self, saved: Snapshot) -> None:
        """Write the checkpoint, unless the run was restored from it; then discard the weights of ``saved``."""
        try:
            if saved.step != self.restored_step:
                self.recorder.flush()  # rows of the steps that a checkpoint contains are never lost
                directory = checkpoint_directory(self.directory, saved.step)
                write_checkpoint(directory, saved, self.recorder.check_directory)
        finally:
            saved.policy.discard()

    def publish(self, saved: Snapshot, final: bool) -> None:
        """Record the checkpoint and prune older ones; if it is the ``final`` one, write ``final/`` and the exported
        copy. Called after the checkpoints of the whole cohort are written."""
        self.recorder.check_directory()
        directory = checkpoint_directory(self.directory, saved.step)
        self._record_save(f"{saved.step:06d}", saved.step, directory, directory, saved.cursor)
        if final:
            target = self.directory / "final"
            aside = aside_of(target)
            saved.policy.export(aside, directory)
            self.recorder.check_directory()
            publish(aside, target, self._owner("final"))
            if self.export is not None:
                install(target, self.export, self._owner("adapter_path"))
            self._record_save("final", saved.step, directory, target, saved.cursor)
            self.recorder.flush()  # HTML pages included, before the run counts as done
        prune(self.directory, self.training.keep_last, self.training.keep_every)

    def load(self, directory: Path, policy: Policy) -> RunState:
        """Verify the checkpoint, load the policy's tensors in place, and return the run's other state.

        Raises CheckpointError when it is damaged or belongs to another base.
        """
        state = RunState.from_dict(load_checkpoint(directory, policy))
        if state.base != self.base_id and not self.accept_other_base:
            raise CheckpointError(f"{directory} was trained on other base weights than these")
        self.loaded = state
        return state

    def discard_after(self, step: int) -> None:
        self.recorder.truncate(step)
        delete_checkpoints_after(self.directory, step)

    def record_restored(self, step: int, cursor: int) -> None:
        """Record the checkpoint of ``step`` if the run was killed between writing and recording it."""
        directory = checkpoint_directory(self.directory, step)
        self._record_save(f"{step:06d}", step, directory, directory, cursor)

    def _owner(self, name: str) -> Owner | None:
        run = owner_of(self.directory)
        return run and run.at(name)

    def _record_save(self, name: str, step: int, state_path: Path, sampler_path: Path, cursor: int) -> None:
        rows = recorded_checkpoints(self.directory)
        # A save that was interrupted is made again at the same step.
        if any(row["name"] == name and row["batch"] == step for row in rows):
            return
        self.recorder.record_checkpoint(
            Checkpoint(
                name=name,
                batch=step,
                step=step - 1,
                state_path=str(state_path.relative_to(self.directory)),
                sampler_path=str(sampler_path.relative_to(self.directory)),
                epoch=cursor // max(1, self.problems),
            )
        )


class NullCheckpoints(Checkpoints):
    """Checkpoints of ranks other than the first: they are loaded, and never written."""

    def write(self, saved: Snapshot) -> None:
        saved.policy.discard()

    def publish(self, saved: Snapshot, final: bool) -> None: ...

    def discard_after(self, step: int) -> None: ...

    def record_restored(self, step: int, cursor: int) -> None: ...
