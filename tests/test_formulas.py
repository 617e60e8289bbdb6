"""What ``explain`` says a condition computes: every mode has its words, and the formula is the one that is computed."""

from __future__ import annotations

import pytest
import torch

from retrain.campaign.planning.costs import architecture_of, assumptions, estimate_run, find_device
from retrain.commands.formulas import DIVISORS, advantage_words, credit_formula, credit_words, loss_words
from retrain.config import parse_dict
from retrain.config.modes import ADVANTAGES, LOSSES, TOKEN_CREDIT, UNCERTAINTIES
from retrain.maths import advantages, credit, losses


def config(**sections):
    return parse_dict(sections)


def test_the_table_of_modes_names_the_functions_there_are():
    assert set(ADVANTAGES) == set(advantages.ADVANTAGES)
    assert set(TOKEN_CREDIT) == set(credit.TRANSFORMS)
    assert set(UNCERTAINTIES) == set(credit.UNCERTAINTIES)
    assert set(LOSSES) == set(losses.POLICY_LOSSES)
    assert set(DIVISORS) == set(losses.NORMALIZERS)
    for mode in credit.TRANSFORMS:
        assert credit_formula(config(algorithm={"transform_mode": mode}))


@pytest.mark.parametrize("mode", sorted(set(ADVANTAGES) - {"reinforce_pp"}))
def test_the_words_of_an_advantage_are_its_formula(mode):
    """Read with r, mean and std as numbers, the words give what is computed."""
    r = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
    words = ADVANTAGES[mode].formula.replace(" of its group", "").replace("−", "-")
    others = (r.sum() - r) / 3
    words = words.replace("mean of the others in its group", "others")
    value = eval(words, {"r": r, "mean": r.mean(), "std": r.std(correction=0) + 1e-6, "others": others})
    torch.testing.assert_close(value, advantages.group_advantages(mode, r))


def test_the_formula_of_gtpo_is_what_is_computed():
    one = config(algorithm={"transform_mode": "gtpo"}, gtpo={"beta": 0.3})
    formula = credit_formula(one).split(";")[0].replace("·", "*").replace("−", "-").replace("mean h", "mean")
    logprobs = torch.tensor([[-0.1, -2.0, -0.4]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    computed = credit.token_advantages(
        "gtpo", torch.tensor([1.5], dtype=torch.float64), logprobs, None, None, mask, beta=0.3
    ).advantages_BT[0]
    for h, value in zip(-logprobs[0], computed, strict=True):
        assert eval(formula, {"A": 1.5, "h": h, "mean": -logprobs.mean(), "max": max}) == pytest.approx(float(value))


def test_numbers_and_plug_ins_of_the_run_stand_in_the_formula():
    sepa = credit_formula(
        config(
            algorithm={"transform_mode": "gtpo_sepa", "uncertainty_kind": "shannon_entropy"},
            gtpo={"beta": 0.25},
            sepa={"steps": 40, "delay_steps": 5, "correct_rate_gate": 0.3},
            planning={"detector": "mine:steps"},
        )
    )
    for part in ("0.25", "in 40 steps after 5 once 30% are correct", "your own mine:steps", "entropy of the whole"):
        assert part in sepa, part
    assert "0.4·|x| on as many random tokens" in credit_formula(
        config(algorithm={"transform_mode": "gtpo_hicra_placebo"}, hicra={"alpha": 0.4})
    )
    own = config(
        algorithm={
            "advantage_mode": "mine:own", "transform_mode": "mine:spread", "uncertainty_kind": "mine:doubt",
            "loss": "mine:loss",
        }
    )  # fmt: skip
    assert advantage_words(own) == "your own mine:own"
    assert credit_words(own) == "your own mine:spread"
    assert "your own mine:doubt" in credit_formula(own)
    assert "mine:loss (your own)" in loss_words(own)
    capped = config(algorithm={"loss": "mine:loss", "tis_cap": 2.0})
    assert loss_words(capped).startswith("policy gradient of your own mine:loss weighted by π/π_sampler up to 2")


@pytest.mark.parametrize("section", [{"algorithm": {"kl_coef": 0.01}}, {"logging": {"log_kl": True}}])
def test_the_pass_of_the_base_is_counted(section):
    """KL adds one forward pass to four operations per parameter: half more for the update, nothing for sampling."""
    device, plain, kl = find_device("cpu", 1, 1e9), config(), config(**section)
    architecture = architecture_of("tiny-reasoner")
    before, after = (estimate_run(each, architecture, device).seconds for each in (plain, kl))
    training = plain.training
    tokens = training.max_steps * training.batch_size * training.group_size * (12 + training.max_tokens)
    assert architecture is not None
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(2 * architecture.active_parameters * tokens / (1e9 * 0.35))
    assert "costs 6 operations" in assumptions(kl)[1]
    assert "costs 4 operations" in assumptions(plain)[1]
