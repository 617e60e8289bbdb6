"""One update beside the limit's: processor time of one thread, the two in turn, medians.

    python benchmarks/update.py [--setting 256x64] [--only plain] [--micro 1024] [--profile]

The work is that of ``benchmarks/step.py`` (see ``workload.py``), of which ``limit.py`` is the other side; sampling is
left out, so completions are random tokens. The variants are ``plain``; ``ragged``, with lengths drawn from a quarter of
the asked number to all of it; ``entropy``, with an entropy bonus; ``autocast``, torch's own casts around matrix
products; ``bfloat16``, with the whole base in it; and ``rounded``, with ``[training] update_dtype = "bfloat16"``. The
limit knows ``plain``, and in bfloat16 the last two. ``--together`` takes all variants in turn, so that their ratios
count, and sets them against ``plain``. ``--profile`` prints torch's profile of one update of each variant.
"""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import workload
from commandline import opened, parser_of, publish, table
from limit import Limit
from workload import ALPHA, LR, RANK, SHAPES, Setting

from retrain.algorithms.losses import PPO
from retrain.policy.base import MemoryPlan, load_base
from retrain.policy.lora import Lanes, new_optimizer
from retrain.policy.objective import EntropyTerm, Objective, PolicyTerm
from retrain.policy.packing import Budget
from retrain.policy.update import PendingUpdate, UpdateContext, policy_step
from retrain.types import Denominators, Sample, StepBatch


@dataclass(frozen=True)
class Variant:
    """One row of the table; ``repeats`` are those of a row that is slow where bfloat16 is."""

    what: str
    ragged: bool = False
    entropy: bool = False
    autocast: bool = False
    dtype: str = "float32"
    rounded: bool = False
    limit: str | None = None
    repeats: int | None = None


VARIANTS = {
    "plain": Variant("fp32", limit="float32"),
    "ragged": Variant("completions of a quarter to all of the tokens", ragged=True),
    "entropy": Variant("with an entropy bonus", entropy=True),
    "autocast": Variant("products in bf16", autocast=True, repeats=2),
    "bfloat16": Variant("base in bf16", dtype="bfloat16", limit="bfloat16", repeats=2),
    "rounded": Variant('update_dtype = "bfloat16"', rounded=True, limit="bfloat16", repeats=2),
}


def completions(setting: Setting, ragged: bool) -> list[list[int]]:
    """Random tokens for every row of the step."""
    draw, vocab = random.Random(1), SHAPES[setting.shape].vocab
    shortest = setting.new_tokens // 4 if ragged else setting.new_tokens
    return [
        [draw.randrange(1, vocab) for _ in range(draw.randint(shortest, setting.new_tokens))]
        for _ in range(setting.rows)
    ]


def ours(
    directory: Path, setting: Setting, rows: list[list[int]], variant: Variant, micro: int = 0
) -> Callable[[], Any]:
    """A function that makes one update with ``policy_step``."""
    base = load_base(str(directory), devices="cpu", dtype=variant.dtype)
    lanes = Lanes(base)
    adapter = lanes.new_adapter(RANK, ALPHA).initialise("benchmark")
    optimizer = new_optimizer([adapter.flat], LR, (0.9, 0.999), 1e-8, 0.0)
    prompts, rewards = workload.prompt_ids(setting), workload.advantages(setting)
    samples = [
        Sample.single_turn(
            prompts[i // setting.samples],
            ids,
            np.full(len(ids), -np.log(SHAPES[setting.shape].vocab)),
            np.full(len(ids), rewards[i]),
        )
        for i, ids in enumerate(rows)
    ]
    batch = StepBatch(samples, Denominators(sum(len(ids) for ids in rows), len(rows)), 0, ("benchmark",))
    objective = Objective((PolicyTerm(PPO()), EntropyTerm(0.01)) if variant.entropy else (PolicyTerm(PPO()),))
    context = UpdateContext(lanes, Budget(micro or MemoryPlan.of(base).micro_batch_tokens), bfloat16=variant.rounded)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if variant.autocast else nullcontext():
            policy_step(PendingUpdate(context, adapter, optimizer, batch, objective, LR))

    return step


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Processor time of one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def limit(directory: Path, setting: Setting, rows: list[list[int]], dtype: str) -> Callable[[], Any]:
    """A function that makes one update of the limit's, with one thread."""
    side = Limit(directory, SHAPES[setting.shape], getattr(torch, dtype))
    side.use_threads(1, split=False)
    prompts = [ids for ids in workload.prompt_ids(setting) for _ in range(setting.samples)]
    tokens = torch.tensor([[*a, *b] for a, b in zip(prompts, rows, strict=True)])
    sampled = torch.full((setting.rows, setting.new_tokens), -float(np.log(SHAPES[setting.shape].vocab)))
    with torch.no_grad():
        for layer in side.layers:
            for product in layer.values():
                product.merge()
    return lambda: side.update(setting, tokens, sampled)


def measure(setting: Setting, name: str, options: Any) -> dict[str, list[float]]:
    """Processor seconds of every update of each side."""
    variant, directory = VARIANTS[name], workload.model_directory(options.models, setting.shape)
    rows = completions(setting, variant.ragged)
    work = {"ours": ours(directory, setting, rows, variant, options.micro)}
    if variant.limit is not None:
        work["limit"] = limit(directory, setting, rows, variant.limit)
    seconds = in_turn(work, min(options.repeats, variant.repeats or options.repeats))
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work["ours"]()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))
    return seconds


def in_turn(work: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of each side, after one turn of warm-up."""
    seconds: dict[str, list[float]] = {side: [] for side in work}
    for turn in range(1 + repeats):
        for side, step in work.items():
            took = cpu_seconds(step)
            if turn:
                seconds[side].append(took)
    return seconds


def measure_together(setting: Setting, names: list[str], options: Any) -> dict[str, list[float]]:
    """Processor seconds of these variants, and of the limit in the precisions that they ask it for."""
    directory = workload.model_directory(options.models, setting.shape)
    chosen = {name: VARIANTS[name] for name in names}
    work = {
        variant.what: ours(directory, setting, completions(setting, variant.ragged), variant, options.micro)
        for variant in chosen.values()
    }
    for dtype in sorted({variant.limit for variant in chosen.values() if variant.limit is not None}, reverse=True):
        work[f"limit in {dtype}"] = limit(directory, setting, completions(setting, False), dtype)
    return in_turn(work, options.repeats)


def report_together(seconds: dict[str, list[float]]) -> str:
    """Markdown: one row for each side, with the median of its ratios to the first, turn by turn."""
    first = next(iter(seconds.values()))
    rows = [
        [
            side,
            f"{workload.median(took):.2f}",
            f"{workload.median([b / a for a, b in zip(took, first, strict=True)]):.2f}×",
        ]
        for side, took in seconds.items()
    ]
    return table(("update", "processor s", f"as fast as {next(iter(seconds))}"), rows)


def report(found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: one row for each variant."""
    rows = []
    for name, seconds in found.items():
        mid = {side: workload.median(values) for side, values in seconds.items()}
        ratio = f"{mid['ours'] / mid['limit']:.2f}×" if "limit" in mid else ""
        rows.append(
            [VARIANTS[name].what, *(f"{mid[side]:.2f}" if side in mid else "" for side in ("limit", "ours")), ratio]
        )
    return table(("update", "limit", "ours", "ours to limit"), rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--setting", default="256x64", help="SHAPExTOKENS, as in step.py")
    parser.add_argument("--only", help=f"comma-separated variants of {','.join(VARIANTS)}; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro", type=int, default=0, help="tokens of our micro-batches; 0: what training takes")
    parser.add_argument("--together", action="store_true", help="all variants in turn, beside the first")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.setting, options.repeats = "tinyx8", 1
    torch.set_num_threads(1)
    setting = Setting.parse(options.setting)
    names = options.only.split(",") if options.only else list(VARIANTS)
    if options.together:
        with opened(options):
            seconds = measure_together(setting, names, options)
        content = {"setting": setting.name, "cpu_s": seconds}
        publish(options, f"update {setting.name}", report_together(seconds), content)
        return
    with opened(options):
        found = {name: measure(setting, name, options) for name in names}
    publish(options, "update", report(found), {"setting": setting.name, "cpu_s": found})


if __name__ == "__main__":
    main()
