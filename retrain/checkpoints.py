"""Checkpoints of one run: a directory written aside, hashed, fsynced and renamed; the newest whole one is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from retrain.errors import CheckpointError, UsageError
from retrain.files import aside_of, read_json, sha256, write_bytes, write_json, writing
from retrain.ownership import Owner, is_whole, owner_of, publish, remove
from retrain.policy.protocol import Policy, PolicySnapshot
from retrain.record.recorder import ROW_FILES
from retrain.record.status import last_row

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT = 3


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state at ``step``: its policy, and all else as strict JSON; and by step those earlier weights
    that rollouts of later steps are drawn by."""

    step: int
    policy: PolicySnapshot
    state: str
    earlier: Mapping[int, PolicySnapshot] = field(default_factory=dict)


def write_checkpoint(directory: Path, saved: Snapshot) -> None:
    """Write the snapshot as one directory that is there whole or not at all.

    Raises StorageError when the file system refuses, NotOurs when somebody else's files have these names, and
    CheckpointError when the policy wrote a link; what had been written aside is removed.
    """
    aside = aside_of(directory)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with writing(aside):
            aside.mkdir(parents=True)
        saved.policy.write(aside)
        for step, weights in saved.earlier.items():
            own = earlier_directory(aside, step)
            own.mkdir(parents=True)
            weights.export(own, aside)
        write_bytes(aside / STATE, saved.state.encode())
        files = [path for path in sorted(aside.rglob("*")) if path.is_symlink() or not path.is_dir()]
        if links := [path for path in files if path.is_symlink()]:
            raise CheckpointError(f"the backend saved a link, {links[0].name}: a checkpoint holds its own files")
        hashes = {path.relative_to(aside).as_posix(): sha256(path) for path in files}
        write_json(aside / MANIFEST, {"format": FORMAT, "sha256": hashes})
        publish(aside, directory, _owner(directory))
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def verify_checkpoint(directory: Path) -> None:
    """Raise CheckpointError unless every file of the manifest is there with its hash, and nothing is a link."""
    try:
        manifest = read_json(directory / MANIFEST)
        hashes, written = manifest["sha256"].items(), manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory} has no readable {MANIFEST}") from error
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
        if not path.is_file() or sha256(path) != digest:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}")


def load_checkpoint(directory: Path, policy: Policy) -> dict[str, Any]:
    """Verify, then restore the policy in place; returns the JSON state."""
    verify_checkpoint(directory)
    policy.load(directory)
    return read_json(directory / STATE)


def earlier_directory(checkpoint: Path, step: int) -> Path:
    """Where a checkpoint has the weights as they were before an earlier step."""
    return checkpoint / "earlier" / f"step_{step:06d}"


def checkpoint_directory(run_directory: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return run_directory / "checkpoints" / f"step_{step:06d}"


def checkpoint_directories(run_directory: Path) -> list[Path]:
    """Checkpoints that the run has written, by step, oldest first (whole or not).

    Those that others have put there are left out, except in a directory without a mark, where nothing is ever removed.
    """
    named = (path for path in (run_directory / "checkpoints").glob("step_*") if path.name[5:].isdecimal())
    marked = owner_of(run_directory) is not None
    return sorted((path for path in named if is_whole(path, _owner(path) if marked else None)), key=checkpoint_step)


def _owner(directory: Path) -> Owner | None:
    """Whose a checkpoint in this place is: the run's around it."""
    run = owner_of(directory.parent.parent)
    return run and run.at(f"checkpoints/{directory.name}")


def checkpoint_step(directory: Path) -> int:
    """The number of updates done at a checkpoint, from its name."""
    return int(directory.name[5:])


def check_records(run_directory: Path, step: int) -> None:
    """Raise CheckpointError unless every step before ``step`` has its rows in the files that grow with the steps."""
    for name in ROW_FILES:
        try:
            last = last_row(run_directory / name).get("step", -1)
        except CheckpointError:
            continue  # a damaged line, which cutting the records to their step will name
        if last < step - 1:
            raise CheckpointError(f"{run_directory / name} ends with step {last}, the checkpoint is of step {step}")


def newest_whole(run_directory: Path, report: list[str]) -> Path | None:
    """The newest checkpoint to continue from; what is wrong with newer ones is appended to ``report``."""
    run = _Verified(run_directory, report)
    step = next((step for strict in (True, False) for step in run.steps if run.whole(step, strict)), None)
    return None if step is None else checkpoint_directory(run_directory, step)


def common_step(runs: Sequence[tuple[Path, int]], reports: Sequence[list[str]]) -> int:
    """The newest step at which every run of a cohort has a whole checkpoint; 0, the start, when there is none.

    ``runs`` are (directory, max_steps): a run that ends earlier than a step need only be whole at its own end.
    What is wrong with newer checkpoints is appended to the run's own report. A checkpoint whose records lack rows is
    passed over for an earlier one whose records are complete, and taken where there is none.
    """
    verified = [_Verified(directory, report) for (directory, _), report in zip(runs, reports, strict=True)]
    for strict in (True, False):
        for step in sorted({step for run in verified for step in run.steps}, reverse=True):
            pairs = [(run, min(step, last)) for run, (_, last) in zip(verified, runs, strict=True)]
            if all(end in run.steps for run, end in pairs) and all([run.whole(end, strict) for run, end in pairs]):
                return step
    return 0


class _Verified:
    """The checkpoints of one run, each verified at most once."""

    def __init__(self, run_directory: Path, report: list[str]):
        self.run_directory, self.report = run_directory, report
        self.steps = [checkpoint_step(path) for path in reversed(checkpoint_directories(run_directory))]
        self._faults: dict[int, str] = {}

    def whole(self, step: int, strict: bool) -> bool:
        """Whether the run can continue from there, ``strict`` with all of its records; a reason why not is reported
        once."""
        if step not in self._faults:
            self._faults[step] = self._fault(step)
        return not self._faults[step] or (not strict and self._faults[step] == "short")

    def _fault(self, step: int) -> Literal["", "damaged", "short"]:
        try:
            verify_checkpoint(checkpoint_directory(self.run_directory, step))
        except CheckpointError as error:
            self.report.append(f"skipped a damaged checkpoint: {error}")
            return "damaged"
        try:
            check_records(self.run_directory, step)
        except CheckpointError as error:
            self.report.append(f"skipped a checkpoint whose records lack rows: {error}")
            return "short"
        return ""


def forget_after(run_directory: Path, step: int) -> None:
    """Delete the run's own checkpoints of later steps, which will be made anew."""
    for directory in checkpoint_directories(run_directory):
        if checkpoint_step(directory) > step:
            remove(directory, _owner(directory))


def prune(run_directory: Path, keep_last: int, keep_every: int = 0) -> None:
    """Delete all but the last ``keep_last`` of the run's own checkpoints (0 keeps all) and those at multiples of
    ``keep_every``."""
    for directory in checkpoint_directories(run_directory)[:-keep_last] if keep_last else []:
        if not (keep_every and checkpoint_step(directory) % keep_every == 0):
            remove(directory, _owner(directory))
