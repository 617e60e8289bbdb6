"""Held-out evaluation, in one place for the loop, for the untrained model, and for the verification of ranks.

An answer is a function of the weights, the problem and its random stream, which the subject heads, so that the same
weights after the same number of updates are asked the same way by whoever evaluates them. Sets are sampled one after
another: that a set is there changes no number of the others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrain.config.evaluation import HELDOUT, HeldOut
from retrain.engines.protocol import Engine, PolicyRef
from retrain.environments.dataset import content_hash
from retrain.environments.prompts import Renderer
from retrain.environments.protocol import Environment
from retrain.record.base_evaluations import BaseEvaluations
from retrain.rollouts.collect import RolloutRequest, Sampling, collect
from retrain.types import EvalRecord, Group, Prompt


@dataclass(frozen=True)
class Subject:
    """What is evaluated: weights by name after ``step`` updates, in which environment each held-out set is asked, and
    the head of the random streams."""

    policy: PolicyRef
    environments: Mapping[str, Environment]
    stream: tuple[int | str, ...]
    step: int


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of one subject; with ``error``, what its grader raised, groups are missing."""

    record: EvalRecord
    error: Exception | None = None


class Evaluator:
    """Samples and grades held-out sets.

    ``base_evaluations`` keeps evaluations of the untrained model for all cohorts of a campaign.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sets: Sequence[HeldOut],
        base_evaluations: BaseEvaluations | None = None,
    ):
        self.engine, self.renderer, self.sets, self.base_evaluations = engine, renderer, list(sets), base_evaluations

    def evaluate(self, held_out: HeldOut, subjects: Sequence[Subject]) -> list[Evaluated]:
        """The set's answers by each of the subjects, from one decode batch."""
        begin, (temperature, samples, max_tokens) = time.time(), held_out.sampling
        own = () if held_out.name == HELDOUT else (held_out.name,)
        asked = [subject.environments[held_out.name].problems(held_out.name) for subject in subjects]
        requests = [
            RolloutRequest(
                subject.environments[held_out.name],
                self.renderer,
                problem,
                subject.policy,
                samples,
                Sampling(max_tokens, temperature, **held_out.truncation),
                (*subject.stream, "eval", *own, subject.step, i),
            )
            for subject, problems in zip(subjects, asked, strict=True)
            for i, problem in enumerate(problems)
        ]
        found = iter(collect(self.engine, requests).groups)
        evaluated = []
        for subject, problems in zip(subjects, asked, strict=True):
            part = [next(found) for _ in problems]
            groups = [group for group in part if isinstance(group, Group)]
            error = next((group for group in part if isinstance(group, Exception)), None)
            seconds = time.time() - begin
            how = (temperature, samples, seconds, max_tokens)
            record = EvalRecord(held_out.name, subject.step, groups, *how, **held_out.truncation)
            evaluated.append(Evaluated(record, error))
        return evaluated

    def known_base(self, held_out: HeldOut, environment: Environment, setting: str) -> EvalRecord | None:
        """What an earlier cohort measured of the untrained model on this set, None if none has. ``setting``: all else
        that decides about it, grading and seed."""
        kept = self.base_evaluations
        return kept.get(_how(held_out, environment, setting), self._prompts(held_out, environment)) if kept else None

    def keep_base(self, held_out: HeldOut, environment: Environment, setting: str, record: EvalRecord) -> None:
        """Keep the untrained model's evaluation for later cohorts. Raises StorageError when it cannot be written."""
        if self.base_evaluations is not None and len(record.groups) == len(environment.problems(held_out.name)):
            self.base_evaluations.put(_how(held_out, environment, setting), record)

    def _prompts(self, held_out: HeldOut, environment: Environment) -> list[Prompt]:
        """The set's problems as the model reads them. Raises ModelError or DataError as ``Renderer.prompt``."""
        return [
            self.renderer.prompt(problem, environment.start(problem, 0).observe().messages)
            for problem in environment.problems(held_out.name)
        ]


def _how(held_out: HeldOut, environment: Environment, setting: str) -> str:
    problems = content_hash((), environment.problems(held_out.name))
    sampling = (held_out.sampling, held_out.truncation)
    return repr((held_out.name, sampling, held_out.data, problems, setting))
