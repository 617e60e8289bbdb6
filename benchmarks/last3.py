"""What the mean of the last three evaluations saves over the last one, at equal numbers of answers.

    retrain train campaigns/lr.toml --out DIR --set evaluation.samples=3 --set 'evaluation.schedule="verdict"'
    python benchmarks/last3.py DIR... [--json FILE]

Every run of a campaign was evaluated with three answers to each problem after about 80, 90 and 100 % of the steps.
Both metrics are made from these, from as many answers as one evaluation has:

    final    all three answers to every problem after the last update
    last3    one answer to every problem after 80, one after 90 and one after 100 % of the steps

The seeds that a difference takes are proportional to the variance over seeds of the paired differences to the first
condition, averaged here over the other conditions. The ratio is `final`'s variance over that of `last3`: above 1,
`last3` needs fewer seeds. Its interval is the 95 % percentile interval of the bootstrap over whole seeds. What of a
run's variance is that of the answers, given the policy, follows from how the three answers to a problem differ.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from retrain.config.evaluation import deciding_marks
from retrain.files import read_json, read_jsonl, write_json
from retrain.verdicts.results import read_run

METRICS = ("final", "last3")
RESAMPLED = 10_000

Marks = dict[int, np.ndarray]
"""Which answers were right, by the updates done: [problems, samples]."""


def marks_of(run: Path) -> Marks:
    marks: dict[int, dict[str, list[float]]] = {}
    for row in read_jsonl(run / "emergence/evaluations.jsonl"):
        marks.setdefault(row["step"], {}).setdefault(row["problem_id"], []).append(float(row["correct"]))
    return {step: np.array(list(own.values())) for step, own in marks.items()}


def answers_of(metric: str, marks: Marks) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the parts whose mean is the metric: the answers used, and all answers to the same problems."""
    last = max(marks)
    if metric == "final":
        return [(marks[last], marks[last])]
    return [(marks[step][:, i : i + 1], marks[step]) for i, step in enumerate(deciding_marks(last))]


def value_and_noise(metric: str, marks: Marks) -> tuple[float, float]:
    """Return a run's accuracy and the variance that the answers give it."""
    parts = answers_of(metric, marks)
    value = np.mean([used.mean() for used, _ in parts])
    noise = np.mean([every.var(axis=1, ddof=1).mean() / used.size for used, every in parts]) / len(parts)
    return float(value), float(noise)


def pair_variance(values: np.ndarray) -> np.ndarray:
    """Return the variance over seeds of the differences to the first condition, averaged over the other conditions.

    ``values`` is [condition, draw, seed]; the result has one entry per draw.
    """
    return (values[1:] - values[:1]).var(axis=2, ddof=1).mean(axis=0)


def measured(runs: list[list[Marks]]) -> dict[str, Any]:
    """Compare both metrics; ``runs`` are the marks by condition and seed."""
    both = {metric: np.array([[value_and_noise(metric, run) for run in own] for own in runs]) for metric in METRICS}
    seeds = len(runs[0])
    drawn = np.random.default_rng(0).integers(0, seeds, (RESAMPLED, seeds))
    variance = {metric: pair_variance(found[:, None, :, 0])[0] for metric, found in both.items()}
    resampled = {metric: pair_variance(found[:, drawn, 0]) for metric, found in both.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        interval = np.nanquantile(resampled["final"] / resampled["last3"], [0.025, 0.975])
    rows = {
        metric: {
            "accuracy": found[:, :, 0].mean(axis=1).tolist(),
            "run_sd": float(found[:, :, 0].var(axis=1, ddof=1).mean() ** 0.5),
            "noise_sd": float(found[:, :, 1].mean() ** 0.5),
            "pair_sd": float(variance[metric] ** 0.5),
        }
        for metric, found in both.items()
    }
    last = max(runs[0][0])
    sizes = {"seeds": seeds, "conditions": len(runs), "steps": last, "answers": runs[0][0][last].size}
    return {**sizes, **rows, "ratio": float(variance["final"] / variance["last3"]), "interval": interval.tolist()}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the figures of every campaign as a Markdown table, in points."""
    lines = [
        "| campaign | conditions × seeds, steps | answers | metric | accuracy | sd of a run | of it answers "
        "| sd of a pair | ratio of variances |",
        "|---|---|--:|---|---|--:|--:|--:|---|",
    ]
    for name, own in found.items():
        for metric in METRICS:
            row = own[metric]
            sizes = f"{own['conditions']} × {own['seeds']}, {own['steps']}"
            accuracy = ", ".join(f"{100 * value:.1f}" for value in row["accuracy"])
            figures = " | ".join(f"{100 * row[key]:.2f}" for key in ("run_sd", "noise_sd", "pair_sd"))
            low, high = own["interval"]
            ratio = "1" if metric == "final" else f"{own['ratio']:.2f} [{low:.2f}, {high:.2f}]"
            lines.append(f"| {name} | {sizes} | {own['answers']} | {metric} | {accuracy} | {figures} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="campaigns that have ended")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {}
    for directory in args.directories:
        runs = [read_run(directory, entry) for entry in read_json(directory / "manifest.json")["runs"]]
        unfinished = [run.run_id for run in runs if not run.done]
        if unfinished:
            raise SystemExit(f"not finished: {', '.join(unfinished)}")
        labels = list(dict.fromkeys(run.label for run in runs))
        found[directory.name] = measured(
            [[marks_of(run.path) for run in runs if run.label == label] for label in labels]
        )
    print(table(found))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
