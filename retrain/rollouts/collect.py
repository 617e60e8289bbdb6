"""Rollouts of many problems at once: turn k of all living episodes is one decode batch, then the episodes step.

Episodes step and are graded in a thread of their own, beside decoding: what belongs to a group is done as soon as its
actions are there, while others are still being sampled.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import Self

from retrain.config.training import Sampling
from retrain.data.prompts import Renderer
from retrain.engines.protocol import Engine, PolicyRef, SampleRequest
from retrain.environments.protocol import Environment, Episode
from retrain.record.environment import without_keys
from retrain.rng import torch_seed
from retrain.types import Action, Group, Message, Problem, Prompt, RewardResult, Rollout, Turn


@dataclass(frozen=True)
class RolloutRequest:
    """``samples`` rollouts of one problem by the policy that ``policy`` names. ``stream`` names the random stream of
    the group."""

    environment: Environment
    renderer: Renderer
    problem: Problem
    policy: PolicyRef
    samples: int
    sampling: Sampling
    stream: tuple[int | str, ...]


@dataclass
class _Trajectory:
    """A rollout in progress: its episode, its turns, and what the policy reads next, as tokens and as messages."""

    episode: Episode
    conversation: list[Message]
    next_ids: tuple[int, ...]
    next_messages: tuple[Message, ...]
    turns: list[Turn] = field(default_factory=list)
    done: bool = False


class _Open:
    """A group in progress."""

    def __init__(self, request: RolloutRequest):
        environment, problem, stream = request.environment, request.problem, request.stream
        seed = torch_seed(*stream, "episode")
        self.request = request
        self.error: Exception | None = None
        self.episodes = [environment.start(problem, seed) for _ in range(request.samples)]
        messages = self.episodes[0].observe().messages
        self.prompt: Prompt = request.renderer.prompt(problem, messages)
        self.trajectories = [
            _Trajectory(episode, [*messages], self.prompt.token_ids, messages) for episode in self.episodes
        ]
        self.rewards: list[RewardResult] | None = None

    def step(self, sample: int, action: Action) -> None:
        """The policy's action, the episode's answer."""
        one, renderer = self.trajectories[sample], self.request.renderer
        one.turns.append(Turn(one.next_ids, action, one.next_messages))
        step = one.episode.step(action)
        one.done = step.done
        if not step.done:
            one.next_ids = renderer.answer(one.conversation, action, step.messages)
            one.next_messages = step.messages
            one.conversation += [{"role": "assistant", "content": action.text}, *step.messages]

    @property
    def done(self) -> bool:
        """Whether every episode is over."""
        return all(one.done for one in self.trajectories)

    def group(self) -> Group:
        """The graded rollouts."""
        assert self.rewards is not None
        pairs = zip(self.trajectories, self.rewards, strict=True)
        return Group(self.prompt, [Rollout(self.prompt, one.turns, reward) for one, reward in pairs])


@dataclass
class Collected:
    """Every request's graded group, or what its environment, chat template or grader raised; ``spans`` of time,
    ("rollout" | "score", start, end) in seconds since the epoch; and the seconds that the engine took to load the
    weights, None where it does not say."""

    groups: list[Group | Exception]
    spans: list[tuple[str, float, float]]
    sync_seconds: float | None = None


def collect(engine: Engine, requests: Sequence[RolloutRequest], max_rows: int | None = None) -> Collected:
    """Sample, step and grade all of the rollouts; ``max_rows`` bounds how many sequences decode at once."""
    spans: list[tuple[str, float, float]] = []
    syncs: list[float] = []
    begun: list[_Open | Exception] = [_begin(request) for request in requests]
    groups = [each for each in begun if isinstance(each, _Open)]
    asked: list[tuple[_Open, int | None]] = [(group, None) for group in groups]
    with _Stepping() as stepping:
        for turn in count():
            start = time.time()
            engine.sample(
                [_sample_request(group, turn, sample) for group, sample in asked],
                max_rows=max_rows,
                finished=lambda i, actions, asked=asked: stepping.add(*asked[i], actions),
            )
            sampled = time.time()
            syncs += [engine.sync_seconds] if engine.sync_seconds is not None else []
            asked = stepping.living(groups)
            spans += [("rollout", start, sampled), ("score", sampled, time.time())]
            if not asked:
                break
    ended = [each if isinstance(each, Exception) else each.error or each.group() for each in begun]
    return Collected(ended, spans, sum(syncs) if syncs else None)


def _begin(request: RolloutRequest) -> _Open | Exception:
    try:
        return _Open(request)
    except Exception as error:  # belongs to the request's run alone
        return error


def _sample_request(group: _Open, turn: int, sample: int | None) -> SampleRequest:
    """The first turn of a whole group, or a later turn of one of its rollouts."""
    request = group.request
    if sample is None:
        prompt_ids, count, stream = group.prompt.token_ids, request.samples, request.stream
    else:
        one = group.trajectories[sample]
        before = [token for past in one.turns for token in (*past.observation_ids, *past.action.token_ids)]
        prompt_ids, count, stream = (*before, *one.next_ids), 1, (*request.stream, "turn", turn, sample)
    return SampleRequest(request.policy, tuple(prompt_ids), count, stream=stream, **vars(request.sampling))


_Actions = tuple[_Open, Sequence[int], list[Action]]
"""A group, which of its rollouts act, and their actions."""


class _Stepping:
    """Steps episodes and grades groups in a thread of its own. What arrives while it grades is graded together."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Actions | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="episodes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._queue.put(None)
        if kind is None or issubclass(kind, Exception):  # after Ctrl-C nobody waits for a slow grader
            self._thread.join()

    def add(self, group: _Open, sample: int | None, actions: list[Action]) -> None:
        """Step one episode of a group, or (None) all of them; callable from any thread."""
        self._queue.put((group, range(len(actions)) if sample is None else [sample], actions))

    def living(self, groups: Sequence[_Open]) -> list[tuple[_Open, int | None]]:
        """The episodes that go on, once all actions so far are taken."""
        taken = threading.Event()
        self._queue.put(taken)
        taken.wait()
        return [
            (group, sample)
            for group in groups
            if group.error is None
            for sample, one in enumerate(group.trajectories)
            if not one.done
        ]

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            batch: list[_Actions | threading.Event | None] = [item]
            while not self._queue.empty():
                batch.append(self._queue.get())
            self._take([each for each in batch if isinstance(each, tuple)])
            for each in batch:
                if isinstance(each, threading.Event):
                    each.set()
            if None in batch:
                return

    def _take(self, steps: Sequence[_Actions]) -> None:
        """Step the episodes, then grade the groups that are over, in one call per environment."""
        over: dict[Environment, list[_Open]] = {}
        for group, samples, actions in steps:
            try:
                for sample, action in zip(samples, actions, strict=True):
                    group.step(sample, action)
            except (Exception, SystemExit) as error:  # belongs to the group's run; the trainer ends it
                group.error = _exception(error)
                continue
            if group.done:
                over.setdefault(group.request.environment, []).append(group)
        for environment, groups in over.items():
            try:
                rewards = iter(environment.results([episode for group in groups for episode in group.episodes]))
                for group in groups:
                    group.rewards = [_without_secrets(next(rewards)) for _ in group.episodes]
            except (Exception, SystemExit) as error:
                for group in groups:
                    group.error = _exception(error)


def _exception(error: Exception | SystemExit) -> Exception:
    """What the code of an environment or grader raised; a call of exit ends its run, not the thread."""
    return error if isinstance(error, Exception) else RuntimeError(f"it called exit({error.code!r})")


def _without_secrets(reward: RewardResult) -> RewardResult:
    """The reward with no key or token of the process's environment in its error."""
    return replace(reward, error=without_keys(reward.error)) if reward.error else reward
