"""Runs of one cohort with several kinds of updates and critics: each equals the run alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.campaigns import StopAfter, continue_training, train
from helpers.lanes import ALL, NAMES, by_name, critic_campaign, critic_files, last_checkpoint
from safetensors.torch import load_file

from retrain.files import read_json, read_jsonl
from retrain.policy.local import LocalPolicy
from retrain.types import StepBatch

SMALL = {"keep_last": 0, "micro_batch_tokens": 64}
"""Several micro-batches in every update."""
NUMBERS = ("loss", "optim/grad_norm", "policy/approxkl_avg", "kl", "critic/value_mean", "critic/explained_variance")


def train_critics(folder: Path, model: Path, *sets: str, conditions=ALL, **options) -> None:
    folder.mkdir()
    path = critic_campaign(folder, model, *conditions, training=SMALL, dtype="float64")
    train(path, folder / "out", *sets, **options)


@pytest.fixture(scope="module")
def cohort(model, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lanes") / "cohort"
    train_critics(folder, model, "campaign.max_steps=3")
    return by_name(folder / "out")


def texts(run: Path) -> list[str]:
    return [row["completion"] for row in read_jsonl(run / "emergence/generations.jsonl")]


def numbers(run: Path) -> np.ndarray:
    return np.array([[row.get(key) for key in NUMBERS] for row in read_jsonl(run / "metrics.jsonl")], dtype=float)


def assert_alike(run: Path, other: Path) -> None:
    """The same tokens, and the same numbers but for the last bits, which depend on the decode batch."""
    assert texts(run) == texts(other)
    np.testing.assert_allclose(numbers(run), numbers(other), atol=1e-8)
    for path in [*(other / "final").glob("*.safetensors"), *last_checkpoint(other).glob("critic*")]:
        weights, others = load_file(run / path.relative_to(other)), load_file(path)
        assert weights.keys() == others.keys()
        for name in weights:
            np.testing.assert_allclose(weights[name].numpy(), others[name].numpy(), atol=1e-6)


def name_of(policy: LocalPolicy) -> str:
    config = policy.config
    if config.algorithm.critic:
        return "shared" if config.critic.share_adapter else "own"
    return "four" if config.training.several_updates else "once"


def test_runs_in_a_cohort_equal_the_runs_alone(cohort, model, tmp_path):
    train_critics(tmp_path / "alone", model, "campaign.lanes=1", "campaign.max_steps=3")
    alone = by_name(tmp_path / "alone/out")
    for name in NAMES:
        assert_alike(cohort[name], alone[name])
    assert {name for name, run in cohort.items() if critic_files(run)} == {"own", "shared"}
    rows = {name: read_jsonl(run / "metrics.jsonl") for name, run in cohort.items()}
    assert max(row["optim/updates"] for row in rows["four"]) == 4  # none for a minibatch without signal
    assert max(row["timing_microbatches"] for row in rows["own"]) > 2
    assert len({json.dumps(texts(run)) for run in cohort.values()}) == 4  # they do differ


def poison(monkeypatch, *faults: tuple[str, int, int]) -> None:
    """Make advantages, or the targets of a critic, infinite in these (run, step, update)."""
    update = LocalPolicy.update

    def poisoned(self, batch: StepBatch, objective, lr):
        if (name_of(self), batch.step, batch.update) in faults:
            field = "advantages" if self.critic is None else "value_targets"
            batch = replace(
                batch, samples=[replace(s, **{field: np.where(s.action_mask, np.inf, 0.0)}) for s in batch.samples]
            )
        return update(self, batch, objective, lr)

    monkeypatch.setattr(LocalPolicy, "update", poisoned)


def test_updates_that_are_not_finite_are_left_out_then_fail_their_run_alone(cohort, model, tmp_path, monkeypatch):
    """A run that fails in the middle of a batch is not saved as it was before the step. It can be tried again."""
    out = tmp_path / "bad/out"
    with monkeypatch.context() as patch:
        poison(patch, ("four", 1, 1), ("own", 1, 0), ("four", 2, 1))
        sets = ("campaign.max_steps=3", "training.nonfinite_limit=2")
        train_critics(tmp_path / "bad", model, *sets, observer=StopAfter(5), status=130)  # in step 1
        continue_training(out, status=1)
    runs = by_name(out)
    entries = dict(zip(NAMES, read_json(out / "manifest.json")["runs"], strict=True))
    assert {name: entry["state"] for name, entry in entries.items()} == {
        "once": "done", "four": "failed", "own": "done", "shared": "done",
    }  # fmt: skip
    assert "step 2: " in entries["four"]["reason"]
    assert "2 steps in a row: nonfinite_limit" in entries["four"]["reason"]
    assert_alike(runs["once"], cohort["once"])
    assert_alike(runs["shared"], cohort["shared"])
    assert last_checkpoint(runs["four"]).name == "step_000002"
    continue_training(out, retry_failed=True)
    for name, updates in (("own", None), ("four", 3)):
        rows = read_jsonl(runs[name] / "metrics.jsonl")
        assert [(row["step"], row["optim/skipped"]) for row in rows] == [(0, False), (1, True), (2, False)]
        assert rows[1].get("optim/updates") == updates  # the other three of the batch were made
        lines = (runs[name] / "run.log").read_text().splitlines()
        assert any("step 1: " in line and "the update was not applied" in line for line in lines)
