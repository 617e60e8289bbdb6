import pytest

from retrain.algorithms import GROUP_ADVANTAGES, LOSSES, TOKEN_CREDIT, GaeAdvantage, build_loss
from retrain.algorithms.credit.uncertainty import UNCERTAINTIES
from retrain.cli.formulas import DIVISORS, advantage_text, credit_formula, credit_text, critic_text, loss_text
from retrain.config import parse_dict
from retrain.config.base import ActiveIf
from retrain.config.describe import choices
from retrain.config.modes import MODES, Need, credit_of, loss_of, used_by
from retrain.config.root import keys
from retrain.errors import ConfigError
from retrain.policy.objective import NORMALIZERS

FUNCTIONS = {
    "advantage_mode": {**GROUP_ADVANTAGES, "gae": GaeAdvantage}, "transform_mode": TOKEN_CREDIT,
    "uncertainty_kind": UNCERTAINTIES, "loss": LOSSES,
}  # fmt: skip


@pytest.mark.parametrize("key", MODES)
def test_a_key_accepts_the_modes_of_the_table_which_are_the_functions_there_are(key):
    assert set(MODES[key]) == set(FUNCTIONS[key])
    assert choices(keys()[f"algorithm.{key}"]) == list(MODES[key])
    assert set(DIVISORS) == set(NORMALIZERS)
    assert all(credit_formula(parse_dict({"algorithm": {"transform_mode": mode}})) for mode in TOKEN_CREDIT)


@pytest.mark.parametrize("key", MODES)
def test_a_mode_and_the_keys_of_its_row_name_each_other(key):
    used = {dotted: used_by(key, dotted) for dotted in keys()}
    for dotted, field in keys().items():
        markers = [each for each in field.metadata if isinstance(each, ActiveIf) and each.key == f"algorithm.{key}"]
        assert all(marker.values == used[dotted] for marker in markers), dotted
        assert bool(markers) == bool(used[dotted]), dotted
    for name, mode in MODES[key].items():
        row_keys = [*mode.keys, *(f"algorithm.{parameter}" for parameter in mode.parameters)]
        assert all(any(name in used[dotted] for dotted in keys() if dotted.startswith(each)) for each in row_keys)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_defaults_of_its_row_and_compares_with_the_same_policy(name):
    built = build_loss(parse_dict({"algorithm": {"loss": name}}), name)
    assert built.from_sampler == loss_of(name).from_sampler
    assert repr(built).replace("[", "(").replace("]", ")") == repr(LOSSES[name]())


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


PASSES = {"num_iterations": 4, "minibatches": 2, "target_kl": 0.02}
GAE, KL = {"advantage_mode": "gae"}, {"advantage_mode": "gae", "kl_coef": 0.05}
CRITIC = {"lora_rank": 4, "lr": 0.01, "gamma": 0.9, "lam_policy": 0.8, "whiten": False}
OWN = {"advantage_mode": "mine:own", "transform_mode": "mine:spread"}
SEPA = {
    "algorithm": {"transform_mode": "gtpo_sepa", "uncertainty_kind": "shannon_entropy"}, "gtpo": {"beta": 0.25},
    "sepa": {"steps": 40, "delay_steps": 5, "correct_rate_gate": 0.3}, "planning": {"detector": "mine:steps"},
}  # fmt: skip
PLACEBO = {"algorithm": {"transform_mode": "gtpo_hicra_placebo"}, "hicra": {"alpha": 0.4}}


@pytest.mark.parametrize(("words", "sections", "parts"), [
    (credit_formula, SEPA, ["0.25", "in 40 steps after 5 once 30% are correct", "your own mine:steps", "entropy"]),
    (credit_formula, PLACEBO, ["0.4·|x| on as many random tokens"]),
    (credit_text, {"algorithm": OWN}, ["your own mine:spread"]),
    (advantage_text, {"algorithm": GAE, "critic": CRITIC}, ["γV_(t+1) − V_t of a critic, γ = 0.9, λ = 0.8"]),
    (critic_text, {"algorithm": GAE, "critic": CRITIC}, ["an adapter of its own of rank 4, lr 0.01"]),
    (loss_text, {"training": PASSES}, ["4 passes × 2 minibatches of whole groups = 8 updates", "exceeds 0.02"]),
    (loss_text, {"algorithm": {"tis_cap": 2.0}, "training": PASSES}, ["clipped), weighted by π_old/π_sampler"]),
    (loss_text, {"algorithm": {**KL, "kl_in_reward": "k1"}}, ["KL to the base (k1) taken from the reward of"]),
])  # fmt: skip
def test_a_run_in_words(words, sections, parts):
    for part in parts:
        assert part in words(parse_dict(sections))
