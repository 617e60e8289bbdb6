"""Classes with ``load_dataset`` and ``compute_reward``, as Telescope's environments are written.

With one turn ``compute_reward(completion, sample, eos_token="")`` grades the answer. With several ``env_response``
answers each action, ``is_done(state)`` or ``max_turns`` ends it, and ``compute_reward(state, eos_token="")`` grades
``state.trajectory``. ``get_tool_metrics(state)`` adds metrics; ``reward_min``, ``reward_max`` and ``metrics_ranges``
are the ranges. https://github.com/eduardoslonski/telescope, src/telescope/environments/base.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.providers.styles_loop import Loop
from retrain.errors import DataError, PluginError
from retrain.plugins import declared_ranges, described
from retrain.rewards.base import checked, failed
from retrain.types import Action, Message, Problem, RewardResult


@dataclass
class Turn:
    """An action with what it answered, as ``compute_reward`` finds it in ``state.trajectory``."""

    prompt: list[Message]
    completion: list[Message]
    completion_token_ids: list[int] = field(default_factory=list)
    completion_logprobs: list[float] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    is_truncated: bool = False


@dataclass
class State:
    """A rollout so far, for a class without ``create_initial_state``."""

    sample: Any
    env_name: str
    trajectory: list[Any] = field(default_factory=list)
    is_completed: bool = False
    stop_reason: str | None = None
    error: str | None = None
    custom: dict[str, Any] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """Actions taken."""
        return len(self.trajectory)


class Graded:
    """The environment of such an object. The last ``heldout`` samples are held out; None: a tenth, at most 200."""

    def __init__(self, made: Any, loop: Loop, owner: str, heldout: int | None):
        self.made, self.loop, self.owner, self.heldout = made, loop, owner, heldout
        self.several_turns = callable(getattr(made, "env_response", None))
        if getattr(made, "_name", "") is None:  # Telescope's loader names environments, and their states ask for it
            made._name = type(made).__name__
        self.exact = bool(getattr(made, "exact", False))
        ranges = declared_ranges(made)
        total = ranges.pop("reward", {})
        self.reward_range = (total["min"], total["max"]) if {"min", "max"} <= set(total) else None
        self.metrics_ranges: Mapping[str, Range] = ranges
        self._samples: list[Any] | None = None

    @property
    def samples(self) -> list[Any]:
        """What ``load_dataset`` returns. Raises DataError for what is no list of samples."""
        if self._samples is None:
            try:
                found = list(self.loop.run(self.made.load_dataset()))
            except Exception as error:
                raise DataError(f"{self.owner}: load_dataset() failed: {described(error)}") from error
            if len(found) < 2:
                raise DataError(f"{self.owner}: load_dataset() returned {len(found)} samples; two at least are needed")
            if wrong := next((sample for sample in found if not hasattr(sample, "prompt")), None):
                raise DataError(f"{self.owner}: a sample of load_dataset() is {type(wrong).__name__}, without a prompt")
            self._samples = found
        return self._samples

    def problems(self, split: str) -> Sequence[Problem]:
        """Samples: those of ``train``, or for any other name the held-out ones."""
        total = len(self.samples)
        held = min(200, max(1, total // 10)) if self.heldout is None else self.heldout
        if held >= total:
            raise DataError(f"{self.owner}: heldout = {held} leaves none of {total} samples to train on")
        chosen = range(total - held) if split == "train" else range(total - held, total)
        return [self._problem(index) for index in chosen]

    def start(self, problem: Problem, seed: int) -> GradedEpisode:
        """See ``Environment.start``."""
        return GradedEpisode(self, self.samples[int(problem.metadata["index"])])

    def _problem(self, index: int) -> Problem:
        sample = self.samples[index]
        prompt = sample.prompt if isinstance(sample.prompt, str) else tuple(chat(sample.prompt, self.owner))
        facts = getattr(sample, "metadata", None) or {}
        try:
            json.dumps(facts)
        except (TypeError, ValueError):
            facts = {}
        answer = str(getattr(sample, "answer", "") or "")
        return Problem(str(index), prompt, answer, (), {**facts, "index": index})


class GradedEpisode:
    """One sample's rollout."""

    def __init__(self, environment: Graded, sample: Any):
        self.environment, self.sample = environment, sample
        made = environment.made
        self.conversation = self._prompt()
        begin = getattr(made, "create_initial_state", None)
        self.state: Any = begin(sample) if callable(begin) else State(sample, environment.owner)

    def _prompt(self) -> list[Message]:
        made, owner, prompt = self.environment.made, self.environment.owner, self.sample.prompt
        if callable(getattr(made, "get_initial_prompt", None)):
            return chat(made.get_initial_prompt(self.sample), owner)
        said = chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, owner)
        if instruction := getattr(made, "instruction_prompt", None):
            at = next((number for number, message in enumerate(said) if message["role"] == "user"), 0)
            said[at] = {"role": said[at]["role"], "content": f"{instruction}\n\n{said[at]['content']}"}
        system = getattr(made, "system_prompt", None)
        return [{"role": "system", "content": str(system)}, *said] if system else said

    def observe(self) -> Observation:
        """The sample as the class puts it."""
        return Observation(tuple(self.conversation))

    def step(self, action: Action) -> Step:
        """With one turn the end; else what ``env_response`` answers, until ``is_done``."""
        made, run = self.environment.made, self.environment.loop.run
        answer: Message = {"role": "assistant", "content": action.text}
        self.state.trajectory.append(
            Turn(
                list(self.conversation),
                [answer],
                list(action.token_ids),
                action.logprobs_T.tolist(),
                is_truncated=action.stop_reason == "length",
            )
        )
        if not self.environment.several_turns:
            return Step()
        before = [*self.conversation, answer]
        said = chat(run(made.env_response(list(before), self.state)) or [], self.environment.owner)
        done, reason = self._is_done()
        if done:
            self.state.is_completed, self.state.stop_reason = True, reason
            return Step(logs={"stop_reason": str(reason)} if reason else {})
        following = [*before, *said]
        if callable(getattr(made, "get_next_prompt_messages", None)):
            following = chat(run(made.get_next_prompt_messages(self.state, said)), self.environment.owner)
        self.conversation = following
        if following[: len(before)] == before and len(following) > len(before):
            return Step(following[len(before) :], done=False)
        return Step(done=False, conversation=following)

    def _is_done(self) -> tuple[bool, str | None]:
        made = self.environment.made
        if callable(getattr(made, "is_done", None)):
            done = self.environment.loop.run(made.is_done(self.state))
            return (bool(done[0]), done[1]) if isinstance(done, tuple | list) else (bool(done), None)
        limit = getattr(made, "max_turns", None)
        if type(limit) is not int:
            raise PluginError(f"{self.environment.owner} has env_response, and neither is_done nor max_turns to end it")
        return limit >= 0 and len(self.state.trajectory) >= limit, "max_turns_reached"

    def result(self) -> RewardResult:
        """What ``compute_reward`` says, with ``get_tool_metrics``; what it raises becomes an error."""
        made, run = self.environment.made, self.environment.loop.run
        try:
            if self.environment.several_turns:
                given = run(made.compute_reward(self.state))
            else:
                text = self.state.trajectory[-1].completion[0]["content"] if self.state.trajectory else ""
                given = run(made.compute_reward(text, self.sample))
            result = checked(_ours(given))
            if callable(getattr(made, "get_tool_metrics", None)):
                used = run(made.get_tool_metrics(self.state))
                result.sample_metrics = {**{str(k): float(v) for k, v in used.items()}, **result.sample_metrics}
        except Exception as error:
            return failed(described(error))
        return result


def chat(messages: Any, owner: str) -> list[Message]:
    """Messages as role and text. Raises PluginError for what is none, and for parts that are not text."""
    said: list[Message] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise PluginError(f"{owner}: a message is {message!r:.80}, not a role with a text")
        said.append({"role": message["role"], "content": content})
    return said


def _ours(given: Any) -> Any:
    """A number as it is; an object with ``total_reward`` as our RewardResult, its tags as ``name=value``."""
    if isinstance(given, RewardResult) or not hasattr(given, "total_reward"):
        return given
    tags = getattr(given, "sample_tags", None) or {}
    metrics = getattr(given, "sample_metrics", None) or {}
    return RewardResult(given.total_reward, dict(metrics), tuple(f"{name}={value}" for name, value in tags.items()))
