"""The exception tree, and functions that format errors and lists in messages."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass


class RetrainError(Exception):
    """Base of all errors that are printed in one line, without a traceback."""

    exit_status = 1


class UsageError(RetrainError):
    """Invalid call: missing file, directory without a run, arguments that contradict each other."""

    exit_status = 2


class ServerNotStarted(UsageError):
    """A server of ``[inference] launch`` that did not answer before the first step."""

    @property
    def reason(self) -> str:
        """The last line of the server's log that names an error, else the last line of the message."""
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        return next((line for line in reversed(lines[1:]) if "rror" in line), lines[-1])


class NotReadable(UsageError):
    """The operating system refuses to read a file that exists, so nothing is known about its content."""

    def __init__(self, path: object, error: OSError):
        reason = (error.strerror or str(error)).lower()
        super().__init__(f"{path} cannot be read: {reason}. Nothing was changed; make it readable and try again")


class NotOurs(UsageError):
    """A path to be written contains files that this run did not write. They are left unchanged."""


@dataclass(frozen=True)
class ConfigProblem:
    """A mistake in a configuration file. ``where`` is ``file.toml:line`` (or ``--set``), ``key`` the dotted key path,
    ``message`` the value and why it is invalid, ``fix`` the line to type instead."""

    where: str
    key: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}  {self.key}  {self.message}"
        return f"{text}: {self.fix}" if self.fix else text


class ConfigError(UsageError):
    """All mistakes of a configuration; ``str()`` has one line for each."""

    def __init__(self, problems: list[ConfigProblem]):
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class MissingExtra(UsageError):
    """A missing optional package; the message contains the line that installs it (``retrain.extras``)."""


class ModelError(RetrainError):
    """A model, tokenizer or adapter that cannot be loaded, or does not fit its use."""

    exit_status = 2


class DataError(RetrainError):
    exit_status = 2


class RubricError(DataError):
    """A problem whose criteria in ``column`` are missing or malformed. ``table``: the section of the grader."""

    def __init__(self, table: str, column: str, reason: str):
        super().__init__(f"[{table}] rubric_column = {column!r}, {reason}")
        self.table, self.column, self.reason = table, column, reason


class PluginError(RetrainError):
    """A user's module:function that is missing or returned an invalid value; the message names it."""


class PluginMissing(PluginError):
    """A user's module:function that cannot be loaded: a configuration error, reported before training."""

    exit_status = 2


class CheckpointError(RetrainError):
    """A checkpoint or run directory that is damaged or belongs to another run."""


class RunFailed(RetrainError):
    """A run that cannot continue (non-finite loss, every reward failed); the run's log has the traceback. ``shared``:
    the cause stops all runs of the campaign, so no single run counts as failed. ``advice``: what to do before
    resuming."""

    shared = False
    advice = ""


OWN_FAULTS = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTEMPTY})
"""errno values that concern a single path, such as a file where a directory should be; other files can be written."""


class StorageError(RunFailed):
    """A file of a run directory that cannot be written. ``shared`` is true if the file system is full, read-only or
    unmounted, which affects all runs."""

    advice = "Make room, or make the directory writable"

    def __init__(self, path: object, error: OSError | str):
        self.path = path
        self.shared = not (isinstance(error, OSError) and error.errno in OWN_FAULTS)
        self.reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else error
        super().__init__(f"{path} cannot be written: {self.reason}")


class LeaseLost(RunFailed):
    """Another process owns the directory that this process wrote, or another directory has replaced it. Nothing more is
    written."""

    shared = True


class DeviceLost(RunFailed):
    """The GPU's context is lost (an assert in a kernel, an illegal access, an ECC error): every later call fails, and
    its memory may be corrupt. Nothing is saved from it; a new process continues from the last checkpoint."""

    shared = True
    advice = "See what nvidia-smi says of the GPU"


class RankLost(DeviceLost):
    advice = "See what ended it"


class ServerFailed(RunFailed):
    """Sampling servers do not answer, or repeatedly return wrong results. The step is abandoned before its update, and
    earlier steps are saved. If servers fail in an evaluation, the update before it is not saved, and the run continues
    from its last checkpoint."""

    shared = True
    advice = "See what the server's log says"


class WorkersLost(RunFailed):
    shared = True
    advice = "See what ended them"


class NonFinite(RunFailed):
    """Loss or gradient of an update is NaN or infinite; the weights are unchanged."""


class RunInterrupted(RetrainError):
    """SIGINT, SIGTERM or SIGHUP; the step is finished and everything is saved."""

    exit_status = 130


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if the text is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def printable(text: str) -> str:
    """Return ``text`` on one line without control characters, at most 300 characters: safe for a terminal and a log."""
    line = "".join(c if c.isprintable() else " " for c in text[:1200]).strip()
    return line if len(line) <= 300 else line[:299] + "…"


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def listed(texts: Sequence[str], most: int) -> str:
    """Return the first ``most`` texts, joined by commas, and the number of the others."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
