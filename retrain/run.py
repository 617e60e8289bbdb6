"""One run: its configuration, data cursor, controllers, adapter, optimizer and records. All its state is here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from retrain.checkpoints import (
    Snapshot,
    checkpoint_directories,
    checkpoint_directory,
    forget_after,
    load_checkpoint,
    newest_whole,
    optimizer_tensors,
    prune,
    snapshot,
    write_checkpoint,
)
from retrain.credit import CreditResult, Modes, needs_entropy
from retrain.engines.protocol import SampleRequest
from retrain.environments.prompts import render
from retrain.errors import CheckpointError, RetrainError, UsageError
from retrain.files import aside_of, read_jsonl
from retrain.maths.planning import Detector
from retrain.maths.schedules import SepaSchedule, learning_rate, sepa_gate_open, sepa_lambda, sepa_start
from retrain.ownership import Owner, install, owner_of, publish
from retrain.policy.adapter_io import read_adapter, write_peft
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget
from retrain.policy.threads import Workers
from retrain.policy.update import LossSettings, default_token_budget, new_optimizer, train_step
from retrain.pressure import Pressure
from retrain.record.environment import without_keys
from retrain.record.recorder import RunRecorder
from retrain.rng import generator
from retrain.types import Problem, Prompt


class DataCursor:
    """Which problems come next: a fresh permutation for every epoch, a function of the seeds and the position.

    ``position`` counts problems handed out so far. A data set smaller than a batch simply wraps into the next epoch.
    """

    def __init__(self, problems: Sequence[Problem], stream: tuple[int | str, ...], shuffle: bool = True):
        self.problems, self.stream, self.shuffle = problems, stream, shuffle
        self.position = 0
        self._epoch, self._order = -1, np.arange(0)

    def take(self, count: int) -> list[Problem]:
        """The next ``count`` problems; moves the cursor."""
        taken = [self._at(self.position + i) for i in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> Problem:
        epoch, place = divmod(position, len(self.problems))
        if not self.shuffle:
            return self.problems[place]
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = generator(*self.stream, "data", epoch).permutation(len(self.problems))
        return self.problems[int(self._order[place])]


@dataclass(frozen=True)
class Mark:
    """What a step moves before its update: enough to take a failed step back."""

    step: int
    position: int
    sepa_state: dict[str, Any]
    weights_version: int
    ungraded_steps: int
    skipped_updates: int


@dataclass
class Run:
    """All state of one training run. ``step`` is the number of updates done, i.e. the next step to run."""

    spec: Any
    directory: Path
    base: BaseModel
    lanes: Any
    """``Lanes`` of the base; None where a backend of the user's holds the weights."""
    recorder: RunRecorder
    cursor: DataCursor
    modes: Modes
    detector: Detector
    step: int = 0
    error: str | None = None
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Wall-clock spans that go into the next metrics row (checkpoint and record come after a row is made)."""
    last_end: float | None = None
    ungraded_steps: int = 0
    """Steps in a row, up to now, in which no completion could be graded."""
    skipped_updates: int = 0
    """Updates in a row, up to now, that were left out because loss or gradient was not finite."""
    restored_step: int | None = None
    """The step of the checkpoint that this process continued from."""
    any_base: bool = False
    """Whether a checkpoint of other base weights may be continued (the user accepted that)."""
    told: set[str] = field(default_factory=set)
    """Grading errors that this process has written to the run's log."""
    starts_as_base: ClassVar[bool] = True
    """Whether an untrained run is the base model itself, so that one evaluation serves all."""
    pressure: Pressure | None = None
    saved_pressure: dict[str, Any] | None = None
    """The cohort's back-pressure controller, shared; every run's checkpoint keeps its observations."""

    def __post_init__(self) -> None:
        config = self.spec.config
        self.config = config
        self._make_policy()
        sepa = config.sepa
        self.sepa = SepaSchedule(
            schedule=sepa.schedule,
            steps=sepa.steps,
            delay_steps=sepa.delay_steps,
            correct_rate_gate=sepa.correct_rate_gate,
            ema_decay=sepa.ema_decay,
            var_threshold=sepa.threshold,
            warmup_steps=sepa.warmup_steps,
        )
        self.sepa_state = sepa_start(self.sepa)

    def _make_policy(self) -> None:
        """The adapter, its optimizer, and what the loss needs to know."""
        config = self.config
        self.adapter = self.lanes.new_adapter(config.model.lora_rank, config.lora.alpha)
        self.adapter.initialise(*self.stream)
        optimizer = config.optimizer
        self.optimizer = new_optimizer(
            self.adapter,
            config.training.lr,
            (optimizer.beta1, optimizer.beta2),
            optimizer.eps,
            config.training.weight_decay,
        )
        budget = config.training.micro_batch_tokens
        training = config.training
        self.loss_settings = LossSettings(
            loss=self.modes.loss,
            normalizer=config.algorithm.loss_normalizer,
            clip_low=training.clip_range[0],
            clip_high=training.clip_range[1],
            ratio_cap=config.algorithm.cispo_cap,
            temperature=training.temperature,
            max_tokens=training.max_tokens,
            micro_batch_tokens=(default_token_budget(self.base) if budget == "auto" else budget),
            grad_clip_norm=optimizer.grad_clip_norm,
            dropout=config.lora.dropout,
            log_kl=config.logging.log_kl,
            dual_clip=config.algorithm.dual_clip,
            tis_cap=config.algorithm.tis_cap,
            icepop_band=tuple(config.algorithm.icepop_band) if config.algorithm.icepop_band else None,
            kl_coef=config.algorithm.kl_coef,
            entropy_coef=config.algorithm.entropy_coef,
        )
        self.budget = Budget(self.loss_settings.micro_batch_tokens)

    # -- identity -----------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """``<label>_s<seed>``, the run's directory name in a campaign."""
        return self.spec.run_id

    @property
    def seed(self) -> int:
        """The run seed: the replicate that conditions are paired by."""
        return self.config.training.seed

    @property
    def stream(self) -> tuple[int | str, ...]:
        """Prefix of all random streams of this run: campaign seed and run seed, never the condition."""
        return (self.config.campaign.seed, self.seed)

    @property
    def export(self) -> Path | None:
        """The user's directory that also receives the final adapter."""
        return self.spec.export

    @property
    def finished(self) -> bool:
        """Whether all updates are done."""
        return self.step >= self.config.training.max_steps

    @property
    def active(self) -> bool:
        """Whether the run takes part in the next step."""
        return self.error is None and not self.finished

    # -- what the next step needs -------------------------------------------------------------------------------

    def anneal(self) -> None:
        """Lower the adapter's rank where the next step begins a stage of ``[lora] anneal``.

        The optimizer begins anew: its moments belong to rows that are no more. A checkpoint of this step holds the
        adapter as it was before, and resuming lowers it again, to the same numbers.
        """
        for step, rank in self.config.lora.anneal:
            if step == self.step and self.adapter.live_rank > rank:
                self.recorder.log(f"step {step}: the adapter goes on with rank {rank} of {self.adapter.live_rank}")
                self.adapter.lower(rank)
                self.optimizer.state.clear()

    def next_prompts(self) -> list[Prompt]:
        """Take and render the prompts of the next batch."""
        problems = self.cursor.take(self.config.training.batch_size)
        return [render(problem, self.base.tokenizer, self.config.data) for problem in problems]

    def requests(self, prompts: Sequence[Prompt], lane: int) -> list[SampleRequest]:
        """What to sample for these prompts in this step."""
        training = self.config.training
        return [
            SampleRequest(
                lane,
                prompt.token_ids,
                training.group_size,
                training.max_tokens,
                training.temperature,
                (*self.stream, "sample", self.step, i),
                **self.config.training_truncation,
            )
            for i, prompt in enumerate(prompts)
        ]

    def lr(self) -> float:
        """Learning rate of the next update."""
        optimizer, training = self.config.optimizer, self.config.training
        return learning_rate(optimizer.schedule, self.step, training.max_steps, optimizer.warmup_steps, training.lr)

    def sepa_values(self) -> tuple[float, bool]:
        """λ and whether the gate is open, for the next step."""
        return sepa_lambda(self.sepa, self.sepa_state, self.step), sepa_gate_open(self.sepa_state, self.step)

    def evaluation_due(self) -> bool:
        """Whether held-out evaluation belongs to the number of updates done now."""
        training, evaluation = self.config.training, self.config.evaluation
        if evaluation.problems == 0:
            return False
        return self.finished or (training.eval_every > 0 and self.step % training.eval_every == 0)

    def first_evaluations(self) -> list[dict[str, Any]]:
        """Of each held-out set, the row of its first evaluation, if that was made before this process took over."""
        first: dict[str, dict[str, Any]] = {}
        for row in read_jsonl(self.directory / "evals.jsonl"):
            first.setdefault(row["name"], row)
        return [first[name] for name in self.config.evaluation.names if name in first]

    @property
    def evaluation_stream(self) -> tuple[int | str, ...]:
        """Prefix of the random streams of an evaluation now: an untrained run answers as every other one does."""
        return (self.config.campaign.seed, "base") if self.step == 0 else self.stream

    @property
    def capabilities(self) -> dict[str, bool]:
        """What rows say of the backend."""
        return {
            "loss_is_placeholder": False,
            "backend_reports_sync_loss": True,
            "backend_preserves_token_advantages": True,
        }

    @property
    def weights_version(self) -> int:
        """Changes whenever the trained weights do."""
        return self.adapter.flat._version

    def update(self, credit: CreditResult, workers: Workers) -> dict[str, Any]:
        """One optimizer step on the sequences of ``credit``; its numbers under the catalogue's keys."""
        return train_step(
            self.base,
            self.lanes,
            self.adapter,
            self.optimizer,
            credit.sequences,
            self.loss_settings,
            credit.denominators,
            self.lr(),
            (*self.stream, "dropout", self.step),
            self.budget,
            workers,
            credit.probe,
        )

    def mark(self) -> Mark:
        """Where the run stands before a step."""
        counters = (self.ungraded_steps, self.skipped_updates)
        return Mark(self.step, self.cursor.position, self.sepa_state, self.weights_version, *counters)

    def rewind(self, mark: Mark) -> bool:
        """Take back what a step that failed has moved. False, with nothing changed, when its weights have moved."""
        if self.step != mark.step or self.weights_version != mark.weights_version:
            return False
        self.cursor.position, self.sepa_state = mark.position, mark.sepa_state
        self.ungraded_steps, self.skipped_updates = mark.ungraded_steps, mark.skipped_updates
        return True

    def save_due(self) -> bool:
        """Whether a checkpoint belongs after the number of updates done now (after the last one always)."""
        every = self.config.training.save_every
        return every > 0 and self.step % every == 0

    # -- state out and in ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but tensors, strict JSON. Random streams have no state: they are functions of the counters."""
        return {
            "step": self.step,
            "cursor": self.cursor.position,
            "sepa": self.sepa_state,
            "ungraded_steps": self.ungraded_steps,
            "skipped_updates": self.skipped_updates,
            "recorder": self.recorder.state(),
            "base": self.base.fingerprint,
            "run_id": self.run_id,
            "pressure": self.pressure.state() if self.pressure else None,
            "budget": self.budget.state(),
        }

    def snapshot(self) -> Snapshot:
        """A copy of the current step's state in host memory, for ``write`` and ``publish``."""
        config = self.config
        return snapshot(
            self.adapter, self.base.name, config.model.revision, self.optimizer, self.state(), config.lora.dropout
        )

    def write(self, saved: Snapshot) -> None:
        """Write the checkpoint, unless it is the very one that the run was restored from."""
        if saved.step != self.restored_step:
            self.recorder.flush()  # rows of the steps that a checkpoint contains are never lost
            self._write_files(checkpoint_directory(self.directory, saved.step), saved)

    def _write_files(self, directory: Path, saved: Snapshot) -> None:
        write_checkpoint(directory, saved)

    def publish(self, saved: Snapshot, final: bool) -> None:
        """What follows when the checkpoints of the whole cohort are there: ``final/``, the lines, and making room."""
        directory = checkpoint_directory(self.directory, saved.step)
        epoch = self._epoch(json.loads(saved.state)["cursor"])
        self._record_save(f"{saved.step:06d}", saved.step, directory, directory, epoch)
        if final:
            target = self.directory / "final"
            self._publish_adapter(target, saved)
            if self.export is not None:
                install(target, self.export, self._owner("adapter_path"))
            self._record_save("final", saved.step, directory, target, epoch)
            self.recorder.flush()  # the pages as well, before the run counts as done
        prune(self.directory, self.config.training.keep_last, self.config.training.keep_every)

    def _publish_adapter(self, directory: Path, saved: Snapshot) -> None:
        aside = aside_of(directory)
        write_peft(aside, saved.adapter, saved.peft)
        publish(aside, directory, self._owner("final"))

    def _owner(self, place: str) -> Owner | None:
        """As whose what the run writes as ``place`` is marked."""
        run = owner_of(self.directory)
        return run and run.at(place)

    def _epoch(self, position: int) -> int:
        return position // max(1, len(self.cursor.problems))

    def _record_save(self, name: str, step: int, state_path: Path, sampler_path: Path, epoch: int) -> None:
        """The line for a save that is complete; saving the same step again does not repeat it."""
        if any(
            row["name"] == name and row["batch"] == step for row in read_jsonl(self.directory / "checkpoints.jsonl")
        ):
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

    def restore(self, step: int | None = None, told: Sequence[str] = ()) -> list[str]:
        """Continue from the checkpoint of ``step`` (0 is the start; None the newest whole one) and cut records to it.

        ``told`` is what was found wrong with later ones. Returns what there is to tell the user. Raises
        CheckpointError when the checkpoint belongs to another base.
        """
        lines = list(told)
        if step is None:
            directory = newest_whole(self.directory, lines)
        else:
            directory = checkpoint_directory(self.directory, step) if step else None
        if directory is None and checkpoint_directories(self.directory):
            lines.append("no checkpoint to continue from: the run starts again from step 0")
        if directory is not None:
            self._load(directory)
            self.restored_step = self.step
            lines.append(f"continues at step {self.step}")
        self.recorder.truncate(self.step)
        forget_after(self.directory, self.step)
        if directory is not None:  # killed between the rename and its line
            epoch = self._epoch(self.cursor.position)
            self._record_save(f"{self.step:06d}", self.step, directory, directory, epoch)
        return lines

    def continue_from(self, directory: Path) -> list[str]:
        """Begin where another run is (``[resume] from``): a run directory or checkpoint with its whole state, or
        the weights alone of a plain adapter directory. Returns what there is to tell.

        Raises UsageError when nothing is left to train or the adapter is scaled differently.
        """
        told: list[str] = []
        checkpoint = directory if (directory / "state.json").is_file() else newest_whole(directory, told)
        if checkpoint is None:
            stored = read_adapter(directory)
            wrong = [scale for scale in stored.scales.values() if abs(scale - self.adapter.scale) > 1e-9]
            if wrong:
                raise UsageError(
                    f"{directory} has LoRA scale {wrong[0]:g}, this run {self.adapter.scale:g}: "
                    "set [model] lora_rank and [lora] alpha to the adapter's"
                )
            self.adapter.load(stored.tensors)
            return [*told, f"starts at step 0 with the weights of {directory}"]
        self._load(checkpoint)
        self.recorder.begin_trackers_anew()
        if self.finished:
            raise UsageError(
                f"{checkpoint} is at step {self.step} of max_steps = {self.config.training.max_steps}: "
                f"set [training] max_steps above {self.step}"
            )
        return [*told, f"continues {checkpoint} at step {self.step}"]

    def _load(self, checkpoint: Path) -> None:
        state = self._load_weights(checkpoint)
        if state["base"] != self.base.fingerprint and not self.any_base:
            raise CheckpointError(f"{checkpoint} was trained on other base weights than {self.base.name} holds now")
        self.step, self.cursor.position = state["step"], state["cursor"]
        self.sepa_state, self.ungraded_steps = state["sepa"], state["ungraded_steps"]
        self.skipped_updates = state.get("skipped_updates", 0)
        self.recorder.restore(state["recorder"])
        self.saved_pressure = state.get("pressure")
        self.budget.restore(state.get("budget"))

    def _load_weights(self, checkpoint: Path) -> dict[str, Any]:
        """Verify the checkpoint and restore adapter and optimizer from it; returns the rest of its state."""
        return load_checkpoint(checkpoint, self.adapter, self.optimizer)

    def fail(self, error: BaseException) -> None:
        """Mark the run failed; its traceback goes to its own log."""
        text = str(error) if isinstance(error, RetrainError) else f"{type(error).__name__}: {error}"
        self.error = without_keys(text)
        self.recorder.log_error(error)

    def check_engine(self, gives_entropy: bool) -> None:
        """Raise UsageError when the configuration asks for entropies and the engine has none."""
        if needs_entropy(self.config) and not gives_entropy:
            raise UsageError(
                f"{self.run_id} needs full-vocabulary entropies, which this engine does not return: "
                'use [inference] engine = "local"'
            )

    def trained(self) -> bool:
        """Whether any update has reached the weights (AdamW has moments)."""
        return bool(optimizer_tensors(self.optimizer))
