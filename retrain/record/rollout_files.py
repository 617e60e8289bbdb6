"""The files of an iteration's rollouts: summary lines, logtree, and the page that shows the same."""

from __future__ import annotations

from pathlib import Path

from retrain.files import dumps, write_text
from retrain.record.rollout_page import rollout_page
from retrain.record.rollouts import Batch, batch_name, logtree, summary_rows

_ENDINGS = (".html", "_logtree.json", "_rollout_summaries.jsonl")


def write_summaries(directory: Path, batch: Batch) -> Path:
    """Write ``<name>_rollout_summaries.jsonl``, without waiting for the disk; its path."""
    path = directory / f"{batch.name}_rollout_summaries.jsonl"
    write_text(path, "".join(dumps(row) + "\n" for row in summary_rows(batch)), durable=False)
    return path


def write_pages(directory: Path, batch: Batch, shown: int) -> tuple[Path, Path]:
    """Write ``<name>_logtree.json`` and ``<name>.html``, without waiting for the disk; their paths.

    ``shown`` groups appear with their texts.
    """
    tree, page = directory / f"{batch.name}_logtree.json", directory / f"{batch.name}.html"
    write_text(tree, dumps(logtree(batch, shown)) + "\n", durable=False)
    write_text(page, rollout_page(batch, shown), durable=False)
    return tree, page


def remove_files(directory: Path, split: str, iteration: int) -> None:
    """Delete the files of one iteration's rollouts."""
    for ending in _ENDINGS:
        (directory / f"{batch_name(split, iteration)}{ending}").unlink(missing_ok=True)
