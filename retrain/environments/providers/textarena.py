"""TextArena's games for one player, https://github.com/LeonGuertler/TextArena: moves in square brackets, words back.

A problem is a game with a seed. The policy reads what the game says since its last move, not its own moves again; the
reward is the game's own at its end. Where a game draws nothing from its seed (TowerOfHanoi-v0), all its problems are
alike, held-out ones too.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.providers.arguments import (
    count,
    ends,
    imported,
    meant,
    named_arguments,
    refuse_unknown,
    table,
)
from retrain.environments.providers.randomness import OwnRandomness
from retrain.errors import DataError, RetrainError, UsageError
from retrain.plugins import described
from retrain.types import Action, Message, Problem, RewardResult

OWNER = "environment textarena"
MOVES = ("[5]", "[0 1]", "hello", "[up]", "[a]", "[1 1 1]", "[2 3]", "[left]")
"""What the check plays; sense and nonsense for most games."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import retrain.environments.providers.textarena as own; "
    "print(chr(10) + own.digest(sys.argv[2], json.loads(sys.argv[3])))"
)


class TextArena:
    """The game ``id``, or several in turn, with ``game`` as the arguments of its class.

    Seeds 0 to ``heldout`` − 1 are held out and the ``size`` next ones train, all of them plus ``seed`` × 1,000,000.
    ``unfinished_reward``: what a game is worth that was cut off. ``exact``: by default whether a short game repeats,
    here and in another process. Raises UsageError for games and arguments that there are not; ``problems`` tries each
    game and raises DataError for one that cannot be played.
    """

    def __init__(
        self,
        id: Any,
        size: int = 1000,
        heldout: int = 200,
        seed: int = 0,
        game: Mapping[str, Any] | None = None,
        unfinished_reward: float = 0.0,
        reward_range: Sequence[float] | None = None,
        exact: bool | None = None,
        **unknown: Any,
    ):
        refuse_unknown(unknown, named_arguments(TextArena), OWNER)
        self.size, self.heldout = count(size, "size", OWNER, 1), count(heldout, "heldout", OWNER)
        self.first = count(seed, "seed", OWNER) * 1_000_000
        self.games = _games(id)
        self.arguments = table(game or {}, "game", OWNER)
        for name in self.games:
            refuse_unknown(self.arguments, _arguments_of(name), f"{OWNER}: {name}")
        if type(unfinished_reward) not in (int, float) or not math.isfinite(unfinished_reward):
            raise UsageError(f"{OWNER}: unfinished_reward is {unfinished_reward!r}, not a number")
        self.unfinished_reward = float(unfinished_reward)
        if exact is not None and type(exact) is not bool:
            raise UsageError(f"{OWNER}: exact is {exact!r}, neither true nor false")
        self._exact = exact
        self.reward_range = ends(reward_range, "reward_range", OWNER)
        self.metrics_ranges: Mapping[str, Range] = {
            "invalid_moves": {"min": 0, "invert": True},
            "finished": {"min": 0, "max": 1},
        }
        self._checked = False

    @cached_property
    def exact(self) -> bool:
        """Whether a game is a function of its seed and moves, as far as a short one in two processes shows."""
        return self._repeats if self._exact is None else self._exact

    def problems(self, split: str) -> Sequence[Problem]:
        """Games with their seeds: those of ``train``, or for any other name the held-out ones."""
        if not self._checked:
            for name in self.games:
                _try_out(name, self.arguments)
            self._checked = True
        begin, number = (self.first + self.heldout, self.size) if split == "train" else (self.first, self.heldout)
        drawn = [(self.games[seed % len(self.games)], seed) for seed in range(begin, begin + number)]
        return [
            Problem(f"{name}/{seed}", f"{name}, seed {seed}", "", (name,), {"game": name, "seed": seed})
            for name, seed in drawn
        ]

    def start(self, problem: Problem, seed: int) -> TextArenaEpisode:
        """A new game. Raises DataError when it cannot be set up."""
        name = problem.metadata["game"]
        return TextArenaEpisode(name, int(problem.metadata["seed"]), self.arguments, self.unfinished_reward)

    @property
    def _repeats(self) -> bool:
        """Whether a short game repeats, between others and in a process with another hash seed."""
        for name in self.games:
            given = json.dumps(self.arguments)
            command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), name, given]
            other = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
            there = other.stdout.decode(errors="replace").split("\n")[-2:][0]
            if not digest(name, self.arguments) == digest(name, self.arguments) == there:
                return False
        return True


class TextArenaEpisode:
    """One game. The global generators are its own while it moves."""

    def __init__(self, name: str, seed: int, arguments: Mapping[str, Any], unfinished_reward: float):
        self.unfinished_reward = unfinished_reward
        self.invalid = self.turns = 0
        self.done = False
        self._randomness = OwnRandomness(f"{name}/{seed}")
        with self._randomness:
            self._game, self._inner = _made(name, arguments)
            try:
                self._game.reset(num_players=1, seed=seed)
                self.first = self._heard()
            except Exception as error:
                raise DataError(f"{OWNER}: {name} cannot be set up: {described(error)}") from error
        if not isinstance(self._inner.state, imported("textarena", OWNER).SinglePlayerState):
            raise DataError(f"{OWNER}: {name} is not a game for one player")

    def observe(self) -> Observation:
        """The rules, and the board where there is one."""
        return Observation(tuple(self.first))

    def step(self, action: Action) -> Step:
        """Make a move; an invalid one is told, and may end the game."""
        state = self._inner.state
        errors = state.error_count
        with self._randomness:
            self.done, _ = self._game.step(action.text)
            heard = self._heard()
        ended_by_it = bool(self.done and state.game_info[0].get("invalid_move"))
        invalid = state.error_count > errors or ended_by_it
        self.invalid += invalid
        self.turns += 1
        metrics = {"invalid_moves": float(invalid)}
        if not self.done:
            return Step(heard, done=False, metrics=metrics)
        return Step(metrics=metrics, logs={"reason": str(state.game_info[0].get("reason", ""))})

    def result(self) -> RewardResult:
        """The game's own reward; ``unfinished_reward`` for a game that was cut off."""
        metrics: dict[str, float | None] = {
            "invalid_moves": float(self.invalid),
            "moves": float(self.turns),
            "finished": float(self.done),
        }
        if not self.done:
            return RewardResult(self.unfinished_reward, metrics)
        reward: Any = (self._inner.state.rewards or {}).get(0)
        if isinstance(reward, str) or not hasattr(reward, "__float__") or not math.isfinite(float(reward)):
            return RewardResult(None, metrics, error=f"the game's reward is {reward!r}, not a number")
        return RewardResult(float(reward), metrics)

    def _heard(self) -> list[Message]:
        """What the game has said since the last move, without the move."""
        kinds = imported("textarena", OWNER).ObservationType
        _, heard = self._inner.get_observation()
        texts = [str(text) for _, text, kind in heard if kind is not kinds.PLAYER_ACTION]
        return [{"role": "user", "content": "\n".join(texts) or "Go on."}]


def digest(name: str, arguments: Mapping[str, Any]) -> str:
    """A fingerprint of a short game: all that it says and gives."""
    episode = TextArenaEpisode(name, 0, arguments, 0.0)
    said: list[Any] = [list(episode.first)]
    for move in MOVES:
        step = episode.step(_action(move))
        said.append([list(step.messages), step.done, dict(step.logs)])
        if step.done:
            break
    said.append(repr(episode.result()))
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _try_out(name: str, arguments: Mapping[str, Any]) -> None:
    """Play a short game. Raises DataError when it raises, or its reward is not a number."""
    episode = TextArenaEpisode(name, 0, arguments, 0.0)
    for move in MOVES:
        try:
            if episode.step(_action(move)).done:
                break
        except Exception as error:
            raise DataError(f"{OWNER}: {name} cannot be played: {move!r} raises {described(error)}") from error
    if error := episode.result().error:
        raise DataError(f"{OWNER}: nothing can be learned from {name}: {error}")


def _action(text: str) -> Action:
    import numpy as np

    return Action([], text, np.zeros(0), None, "stop")


def _made(name: str, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """The game as its moves are made, with the library's wrappers, and the game within. Raises DataError."""
    arena = imported("textarena", OWNER)
    try:
        game = arena.make(name, **arguments)
    except LookupError as error:  # nltk's, a page long
        resource = re.search(r"Resource\W+(?:\x1b\[\d+m)?'?(\w+)", str(error))
        if resource is None:
            raise DataError(f"{OWNER}: {name} cannot be set up: {described(error)}") from error
        fix = f"python -m nltk.downloader {resource[1]}"
        raise DataError(f"{OWNER}: {name} needs data of nltk that is not on this machine; type: {fix}") from error
    except RetrainError:
        raise
    except Exception as error:
        raise DataError(f"{OWNER}: {name} cannot be set up: {described(error)}") from error
    inner = game
    while isinstance(inner, arena.Wrapper):
        inner = inner.env
    return game, inner


def _games(id: Any) -> list[str]:
    """The games that ``id`` names. Raises UsageError."""
    names = [id] if isinstance(id, str) else list(id) if isinstance(id, list | tuple) else []
    if not names:
        raise UsageError(f'{OWNER}: id is {id!r}: type the name of a game, such as id = "GuessTheNumber-v0", or a list')
    registry = imported("textarena.envs.registration", OWNER).ENV_REGISTRY
    for name in names:
        if name not in registry:
            raise UsageError(f"{OWNER} has no game {name!r}{meant(name, registry)}")
    return names


def _arguments_of(name: str) -> list[str]:
    """The arguments of a game's class; raises DataError when it cannot be imported."""
    entry = imported("textarena.envs.registration", OWNER).ENV_REGISTRY[name].entry_point
    try:
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(imported(module, OWNER), attribute)
    except Exception as error:
        raise DataError(f"{OWNER}: {name} cannot be set up: {described(error)}") from error
    return [parameter for parameter in inspect.signature(entry).parameters if parameter != "self"]
