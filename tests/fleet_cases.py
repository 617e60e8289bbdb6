"""What tests of servers beside workers share: who hears, and what a campaign has left."""

from __future__ import annotations

from pathlib import Path

from retrain.files import read_json, read_jsonl
from retrain.record.observer import NullObserver


class Heard(NullObserver):
    """``on_step`` is called after each step with the number of steps so far."""

    def __init__(self, on_step=lambda count: None):
        self.on_step, self.steps, self.lines, self.workers = on_step, 0, [], set()

    def placed(self, spec, worker):
        self.workers.add(worker)

    def step(self, spec, row):
        self.steps += 1
        self.on_step(self.steps)

    def message(self, text, level="info"):
        self.lines.append(text)


def rows_of(out: Path) -> list[dict]:
    return [row for path in sorted(out.glob("runs/*/metrics.jsonl")) for row in read_jsonl(path)]


def recorded(out: Path, text: str) -> list[bool]:
    """Whether ``run.log`` and a note of each run say this of a server, for every run."""
    return [
        text in (run / "run.log").read_text()
        and any(note["key"] == "server" and text in note["text"] for note in read_jsonl(run / "notes.jsonl"))
        for run in sorted(out.glob("runs/*"))
    ]


def whole(out: Path, runs: int = 4, steps: int = 3) -> None:
    """Every step of every run is there once, drawn by what it trains, and nothing is left behind."""
    rows = rows_of(out)
    assert len(rows) == runs * steps
    assert max(row["kl_sample_train_v2"] for row in rows) < 1e-9
    assert {run["state"] for run in read_json(out / "manifest.json")["runs"]} == {"done"}
    assert not list(out.glob("server*.json"))
    assert not (out / "adapters").exists()
