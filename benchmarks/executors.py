"""How much of its time a small campaign takes when several worker processes share a CPU, one thread each.

    python benchmarks/executors.py [--workers 1 2] [--steps 30] [--repeats 3]

Trains campaigns/quickstart.toml with four seeds (eight runs, few held-out problems, no rank analysis) with each
number of workers in turn, and as often as asked. Prints for each the median seconds of the whole command, and of the
time between the first run's start and the last one's end, beside those of the first number.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    "campaign.seeds=[1,2,3,4]", "evaluation.problems=16", "training.eval_every=0", "squeeze.enabled=false",
    "logging.rollouts_every=0", "backend.devices=cpu",
)  # fmt: skip


def measured(workers: int, steps: int, out: Path) -> tuple[float, float]:
    """Seconds of the whole command, and from the first start of a run to the last end."""
    words = [word for text in (*SETTINGS, f"campaign.max_steps={steps}") for word in ("--set", text)]
    command = [sys.executable, "-m", "retrain", "train", "campaigns/quickstart.toml", "--plain", "--out", out, *words]
    command += ["--executor", "processes", "--workers", str(workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    begin, starts, ends = time.monotonic(), [], []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("start ", "end ")):
                (starts if line.startswith("start ") else ends).append(time.monotonic())
    if process.returncode or len(ends) != 8:
        raise SystemExit(f"{workers} workers: exit status {process.returncode}, {len(ends)} of 8 runs ended")
    return time.monotonic() - begin, max(ends) - min(starts)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    options = parser.parse_args()
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in options.workers}
    for _ in range(options.repeats):
        for count in options.workers:
            with tempfile.TemporaryDirectory() as folder:
                found[count].append(measured(count, options.steps, Path(folder) / "out"))
    print("| workers | whole command s | of the first | training s | of the first |")
    print("|---|---|---|---|---|")
    medians = {
        count: [statistics.median(column) for column in zip(*rows, strict=True)] for count, rows in found.items()
    }
    for count, (whole, training) in medians.items():
        first = medians[options.workers[0]]
        print(f"| {count} | {whole:.1f} | {whole / first[0]:.2f} | {training:.1f} | {training / first[1]:.2f} |")
    if options.json:
        options.json.write_text(json.dumps({"steps": options.steps, "seconds": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
