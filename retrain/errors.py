"""The exception tree, and numbers and lists in messages. Every error a user can cause derives from RetrainError and
carries its exit status."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass


class RetrainError(Exception):
    """Base of all errors that are printed in one line, without a traceback."""

    exit_status = 1


class UsageError(RetrainError):
    """A wrong call: missing file, directory that is not a run, arguments that contradict each other."""

    exit_status = 2


class NotReadable(UsageError):
    """A file exists and the operating system refuses to read it. This says nothing about its content."""

    def __init__(self, path: object, error: OSError):
        reason = (error.strerror or str(error)).lower()
        super().__init__(f"{path} cannot be read: {reason}. Nothing was changed; make it readable and try again")


class NotOurs(UsageError):
    """Where this run would write there is something that it has not written; it is left as it is."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration file.

    ``where`` is ``file.toml:line`` (or ``--set``), ``key`` the dotted key path, ``message`` the value and why it
    cannot be, ``fix`` the line to type instead.
    """

    where: str
    key: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}  {self.key}  {self.message}"
        return f"{text}: {self.fix}" if self.fix else text


class ConfigError(UsageError):
    """All mistakes of a configuration at once; ``str()`` has one line for each."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class MissingExtra(UsageError):
    """An optional package is needed and absent; the message holds the line that installs it (``retrain.extras``)."""


class ModelError(RetrainError):
    """A model, tokenizer or adapter cannot be loaded or does not fit what is asked of it."""

    exit_status = 2


class DataError(RetrainError):
    """A data source is missing, empty or malformed."""

    exit_status = 2


class PluginError(RetrainError):
    """A user's module:function is missing or returned something it may not return; names the plug-in."""


class PluginMissing(PluginError):
    """A user's module:function cannot be loaded: a mistake of the configuration, reported before training."""

    exit_status = 2


class CheckpointError(RetrainError):
    """A checkpoint or run directory is damaged or does not belong to this run."""


class RunFailed(RetrainError):
    """A run cannot go on (non-finite loss, every reward failed); its traceback is in the run's log.

    ``shared``: no run can go on, through no fault of theirs. All of them stop, none has failed, and ``advice`` says
    what helps before they are resumed.
    """

    shared = False
    advice = ""


OWN_FAULTS = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTEMPTY})
"""Errors of one path, such as a file where a directory should be; the rest of the file system is usable."""


class StorageError(RunFailed):
    """A file of a run directory cannot be written. ``shared``: disk full, quota, read-only, unmounted."""

    advice = "Make room, or make the directory writable"

    def __init__(self, path: object, error: OSError | str):
        self.path = path
        self.shared = not (isinstance(error, OSError) and error.errno in OWN_FAULTS)
        self.reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else error
        super().__init__(f"{path} cannot be written: {self.reason}")


class LeaseLost(RunFailed):
    """The directory that this process was writing belongs to another process, or another directory is in its place.
    Nothing more is written."""

    shared = True


class DeviceLost(RunFailed):
    """The GPU's context is gone (an assert in a kernel, an illegal access, an ECC error): every later call fails, and
    what lies in its memory may be wrong. Nothing is saved from it; a new process goes on from the last checkpoint."""

    shared = True
    advice = "See what nvidia-smi says of the GPU"


class RankLost(DeviceLost):
    """One of the processes that train together is gone, or does not answer any more."""

    advice = "See what ended it"


class ServerFailed(RunFailed):
    """The servers that sample do not answer, or answer wrongly time and again. Nothing was learnt from it: the step is
    given up before its update, and all that was finished before it is saved; in an evaluation, which follows an update,
    the last checkpoint is what is left."""

    shared = True
    advice = "See what the server's log says"


class WorkersLost(RunFailed):
    """No worker is left, and no other is to be had."""

    shared = True
    advice = "See what ended them"


class NonFinite(RunFailed):
    """Loss or gradient of one update is NaN or infinite; the weights are as they were before it."""


class Interrupted(RetrainError):
    """SIGINT, SIGTERM or SIGHUP: the step is finished and everything is saved."""

    exit_status = 130


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, the name of its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def printable(text: str) -> str:
    """Return ``text`` on one line without control characters, at most 300 characters: safe for a terminal and a log."""
    line = "".join(c if c.isprintable() else " " for c in text[:1200]).strip()
    return line if len(line) <= 300 else line[:299] + "…"


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def listed(texts: Sequence[str], most: int) -> str:
    """Return the first ``most`` of these texts, and how many there are besides."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
