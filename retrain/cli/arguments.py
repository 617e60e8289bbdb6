"""Define arguments that several commands share, and read configuration files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.errors import UsageError

if TYPE_CHECKING:
    from retrain.config import LoadedConfig

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="Campaign or run file (TOML).", show_default=False)]

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override one key of the file, checked as if it stood there; may be repeated.",
        show_default=False,
    ),
]


def output_path(text: str) -> Path:
    """Return the path of an output. Raises UsageError for an empty one, which Path reads as "."."""
    if not text.strip():
        raise UsageError("the path to write to is empty: name a new directory or file; the current directory is .")
    return Path(text)


Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        parser=output_path,
        help="Directory to write to; without it logging.log_dir, or logs/ and the file's name.",
    ),
]

RunDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory of a run or campaign, as train prints it.", show_default=False)
]

Plain = Annotated[bool, typer.Option("--plain", help="Print plain lines, also on a terminal.")]

Verbose = Annotated[
    bool, typer.Option("--verbose", help="In plain output, print every step of every run instead of progress.")
]

RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Continue failed runs too, from their last checkpoints.")
]

AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="Continue although settings, code, packages, model or data differ from what the directory recorded.",
    ),
]

Pilot = Annotated[
    Path | None,
    typer.Option(
        "--pilot",
        metavar="DIR",
        help="Take the pair spread from the runs in this directory; by default from an earlier campaign of the file.",
    ),
]

Detect = Annotated[
    float | None,
    typer.Option(
        "--detect",
        metavar="POINTS",
        min=1e-9,
        help="Print the probability of finding a difference of this size, and the seeds needed; needs a pair spread.",
        show_default=False,
    ),
]

ExecutorName = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="NAME",
        help="Where a campaign's cohorts train: inprocess, processes, ray or slurm (campaign.executor).",
        show_default=False,
    ),
]

WorkerCount = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, help="How many processes train (campaign.workers).", show_default=False
    ),
]

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="WHERE",
        help="With --executor ray, which cluster: auto, local or host:port (ray.address).",
        show_default=False,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def require_directory(directory: Path) -> None:
    """Raise UsageError, with what to type, if ``directory`` is not one; print a note on its ignored settings."""
    if directory.suffix == ".toml" and directory.is_file():
        raise UsageError(f"{directory} is not a directory of results; type: retrain train {directory}")
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; type: retrain status, to see what there is")
    from retrain.config.legacy import removed_note
    from retrain.records.reader import RunReader

    with suppress(OSError, ValueError):  # other code reports a damaged record
        recorded = RunReader(directory).config()
        if isinstance(recorded, dict) and (ignored := removed_note(recorded)):
            print(f"note: {ignored}", file=sys.stderr)


def executor_sets(executor: str | None, workers: int | None, address: str | None) -> list[str]:
    """Return these options as settings of their keys. Raises UsageError for an address without Ray."""
    if address is not None and executor not in (None, "ray"):
        raise UsageError(f"--address is that of a Ray cluster, and --executor is {executor}; type --executor ray")
    given = {"campaign.executor": executor, "campaign.workers": workers, "ray.address": address}
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def read(file: Path, sets: Sequence[str] | None) -> LoadedConfig:
    """Return the configuration in ``file``; print warnings on standard error.

    Raises ConfigError with every mistake, UsageError when there is no such file.
    """
    from retrain.config import load

    loaded = load(file, sets or ())
    for warning in loaded.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return loaded
