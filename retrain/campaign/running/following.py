"""What a rank other than 0 does: hold the base of the cohort, and compute what rank 0 asks for."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from retrain.algorithms import load_modes
from retrain.algorithms.losses.plugin import PluginLoss
from retrain.campaign.running.assemble import lane_bytes, use_deterministic, workers_of
from retrain.config.base import is_plugin
from retrain.config.runs import RunSpec
from retrain.device import is_out_of_memory
from retrain.engines.local import LocalEngine
from retrain.engines.shared import DecodeTask
from retrain.policy.backbone import Scored
from retrain.policy.base import MemoryPlan
from retrain.policy.company import Company
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.policy.objective import PolicyLoss
from retrain.policy.ranks import ANSWER_SECONDS
from retrain.policy.shares import Packed, PassesAsked, ScoresAsked
from retrain.policy.update import MicroBatchResult
from retrain.threads import Workers
from retrain.training.bases import Bases
from retrain.types import Action, PolicyRef


class Desk:
    """What rank 0 may ask for, each of these by its name; see ``policy.ranks.follow``. ``load`` comes first."""

    lanes: Lanes
    engine: LocalEngine  # Engine for the rollouts that this process samples
    workers: Workers

    def __init__(self, bases: Bases):
        self.bases, self._cohort = bases, ExitStack()
        self.losses: dict[str, PolicyLoss] = {}

    def work(self) -> AbstractContextManager[None]:
        return nullcontext() if self.bases.company is None else self.bases.company.work()

    def share_weights(self, device: str) -> None:
        """Hold parts of the weights from now on, on devices of this type."""
        self.bases.company = Company.form(device, ANSWER_SECONDS)

    def accompany(self) -> None:
        """Nothing but to have part in what others do."""

    def load(self, runs: Sequence[Mapping[str, Any]], folder: str, place: str) -> str:
        """Take the base of these runs, on the device ``place``; the fingerprint of its weights."""
        self._cohort.close()
        specs = [RunSpec.from_json(_at(run, place)) for run in runs]
        own = {spec.config.algorithm.loss: spec.config.algorithm for spec in specs}
        plugins = {name: load_modes(section, Path(folder)).loss for name, section in own.items() if is_plugin(name)}
        self.losses = {name: PluginLoss(function) for name, function in plugins.items() if callable(function)}
        first = specs[0].config
        use_deterministic(first.training.deterministic)
        base, self.lanes = self.bases.trained(first)
        self.workers = self._cohort.enter_context(closing(workers_of(base, specs)))
        if not first.inference.served:
            _, _, self.engine = self.bases.take(first)
            self.engine.workers = self.workers
            self.engine.begin(MemoryPlan.of(base, lane_bytes(base, self.lanes, specs)))
        return base.fingerprint

    def publish(self, ref: PolicyRef, weights: Packed) -> None:
        self.engine.publish(ref, LocalSnapshot(weights.frozen(self.lanes)))

    def retire(self, ref: PolicyRef) -> None:
        self.engine.retire(ref)

    def forget(self) -> None:
        self.engine.forget()

    def forget_sequences(self) -> None:
        self.engine.forget_sequences()

    def decode(self, asked: DecodeTask) -> dict[int, list[Action]]:
        try:
            return asked.done(self.engine)
        except RuntimeError as error:
            self._make_room(error)
            raise

    def passes(self, asked: PassesAsked) -> list[MicroBatchResult]:
        try:
            return asked.done(self.lanes, self.workers, self.losses)
        except RuntimeError as error:
            self._make_room(error)
            raise

    def scores(self, asked: ScoresAsked) -> Scored:
        return asked.done(self.lanes)

    def _make_room(self, error: RuntimeError) -> None:
        """Give back what can be, where memory has run out: rank 0 asks again for less."""
        if is_out_of_memory(error):
            self.bases.forget_sequences()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def _at(run: Mapping[str, Any], place: str) -> dict[str, Any]:
    config = dict(run["config"])
    return {**run, "config": {**config, "backend": {**config["backend"], "devices": place}}}
