"""The problems of an experiment: what is trained on, and what is held out and never trained on.

Which problems of a data set are held out is a function of their texts alone (a keyed hash), not of seeds, order or
counts asked for: all runs of a campaign, and all campaigns on the same data, are evaluated on the same problems.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from retrain.config.evaluation import HELDOUT
from retrain.config.tasks import Data
from retrain.data import arithmetic
from retrain.data.sources import NoSplit, has_splits, read_problems
from retrain.errors import DataError
from retrain.rng import generator
from retrain.types import Problem

DEFAULT_EVAL_SPLIT = "test"


class Wanted(NamedTuple):
    """A held-out set to load: its name, the number of problems wanted, and the [data] whose ``eval_source`` and
    ``eval_split`` it is from."""

    name: str
    problems: int
    data: Data


@dataclass(frozen=True)
class Dataset:
    """Problems to train on, and held-out sets by name, disjoint from them by prompt.

    ``content_hash`` is the SHA-256 of all prompts, answers and tags in order; ``notes`` are for the user, such as how
    many training problems are left out because they are held out. ``skipped`` counts problems that are left out because
    their prompts are too long.
    """

    name: str
    train: Sequence[Problem]
    sets: Mapping[str, list[Problem]]
    content_hash: str
    notes: tuple[str, ...] = ()
    skipped: int = 0

    @property
    def heldout(self) -> list[Problem]:
        return [problem for problems in self.sets.values() for problem in problems]


def load_data(
    data: Data,
    heldout: int | Sequence[Wanted],
    max_examples: int | None = None,
    seed: int = 0,
    base_dir: Path | None = None,
) -> Dataset:
    """The data set of a ``[data]`` section.

    ``heldout`` are the held-out sets wanted, or the number of problems of a single one (0: none). At most
    ``max_examples`` problems are trained on. ``seed`` decides which problems are generated, and which ``max_examples``
    keeps. Relative paths are looked up in ``base_dir`` (the TOML's folder), then in the current directory. Raises
    DataError, MissingExtra or PluginError.
    """
    wanted = [Wanted(HELDOUT, heldout, data)] if isinstance(heldout, int) else list(heldout)
    wanted = [each for each in wanted if each.problems > 0]
    source = train = _training(data, max_examples, seed, base_dir)
    notes, sets = list[str](), dict[str, list[Problem]]()
    for each in wanted:
        pool = _pool(each, seed, base_dir, notes)
        if pool is None:
            # Of all problems of the source, not of those that earlier sets have left: sets may share the part.
            rest, pool = _fraction(source, each.data.eval_fraction, each.data.source)
            left = {_key(problem) for problem in rest}
            train = [problem for problem in train if _key(problem) in left]
        pool = sorted({_key(problem): problem for problem in reversed(pool)}.values(), key=lambda p: _position(_key(p)))
        keys = {_key(problem) for problem in pool}
        kept = [problem for problem in train if _key(problem) not in keys]
        named = "" if each.name == HELDOUT else f" in the set {each.name}"
        if len(kept) < len(train):
            out = len(train) - len(kept)
            notes.append(f"{out} of {len(train)} training problems left out: they are held out{named}")
        if not kept:
            raise DataError(f"data source {data.source!r}: every training problem is also held out; nothing is left")
        sets[each.name], train = pool[: each.problems], kept
        if len(sets[each.name]) < each.problems:
            notes.append(
                f"{len(sets[each.name])} problems are held out{named}; "
                f"[evaluation] problems = {each.problems} asks for more"
            )
    kept = _at_most(train, max_examples, seed, data.shuffle)
    once = tuple(dict.fromkeys(notes))  # sets that share a source share its notes
    return Dataset(str(data.source), kept, sets, content_hash(kept, *(sets.values() or [[]])), once)


def content_hash(*parts: Sequence[Problem]) -> str:
    """SHA-256 (hex) of prompts, answers and tags of all parts, in order; ids and metadata do not count."""
    digest = hashlib.sha256()
    for part in parts:
        for problem in part:
            digest.update(json.dumps([_plain(problem), problem.answer, list(problem.tags)]).encode() + b"\n")
        digest.update(b"\x1e")
    return digest.hexdigest()


def column_values(columns: Sequence[str], *parts: Sequence[Problem]) -> list[str]:
    """SHA-256 (hex) of what these columns say of the problems of all parts, in order, by which they are graded; nothing
    where there are no columns. Unlike other metadata, a change of these is another task."""
    if not columns:
        return []
    digest = hashlib.sha256()
    for problem in (problem for part in parts for problem in part):
        values = [problem.metadata.get(column) for column in columns]
        digest.update(json.dumps(values, sort_keys=True, default=repr).encode() + b"\n")
    return [digest.hexdigest()]


def _training(data: Data, max_examples: int | None, seed: int, base_dir: Path | None) -> list[Problem]:
    if data.source == "arithmetic":
        size = data.size if max_examples is None else min(data.size, max_examples)
        return arithmetic.problems("train", size, data.levels, seed)
    return read_problems(data.source, data.split, data, base_dir)


def _pool(wanted: Wanted, seed: int, base_dir: Path | None, notes: list[str]) -> list[Problem] | None:
    """What a held-out set is chosen from: all problems of its own source or split; None where it has neither and is a
    part of the training source."""
    data = wanted.data
    eval_source = data.eval_source
    source = eval_source or data.source
    if source == "arithmetic":
        return arithmetic.problems("heldout", wanted.problems, data.levels, seed)
    if eval_source is not None:
        return read_problems(eval_source, data.eval_split, data, base_dir)
    if data.split == data.eval_split or not has_splits(source, base_dir):
        return None
    try:
        return read_problems(source, data.eval_split, data, base_dir)
    except NoSplit:
        if data.eval_split != DEFAULT_EVAL_SPLIT:  # the file asks for it
            raise
        share = f"{data.eval_fraction:.0%} of {data.split!r}"
        notes.append(f"{source} has no split {data.eval_split!r}: {share} is held out (eval_fraction)")
        return None


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
    """What makes two problems the same: the prompt up to white space."""
    text = problem.prompt if isinstance(problem.prompt, str) else json.dumps(_plain(problem), sort_keys=True)
    return " ".join(text.split())


def _position(key: str) -> float:
    """The key's hash as a number in [0, 1)."""
    digest = hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8, key=b"retrain held-out").digest()
    return int.from_bytes(digest, "little") / 2**64


class DataCursor:
    """Order of training problems: a fresh permutation for every epoch, a function of the seeds and the position.

    ``position`` counts problems taken so far. A batch may span epochs.
    """

    def __init__(self, problems: Sequence[Problem], stream: tuple[int | str, ...], shuffle: bool = True):
        self.problems, self.stream, self.shuffle = problems, stream, shuffle
        self.position = 0
        self._epoch, self._order = -1, np.arange(0)

    def ahead(self, start: int, count: int) -> list[Problem]:
        """``count`` problems, the first of them ``start`` problems after the next one."""
        return [self._at(self.position + start + i) for i in range(count)]

    def _at(self, position: int) -> Problem:
        epoch, place = divmod(position, len(self.problems))
        if not self.shuffle:
            return self.problems[place]
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = generator(*self.stream, "data", epoch).permutation(len(self.problems))
        return self.problems[int(self._order[place])]
