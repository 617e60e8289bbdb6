"""Rollout requests of one run: which problems its steps sample, drawn by which weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.config import Config
from retrain.data.dataset import DataCursor
from retrain.data.prompts import Renderer
from retrain.environments.protocol import Environment, Limits
from retrain.rollouts.collect import RolloutRequest
from retrain.rollouts.resample import Resample, Resampler, SelectedGroups
from retrain.rollouts.versions import RecentWeights
from retrain.types import Group, Problem


@dataclass(eq=False)
class RolloutRequests:
    """Makes the rollout requests of a run's steps, in the order of its data, and selects the groups that a step trains
    on."""

    config: Config
    environment: Environment
    renderer: Renderer
    limits: Limits
    cursor: DataCursor
    recent: RecentWeights
    next_step: int = 0
    """First step whose rollouts this process has not requested yet."""

    def __post_init__(self) -> None:
        training, cursor = self.config.training, self.cursor
        # A list of its own: what is drawn again must not move the cursor of the first rounds.
        upcoming = DataCursor(cursor.problems, (*cursor.stream, "dynamic"), cursor.shuffle).ahead
        rounds = training.dynamic_sampling
        self.resampler = Resampler(training.batch_size, rounds, upcoming, len(cursor.problems)) if rounds else None

    def due(self, step: int, ahead: bool = False) -> dict[int, list[RolloutRequest]]:
        """Return the requests of ``step``, the next one, and with ``ahead`` of all later steps that may be sampled by
        now, by step; no step is requested twice."""
        training = self.config.training
        last = min(step + training.max_off_policy_steps * ahead, training.max_steps - 1)
        steps = range(max(step, self.next_step), last + 1)
        self.next_step = last + 1
        return {later: self.of_step(step, later) for later in steps}

    def of_step(self, now: int, step: int) -> list[RolloutRequest]:
        """Return the requests of ``step``, which is ``now``, the run's next one, or a later one."""
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
            config.training.sampling.requested,
            (*config.stream("sampling"), "sample", step, index),
            self.limits,
            self.recent.newest if config.inference.swap == "in_flight" else None,
        )

    @property
    def resample(self) -> Resample | None:
        """Dynamic sampling, called with a step's groups once they are sampled; None where it is off."""
        return self.resampler and self.resampler.resample

    def select(self, groups: Sequence[Group]) -> SelectedGroups:
        """Move the data cursor by one step, and return the groups that the step trains on."""
        self.cursor.position += self.config.training.batch_size
        return self.resampler.select(groups) if self.resampler else SelectedGroups(list(groups), [], {})
