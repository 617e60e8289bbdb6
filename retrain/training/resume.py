"""Begin a run at a checkpoint of its own, or with the state or weights of another run."""

from collections.abc import Sequence
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.schema.layout import STATE
from retrain.training.checkpoint_files import checkpoint_directory, newest_whole
from retrain.training.run import Run


def resume(run: Run, step: int, skipped: Sequence[str] = ()) -> list[str]:
    """Continue from the run's own checkpoint of ``step`` (0 is the start) and remove the rows of later steps.

    ``skipped`` says what was wrong with later checkpoints. Returns lines for the user. Raises CheckpointError when the
    checkpoint belongs to another base.
    """
    lines, checkpoints = list(skipped), run.checkpoints
    if step:
        run.restore(checkpoint_directory(run.directory, step))
        checkpoints.restored_step = run.step
        lines.append(f"continues at step {run.step}")
    elif checkpoints.any_written:
        lines.append("no checkpoint to continue from: the run starts again from step 0")
    checkpoints.discard_after(run.step)
    if step:
        checkpoints.record_restored(run.step, run.requests.cursor.position)
    return lines


def continue_from(run: Run, directory: Path) -> list[str]:
    """Begin with another run's state (``[resume] from``), of a run directory or checkpoint, or with the weights of an
    adapter directory. Returns lines for the user.

    Raises UsageError when nothing is left to train or the adapter is scaled differently.
    """
    lines: list[str] = []
    checkpoint = directory if (directory / STATE).is_file() else newest_whole(directory, lines)
    if checkpoint is None:
        run.policy.begin_with(directory)
        return [*lines, f"starts at step 0 with the weights of {directory}"]
    run.restore(checkpoint)
    run.recorder.begin_own_records()
    if run.finished:
        raise UsageError(
            f"{checkpoint} is at step {run.step} of max_steps = {run.config.training.max_steps}: "
            f"set [training] max_steps above {run.step}"
        )
    return [*lines, f"continues {checkpoint} at step {run.step}"]
