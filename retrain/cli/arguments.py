"""Define arguments that several commands share, and read configuration files."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from retrain.config import LoadedConfig, load
from retrain.config.legacy import removed_note
from retrain.errors import UsageError
from retrain.records.reader import read_config


def option(
    name: str,
    help: str,
    default: object = None,
    parser: Callable[[str], Any] | None = None,
    min: float | None = None,
    max: float | None = None,
) -> Any:
    """Declare an option. ``name``: "--out DIR" for an option with a value, "--merge" for a flag. ``default``: ``...``
    makes the option required."""
    flag, _, metavar = name.partition(" ")
    return typer.Option(default, flag, metavar=metavar or None, help=help, parser=parser, min=min, max=max)


def argument(metavar: str, help: str, default: object = ...) -> Any:
    return typer.Argument(default, metavar=metavar, help=help, show_default=False)


def output_path(text: str) -> Path:
    """Return ``text`` as the path of an output. Raises UsageError for empty text, which Path would read as the current
    directory."""
    if not text.strip():
        raise UsageError("the path to write to is empty: name a new directory or file; the current directory is .")
    return Path(text)


FILE = argument("FILE", "Campaign or run file (TOML).")
RUN_DIRECTORY = argument("DIR", "Directory of a run or campaign, as train prints it.")
SETS = option("--set SECTION.KEY=VALUE", "Override one key of the file, checked as if it stood there; may be repeated.")
OUT = option(
    "--out DIR", "Directory to write to; without it logging.log_dir, or logs/ and the file's name.", parser=output_path
)
PLAIN = option("--plain", "Print plain lines, also on a terminal.", False)
VERBOSE = option("--verbose", "In plain output, print every step of every run instead of progress.", False)
RETRY_FAILED = option("--retry-failed", "Continue failed runs too, from their last checkpoints.", False)
ACCEPT_CHANGES = option(
    "--accept-changes",
    "Continue although settings, code, packages, model or data differ from what the directory recorded.",
    False,
)
EXECUTOR = option(
    "--executor NAME", "Where a campaign's cohorts train: inprocess, processes, ray or slurm (campaign.executor)."
)
WORKERS = option("--workers N", "How many processes train (campaign.workers).", min=1)
ADDRESS = option("--address WHERE", "With --executor ray, which cluster: auto, local or host:port (ray.address).")
BASE = option("--base MODEL", "The base model, where it is not the one that the adapter names.")
AS_JSON = option("--json", "Print JSON instead of a table.", False)


def require_directory(directory: Path) -> None:
    """Raise UsageError if ``directory`` is no directory. Print a note if this version ignores settings that are
    recorded there."""
    if directory.suffix == ".toml" and directory.is_file():
        raise UsageError(f"{directory} is not a directory of results; type: retrain train {directory}")
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; type: retrain status, to see what there is")
    with suppress(OSError, ValueError):  # other code reports a damaged record
        recorded = read_config(directory)
        if isinstance(recorded, dict) and (ignored := removed_note(recorded)):
            print(f"note: {ignored}", file=sys.stderr)


def executor_sets(executor: str | None, workers: int | None, address: str | None = None) -> list[str]:
    """Return the options as ``section.key=value`` settings. Raises UsageError for an address if the executor is not
    ray."""
    if address is not None and executor not in (None, "ray"):
        raise UsageError(f"--address is that of a Ray cluster, and --executor is {executor}; type --executor ray")
    given = {"campaign.executor": executor, "campaign.workers": workers, "ray.address": address}
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def read(file: Path, sets: Sequence[str] | None) -> LoadedConfig:
    """Return the configuration in ``file``; print warnings on standard error."""
    loaded = load(file, sets or ())
    for warning in loaded.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return loaded
