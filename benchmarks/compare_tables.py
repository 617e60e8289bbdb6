"""How long `retrain compare` takes for large tables, and how much memory.

    python benchmarks/compare_tables.py [--runs 1000] [--format parquet] [--directory DIR]

Every run has 1,319 problems at 20 steps, with a row for each answer; the files are kept in DIR. The memory is the
largest resident set of the command.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROBLEMS, STEPS, CONDITIONS = 1319, 20, 4
LAST_STEP = 10 * (STEPS - 1)


def columns_of(run: int) -> dict[str, Sequence[object]]:
    """Return the rows of one run, by column."""
    draw, count = random.Random(run), PROBLEMS * STEPS
    condition, seed = f"condition{run % CONDITIONS}", run // CONDITIONS
    problems = [f"{random.Random(problem).getrandbits(64):016x}" for problem in range(PROBLEMS)]
    constant = {"condition": condition, "run": f"{condition}_s{seed}", "seed": seed, "state": "done", "set": "gsm8k"}
    return {
        **{name: [value] * count for name, value in constant.items()},
        "step": [step for step in range(0, LAST_STEP + 1, 10) for _ in problems],
        "metric": ["acc"] * count,
        "value": [float(draw.random() < 0.5) for _ in range(count)],
        "problem": problems * STEPS,
        "sample": [0] * count,
    }


def write_parquet(path: Path, runs: int) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    with ParquetWriter(path, pyarrow.table(columns_of(0)).schema) as writer:
        for first in range(0, runs, 40):
            tables = [pyarrow.table(columns_of(run)) for run in range(first, min(first + 40, runs))]
            writer.write_table(pyarrow.concat_tables(tables), row_group_size=1 << 20)


def write_jsonl(path: Path, runs: int) -> None:
    with open(path, "w") as file:
        for run in range(runs):
            columns = columns_of(run)
            for values in zip(*columns.values(), strict=True):
                file.write(json.dumps(dict(zip(columns, values, strict=True))) + "\n")


def write_csv(path: Path, runs: int) -> None:
    import csv

    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        for run in range(runs):
            columns = columns_of(run)
            if run == 0:
                writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--format", choices=("parquet", "jsonl", "csv"), default="parquet")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    path = options.directory / f"compare_tables_{options.runs}.{options.format}"
    if not path.exists():
        {"parquet": write_parquet, "jsonl": write_jsonl, "csv": write_csv}[options.format](path, options.runs)
    print(f"{path.name}: {options.runs * PROBLEMS * STEPS:,} rows, {path.stat().st_size / 1e6:.0f} MB", flush=True)
    command = [sys.executable, "-m", "retrain", "compare", str(path), "--format", "table", "--metric", "acc"]
    begin = time.perf_counter()
    subprocess.run([*command, "--higher-is-better", "--unit", "share", "--steps", str(LAST_STEP)], check=True)
    seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s, memory_mb = used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3
    print(f"{seconds:.1f} s ({processor_s:.1f} s of processor time), {memory_mb:.0f} MB")


if __name__ == "__main__":
    main()
