"""Critics and several updates per batch across interruptions: to the bit what a run that nobody disturbed makes."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from critic_cases import OWN, SHARED, critic_campaign, critic_files, last_checkpoint, made, rows_of, single_run
from lane_cases import local_policy, rollout
from safetensors.torch import load_file
from timing_keys import is_timing_key
from toycampaign import StopAfter
from typer.testing import CliRunner

from retrain.campaign.adapters.squeeze import squeeze
from retrain.campaign.running.controller import launch, resume
from retrain.cli import app
from retrain.config import load, parse_dict
from retrain.errors import CheckpointError, NonFinite
from retrain.files import read_json, read_jsonl
from retrain.policy import local
from retrain.policy.adapter_io import read_adapter
from retrain.policy.critic import MOMENTS, WEIGHTS
from retrain.policy.lora import Lanes
from retrain.policy.objective import objective_of
from retrain.policy.protocol import Denominators, TrainBatch
from retrain.policy.update import train_step
from retrain.record.observer import NullObserver

SEVERAL = "save_every = 2\nnum_iterations = 2\nminibatches = 2\nkeep_last = 0"
GAE = 'advantage_mode = "gae"\ntransform_mode = "none"\n'


class Heard(NullObserver):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str, level: str = "info") -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    """Two critics in one cohort, four updates per batch, four steps, saved every second one."""
    folder = tmp_path_factory.mktemp("finished")
    outcome = launch(load(critic_campaign(folder, model, OWN, SHARED, training=SEVERAL)), folder / "out",
                     NullObserver())  # fmt: skip
    assert outcome.exit_status == 0
    return folder / "out"


def runs_of(out: Path) -> list[Path]:
    return [out / run["path"] for run in read_json(out / "manifest.json")["runs"]]


def assert_same(mine: Path, theirs: Path) -> None:
    """Each run of one directory has made what that of the other has."""
    assert [run.name for run in runs_of(mine)] == [run.name for run in runs_of(theirs)]
    for a, b in zip(runs_of(mine), runs_of(theirs), strict=True):
        ours, others = made(a), made(b)
        assert ours.keys() == others.keys()
        assert [name for name in ours if ours[name] != others[name]] == []


def test_every_checkpoint_holds_the_critic_and_final_does_not(finished):
    for run in runs_of(finished):
        assert critic_files(run) == [
            f"checkpoints/step_00000{step}/{name}" for step in (2, 4) for name in sorted((WEIGHTS, MOMENTS))
        ]
        hashed = read_json(last_checkpoint(run) / "manifest.json")["sha256"]
        assert {WEIGHTS, MOMENTS} <= hashed.keys()
        rows = read_jsonl(run / "metrics.jsonl")
        assert [row["optim/updates"] for row in rows] == [4] * 4
    own, shared = (load_file(last_checkpoint(run) / WEIGHTS) for run in runs_of(finished))
    assert own.keys() == {"head", "adapter"}
    assert shared.keys() == {"head"}
    assert all(bool(tensor.any()) for tensor in (*own.values(), *shared.values()))


def test_interrupted_at_every_step_equals_uninterrupted(finished, model, tmp_path):
    """One directory is stopped after each step in turn."""
    path, out = critic_campaign(tmp_path, model, OWN, SHARED, training=SEVERAL), tmp_path / "out"
    assert launch(load(path), out, StopAfter(1)).exit_status == 130
    for step in (2, 3):
        assert [run["step"] for run in read_json(out / "manifest.json")["runs"]] == [step - 1] * 2
        assert resume(out, StopAfter(1)).exit_status == 130
    assert resume(out, NullObserver()).exit_status == 0
    assert_same(out, finished)


def test_ctrl_c_in_the_middle_of_the_updates_of_a_batch_finishes_the_step(finished, model, tmp_path, monkeypatch):
    """All four updates of both runs are made, the step is recorded and saved."""
    made_updates: list[tuple[int, int]] = []

    def interrupting(passes, adapter, optimizer, batch, *rest, **named):
        made_updates.append((batch.step, batch.update))
        if made_updates.count((1, 1)) == 1 and (batch.step, batch.update) == (1, 1):
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(passes, adapter, optimizer, batch, *rest, **named)

    monkeypatch.setattr(local, "train_step", interrupting)
    path, out = critic_campaign(tmp_path, model, OWN, SHARED, training=SEVERAL), tmp_path / "out"
    assert launch(load(path), out, NullObserver()).exit_status == 130
    assert sorted(made_updates) == sorted([(step, update) for step in (0, 1) for update in range(4)] * 2)
    for mine, whole in zip(runs_of(out), runs_of(finished), strict=True):
        assert rows_of(mine) == rows_of(whole)[:2]
        assert last_checkpoint(mine).name == "step_000002"
        for name in ("adapter_model.safetensors", WEIGHTS, MOMENTS):
            there = whole / "checkpoints/step_000002" / name
            assert (last_checkpoint(mine) / name).read_bytes() == there.read_bytes()
    assert resume(out, NullObserver()).exit_status == 0
    assert_same(out, finished)


@pytest.mark.parametrize(("name", "gone"), [(WEIGHTS, False), (MOMENTS, True)])
def test_a_damaged_or_lost_critic_is_noticed_and_an_older_checkpoint_taken(finished, model, tmp_path, name, gone):
    path, out = critic_campaign(tmp_path, model, OWN, SHARED, training=SEVERAL), tmp_path / "out"
    assert launch(load(path), out, StopAfter(6)).exit_status == 130
    file = last_checkpoint(runs_of(out)[0]) / name
    assert file.parent.name == "step_000003"
    if gone:
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    heard = Heard()
    assert resume(out, heard).exit_status == 0
    (line,) = [line for line in heard.lines if "skipped a damaged checkpoint" in line]
    assert str(file) in line
    assert len([line for line in heard.lines if line.endswith("continues at step 2")]) == 2
    assert_same(out, finished)


@pytest.mark.parametrize(("algorithm", "reason"), [
    ('advantage_mode = "grpo"\ntransform_mode = "none"\n',
     'step_000002 holds no critic: it is of a run without advantage_mode = "gae"'),
    (GAE + "[critic]\nlora_rank = 3\n",
     "step_000002/critic.safetensors does not fit this run: [critic] is another one"),
    (GAE + "[critic]\nshare_adapter = true\n",
     "step_000002/critic.safetensors does not fit this run: [critic] is another one"),
])  # fmt: skip
def test_a_checkpoint_without_such_a_critic_is_refused_in_one_line(model, tmp_path, algorithm, reason):
    """``[resume] from`` of a run without critic, or with one of another shape."""
    first = single_run(tmp_path, model, "first", algorithm)
    assert launch(load(first), tmp_path / "first", NullObserver()).exit_status == 0
    second = single_run(tmp_path, model, "second", GAE, "max_steps = 3")
    asked = ["train", str(second), "--out", str(tmp_path / "second"), "--plain"]
    result = CliRunner().invoke(app, [*asked, "--set", f'resume.from="{tmp_path / "first"}"'])
    assert result.exit_code == 1, result.output
    said = result.stdout + result.stderr
    assert reason in re.sub(r"\s+", " ", said)
    assert "Traceback" not in said
    assert not (tmp_path / "second/metrics.jsonl").exists()
    (entry,) = read_json(tmp_path / "second/manifest.json")["runs"]
    assert entry["state"] == "failed"
    assert reason in entry["reason"]
    assert "\n" not in entry["reason"]


def test_a_critic_that_shares_its_adapter_does_not_take_one_of_its_own(base, lanes, tmp_path):
    """The head of the one reads other hidden states than that of the other."""
    own, shared = (
        local_policy(base, lanes, algorithm={"advantage_mode": "gae"}, critic={"share_adapter": both})
        for both in (False, True)
    )
    for policy, other in ((own, shared), (shared, own)):
        directory = tmp_path / str(policy is own)
        directory.mkdir()
        policy.snapshot(resumable=True).write(directory)
        policy.load(directory)
        with pytest.raises(CheckpointError, match=r"\[critic\] is another one"):
            other.load(directory)


def test_only_the_policy_is_analysed_squeezed_and_merged(finished, model, tmp_path):
    """The critic's own adapter has rank 3, the policy's 4."""
    run = runs_of(finished)[0]
    assert [path.name for path in (run / "final").glob("*.safetensors")] == ["adapter_model.safetensors"]
    analysis = squeeze(run)
    assert analysis["source_rank"] == 4
    assert analysis["num_layers"] == len(read_adapter(run / "final").tensors)
    told = CliRunner().invoke(app, ["squeeze", str(run), "--to", "2", "--out", str(tmp_path / "small")])
    assert told.exit_code == 0, told.output
    assert read_json(tmp_path / "small/adapter_config.json")["r"] == 2
    told = CliRunner().invoke(app, ["export", str(run), "--merge", "--out", str(tmp_path / "merged")])
    assert told.exit_code == 0, told.output
    before, after = (load_file(place / "model.safetensors") for place in (model, tmp_path / "merged"))
    assert before.keys() == after.keys()
    stored = read_adapter(run / "final")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in stored.tensors}
    for name, (a, b) in stored.tensors.items():
        wanted = before[f"{name}.weight"] + stored.scales[name] * (b @ a)
        torch.testing.assert_close(after[f"{name}.weight"], wanted, atol=1e-6, rtol=1e-5)


def first_step(folder: Path, model: Path, critic: str) -> Path:
    """A finished run of one step with several updates and this critic."""
    name = str(len(list(folder.iterdir())))
    path = single_run(folder, model, name, f"{GAE}[critic]\n{critic}", f"max_steps = 1\n{SEVERAL}")
    assert launch(load(path), folder / f"out{name}", NullObserver()).exit_status == 0
    return folder / f"out{name}"


def test_a_critic_of_its_own_does_not_touch_the_policy(model, tmp_path):
    """Its loss and learning rate change nothing of the policy's first step; one that shares the adapter does."""
    runs = [first_step(tmp_path, model, critic) for critic in (
        "vf_coef = 0.1\nlr = 0.001", "vf_coef = 3.0\nlr = 0.1\nlora_rank = 2",
        "vf_coef = 0.1\nshare_adapter = true", "vf_coef = 3.0\nshare_adapter = true",
    )]  # fmt: skip
    one, other, *_ = rows = [read_jsonl(run / "metrics.jsonl")[0] for run in runs]
    differing = {key for key in one if one[key] != other[key] and not is_timing_key(key)}
    assert differing <= {"loss/value_avg", "val/clipfrac_avg", "optim/critic_lr", "optim/critic_grad_norm"}
    assert {"optim/critic_lr", "loss/value_avg"} <= differing
    final = [(run / "final/adapter_model.safetensors").read_bytes() for run in runs]
    assert final[0] == final[1]
    assert len({*final}) == 3
    assert rows[2]["policy/approxkl_avg"] != one["policy/approxkl_avg"]


def batch_of(policy, step: int = 0, update: int = 0, target: float = 1.0) -> TrainBatch:
    """What one update trains on: a few answers that were all expected to be worth nothing."""
    samples = [
        replace(one, values=np.zeros(len(one)), value_targets=np.where(one.action_mask, target, 0.0))
        for one in rollout(policy.base, policy.lanes, policy.adapter)
    ]
    tokens = sum(int(one.action_mask.sum()) for one in samples)
    return TrainBatch(samples, Denominators(tokens, len(samples), action_tokens=tokens), step, (0,), update=update)


def gae_policy(base, lanes, **critic):
    """A policy with a critic and its objective."""
    sections = {"algorithm": {"advantage_mode": "gae"}, "critic": critic}
    return local_policy(base, lanes, **sections), objective_of(parse_dict(sections), "ppo")


def everything(policy) -> dict[str, torch.Tensor]:
    """All that an update may change."""
    snapshot = policy.snapshot(resumable=True)
    parts = {"weights": {"flat": snapshot.weights.flat}, "moments": snapshot.optimizer, **snapshot.critic}
    return {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> set[str]:
    """Which of them are equal to the bit; both have the same ones."""
    assert mine.keys() == theirs.keys()
    return {name for name in mine if torch.equal(mine[name], theirs[name])}


@pytest.mark.parametrize("share", [False, True])
def test_a_saved_critic_goes_on_as_it_would_have(base, lanes, tmp_path, share):
    """Weights, moments and step counts; and a snapshot is a copy, which training does not change before it is
    written."""
    policy, objective = gae_policy(base, lanes, share_adapter=share)
    policy.update(batch_of(policy), objective, 0.01)
    snapshot, saved = policy.snapshot(resumable=True), everything(policy)
    policy.update(batch_of(policy, 1), objective, 0.01)
    snapshot.write(tmp_path)
    after = everything(policy)
    assert not same(saved, after)
    assert len(saved) == (8 if share else 12)
    other, _ = gae_policy(base, lanes, share_adapter=share)
    other.load(tmp_path)
    assert same(everything(other), saved) == saved.keys()
    other.update(batch_of(other, 1), objective, 0.01)
    assert same(everything(other), after) == after.keys()


@pytest.mark.parametrize("share", [False, True])
def test_a_critic_that_is_not_finite_leaves_both_as_they_were(base, lanes, share):
    policy, objective = gae_policy(base, lanes, share_adapter=share)
    policy.update(batch_of(policy), objective, 0.01)
    before, version = everything(policy), policy.version
    with pytest.raises(NonFinite, match="the update was not applied"):
        policy.update(batch_of(policy, 1, target=float("inf")), objective, 0.01)
    assert same(everything(policy), before) == before.keys()
    assert policy.version == version


def test_a_critic_that_has_moved_is_a_change_of_weights(base, lanes):
    """While it trains alone, too: a step that fails after it cannot be taken back."""
    policy, objective = gae_policy(base, lanes, warmup_steps=1)
    adapter = policy.adapter.flat.detach().clone()
    policy.update(batch_of(policy), objective, 0.01)
    assert torch.equal(policy.adapter.flat.detach(), adapter)
    assert policy.version == 1
    policy.update(batch_of(policy, 1), objective, 0.01)
    assert policy.version == 2


def test_a_warm_up_that_fails_in_its_middle_is_not_saved_as_if_it_had_not_begun(model, tmp_path, monkeypatch):
    """The critic has taken one of the step's updates; retried, the run equals one that never failed."""
    several = "max_steps = 3\nsave_every = 1\nnonfinite_limit = 1\nminibatches = 2"
    path = single_run(tmp_path, model, "run", f"{GAE}[critic]\nwarmup_steps = 2\n", several)
    assert launch(load(path), tmp_path / "whole", NullObserver()).exit_status == 0

    def failing(passes, adapter, optimizer, batch, *rest, **named):
        if (batch.step, batch.update) == (0, 1):
            raise NonFinite("loss nan with gradient norm 1.0: the update was not applied")
        return train_step(passes, adapter, optimizer, batch, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(local, "train_step", failing)
        assert launch(load(path), tmp_path / "out", NullObserver()).exit_status == 1
    assert not (tmp_path / "out/checkpoints").exists()
    assert resume(tmp_path / "out", NullObserver(), retry_failed=True).exit_status == 0
    assert made(tmp_path / "out") == made(tmp_path / "whole")


def test_lanes_of_a_base_are_the_policys_after_its_critic_has_scored(base):
    """No lane stays active when values have been asked for."""
    lanes = Lanes(base)
    policy, _ = gae_policy(base, lanes)
    samples = rollout(base, lanes, policy.adapter)[:2]
    policy.score(samples, frozenset({local.Want.VALUES, local.Want.LOGPROBS}))
    assert lanes.mode.adapter is None
    lanes.detach()
