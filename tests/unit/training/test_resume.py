import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.campaigns import Heard, adapter_bytes, continue_training, is_timing_key, run_cli, toy_toml, train
from helpers.models import campaign_head, qwen3_directory
from safetensors.torch import load_file, save

from retrain.campaign.planning.changes import Approval
from retrain.errors import ConfigError, UsageError
from retrain.files import read_json, read_jsonl, write_json
from retrain.ownership import MARK, claim
from retrain.training.checkpoints import FORMAT, common_step, missing_rows

SECRET = "very-secret-value-8c1f"
HUB_TOKEN = "_".join(["hf", "a1b2" * 6])


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


def write_campaign(home: Path, name: str, head: str = "", squeeze: bool = True, **training: Any) -> Path:
    path = home / f"{name}.toml"
    sections = {
        "training": {"batch_size": 2, "group_size": 3, "max_tokens": 6, "save_every": 2} | training,
        "optimizer": {"schedule": "linear"},
        "evaluation": {"problems": 3},
        "data": {"source": "problems.jsonl", "eval_fraction": 0.2},
        "squeeze": {"enabled": squeeze},
    }
    path.write_text(head + toy_toml(home / "model", "lengths.py", **sections))
    return path


def single(home: Path, name: str = "single", max_steps: int = 2, **training: Any) -> Path:
    return write_campaign(home, name, squeeze=False, max_steps=max_steps, **training)


@pytest.fixture(scope="module")
def done(home, tmp_path_factory) -> Path:
    """Return a finished run of two steps that was started with secrets in its environment and arguments."""
    out = tmp_path_factory.mktemp("done") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_API_TOKEN", SECRET)
        patch.setattr(sys, "argv", ["retrain", "train", "--set", f"x={HUB_TOKEN}", SECRET])
        train(single(home), out)
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


def test_secrets_of_environment_and_arguments_are_in_no_file(done):
    files = [path for path in done.rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in (SECRET, HUB_TOKEN):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_more_steps_for_a_finished_run(home, copied, tmp_path):
    messages, export = Heard(), tmp_path / "mine"
    export.mkdir()
    (export / "other.txt").write_text("of the user")
    (tmp_path / "file").write_text("")
    more = "training.max_steps=4"
    with pytest.raises(UsageError, match=r"file is a file, no directory: set \[backend\] adapter_path to another"):
        continue_training(copied, more, f"backend.adapter_path={tmp_path / 'file'}")
    continue_training(copied, more, f"backend.adapter_path={export}", observer=messages)
    assert any("training.max_steps: 2 → 4" in line for line in messages.messages)
    (entry,) = read_json(copied / "manifest.json")["runs"]
    assert (entry["state"], entry["step"], entry["max_steps"]) == ("done", 4, 4)
    rows = read_jsonl(copied / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in read_jsonl(copied / "evals.jsonl")] == [0, 2, 4]
    checkpoints = [(row["name"], row["batch"]) for row in read_jsonl(copied / "checkpoints.jsonl")]
    assert checkpoints == [("000002", 2), ("final", 2), ("000004", 4), ("final", 4)]
    # From there on the schedule is that of four steps: the learning rates of steps 2 and 3 of 4.
    assert [row["optim/lr"] for row in rows] == pytest.approx([0.01, 0.005, 0.005, 0.0025])
    continue_training(copied)  # the plan has the four steps now
    assert read_json(copied / "plan.json")["runs"][0]["config"]["training"]["max_steps"] == 4
    with pytest.raises(UsageError, match="has done 4 steps, max_steps = 2"):
        train(single(home), copied)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        last = copied / "checkpoints/step_000004" / name
        assert (copied / "final" / name).read_bytes() == (export / name).read_bytes() == last.read_bytes()
    assert (export / "other.txt").read_text() == "of the user"


def test_more_steps_and_resume_from_equal_a_run_with_those_steps_from_the_start(home, tmp_path):
    """Weights, moments, random streams and the place in the data: the same bytes."""
    short, long = (single(home, f"constant{n}", n) for n in (1, 2))
    for path in (short, long):
        path.write_text(path.read_text().replace("linear", "constant"))
    train(short, tmp_path / "extended")
    shutil.copytree(tmp_path / "extended", tmp_path / "first")
    train(long, tmp_path / "extended")
    train(long, tmp_path / "whole")
    train(long, tmp_path / "from", f'resume.from="{tmp_path}/first"')
    rows = {
        name: [
            {key: value for key, value in row.items() if not is_timing_key(key) and not key.startswith("eval/")}
            for row in read_jsonl(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("extended", "whole", "from")
    }
    for row in rows["extended"]:
        row["progress/done_frac"] = row["step"] / 2 + 0.5  # the first row has the share of the plan of that time
    assert rows["extended"] == rows["whole"]
    assert [row["step"] for row in rows["from"]] == [1]
    assert rows["from"][0]["loss"] == rows["whole"][1]["loss"]
    assert len({adapter_bytes(tmp_path / name / "final") for name in rows}) == 1
    missing = ["train", str(long), "--out", str(tmp_path / "third"), "--set", f'resume.from="{tmp_path}/nothing"']
    result = run_cli(*missing)
    assert (result.exit_code, "nothing" in result.stderr) == (2, True)


def test_every_difference_is_named_and_decided(home, copied):
    interrupted(copied)
    facts = read_json(copied / "config.json")
    facts["packages"] |= {"torch": "1.0", "rich": "1.0"}
    facts["code"]["sha256"] = "0" * 64
    facts["modules"] = {}
    write_json(copied / "config.json", facts)
    path = single(home, max_steps=3, weight_decay=0.1)
    questions: list[list[str]] = []  # an answer of None is a no
    with pytest.raises(UsageError) as error:
        train(path, copied, approval=Approval(ask=questions.append))
    assert len(questions[0]) == 4
    parts = ("package torch: 1.0 → ", "weight_decay: 0.0 → 0.1", "retrain's code: ", "code of ", "--accept-changes")
    assert [part for part in parts if part not in str(error.value)] == []
    assert "rich" not in str(error.value)
    messages = Heard()
    accepted = Approval(accept=True, notify=messages.message)
    train(path, copied, observer=messages, approval=accepted)
    assert any("weight_decay: 0.0 → 0.1" in line for line in messages.messages)
    train(path, copied)  # the record now names what it was made with
    (copied / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is lost: what made the checkpoints is not known"):
        continue_training(copied, "training.max_steps=4")


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
        before = (home / file).read_bytes()
        (home / file).write_bytes(content)
        try:
            with pytest.raises(UsageError) as error:
                continue_training(copied, "training.max_steps=3")
        finally:
            (home / file).write_bytes(before)
        (line,) = [line for line in str(error.value).splitlines() if " → " in line]
        assert re.fullmatch(rf"  {name}: (\w+) → (?!\1)\w+", line)


def test_a_finished_run_keeps_its_settings(copied):
    for name in (".timeline.html.1.retrain-tmp", "emergence/.steps.jsonl.1.retrain-tmp"):
        (copied / name).write_text("<ht")
    (copied / "checkpoints/.x.old.1.retrain-tmp").mkdir()
    continue_training(copied)
    assert list(copied.rglob("*.retrain-tmp")) == []  # a killed process leaves such files
    with pytest.raises(UsageError, match=r"finished, with other settings \(training\.lr: 0\.01 → 0\.02\)"):
        continue_training(copied, "training.lr=0.02", approval=Approval(accept=True))
    with pytest.raises(UsageError, match="defines the runs of the campaign"):
        continue_training(copied, "campaign.seeds=[1]")


@pytest.mark.parametrize(("name", "change"), [
    ("plan.json", {"run_id": "../../elsewhere"}), ("plan.json", {"run_id": "/etc/x"}),
    ("manifest.json", {"path": "../elsewhere"}), ("manifest.json", {"run_id": ".."}),
])  # fmt: skip
def test_a_record_that_names_another_directory_is_refused(copied, name, change):
    content = read_json(copied / name)
    content["runs"][0] |= change
    write_json(copied / name, content)
    with pytest.raises(UsageError, match="not a run of this directory"):
        continue_training(copied)


def test_a_checkpoint_of_the_former_layout_is_refused_in_one_line(home, copied):
    """It is not skipped as if it were damaged: all steps would be trained again."""
    (directory,) = (copied / "checkpoints").iterdir()
    manifest = read_json(directory / "manifest.json")
    assert manifest["format"] == FORMAT == 3
    write_json(directory / "manifest.json", manifest | {"format": 2})
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.suffix in (".safetensors", ".jsonl")}
    for command in (["resume", str(copied)], ["train", str(single(home)), "--out", str(copied)]):
        result = run_cli(*command, "--set", "training.max_steps=3")
        assert result.exit_code == 2, result.output
        (line,) = [line for line in result.stderr.splitlines() if line.strip()]
        assert "step_000002 is a checkpoint of layout 2, this version of retrain reads layout 3" in line
        assert "begin anew with another --out" in line
    assert {path: path.read_bytes() for path in before} == before


def test_a_model_with_its_own_code_is_refused_unless_asked_for_and_then_logged(home, tmp_path, import_path):
    model = shutil.copytree(home / "model", tmp_path / "model")
    settings = read_json(model / "config.json")
    settings["model_type"] = "custom"
    settings["auto_map"] = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.M"}
    write_json(model / "config.json", settings)
    (model / "custom.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n"
        "class Config(Qwen3Config):\n    model_type = 'custom'\n\n"
        "class M(Qwen3ForCausalLM):\n    config_class = Config\n"
    )
    path = single(home, "custom", 1)
    path.write_text(path.read_text().replace(str(home / "model"), str(model)))
    with pytest.raises(ConfigError, match="comes with its own code: read it, then set trust_remote_code = true"):
        train(path, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    path.write_text(path.read_text().replace("lora_rank = 4", "lora_rank = 4\ntrust_remote_code = true"))
    train(path, tmp_path / "out")
    assert (tmp_path / "ran").exists()
    assert "may run code of its own: trust_remote_code = true" in (tmp_path / "out/run.log").read_text()


def test_lanes_and_cohorts_are_taken_from_the_record(home, tmp_path, monkeypatch):
    path = write_campaign(home, "lanes", campaign_head(("grpo", "none"), seeds=[1, 2, 3], max_steps=1))
    for lanes, steps in ((2, 1), (3, 2)):  # later on a machine with more memory
        monkeypatch.setattr("retrain.campaign.controller.lane_count", lambda *arguments, n=lanes: n)
        path.write_text(path.read_text().replace("max_steps = 1", f"max_steps = {steps}"))
        train(path, tmp_path / "out")
        manifest = read_json(tmp_path / "out/manifest.json")
        assert (manifest["lanes"], manifest["cohorts"]) == (2, [["grpo+none_s1", "grpo+none_s2"], ["grpo+none_s3"]])
    assert {run["step"] for run in manifest["runs"]} == {2}
    assert manifest["squeeze"]
    assert manifest["comparison"] is not None


def steps_of(run: Path, *steps: int) -> Path:
    """A run directory with (empty but whole) checkpoints of these steps, and the rows that belong to the last."""
    owner, names = claim(run), ("metrics.jsonl", "emergence/steps.jsonl", "emergence/generations.jsonl")
    for step in steps:
        state = json.dumps({"recorder": {"rows": dict.fromkeys(names, step)}})
        files = {"state.json": state, "optimizer.safetensors": "tensors"}
        folder = run / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
        write_json(folder / "manifest.json", {"format": FORMAT, "sha256": hashes})
        place = f"checkpoints/{folder.name}"
        write_json(folder / MARK, {"owner": owner.id, "place": place, "files": [*files, "manifest.json"]})
    (run / "emergence").mkdir(parents=True, exist_ok=True)
    for name in names:
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


def test_a_checkpoint_continues_where_the_record_has_all_its_rows(tmp_path):
    run = steps_of(tmp_path / "a", 2, 4)
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert missing_rows(run, 4) == ["metrics.jsonl has 3 of its 4 rows"]
    reports: list[str] = []
    assert common_step([(run, 10)], [reports]).step == 2
    assert reports == ["went back to step 2, the newest with all rows: metrics.jsonl has 3 of its 4 rows"]
    (run / "metrics.jsonl").write_text("")
    point = common_step([(run, 10)], [[]])
    assert (point.step, point.missing_rows) == (4, [["metrics.jsonl has 0 of its 4 rows"]])
    start = steps_of(tmp_path / "b", 0)  # a cohort that starts anew empties its records and may be killed then
    write_json(start / "checkpoints/step_000000/state.json", {"recorder": {"rows": {"evals.jsonl": 1}}})
    assert missing_rows(start, 0) == ["evals.jsonl has 0 of its 1 rows"]
    assert common_step([(start, 10)], [[]]).step == 0
