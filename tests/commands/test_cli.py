"""The command line: what each command prints, writes and returns; nothing here trains."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from retrain import __version__
from retrain.cli import app
from retrain.commands import setup
from retrain.config import load
from retrain.errors import ConfigError, Interrupted, RunFailed
from retrain.policy import device

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "campaigns" / "quickstart.toml"

FIVE_MISTAKES = """\
[campaign]
seeds = [0, 1]

[model]
model = "tiny-reasoner"
lora_rnk = 8

[training]
batch_size = 0
max_steps = "many"

[algorithm]
advantage_mode = "grop"

[bakcend]
devices = "cpu"
"""


def run(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_version():
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"retrain {__version__}\n")


@pytest.mark.parametrize(("arguments", "line"), [
    (["trian"], "error: No such command 'trian'. Did you mean 'train'? For help type: retrain --help"),
    (["train"], "error: Missing argument 'FILE'. For help type: retrain train --help"),
    (["train", "a.toml", "--bogus"], "error: No such option: --bogus"),
    (["--bogus"], "error: No such option: --bogus. For help type: retrain --help"),
    (["squeeze", "logs", "--to", "0"], "error: Invalid value for '--to': "),
    (["init", "--template", "x"], ""),
])  # fmt: skip
def test_wrong_usage_is_one_plain_line_and_status_2(arguments, line):
    result = CliRunner().invoke(app, arguments, prog_name="retrain")
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(line)
    assert "--help" in result.stderr or not line


def test_help_is_fast_and_light():
    """The best of five: below half a second of processor time, and the modules it loads hold nothing heavy."""
    code = "import sys, retrain.cli as c\ntry: c.app(['--help'])\nfinally: print(*sys.modules, file=sys.stderr)"
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert not {"torch", "transformers", "numpy", "peft", "scipy"} & set(done.stderr.split())
    assert min(times) < 0.5


def test_five_mistakes_are_five_lines(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(FIVE_MISTAKES)
    for command in ("check", "explain", "train"):
        result = run(command, file)
        lines = result.stderr.splitlines()
        assert result.exit_code == 2
        assert result.stdout == ""
        assert len(lines) == 5
        expected = (6, "model.lora_rnk"), (9, "training.batch_size"), (10, "training.max_steps")
        expected += (13, "algorithm.advantage_mode"), (15, "bakcend")
        for line, (number, key) in zip(lines, expected, strict=True):
            assert f"wrong.toml:{number}" in line
            assert key in line


def test_layers_that_the_model_does_not_have_are_mistakes_of_the_file(tmp_path):
    file = tmp_path / "targets.toml"
    file.write_text('[lora]\ntarget_modules = ["q_proj", "lm_head", "queries"]\n')
    for command in ("check", "train"):
        result = run(command, file)
        assert (result.exit_code, result.stdout) == (2, "")
        for line, told in zip(result.stderr.splitlines(), ('"lm_head", the output layer', '"queries"'), strict=True):
            assert line.startswith("targets.toml:2  lora.target_modules  names " + told)
            assert line.endswith('target_modules = ["q_proj"]')


def test_set_is_checked_like_the_file():
    result = run("check", QUICKSTART, "--set", "training.max_steps=0")
    assert result.exit_code == 2
    assert "--set" in result.stderr
    assert "training.max_steps" in result.stderr
    assert run("check", QUICKSTART, "--set", "training.max_steps=3").exit_code == 0


@pytest.mark.parametrize(("setting", "fix"), [
    ("campaign.max_steps=2", "--set training.max_steps=2"),
    ("campaign.seeds=[1,2]", "leave it out, or add [campaign] to the file"),
])  # fmt: skip
@pytest.mark.parametrize("command", ["train", "check", "explain"])
def test_a_campaign_setting_makes_no_campaign_of_a_run_file(tmp_path, command, setting, fix):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nmax_steps = 3\n")
    result = run(command, file, "--set", setting)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    key = setting.partition("=")[0]
    assert line.startswith(f"--set  {key}  is for campaigns, and run.toml describes a single run: ")
    assert line.endswith(fix)


def test_missing_file_is_one_line():
    result = run("check", "nowhere.toml")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "nowhere.toml" in result.stderr


SHIPPED = sorted([*(ROOT / "campaigns").glob("*.toml"), *(ROOT / "benchmarks").glob("*.toml")])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_campaigns_pass_check(path):
    assert run("check", path).exit_code == 0


@pytest.mark.parametrize("name", ["quickstart", "gtpo", "critic", "calculator", "smollm2", "gsm8k"])
def test_explain_of_shipped_campaigns(name):
    result = run("explain", ROOT / f"campaigns/{name}.toml")
    assert result.exit_code == 0
    assert "writes  " in result.output


def test_dry_run_writes_nothing(tmp_path):
    result = run("train", QUICKSTART, "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert str(tmp_path / "out") in result.output
    assert list(tmp_path.iterdir()) == []


def test_explain_tells_every_term_of_the_loss(tmp_path):
    file = tmp_path / "terms.toml"
    head = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "my:own"\n'
    file.write_text(
        f"[campaign]\nseeds = [1]\n{head}kl_coef = 0.1\ndual_clip = 3.0\n"
        f"{head}entropy_coef = 0.01\ntis_cap = 2.0\n{head}icepop_band = [0.5, 5]\nloss_normalizer = 'constant'\n"
    )
    lines = [line for line in run("explain", file).output.splitlines() if line.startswith("loss ")]
    assert "a negative advantage counts 3 times at most, plus 0.1 × KL to the base  (grpo+my-own~dual" in lines[0]
    assert "π/π_sampler up to 2, divided by all tokens, minus 0.01 × entropy  (grpo+my-own~ent" in lines[1]
    assert "where that is 0.5 to 5, divided by max_tokens and the number of completions  (grpo" in lines[2]


def test_explain_tells_conditions_seeds_and_costs(tmp_path):
    file = tmp_path / "two.toml"
    file.write_text(
        '[campaign]\nseeds = [3, 5]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'
        '[[campaign.conditions]]\nadvantage_mode = "maxrl"\ntransform_mode = "none"\n"training.lr" = 3e-4\n'
        '[training]\nmax_steps = 10\nbatch_size = 4\ngroup_size = 8\nmax_tokens = 50\n[backend]\ndevices = "cpu"\n'
    )
    text = run("explain", file).output
    assert "2 conditions × 2 seeds = 4 runs" in text
    assert "3 5" in text
    assert "10 steps × 4 prompts × 8 completions = 320 completions, at most 16,000 tokens" in text
    assert "training.lr = 0.0003" in text
    assert "(r − mean) / mean" in text


def test_init_writes_a_file_that_checks_and_never_overwrites(tmp_path):
    for template in setup.Template:
        target = tmp_path / f"my-{template.value}.toml"
        assert run("init", target, "--template", template.value).exit_code == 0
        assert run("check", target).exit_code == 0
        target.write_text("# mine\n")
        again = run("init", target, "--template", template.value)
        assert again.exit_code == 2
        assert target.read_text() == "# mine\n"
    assert run("init", tmp_path).exit_code == 0
    first = (tmp_path / "quickstart.toml").read_text().splitlines()[0]
    schema = tmp_path / first.removeprefix("#:schema ")
    assert json.loads(schema.read_text()) == json.loads(run("schema").output)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("here", "type: retrain init here.toml"),
        ("/proc/a.toml", "/proc/a.toml cannot be written: "),
    ],
)
def test_init_refuses_other_paths(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    result = run("init", path)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_init_makes_the_directories_above_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("init", "not/there/a.toml").exit_code == 0
    assert run("check", "not/there/a.toml").exit_code == 0
    refused = run("init", "not/there/a.toml/b.toml")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "not/there/a.toml/b.toml cannot be written: " in refused.stderr


def test_schema_is_a_schema_that_the_quickstart_obeys():
    import tomllib

    import jsonschema

    schema = json.loads(run("schema").output)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(tomllib.loads(QUICKSTART.read_text()), schema)


def test_doctor_names_every_package_and_extra():
    result = run("doctor")
    assert result.exit_code == 0
    for name in (*setup.REQUIRED, *(f"[{extra}]" for extra in setup.EXTRAS), "disk", "cpu"):
        assert name in result.output


@pytest.mark.parametrize(
    ("dtype", "gain", "said"),
    [
        ("auto", 3.4, 'multiplies in bfloat16 3.4 times as fast as in float32: [inference] dtype = "bfloat16" is'),
        ("auto", 1.4, None),
        ("float32", 3.4, None),
        ("bfloat16", 3.4, None),
        ("bfloat16", 0.4, 'at 0.4 of the speed of float32: [inference] dtype = "float32" is faster here'),
    ],
)
def test_what_bfloat16_brings_is_told_where_it_matters(monkeypatch, dtype, gain, said):
    monkeypatch.setattr(device, "bfloat16_gain", lambda: gain)
    advice = device.bfloat16_advice(dtype)
    assert (advice is None) if said is None else (said in (advice or ""))
    assert f"bfloat16             multiplied {gain} times as fast" in run("doctor").output


def test_the_gain_of_bfloat16_is_measured():
    assert 0 < device.bfloat16_gain() < 1000
    assert device.bfloat16_gain() == device.bfloat16_gain()  # once


def test_doctor_says_ok_of_what_is_there_only(monkeypatch):
    found = setup.version_of
    monkeypatch.setattr(setup, "version_of", lambda package: None if package == "trackio" else found(package))
    result = run("doctor")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    (absent,) = [line for line in lines if "[trackio]" in line]
    assert absent.split(maxsplit=2)[0] == "-"
    assert absent.endswith("not installed (Trackio tracking); type: pip install '.[trackio]'")
    assert not [line for line in lines if line.startswith("ok ") and "not installed" in line]


def test_doctor_fails_when_a_required_package_is_missing(monkeypatch):
    monkeypatch.setattr(setup, "version_of", lambda package: None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip install" in result.output


def write_campaign(directory: Path, runs: dict[str, tuple[str, int]], single: bool = False) -> None:
    """What training leaves of runs given as {run_id: (state, steps done)}."""
    entries = []
    for run_id, (state, steps) in runs.items():
        relative = "." if single else f"runs/{run_id}"
        entries.append({"run_id": run_id, "state": state, "path": relative, "max_steps": 4, "reason": None, "step": 0})
        path = directory / relative
        path.mkdir(parents=True)
        rows = [{"step": i, "mean_reward": i / 4, "correct_rate": 0.5} for i in range(steps)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        evals = [{"step": 0, "eval/heldout/correct_rate": 0.25}, {"step": steps, "eval/heldout/correct_rate": 0.75}]
        (path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    (directory / "manifest.json").write_text(json.dumps({"runs": entries}))


def test_status_of_a_run_a_campaign_and_several(tmp_path):
    write_campaign(tmp_path / "camp", {"a_s1": ("done", 4), "a_s2": ("failed", 2), "b_s1": ("running", 1)})
    write_campaign(tmp_path / "single", {"grpo+none_s0": ("pending", 0)}, single=True)
    states = {
        "a_s1": ("done", 4),
        "a_s2": ("failed", 2),
        "b_s1": ("interrupted", 1),  # nothing holds the lock
        "grpo+none_s0": ("pending", 0),
    }
    reports = json.loads(run("status", tmp_path, "--json").output)
    assert {row["run_id"]: (row["state"], row["step"]) for report in reports for row in report["runs"]} == states
    (report,) = json.loads(run("status", tmp_path / "camp" / "runs" / "a_s2", "--json").output)
    assert (report["runs"][0]["run_id"], report["runs"][0]["heldout_now"]) == ("a_s2", 0.75)
    lines = run("status", tmp_path / "camp").output.splitlines()
    assert [line.split()[1:5] for line in lines[1:]] == [
        ["a_s1", "done", "4", "4"],
        ["a_s2", "failed", "2", "4"],
        ["b_s1", "interrupted", "1", "4"],
    ]


def test_status_tells_a_living_run_by_the_lock(tmp_path):
    import fcntl

    write_campaign(tmp_path, {"a_s1": ("running", 1)})
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (report,) = json.loads(run("status", tmp_path, "--json").output)
        assert report["runs"][0]["state"] == "running"
        assert "worker" not in run("status", tmp_path).output
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        manifest["runs"][0]["worker"] = "2 gpu:1"
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        assert run("status", tmp_path).output.splitlines()[1].endswith("worker 2 gpu:1")


def test_status_without_runs_says_how_to_have_some(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    empty, *refused = run("status", "."), run("status"), run("status", "file")
    assert (empty.exit_code, empty.stdout.partition(";")[0]) == (0, "No runs under .")
    for result, found in zip(refused, ("logs does not exist", "file is not a directory"), strict=True):
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert result.stderr.startswith(f"no runs to show: {found};")
    for text in (empty.stdout, *(result.stderr for result in refused)):
        assert all(f"retrain {command}" in text for command in ("train FILE", "init", "status DIR"))


@pytest.mark.parametrize("command", ["resume", "squeeze", "report", "compare"])
def test_directories_that_are_no_runs_are_refused_in_one_line(tmp_path, command):
    (tmp_path / "file.toml").write_text("")
    for path, words in (("", "it"), ("nowhere", "is not a directory"), ("file.toml", "type: retrain train")):
        result = run(command, tmp_path / path)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith(str(tmp_path / path))
        assert words in line


@pytest.mark.parametrize("row", ['{"name": "10", "state_path": "tinker://a"}', '{"sampler_path": null}', "[1]"])
@pytest.mark.parametrize("command", ["squeeze", "serve"])
def test_a_directory_of_another_tool_with_checkpoints_is_refused_in_one_line(tmp_path, command, row):
    (tmp_path / "checkpoints.jsonl").write_text(row + "\n")
    result = run(command, tmp_path)
    assert (result.exit_code, result.stderr.startswith(f"{tmp_path} holds no adapter: ")) == (2, True)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "importing it failed: SystemExit: 3 (own.py:1)"),
        ("def score(completion, answer) return 1", "importing it failed: SyntaxError: expected ':' (own.py:1)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (own.py:1)"),
        ("def scor(completion, answer): return 1", "it has no function 'score'; it defines scor"),
    ],
)
def test_a_reward_with_a_mistake_is_told_with_its_line(tmp_path, code, reason):
    (tmp_path / "own.py").write_text(code)
    file = tmp_path / "own.toml"
    file.write_text('[reward]\ntype = "custom"\ncustom_module = "own.py"\n')
    result = run("check", file)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("own.toml:3  reward.custom_module  is ")
    assert line.endswith(reason)


@pytest.mark.parametrize(
    ("error", "exit_status", "words"),
    [
        (RunFailed("run a_s1: loss is not finite"), 1, "run a_s1: loss is not finite\n"),
        (Interrupted("saved at step 3"), 130, "saved at step 3\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
)
def test_errors_become_lines_and_statuses(monkeypatch, tmp_path, error, exit_status, words):
    def fail(*_):
        raise error

    monkeypatch.setattr("retrain.record.status.homes_of_runs", fail)
    result = run("status", tmp_path)
    assert (result.exit_code, result.stderr) == (exit_status, words)


def test_our_own_mistakes_keep_their_traceback(monkeypatch, tmp_path):
    def fail(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("retrain.record.status.homes_of_runs", fail)
    result = run("status", tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_every_command_has_help_that_names_its_options(command):
    result = run(command.name or command.callback.__name__, "--help")
    assert result.exit_code == 0
    (first, *_) = command.callback.__doc__.split("\n\n")
    assert " ".join(first.split()) in " ".join(result.output.split())
    hints = get_type_hints(command.callback, include_extras=True).values()
    options = [
        name for hint in hints for item in get_args(hint)[1:] for name in getattr(item, "param_decls", None) or ()
    ]
    assert [name for name in options if name not in result.output] == []
    assert "default: (" not in result.output


NEEDY = """\
[data]
source = "gsm8k"
eval_source = "held.parquet"

[reward]
type = "weighted"
components = [{ type = "match" }, { type = "math", weight = 0.5 }]

[logging]
report_to = ["tensorboard", "trackio"]
wandb_project = "mine"

[[evaluation.sets]]
name = "held"

[[evaluation.sets]]
name = "hub"
source = "math"
"""


def test_packages_that_a_file_needs_are_missed_before_anything_is_loaded(tmp_path, monkeypatch):
    from retrain.campaign.planning import references

    file = tmp_path / "needy.toml"
    file.write_text(NEEDY)
    monkeypatch.setattr(references, "is_installed", lambda module: False)
    expected = (
        ("2  data.source", "is \"gsm8k\", which needs the package datasets: pip install '.[data]'"),
        ("3  data.eval_source", "is \"held.parquet\", which needs the package pyarrow: pip install '.[data]'"),
        ("7  reward.components[2].type", "is \"math\", which needs the package math-verify: pip install '.[math]'"),
        ("10  logging.report_to", 'is "tensorboard", which needs the package tensorboard'),
        ("10  logging.report_to", 'is "trackio", which needs the package trackio'),
        ("18  evaluation.sets[2].source", 'is "math", which needs the package datasets'),
        ("11  logging.wandb_project", "is \"mine\", which needs the package wandb: pip install '.[wandb]'"),
    )
    for command in (["check"], ["train", "--out", str(tmp_path / "out")]):
        result = run(command[0], file, *command[1:])
        assert result.exit_code == 2
        lines = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
        assert len(lines) == len(expected)
        for where, told in expected:
            assert any(line.startswith(f"needy.toml:{where}  {told}") for line in lines), (where, told, lines)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("logging", "told"), [
    ('report_to = "none"\nwandb_project = "mine"', []),
    ('report_to = "all"', []),
    ('report_to = "all"\nwandb_project = "mine"', ["logging.wandb_project"]),
    ('report_to = "wandb"\nwandb_project = "mine"', ["logging.report_to"]),
])  # fmt: skip
def test_only_trackers_that_runs_report_to_are_missed(tmp_path, monkeypatch, logging, told):
    from retrain.campaign.planning import references
    from retrain.config import upkeep

    (tmp_path / "f.toml").write_text(f"[logging]\n{logging}\n")
    monkeypatch.setattr(references, "is_installed", lambda module: False)
    monkeypatch.setattr(upkeep, "find_spec", lambda module: None)
    result = run("check", tmp_path / "f.toml")
    assert [line.split()[1] for line in result.stderr.splitlines()] == told
    assert result.exit_code == (2 if told else 0)


SET_VALUES = (
    ("model.model=/nowhere/model", "model.model", "there is no such directory"),
    ("data.source=nosuchmodule:problems", "data.source", "nosuchmodule"),
    ('algorithm.loss="nosuchmodule:loss"', "algorithm.loss", "nosuchmodule"),
    ('lora.target_modules=["nothing"]', "lora.target_modules", "nothing"),
    ("reward.custom_module=nosuchmodule", "reward.custom_module", "nosuchmodule"),
    ('evaluation.sets=[{name = "a", source = "nosuchmodule:p"}]', "evaluation.sets[1].source", "nosuchmodule"),
)


@pytest.mark.parametrize(("setting", "key", "said"), SET_VALUES, ids=[key for _, key, _ in SET_VALUES])
def test_what_was_set_on_the_command_line_is_not_looked_for_in_the_file(tmp_path, setting, key, said):
    """The file has the same keys, with other values."""
    file = tmp_path / "f.toml"
    (tmp_path / "mine.py").write_text("def score(completion, answer):\n    return 1.0\n")
    file.write_text(
        '[model]\nmodel = "tiny-reasoner"\n[data]\nsource = "arithmetic"\n[algorithm]\nloss = "ppo"\n'
        '[lora]\ntarget_modules = ["q_proj"]\n[reward]\ntype = "custom"\ncustom_module = "mine.py"\n'
        '[[evaluation.sets]]\nname = "own"\nsource = "arithmetic"\n'
    )
    assert run("check", file).exit_code == 0
    result = run("check", file, "--set", setting)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2
    assert line.startswith(f"--set  {key}  ")
    assert said in line


def test_a_plug_in_that_lacks_a_known_package_is_told_what_to_type(tmp_path):
    (tmp_path / "tasks.py").write_text("import reasoning_gym_absent\n")
    (tmp_path / "gym.py").write_text("raise ModuleNotFoundError('no', name='reasoning_gym')\n")
    for module, told in (("tasks", ""), ("gym", "; type: pip install '.[gym]'")):
        (tmp_path / "f.toml").write_text(f'[data]\nsource = "{module}:problems"\n')
        result = run("check", tmp_path / "f.toml")
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert line.endswith(str(Path.cwd()) + told)


def test_what_is_installed_is_not_missed_and_nothing_is_imported_to_know():
    from retrain.extras import EXTRAS, is_installed

    code = "from retrain.extras import *; print([is_installed(m) for e in EXTRAS.values() for m in e.packages])"
    code += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    first, modules = done.stdout.splitlines()
    names = [module for extra in EXTRAS.values() for module in extra.packages]
    assert json.loads(first.lower()) == [is_installed(name) for name in names]
    assert not set(names) & set(modules.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nleraning_rate = 0.1\n", "lr"),
        ('[squeeze]\nenabled = "false"\n', "enabled = false"),
        ("[gtpo]\nbeta = -1\n", "beta"),
    ],
)
def test_a_mistake_is_one_line_and_trains_nothing(tmp_path, text, said):
    """Unknown keys ignored, "false" read as true, beta = -1 trained to the end, a typo told in 116 lines."""
    path = tmp_path / "typo.toml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["train", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert "typo.toml:2" in line
    assert said in line
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError):
        load(path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lora.alpha=1e308", "lora.alpha  is 1e+308, but must be a number ≥ 0 and ≤ 1e+18: alpha = 32.0"),
        ("model.lora_rank=1000000000", "model.lora_rank  is 1000000000, and no linear layer of tiny-reasoner has more"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_adapters_that_cannot_be_trained_are_refused(tmp_path, command, setting, message):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nmax_steps = 1\n")
    result = run(command, file, "--set", setting)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"--set  {message}")


@pytest.mark.parametrize(
    "arguments", [["train", "run.toml"], ["resume", "."], ["squeeze", "."], ["export", ".", "--merge"], ["report", "."]]
)
def test_an_empty_path_to_write_to_is_refused(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[training]\nmax_steps = 1\n")
    result = run(*arguments, "--out", "")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("the path to write to is empty: ")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


ENDLESS = """
from itertools import repeat
from retrain import Problem

def endless(split):
    yield from repeat(Problem("1", "1", "1"))

class Endless:
    def problems(self, split):
        return endless(split)

    def start(self, problem, seed):
        raise NotImplementedError
"""


@pytest.mark.parametrize(
    ("command", "section", "name"),
    [
        ("check", '[environment]\nprovider = "own_problems:Endless"', "problems('train')"),
        ("train", '[data]\nsource = "own_problems:endless"', "data source 'own_problems:endless'"),
    ],
)
def test_problems_without_end_are_an_error(tmp_path, command, section, name):
    (tmp_path / "own_problems.py").write_text(ENDLESS)
    (tmp_path / "run.toml").write_text(section)
    result = run(command, tmp_path / "run.toml", *(["--out", tmp_path / "out"] if command == "train" else []))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"{name} makes more than 1,000,000 problems" in line
    assert "a generator must end" in line
