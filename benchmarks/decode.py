"""Decoding against the roofline: tokens per second for growing lanes × group sizes, and what each axis costs.

    python benchmarks/decode.py [--shape 256] [--plots DIR]

The roofline of a decode step is the larger of two times, both from rates measured here first: the bytes that must be
read (frozen weights once, every lane's adapter once, every sequence's keys and values once) over the copy bandwidth,
and the operations (weights, adapters and attention for every row) over the rate of a large matrix product.

The prediction, written down before anything was measured, is that time plus one constant per decode step and one for
each call, the cost of everything that does not grow with the rows. Both constants come from two calls with a single
row, 8 and 32 tokens long; nothing else is fitted.

    predicted(lanes, prompts, group, new, rank) = call + new · (step + roofline(rows, mean length, rank))
"""

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import workload
from commandline import DOCS, opened, parser_of, publish, table
from ours import cohort
from plots import Series, write_plot
from workload import ALPHA, SHAPES, Setting, Shape

from retrain.engines import local
from retrain.policy.local import LocalSnapshot
from retrain.types import PolicyRef, SampleRequest

BAR_GPU = 0.6
GRID_LANES, GRID_GROUPS = (1, 2, 5, 8), (1, 4, 8, 16)
AXES: dict[str, tuple[str, tuple[int, ...]]] = {
    "lanes": ("lanes (runs that decode together)", (1, 2, 4, 8)),
    "new_tokens": ("new tokens per completion", (16, 32, 64, 128, 256)),
    "group": ("completions per prompt", (1, 2, 4, 8, 16)),
    "rank": ("LoRA rank", (4, 8, 16, 32, 64)),
}


@dataclass(frozen=True)
class Case:
    """What one call decodes."""

    lanes: int = 2
    group: int = 8
    new_tokens: int = 32
    rank: int = 16
    prompts: int = 4
    prompt_tokens: int = 32

    @property
    def rows(self) -> int:
        return self.lanes * self.prompts * self.group


@dataclass(frozen=True)
class Machine:
    """Bytes per second of a large copy (read and write counted), operations per second of a large matrix product."""

    bandwidth: float
    rate: float
    item: int


def measure_machine(device: str) -> Machine:
    """The two rates of this machine with torch's threads as they are; the best of five each."""
    item = 2 if device == "cuda" else 4
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size, side = (1 << 28, 8192) if device == "cuda" else (1 << 26, 1024)
    source, target = torch.ones(size, device=device), torch.empty(size, device=device)
    x = torch.ones(side, side, dtype=dtype, device=device)
    laps, copies, products = workload.Laps(), list[float](), list[float]()
    for _ in range(6):
        laps.lap()
        target.copy_(source)
        copies.append(laps.lap()[0])
        torch.mm(x, x)
        products.append(laps.lap()[0])
    return Machine(2 * 4 * size / min(copies[1:]), 2 * side**3 / min(products[1:]), item)


def roofline(shape: Shape, case: Case, machine: Machine) -> float:
    """Seconds of one decode step at the mean length of the call."""
    attention = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    products = [(shape.hidden, attention), (shape.hidden, keys), (shape.hidden, keys), (attention, shape.hidden)]
    products += [(shape.hidden, shape.inner)] * 2 + [(shape.inner, shape.hidden)]
    weights = shape.layers * sum(a * b for a, b in products) + shape.hidden * shape.vocab
    adapter = shape.layers * case.rank * sum(a + b for a, b in products)
    length = case.prompt_tokens + case.new_tokens / 2
    read = weights + case.lanes * adapter + case.rows * length * 2 * shape.layers * keys
    operations = case.rows * 2 * (weights + adapter + 2 * shape.layers * attention * length)
    return max(read * machine.item / machine.bandwidth, operations / machine.rate)


def predicted(shape: Shape, case: Case, machine: Machine, step: float, call: float) -> float:
    """Seconds of one call; see the formula at the head of this file."""
    return call + case.new_tokens * (step + roofline(shape, case, machine))


class Decoder:
    """The engine of a cohort, with adapters of any number and rank."""

    def __init__(self, made: Any, setting: Setting):
        self.made, self.setting, self.calls = made, setting, 0

    def seconds(self, case: Case, repeats: int) -> float:
        """Median over the repeats, after one call that does not count."""
        engine, refs = self.made.engine, [PolicyRef(f"lane {lane}", 0) for lane in range(case.lanes)]
        for lane, ref in enumerate(refs):
            adapter = engine.lanes.new_adapter(case.rank, float(ALPHA)).initialise(lane)
            with torch.no_grad():
                for _, b in adapter.tensors().values():
                    b.normal_(std=0.01)
            engine.publish(ref, LocalSnapshot(adapter.frozen()))
        prompts = workload.prompt_ids(replace(self.setting, prompt_tokens=case.prompt_tokens), case.prompts)
        times = []
        for _ in range(repeats + 1):
            self.calls += 1
            requests = [
                SampleRequest(ref, tuple(ids), case.group, case.new_tokens, 1.0, (self.calls, lane, i))
                for lane, ref in enumerate(refs)
                for i, ids in enumerate(prompts)
            ]
            laps = workload.Laps()
            groups = engine.sample(requests)
            times.append(laps.lap()[0])
            found = sum(len(completion) for group in groups for completion in group)
            if found != case.rows * case.new_tokens:
                raise SystemExit(f"{found} tokens were sampled for {case}")
        return workload.median(times[1:])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rates, constants, the grid of lanes × groups, and one series for each axis."""
    shape, machine = SHAPES[options.shape], measure_machine(options.device)
    setting = Setting(options.shape, 8)
    standard = Case(new_tokens=8) if options.quick else Case()
    lanes, groups = ((1, 2), (1, 2)) if options.quick else (GRID_LANES, GRID_GROUPS)
    with cohort(setting, options.models, device=options.device) as made:
        decoder = Decoder(made, setting)
        one = replace(standard, lanes=1, prompts=1, group=1)
        short, long = (decoder.seconds(replace(one, new_tokens=n), options.repeats) for n in (8, 32))
        step = max(0.0, (long - short) / 24 - roofline(shape, one, machine))
        call = max(0.0, short - 8 * (step + roofline(shape, one, machine)))

        def point(case: Case) -> dict[str, Any]:
            took = decoder.seconds(case, options.repeats)
            ideal = case.new_tokens * roofline(shape, case, machine)
            return {
                "case": asdict(case),
                "measured_s": took,
                "predicted_s": predicted(shape, case, machine, step, call),
                "roofline_s": ideal,
                "tokens_per_s": case.rows * case.new_tokens / took,
                "share": ideal / took,
            }

        grid = [point(replace(standard, lanes=a, group=b)) for a in lanes for b in groups]
        axes = {
            axis: [point(replace(standard, **{axis: value})) for value in (values[:2] if options.quick else values)]
            for axis, (_, values) in AXES.items()
        }
    run = Case(lanes=1, group=8, new_tokens=64, prompts=8)
    one, five = (predicted(shape, replace(run, lanes=n), machine, step, call) for n in (1, 5))
    constants = {"five_lanes_gain": 5 * one / five, "step_s": step, "call_s": call} | asdict(machine)
    return {"shape": options.shape, "constants": constants, "grid": grid, "axes": axes}


def report(found: dict[str, Any], device: str) -> str:
    c = found["constants"]
    lines = [
        f"Copy {c['bandwidth'] / 1e9:.1f} GB/s, matrix product {c['rate'] / 1e9:.0f} GFLOP/s, "
        f"{1e3 * c['step_s']:.2f} ms per step and {1e3 * c['call_s']:.1f} ms per call besides. "
        f"Predicted gain of five lanes of 8 × 8 sequences and 64 tokens: {c['five_lanes_gain']:.2f}×.",
        "",
    ]
    head = ("lanes", "group", "rows", "tokens/s", "measured ms/step", "predicted", "roofline", "share of the roofline")
    rows = []
    for p in found["grid"]:
        case = Case(**p["case"])
        ms = [f"{1e3 * p[key] / case.new_tokens:.2f}" for key in ("measured_s", "predicted_s", "roofline_s")]
        sizes = [f"{size:.0f}" for size in (case.lanes, case.group, case.rows, p["tokens_per_s"])]
        rows.append([*sizes, *ms, f"{100 * p['share']:.0f} %"])
    best = max(p["share"] for p in found["grid"])
    lines += [
        table(head, rows, left=0),
        "",
        f"Best share {100 * best:.0f} %" + (f" (bar ≥ {100 * BAR_GPU:.0f} % on a GPU)" if device == "cuda" else ""),
    ]
    return "\n".join(lines)


def plot_name(axis: str, device: str) -> str:
    return f"decode-{'gpu-' if device == 'cuda' else ''}{axis.replace('_', '-')}.svg"


def draw(found: dict[str, Any], directory: Path, device: str) -> None:
    """One plot per axis."""
    for axis, (label, _) in AXES.items():
        points = found["axes"][axis]
        x = [p["case"][axis] for p in points]
        ms = {key: [1e3 * p[key] / p["case"]["new_tokens"] for p in points] for key in
              ("predicted_s", "roofline_s", "measured_s")}  # fmt: skip
        write_plot(
            directory / plot_name(axis, device),
            f"Cost of a decode step, hidden {SHAPES[found['shape']].hidden}",
            label,
            "milliseconds per step",
            x,
            [
                Series("predicted", "predicted", ms["predicted_s"]),
                Series("roofline", "limit", ms["roofline_s"]),
                Series("measured", "measured", ms["measured_s"]),
            ],
        )


def main() -> None:
    parser = parser_of(__doc__, "on cuda, by default with the 1.7b shape")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default 256")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least-piece-rows", type=int, help="split a batch over cores from pieces of this size on")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw decode-<axis>.svg here; --record draws into docs/images"
    )
    options = parser.parse_args()
    options.shape = options.shape or ("tiny" if options.quick else "1.7b" if options.gpu else "256")
    if options.quick:
        options.repeats = 1
    torch.set_num_threads(options.threads)
    local.LEAST_PIECE_ROWS = options.least_piece_rows or local.LEAST_PIECE_ROWS
    with opened(options):
        found = measure(options)
    images = options.plots or (DOCS / "images" if options.record else None)
    if images:
        draw(found, images, options.device)
    links = [f"![Cost by {label}](../images/{plot_name(axis, options.device)})" for axis, (label, _) in AXES.items()]
    publish(options, "decode", report(found, options.device), found, "\n".join(links))


if __name__ == "__main__":
    main()
