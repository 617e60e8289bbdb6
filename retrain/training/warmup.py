"""Trains the adapter of the supervised warm-up, from which the runs of a campaign start.

Runs with equal data, base, LoRA settings and settings of the warm-up share one adapter, whatever their condition and
seed. It is in ``warmup/<hash>`` of the campaign's directory, whose lease a process holds while it trains:

    metrics.jsonl  one row per step; row 0 is the base before the first step
    checkpoint/    adapter, optimizer and state of an unfinished warm-up
    adapter/       the result, a PEFT adapter
    warmup.json    facts about the result, written last
    evals.jsonl    held-out evaluations of the base and of the result
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from retrain.config import Config
from retrain.config.runs import RunSpec
from retrain.data.examples import load_examples
from retrain.errors import CheckpointError, NonFinite, RunFailed, RunInterrupted
from retrain.files import (
    append_jsonl,
    aside_of,
    fsync,
    read_json,
    read_json_if_present,
    read_jsonl,
    truncate_jsonl,
    write_json,
)
from retrain.ownership import Owner, publish, remove
from retrain.policy.adapter_io import peft_config, read_adapter, write_peft
from retrain.policy.base import BaseModel, MemoryPlan
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.packing import Budget
from retrain.policy.supervised import SupervisedTrainer, supervised_sample
from retrain.policy.update import UpdateContext
from retrain.records.catalogue import WARMUP_METRICS
from retrain.records.schema.base import Row
from retrain.records.schema.layout import METRICS, STATE, WARMUP, WARMUP_FACTS
from retrain.rng import generator
from retrain.threads import Workers
from retrain.training.bases import Bases
from retrain.training.updates import learning_rate
from retrain.types import Sample
from retrain.util.session import DirectoryLock, leases_of
from retrain.util.text import duration

PARTS = 10  # A warm-up is measured and reported after every tenth of its steps


@dataclass(frozen=True)
class WarmUpPlan:
    """A warm-up to train: the configuration of one of its runs, and its examples as samples. ``notes``: lines for the
    user about the examples."""

    config: Config
    train: list[Sample]
    held_out: list[Sample]
    data_hash: str  # Hash of all tokens and loss masks
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        return self.config.warmup.step_count(len(self.train))

    @property
    def stream(self) -> tuple[int | str, ...]:
        return (self.config.campaign.seed, "warmup")

    def digest(self, base: str) -> str:
        """Return a hash of all that the result depends on. ``base``: fingerprint of the base's weights."""
        config, optimizer = self.config, self.config.optimizer
        adamw = {
            "betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.eps,
            "weight_decay": config.training.weight_decay, "clip_norm": optimizer.grad_clip_norm,
        }  # fmt: skip
        settings = [
            base, self.data_hash, self.stream, self.steps, config.warmup.batch_size, config.warmup.lr,
            optimizer.schedule, adamw, config.model.lora_rank, config.lora.alpha, config.lora.dropout,
            config.lora.target_modules, config.training.update_dtype,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]

    def batch(self, step: int) -> list[Sample]:
        """Return the examples of 0-based ``step``. Every epoch is a new permutation; its last batch may be smaller."""
        size = self.config.warmup.batch_size
        epoch, index = divmod(step, -(-len(self.train) // size))
        order = generator(*self.stream, "data", epoch).permutation(len(self.train))
        return [self.train[i] for i in order[index * size : (index + 1) * size]]

    def new_adapter(self, lanes: Lanes) -> Adapter:
        return lanes.new_adapter(self.config.model.lora_rank, self.config.lora.alpha)

    def peft_config(self, adapter: Adapter, base: BaseModel) -> Mapping[str, object]:
        return peft_config(adapter, base.name, self.config.model.revision, self.config.lora.dropout)


def read_warm_ups(specs: Sequence[RunSpec], folder: Path, bases: Bases) -> dict[str, WarmUpPlan]:
    """Return the warm-up of each run that has one, by run id; no weights are loaded. Raises DataError."""
    plans, read = dict[str, WarmUpPlan](), dict[str, WarmUpPlan]()
    for spec in (spec for spec in specs if spec.config.warmup.active):
        key = spec.config.warmup.model_dump_json()
        if key not in read:
            read[key] = _read_warm_up(spec.config, folder, bases)
        plans[spec.run_id] = replace(read[key], config=spec.config)
    return plans


def _read_warm_up(config: Config, folder: Path, bases: Bases) -> WarmUpPlan:
    files, hashed = bases.model_files(config), hashlib.sha256()
    examples = load_examples(config, folder, files.tokenizer, files.context)
    train, held_out = (
        [supervised_sample(*example) for example in part] for part in (examples.train, examples.held_out)
    )
    for part in (train, held_out):
        for sample in part:
            hashed.update(sample.token_ids.tobytes() + sample.loss_mask.tobytes() + b"\x1e")
        hashed.update(b"\x1d")
    return WarmUpPlan(config, train, held_out, hashed.hexdigest(), examples.notes)


@dataclass(frozen=True)
class WarmUp:
    """A finished warm-up. ``adapter`` is its result, ``base`` an adapter that changes nothing. ``facts``: the content
    of ``warmup.json``."""

    directory: Path
    adapter: LocalSnapshot
    base: LocalSnapshot
    facts: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return self.directory.name

    @property
    def summary(self) -> str:
        losses = [self.facts[key] for key in ("heldout_loss_before", "heldout_loss_after")]
        measured = "held-out loss" if losses[0] is not None else "loss"
        first, last = losses if losses[0] is not None else (self.facts["loss_first"], self.facts["loss_last"])
        steps, examples = self.facts["steps"], self.facts["examples"]
        return f"warm-up {self.digest}: {measured} {first:.4f} → {last:.4f} in {steps} steps on {examples} examples"


@dataclass(frozen=True)
class WarmUpTraining:
    """Trains the warm-ups of a cohort, or waits for the process that does. ``stop`` is called between steps."""

    directory: Path  # Of the campaign
    owner: Owner | None  # Of ``directory``; None on ranks other than 0, which write nothing
    bases: Bases
    workers: Workers
    notify: Callable[[str], None]
    stop: Callable[[], bool]

    def adapters(self, plans: Mapping[str, WarmUpPlan]) -> dict[str, WarmUp]:
        """Return the finished warm-up of each run. Raises RunInterrupted, with everything saved, when ``stop`` returns
        True."""
        finished: dict[str, WarmUp] = {}
        warm_ups = dict[str, WarmUp]()
        for run_id, plan in plans.items():
            base, lanes = self.bases.with_lanes(plan.config)
            digest = plan.digest(base.fingerprint)
            if digest not in finished:
                finished[digest] = self._finished(plan, self.directory / WARMUP / digest, base, lanes)
            warm_ups[run_id] = finished[digest]
        return warm_ups

    def _finished(self, plan: WarmUpPlan, directory: Path, base: BaseModel, lanes: Lanes) -> WarmUp:
        lock: DirectoryLock | None = None

        def is_finished() -> bool:
            """Return whether the warm-up exists; if it does not, this process has the lease to train it."""
            nonlocal lock
            if (directory / WARMUP_FACTS).exists() or self.owner is None:
                return True
            owner = self.owner.at(f"{WARMUP}/{directory.name}")
            lock = stack.enter_context(leases_of([(directory, owner)]))[directory]
            return (directory / WARMUP_FACTS).exists()  # another process may have trained it meanwhile

        with ExitStack() as stack:
            if not self.bases.from_first("warm-up", is_finished):
                WarmUpSession(plan, directory, base, lanes, self, lock).train()
        return self.bases.agreed("loading the warm-up", lambda: load_warm_up(plan, directory, base, lanes))


class WarmUpSession:
    """The training of one warm-up. Without ``lock`` (on ranks other than 0), nothing is written."""

    def __init__(
        self, plan: WarmUpPlan, directory: Path, base: BaseModel, lanes: Lanes, training: WarmUpTraining,
        lock: DirectoryLock | None,
    ):  # fmt: skip
        self.plan, self.directory, self.base, self.training, self.lock = plan, directory, base, training, lock
        config, bases = plan.config, training.bases
        memory, tokens = bases.smallest_memory(lambda: MemoryPlan.of(base)), config.training.micro_batch_tokens
        self.budget = Budget(memory.micro_batch_tokens, plan=memory) if tokens == "auto" else Budget(tokens)
        bfloat16, workers = config.training.update_dtype == "bfloat16", training.workers
        context = UpdateContext(lanes, self.budget, workers, config.lora.dropout, bfloat16, bases.ranks)
        adapter = plan.new_adapter(lanes).initialise(*plan.stream)
        self.trainer = SupervisedTrainer(context, adapter, config, plan.stream)
        self.peft_config = plan.peft_config(adapter, base)

    def train(self) -> None:
        """Train from the last checkpoint to the end. Raises RunInterrupted after saving, RunFailed if a loss is not
        finite."""
        plan, bases = self.plan, self.training.bases
        step, every = bases.from_first("warm-up checkpoint", self._resume_step), plan.config.training.save_every
        if step:
            state = read_json(self.directory / "checkpoint" / STATE)
            bases.agreed("loading a checkpoint", lambda: self.trainer.load(self.directory / "checkpoint"))
            self.budget.restore(state["budget"])
        examples = f"{len(plan.train)} examples, {plan.steps} steps of {plan.config.warmup.batch_size}"
        begun = f"continues at step {step}" if step else f"in {self.directory}"
        for note in (*plan.notes, f"warm-up {self.directory.name}: {examples}, {begun}"):
            self.training.notify(note)
        if not step:
            self._record(0, self._held_out(), 0, 0.0)
        began, first = time.monotonic(), step
        while step < plan.steps:
            if bases.from_first("stopping", self.training.stop):
                self._save(step)
                raise RunInterrupted(f"the warm-up stopped after step {step} of {plan.steps}; everything is saved")
            row = self._step(step)
            step += 1
            if self._is_due(step):
                eta = (time.monotonic() - began) / (step - first) * (plan.steps - step)
                self.training.notify(_progress(self.directory.name, row, plan.steps, eta))
            if every and step % every == 0 and step < plan.steps:
                self._save(step)
        bases.from_first("end of the warm-up", self._finish)

    def _step(self, step: int) -> Row:
        plan, warmup, begin = self.plan, self.plan.config.warmup, time.monotonic()
        batch = plan.batch(step)
        lr = learning_rate(plan.config.optimizer.schedule, step, plan.steps, 0, warmup.lr)
        try:
            metrics = self.trainer.update(batch, step, lr)
        except NonFinite as error:
            raise RunFailed(f"step {step} of the warm-up: {error}; lower [warmup] lr") from error
        seconds = time.monotonic() - begin
        held_out = self._held_out() if self._is_due(step + 1) else {}
        for note in self.budget.take_notes():
            self.training.notify(f"warm-up {self.directory.name}: {note}")
        return self._record(step + 1, metrics | held_out, sum(map(len, batch)), seconds)

    def _is_due(self, step: int) -> bool:
        return step == self.plan.steps or step % max(1, self.plan.steps // PARTS) == 0

    def _held_out(self) -> dict[str, float]:
        if not self.plan.held_out:
            return {}
        measured = self.trainer.measure(self.plan.held_out)
        return {f"sft/heldout_{key}": measured[f"sft/{key}"] for key in ("loss", "token_accuracy")}

    def _record(self, step: int, metrics: Mapping[str, float], tokens: int, seconds: float) -> Row:
        values = {
            "sft/tokens": tokens, "sft/step_time_s": seconds,
            "sft/epoch": step / -(-len(self.plan.train) // self.plan.config.warmup.batch_size),
            "sft/tokens_per_s": tokens / seconds if seconds else None, **metrics,
        }  # fmt: skip
        row: Row = {"step": step} | {metric.key: values.get(metric.key) for metric in WARMUP_METRICS}
        if self.lock is not None:
            self.lock.check()
            append_jsonl(self.directory / METRICS, [row])
        return row

    def _resume_step(self) -> int:
        """Return the step of the checkpoint, and remove the rows of later steps."""
        state = read_json_if_present(self.directory / "checkpoint" / STATE) or {"step": 0}
        truncate_jsonl(self.directory / METRICS, state["step"] + (state["step"] > 0))
        return state["step"]

    def _save(self, step: int) -> None:
        if self.lock is None or not step:
            return
        fsync(self.directory / METRICS)
        aside = aside_of(self.directory / "checkpoint")
        self.trainer.snapshot(self.peft_config).write(aside)
        write_json(aside / STATE, {"step": step, "budget": self.budget.state()})
        self.lock.check()
        publish(aside, self.directory / "checkpoint", self._owner("checkpoint"))

    def _finish(self) -> None:
        assert self.lock is not None, "only rank 0 calls this"
        aside = aside_of(self.directory / "adapter")
        write_peft(aside, self.trainer.adapter.frozen("cpu").tensors(), self.peft_config)
        self.lock.check()
        publish(aside, self.directory / "adapter", self._owner("adapter"))
        rows = read_jsonl(self.directory / METRICS)
        facts = {
            "steps": self.plan.steps,
            "examples": len(self.plan.train),
            "heldout_examples": len(self.plan.held_out),
            "tokens": sum(row["sft/tokens"] for row in rows),
            "loss_first": rows[1]["sft/loss"],
            "loss_last": rows[-1]["sft/loss"],
            "heldout_loss_before": rows[0]["sft/heldout_loss"],
            "heldout_loss_after": rows[-1]["sft/heldout_loss"],
            "fingerprint": self.trainer.adapter.fingerprint(),
            "base": self.base.fingerprint,
        }
        write_json(self.directory / WARMUP_FACTS, facts)
        remove(self.directory / "checkpoint", self._owner("checkpoint"))

    def _owner(self, name: str) -> Owner | None:
        owner = self.training.owner
        return owner and owner.at(f"{WARMUP}/{self.directory.name}/{name}")


def load_warm_up(plan: WarmUpPlan, directory: Path, base: BaseModel, lanes: Lanes) -> WarmUp:
    """Return a finished warm-up. Raises CheckpointError if the fingerprint in ``warmup.json`` is not its adapter's."""
    adapter, facts = plan.new_adapter(lanes), read_json(directory / WARMUP_FACTS)
    config = partial(plan.peft_config, adapter, base)
    unchanged = LocalSnapshot(adapter.frozen(), config)
    adapter.load(read_adapter(directory / "adapter").tensors)
    if adapter.fingerprint() != facts["fingerprint"]:
        raise CheckpointError(f"{directory / 'adapter'} is not the adapter that was trained there: remove {directory}")
    return WarmUp(directory, LocalSnapshot(adapter.frozen(), config), unchanged, facts)


def _progress(name: str, row: Row, steps: int, eta: float) -> str:
    pairs = {"step": f"{row['step']}/{steps}", "loss": f"{row['sft/loss']:.4f}"}
    if row["sft/heldout_loss"] is not None:
        pairs["heldout_loss"] = f"{row['sft/heldout_loss']:.4f}"
    pairs |= {"token_accuracy": f"{row['sft/token_accuracy']:.3f}", "tokens_per_s": f"{row['sft/tokens_per_s']:.0f}"}
    return " ".join(["warm-up", name, *(f"{key}={value}" for key, value in (pairs | {"eta": duration(eta)}).items())])
