import math

import numpy as np
import pytest

from retrain.algorithms.protocol import Credit
from retrain.algorithms.rejection import leave_out_anew, reject
from retrain.config import parse_dict
from retrain.config.modes import Need
from retrain.errors import ConfigError
from retrain.policy.protocol import Denominators, Scores, TrainBatch, Want
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Sample, Turn, samples_of_rollout

W = ([1.0, 1.0], [1.5, 0.4, 2.5], [1.01])
"""The ratios of three completions: on policy, far away, nearly on policy."""


def section(**keys):
    return parse_dict({"algorithm": keys}).algorithm


def step(ratios=W, advantages=(1.0, -1.0, 1.0)) -> tuple[list[Group], Credit, Scores]:
    """Three groups of one rollout, as credited, and the trainer's log-probabilities."""
    groups = []
    for own, advantage in zip(ratios, advantages, strict=True):
        prompt = Prompt(Problem("0", "1 + 1", "2"), "1 + 1", (1, 2))
        action = Action([7] * len(own), "", np.full(len(own), -1.0), None, "stop")
        rollout = Rollout(prompt, [Turn(prompt.token_ids, action)], RewardResult(1.0), advantage=advantage)
        rollout.token_advantages_T = np.full(len(own), advantage)
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


def rejected(ratios=W, **algorithm) -> tuple[list[Group], Credit]:
    groups, credit, scores = step(ratios, [1.0, -1.0, 1.0, 1.0][: len(ratios)])
    return groups, reject(groups, credit, section(**algorithm), scores)


def test_nothing_changes_where_nothing_is_rejected():
    for algorithm in ({}, {"correction": "icepop"}, {"loss": "dppo"}):
        groups, credit, _ = step()
        assert reject(groups, credit, section(**algorithm), None) is credit  # and no log-probabilities are needed
        assert weights(groups) == [None, None, None]
        assert Need.LOGPROBS not in section(**algorithm).needs
    groups, credit, scores = step()
    assert reject(groups, credit, section(loss="m2po", m2po_threshold=1e-9), None, several=True) is credit
    geometric = section(rejection="geometric")
    assert reject([], credit, geometric, None) is credit
    with pytest.raises(ValueError, match="zip"):
        reject(groups[:2], credit, geometric, scores)
    groups[1].rollouts[0].token_advantages_T = None  # it has no reward
    assert reject(groups, credit, geometric, scores).metrics["rejected_tokens_frac"] == 0.0
    assert weights(groups)[1] is None
    for group in groups:
        group.rollouts[0].token_advantages_T = None
    assert reject(groups, credit, geometric, scores) is credit
    assert weights(groups) == [None, None, None]


@pytest.mark.parametrize("more", [{}, {"correction": "mis"}, {"loss": "m2po", "m2po_threshold": 100.0}])
def test_what_is_rejected_weighs_nothing_and_still_counts(more):
    groups, credit = rejected(rejection="geometric", **more)
    assert weights(groups) == [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]]
    assert credit.denominators == Denominators(6, 3, action_tokens=6)
    assert credit.metrics == {"some": 1.0, "rejected_tokens_frac": 0.5, "rejected_sequences_frac": pytest.approx(1 / 3)}
    assert credit.denominators_of([groups[1].rollouts[0]]).tokens == 3


def test_with_several_updates_m2po_is_left_to_each_of_them():
    groups, credit, scores = step()
    algorithm = section(loss="m2po", m2po_threshold=1e-9, rejection="geometric", rejection_denominator="all")
    found = reject(groups, credit, algorithm, scores, several=True)
    assert weights(groups) == [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]]  # by the completion's ratio alone
    assert found.metrics == {"some": 1.0}


def test_shares_of_single_tokens_and_of_completions_without_tokens():
    _, credit = rejected([[4.0]], rejection="geometric")
    assert (credit.metrics["rejected_tokens_frac"], credit.metrics["rejected_sequences_frac"]) == (1.0, 1.0)
    groups, credit = rejected([[4.0, 4.0], [], [1.0]], rejection="geometric")
    assert weights(groups) == [[0.0, 0.0], [], [1.0]]
    assert credit.metrics["rejected_tokens_frac"] == pytest.approx(2 / 3)
    assert credit.metrics["rejected_sequences_frac"] == pytest.approx(1 / 3)


def test_ratios_are_compared_in_double_precision():
    groups, _ = rejected([[0.5 + 1e-9], [0.5 - 1e-9]], rejection="veto", rejection_limit=0.5)
    assert weights(groups) == [[1.0], [0.0]]


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
    assert credit.denominators_of([groups[0].rollouts[0]]) == Denominators(2, 1, action_tokens=2, kept_tokens=True)


def test_tokens_that_do_not_train_are_not_in_the_divisor():
    groups, credit, scores = step()
    groups[0].rollouts[0].loss_mask_T = np.array([True, False])
    groups[2].rollouts[0].loss_mask_T = np.array([False])
    algorithm = section(rejection="geometric", rejection_denominator="kept")
    found = reject(groups, credit, algorithm, scores)
    assert found.denominators == Denominators(1, 1, action_tokens=6, kept_tokens=True)


def test_a_rewritten_conversation_is_looked_at_sample_by_sample():
    groups, credit, scores = step(ratios=([3.0, 1.0, 1.0],), advantages=(1.0,))
    (rollout,) = groups[0].rollouts
    first, second = (Action([7] * n, "", np.full(n, -1.0), None, "stop") for n in (1, 2))
    rollout.turns[:] = [Turn((1, 2), first), Turn((1, 2, 3), second, fresh=True)]
    found = reject(groups, credit, section(rejection="geometric", rejection_denominator="kept"), scores)
    assert rollout.policy_weights_T is not None
    assert rollout.policy_weights_T.tolist() == [0.0, 1.0, 1.0]
    assert (found.denominators.tokens, found.denominators.sequences) == (2, 1)
    assert [sample.policy_weights.tolist() for sample in samples_of_rollout(rollout)] == [[0, 0, 0], [0, 0, 0, 1, 1]]


class FixedScores:
    def __init__(self, logprobs: list[np.ndarray]):
        self.logprobs, self.calls = logprobs, 0

    def score(self, samples, want) -> Scores:
        assert want == {Want.LOGPROBS}
        self.calls += 1
        return Scores(logprobs=self.logprobs)


def samples_with(advantages: list) -> list[Sample]:
    return [
        Sample.single_turn([1, 2], [7] * len(own), np.full(len(own), -1.0), np.array(own, dtype=float))
        for own in advantages
    ]


def update(samples: list[Sample], number: int, logprobs: list, algorithm) -> tuple[list[list[float]], dict, int]:
    """The weights of the sampled tokens in this update, the shares, and how often the policy was asked."""
    policy = FixedScores(logprobs)
    batch, shares = leave_out_anew(TrainBatch(samples, Denominators(5, 2), 0, (), update=number), policy, algorithm)
    assert not any(sample.policy_weights[~sample.action_mask].any() for sample in batch.samples)
    return [sample.policy_weights[sample.action_mask].tolist() for sample in batch.samples], shares, policy.calls


@pytest.mark.parametrize(
    ("tokens", "threshold", "kept"),
    [("all", 0.04, [[1.0, 1.0, 1.0], [0.0, 1.0]]), ("harmful", 0.02, [[1.0, 1.0, 0.0], [0.0, 1.0]])],
)
def test_before_each_of_several_updates_the_second_moment_is_that_of_the_policy_then(tokens, threshold, kept):
    """The example of the second moment by hand, in two completions, behind two tokens that were read."""
    algorithm = section(loss="m2po", m2po_threshold=threshold, m2po_tokens=tokens)
    samples = samples_with([[1, 1, 1], [-1, -1]])
    far = [np.array([0.1, -0.2, 0.3]) - 1.0, np.array([-0.5, 0.05]) - 1.0]
    assert update(samples, 0, far, algorithm)[0::2] == (kept, 1)  # nobody knows the log-probabilities before the update
    for sample in samples:
        sample.old_logprobs = sample.logprobs.copy()  # the rollouts are fresh
    none = {"rejected_tokens_frac": 0.0, "rejected_sequences_frac": 0.0}
    assert update(samples, 0, far, algorithm) == ([[1.0] * 3, [1.0] * 2], none, 0)
    given, shares, calls = update(samples, 1, far, algorithm)
    assert (given, calls) == (kept, 1)
    assert shares["rejected_tokens_frac"] == pytest.approx(sum(own.count(0.0) for own in kept) / 5)
    # What was rejected for another reason stays left out, and what the second update left out may come back.
    samples[0].policy_weights = np.array([0.0, 0.0, 0.0, 1.0, 1.0])
    given, shares, _ = update(samples, 2, [np.full(3, -1.0), np.full(2, -1.0)], algorithm)
    assert given == [[0.0, 1.0, 1.0], [1.0, 1.0]]
    assert shares == none | {"rejected_tokens_frac": pytest.approx(0.2)}
    with pytest.raises(ValueError, match="zip"):
        update(samples, 1, far[:1], algorithm)


@pytest.mark.parametrize("tokens", ["all", "harmful"])
@pytest.mark.parametrize("apart", [0.0, 3.0])
def test_groups_without_an_advantage_change_nothing_for_the_second_moment(tokens, apart):
    algorithm = section(loss="m2po", m2po_threshold=0.05, m2po_tokens=tokens)
    ratios, advantages = (*W, [math.exp(apart)] * 6), (1.0, -1.0, 1.0, 0.0)
    kept = []
    for count in (3, 4):
        groups, credit, scores = step(ratios[:count], advantages[:count])
        reject(groups, credit, algorithm, scores)
        samples = samples_with(
            [[advantage] * len(own) for own, advantage in zip(ratios[:count], advantages[:count], strict=True)]
        )
        again, _, _ = update(samples, 1, [np.log(own) - 1.0 for own in ratios[:count]], algorithm)
        kept.append((weights(groups), again))
    for own, more in zip(*kept, strict=True):
        assert any(0.0 in weight for weight in own if weight)
        assert more == [*own, [1.0] * 6]


def test_what_is_left_out_in_each_of_several_updates_cannot_leave_the_divisor():
    with pytest.raises(ConfigError, match=r"rejection_denominator.* before each of the step's several updates"):
        parse_dict({"algorithm": {"loss": "m2po", "rejection_denominator": "kept"}, "training": {"num_iterations": 2}})
