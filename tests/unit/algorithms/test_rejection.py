"""What is left out of the policy loss for a whole step: weights, divisors, and that nothing else moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toymodels import train_quietly

from retrain.algorithms.protocol import Credit
from retrain.algorithms.rejection import leave_out_anew, reject
from retrain.config import parse_dict
from retrain.config.modes import Need
from retrain.errors import ConfigError
from retrain.maths.corrections import Correction
from retrain.policy.logprobs import MicroBatch
from retrain.policy.objective import KLTerm, Objective, PolicyTerm, TokenScores
from retrain.policy.protocol import Denominators, Scores, TrainBatch, Want
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Sample, Turn, samples_of_rollout

W = ([1.0, 1.0], [1.5, 0.4, 2.5], [1.01])
"""The ratios of three completions: on policy, far away, nearly on policy."""


def step(ratios=W, advantages=(1.0, -1.0, 1.0)) -> tuple[list[Group], Credit, Scores]:
    """Three groups of one rollout, as credited, and what the trainer says of them."""
    groups = []
    for own, advantage in zip(ratios, advantages, strict=True):
        prompt = Prompt(Problem("0", "1 + 1", "2"), "1 + 1", (1, 2))
        action = Action([7] * len(own), "", np.full(len(own), -1.0), None, "stop")
        rollout = Rollout(prompt, [Turn(prompt.token_ids, action)], RewardResult(1.0), advantage=advantage)
        rollout.token_advantages_T = np.full(len(own), advantage)
        rollout.loss_mask_T = np.ones(len(own), dtype=bool)
        groups.append(Group(prompt, [rollout]))
    rollouts = [group.rollouts[0] for group in groups]
    total = sum(map(len, rollouts))
    credit = Credit(
        Denominators(total, len(rollouts), action_tokens=total), {"some": 1.0}, {r: len(r) for r in rollouts}
    )
    return groups, credit, Scores(logprobs=[np.log(own) - 1.0 for own in map(np.array, ratios)])


def weights(groups: list[Group]) -> list[list[float] | None]:
    kept = [group.rollouts[0].policy_weights_T for group in groups]
    return [None if each is None else each.tolist() for each in kept]


def rejected(**algorithm) -> tuple[list[Group], Credit]:
    groups, credit, scores = step()
    return groups, reject(groups, credit, parse_dict({"algorithm": algorithm}).algorithm, scores)


def test_nothing_is_touched_where_nothing_is_rejected():
    for algorithm in ({}, {"correction": "icepop"}, {"loss": "dppo"}):
        groups, credit, _ = step()
        section = parse_dict({"algorithm": algorithm}).algorithm
        assert reject(groups, credit, section, None) is credit  # and no log-probabilities are needed
        assert weights(groups) == [None, None, None]
        assert Need.LOGPROBS not in section.needs
    groups, credit, scores = step()
    section = parse_dict({"algorithm": {"rejection": "geometric"}}).algorithm
    groups[1].rollouts[0].token_advantages_T = None  # it has no reward
    assert reject(groups, credit, section, scores).metrics["rejected_tokens_frac"] == 0.0
    assert weights(groups)[1] is None


def test_what_is_rejected_weighs_nothing_and_still_counts():
    groups, credit = rejected(rejection="geometric")
    assert weights(groups) == [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]]
    assert credit.denominators == Denominators(6, 3, action_tokens=6)
    assert credit.metrics == {"some": 1.0, "rejected_tokens_frac": 0.5, "rejected_sequences_frac": pytest.approx(1 / 3)}
    assert credit.denominators_of([groups[1].rollouts[0]]).tokens == 3


@pytest.mark.parametrize(
    ("algorithm", "expected", "tokens", "sequences"),
    [
        ({"rejection": "k3"}, [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]], 3, 2),
        ({"correction": "icepop"}, [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0]], 5, 3),
        ({"correction": "mis"}, [[1.0, 1.0], [1.0, 1.0, 0.0], [1.0]], 5, 3),
        ({"correction": "seq_mis", "tis_cap": 1.4}, [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]], 3, 2),
        ({"loss": "m2po", "m2po_threshold": 0.05}, [[1.0, 1.0], [1.0, 0.0, 0.0], [1.0]], 4, 3),
        ({"loss": "m2po", "m2po_tokens": "harmful"}, [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0]], 5, 3),
        ({"rejection": "veto", "rejection_limit": 0.5, "correction": "mis"}, [[1.0, 1.0], [0.0] * 3, [1.0]], 3, 2),
    ],
    ids=str,
)
def test_everything_that_is_left_out_can_leave_the_divisor(algorithm, expected, tokens, sequences):
    groups, credit = rejected(**algorithm, rejection_denominator="kept")
    assert weights(groups) == expected
    assert credit.denominators == Denominators(tokens, sequences, action_tokens=6, kept_tokens=True)
    first = credit.denominators_of([groups[0].rollouts[0]])
    assert (first.tokens, first.sequences, first.action_tokens, first.kept_tokens) == (2, 1, 2, True)


def test_a_rewritten_conversation_is_looked_at_sample_by_sample():
    """Each sample is a sequence of its own: the first is far away, the second is not."""
    groups, credit, scores = step(ratios=([3.0, 1.0, 1.0],), advantages=(1.0,))
    (rollout,) = groups[0].rollouts
    first, second = (Action([7] * n, "", np.full(n, -1.0), None, "stop") for n in (1, 2))
    rollout.turns[:] = [Turn((1, 2), first), Turn((1, 2, 3), second, fresh=True)]
    section = parse_dict({"algorithm": {"rejection": "geometric", "rejection_denominator": "kept"}}).algorithm
    found = reject(groups, credit, section, scores)
    assert rollout.policy_weights_T is not None
    assert rollout.policy_weights_T.tolist() == [0.0, 1.0, 1.0]
    assert (found.denominators.tokens, found.denominators.sequences) == (2, 1)
    assert [sample.policy_weights.tolist() for sample in samples_of_rollout(rollout)] == [[0, 0, 0], [0, 0, 0, 1, 1]]


def table(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def micro_batch(**more) -> MicroBatch:
    mask = torch.ones(1, 3).bool()
    keys = {"action_BT": mask, "loss_mask_BT": mask, "advantages_BT": table(1.0, 1.0, 1.0)}
    return MicroBatch(None, torch.zeros(3), **keys, sampler_logprobs_BT=table(-1.0, -1.0, -1.0), **more)


def test_weights_are_one_more_factor_of_the_policy_loss_alone():
    logprobs = table(-0.9, -1.2, -1.0)
    scores = TokenScores(logprobs, reference_BT=table(-1.1, -1.0, -1.3))
    plain, left_out = micro_batch(), micro_batch(policy_weights_BT=table(1.0, 0.0, 1.0))
    for term in (PolicyTerm("reinforce"), PolicyTerm(correction=Correction("tis", high=1.05))):
        whole, sums = term.per_token(plain, scores)
        some, counted = term.per_token(left_out, scores)
        assert some.tolist() == (whole * table(1.0, 0.0, 1.0)).tolist()
        assert all(torch.equal(sums[key], counted[key]) for key in sums)  # all tokens are compared
    assert torch.equal(KLTerm(0.1).per_token(plain, scores)[0], KLTerm(0.1).per_token(left_out, scores)[0])


@pytest.mark.parametrize(("normalizer", "kept"), [("tokens", 1 / 2), ("sequences", 1 / 2), ("constant", 1 / 8)])
def test_divisors_of_what_is_kept(normalizer, kept):
    batch = micro_batch(policy_weights_BT=table(1.0, 0.0, 1.0))
    objective = Objective((PolicyTerm("m2po"),), normalizer, max_tokens=8)
    scores = TokenScores(table(-1.0, -1.0, -1.0))
    loss, _ = objective.loss(batch, scores, Denominators(2, 1, kept_tokens=True))
    assert float(loss) == pytest.approx(-2 * kept)
    loss, _ = objective.loss(batch, scores, Denominators(3, 1))
    assert float(loss) == pytest.approx(-2 * (kept if normalizer == "constant" else 1 / 3))


RUN = """
[model]
model = "tiny-reasoner"
lora_rank = 4
[training]
max_steps = 3
batch_size = 2
group_size = 4
max_tokens = 24
lr = 5e-3
max_off_policy_steps = 1
num_iterations = 2
[algorithm]
loss = "m2po"
m2po_threshold = """


class Says:
    """A policy of which only what it says now is asked."""

    def __init__(self, logprobs: list[np.ndarray]):
        self.logprobs, self.asked = logprobs, 0

    def score(self, samples, want) -> Scores:
        assert want == {Want.LOGPROBS}
        assert len(samples) == len(self.logprobs)
        self.asked += 1
        return Scores(logprobs=self.logprobs)


@pytest.mark.parametrize(
    ("tokens", "kept"), [("all", [1.0, 1.0, 1.0, 0.0, 1.0]), ("harmful", [1.0, 1.0, 0.0, 0.0, 1.0])]
)
def test_before_each_of_several_updates_the_second_moment_is_that_of_the_policy_then(tokens, kept):
    """The example of the second moment by hand, in two completions, behind two tokens that were read."""
    logs, signs = np.array([0.1, -0.2, 0.3, -0.5, 0.05]), np.array([1.0, 1.0, 1.0, -1.0, -1.0])
    threshold = {"all": 0.04, "harmful": 0.02}[tokens]
    algorithm = parse_dict(
        {"algorithm": {"loss": "m2po", "m2po_threshold": threshold, "m2po_tokens": tokens}}
    ).algorithm
    samples = [
        Sample.single_turn([1, 2], [7] * len(own), np.full(len(own), -1.0), signs[own])
        for own in (np.arange(3), np.arange(3, 5))
    ]
    for sample in samples:
        sample.old_logprobs = sample.logprobs.copy()  # the rollouts are fresh
    policy = Says([logs[:3] - 1.0, logs[3:] - 1.0])
    first, shares = leave_out_anew(TrainBatch(samples, Denominators(5, 2), 0, ()), policy, algorithm)
    assert (policy.asked, shares["rejected_tokens_frac"]) == (0, 0.0)
    second, shares = leave_out_anew(TrainBatch(first.samples, Denominators(5, 2), 0, (), update=1), policy, algorithm)
    given = [sample.policy_weights[sample.action_mask].tolist() for sample in second.samples]
    assert [weight for own in given for weight in own] == kept
    assert shares["rejected_tokens_frac"] == pytest.approx(kept.count(0.0) / 5)
    assert all(sample.policy_weights[:2].tolist() == [0.0, 0.0] for sample in second.samples)
    # What was rejected for another reason stays left out, and what the second update left out may come back.
    samples[0].policy_weights = np.array([0.0, 0.0, 0.0, 1.0, 1.0])
    near = Says([np.full(3, -1.0), np.full(2, -1.0)])
    third, shares = leave_out_anew(TrainBatch(samples, Denominators(5, 2), 0, (), update=2), near, algorithm)
    assert [each.policy_weights[each.action_mask].tolist() for each in third.samples] == [[0.0, 1.0, 1.0], [1.0, 1.0]]
    assert shares == {"rejected_tokens_frac": pytest.approx(0.2), "rejected_sequences_frac": 0.0}


@pytest.mark.parametrize("tokens", ["all", "harmful"])
@pytest.mark.parametrize("apart", [0.0, 3.0])
def test_groups_without_an_advantage_change_nothing_for_the_second_moment(tokens, apart):
    """However near or far the sampler of a uniform group is: with one update, and before each of several."""
    section = {"loss": "m2po", "m2po_threshold": 0.05, "m2po_tokens": tokens}
    algorithm = parse_dict({"algorithm": section}).algorithm
    ratios, advantages = (*W, [math.exp(apart)] * 6), (1.0, -1.0, 1.0, 0.0)
    kept = []
    for count in (3, 4):
        groups, credit, scores = step(ratios[:count], advantages[:count])
        reject(groups, credit, algorithm, scores)
        samples = [
            Sample.single_turn([1], [7] * len(own), np.full(len(own), -1.0), np.full(len(own), advantage))
            for own, advantage in zip(ratios[:count], advantages[:count], strict=True)
        ]
        policy = Says([np.log(own) - 1.0 for own in ratios[:count]])
        batch, _ = leave_out_anew(TrainBatch(samples, Denominators(6, 3), 0, (), update=1), policy, algorithm)
        kept.append((weights(groups), [each.policy_weights[each.action_mask].tolist() for each in batch.samples]))
    for own, more in zip(*kept, strict=True):
        assert any(0.0 in weight for weight in own if weight)
        assert more == [*own, [1.0] * 6]


def test_several_updates_of_a_run_are_bounded(tmp_path):
    """Runs whose rollouts are a step behind: a bound that is reached leaves tokens out and moves other weights."""
    adapters = []
    for threshold in (1e-5, 1e9):
        folder = tmp_path / str(threshold)
        folder.mkdir()
        shares = [
            row["rejected_tokens_frac"] for row in train_quietly(folder, f"{RUN}{threshold}") if row["num_datums"]
        ]
        assert any(0.0 < share < 0.5 for share in shares) == (threshold < 1.0)
        assert threshold < 1.0 or set(shares) == {0.0}
        adapters.append(load_file(folder / "out/final/adapter_model.safetensors"))
    some, free = adapters
    assert any(not torch.allclose(free[key], some[key], rtol=1e-3, atol=1e-4) for key in free)
    with pytest.raises(ConfigError, match=r"rejection_denominator.* before each of the step's several updates"):
        parse_dict({"algorithm": {"loss": "m2po", "rejection_denominator": "kept"}, "training": {"num_iterations": 2}})
