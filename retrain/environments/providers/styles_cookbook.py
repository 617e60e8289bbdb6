"""Environments of the Tinker cookbook, https://github.com/thinking-machines-lab/tinker-cookbook, tinker_cookbook/rl.

A data set's batches hold builders; a builder's ``make_envs`` makes environments, of which each episode plays one of its
own; an environment has ``initial_observation()`` and ``step(action)``. What it says is messages (its action is then a
message), text (a text) or tokens (tokens); tokens are decoded by a tokenizer, and go through the chat template as a
user's text. Wrappers of message environments are looked through, and questions are read from question environments, so
that neither needs one. A builder's ``compute_group_rewards`` sees one rollout at a time: what compares rollouts with
each other has no place to do so.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.providers.styles_graded import chat
from retrain.environments.providers.styles_loop import Loop
from retrain.errors import DataError, PluginError
from retrain.plugins import declared_ranges, described
from retrain.rewards.base import failed
from retrain.types import Action, Message, Problem, RewardResult


class Source(Protocol):
    """Where the problems of a ``Cookbook`` come from; ``owner`` may declare ranges and ``exact``."""

    owner: Any

    def numbers(self, split: str) -> Sequence[int]:
        """The problems of a split, by number."""
        ...

    def made(self, split: str, number: int, loop: Loop) -> tuple[Any, Any]:
        """A new environment for this problem, and its builder or None."""
        ...


class DatasetProblems:
    """The builders in the batches of a data set; those of ``test`` are held out, or else the last ``heldout``."""

    def __init__(self, train: Any, test: Any, heldout: int | None, name: str):
        self.owner = train
        self._sets, self._heldout, self._name = {"train": train, "held out": test}, heldout, name
        self._builders: dict[str, list[Any]] = {}

    def numbers(self, split: str) -> Sequence[int]:
        """See ``Source``."""
        if self._sets["held out"] is not None:
            return range(len(self._all("train" if split == "train" else "held out")))
        total = len(self._all("train"))
        held = min(200, max(1, total // 10)) if self._heldout is None else self._heldout
        if held >= total:
            raise DataError(f"{self._name}: heldout = {held} leaves none of {total} problems to train on")
        return range(total - held) if split == "train" else range(total - held, total)

    def made(self, split: str, number: int, loop: Loop) -> tuple[Any, Any]:
        """See ``Source``."""
        own = split == "train" or self._sets["held out"] is None
        builder = self._all("train" if own else "held out")[number]
        environments = loop.run(builder.make_envs())
        if not environments:
            raise PluginError(f"{self._name}: make_envs() made no environment")
        return environments[0], builder

    def _all(self, which: str) -> list[Any]:
        if which not in self._builders:
            source = self._sets[which]
            try:
                self._builders[which] = [one for batch in range(len(source)) for one in source.get_batch(batch)]
            except Exception as error:
                raise DataError(f"{self._name}: get_batch failed: {described(error)}") from error
        return self._builders[which]


class SeededProblems:
    """A class whose objects are episodes, and whose problems are seeds; the first ``heldout`` are held out."""

    def __init__(self, owner: Any, arguments: Mapping[str, Any], size: int, heldout: int):
        self.owner, self._arguments, self._size, self._heldout = owner, arguments, size, heldout

    def numbers(self, split: str) -> Sequence[int]:
        """See ``Source``."""
        return range(self._heldout, self._heldout + self._size) if split == "train" else range(self._heldout)

    def made(self, split: str, number: int, loop: Loop) -> tuple[Any, Any]:
        """See ``Source``."""
        return self.owner(**self._arguments, seed=number), None


class Cookbook:
    """The environment of such problems."""

    def __init__(self, source: Source, loop: Loop, owner: str, tokenizer: Any):
        self.source, self.loop, self.owner, self.tokenizer = source, loop, owner, tokenizer
        self.exact = bool(getattr(source.owner, "exact", False))
        ranges = declared_ranges(source.owner)
        total = ranges.pop("reward", {})
        self.reward_range = (total["min"], total["max"]) if {"min", "max"} <= set(total) else None
        self.metrics_ranges: Mapping[str, Range] = ranges

    def problems(self, split: str) -> Sequence[Problem]:
        """Those of ``train``, or for any other name the held-out ones; what they ask is known when they start."""
        where = "train" if split == "train" else "held out"
        return [
            Problem(f"{where}/{number}", f"{where} problem {number}", "", (), {"split": where, "number": number})
            for number in self.source.numbers(where)
        ]

    def start(self, problem: Problem, seed: int) -> CookbookEpisode:
        """A new environment, asked for its first observation."""
        return CookbookEpisode(
            self, *self.source.made(problem.metadata["split"], problem.metadata["number"], self.loop)
        )


@dataclass
class Transition:
    """A step as ``compute_group_rewards`` finds it."""

    ob: Any
    ac: Any
    reward: float
    episode_done: bool
    metrics: Mapping[str, Any] = field(default_factory=dict)
    logs: Mapping[str, Any] = field(default_factory=dict)


class CookbookEpisode:
    """One environment's life."""

    def __init__(self, environment: Cookbook, made: Any, builder: Any):
        self.environment, self.builder = environment, builder
        self.wrapped, self.made = made, getattr(made, "message_env", None) or made
        self.transitions: list[Transition] = []
        self._closed = False
        try:
            self.seen, self.conversation = self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> tuple[Any, list[Message]]:
        run, owner = self.environment.loop.run, self.environment.owner
        observation = run(self.made.initial_observation())
        if isinstance(observation, tuple) and len(observation) == 2:  # with where to stop, which is the engine's here
            observation = observation[0]
        if callable(getattr(self.made, "get_question", None)) and _is_tokens(observation):
            asked = [*getattr(self.made, "convo_prefix", ()), {"role": "user", "content": self.made.get_question()}]
            return observation, chat(asked, owner)
        return observation, self._said(observation)

    def observe(self) -> Observation:
        """What it says first."""
        return Observation(tuple(self.conversation))

    def step(self, action: Action) -> Step:
        """Send the action in the form of the observation, and read what it leads to."""
        answer = self._call(action)
        for name in ("reward", "episode_done"):
            if not hasattr(answer, name):
                raise PluginError(f"{self.environment.owner}: step() returned {type(answer).__name__}, without {name}")
        reward, done = float(answer.reward), bool(answer.episode_done)
        if not math.isfinite(reward):
            raise PluginError(f"{self.environment.owner}: step() gave a reward of {reward}")
        metrics, logs = getattr(answer, "metrics", None) or {}, getattr(answer, "logs", None) or {}
        taken = SimpleNamespace(tokens=list(action.token_ids), maybe_logprobs=action.logprobs_T.tolist())
        self.transitions.append(Transition(self.seen, taken, reward, done, metrics, logs))
        numbers = {str(name): float(value) for name, value in metrics.items()}
        texts = {str(name): str(value) for name, value in logs.items()}
        self.seen = answer.next_messages if hasattr(answer, "next_messages") else answer.next_observation
        if done:
            return Step(done=True, reward=reward, metrics=numbers, logs=texts)
        before = [*self.conversation, {"role": "assistant", "content": action.text}]
        said = self._said(self.seen)
        whole = said[0] == self.conversation[0] or _is_tokens(self.seen) or self._repeated(said)
        self.conversation = said if whole else [*before, *said]
        if self.conversation[: len(before)] == before and len(self.conversation) > len(before):
            return Step(self.conversation[len(before) :], done=False, reward=reward, metrics=numbers, logs=texts)
        return Step(done=False, reward=reward, metrics=numbers, logs=texts, conversation=self.conversation)

    def _call(self, action: Action) -> Any:
        form: Any = action.text
        if _is_tokens(self.seen):
            form = list(action.token_ids)
        elif not isinstance(self.seen, str):
            form = {"role": "assistant", "content": action.text}
        further = {}
        if "extra" in inspect.signature(self.made.step).parameters:
            further = {"extra": {"stop_reason": action.stop_reason}}
        return self.environment.loop.run(self.made.step(form, **further))

    def result(self) -> RewardResult:
        """The sum of the rewards of its steps, and what the builder adds; metrics are summed too."""
        total = math.fsum(step.reward for step in self.transitions)
        metrics: dict[str, float | None] = {}
        for step in self.transitions:
            for name, value in step.metrics.items():
                metrics[str(name)] = float(value) + (metrics.get(str(name)) or 0.0)
        if callable(getattr(self.builder, "compute_group_rewards", None)):
            rollout = SimpleNamespace(transitions=self.transitions, final_ob=self.seen, stop_reason=None)
            try:
                graded = self.builder.compute_group_rewards([rollout], [self.wrapped])
                ((further, more),) = self.environment.loop.run(graded)
                metrics |= {str(name): float(value) for name, value in more.items()}
                total += float(further)
            except Exception as error:
                return failed(f"compute_group_rewards: {described(error)}")
        return RewardResult(total, metrics) if math.isfinite(total) else failed(f"a reward of {total}")

    def close(self) -> None:
        """The builder's ``cleanup``, once; what it raises is of no consequence any more."""
        cleanup = getattr(self.builder, "cleanup", None)
        if callable(cleanup) and not self._closed:
            with contextlib.suppress(Exception):
                self.environment.loop.run(cleanup())
        self._closed = True

    def _repeated(self, said: Sequence[Message]) -> bool:
        """Whether one text begins with all that was said before, as an observation for a model does."""
        first = self.conversation[0]["content"]
        return len(said) == 1 and bool(first) and said[0]["content"].startswith(first)

    def _said(self, observation: Any) -> list[Message]:
        """An observation as messages. Raises PluginError for what is none."""
        owner = self.environment.owner
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        if _is_tokens(observation):
            renderer = getattr(self.made, "renderer", None)
            tokenizer = self.environment.tokenizer or getattr(renderer, "tokenizer", None)
            if tokenizer is None:
                raise PluginError(
                    f"{owner}: its observations are tokens, which only a tokenizer reads: let it return messages or "
                    "text, or give it a renderer with a tokenizer"
                )
            return [{"role": "user", "content": tokenizer.decode(observation.to_ints(), skip_special_tokens=True)}]
        if isinstance(observation, Sequence) and observation:
            return chat(observation, owner)
        raise PluginError(f"{owner}: an observation is {type(observation).__name__}, not messages, text or tokens")


def _is_tokens(observation: Any) -> bool:
    return callable(getattr(observation, "to_ints", None))
