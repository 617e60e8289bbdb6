"""What a base in 8 or 4 bits takes and gives: memory, loading, a decode and an update, and its difference to the base.

    python benchmarks/quantize.py [--model models/smollm2] [--dtype float32]

Each format is loaded in a process of its own. Resident is the process's memory after loading, above what it was after
the imports; the peak is the highest until then, above the same. Sampling is 8 prompts × 4 completions of 32 tokens of
one adapter of rank 16, the update one step on them; both after one of warm-up. k3 and KL are what
every run reports of its base (``policy.quantized``).
"""

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared import opened, parser_of, publish, table

KINDS = ("none", "int8", "nf4")
PROMPTS, SAMPLES, TOKENS, RANK = 8, 4, 32, 16
MIB = 2**20


def measured(model: str, dtype: str, kind: str, threads: int) -> dict[str, Any]:
    """One format, in this process."""
    import numpy as np
    import peft  # noqa: F401 - what every run imports is not memory of the base
    import psutil
    import torch

    from retrain.algorithms.losses import PPO
    from retrain.config import parse_dict
    from retrain.engines.local import LocalEngine
    from retrain.policy.base import find_model_files, load_weights
    from retrain.policy.local import LocalPolicy
    from retrain.policy.lora import Lanes
    from retrain.policy.objective import Objective, PolicyTerm
    from retrain.types import Denominators, PolicyRef, Sample, SampleRequest, StepBatch

    torch.set_num_threads(threads)
    config = parse_dict({"model": {"model": model, "quantize": kind, "lora_rank": RANK}})
    files = find_model_files(config)
    if kind == "nf4":
        import bitsandbytes.functional  # noqa: F401
    before, begin = psutil.Process().memory_info().rss, time.perf_counter()
    base = load_weights(files, "cpu", dtype)
    loading, peak = time.perf_counter() - begin, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what the allocator holds of the weights before is not the base's
    resident = psutil.Process().memory_info().rss
    lanes = Lanes(base)
    engine, policy = LocalEngine(base, lanes), LocalPolicy(base, lanes, config, ("quantize",))
    ref, noise = PolicyRef("run", 0), np.random.default_rng(0)
    engine.publish(ref, policy.snapshot())
    prompts = [tuple(noise.integers(3, min(base.vocab_size, 30000), 24).tolist()) for _ in range(PROMPTS)]
    asked = [SampleRequest(ref, own, SAMPLES, TOKENS, 1.0, ("quantize", i)) for i, own in enumerate(prompts)]
    answers = engine.sample(asked)
    samples = [
        Sample.single_turn(r.prompt_ids, c.token_ids, c.logprobs_T, noise.normal(size=len(c)))
        for r, group in zip(asked, answers, strict=True)
        for c in group
    ]
    batch = StepBatch(samples, Denominators(sum(len(c) for g in answers for c in g), len(samples)), 0, ())

    objective = Objective((PolicyTerm(PPO()),), "tokens", 1.0, TOKENS)

    def seconds(work: Callable[[], Any]) -> float:
        work()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    sampling = seconds(lambda: engine.sample(asked))
    updating = seconds(lambda: policy.update(batch, objective, 1e-5))
    effect = base.quantized
    return {
        "kind": kind, "weights": base.weight_bytes, "resident": resident - before, "peak": peak - before,
        "loading_s": loading, "sampling_s": sampling, "update_s": updating,
        "k3": effect and effect.k3, "kl": effect and effect.kl,
    }  # fmt: skip


def row(one: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """A line of the table."""
    gaps = ["-" if one[name] is None else f"{one[name]:.2g}" for name in ("k3", "kl")]
    sizes = [f"{one[name] / MIB:.0f}" for name in ("weights", "resident", "peak")]
    times = [f"{one[n]:.2f} ({one[n] / plain[n]:.1f}×)" for n in ("sampling_s", "update_s")]
    return [one["kind"], *sizes, f"{one['loading_s']:.1f}", *times, *gaps]


def main() -> None:
    parser: argparse.ArgumentParser = parser_of(__doc__)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    with opened(parser.parse_args()) as options:
        model = "tiny-reasoner" if options.quick else options.model
        if options.only:
            print(json.dumps(measured(model, options.dtype, options.only, options.threads)))
            return
        found = []
        for kind in KINDS:
            own = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--only", kind]
            own = [word for word in own if word != "--record"]
            said = subprocess.run(own, check=True, stdout=subprocess.PIPE, text=True).stdout
            found.append(json.loads(said.splitlines()[-1]))
        head = ["", "weights MiB", "resident", "peak", "loading s", "sampling s", "update s", "k3", "KL"]
        text = table(head, [row(one, found[0]) for one in found])
        publish(options, "quantize", text, {"formats": found})


if __name__ == "__main__":
    main()
