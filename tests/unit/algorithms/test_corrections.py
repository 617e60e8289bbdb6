import itertools
import math

import pytest
import torch

from retrain.algorithms.losses import M2PO
from retrain.maths.corrections import Correction, kept_sequences

SAMPLER = torch.full((1, 3), -1.0, dtype=torch.float64)
W = torch.tensor([[1.5, 0.4, 2.5]], dtype=torch.float64)
OLD = SAMPLER + W.log()
MASK = torch.ones(1, 3).bool()


def correction_weights(correction, old, sampler, mask):
    return torch.where(mask, correction.weights(correction.ratio(old, sampler, mask)), 0.0)


@pytest.mark.parametrize(("correction", "expected"), [
    (Correction("tis", high=2.0), [1.5, 0.4, 2.0]), (Correction("mis", high=2.0), [1.5, 0.4, 0.0]),
    (Correction("icepop", 0.5, 2.0), [1.5, 0.0, 0.0]), (Correction("decoupled"), [1.5, 0.4, 2.5]),
    (Correction("seq_tis", high=2.0), [1.5, 1.5, 1.5]), (Correction("seq_mis", high=2.0), [1.5, 1.5, 1.5]),
    (Correction("seq_tis", high=1.2), [1.2, 1.2, 1.2]), (Correction("seq_mis", high=1.2), [0.0, 0.0, 0.0]),
], ids=str)  # fmt: skip
def test_weights_by_hand(correction, expected):
    """algorithms2 §8."""
    assert correction_weights(correction, OLD, SAMPLER, MASK).tolist()[0] == pytest.approx(expected)


def test_weights_at_the_edges():
    """A ratio of exactly 1, which on-policy tokens have, trains with the bands [1, β] and [α, 1]; beyond it none."""
    for band in ((1.0, 2.0), (0.5, 1.0)):
        assert correction_weights(Correction("icepop", *band), SAMPLER, SAMPLER, MASK).tolist() == [[1.0, 1.0, 1.0]]
    assert not correction_weights(Correction("icepop", 0.5, 1.0), SAMPLER + 1e-3, SAMPLER, MASK).any()
    assert not correction_weights(Correction("icepop", 1.0, 2.0), SAMPLER - 1e-3, SAMPLER, MASK).any()
    padded = correction_weights(Correction("seq_tis"), OLD, SAMPLER, torch.tensor([[True, True, False]]))
    assert padded.tolist()[0] == pytest.approx([0.6, 0.6, 0.0])  # of the product too
    far = torch.full((1, 400), 3.0)  # a product that leaves every range
    for kind, old, expected in (("seq_tis", far, 2.0), ("seq_mis", far, 0.0), ("seq_tis", -far, 0.0)):
        weights = correction_weights(Correction(kind, high=2.0), old, 0 * far, torch.ones_like(far).bool())
        assert weights[0].tolist() == pytest.approx([expected] * 400, abs=1e-6)
    for kind in ("tis", "mis", "icepop", "decoupled", "seq_tis", "seq_mis"):
        assert not correction_weights(Correction(kind), OLD.clone().requires_grad_(), SAMPLER, MASK).requires_grad


def test_the_whole_product_is_unbiased_and_single_weights_are_not():
    """All four paths of a tree of two binary tokens, summed up: E_μ[weight·f] against E_π[f], f the second token."""
    pi, mu = {"": 0.7, "0": 0.9, "1": 0.2}, {"": 0.4, "0": 0.5, "1": 0.6}

    def chances(tree, path):
        first, second = tree[""], tree[str(path[0])]
        return (first if path[0] else 1 - first), (second if path[1] else 1 - second)

    truth, found = 0.0, {"seq_tis": 0.0, "decoupled": 0.0}
    for path in itertools.product((0, 1), repeat=2):
        ours, theirs = (torch.tensor([chances(tree, path)], dtype=torch.float64).log() for tree in (pi, mu))
        truth += math.exp(float(ours.sum())) * path[1]
        for kind in found:
            weights = correction_weights(Correction(kind), ours, theirs, torch.ones(1, 2).bool())
            found[kind] += math.exp(float(theirs.sum())) * float(weights[0, 1]) * path[1]
    assert found["seq_tis"] == pytest.approx(truth)
    assert abs(found["decoupled"] - truth) > 0.05


@pytest.mark.parametrize(("kind", "low", "high", "kept"), [
    ("geometric", 0.5, 1.2, True),  # 1.144714
    ("geometric", 0.5, 1.14, False),
    ("geometric", 1.15, 2.0, False),
    ("k3", 0.0, 0.3316, True),  # 0.331512
    ("k3", 0.0, 0.3315, False),
    ("veto", 0.39, math.inf, True),
    ("veto", 0.41, math.inf, False),
])  # fmt: skip
def test_rejected_sequences_by_hand(kind, low, high, kept):
    assert kept_sequences(kind, OLD, SAMPLER, MASK, low, high).tolist() == [[kept]]


def test_padding_and_empty_sequences_take_no_part():
    mask = torch.tensor([[True, False, False], [False, False, False]])
    old, sampler = torch.zeros(2, 3), torch.zeros(2, 3)
    old[:, 1:] = -30.0
    for kind, low, high in (("geometric", 0.99, 1.01), ("k3", 0.0, 0.01), ("veto", 0.5, math.inf)):
        assert kept_sequences(kind, old, sampler, mask, low, high).tolist() == [[True], [True]]


LOG_RATIOS = torch.tensor([[0.1, -0.2, 0.3, -0.5, 0.05]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0]])


def second_moment(threshold, advantages=None, log_ratios=LOG_RATIOS):
    zero = torch.zeros_like(log_ratios)
    loss = M2PO(threshold) if advantages is None else M2PO(threshold, "harmful")
    return loss.kept_tokens(log_ratios, zero, zero == 0, zero + 1 if advantages is None else advantages)[0].tolist()


def test_the_second_moment_by_hand():
    """algorithms2 §2."""
    assert second_moment(0.04) == [True, True, True, False, True]
    assert second_moment(0.04, ADVANTAGES) == [True, True, False, False, True]
    assert second_moment(0.06, ADVANTAGES) == [True, True, True, False, True]
    assert second_moment(0.0786) == second_moment(math.inf) == [True] * 5
    assert second_moment(1e-9) == [False] * 5
    assert second_moment(0.25, log_ratios=torch.tensor([[0.5]])) == [False]  # the mean must be below the threshold
    still = torch.tensor([[0.0, 0.0, 0.3]], dtype=torch.float64)
    assert second_moment(0.04, log_ratios=still) == [True] * 3
    assert second_moment(0.04, torch.ones(1, 3), still) == [True, True, False]  # only harmful tokens count


def test_equal_tokens_leave_together_and_the_mean_is_of_the_step():
    """Of two that are equally far none is chosen by its place; rows are not looked at one by one."""
    pair = torch.tensor([[0.4, -0.4, 0.0]], dtype=torch.float64)
    assert second_moment(0.09, log_ratios=pair) == [False, False, True]  # one of them would fit
    rows = torch.tensor([[0.3, 0.0], [0.0, 0.0]], dtype=torch.float64)
    zero = torch.zeros_like(rows)
    m2po = M2PO(0.03)
    assert m2po.kept_tokens(rows, zero, zero == 0, zero + 1).all()
    assert not m2po.kept_tokens(rows[:1], zero[:1], zero[:1] == 0, zero[:1] + 1)[0, 0]
    masked = m2po.kept_tokens(rows, zero, torch.tensor([[False, True], [True, True]]), zero + 1)
    assert masked.tolist() == [[False, True], [True, True]]
