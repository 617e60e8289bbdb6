"""Sample answers of a trained adapter and its base, and sample and grade answers before training.

Adapter and base read the same prompts and draw the same random numbers, in one batch. Before training, answers are
graded one after the other, to time each.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from retrain.adapters.export import uniform
from retrain.adapters.provenance import Provenance
from retrain.config import Config
from retrain.config.evaluation import HELDOUT, EvaluationSet
from retrain.data.prompts import Renderer, conversation, render
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import Engine
from retrain.engines.server.engine import ServerEngine, server_engine
from retrain.environments.build import SplitEnvironment
from retrain.environments.protocol import Environment
from retrain.errors import ModelError, UsageError
from retrain.plugins import described
from retrain.policy.adapter_io import AdapterFile
from retrain.policy.base import BaseModel, workers_for
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Adapter, Lanes
from retrain.records.measure import EQUAL_REWARDS
from retrain.records.schema.base import Row
from retrain.rewards import Grader
from retrain.rewards.base import CompletionText, failed
from retrain.rollouts.collect import RolloutRequest, collect, require_graded
from retrain.types import Action, PolicyRef, Problem, Prompt, RewardResult, Rollout, SampleRequest
from retrain.util.text import without_keys


def answers(
    source: Provenance,
    prompts: Sequence[str],
    *,
    samples: int,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    notify: Callable[[str], None] = lambda line: None,
) -> Row:
    """Sample every prompt with the adapter and with its base; sample k of both draws the same random numbers.

    Prompts go through the system prompt, prompt template and chat template of the run; temperature and max_tokens are
    by default those of its held-out evaluation. Returns adapter, base, temperature, max_tokens, seed and ``prompts``,
    each {prompt, rendered, tokens, base: [{text, tokens, stop}], adapter: [...]}. Raises RetrainError when the model
    or adapter cannot be loaded, or a prompt is too long for it.
    """
    config = source.config
    given = {"max_tokens": max_tokens, "temperature": temperature}
    defaults = config.resolved(EvaluationSet(name=HELDOUT)).sampling
    defaults = replace(defaults, **{key: value for key, value in given.items() if value is not None}).requested
    with ExitStack() as stack:
        base = source.load(config.backend.device, config.inference.dtype)
        if changed := source.other_weights(base):
            notify(changed)
        with AdapterFile(source.adapter) as file:
            file.require_plain()
            lanes = Lanes(base, _layers(file, base))
            stack.callback(lanes.detach)
            adapters = [lanes.new_adapter(1, 1.0), lane_adapter(file, lanes)]  # an adapter of zeros equals the base
        engine = _engine(config, base, lanes, stack, notify)
        refs = [PolicyRef("base", 0), PolicyRef("adapter", 0)]
        for ref, adapter in zip(refs, adapters, strict=True):
            engine.publish(ref, LocalSnapshot(adapter.frozen()))
        rendered = [render(Problem(f"prompt {i + 1}", text, ""), base.tokenizer, config.data)
                    for i, text in enumerate(prompts)]  # fmt: skip
        requests = [
            SampleRequest(ref, prompt.token_ids, samples, stream=(seed, "talk", i), **vars(defaults))
            for ref in refs
            for i, prompt in enumerate(rendered)
        ]
        sampled = engine.sample(requests)
    count = len(rendered)
    return {
        "adapter": str(source.adapter),
        "base": source.base,
        "temperature": defaults.temperature,
        "max_tokens": defaults.max_tokens,
        "seed": seed,
        "prompts": [
            {
                "prompt": text,
                "rendered": as_read(prompt, base.tokenizer),
                "tokens": len(prompt.token_ids),
                "base": [answer(each) for each in sampled[i]],
                "adapter": [answer(each) for each in sampled[count + i]],
            }
            for i, (text, prompt) in enumerate(zip(prompts, rendered, strict=True))
        ],
    }


def _engine(
    config: Config, base: BaseModel, lanes: Lanes, stack: ExitStack, notify: Callable[[str], None]
) -> LocalEngine | ServerEngine:
    """Return the engine of ``[inference] url`` if its servers answer, else an engine in this process. Servers of
    ``[inference] launch`` are not started."""
    if config.inference.url:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="retrain-sample-")))
        try:
            served = server_engine(config, base, directory, lambda text, level: notify(text))
            stack.callback(served.close)
            return served
        except UsageError as error:
            notify(f"{error}\nThe answers are sampled in this process instead.")
    workers = workers_for(base)
    stack.callback(workers.close)
    return LocalEngine(base, lanes, workers=workers, notify=notify)


def as_read(prompt: Prompt, tokenizer: Any) -> str:
    return tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)


def answer(completion: Action) -> Row:
    return {"text": completion.text, "tokens": len(completion), "stop": completion.stop_reason}


def _layers(file: AdapterFile, base: BaseModel) -> list[str]:
    layers = dict(base.model.named_modules())
    for name, where in file.modules.items():
        weight = getattr(layers.get(name), "weight", None)
        if weight is None or tuple(weight.shape) != (where.b_shape[0], where.a_shape[1]):
            raise ModelError(
                f"{file.directory} adapts {name}, which is not a linear layer of that size in {base.name}: "
                "give the right base with --base"
            )
    return list(file.modules)


def lane_adapter(file: AdapterFile, lanes: Lanes, rank: int = 1) -> Adapter:
    """Return the adapter of a file on these lanes, padded with zeros to ``rank`` if its own is smaller."""
    rank = max(rank, file.rank)
    scale, pairs = uniform(file, rank)
    adapter = lanes.new_adapter(rank, scale * rank)
    adapter.load(dict(pairs))
    return adapter


WAITS = ("rollout", "score")
PATIENCE_S = 30.0  # Seconds without a single grade after which the remaining answers are skipped
POOLED = ("math", "judge", "custom")  # Rewards that grade several answers at once, `[reward] workers` of them


# Results of one prompt's answers, and the seconds of each; NaN for one that was not graded
Graded = tuple[list[RewardResult], list[float]]
# Prompts, their answers with grades, and the seconds of sampling
Tried = tuple[list[Prompt], list[list[Action]], list[Graded], float]


def trial_report(
    engine: Engine, requests: Sequence[RolloutRequest], environment: Environment, renderer: Renderer, config: Config
) -> Row:
    """Sample and grade the answers to ``requests`` of one run.

    Returns ``prompts`` (each with its answers and grades), ``sampling`` and ``grading`` (counts and seconds,
    extrapolated to a step) and ``verdict``.
    """
    if isinstance(environment, SplitEnvironment) and environment.host is None and environment.grader is not None:
        prompts, sampled, graded, sampling_s = _answers(engine, requests, environment.grader, renderer, config)
    else:
        prompts, sampled, graded, sampling_s = _episodes(engine, requests)
    return {
        "prompts": [
            {
                "id": prompt.problem.id,
                "rendered": as_read(prompt, renderer.tokenizer),
                "tokens": len(prompt.token_ids),
                "answer": prompt.problem.answer,
                "samples": [_graded(*each) for each in zip(sampled[i], *graded[i], strict=True)],
            }
            for i, prompt in enumerate(prompts)
        ],
        "sampling": _sampling(config, sampled, sampling_s),
        "grading": _grading(config, graded),
        "verdict": _verdict(config, sampled, [results for results, _ in graded]),
    }


def _answers(
    engine: Engine, requests: Sequence[RolloutRequest], grader: Grader, renderer: Renderer, config: Config
) -> Tried:
    prompts = [renderer.prompt(each.problem, conversation(each.problem, config.data)) for each in requests]
    begin = time.perf_counter()
    sampled = engine.sample(
        [
            SampleRequest(each.policy, prompt.token_ids, each.samples, stream=each.stream, **asdict(each.sampling))
            for each, prompt in zip(requests, prompts, strict=True)
        ]
    )
    seconds = time.perf_counter() - begin
    return prompts, sampled, _grade(grader, prompts, sampled), seconds


def _episodes(engine: Engine, requests: Sequence[RolloutRequest]) -> Tried:
    """Sample and grade whole episodes. Every episode gets the mean of the grading seconds. Raises RunFailed for
    exceptions of the chat template or a grader."""
    collected = collect(engine, requests)
    groups = require_graded(collected.groups)
    seconds = {name: sum(end - begin for span, begin, end in collected.spans if span == name) for name in WAITS}
    each = seconds["score"] / max(1, sum(len(group.rollouts) for group in groups))
    graded = [([one.reward for one in group.rollouts], [each] * len(group.rollouts)) for group in groups]
    talks = [[_as_text(rollout) for rollout in group.rollouts] for group in groups]
    return [group.prompt for group in groups], talks, graded, seconds["rollout"]


def _as_text(rollout: Rollout) -> Action:
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
            except Exception as error:  # in training this error would end the run
                result = failed(described(error))
            seconds.append(time.perf_counter() - begin)
            spent += seconds[-1]
            any_grade = any_grade or result.total_reward is not None
            results.append(replace(result, error=without_keys(result.error)) if result.error else result)
        graded.append((results, seconds))
    return graded


def _graded(completion: Action, result: RewardResult, seconds: float) -> Row:
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


def _sampling(config: Config, sampled: Sequence[Sequence[Action]], seconds: float) -> Row:
    """Return counts and seconds of sampling. ``step_seconds`` bounds the seconds of a training step: one bound is the
    time of these answers, the other is this time scaled to the step's number of answers."""
    training = config.training
    answers, step = sum(map(len, sampled)), training.batch_size * training.group_size
    ends = sorted((seconds, seconds * step / answers))
    return {
        "answers": answers,
        "tokens": sum(len(each) for group in sampled for each in group),
        "seconds": seconds,
        "step_answers": step,
        "step_seconds": [ends[0], ends[1]],
    }


def _grading(config: Config, graded: Sequence[Graded]) -> Row:
    """Return counts and seconds of grading. ``step_seconds`` is the time for all answers of a training step, graded by
    as many workers as the reward has. The mean leaves out the first answer, which waits for workers to start, unless it
    is the only one."""
    times = [each for _, seconds in graded for each in seconds if each == each]
    usual = times[1:] or times
    reward, training = config.reward, config.training
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


def _verdict(config: Config, sampled: Sequence[Sequence[Action]], graded: Sequence[Sequence[RewardResult]]) -> Row:
    results = [result for group in graded for result in group]
    rewards = _rewards(results)
    failures = Counter(result.error or "no reason given" for result in results if result.total_reward is None)
    return {
        "answers": len(results),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "correct": sum(result.is_correct for result in results),
        "groups": len(graded),
        "mixed_groups": sum(_spread(_rewards(group)) > EQUAL_REWARDS for group in graded),
        "truncated": sum(each.stop_reason == "length" for group in sampled for each in group),
        "max_tokens": config.training.max_tokens,
        "all_failed": not rewards,
        "reasons": dict(failures.most_common()),
    }


def _rewards(results: Sequence[RewardResult]) -> list[float]:
    return [result.total_reward for result in results if result.total_reward is not None]


def _spread(rewards: Sequence[float]) -> float:
    return max(rewards) - min(rewards) if rewards else 0.0
