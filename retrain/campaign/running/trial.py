"""A look before training: some problems of a run's first batch as the model reads them, sampled and graded.

The run is put together as training does it (``assemble``), in a directory that is removed again and without trackers:
the prompts are those of its first batch, the answers those of its first step, the grader is its own. Answers are graded
one after the other, so that each has its time.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import count
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from retrain.adapters.talk import answer, as_read
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.assemble import DoesNotFit, assemble
from retrain.campaign.running.protocol import CohortJob
from retrain.config import parse_dict
from retrain.config.campaign import condition_name, find_label
from retrain.config.runs import RunSpec
from retrain.data.prompts import conversation
from retrain.environments.build import SplitEnvironment
from retrain.errors import UsageError
from retrain.plugins import described
from retrain.records.measure import EQUAL_REWARDS
from retrain.records.observer import NullObserver
from retrain.records.text import without_keys
from retrain.rewards import Grader
from retrain.rewards.base import CompletionText, failed
from retrain.rollouts.collect import RolloutRequest, collect, require_graded
from retrain.training.loop import Cohort
from retrain.training.run import Run
from retrain.types import Action, Prompt, RewardResult, Rollout, SampleRequest

ANSWERS = 4  # Answers for each problem, or the group size where that is smaller
WAITS = ("rollout", "score")
PATIENCE_S = 30.0  # Seconds spent on grading without one grade, after which the rest is not tried
POOLED = ("math", "judge", "custom")  # Rewards that grade several answers at once, `[reward] workers` of them


class Messages(NullObserver):
    """Passes on messages alone."""

    def __init__(self, tell: Callable[[str], None]):
        self.tell = tell

    def message(self, text: str, level: str = "info") -> None:
        self.tell(text)


def trial(
    plan: Plan, problems: int, samples: int | None, condition: str | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Sample and grade ``samples`` answers to each of the first ``problems`` problems of one planned run.

    ``condition`` is the label of the run's condition, None the first; the seed is the first. Returns ``run``, ``seed``,
    ``model``, ``prompts`` (each with its answers and what the reward says of them), ``sampling`` and ``grading``
    (counts and seconds, with what a whole step takes) and ``verdict``. Raises RetrainError as training does.
    """
    spec = _untracked(chosen(plan, condition))
    samples = samples or min(ANSWERS, spec.config.training.group_size)
    with ExitStack() as stack:
        aside = Path(stack.enter_context(TemporaryDirectory(prefix="retrain-try-")))
        try:
            job = CohortJob.of(replace(plan, directory=aside), [spec])
            cohort = assemble(job, Messages(tell), lambda: False, stack)
        except DoesNotFit as short:
            raise UsageError(str(short)) from short
        run = cohort.runs[0]
        run.publish_to(cohort.engine)
        asked: list[RolloutRequest] = []
        for step in count():
            asked += run.requests.of_step(run.step, step)
            if len(asked) >= problems:
                break
        asked = asked[:problems]
        asked = [replace(each, samples=samples) for each in asked]
        prompts, sampled, graded, sampling_s = (_episodes if run.config.environment.hosted else _answers)(cohort, asked)
        return {
            "run": spec.run_id,
            "seed": spec.seed,
            "model": spec.config.model.model,
            "prompts": [
                {
                    "id": prompt.problem.id,
                    "rendered": as_read(prompt, run.requests.renderer.tokenizer),
                    "tokens": len(prompt.token_ids),
                    "answer": prompt.problem.answer,
                    "samples": [_graded(*each) for each in zip(sampled[i], *graded[i], strict=True)],
                }
                for i, prompt in enumerate(prompts)
            ],
            "sampling": _sampling(run, sampled, sampling_s),
            "grading": _grading(run, graded),
            "verdict": _verdict(run, sampled, [results for results, _ in graded]),
        }  # fmt: skip


def chosen(plan: Plan, condition: str | None) -> RunSpec:
    """The first run of the condition. Raises UsageError when there is no such condition."""
    labels = list(dict.fromkeys(spec.label for spec in plan.specs))
    label = labels[0] if condition is None else find_label(condition, labels)
    if label is None:
        raise UsageError(f"--condition {condition!r} is not one of {', '.join(map(condition_name, labels))}")
    return next(spec for spec in plan.specs if spec.label == label)


def _untracked(spec: RunSpec) -> RunSpec:
    data = spec.config.to_dict()
    data["logging"] |= {"report_to": [], "wandb_project": None}
    data["backend"]["adapter_path"] = None
    return replace(spec, config=parse_dict(data), is_campaign=False)


def others(plan: Plan, condition: str | None) -> list[str]:
    """Labels of the conditions whose reward or sampling is not that of the one that is tried.

    Raises UsageError when there is no such condition.
    """
    tried = chosen(plan, condition)

    def seen(spec: RunSpec) -> tuple[Any, ...]:
        return spec.config.reward.grading, spec.config.training.sampling.requested

    return list(
        dict.fromkeys(spec.label for spec in plan.specs if spec.seed == tried.seed and seen(spec) != seen(tried))
    )


Graded = tuple[list[RewardResult], list[float]]
"""The results of one prompt's answers, and the seconds that each took; NaN for one that was not tried."""
Tried = tuple[list[Prompt], list[list[Action]], list[Graded], float]
"""Prompts, the answers to each and what they are worth, and the seconds of sampling."""


def _answers(cohort: Cohort, asked: Sequence[RolloutRequest]) -> Tried:
    """Answers in one turn, graded one after the other."""
    run = cohort.runs[0]
    environment = run.environments["train"]
    assert isinstance(environment, SplitEnvironment)
    assert environment.grader is not None
    prompts = [
        run.requests.renderer.prompt(each.problem, conversation(each.problem, run.config.data)) for each in asked
    ]
    begin = time.perf_counter()
    sampled = cohort.engine.sample(
        [
            SampleRequest(each.policy, prompt.token_ids, each.samples, stream=each.stream, **asdict(each.sampling))
            for each, prompt in zip(asked, prompts, strict=True)
        ]
    )
    seconds = time.perf_counter() - begin
    return prompts, sampled, _grade(environment.grader, prompts, sampled), seconds


def _episodes(cohort: Cohort, asked: Sequence[RolloutRequest]) -> Tried:
    """Whole episodes; each has the mean of the seconds that their environments took. Raises RunFailed with what the
    chat template or a grader raises."""
    collected = collect(cohort.engine, asked)
    groups = require_graded(collected.groups)
    seconds = {name: sum(end - begin for span, begin, end in collected.spans if span == name) for name in WAITS}
    each = seconds["score"] / max(1, sum(len(group.rollouts) for group in groups))
    graded = [([one.reward for one in group.rollouts], [each] * len(group.rollouts)) for group in groups]
    talks = [[_told(rollout) for rollout in group.rollouts] for group in groups]
    return [group.prompt for group in groups], talks, graded, seconds["rollout"]


def _told(rollout: Rollout) -> Action:
    """An episode as one text: what the model said, and between, indented, what it read."""
    lines = []
    for index, turn in enumerate(rollout.turns):
        if index:
            for message in turn.messages:
                who = " ".join(filter(None, (message["role"], message.get("name"))))
                lines.append(indent(f"[{who}] {message['content']}", "    "))
        lines.append(turn.action.text)
    ended = "" if rollout.ended == "done" else f"\n[ended by {rollout.ended}]"
    return Action(rollout.token_ids, "\n".join(lines) + ended, rollout.logprobs_T, None, rollout.stop_reason)


def _grade(grader: Grader, prompts: Sequence[Prompt], sampled: Sequence[Sequence[Action]]) -> list[Graded]:
    """Every answer graded by itself; without one grade in ``PATIENCE_S`` seconds the rest is not tried."""
    graded: list[Graded] = []
    spent, any_grade = 0.0, False
    for prompt, completions in zip(prompts, sampled, strict=True):
        results, seconds = [], []
        for completion in completions:
            if spent > PATIENCE_S and not any_grade:
                results.append(failed(f"not tried: no grade in {spent:.0f} s"))
                seconds.append(float("nan"))
                continue
            begin = time.perf_counter()
            try:
                text = CompletionText(completion.text, completion.token_ids)
                (result,) = grader.grade([(prompt.problem, text)])
            except Exception as error:  # in training it would end the run
                result = failed(described(error))
            seconds.append(time.perf_counter() - begin)
            spent += seconds[-1]
            any_grade = any_grade or result.total_reward is not None
            results.append(replace(result, error=without_keys(result.error)) if result.error else result)
        graded.append((results, seconds))
    return graded


def _graded(completion: Action, result: RewardResult, seconds: float) -> dict[str, Any]:
    return answer(completion) | {
        "reward": result.total_reward,
        "components": dict(result.components),
        "sample_metrics": dict(result.sample_metrics),
        "tags": list(result.tags),
        "correct": None if result.total_reward is None else result.is_correct,
        "format_ok": result.format_ok,
        "error": result.error,
        **({"audit_error": result.audit_error} if result.audit_error else {}),
        "seconds": seconds,
    }


def _sampling(run: Run, sampled: Sequence[Sequence[Action]], seconds: float) -> dict[str, Any]:
    """``step_seconds``: at least as long as these answers took, at most in proportion to their number."""
    training = run.config.training
    answers, step = sum(map(len, sampled)), training.batch_size * training.group_size
    ends = sorted((seconds, seconds * step / answers))
    return {
        "answers": answers,
        "tokens": sum(len(each) for group in sampled for each in group),
        "seconds": seconds,
        "step_answers": step,
        "step_seconds": [ends[0], ends[1]],
    }


def _grading(run: Run, graded: Sequence[Graded]) -> dict[str, Any]:
    """``step_seconds``: all answers of a step at these seconds each, as many at once as the reward has workers.

    The first answer waits for the workers to start and is left out of the mean where there are others.
    """
    times = [each for _, seconds in graded for each in seconds if each == each]
    usual = times[1:] or times
    reward, training = run.config.reward, run.config.training
    pooled = any(kind in POOLED for kind in (reward.type, *(part.type for part in reward.components)))
    workers, step = (reward.workers if pooled else 1), training.batch_size * training.group_size
    mean = sum(usual) / len(usual)
    return {
        "graded": len(times),
        "failed": sum(result.total_reward is None for results, _ in graded for result in results),
        "first_seconds": times[0],
        "mean_seconds": mean,
        "slowest_seconds": max(times),
        "timeout_s": reward.timeout_s if pooled else None,
        "workers": workers,
        "step_answers": step,
        "step_seconds": ceil(step / workers) * mean,
    }


def _verdict(run: Run, sampled: Sequence[Sequence[Action]], graded: Sequence[Sequence[RewardResult]]) -> dict[str, Any]:
    """What it comes to: mean reward, right answers, groups with something to learn from, and the reasons of failures,
    the most frequent first."""
    results = [result for group in graded for result in group]
    totals = [[r.total_reward for r in group if r.total_reward is not None] for group in graded]
    known = [total for group in totals for total in group]
    errors = [result.error or "no reason given" for result in results if result.total_reward is None]
    return {
        "answers": len(results),
        "mean_reward": sum(known) / len(known) if known else None,
        "correct": sum(result.is_correct for result in results),
        "groups": len(totals),
        "mixed_groups": sum(bool(group) and max(group) - min(group) > EQUAL_REWARDS for group in totals),
        "truncated": sum(each.stop_reason == "length" for group in sampled for each in group),
        "max_tokens": run.config.training.max_tokens,
        "all_failed": not known,
        "reasons": {error: errors.count(error) for error in sorted(set(errors), key=lambda e: -errors.count(e))},
    }
