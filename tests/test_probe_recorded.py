"""Recorded rollouts: what a probe makes of them against what it samples itself, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from probe_cases import BINARY, probed, toy
from safetensors.numpy import load_file, save_file
from toycampaign import toy_world
from toymodels import campaign_head
from typer.testing import CliRunner

from retrain.campaign.judging.probed import probe_path
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.controller import launch
from retrain.cli import app
from retrain.config import load
from retrain.errors import RunFailed, UsageError
from retrain.probe import measure
from retrain.probe.measure import Effort, probe
from retrain.probe.recorded import points_at, recorded_of, usable
from retrain.probe.reread import distance
from retrain.probe.words import recorded_words
from retrain.record.observer import NullObserver
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Turn

EVERY = "[squeeze]\nenabled = false\n[logging]\nrollouts_every = 1\n"
FILE = "tokens_{:06d}.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    model = toy_world(folder)
    (folder / "binary.py").write_text(BINARY)
    return model


def trained(folder: Path, world: Path, **keys: Any) -> tuple[Path, Path]:
    """A file, and the directory of its baseline's first run, trained for six steps that are all recorded."""
    path = toy(folder, world, ("grpo", "none"), ("maxrl", "gtpo"), **{"extra": EVERY, "max_steps": 6, **keys})
    text = path.read_text().replace("save_every = 2", "save_every = 3\nkeep_last = 0")
    path.write_text(text.replace("seeds = [1, 2]", "seeds = [1]"))
    assert launch(load(path, ()), folder / "out", NullObserver()).exit_status == 0
    return path, folder / "out" / "runs" / "grpo+none_s1"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, world: Path) -> tuple[Path, Path]:
    return trained(tmp_path_factory.mktemp("recorded"), world)


def replayed(path: Path, run: Path, *at: str, newest: int | None = None, problems: int = 0) -> dict[str, Any]:
    found = recorded_of(str(run), newest)
    points, _ = points_at(found, at, None)
    effort = Effort(problems=problems, samples=4)
    return probe(Plan.of(load(path, ())), points, effort, lambda text: None, recorded=found)


def gradients(work: Callable[[], Any]) -> tuple[Any, list[torch.Tensor]]:
    """What the work gives, and the gradients that were taken for it, condition by condition."""
    taken: list[torch.Tensor] = []
    original = measure.gradient_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "gradient_of", lambda *given: taken.append(g := original(*given)) or g)
        return work(), taken


def digests(directory: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.rglob("*")) if p.is_file()}


# -- what is made of them -----------------------------------------------------------------------------------------


def test_recorded_steps_at_their_checkpoint_give_the_gradients_that_sampling_there_gives(recorded: tuple[Path, Path]):
    """The first step after each checkpoint is that which a probe there samples; the run is left as it is."""
    path, run = recorded
    before = digests(run.parent.parent)
    report, mine = gradients(lambda: replayed(path, run))
    assert digests(run.parent.parent) == before
    checkpoint = run / "checkpoints" / "step_000003"
    assert [(point["at"], point["step"]) for point in report["points"]] == [("base", 0), (str(checkpoint), 3)]
    assert [point["recorded"]["steps"] for point in report["points"]] == [[0, 1, 2], [3, 4, 5]]
    assert [point["recorded"]["updates_away"] for point in report["points"]] == [[0, 2], [0, 2]]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, at in enumerate(("base", str(checkpoint))):
        _, sampled = gradients(lambda at=at: probed(path, at, batches=3, problems=0))
        own = mine[6 * number : 6 * number + 6]
        for condition in (0, 3):  # the first batch of each of the two conditions
            torch.testing.assert_close(own[condition], sampled[condition], rtol=1e-4, atol=1e-6)
            assert not torch.allclose(own[condition + 1], sampled[condition + 1], rtol=0.1)  # the weights moved on
        assert float(own[0].norm()) == pytest.approx(rows[3 * number]["optim/grad_norm"], rel=1e-4)


def test_where_the_weights_hardly_move_the_whole_report_is_that_of_a_probe_that_samples(tmp_path: Path, world: Path):
    path = toy(tmp_path, world, ("grpo", "none"), ("maxrl", "gtpo"))
    path.write_text(path.read_text().replace("lr = 0.01", "lr = 1e-12"))
    edited = path.read_text() + EVERY
    path.write_text(edited)
    assert launch(load(path, ()), tmp_path / "out", NullObserver()).exit_status == 0
    run = tmp_path / "out" / "runs" / "grpo+none_s1"
    mine = replayed(path, run, "base", problems=4)["points"][0]
    theirs = probed(path, "base", batches=4, problems=4)["points"][0]
    assert mine["recorded"]["k3_most"] < 1e-8
    assert theirs["recorded"] is None
    for key in ("batches", "rollouts", "success", "heldout", "uniform_batches"):
        assert mine[key] == theirs[key]
    flat = [json.loads(json.dumps([point["cosines"], point["conditions"]])) for point in (mine, theirs)]
    assert numbers(flat[0]) == pytest.approx(numbers(flat[1]), rel=1e-3, abs=1e-5, nan_ok=True)
    assert len(numbers(flat[0])) > 100


def numbers(of: Any) -> list[float]:
    """All numbers of plain data, in order."""
    if isinstance(of, dict):
        return [one for value in of.values() for one in numbers(value)]
    if isinstance(of, list):
        return [one for value in of for one in numbers(value)]
    return [float(of)] if isinstance(of, (int, float)) else []


def test_named_weights_see_all_steps_and_newest_steps_are_taken_first(recorded: tuple[Path, Path]):
    path, run = recorded
    (final,) = replayed(path, run, str(run / "final"))["points"]
    assert final["recorded"]["steps"] == [0, 1, 2, 3, 4, 5]
    assert final["recorded"]["updates_away"] == [1, 6]
    own = replayed(path, run)["points"]
    assert final["recorded"]["k3"] > max(point["recorded"]["k3"] for point in own) > 1e-7
    assert [point["recorded"]["steps"] for point in replayed(path, run, newest=3)["points"]] == [[3, 4, 5]]


def test_the_distance_is_that_of_the_definition():
    """Tokens of two batches, with log ratios (trainer − sampler) of ln 2 and 0, and of −ln 2."""
    prompt = Prompt(Problem("p", "?", ""), "?", (1, 2))

    def batch(*sampled: float) -> list[Group]:
        action = Action([5] * len(sampled), "x", np.array(sampled), None, "stop")
        return [Group(prompt, [Rollout(prompt, [Turn((1, 2), action)], RewardResult(1.0))])]

    def score(samples: list, want: frozenset) -> Any:
        (sample,) = samples
        found = SimpleNamespace(logprobs=[np.full(int(sample.action_mask.sum()), -1.0)])
        return SimpleNamespace(of_rollouts=lambda groups: found)

    run: Any = SimpleNamespace(policy=SimpleNamespace(score=score))
    far, near = 2 - 1 - math.log(2), 0.5 - 1 + math.log(2)
    found = distance(run, [batch(-1.0 - math.log(2), -1.0), batch(-1.0 + math.log(2))])
    assert found == pytest.approx({"k3": (far + near) / 3, "k3_most": near, "ratio": (2 + 1 + 0.5) / 3})
    assert distance(run, [batch()]) == {"k3": 0.0, "k3_most": 0.0, "ratio": 1.0}


def test_what_was_read_and_said_over_several_turns_with_tools_is_credited_again(tmp_path: Path):
    """Turns, rewards and credit by turn, as the calculator's campaign has them."""
    campaigns = Path(__file__).parent.parent / "campaigns"
    shutil.copy(campaigns / "calculations.py", tmp_path / "calculations.py")
    text = (campaigns / "calculator.toml").read_text()
    head, rest = text[: text.index("[campaign]")], text[text.index("[model]") :]
    conditions = ('turn_credit = "episode"\n', 'turn_credit = "turn"\n')
    begin = campaign_head(seeds=[1], max_steps=3)
    for line in conditions:
        begin += campaign_head(("grpo", "none")).partition("\n")[2] + line
    rest = rest.replace("batch_size = 8", "batch_size = 3").replace("problems = 200", "problems = 4")
    path = tmp_path / "tools.toml"
    path.write_text(f"{head}{begin}{rest.replace('eval_every = 20', 'eval_every = 0')}\n{EVERY}")
    assert launch(load(path, ()), tmp_path / "out", NullObserver()).exit_status == 0
    (run, _) = sorted((tmp_path / "out" / "runs").iterdir())
    report, mine = gradients(lambda: replayed(path, run))
    _, sampled = gradients(lambda: probed(path, "base", batches=3, problems=0))
    lines = load_file(run / FILE.format(0))["rollouts"].tobytes().decode()
    assert lines.count('"text":') > 24 + 3  # some of the 24 rollouts have several turns
    assert report["points"][0]["uniform_batches"] < 3
    assert any(float(each.norm()) > 0 for each in mine[:1])
    for condition in (0, 3):
        torch.testing.assert_close(mine[condition], sampled[condition], rtol=1e-4, atol=1e-6)


def test_the_command_says_which_weights_and_how_far(tmp_path: Path, recorded: tuple[Path, Path]):
    path, run = tmp_path / "toy.toml", recorded[1]
    path.write_text(recorded[0].read_text())
    asked = ["probe", str(path), "--problems", "0", "--rollouts", str(run)]
    told = CliRunner().invoke(app, [*asked, "--html"])
    assert told.exit_code == 0, told.output
    report = json.loads(probe_path(path).read_text())
    assert report["recorded"] == {"run": str(run), "run_id": "grpo+none_s1", "steps": [0, 1, 2, 3, 4, 5]}
    assert "base: 3 batches of 3 × 4 answers" in told.output
    for point in report["points"]:
        words = recorded_words(report, point)
        assert words in told.output
        assert words.startswith(f"3 recorded steps of {run}, {point['step']} to {point['step'] + 2}, 0 to 2 updates ")
        assert re.search(r"k3 from the weights that sampled them \S+ nats a token, .* mean ratio \d\.\d\d\d$", words)
        assert words in probe_path(path, "html").read_text()
    assert all(" on recorded rollouts: " in line["text"] for line in report["lines"])
    (run_at,) = points_at(recorded_of(str(run)), [str(run)], None)[0]
    assert (run_at.step, run_at.steps) == (6, (0, 1, 2, 3, 4, 5))


# -- which weights ------------------------------------------------------------------------------------------------


def test_steps_without_a_checkpoint_are_looked_at_by_the_one_before(tmp_path: Path, recorded: tuple[Path, Path]):
    run = tmp_path / "run"
    shutil.copytree(recorded[1], run)
    weights = run / "checkpoints" / "step_000003" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    found = recorded_of(str(run))
    points, notes = points_at(found, [], None)
    assert [(point.name, point.steps) for point in points] == [("base", (0, 1, 2, 3, 4, 5))]
    assert re.search(r"skipped a damaged checkpoint: .*adapter_model.safetensors is damaged", notes[0])
    shutil.rmtree(run / "checkpoints" / "step_000003")
    assert points_at(found, [], None)[1] == []


def test_weights_with_too_few_recorded_steps_are_left_out_and_named(tmp_path: Path, recorded: tuple[Path, Path]):
    run = tmp_path / "run"
    shutil.copytree(recorded[1], run)
    (run / FILE.format(1)).unlink()
    points, notes = points_at(recorded_of(str(run)), [], None)
    assert [point.steps for point in points] == [(3, 4, 5)]
    assert notes == ["base is left out: 2 recorded steps there, an interval takes 3"]
    (run / FILE.format(4)).unlink()
    with pytest.raises(UsageError, match=r"no weights that it kept have 3 recorded steps .* --at, or set \[logging\]"):
        points_at(recorded_of(str(run)), [], None)
    assert points_at(recorded_of(str(run)), ["base"], None)[0][0].steps == (0, 2, 3, 5)


# -- which conditions ---------------------------------------------------------------------------------------------


def test_conditions_that_would_have_drawn_others_are_left_out_and_named(tmp_path: Path, recorded: tuple[Path, Path]):
    (tmp_path / "own.py").write_text("def mine(rewards, context):\n    return rewards\n")
    text = recorded[0].read_text()
    begin = text.index("\n[model]")
    extra = ""
    for line in ("group_size = 6", "reward.custom_function = 'always'", "temperature = 0.5"):
        extra += f'[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n{line}\n'
    extra += '[[campaign.conditions]]\nadvantage_mode = "own:mine"\ntransform_mode = "none"\n'
    path = tmp_path / "toy.toml"
    head = text[:begin].replace("max_steps = 6", "max_steps = 6\nallow_confounded = true")
    path.write_text(f"{head}\n{extra}{text[begin:]}")
    specs = [spec for spec in Plan.of(load(path, ())).specs if spec.seed == 1]
    kept, notes = usable(specs, recorded_of(str(recorded[1])))
    assert [spec.label for spec in kept] == ["grpo+none", "maxrl+gtpo"]
    said = "\n".join(notes)
    for words in (
        "is left out: [training] group_size is 6 in it, 4 in the recorded rollouts",
        '[reward] custom_function is "always" in it, "score" in the recorded rollouts',
        "[training] temperature is 0.5 in it, 1.0 in the recorded rollouts",
        "own:mine is given the parts and tags of every reward, which a record does not keep",
    ):
        assert words in said
    assert len(notes) == 4
    with pytest.raises(UsageError, match=r"cannot stand for those of the baseline, .*: \[training\] group_size is 6"):
        usable([each for each in specs if each not in kept], recorded_of(str(recorded[1])))
    with pytest.raises(UsageError, match=r"can stand for the baseline's alone: .* is left out: \[training\]"):
        usable([kept[0], *(each for each in specs if each not in kept)], recorded_of(str(recorded[1])))
    faster = Plan.of(load(recorded[0], ["reward.workers=2", "environment.timeout_s=60.0"]))
    assert usable(faster.specs, recorded_of(str(recorded[1])))[1] == []  # what changes no rollout


def test_entropies_that_were_not_recorded_are_missed_where_they_count(tmp_path: Path, recorded: tuple[Path, Path]):
    run = tmp_path / "run"
    shutil.copytree(recorded[1], run)
    rewritten(run, 5, lambda arrays: arrays.pop("entropy"))
    path = toy(tmp_path, recorded[0].parent, ("grpo", "none"), ("maxrl", "gtpo"), ("grpo", "entropy_mask"))
    text = recorded[0].read_text()
    masked = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "entropy_mask"\n'
    path.write_text(text.replace("\n[model]", f"\n{masked}[model]", 1))
    specs = Plan.of(load(path, ())).specs
    assert usable(specs, recorded_of(str(recorded[1])))[1] == []
    (note,) = usable(specs, recorded_of(str(run)))[1]
    assert note == "grpo+entropy_mask is left out: it weighs tokens by entropies, which were not recorded"


# -- bad input ----------------------------------------------------------------------------------------------------


BEGINS = ("offsets", "sampled", "rollout_at")


def rewritten(run: Path, step: int, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """The file of a step with something else in it."""
    path = run / FILE.format(step)
    arrays = {name: array.copy() for name, array in load_file(path).items()}
    change(arrays)
    save_file(arrays, path, {"schema": "1", "split": "train", "iteration": str(step), "run": "r", "condition": "c"})


def lines(of: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, np.ndarray]], None]:
    """Puts into each line of the prompts or rollouts (``of``: "prompt", "rollout") what ``change`` gives for it."""

    def edit(arrays: dict[str, np.ndarray]) -> None:
        old = arrays[f"{of}s"].tobytes()
        each = [json.loads(old[a:b]) for a, b in pairwise(arrays[f"{of}_at"])]
        made = [json.dumps(line | change(line)).encode() for line in each]
        arrays[f"{of}s"] = np.frombuffer(b"".join(made), np.uint8)
        arrays[f"{of}_at"] = np.cumsum([0, *map(len, made)]).astype(np.int64)

    return edit


def test_what_cannot_be_taken_is_told_in_one_line(tmp_path: Path, recorded: tuple[Path, Path]):
    path, run = recorded
    empty = tmp_path / "empty"
    empty.mkdir()

    def refused(directory: Path, *, words: str, status: int = 2) -> None:
        asked = ["probe", str(path), "--problems", "0", "--rollouts", str(directory)]
        told = CliRunner().invoke(app, asked)
        assert told.exit_code == status, told.output
        assert re.search(words, " ".join(told.output.split())), told.output
        assert isinstance(told.exception, SystemExit)  # no traceback

    refused(tmp_path / "nowhere", words="--rollouts .*nowhere is not a directory: name a run directory")
    refused(empty, words="is no run directory: it has no config.json of a run")
    refused(run.parent.parent, words=r"is a campaign: name one of its runs, such as .*runs/grpo\+none_s1")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for file in copy.glob("tokens_0*"):
        file.unlink()
    refused(copy, words=r"has no recorded rollouts: set \[logging\] rollouts_every = 1")
    for step in (2, 3):
        shutil.copy(run / FILE.format(step), copy)
    refused(copy, words="an interval takes 3 recorded steps, here are 2")
    for step in (0, 1):
        shutil.copy(run / FILE.format(step), copy)
    rewritten(copy, 1, lambda arrays: arrays.pop("logprobs"))
    refused(copy, words="is no file of tokens, or cut short: it has no logprobs", status=1)
    shutil.copy(run / FILE.format(1), copy)
    rewritten(copy, 1, lambda arrays: arrays["logprobs"].put(3, np.nan))
    refused(copy, words="step 1 has tokens without the sampler's log-probability")
    rewritten(copy, 1, lambda arrays: arrays.update(rollout_at=arrays["rollout_at"][:-1]))
    refused(copy, words="cut short: its indices are of different lengths", status=1)
    shutil.copy(run / FILE.format(1), copy)
    rewritten(copy, 1, lambda arrays: arrays.update({name: arrays[name][:-1] for name in BEGINS}))
    refused(copy, words="step 1 recorded 11 rollouts of 3 prompts, not all 3 × 4 that it was to train on")
    shutil.copy(run / FILE.format(1), copy)
    rewritten(copy, 1, lines("prompt", lambda line: {"problem_id": "???"}))
    refused(copy, words=r"step 1 asked \?+, which the training problems of this file do not have with that answer")
    shutil.copy(run / FILE.format(1), copy)
    rewritten(copy, 1, lines("prompt", lambda line: {"reference": "?"}))
    refused(copy, words="step 1 asked .*, which the training problems of this file do not have with that answer")
    shutil.copy(run / FILE.format(1), copy)
    (copy / FILE.format(1)).write_bytes((copy / FILE.format(1)).read_bytes()[:200])
    refused(copy, words="is no file of tokens, or cut short", status=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base": {"fingerprint": "other"}}, "was sampled from other base weights"),
        ({"base": {"tokenizer": "other"}}, "was sampled with another tokenizer or chat template"),
        ({"training": {"top_p": 0.9}}, "was sampled with top_p, top_k or min_p, and a record does not keep"),
        (
            {"data": {"system_prompt": "Be brief."}},
            r"\[data\] system_prompt is not set in it, .Be brief.. in the",
        ),
    ],
)
def test_rollouts_of_another_model_or_sampling_are_refused(
    tmp_path: Path, recorded: tuple[Path, Path], change: dict[str, dict[str, Any]], words: str
):
    path, run = recorded
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    facts = json.loads((copy / "config.json").read_text())
    for section, values in change.items():
        facts[section] |= values
    (copy / "config.json").write_text(json.dumps(facts))
    told = CliRunner().invoke(app, ["probe", str(path), "--rollouts", str(copy)])
    assert told.exit_code == 2, told.output
    assert re.search(words, " ".join(told.output.split())), told.output


def test_groups_that_are_all_uniform_are_told(tmp_path: Path, recorded: tuple[Path, Path]):
    path, run = recorded
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for step in range(6):
        rewritten(copy, step, lines("rollout", lambda line: {"reward": 1.0}))
    with pytest.raises(RunFailed, match=r"^--rollouts .*: all groups of 3 batches have equal rewards, .* --rollouts"):
        replayed(path, copy)


def test_groups_that_were_too_old_to_train_are_left_out(tmp_path: Path, recorded: tuple[Path, Path]):
    path, run = recorded
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    whole = replayed(path, copy)["points"][0]["rollouts"]
    rewritten(copy, 2, lines("rollout", lambda line: {"discarded": "max_async"} if line["group"] == 1 else {}))
    assert replayed(path, copy)["points"][0]["rollouts"] == whole - 4
