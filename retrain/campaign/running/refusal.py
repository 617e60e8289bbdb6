"""What a refused command leaves: the records as they were."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from retrain.config.runs import RunSpec, run_directory
from retrain.errors import NotReadable, RetrainError
from retrain.files import stamp_of, write_bytes
from retrain.ownership import MARK
from retrain.records.schema.layout import CODE_DIFF, CONFIG, ENVIRONMENT, LOG, MANIFEST, PLAN
from retrain.util.lease import LEASE, LOCK

RECORDS = (MANIFEST, PLAN, CONFIG, ENVIRONMENT, CODE_DIFF)
"""Files of a campaign or run that are written before its first run begins."""
CLAIM = {MARK, LOCK, LEASE}  # Files by which a process takes possession of a directory


@contextmanager
def restored_when_refused(directory: Path, specs: Sequence[RunSpec]) -> Iterator[None]:
    """Restore the records in ``directory`` when the command is refused before any of its runs has begun.

    The plan has to be on the disk before a worker starts, and some faults are only found once model, data and
    checkpoints are loaded. A refusal is an error with exit status 2. A run has begun when its ``run.log`` has changed.
    """
    before = {name: _content(directory / name) for name in RECORDS}
    is_new = not (directory / MARK).exists()
    logs = [run_directory(directory, spec) / LOG for spec in specs]
    stamps = [stamp_of(log) for log in logs]
    try:
        yield
    except (RetrainError, PermissionError) as error:
        is_refusal = error.exit_status == 2 if isinstance(error, RetrainError) else True
        if is_refusal and [stamp_of(log) for log in logs] == stamps:
            for name, content in before.items():
                if content is None:
                    (directory / name).unlink(missing_ok=True)
                elif content != _content(directory / name):
                    write_bytes(directory / name, content)
            for folder in {log.parent for log in logs} - {directory}:
                _remove_claim(folder)
            if is_new:
                with suppress(OSError):
                    (directory / "runs").rmdir()
                _remove_claim(directory)
        raise


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() else None
    except PermissionError as error:
        raise NotReadable(path, error) from error


def _remove_claim(directory: Path) -> None:
    """Remove a directory that holds nothing but this process's claim."""
    if directory.is_dir() and {path.name for path in directory.iterdir()} <= CLAIM:
        for name in CLAIM:
            (directory / name).unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()
