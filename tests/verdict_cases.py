"""Directories of campaigns whose held-out accuracies are given, finished or run by run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toymodels import campaign_head

from retrain.campaign.judging.declaration import freeze
from retrain.campaign.judging.pooling import conclude
from retrain.campaign.judging.results import METRIC
from retrain.campaign.judging.sequential import Looks
from retrain.campaign.planning.manifest import Manifest, read_manifest
from retrain.campaign.planning.plan import plan
from retrain.config import load
from retrain.files import append_jsonl, write_json
from retrain.record.observer import NullObserver

BASE = [0.60, 0.64, 0.58, 0.66, 0.62, 0.59, 0.65, 0.61]


def campaign(
    folder: Path,
    results: Mapping[str, Sequence[float | None]],
    config: dict[str, Any] | None = None,
    states: dict[str, str] | None = None,
    heldout: str = "problems A",
    seeds: list[int] | None = None,
) -> Path:
    """A campaign's directory: held-out accuracy 0.5 before, half-way there, and the given values by seed."""
    runs = []
    for label, values in results.items():
        for seed, value in zip(seeds or range(1, len(values) + 1), values, strict=True):
            run_id = f"{label}_s{seed}"
            path = folder / "runs" / run_id
            state = (states or {}).get(run_id, "done")
            sections = {
                "training": {"seed": seed, "lr": 0.001, "max_steps": 20},
                "campaign": {"seed": 0},
                "evaluation": {"samples": 2, "temperature": 1.0, "max_tokens": 80},
            }
            for name, table in (config or {}).items():
                sections[name] = {**sections.get(name, {}), **table}
            write_json(path / "config.json", {**sections, "heldout_hash": heldout, "data_hash": "d", "git": None})
            timing = {"time/update": 2.0, "time/rollout": 4.0, "cohort_size": 4}
            rows = [
                {"step": step, "correct_rate": 0.4, "num_tokens": 100 * (step + 1), **timing}
                for step in range(20 if state == "done" else 7)
            ]
            append_jsonl(path / "metrics.jsonl", rows)
            facts = {"name": "heldout", "samples": 2, "eval/heldout/problems": 50}
            points = [(0, 0.5), (10, 0.5 if value is None else (0.5 + value) / 2), (20, value)]
            length = {"eval/heldout/mean_length": 30.0 + seed}
            evaluations = [
                {"step": step, **facts, METRIC: accuracy, "eval/heldout/hard/correct_rate": accuracy, **length}
                for step, accuracy in (points if state == "done" else points[:1])
            ]
            append_jsonl(path / "evals.jsonl", evaluations)
            reason = "CUDA out of memory" if state == "failed" else None
            runs.append({"run_id": run_id, "label": label, "seed": seed, "state": state, "reason": reason,
                         "step": len(rows), "path": f"runs/{run_id}"})  # fmt: skip
    write_json(folder / "manifest.json", {"format": 1, "runs": runs})
    return folder


def shifted(by: float, noise: float = 0.004) -> list[float | None]:
    """``BASE`` and a difference that alternates around ``by``."""
    return [value + by + noise * (-1) ** i for i, value in enumerate(BASE)]


# Campaigns under a sequential rule whose runs are put on the disk instead of trained

EIGHT = list(range(1, 9))
GRPO, RLOO, DR_GRPO = ("grpo", "none"), ("rloo", "none"), ("dr_grpo", "none")


def configuration(
    tmp_path: Path, conditions=(GRPO, RLOO), rule="linear", seeds: list[int] = EIGHT, rest="", **keys
) -> Path:
    path = tmp_path / "rule.toml"
    tmp_path.mkdir(exist_ok=True)
    path.write_text(campaign_head(*conditions, seeds=seeds, max_steps=1, sequential=rule, **keys) + rest)
    return path


class Played:
    """A campaign whose runs are put on the disk instead of trained: accuracy by condition and seed."""

    def __init__(self, tmp_path: Path, effect: float = 0.1, **settings):
        self.folder, self.effect = tmp_path, effect
        self._start([], **settings)

    def start_again(self, **settings) -> None:
        """With the file as it is now."""
        self.manifest.files.flush()
        self._start(read_manifest(self.manifest.directory)["runs"], **settings)

    def _start(self, before, **settings) -> None:
        self.loaded = load(configuration(self.folder, **settings))
        self.specs = plan(self.loaded)
        self.manifest = Manifest.open(self.folder / "out", "rule", self.specs)
        freeze(self.manifest.content, self.specs, before, {})
        self.manifest.write()

    def finish(self, seed: int, state: str = "done", only: str | None = None, sign: int = 1) -> None:
        for spec in self.specs:
            stopped = self.manifest.run(spec.run_id)["state"] == "stopped"
            if spec.seed == seed and spec.label.startswith(only or "") and not stopped:
                folder = self.manifest.directory / "runs" / spec.run_id
                value = 0.5 + 0.01 * seed + (sign * self.effect if spec.label.startswith("rloo") else 0.0)
                row = {"step": 1, "name": "heldout", "eval/heldout/correct_rate": value}
                append_jsonl(folder / "evals.jsonl", [row])
                append_jsonl(folder / "metrics.jsonl", [{"step": 0, "num_tokens": 5, "correct_rate": value}])
                self.manifest.update(spec.run_id, state=state, step=1)

    def put(self, seed: int, label: str, value: float, **facts) -> None:
        """One finished run with this accuracy; further ``facts`` stand in the row of its evaluation."""
        spec = next(spec for spec in self.specs if spec.seed == seed and spec.label.startswith(label))
        row = {"step": 1, "name": "heldout", "eval/heldout/correct_rate": value, **facts}
        append_jsonl(self.manifest.directory / "runs" / spec.run_id / "evals.jsonl", [row])
        self.manifest.update(spec.run_id, state="done", step=1)

    def look(self) -> dict:
        Looks(self.manifest, self.specs, NullObserver()).look()
        return self.manifest.content["sequential"]["conditions"]["rloo+none"]

    def states(self, label: str = "") -> list[str]:
        return [run["state"] for run in self.manifest.content["runs"] if run["label"].startswith(label)]

    def compare(self) -> dict:
        self.manifest.files.flush()
        return conclude(self.manifest.directory)
