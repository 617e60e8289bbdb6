"""The checkpoints of one run: what is written, published, recorded and deleted, and what it continues from."""

from pathlib import Path

from retrain.config.training import Training
from retrain.errors import CheckpointError
from retrain.files import aside_of
from retrain.ownership import Owner, install, owner_of, publish
from retrain.policy.protocol import Policy
from retrain.records.reader import RunReader
from retrain.records.recorder import RunRecorder
from retrain.records.schema.rows import Checkpoint
from retrain.training.checkpoint_files import (
    Snapshot,
    checkpoint_directories,
    checkpoint_directory,
    forget_after,
    load_checkpoint,
    prune,
    write_checkpoint,
)
from retrain.training.state import RunState


class Checkpoints:
    """Saves and loads one run. ``base_id`` is the fingerprint of its frozen weights, ``accept_other_base`` whether the
    user has accepted to continue a checkpoint of other ones; ``problems`` is the size of its training data, ``export``
    the user's directory that also receives the final adapter."""

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
        self.loaded: RunState | None = None  # Of the checkpoint that this process began with, another run's included
        self.restored_step: int | None = None  # Step of the run's own checkpoint that this process continued from

    @property
    def any_written(self) -> bool:
        return bool(checkpoint_directories(self.directory))

    def is_due(self, step: int) -> bool:
        """Return whether ``save_every`` asks for a checkpoint after this number of updates."""
        every = self.training.save_every
        return every > 0 and step % every == 0

    def write(self, saved: Snapshot) -> None:
        """Write the checkpoint, unless the run was restored from that very one."""
        try:
            if saved.step != self.restored_step:
                self.recorder.flush()  # rows of the steps that a checkpoint contains are never lost
                directory = checkpoint_directory(self.directory, saved.step)
                write_checkpoint(directory, saved, self.recorder.files.check_directory)
        finally:
            saved.policy.discard()

    def publish(self, saved: Snapshot, final: bool) -> None:
        """Record the checkpoint, write ``final/`` if it is the last one, and prune; called once the checkpoints of the
        whole cohort are written."""
        self.recorder.files.check_directory()
        directory = checkpoint_directory(self.directory, saved.step)
        self._record_save(f"{saved.step:06d}", saved.step, directory, directory, saved.cursor)
        if final:
            target = self.directory / "final"
            aside = aside_of(target)
            saved.policy.export(aside, directory)
            self.recorder.files.check_directory()
            publish(aside, target, self._owner("final"))
            if self.export is not None:
                install(target, self.export, self._owner("adapter_path"))
            self._record_save("final", saved.step, directory, target, saved.cursor)
            self.recorder.flush()  # the pages as well, before the run counts as done
        prune(self.directory, self.training.keep_last, self.training.keep_every)

    def load(self, directory: Path, policy: Policy) -> RunState:
        """Verify the checkpoint, restore the policy's tensors and return the state of all else.

        Raises CheckpointError when it is damaged or belongs to another base.
        """
        state = RunState.from_dict(load_checkpoint(directory, policy))
        if state.base != self.base_id and not self.accept_other_base:
            raise CheckpointError(f"{directory} was trained on other base weights than these")
        self.loaded = state
        return state

    def discard_after(self, step: int) -> None:
        """Remove the rows and the checkpoints of later steps, which will be made anew."""
        self.recorder.truncate(step)
        forget_after(self.directory, step)

    def record_restored(self, step: int, cursor: int) -> None:
        """Record the checkpoint that the run is restored from, if it was killed between the rename and the record."""
        directory = checkpoint_directory(self.directory, step)
        self._record_save(f"{step:06d}", step, directory, directory, cursor)

    def _owner(self, name: str) -> Owner | None:
        """Return the mark of what the run writes under this name."""
        run = owner_of(self.directory)
        return run and run.at(name)

    def _record_save(self, name: str, step: int, state_path: Path, sampler_path: Path, cursor: int) -> None:
        """Append the record of a complete save; saving the same step again does not repeat it."""
        rows = RunReader(self.directory).checkpoints()
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
