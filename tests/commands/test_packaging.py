import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from helpers.campaigns import blocks

from retrain.cli import setup

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
COMMANDS = """
import json, sys
from retrain.cli.app import app

heavy = {"torch", "transformers", "peft", "safetensors.torch", "scipy", "pandas", "datasets", "pyarrow", "wandb"}
for command in json.loads(sys.argv[1]):
    app(command, standalone_mode=False)
    print("loaded:", command[0], *sorted(heavy & set(sys.modules)))
"""


def test_commands_import_no_torch(tmp_path):
    """One process runs them one after another; what one of them has loaded stays for the next."""
    (backend,) = [block.values[0] for block in blocks("python") if "class Table" in block.values[0]]
    (tmp_path / "my_backend.py").write_text(backend)
    (tmp_path / "own.toml").write_text('[backend]\nbackend = "my_backend:Table"\n')
    commands = [
        ["--version"], ["schema"], ["status", "."], ["check", "own.toml"],
        ["check", f"{ROOT}/campaigns/quickstart.toml"], ["train", "own.toml", "--dry-run"],
        ["explain", f"{ROOT}/campaigns/gsm8k.toml"],
    ]  # fmt: skip
    command = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    loaded = {}
    for line in done.stdout.splitlines():
        if line.startswith("loaded:"):
            _, name, *modules = line.split()
            loaded.setdefault(name, set(modules))
    # A chat template takes transformers' renderer (a module without torch), a hub's data set its library.
    assert loaded["--version"] == loaded["schema"] == loaded["status"] == set()
    assert loaded["check"] <= {"transformers"}
    assert loaded["train"] <= {"transformers"}
    assert "torch" not in loaded["explain"]


def requirement_names(lines: list[str]) -> set[str]:
    names = {re.split(r"[<>=\[ ;]", line, maxsplit=1)[0] for line in lines if line and not line.startswith("#")}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


CORE = requirement_names(PROJECT["project"]["dependencies"])


def test_constraints_pin_every_requirement_exactly():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    optional = requirement_names([line for lines in EXTRAS.values() for line in lines])
    # vLLM's own pins contradict these: its environment has constraints-vllm.txt.
    assert (CORE | optional) - {"retrain", "vllm"} <= requirement_names(pins)


def test_every_extra_is_looked_for_by_doctor():
    assert set(setup.EXTRAS) == set(EXTRAS) - {"docs", "dev"}
    for extra, (packages, _) in setup.EXTRAS.items():
        assert set(packages.values()) <= requirement_names(EXTRAS[extra]) | (CORE if extra == "wandb" else set())


def test_wheel(tmp_path):
    """The bundled models and py.typed lie inside the package; templates come from campaigns/."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 9_000_000
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"retrain/templates/{name}" for name in setup.TEMPLATE_FILES.values()} <= names
    files = [path for path in (ROOT / "retrain").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names
    assert not [name for name in names if name.startswith(("tests/", "campaigns/", "logs/"))]
