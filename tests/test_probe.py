"""The probe against what is known of the formulas, of the gradient, and of what it must leave alone."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hostile import HOSTILE, MARKER
from lane_cases import fresh_logits, local_policy, totals, trained
from lane_cases import rollout as sampled
from pages import Reader
from probe_cases import BINARY, probed, toy
from probe_predicts import main as predictions_and_findings
from safetensors.torch import load_file
from toycampaign import campaign, toy_world
from toymodels import qwen3_directory, toy_base
from typer.testing import CliRunner

from retrain.campaign.judging.probed import probe_digest, probe_lines, probe_path, whole_line
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.controller import launch
from retrain.cli import app
from retrain.config import load
from retrain.environments.single_turn import SingleTurn
from retrain.errors import CheckpointError, RunFailed, StorageError, UsageError
from retrain.files import dumps, read_jsonl
from retrain.maths import gradients
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes
from retrain.policy.objective import Objective, objective_of
from retrain.policy.protocol import TrainBatch
from retrain.probe import measure, store
from retrain.probe.page import probe_page
from retrain.probe.points import points_of
from retrain.probe.rollouts import success_gradients
from retrain.probe.store import Rows, Scaling, layers_of, products
from retrain.probe.words import Line, lines_of
from retrain.record.observer import NullObserver
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Sample, Turn


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    model = toy_world(folder)
    (folder / "binary.py").write_text(BINARY)
    return model


def of(report: dict[str, Any], label: str) -> dict[str, Any]:
    return next(each for each in report["points"][0]["conditions"] if each["label"] == label)


# -- formulas that are proportional -------------------------------------------------------------------------------


def test_rloo_and_dr_grpo_point_in_one_direction_and_differ_by_n_over_n_minus_one(tmp_path: Path, world: Path):
    report = probed(toy(tmp_path, world, ("dr_grpo", "none"), ("rloo", "none")))
    assert report["points"][0]["cosines"][0][1]["estimate"] == pytest.approx(1, abs=1e-6)
    length = of(report, "rloo+none")["length"]
    assert length["gradient"]["estimate"] == pytest.approx(4 / 3, rel=1e-5)
    assert length["adamw"]["estimate"] == pytest.approx(1, rel=1e-3)  # a factor is what AdamW takes out
    assert of(report, "rloo+none")["tokens"]["changed"] == 0


def test_maxrl_is_rloo_with_two_samples(tmp_path: Path, world: Path):
    report = probed(toy(tmp_path, world, ("rloo", "none"), ("maxrl", "none"), group=2), batches=5)
    assert report["points"][0]["cosines"][0][1]["estimate"] == pytest.approx(1, abs=1e-6)
    assert of(report, "maxrl+none")["length"]["gradient"]["estimate"] == pytest.approx(1, rel=1e-5)


def test_another_learning_rate_is_another_length_of_the_same_update(tmp_path: Path, world: Path):
    path = toy(tmp_path, world, ("grpo", "none"), ("grpo", "none"))
    text = path.read_text()
    place = text.rindex('transform_mode = "none"\n') + len('transform_mode = "none"\n')
    path.write_text(text[:place] + "lr = 0.03\n" + text[place:])
    report = probed(path)
    other = report["points"][0]["conditions"][1]
    assert other["length"]["adamw"]["estimate"] == pytest.approx(3)
    assert other["equal_lr"] == pytest.approx(0.01)
    assert other["length"]["gradient"]["estimate"] == pytest.approx(1)
    assert other["alignment"]["gain"]["estimate"] == pytest.approx(
        3 * report["points"][0]["conditions"][0]["alignment"]["gain"]["estimate"]
    )
    assert other["alignment"]["versus_baseline"]["estimate"] == pytest.approx(0, abs=1e-12)  # at equal length
    assert other["alignment"]["beyond_baseline"]["estimate"] == pytest.approx(
        other["alignment"]["gain"]["estimate"] * 2 / 3
    )


def test_the_learning_rate_to_set_is_one_of_the_file_not_of_its_schedule(tmp_path: Path, world: Path):
    """At step 2 of 4 the linear schedule is at half of ``lr``; what a file takes is ``lr`` itself."""
    path = toy(tmp_path, world, ("grpo", "none"), ("grpo", "none"), extra='[optimizer]\nschedule = "linear"\n')
    text = path.read_text()
    place = text.rindex('transform_mode = "none"\n') + len('transform_mode = "none"\n')
    path.write_text(text[:place] + "lr = 0.03\n" + text[place:])
    rates: list[float] = []
    original = measure.products
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "products", lambda *all: rates.extend(each.lr for each in all[3]) or original(*all))
        report = probed(path, batches=3, problems=0)
    assert rates == pytest.approx([0.005, 0.015])  # steps are as long as the schedule has them
    other = report["points"][0]["conditions"][1]
    assert (other["lr"], other["equal_lr"]) == (0.03, pytest.approx(0.01))
    assert any("set lr = 0.01 in it" in line.text for line in lines_of(report))


# -- the gradient -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalPolicy, list]:
    base = toy_base(tmp_path_factory.mktemp("lane"))
    lanes = Lanes(base)
    policy = local_policy(base, lanes, optimizer={"grad_clip_norm": 0.0})
    policy.adapter.load(trained(lanes, 1).tensors())
    return policy, sampled(base, lanes, policy.adapter)


def batch_of(samples: list) -> TrainBatch:
    counted = totals(samples)
    return TrainBatch(samples, replace(counted, action_tokens=counted.tokens), 0, ("test",))


UPDATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"training": {"update_dtype": "bfloat16"}},
    "dropout": {"lora": {"dropout": 0.3}},
    "shared critic": {"algorithm": {"advantage_mode": "gae"}, "critic": {"share_adapter": True}},
    "own critic": {"algorithm": {"advantage_mode": "gae"}},
}


def learner(lane: tuple[LocalPolicy, list], kind: str, **critic: Any) -> LocalPolicy:
    """A policy with the weights of the lane's and the settings of this kind; a critic's head has left its beginning."""
    sections = {"optimizer": {"grad_clip_norm": 0.0}, **UPDATES[kind]}
    if "critic" in kind:
        sections["critic"] = {**sections.get("critic", {}), **critic}
    made = local_policy(lane[0].base, lane[0].lanes, **sections)
    made.adapter.load(lane[0].adapter.tensors())
    if made.critic is not None:
        with torch.no_grad():
            made.critic.head.flat.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(5))
    return made


def valued(samples: list) -> list:
    """The samples with made-up values from before and targets, which a critic's loss reads."""
    noise = np.random.default_rng(3)
    made = [{key: np.where(one.action_mask, noise.normal(size=len(one)), 0.0) for key in ("values", "value_targets")}
            for one in samples]  # fmt: skip
    return [replace(one, **values) for one, values in zip(samples, made, strict=True)]


@pytest.mark.parametrize("kind", UPDATES)
def test_the_gradient_is_the_updates_own(lane: tuple[LocalPolicy, list], kind: str):
    policy, samples = learner(lane, kind), valued(lane[1])
    objective = objective_of(policy.config, "ppo")
    found = policy.gradient(batch_of(samples), objective)
    assert torch.equal(found, policy.gradient(batch_of(samples), objective))
    policy.update(batch_of(samples), objective, 1e-3)
    assert policy.adapter.flat.grad is not None
    assert torch.equal(found, policy.adapter.flat.grad)
    assert float(found.norm()) > 0
    plain = learner(lane, "plain")
    alone = plain.gradient(batch_of(samples), objective_of(plain.config, "ppo"))
    assert torch.equal(found, alone) == (kind in ("plain", "own critic"))  # the others are not the plain one's


@pytest.mark.parametrize("kind", ["shared critic", "own critic"])
def test_the_gradient_in_a_critics_warm_up_is_that_which_follows_it(lane: tuple[LocalPolicy, list], kind: str):
    policy, samples = learner(lane, kind, warmup_steps=2), valued(lane[1])
    objective = objective_of(policy.config, "ppo")
    found = policy.gradient(batch_of(samples), objective)
    policy.update(replace(batch_of(samples), step=2), objective, 1e-3)
    assert policy.adapter.flat.grad is not None
    assert torch.equal(found, policy.adapter.flat.grad)
    assert float(found.norm()) > 0


def test_the_gradient_is_linear_in_the_advantages(lane: tuple[LocalPolicy, list]):
    policy, samples = lane
    noise = np.random.default_rng(0)
    others = [replace(each, advantages=np.where(each.action_mask, noise.normal(size=len(each)), 0)) for each in samples]
    both = [replace(a, advantages=a.advantages + b.advantages) for a, b in zip(samples, others, strict=True)]
    one, two, together = (policy.gradient(batch_of(each), Objective()) for each in (samples, others, both))
    torch.testing.assert_close(one + two, together, rtol=1e-4, atol=1e-6)


def test_a_gradient_changes_nothing(lane: tuple[LocalPolicy, list]):
    policy, samples = lane
    policy.update(batch_of(samples), Objective(), 1e-3)  # so that AdamW has a state
    torch.manual_seed(7)  # a state that no dropout of a test before can have left

    def bits() -> bytes:
        state = policy.optimizer.state_dict()["state"][0]
        moments = [state[key].numpy().tobytes() for key in ("exp_avg", "exp_avg_sq", "step")]
        return b"".join([policy.adapter.flat.detach().numpy().tobytes(), *moments, bytes(torch.get_rng_state())])

    before, version = bits(), policy.version
    policy.gradient(batch_of(samples), Objective())
    dropping = local_policy(policy.base, policy.lanes, lora={"dropout": 0.5})
    dropping.gradient(batch_of(samples), Objective())
    assert (bits(), policy.version) == (before, version)


def test_without_anything_to_train_on_the_gradient_is_zero(lane: tuple[LocalPolicy, list]):
    assert not bool(lane[0].gradient(TrainBatch([], totals([]), 0, ()), Objective()).any())


# -- held-out success ---------------------------------------------------------------------------------------------

WORTH = 40
"""Tokens that are right, from the first."""
DRAWS, SAMPLES = 10_000, 8


def test_the_gradient_of_success_is_that_of_enumeration_over_ten_thousand_draws(lane: tuple[LocalPolicy, list]):
    """One-token answers: the success rate is a sum over the vocabulary, and its gradient autograd's."""
    policy, _ = lane
    prompt_ids = (5, 17, 60, 44)
    adapter = policy.adapter
    blank = sampled_token(prompt_ids, 0, 0.0)
    logprobs_V = torch.log_softmax(fresh_logits(policy.lanes, adapter, blank)[0].float(), -1)
    success = logprobs_V.exp()[:WORTH].sum()
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(success, adapter.views)])
    noise = np.random.default_rng(0)
    told_V = logprobs_V.detach().double()
    share_V = told_V.exp().numpy()
    tokens = noise.choice(len(share_V), size=DRAWS, p=share_V / share_V.sum())
    prompt = Prompt(Problem("p", "?", ""), "?", prompt_ids)
    rollouts = [one_token(prompt, int(token), float(told_V[token])) for token in tokens]
    groups = [Group(prompt, rollouts[i : i + SAMPLES]) for i in range(0, DRAWS, SAMPLES)]
    run = SimpleNamespace(policy=policy, config=policy.config, step=0, stream=("toy",))
    found = -torch.stack(success_gradients(run, groups, parts=25)).double()  # type: ignore[arg-type]
    directions = torch.randn(12, found.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    directions[0] = exact.double()
    projected, wanted = found @ directions.T, directions @ exact.double()
    errors = projected.std(0) / 5
    assert bool(((projected.mean(0) - wanted).abs() < 4 * errors).all())
    assert float(wanted[0]) > 5 * float(errors[0])  # it could have been told from 0


def one_token(prompt: Prompt, token: int, logprob: float) -> Rollout:
    action = Action([token], "x", np.array([logprob]), None, "stop")
    return Rollout(prompt, [Turn(prompt.token_ids, action)], RewardResult(float(token < WORTH)))


def sampled_token(prompt_ids: tuple[int, ...], token: int, logprob: float):
    return Sample.single_turn(prompt_ids, [token], np.array([logprob]), np.zeros(1))


# -- the store ----------------------------------------------------------------------------------------------------


def test_rows_on_disk_give_the_same_products_as_rows_in_memory(lane: tuple[LocalPolicy, list]):
    adapter = lane[0].adapter
    width = adapter.flat.numel()
    vectors = torch.randn(2 * 3 + 2, width, generator=torch.Generator().manual_seed(1))
    scalings, moments = [Scaling(0.1, 1.0, 1e-8), Scaling(0.2, 0.0, 1e-8)], torch.rand(width) + 0.1
    found = []
    for memory in (None, 0):
        rows = Rows(len(vectors), width, memory)
        assert rows.on_disk == (memory == 0)
        for number, vector in enumerate(vectors):
            rows.put(number, vector)
        found.append(products(rows, layers_of(adapter), 3, scalings, moments))
        rows.close()
    one, two = found
    np.testing.assert_array_equal(one.gram, two.gram)
    assert one.steps_at is not None
    assert two.steps_at is not None
    np.testing.assert_array_equal(one.steps_at[1], two.steps_at[1])
    plain = vectors.double().numpy()
    np.testing.assert_allclose(one.gram.reshape(6, 6), plain[:6] @ plain[:6].T, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(one.wanted, plain[6:] @ plain[6:].T, rtol=1e-9, atol=1e-9)
    clipped = plain[:3] / np.maximum(1.0, np.linalg.norm(plain[:3], axis=1, keepdims=True))
    steps = 0.1 * clipped / (np.sqrt((clipped**2).mean(0)) + 1e-8)
    np.testing.assert_allclose(one.steps[0][0], steps @ steps.T, rtol=1e-9)
    here = 0.1 * clipped / (np.sqrt(moments.double().numpy()) + 1e-8)
    np.testing.assert_allclose(one.steps_at[1][0], here @ plain[6:].T, rtol=1e-8, atol=1e-12)
    total = sum(table[:, 1] for table in one.layers.values())
    np.testing.assert_allclose(total, [np.einsum("ii->", one.gram[c, :, c]) for c in range(2)])


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file's blocks are taken at once: a mapped file that finds no room later ends the process."""
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    rows = Rows(3, 100_000, memory=0)
    assert isinstance(rows.table, np.memmap)
    descriptor = rows._file.fileno()  # type: ignore[union-attr]  # it has no name
    assert os.fstat(descriptor).st_blocks * 512 >= 4 * 3 * 100_000
    rows.close()
    made, original = [], store.tempfile.TemporaryFile
    monkeypatch.setattr(store.tempfile, "TemporaryFile", lambda **keys: made.append(original(**keys)) or made[-1])

    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=f"^{tmp_path} .*cannot be written: no space left on device"):
        Rows(3, 100_000, memory=0)
    assert made[0].closed
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    rows = Rows(3, 100_001, memory=0)
    assert os.fstat(rows._file.fileno()).st_size == 4 * 3 * 100_001  # type: ignore[union-attr]
    rows.close()


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_campaign(tmp_path_factory: pytest.TempPathFactory, world: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trained")
    path = toy(folder, world, ("grpo", "none"), ("maxrl", "gtpo"), extra="[squeeze]\nenabled = false\n")
    assert launch(load(path, ()), folder / "out", NullObserver()).exit_status == 0
    return path, folder / "out"


def digests(directory: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_run_is_probed_at_its_checkpoints_and_left_as_it_is(trained_campaign: tuple[Path, Path]):
    path, out = trained_campaign
    run = out / "runs" / "grpo+none_s1"
    before = digests(out)
    report = probed(path, "base", str(run / "checkpoints" / "step_000002"), str(run), str(run / "final"))
    assert digests(out) == before
    assert [point["step"] for point in report["points"]] == [0, 2, 4, 4]
    base, early, late, final = report["points"]
    assert base["conditions"][1]["length"]["adamw_here"] is None  # no optimizer has a state there
    assert early["conditions"][1]["length"]["adamw_here"] is not None
    assert final["conditions"][1]["length"]["adamw_here"] is None  # weights alone
    assert early["conditions"][0]["norm"] != base["conditions"][0]["norm"]
    assert late["conditions"][0]["norm"] == pytest.approx(final["conditions"][0]["norm"], rel=1e-6)
    again = probed(path, str(run))
    for key in ("cosines", "conditions", "success"):
        assert dumps(again["points"][0][key]) == dumps(late[key])  # the same again, to the last bit


@pytest.mark.parametrize(("at", "step"), [("base", 0), ("checkpoints/step_000002", 2)])
@pytest.mark.parametrize("number", [0, 1])
def test_the_first_batch_is_that_which_training_takes(
    trained_campaign: tuple[Path, Path], number: int, at: str, step: int
):
    """Also at a checkpoint of either condition: the answers that the run drew there next, their rewards, and the
    gradient of its step."""
    path, out = trained_campaign
    run = out / "runs" / ("grpo+none_s1", "maxrl+gtpo_s1")[number]
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[step])
    answers = [each for each in read_jsonl(run / "emergence" / "generations.jsonl") if each["step"] == step]
    norms: list[float] = []
    batches: list[list[Group]] = []
    sampling, original = measure.sample_batches, measure.gradient_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "sample_batches", lambda *given: batches.extend(b := sampling(*given)) or b)
        patch.setattr(measure, "gradient_of", lambda *given: norms.append(float((g := original(*given)).norm())) or g)
        report = probed(path, at if at == "base" else str(run / at), batches=3, problems=0)
    assert norms[3 * number] == pytest.approx(row["optim/grad_norm"], rel=1e-4)
    drawn = [(one.text, one.reward.total_reward) for group in batches[0] for one in group.rollouts]
    assert drawn == [(each["completion"], each["reward"]) for each in answers]
    assert len(drawn) == 12
    assert report["points"][0]["heldout"] is None
    assert report["points"][0]["conditions"][0]["alignment"] is None


def test_second_moments_are_corrected_with_the_beta2_that_made_them(
    tmp_path: Path, trained_campaign: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "out" / "runs" / "grpo+none_s1"
    shutil.copytree(trained_campaign[1] / "runs" / "grpo+none_s1", run)
    found: list[torch.Tensor | None] = []
    original = measure.products
    monkeypatch.setattr(measure, "products", lambda *given: found.append(given[4]) or original(*given))
    path = tmp_path / "other.toml"
    path.write_text(trained_campaign[0].read_text() + "[optimizer]\nbeta2 = 0.5\n")
    probed(path, str(run), batches=3, problems=0)
    stored = load_file(run / "checkpoints" / "step_000004" / "optimizer.safetensors")
    assert float(stored["step"]) == 4
    assert found[0] is not None
    torch.testing.assert_close(found[0], stored["exp_avg_sq"] / (1 - 0.999**4), rtol=1e-6, atol=0)
    facts = json.loads((run / "config.json").read_text())
    facts.pop("optimizer")
    (run / "config.json").write_text(json.dumps(facts))
    report = probed(path, str(run), batches=3, problems=0)
    assert found[1] is None  # nobody knows
    assert report["points"][0]["conditions"][1]["length"]["adamw_here"] is None


def test_a_file_that_goes_on_from_a_run_is_probed_there(tmp_path: Path, trained_campaign: tuple[Path, Path]):
    run = trained_campaign[1] / "runs" / "grpo+none_s1"
    begin = run / "checkpoints" / "step_000002"
    path = tmp_path / "on.toml"
    path.write_text(trained_campaign[0].read_text() + f'[resume]\nfrom = "{begin}"\n')
    asked = ["probe", str(path), "--batches", "3", "--problems", "0"]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    report = json.loads(probe_path(path).read_text())
    (point,) = report["points"]
    assert (point["at"], point["step"]) == (str(begin), 2)
    there = probed(trained_campaign[0], str(begin), batches=3, problems=0)["points"][0]
    assert dumps(point["conditions"][0]) == dumps(there["conditions"][0])
    assert all(line["text"].startswith("maxrl+gtpo at step 2: ") for line in report["lines"])
    assert f"probe         {report['lines'][0]['text']}" in CliRunner().invoke(app, ["explain", str(path)]).output
    specs = Plan.of(load(path, ())).specs
    assert probe_lines(path, specs)
    assert probe_lines(path, Plan.of(load(path, [f"resume.from={str(run)!r}"])).specs) == []  # another beginning
    assert CliRunner().invoke(app, [*asked, "--at", "base"]).exit_code == 0
    report = json.loads(probe_path(path).read_text())
    assert [point["step"] for point in report["points"]] == [0]
    assert all(line["text"].startswith("maxrl+gtpo at base: ") for line in report["lines"])
    (point,) = points_of([], str(run / "final"))
    assert (point.directory, point.step, point.checkpoint) == (run / "final", 0, False)  # its runs count from 0
    with pytest.raises(UsageError, match=r"^\[resume\] from = nowhere is not a directory"):
        points_of([], "nowhere")


# -- bad input ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_probed_is_told_in_one_line(tmp_path: Path, world: Path, trained_campaign: tuple[Path, Path]):
    one = toy(tmp_path, world, ("grpo", "none"))
    with pytest.raises(UsageError, match=r"^toy has one condition"):
        probed(one)
    path = toy(tmp_path, world, ("grpo", "none"), ("rloo", "none"))
    with pytest.raises(UsageError, match="too few for an interval"):
        probed(path, batches=2)
    with pytest.raises(UsageError, match="is not a directory"):
        probed(path, str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"is a campaign: name one of its runs, such as .*grpo\+none_s1"):
        probed(path, str(trained_campaign[1]))
    with pytest.raises(UsageError, match="neither a checkpoint nor an adapter"):
        probed(path, str(tmp_path))
    uniform = toy(tmp_path, world, ("grpo", "none"), ("rloo", "none"), function="always")
    with pytest.raises(RunFailed, match="all groups of 3 batches have equal rewards"):
        probed(uniform, batches=3, problems=0)


def test_what_code_of_the_users_raises_is_told_in_one_line(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
):
    path = toy(tmp_path, world, ("grpo", "none"), ("rloo", "none"), function="broken")
    with pytest.raises(RunFailed, match=r"^--at base: no rollout has a reward: .*no such column"):
        probed(path, batches=3, problems=0)

    def results(self: SingleTurn, episodes: Any) -> None:
        raise ValueError("the grader is away")

    monkeypatch.setattr(SingleTurn, "results", results)
    done = CliRunner().invoke(app, ["probe", str(path), "--batches", "3"])
    assert done.exit_code == 1
    assert "rollouts failed: ValueError: the grader is away (test_probe.py:" in done.output
    assert isinstance(done.exception, SystemExit)  # no traceback


def test_a_checkpoint_of_another_base_or_rank_is_refused(
    tmp_path: Path, world: Path, trained_campaign: tuple[Path, Path]
):
    at = str(trained_campaign[1] / "runs" / "grpo+none_s1")
    other = tmp_path / "other"
    other.mkdir()
    model = qwen3_directory(other / "model", ["0 2 4 6 8 the answer"], seed=5)
    (other / "binary.py").write_text(BINARY)
    with pytest.raises(CheckpointError, match="other base weights"):
        probed(toy(tmp_path, model, ("grpo", "none"), ("rloo", "none")), at)
    path = toy(tmp_path, world, ("grpo", "none"), ("rloo", "none"))
    path.write_text(path.read_text().replace("lora_rank = 4", "lora_rank = 2"))
    with pytest.raises(UsageError, match=r"^--at .* has LoRA scale 8, this run 16: set \[model\] lora_rank"):
        probed(path, at)
    path.write_text(path.read_text() + "[lora]\nalpha = 16\n")
    with pytest.raises(UsageError, match=r"^--at .* does not fit grpo\+none: "):
        probed(path, at)


def test_a_backend_without_gradients_is_refused(tmp_path: Path, world: Path):
    (tmp_path / "own_backend.py").write_text("class Backend:\n    pass\n")
    path = toy(
        tmp_path, world, ("grpo", "none"), ("rloo", "none"), extra='[backend]\nbackend = "own_backend:Backend"\n'
    )
    with pytest.raises(UsageError, match="own_backend:Backend gives no gradients"):
        probed(path)


def test_conditions_with_another_adapter_are_left_out_and_told(tmp_path: Path, world: Path):
    path = toy(tmp_path, world, ("grpo", "none"), ("rloo", "none"), ("grpo", "none"), allow_confounded=True)
    text = path.read_text()
    place = text.rindex('transform_mode = "none"\n') + len('transform_mode = "none"\n')
    path.write_text(text[:place] + "lora_rank = 2\n" + text[place:])
    report = probed(path, batches=3, problems=0)
    assert report["conditions"] == ["grpo+none", "rloo+none"]
    assert "grpo+none~lora_rank=2 is left out" in report["notes"][0]


# -- beside the file ----------------------------------------------------------------------------------------------


def test_lines_are_quoted_as_long_as_they_are_of_these_settings(tmp_path: Path, world: Path):
    path = campaign(tmp_path, world)
    plan = Plan.of(load(path, ()))
    assert probe_lines(path, plan.specs) == []
    report = {"digest": probe_digest(plan.specs), "lines": [{"text": str(i)} for i in range(3)]}
    probe_path(path).write_text(dumps(report))
    assert probe_lines(path, plan.specs) == ["0", "1"]
    other = Plan.of(load(path, ["training.lr=0.02"]))
    assert probe_lines(path, other.specs) == []
    more = Plan.of(load(path, ["campaign.seeds=[1, 2, 3]", "logging.log_kl=true"]))
    assert probe_lines(path, more.specs) == ["0", "1"]
    probe_path(path).write_text("{")
    assert probe_lines(path, plan.specs) == []


def test_what_a_campaign_could_show_is_said_of_the_seeds_and_the_rule_of_now(tmp_path: Path, world: Path):
    path = campaign(tmp_path, world)
    plan = Plan.of(load(path, ()))
    lines = [{"text": "the same", "equal": True}, {"text": "worse", "equal": False}]
    probe_path(path).write_text(dumps({"digest": probe_digest(plan.specs), "lines": lines}))
    assert probe_lines(path, plan.specs) == ["the same; 2 seeds would be too few for a verdict anyway", "worse"]

    def least(*sets: str) -> float:
        first, second = probe_lines(path, Plan.of(load(path, sets)).specs)
        assert second == "worse"
        return float(re.search(r"a campaign of \d+ seeds could show only ([\d.]+) points", first)[1])  # type: ignore[index]

    seeds = "campaign.seeds=[1, 2, 3, 4, 5, 6, 7, 8]"
    assert 4 < least(seeds) < 6  # 8 pairs find 1.2 to 1.3 standard deviations, and 4 points are one
    assert least("campaign.seeds=" + str(list(range(1, 17)))) < least(seeds)
    assert least(seeds, "campaign.test='normal'") < least(seeds) < least(seeds, "campaign.sequential='pocock'")


# -- words, table, page -------------------------------------------------------------------------------------------


def interval(estimate: float, low: float | None = None, high: float | None = None) -> dict[str, float | None]:
    return {"estimate": estimate, "low": low, "high": high}


def told(cosine: Any, *, length: float = 1.0, adamw: float = 1.0, versus: Any = None, expected: Any = None,
         same: bool = True, **place: Any) -> list[Line]:  # fmt: skip
    """The sentences about one condition with these numbers, beside a baseline whose batches have cosine 0.2."""
    condition = {
        "label": "other",
        "lr": 0.01,
        "equal_lr": 0.01 / adamw,
        "expected_cosine": expected,
        "same_rollouts": same,
        "length": {"gradient": interval(length), "adamw": interval(adamw)},
        "alignment": {"versus_baseline": versus},
    }
    point = {
        "at": "base",
        "step": 0,
        "conditions": [{**condition, "label": "baseline", "same_rollouts": True}, condition],
        "cosines": [[interval(0.2, 0.1, 0.3), cosine], [cosine, interval(0.2, 0.1, 0.3)]],
        **place,
    }
    return lines_of({"conditions": ["baseline", "other"], "points": [point]})


def test_the_same_update_is_told_and_expects_no_difference():
    (line,) = told(interval(0.999, 0.998, 1.0))
    assert (line.kind, line.equal) == ("same", True)
    assert "expect no difference" in line.text
    (noise,) = told(interval(0.9, 0.8, 0.95), expected=interval(0.98, 0.9, 1.0))
    assert (noise.kind, noise.equal) == ("noise", True)
    assert "two batches of the baseline alone have 0.200" in noise.text
    assert whole_line(vars(noise), "that is little") == f"{noise.text}; that is little"
    (other,) = told(interval(0.15, 0.05, 0.25))
    assert whole_line(vars(other), "that is little") == other.text


def test_a_sentence_says_where_it_holds_unless_that_is_where_runs_begin():
    same = interval(0.999, 0.998, 1.0)
    assert told(same)[0].text.startswith("other: ")
    assert told(same, at="logs/run", step=30)[0].text.startswith("other at step 30: ")
    assert told(same, at="adapters/mine", step=None)[0].text.startswith("other at adapters/mine: ")


def test_without_rollouts_in_common_expected_updates_alone_are_compared():
    """The cosine of two batches is that of their noise: 0.15 would be another update, on the same rollouts."""
    kinds = {}
    for name, found in {"same": (0.995, 1.0), "different": (0.5, 0.9), "unclear": (0.5, 1.0)}.items():
        (line,) = told(None, same=False, expected=interval(0.9, *found))
        kinds[name] = line.kind, line.equal
        assert f"on rollouts of its own; cosine of expectations 0.900 [{found[0]:.3f}, {found[1]:.3f}]" in line.text
    assert kinds == {"same": ("same", True), "different": ("different", False), "unclear": ("unclear", False)}
    for nothing in (None, interval(0.9)):
        (line,) = told(None, same=False, expected=nothing)
        assert line.kind == "unclear"
        assert "type more --batches" in line.text
    worse = told(None, same=False, expected=interval(0.9, 0.5, 1.0), versus=interval(-0.002, -0.003, -0.001))
    assert [line.kind for line in worse] == ["worse", "different"]


def test_a_condition_with_rollouts_of_its_own_is_marked(tmp_path: Path, world: Path):
    path = toy(tmp_path, world, ("grpo", "none"), ("rloo", "none"), ("grpo", "none"), allow_confounded=True)
    text = path.read_text()
    place = text.rindex('transform_mode = "none"\n') + len('transform_mode = "none"\n')
    path.write_text(text[:place] + "group_size = 6\n" + text[place:])
    calls, cosine, expected = [], gradients.cosine_interval, gradients.expected_cosine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "cosine_interval", lambda *given: calls.append("cosine") or cosine(*given))
        patch.setattr(gradients, "expected_cosine", lambda *given: calls.append("expected") or expected(*given))
        patch.setattr(measure, "_layers", lambda *given: calls.append("layers") or [])
        told = CliRunner().invoke(app, ["probe", str(path), "--batches", "3", "--problems", "0", "--html"])
    assert told.exit_code == 0, told.output
    report = json.loads(probe_path(path).read_text())
    (point,) = report["points"]
    assert [each["same_rollouts"] for each in point["conditions"]] == [True, True, False]
    assert [each["rollouts"] for each in point["conditions"]] == [0, 0, 2]
    pairs = [[cell is not None for cell in row] for row in point["cosines"]]
    assert pairs == [[True, True, False], [True, True, False], [False, False, True]]
    assert point["cosines"][0][1] == point["cosines"][1][0]
    assert sorted(calls) == ["cosine", *["expected"] * 3, "layers", "layers"]  # each pair once, with the baseline alone
    other = point["conditions"][2]
    assert other["tokens"] is None
    assert other["layers"] == []
    about = [line["text"] for line in report["lines"] if line["condition"] == "grpo+none~group_size=6"]
    assert any("rollouts of its own" in text for text in about)
    assert not any("two batches of the baseline" in text for text in about)
    assert re.search(r"^3 grpo~group_size=6 +\* +\* +\([−0-9.]+\)$", told.output, re.MULTILINE)
    assert "* other rollouts: in the table the cosine of expectations, in the matrix none" in told.output
    page = probe_path(path, "html").read_text()
    assert ">*</text>" in page
    assert "Rollouts of its own" in page


def test_another_direction_is_told_where_noise_does_not_explain_it():
    (line,) = told(interval(0.9, 0.8, 0.95), expected=interval(0.9, 0.85, 0.95))
    assert line.kind == "different"
    (line,) = told(interval(0.15, 0.05, 0.25))
    assert line.kind == "different"
    (line,) = told(None)
    assert "no batch has a gradient" in line.text


def test_a_length_is_told_with_what_adamw_leaves_of_it():
    kinds = {line.kind: line.text for line in told(interval(0.999, 0.998, 1.0), length=2.7, adamw=1.05)}
    assert "2.7 times as long, which AdamW scales away" in kinds["length"]
    assert "no other lr is needed" in kinds["length"]
    kinds = {line.kind: line.text for line in told(interval(0.999, 0.998, 1.0), length=2.7, adamw=2.0)}
    assert "set lr = 0.005 in it, or compare learning rates" in kinds["length"]
    kinds = {line.kind: line.text for line in told(interval(0.999, 0.998, 1.0), adamw=2.0)}
    assert "set lr = 0.005" in kinds["length"]


def test_the_same_direction_in_longer_steps_expects_nothing():
    """campaigns/lr.toml: at cosine 1 the rate of twice the size ended 8.3 points below."""
    for cosine, expected in ((interval(1.0, 1.0, 1.0), None), (interval(0.9, 0.8, 0.95), interval(0.98, 0.9, 1.0))):
        found = told(cosine, expected=expected, length=1.0, adamw=2.0)
        assert [line.kind for line in found] == ["length", "direction"]
        assert not any(line.equal for line in found)
        assert "expect no difference" not in "".join(line.text for line in found)
        assert "in AdamW steps 2 times as long: a difference would be one of learning rates" in found[1].text
    (own,) = told(None, same=False, expected=interval(0.999, 0.995, 1.0), adamw=1.3)
    assert (own.kind, own.equal) == ("direction", False)
    assert [line.kind for line in told(interval(1.0, 1.0, 1.0), adamw=1.2)] == ["same"]


def test_alignment_decides_what_to_expect():
    worse = told(interval(0.9, 0.8, 0.95), versus=interval(-0.002, -0.003, -0.001))
    assert worse[0].kind == "worse"
    assert "−0.20 [−0.30, −0.10] points a step" in worse[0].text
    better = told(interval(0.9, 0.8, 0.95), versus=interval(0.002, 0.001, 0.003))
    assert better[0].kind == "better"
    assert all(line.kind not in ("better", "worse") for line in told(interval(0.9), versus=interval(0, -0.1, 0.1)))
    nothing = interval(-0.00004, -0.00006, -0.00002)  # what would be printed as −0.00 [−0.01, −0.00]
    assert [line.kind for line in told(interval(0.999, 0.998, 1.0), versus=nothing)] == ["same"]


def test_the_command_prints_keeps_and_draws(tmp_path: Path, world: Path):
    path = toy(tmp_path, world, ("grpo", "none"), ("rloo", "none"), ("maxrl", "gtpo"))
    arguments = ["probe", str(path), "--batches", "3", "--problems", "4", "--samples", "4", "--html"]
    done = CliRunner().invoke(app, [*arguments, "--at", "base"])
    assert done.exit_code == 0, done.output
    assert "rloo+none" in done.output
    assert f"kept in {probe_path(path)}, {probe_path(path, 'html')}" in done.output
    report = json.loads(probe_path(path).read_text())
    assert [each["label"] for each in report["points"][0]["conditions"]] == report["conditions"]
    first = report["lines"][0]["text"]
    explained = CliRunner().invoke(app, ["explain", str(path)])
    assert f"probe         {first}" in explained.output
    assert f"note: probe: {first}" in CliRunner().invoke(app, ["check", str(path)]).output
    probe_path(path).unlink()
    explained = CliRunner().invoke(app, ["explain", str(path)])
    assert f"retrain probe {path} compares the conditions' updates before any run" in explained.output
    for point in report["points"]:  # what a model or a file wrote stays text
        point["at"] = HOSTILE["script"]
        for condition in point["conditions"][1:]:
            condition["label"] = HOSTILE["attribute"]
            for shown in condition["tokens"]["shown"]:
                shown["tokens"] = [[text, 2.0] for text in HOSTILE.values()]
                shown["prompt"] = shown["problem"] = HOSTILE["script_end"]
    report["lines"][0]["text"] = report["name"] = HOSTILE["image"]
    report["points"].append({**report["points"][0], "step": 3})
    reader = Reader(probe_page(report))
    assert reader.tags.count("script") == 1  # the page's own
    assert "img" not in reader.tags
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert any(MARKER in text for text in reader.texts)
    assert any("Over training" in text for text in reader.texts)


# -- what probes predicted, beside what was found -------------------------------------------------------------------


def test_predictions_stand_beside_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "toy.probe.json"

    def written(*alignments: Any) -> str:
        conditions = [{"label": f"c{i}", "alignment": each} for i, each in enumerate(alignments)]
        points = [{"step": 0, "conditions": conditions}, {"step": 2, "conditions": conditions}]
        labels = [each["label"] for each in conditions]
        path.write_text(dumps({"file": "toy.toml", "baseline": "c0", "conditions": labels, "points": points}))
        return str(path)

    def gain(low: float | None, high: float | None) -> dict[str, Any]:
        same = interval(1e-18, 1e-19, 1e-17)  # nothing but rounding
        return {"beyond_baseline": interval(0.01, low, high), "versus_baseline": same}

    predictions_and_findings([written(gain(None, None), gain(0.005, 0.02), gain(-0.01, 0.02)), "c1=2.5", "c2=-1"])
    one, none = "+1.00 [+0.50, +2.00] (told)", "+0.00 [+0.00, +0.00]"
    assert capsys.readouterr().out.splitlines() == [
        "steps as they are:",
        f"c1: start {one}, step 2 {one}; found +2.5",
        "c2: start +1.00 [−1.00, +2.00], step 2 +1.00 [−1.00, +2.00]; found −1.0",
        "steps of the baseline's length:",
        f"c1: start {none}, step 2 {none}; found +2.5",
        f"c2: start {none}, step 2 {none}; found −1.0",
    ]
    for made, given, words in (
        ([None, None], "c1=1", "toy.toml predicts nothing at start: probe again without --problems 0"),
        ([gain(0, 0), gain(None, None)], "c1=1", "has no interval for c1 at start: probe again with more"),
        ([gain(0, 0), gain(0, 0)], "c0=1", "c0 is the baseline of toy.toml: name another"),
        ([gain(0, 0), gain(0, 0)], "c9=1", "has no condition c9: c0, c1"),
        ([gain(0, 0), gain(0, 0)], "c1=much", "c1=much ends in no number of points"),
    ):
        with pytest.raises(SystemExit, match=words):
            predictions_and_findings([written(*made), given])
    with pytest.raises(SystemExit, match=r"type FILE\.probe\.json first"):
        predictions_and_findings(["c1=1", str(path)])
