"""Loads the training problems and held-out sets of an experiment.

A keyed hash of the prompts decides which problems are held out, independent of seeds, order and counts: all runs of a
campaign, and all campaigns on the same data, are evaluated on the same problems.
"""

import hashlib
import heapq
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from retrain.config.evaluation import HELDOUT, HeldOut
from retrain.config.tasks import Data
from retrain.data.arithmetic import arithmetic_problems
from retrain.data.prompts import conversation, render
from retrain.data.sources import NoSplit, has_splits, read_problems
from retrain.errors import DataError
from retrain.types import Problem

DEFAULT_EVAL_SPLIT = "test"
# To find the prompt with most tokens, only so many prompts with most characters are rendered: rendering all of a large
# data set takes minutes
LONGEST_BY_CHARACTERS = 8
SPARE_TOKENS = 16  # Allowance for the tokens that a tokenizer adds to a text, such as a beginning token


@dataclass(frozen=True)
class Dataset:
    """Problems to train on, and held-out sets by name, which share no prompt with the training problems.

    ``content_hash`` is the SHA-256 of all prompts, answers and tags in order. ``notes``: lines for the user, such as
    how many training problems were removed because they are held out. ``skipped``: number of too long prompts.
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
    held_out: Sequence[HeldOut] = (),
    max_examples: int | None = None,
    seed: int = 0,
    base_dir: Path | None = None,
) -> Dataset:
    """Return the data set of a ``[data]`` section with its held-out sets.

    ``max_examples`` limits the training problems. ``seed`` decides which problems are generated and which
    ``max_examples`` keeps. Relative paths are looked up in ``base_dir`` (the TOML's folder), then in the current
    directory. Raises DataError, MissingExtra or PluginError.
    """
    if data.source == "arithmetic":
        size = data.size if max_examples is None else min(data.size, max_examples)
        source = arithmetic_problems("train", size, data.levels, seed)
    else:
        source = read_problems(data.source, data.split, data, base_dir)
    train = source
    notes, sets = list[str](), dict[str, list[Problem]]()
    for request in held_out:
        if request.problems == 0:
            continue
        sets[request.name], train = _hold_out(request, source, train, _pool(request, seed, base_dir, notes), notes)
        if not train:
            raise DataError(f"data source {data.source!r}: every training problem is also held out; nothing is left")
    train = _at_most(train, max_examples, seed, data.shuffle)
    once = tuple(dict.fromkeys(notes))  # sets that share a source share its notes
    return Dataset(str(data.source), train, sets, content_hash(train, *(sets.values() or [[]])), once)


def _hold_out(
    held_out: HeldOut, source: list[Problem], train: list[Problem], pool: list[Problem] | None, notes: list[str]
) -> tuple[list[Problem], list[Problem]]:
    """Return a held-out set, and ``train`` without the problems that the set was chosen from.

    The set is chosen from ``pool``; if that is None, from a fraction of ``source`` that several sets may share.
    """
    where = "" if held_out.name == HELDOUT else f" in the set {held_out.name}"
    chosen_from = _fraction(source, held_out.data) if pool is None else pool
    by_key = {_key(problem): problem for problem in reversed(chosen_from)}  # of equal prompts, the first
    rest = [problem for problem in train if _key(problem) not in by_key]
    if pool is not None and len(rest) < len(train):
        notes.append(f"{len(train) - len(rest)} of {len(train)} training problems left out: they are held out{where}")
    chosen = [by_key[key] for key in sorted(by_key, key=_position)][: held_out.problems]
    if len(chosen) < held_out.problems:
        asked = f"[evaluation] problems = {held_out.problems} asks for more"
        notes.append(f"{len(chosen)} problems are held out{where}; {asked}")
    return chosen, rest


def content_hash(*parts: Sequence[Problem]) -> str:
    """Return the SHA-256 (hex) of prompts, answers and tags of all parts, in order; ids and metadata do not count."""
    digest = hashlib.sha256()
    for part in parts:
        for problem in part:
            digest.update(json.dumps([_plain(problem), problem.answer, list(problem.tags)]).encode() + b"\n")
        # Marks the end of a part, so that moving a problem to the next part changes the hash.
        digest.update(b"\x1e")
    return digest.hexdigest()


def column_values(columns: Sequence[str], *parts: Sequence[Problem]) -> list[str]:
    """Return a list with one SHA-256 (hex), of the values in these columns over all problems in order; [] without
    columns. ``content_hash`` leaves metadata out, but a change of columns that grading reads changes the task."""
    if not columns:
        return []
    digest = hashlib.sha256()
    for problem in (problem for part in parts for problem in part):
        values = [problem.metadata.get(column) for column in columns]
        digest.update(json.dumps(values, sort_keys=True, default=repr).encode() + b"\n")
    return [digest.hexdigest()]


def _pool(held_out: HeldOut, seed: int, base_dir: Path | None, notes: list[str]) -> list[Problem] | None:
    """Return the problems from which a held-out set is chosen; None if it is a fraction of the training source."""
    data = held_out.data
    eval_source = data.eval_source
    source = eval_source or data.source
    if source == "arithmetic":
        return arithmetic_problems("heldout", held_out.problems, data.levels, seed)
    if eval_source is not None:
        return read_problems(eval_source, data.eval_split, data, base_dir)
    if data.split == data.eval_split or not has_splits(source, base_dir):
        return None
    try:
        return read_problems(source, data.eval_split, data, base_dir)
    except NoSplit:
        if data.eval_split != DEFAULT_EVAL_SPLIT:  # the user has chosen this split
            raise
        share = f"{data.eval_fraction:.0%} of {data.split!r}"
        notes.append(f"{source} has no split {data.eval_split!r}: {share} is held out (eval_fraction)")
        return None


def _fraction(problems: list[Problem], data: Data) -> list[Problem]:
    """Return the problems whose prompt hashes are smallest: the share ``eval_fraction`` of the distinct prompts,
    rounded, at least one prompt and not all. Raises DataError if there is only one prompt."""
    positions = sorted({_position(_key(problem)) for problem in problems})
    if len(positions) < 2:
        raise DataError(
            f"data source {data.source!r} holds a single problem, so none can be held out: add more, name an "
            "eval_source, or set [evaluation] problems = 0"
        )
    count = min(max(1, math.floor(data.eval_fraction * len(positions) + 0.5)), len(positions) - 1)
    return [problem for problem in problems if _position(_key(problem)) <= positions[count - 1]]


def _at_most(problems: list[Problem], count: int | None, seed: int, shuffle: bool) -> list[Problem]:
    if count is None or len(problems) <= count:
        return problems
    if not shuffle:
        return problems[:count]
    # Data sets are often sorted by subject: the first ones would be one subject.
    order = sorted(range(len(problems)), key=lambda i: (_position(f"{seed}\x1f{_key(problems[i])}"), i))
    return [problems[i] for i in sorted(order[:count])]


def _plain(problem: Problem) -> str | list[dict[str, str]]:
    return problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]


def _key(problem: Problem) -> str:
    text = problem.prompt if isinstance(problem.prompt, str) else json.dumps(_plain(problem), sort_keys=True)
    return " ".join(text.split())


def _position(key: str) -> float:
    digest = hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8, key=b"retrain held-out").digest()
    # A number in [0, 1) that depends on the text alone: adding or reordering problems moves no other one.
    return int.from_bytes(digest, "little") / 2**64


class PromptLimit(NamedTuple):
    """Prompt settings of problems: ``section``, the [data] with prompt keys; ``limit``, the maximum number of tokens of
    a prompt (None: no limit); ``why``, the source of that limit for messages."""

    section: Data
    limit: int | None
    why: str


def without_long_prompts(
    data: Dataset, tokenizer: object, training: PromptLimit, heldout: Mapping[str, PromptLimit]
) -> Dataset:
    """Return ``data`` without prompts that exceed a token limit. ``heldout``: the limits of the held-out sets by name.

    With ``[data] long_prompts = "skip"`` longer prompts are left out, counted and noted; otherwise DataError names the
    first. Raises DataError too if a set loses all its problems. At least one problem per sequence of message roles is
    rendered, so that a chat template that rejects the roles raises ModelError here.
    """
    too_long = _too_long(data.train, tokenizer, training)
    parts = [_Part("training problems", "", data.train, training, too_long)]
    for name, problems in data.sets.items():
        words = ("held-out ones", "") if name == HELDOUT else (f"in the set {name}", f" in the set {name}")
        parts.append(_Part(*words, problems, heldout[name], _too_long(problems, tokenizer, heldout[name])))
    if not any(part.longer for part in parts):
        return data
    if training.section.long_prompts != "skip":
        raise DataError(_first_too_long(parts))
    remaining = [[problem for problem in part.problems if id(problem) not in part.longer] for part in parts]
    for part, left in zip(parts, remaining, strict=True):
        if part.problems and not left:
            use = "to train on" if part.problems is data.train else f"that is held out{part.suffix}"
            raise DataError(
                f"data source {data.name!r}: every prompt {use} is longer than {part.room.limit} tokens "
                f"({part.room.why}); the shortest has {min(part.longer.values())}"
            )
    sets = dict(zip(data.sets, remaining[1:], strict=True))
    return replace(
        data,
        train=remaining[0],
        sets=sets,
        content_hash=content_hash(remaining[0], *(sets.values() or [[]])),
        notes=(*data.notes, *_left_out(parts)),
        skipped=sum(len(part.longer) for part in parts),
    )


class _Part(NamedTuple):
    """The training problems or one held-out set. ``name``: used after counts in messages; ``suffix``: used for a single
    problem; ``longer``: number of tokens of every prompt over the limit, by the problem's ``id()``."""

    name: str
    suffix: str
    problems: Sequence[Problem]
    room: PromptLimit
    longer: Mapping[int, int]

    @property
    def first(self) -> Problem:
        return next(problem for problem in self.problems if id(problem) in self.longer)


def _too_long(problems: Sequence[Problem], tokenizer: object, room: PromptLimit) -> dict[int, int]:
    forms = {tuple(message["role"] for message in conversation(p, room.section)): p for p in problems}
    markup = 0  # bytes that the chat template adds to a conversation
    for problem in forms.values():
        rendered = render(problem, tokenizer, room.section)
        markup = max(markup, len(rendered.text.encode()) - _bytes(problem, room.section))
    if room.limit is None:
        return {}
    return {
        id(problem): length
        for problem in problems
        if _bytes(problem, room.section) + markup + SPARE_TOKENS > room.limit  # a token is a byte or more
        and (length := len(render(problem, tokenizer, room.section).token_ids)) > room.limit
    }


def _first_too_long(parts: Sequence[_Part]) -> str:
    part = next(part for part in parts if part.longer)
    more = sum(len(part.longer) for part in parts) - 1
    others = f"; {more} more are too long" if more else ""
    return (
        f"{part.first.id}  the prompt{part.suffix} has {part.longer[id(part.first)]} tokens, more than "
        f"{part.room.limit} ({part.room.why}){others}: shorten it, or leave such problems out with "
        '[data] long_prompts = "skip"'
    )


def _left_out(parts: Sequence[_Part]) -> Iterator[str]:
    long = [part for part in parts if part.longer]
    for limit in dict.fromkeys(part.room.limit for part in long):
        here = [part for part in long if part.room.limit == limit]
        counts = ", ".join(f"{len(part.longer)} of {len(part.problems)} {part.name}" for part in here)
        first = here[0].first
        yield (
            f"left out for prompts of more than {limit} tokens: {counts}; the first is {first.id} "
            f"with {here[0].longer[id(first)]} tokens"
        )


def _bytes(problem: Problem, section: Data) -> int:
    return sum(len(message["content"].encode()) for message in conversation(problem, section))


def longest_prompt(problems: Iterable[Problem], tokenizer: object, data: Data) -> int:
    """Return the tokens of the longest prompt, found among the ``LONGEST_BY_CHARACTERS`` prompts with most characters;
    0 without problems. Raises ModelError or DataError if one of them cannot be rendered."""

    def characters(problem: Problem) -> int:
        return sum(len(message["content"]) for message in conversation(problem, data))

    longest = heapq.nlargest(LONGEST_BY_CHARACTERS, problems, key=characters)
    return max((len(render(problem, tokenizer, data).token_ids) for problem in longest), default=0)
