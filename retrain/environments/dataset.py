"""The problems of an experiment: what is trained on, and what is held out and never trained on.

Which problems of a data set are held out is a function of their texts alone (a keyed hash), not of seeds, order or
counts asked for: all runs of a campaign, and all campaigns on the same data, are evaluated on the same problems.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.environments.sources import (
    FILE_ENDINGS,
    HUB,
    HUB_NAME,
    Columns,
    NoSplit,
    directory_of,
    file_problems,
    function_problems,
    hub_problems,
    table_problems,
    takes_split,
)
from retrain.errors import DataError
from retrain.types import Problem

DEFAULT_EVAL_SPLIT = "test"


@dataclass(frozen=True)
class Dataset:
    """Problems to train on and held-out problems, disjoint by prompt.

    ``content_hash`` is the SHA-256 of all prompts, answers and tags in order; ``notes`` are things a person should
    hear of, such as training problems that were removed because they are held out. ``skipped`` counts problems that
    were left out because their prompts are too long.
    """

    name: str
    train: Sequence[Problem]
    heldout: list[Problem]
    content_hash: str
    notes: tuple[str, ...] = ()
    skipped: int = 0


def load_data(
    data: Any, heldout: int, max_examples: int | None = None, seed: int = 0, base_dir: Path | None = None
) -> Dataset:
    """The data set of a ``[data]`` section (any object with its attributes).

    ``heldout`` is the number of held-out problems wanted (0: none are set aside), ``max_examples`` the most to train
    on, ``seed`` decides which problems a generated source generates and which of them ``max_examples`` keeps.
    ``base_dir`` (the TOML's folder) is where relative paths are looked up first, then the current directory.
    Raises DataError, MissingExtra or PluginError.
    """
    notes: list[str] = []
    train, pool = _train_and_pool(data, heldout, max_examples, seed, base_dir, notes)
    pool = sorted({_key(problem): problem for problem in reversed(pool)}.values(), key=lambda p: _position(_key(p)))
    heldout_keys = {_key(problem) for problem in pool}
    kept = [problem for problem in train if _key(problem) not in heldout_keys]
    if len(kept) < len(train):
        notes.append(f"{len(train) - len(kept)} of {len(train)} training problems left out: they are held out")
    if not kept:
        raise DataError(f"data source {data.source!r}: every training problem is also held out; nothing is left")
    chosen = pool[: max(heldout, 0)]
    if len(chosen) < heldout:
        notes.append(f"{len(chosen)} problems are held out; [evaluation] problems = {heldout} asks for more")
    kept = _at_most(kept, max_examples, seed, getattr(data, "shuffle", True))
    return Dataset(str(data.source), kept, chosen, content_hash(kept, chosen), tuple(notes))


def content_hash(train: Sequence[Problem], heldout: Sequence[Problem]) -> str:
    """SHA-256 (hex) of prompts, answers and tags of both parts, in order; ids and metadata do not count."""
    digest = hashlib.sha256()
    for part in (train, heldout):
        for problem in part:
            digest.update(json.dumps([_plain(problem), problem.answer, list(problem.tags)]).encode() + b"\n")
        digest.update(b"\x1e")
    return digest.hexdigest()


def _train_and_pool(
    data: Any, heldout: int, max_examples: int | None, seed: int, base_dir: Path | None, notes: list[str]
) -> tuple[list[Problem], list[Problem]]:
    """Training problems, and the pool that the held-out ones are chosen from (empty for ``heldout`` 0)."""
    source, eval_source = data.source, getattr(data, "eval_source", None)
    if source == "arithmetic":
        from retrain.environments import arithmetic

        size = data.size if max_examples is None else min(data.size, max_examples)
        train = arithmetic.problems("train", size, data.levels, seed)
    else:
        train = _problems(source, data.split, data, base_dir)
    if heldout <= 0:
        return train, []
    if eval_source == "arithmetic" or (eval_source is None and source == "arithmetic"):
        from retrain.environments import arithmetic

        return train, arithmetic.problems("heldout", heldout, data.levels, seed)
    if eval_source is not None:
        return train, _problems(eval_source, data.eval_split, data, base_dir)
    if data.split != data.eval_split and _has_splits(source, base_dir):
        try:
            return train, _problems(source, data.eval_split, data, base_dir)
        except NoSplit:
            if data.eval_split != DEFAULT_EVAL_SPLIT:  # somebody asked for it
                raise
            share = f"{data.eval_fraction:.0%} of {data.split!r}"
            notes.append(f"{source} has no split {data.eval_split!r}: {share} is held out (eval_fraction)")
    return _fraction(train, data.eval_fraction, source)


def _has_splits(source: str, base_dir: Path | None) -> bool:
    """Whether the source tells training and test problems apart by itself."""
    if source.endswith(FILE_ENDINGS):
        return False
    return ":" not in source or takes_split(source, base_dir)


def _problems(source: str, split: str, data: Any, base_dir: Path | None) -> list[Problem]:
    columns = Columns(data.prompt_column, data.answer_column, (data.tags_column,) if data.tags_column else ())
    subset = getattr(data, "subset", None)
    if source.endswith(FILE_ENDINGS):
        return file_problems(source, columns, base_dir)
    if source in HUB:
        return hub_problems(source, split)
    if ":" in source:
        return function_problems(source, split, columns, base_dir)
    directory = directory_of(source, base_dir)
    known = next((name for name, hub in HUB.items() if hub.repository == source), None)
    if directory is None and known is not None and subset is None:
        return hub_problems(known, split)
    if directory is not None or HUB_NAME.fullmatch(source):
        return table_problems(source, split, columns, subset, directory=directory)
    raise DataError(f"data source {source!r}: no such directory, and neither arithmetic, {', '.join(HUB)}, a .jsonl or "
                    ".parquet file, a hub name such as owner/name, nor a module:function")  # fmt: skip


def _fraction(problems: list[Problem], fraction: float, source: str) -> tuple[list[Problem], list[Problem]]:
    """Split by the hash of the prompt: exactly ``fraction`` of the different prompts, rounded, are held out, and at
    least one on either side."""
    positions = sorted({_position(_key(problem)) for problem in problems})
    if len(positions) < 2:
        raise DataError(
            f"data source {source!r} holds a single problem, so none can be held out: add more, name an eval_source, "
            "or set [evaluation] problems = 0"
        )
    count = min(max(1, math.floor(fraction * len(positions) + 0.5)), len(positions) - 1)
    last = positions[count - 1]
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem in problems:
        sides[_position(_key(problem)) <= last].append(problem)
    return sides


def _at_most(problems: list[Problem], count: int | None, seed: int, shuffle: bool) -> list[Problem]:
    """At most ``count`` problems in their order: the first ones, or a seeded sample of the data if it is shuffled."""
    if count is None or len(problems) <= count:
        return problems
    if not shuffle:
        return problems[:count]
    # Data sets are often sorted by subject: the first ones would be one subject.
    order = sorted(range(len(problems)), key=lambda i: (_position(f"{seed}\x1f{_key(problems[i])}"), i))
    return [problems[i] for i in sorted(order[:count])]


def _plain(problem: Problem) -> Any:
    return problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]


def _key(problem: Problem) -> str:
    """What makes two problems the same: the words of the prompt, whatever the white space."""
    text = problem.prompt if isinstance(problem.prompt, str) else json.dumps(_plain(problem), sort_keys=True)
    return " ".join(text.split())


def _position(key: str) -> float:
    """A number in [0, 1) that only the key decides, as if drawn uniformly."""
    digest = hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8, key=b"retrain held-out").digest()
    return int.from_bytes(digest, "little") / 2**64
