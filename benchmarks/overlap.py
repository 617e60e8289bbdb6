"""How much wall time rollouts ahead of the policy save, when sampling and training have a processor core each.

    python benchmarks/overlap.py [--steps 12] [--repeats 3] [--model tiny-reasoner]

Trains on generated arithmetic with ``[training] max_off_policy_steps`` 0, 1 and 2 in turn, in a process on the first
core; ``retrain serve`` samples completions on the second one. Groups without signal go through the trainer too, so that
every update costs the same. The first two steps, in which kernels warm up and the queue fills, do not count. Prints for
each the median over the repeats of seconds per step, the waiting among them, and the sampling during updates.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BOUNDS = (0, 1, 2)
LEFT_OUT = 2
TOML = """
[model]
model = "{model}"
lora_rank = 16
[algorithm]
advantage_mode = "grpo"
transform_mode = "none"
correction = "tis"
discard_group_zero_advantage = false
[inference]
engine = "openai"
url = "{url}"
dtype = "float32"
[training]
max_steps = {steps}
max_off_policy_steps = {bound}
batch_size = {batch}
group_size = 8
max_tokens = {tokens}
lr = {lr}
save_every = 0
[evaluation]
problems = 0
[squeeze]
enabled = false
[logging]
rollouts_every = 0
"""


@contextmanager
def served(model: str, core: int) -> Iterator[str]:
    """The address of ``retrain serve`` on this core."""
    command = [sys.executable, "-m", "retrain", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread())
    os.sched_setaffinity(process.pid, {core})
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if " at http" in line), "")
        if not line:
            raise SystemExit(f"retrain serve ended with status {process.wait()}")
        yield line.split(" at ")[1].split()[0].removesuffix("/v1")
    finally:
        process.terminate()
        process.wait()


def one_thread() -> dict[str, str]:
    """The environment of a process that has one core."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(toml: str, core: int) -> list[dict]:
    """The rows of one training run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overlap.toml"
        path.write_text(toml)
        command = ["taskset", "-c", str(core), sys.executable, "-m", "retrain", "train", str(path), "--plain"]
        done = subprocess.run([*command, "--out", f"{folder}/run"], capture_output=True, text=True, env=one_thread())
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="tiny-reasoner")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), metavar=("TRAIN", "SAMPLE"))
    parser.add_argument("--batch", type=int, default=8, help="prompts of a step, eight completions each")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    steps: dict[int, list[dict[str, float]]] = {bound: [] for bound in BOUNDS}
    keys = {"step": "step_time_s", "waiting": "timing_waiting_for_data", "overlap": "time/overlap"}
    with served(options.model, options.cores[1]) as url:
        for _ in range(options.repeats):
            for bound in BOUNDS:
                given = {key: getattr(options, key) for key in ("model", "steps", "batch", "tokens", "lr")}
                rows = run(TOML.format(url=url, bound=bound, **given), options.cores[0])[LEFT_OUT:]
                steps[bound].append(
                    {name: statistics.fmean(row.get(key) or 0.0 for row in rows) for name, key in keys.items()}
                )
    print(f"{options.model}, {options.batch} × 8 completions of up to {options.tokens} tokens")
    first = statistics.median(each["step"] for each in steps[0])
    for bound, measured in steps.items():
        middle = {name: statistics.median(each[name] for each in measured) for name in ("step", "waiting", "overlap")}
        print(
            f"max_off_policy_steps {bound}: {middle['step']:.2f} s per step, {middle['waiting']:.2f} s of it waiting, "
            f"sampled meanwhile {middle['overlap']:.2f} s; {first / middle['step']:.2f}× as fast as 0"
        )


if __name__ == "__main__":
    main()
