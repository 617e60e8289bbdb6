"""Runs that learn from a batch once, four times, with a critic of their own or with a shared one, in one cohort: each
gets what it gets alone, and what goes wrong in one of its updates is its own affair."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from critic_cases import ALL, ALL_MANY, NAMES, by_name, critic_campaign, critic_files, last_checkpoint, made
from safetensors.torch import load_file

from retrain.campaign.running import assemble
from retrain.campaign.running.controller import launch, resume
from retrain.config import load
from retrain.files import read_json, read_jsonl
from retrain.policy.local import LocalPolicy
from retrain.policy.protocol import TrainBatch
from retrain.policy.threads import Workers
from retrain.record.observer import NullObserver

SMALL = "save_every = 2\nkeep_last = 0\nmicro_batch_tokens = 64"
"""Several micro-batches in every update."""
NUMBERS = ("loss", "optim/grad_norm", "policy/approxkl_avg", "kl", "critic/value_mean", "critic/explained_variance")


def train(folder: Path, model: Path, *sets: str, conditions=ALL, observer=None):
    """The cohort of four, in double precision."""
    folder.mkdir()
    path = critic_campaign(folder, model, *conditions, training=SMALL, dtype="float64")
    return launch(load(path, sets), folder / "out", observer or NullObserver())


@pytest.fixture(scope="module")
def together(model, tmp_path_factory) -> dict[str, Path]:
    """The four runs of an undisturbed cohort, by name."""
    folder = tmp_path_factory.mktemp("lanes") / "together"
    assert train(folder, model).exit_status == 0
    return by_name(folder / "out")


def texts(run: Path) -> list[str]:
    return [row["completion"] for row in read_jsonl(run / "emergence/generations.jsonl")]


def assert_alike(mine: Path, theirs: Path) -> None:
    """The same tokens, and the same numbers but for the last bits, which the company in a decode batch decides."""
    assert texts(mine) == texts(theirs)
    ours, others = (read_jsonl(run / "metrics.jsonl") for run in (mine, theirs))
    assert [row.keys() for row in ours] == [row.keys() for row in others]
    for key in NUMBERS:
        a, b = ([row.get(key) for row in rows] for rows in (ours, others))
        assert [value is None for value in a] == [value is None for value in b], key
        known = [value is not None for value in a]
        np.testing.assert_allclose(np.array(a)[known].astype(float), np.array(b)[known].astype(float), atol=1e-8)
    for path in sorted((theirs / "final").glob("*.safetensors")) + sorted(last_checkpoint(theirs).glob("critic*")):
        a, b = load_file(mine / path.relative_to(theirs)), load_file(path)
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name].numpy(), b[name].numpy(), atol=1e-6)


def test_runs_in_a_cohort_equal_the_runs_alone(together, model, tmp_path):
    assert train(tmp_path / "alone", model, "campaign.lanes=1").exit_status == 0
    alone = by_name(tmp_path / "alone/out")
    for name in NAMES:
        assert_alike(together[name], alone[name])
    assert {name: bool(critic_files(run)) for name, run in together.items()} == {
        "once": False, "four": False, "own": True, "shared": True,
    }  # fmt: skip
    rows = {name: read_jsonl(run / "metrics.jsonl") for name, run in together.items()}
    assert max(row["optim/updates"] for row in rows["four"]) == 4  # none for a minibatch without signal
    assert max(row["timing_microbatches"] for row in rows["own"]) > 2
    assert len({json.dumps(texts(run)) for run in together.values()}) == 4  # they do differ


@pytest.mark.parametrize("count", [2, 3])
def test_several_workers_change_no_bit(together, model, tmp_path, monkeypatch, count):
    """Two: two updates side by side, twice. Three: three side by side, then the micro-batches of the fourth run."""
    monkeypatch.setattr(assemble, "workers_for", lambda base: Workers(count))
    assert train(tmp_path / "workers", model).exit_status == 0
    for name, run in by_name(tmp_path / "workers/out").items():
        ours, theirs = made(run), made(together[name])
        assert ours.keys() == theirs.keys()
        assert [part for part in ours if ours[part] != theirs[part]] == []


def poison(monkeypatch, condition: str, *updates: tuple[int, int]) -> None:
    """Advantages, and where there is a critic its targets, that are infinite in these (step, update) of one run."""
    update = LocalPolicy.update

    def poisoned(self, batch: TrainBatch, objective, lr):
        if condition == name_of(self) and (batch.step, batch.update) in updates:
            bad = np.inf if self.critic is None else 1.0
            samples = [
                replace(
                    one,
                    advantages=np.where(one.action_mask, bad, 0.0),
                    value_targets=None if one.value_targets is None else np.where(one.action_mask, np.inf, 0.0),
                )
                for one in batch.samples
            ]
            batch = replace(batch, samples=samples)
        return update(self, batch, objective, lr)

    monkeypatch.setattr(LocalPolicy, "update", poisoned)


def name_of(policy: LocalPolicy) -> str:
    """Which of the four runs it belongs to."""
    config = policy.config
    if config.algorithm.critic:
        return "shared" if config.critic.share_adapter else "own"
    return "four" if config.training.several_updates else "once"


@pytest.mark.parametrize("name", ["four", "own", "shared"])
def test_one_update_of_four_that_is_not_finite_is_left_out(model, tmp_path, monkeypatch, name):
    """Recorded, and without a trace in weights and moments: the other three are made, the other runs go on."""
    versions: dict[tuple[int, int], int] = {}
    poison(monkeypatch, name, (1, 1))
    poisoned = LocalPolicy.update

    def watched(self, batch, objective, lr):
        try:
            return poisoned(self, batch, objective, lr)
        finally:
            if name_of(self) == name:
                versions[batch.step, batch.update] = self.version

    monkeypatch.setattr(LocalPolicy, "update", watched)
    assert train(tmp_path / "bad", model, "campaign.max_steps=3", conditions=ALL_MANY).exit_status == 0
    runs = by_name(tmp_path / "bad/out")
    rows = {label: read_jsonl(run / "metrics.jsonl") for label, run in runs.items()}
    assert [row["optim/skipped"] for row in rows[name]] == [False, True, False]
    made_in = [sum(step == each and (step, update) != (1, 1) for step, update in versions) for each in range(3)]
    assert made_in[1] == 3
    assert [row["optim/updates"] for row in rows[name]] == made_in
    assert versions[1, 1] == versions[1, 0]
    assert sorted(versions.values()) == sorted([*range(1, sum(made_in) + 1), versions[1, 0]])
    assert rows[name][1]["loss"] is not None
    assert rows[name][1]["optim/grad_norm"] > 0
    lines = (runs[name] / "run.log").read_text().splitlines()
    (line,) = [line for line in lines if "the update was not applied" in line]
    assert "step 1: " in line
    for label in rows.keys() - {name}:
        assert [row["optim/skipped"] for row in rows[label]] == [False] * 3
        assert "not applied" not in (runs[label] / "run.log").read_text()


class StopAt(NullObserver):
    """Asks once to stop, when the first run has recorded this step."""

    def __init__(self, last: int):
        self.last, self.asked = last, False

    def step(self, spec, row):
        if row["step"] == self.last and not self.asked:
            self.asked = True
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def longer(model, tmp_path_factory) -> dict[str, Path]:
    """The four runs with a fifth step."""
    folder = tmp_path_factory.mktemp("longer") / "out"
    assert train(folder, model, "campaign.max_steps=5").exit_status == 0
    return by_name(folder / "out")


@pytest.mark.parametrize(("name", "updates", "kept"), [
    ("four", ((1, 1), (2, 1), (3, 1)), 3),
    ("shared", ((2, 0), (3, 0), (4, 0)), 4),
])  # fmt: skip
def test_after_nonfinite_limit_the_run_fails_and_the_others_are_as_without_it(
    longer, model, tmp_path, monkeypatch, name, updates, kept
):
    """One fails in the middle of a batch, with an update made that cannot be taken back: it is not saved as if it had
    not begun the step. The others are stopped and resumed all the same, and what failed can be tried again."""
    out = tmp_path / "bad/out"
    with monkeypatch.context() as patch:
        poison(patch, name, *updates)
        outcome = train(tmp_path / "bad", model, "campaign.max_steps=5", observer=StopAt(2))
        assert outcome.exit_status == 130
        assert resume(out, StopAt(3)).exit_status == 130  # of "four" the others are there still
        assert resume(out, NullObserver()).exit_status == 1
    runs = by_name(out)
    entries = dict(zip(NAMES, read_json(out / "manifest.json")["runs"], strict=True))
    assert entries[name]["state"] == "failed"
    assert f"step {updates[-1][0]}: " in entries[name]["reason"]
    assert "3 steps in a row: nonfinite_limit" in entries[name]["reason"]
    for label in NAMES:
        if label != name:
            assert entries[label]["state"] == "done"
            assert_alike(runs[label], longer[label])
    assert last_checkpoint(runs[name]).name == f"step_{kept:06d}"
    assert resume(out, NullObserver(), retry_failed=True).exit_status == 0
    assert [row["step"] for row in read_jsonl(runs[name] / "metrics.jsonl")] == list(range(5))
