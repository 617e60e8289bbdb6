"""``init``, ``schema``, ``doctor``: prepare for the first run."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Literal

import psutil
import typer

from retrain import __version__
from retrain.cli.arguments import argument, option
from retrain.config import json_schema
from retrain.device import bfloat16_gain, build_fault
from retrain.errors import UsageError
from retrain.extras import EXTRAS
from retrain.files import dumps

REQUIRED = (
    "torch", "transformers", "peft", "numpy", "scipy", "pydantic", "safetensors", "tomli", "typer", "rich", "httpx",
    "jaxtyping", "wandb",
)  # fmt: skip

MARKS = {True: "ok", False: "BAD", None: "-"}
"""Prefix of a line of ``doctor``: good, bad, or missing and needed only by some campaigns."""


SCHEMA_FILE = "retrain.schema.json"  # Name of the schema beside a new campaign file, whose first line names it

TEMPLATE_FILES = {"quickstart": "quickstart.toml", "campaign": "five_conditions.toml", "gsm8k": "gsm8k.toml"}


def init(
    path: Path | None = argument("PATH", "File or directory to write to; without it <template>.toml here.", None),
    template: Literal["quickstart", "campaign", "gsm8k"] = option(
        "--template",
        "quickstart: minutes on the bundled model; campaign: the five standard conditions; gsm8k: Qwen3-8B on one GPU.",
        "quickstart",
    ),
) -> None:
    """Write a commented campaign file and its JSON Schema.

    Editors check the file by the schema. Existing files are never overwritten.
    """
    target = path or Path()
    if target.is_dir():
        target = target / f"{template}.toml"
    if target.suffix != ".toml":
        raise UsageError(f"{target} does not end in .toml; type: retrain init {target}.toml")
    package, file = Path(__file__).parents[1], TEMPLATE_FILES[template]
    installed = package / "templates" / file
    shipped = installed if installed.is_file() else package.parent / "campaigns" / file  # in a checkout
    text = shipped.read_text(encoding="utf-8")
    text = text.replace("#:schema ./schema.json", f"#:schema ./{SCHEMA_FILE}", 1)
    if not write_new(target, text):
        raise UsageError(f"{target} exists and stays as it is; give another path")
    has_schema = write_new(target.with_name(SCHEMA_FILE), schema_text())
    print(f"Wrote {target}" + (f" and, for editors, {SCHEMA_FILE}" if has_schema else ""))
    print(f"What it will do: retrain explain {target}\nTrain it: retrain train {target}")


def write_new(path: Path, text: str) -> bool:
    """Write a new file and its parent directories; return False, without changes, if it exists. Raises UsageError if it
    cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            return False
        raise UsageError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from error
    return True


def schema() -> None:
    """Print the JSON Schema of campaign files, for editors."""
    print(schema_text(), end="")


def schema_text() -> str:
    return dumps(json_schema(), indent=2) + "\n"


def doctor(
    model: str | None = argument(
        "MODEL", "With --url: the model that the server should hold, by default its own.", None
    ),
    device: str | None = option(
        "--device auto|cpu|gpu:N",
        "Prove on this device, in about 90 seconds, that sampling, training and resuming are right.",
    ),
    file: Path | None = option(
        "--file FILE",
        "With --device: use the model of this campaign file, with random weights if its own are missing. With "
        "--url: its model, adapter and section inference.",
    ),
    report: Path | None = option("--json FILE", "With --device: write a full report to this file."),
    url: list[str] | None = option(
        "--url URL", "Prove that this server samples from the trained weights; may be repeated."
    ),
    engine: str | None = option("--engine vllm|sglang|openai", "With --url: its kind."),
    starts_vllm: bool = option(
        "--vllm", "With --file: start its vLLM beside the model, and prove that it samples, sleeps and wakes.", False
    ),
) -> None:
    """Check this machine: Python, packages, devices, extras, disk.

    With --device prove that it computes right, with --url that a server does, with --vllm that one can be started.
    Nothing else is contacted.
    """
    if not url:
        refuse_given(
            {"MODEL": model, "--engine": engine},
            "{} belongs to the check of a server; type: retrain doctor --url http://127.0.0.1:8000",
        )
    if starts_vllm:
        if url or device is not None or report is not None or file is None:
            raise UsageError("--vllm starts the vLLM of a file; type: retrain doctor --vllm --file FILE")
        from retrain.cli.doctor import check_vllm

        raise typer.Exit(check_vllm(file))
    if url and (device is not None or report is not None):
        raise UsageError("--url checks a server, --device and --json this machine: type one after the other")
    if url or device is not None:
        if report is not None:
            require_writable(report)
        # Torch reads this when it is imported: its memory profiler warns of earlier allocations.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from retrain.cli.doctor import check_machine, check_servers

        raise typer.Exit(check_servers(url, engine, model, file) if url else check_machine(device or "", file, report))
    belongs = "{0} belongs to the self-check; type: retrain doctor --device auto {0} {1}"
    refuse_given({"--file": file, "--json": report}, belongs)
    lines = list(machine_facts())
    for name, text, good in lines:
        print(f"{MARKS[good]:<3}  {name:<20} {text}")
    if any(good is False for *_, good in lines):
        raise typer.Exit(1)


def refuse_given(arguments: Mapping[str, object], message: str) -> None:
    """Raise UsageError for the first argument that was given. ``message``: format string for its name and value."""
    for name, value in arguments.items():
        if value is not None:
            raise UsageError(message.format(name, value))


def require_writable(file: Path) -> None:
    """Raise UsageError if the report cannot be written, or if ``file`` exists and is no report of ``doctor``."""
    if file.is_dir():
        raise UsageError(f"{file} is a directory; give a file, such as {file / 'doctor.json'}")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise UsageError(f"{file} cannot be written: {file.parent} is no directory that can be written to")
    if not file.exists():
        return
    try:
        ours = json.loads(file.read_bytes()).get("kind") == "retrain doctor"
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise UsageError(f"{file} exists and is no report of retrain doctor; it stays as it is: give another path")


def machine_facts() -> Iterator[tuple[str, str, bool | None]]:
    """Yield facts of this machine: name, text, and a key of ``MARKS``."""
    yield "retrain", f"{__version__} in {Path(__file__).parents[1]}", True
    yield "python", f"{platform.python_version()} ({sys.executable})", sys.version_info >= (3, 11)
    for package in REQUIRED:
        version = version_of(package)
        yield package, version or "missing; type: pip install .", version is not None
    yield "cpu", f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}", True
    yield "memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB", True
    if version_of("torch") is not None:
        yield from torch_facts()
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield "disk", f"{free:.1f} GiB free here", free > 1
    for extra, (packages, purpose) in EXTRAS.items():
        package = next(iter(packages.values()))
        version = version_of(package)
        hint = f"{package} {version}" if version else f"not installed ({purpose}); type: pip install '.[{extra}]'"
        yield f"[{extra}]", hint, True if version else None
    for name in ("HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WANDB_MODE"):
        if name in os.environ:
            yield name, os.environ[name], True


def torch_facts() -> Iterator[tuple[str, str, bool]]:
    import torch

    yield "torch threads", str(torch.get_num_threads()), True
    if not torch.cuda.is_available():
        yield "bfloat16", f"multiplied {bfloat16_gain():.1f} times as fast as float32 on the CPU", True
        fault = build_fault("auto")
        yield "gpu", fault or 'none found by torch: runs use the CPU ([backend] devices = "auto")', not fault
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
        yield f"gpu:{index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {bf16}", True


def version_of(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None
