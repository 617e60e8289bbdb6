"""Recorded rollouts as the groups that they were when the run trained on them, before credit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.errors import UsageError
from retrain.policy.protocol import Want, samples_of
from retrain.probe.recorded import Recorded
from retrain.record.tokens import RolloutTokens, TokenFile
from retrain.run import Run
from retrain.tokenizer import Tokenizer
from retrain.types import TOO_OLD, Action, Group, Problem, Prompt, RewardResult, Rollout, Turn


def recorded_batches(recorded: Recorded, steps: Sequence[int], run: Run) -> list[list[Group]]:
    """The batches of these steps, of the problems of ``run``. Groups that were too old to train are left out, as they
    were then. Raises UsageError for a problem that the run does not have, and for log-probabilities that are none."""
    problems = {problem.id: problem for problem in run.cursor.problems}
    text = Tokenizer(run.renderer.tokenizer)
    return [_batch(recorded, step, problems, text) for step in steps]


def _batch(recorded: Recorded, step: int, problems: Mapping[str, Problem], text: Tokenizer) -> list[Group]:
    groups: dict[int, Group] = {}
    with TokenFile(recorded.path(step)) as file:
        for index in range(len(file)):
            one = file.rollout(index)
            if not np.isfinite(one.arrays["logprobs"]).all():
                raise UsageError(f"{recorded.typed}: step {step} has tokens without the sampler's log-probability")
            if one.line["discarded"] == TOO_OLD:
                continue
            number = one.line["group"]
            if number not in groups:
                problem = problems.get(one.prompt["problem_id"])
                if problem is None or problem.answer != one.prompt["reference"]:
                    raise UsageError(
                        f"{recorded.typed}: step {step} asked {one.prompt['problem_id']}, which the training problems "
                        "of this file do not have with that answer"
                    )
                groups[number] = Group(_prompt(one, problem, text), [])
            groups[number].rollouts.append(_rollout(one, groups[number].prompt))
    return list(groups.values())


def _prompt(one: RolloutTokens, problem: Problem, text: Tokenizer) -> Prompt:
    """What the first rollout of a group read first; one that could not begin has read nothing."""
    read = one.line["turns"][0]["read"] if one.line["turns"] else 0
    ids = tuple(int(token) for token in one.arrays["ids"][:read])
    return Prompt(problem, text.decode(ids), ids, tuple(one.prompt["messages"]))


def _rollout(one: RolloutTokens, prompt: Prompt) -> Rollout:
    line, arrays = one.line, one.arrays
    turns, at, sampled = list[Turn](), 0, 0
    for turn in line["turns"]:
        begin, end = at + turn["read"], at + turn["read"] + turn["tokens"]
        own = slice(sampled, sampled + turn["tokens"])
        entropy_T, versions_T = arrays.get("entropy"), arrays["versions"][own]
        action = Action(
            token_ids=arrays["ids"][begin:end].tolist(),
            text=turn["text"],
            logprobs_T=arrays["logprobs"][own].astype(np.float64),
            entropy_T=None if entropy_T is None else entropy_T[own].astype(np.float64),
            stop_reason=turn["stop_reason"],
            policy_version=int(versions_T[0]) if len(versions_T) else 0,
        )
        observation = tuple(int(token) for token in arrays["ids"][at:begin])
        messages = prompt.messages if not turns and not turn["messages"] else tuple(turn["messages"])
        said = turn["metrics"], turn["logs"]
        turns.append(Turn(observation, action, messages, turn.get("fresh", False), turn["reward"], *said))
        at, sampled = end, own.stop
    return Rollout(prompt, turns, _reward(line), line["ended"], age=line["age"])


def _reward(line: Mapping[str, Any]) -> RewardResult:
    numbers = {name: value for name, value in line["metrics"].items() if name not in ("correct", "format")}
    return RewardResult(line["reward"], numbers, correct=line["correct"], error=line["error"])


def distance(run: Run, batches: Sequence[Sequence[Group]]) -> dict[str, float]:
    """How far the run's weights, as they are, lie from those that sampled these rollouts: ``k3`` of a token, in nats,
    the largest of any batch, and the mean importance ratio."""
    means, largest, ratios, counts = list[float](), 0.0, list[float](), list[int]()
    for groups in batches:
        found = run.policy.score(samples_of(groups, every=True), frozenset({Want.LOGPROBS})).of_rollouts(groups)
        assert found.logprobs is not None, "a policy gives what it is asked for"
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        log_ratio_N = np.concatenate(
            [np.zeros(0), *(own - one.logprobs_T for own, one in zip(found.logprobs, rollouts, strict=True))]
        )
        if len(log_ratio_N):
            ratio_N = np.exp(log_ratio_N)
            means.append(float((ratio_N - 1 - log_ratio_N).mean()))
            ratios.append(float(ratio_N.mean()))
            counts.append(len(log_ratio_N))
            largest = max(largest, means[-1])
    if not counts:
        return {"k3": 0.0, "k3_most": 0.0, "ratio": 1.0}
    mean, ratio = (float(np.average(each, weights=counts)) for each in (means, ratios))
    return {"k3": mean, "k3_most": largest, "ratio": ratio}
