"""Use environments of the ``verifiers`` library (Prime Intellect) unchanged.

They are modules with ``load_environment`` (verifiers up to 0.3), or modules that export a ``Taskset`` (``import
verifiers.v1``, from 0.4). Both drive their rollouts themselves; ``inversion`` inverts the control.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence

from retrain.environments.arguments import imported
from retrain.environments.providers.inversion import Inversion, InvertedEpisode, TaskRow
from retrain.environments.providers.randomness import OwnRandomness
from retrain.environments.providers.verifiers_classic import Classic
from retrain.environments.providers.verifiers_v1 import Tasksets, is_taskset
from retrain.errors import DataError, RetrainError, UsageError
from retrain.plugins import described
from retrain.types import Problem

# Seed while data are loaded: rows that the environment draws without a seed are then equal in every process
LOADING_SEED = "loading"
# Share and largest number of training problems to hold out, if the environment has no held-out problems and the
# configuration no ``heldout``
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 200


class Verifiers:
    """Environment of the installed module ``id``.

    ``args`` are arguments of ``load_environment``, or keys of the taskset's configuration. ``env`` has the other keys
    of a taskset's environment (``{"id": …, "agent": {"max_turns": …}}``).

    Held-out problems come from the first of these sources that exists: a second instance of the environment, made with
    ``args`` overridden by ``heldout_args`` (``{"split": "test"}``); the environment's own held-out problems, at most
    ``heldout``; a part of the training problems, ``heldout`` in number (0: none), the same in every run. ``train`` is
    the number of problems of an endless taskset; for others, it is the largest number of training problems.

    ``exact`` declares that an episode is a function of problem, seed and actions. It is False by default, because tools
    may do anything. Raises MissingExtra, UsageError or DataError if the environment is missing or cannot be loaded.
    """

    def __init__(
        self,
        id: str,
        *,
        train: int | None = None,
        heldout: int | None = None,
        heldout_args: Mapping[str, object] | None = None,
        env: Mapping[str, object] | None = None,
        exact: bool = False,
        **args: object,
    ):
        imported("verifiers", "environment verifiers")
        self.id, self.exact = id, exact
        self._train, self._heldout, self._heldout_args = train, heldout, heldout_args
        self._args, self._env = args, env or {}
        self._inversion = Inversion()
        self._libraries: dict[str, Classic | Tasksets] = {}
        self._rows: dict[str, Sequence[TaskRow]] = {}
        try:
            self._library("train")
        except BaseException:
            self.close()
            raise

    def problems(self, split: str) -> Sequence[Problem]:
        """Return the problems of ``train``; other names give the held-out problems. Raises DataError if there are
        none."""
        part, chosen = self._chosen(split == "train")
        if not chosen:
            what = "training problems" if split == "train" else "held-out problems"
            hint = "" if split == "train" else ': set heldout, or heldout_args = { split = "test" }'
            raise DataError(f"environment {self.id} has no {what}{hint}")
        rows = self._part(part)
        return [
            Problem(f"{self.id}/{part}/{index}", prompt, answer, tags, {"part": part, "row": index, "digest": digest})
            for index in chosen
            for prompt, answer, tags, digest in [rows[index]]
        ]

    def start(self, problem: Problem, seed: int) -> InvertedEpisode:
        """Begin an episode of a problem, which another process may have listed. Raises DataError if this process has
        another task at the same row, PluginError if the episode ends before the first request."""
        part, index = str(problem.metadata["part"]), int(problem.metadata["row"])
        rows = self._part(part)
        if index >= len(rows) or rows[index].digest != problem.metadata["digest"]:
            raise DataError(
                f"environment {self.id} has another task at row {index} in each process: its data are drawn at random; "
                "give it the argument that seeds them"
            )
        return InvertedEpisode(self._inversion, self._library(part).lead(part, index), seed)

    def close(self) -> None:
        self._inversion.close()

    def _chosen(self, train: bool) -> tuple[str, Sequence[int]]:
        if not train and self._heldout_args is not None:
            return "heldout", range(len(self._part("heldout")))
        evaluation = len(self._part("eval"))
        if not train and evaluation:
            return "eval", range(evaluation if self._heldout is None else min(evaluation, self._heldout))
        rows = self._part("train")
        held = set() if evaluation or self._heldout_args is not None else held_out(rows, self._heldout)
        chosen = [index for index in range(len(rows)) if (index not in held) == train]
        return "train", chosen[: self._train] if train else chosen

    def _part(self, part: str) -> Sequence[TaskRow]:
        if part not in self._rows:
            with OwnRandomness(LOADING_SEED):
                self._rows[part] = self._library(part).rows(part)
        return self._rows[part]

    def _library(self, part: str) -> Classic | Tasksets:
        """Return the loaded environment: the same for ``train`` and ``eval``, a second instance for ``heldout``."""
        which = "heldout" if part == "heldout" else "train"
        if which not in self._libraries:
            args = self._args | (dict(self._heldout_args or {}) if which == "heldout" else {})
            with OwnRandomness(LOADING_SEED):
                self._libraries[which] = self._load(args)
        return self._libraries[which]

    def _load(self, args: Mapping[str, object]) -> Classic | Tasksets:
        v1 = importlib.util.find_spec("verifiers.v1") is not None and hasattr(
            importlib.import_module("verifiers.v1"), "taskset_config_type"
        )
        try:
            if v1 and is_taskset(self.id):
                return Tasksets(self.id, args, self._env, self._inversion, self._train)
            return Classic(self.id, args, self._env, self._inversion)
        except RetrainError:
            raise
        except Exception as error:  # any exception of the environment's code
            cause = error.__cause__
            hidden = f"; {described(cause)}" if cause is not None and str(cause) not in str(error) else ""
            raise DataError(f"environment {self.id} cannot be loaded: {described(error)}{hidden}") from error


def held_out(rows: Sequence[TaskRow], count: int | None) -> set[int]:
    """Return the indices of the ``count`` held-out rows. Raises UsageError if none is left for training.

    The rows with the smallest hashes are held out, so that they are the same in every run and equal rows are either all
    held out or all trained on.
    """
    if count is None:
        count = min(max(round(len(rows) * HELD_OUT_SHARE), len(rows) > 1), MOST_HELD_OUT)
    if count <= 0:
        return set()
    hashes = [row.digest for row in rows]
    last = sorted(hashes)[min(count, len(hashes)) - 1]
    held = {index for index, value in enumerate(hashes) if value <= last}
    if len(held) == len(rows):
        raise UsageError(f"heldout = {count} leaves none of the {len(rows)} problems to train with: take a smaller one")
    return held
