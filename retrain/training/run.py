"""One run: its policy, algorithm, data and records, the rollouts that it requests, the parts of its step, and limits
of consecutive faulty steps. ``training.loop`` calls the parts in order, for all runs of a cohort."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from retrain.algorithms.algorithm import Algorithm, samples_of, scores_by_rollout
from retrain.algorithms.distillation import Teacher, TeacherContext, teacher_logprobs, teacher_prompts
from retrain.config import Config
from retrain.config.runs import RunSpec
from retrain.config.training import Training
from retrain.data.prompts import Renderer
from retrain.device import failure_text, timestamp
from retrain.engines.protocol import Engine
from retrain.environments.protocol import Environment, EpisodeLimits
from retrain.errors import RunFailed
from retrain.files import dumps
from retrain.policy.protocol import Policy
from retrain.records.recorder import RunRecorder
from retrain.records.schema.base import Row
from retrain.rewards.base import punish_overlong
from retrain.rng import generator
from retrain.rollouts.collect import RecentWeights, RolloutRequest, Weights
from retrain.rollouts.queue import Span
from retrain.rollouts.resample import Resample, Resampler, SelectedGroups
from retrain.training.checkpoints import Checkpoints, Snapshot, earlier_weights_directory
from retrain.training.state import HealthCounters, RollbackPoint, RunState, SharedState
from retrain.training.updates import (
    MinibatchUpdate,
    UpdatePlan,
    aggregate_metrics,
    exceeds_target_kl,
    iter_minibatches,
    probe_of,
    update_minibatch,
    with_old_logprobs,
    with_trainer_logprobs,
)
from retrain.training.watch import Watch, by_version
from retrain.types import (
    MAX_STALENESS,
    CreditedBatch,
    CreditedGroup,
    Group,
    PolicyRef,
    Problem,
    Scores,
    StepRecord,
    Want,
)
from retrain.util.text import without_keys

POLICY_SCORES = frozenset({Want.LOGPROBS, Want.VALUES, Want.REFERENCE})  # Scores that are requested from the policy
UNGRADED_STEPS = 3  # A run fails after this many steps in a row in which no rollout could be graded
MISMATCHED_STEPS = 2  # A run fails after this many steps in a row in which its sampler and its trainer disagree
LOGGED_ERRORS = 20  # Different grading errors that go into a run's log


class DataCursor:
    """Position of a run in its training problems. With ``shuffle``, each epoch has a new permutation, which depends
    only on ``stream`` and the epoch.

    ``position`` counts problems taken so far. A batch may span epochs.
    """

    def __init__(self, problems: Sequence[Problem], stream: tuple[int | str, ...], shuffle: bool = True):
        self.problems, self.stream, self.shuffle = problems, stream, shuffle
        self.position = 0
        self._epoch, self._order = -1, np.arange(0)

    def ahead(self, start: int, count: int) -> list[Problem]:
        """Return ``count`` problems without moving; with ``start`` 0, the first is the next problem of the order."""
        return [self._at(self.position + start + i) for i in range(count)]

    def _at(self, position: int) -> Problem:
        epoch, index = divmod(position, len(self.problems))
        if not self.shuffle:
            return self.problems[index]
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = generator(*self.stream, "data", epoch).permutation(len(self.problems))
        return self.problems[int(self._order[index])]


@dataclass(eq=False)
class RolloutRequests:
    """Makes the rollout requests of a run's steps, in the order of its data, and selects the groups that a step trains
    on."""

    config: Config
    environment: Environment
    renderer: Renderer
    limits: EpisodeLimits
    cursor: DataCursor
    recent: RecentWeights
    next_step: int = 0  # First step whose rollouts this process has not requested yet

    def __post_init__(self) -> None:
        training, cursor = self.config.training, self.cursor
        self.sampling = training.sampling.requested
        # Prefix of all random streams from which the run samples (see Config.stream).
        self.stream = self.config.stream("sampling")
        # Resampling has its own order, so that it does not move the cursor of the first round.
        upcoming = DataCursor(cursor.problems, (*cursor.stream, "dynamic"), cursor.shuffle).ahead
        rounds = training.dynamic_sampling
        self.resampler = Resampler(training.batch_size, rounds, upcoming, len(cursor.problems)) if rounds else None

    def due(self, step: int, ahead: bool = False) -> dict[int, list[RolloutRequest]]:
        """Return requests by step: those of ``step`` (the run's next step) and, with ``ahead``, of all later steps
        within the staleness limit. Steps that an earlier call returned are left out."""
        training = self.config.training
        last = min(step + training.max_off_policy_steps * ahead, training.max_steps - 1)
        steps = range(max(step, self.next_step), last + 1)
        self.next_step = last + 1
        return {later: self.of_step(step, later) for later in steps}

    def of_step(self, now: int, step: int) -> list[RolloutRequest]:
        """Return the requests of ``step``; ``now`` is the run's next step."""
        size = self.config.training.batch_size
        problems = self.cursor.ahead((step - now) * size, size)
        return [self._request(problem, step, i) for i, problem in enumerate(problems)]

    def _request(self, problem: Problem, step: int, index: int) -> RolloutRequest:
        config = self.config
        return RolloutRequest(
            self.environment,
            self.renderer,
            problem,
            self.recent.drawing(step),
            config.training.group_size,
            self.sampling,
            (*self.stream, "sample", step, index),
            self.limits,
            self.recent.newest if config.inference.swap == "in_flight" else None,
        )

    @property
    def resample(self) -> Resample | None:
        return self.resampler and self.resampler.resample

    def select(self, groups: Sequence[Group]) -> SelectedGroups:
        """Move the data cursor by one step, and return the groups that the step trains on."""
        self.cursor.position += self.config.training.batch_size
        return self.resampler.select(groups) if self.resampler else SelectedGroups(list(groups), [], {})


class StepTimer:
    """Measures the parts of a run's steps: ``with timer("update"): …``.

    Checkpoint and record come after a step's row is made, so their times are in the next row.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._last_end: float | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = timestamp()
        try:
            yield
        finally:
            self.add(name, begin, timestamp())

    def add(self, name: str, begin: float, end: float) -> None:
        self._spans.append((name, begin, end))

    def start(self, now: float) -> None:
        self._last_end = now

    def finish_step(self, now: float) -> tuple[list[Span], float]:
        """Return the spans of the step that ends ``now``, and when it began; the next step begins ``now``."""
        spans, begin = self._spans, self._last_end or now
        self._spans, self._last_end = [], now
        return spans, begin


@dataclass
class RunHealth:
    """Counts consecutive faulty steps and fails the run at a limit. ``log(text, level)`` writes to the run's log."""

    training: Training
    log: Callable[[str, str], None]
    counters: HealthCounters = field(default_factory=HealthCounters)
    # Errors of grading and auditing that this process has logged
    logged_errors: set[tuple[str, str]] = field(default_factory=set)

    def check_grading(self, step: int, groups: Sequence[CreditedGroup]) -> None:
        """Log each new grading error. Raises RunFailed after ``UNGRADED_STEPS`` steps in a row without any grade."""
        results = [rollout.reward for group in groups for rollout in group.rollouts]
        errors = [result.error for result in results if result.error]
        self._log_errors(step, "graded", errors)
        self._log_errors(step, "audited", [result.audit_error for result in results if result.audit_error])
        counters = self.counters
        counters.ungraded_steps = counters.ungraded_steps + 1 if all(g.discarded == "no_reward" for g in groups) else 0
        limit = min(UNGRADED_STEPS, self.training.max_steps)
        if counters.ungraded_steps >= limit:
            reasons = "; ".join(list(dict.fromkeys(errors))[:3])
            steps = "the only step" if limit == 1 else f"{limit} steps in a row"
            raise RunFailed(f"no completion of {steps} could be graded: {reasons}")

    def _log_errors(self, step: int, action: str, errors: Sequence[str]) -> None:
        for error in dict.fromkeys(errors):
            if (action, error) not in self.logged_errors and len(self.logged_errors) < LOGGED_ERRORS:
                self.logged_errors.add((action, error))
                count = errors.count(error)
                self.log(f"step {step}: {count} completion(s) not {action}: {error}", "warning")

    def check_sampler(self, step: int, mismatches: Sequence[str]) -> None:
        """Log ``mismatches``. Raises RunFailed after ``MISMATCHED_STEPS`` steps in a row with any."""
        counters = self.counters
        counters.mismatched_steps = counters.mismatched_steps + 1 if mismatches else 0
        if not mismatches:
            return
        problem = (
            f"sampler and trainer disagree about the same tokens: {'; '.join(mismatches)} ([inference] mismatch_limit)"
        )
        if counters.mismatched_steps >= MISMATCHED_STEPS:
            raise RunFailed(f"step {step}: {problem}, {MISMATCHED_STEPS} steps in a row")
        self.log(f"step {step}: {problem}", "warning")

    def check_updates(self, step: int, updates: Sequence[MinibatchUpdate]) -> None:
        """Log skipped updates. Raises RunFailed after ``nonfinite_limit`` steps in a row with a skipped update."""
        errors = [update.error for update in updates if update.error is not None]
        if not errors:
            if any(update.batch.samples for update in updates):
                self.counters.skipped_updates = 0
            return
        self.counters.skipped_updates += 1
        limit, error = self.training.nonfinite_limit, errors[-1]
        if self.counters.skipped_updates >= limit:
            steps = "" if limit == 1 else f" ({limit} steps in a row: nonfinite_limit)"
            raise RunFailed(f"step {step}: {error}{steps}") from error
        several = f" ({len(errors)} of {len(updates)} updates)" if len(updates) > 1 else ""
        self.log(f"step {step}: {error}{several}", "warning")


def sampler_mismatches(watch: Watch, policy: Policy, recent: RecentWeights, groups: Sequence[Group]) -> list[str]:
    """Compare sampler and trainer log-probabilities of some rollouts, under the weights that sampled them; return a
    message for each policy version above the limit, with the likely cause."""
    weights, mismatches = recent.snapshots(), list[str]()
    for version, samples in by_version(probe_of(groups)):
        if version not in weights:
            continue
        value = watch.mismatch(policy, samples, weights[version])
        if not value <= watch.limit:
            others = [(other, snapshot) for other, snapshot in weights.items() if other != version]
            cause = watch.cause(samples, weights[version], others)
            mismatches.append(f"{value:.2g} nats² for version {version}, above {watch.limit:g}: {cause}")
    return mismatches


@dataclass(eq=False)
class Run:
    """One training run. ``step`` is the number of steps done, which is the next step to run.

    ``environments`` has the training environment as ``train``, and others by the name of their held-out set.
    """

    spec: RunSpec
    policy: Policy
    algorithm: Algorithm
    update_plan: UpdatePlan
    environments: Mapping[str, Environment]
    requests: RolloutRequests
    recorder: RunRecorder
    checkpoints: Checkpoints
    watch: Watch | None  # None where the sampler is the trainer itself
    teacher: Teacher | None  # None without distillation
    teacher_context: TeacherContext | None  # None where the teacher reads the same prompts as the policy
    step: int = 0
    error: str | None = None  # None until the run has failed
    health: RunHealth = field(init=False)
    timer: StepTimer = field(default_factory=StepTimer)

    def __post_init__(self) -> None:
        self.health = RunHealth(self.config.training, self.recorder.log)

    # -- identity -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        return self.spec.config

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    @property
    def policy_ref(self) -> PolicyRef:
        return PolicyRef(self.run_id, self.policy.version)

    @property
    def finished(self) -> bool:
        return self.step >= self.config.training.max_steps

    @property
    def active(self) -> bool:
        return self.error is None and not self.finished

    # -- a step, in order ---------------------------------------------------------------------------------------

    def begin_step(self, engine: Engine) -> None:
        """Lower the adapter's rank if a stage of rank annealing begins with this step; publish changed weights."""
        ref = self.policy_ref
        for line in self.policy.begin_step(self.step):
            self.recorder.log(line)
        if self.policy_ref != ref:
            self.publish_to(engine)

    def publish_to(self, engine: Engine) -> None:
        self.requests.recent.publish_to(engine, Weights(self.step, self.policy_ref, self.policy.snapshot()))

    def take(self, groups: Sequence[Group]) -> SelectedGroups:
        """Move the data cursor by one step; return the groups to train on, as updates see them: with overlong
        penalties in their rewards, and without ``support`` unless ``replay_truncation``."""
        selected = self.requests.select(groups)
        if not self.config.training.replay_truncation:
            selected = replace(selected, groups=[group.without_support() for group in selected.groups])
        if soft := self.config.reward.overlong_tokens:
            return replace(selected, groups=punish_overlong(selected.groups, self.config.training.max_tokens, soft))
        return selected

    def with_staleness(self, group: Group) -> CreditedGroup:
        """Return the group with the staleness of each rollout. The group is marked as discarded if a rollout is too
        stale to train."""
        recent = self.requests.recent
        versions = [{turn.action.policy_version for turn in rollout.turns} for rollout in group.rollouts]
        staleness = [max((recent.staleness(version, self.step) for version in each), default=0) for each in versions]
        is_too_stale = any(behind > recent.bound for behind in staleness)
        return CreditedGroup.of(group, staleness, MAX_STALENESS if is_too_stale else None)

    def credit(self, groups: Sequence[CreditedGroup]) -> CreditedBatch:
        """Score the rollouts and credit them with the algorithm. The batch has all ``groups``, in their order."""
        fresh = CreditedBatch(tuple(group for group in groups if group.discarded != MAX_STALENESS))
        want, scores = self.algorithm.requires & POLICY_SCORES, Scores()
        # Credit steps measure a critic's scores even when every group is too stale to train.
        if want and (fresh.groups or self.config.algorithm.critic):
            scored = fresh.groups or groups
            scores = scores_by_rollout(self.policy.score(samples_of(scored), want), scored)
        if self.teacher is not None and fresh.groups:
            if self.config.distillation.full_vocabulary:
                prompts = teacher_prompts(fresh.groups, self.teacher_context)
                fresh = fresh.with_fields(fresh.rollouts, ({"teacher_prompt": prompt} for prompt in prompts))
            else:
                teacher = teacher_logprobs(self.teacher, self.policy, fresh.groups, self.teacher_context)
                scores = replace(scores, teacher=teacher)
        batch = self.algorithm.credit(fresh, scores, self.step)
        if self.update_plan.per_step > 1 and batch.groups:
            batch = with_old_logprobs(batch, self.policy, scores.logprobs)
        return self.algorithm.with_stale_groups(batch, groups)

    def update(self, batch: CreditedBatch) -> tuple[CreditedBatch, dict[str, float | None]]:
        """Take the optimizer steps of the batch and end the step; return the batch, with the trainer's
        log-probabilities if tokens of this step are recorded, and the metrics of the updates. A minibatch whose loss or
        gradient is not finite is skipped. Raises RunFailed at the limits of ``RunHealth``."""
        self.health.check_grading(self.step, batch.groups)
        if self.watch is not None:
            mismatches = sampler_mismatches(self.watch, self.policy, self.requests.recent, batch.groups)
            self.health.check_sampler(self.step, mismatches)
        training, updates, epochs = self.config.training, list[MinibatchUpdate](), 0
        try:
            recorded = self.recorder.keeps_tokens(self.step)
            for minibatches in iter_minibatches(batch, training, self.step, self.requests.stream, recorded):
                updates += [update_minibatch(minibatch, self.policy, self.update_plan) for minibatch in minibatches]
                epochs += 1
                if exceeds_target_kl(updates[-len(minibatches) :], training.target_kl):
                    break
            self.health.check_updates(self.step, updates)
        finally:
            for note in self.policy.notes():
                self.recorder.log(f"step {self.step}: {note}", "warning")
        self.step += 1
        if self.update_plan.per_step > 1:
            return batch, aggregate_metrics(updates, epochs)
        return with_trainer_logprobs(batch, updates[0].trainer_logprobs), dict(updates[0].metrics)

    def record_step(
        self, selected: SelectedGroups, batch: CreditedBatch, update: Mapping[str, object],
        shared: Mapping[str, object], now: float,
    ) -> Row:  # fmt: skip
        """Record the step that has just ended and return its row. ``update``: metrics of its optimizer steps.
        ``shared``: metrics that the runs of a cohort have in common."""
        config, cursor = self.config, self.requests.cursor
        spans, begin = self.timer.finish_step(now)
        record = StepRecord(
            step=self.step - 1,
            groups=batch.groups,
            update={**update, **self.policy.capabilities},
            state={
                **batch.metrics,
                **shared,
                "uncertainty_kind": config.algorithm.uncertainty_kind,
                "batch_size": config.training.batch_size,
                "group_size": config.training.group_size,
                "epoch": cursor.position / max(1, len(cursor.problems)),
                **selected.metrics,
            },
            spans=spans,
            step_start=begin,
            step_end=now,
            dropped=selected.dropped,
        )
        return self.recorder.record_step(record)

    def fail(self, error: BaseException) -> None:
        self.error = without_keys(failure_text(error))
        self.recorder.log_error(error)

    # -- state out and in ---------------------------------------------------------------------------------------

    def rollback_point(self) -> RollbackPoint:
        health = replace(self.health.counters)
        cursor, version = self.requests.cursor.position, self.policy.version
        return RollbackPoint(self.step, cursor, self.algorithm.state(), health, version)

    def roll_back(self, point: RollbackPoint) -> bool:
        """Undo a failed step, unless it has already changed the weights; return whether it was undone."""
        if self.step != point.step or self.policy.version != point.policy_version:
            return False
        self.requests.cursor.position = point.cursor
        self.algorithm.restore(point.algorithm)
        self.health.counters = replace(point.health)
        return True

    def state(self, shared: SharedState) -> RunState:
        return RunState(
            step=self.step,
            cursor=self.requests.cursor.position,
            algorithm=self.algorithm.state(),
            policy=self.policy.state(),
            health=replace(self.health.counters),
            recorder=self.recorder.state(),
            earlier=[(weights.step, weights.ref.version) for weights in self.requests.recent.before(self.step)],
            base=self.checkpoints.base_id,
            run_id=self.run_id,
            shared=shared,
        )

    def snapshot(self, shared: SharedState) -> Snapshot:
        """Return a copy of the run in host memory, for ``Checkpoints.write`` and ``publish``."""
        state = self.state(shared)
        earlier = {weights.step: weights.snapshot for weights in self.requests.recent.before(self.step)}
        text = dumps(state.to_dict(), indent=2) + "\n"
        return Snapshot(self.step, self.policy.snapshot(resumable=True), text, earlier, state.cursor)

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint, of this run or another one. Raises CheckpointError when it cannot be used."""
        state = self.checkpoints.load(checkpoint, self.policy)
        self.step, self.requests.cursor.position = state.step, state.cursor
        self.algorithm.restore(state.algorithm)
        self.policy.restore(state.policy)
        self.health.counters = replace(state.health)
        for step, version in state.earlier:
            weights = self.policy.read(earlier_weights_directory(checkpoint, step))
            self.requests.recent.note(Weights(step, PolicyRef(self.run_id, version), weights))
        self.recorder.restore(state.recorder)
