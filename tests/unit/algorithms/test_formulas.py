"""What ``explain`` says a condition computes: every mode has its words, and the formula is the one that is computed."""

from __future__ import annotations

import pytest
import torch

from retrain.commands.formulas import (
    DIVISORS,
    WHITENED,
    advantage_words,
    credit_formula,
    credit_words,
    critic_words,
    loss_words,
)
from retrain.config import parse_dict
from retrain.config.modes import ADVANTAGES, LOSSES, TOKEN_CREDIT, UNCERTAINTIES
from retrain.maths import advantages, credit, losses
from retrain.maths.critic import gae


def config(**sections):
    return parse_dict(sections)


def test_the_table_of_modes_names_the_functions_there_are():
    assert {name for name, mode in ADVANTAGES.items() if not mode.by_token} == set(advantages.ADVANTAGES)
    assert set(TOKEN_CREDIT) == set(credit.TRANSFORMS)
    assert set(UNCERTAINTIES) == set(credit.UNCERTAINTIES)
    assert set(LOSSES) == set(losses.POLICY_LOSSES)
    assert set(DIVISORS) == set(losses.NORMALIZERS)
    for mode in credit.TRANSFORMS:
        assert credit_formula(config(algorithm={"transform_mode": mode}))


@pytest.mark.parametrize("mode", sorted(set(ADVANTAGES) - {"reinforce_pp", "gae"}))
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


def test_the_advantage_of_a_critic_has_this_run_s_numbers():
    """With two tokens δ_1 = 1 − 0.2 = 0.8, δ_0 = 0.9·0.2 − 0.5 = −0.32 and A_0 = −0.32 + 0.9·0.8·0.8 = 0.256."""
    one = config(
        algorithm={"advantage_mode": "gae"},
        critic={"gamma": 0.9, "lam_policy": 0.8, "lam_value": 1.0, "whiten": False},
    )
    words = advantage_words(one)
    assert words.startswith("Σ_k (γλ)^k·δ_(t+k) with δ_t = r_t + γV_(t+1) − V_t of a critic, ")
    assert words.endswith(", γ = 0.9, λ = 0.8 (1 for what the critic learns)")
    values, rewards = torch.tensor([[0.5, 0.2]]).double(), torch.tensor([[0.0, 1.0]]).double()
    found = gae(rewards, values, torch.ones(1, 2, dtype=torch.bool), 0.9, 0.8)
    torch.testing.assert_close(found, torch.tensor([[0.256, 0.8]]).double())
    whitened = advantage_words(config(algorithm={"advantage_mode": "gae"}))
    assert whitened.endswith(" of a critic, γ = 1, λ = 0.95, then whitened over the batch")
    assert ADVANTAGES["gae"].formula.endswith(WHITENED)
    assert credit_words(one) == "every token its own"


def test_a_critic_in_words():
    assert critic_words(config()) == ""
    ppo, training = {"advantage_mode": "gae"}, {"lr": 0.002, "max_steps": 10}
    own = config(algorithm=ppo, training=training, model={"lora_rank": 8})
    assert critic_words(own) == (
        "a value head and an adapter of its own of rank 8, lr 0.002; 0.1 × squared error of the value"
    )
    other = config(
        algorithm=ppo,
        training=training | {"num_iterations": 2},
        critic={"lora_rank": 4, "lr": 0.01, "vf_coef": 0.5, "cliprange_value": 0.3, "warmup_steps": 3},
    )
    assert critic_words(other) == (
        "a value head and an adapter of its own of rank 4, lr 0.01; 0.5 × squared error of the value, or that of the "
        "value moved by 0.3 at most where that is more; trains alone in the first 3 steps"
    )
    shared = config(
        algorithm=ppo, training={"num_iterations": 2}, critic={"share_adapter": True, "lr": 0.01, "cliprange_value": 0}
    )
    assert critic_words(shared) == (
        "a value head (lr 0.01) on the policy's adapter, which learns both; 0.1 × squared error of the value"
    )


def test_several_updates_of_a_batch_in_words():
    assert loss_words(config()) == "ppo (ratio clipped), divided by all tokens"
    assert loss_words(config(training={"clip_eps": 0})) == "ppo (ratio not clipped), divided by all tokens"
    assert loss_words(config(training={"num_iterations": 4, "minibatches": 2, "target_kl": 0.02})) == (
        "ppo (ratio π/π_old clipped), divided by all tokens; 4 passes × 2 minibatches of whole groups = 8 updates of a "
        "batch, π_old is from before the first; no further pass once KL(π_old, π) exceeds 0.02"
    )
    single = loss_words(config(training={"minibatches": 3, "minibatch_by": "sequence"}))
    assert single.partition("; ")[2].startswith("1 pass × 3 minibatches of single completions = 3 updates of a batch")
    assert "; 3 passes = 3 updates of a batch" in loss_words(config(training={"num_iterations": 3}))


@pytest.mark.parametrize(
    ("key", "value", "words"), [("tis_cap", 2.0, "up to 2"), ("icepop_band", [0.5, 5.0], "where that is 0.5 to 5")]
)
def test_a_correction_leaves_the_ratio_of_several_updates_clipped(key, value, words):
    one, several = (
        loss_words(config(algorithm={key: value}, training={"num_iterations": count})).partition(", divided")[0]
        for count in (1, 2)
    )
    assert one == f"policy gradient weighted by π/π_sampler {words}"
    assert several == f"ppo (ratio π/π_old clipped), weighted by π_old/π_sampler {words}"


def test_the_divergence_is_in_the_reward_or_in_the_loss():
    inside = loss_words(config(algorithm={"advantage_mode": "gae", "kl_coef": 0.05}))
    assert inside.endswith(", plus 0.05 × KL to the base")
    outside = loss_words(config(algorithm={"advantage_mode": "gae", "kl_coef": 0.05, "kl_in_reward": "k1"}))
    assert outside.endswith(", 0.05 × KL to the base (k1) taken from the reward of every token")
    assert "plus" not in outside
