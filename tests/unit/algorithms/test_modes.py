"""The table of modes: its names are those of the functions, its keys have an effect, and a new mode is one row of it
and one function."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrain.commands.formulas import DIVISORS, advantage_words, credit_formula, credit_words, critic_words, loss_words
from retrain.config import parse_dict
from retrain.config.base import UsedWhen
from retrain.config.describe import choices
from retrain.config.modes import ADVANTAGES, MODES, Need, credit_of, used_by
from retrain.config.root import keys
from retrain.errors import ConfigError
from retrain.maths import advantages, credit, critic, losses

ROOT = Path(__file__).parents[3]
FUNCTIONS = {
    "advantage_mode": {**advantages.ADVANTAGES, "gae": critic.gae},
    "transform_mode": credit.TRANSFORMS,
    "uncertainty_kind": credit.UNCERTAINTIES,
    "loss": losses.POLICY_LOSSES,
}


@pytest.mark.parametrize("key", MODES)
def test_a_key_accepts_the_modes_of_the_table_which_are_the_functions_there_are(key):
    assert set(MODES[key]) == set(FUNCTIONS[key])
    assert choices(keys()[f"algorithm.{key}"]) == list(MODES[key])
    assert set(DIVISORS) == set(losses.NORMALIZERS)
    assert all(credit_formula(parse_dict({"algorithm": {"transform_mode": mode}})) for mode in credit.TRANSFORMS)


@pytest.mark.parametrize("key", MODES)
def test_a_mode_and_the_keys_of_its_row_name_each_other(key):
    used = {dotted: used_by(key, dotted) for dotted in keys()}
    for dotted, field in keys().items():
        markers = [each for each in field.metadata if isinstance(each, UsedWhen) and each.key == f"algorithm.{key}"]
        assert all(marker.values == used[dotted] for marker in markers), dotted
        assert bool(markers) == bool(used[dotted]), dotted
    for name, mode in MODES[key].items():
        assert all(any(name in used[dotted] for dotted in keys() if dotted.startswith(each)) for each in mode.keys)


def test_what_a_configuration_needs_is_what_its_modes_need():
    def needs(**algorithm: str) -> frozenset[Need]:
        return parse_dict({"algorithm": algorithm}).algorithm.needs

    assert needs() == needs(transform_mode="gtpo") == {Need.GROUP}
    assert needs(transform_mode="gtpo_sepa") == needs(transform_mode="gtpo_hicra") == {Need.GROUP, Need.PLANNING}
    assert needs(transform_mode="gtpo", uncertainty_kind="shannon_entropy") == {Need.GROUP, Need.ENTROPY}
    assert needs(transform_mode="entropy_mask") == {Need.GROUP, Need.ENTROPY}
    assert needs(advantage_mode="mine:own", transform_mode="mine:spread") == set()
    assert credit_of("mine:spread").own_advantage
    with pytest.raises(ConfigError, match=r'this variant is not available.*transform_mode = "gtpo_sepa"'):
        needs(transform_mode="gtpo_sepa_amp")


ROW = """ADVANTAGES: dict[str, Advantage] = {
    "median": Advantage(formula="r − median of its group", paper="0000.00000"),
"""
FUNCTION = """def median(rewards_N: Rewards_PN) -> Doubles_PN:
    rewards_N = _checked(rewards_N)
    return rewards_N - rewards_N.median(-1, keepdim=True).values


ADVANTAGES: dict[str, Callable[[Rewards_PN], Doubles_PN]] = {
    "median": median,
"""
PROGRAM = """
import torch
from retrain.commands.formulas import advantage_words
from retrain.config import configuration_markdown, parse_dict
from retrain.maths.advantages import group_advantages
config = parse_dict({"algorithm": {"advantage_mode": "median", "transform_mode": "gtpo"}})
print(advantage_words(config))
print(group_advantages("median", torch.tensor([1.0, 0.0, 0.0])).tolist())
print(configuration_markdown())
"""


def test_a_new_advantage_is_one_row_and_one_function(tmp_path):
    """Written into a copy of the package as one would write it, it is accepted, computed, and told of."""
    shutil.copytree(ROOT / "retrain", tmp_path / "retrain", ignore=shutil.ignore_patterns("__pycache__", "models"))
    for module, old, new in (
        ("config/modes.py", ROW.partition("\n")[0] + "\n", ROW),
        ("maths/advantages.py", FUNCTION.splitlines()[-2] + "\n", FUNCTION),
    ):
        path = tmp_path / "retrain" / module
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"r − median of its group\n\[1\.0, 0\.0, 0\.0\]\n", done.stdout)
    assert "| `advantage_mode` | `median` | r − median of its group | [0000.00000]" in done.stdout
    assert 'one of "median", "grpo"' in done.stdout


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


PASSES = {"num_iterations": 4, "minibatches": 2, "target_kl": 0.02}
GAE, KL = {"advantage_mode": "gae"}, {"advantage_mode": "gae", "kl_coef": 0.05}
OWN = {"lora_rank": 4, "lr": 0.01, "gamma": 0.9, "lam_policy": 0.8, "whiten": False}


@pytest.mark.parametrize(
    ("words", "sections", "part"),
    [
        (loss_words, {}, "ppo (ratio clipped), divided by all tokens"),
        (loss_words, {"training": {"clip_eps": 0}}, "ppo (ratio not clipped), divided by all tokens"),
        (loss_words, {"training": PASSES}, "4 passes × 2 minibatches of whole groups = 8 updates of a batch"),
        (loss_words, {"training": PASSES}, "no further pass once KL(π_old, π) exceeds 0.02"),
        (loss_words, {"algorithm": {"tis_cap": 2.0}}, "policy gradient weighted by π/π_sampler up to 2"),
        (loss_words, {"algorithm": {"tis_cap": 2.0}, "training": PASSES}, "clipped), weighted by π_old/π_sampler"),
        (loss_words, {"algorithm": KL}, ", plus 0.05 × KL to the base"),
        (loss_words, {"algorithm": {**KL, "kl_in_reward": "k1"}}, "KL to the base (k1) taken from the reward of every"),
        (advantage_words, {"algorithm": GAE, "critic": OWN}, "γV_(t+1) − V_t of a critic, γ = 0.9, λ = 0.8"),
        (critic_words, {"algorithm": GAE, "critic": OWN}, "a value head and an adapter of its own of rank 4, lr 0.01"),
    ],
)
def test_a_run_in_words(words, sections, part):
    assert part in words(config(**sections))
