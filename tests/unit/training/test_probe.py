import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.campaigns import run_cli, toy_toml, toy_world, train
from helpers.lanes import local_policy, rollout, totals, trained, with_values
from helpers.models import campaign_head, qwen3_directory

from retrain.algorithms import objective_of
from retrain.algorithms.losses import PPO
from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.errors import CheckpointError, RunFailed, UsageError
from retrain.files import read_jsonl
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes
from retrain.policy.objective import Objective, PolicyTerm
from retrain.probe.gradients import comparable, probe
from retrain.types import StepBatch

REWARDS = '''
def score(completion, answer):
    """Return 1 for a completion with more even than odd characters, about half of a toy model's."""
    return float(2 * sum(ord(c) % 2 == 0 for c in completion) > len(completion))

def always(completion, answer):
    return 1.0

def broken(completion, answer):
    raise RuntimeError("no such column")
'''
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    (folder / "binary.py").write_text(REWARDS)
    return toy_world(folder)


def toy(folder: Path, model: Path, *conditions: tuple[str, str], second: str = "", function: str = "score") -> Path:
    path, training = folder / "toy.toml", {"max_tokens": 8, "save_every": 1, "max_examples": None}
    head = campaign_head(*conditions, seeds=[1, 2], max_steps=STEPS, allow_confounded=True)
    others = {"reward": {"custom_function": function}, "evaluation": {"problems": None}}
    world = toy_toml(model, "binary.py", training=training, **others)
    path.write_text(f"{head}\n{second}\n\n{world}")
    return path


def probed(path: Path, *sets: str, batches: int = 4) -> dict[str, Any]:
    return probe(Plan.of(load(path, sets)), batches, lambda text: None)


def test_known_relations_of_the_formulas(tmp_path: Path, model: Path):
    """The last condition has another learning rate, which is no part of a gradient."""
    conditions = [("dr_grpo", "none"), ("rloo", "none"), ("maxrl", "gtpo"), ("maxrl", "gtpo_sepa"), ("dr_grpo", "none")]
    report = probed(toy(tmp_path, model, *conditions, second="lr = 0.03"))
    assert (report["step"], report["batches"], report["baseline"]) == (0, 4, "dr_grpo+none")
    first, scaled, other, pooled, same = report["conditions"]
    assert same["cosine"]["estimate"] == pytest.approx(1, abs=1e-9)
    assert same["length"]["estimate"] == pytest.approx(1, abs=1e-9)
    assert (same["norm"], same["halves"]) == (first["norm"], first["halves"])
    assert first["norm"] > 0
    assert -1 < first["halves"] < 1
    # RLOO's advantages are Dr. GRPO's times N/(N − 1).
    assert scaled["cosine"]["estimate"] == pytest.approx(1, abs=1e-6)
    assert scaled["length"]["estimate"] == pytest.approx(4 / 3, rel=1e-5)
    assert scaled["length"]["low"] == pytest.approx(4 / 3, rel=1e-5)
    assert 0 < other["cosine"]["low"] < other["cosine"]["estimate"] < other["cosine"]["high"] < 1
    # SEPA's λ is 0 at the first step, where its update would be that of the condition without it.
    assert pooled["cosine"]["estimate"] != pytest.approx(other["cosine"]["estimate"], abs=1e-9)


@pytest.fixture
def batch(base, lanes) -> StepBatch:
    samples = with_values(rollout(base, lanes, trained(lanes, 1)), seed=3)
    counted = totals(samples)
    return StepBatch(samples, replace(counted, action_tokens=counted.tokens), 0, ("test",))


UPDATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"training": {"update_dtype": "bfloat16"}},
    "dropout": {"lora": {"dropout": 0.3}},
    "shared critic": {"algorithm": {"advantage_mode": "gae"}, "critic": {"share_adapter": True}},
    "own critic": {"algorithm": {"advantage_mode": "gae"}},
}


def learner(lanes: Lanes, kind: str, **critic: Any) -> LocalPolicy:
    """A policy with the settings of this kind that has left its beginning."""
    sections = {**UPDATES[kind], "critic": {**UPDATES[kind].get("critic", {}), **critic}}
    policy = local_policy(lanes.base, lanes, optimizer={"grad_clip_norm": 0.0}, **sections)
    with torch.no_grad():
        policy.adapter.flat.copy_(trained(lanes, 1).flat)
        if policy.critic is not None:
            policy.critic.head.flat.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(5))
    return policy


@pytest.mark.parametrize("kind", UPDATES)
def test_the_gradient_is_the_updates_own(lanes, batch, kind):
    policy = learner(lanes, kind)
    objective = objective_of(policy.config, "ppo")
    gradient = policy.gradient(batch, objective)
    assert torch.equal(gradient, policy.gradient(batch, objective))
    policy.update(batch, objective, 1e-3)
    assert torch.equal(gradient, policy.adapter.flat.grad)
    assert float(gradient.norm()) > 0
    if "critic" in kind:  # while the critic warms up, the gradient is that of the steps that follow
        assert torch.equal(learner(lanes, kind, warmup_steps=2).gradient(batch, objective), gradient)
    assert not bool(policy.gradient(StepBatch([], totals([]), 0, ()), objective).any())
    plain = learner(lanes, "plain")
    without = plain.gradient(batch, objective_of(plain.config, "ppo"))
    assert torch.equal(gradient, without) == (kind in ("plain", "own critic"))  # the others are not the plain one's


def test_a_gradient_changes_nothing(lanes, batch):
    policy = learner(lanes, "plain")
    policy.update(batch, Objective((PolicyTerm(PPO()),)), 1e-3)  # so that AdamW has a state
    torch.manual_seed(7)  # a state that no dropout of a test before can have left

    def bits() -> bytes:
        state = policy.optimizer.state_dict()["state"][0]
        moments = [state[key].numpy().tobytes() for key in ("exp_avg", "exp_avg_sq", "step")]
        return b"".join([policy.adapter.flat.detach().numpy().tobytes(), *moments, bytes(torch.get_rng_state())])

    before, version = bits(), policy.version
    policy.gradient(batch, Objective((PolicyTerm(PPO()),)))
    learner(lanes, "dropout").gradient(batch, Objective((PolicyTerm(PPO()),)))
    assert (bits(), policy.version) == (before, version)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, model) -> tuple[Path, Path]:
    """A file, and the directory where it was trained at a learning rate that leaves the policy where it is."""
    folder = tmp_path_factory.mktemp("trained")
    path = toy(folder, model, ("grpo", "none"), ("maxrl", "gtpo"))
    path.write_text(path.read_text().replace("lr = 0.01", "lr = 1e-12"))
    train(path, folder / "out", "campaign.seeds=[1]", "training.keep_last=0")
    return path, folder / "out"


def test_batches_and_gradients_are_those_of_training(campaign: tuple[Path, Path]):
    """From the start and from a checkpoint; printed as a table and as JSON. The probe writes nothing."""
    path, out = campaign
    before = {file: file.stat().st_mtime_ns for file in path.parent.rglob("*")}
    table = run_cli("probe", path, "--batches", STEPS)
    printed = run_cli("probe", path, "--batches", STEPS, "--json")
    assert (table.exit_code, printed.exit_code) == (0, 0), table.output
    report = json.loads(printed.stdout)
    assert report["file"] == str(path)
    (row,) = (line.split() for line in table.output.splitlines() if line.startswith("maxrl"))
    other = report["conditions"][1]
    assert row[1] == f"{other['norm']:.3g}"
    assert [float(cell.replace("−", "-")) for cell in (row[2], row[5], row[-1])] == pytest.approx(
        [other["length"]["estimate"], other["cosine"]["estimate"], other["halves"]], abs=0.005
    )
    checkpoint = out / "runs/grpo+none_s1/checkpoints/step_000001"
    for step, found in ((0, report), (1, probed(path, f"resume.from={str(checkpoint)!r}", batches=STEPS - 1))):
        assert (found["step"], found["batches"]) == (step, STEPS - step)
        for condition in found["conditions"]:
            rows = read_jsonl(out / "runs" / f"{condition['label']}_s1" / "metrics.jsonl")[step:]
            norms = [row["optim/grad_norm"] or 0 for row in rows]  # None where all rewards were equal
            assert condition["norm"] == pytest.approx(np.mean(norms), rel=1e-4)
            assert found["success"] == pytest.approx(np.mean([row["correct_rate"] for row in rows]))
    assert {file: file.stat().st_mtime_ns for file in path.parent.rglob("*")} == before


def test_a_checkpoint_of_another_base_is_refused(tmp_path: Path, campaign: tuple[Path, Path]):
    (tmp_path / "binary.py").write_text(REWARDS)
    other = qwen3_directory(tmp_path / "model", ["0 2 4 6 8 the answer"], seed=5)
    path = toy(tmp_path, other, ("grpo", "none"), ("rloo", "none"))
    with pytest.raises(CheckpointError, match=r"^grpo\+none: .* was trained on other base weights"):
        probed(path, f"resume.from={str(campaign[1] / 'runs/grpo+none_s1')!r}")


def test_what_cannot_be_compared_is_one_line(tmp_path: Path, model: Path):
    path = toy(tmp_path, model, ("grpo", "none"), ("rloo", "none"), ("grpo", "none"), second="lora_rank = 2")
    for line, words in (("lora_rank = 2", "adapter differ"), ("group_size = 6", "other rollouts")):
        path.write_text(path.read_text().replace("lora_rank = 2\n\n", f"{line}\n\n"))
        specs, (note,) = comparable(Plan.of(load(path, ())))
        assert [spec.label for spec in specs] == ["grpo+none", "rloo+none"]
        assert note.startswith(f"grpo+none~{line.replace(' ', '')} is left out: ")
        assert words in note
    with pytest.raises(UsageError, match=r"^toy has one condition"):
        probed(toy(tmp_path, model, ("grpo", "none")))
    pair = ("grpo", "none"), ("rloo", "none")
    with pytest.raises(UsageError, match="--batches 2 is too few for an interval"):
        probed(toy(tmp_path, model, *pair), batches=2)
    with pytest.raises(UsageError, match="own_backend:Backend gives no gradients"):
        probed(toy(tmp_path, model, *pair), 'backend.backend="own_backend:Backend"')
    with pytest.raises(RunFailed, match="all groups of 3 batches have equal rewards"):
        probed(toy(tmp_path, model, *pair, function="always"), batches=3)
    with pytest.raises(RunFailed, match=r"no rollout has a reward: .*no such column"):
        probed(toy(tmp_path, model, *pair, function="broken"), batches=3)
