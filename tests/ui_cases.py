"""A small campaign's files as retrain writes them, and a page's server over directories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from retrain.files import append_jsonl, write_json
from retrain.ui.library import Library
from retrain.ui.numbers import Pool
from retrain.ui.places import Places
from retrain.ui.server import app_of

HOST = "http://127.0.0.1:8571"
LABELS = ("grpo+none", "maxrl+none")


def row(step: int, **more: Any) -> dict[str, Any]:
    """A row of metrics.jsonl, in short."""
    return {"step": step, "condition": "grpo+none", "mean_reward": 0.1 * step, "correct_rate": step / 10,
            "num_tokens": 100 * (step + 1), "step_time_s": 2.0, "time/rollout": 1.0, "time/update": 0.5,
            "cohort_size": 2, "entropy": None if step == 1 else 0.5, "rewards/match/mean": 0.5,
            "rewards/match/std": 0.1, "rewards/match/min": 0.0, "rewards/match/max": 1.0,
            "env/easy/correct": 0.5} | more  # fmt: skip


def campaign(path: Path, seeds: int = 2, steps: int = 6, state: str = "done", labels: Sequence[str] = LABELS) -> Path:
    """Conditions × seeds; the second condition is better by a fifth."""
    entries = []
    for seed in range(1, seeds + 1):
        for index, label in enumerate(labels):
            run_id = f"{label}_s{seed}"
            run = path / "runs" / run_id
            entries.append({"run_id": run_id, "label": label, "seed": seed, "state": state, "reason": None,
                            "step": steps, "max_steps": steps, "path": f"runs/{run_id}"})  # fmt: skip
            append_jsonl(run / "metrics.jsonl", [row(step, condition=label) for step in range(steps)])
            rates = {0: 0.25, steps: 0.5 + 0.2 * index + seed / 64}
            append_jsonl(run / "evals.jsonl", [evaluation(step, rate) for step, rate in rates.items()])
            settings = {"training": {"seed": seed, "max_steps": steps, "eval_every": steps}, "data_hash": "d1",
                        "algorithm": {"advantage_mode": label.partition("+")[0]}, "campaign": {"seed": 0},
                        "ranges": {"reward": {"min": 0, "max": 1}}}  # fmt: skip
            write_json(run / "config.json", settings | {"run_id": run_id, "condition": label})
            append_jsonl(run / "notes.jsonl", [note(2, "nothing_clipped"), note(4, "truncated", "warning")])
            (run / "run.log").write_text("2026-01-01 00:00:00 info    start\nno date <script>\n")
    write_json(
        path / "manifest.json", {"format": 1, "name": path.name, "created": 1.0, "updated": 2.0, "runs": entries}
    )
    return path


def evaluation(step: int, rate: float) -> dict[str, Any]:
    """A row of evals.jsonl."""
    facts = {"correct_rate": rate, "problems": 64, "reward_mean": rate}
    return {"name": "heldout", "step": step, "samples": 1} | {
        f"eval/heldout/{key}": value for key, value in facts.items()
    }


def note(step: int, key: str, level: str = "info") -> dict[str, Any]:
    """A row of notes.jsonl."""
    return {"step": step, "key": key, "level": level, "text": f"about {key}", "remedy": "nothing to do"}


def client_of(*directories: Path, cache: Path | None = None, **options: Any) -> TestClient:
    """A browser's side of a server over these directories; what was read is looked at anew for every request."""
    library = Library(Places(directories), Pool(cache))
    return TestClient(app_of(library, **options), base_url=HOST, raise_server_exceptions=True)


def get(client: TestClient, path: str, status: int = 200, **query: Any) -> Any:
    """The JSON of an answer with this status; an error is one line."""
    answer = client.get(path, params=query)
    assert answer.status_code == status, answer.text
    found = json.loads(answer.content, parse_constant=lambda name: pytest_fail(name))
    if status >= 400:
        assert set(found) == {"error"}
        assert "\n" not in found["error"]
        assert "Traceback" not in found["error"]
    return found


def pytest_fail(name: str) -> None:
    """NaN and Infinity are no JSON."""
    raise AssertionError(f"{name} in an answer")
