"""One run: its policy, algorithm, data cursor and records. All its state is declared here and changed only here."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retrain.algorithms.gae import sequence_kl
from retrain.algorithms.protocol import Algorithm, Credit
from retrain.algorithms.rejection import leave_out_anew
from retrain.checkpoints import (
    Snapshot,
    checkpoint_directories,
    checkpoint_directory,
    earlier_directory,
    forget_after,
    load_checkpoint,
    newest_whole,
    prune,
    write_checkpoint,
)
from retrain.clock import timestamp
from retrain.config import Config
from retrain.config.modes import Need
from retrain.config.schedule import Extent, extent_after
from retrain.data.dataset import DataCursor
from retrain.data.prompts import Renderer
from retrain.engines.protocol import Engine, PolicyRef
from retrain.engines.server.watch import Watch, by_version
from retrain.environments.protocol import ONE_TURN, Environment, Limits
from retrain.errors import CheckpointError, NonFinite, RunFailed, UsageError
from retrain.files import aside_of, dumps, read_jsonl
from retrain.maths.losses import RATIO_METRICS
from retrain.maths.schedules import learning_rate
from retrain.ownership import Owner, install, owner_of, publish
from retrain.policy.budget import failure_text
from retrain.policy.context import Context
from retrain.policy.objective import Objective
from retrain.policy.protocol import Denominators, Policy, Scores, TrainBatch, Want, probe_of, samples_of
from retrain.policy.teacher import Teacher, note_prompts, taught
from retrain.record.environment import without_keys
from retrain.record.observer import RunSpecLike
from retrain.record.recorder import RunRecorder
from retrain.rewards.overlong import punish_overlong
from retrain.rollouts.collect import RolloutRequest
from retrain.rollouts.dynamic import Chosen, DynamicSampling, Further
from retrain.rollouts.versions import RecentWeights, Weights
from retrain.types import TOO_OLD, Group, StepRecord
from retrain.updates import Taken, far_enough, note_old_logprobs, passes, together

UNGRADED_STEPS = 3  # A run fails after this many steps in a row in which no rollout could be graded
LOGGED_ERRORS = 20  # Different grading errors that go into a run's log
MISMATCHED_STEPS = 2  # A run fails in so many steps in a row in which its sampler and its trainer disagree
WANTS = {Need.LOGPROBS: Want.LOGPROBS, Need.VALUES: Want.VALUES, Need.REFERENCE: Want.REFERENCE}
"""What an algorithm needs of the policy's scores."""


@dataclass(frozen=True)
class RollbackPoint:
    """What a step changes before its update: enough to undo a failed step."""

    step: int
    position: int
    algorithm: dict[str, Any]
    policy_version: int
    ungraded_steps: int
    skipped_updates: int
    mismatched_steps: int


@dataclass(eq=False)
class Run:
    """All state of one training run. ``step`` is the number of updates done, i.e. the next step to run.

    ``environments`` holds what it trains in as ``train`` and what it is evaluated in by the held-out set's name.
    ``base_id`` identifies the frozen weights under its policy.
    """

    spec: RunSpecLike
    config: Config
    directory: Path
    base_id: str
    policy: Policy
    algorithm: Algorithm
    objective: Objective
    environments: Mapping[str, Environment]
    renderer: Renderer
    recorder: RunRecorder
    cursor: DataCursor
    limits: Limits = ONE_TURN  # When its episodes end at the latest
    watch: Watch | None = None  # Compares an external sampler with the trainer at every step
    teacher: Teacher | None = None  # Teacher that scores the run's rollouts, if any
    shown: Context | None = None  # Privileged context of the teacher
    any_base: bool = False  # Whether a checkpoint of other base weights may be continued, which the user has accepted
    step: int = 0
    error: str | None = None
    ungraded_steps: int = 0  # Steps in a row, up to now, in which no rollout could be graded
    skipped_updates: int = 0
    """Steps in a row, up to now, in which an update was left out because loss or gradient was not finite."""
    mismatched_steps: int = 0  # Steps in a row, up to now, in which sampler and trainer differed by more than they may
    restored_step: int | None = None  # The step of the checkpoint that this process continued from
    saved_shared: dict[str, Any] = field(default_factory=dict)
    """What the checkpoint knows of what all runs of the cohort share: its back-pressure controller and its engine."""
    recent: RecentWeights = field(init=False)  # The weights that rollouts of this and later steps are drawn by
    dynamic: DynamicSampling | None = field(init=False)  # Resamples groups without signal, if enabled
    chosen: Chosen | None = None  # Groups that dynamic sampling selected for the current step
    published: set[PolicyRef] = field(default_factory=set)  # Policy refs currently published to the engine
    requested: int = 0  # The first step whose rollouts this process has not asked for yet
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Wall-clock spans that go into the next metrics row (checkpoint and record come after a row is made)."""
    last_end: float | None = None
    logged_errors: set[tuple[str, str]] = field(default_factory=set)
    """What went wrong in grading and in auditing that this process has written to the run's log."""

    def __post_init__(self) -> None:
        training, cursor = self.config.training, self.cursor
        self.recent = RecentWeights(training.max_off_policy_steps, self.config.inference.served)
        upcoming = DataCursor(cursor.problems, (*cursor.stream, "dynamic"), cursor.shuffle).ahead
        sizes = training.batch_size, training.dynamic_sampling
        self.dynamic = DynamicSampling(*sizes, upcoming, len(cursor.problems)) if sizes[1] else None

    # -- identity -----------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """``<label>_s<seed>``, the run's directory name in a campaign."""
        return self.spec.run_id

    @property
    def stream(self) -> tuple[int | str, ...]:
        """Prefix of the random streams of all that this run samples (see ``Config.stream``)."""
        return self.config.stream("sampling")

    @property
    def evaluation_stream(self) -> tuple[int | str, ...]:
        """Prefix of the random streams of an evaluation now: all untrained runs answer alike."""
        return (self.config.campaign.seed, "base") if self.step == 0 else self.stream

    @property
    def policy_ref(self) -> PolicyRef:
        return PolicyRef(self.run_id, self.policy.version)

    @property
    def finished(self) -> bool:
        return self.step >= self.config.training.max_steps

    @property
    def active(self) -> bool:
        """Whether the run takes part in the next step."""
        return self.error is None and not self.finished

    @property
    def equals_base(self) -> bool:
        """Whether it is still the base model, so that one evaluation serves all such runs."""
        return self.step == 0 and self.policy.starts_as_base and not self.config.resume.from_

    # -- a step, in order ---------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Training begins at this time, in seconds since the epoch."""
        self.last_end = now

    def begin_step(self) -> None:
        """What is due before the next step."""
        for line in self.policy.begin_step(self.step):
            self.recorder.log(line)

    def rollback_point(self) -> RollbackPoint:
        """Where the run stands before a step."""
        position = self.cursor.position
        counters = (self.ungraded_steps, self.skipped_updates, self.mismatched_steps)
        return RollbackPoint(self.step, position, self.algorithm.state(), self.policy.version, *counters)

    def roll_back(self, point: RollbackPoint) -> bool:
        """Undo a failed step. False, with nothing changed, when its weights have changed."""
        if self.step != point.step or self.policy.version != point.policy_version:
            return False
        self.cursor.position = point.position
        self.algorithm.restore(point.algorithm)
        self.ungraded_steps, self.skipped_updates = point.ungraded_steps, point.skipped_updates
        self.mismatched_steps = point.mismatched_steps
        return True

    def publish_to(self, engine: Engine) -> None:
        """Have the engine sample with the weights as they are now, and let go of those that are too old."""
        now = Weights(self.step, self.policy_ref, self.policy.snapshot())
        for each in (*self.recent, now):
            if each.ref not in self.published:
                engine.publish(each.ref, each.snapshot)
                self.published.add(each.ref)
        self._retire(engine, self.recent.note(now))

    def withdraw_from(self, engine: Engine) -> None:
        """The engine needs none of its weights any more."""
        self._retire(engine, list(self.published))

    def _retire(self, engine: Engine, refs: Sequence[PolicyRef]) -> None:
        for ref in refs:
            engine.retire(ref)
            self.published.discard(ref)

    def rollout_requests(self, ahead: bool = False) -> dict[int, list[RolloutRequest]]:
        """What to sample for the next step and, with ``ahead``, for all later ones that may be sampled by now, by step;
        nothing is asked for twice."""
        training = self.config.training
        last = min(self.step + training.max_off_policy_steps * ahead, training.max_steps - 1)
        asked = range(max(self.step, self.requested), last + 1)
        self.requested = last + 1
        return {step: self.requests_of(step) for step in asked}

    def requests_of(self, step: int) -> list[RolloutRequest]:
        """What is sampled for a step, this one or a later one."""
        training, drawing = self.config.training, self.recent.drawing(step)
        size = training.batch_size
        return [
            RolloutRequest(
                self.environments["train"],
                self.renderer,
                problem,
                drawing,
                training.group_size,
                training.sampling.requested,
                (*self.stream, "sample", step, i),
                self.limits,
                self.recent.newest if self.config.inference.swap == "in_flight" else None,
            )
            for i, problem in enumerate(self.cursor.ahead((step - self.step) * size, size))
        ]

    @property
    def further(self) -> Further | None:
        """What to sample for a step besides, once its requests are; None for nothing."""
        return self.dynamic and self.dynamic.further

    def take(self, groups: Sequence[Group]) -> list[Group]:
        """These were sampled for the step: moves the data cursor, tells which groups are too old to train, and returns
        those of the batch."""
        self.cursor.position += self.config.training.batch_size
        self.chosen = self.dynamic and self.dynamic.choose(groups)
        groups = self.chosen.groups if self.chosen else list(groups)
        for group in groups:
            for rollout in group.rollouts:
                versions = [turn.action.policy_version for turn in rollout.turns]
                rollout.age = max((self.recent.age(version, self.step) for version in versions), default=0)
            if any(rollout.age > self.recent.bound for rollout in group.rollouts):
                group.discarded = TOO_OLD
        if soft := self.config.reward.overlong_tokens:
            punish_overlong(groups, self.config.training.max_tokens, soft)
        return groups

    def lr(self, update: int = 0) -> float:
        """Learning rate of this update of the next step; the schedule counts updates."""
        optimizer, training = self.config.optimizer, self.config.training
        at, every = self.step * training.updates + update, training.updates
        steps, warmup = training.max_steps * every, optimizer.warmup_steps * every
        return learning_rate(optimizer.schedule, at, steps, warmup, training.lr)

    def credit(self, groups: Sequence[Group]) -> Credit:
        """Have the algorithm credit the step's rollouts."""
        sampled, groups = groups, [group for group in groups if group.discarded != TOO_OLD]
        if len(groups) < len(sampled):
            self.algorithm.mark_planning([group for group in sampled if group.discarded == TOO_OLD])
        want = frozenset(WANTS[need] for need in self.algorithm.needs if need in WANTS)
        scores: Scores | None = None
        if want and (groups or self.config.algorithm.critic):
            scored = groups or sampled
            scores = self.policy.score(samples_of(scored, every=True), want).of_rollouts(scored)
        if not groups:
            return Credit(Denominators(0, 0), {} if scores is None else sequence_kl(scores, self.config))
        if self.teacher is not None and self.config.distillation.whole:
            note_prompts(groups, self.shown)
        elif self.teacher is not None:
            scores = replace(scores or Scores(), teacher=taught(self.teacher, self.policy, groups, self.shown))
        credit = self.algorithm.credit(groups, scores, self.step)
        if self.config.training.several_updates:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            if scores is not None and scores.logprobs is not None:
                for rollout, logprobs_T in zip(rollouts, scores.logprobs, strict=True):
                    rollout.old_logprobs_T = logprobs_T
            note_old_logprobs(self.policy, groups)
        return credit

    def update(self, groups: Sequence[Group], credit: Credit) -> dict[str, Any]:
        """The optimizer step, or the several of them, with which the step ends. One whose loss or gradient is not
        finite is skipped, and recorded as such, up to ``nonfinite_limit`` times in a row. Returns their numbers. Raises
        RunFailed at these limits.
        """
        self._check_grading(groups)
        self._check_sampler(groups)
        training, taken, made = self.config.training, list[Taken](), 0
        try:
            recorded = self.recorder.keeps_tokens(self.step)
            for batches in passes(groups, credit, training, self.step, self.stream, recorded):
                taken += map(self._update, batches)
                made += 1
                if far_enough(taken[-len(batches) :], training.target_kl):
                    break
            self._check_updates(taken)
        finally:
            for note in self.policy.notes():
                self.recorder.log(f"step {self.step}: {note}", "warning")
        self.step += 1
        return together(taken, made) if training.several_updates else dict(taken[0].numbers)

    def _update(self, batch: TrainBatch) -> Taken:
        """One optimizer step, left out where its loss or gradient is not finite."""
        lr, left_out = self.lr(batch.update), dict[str, Any]()
        if self.config.chooses_anew and batch.samples:
            batch, left_out = leave_out_anew(batch, self.policy, self.config.algorithm)
        try:
            return Taken(batch, {**self.policy.update(batch, self.objective, lr), **left_out, "optim/skipped": False})
        except NonFinite as error:
            absent = dict.fromkeys(("loss", "reported_loss", "optim/grad_norm", "optim/grad_clipped", *RATIO_METRICS))
            numbers = {**absent, "optim/lr": lr, "num_datums": len(batch.samples), "optim/skipped": True}
            return Taken(batch, numbers, error)

    def _check_updates(self, taken: Sequence[Taken]) -> None:
        """Count steps in a row that left out an update; RunFailed at the limit."""
        errors = [each.error for each in taken if each.error is not None]
        if not errors:
            if any(each.batch.samples for each in taken):
                self.skipped_updates = 0
            return
        self.skipped_updates += 1
        limit, error = self.config.training.nonfinite_limit, errors[-1]
        if self.skipped_updates >= limit:
            steps = "" if limit == 1 else f" ({limit} steps in a row: nonfinite_limit)"
            raise RunFailed(f"step {self.step}: {error}{steps}") from error
        several = f" ({len(errors)} of {len(taken)} updates)" if len(taken) > 1 else ""
        self.recorder.log(f"step {self.step}: {error}{several}", "warning")

    def _check_grading(self, groups: Sequence[Group]) -> None:
        """Log failed gradings, each reason once; RunFailed after ``UNGRADED_STEPS`` without any grade."""
        results = [rollout.reward for group in groups for rollout in group.rollouts]
        errors = [result.error for result in results if result.error]
        self._log_errors("graded", errors)
        self._log_errors("audited", [result.audit_error for result in results if result.audit_error])
        self.ungraded_steps = self.ungraded_steps + 1 if all(g.discarded == "no_reward" for g in groups) else 0
        limit = min(UNGRADED_STEPS, self.config.training.max_steps)
        if self.ungraded_steps >= limit:
            reasons = "; ".join(list(dict.fromkeys(errors))[:3])
            steps = "the only step" if limit == 1 else f"{limit} steps in a row"
            raise RunFailed(f"no completion of {steps} could be graded: {reasons}")

    def _log_errors(self, what: str, errors: Sequence[str]) -> None:
        for error in dict.fromkeys(errors):
            if (what, error) not in self.logged_errors and len(self.logged_errors) < LOGGED_ERRORS:
                self.logged_errors.add((what, error))
                count = errors.count(error)
                self.recorder.log(f"step {self.step}: {count} completion(s) not {what}: {error}", "warning")

    def _check_sampler(self, groups: Sequence[Group]) -> None:
        """Compare what the sampler said of some tokens with what the trainer says, for the weights that drew them. Logs
        a difference above the limit; RunFailed in the second step in a row with one."""
        if self.watch is None:
            return
        weights, found = self.recent.snapshots(), list[str]()
        for version, samples in by_version(probe_of(groups)):
            if version not in weights:
                continue
            value = self.watch.mismatch(self.policy, samples, weights[version])
            if not value <= self.watch.limit:
                others = [(each, snapshot) for each, snapshot in weights.items() if each != version]
                cause = self.watch.cause(samples, weights[version], others)
                found.append(f"{value:.2g} nats² for version {version}, above {self.watch.limit:g}: {cause}")
        self.mismatched_steps = self.mismatched_steps + 1 if found else 0
        if not found:
            return
        words = f"sampler and trainer disagree about the same tokens: {'; '.join(found)} ([inference] mismatch_limit)"
        if self.mismatched_steps >= MISMATCHED_STEPS:
            raise RunFailed(f"step {self.step}: {words}, {MISMATCHED_STEPS} steps in a row")
        self.recorder.log(f"step {self.step}: {words}", "warning")

    def note_span(self, name: str, begin: float, end: float) -> None:
        """Wall-clock time of a part of the step, in seconds since the epoch."""
        self.spans.append((name, begin, end))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = timestamp()
        try:
            yield
        finally:
            self.note_span(name, begin, timestamp())

    def record_step(
        self, groups: Sequence[Group], update: Mapping[str, Any], state: Mapping[str, Any], now: float
    ) -> dict[str, Any]:
        """Record the step that has just ended and return its row. ``update`` are the policy's numbers, ``state`` those
        of the algorithm and of what the runs of a cohort share."""
        config = self.config
        record = StepRecord(
            step=self.step - 1,
            groups=list(groups),
            update={**update, **self.policy.capabilities},
            state={
                **state,
                "uncertainty_kind": config.algorithm.uncertainty_kind,
                "batch_size": config.training.batch_size,
                "group_size": config.training.group_size,
                "epoch": self.cursor.position / max(1, len(self.cursor.problems)),
                **(self.chosen.numbers if self.chosen else {}),
            },
            spans=self.spans,
            step_start=self.last_end or now,
            step_end=now,
            dropped=self.chosen.dropped if self.chosen else [],
        )
        self.spans, self.last_end = [], now
        return self.recorder.record_step(record)

    def evaluation_due(self) -> Extent | None:
        """How to evaluate after the number of updates done now; None for not at all."""
        return extent_after(self.config, self.step)

    def first_evaluations(self) -> list[dict[str, Any]]:
        """The first recorded evaluation of each held-out set, as its row."""
        first: dict[str, dict[str, Any]] = {}
        for row in read_jsonl(self.directory / "evals.jsonl"):
            first.setdefault(row["name"], row)
        return [first[name] for name in self.config.evaluation.names if name in first]

    def fail(self, error: BaseException) -> None:
        """Mark the run failed; its traceback goes to its own log."""
        self.error = without_keys(failure_text(error))
        self.recorder.log_error(error)

    # -- state out and in ---------------------------------------------------------------------------------------

    def save_due(self) -> bool:
        """Whether ``save_every`` asks for a checkpoint after the number of updates done now."""
        every = self.config.training.save_every
        return every > 0 and self.step % every == 0

    def state(self, shared: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Everything but tensors, with what the cohort shares, strict JSON. Random streams have no state: they are
        functions of the counters."""
        return {
            "step": self.step,
            "cursor": self.cursor.position,
            "algorithm": self.algorithm.state(),
            "policy": self.policy.state(),
            "ungraded_steps": self.ungraded_steps,
            "skipped_updates": self.skipped_updates,
            "mismatched_steps": self.mismatched_steps,
            "recorder": self.recorder.state(),
            "earlier": [[each.step, each.ref.version] for each in self._earlier()],
            "base": self.base_id,
            "run_id": self.run_id,
            "shared": dict(shared or {}),
        }

    def snapshot(self, shared: Mapping[str, Any]) -> Snapshot:
        """A copy of the current step's state in host memory, for ``write`` and ``publish``."""
        state = dumps(self.state(shared), indent=2) + "\n"
        earlier = {each.step: each.snapshot for each in self._earlier()}
        return Snapshot(self.step, self.policy.snapshot(resumable=True), state, earlier)

    def _earlier(self) -> list[Weights]:
        """The weights before earlier steps that rollouts of this and later steps are drawn by."""
        first = self.step - self.recent.bound
        return [each for each in self.recent if first <= each.step < self.step]

    def write(self, saved: Snapshot) -> None:
        """Write the checkpoint, unless it is the very one that the run was restored from."""
        try:
            if saved.step != self.restored_step:
                self.recorder.flush()  # rows of the steps that a checkpoint contains are never lost
                directory = checkpoint_directory(self.directory, saved.step)
                write_checkpoint(directory, saved, self.recorder.check_directory)
        finally:
            saved.policy.discard()

    def publish(self, saved: Snapshot, final: bool) -> None:
        """What follows once the whole cohort's checkpoints are written: ``final/``, the records, and pruning."""
        self.recorder.check_directory()
        directory = checkpoint_directory(self.directory, saved.step)
        epoch = self._epoch(json.loads(saved.state)["cursor"])
        self._record_save(f"{saved.step:06d}", saved.step, directory, directory, epoch)
        if final:
            target = self.directory / "final"
            aside = aside_of(target)
            saved.policy.export(aside, directory)
            self.recorder.check_directory()
            publish(aside, target, self._owner("final"))
            if self.spec.export is not None:
                install(target, self.spec.export, self._owner("adapter_path"))
            self._record_save("final", saved.step, directory, target, epoch)
            self.recorder.flush()  # the pages as well, before the run counts as done
        prune(self.directory, self.config.training.keep_last, self.config.training.keep_every)

    def _owner(self, place: str) -> Owner | None:
        """The mark of what the run writes at ``place``."""
        run = owner_of(self.directory)
        return run and run.at(place)

    def _epoch(self, position: int) -> int:
        return position // max(1, len(self.cursor.problems))

    def _record_save(self, name: str, step: int, state_path: Path, sampler_path: Path, epoch: int) -> None:
        """The record of a complete save; saving the same step again does not repeat it."""
        rows = read_jsonl(self.directory / "checkpoints.jsonl")
        if any(row["name"] == name and row["batch"] == step for row in rows):
            return
        self.recorder.record_checkpoint(
            {
                "name": name,
                "batch": step,
                "step": step - 1,
                "state_path": str(state_path.relative_to(self.directory)),
                "sampler_path": str(sampler_path.relative_to(self.directory)),
                "epoch": epoch,
            }
        )

    def restore(self, step: int, passed_over: Sequence[str] = ()) -> list[str]:
        """Continue from the checkpoint of ``step`` (0 is the start) and remove the rows of later steps.

        ``passed_over`` is what was wrong with later ones. Returns lines for the user. Raises CheckpointError when the
        checkpoint belongs to another base.
        """
        lines = list(passed_over)
        directory = checkpoint_directory(self.directory, step) if step else None
        if directory is None and checkpoint_directories(self.directory):
            lines.append("no checkpoint to continue from: the run starts again from step 0")
        if directory is not None:
            self._load(directory)
            self.restored_step = self.step
            lines.append(f"continues at step {self.step}")
        self.recorder.truncate(self.step)
        forget_after(self.directory, self.step)
        if directory is not None:  # killed between the rename and its record
            epoch = self._epoch(self.cursor.position)
            self._record_save(f"{self.step:06d}", self.step, directory, directory, epoch)
        return lines

    def continue_from(self, directory: Path) -> list[str]:
        """Begin with another run's state (``[resume] from``), of a run directory or checkpoint, or with the weights of
        an adapter directory. Returns lines for the user.

        Raises UsageError when nothing is left to train or the adapter is scaled differently.
        """
        lines: list[str] = []
        checkpoint = directory if (directory / "state.json").is_file() else newest_whole(directory, lines)
        if checkpoint is None:
            self.policy.begin_with(directory)
            return [*lines, f"starts at step 0 with the weights of {directory}"]
        self._load(checkpoint)
        self.recorder.begin_own_records()
        if self.finished:
            raise UsageError(
                f"{checkpoint} is at step {self.step} of max_steps = {self.config.training.max_steps}: "
                f"set [training] max_steps above {self.step}"
            )
        return [*lines, f"continues {checkpoint} at step {self.step}"]

    def _load(self, checkpoint: Path) -> None:
        state = load_checkpoint(checkpoint, self.policy)
        if state["base"] != self.base_id and not self.any_base:
            raise CheckpointError(f"{checkpoint} was trained on other base weights than these")
        self.step, self.cursor.position = state["step"], state["cursor"]
        self.algorithm.restore(state["algorithm"])
        self.policy.restore(state["policy"])
        self.ungraded_steps, self.skipped_updates = state["ungraded_steps"], state["skipped_updates"]
        self.mismatched_steps = state.get("mismatched_steps", 0)
        for step, version in state.get("earlier", []):
            weights = self.policy.read(earlier_directory(checkpoint, step))
            self.recent.note(Weights(step, PolicyRef(self.run_id, version), weights))
        self.recorder.restore(state["recorder"])
        self.saved_shared = state["shared"]
