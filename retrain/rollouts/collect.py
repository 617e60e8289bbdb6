"""Collects rollouts of many problems: turn k of all live episodes is sampled in one decode batch, then they step.

Episodes step and are graded in other threads than decoding, as soon as the actions of a group are complete. An error of
an episode ends that episode, with a reason instead of a reward; an error of a grader or the chat template fails the
group's run. ``RecentWeights`` decides which weights of a run sample its rollouts.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import Protocol, Self

from retrain.config.training import Sampling
from retrain.data.prompts import Conversation, Renderer
from retrain.device import timestamp
from retrain.engines.protocol import Engine
from retrain.environments.protocol import Environment, Episode, EpisodeFailed, EpisodeLimits, Step
from retrain.errors import RetrainError, RunFailed
from retrain.plugins import described
from retrain.policy.protocol import PolicySnapshot
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
from retrain.util.text import without_keys

NO_LIMITS = EpisodeLimits()


@dataclass(frozen=True)
class Weights:
    step: int  # Step before which these weights were published
    ref: PolicyRef
    snapshot: PolicySnapshot


@dataclass(eq=False)
class RecentWeights:
    """The versions of a run's weights from which its current and next rollouts are sampled, oldest first.

    These are the weights published before the current step and before each of the ``bound`` steps preceding it.
    ``remembers``: ``snapshots`` also has the last dropped weights, which servers may still use.
    """

    bound: int
    remembers: bool = False
    published: set[PolicyRef] = field(default_factory=set)  # Currently loaded in the engine
    _dropped: Weights | None = None
    _weights: list[Weights] = field(default_factory=list)
    _replaced: list[Weights] = field(default_factory=list)

    def publish_to(self, engine: Engine, newest: Weights) -> None:
        """Publish ``newest``, and older kept weights that the engine lacks; retire weights that are no longer kept."""
        for weights in (*self._weights, newest):
            if weights.ref not in self.published:
                engine.publish(weights.ref, weights.snapshot)
                self.published.add(weights.ref)
        self._retire(engine, self.note(newest))

    def withdraw_from(self, engine: Engine) -> None:
        self._retire(engine, list(self.published))

    def _retire(self, engine: Engine, refs: Sequence[PolicyRef]) -> None:
        for ref in refs:
            engine.retire(ref)
            self.published.discard(ref)

    def note(self, weights: Weights) -> list[PolicyRef]:
        """Store ``weights`` for their step; return the refs of weights that are no longer needed. Unless ``bound`` is
        0, replaced weights of the same step stay until the next call, because a request may already name them."""
        before = [*self._replaced, *self._weights]
        retained = [each for each in self._weights if weights.step - self.bound <= each.step < weights.step]
        replaced = [each for each in before if each.step == weights.step and each.ref != weights.ref]
        names = {each.ref for each in (*retained, *replaced, weights)}
        dropped = [each for each in before if each.ref not in names]
        self._replaced, self._weights = replaced if self.bound else [], [*retained, weights]
        dropped += [] if self.bound else replaced
        if self.remembers and dropped:
            self._dropped = dropped[-1]
        return list(dict.fromkeys(each.ref for each in dropped))

    def before(self, step: int) -> list[Weights]:
        return [each for each in self._weights if step - self.bound <= each.step < step]

    def drawing(self, step: int) -> PolicyRef:
        """Return the ref of the weights that sample the rollouts of ``step``: the newest weights that were published at
        least ``bound`` steps before it, or else the oldest weights."""
        old_enough = [each for each in self._weights if each.step <= step - self.bound]
        return (old_enough[-1] if old_enough else self._weights[0]).ref

    def newest(self) -> PolicyRef:
        return self._weights[-1].ref

    def snapshots(self) -> dict[int, PolicySnapshot]:
        known = [*([self._dropped] if self._dropped else []), *self._weights]
        return {each.ref.version: each.snapshot for each in known}

    def staleness(self, version: int, step: int) -> int:
        """Return the steps from the last publication of ``version`` to ``step``; ``bound`` + 1 if it is unknown."""
        known = [*self._replaced, *self._weights]
        last = max((each.step for each in known if each.ref.version == version), default=None)
        return step - last if last is not None else self.bound + 1


@dataclass(frozen=True)
class RolloutRequest:
    """Request for ``samples`` rollouts of one problem by ``policy``. ``stream``: random stream of the group. ``newest``
    returns the ref of the weights that sample the turns after the first; None: ``policy`` samples all turns."""

    environment: Environment
    renderer: Renderer
    problem: Problem
    policy: PolicyRef
    samples: int
    sampling: Sampling
    stream: tuple[int | str, ...]
    limits: EpisodeLimits = NO_LIMITS
    newest: Callable[[], PolicyRef] | None = None


@dataclass
class _Trajectory:
    """A rollout in progress. ``next_ids``, ``next_messages``: the next observation; ``fresh``: the next observation
    begins a new sequence; ``length``: tokens of the sequence, including the next observation."""

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
            with contextlib.suppress(Exception):  # the episode has already failed
                close()


class _PendingGroup:
    """A group in progress. Call ``start`` for each rollout, ``read`` once, then ``step`` for every action."""

    def __init__(self, request: RolloutRequest):
        self.request = request
        self.error: Exception | None = None
        self.prompt = Prompt(request.problem, "", ())
        self.trajectories = [_Trajectory() for _ in range(request.samples)]
        self.rewards: list[RewardResult] | None = None
        self.shares_prompt = True  # Whether all rollouts begin with the same prompt

    def start(self, sample: int) -> None:
        request, trajectory = self.request, self.trajectories[sample]
        try:
            trajectory.episode = request.environment.start(request.problem, torch_seed(*request.stream, "episode"))
        # SystemExit is no Exception: an environment that calls exit() must end its episode, not this thread.
        except (Exception, SystemExit) as error:
            trajectory.fail(_exception(error))

    def read(self) -> None:
        """Render the first observations: one prompt for the group, unless its episodes begin differently. Raises errors
        of the chat template."""
        request, first = self.request, None
        for trajectory in self.trajectories:
            if trajectory.episode is None or trajectory.ended:
                continue
            try:
                observed = trajectory.episode.observe()
            except (Exception, SystemExit) as error:
                trajectory.fail(_exception(error))
                continue
            prompt = self.prompt
            if observed != first:
                prompt = request.renderer.prompt(request.problem, observed.messages, observed.tools)
                self.shares_prompt = first is None
            if first is None:
                first, self.prompt = observed, prompt
            trajectory.conversation = Conversation(request.renderer, prompt, observed.tools)
            trajectory.next_ids, trajectory.next_messages = prompt.token_ids, prompt.messages
            self._set_length(trajectory, len(prompt.token_ids))

    def step(self, sample: int, action: Action) -> None:
        """Step the episode with the policy's action. Raises errors of the chat template."""
        trajectory = self.trajectories[sample]
        assert trajectory.episode is not None
        turn = Turn(trajectory.next_ids, action, trajectory.next_messages, trajectory.fresh)
        try:
            step = trajectory.episode.step(action)
        except (Exception, SystemExit) as error:
            trajectory.turns.append(turn)
            trajectory.fail(_exception(error))
            return
        trajectory.turns.append(replace(turn, reward=step.reward, metrics=dict(step.metrics), logs=dict(step.logs)))
        trajectory.length += len(action)
        if step.done:
            trajectory.ended = "done"
        elif len(trajectory.turns) == self.request.limits.turns:
            trajectory.ended = "max_turns"
        else:
            self._answer(trajectory, action, step)

    def _answer(self, trajectory: _Trajectory, action: Action, step: Step) -> None:
        assert trajectory.conversation is not None
        read = trajectory.conversation.reply(action, step.messages)
        if step.conversation is not None:
            read = trajectory.conversation.replace(step.conversation)
        trajectory.next_ids, trajectory.fresh = read
        trajectory.next_messages = tuple(trajectory.conversation.messages if read.fresh else step.messages)
        self._set_length(trajectory, len(read.token_ids) + (0 if read.fresh else trajectory.length))

    def _set_length(self, trajectory: _Trajectory, length: int) -> None:
        trajectory.length = length
        limit = self.request.limits.tokens
        if limit is not None and length >= limit:
            trajectory.ended = "max_tokens"
            if not trajectory.turns:
                trajectory.error = (
                    f"the prompt has {length} tokens, and an episode {limit} (max_episode_tokens, or the context)"
                )

    def sample_request(self, turn: int, sample: int | None) -> SampleRequest:
        """Return the request for ``turn`` of the rollout ``sample``; None: for the first turn of all rollouts."""
        request = self.request
        trajectory = self.trajectories[sample or 0]
        before: list[int] = []
        for past in trajectory.turns:
            before = [] if past.fresh else before
            before += [*past.observation_ids, *past.action.token_ids]
        prompt_ids = trajectory.next_ids if trajectory.fresh else (*before, *trajectory.next_ids)
        sampling = request.sampling
        if request.limits.tokens is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, request.limits.tokens - trajectory.length))
        stream = request.stream if sample is None else (*request.stream, "turn", turn, sample)
        count = request.samples if sample is None else 1
        samples = range(request.samples) if sample is None else [sample]
        goes_on = self.request.limits.turns is None or turn + 1 < self.request.limits.turns
        names = tuple((*request.stream, number) for number in samples) if goes_on or turn else ()
        policy = request.newest() if turn and request.newest is not None else request.policy
        return SampleRequest(policy, tuple(prompt_ids), count, stream=stream, sequences=names, **vars(sampling))

    @property
    def living(self) -> list[int]:
        return [sample for sample, trajectory in enumerate(self.trajectories) if trajectory.ended is None]

    def set_rewards(self, rewards: Iterator[RewardResult]) -> None:
        self.rewards = [
            failed(without_keys(trajectory.error)) if trajectory.error else _without_secrets(next(rewards))
            for trajectory in self.trajectories
        ]

    def group(self) -> Group:
        assert self.rewards is not None
        pairs = zip(self.trajectories, self.rewards, strict=True)
        rollouts = [
            Rollout(self.prompt, tuple(trajectory.turns), reward, trajectory.ended or "done")
            for trajectory, reward in pairs
        ]
        return Group(self.prompt, tuple(rollouts))


@dataclass(eq=False)
class CollectResult:
    """Result of ``collect``: for every request, in order, its graded group or the error that prevented the group."""

    groups: list[Group | Exception]
    spans: list[tuple[str, float, float]]  # ("rollout" | "score", start, end) in seconds since the epoch
    sync_seconds: float | None = None  # Seconds in which the engine loaded weights; None if unknown


def require_graded(results: Sequence[Group | Exception]) -> list[Group]:
    groups = []
    for group in results:
        if isinstance(group, RetrainError):
            raise group
        if isinstance(group, Exception):
            raise RunFailed(f"rollouts failed: {without_keys(described(group))}") from group
        groups.append(group)
    return groups


class Collector(Protocol):
    def __call__(
        self, engine: Engine, requests: Sequence[RolloutRequest], max_rows: int | None = None
    ) -> CollectResult: ...


def collect(engine: Engine, requests: Sequence[RolloutRequest], max_rows: int | None = None) -> CollectResult:
    """Sample all rollouts, step their episodes and grade them; ``max_rows`` limits the sequences decoded at once."""
    spans: list[tuple[str, float, float]] = []
    syncs: list[float] = []
    groups = [_PendingGroup(request) for request in requests]
    with _EpisodeThread(requests) as episodes:
        pending = episodes.begin(groups)
        for turn in count():
            start = timestamp()
            engine.sample(
                [group.sample_request(turn, sample) for group, sample in pending],
                max_rows=max_rows,
                # A default argument binds this turn's list; the name is assigned again for the next turn.
                finished=lambda i, actions, pending=pending: episodes.add(*pending[i], actions),
            )
            sampled = timestamp()
            syncs += [engine.sync_seconds] if engine.sync_seconds is not None else []
            pending = episodes.living(groups)
            spans += [("rollout", start, sampled), ("score", sampled, timestamp())]
            if not pending:
                break
        engine.forget_sequences()
    ended: list[Group | Exception] = [group.error or group.group() for group in groups]
    return CollectResult(ended, spans, sum(syncs) if syncs else None)


_Pending = tuple[_PendingGroup, int | None]  # A group, and which of its rollouts acts; None: all, from one prompt
_Actions = tuple[_PendingGroup, Sequence[int], list[Action]]  # A group, which of its rollouts act, and their actions


class _EpisodeThread:
    """Steps episodes and grades groups in its own thread, plus one thread per process of hosted environments. Groups
    that arrive during grading are graded together next."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self._queue: queue.SimpleQueue[_Actions | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        wide = max((getattr(request.environment, "parallel", 1) for request in requests), default=1)
        self._side_by_side = ThreadPoolExecutor(wide, "episode") if wide > 1 else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._queue.put(None)
        if kind is None or issubclass(kind, Exception):  # after Ctrl-C, do not wait for a slow grader
            self._thread.join()
        if self._side_by_side is not None:
            self._side_by_side.shutdown(wait=kind is None, cancel_futures=True)

    def begin(self, groups: Sequence[_PendingGroup]) -> list[_Pending]:
        """Start all episodes, and return those that wait for an action; grade groups whose episodes have all failed."""
        jobs = [(group, sample) for group in groups for sample in range(len(group.trajectories))]
        self._for_each(lambda group, sample: group.start(sample), jobs)
        pending: list[_Pending] = []
        for group in groups:
            try:
                group.read()
            except Exception as error:  # of the chat template, which fails only the request's run
                group.error = error
                continue
            living = group.living
            whole = group.shares_prompt and len(living) == len(group.trajectories)
            pending += [(group, None)] if whole else [(group, sample) for sample in living]
        self._grade([group for group in groups if group.error is None and not group.living])
        return pending

    def add(self, group: _PendingGroup, sample: int | None, actions: list[Action]) -> None:
        """Queue the actions of one rollout of a group, or of all its rollouts (None), to be stepped; thread-safe."""
        self._queue.put((group, range(len(actions)) if sample is None else [sample], actions))

    def living(self, groups: Sequence[_PendingGroup]) -> list[_Pending]:
        """Wait until all actions so far are processed; return the live episodes."""
        taken = threading.Event()
        self._queue.put(taken)
        taken.wait()
        return [(group, sample) for group in groups if group.error is None for sample in group.living]

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            batch: list[_Actions | threading.Event | None] = [item]
            while not self._queue.empty():
                batch.append(self._queue.get())
            self._take([item for item in batch if isinstance(item, tuple)])
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()
            if None in batch:
                return

    def _take(self, steps: Sequence[_Actions]) -> None:
        acts = {
            (group, sample): action
            for group, samples, actions in steps
            for sample, action in zip(samples, actions, strict=True)
        }
        self._for_each(lambda group, sample: group.step(sample, acts[group, sample]), list(acts))
        self._grade([group for group in dict.fromkeys(group for group, *_ in steps) if not group.living])

    def _for_each(self, act: Callable[[_PendingGroup, int], None], jobs: Sequence[tuple[_PendingGroup, int]]) -> None:
        def act_on(group: _PendingGroup, sample: int) -> None:
            try:
                act(group, sample)
            except (Exception, SystemExit) as error:
                group.error = _exception(error)

        if self._side_by_side is None:
            for job in jobs:
                act_on(*job)
        else:
            list(self._side_by_side.map(lambda job: act_on(*job), jobs))

    def _grade(self, groups: Sequence[_PendingGroup]) -> None:
        over: dict[Environment, list[_PendingGroup]] = {}
        for group in groups:
            if group.error is None:
                over.setdefault(group.request.environment, []).append(group)
        for environment, finished in over.items():
            graded = [rollout for group in finished for rollout in group.trajectories if not rollout.error]
            episodes = [trajectory.episode for trajectory in graded if trajectory.episode is not None]
            try:
                rewards = iter(environment.results(episodes) if episodes else [])
                for group in finished:
                    group.set_rewards(rewards)
            except (Exception, SystemExit) as error:
                for group in finished:
                    group.error = _exception(error)


def _exception(error: Exception | SystemExit) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"it called exit({error.code!r})")


def _without_secrets(reward: RewardResult) -> RewardResult:
    return replace(reward, error=without_keys(reward.error)) if reward.error else reward
