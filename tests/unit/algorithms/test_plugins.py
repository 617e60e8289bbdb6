import statistics
import sys
from pathlib import Path

import pytest
import torch
from helpers.lanes import apply, compare
from helpers.records import completion

from retrain.algorithms import PluginDetector, PluginLoss, TokenUncertainty, TransformPlugin, load_detector, load_modes
from retrain.algorithms.credit.group_advantage import SpreadAdvantage, plugin_advantages
from retrain.algorithms.losses import Reinforce
from retrain.campaign.planning.plan import plan
from retrain.config import parse_dict
from retrain.errors import PluginError
from retrain.plugins import load_function
from retrain.policy.objective import policy_loss
from retrain.types import Problem, Prompt, RewardResult, single_turn

SURPRISAL = TokenUncertainty("surprisal")
CODE = """
from toy_helpers import PLACE

seen = []


def place(*tensors):
    return PLACE


def store():
    return seen
"""


@pytest.fixture
def folder(tmp_path, import_path) -> Path:
    (tmp_path / "toy_credit.py").write_text(CODE)
    (tmp_path / "toy_helpers.py").write_text("PLACE = 'there'\n")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("toy_"):
            del sys.modules[name]


def algorithm(**keys: str):
    return parse_dict({"algorithm": keys})


def test_where_a_function_is_looked_up(folder, tmp_path_factory, monkeypatch):
    """In the folder of the TOML, then in the current one; a module of the standard library is not in the way."""
    here = tmp_path_factory.mktemp("here")
    (here / "toy_credit.py").write_text("def place(rewards):\n    return 'here'\n")
    (here / "toy_only_here.py").write_text("def f():\n    return 'here'\n")
    (folder / "statistics.py").write_text("def mine(rewards):\n    return rewards\n")
    monkeypatch.chdir(here)
    assert load_function("toy_only_here:f", folder, "x")() == "here"
    place, store = (load_function(f"toy_credit:{name}", folder, "x") for name in ("place", "store"))
    assert place() == "there"
    assert place.__globals__["seen"] is store()  # functions of one file share its state
    assert load_function("toy_credit:place", None, "x")(None) == "here"
    keys = ("advantage_mode", "transform_mode", "uncertainty_kind", "loss")
    modes = load_modes(algorithm(**dict.fromkeys(keys, "toy_credit:place")).algorithm, folder)
    assert [mode() for mode in (modes.advantage, modes.transform, modes.uncertainty, modes.loss)] == ["there"] * 4
    detector = load_detector(parse_dict({"planning": {"detector": "toy_credit:place"}}), folder)
    with pytest.raises(PluginError, match="returned 5 masks for 1 completions"):
        detector.token_masks(["so"], [[(0, 2)]])
    assert load_detector(parse_dict({"logging": {"strategic_grams": ["aha"]}})).phrases == ("aha",)
    assert load_function("statistics:mine", folder, "x")(3) == 3
    assert sys.modules["statistics"] is statistics


@pytest.mark.parametrize(("code", "reason"), [
    (None, "no module 'toy_wrong' here or in "),
    ("def g(): pass", "the module 'toy_wrong' has no function 'f'"),
    ("f = 3", "has no function 'f'"),
    ("\n\nx = undefined", "NameError: name 'undefined' is not defined (toy_wrong.py:3)"),
    ("def f(:", "SyntaxError: invalid syntax (toy_wrong.py:1)"),
    ("import toy_absent", "no module 'toy_absent'"),
    ("import sys\nsys.exit(3)", "SystemExit: 3 (toy_wrong.py:2)"),
    ("import numpy\nnumpy.linalg.inv(numpy.ones(2))", "dimensional (toy_wrong.py:2)"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_named(folder, code, reason):
    if code is not None:
        (folder / "toy_wrong.py").write_text(code)
    with pytest.raises(PluginError) as caught:
        load_modes(algorithm(advantage_mode="toy_wrong:f").algorithm, folder)
    assert str(caught.value).startswith("[algorithm] advantage_mode = 'toy_wrong:f': ")
    assert reason in str(caught.value)
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)


def loss_of(value):
    return lambda: policy_loss(PluginLoss(lambda logprobs_BT, *rest: value(logprobs_BT)), *loss_inputs())


def masks_of(value):
    masks = PluginDetector(lambda texts, offsets: value)
    return lambda: masks.token_masks(["so x", "x = 4"], [[(0, 2), (2, 4)], [(0, 1), (1, 5)]])


def credit_of(*steps):
    group = single_turn(Prompt(Problem("p", "?", "1"), "?", (1, 2)), [completion(3)] * 2, [RewardResult(1.0)] * 2)
    return lambda: apply(compare([group], "dr_grpo"), SpreadAdvantage(False), *steps)


@pytest.mark.parametrize(("call", "reason"), [
    (lambda: plugin_advantages(lambda rewards: rewards[:1], torch.ones(2)),
     r"advantage plug-in .* shape \(1,\) for rewards of shape \(2,\): return one number per completion$"),
    (lambda: plugin_advantages(lambda rewards: rewards / 0, torch.ones(2)),
     r"^advantage plug-in .* returned NaN or infinity: \[inf, inf\]$"),
    (credit_of(SURPRISAL, TransformPlugin(lambda h_BT, **rest: h_BT[0])),
     r"transform plug-in .* shape \(3,\) for tokens of shape \(2, 3\): return one advantage per token$"),
    (credit_of(TokenUncertainty(lambda *tensors: tensors[0][0])),
     r"uncertainty plug-in .* for tokens of shape \(2, 3\): return one number per token$"),
    (credit_of(TokenUncertainty(lambda *tensors: tensors[0] / 0)), "uncertainty plug-in .*NaN or infinity"),
    (loss_of(torch.sum), r"returned shape \(\) for tokens of shape \(3, 5\): return the loss of every token"),
    (loss_of(lambda logprobs: logprobs / 0), "loss plug-in .* returned NaN or infinity for a trained token"),
    (loss_of(torch.zeros_like), "has no gradient"),
    (masks_of([[True], [True]]), r"returned shape \(1,\) for a completion of 2 tokens: return one entry per token"),
    (masks_of([[0.5, 1.0], [0.0, 1.0]]), "returned something else than true and false"),
    (masks_of([["", "1"], ["0", "1"]]), "returned something else than true and false"),
    (masks_of([[True, False]]), "planning detector .* returned 1 masks for 2 completions: return one for each$"),
])  # fmt: skip
def test_wrong_results_name_the_plug_in(call, reason):
    with pytest.raises(PluginError, match=reason):
        call()
    first, second = masks_of([[True, False], [0, 1]])()
    assert (first.tolist(), second.tolist()) == ([True, False], [False, True])


def loss_inputs():
    generator = torch.Generator().manual_seed(3)
    sampler = -torch.rand(3, 5, generator=generator, dtype=torch.float64)
    logprobs = (sampler + 0.1 * torch.randn(3, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    return logprobs, torch.where(mask, sampler, torch.nan), torch.where(mask, advantages, torch.nan), mask


def test_a_loss_of_the_users_gives_the_gradient_of_ours():
    def reinforce(logprobs_BT, sampler_logprobs_BT, advantages_BT, mask_BT):
        ratio = (logprobs_BT - sampler_logprobs_BT).exp().detach()
        return -ratio * advantages_BT * logprobs_BT

    gradients, losses = [], []
    for loss in (PluginLoss(reinforce), Reinforce()):
        logprobs, *rest = loss_inputs()
        per_token, sums = policy_loss(loss, logprobs, *rest)
        per_token.sum().backward()
        losses.append(per_token.detach())
        gradients.append(logprobs.grad)
        assert float(sums["clip_low"] + sums["clip_high"]) == 0
    assert torch.equal(*losses)
    assert torch.equal(*gradients)
    assert not gradients[0][2].any()  # nothing flows into the padding, whatever it holds


def test_what_plug_ins_get():
    """Nothing of the padding, and a loss in the precision of the policy; what a loss returns there is not looked at."""
    given = []

    def loss(logprobs_BT, old_BT, advantages_BT, mask_BT):
        given.extend((old_BT, mask_BT))
        return torch.where(mask_BT, -logprobs_BT * advantages_BT, torch.nan)

    def advantages(rewards_N, context):
        return rewards_N * context

    def detector(texts, offsets):
        assert texts == ["so x"]
        return [table[:, 0] == 2 for table in offsets]

    logprobs, sampler, weights, mask = loss_inputs()
    policy_loss(PluginLoss(loss), logprobs.float(), sampler, weights, mask)
    old_BT, mask_BT = given
    assert torch.equal(mask_BT, mask)
    assert torch.equal(old_BT, torch.where(mask, sampler, 0.0).float())
    assert plugin_advantages(advantages, torch.tensor([1.0, 2.0]), 3.0).tolist() == [3.0, 6.0]
    assert PluginDetector(detector).token_masks(["so x"], [[(0, 2), (2, 4)]])[0].tolist() == [False, True]


def test_labels_of_plug_ins_are_file_names():
    rows = [
        {"advantage_mode": "pack.mine:own", "transform_mode": "none"},
        {"advantage_mode": "grpo", "transform_mode": "gtpo", "uncertainty_kind": "mine:own"},
    ]
    specs = plan(parse_dict({"campaign": {"seeds": [1], "conditions": rows}}))
    assert [spec.run_id for spec in specs] == ["pack.mine-own+none_s1", "grpo+gtpo~uncertainty_kind=mine-own_s1"]
