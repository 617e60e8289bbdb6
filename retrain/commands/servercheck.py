"""``doctor --url``: whether servers compute what is trained here, one line for each check as soon as it is made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from retrain.commands.output import visible


def servercheck(url: Sequence[str], engine: str | None, model: str | None, file: Path | None) -> int:
    """Make every check and print it; the exit status: 1 when one has failed.

    Raises UsageError for a file that cannot be used, ModelError for a model that cannot be had.
    """
    from retrain.selfcheck.results import Status
    from retrain.selfcheck.servers import asked_config, examine_servers

    config = asked_config(url, engine, model, file)
    live = sys.stdout.isatty()
    failed = False
    print(f"{config.inference.engine} at {', '.join(url)}, compared with {visible(config.model.model)} here")

    def begins(name: str) -> None:
        if live:
            print(f"…     {name}", end="", flush=True)

    for line in examine_servers(config, begins, any_rank=file is None):
        failed |= line.result.status is Status.FAIL
        words = f"{line.result.status}  {line.name:<11} {visible(line.result.text())}  [{line.seconds:.1f} s]"
        print(("\r\x1b[K" if live else "") + words, flush=True)
    return int(failed)
