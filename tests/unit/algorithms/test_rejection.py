import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.lanes import algorithm_of, apply
from helpers.records import completion, group, updated

from retrain.algorithms.algorithm import training_samples
from retrain.algorithms.credit.rejection_mask import RejectionMask, mask_minibatch
from retrain.config import parse_dict
from retrain.training.updates import denominators_of
from retrain.types import CreditedBatch, Denominators, Sample, Scores, StepBatch, Turn, Want

W = ([1.0, 1.0], [1.5, 0.4, 2.5], [1.01])
"""The ratios of three completions: on policy, far away, nearly on policy."""


def section(**keys):
    return parse_dict({"algorithm": keys}).algorithm


def credited(ratios=W, advantages=(1.0, -1.0, 1.0, 0.0)) -> tuple[CreditedBatch, Scores]:
    """Groups of one rollout, as credited, and the trainer's log-probabilities."""
    groups = [
        updated(group([1.0], [len(row)]), {"advantage": own, "token_advantages_T": np.full(len(row), own)})
        for row, own in zip(ratios, advantages, strict=False)
    ]
    total = sum(map(len, ratios))
    batch = CreditedBatch(tuple(groups), Denominators(total, len(ratios), action_tokens=total), {"some": 1.0})
    return batch, Scores(logprobs=[np.log(row) - 1.0 for row in map(np.array, ratios)])


def changed(batch: CreditedBatch, **changes: list) -> CreditedBatch:
    rows = zip(*changes.values(), strict=True)
    return batch.with_fields(batch.rollouts, [dict(zip(changes, row, strict=True)) for row in rows])


def weights(batch: CreditedBatch) -> list[list[float] | None]:
    kept = [rollout.policy_weights_T for rollout in batch.rollouts]
    return [None if weights_T is None else weights_T.tolist() for weights_T in kept]


def rejected(ratios=W, advantages=(1.0, -1.0, 1.0, 1.0), **algorithm) -> CreditedBatch:
    batch, scores = credited(ratios, advantages)
    return apply(batch, RejectionMask(section(**algorithm)), scores=scores)


def test_nothing_changes_where_nothing_is_rejected():
    for algorithm in ({}, {"correction": "icepop"}, {"loss": "dppo"}):
        batch, _ = credited()
        assert apply(batch, RejectionMask(section(**algorithm))) is batch  # and no log-probabilities are needed
        assert Want.LOGPROBS not in algorithm_of({"algorithm": algorithm}).requires
    batch, scores = credited()
    m2po = RejectionMask(section(loss="m2po", m2po_threshold=1e-9), several_updates=True)
    assert apply(batch, m2po) is batch
    geometric = RejectionMask(section(rejection="geometric"))
    with pytest.raises(ValueError, match="zip"):
        apply(CreditedBatch(batch.groups[:2]), geometric, scores=scores)
    advantages = [rollout.token_advantages_T for rollout in batch.rollouts]
    unrewarded = changed(batch, token_advantages_T=[advantages[0], None, advantages[2]])
    found = apply(unrewarded, geometric, scores=scores)
    assert found.metrics["rejected_tokens_frac"] == 0.0
    assert weights(found)[1] is None
    unrewarded = changed(batch, token_advantages_T=[None] * 3)
    assert apply(unrewarded, geometric, scores=scores) is unrewarded


@pytest.mark.parametrize("more", [{}, {"correction": "mis"}, {"loss": "m2po", "m2po_threshold": 100.0}])
def test_what_is_rejected_weighs_nothing_and_still_counts(more):
    batch = rejected(rejection="geometric", **more)
    assert weights(batch) == [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]]
    assert batch.denominators == Denominators(6, 3, action_tokens=6)
    assert batch.metrics == {"some": 1.0, "rejected_tokens_frac": 0.5, "rejected_sequences_frac": pytest.approx(1 / 3)}
    assert denominators_of(batch, [batch.rollouts[1]]).tokens == 3


def test_with_several_updates_m2po_is_left_to_each_of_them():
    batch, scores = credited()
    algorithm = section(loss="m2po", m2po_threshold=1e-9, rejection="geometric", rejection_denominator="all")
    found = apply(batch, RejectionMask(algorithm, several_updates=True), scores=scores)
    assert weights(found) == [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]]  # by the completion's ratio alone
    assert found.metrics == {"some": 1.0}


def test_shares_of_single_tokens_and_of_completions_without_tokens():
    batch = rejected([[4.0]], rejection="geometric")
    assert (batch.metrics["rejected_tokens_frac"], batch.metrics["rejected_sequences_frac"]) == (1.0, 1.0)
    batch = rejected([[4.0, 4.0], [], [1.0]], rejection="geometric")
    assert weights(batch) == [[0.0, 0.0], [], [1.0]]
    assert batch.metrics["rejected_tokens_frac"] == pytest.approx(2 / 3)
    assert batch.metrics["rejected_sequences_frac"] == pytest.approx(1 / 3)


def test_ratios_are_compared_in_double_precision():
    batch = rejected([[0.5 + 1e-9], [0.5 - 1e-9]], rejection="veto", rejection_limit=0.5)
    assert weights(batch) == [[1.0], [0.0]]


@pytest.mark.parametrize(("algorithm", "expected", "tokens", "sequences"), [
    ({"rejection": "k3"}, [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]], 3, 2),
    ({"correction": "icepop"}, [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0]], 5, 3),
    ({"correction": "mis"}, [[1.0, 1.0], [1.0, 1.0, 0.0], [1.0]], 5, 3),
    ({"correction": "seq_mis", "tis_cap": 1.4}, [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]], 3, 2),
    ({"loss": "m2po", "m2po_threshold": 0.05}, [[1.0, 1.0], [1.0, 0.0, 0.0], [1.0]], 4, 3),
    ({"loss": "m2po", "m2po_tokens": "harmful"}, [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0]], 5, 3),
    ({"rejection": "veto", "rejection_limit": 0.5, "correction": "mis"}, [[1.0, 1.0], [0.0] * 3, [1.0]], 3, 2),
], ids=str)  # fmt: skip
def test_everything_that_is_left_out_can_leave_the_divisor(algorithm, expected, tokens, sequences):
    batch = rejected(**algorithm, rejection_denominator="kept")
    assert weights(batch) == expected
    assert batch.denominators == Denominators(tokens, sequences, action_tokens=6, kept_tokens=True)
    assert denominators_of(batch, [batch.rollouts[0]]) == Denominators(2, 1, action_tokens=2, kept_tokens=True)


def test_tokens_that_do_not_train_are_not_in_the_divisor():
    batch, scores = credited()
    batch = changed(batch, loss_mask_T=[np.array([True, False]), None, np.array([False])])
    found = apply(batch, RejectionMask(section(rejection="geometric", rejection_denominator="kept")), scores=scores)
    assert found.denominators == Denominators(1, 1, action_tokens=6, kept_tokens=True)


def test_a_rewritten_conversation_is_looked_at_sample_by_sample():
    batch, scores = credited(ratios=([3.0, 1.0, 1.0],))
    batch = changed(batch, turns=[(Turn((1, 2), completion(1)), Turn((1, 2, 3), completion(2), fresh=True))])
    found = apply(batch, RejectionMask(section(rejection="geometric", rejection_denominator="kept")), scores=scores)
    (rollout,) = found.rollouts
    assert weights(found) == [[0.0, 1.0, 1.0]]
    assert (found.denominators.tokens, found.denominators.sequences) == (2, 1)
    assert [sample.policy_weights.tolist() for sample in training_samples(rollout)] == [[0, 0, 0], [0, 0, 0, 1, 1]]
    batch, scores = credited(ratios=([1.0, 1.0, 1.0],))
    batch = changed(batch, turns=[rollout.turns])
    found = apply(batch, RejectionMask(section(rejection="geometric", rejection_denominator="kept")), scores=scores)
    assert (found.denominators.tokens, found.denominators.sequences) == (3, 2)


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
    batch, shares = mask_minibatch(StepBatch(samples, Denominators(5, 2), 0, (), update=number), policy, algorithm)
    assert not any(sample.policy_weights[~sample.action_mask].any() for sample in batch.samples)
    return [sample.policy_weights[sample.action_mask].tolist() for sample in batch.samples], shares, policy.calls


@pytest.mark.parametrize(("tokens", "threshold", "kept"), [
    ("all", 0.04, [[1.0, 1.0, 1.0], [0.0, 1.0]]), ("harmful", 0.02, [[1.0, 1.0, 0.0], [0.0, 1.0]]),
])  # fmt: skip
def test_before_each_of_several_updates_the_second_moment_is_that_of_the_policy_then(tokens, threshold, kept):
    """The example of the second moment by hand, in two completions, behind two tokens that were read."""
    algorithm = section(loss="m2po", m2po_threshold=threshold, m2po_tokens=tokens)
    samples = samples_with([[1, 1, 1], [-1, -1]])
    far = [np.array([0.1, -0.2, 0.3]) - 1.0, np.array([-0.5, 0.05]) - 1.0]
    assert update(samples, 0, far, algorithm)[0::2] == (kept, 1)  # nobody knows the log-probabilities before the update
    samples = [replace(sample, old_logprobs=sample.logprobs.copy()) for sample in samples]  # the rollouts are fresh
    none = {"rejected_tokens_frac": 0.0, "rejected_sequences_frac": 0.0}
    assert update(samples, 0, far, algorithm) == ([[1.0] * 3, [1.0] * 2], none, 0)
    given, shares, calls = update(samples, 1, far, algorithm)
    assert (given, calls) == (kept, 1)
    assert shares["rejected_tokens_frac"] == pytest.approx(sum(own.count(0.0) for own in kept) / 5)
    # What was rejected for another reason stays left out, and what the second update left out may come back.
    samples[0] = replace(samples[0], policy_weights=np.array([0.0, 0.0, 0.0, 1.0, 1.0]))
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
        batch, scores = credited(ratios[:count], advantages)
        samples = samples_with(
            [[advantage] * len(own) for own, advantage in zip(ratios[:count], advantages[:count], strict=True)]
        )
        again, _, _ = update(samples, 1, [np.log(own) - 1.0 for own in ratios[:count]], algorithm)
        kept.append((weights(apply(batch, RejectionMask(algorithm), scores=scores)), again))
    for own, more in zip(*kept, strict=True):
        assert any(0.0 in weight for weight in own if weight)
        assert more == [*own, [1.0] * 6]
