import json
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
from helpers.campaigns import run_cli

from retrain import __version__, device
from retrain.cli import setup
from retrain.cli.app import COMMANDS, FUNCTIONS, command_of
from retrain.config.comparing import is_comparison_file

ROOT = Path(__file__).parents[2]
CAMPAIGNS = sorted((ROOT / "campaigns").rglob("*.toml"))
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.toml"))


def refusal(*arguments: str | Path) -> str:
    """Return the one line with which a command refuses its input."""
    result = run_cli(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    return line


@pytest.mark.parametrize(("arguments", "line"), [
    (["trian"], "error: No such command 'trian'. Did you mean 'train'? For help type: retrain --help"),
    (["train"], "error: Missing argument 'FILE'. For help type: retrain train --help"),
    (["train", "a.toml", "--bogus"], "error: No such option: --bogus"),
    (["--bogus"], "error: No such option: --bogus. For help type: retrain --help"),
    (["squeeze", "logs", "--to", "0"], "error: Invalid value for '--to': "),
    *(([name, "--bogus"], "error: No such option: --bogus") for name in FUNCTIONS),
])  # fmt: skip
def test_wrong_usage_is_one_plain_line_and_status_2(arguments, line):
    result = run_cli(*arguments, prog_name="retrain")
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(line)
    assert "--help" in result.stderr


def test_version_and_help_of_every_command():
    assert run_cli("--version").output == f"retrain {__version__}\n"
    first_lines = {path: line for commands in COMMANDS.values() for path, line in commands.items()}
    for name, path in FUNCTIONS.items():
        result = run_cli(name, "--help")
        assert result.exit_code == 0
        assert command_of(name).help.partition("\n\n")[0] == first_lines[path]
        assert first_lines[path] in " ".join(result.output.split())
        assert "default: (" not in result.output


def test_help_is_fast_and_light():
    code = "import sys, retrain.cli.app as c\ntry: c.app(['--help'])\nfinally: print(*sys.modules, file=sys.stderr)"
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    heavy = {"torch", "transformers", "numpy", "peft", "scipy", "starlette", "uvicorn", "jinja2", "retrain.ui.server"}
    assert not heavy & set(done.stderr.split())
    assert min(times) < 0.5


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    content = json.loads(run_cli("schema").output)
    jsonschema.Draft202012Validator.check_schema(content)
    return jsonschema.Draft202012Validator(content)


@pytest.mark.parametrize("path", [*CAMPAIGNS, *EXAMPLES], ids=lambda path: path.name)
def test_shipped_files_pass_check_and_have_enough_seeds_for_a_verdict(path, schema):
    if not is_comparison_file(path):  # the schema is that of campaigns
        schema.validate(tomllib.loads(path.read_text(encoding="utf-8")))
    result = run_cli("check", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{path}: fine, ")
    if path in CAMPAIGNS and path.name not in ("quickstart.toml", "smollm2.toml"):  # which show that models learn
        warnings = [line for line in result.stderr.splitlines() if "campaign.seeds" in line]
        if path.name == "smollm2_rare.toml":  # an hour for a seed: it takes the risk of a collapsed run
            warnings = [line for line in warnings if "should a run collapse" not in line]
        assert warnings == []


def test_dry_run_writes_nothing(tmp_path):
    (tmp_path / "run.toml").write_text(STEPS)
    result = run_cli("train", tmp_path / "run.toml", "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert str(tmp_path / "out") in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_init_writes_a_file_that_checks_and_never_overwrites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for template in setup.TEMPLATE_FILES:
        target = tmp_path / f"not/there/my-{template}.toml"  # the directories are made
        assert run_cli("init", target, "--template", template).exit_code == 0
        assert run_cli("check", target).exit_code == 0
    target.write_text("# mine\n")
    assert run_cli("init", target, "--template", template).exit_code == 2
    assert target.read_text() == "# mine\n"
    assert run_cli("init", tmp_path).exit_code == 0
    first = (tmp_path / "quickstart.toml").read_text().splitlines()[0]
    schema = tmp_path / first.removeprefix("#:schema ")
    assert json.loads(schema.read_text()) == json.loads(run_cli("schema").output)
    assert "type: retrain init here.toml" in refusal("init", "here")
    assert "/proc/a.toml cannot be written: " in refusal("init", "/proc/a.toml")
    assert "quickstart.toml/b.toml cannot be written: " in refusal("init", "quickstart.toml/b.toml")


FIVE_MISTAKES = """\
[campaign]
seeds = [0, 1]
[model]
lora_rnk = 8
[training]
batch_size = 0
max_steps = "many"
[algorithm]
advantage_mode = "grop"
[bakcend]
"""


@pytest.mark.parametrize("command", ["check", "explain", "train"])
def test_five_mistakes_are_five_lines(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text(FIVE_MISTAKES)
    result = run_cli(command, "wrong.toml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line.split("  ")[:2] for line in result.stderr.splitlines()] == [
        ["wrong.toml:4", "model.lora_rnk"], ["wrong.toml:6", "training.batch_size"],
        ["wrong.toml:7", "training.max_steps"], ["wrong.toml:9", "algorithm.advantage_mode"],
        ["wrong.toml:10", "bakcend"],
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


STEPS = "[training]\nmax_steps = 3\n"
REWARD = '[reward]\ntype = "custom"\ncustom_module = "own.py"\n'
MODULES = {
    "own": "def score(completion, answer): return 1",
    "exits": "raise SystemExit(3)",
    "other": "def scor(completion, answer): return 1",
    "gym": "raise ModuleNotFoundError('no', name='reasoning_gym')\n",
}
"""Modules of the user's: all but the first cannot be used."""
REFUSED = [
    ('[lora]\ntarget_modules = ["q_proj", "queries"]', "", "f.toml:2  lora.target_modules  names ",
     'target_modules = ["q_proj"]'),
    (STEPS, "training.max_steps=0", "--set  training.max_steps  ", ""),
    (STEPS, "campaign.max_steps=2",
     "--set  campaign.max_steps  is for campaigns, and f.toml describes a single run: ", "--set training.max_steps=2"),
    (STEPS, "model.lora_rank=1000000000",
     "--set  model.lora_rank  is 1000000000, and no linear layer of tiny-reasoner has more", ""),
    ('[data]\nsource = "gym:problems"', "", "f.toml:2  data.source  ", "; type: pip install '.[gym]'"),
    # What was set on the command line is not looked for in the file, which has the same keys with other values.
    ('[model]\nmodel = "tiny-reasoner"', "model.model=/nowhere/model", "--set  model.model  ", ""),
    ('[data]\nsource = "arithmetic"', "data.source=nosuchmodule:problems", "--set  data.source  ", ""),
    ('[[evaluation.sets]]\nname = "own"\nsource = "arithmetic"',
     'evaluation.sets=[{name = "a", source = "nosuchmodule:p"}]', "--set  evaluation.sets[1].source  ", ""),
    (REWARD, 'reward.custom_module="exits.py"', "--set  reward.custom_module  is ", "SystemExit: 3 (exits.py:1)"),
    (REWARD, 'reward.custom_module="other.py"', "--set  ", "it has no function 'score'; it defines scor"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "setting", "start", "end"), REFUSED)
def test_a_mistake_is_one_line(tmp_path, text, setting, start, end):
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "f.toml").write_text(text)
    sets = ["--set", setting] if setting else []
    for command in (["check"], ["train", "--out", tmp_path / "out"]):
        line = refusal(*command, tmp_path / "f.toml", *sets)
        assert line.startswith(start)
        assert line.endswith(end)
    assert not (tmp_path / "out").exists()


NEEDY = """\
data.source = "gsm8k"
reward = {type = "weighted", components = [{ type = "match" }, { type = "math", weight = 0.5 }]}
logging.report_to = ["tensorboard", "trackio"]
evaluation.sets = [{name = "held"}, {name = "hub", source = "math"}]
"""
NEEDED = [
    "1  data.source  is \"gsm8k\", which needs the package datasets: pip install '.[data]'",
    "2  reward.components[2].type  is \"math\", which needs the package math-verify: pip install '.[math]'",
    '3  logging.report_to  is "tensorboard", which needs the package tensorboard',
    '3  logging.report_to  is "trackio", which needs the package trackio',
    '4  evaluation.sets[2].source  is "math", which needs the package datasets',
]


def test_packages_that_a_file_needs_are_missed_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "needy.toml").write_text(NEEDY)
    for module in ("datasets", "math_verify", "tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    for command in (["check"], ["train", "--out", str(tmp_path / "out")]):
        result = run_cli(command[0], tmp_path / "needy.toml", *command[1:])
        assert result.exit_code == 2
        lines = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
        assert len(lines) == len(NEEDED)
        for start in NEEDED:
            assert any(line.startswith(f"needy.toml:{start}") for line in lines), (start, lines)
    assert not (tmp_path / "out").exists()


def test_status_without_runs_says_how_to_have_some(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    empty = run_cli("status", ".")
    assert (empty.exit_code, empty.stdout.partition(";")[0]) == (0, "No runs under .")
    assert refusal("status").startswith("no runs to show: logs does not exist;")
    line = refusal("status", "file")
    assert line.startswith("no runs to show: file is not a directory;")
    assert all(f"retrain {command}" in line for command in ("train FILE", "init", "status DIR"))


@pytest.mark.parametrize("command", ["resume", "squeeze", "report", "compare"])
def test_directories_that_are_no_runs_are_refused_in_one_line(tmp_path, command):
    (tmp_path / "file.toml").write_text("")
    missing = "nothing matches" if command == "compare" else "is not a directory"  # compare takes patterns too
    for path, words in (("", "it"), ("nowhere", missing), ("file.toml", "type: retrain train")):
        line = refusal(command, tmp_path / path)
        assert str(tmp_path / path) in line
        assert words in line
    (tmp_path / "checkpoints.jsonl").write_text('{"name": "10", "state_path": "tinker://a"}\n')  # of another tool
    for reader in ("squeeze", "serve"):
        assert refusal(reader, tmp_path).startswith(f"{tmp_path} holds no adapter: ")


@pytest.mark.parametrize(
    "arguments", [["train", "run.toml"], ["resume", "."], ["squeeze", "."], ["export", ".", "--merge"], ["report", "."]]
)
def test_an_empty_path_to_write_to_is_refused(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[training]\nmax_steps = 1\n")
    assert refusal(*arguments, "--out", "").startswith("the path to write to is empty: ")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_doctor_names_every_package_and_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(setup, "bfloat16_gain", lambda: 3.4)
    version_of, missing = setup.version_of, {"trackio"}
    monkeypatch.setattr(setup, "version_of", lambda package: None if package in missing else version_of(package))
    result = run_cli("doctor")
    assert result.exit_code == 0
    for name in (*setup.REQUIRED, *(f"[{extra}]" for extra in setup.EXTRAS), "disk", "cpu"):
        assert name in result.output
    assert "bfloat16             multiplied 3.4 times as fast" in result.output
    assert re.search(r"^- .*\[trackio\].*not installed .*; type: pip install '\.\[trackio\]'$", result.output, re.M)
    missing |= {*setup.REQUIRED}
    result = run_cli("doctor")
    assert (result.exit_code, "pip install" in result.output) == (1, True)
    assert '[inference] dtype = "bfloat16" is faster here' in (device.bfloat16_advice("auto") or "")
