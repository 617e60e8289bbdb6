"""What a controller does for an event does not depend on how many runs there are: work is counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from snippets import ROOT

from retrain.campaign.judging import sequential
from retrain.campaign.planning import asked
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running import controller
from retrain.config import load
from retrain.record.observer import NullObserver

sys.path.insert(0, str(ROOT / "benchmarks"))
from controller import StubWorkers, campaign

WORKERS = 8


def counted(monkeypatch, counts: Counter, home, name: str) -> None:
    real = getattr(home, name)

    def call(*given, **named):
        counts[name] += 1
        return real(*given, **named)

    monkeypatch.setattr(home, name, call)


def carried_out(folder: Path, runs: int, monkeypatch) -> Counter:
    """How often what is costly was done for a campaign of so many runs."""
    folder.mkdir()
    campaign(folder / "stub.toml", runs, "seeds")
    plan, counts = check(Plan.of(load(folder / "stub.toml"), folder / "out")), Counter[str]()
    with monkeypatch.context() as patch:
        patch.setattr(controller, "_report", lambda manifest, observer: None)
        counted(patch, counts, asked, "longest_completions")
        counted(patch, counts, sequential, "declaration")
        counted(patch, counts, sequential, "read_run")
        outcome = controller.execute(plan, NullObserver(), executor=StubWorkers(WORKERS, steps=2))
    assert outcome.exit_status == 0
    assert all(run["state"] == "done" for run in outcome.summary["runs"])
    return counts


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cost")
    with pytest.MonkeyPatch.context() as patch:
        return {runs: carried_out(folder / str(runs), runs, patch) for runs in (20, 80)}


def test_the_cost_of_a_campaign_does_not_grow_with_the_number_of_runs(counts):
    for runs, found in counts.items():
        assert found["longest_completions"] == 0  # check has done it, once
        assert found["declaration"] == 1  # not at each interim analysis
        assert found["read_run"] == 2 * (runs // 5 * 4)  # every run but a baseline once, with its baseline


def test_a_failed_run_is_not_read_again_at_every_look(tmp_path, monkeypatch):
    from played_campaigns import Played

    played = Played(tmp_path, rule="always_valid")
    played.finish(1)
    played.finish(2, state="failed", only="rloo")
    played.finish(2, only="grpo")
    played.look()
    reads = Counter[str]()
    counted(monkeypatch, reads, sequential, "read_run")
    played.look()
    assert reads["read_run"] == 0
    played.manifest.update("rloo+none_s2", state="done")
    assert [seed for seed, value in played.look()["differences"] if value is not None] == [1, 2]
    assert reads["read_run"] == 2
