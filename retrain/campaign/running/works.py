"""What there is to do in a campaign, as a scheduler takes it: cohorts to train, adapters to analyse."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.campaign.planning.changes import Approval
from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import Plan, RunSpec
from retrain.campaign.running.protocol import CohortJob, JobObserver, SqueezeJob
from retrain.records.schema.campaign import ENDED


@dataclass(frozen=True)
class Campaign:
    """What every work of a campaign needs: its plan, its records, what was accepted, and who follows it."""

    plan: Plan
    manifest: Manifest
    approval: Approval
    observer: JobObserver


@dataclass(eq=False)
class CohortWork:
    """Runs that train together. What is left of them is asked when their turn has come: the sequential rule may have
    stopped some, and a process that died has finished others.

    ``again``: all of them had failed, and each goes on from its own newest checkpoint.
    """

    campaign: Campaign
    specs: Sequence[RunSpec]
    again: bool = False
    names: frozenset[str] = field(init=False)
    trains: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(spec.run_id for spec in self.specs)

    def left(self) -> list[RunSpec]:
        """The runs of the next job; none when all have ended.

        Of an unfinished cohort the failed runs are given as well: those that failed after the step at which the others
        go on have to be in its batches again, and fail again.
        """
        group = [spec for spec in self.specs if self._entry(spec)["state"] not in ("done", "stopped")]
        if self.again or any(self._entry(spec)["state"] != "failed" for spec in group):
            return group
        return []

    def job(self) -> CohortJob | None:
        specs = self.left()
        if not specs:
            return None
        how: dict[str, Any] = {"together": False}
        if not self.again:
            failed = [spec for spec in specs if self._entry(spec)["state"] == "failed"]
            how = {"failed_at": {spec.run_id: int(self._entry(spec)["step"]) for spec in failed}}
        return CohortJob.of(self.campaign.plan, specs, accepted=list(self.campaign.approval.accepted), **how)

    def give_up(self, reason: str) -> None:
        for spec in self.specs:
            if self._entry(spec)["state"] not in ENDED:
                self.campaign.observer.run_finished(spec, "failed", reason)

    def _entry(self, spec: RunSpec) -> dict[str, Any]:
        return self.campaign.manifest.run(spec.run_id)


@dataclass(eq=False)
class SqueezeWork:
    """The analysis of a finished run's adapter, ``place`` below the campaign's directory."""

    campaign: Campaign
    spec: RunSpec
    place: str
    names: frozenset[str] = field(default=frozenset(), init=False)  # Empty: no other work may touch a finished run
    trains: bool = field(default=False, init=False)

    def job(self) -> SqueezeJob:
        plan = self.campaign.plan
        return SqueezeJob(plan.directory, plan.folder, self.spec, plan.longest, self.place)

    def give_up(self, reason: str) -> None:
        self.campaign.observer.message(f"squeeze analysis of {self.spec.run_id} failed: {reason}", "warning")
