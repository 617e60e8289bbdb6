"""Campaigns under a sequential rule whose runs are put on the disk instead of trained."""

from __future__ import annotations

from pathlib import Path

from toymodels import campaign_head

from retrain.campaign.judging.declaration import freeze
from retrain.campaign.judging.pooling import conclude
from retrain.campaign.judging.sequential import Looks
from retrain.campaign.planning.manifest import Manifest, read_manifest
from retrain.campaign.planning.plan import plan
from retrain.config import load
from retrain.files import append_jsonl
from retrain.record.observer import NullObserver

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
