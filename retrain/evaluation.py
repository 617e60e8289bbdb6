"""Held-out evaluation, in one place for the loop, for the untrained model, and for the verification of ranks.

An answer is a function of the weights, the problem and its random stream, which the subject heads, so that the same
adapter after the same number of updates is asked the same way by whoever evaluates it. Sets are sampled one after
another: that a set is there changes no number of the others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.config.evaluation import HELDOUT, HeldOut
from retrain.engines.protocol import Engine, SampleRequest
from retrain.environments.dataset import content_hash
from retrain.environments.prompts import render
from retrain.record.yardstick import Yardstick
from retrain.rewards import Grader
from retrain.scoring import Scoring
from retrain.types import EvalRecord, Group, Problem, Prompt


@dataclass(frozen=True)
class Subject:
    """What is evaluated: an adapter after ``step`` updates, who grades it, and the head of its random streams."""

    adapter: Any
    grader: Grader
    stream: tuple[int | str, ...]
    step: int


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of one subject; with ``error``, what its grader raised, groups are missing."""

    record: EvalRecord
    error: Exception | None = None


class Evaluator:
    """Samples and grades held-out sets, whose ``problems`` are given by name.

    ``base_evaluations`` keeps evaluations of the untrained model for all cohorts of a campaign.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        sets: Sequence[HeldOut],
        problems: Mapping[str, Sequence[Problem]],
        base_evaluations: Yardstick | None = None,
    ):
        self.engine, self.tokenizer, self.sets, self.problems = engine, tokenizer, list(sets), problems
        self.base_evaluations = base_evaluations
        self._prompts: dict[str, list[Prompt]] = {}

    def prompts(self, held_out: HeldOut) -> list[Prompt]:
        """The set's problems as the model reads them. Raises ModelError or DataError as ``render``."""
        if held_out.name not in self._prompts:
            problems = self.problems[held_out.name]
            self._prompts[held_out.name] = [render(problem, self.tokenizer, held_out.data) for problem in problems]
        return self._prompts[held_out.name]

    def evaluate(self, held_out: HeldOut, subjects: Sequence[Subject]) -> list[Evaluated]:
        """The set's answers by each of the subjects, from one decode batch."""
        begin, prompts = time.time(), self.prompts(held_out)
        temperature, samples, max_tokens = held_out.sampling
        own = () if held_out.name == HELDOUT else (held_out.name,)
        requests = [
            SampleRequest(
                lane, prompt.token_ids, samples, max_tokens, temperature,
                (*subject.stream, "eval", *own, subject.step, i), **held_out.truncation,
            )
            for lane, subject in enumerate(subjects)
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        with Scoring([(subject.grader, prompt) for subject in subjects for prompt in prompts]) as scoring:
            self.engine.sample(requests, [subject.adapter for subject in subjects], scoring.add)
            found = iter(scoring.groups())
        evaluated = []
        for subject in subjects:
            part = [next(found) for _ in prompts]
            groups = [group for group in part if isinstance(group, Group)]
            error = next((group for group in part if isinstance(group, Exception)), None)
            seconds = time.time() - begin
            how = (temperature, samples, seconds, max_tokens)
            record = EvalRecord(held_out.name, subject.step, groups, *how, **held_out.truncation)
            evaluated.append(Evaluated(record, error))
        return evaluated

    def known_base(self, held_out: HeldOut, setting: str) -> EvalRecord | None:
        """What an earlier cohort measured of the untrained model on this set, None if none has. ``setting``: all else
        that decides about it, grading and seed."""
        kept = self.base_evaluations
        return kept.get(self._how(held_out, setting), self.prompts(held_out)) if kept else None

    def keep_base(self, held_out: HeldOut, setting: str, record: EvalRecord) -> None:
        """Keep the untrained model's evaluation for later cohorts. Raises StorageError when it cannot be written."""
        if self.base_evaluations is not None and len(record.groups) == len(self.problems[held_out.name]):
            self.base_evaluations.put(self._how(held_out, setting), record)

    def _how(self, held_out: HeldOut, setting: str) -> str:
        problems = content_hash((), self.problems[held_out.name])
        sampling = (held_out.sampling, held_out.truncation)
        return repr((held_out.name, sampling, held_out.data, problems, setting))
