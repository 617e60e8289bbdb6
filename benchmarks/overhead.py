"""What of a step is not model arithmetic, and how long ``retrain train`` takes to its first sampled token.

    python benchmarks/overhead.py [--setting 512x64] [--steps 8]
    python benchmarks/overhead.py --startup

The share comes from the ``timing_spans.jsonl`` of a real run: from the start of one step's sampling to the start of the
next one's, everything outside sampling and update (scoring in worker processes, credit, records, checkpoints, and
whatever lies between the spans), median over the steps after the first. Start-up is a fresh process each time, from its
creation to the end of its first one-token sampling, beside a fresh process that only imports torch, transformers and
peft; the two take turns.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shared
from ours import FIVE, toml
from shared import HERE, Setting, bar, median, opened, parser_of, publish, table, with_verdicts

TRAINED = FIVE[4]
"""The standard condition with most to do besides the model."""
BAR_OVERHEAD, BAR_STARTUP = 0.05, 1.3
MODEL_SPANS = ("rollout", "update", "eval")
IMPORTS = "import torch, transformers, peft"
REWARD = """\
import zlib


def score(completion, answer):
    return float(zlib.crc32(completion.encode()) % 2)
"""


def campaign_file(folder: Path, setting: Setting, models: Path, steps: int) -> Path:
    """A run of so many steps, with its data and reward; of one step, which has no time for SEPA, with plain GRPO."""
    condition = TRAINED if steps > 1 else FIVE[0]
    text = toml(setting, shared.model_directory(models, setting.shape), folder / "data.jsonl", (condition,), "cpu")
    text = text.replace("max_steps = 1000000", f"max_steps = {steps}")
    rows = [{"prompt": prompt, "answer": "1"} for prompt in shared.prompt_texts(setting, 8 * setting.prompts)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parity.py").write_text(REWARD)
    (folder / "run.toml").write_text(text + '[reward]\ntype = "custom"\ncustom_module = "parity.py"\n')
    return folder / "run.toml"


def train(folder: Path, setting: Setting, models: Path, steps: int, threads: int) -> tuple[Path, float, float]:
    """``retrain train`` in its own process: the run directory, when the process was made, its processor seconds."""
    file = campaign_file(folder, setting, models, steps)
    out = folder / f"out{len(list(folder.glob('out*')))}"
    began, used = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "retrain", "train", file, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(threads))
    if done.returncode:
        raise SystemExit(f"retrain train failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return out, began, children_cpu(used)


def environment(threads: int) -> dict[str, str]:
    here = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | here | {"PYTHONPATH": str(HERE.parent)}


def children_cpu(before: resource.struct_rusage) -> float:
    """Processor seconds of child processes that ended since ``before``."""
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


def spans(run: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["spans"] for line in (run / "timing_spans.jsonl").read_text().splitlines()]


def shares(steps: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, float]]:
    """Of every step but the first and last: its seconds, those of the model, and each other part's."""
    begins = [next(s["wall_start"] for s in step if s["name"] == "rollout") for step in steps]
    found = []
    for i in range(1, len(steps) - 1):
        inside = [
            span
            for span in (*steps[i], *steps[i + 1])  # a step's records are told by the next one's line
            if begins[i] <= span["wall_start"] < begins[i + 1]
        ]
        parts = dict.fromkeys(("total", "model", "other"), 0.0)
        for span in inside:
            name = "model" if span["name"] in MODEL_SPANS else span["name"]
            if name != "cohort":  # waiting for other runs' updates: none here
                parts[name] = parts.get(name, 0.0) + span["duration"]
        parts["total"] = begins[i + 1] - begins[i]
        parts["other"] = parts["total"] - parts["model"]
        found.append(parts)
    return found


def overhead(options: argparse.Namespace) -> None:
    setting = Setting.parse(options.setting)
    with tempfile.TemporaryDirectory() as temporary:
        run, _, _ = train(Path(temporary), setting, options.models, options.steps + 2, options.threads)
        steps = shares(spans(run))
    names = sorted({name for step in steps for name in step} - {"total", "model", "other"})
    mid = {name: median([step.get(name, 0.0) for step in steps]) for name in ("total", "model", *names)}
    share = median([step["other"] / step["total"] for step in steps])
    rest = mid["total"] - mid["model"] - sum(mid[name] for name in names)
    parts = {"sampling and update": mid["model"]} | {name: mid[name] for name in names} | {"between the spans": rest}
    lines = [(part, f"{1e3 * s:.1f}", f"{100 * s / mid['total']:.2f} %") for part, s in parts.items()]
    label = f"{setting.name}: {100 * share:.2f} % is not sampling or update (bar ≤ {100 * BAR_OVERHEAD:.0f} %)"
    text = with_verdicts(table(("part", "ms per step", "share"), lines), [bar(label, share <= BAR_OVERHEAD)])
    publish(options, "overhead", text, {"setting": setting.name, "share": share, "steps": steps})


def startup(options: argparse.Namespace) -> None:
    setting = Setting(options.setting.rpartition("x")[0], 1, prompts=1, samples=2)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        shared.model_directory(options.models, setting.shape)
        for turn in range(1 + options.repeats):  # the first turn fills the file cache
            begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=environment(options.threads))
            imports, imports_cpu = time.perf_counter() - begin, children_cpu(used)
            run, began, cpu = train(Path(temporary), setting, options.models, 1, options.threads)
            first = next(s["wall_end"] for s in spans(run)[0] if s["name"] == "rollout") - began
            if turn:
                rows.append({"imports_s": imports, "imports_cpu_s": imports_cpu, "first_token_s": first, "cpu_s": cpu})
    mid = {key: median([row[key] for row in rows]) for key in rows[0]}
    ratio = median([row["first_token_s"] / row["imports_s"] for row in rows])
    lines = [
        ("importing torch, transformers and peft", f"{mid['imports_s']:.2f}", f"{mid['imports_cpu_s']:.2f}"),
        ("start to first token of `retrain train`", f"{mid['first_token_s']:.2f}", f"{mid['cpu_s']:.2f} to its end"),
    ]
    label = f"first token after {ratio:.2f}× the time of the imports (bar ≤ {BAR_STARTUP})"
    text = with_verdicts(table(("", "s", "processor s"), lines), [bar(label, ratio <= BAR_STARTUP)])
    publish(options, "start-up", text, {"setting": setting.name, "ratio": ratio, "turns": rows})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--setting", default="512x64", help="SHAPExTOKENS")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--startup", action="store_true", help="measure start-up instead")
    parser.add_argument("--repeats", type=int, default=5, help="of --startup")
    options = parser.parse_args()
    if options.quick:
        options.setting, options.steps, options.repeats = "tinyx8", 2, 1
    with opened(options):
        (startup if options.startup else overhead)(options)


if __name__ == "__main__":
    main()
