"""One RL step, side by side: retrain, the limit, TRL's GRPOTrainer and retrain 0.3.0, on equal work.

    python benchmarks/step.py --only ours,limit
    python benchmarks/step.py --trl-python ENVS/trl/bin/python --retrain03-python ENVS/retrain03/bin/python

Peers live in their own environments, made once with

    python benchmarks/step.py --make-envs ENVS

Each side is a process of its own that waits between its steps, so one works at a time; the sides take turns, step by
step, after one step of warm-up each. Medians over ``--repeats`` steps; ``--json FILE`` keeps every step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import workload
from sides import HERE, Side, bar, medians, take_turns
from workload import Measured, Setting

SIDES = {"ours": "ours.py", "limit": "limit.py", "trl": "peer_trl.py", "retrain03": "peer_retrain03.py"}
SETTINGS = ("256x64", "256x256", "512x64", "512x256")
GPU_SETTINGS = ("1.7bx256",)
PEERS = {"trl": ("trl", "peft"), "retrain03": ("retrain==0.3.0",)}
BAR_LIMIT, BAR_TRL, BAR_RETRAIN03 = 1.15, 1.2, 3.5


def run(setting: Setting, pythons: dict[str, str], options: argparse.Namespace) -> dict[str, list[Measured]]:
    """The measured steps of every side at one setting."""
    workload.model_directory(options.models, setting.shape)
    sides: list[Side] = []
    common = {"models": options.models, "threads": options.threads, "device": options.device}
    try:
        for name, python in pythons.items():
            sides.append(Side(name, [python, HERE / SIDES[name]], setting, ours=name == "ours", **common))
        take_turns(sides, options.warmup, options.repeats)
    finally:
        for side in sides:
            side.close()
    return {side.name: side.steps for side in sides}


def table(results: dict[str, dict[str, list[Measured]]]) -> str:
    """Markdown: seconds of each side, and how many times the limit ours is, and the peers are ours."""
    lines = [
        "| setting | side | sampling s | update s | step s | processor s | tokens | peak MiB | to ours |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for setting, sides in results.items():
        ours = medians(sides["ours"])["step_s"] if "ours" in sides else None
        for name, steps in sides.items():
            m = medians(steps)
            ratio = f"{m['step_s'] / ours:.2f}×" if ours else ""
            lines.append(
                f"| {setting} | {name} | {m['sampling_s']:.2f} | {m['update_s']:.2f} | {m['step_s']:.2f} "
                f"| {m['step_cpu_s']:.2f} | {m['tokens']:.0f} | {m['peak_mib']:.0f} | {ratio} |"
            )
    return "\n".join(lines)


def verdicts(results: dict[str, dict[str, list[Measured]]]) -> list[str]:
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
        for peer, least in (("trl", BAR_TRL), ("retrain03", BAR_RETRAIN03)):
            if peer in found:
                ratio = found[peer]["step_s"] / ours["step_s"]
                lines.append(bar(f"{setting}: {ratio:.2f}× as fast as {peer} (bar ≥ {least})", ratio >= least))
        if "trl" in found:
            peak, theirs = ours["peak_mib"], found["trl"]["peak_mib"]
            lines.append(bar(f"{setting}: peak {peak:.0f} MiB (bar ≤ TRL's {theirs:.0f})", peak <= theirs))
    return lines


def make_environments(root: Path) -> None:
    """A virtual environment per peer under ``root``, torch first, so that all sides have this one's version."""
    import torch

    version = torch.__version__.partition("+")[0]
    for name, packages in PEERS.items():
        subprocess.run([sys.executable, "-m", "venv", root / name], check=True)
        pip = [root / name / "bin" / "python", "-m", "pip", "install"]
        subprocess.run([*pip, f"torch=={version}"], check=True)
        subprocess.run([*pip, *packages], check=True)
        print(f"--{name}-python {root / name / 'bin' / 'python'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", help=f"comma-separated SHAPExTOKENS; default {','.join(SETTINGS)}")
    parser.add_argument("--only", help=f"comma-separated sides of {','.join(SIDES)}; default: all with an environment")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--trl-python", metavar="PYTHON", help="python of an environment with trl and peft")
    parser.add_argument("--retrain03-python", metavar="PYTHON", help="python of an environment with retrain 0.3.0")
    parser.add_argument("--make-envs", type=Path, metavar="DIR", help="make the peers' environments here and end")
    parser.add_argument("--models", type=Path, help="keep the random-weight models here")
    parser.add_argument("--quick", action="store_true", help="a toy shape, one repeat: does everything work?")
    parser.add_argument("--gpu", action="store_true", help=f"on cuda, settings {','.join(GPU_SETTINGS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measured step here")
    parser.add_argument("--record", action="store_true", help="write the output into docs/performance.md")
    options = parser.parse_args()
    if options.make_envs:
        make_environments(options.make_envs)
        return
    names = options.settings.split(",") if options.settings else list(GPU_SETTINGS if options.gpu else SETTINGS)
    if options.quick:
        names, options.repeats = (names if options.settings else ["tinyx8"]), 1
    options.device = "cuda" if options.gpu else "cpu"
    if options.gpu:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("--gpu: torch sees no GPU here")
    here = {"ours": sys.executable, "limit": sys.executable}
    pythons = here | {"trl": options.trl_python, "retrain03": options.retrain03_python}
    wanted = options.only.split(",") if options.only else [name for name, python in pythons.items() if python]
    for name in wanted:
        if not pythons.get(name):
            raise SystemExit(f"{name} needs --{name}-python, or is no side: {', '.join(SIDES)}")
    with tempfile.TemporaryDirectory() as temporary:
        options.models = options.models or Path(temporary)
        chosen = {name: pythons[name] for name in SIDES if name in wanted}
        results = {name: run(Setting.parse(name), chosen, options) for name in names}
    text = workload.with_verdicts(table(results), verdicts(results))
    print(text)
    if options.record:
        workload.record("step on a GPU" if options.gpu else "step", text)
    if options.json:
        content: dict[str, Any] = {"threads": options.threads, "repeats": options.repeats, "settings": {}}
        for setting, sides in results.items():
            content["settings"][setting] = {name: [asdict(m) for m in steps] for name, steps in sides.items()}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
