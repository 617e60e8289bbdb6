"""What is probed: rollouts of a point, credited under every condition by the functions that training uses.

Rollouts are those of the steps that training would take from here: the same problems in the same order, the same random
streams. Conditions that sample alike share them; one that has another group size, batch size or sampling has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from retrain.algorithms.protocol import Credit
from retrain.data.prompts import Renderer
from retrain.engines.protocol import Engine
from retrain.maths.advantages import rloo
from retrain.policy.local import LocalPolicy
from retrain.policy.objective import Objective, PolicyTerm
from retrain.policy.protocol import Denominators, TrainBatch, samples_of
from retrain.rollouts.collect import Collected, RolloutRequest, collect
from retrain.rollouts.dynamic import Wanted, collect_rounds
from retrain.run import Run
from retrain.types import Group, Rollout

AT_ONCE = 4
"""Batches that are sampled together, between two lines of progress."""
PARTS = 16
"""Independent gradients of held-out success at most; the problems are dealt out to them."""

Tell = Callable[[str], None]


def sampling_key(run: Run) -> tuple[Any, ...]:
    """Runs with the same key sample, and grade, the same rollouts at the same weights."""
    training, environment = run.config.training, repr(run.config.environment)
    sizes = training.batch_size, training.group_size, training.dynamic_sampling
    return *sizes, training.sampling.requested, run.config.reward.grading, environment


def sample_batches(engine: Engine, run: Run, batches: int, tell: Tell) -> list[list[Group]]:
    """The graded rollouts of so many steps from where the run is, all by its present weights. Raises RunFailed with
    what a grader or the chat template raises."""
    run.publish_to(engine)
    found: list[list[Group]] = []
    for start in range(0, batches, AT_ONCE):
        steps = range(run.step + start, run.step + min(start + AT_ONCE, batches))
        asked = [Wanted(step, run.requests_of(step), run.further) for step in steps]
        collect_rounds(engine, asked)
        own = [Collected(each.groups, []).graded() for each in asked]
        found += [run.dynamic.choose(groups).groups if run.dynamic else groups for groups in own]
        tell(f"sampled {len(found)} of {batches} batches")
    return found


def sample_heldout(engine: Engine, run: Run, problems: int, samples: int, skip: int) -> list[Group]:
    """Graded rollouts of held-out problems, sampled as in training; without a held-out set, of training problems that
    come ``skip`` problems later."""
    held_out = run.config.decisive
    if held_out is None:
        environment, renderer, asked = run.environments["train"], run.renderer, run.cursor.ahead(skip, problems)
    else:
        environment = run.environments[held_out.name]
        renderer = Renderer(run.renderer.tokenizer, held_out.data, run.renderer.tools_prompt)
        asked = environment.problems(held_out.name)[:problems]
    training = run.config.training
    requests = [
        RolloutRequest(
            environment,
            renderer,
            problem,
            run.policy_ref,
            samples,
            training.sampling.requested,
            (*run.stream, "probe", run.step, i),
            run.limits,
        )
        for i, problem in enumerate(asked)
    ]
    run.publish_to(engine)
    return collect(engine, requests).graded()


@dataclass(frozen=True)
class Credited:
    """One batch under one condition: copies of its groups that share what was sampled, and the divisors."""

    groups: list[Group]
    credit: Credit

    @property
    def rollouts(self) -> list[Rollout]:
        """All of them, in order."""
        return [rollout for group in self.groups for rollout in group.rollouts]


def credited(run: Run, groups: Sequence[Group], step: int, state: dict[str, Any]) -> Credited:
    """The batch as ``run`` credits it at ``step``, its algorithm in ``state``. ``groups`` are left as they are."""
    own = [Group(group.prompt, [_uncredited(rollout) for rollout in group.rollouts]) for group in groups]
    run.algorithm.restore(state)
    before, run.step = run.step, step
    try:
        return Credited(own, run.credit(own))
    finally:
        run.step = before
        run.algorithm.restore(state)


def _uncredited(rollout: Rollout) -> Rollout:
    return replace(
        rollout,
        advantage=float("nan"),
        turn_advantages=None,
        planning_T=None,
        token_advantages_T=None,
        loss_mask_T=None,
        old_logprobs_T=None,
        policy_weights_T=None,
        values_T=None,
        value_targets_T=None,
    )


def gradient_of(run: Run, batch: Credited, step: int) -> torch.Tensor:
    """What the run's optimizer would be given for this batch, [D]; of several updates the first, of the whole batch."""
    assert isinstance(run.policy, LocalPolicy)
    samples = samples_of(batch.groups)
    return run.policy.gradient(TrainBatch(samples, batch.credit.denominators, step, run.stream), run.objective)


def open_gate(state: dict[str, Any]) -> dict[str, Any]:
    """The algorithm's state as if its gate had been open from the start: a schedule that waits for success would
    otherwise make the condition look like the one without it."""
    sepa = state.get("sepa")
    if not isinstance(sepa, dict) or sepa.get("opened_at") is not None:
        return state
    return {**state, "sepa": {**sepa, "opened_at": 0}}


def success_gradients(run: Run, groups: Sequence[Group], parts: int = PARTS) -> list[torch.Tensor]:
    """Independent unbiased estimates of −∇ of the success rate, one for each part of the problems, [D] each.

    REINFORCE with a leave-one-out baseline: Σ over the rollouts of a problem of (r − mean of the others)·∇log π,
    divided by their number, r being 1 for a correct one and 0 otherwise.
    """
    assert isinstance(run.policy, LocalPolicy)
    objective = Objective((PolicyTerm(loss="reinforce"),), "constant", run.config.training.temperature, max_tokens=1)
    found = []
    count = min(parts, len(groups))
    for part in range(count):
        own, rated = list[Group](), 0
        for group in groups[part::count]:
            graded = [_uncredited(one) for one in group.rollouts if one.reward.total_reward is not None]
            if len(graded) < 2:
                continue
            advantages_N = rloo(torch.tensor([float(one.reward.is_correct) for one in graded])).tolist()
            for rollout, advantage in zip(graded, advantages_N, strict=True):
                rollout.token_advantages_T = np.full(len(rollout), advantage)
            own.append(Group(group.prompt, graded))
            rated += len(graded)
        tokens = sum(len(rollout) for group in own for rollout in group.rollouts)
        batch = TrainBatch(samples_of(own), Denominators(tokens, rated), run.step, (*run.stream, "probe"))
        found.append(run.policy.gradient(batch, objective))
    return found


def uniform(groups: Sequence[Group]) -> bool:
    """Whether no group has rewards that differ: nothing to learn from."""
    rewards = [group.rewards_N[np.isfinite(group.rewards_N)] for group in groups]
    return not any(len(each) and each.max() - each.min() > 1e-8 for each in rewards)
