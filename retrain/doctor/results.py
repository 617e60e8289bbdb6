"""Define results of checks, and the limits of every number that they judge.

A limit may differ by number format ("bfloat16") or device type ("cuda"); the number format takes precedence.
"Measured" refers to the bundled model unless a comment says otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
Bound = float | Mapping[str, float] | None


@dataclass(frozen=True)
class Limit:
    """Allowed range of a number, its name and unit as printed, and what the user does when it is exceeded."""

    name: str
    fix: str
    most: Bound = None
    least: Bound = None
    unit: str = ""


NUMERICS = "sampler and trainer compute different things: report it with --json, and do not train on this machine"
MIXED_LANES = "lanes are mixed up or computed wrongly: report it with --json, and train with [campaign] lanes = 1"
GRADIENT = "the update's gradient is wrong: report it with --json, and do not train on this machine"
BUDGET = "micro-batches are planned with the wrong size: set [training] micro_batch_tokens, and report it with --json"
SLOW_MACHINE = "see what else uses the machine, and whether it is throttled"

# Sequences that part, per token: a draw changes where it falls within the rounding of a border between two tokens. For
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
    # Measured 1e-7 in float32 and 1e-4 in bfloat16; 2e-7 and 1e-3 with random weights.
    "ratio_off": Limit("|ratio − 1|", NUMERICS, most={"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3}),
    # Mean of ρ − 1 − log ρ in nats. Measured 2e-13 and 5e-6; 2e-11 and 6e-4 with random weights, whose logits of up to
    # 25 have steps of an eighth in bfloat16. 2e-3 on an H200 with random weights at the shapes of Qwen3-8B.
    "k3": Limit("k3", NUMERICS, most={"float64": 1e-12, "float32": 1e-8, "bfloat16": 5e-3}),
    # Of |log π_trainer − log π_sampler| in nats. Measured 2e-6 and 0.006; 2e-5 and 0.1 with random weights, 0.19 on an
    # H200.
    "p99": Limit("p99", NUMERICS, most={"float64": 1e-6, "float32": 3e-4, "bfloat16": 0.4}),
    "lane_parted": Limit("parted", MIXED_LANES, most=PARTED),
    # Products of other row counts round differently: 0.18 in bfloat16 on an H200 with random weights.
    "lane_p99": Limit("p99", MIXED_LANES, most={"float64": 1e-6, "float32": 1e-4, "bfloat16": 0.4}),
    # Measured 1e-12 in float32 and 1e-4 in bfloat16; 7e-12 and 7e-4 with random weights.
    "gradient_angle": Limit("1 − cosine", GRADIENT, most={"float32": 1e-7, "bfloat16": 1e-2}),
    "gradient_norm": Limit("|norm ratio − 1|", GRADIENT, most={"float32": 1e-4, "bfloat16": 0.03}),
    "resume_differs": Limit(
        "differing", "a run that is resumed here is not the run that was stopped: report it with --json", most=0
    ),
    # Measured per predicted byte: 1.15, and 1.01 on wider models; a batch that shrinks copies its cache once.
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
    "not_recovered": Limit(
        "not recovered",
        "a run will fail where memory is short: report it with --json; lower [training] batch_size or max_tokens",
        most=0,
    ),
    "drill_parted": Limit(
        "parted", "what is sampled after memory ran out is wrong: report it with --json", most=PARTED
    ),
    # Smaller micro-batches round differently. An angle with 1 − cosine = 0.01, which "gradient_angle" allows, is a
    # relative difference of 0.14; 0.07 in bfloat16 on an H200 with random weights.
    "drill_gradient": Limit(
        "gradient off",
        "an update made again after memory ran out is wrong: report it with --json",
        most={"float64": 1e-5, "float32": 1e-4, "bfloat16": 0.14},
    ),
    # Small models on a CPU are bound by the number of operations and reach a few per cent.
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


@dataclass(frozen=True)
class Result:
    """Result of a check. ``words``, ``numbers`` and ``todo`` (what the user does) are printed, everything else is
    written to the --json file. The name, wall-clock seconds and CPU seconds (with child processes) are set after the
    check has run."""

    status: str
    words: str = ""
    numbers: str = ""
    measures: Sequence[Mapping[str, object]] = ()
    todo: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0
    processor_seconds: float = 0.0

    @property
    def line(self) -> str:
        line = ", ".join(text for text in (self.words, self.numbers) if text)
        return f"{line} → {self.todo}" if self.todo else line

    def to_json(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key != "numbers"}


def judged(
    kinds: tuple[str, ...], values: Mapping[str, float], words: str = "", *, fault: str = "", **facts: object
) -> Result:
    """Return PASS if there is no ``fault`` and every value is within its limits for ``kinds`` (number format, device
    type), else FAIL with what to do. NaN is beyond every limit."""
    measures, texts, fixes = [], [], [fault] if fault else []
    for key, value in values.items():
        limit = LIMITS[key]
        ends = {}
        for name, bound in (("least", limit.least), ("most", limit.most)):
            if isinstance(bound, Mapping):
                bound = next((bound[kind] for kind in kinds if kind in bound), None)
            if bound is not None:
                ends[name] = bound
        ok = ends.get("least", -math.inf) <= value <= ends.get("most", math.inf)
        measures.append({"name": key, "value": float(value), **ends, "unit": limit.unit, "ok": ok})
        unit = f" {limit.unit}" if limit.unit else ""
        allowed = ", ".join(f"at {name} {end:.3g}" for name, end in ends.items())
        texts.append(f"{limit.name} {value:.3g}{unit} ({allowed})")
        if not ok:
            fixes.append(limit.fix)
    status = FAIL if fixes else PASS
    return Result(status, words, ", ".join(texts), measures, "; ".join(dict.fromkeys(fixes)), facts)
