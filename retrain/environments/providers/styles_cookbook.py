"""Adapt environments of the Tinker cookbook, https://github.com/thinking-machines-lab/tinker-cookbook,
tinker_cookbook/rl.

A data set's batches contain builders; a builder's ``make_envs`` returns environments, one per episode; an environment
has ``initial_observation()`` and ``step(action)``. Observations are messages, text or tokens, and actions have the same
form. Tokens are decoded by a tokenizer, and pass the chat template as a user's text. Wrappers of message environments
are unwrapped, and questions are read from question environments, so that neither needs a tokenizer. A builder's
``compute_group_rewards`` gets one rollout at a time, so it cannot compare rollouts.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from retrain.environments.protocol import Observation, Step
from retrain.environments.providers.styles_graded import AdaptedEnvironment, Run, chat, continued, numbers_of
from retrain.errors import PluginError
from retrain.plugins import described
from retrain.rewards.base import failed
from retrain.types import Action, Message, Problem, RewardResult

HELD_OUT = "held out"


class Builders(NamedTuple):
    """Access to the cookbook's builders, one per problem. ``numbers(split)`` returns the numbers of the problems of a
    split, "train" or HELD_OUT; ``make(split, number)`` returns the builder of one problem."""

    numbers: Callable[[str], Sequence[int]]
    make: Callable[[str, int], Any]


def dataset_builders(train: Any, test: Any, heldout: int | None, owner: str) -> Builders:
    """Return the builders in the batches of data sets. The builders in ``test`` are held out or, if it is None, the
    last ``heldout`` builders in ``train``."""
    sources = {"train": train, HELD_OUT: train if test is None else test}

    @cache
    def made(split: str) -> Sequence[Any]:
        source = sources[split]
        return [builder for batch in range(len(source)) for builder in source.get_batch(batch)]

    def numbers(split: str) -> Sequence[int]:
        total = len(made(split))
        return numbers_of(split, total, heldout, owner) if test is None else range(total)

    return Builders(numbers, lambda split, number: made(split)[number])


class Cookbook(AdaptedEnvironment):
    def __init__(self, written: object, builders: Builders, owner: str, run: Run):
        super().__init__(written, owner, run)
        self.builders = builders

    def problems(self, split: str) -> Sequence[Problem]:
        where = "train" if split == "train" else HELD_OUT
        return [
            Problem(f"{where}/{number}", f"{where} problem {number}", "", (), {"split": where, "number": number})
            for number in self.builders.numbers(where)
        ]

    def start(self, problem: Problem, seed: int) -> CookbookEpisode:
        builder = self.builders.make(problem.metadata["split"], problem.metadata["number"])
        environments = self.run(builder.make_envs())
        if not environments:
            raise PluginError(f"{self.owner}: make_envs() made no environment")
        return CookbookEpisode(environments[0], builder, self.owner, self.run)


class CookbookEpisode:
    def __init__(self, made: Any, builder: Any, owner: str, run: Run):
        self.builder, self.owner, self.run = builder, owner, run
        self.wrapped, self.made = made, getattr(made, "message_env", None) or made
        self.transitions: list[Any] = []
        self.seen: Any = None
        self.conversation: list[Message] = []
        self._closed = False
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        self.seen = self.run(self.made.initial_observation())
        if isinstance(self.seen, tuple) and len(self.seen) == 2:  # with a stop condition, which the engine has itself
            self.seen = self.seen[0]
        if callable(getattr(self.made, "get_question", None)) and _is_tokens(self.seen):
            question = {"role": "user", "content": self.made.get_question()}
            self.conversation = chat([*getattr(self.made, "convo_prefix", ()), question])
        else:
            self.conversation = self._messages(self.seen)

    def observe(self) -> Observation:
        return Observation(tuple(self.conversation))

    def step(self, action: Action) -> Step:
        answer = self._answer(action)
        for name in ("reward", "episode_done"):
            if not hasattr(answer, name):
                raise PluginError(f"{self.owner}: step() returned {type(answer).__name__}, without {name}")
        reward, done = float(answer.reward), bool(answer.episode_done)
        if not math.isfinite(reward):
            raise PluginError(f"{self.owner}: step() gave a reward of {reward}")
        metrics, logs = getattr(answer, "metrics", None) or {}, getattr(answer, "logs", None) or {}
        sampled = SimpleNamespace(tokens=list(action.token_ids), maybe_logprobs=action.logprobs_T.tolist())
        transition = SimpleNamespace(  # read by compute_group_rewards
            ob=self.seen, ac=sampled, reward=reward, episode_done=done, metrics=metrics, logs=logs
        )
        self.transitions.append(transition)
        self.seen = answer.next_messages if hasattr(answer, "next_messages") else answer.next_observation
        if done:
            return Step(done=True, reward=reward, metrics=metrics, logs=logs)
        before = [*self.conversation, {"role": "assistant", "content": action.text}]
        messages = self._messages(self.seen)
        whole = messages[0] == self.conversation[0] or _is_tokens(self.seen) or self._repeats(messages)
        self.conversation = messages if whole else [*before, *messages]
        return continued(before, self.conversation, reward=reward, metrics=metrics, logs=logs)

    def _answer(self, action: Action) -> Any:
        form: Any = {"role": "assistant", "content": action.text}
        if _is_tokens(self.seen):
            form = list(action.token_ids)
        elif isinstance(self.seen, str):
            form = action.text
        takes_extra = "extra" in inspect.signature(self.made.step).parameters
        extra = {"extra": {"stop_reason": action.stop_reason}} if takes_extra else {}
        return self.run(self.made.step(form, **extra))

    def result(self) -> RewardResult:
        total = math.fsum(step.reward for step in self.transitions)
        metrics: dict[str, float | None] = {}
        for step in self.transitions:
            for name, value in step.metrics.items():
                metrics[str(name)] = float(value) + (metrics.get(str(name)) or 0.0)
        if callable(getattr(self.builder, "compute_group_rewards", None)):
            rollout = SimpleNamespace(transitions=self.transitions, final_ob=self.seen, stop_reason=None)
            try:
                ((reward, more),) = self.run(self.builder.compute_group_rewards([rollout], [self.wrapped]))
                metrics |= {str(name): float(value) for name, value in more.items()}
                total += float(reward)
            except Exception as error:
                return failed(f"compute_group_rewards: {described(error)}")
        return RewardResult(total, metrics) if math.isfinite(total) else failed(f"a reward of {total}")

    def close(self) -> None:
        """Call the builder's ``cleanup`` once; its exceptions are ignored."""
        cleanup = getattr(self.builder, "cleanup", None)
        if callable(cleanup) and not self._closed:
            with contextlib.suppress(Exception):
                self.run(cleanup())
        self._closed = True

    def _repeats(self, messages: Sequence[Message]) -> bool:
        """Return whether an observation is one text that begins with the conversation's first message."""
        first = self.conversation[0]["content"]
        return len(messages) == 1 and bool(first) and messages[0]["content"].startswith(first)

    def _messages(self, observation: Any) -> list[Message]:
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        if _is_tokens(observation):
            tokenizer = getattr(getattr(self.made, "renderer", None), "tokenizer", None)
            if tokenizer is None:
                raise PluginError(
                    f"{self.owner}: its observations are tokens, which only a tokenizer reads: let it return messages "
                    "or text, or give it a renderer with a tokenizer"
                )
            return [{"role": "user", "content": tokenizer.decode(observation.to_ints(), skip_special_tokens=True)}]
        if isinstance(observation, Sequence) and observation:
            return chat(observation)
        raise PluginError(f"{self.owner}: an observation is {type(observation).__name__}, not messages, text or tokens")


def _is_tokens(observation: object) -> bool:
    return callable(getattr(observation, "to_ints", None))
