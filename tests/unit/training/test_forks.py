import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import run_cli, toy_toml, toy_world, train
from helpers.models import campaign_head, qwen3_directory

from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.config.campaign import condition_name
from retrain.errors import UsageError
from retrain.files import read_json, read_jsonl, sha256, write_json
from retrain.probe.forks import FORECAST, plan_fork, run_fork

STEPS, AT = 6, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "training": {"max_tokens": 8, "lr": 0.03, "save_every": 1, "eval_every": 1, "keep_last": 0},
    "optimizer": {"schedule": "linear", "warmup_steps": 2},
    "evaluation": {"problems": 6, "temperature": 0},
    "inference": {"dtype": "float64"},
}
SEPA = {"steps": 3, "delay_steps": 1, "correct_rate_gate": 0}
CONDITIONS = (("grpo", "none"), ("maxrl", "gtpo_sepa"), ("rloo", "none"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return toy_world(tmp_path_factory.mktemp("world"))


def toy(folder: Path, model: Path, *conditions: tuple[str, str], last: str = "", **keys: Any) -> Path:
    """A campaign file; ``last`` is a line of the last condition. Its metric is the mean reward: no answer is right."""
    path = folder / "toy.toml"
    keys = {"seeds": [1], "max_steps": STEPS, "primary_metric": "final:reward_mean", "allow_confounded": True, **keys}
    head = campaign_head(*conditions, **keys)
    sepa = SEPA if any(transform == "gtpo_sepa" for _, transform in conditions) else {}
    path.write_text(f"{head}{last}\n{toy_toml(model, sepa=sepa, **SETTINGS)}")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trained")
    path = toy(folder, model, *CONDITIONS)
    train(path, folder / "out")
    return path, folder / f"out/runs/grpo+none_s1/checkpoints/step_{AT:06d}"


def forked(path: Path, checkpoint: Path, *sets: str, steps: int = 2) -> dict[str, Any]:
    return run_fork(plan_fork(Plan.of(load(path, sets)), checkpoint, steps, seeds=2), lambda text: None)


@pytest.fixture(scope="module")
def report(trained) -> dict[str, Any]:
    """A fork of two steps from that checkpoint."""
    return forked(*trained)


def changes(report: dict[str, Any]) -> dict[str, dict[int, float]]:
    return {each["label"]: each["changes"] for each in report["conditions"]}


def rewards(run: Path) -> dict[int, float]:
    return {row["step"]: row["eval/heldout/reward_mean"] for row in read_jsonl(run / "evals.jsonl")}


def test_the_command_ranks_the_conditions_and_writes_nothing(trained: tuple[Path, Path]):
    path, checkpoint = trained
    before = {file: file.stat().st_mtime_ns for file in path.parent.rglob("*")}
    typed = ["probe", str(path), "--fork", "2", "--at", str(checkpoint), "--seeds", "3"]
    table, printed = run_cli(*typed), run_cli(*typed, "--json")
    assert (table.exit_code, printed.exit_code) == (0, 0), table.output
    report = json.loads(printed.stdout)
    assert {file: file.stat().st_mtime_ns for file in path.parent.rglob("*")} == before
    assert (report["run"], report["step"], report["end"], report["max_steps"]) == ("grpo+none_s1", AT, AT + 2, STEPS)
    assert report["seeds"] == [1001, 1002, 1003]
    assert report["share"] == pytest.approx(3 * 3 * 2 / (3 * 1 * STEPS))
    assert report["tokens"] > 0
    assert report["notes"] == []
    # The held-out set is answered greedily: each seed sees what the run saw at this checkpoint.
    assert report["before"] == pytest.approx(rewards(checkpoint.parents[1])[AT], abs=1e-12)
    ranked = report["conditions"]
    means = [each["change"]["estimate"] for each in ranked]
    assert means == sorted(means, reverse=True)
    assert len(set(means)) == 3
    lines = table.stdout.splitlines()
    rows = [line.split()[:2] for line in lines if line[:4].strip().isdigit()]
    assert rows == [[str(rank), condition_name(each["label"])] for rank, each in enumerate(ranked, 1)]
    for each in ranked:
        change, own = each["change"], each["changes"].values()
        assert change["estimate"] == pytest.approx(sum(own) / 3)
        assert change["low"] < change["estimate"] < change["high"]
        assert (each["difference"] is None) == (each["label"] == "grpo+none")
    base = changes(report)["grpo+none"]
    for each in ranked:
        if each["difference"] is not None:
            pairs = [each["changes"][seed] - base[seed] for seed in base]
            assert each["difference"]["estimate"] == pytest.approx(sum(pairs) / 3)
    assert report["forecast"] == FORECAST == lines[-1]


def test_schedules_and_moments_go_on_as_in_a_resumed_campaign(tmp_path: Path, trained: tuple[Path, Path], report):
    """To the end: the learning rate falls over all steps of the file, and SEPA's λ rises over them."""
    path, checkpoint = trained
    train(path, tmp_path / "out", f"resume.from={str(checkpoint)!r}", "campaign.seeds=[1001, 1002]")
    to_the_end = forked(path, checkpoint, steps=STEPS - AT)
    for steps, fork in ((2, report), (STEPS - AT, to_the_end)):
        for each in fork["conditions"]:
            for seed, change in each["changes"].items():
                after = rewards(tmp_path / "out/runs" / f"{each['label']}_s{seed}")[AT + steps]
                assert change == pytest.approx(after - fork["before"], abs=1e-12)
    assert changes(report) != changes(forked(path, checkpoint, f"training.max_steps={STEPS + 6}"))


def test_lanes_change_nothing(trained: tuple[Path, Path], report):
    sets = ["campaign.lanes=1", "training.keep_last=2", "training.keep_every=2"]
    one, all_lanes = changes(forked(*trained, *sets)), changes(report)
    assert one.keys() == all_lanes.keys()
    assert all(one[label] == pytest.approx(all_lanes[label], abs=1e-9) for label in one)


def test_the_gate_of_sepa_counts_as_open_since_the_start(tmp_path: Path, model: Path, trained: tuple[Path, Path]):
    sepa = ("maxrl", "gtpo_sepa")
    path = toy(tmp_path, model, ("maxrl", "gtpo"), sepa, sepa, last="sepa.correct_rate_gate = 0.9")
    plain, opened, shut = plan_fork(Plan.of(load(path, ())), trained[1], 2, seeds=2).labels
    found = changes(forked(path, trained[1]))
    assert found[shut] == found[opened]
    assert found[plain] != found[opened]


def test_conditions_that_do_not_fit_are_named(tmp_path: Path, model: Path, trained: tuple[Path, Path]):
    conditions = [("grpo", "none"), ("rloo", "none"), ("grpo", "none")]
    for last, words in (
        ("lora_rank = 2", "the checkpoint's adapter has rank 4 and alpha 32"),
        ("lora.alpha = 4", "the checkpoint's adapter has rank 4 and alpha 32"),
        ('lora.target_modules = ["q_proj"]', "adapted layers differ"),
    ):
        fork = plan_fork(Plan.of(load(toy(tmp_path, model, *conditions, last=last), ())), trained[1], 2, 2)
        assert fork.labels == ["grpo+none", "rloo+none"]
        assert words in fork.left_out[0]
    path = toy(tmp_path, model, ("grpo", "none"), ("gae", "none"))
    with pytest.raises(
        UsageError, match=r"fewer than two conditions to continue: gae.* the checkpoint holds no critic"
    ):
        plan_fork(Plan.of(load(path, ())), trained[1], 2, 2)


def test_a_run_that_fails_has_no_rank(tmp_path: Path, model: Path, trained: tuple[Path, Path]):
    conditions = [("grpo", "none"), ("rloo", "none"), ("grpo", "none")]
    path = toy(tmp_path, model, *conditions, last='reward.custom_function = "fragile"')
    typed = ["probe", str(path), "--fork", "3", "--at", str(trained[1]), "--seeds", "2"]
    done = run_cli(*typed)
    assert done.exit_code == 0, done.output
    assert "fragile_s1001 failed: no completion of 3 steps in a row could be graded" in done.output
    ranks = [line.split()[0] for line in done.stdout.splitlines() if line.split()[:1] in (["1"], ["2"], ["-"])]
    assert ranks == ["1", "2", "-"]


def test_seeds_are_beyond_all_that_are_in_use(trained: tuple[Path, Path]):
    path, checkpoint = trained
    plan = Plan.of(load(path, ["campaign.seeds=[5, 1007]"]))
    assert plan_fork(plan, checkpoint, 1, 3).seeds == [1008, 1009, 1010]


@pytest.mark.parametrize(("options", "sets", "message"), [
    (["--fork", "2"], [], "--fork and --at belong together"),
    (["--at", "{at}"], [], "--fork and --at belong together"),
    (["--fork", "2", "--at", "{at}", "--batches", "4"], [], "--batches is for a probe without --fork"),
    (["--seeds", "3"], [], "--seeds is for --fork"),
    (["--fork", "2", "--at", "{at}/nowhere"], [], "nowhere is no checkpoint"),
    (["--fork", "4", "--at", "{at}"], [], "is at step 3 of 6: --fork 4 goes beyond the end"),
    (["--fork", "2", "--at", "{at}"], ["model.model=tiny-reasoner"], "trains tiny-reasoner: name one of its own"),
    (["--fork", "2", "--at", "{at}"], ["campaign.vary=init"], "makes all seeds of a fork alike"),
    (["--fork", "2", "--at", "{at}"], ["evaluation.problems=0", "training.eval_every=0"],
     "no held-out problems to rank by"),
])  # fmt: skip
def test_mistakes_are_one_line(trained: tuple[Path, Path], options: list[str], sets: list[str], message: str):
    path, checkpoint = trained
    words = [word.format(at=checkpoint) for word in options]
    done = run_cli("probe", path, *words, *(part for each in sets for part in ("--set", each)))
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


def test_damaged_checkpoints_and_other_weights_are_refused(tmp_path: Path, model: Path, trained: tuple[Path, Path]):
    path, checkpoint = trained
    copy = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    write_json(copy / "state.json", {**read_json(copy / "state.json"), "base": "another"})
    with pytest.raises(UsageError, match=r"state\.json is damaged"):
        forked(path, copy)
    manifest = read_json(copy / "manifest.json")
    manifest["sha256"]["state.json"] = sha256(copy / "state.json")
    write_json(copy / "manifest.json", manifest)
    with pytest.raises(UsageError, match=r"cannot be continued: .* was trained on other base weights than these"):
        forked(path, copy)
    write_json(copy / "state.json", {**read_json(checkpoint / "state.json"), "step": 0})
    manifest["sha256"]["state.json"] = sha256(copy / "state.json")
    write_json(copy / "manifest.json", manifest)
    with pytest.raises(UsageError, match="is at step 0: a fork continues a later checkpoint"):
        forked(path, copy)
    other = qwen3_directory(tmp_path / "model", ["0 2 4 6 8 the answer"], seed=5)
    with pytest.raises(UsageError, match=f"was trained on {model.resolve()}, and toy trains {other}"):
        forked(path, checkpoint, f"model.model={str(other)!r}")
    with pytest.raises(UsageError, match="toy has one condition"):
        forked(toy(tmp_path, model, ("grpo", "none")), checkpoint)
