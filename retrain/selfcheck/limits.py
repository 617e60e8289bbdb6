"""Every number that the self-check judges, with its bounds and what to do beyond them.

Bounds may differ by number format ("bfloat16") or by kind of device ("cuda"); a number format goes first. "Measured"
is on the bundled model unless a comment says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Bound = float | Mapping[str, float]


@dataclass(frozen=True)
class Limit:
    """``least`` and ``most`` enclose the number; ``name`` precedes it on the line and ``unit`` follows it."""

    name: str
    fix: str
    most: Bound = math.inf
    least: Bound = -math.inf
    unit: str = ""

    def ends(self, kinds: tuple[str, ...]) -> tuple[float, float]:
        """Return (least, most) for the first of these kinds (number format, device) that the bounds name."""
        return _bound(self.least, kinds, -math.inf), _bound(self.most, kinds, math.inf)


def _bound(given: Bound, kinds: tuple[str, ...], without: float) -> float:
    if not isinstance(given, Mapping):
        return given
    return next((given[kind] for kind in kinds if kind in given), without)


NUMERICS = "sampler and trainer compute different things: report it with --json, and do not train on this machine"
MIXED_LANES = "lanes are mixed up or computed wrongly: report it with --json, and train with [campaign] lanes = 1"
GRADIENT = "the update's gradient is wrong: report it with --json, and do not train on this machine"
BUDGET = "micro-batches are planned with the wrong size: set [training] micro_batch_tokens, and report it with --json"
SLOW_MACHINE = "see what else uses the machine, and whether it is throttled"

# Sequences that part, per token: a draw changes where it falls within the rounding of a border between two tokens. Of
# a model that is sure of itself that is once in a hundred thousand tokens in float32 and in a hundred in bfloat16; with
# n tokens to choose from, √n times as often. Where lanes are mixed up, nearly every sequence parts at its first token.
PARTED = {"float64": 1e-4, "float32": 0.02, "bfloat16": 0.3}

LIMITS: dict[str, Limit] = {
    # A core copies several GB/s and gives tens of GFLOP/s in float32, a tenth of that in bfloat16 without instructions
    # for it; a GPU copies more than 200 GB/s and gives 10 TFLOP/s in float32.
    "bandwidth": Limit("copy", SLOW_MACHINE, least={"cpu": 0.5, "cuda": 100}, unit="GB/s"),
    "matrix_rate": Limit("products", SLOW_MACHINE, least={"float64": 0.5, "cpu": 0.5, "cuda": 1000}, unit="GFLOP/s"),
    # A replayed step is an eager one; a library that chooses another kernel while capturing rounds differently.
    "graph_parted": Limit("parted", NUMERICS, most=PARTED),
    "graph_gap": Limit("largest difference", NUMERICS, most={"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.2}),
    "captures": Limit(
        "captured", "the note above says why a step could not be captured; report it with --json", least=1
    ),
    # Measured 1e-7 in float32 and 1e-4 in bfloat16; 2e-7 and 1e-3 on random weights.
    "ratio_off": Limit("|ratio − 1|", NUMERICS, most={"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3}),
    # Mean of ρ − 1 − log ρ in nats. Measured 2e-13 and 5e-6; 2e-11 and 6e-4 on random weights, whose logits up to 25
    # bfloat16 has in steps of an eighth.
    "k3": Limit("k3", NUMERICS, most={"float64": 1e-12, "float32": 1e-8, "bfloat16": 2e-3}),
    # Of |log π_trainer − log π_sampler| in nats. Measured 2e-6 and 0.006; 2e-5 and 0.1 on random weights.
    "p99": Limit("p99", NUMERICS, most={"float64": 1e-6, "float32": 3e-4, "bfloat16": 0.2}),
    "lane_parted": Limit("parted", MIXED_LANES, most=PARTED),
    "lane_p99": Limit("p99", MIXED_LANES, most={"float64": 1e-6, "float32": 1e-4, "bfloat16": 0.15}),
    # Measured 1e-12 in float32 and 1e-4 in bfloat16; 7e-12 and 7e-4 on random weights.
    "gradient_angle": Limit("1 − cosine", GRADIENT, most={"float32": 1e-7, "bfloat16": 1e-2}),
    "gradient_norm": Limit("|norm ratio − 1|", GRADIENT, most={"float32": 1e-4, "bfloat16": 0.03}),
    "resume_differs": Limit(
        "differing", "a run that is resumed here is not the run that was stopped: report it with --json", most=0
    ),
    # Measured per predicted byte: 1.15, and 1.01 on wider models; a batch that shrinks copies what it keeps once.
    "cache_growth": Limit(
        "cache",
        "rows are planned with the wrong size: report it with --json; lower [training] batch_size if memory runs out",
        least=0.9,
        most=1.3,
    ),
    # Measured per predicted byte: 1.03. The peak also has the backward pass of one layer: 1.2 in float32 and 1.35 in
    # bfloat16, 1.04 on wider models, 2.7 on a toy of two layers.
    "kept_growth": Limit("kept", BUDGET, least=0.85, most=1.15),
    "peak_growth": Limit("peak", BUDGET, most={"float64": 2.0, "float32": 2.0, "bfloat16": 3.0}),
    "drill_parted": Limit(
        "parted", "what is sampled after memory ran out is wrong: report it with --json", most=PARTED
    ),
    "drill_gradient": Limit(
        "gradient off",
        "an update made again after memory ran out is wrong: report it with --json",
        most={"float64": 1e-5, "float32": 1e-4, "bfloat16": 0.03},
    ),
    "not_recovered": Limit(
        "not recovered",
        "a run will fail where memory is short: report it with --json; lower [training] batch_size or max_tokens",
        most=0,
    ),
    # Small models on a CPU are bound by the number of operations: some per cent.
    "decode_share": Limit(
        "decoding against the roofline",
        SLOW_MACHINE + "; on a GPU look at the share that kernels fill",
        least={"cpu": 0.001, "cuda": 0.1},
    ),
    "update_share": Limit("update against the roofline", SLOW_MACHINE, least={"cpu": 0.001, "cuda": 0.1}),
    "kernel_share": Limit(
        "of the GPU's time filled by kernels",
        "see whether graphs are captured (graph equals eager) and what else uses the processor",
        least=0.3,
    ),
}
