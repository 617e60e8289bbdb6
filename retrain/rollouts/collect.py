"""Rollouts of many problems at once: turn k of all living episodes is one decode batch, then the episodes step.

Episodes step and are graded in threads of their own, beside decoding: what belongs to a group is done as soon as its
actions are there, while others are still being sampled. What an episode raises ends that episode, with a reason in
place of its reward; what a grader or the chat template raises belongs to the group's run.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import Any, Self

from retrain.config.training import Sampling
from retrain.data.conversation import Conversation
from retrain.data.prompts import Renderer
from retrain.device import timestamp
from retrain.engines.protocol import Engine
from retrain.environments.protocol import Environment, Episode, EpisodeFailed, Limits, Step
from retrain.errors import RetrainError, RunFailed
from retrain.plugins import described
from retrain.records.environment import without_keys
from retrain.rewards.base import failed
from retrain.rng import torch_seed
from retrain.types import (
    Action,
    Ended,
    Group,
    Message,
    PolicyRef,
    Problem,
    Prompt,
    RewardResult,
    Rollout,
    SampleRequest,
    Turn,
)

NO_LIMITS = Limits()


@dataclass(frozen=True)
class RolloutRequest:
    """``samples`` rollouts of one problem by the policy that ``policy`` names. ``stream`` names the random stream of
    the group. ``newest`` names the weights that later turns are drawn by; None for the same ones."""

    environment: Environment
    renderer: Renderer
    problem: Problem
    policy: PolicyRef
    samples: int
    sampling: Sampling
    stream: tuple[int | str, ...]
    limits: Limits = NO_LIMITS
    newest: Callable[[], PolicyRef] | None = None


@dataclass
class _Trajectory:
    """A rollout in progress: its episode, its turns, and what the policy reads next, as tokens and as messages.

    ``length`` are the tokens of its sequence, what is read next included, ``spent`` those of all sequences.
    """

    episode: Episode | None = None
    conversation: Conversation | None = None
    next_ids: tuple[int, ...] = ()
    next_messages: tuple[Message, ...] = ()
    fresh: bool = False
    turns: list[Turn] = field(default_factory=list)
    length: int = 0
    ended: Ended | None = None
    error: str = ""

    def fail(self, error: Exception) -> None:
        self.ended = error.ended if isinstance(error, EpisodeFailed) else "raised"
        self.error = str(error) if isinstance(error, EpisodeFailed) else described(error)
        if (close := getattr(self.episode, "close", None)) is not None:
            with contextlib.suppress(Exception):  # nobody needs it any more
                close()


class _Open:
    """A group in progress. ``begin`` is called once, then ``step`` for every action."""

    def __init__(self, request: RolloutRequest):
        self.request = request
        self.error: Exception | None = None
        self.prompt = Prompt(request.problem, "", ())
        self.trajectories = [_Trajectory() for _ in range(request.samples)]
        self.rewards: list[RewardResult] | None = None
        self.alike = True  # Whether all rollouts begin with the same prompt

    def start(self, sample: int) -> None:
        request, one = self.request, self.trajectories[sample]
        try:
            one.episode = request.environment.start(request.problem, torch_seed(*request.stream, "episode"))
        except (Exception, SystemExit) as error:
            one.fail(_exception(error))

    def read(self) -> None:
        """Put the first observations to the policy: one prompt, unless an environment begins otherwise every time.
        Raises what the chat template raises."""
        request, first = self.request, None
        for one in self.trajectories:
            if one.episode is None or one.ended:
                continue
            try:
                observed = one.episode.observe()
            except (Exception, SystemExit) as error:
                one.fail(_exception(error))
                continue
            prompt = self.prompt
            if observed != first:
                prompt = request.renderer.prompt(request.problem, observed.messages, observed.tools)
                self.alike = first is None
            if first is None:
                first, self.prompt = observed, prompt
            one.conversation = Conversation(request.renderer, prompt, observed.tools)
            one.next_ids, one.next_messages = prompt.token_ids, prompt.messages
            self._go_on(one, len(prompt.token_ids))

    def step(self, sample: int, action: Action) -> None:
        """The policy's action, the episode's answer. Raises what the chat template raises."""
        one = self.trajectories[sample]
        assert one.episode is not None
        turn = Turn(one.next_ids, action, one.next_messages, one.fresh)
        try:
            step = one.episode.step(action)
        except (Exception, SystemExit) as error:
            one.turns.append(turn)
            one.fail(_exception(error))
            return
        one.turns.append(replace(turn, reward=step.reward, metrics=dict(step.metrics), logs=dict(step.logs)))
        one.length += len(action)
        if step.done:
            one.ended = "done"
        elif len(one.turns) == self.request.limits.turns:
            one.ended = "max_turns"
        else:
            self._answer(one, action, step)

    def _answer(self, one: _Trajectory, action: Action, step: Step) -> None:
        assert one.conversation is not None
        read = one.conversation.reply(action, step.messages)
        if step.conversation is not None:
            read = one.conversation.replace(step.conversation)
        one.next_ids, one.fresh = read
        one.next_messages = tuple(one.conversation.messages if read.fresh else step.messages)
        self._go_on(one, len(read.token_ids) + (0 if read.fresh else one.length))

    def _go_on(self, one: _Trajectory, length: int) -> None:
        """The sequence has this many tokens now; without room for another the episode is over."""
        one.length = length
        limit = self.request.limits.tokens
        if limit is not None and length >= limit:
            one.ended = "max_tokens"
            if not one.turns:
                one.error = (
                    f"the prompt has {length} tokens, and an episode {limit} (max_episode_tokens, or the context)"
                )

    def sample_request(self, turn: int, sample: int | None) -> SampleRequest:
        """The first turn of a whole group, or a turn of one of its rollouts."""
        request = self.request
        one = self.trajectories[sample or 0]
        before: list[int] = []
        for past in one.turns:
            before = [] if past.fresh else before
            before += [*past.observation_ids, *past.action.token_ids]
        prompt_ids = one.next_ids if one.fresh else (*before, *one.next_ids)
        sampling = request.sampling
        if request.limits.tokens is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, request.limits.tokens - one.length))
        stream = request.stream if sample is None else (*request.stream, "turn", turn, sample)
        count = request.samples if sample is None else 1
        asked = range(request.samples) if sample is None else [sample]
        goes_on = self.request.limits.turns is None or turn + 1 < self.request.limits.turns
        names = tuple((*request.stream, each) for each in asked) if goes_on or turn else ()
        policy = request.newest() if turn and request.newest is not None else request.policy
        return SampleRequest(policy, tuple(prompt_ids), count, stream=stream, sequences=names, **vars(sampling))

    @property
    def living(self) -> list[int]:
        return [sample for sample, one in enumerate(self.trajectories) if one.ended is None]

    def results(self, given: Iterable[RewardResult]) -> None:
        """``given`` are the rewards of those episodes that have not failed, in order."""
        rewards = iter(given)
        self.rewards = [
            failed(without_keys(one.error)) if one.error else _without_secrets(next(rewards))
            for one in self.trajectories
        ]

    def group(self) -> Group:
        assert self.rewards is not None
        pairs = zip(self.trajectories, self.rewards, strict=True)
        rollouts = [Rollout(self.prompt, tuple(one.turns), reward, one.ended or "done") for one, reward in pairs]
        return Group(self.prompt, tuple(rollouts))


@dataclass
class Collected:
    """Every request's graded group, or what its environment, chat template or grader raised; ``spans`` of time,
    ("rollout" | "score", start, end) in seconds since the epoch; and the seconds that the engine took to load the
    weights, None where it does not say."""

    groups: list[Group | Exception]
    spans: list[tuple[str, float, float]]
    sync_seconds: float | None = None

    def graded(self) -> list[Group]:
        """All groups, for those who cannot go on without one. Raises RunFailed with what environment, chat template or
        grader raised first."""
        found = []
        for group in self.groups:
            if isinstance(group, RetrainError):
                raise group
            if isinstance(group, Exception):
                raise RunFailed(f"rollouts failed: {without_keys(described(group))}") from group
            found.append(group)
        return found


def collect(engine: Engine, requests: Sequence[RolloutRequest], max_rows: int | None = None) -> Collected:
    """Sample, step and grade all of the rollouts; ``max_rows`` bounds how many sequences decode at once."""
    spans: list[tuple[str, float, float]] = []
    syncs: list[float] = []
    groups = [_Open(request) for request in requests]
    with _Stepping(requests) as stepping:
        asked = stepping.begin(groups)
        for turn in count():
            start = timestamp()
            engine.sample(
                [group.sample_request(turn, sample) for group, sample in asked],
                max_rows=max_rows,
                finished=lambda i, actions, asked=asked: stepping.add(*asked[i], actions),
            )
            sampled = timestamp()
            syncs += [engine.sync_seconds] if engine.sync_seconds is not None else []
            asked = stepping.living(groups)
            spans += [("rollout", start, sampled), ("score", sampled, timestamp())]
            if not asked:
                break
        engine.forget_sequences()
    ended: list[Group | Exception] = [group.error or group.group() for group in groups]
    return Collected(ended, spans, sum(syncs) if syncs else None)


_Asked = tuple[_Open, int | None]  # A group, and which of its rollouts acts; None: all of them, alike so far
_Actions = tuple[_Open, Sequence[int], list[Action]]  # A group, which of its rollouts act, and their actions


class _Stepping:
    """Steps episodes and grades groups in a thread of its own, with as many more as there are processes of hosted
    environments. What arrives while it grades is graded together."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self._queue: queue.SimpleQueue[_Actions | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="episodes", daemon=True)
        wide = max((getattr(request.environment, "parallel", 1) for request in requests), default=1)
        self._side_by_side = ThreadPoolExecutor(wide, "episode") if wide > 1 else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._queue.put(None)
        if kind is None or issubclass(kind, Exception):  # after Ctrl-C nobody waits for a slow grader
            self._thread.join()
        if self._side_by_side is not None:
            self._side_by_side.shutdown(wait=kind is None, cancel_futures=True)

    def begin(self, groups: Sequence[_Open]) -> list[_Asked]:
        """Start all episodes; whole groups are asked at once. One whose episodes all fail is over."""
        self._each(lambda group, sample: group.start(sample), [(g, range(len(g.trajectories)), []) for g in groups])
        asked: list[_Asked] = []
        for group in groups:
            try:
                group.read()
            except Exception as error:  # of the chat template: it belongs to the request's run alone
                group.error = error
                continue
            living = group.living
            whole = group.alike and len(living) == len(group.trajectories)
            asked += [(group, None)] if whole else [(group, sample) for sample in living]
        self._grade([group for group in groups if group.error is None and not group.living])
        return asked

    def add(self, group: _Open, sample: int | None, actions: list[Action]) -> None:
        """Step one episode of a group, or (None) all of them; callable from any thread."""
        self._queue.put((group, range(len(actions)) if sample is None else [sample], actions))

    def living(self, groups: Sequence[_Open]) -> list[_Asked]:
        """The episodes that go on, once all actions so far are taken."""
        taken = threading.Event()
        self._queue.put(taken)
        taken.wait()
        return [(group, sample) for group in groups if group.error is None for sample in group.living]

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
        acts = {
            (group, sample): action
            for group, own, actions in steps
            for sample, action in zip(own, actions, strict=True)
        }
        self._each(lambda group, sample: group.step(sample, acts[group, sample]), steps)
        self._grade([group for group in dict.fromkeys(group for group, *_ in steps) if not group.living])

    def _each(self, work: Callable[[_Open, int], None], steps: Sequence[tuple[_Open, Sequence[int], Any]]) -> None:
        """Do the work for each of these rollouts; what it raises belongs to the group's run."""

        def one(group: _Open, sample: int) -> None:
            try:
                work(group, sample)
            except (Exception, SystemExit) as error:
                group.error = _exception(error)

        jobs = [(group, sample) for group, own, _ in steps for sample in own]
        if self._side_by_side is None:
            for job in jobs:
                one(*job)
        else:
            list(self._side_by_side.map(lambda job: one(*job), jobs))

    def _grade(self, groups: Sequence[_Open]) -> None:
        """The rewards of groups that are over; episodes that have failed have none."""
        over: dict[Environment, list[_Open]] = {}
        for group in groups:
            if group.error is None:
                over.setdefault(group.request.environment, []).append(group)
        for environment, own in over.items():
            graded = [[one.episode for one in group.trajectories if not one.error] for group in own]
            episodes = [episode for each in graded for episode in each if episode is not None]
            try:
                rewards = iter(environment.results(episodes) if episodes else [])
                for group in own:
                    group.results(rewards)
            except (Exception, SystemExit) as error:
                for group in own:
                    group.error = _exception(error)


def _exception(error: Exception | SystemExit) -> Exception:
    """What the code of an environment or grader raised; a call of exit ends its run, not the thread."""
    return error if isinstance(error, Exception) else RuntimeError(f"it called exit({error.code!r})")


def _without_secrets(reward: RewardResult) -> RewardResult:
    """The reward with no key or token of the process's environment in its error."""
    return replace(reward, error=without_keys(reward.error)) if reward.error else reward
