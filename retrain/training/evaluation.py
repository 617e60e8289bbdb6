"""Evaluates policies on held-out sets, for the loop and for the verification of compressed adapters.

An answer is a function of the weights, the problem and its random stream: evaluating equal weights after the same
number of updates gives equal answers. Sets are sampled one after another, so that no set affects the results of
another.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from retrain.config.evaluation import HELDOUT, Extent, HeldOut
from retrain.data.dataset import column_values, content_hash
from retrain.data.prompts import Renderer, Tools
from retrain.engines.protocol import Engine
from retrain.environments.protocol import ONE_TURN, Environment, EpisodeLimits
from retrain.ranks import RankGroup
from retrain.records.base_evaluations import BaseEvaluations
from retrain.records.observer import Observer
from retrain.records.schema.base import Row
from retrain.rollouts.collect import Collector, RolloutRequest, collect
from retrain.training.recovery import Failures, Saver
from retrain.training.run import Run
from retrain.types import EvalRecord, Group, Message, PolicyRef, Problem, Prompt


@dataclass(frozen=True)
class EvaluatedPolicy:
    policy: PolicyRef
    environments: Mapping[str, Environment]  # By held-out set
    stream: tuple[int | str, ...]  # Prefix of the random streams
    step: int  # Updates so far


class Evaluator:
    """Samples and grades held-out sets.

    ``base_evaluations`` stores evaluations of the untrained model for all cohorts of a campaign. With ``ranks``, each
    rank samples a share of the problems, and rank 0 stores.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sets: Sequence[HeldOut],
        base_evaluations: BaseEvaluations | None = None,
        limits: EpisodeLimits = ONE_TURN,
        ranks: RankGroup | None = None,
        collect: Collector = collect,
    ):
        self.engine, self.renderer, self.sets = engine, _RenderedOnce(renderer), list(sets)
        self.base_evaluations, self.limits, self.ranks, self.collect = base_evaluations, limits, ranks, collect

    def evaluate(self, held_out: HeldOut, subjects: Sequence[EvaluatedPolicy]) -> list[EvalRecord]:
        """Sample and grade a held-out set with all ``subjects`` in one decode batch; return one record per subject.
        A problem's random streams, and therefore its first answers, are the same for the whole set and for a part."""
        begin, sampling = time.monotonic(), held_out.sampling.requested
        set_stream = () if held_out.name == HELDOUT else (held_out.name,)
        problems_by_subject = [
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
                (*subject.stream, "eval", *set_stream, subject.step, i),
                self.limits,
            )
            for subject, problems in zip(subjects, problems_by_subject, strict=True)
            for i, problem in problems
        ]
        collected = iter(self.collect(self.engine, requests).groups)
        records = []
        for subject, problems in zip(subjects, problems_by_subject, strict=True):
            results = [next(collected) for _ in problems]
            groups = [group for group in results if isinstance(group, Group)]
            error = next((group for group in results if isinstance(group, Exception)), None)
            how = {"samples": held_out.samples, "seconds": time.monotonic() - begin, "error": error, **vars(sampling)}
            records.append(EvalRecord(held_out.recorded_name, subject.step, groups, **how))
        return records

    def known_base(self, held_out: HeldOut, environment: Environment, setting: str) -> EvalRecord | None:
        """Return an earlier cohort's evaluation of the untrained model on this set, None if there is none. ``setting``
        identifies environment, grading and seed."""
        if self.base_evaluations is None:
            return None
        get = partial(self.base_evaluations.get, _key(held_out, environment, setting))
        problems = environment.problems(held_out.name)
        if self.ranks is not None:
            return self.ranks.from_first("base evaluation", lambda: get(problems))
        return get(problems)

    def keep_base(self, held_out: HeldOut, environment: Environment, setting: str, record: EvalRecord) -> None:
        """Store a complete evaluation of the untrained model for later cohorts. Raises StorageError."""
        if self.ranks is not None and not self.ranks.is_first:
            return
        if self.base_evaluations is not None and len(record.groups) == len(environment.problems(held_out.name)):
            self.base_evaluations.put(_key(held_out, environment, setting), record)


class _RenderedOnce(Renderer):
    """A renderer that caches prompts, because every evaluation has the same problems."""

    def __init__(self, renderer: Renderer):
        super().__init__(renderer.tokenizer, renderer.data, renderer.tools_prompt)
        self._prompts: dict[int, tuple[tuple[Message, ...], Prompt]] = {}

    def prompt(self, problem: Problem, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        # The cached prompt holds the problem, so its id is not reused. An environment may change a problem's messages.
        rendered, prompt = self._prompts.get(id(problem), (None, None))
        if prompt is None or rendered != tuple(messages):
            prompt = super().prompt(problem, messages, tools)
            self._prompts[id(problem)] = tuple(messages), prompt
        return prompt


def _key(held_out: HeldOut, environment: Environment, setting: str) -> str:
    problems = content_hash((), environment.problems(held_out.name))
    return repr((held_out.name, held_out.samples, held_out.sampling.requested, held_out.data, problems, setting))


class CohortEvaluator:
    """Evaluates the runs of a cohort in one decode batch; untrained runs with equal settings share an evaluation. An
    evaluation that fails ends its runs. ``evaluator`` has the held-out sets, which all runs share."""

    def __init__(self, evaluator: Evaluator, observer: Observer, saver: Saver, failures: Failures):
        self.evaluator, self.observer, self.saver, self.failures = evaluator, observer, saver, failures

    def trained(self, extents: Mapping[Run, Extent]) -> None:
        for held_out in self.evaluator.sets:
            for extent, problems in (("whole", held_out), ("part", held_out.part)):
                due = [run for run, wanted in extents.items() if run.error is None and wanted == extent]
                self._evaluate(problems, [[run] for run in due])

    def untrained(self, runs: Sequence[Run]) -> Iterator[None]:
        """Evaluate runs before their first update; yield after each held-out set."""
        for held_out in self.evaluator.sets:
            others = [run for run in runs if not equals_base(run) and run.error is None]
            self._evaluate(held_out, [[run] for run in others])
            self._evaluate_base(held_out, [run for run in runs if equals_base(run) and run.error is None])
            yield

    def _evaluate_base(self, held_out: HeldOut, runs: Sequence[Run]) -> None:
        """Evaluate runs whose policies still equal the base on a held-out set. Runs with equal environment, grading and
        seed share one evaluation, which an earlier cohort of the campaign may have made."""
        alike: dict[str, list[Run]] = {}
        for run in runs:
            config = run.config
            audit = [config.audit.model_dump_json()] if config.audit.is_enabled else []
            rubrics = column_values(config.graded_columns, run.environments[held_out.name].problems(held_out.name))
            measured = (config.environment.measured, config.reward.grading, config.campaign.seed)
            setting = repr((*measured, *audit, *rubrics))
            alike.setdefault(setting, []).append(run)
        for setting, same in list(alike.items()):
            earlier = self.evaluator.known_base(held_out, same[0].environments[held_out.name], setting)
            if earlier is not None:
                del alike[setting]
                self._record_evaluation(same, earlier)
        records = self._evaluate(held_out, list(alike.values()))
        for (setting, same), record in zip(alike.items(), records, strict=True):
            environment = same[0].environments[held_out.name]
            self.saver.submit(same[0], partial(self.evaluator.keep_base, held_out, environment, setting, record))

    def _evaluate(self, held_out: HeldOut, alike: Sequence[Sequence[Run]]) -> list[EvalRecord]:
        """Evaluate the first run of each list in ``alike`` on a held-out set, in one decode batch; record the result
        for all runs of the list, and return the records."""
        if not alike:
            return []
        subjects = [_subject(run) for run, *_ in alike]
        with ExitStack() as spans:
            for same in alike:
                for run in same:
                    spans.enter_context(run.timer("eval"))
            records = self.evaluator.evaluate(held_out, subjects)
            for same, record in zip(alike, records, strict=True):
                for run in same:
                    if record.error is not None:
                        self.failures.end(run, record.error)
                self._record_evaluation([run for run in same if run.error is None], record)
        return records

    def _record_evaluation(self, runs: Sequence[Run], record: EvalRecord) -> None:
        for run in runs:
            with self.failures.isolated(run):
                row = run.recorder.record_eval(record)
            if run.error is None:
                self.observer.sealed(run.spec, run.recorder.seal())
                self.observer.evaluated(run.spec, record.name, row)
        self.failures.share(runs)


def equals_base(run: Run) -> bool:
    return run.step == 0 and run.policy.starts_as_base and not run.config.resume.from_


def first_evaluations(run: Run) -> list[Row]:
    first: dict[str, Row] = {}
    if run.step == 0:  # without a checkpoint, the records of an earlier process are discarded
        return []
    for row in run.recorder.evaluations():
        first.setdefault(row["name"], row)
    return [first[name] for name in run.config.evaluation.names if name in first]


def _subject(run: Run) -> EvaluatedPolicy:
    # Untrained runs share a random stream and therefore their answers, so that one evaluation serves all.
    stream = (run.config.campaign.seed, "base") if run.step == 0 else run.requests.stream
    return EvaluatedPolicy(run.policy_ref, run.environments, stream, run.step)
