"""What ``explain`` says a condition computes: every mode has its words, and the formula is the one that is computed."""

from __future__ import annotations

import pytest
import torch

from retrain.commands.formulas import (
    advantage_words,
    credit_formula,
    credit_words,
    critic_words,
    loss_words,
)
from retrain.config import parse_dict
from retrain.config.modes import ADVANTAGES
from retrain.maths import advantages, credit


def config(**sections):
    return parse_dict(sections)


def test_the_words_of_an_advantage_and_of_gtpo_are_the_formula():
    """Read with r, mean and std as numbers, the words give what is computed."""
    r = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
    numbers = {"r": r, "mean": r.mean(), "std": r.std(correction=0) + 1e-6, "others": (r.sum() - r) / 3}
    for mode in ("grpo", "dr_grpo", "rloo", "maxrl"):
        words = ADVANTAGES[mode].formula.replace("mean of the others in its group", "others")
        value = eval(words.replace(" of its group", "").replace("−", "-"), dict(numbers))
        torch.testing.assert_close(value, advantages.group_advantages(mode, r))
    one = config(algorithm={"transform_mode": "gtpo"}, gtpo={"beta": 0.3})
    formula = credit_formula(one).split(";")[0].replace("·", "*").replace("−", "-").replace("mean h", "mean")
    h, one_and_a_half = torch.tensor([[0.1, 2.0, 0.4]], dtype=torch.float64), torch.tensor([1.5], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    computed = credit.token_advantages("gtpo", one_and_a_half, -h, None, None, mask, beta=0.3).advantages_BT[0]
    values = [eval(formula, {"A": 1.5, "h": float(each), "mean": float(h.mean()), "max": max}) for each in h[0]]
    assert values == pytest.approx(computed.tolist())


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
    numbers = {"gamma": 0.9, "lam_policy": 0.8, "lam_value": 1.0, "whiten": False}
    one = config(algorithm={"advantage_mode": "gae"}, critic=numbers)
    words = advantage_words(one)
    assert words.startswith("Σ_k (γλ)^k·δ_(t+k) with δ_t = r_t + γV_(t+1) − V_t of a critic, ")
    assert words.endswith(", γ = 0.9, λ = 0.8 (1 for what the critic learns)")
    whitened = advantage_words(config(algorithm={"advantage_mode": "gae"}))
    assert whitened.endswith(" of a critic, γ = 1, λ = 0.95, then whitened over the batch")
    assert credit_words(one) == "every token its own"
    inside = loss_words(config(algorithm={"advantage_mode": "gae", "kl_coef": 0.05}))
    assert inside.endswith(", plus 0.05 × KL to the base")
    outside = loss_words(config(algorithm={"advantage_mode": "gae", "kl_coef": 0.05, "kl_in_reward": "k1"}))
    assert outside.endswith(", 0.05 × KL to the base (k1) taken from the reward of every token")
    assert "plus" not in outside


def test_a_critic_in_words():
    ppo, training = {"advantage_mode": "gae"}, {"lr": 0.002, "max_steps": 10, "num_iterations": 2}
    several = {"lora_rank": 4, "lr": 0.01, "vf_coef": 0.5, "cliprange_value": 0.3, "warmup_steps": 3}
    assert critic_words(config()) == ""
    assert critic_words(config(algorithm=ppo, training=training, critic=several)) == (
        "a value head and an adapter of its own of rank 4, lr 0.01; 0.5 × squared error of the value, or that of the "
        "value moved by 0.3 at most where that is more; trains alone in the first 3 steps"
    )
    shared = {"share_adapter": True, "lr": 0.01, "cliprange_value": 0}
    assert critic_words(config(algorithm=ppo, training=training, critic=shared)) == (
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
