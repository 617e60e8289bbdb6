"""Environments of the ``verifiers`` library (Prime Intellect), unchanged.

Both kinds: a module with ``load_environment`` (verifiers up to 0.3), and one that exports a ``Taskset`` (``import
verifiers.v1``, from 0.4). They lead their rollouts themselves; ``inversion`` turns them round.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from retrain.environments.protocol import Range
from retrain.environments.providers.arguments import imported
from retrain.environments.providers.inversion import Inversion, InvertedEpisode, Lead
from retrain.environments.providers.randomness import OwnRandomness
from retrain.errors import DataError, RetrainError, UsageError
from retrain.plugins import described
from retrain.types import Message, Problem

LOADING_SEED = "loading"
"""What rows are drawn from at random are the same in every process, unless the environment seeds itself."""
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 200
"""Of the training problems, where an environment has no held-out ones and no number is given."""


class Row(NamedTuple):
    """A task of the library's. ``digest`` is a hash of all that makes it; another process must have the same one in
    this place."""

    prompt: tuple[Message, ...]
    answer: str
    tags: tuple[str, ...]
    digest: str


class Library(Protocol):
    """What is asked of either kind of environment. Rows are numbered; ``train`` are those to train with, ``eval``
    those that the environment itself holds out."""

    def rows(self, part: str) -> Sequence[Row]:
        """All rows of a part, [] where there are none."""
        ...

    def lead(self, part: str, index: int) -> Lead:
        """What leads a rollout of this row."""
        ...


class Verifiers:
    """The installed environment ``id`` as ours.

    ``args`` are what it is loaded with: arguments of ``load_environment``, or keys of the taskset's configuration.
    ``env`` is the rest of a taskset's environment (``{"id": …, "agent": {"max_turns": …}}``).

    Problems are held out by what the environment itself holds out; else by loading it a second time with
    ``heldout_args`` over ``args`` (``{"split": "test"}``); else by a share of the training problems, the same in every
    run: ``heldout`` of them, 0 for none. ``train`` is how many problems an endless taskset is asked for, and at most
    how many are used of any other.

    ``exact`` vouches that an episode is a function of problem, seed and actions. Nothing here can know it (tools may be
    anything), so it is False unless said.

    Raises MissingExtra, UsageError or DataError when there is no such environment or it cannot be loaded.
    """

    def __init__(
        self,
        id: str,
        *,
        train: int | None = None,
        heldout: int | None = None,
        heldout_args: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        exact: bool = False,
        **args: Any,
    ):
        imported("verifiers", "environment verifiers")
        self.id, self.exact = id, exact
        self.reward_range: tuple[float, float] | None = None
        self.metrics_ranges: Mapping[str, Range] = {}
        self._train, self._heldout, self._heldout_args = train, heldout, heldout_args
        self._args, self._env = args, env or {}
        self._inversion = Inversion()
        self._libraries: dict[str, Library] = {}
        self._rows: dict[str, Sequence[Row]] = {}
        try:
            self._library("train")
        except BaseException:
            self.close()
            raise

    def problems(self, split: str) -> Sequence[Problem]:
        """The problems of ``train``, or for any other name those that are held out. Raises DataError where there are
        none."""
        part, chosen = self._chosen(split == "train")
        if not chosen:
            what = "training problems" if split == "train" else "held-out problems"
            hint = "" if split == "train" else ': set heldout, or heldout_args = { split = "test" }'
            raise DataError(f"environment {self.id} has no {what}{hint}")
        rows = self._part(part)
        return [
            Problem(
                id=f"{self.id}/{part}/{index}",
                prompt=rows[index].prompt,
                answer=rows[index].answer,
                tags=rows[index].tags,
                metadata={"part": part, "row": index, "digest": rows[index].digest},
            )
            for index in chosen
        ]

    def start(self, problem: Problem, seed: int) -> InvertedEpisode:
        """An episode of this problem, which may come from another process. Raises DataError where this process has
        another task in its place."""
        part, index = str(problem.metadata["part"]), int(problem.metadata["row"])
        rows = self._part(part)
        if index >= len(rows) or rows[index].digest != problem.metadata["digest"]:
            raise DataError(
                f"environment {self.id} has another task at row {index} in each process: its data are drawn at random; "
                "give it the argument that seeds them"
            )
        opening = rows[index].prompt
        return InvertedEpisode(self._inversion, self._library(part).lead(_of(part), index), opening, seed)

    def results(self, episodes: Sequence[InvertedEpisode]) -> list[Any]:
        """``result()`` of each."""
        return [episode.result() for episode in episodes]

    def close(self) -> None:
        """Stop the tool servers and whatever else the environment has started."""
        self._inversion.close()

    def _chosen(self, train: bool) -> tuple[str, Sequence[int]]:
        """The part, and which of its rows."""
        if not train and self._heldout_args is not None:
            return "heldout", range(len(self._part("heldout")))
        own = len(self._part("eval"))
        if not train and own:
            return "eval", range(own if self._heldout is None else min(own, self._heldout))
        rows = self._part("train")
        held = set() if own or self._heldout_args is not None else held_out(rows, self._heldout)
        chosen = [index for index in range(len(rows)) if (index not in held) == train]
        return "train", chosen[: self._train] if train else chosen

    def _part(self, part: str) -> Sequence[Row]:
        if part not in self._rows:
            with _drawn_alike():
                self._rows[part] = self._library(part).rows(_of(part))
        return self._rows[part]

    def _library(self, part: str) -> Library:
        """``train`` and ``eval`` come from one loading, ``heldout`` from the second."""
        which = "heldout" if part == "heldout" else "train"
        if which not in self._libraries:
            args = self._args | (dict(self._heldout_args or {}) if which == "heldout" else {})
            with _drawn_alike():
                self._libraries[which] = load(self.id, args, self._env, self._inversion, self._train)
        return self._libraries[which]


def digest(task: Any) -> str:
    """A hash of what is JSON, or can be written as text."""
    return hashlib.sha256(json.dumps(task, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load(id: str, args: Mapping[str, Any], env: Mapping[str, Any], inversion: Inversion, train: int | None) -> Library:
    """The environment ``id`` of either kind."""
    v1 = importlib.util.find_spec("verifiers.v1") is not None and hasattr(
        importlib.import_module("verifiers.v1"), "taskset_config_type"
    )
    try:
        if v1:
            from retrain.environments.providers.verifiers_v1 import Tasksets, is_taskset

            if is_taskset(id):
                return Tasksets(id, args, env, inversion, train)
        from retrain.environments.providers.verifiers_classic import Classic

        return Classic(id, args, env, inversion)
    except RetrainError:
        raise
    except Exception as error:  # whatever the environment's own code raises
        cause = error.__cause__
        hidden = f"; {described(cause)}" if cause is not None and str(cause) not in str(error) else ""
        raise DataError(f"environment {id} cannot be loaded: {described(error)}{hidden}") from error


def held_out(rows: Sequence[Row], wanted: int | None) -> set[int]:
    """The indices of the rows that are held out of training: those of the smallest hashes, so that the same rows are
    held out of the same data in every run, and equal rows are on the same side. Raises UsageError when none is left."""
    if wanted is None:
        wanted = min(max(round(len(rows) * HELD_OUT_SHARE), len(rows) > 1), MOST_HELD_OUT)
    if wanted <= 0:
        return set()
    hashes = [row.digest for row in rows]
    last = sorted(hashes)[min(wanted, len(hashes)) - 1]
    held = {index for index, value in enumerate(hashes) if value <= last}
    if len(held) == len(rows):
        raise UsageError(
            f"heldout = {wanted} leaves none of the {len(rows)} problems to train with: take a smaller one"
        )
    return held


def _of(part: str) -> str:
    """What the library calls this part."""
    return "train" if part == "heldout" else part


def _drawn_alike() -> OwnRandomness:
    return OwnRandomness(LOADING_SEED)
