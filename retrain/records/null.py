"""The recorder of ranks other than the first: it writes nothing and talks to no tracker."""

from collections.abc import Callable
from pathlib import Path

from retrain.records.context import RunContext
from retrain.records.environment import SystemInfo
from retrain.records.recorder import RunFiles, RunRecorder
from retrain.records.schema.base import Row, Values
from retrain.records.schema.rows import Checkpoint
from retrain.types import EvalRecord, StepRecord


class NullFiles(RunFiles):
    """Files that are not written. ``any_written``: a run that has a checkpoint is restored from it."""

    any_written = True  # pyright: ignore[reportAssignmentType]

    def __init__(self, directory: Path):
        self.directory = directory

    def check_directory(self) -> None: ...

    def write(self, action: Callable[[], object], always: bool = False) -> None: ...

    def flush(self) -> None: ...


class NullRecorder(RunRecorder):
    """See the module."""

    def __init__(self, run_dir: Path, context: RunContext):
        self.directory, self.context, self.files = run_dir, context, NullFiles(run_dir)

    def start(self, facts: Values | None = None, system: SystemInfo | None = None) -> None: ...

    def record_step(self, record: StepRecord) -> Row:
        return {}

    def record_eval(self, record: EvalRecord) -> Row:
        return {}

    def seal(self) -> Row:
        return {}

    def record_checkpoint(self, checkpoint: Checkpoint) -> None: ...

    def truncate(self, step: int) -> None: ...

    def state(self) -> Row:
        return {}

    def restore(self, state: Values) -> None: ...

    def begin_own_records(self) -> None: ...

    def close(self, failed: bool = False) -> bool:
        return True
