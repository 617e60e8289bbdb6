"""Every number that the self-check judges: its name on the line, its bounds, why they are these, and what to do beyond.

Bounds may differ by number format ("bfloat16") or by kind of device ("cuda"); a number format goes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Bound = float | Mapping[str, float]


@dataclass(frozen=True)
class Limit:
    """``most`` and ``least`` enclose the number; ``unit`` follows it on the line; ``reason`` says why there."""

    name: str
    reason: str
    fix: str
    most: Bound = math.inf
    least: Bound = -math.inf
    unit: str = ""

    def ends(self, kinds: tuple[str, ...]) -> tuple[float, float]:
        """(least, most) for the first of these kinds (number format, device) that the bounds tell apart."""
        return _bound(self.least, kinds, -math.inf), _bound(self.most, kinds, math.inf)


def _bound(given: Bound, kinds: tuple[str, ...], without: float) -> float:
    if not isinstance(given, Mapping):
        return given
    return next((given[kind] for kind in kinds if kind in given), without)


NUMERICS = "sampler and trainer compute different things: report it with --json, and do not train on this machine"
SLOW_MACHINE = "see what else uses the machine, and whether it is throttled"

PARTED = {"float64": 1e-4, "float32": 0.02, "bfloat16": 0.3}
"""Sequences that part, per token: a draw changes where it falls within the rounding of a border between two tokens. Of
a model that is sure of itself that is once in a hundred thousand tokens in float32 and in a hundred in bfloat16; with n
tokens to choose from, √n times as often. Where lanes are mixed up, nearly every sequence parts at its first token."""

LIMITS: dict[str, Limit] = {
    "bandwidth": Limit(
        "copy",
        "a core alone copies several GB/s, a GPU more than 200; less is a machine that is busy or emulated",
        SLOW_MACHINE,
        least={"cpu": 0.5, "cuda": 100},
        unit="GB/s",
    ),
    "matrix_rate": Limit(
        "products",
        "a core alone gives tens of GFLOP/s in float32 and, without instructions for it, a tenth in bfloat16; a GPU "
        "with bfloat16 gives more than 20 TFLOP/s in it, and about 10 in float32",
        SLOW_MACHINE,
        least={"float64": 0.5, "cpu": 0.5, "cuda": 1000},
        unit="GFLOP/s",
    ),
    "graph_parted": Limit(
        "parted",
        "sequences that draw another token than eager steps, per token compared: a replayed step is an "
        "eager one, so none should; a library that chooses another kernel while capturing rounds differently",
        NUMERICS,
        most=PARTED,
    ),
    "graph_gap": Limit(
        "largest difference",
        "of log-probabilities (nats) up to where they part",
        NUMERICS,
        most={"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.2},
    ),
    "captures": Limit(
        "captured",
        "a graph of the step at least, or nothing was compared",
        "the note above says why a step could not be captured; report it with --json",
        least=1,
    ),
    "ratio_off": Limit(
        "|ratio − 1|",
        "of the mean importance ratio; measured 1e-7 in float32 and 1e-4 in bfloat16 on the bundled model, 2e-7 and "
        "1e-3 on random weights",
        NUMERICS,
        most={"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3},
    ),
    "k3": Limit(
        "k3",
        "KL of sampler and trainer, mean of ρ − 1 − log ρ (nats); measured 2e-13 in float32 and 5e-6 in bfloat16 on "
        "the bundled model, 2e-11 and 6e-4 on random weights, whose logits up to 25 bfloat16 has in steps of an eighth",
        NUMERICS,
        most={"float64": 1e-12, "float32": 1e-8, "bfloat16": 2e-3},
    ),
    "p99": Limit(
        "p99",
        "of |log π_trainer − log π_sampler| (nats): 99 of 100 tokens are nearer; measured 2e-6 in float32 and 0.006 in "
        "bfloat16 on the bundled model, 2e-5 and 0.1 on random weights",
        NUMERICS,
        most={"float64": 1e-6, "float32": 3e-4, "bfloat16": 0.2},
    ),
    "lane_parted": Limit(
        "parted",
        "sequences that draw another token than alone, per token compared: sums in another order, and no more",
        "lanes are mixed up or computed wrongly: report it with --json, and train with [campaign] lanes = 1",
        most=PARTED,
    ),
    "lane_p99": Limit(
        "p99",
        "of the difference of log-probabilities (nats) up to where they part: sums in another order",
        "lanes are mixed up or computed wrongly: report it with --json, and train with [campaign] lanes = 1",
        most={"float64": 1e-6, "float32": 1e-4, "bfloat16": 0.15},
    ),
    "gradient_angle": Limit(
        "1 − cosine",
        "against the plain formulas in twice the precision; measured 1e-12 in float32 and 1e-4 in bfloat16 on the "
        "bundled model, 7e-12 and 7e-4 on random weights",
        "the update's gradient is wrong: report it with --json, and do not train on this machine",
        most={"float32": 1e-7, "bfloat16": 1e-2},
    ),
    "gradient_norm": Limit(
        "|norm ratio − 1|",
        "a factor on the gradient hides behind AdamW and shows in clipping",
        "the update's gradient is wrong: report it with --json, and do not train on this machine",
        most={"float32": 1e-4, "bfloat16": 0.03},
    ),
    "resume_differs": Limit(
        "differing",
        "of adapters, moments, tokens, log-probabilities and losses: a checkpoint holds all that matters",
        "a run that is resumed here is not the run that was stopped: report it with --json",
        most=0,
    ),
    "cache_growth": Limit(
        "cache",
        "measured per predicted byte: 1 is the cache itself; where sequences end and the batch shrinks, what is kept "
        "of it is copied once; measured 1.15 on the bundled model, 1.01 on wider ones",
        "rows are planned with the wrong size: report it with --json; lower [training] batch_size if memory runs out",
        least=0.9,
        most=1.3,
    ),
    "kept_growth": Limit(
        "kept",
        "measured per predicted byte that the forward pass keeps for the backward pass: below 1 less is trained on at "
        "a time than fits, above 1 memory runs out before the plan says so; measured 1.03 on the bundled model",
        "micro-batches are planned with the wrong size: set [training] micro_batch_tokens, and report it with --json",
        least=0.85,
        most=1.15,
    ),
    "peak_growth": Limit(
        "peak",
        "measured per predicted byte of an update: besides what is kept, the backward pass of one layer at a time, "
        "which with few layers is a good part of it; measured 1.2 in float32 and 1.35 in bfloat16 on the bundled "
        "model, 1.04 on wider ones, 2.7 on a toy of two layers",
        "micro-batches are planned with the wrong size: set [training] micro_batch_tokens, and report it with --json",
        most={"float64": 2.0, "float32": 2.0, "bfloat16": 3.0},
    ),
    "drill_parted": Limit(
        "parted",
        "sequences that differ from an undisturbed batch of that size, per token compared",
        "what is sampled after memory ran out is wrong: report it with --json",
        most=PARTED,
    ),
    "drill_gradient": Limit(
        "gradient off",
        "relative difference after the step was made again in smaller micro-batches: sums in another order, kept "
        "in float32",
        "an update made again after memory ran out is wrong: report it with --json",
        most={"float64": 1e-5, "float32": 1e-4, "bfloat16": 0.03},
    ),
    "not_recovered": Limit(
        "not recovered",
        "every shortage ends in a smaller batch, never in the end of the run",
        "a run will fail where memory is short: report it with --json; lower [training] batch_size or max_tokens",
        most=0,
    ),
    "decode_share": Limit(
        "decoding against the roofline",
        "the time of what a batch of this size must read or compute, at the rates measured here; small models on a "
        "CPU are bound by the number of operations: some per cent, and less in bfloat16, where large products are fast",
        SLOW_MACHINE + "; on a GPU look at the share that kernels fill",
        least={"cpu": 0.001, "cuda": 0.1},
    ),
    "update_share": Limit(
        "update against the roofline",
        "four operations per weight and trained token, at the rate measured here",
        SLOW_MACHINE,
        least={"cpu": 0.001, "cuda": 0.1},
    ),
    "kernel_share": Limit(
        "of the GPU's time filled by kernels",
        "replayed steps leave hardly a gap; launches from Python leave more gaps than kernels",
        "see whether graphs are captured (graph equals eager) and what else uses the processor",
        least=0.3,
    ),
}
