"""What the mean of the last three evaluations saves: spreads of `final`, `last3` and `auc` at equal numbers of answers.

    python benchmarks/last3.py [--seeds 12] [--steps 30] [--problems 64] [--runs DIR] [--json FILE]

Two learning rates train in the wind tunnel, paired by seed, with ten full evaluations of three answers to each held-out
problem. From these answers each metric is made anew from as many as one evaluation has, three to each problem:

    final    all three answers to every problem after the last update
    last3    one answer to every problem after 80, one after 90 and one after 100 % of the steps
    auc      all three answers to every tenth problem after each tenth of the steps, to other problems each time

The seeds that a difference takes are proportional to the variance over seeds of its estimate, so `final`'s variance
over a metric's is the factor in seeds at equal differences; beside it stands the factor where each metric shows the
difference that it showed here. Intervals are percentiles of the bootstrap over whole pairs of seeds, which is too
narrow with so few. What of a variance is that of the answers, given the policies, follows from how the three answers to
a problem differ. `--runs` keeps the runs; a directory that already holds them is only read.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from windtunnel import train

from retrain.config.evaluation import deciding_marks
from retrain.files import read_jsonl, write_json
from retrain.verdicts.results import RunResult

SAMPLES, EVALUATIONS = 3, 10
RATES = (2e-3, 1e-3)
METRICS = ("final", "last3", "auc")
RESAMPLED = 10_000


def runs_of(folder: Path, seeds: int, steps: int, problems: int) -> list[RunResult]:
    """The runs of both conditions; those that ``folder`` holds are only read."""
    if steps % EVALUATIONS:
        raise SystemExit(f"--steps {steps} is no multiple of {EVALUATIONS}, the number of evaluations")
    conditions = [{"advantage_mode": "grpo", "transform_mode": "none", "lr": rate} for rate in RATES]
    asked = (f"training.eval_every={steps // EVALUATIONS}", f"evaluation.samples={SAMPLES}")
    sets = (*asked, f"evaluation.problems={problems}")
    return train(folder, conditions, seeds=range(1, seeds + 1), steps=steps, batch_size=6, sets=sets)


def marks_of(run: RunResult) -> dict[int, np.ndarray]:
    """Which answers were right, by the updates done: [problems, samples]."""
    marks: dict[int, dict[str, list[float]]] = {}
    for row in read_jsonl(run.path / "emergence/evaluations.jsonl"):
        marks.setdefault(row["step"], {}).setdefault(row["problem_id"], []).append(float(row["correct"]))
    return {step: np.array(list(own.values())) for step, own in marks.items()}


@dataclass(frozen=True)
class Part:
    """Answers that a metric is made from: with which weight, after which step, to which problems, how many to each."""

    weight: float
    step: int
    problems: slice
    samples: slice

    def mean(self, marks: dict[int, np.ndarray]) -> float:
        """Their accuracy."""
        return float(marks[self.step][self.problems, self.samples].mean())

    def noise(self, marks: dict[int, np.ndarray]) -> float:
        """Variance of that accuracy given the policy, from how all answers to a problem differ."""
        used = marks[self.step][self.problems]
        return float(used.var(axis=1, ddof=1).mean()) / used[:, self.samples].size


def parts(metric: str, steps: list[int]) -> list[Part]:
    """From which answers a metric is made, three to each problem in all."""
    everything = slice(None)
    if metric == "final":
        return [Part(1.0, steps[-1], everything, everything)]
    if metric == "last3":
        return [Part(1 / 3, step, everything, slice(i, i + 1)) for i, step in enumerate(deciding_marks(steps[-1]))]
    inner = 1.0 / (len(steps) - 1)  # trapezoids: the ends count half
    ends = (0, len(steps) - 1)
    return [
        Part(inner / 2 if i in ends else inner, step, slice(i, None, len(steps)), everything)
        for i, step in enumerate(steps)
    ]


def measured(runs: list[list[dict[int, np.ndarray]]]) -> dict[str, Any]:
    """Spreads of every metric and their ratios; ``runs`` are the marks by condition and seed."""
    steps = sorted(runs[0][0])
    values, noise = {}, {}
    for metric in METRICS:
        made = parts(metric, steps)
        values[metric] = np.array([[sum(p.weight * p.mean(run) for p in made) for run in own] for own in runs])
        noise[metric] = float(np.mean([[sum(p.weight**2 * p.noise(run) for p in made) for run in own] for own in runs]))
    seeds = len(runs[0])
    drawn = np.random.default_rng(0).integers(0, seeds, (RESAMPLED, seeds))
    rows = []
    for metric in METRICS:
        unpaired, paired, effect = _spreads(values[metric][:, None, :])
        one = {"metric": metric, "accuracy": values[metric].mean(axis=1).tolist(), "noise": noise[metric]}
        one |= {"unpaired": float(unpaired[0]), "paired": float(paired[0]), "difference": float(effect[0])}
        for kind, factors in zip(
            ("unpaired", "paired", "as_seen"), _factors(values, metric, np.arange(seeds)[None]), strict=True
        ):
            one[f"{kind}_factor"] = float(factors[0])
        for kind, factors in zip(("unpaired", "paired", "as_seen"), _factors(values, metric, drawn), strict=True):
            one[f"{kind}_interval"] = np.nanquantile(factors, [0.025, 0.975]).tolist()
        rows.append(one)
    problems, samples = runs[0][0][steps[-1]].shape
    return {"seeds": seeds, "steps": steps[-1], "answers": problems * samples, "metrics": rows}


def _spreads(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Variance of a run, variance of a paired difference and mean difference; ``values`` [condition, draw, seed]."""
    difference = values[0] - values[1]
    return values.var(axis=2, ddof=1).mean(axis=0), difference.var(axis=1, ddof=1), difference.mean(axis=1)


def _factors(values: dict[str, np.ndarray], metric: str, drawn: np.ndarray) -> tuple[np.ndarray, ...]:
    """How many times the seeds `final` takes: unpaired, paired, and paired with the differences that were seen."""
    mine, base = (_spreads(values[name][:, drawn]) for name in (metric, "final"))
    with np.errstate(divide="ignore", invalid="ignore"):
        unpaired, paired = base[0] / mine[0], base[1] / mine[1]
        return unpaired, paired, paired * (mine[2] / base[2]) ** 2


def told(found: dict[str, Any]) -> str:
    """The table of ``measured``."""
    lines = [
        f"{found['seeds']} pairs of runs of {found['steps']} steps, lr = {RATES[0]:g} and {RATES[1]:g}; "
        f"{found['answers']} answers a run for each metric",
        "",
        "| metric | accuracy | sd of a run | of it answers | sd of a pair | difference | factor unpaired "
        "| factor paired | with the difference seen |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["metrics"]:
        cells = [
            row["metric"],
            " and ".join(f"{100 * value:.1f}%" for value in row["accuracy"]),
            f"{100 * row['unpaired'] ** 0.5:.2f}",
            f"{100 * row['noise'] ** 0.5:.2f}",
            f"{100 * row['paired'] ** 0.5:.2f}",
            f"{100 * row['difference']:+.1f}",
        ]
        for kind in ("unpaired", "paired", "as_seen"):
            low, high = row[f"{kind}_interval"]
            factor = f"{_shown(row[f'{kind}_factor'])} [{_shown(low)}, {_shown(high)}]"
            cells.append("1" if row["metric"] == "final" else factor)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(factor: float) -> str:
    """A factor; where `final` shows next to no difference, that of the differences seen has no bound."""
    return f"{factor:.2f}" if factor < 100 else "> 100"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--runs", type=Path, help="where the runs are kept; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = runs_of(args.runs or Path(folder), args.seeds, args.steps, args.problems)
        unfinished = [run.run_id for run in runs if not run.done]
        if unfinished:
            raise SystemExit(f"not finished: {', '.join(unfinished)}")
        labels = list(dict.fromkeys(run.label for run in runs))
        found = measured([[marks_of(run) for run in runs if run.label == label] for label in labels])
    print(told(found))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
