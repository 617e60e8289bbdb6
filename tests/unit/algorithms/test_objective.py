import math

import pytest
import torch

from retrain.algorithms import PluginLoss
from retrain.algorithms.losses import M2PO, PPO, Reinforce
from retrain.maths.corrections import Correction
from retrain.policy.objective import EntropyTerm, KLTerm, NoLoss, Objective, PolicyTerm, TeacherTerm, TokenScores
from retrain.policy.packing import MicroBatch
from retrain.types import Denominators


def table(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def micro_batch(**more) -> MicroBatch:
    mask = torch.ones(1, 3).bool()
    keys = {"action_BT": mask, "loss_mask_BT": mask, "advantages_BT": table(1.0, 1.0, 1.0)}
    return MicroBatch(None, torch.zeros(3), sampler_logprobs_BT=table(-1.0, -1.0, -1.0), **{**keys, **more})


def test_weights_are_one_more_factor_of_the_policy_loss_alone():
    logprobs = table(-0.9, -1.2, -1.0)
    scores = TokenScores(logprobs, reference_BT=table(-1.1, -1.0, -1.3))
    plain, left_out = micro_batch(), micro_batch(policy_weights_BT=table(1.0, 0.0, 1.0))
    for term in (PolicyTerm(Reinforce()), PolicyTerm(PPO(), correction=Correction("tis", high=1.05))):
        whole, sums = term.per_token(plain, scores)
        some, counted = term.per_token(left_out, scores)
        assert some.tolist() == (whole * table(1.0, 0.0, 1.0)).tolist()
        assert all(torch.equal(sums[key], counted[key]) for key in sums)  # all tokens are compared
    assert torch.equal(KLTerm(0.1).per_token(plain, scores)[0], KLTerm(0.1).per_token(left_out, scores)[0])


@pytest.mark.parametrize(("normalizer", "kept"), [("tokens", 1 / 2), ("sequences", 1 / 2), ("constant", 1 / 8)])
def test_divisors_of_what_is_kept(normalizer, kept):
    batch = micro_batch(policy_weights_BT=table(1.0, 0.0, 1.0))
    objective = Objective((PolicyTerm(M2PO()),), normalizer, max_tokens=8)
    scores = TokenScores(table(-1.0, -1.0, -1.0))
    loss, _ = objective.loss(batch, scores, Denominators(2, 1, kept_tokens=True))
    assert float(loss) == pytest.approx(-2 * kept)
    loss, _ = objective.loss(batch, scores, Denominators(3, 1))
    assert float(loss) == pytest.approx(-2 * (kept if normalizer == "constant" else 1 / 3))


def numbers(sums):
    return {key: float(value) for key, value in sums.items()}


def test_the_divergence_to_the_base_by_hand():
    """k2 for the gradient over trained tokens; k3 over them and k1 over all sampled tokens for the record."""
    sampled = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    trained = sampled & torch.tensor([True, False, False])
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    batch = MicroBatch(None, torch.zeros(5), sampled, trained, zeros, zeros)
    scores = TokenScores(zeros - 1.0, reference_BT=zeros - 1.5)
    k3 = math.exp(-0.5) - 1.0 + 0.5
    expected = {"kl": 2 * k3, "sequence_kl": 5 * 0.5, "sequences": 2.0}
    for coef, loss in ((0.0, None), (1.0, 0.125), (3.0, 0.375)):
        per_token, sums = KLTerm(coef).per_token(batch, scores)
        assert numbers(sums) == pytest.approx(expected)
        assert per_token is None if loss is None else per_token.tolist() == [[loss, 0, 0], [loss, 0, 0], [0, 0, 0]]


def test_the_divergence_from_a_teacher_is_of_taught_and_trained_tokens():
    batch = micro_batch(loss_mask_BT=torch.tensor([[True, True, False]]))
    scores = TokenScores(divergence_BT=table(0.5, 7.0, 9.0), taught_BT=torch.tensor([[True, False, True]]))
    per_token, sums = TeacherTerm(4.0, 1.0).per_token(batch, scores)
    assert per_token.tolist() == [[2.0, 0.0, 0.0]]
    assert numbers(sums) == {"divergence": 0.5, "taught_tokens": 1.0}


def test_an_entropy_bonus_lowers_the_loss_and_is_logged_where_asked():
    scores = TokenScores(table(-1.0, -1.0, -1.0), entropy_BT=table(0.5, 1.0, 9.0))
    batch = micro_batch(loss_mask_BT=torch.tensor([[True, True, False]]))
    per_token, sums = EntropyTerm(2.0).per_token(batch, scores)
    assert (per_token.tolist(), sums) == ([[-1.0, -2.0, 0.0]], {})
    per_token, sums = EntropyTerm(logged=True).per_token(batch, scores)
    assert (per_token, numbers(sums)) == (None, {"entropy": 1.5})


def test_an_objective_knows_what_its_terms_need():
    terms = (PolicyTerm(PPO()), KLTerm(0.1), KLTerm(0.2), EntropyTerm(0.5))
    objective = Objective(terms)
    assert objective.kl_coef == pytest.approx(0.3)
    assert (objective.entropy_gradient, objective.every_sequence) == (True, True)
    logged = Objective((PolicyTerm(PPO()), KLTerm(), EntropyTerm(logged=True)))
    assert (logged.kl_coef, logged.entropy_gradient, logged.every_sequence) == (0, False, False)
    assert Objective((PolicyTerm(PluginLoss(max)),)).every_sequence  # a plug-in may do anything
    assert objective.only(KLTerm, EntropyTerm).terms == terms[1:]
    assert objective.without(KLTerm).terms == (terms[0], terms[3])
    assert objective.without_gradient().terms == (PolicyTerm(NoLoss()), KLTerm(), KLTerm())
