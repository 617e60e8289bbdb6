"""The files of an iteration's rollouts: summary lines, logtree, page and tokens; and their index, ``iterations.jsonl``,
so that a reader need not list them."""

from pathlib import Path

from retrain.files import dumps, keep_rows, write_text
from retrain.records.rollout_page import rollout_page
from retrain.records.rollouts import TRAIN, Batch, batch_name, logtree, summary_rows
from retrain.records.schema.base import Row
from retrain.records.schema.layout import ITERATIONS, LOGTREE, PAGE, SUMMARIES
from retrain.records.schema.rows import Iteration
from retrain.records.tokens import tokens_name, write_tokens


def write_files(directory: Path, batch: Batch, num_groups: int | None) -> list[Path]:
    """Write the summary lines and, unless ``num_groups`` is None, every token, and logtree and page with the texts of
    ``num_groups`` groups, without waiting for the disk; return the paths."""
    texts = {SUMMARIES: "".join(dumps(row) + "\n" for row in summary_rows(batch))}
    if num_groups is not None:
        texts |= {LOGTREE: dumps(logtree(batch, num_groups)) + "\n", PAGE: rollout_page(batch, num_groups)}
    paths = {directory / f"{batch.name}{ending}": text for ending, text in texts.items()}
    for path, text in paths.items():
        write_text(path, text, durable=False)
    return [*paths, *([] if num_groups is None else [write_tokens(directory, batch)])]


def index_line(batch: Batch, num_groups: int | None, lines: tuple[int, int]) -> Row:
    """Return the line of an iteration in the index. ``lines``: the bytes [begin, end) of its completions in
    ``emergence/generations.jsonl``, of an evaluation in ``emergence/evaluations.jsonl``."""
    rewards = [rollout.reward for group in batch.groups for rollout in group.rollouts]
    totals = [reward.total_reward for reward in rewards if reward.total_reward is not None]
    return Iteration(
        split=batch.split,
        iteration=batch.iteration,
        groups=len(batch.groups),
        rollouts=len(rewards),
        correct=sum(reward.is_correct for reward in rewards),
        reward=sum(totals) / len(totals) if totals else None,
        lines=lines,
        name=batch.name,
        tokens=None if num_groups is None else tokens_name(batch.split, batch.iteration),
    ).to_row()


def truncate_index(directory: Path, step: int, evaluation: int) -> None:
    """Keep the lines of steps before ``step`` and of evaluations before ``evaluation``; drop any torn line."""
    keep_rows(directory / ITERATIONS, lambda row: row["iteration"] < (step if row["split"] == TRAIN else evaluation))


def remove_files(directory: Path, split: str, iteration: int) -> None:
    for ending in (SUMMARIES, LOGTREE, PAGE):
        (directory / f"{batch_name(split, iteration)}{ending}").unlink(missing_ok=True)
    (directory / tokens_name(split, iteration)).unlink(missing_ok=True)
