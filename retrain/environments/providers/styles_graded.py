"""Adapt classes with ``load_dataset`` and ``compute_reward``, as Telescope's environments are written.

With one turn, ``compute_reward(completion, sample, eos_token="")`` grades the answer. With several, ``env_response``
replies to each action, ``is_done(state)`` or ``max_turns`` ends the episode, and ``compute_reward(state,
eos_token="")`` grades ``state.trajectory``. ``get_tool_metrics(state)`` adds metrics; ``reward_min``, ``reward_max``
and ``metrics_ranges`` are the ranges. https://github.com/eduardoslonski/telescope, src/telescope/environments/base.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from retrain.environments.protocol import Observation, Step
from retrain.environments.providers.messages import chat_messages
from retrain.errors import DataError, PluginError
from retrain.plugins import described
from retrain.rewards.base import checked, failed
from retrain.types import Action, Message, Problem, RewardResult

chat = partial(chat_messages, separator="")  # Joins the text parts of a message without separator
Run = Callable[[object], Any]  # Function that returns its argument or, if that is awaitable, its awaited result


class AdaptedEnvironment:
    """Base of environments in another trainer's style; ``written`` may declare ranges and ``exact``."""

    def __init__(self, written: object, owner: str, run: Run):
        self.owner, self.run, self.exact = owner, run, bool(getattr(written, "exact", False))
        self.reward_min, self.reward_max = getattr(written, "reward_min", None), getattr(written, "reward_max", None)
        self.metrics_ranges = getattr(written, "metrics_ranges", None) or {}


def numbers_of(split: str, total: int, heldout: int | None, owner: str) -> range:
    """Return the indices of a split's problems among ``total``. The last ``heldout`` problems (None: a tenth, at most
    200) are held out, all others are ``train``. Raises DataError if none is left to train on."""
    held = min(200, max(1, total // 10)) if heldout is None else heldout
    if held >= total:
        raise DataError(f"{owner}: heldout = {held} leaves none of {total} problems to train on")
    return range(total - held) if split == "train" else range(total - held, total)


def continued(before: Sequence[Message], after: Sequence[Message], **facts: Any) -> Step:
    """Return the step that turns conversation ``before`` into ``after``: it has only the new messages, or the whole
    conversation if its beginning changed."""
    if list(after[: len(before)]) == list(before) and len(after) > len(before):
        return Step(after[len(before) :], done=False, **facts)
    return Step(done=False, conversation=after, **facts)


@dataclass
class State:
    sample: Any
    env_name: str
    trajectory: list[Any] = field(default_factory=list)
    is_completed: bool = False
    stop_reason: str | None = None
    error: str | None = None
    custom: dict[str, object] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        return len(self.trajectory)


class GradedEnvironment(AdaptedEnvironment):
    def __init__(self, made: Any, owner: str, run: Run, heldout: int | None):
        super().__init__(made, owner, run)
        self.made, self.heldout = made, heldout
        if getattr(made, "_name", "") is None:  # Telescope's loader names environments, and their states read the name
            made._name = type(made).__name__

    def problems(self, split: str) -> Sequence[Problem]:
        samples = self.samples
        return [_problem(samples[at], at) for at in numbers_of(split, len(samples), self.heldout, self.owner)]

    def start(self, problem: Problem, seed: int) -> GradedEpisode:
        return GradedEpisode(self.made, self.samples[int(problem.metadata["index"])], self.owner, self.run)

    @cached_property
    def samples(self) -> list[Any]:
        samples = list(self.run(self.made.load_dataset()))
        if len(samples) < 2:
            raise DataError(f"{self.owner}: load_dataset() returned {len(samples)} samples; two at least are needed")
        if wrong := next((sample for sample in samples if not hasattr(sample, "prompt")), None):
            raise DataError(f"{self.owner}: a sample of load_dataset() is {type(wrong).__name__}, without a prompt")
        return samples


def _problem(sample: Any, index: int) -> Problem:
    prompt = sample.prompt if isinstance(sample.prompt, str) else tuple(chat(sample.prompt))
    facts = getattr(sample, "metadata", None) or {}
    try:
        json.dumps(facts)
    except (TypeError, ValueError):
        facts = {}
    answer = str(getattr(sample, "answer", "") or "")
    return Problem(str(index), prompt, answer, (), {**facts, "index": index})


class GradedEpisode:
    def __init__(self, made: Any, sample: Any, owner: str, run: Run):
        self.made, self.sample, self.owner, self.run = made, sample, owner, run
        self.several_turns = self._has("env_response")
        self.conversation = self._prompt()
        self.state: Any = (
            made.create_initial_state(sample) if self._has("create_initial_state") else State(sample, owner)
        )

    def _has(self, method: str) -> bool:
        return callable(getattr(self.made, method, None))

    def _prompt(self) -> list[Message]:
        made, prompt = self.made, self.sample.prompt
        if self._has("get_initial_prompt"):
            return chat(made.get_initial_prompt(self.sample))
        messages = chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if instruction := getattr(made, "instruction_prompt", None):
            at = next((number for number, message in enumerate(messages) if message["role"] == "user"), 0)
            content = f"{instruction}\n\n{messages[at]['content']}"
            messages[at] = {"role": messages[at]["role"], "content": content}
        system = getattr(made, "system_prompt", None)
        return [{"role": "system", "content": str(system)}, *messages] if system else messages

    def observe(self) -> Observation:
        return Observation(tuple(self.conversation))

    def step(self, action: Action) -> Step:
        """End the episode or, if the environment has several turns, return the reply of ``env_response`` until it is
        done."""
        answer: Message = {"role": "assistant", "content": action.text}
        turn = SimpleNamespace(  # read by compute_reward in state.trajectory
            prompt=list(self.conversation),
            completion=[answer],
            completion_token_ids=list(action.token_ids),
            completion_logprobs=action.logprobs_T.tolist(),
            prompt_token_ids=[],
            is_truncated=action.stop_reason == "length",
        )
        self.state.trajectory.append(turn)
        if not self.several_turns:
            return Step()
        before = [*self.conversation, answer]
        response = chat(self.run(self.made.env_response(list(before), self.state)) or [])
        done, reason = self._is_done()
        if done:
            self.state.is_completed, self.state.stop_reason = True, reason
            return Step(logs={"stop_reason": str(reason)} if reason else {})
        self.conversation = [*before, *response]
        if self._has("get_next_prompt_messages"):
            self.conversation = chat(self.run(self.made.get_next_prompt_messages(self.state, response)))
        return continued(before, self.conversation)

    def _is_done(self) -> tuple[bool, str | None]:
        if self._has("is_done"):
            done = self.run(self.made.is_done(self.state))
            return (bool(done[0]), done[1]) if isinstance(done, tuple | list) else (bool(done), None)
        limit = getattr(self.made, "max_turns", None)
        if type(limit) is not int:
            raise PluginError(f"{self.owner} has env_response, and neither is_done nor max_turns to end it")
        return 0 <= limit <= len(self.state.trajectory), "max_turns_reached"

    def result(self) -> RewardResult:
        try:
            if self.several_turns:
                reward = self.run(self.made.compute_reward(self.state))
            else:
                text = self.state.trajectory[-1].completion[0]["content"] if self.state.trajectory else ""
                reward = self.run(self.made.compute_reward(text, self.sample))
            result = checked(_reward_result(reward))
            if self._has("get_tool_metrics"):
                used = self.run(self.made.get_tool_metrics(self.state))
                result.sample_metrics = {**{str(k): float(v) for k, v in used.items()}, **result.sample_metrics}
        except Exception as error:
            return failed(described(error))
        return result


def _reward_result(reward: Any) -> Any:
    """Return an object with ``total_reward`` as a RewardResult with tags ``name=value``; other objects unchanged."""
    if isinstance(reward, RewardResult) or not hasattr(reward, "total_reward"):
        return reward
    tags = getattr(reward, "sample_tags", None) or {}
    metrics = getattr(reward, "sample_metrics", None) or {}
    return RewardResult(reward.total_reward, dict(metrics), tuple(f"{name}={value}" for name, value in tags.items()))
