"""Held-out evaluation, for the loop, for the untrained model, and for the verification of ranks.

An answer is a function of the weights, the problem and its random stream, whose prefix is the subject's: whoever
evaluates the same weights after the same number of updates gets the same answers. Sets are sampled one after another,
so that no set changes the numbers of the others.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrain.config.evaluation import HELDOUT, HeldOut
from retrain.data.dataset import content_hash
from retrain.data.prompts import Renderer, Tools
from retrain.engines.protocol import Engine, PolicyRef
from retrain.environments.protocol import ONE_TURN, Environment, Limits
from retrain.record.base_evaluations import BaseEvaluations
from retrain.rollouts.collect import RolloutRequest, collect
from retrain.types import EvalRecord, Group, Message, Problem, Prompt


@dataclass(frozen=True)
class Subject:
    """What is evaluated: weights by name after ``step`` updates, the environment of each held-out set, and the prefix
    of the random streams."""

    policy: PolicyRef
    environments: Mapping[str, Environment]
    stream: tuple[int | str, ...]
    step: int


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
        limits: Limits = ONE_TURN,
    ):
        self.engine, self.renderer, self.sets = engine, _RenderedOnce(renderer), list(sets)
        self.base_evaluations, self.limits = base_evaluations, limits

    def evaluate(self, held_out: HeldOut, subjects: Sequence[Subject]) -> list[EvalRecord]:
        """The set's answers by each of the subjects, from one decode batch. The answer to a problem of a set's part is
        the first one that the whole set would have had of it."""
        begin, sampling = time.monotonic(), held_out.sampling.requested
        own = () if held_out.name == HELDOUT else (held_out.name,)
        asked = [
            list(enumerate(subject.environments[held_out.name].problems(held_out.name)))[:: held_out.every]
            for subject in subjects
        ]
        requests = [
            RolloutRequest(
                subject.environments[held_out.name],
                self.renderer,
                problem,
                subject.policy,
                held_out.samples,
                sampling,
                (*subject.stream, "eval", *own, subject.step, i),
                self.limits,
            )
            for subject, problems in zip(subjects, asked, strict=True)
            for i, problem in problems
        ]
        collected = iter(collect(self.engine, requests).groups)
        records = []
        for subject, problems in zip(subjects, asked, strict=True):
            own_groups = [next(collected) for _ in problems]
            groups = [group for group in own_groups if isinstance(group, Group)]
            error = next((group for group in own_groups if isinstance(group, Exception)), None)
            how = {"samples": held_out.samples, "seconds": time.monotonic() - begin, "error": error, **vars(sampling)}
            records.append(EvalRecord(held_out.recorded_name, subject.step, groups, **how))
        return records

    def known_base(self, held_out: HeldOut, environment: Environment, setting: str) -> EvalRecord | None:
        """What an earlier cohort measured of the untrained model on this set, None if none has. ``setting``: all else
        that decides about it: environment, grading and seed."""
        if self.base_evaluations is None:
            return None
        problems = environment.problems(held_out.name)
        return self.base_evaluations.get(_how(held_out, environment, setting), problems)

    def keep_base(self, held_out: HeldOut, environment: Environment, setting: str, record: EvalRecord) -> None:
        """Keep the untrained model's evaluation for later cohorts. Raises StorageError when it cannot be written."""
        if self.base_evaluations is not None and len(record.groups) == len(environment.problems(held_out.name)):
            self.base_evaluations.put(_how(held_out, environment, setting), record)


class _RenderedOnce(Renderer):
    """Keeps the prompts: every evaluation asks the same problems."""

    def __init__(self, renderer: Renderer):
        super().__init__(renderer.tokenizer, renderer.data, renderer.tools_prompt)
        self._prompts: dict[int, tuple[tuple[Message, ...], Prompt]] = {}

    def prompt(self, problem: Problem, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """See ``Renderer.prompt``. An environment may ask a problem in other words than before."""
        asked, prompt = self._prompts.get(
            id(problem), (None, None)
        )  # the id stays its own: the prompt holds the problem
        if prompt is None or asked != tuple(messages):
            prompt = super().prompt(problem, messages, tools)
            self._prompts[id(problem)] = tuple(messages), prompt
        return prompt


def _how(held_out: HeldOut, environment: Environment, setting: str) -> str:
    problems = content_hash((), environment.problems(held_out.name))
    return repr((held_out.name, held_out.samples, held_out.sampling.requested, held_out.data, problems, setting))
