"""``train``, ``resume``, ``squeeze``: commands that compute."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import tomli
import typer

from retrain.campaign.planning.changes import Approval
from retrain.campaign.planning.manifest import CampaignOutcome
from retrain.campaign.planning.plan import Plan
from retrain.cli.arguments import (
    ACCEPT_CHANGES,
    ADDRESS,
    AS_JSON,
    EXECUTOR,
    FILE,
    OUT,
    PLAIN,
    RETRY_FAILED,
    SETS,
    VERBOSE,
    WORKERS,
    argument,
    executor_sets,
    option,
    output_path,
    read,
    require_directory,
)
from retrain.cli.console import lasting_streams, make_console
from retrain.cli.explain import print_explanation
from retrain.cli.output import note, print_report, print_squeeze, print_tables_of
from retrain.device import torchrun_rank
from retrain.errors import UsageError
from retrain.records.observer import Observer
from retrain.records.registry import OFF, ON
from retrain.records.trackers import wandb_upload_command
from retrain.util.mirror import Mirror
from retrain.util.session import ENDINGS
from retrain.util.text import visible


def finish(action: Callable[[Observer], CampaignOutcome], plain: bool = False, verbose: bool = False) -> None:
    """Run ``action`` under a console, print the outcome, and exit with its status."""
    started = time.time()
    with lasting_streams():  # a closed terminal does not end the training
        observer = make_console(plain=plain, verbose=verbose)
        try:
            outcome = action(observer)
        finally:
            observer.close()
        print_tables_of(outcome.summary, plain)
        if outcome.exit_status in {ending.status for ending in ENDINGS.values()}:
            kept = "everything up to the last finished step is saved"
            kept = kept if outcome.saved else "stopped at the last checkpoint"
            print(f"interrupted; {kept}. Type: retrain resume {outcome.directory}")
        if upload := wandb_upload_command(outcome.directory, started):
            print(f"W&B records are offline; to upload them, type: {upload}")
    raise typer.Exit(outcome.exit_status)


def train(
    file: Path = FILE,
    sets: list[str] | None = SETS,
    out: Path | None = OUT,
    dry_run: bool = option("--dry-run", "Print what would be trained and written (as explain does) and stop.", False),
    retry_failed: bool = RETRY_FAILED,
    accept_changes: bool = ACCEPT_CHANGES,
    executor: str | None = EXECUTOR,
    workers: int | None = WORKERS,
    address: str | None = ADDRESS,
    no_registry: bool = option(
        "--no-registry", "Leave the declaration out of registry.jsonl beside DIR; outputs say so.", False
    ),
    plain: bool = PLAIN,
    verbose: bool = VERBOSE,
) -> None:
    """Train a campaign or run; print comparison, rank and paths.

    Started again on the same file, it continues; finished runs are not repeated, unless the file asks for more steps.
    """
    follow_torchrun(dry_run)
    how = executor_sets(executor, workers, address)
    if how and is_run_file(file):
        raise UsageError(
            f"{file} is a single run, which trains in this process: leave out --executor, --workers and --address"
        )
    loaded = read(file, [*(sets or ()), *how])
    if dry_run:
        print_explanation(Plan.of(loaded, out))
        return
    from retrain.campaign.controller import launch

    def start(observer: Observer) -> CampaignOutcome:
        registry = OFF if no_registry else ON
        return launch(loaded, out, observer, retry_failed, approval(accept_changes, observer), registry)

    finish(start, plain, verbose)


def follow_torchrun(nothing: bool = False) -> None:
    """If torchrun started this process as another rank than 0, run the jobs that rank 0 sends, then exit. With
    ``nothing`` to compute, such a process exits at once."""
    if torchrun_rank():
        from retrain.campaign.running import rank_worker

        raise typer.Exit(0 if nothing else rank_worker.follow_torchrun())


def is_run_file(file: Path) -> bool:
    try:
        return "campaign" not in tomli.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False


def resume(
    directory: str = argument("DIR", "Directory of a run or campaign, as train prints it, or the URL of its copy."),
    sets: list[str] | None = SETS,
    out: Path | None = option(
        "--out DIR", "With a URL: directory to download the copy to; without it logs/ and its name.", parser=output_path
    ),
    retry_failed: bool = RETRY_FAILED,
    accept_changes: bool = ACCEPT_CHANGES,
    executor: str | None = EXECUTOR,
    workers: int | None = WORKERS,
    address: str | None = ADDRESS,
    plain: bool = PLAIN,
    verbose: bool = VERBOSE,
) -> None:
    """Continue an interrupted run or campaign from its last checkpoints.

    Finished ones continue with more steps (--set training.max_steps=…).
    """
    follow_torchrun()
    path = Path(directory)
    if "://" in directory:
        path = out or Path("logs", directory.rstrip("/").rpartition("/")[2])
        Mirror(directory, path).fetch()
        print(f"{directory} is in {path} now")
    elif out is not None:
        raise UsageError(f"{directory} continues in place: leave out --out, which is for the copy at a URL")
    require_directory(path)
    from retrain.campaign.controller import resume as go_on

    def start(observer: Observer) -> CampaignOutcome:
        changed = [*(sets or ()), *executor_sets(executor, workers, address)]
        return go_on(path, observer, retry_failed, approval(accept_changes, observer), changed)

    finish(start, plain, verbose)


def approval(accept: bool, observer: Observer) -> Approval:
    """Return the approval of differences from a directory's records: given if ``accept``, otherwise the user is asked
    if there is a terminal."""

    def ask(lines: list[str]) -> bool:
        observer.close()
        print("This directory has changed since its last start:")
        for line in lines:
            print(f"  {visible(line)}")
        return typer.confirm("Go on with what is there now?", default=False)

    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return Approval(accept, ask if at_terminal else None, observer.message)


def squeeze(
    directory: Path = argument("DIR", "A run, campaign, checkpoint or adapter directory."),
    to: int | None = option("--to RANK", "Write an adapter compressed to this rank.", min=1),
    out: Path | None = option(
        "--out DIR",
        "Where the compressed adapter goes; without it squeeze/rank_RANK beside the adapter.",
        parser=output_path,
    ),
    steps: int | None = option(
        "--continue STEPS", "Train the compressed adapter this many steps at its new rank.", min=1
    ),
    pattern: bool = option("--pattern", "A rank for each module, with the total energy of RANK everywhere.", False),
    as_json: bool = AS_JSON,
) -> None:
    """Analyse the LoRA rank of an adapter and compress it.

    Compresses with --to, and trains the compressed adapter on with --continue.
    """
    require_directory(directory)
    if pattern and (to is None or steps is not None):
        raise UsageError("--pattern says how --to compresses: type --to RANK --pattern, without --continue")
    if steps is not None:
        if to is None or as_json:
            raise UsageError("--continue trains at the rank of --to and prints as it trains: type --to RANK, no --json")
        from retrain.adapters.continuing import continuation
        from retrain.campaign.controller import launch

        loaded, target = continuation(directory, to, steps, out)
        for warning in loaded.warnings:
            note(warning)
        finish(lambda observer: launch(loaded, target, observer))
    from retrain.adapters.squeeze import squeeze as squeeze_directory

    print_report(squeeze_directory(directory, to, out, pattern), as_json, print_squeeze)
