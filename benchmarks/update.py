"""One update beside the limit's: processor time of one thread, the two in turn, medians.

    OMP_NUM_THREADS=1 python benchmarks/update.py 256x64 [--profile] [--ragged] [--dtype bfloat16] [--micro 2048]

The work is that of ``benchmarks/step.py`` (see ``workload.py``), of which ``limit.py`` is the other side; sampling is
left out, so completions are random tokens. ``--ragged`` draws their lengths (a quarter of the asked number up to all of
it), ``--entropy`` adds an entropy bonus, ``--autocast`` runs matrix products in bfloat16: ours alone then, since the
limit knows none of these. Prints one JSON line, with ``--profile`` followed by torch's profile of one update.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import workload
from limit import Limit
from workload import ALPHA, LR, RANK, SHAPES, Setting

from retrain.policy import Denominators, Lanes, LossSettings, TrainSequence, load_base, new_optimizer, train_step
from retrain.policy.update import default_token_budget


def completions(setting: Setting, ragged: bool) -> list[list[int]]:
    """Random tokens for every row of the step."""
    draw, vocab = random.Random(1), SHAPES[setting.shape].vocab
    shortest = setting.new_tokens // 4 if ragged else setting.new_tokens
    return [
        [draw.randrange(1, vocab) for _ in range(draw.randint(shortest, setting.new_tokens))]
        for _ in range(setting.rows)
    ]


def ours(directory: Path, setting: Setting, rows: list[list[int]], options: Any) -> Callable[[], Any]:
    """A function that makes one update with ``train_step``."""
    base = load_base(str(directory), devices="cpu", dtype=options.dtype)
    lanes = Lanes(base)
    adapter = lanes.new_adapter(RANK, ALPHA).initialise("benchmark")
    optimizer = new_optimizer(adapter, LR, (0.9, 0.999), 1e-8, 0.0)
    prompts, rewards = workload.prompt_ids(setting), workload.advantages(setting)
    sequences = [
        TrainSequence(
            prompts[i // setting.samples],
            ids,
            np.full(len(ids), -np.log(SHAPES[setting.shape].vocab)),
            np.full(len(ids), rewards[i]),
            np.ones(len(ids), dtype=bool),
        )
        for i, ids in enumerate(rows)
    ]
    totals = Denominators(sum(len(ids) for ids in rows), len(rows))
    settings = LossSettings(
        micro_batch_tokens=options.micro or default_token_budget(base),
        entropy_coef=0.01 if options.entropy else 0.0,
    )

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if options.autocast else nullcontext():
            train_step(base, lanes, adapter, optimizer, sequences, settings, totals, LR)

    return step


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Processor time of one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    """Measure one setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", help="SHAPExTOKENS, as in step.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro", type=int, default=0, help="tokens of our micro-batches; 0: what training takes")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting, work = Setting.parse(options.setting), dict[str, Callable[[], Any]]()
    rows = completions(setting, options.ragged)
    with tempfile.TemporaryDirectory() as temporary:
        directory = workload.model_directory(Path(temporary), setting.shape)
        work["ours"] = ours(directory, setting, rows, options)
        if not (options.ragged or options.entropy or options.autocast or options.dtype != "float32"):
            limit = Limit(directory, SHAPES[setting.shape], torch.float32)
            limit.use_threads(1, split=False)
            prompts = [ids for ids in workload.prompt_ids(setting) for _ in range(setting.samples)]
            tokens = torch.tensor([[*a, *b] for a, b in zip(prompts, rows, strict=True)])
            sampled = torch.full((setting.rows, setting.new_tokens), -float(np.log(SHAPES[setting.shape].vocab)))
            with torch.no_grad():
                for layer in limit.layers:
                    for product in layer.values():
                        product.merge()
            work["limit"] = lambda: limit.update(setting, tokens, sampled)
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(options.repeats + 1):
            for name, step in work.items():
                seconds[name].append(cpu_seconds(step))
    medians = {name: workload.median(values[1:]) for name, values in seconds.items()}
    result: dict[str, Any] = {**vars(options), "cpu_s": {name: round(value, 3) for name, value in medians.items()}}
    result["best_s"] = {name: round(min(values[1:]), 3) for name, values in seconds.items()}
    if "limit" in medians:
        result["ours_over_limit"] = round(medians["ours"] / medians["limit"], 3)
    print(json.dumps(result))
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work["ours"]()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))


if __name__ == "__main__":
    main()
