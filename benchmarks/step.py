"""One RL step, side by side: retrain, the limit, TRL's GRPOTrainer and vLLM, on equal work.

    python benchmarks/step.py --only ours,limit
    python benchmarks/step.py --envs ENVS

Every side lives in an environment of its own with nothing but what it needs, because what is installed besides shows in
the memory (transformers imports scikit-learn where it is installed). They are made once with

    python benchmarks/step.py --envs ENVS --make

Each side is a process of its own that waits between its steps, so one works at a time; the sides take turns, step by
step, after one step of warm-up each. Medians over ``--repeats`` steps; ``--json FILE`` keeps every step.
"""

import argparse
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import shared
from shared import (
    HERE,
    Measured,
    Setting,
    Side,
    bar,
    medians,
    opened,
    parser_of,
    publish,
    table,
    take_turns,
    with_verdicts,
)

SIDES = {"ours": "ours.py", "limit": "limit.py", "trl": "peer_trl.py", "vllm": "peer_vllm.py"}
SETTINGS = ("256x64", "256x256", "512x64", "512x256")
GPU_SETTINGS = ("1.7bx256",)
ENVIRONMENTS = {"ours": ("-c", HERE.parent / "constraints.txt", HERE.parent), "trl": ("trl", "peft")}
"""What is installed for a side, after torch; ours and the limit share one, or run in the one that runs this. That of
vLLM, which has a build for CPUs of its own, has to be there."""
BAR_LIMIT, BAR_TRL = 1.15, 1.2
BAR_VLLM = {"float32": 2.5, "bfloat16": 2.0}
"""How many times as fast as vLLM sampling alone has to be."""


def run(setting: Setting, pythons: dict[str, Path], options: argparse.Namespace) -> dict[str, list[Measured]]:
    """The measured steps of every side at one setting."""
    shared.model_directory(options.models, setting.shape)
    sides: list[Side] = []
    common = {key: getattr(options, key) for key in ("models", "threads", "device", "dtype")}
    try:
        for name, python in pythons.items():
            sides.append(Side(name, [python, HERE / SIDES[name]], setting, ours=name == "ours", **common))
        take_turns(sides, options.warmup, options.repeats)
    finally:
        for side in sides:
            side.close()
    return {side.name: side.steps for side in sides}


def report(results: dict[str, dict[str, list[Measured]]], dtype: str) -> str:
    """Markdown: seconds of each side and how many times ours they are, then the verdicts. vLLM samples and does not
    train."""
    rows = []
    for setting, sides in results.items():
        ours = medians(sides["ours"])["step_s"] if "ours" in sides else None
        for name, steps in sides.items():
            m = medians(steps)
            keys = ("sampling_s",) if name == "vllm" else ("sampling_s", "update_s", "step_s", "step_cpu_s")
            seconds = [f"{m[key]:.2f}" for key in keys] + [""] * (4 - len(keys))
            ratio = f"{m['step_s'] / ours:.2f}×" if ours and name != "vllm" else ""
            rows.append([setting, name, *seconds, f"{m['tokens']:.0f}", f"{m['peak_mib']:.0f}", ratio])
    head = ("setting", "side", "sampling s", "update s", "step s", "processor s", "tokens", "peak MiB", "to ours")
    return with_verdicts(table(head, rows, left=2), verdicts(results, dtype))


def verdicts(results: dict[str, dict[str, list[Measured]]], dtype: str) -> list[str]:
    """Each bar with what was measured, met or missed."""
    lines = []
    for setting, sides in results.items():
        if "ours" not in sides:
            continue
        found = {name: medians(steps) for name, steps in sides.items()}
        ours = found["ours"]
        if "limit" in found:
            ratio = ours["step_s"] / found["limit"]["step_s"]
            lines.append(bar(f"{setting}: {ratio:.2f}× the limit (bar ≤ {BAR_LIMIT})", ratio <= BAR_LIMIT))
        if "trl" in found:
            ratio = found["trl"]["step_s"] / ours["step_s"]
            lines.append(bar(f"{setting}: {ratio:.2f}× as fast as TRL (bar ≥ {BAR_TRL})", ratio >= BAR_TRL))
        if "vllm" in found:
            ratio, least = found["vllm"]["sampling_s"] / ours["sampling_s"], BAR_VLLM[dtype]
            lines.append(bar(f"{setting}: samples {ratio:.2f}× as fast as vllm (bar ≥ {least})", ratio >= least))
        if "trl" in found:
            peak, theirs = ours["peak_mib"], found["trl"]["peak_mib"]
            lines.append(bar(f"{setting}: peak {peak:.0f} MiB (bar ≤ TRL's {theirs:.0f})", peak <= theirs))
    return lines


def make_environments(root: Path) -> None:
    """The environments of all sides under ``root``, torch first, so that all have this one's version."""
    import torch

    version = torch.__version__.partition("+")[0]
    for name, packages in ENVIRONMENTS.items():
        subprocess.run([sys.executable, "-m", "venv", root / name], check=True)
        pip = [root / name / "bin" / "python", "-m", "pip", "install"]
        subprocess.run([*pip, f"torch=={version}"], check=True)
        subprocess.run([*pip, *packages], check=True)


def python_of(side: str, envs: Path | None) -> Path | None:
    """The interpreter of a side; None when it has no environment."""
    name = "ours" if side in ("ours", "limit") else side
    made = None if envs is None else envs / name / "bin" / "python"
    if made is not None and made.is_file():
        return made
    return Path(sys.executable) if name == "ours" else None


def main() -> None:
    parser = parser_of(__doc__, f"on cuda, settings {','.join(GPU_SETTINGS)}")
    parser.add_argument("--settings", help=f"comma-separated SHAPExTOKENS; default {','.join(SETTINGS)}")
    parser.add_argument("--only", help=f"comma-separated sides of {','.join(SIDES)}; default: all with an environment")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of all sides; default: bfloat16 on a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--envs", type=Path, metavar="DIR", help="where the environments of the sides lie")
    parser.add_argument("--make", action="store_true", help="make these environments and end")
    options = parser.parse_args()
    if options.make:
        if options.envs is None:
            parser.error("--make needs --envs DIR")
        make_environments(options.envs)
        return
    names = options.settings.split(",") if options.settings else list(GPU_SETTINGS if options.gpu else SETTINGS)
    if options.quick:
        names, options.repeats = (names if options.settings else ["tinyx8"]), 1
    found = {side: python_of(side, options.envs) for side in SIDES}
    wanted = options.only.split(",") if options.only else [side for side, python in found.items() if python]
    for side in wanted:
        if side not in SIDES:
            raise SystemExit(f"{side} is no side: {', '.join(SIDES)}")
        if found[side] is None:
            raise SystemExit(f"{side} has no environment: --envs DIR, made with --make")
    pythons = {side: python for side, python in found.items() if side in wanted and python}
    with opened(options):
        options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
        results = {name: run(Setting.parse(name), pythons, options) for name in names}
    steps = {
        setting: {name: [asdict(m) for m in measured] for name, measured in sides.items()}
        for setting, sides in results.items()
    }
    real = all(name.startswith("smollm2x") for name in names)
    mark = f"step {options.dtype}" if real else "step"
    publish(options, mark, report(results, options.dtype), {"repeats": options.repeats, "settings": steps})


if __name__ == "__main__":
    main()
