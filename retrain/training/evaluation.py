"""Evaluates policies on held-out sets, for the loop and for the verification of compressed adapters.

An answer is a function of the weights, the problem and its random stream: evaluating equal weights after the same
number of updates gives equal answers. Sets are sampled one after another, so that no set affects the results of
another.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from retrain.config.evaluation import HELDOUT, Extent, HeldOut
from retrain.data.dataset import column_values, content_hash
from retrain.data.prompts import Renderer, Tools
from retrain.engines.protocol import Engine
from retrain.environments.protocol import ONE_TURN, Environment, EpisodeLimits
from retrain.files import append_jsonl, read_jsonl, writing
from retrain.ranks import RankGroup
from retrain.records.base_evaluations import BaseEvaluations
from retrain.records.observer import Observer
from retrain.records.schema.base import Row
from retrain.records.schema.layout import EVALS
from retrain.records.schema.rows import Evaluation
from retrain.records.scores import eval_row
from retrain.rollouts.collect import Collector, RolloutRequest, collect
from retrain.training.recovery import Failures, Saver
from retrain.training.run import Run
from retrain.training.warmup import WarmUp
from retrain.types import EvalRecord, Group, Message, PolicyRef, Problem, Prompt
from retrain.util.text import percent


@dataclass(frozen=True)
class EvaluatedPolicy:
    policy: PolicyRef
    environments: Mapping[str, Environment]  # By held-out set
    stream: tuple[int | str, ...]  # Prefix of the random streams
    step: int  # Updates so far


class Evaluator:
    """Samples and grades held-out sets.

    ``base_evaluations`` stores evaluations of the untrained model for all cohorts of a campaign. With ``ranks``, each
    rank samples a share of the problems, and rank 0 stores. ``warm_ups``: what runs start from, by run id; a run that
    is not in it starts from the base.
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
        warm_ups: Mapping[str, WarmUp] = MappingProxyType({}),
    ):
        self.engine, self.renderer, self.sets = engine, _RenderedOnce(renderer), list(sets)
        self.warm_ups = warm_ups
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

    @property
    def writes(self) -> bool:
        return self.ranks is None or self.ranks.is_first

    def keep_base(self, held_out: HeldOut, environment: Environment, setting: str, record: EvalRecord) -> None:
        """Store a complete evaluation of the untrained model for later cohorts. Raises StorageError."""
        if not self.writes:
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

    def trained(self, extents: Mapping[Run, Extent | None]) -> None:
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
        """Evaluate runs whose policies still equal the base or their warm-up on a held-out set. Runs with equal
        warm-up, environment, grading and seed share one evaluation, which an earlier cohort of the campaign may have
        made. After a warm-up, the base is evaluated too."""
        alike, results = dict[str, list[Run]](), dict[str, EvalRecord]()
        bases: dict[str, tuple[WarmUp, EvalRecord]] = {}
        for run in runs:
            config = run.config
            audit = [config.audit.model_dump_json()] if config.audit.is_enabled else []
            rubrics = column_values(config.graded_columns, run.environments[held_out.name].problems(held_out.name))
            measured = (config.environment.measured, config.reward.grading, config.campaign.seed)
            setting = (*measured, *audit, *rubrics)
            if (warm_up := self.evaluator.warm_ups.get(run.run_id)) is not None:
                of_base, setting = repr(setting), (*setting, warm_up.digest)
                if repr(setting) not in bases:
                    bases[repr(setting)] = warm_up, self._base_record(held_out, run, warm_up, of_base)
            alike.setdefault(repr(setting), []).append(run)
        new = dict(alike)
        for setting, same in alike.items():
            earlier = self.evaluator.known_base(held_out, same[0].environments[held_out.name], setting)
            if earlier is not None:
                del new[setting]
                results[setting] = earlier
                self._record_evaluation(same, earlier)
        records = self._evaluate(held_out, list(new.values()))
        for (setting, same), record in zip(new.items(), records, strict=True):
            environment, results[setting] = same[0].environments[held_out.name], record
            self.saver.submit(same[0], partial(self.evaluator.keep_base, held_out, environment, setting, record))
        for setting, (warm_up, before) in bases.items():
            self._report_warm_up(warm_up, setting, alike[setting][0], before, results[setting])

    def _base_record(self, held_out: HeldOut, run: Run, warm_up: WarmUp, setting: str) -> EvalRecord:
        """Return the evaluation of the base under the settings of a run that has had a warm-up."""
        evaluator, environment = self.evaluator, run.environments[held_out.name]
        record = evaluator.known_base(held_out, environment, setting)
        if record is None:
            policy = PolicyRef(f"{run.run_id}.base", 0)
            evaluator.engine.publish(policy, warm_up.base)
            with run.timer("eval"):
                [record] = evaluator.evaluate(held_out, [replace(_subject(run), policy=policy)])
            evaluator.engine.retire(policy)
            self.saver.submit(run, partial(evaluator.keep_base, held_out, environment, setting, record))
        return record

    def _report_warm_up(self, warm_up: WarmUp, setting: str, run: Run, before: EvalRecord, after: EvalRecord) -> None:
        """Report the accuracy before and after the warm-up, and write both evaluations to the warm-up's directory."""
        config, context, path = run.config, run.recorder.context, warm_up.directory / EVALS
        digest = hashlib.sha256(setting.encode()).hexdigest()[:12]
        done = {(row["name"], row["setting"]) for row in read_jsonl(path)}
        if run.error is not None or (before.name, digest) in done or not self.evaluator.writes:
            return
        if before.error is not None:
            text = f"warm-up {warm_up.digest}: the evaluation of the base on {before.name} failed: {before.error}"
            self.observer.message(text, "warning")
            return
        rows = []
        for record in (before, replace(after, step=warm_up.facts["steps"])):
            sampling = {key: getattr(record, key) for key in Evaluation.field_names()}
            strict, audited = config.reward.strict_answers, config.audit.is_enabled
            numbers = eval_row(record, context.tags_of(record.name), strict, audited)
            rows.append(sampling | {"setting": digest} | numbers)
        with self.failures.isolated(run), writing(path):
            append_jsonl(path, rows)
        old, new = (percent(row[f"eval/{before.name}/correct_rate"]) for row in rows)
        line = f"warm-up {warm_up.digest}: accuracy on {before.name} {old} (base) → {new} (after the warm-up)"
        run.recorder.log(line)
        self.observer.message(line)

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
    return EvaluatedPolicy(run.policy_ref, run.environments, run.config.evaluation_stream(run.step), run.step)
