"""The health of a run: steps in a row that went wrong, and when they fail the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from retrain.config.training import Training
from retrain.engines.server.watch import Watch, by_version
from retrain.errors import RunFailed
from retrain.policy.protocol import Policy
from retrain.rollouts.queue import RecentWeights
from retrain.training.state import HealthCounters
from retrain.training.updates import MinibatchUpdate, probe_of
from retrain.types import CreditedGroup, Group

UNGRADED_STEPS = 3  # A run fails after this many steps in a row in which no rollout could be graded
MISMATCHED_STEPS = 2  # A run fails after this many steps in a row in which its sampler and its trainer disagree
LOGGED_ERRORS = 20  # Different grading errors that go into a run's log


@dataclass
class RunHealth:
    """Counts steps in a row that went wrong, and fails the run at a limit. ``log(text, level)`` writes into the run's
    log."""

    training: Training
    log: Callable[[str, str], None]
    counters: HealthCounters = field(default_factory=HealthCounters)
    logged_errors: set[tuple[str, str]] = field(default_factory=set)
    """Errors of grading and auditing that this process has logged."""

    def check_grading(self, step: int, groups: Sequence[CreditedGroup]) -> None:
        """Log failed gradings, each reason once. Raises RunFailed after ``UNGRADED_STEPS`` without any grade."""
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
        """Log in what sampler and trainer disagree (``sampler_mismatches``). Raises RunFailed after
        ``MISMATCHED_STEPS``."""
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
        """Log skipped updates. Raises RunFailed after ``nonfinite_limit`` steps with one."""
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
    """Compare the sampler's log-probabilities of some tokens with the trainer's, for the weights that drew them; return
    a line for each version of the weights above the limit, with the likely cause."""
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
