"""The five standard conditions as lanes of one cohort, against the same five one after another, on equal tokens.

    python benchmarks/campaign.py [--settings 128x64,256x64,512x64] [--repeats 5]

Both ways run the same code (the cohort of ``retrain train``): once with five runs that step together, and as five
processes with one run each, whose times are added. All six take turns, one step each, one process at a time. Memory is
the peak of the process with five lanes, against what must be held: base, and five times adapter, gradient, optimizer
and the run's keys and values; next to it the peak of a run alone, which shows the working memory of any step.
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

import shared
from shared import HERE, Setting, Side, bar, medians, opened, parser_of, publish, table, take_turns, with_verdicts

LANES = 5
SETTINGS, GPU_SETTINGS = ("128x64", "256x64", "512x64"), ("1.7bx256", "8bx256")
BARS = {"cpu": {"decode": 1.7, "campaign": 1.2}, "cuda": {"decode": 2.0, "campaign": 1.4}}
MEMORY_SLACK = 1.1


def run(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Everything measured at one setting."""
    shared.model_directory(options.models, setting.shape)
    sides: list[Side] = []
    common = {"models": options.models, "threads": options.threads, "device": options.device}
    script = [sys.executable, HERE / "ours.py"]
    try:
        sides.append(Side("five lanes", [*script, "--runs", str(LANES)], setting, runs=LANES, **common))
        for i in range(LANES):
            sides.append(Side(f"alone {i}", [*script, "--first", str(i)], setting, **common))
        take_turns(sides, options.warmup, options.repeats)
    finally:
        for side in sides:
            side.close()
    lanes, alone = sides[0], sides[1:]
    together = medians(lanes.steps)
    apart = [medians(side.steps) for side in alone]
    added = {key: sum(m[key] for m in apart) for key in ("sampling_s", "update_s", "step_s", "step_cpu_s")}
    return {
        "lanes": together,
        "alone": added,
        "decode": added["sampling_s"] / together["sampling_s"],
        "update": added["update_s"] / together["update_s"],
        "campaign": added["step_s"] / together["step_s"],
        "memory": {
            "lanes_mib": together["peak_mib"] - lanes.facts["imported_mib"],
            "alone_mib": max(m["peak_mib"] for m in apart) - alone[0].facts["imported_mib"],
            "must_mib": lanes.facts["base_mib"] + LANES * lanes.facts["run_mib"],
            "run_mib": lanes.facts["run_mib"],
        },
        "steps": {side.name: [asdict(m) for m in side.steps] for side in sides},
    }


def report(results: dict[str, dict[str, Any]], device: str) -> str:
    """Markdown: the table and the verdicts."""
    rows = []
    for setting, r in results.items():
        m = r["memory"]
        seconds = [f"{r[way]['sampling_s']:.2f} + {r[way]['update_s']:.2f}" for way in ("lanes", "alone")]
        ratios = [f"{r[part]:.2f}×" for part in ("decode", "update", "campaign")]
        rows.append(
            [setting, *seconds, *ratios, *(f"{m[part]:.0f}" for part in ("lanes_mib", "alone_mib", "must_mib"))]
        )
    head = ["setting", "five lanes: sampling + update s", "one after another s", "decode", "update", "campaign"]
    head += ["lanes MiB", "one run MiB", "base + 5 runs' own MiB"]
    return with_verdicts(table(head, rows), verdicts(results, device))


def verdicts(results: dict[str, dict[str, Any]], device: str) -> list[str]:
    lines = []
    for setting, r in results.items():
        for name, least in BARS[device].items():
            lines.append(bar(f"{setting}: {name} {r[name]:.2f}× (bar ≥ {least})", r[name] >= least))
        m = r["memory"]
        most = MEMORY_SLACK * m["must_mib"]
        lines.append(
            bar(f"{setting}: five lanes hold {m['lanes_mib']:.0f} MiB (bar ≤ {most:.0f})", m["lanes_mib"] <= most)
        )
        added = (m["lanes_mib"] - m["alone_mib"]) / (LANES - 1)
        lines.append(f"{setting}: each further lane adds {added:.1f} MiB, its own state is {m['run_mib']:.1f} MiB")
    return lines


def main() -> None:
    parser = parser_of(__doc__, f"on cuda, settings {','.join(GPU_SETTINGS)}")
    parser.add_argument("--settings", help=f"comma-separated SHAPExTOKENS; default {','.join(SETTINGS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    names = options.settings.split(",") if options.settings else list(GPU_SETTINGS if options.gpu else SETTINGS)
    if options.quick:
        names, options.repeats = (names if options.settings else ["tinyx8"]), 1
    with opened(options):
        results = {name: run(Setting.parse(name), options) for name in names}
    text = report(results, options.device)
    publish(options, "campaign", text, {"repeats": options.repeats, "settings": results})


if __name__ == "__main__":
    main()
