"""Directories of campaigns whose held-out accuracies are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.campaign.judging.results import METRIC
from retrain.files import append_jsonl, write_json

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
            rows = [
                {
                    "step": step,
                    "correct_rate": 0.4,
                    "num_tokens": 100 * (step + 1),
                    "time/update": 2.0,
                    "time/rollout": 4.0,
                    "cohort_size": 4,
                }
                for step in range(20 if state == "done" else 7)
            ]
            append_jsonl(path / "metrics.jsonl", rows)
            points = [(0, 0.5), (10, 0.5 if value is None else (0.5 + value) / 2), (20, value)]
            append_jsonl(
                path / "evals.jsonl",
                [
                    {
                        "step": step,
                        "name": "heldout",
                        "samples": 2,
                        METRIC: v,
                        "eval/heldout/problems": 50,
                        "eval/heldout/hard/correct_rate": v,
                        "eval/heldout/mean_length": 30.0 + seed,
                    }
                    for step, v in (points if state == "done" else points[:1])
                ],
            )
            reason = "CUDA out of memory" if state == "failed" else None
            runs.append({"run_id": run_id, "label": label, "seed": seed, "state": state, "reason": reason,
                         "step": len(rows), "path": f"runs/{run_id}"})  # fmt: skip
    write_json(folder / "manifest.json", {"format": 1, "runs": runs})
    return folder


def shifted(by: float, noise: float = 0.004) -> list[float | None]:
    """``BASE`` and a difference that alternates around ``by``."""
    return [value + by + noise * (-1) ** i for i, value in enumerate(BASE)]
