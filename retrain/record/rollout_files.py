"""The files of an iteration's rollouts: summary lines, logtree, and the page that shows the same."""

from __future__ import annotations

from pathlib import Path

from retrain.files import dumps, write_text
from retrain.record.rollout_page import rollout_page
from retrain.record.rollouts import Batch, batch_name, logtree, summary_rows

SUMMARIES, LOGTREE, PAGE = "_rollout_summaries.jsonl", "_logtree.json", ".html"


def write_files(directory: Path, batch: Batch, shown: int | None) -> list[Path]:
    """Write the summary lines, and logtree and page with the texts of ``shown`` groups unless that is None, without
    waiting for the disk; their paths."""
    texts = {SUMMARIES: "".join(dumps(row) + "\n" for row in summary_rows(batch))}
    if shown is not None:
        texts |= {LOGTREE: dumps(logtree(batch, shown)) + "\n", PAGE: rollout_page(batch, shown)}
    paths = {directory / f"{batch.name}{ending}": text for ending, text in texts.items()}
    for path, text in paths.items():
        write_text(path, text, durable=False)
    return list(paths)


def remove_files(directory: Path, split: str, iteration: int) -> None:
    """Delete the files of one iteration's rollouts."""
    for ending in (SUMMARIES, LOGTREE, PAGE):
        (directory / f"{batch_name(split, iteration)}{ending}").unlink(missing_ok=True)
