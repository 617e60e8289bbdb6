"""``compare``: the verdict of one or several campaigns, from their files alone; works while they still run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from retrain.commands.arguments import AsJson, require_directory
from retrain.commands.output import print_comparison
from retrain.files import dumps


def compare(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Directories of campaigns or runs.", show_default=False)
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="METRIC",
            help="final or auc, a metric's key, or auc:KEY; short for held-out ones, as in pass@4. Without it what the "
            "campaign declared.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="LABEL", help="Condition that the others are compared with; without it the first."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare conditions over seeds: paired differences with intervals, exact p-values, and the verdict in words.

    Runs of several directories are pooled by condition. Only finished runs count; all others are named.
    """
    from retrain.campaign.judging.pooling import compare_directories

    for directory in directories:
        require_directory(directory)
    report = compare_directories(directories, metric=metric, baseline=baseline)
    if as_json:
        print(dumps(report, indent=2))
    else:
        print_comparison(report, plain=not sys.stdout.isatty(), secondary=True)
