"""Continuing: what is checked before, what is kept, what more steps do, and where a cohort begins again."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from lane_cases import adamw, update
from mixed_cases import adapter_bytes, launch_file, rows_of, toy_file
from safetensors.torch import load_file, save
from timing_keys import is_timing_key
from toymodels import qwen3_directory
from typer.testing import CliRunner

import retrain
from retrain.campaign.planning.changes import Approval
from retrain.campaign.running.controller import launch, resume
from retrain.checkpoints import FORMAT, common_step, missing_rows, prune
from retrain.cli import app
from retrain.config import load
from retrain.errors import CheckpointError, ConfigError, NonFinite, UsageError
from retrain.files import read_json, read_jsonl, write_json
from retrain.ownership import MARK, claim
from retrain.policy import local
from retrain.policy.base import load_base
from retrain.policy.local import optimizer_tensors
from retrain.policy.lora import Lanes
from retrain.policy.update import train_step
from retrain.record.environment import code_version
from retrain.record.observer import NullObserver
from retrain.saving import Saver
from retrain.types import Sample

SECRET = "very-secret-value-8c1f"
TOML = """
{head}
[model]
model = "{model}"
lora_rank = 2
[training]
batch_size = 2
group_size = 3
max_tokens = 6
lr = 0.01
save_every = 2
{training}
[optimizer]
schedule = "linear"
[evaluation]
problems = 3
[data]
source = "problems.jsonl"
eval_fraction = 0.2
[squeeze]
enabled = {squeeze}
[reward]
type = "custom"
custom_module = "lengths.py"
workers = 1
"""


class Heard(NullObserver):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str, level: str = "info") -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("home")
    qwen3_directory(path / "model", ["What is 3 + 4? 7", "Compute 12 * 3."], hidden=16)
    problems = [{"prompt": f"What is {n} + 4?", "answer": str(n + 4)} for n in range(20)]
    (path / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (path / "lengths.py").write_text(
        "import os\n\ndef score(completion, answer):\n"
        "    if len(completion) % 7 == 0:\n"
        "        raise ValueError('no score: ' + os.environ.get('SOME_API_TOKEN', ''))\n"
        "    return len(completion) % 5 / 4\n"
    )
    return path


def single(home: Path, name: str = "single", training: str = "max_steps = 2") -> Path:
    path = home / f"{name}.toml"
    path.write_text(TOML.format(head="", model=home / "model", training=training, squeeze="false"))
    return path


def go(path: Path, out: Path, **named):
    return launch(load(path), out, named.pop("observer", NullObserver()), **named)


def numbers(run: Path) -> list[str]:
    rows = read_jsonl(run / "metrics.jsonl")
    kept = [{k: v for k, v in row.items() if not is_timing_key(k) and "done_frac" not in k} for row in rows]
    return [json.dumps(row) for row in kept]


@pytest.fixture(scope="module")
def done(home, tmp_path_factory) -> Path:
    """A finished run of two steps, made with a secret in its environment."""
    out = tmp_path_factory.mktemp("done") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_API_TOKEN", SECRET)
        assert go(single(home), out).exit_status == 0
    return out


@pytest.fixture
def copied(done, tmp_path) -> Path:
    shutil.copytree(done, tmp_path / "out")
    return tmp_path / "out"


def interrupted(directory: Path) -> None:
    manifest = read_json(directory / "manifest.json")
    for run in manifest["runs"]:
        run["state"] = "interrupted"
    write_json(directory / "manifest.json", manifest)


def test_secrets_of_the_environment_are_in_no_file(done):
    files = [path for path in done.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    errors = [row["error"] for row in read_jsonl(done / "emergence/generations.jsonl") if row.get("error")]
    if errors:
        assert "no score: [key left out]" in errors[0]


def test_more_steps_for_a_finished_run(home, copied, tmp_path):
    heard, export = Heard(), tmp_path / "mine"
    export.mkdir()
    (export / "other.txt").write_text("of the user's")
    sets = ["training.max_steps=4", f"backend.adapter_path={export}"]
    assert resume(copied, heard, sets=sets).exit_status == 0
    assert any("training.max_steps: 2 → 4" in line for line in heard.lines)
    (entry,) = read_json(copied / "manifest.json")["runs"]
    assert (entry["state"], entry["step"], entry["max_steps"]) == ("done", 4, 4)
    rows = read_jsonl(copied / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in read_jsonl(copied / "evals.jsonl")] == [0, 2, 4]
    assert [(r["name"], r["batch"]) for r in read_jsonl(copied / "checkpoints.jsonl")] == [
        ("000002", 2), ("final", 2), ("000004", 4), ("final", 4),
    ]  # fmt: skip
    # The schedule is that of four steps from there on: the learning rates of steps 2 and 3 of 4.
    assert [row["optim/lr"] for row in rows] == pytest.approx([0.01, 0.005, 0.005, 0.0025])
    assert resume(copied, NullObserver()).exit_status == 0  # the plan has the four steps now
    assert read_json(copied / "plan.json")["runs"][0]["config"]["training"]["max_steps"] == 4
    with pytest.raises(UsageError, match="has done 4 steps, max_steps = 2"):
        go(single(home), copied)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        last = copied / "checkpoints/step_000004" / name
        assert (copied / "final" / name).read_bytes() == (export / name).read_bytes() == last.read_bytes()
    assert (export / "other.txt").read_text() == "of the user's"


def test_a_place_for_the_adapter_that_cannot_be_is_an_error_before_training(copied, tmp_path):
    (tmp_path / "file").write_text("")
    sets = ["training.max_steps=4", f"backend.adapter_path={tmp_path / 'file'}"]
    with pytest.raises(UsageError, match=r"file is a file, no directory: set \[backend\] adapter_path to another"):
        resume(copied, NullObserver(), sets=sets)
    assert [row["step"] for row in read_jsonl(copied / "metrics.jsonl")] == [0, 1]


def test_more_steps_equal_a_run_that_had_them_from_the_start(home, tmp_path):
    short, long = (single(home, f"constant{n}", f"max_steps = {n}") for n in (2, 4))
    for path in (short, long):
        path.write_text(path.read_text().replace("linear", "constant"))
    go(short, tmp_path / "a")
    go(long, tmp_path / "a")
    go(long, tmp_path / "b")
    mine, theirs = ([json.loads(row) for row in numbers(tmp_path / name)] for name in "ab")
    assert mine[1].pop("eval/heldout/correct_rate", 0) is not None  # what was its last step has an evaluation
    for a, b in zip(mine, theirs, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith("eval/")} == {
            k: v for k, v in b.items() if not k.startswith("eval/")
        }
    first, second = (tmp_path / name / "final/adapter_model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_every_difference_is_named_and_decided(home, copied):
    interrupted(copied)
    facts = read_json(copied / "config.json")
    facts["packages"] |= {"torch": "1.0", "rich": "1.0"}
    facts["code"]["sha256"] = "0" * 64
    facts["modules"] = {}
    write_json(copied / "config.json", facts)
    path = single(home, training="max_steps = 3\nweight_decay = 0.1")
    with pytest.raises(UsageError) as error:
        go(path, copied)
    text = str(error.value)
    for part in ("package torch: 1.0 → ", "training.weight_decay: 0.0 → 0.1", "retrain's code: ", "code of ",
                 "--accept-changes"):  # fmt: skip
        assert part in text
    assert "rich" not in text
    asked: list[list[str]] = []

    def no(lines: list[str]) -> bool:
        asked.append(lines)
        return False

    with pytest.raises(UsageError):
        go(path, copied, approval=Approval(ask=no))
    assert len(asked[0]) == 4
    heard = Heard()
    assert go(path, copied, observer=heard, approval=Approval(accept=True, tell=heard.message)).exit_status == 0
    assert any("weight_decay: 0.0 → 0.1" in line for line in heard.lines)
    assert go(path, copied).exit_status == 0  # the record says now what it was made with


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """The file with other content, as long as it lasts."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def test_other_data_weights_or_tokenizer_are_named(home, copied):
    """One number of one weight, the chat template, one answer: the files change, not the record."""
    interrupted(copied)
    weights = load_file(home / "model/model.safetensors")
    max(weights.values(), key=torch.numel).view(-1)[1] += 1e-3
    problems = (home / "problems.jsonl").read_bytes()
    cases = (
        ("weights of the base model", "model/model.safetensors", save(weights, metadata={"format": "pt"})),
        ("tokenizer of the base model", "model/chat_template.jinja", b"{{ messages[0]['content'] }}"),
        ("data", "problems.jsonl", problems.replace(b'"answer": "7"', b'"answer": "8"')),
    )
    for name, file, content in cases:
        with changed(home / file, content), pytest.raises(UsageError) as error:
            resume(copied, NullObserver(), sets=["training.max_steps=3"])
        (line,) = [line for line in str(error.value).splitlines() if " → " in line]
        assert re.fullmatch(rf"  {name}: (\w+) → (?!\1)\w+", line)
    accepted = Approval(accept=True)
    with changed(home / file, content):
        assert resume(copied, NullObserver(), sets=["training.max_steps=3"], approval=accepted).exit_status == 0


def test_what_a_killed_process_left_is_removed_also_from_finished_runs(copied):
    torn = [copied / name for name in (".timeline.html.1.retrain-tmp", "emergence/.steps.jsonl.1.retrain-tmp",
                                       "checkpoints/.x.old.1.retrain-tmp")]  # fmt: skip
    torn[0].write_text("<ht")
    torn[1].write_text("{")
    torn[2].mkdir()
    assert resume(copied, NullObserver()).exit_status == 0
    assert not any(path.exists() for path in torn)


def test_a_lost_record_of_what_a_run_was_made_with_is_a_difference(copied):
    (copied / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is lost: what made the checkpoints is not known"):
        resume(copied, NullObserver(), sets=["training.max_steps=3"])


def test_the_code_of_retrain_is_known_by_its_sources(tmp_path, monkeypatch):
    """With or without git: one character of one module, or its name, makes another revision."""
    package = tmp_path / "retrain"
    (package / "maths").mkdir(parents=True)
    for name in ("__init__.py", "maths/a.py"):
        (package / name).write_text("x = 1\n")
    monkeypatch.setattr(retrain, "__file__", str(package / "__init__.py"))

    def digest() -> str:
        return code_version.__wrapped__()["sha256"]

    first = digest()
    assert digest() == first
    (package / "maths/a.py").write_text("x = 2\n")
    second = digest()
    (package / "maths/a.py").rename(package / "maths/b.py")
    assert len({first, second, digest()}) == 3


def test_code_of_the_model_is_off_unless_asked_for_and_then_logged(home, tmp_path, monkeypatch):
    """A model with code of its own: refused with the line to type, and run only with that line, which the log tells."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    theirs = tmp_path / "model"
    shutil.copytree(home / "model", theirs)
    settings = json.loads((theirs / "config.json").read_text())
    settings |= {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.M"},
    }
    (theirs / "config.json").write_text(json.dumps(settings))
    (theirs / "theirs.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n"
        "class Config(Qwen3Config):\n    model_type = 'theirs'\n\n"
        "class M(Qwen3ForCausalLM):\n    config_class = Config\n"
    )
    path = single(home, "theirs", "max_steps = 1")
    path.write_text(path.read_text().replace(str(home / "model"), str(theirs)))
    with pytest.raises(ConfigError, match="comes with its own code: read it, then set trust_remote_code = true"):
        go(path, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    path.write_text(path.read_text().replace("lora_rank = 2", "lora_rank = 2\ntrust_remote_code = true"))
    assert go(path, tmp_path / "out").exit_status == 0
    assert (tmp_path / "ran").exists()
    assert "may run code of its own: trust_remote_code = true" in (tmp_path / "out/run.log").read_text()


def test_a_finished_run_is_not_made_otherwise(home, copied):
    with pytest.raises(UsageError, match=r"finished, with other settings \(training\.lr: 0\.01 → 0\.02\)"):
        resume(copied, NullObserver(), approval=Approval(accept=True), sets=["training.lr=0.02"])
    with pytest.raises(UsageError, match="says which runs there are"):
        resume(copied, NullObserver(), sets=["campaign.seeds=[1]"])
    with pytest.raises(ConfigError, match="max_step"):
        resume(copied, NullObserver(), sets=["training.max_step=3"])


def test_lanes_and_cohorts_are_taken_from_the_record(home, tmp_path, monkeypatch):
    head = "[campaign]\nseeds = [1, 2, 3]\nmax_steps = 1\n[[campaign.conditions]]\n" + (
        'advantage_mode = "grpo"\ntransform_mode = "none"\n'
    )
    path = home / "lanes.toml"
    path.write_text(TOML.format(head=head, model=home / "model", training="", squeeze="true"))
    monkeypatch.setattr("retrain.campaign.planning.cohorts.lane_count", lambda *arguments: 2)
    go(path, tmp_path / "out")
    cohorts = [["grpo+none_s1", "grpo+none_s2"], ["grpo+none_s3"]]
    manifest = read_json(tmp_path / "out/manifest.json")
    assert (manifest["lanes"], manifest["cohorts"]) == (2, cohorts)
    monkeypatch.setattr(
        "retrain.campaign.planning.cohorts.lane_count", lambda *arguments: 3
    )  # a machine with more memory
    path.write_text(path.read_text().replace("max_steps = 1", "max_steps = 2"))
    assert go(path, tmp_path / "out").exit_status == 0
    manifest = read_json(tmp_path / "out/manifest.json")
    assert (manifest["lanes"], manifest["cohorts"]) == (2, cohorts)
    assert {run["step"] for run in manifest["runs"]} == {2}
    assert manifest["squeeze"]
    assert manifest["comparison"] is not None


def test_a_directory_with_links_or_paths_is_refused(copied, tmp_path):
    shutil.move(copied / "checkpoints", tmp_path / "elsewhere")
    (copied / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="checkpoints is a symbolic link"):
        resume(copied, NullObserver(), sets=["training.max_steps=3"])
    (copied / "checkpoints").unlink()
    for name, change in (
        ("plan.json", {"run_id": "../../elsewhere"}),
        ("plan.json", {"run_id": "/etc/x"}),
        ("manifest.json", {"path": "../elsewhere"}),
        ("manifest.json", {"run_id": ".."}),
    ):
        good = (copied / name).read_text()
        content = json.loads(good)
        content["runs"][0] |= change
        write_json(copied / name, content)
        with pytest.raises(UsageError, match="not a run of this directory"):
            resume(copied, NullObserver())
        (copied / name).write_text(good)


def test_updates_that_are_not_finite_are_left_out_then_fail_the_run(home, tmp_path, monkeypatch):
    bad, calls = {1, 3, 4}, []

    def sometimes(*arguments, **named):
        calls.append(arguments)
        if len(calls) - 1 in bad:
            raise NonFinite("loss nan with gradient norm 1.0: the update was not applied")
        return train_step(*arguments, **named)

    monkeypatch.setattr(local, "train_step", sometimes)
    path = single(home, "bad", "max_steps = 6\nnonfinite_limit = 2")
    assert go(path, tmp_path / "out").exit_status == 1
    (entry,) = read_json(tmp_path / "out/manifest.json")["runs"]
    assert entry["state"] == "failed"
    assert "step 4: loss nan" in entry["reason"]
    assert "2 steps in a row: nonfinite_limit" in entry["reason"]
    rows = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert [row["optim/skipped"] for row in rows] == [False, True, False, True]
    assert rows[1]["loss"] is None
    assert rows[1]["optim/grad_norm"] is None
    assert (tmp_path / "out/checkpoints/step_000004/state.json").is_file()  # as it was before step 4
    bad.clear()
    assert resume(tmp_path / "out", NullObserver(), retry_failed=True).exit_status == 0
    assert [row["step"] for row in read_jsonl(tmp_path / "out/metrics.jsonl")] == list(range(6))


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(home):
    base = load_base(str(home / "model"), devices="cpu", dtype="float32")
    lanes = Lanes(base, "all-linear")
    adapter = lanes.new_adapter(2, 4.0).initialise(0)
    optimizer = adamw(adapter)
    advantages_T = np.array([1.0, np.inf, 1.0])
    sample = Sample.single_turn([5, 6], [7, 8, 9], np.full(3, -5.0), advantages_T)
    before = adapter.flat.detach().clone()
    with pytest.raises(NonFinite, match="the update was not applied"):
        update(lanes, adapter, [sample], optimizer=optimizer, lr=0.01)
    assert torch.equal(adapter.flat.detach(), before)
    assert optimizer_tensors(optimizer) == {}
    lanes.detach()


def steps_of(run: Path, *steps: int) -> Path:
    """A run directory with (empty but whole) checkpoints of these steps, and the rows that belong to the last."""
    import hashlib

    owner = claim(run)
    for step in steps:
        folder = run / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        names = {"state.json": "{}", "optimizer.safetensors": "tensors"}
        for name, text in names.items():
            (folder / name).write_text(text)
        hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in names.items()}
        write_json(folder / "manifest.json", {"format": FORMAT, "sha256": hashes})
        own = {"owner": owner.id, "place": f"checkpoints/{folder.name}", "files": [*names, "manifest.json"]}
        write_json(folder / MARK, own)
    (run / "emergence").mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "emergence/steps.jsonl", "emergence/generations.jsonl", "timing_spans.jsonl"):
        (run / name).write_text("".join(f'{{"step": {i}}}\n' for i in range(max(steps, default=0))))
    return run


def test_a_cohort_begins_again_where_all_of_it_can(tmp_path):
    a, b = steps_of(tmp_path / "a", 2, 4, 6), steps_of(tmp_path / "b", 2, 4)
    reports: list[list[str]] = [[], []]
    assert common_step([(a, 10), (b, 10)], reports).step == 4
    assert common_step([(a, 10), (b, 4)], reports).step == 6  # b ends at 4
    assert reports == [[], []]
    (b / "checkpoints/step_000004/state.json").write_text("torn")
    assert common_step([(a, 10), (b, 10)], reports).step == 2
    assert len(reports[1]) == 1
    assert "damaged" in reports[1][0]
    assert common_step([(a, 10), (steps_of(tmp_path / "new"), 10)], [[], []]).step == 0


def test_a_checkpoint_of_step_0_needs_no_rows(tmp_path):
    """A cohort that starts anew empties its records; killed then, it still has the checkpoint of the first attempt."""
    run = steps_of(tmp_path / "a", 0)
    state = {"recorder": {"rows": {"evals.jsonl": 1}}}
    (run / "checkpoints/step_000000/state.json").write_text(json.dumps(state))
    assert missing_rows(run, 0) == ["evals.jsonl has 0 of its 1 rows"]
    point = common_step([(run, 10)], [[]])
    assert (point.step, point.missing_rows) == (0, [[]])


def test_a_checkpoint_of_an_earlier_version_knows_its_rows_by_its_step(tmp_path):
    run = steps_of(tmp_path / "a", 2, 4)
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert missing_rows(run, 4) == ["metrics.jsonl has no rows after step 2"]
    reports: list[str] = []
    assert common_step([(run, 10)], [reports]).step == 2
    assert reports == ["went back to step 2, the newest with all rows: metrics.jsonl has no rows after step 2"]
    (run / "metrics.jsonl").write_text("")
    point = common_step([(run, 10)], [[]])
    assert (point.step, point.missing_rows) == (4, [["metrics.jsonl has no rows"]])


@pytest.mark.parametrize("command", ["resume", "train"])
def test_a_checkpoint_of_the_former_layout_is_refused_in_one_line(home, copied, command):
    """It is whole and yet nothing to continue from: not skipped as if damaged, which would train all steps again."""
    (directory,) = (copied / "checkpoints").iterdir()
    manifest = read_json(directory / "manifest.json")
    assert manifest["format"] == FORMAT == 3
    write_json(directory / "manifest.json", manifest | {"format": 2})
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    named = [str(copied)] if command == "resume" else [str(single(home)), "--out", str(copied)]
    result = CliRunner().invoke(app, [command, *named, "--set", "training.max_steps=3"])
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert "step_000002 is a checkpoint of layout 2, this version of retrain reads layout 3" in line
    assert "begin anew with another --out" in line
    rows = [read_jsonl(copied / name) for name in ("metrics.jsonl", "evals.jsonl", "checkpoints.jsonl")]
    assert [len(each) for each in rows] == [2, 2, 2]
    assert all(path.read_bytes() == content for path, content in before.items() if path.suffix == ".safetensors")


def test_retention(tmp_path):
    run = steps_of(tmp_path / "a", *range(2, 22, 2))
    prune(run, keep_last=2, keep_every=8)
    assert [int(path.name[5:]) for path in sorted((run / "checkpoints").iterdir())] == [8, 16, 18, 20]


def test_saves_are_done_in_order_and_errors_end_their_run():
    order: list[int] = []
    ended: list[tuple[str, str]] = []

    def guard(run, work) -> None:
        try:
            work()
        except CheckpointError as error:
            ended.append((run, str(error)))

    def fail() -> None:
        raise CheckpointError("no")

    saver = Saver(guard, lambda: None)
    saver.submit("a", lambda: order.append(1))
    saver.submit("b", fail)
    saver.submit("c", lambda: order.append(2))
    saver.settle()
    assert ended == [("b", "no")]
    assert order == [1, 2]
    saver.settle()
    assert ended == [("b", "no")]
    saver.close()


def test_resume_from_continues_and_refuses_what_is_not_there(toy_home, tmp_path):
    """A resume flag that is accepted and ignored; a cold optimizer after it."""
    path = toy_file(toy_home, tmp_path / "run.toml", reward="even")
    launch_file(path, tmp_path / "first", "training.max_steps=2")
    launch_file(path, tmp_path / "whole", "training.max_steps=4")
    launch_file(path, tmp_path / "second", "training.max_steps=4", f'resume.from="{tmp_path}/first"')
    assert [row["step"] for row in rows_of(tmp_path / "second")] == [2, 3]
    losses = [[row["loss"] for row in rows_of(tmp_path / name)][-2:] for name in ("whole", "second")]
    assert losses[0] == losses[1]
    assert adapter_bytes(tmp_path / "second/final") == adapter_bytes(tmp_path / "whole/final")
    missing = ["train", str(path), "--out", str(tmp_path / "third"), "--set", f'resume.from="{tmp_path}/nothing"']
    result = CliRunner().invoke(app, missing)
    assert result.exit_code == 2
    assert "nothing" in result.stderr
    assert not (tmp_path / "third/metrics.jsonl").exists()
