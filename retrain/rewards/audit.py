"""The audit: a second grader that looks at what the first one pays for, and never trains.

Its score goes into the sample metrics of a result, as ``audit``, which are recorded and reach no advantage. Whatever
goes wrong with it costs that number alone.
"""

from collections.abc import Sequence

from retrain.plugins import described
from retrain.rewards.base import Item, Reward, failed
from retrain.types import RewardResult

AUDIT = "audit"  # Name of the audit's score among the sample metrics, and prefix of its other metrics


class AuditedReward(Reward):
    """``reward``, with what ``audit`` says of the same completions beside."""

    def __init__(self, reward: Reward, audit: Reward):
        self.reward, self.audit = reward, audit
        self.name = reward.name
        self.columns = (*reward.columns, *audit.columns)
        self.names: tuple[str, ...] = tuple(getattr(reward, "names", (reward.name,)))
        own = {AUDIT if name == "reward" else f"{AUDIT}/{name}": limits for name, limits in audit.ranges.items()}
        self.ranges = {**reward.ranges, **own}

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return the results of ``reward``, each with the audit's numbers; None with the reason where it has none."""
        results = self.reward.grade_all(items)
        try:
            audited = self.audit.grade_all(items)
        except Exception as error:  # an audit costs its own number, never the run
            audited = [failed(described(error))] * len(items)
        for result, beside in zip(results, audited, strict=True):
            result.audit_error = beside.error
            found = {AUDIT: beside.total_reward}
            found |= {f"{AUDIT}/{name}": value for name, value in beside.sample_metrics.items()}
            result.sample_metrics = {**result.sample_metrics, **found}
        return results

    def close(self) -> None:
        self.reward.close()
        self.audit.close()
