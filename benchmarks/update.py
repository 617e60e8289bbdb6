"""One update beside the limit's: processor time of one thread, the variants in turn, medians.

    python benchmarks/update.py [--setting 256x64] [--only plain,rounded] [--micro 1024]

The work is that of ``benchmarks/step.py`` (see ``shared.py``), of which ``limit.py`` is the other side; sampling is
left out, so completions are random tokens. The variants are ``plain``; ``autocast``, torch's own casts around matrix
products; ``bfloat16``, with the whole base in it; and ``rounded``, with ``[training] update_dtype = "bfloat16"``. The
limit is measured in the formats of the variants; all ratios are to the first variant, turn by turn.
"""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from limit import Limit
from shared import ALPHA, LR, RANK, SHAPES, Setting, median, opened, parser_of, publish, table

from retrain.algorithms.losses import PPO
from retrain.config import Config
from retrain.policy.base import MemoryPlan, load_base
from retrain.policy.lora import Lanes, new_optimizer
from retrain.policy.objective import Objective, PolicyTerm
from retrain.policy.packing import Budget
from retrain.policy.update import PendingUpdate, UpdateContext, policy_step
from retrain.types import Denominators, Sample, StepBatch


@dataclass(frozen=True)
class Variant:
    """One row of the table; ``limit`` is the format of the limit that belongs to it."""

    name: str
    limit: str | None
    dtype: str = "float32"
    autocast: bool = False
    rounded: bool = False


VARIANTS = {
    "plain": Variant("fp32", "float32"),
    "rounded": Variant('update_dtype = "bfloat16"', "bfloat16", rounded=True),
    "bfloat16": Variant("base in bf16", "bfloat16", dtype="bfloat16"),
    "autocast": Variant("products in bf16", None, autocast=True),
}


def completions(setting: Setting) -> list[list[int]]:
    """Return random tokens for every row of the step."""
    draw, vocab = random.Random(1), SHAPES[setting.shape].vocab
    return [[draw.randrange(1, vocab) for _ in range(setting.new_tokens)] for _ in range(setting.rows)]


def ours(directory: Path, setting: Setting, rows: list[list[int]], variant: Variant, micro: int) -> Callable[[], None]:
    """Return a function that makes one update with ``policy_step``."""
    base = load_base(str(directory), devices="cpu", dtype=variant.dtype)
    lanes = Lanes(base)
    adapter = lanes.new_adapter(RANK, ALPHA).initialise("benchmark")
    optimizer = new_optimizer([adapter.flat], LR, Config())
    prompts, advantages = shared.prompt_ids(setting), shared.advantages(setting)
    samples = [
        Sample.single_turn(
            prompts[i // setting.samples],
            ids,
            np.full(len(ids), -np.log(SHAPES[setting.shape].vocab)),
            np.full(len(ids), advantages[i]),
        )
        for i, ids in enumerate(rows)
    ]
    batch = StepBatch(samples, Denominators(sum(len(ids) for ids in rows), len(rows)), 0, ("benchmark",))
    objective = Objective((PolicyTerm(PPO()),))
    context = UpdateContext(lanes, Budget(micro or MemoryPlan.of(base).micro_batch_tokens), bfloat16=variant.rounded)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if variant.autocast else nullcontext():
            policy_step(PendingUpdate(context, adapter, optimizer, batch, objective, LR))

    return step


def limit(directory: Path, setting: Setting, rows: list[list[int]], dtype: str) -> Callable[[], None]:
    """Return a function that makes one update of the limit's, with one thread."""
    side = Limit(directory, SHAPES[setting.shape], getattr(torch, dtype))
    side.use_threads(1, split=False)
    prompts = [ids for ids in shared.prompt_ids(setting) for _ in range(setting.samples)]
    tokens = torch.tensor([[*a, *b] for a, b in zip(prompts, rows, strict=True)])
    sampled = torch.full((setting.rows, setting.new_tokens), -float(np.log(SHAPES[setting.shape].vocab)))
    with torch.no_grad():
        for layer in side.layers:
            for product in layer.values():
                product.merge()
    return lambda: side.update(setting, tokens, sampled)


def measure(setting: Setting, names: list[str], options: Any) -> dict[str, list[float]]:
    """Return the processor seconds of every update of each variant and of the limit, after one turn of warm-up."""
    directory, rows = shared.model_directory(options.models, setting.shape), completions(setting)
    variants = [VARIANTS[name] for name in names]
    work = {variant.name: ours(directory, setting, rows, variant, options.micro) for variant in variants}
    for dtype in sorted({variant.limit for variant in variants if variant.limit}, reverse=True):
        work[f"limit in {dtype}"] = limit(directory, setting, rows, dtype)
    seconds: dict[str, list[float]] = {side: [] for side in work}
    for turn in range(1 + options.repeats):
        for side, step in work.items():
            begin = time.process_time()
            step()
            if turn:
                seconds[side].append(time.process_time() - begin)
    return seconds


def report(seconds: dict[str, list[float]]) -> str:
    """Return one row for each side, with the median of its ratios to the first, turn by turn."""
    name, first = next(iter(seconds.items()))
    rows = []
    for side, measured in seconds.items():
        ratio = median([b / a for a, b in zip(measured, first, strict=True)])
        rows.append([side, f"{median(measured):.2f}", f"{ratio:.2f}×"])
    return table(("update", "processor s", f"as fast as {name}"), rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--setting", default="256x64", help="SHAPExTOKENS, as in step.py")
    parser.add_argument("--only", help=f"comma-separated variants of {','.join(VARIANTS)}; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro", type=int, default=0, help="tokens of our micro-batches; 0: what training takes")
    options = parser.parse_args()
    if options.quick:
        options.setting, options.repeats = "tinyx8", 1
    torch.set_num_threads(1)
    setting = Setting.parse(options.setting)
    names = options.only.split(",") if options.only else list(VARIANTS)
    with opened(options):
        seconds = measure(setting, names, options)
    publish(options, f"update {setting.name}", report(seconds), {"setting": setting.name, "cpu_s": seconds})


if __name__ == "__main__":
    main()
