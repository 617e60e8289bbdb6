"""A step that fails before its weights have moved is taken back whole: cursor, counters, what SEPA remembers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from toycampaign import campaign

from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.assemble import assemble
from retrain.campaign.running.protocol import CohortJob
from retrain.config import load
from retrain.record.observer import NullObserver

KEYS = ["sepa.schedule='auto'", "sepa.warmup_steps=1", "sepa.correct_rate_gate=0.0", "campaign.seeds=[1]"]


@pytest.fixture
def cohort(model, tmp_path):
    """Two runs, the second with SEPA's λ by what it saw, at their first step."""
    path = campaign(tmp_path, model, condition='transform_mode = "gtpo_sepa"')
    path.write_text(path.read_text().replace('transform_mode = "gtpo_hicra_placebo"\n', ""))
    loaded = load(path, KEYS)
    with ExitStack() as stack:
        planned = Plan.of(loaded, tmp_path / "out")
        made = assemble(CohortJob.of(planned, planned.specs), NullObserver(), lambda: False, stack)
        for run in made.runs:
            made.engine.publish(run.policy_ref, run.policy.snapshot())
        yield made
        for run in made.runs:
            run.recorder.close(failed=True)


def state(run):
    """All that a checkpoint would hold of it, but for what the recorder counts."""
    return {key: value for key, value in run.state().items() if key != "recorder"}


def test_a_step_that_failed_is_taken_back(cohort):
    cohort.step(cohort.runs)
    run = cohort.runs[1]
    assert run.error is None
    point, before = run.rollback_point(), state(run)
    assert before["algorithm"]["sepa"]["observed"] == 1
    groups = cohort.queue.take({run: run.rollout_requests()})[0][run]
    first = run.credit(groups)
    run.ungraded_steps, run.skipped_updates = 2, 1
    moved = state(run)
    assert all(moved[key] != before[key] for key in ("cursor", "algorithm", "ungraded_steps", "skipped_updates"))
    assert run.roll_back(point)
    assert state(run) == before
    again = cohort.queue.take({run: run.rollout_requests()})[0][run]
    assert [one.token_ids for group in again for one in group.rollouts] == [
        one.token_ids for group in groups for one in group.rollouts
    ]
    assert run.credit(again) == first


def test_weights_that_have_moved_are_not_taken_back(cohort):
    run = cohort.runs[1]
    point = run.rollback_point()
    cohort.step(cohort.runs)
    after = state(run)
    assert (run.step, run.policy.version) == (1, 1)
    assert not run.roll_back(point)
    assert state(run) == after


def test_a_run_that_fails_in_its_credit_is_saved_as_it_was_before_the_step(cohort, monkeypatch):
    """Its cohort is saved with it, at one common step."""
    cohort.step(cohort.runs)
    run, before = cohort.runs[1], state(cohort.runs[1])

    def failing(groups, scores, step):
        run.algorithm.sepa = {"opened_at": 99}
        raise RuntimeError("credit went wrong")

    monkeypatch.setattr(run.algorithm, "credit", failing)
    cohort.step(cohort.runs)
    assert run.error == "RuntimeError: credit went wrong"
    assert cohort.runs[0].error is None
    cohort.saver.settle()
    assert state(run) == before
    assert [path.name for path in sorted((run.directory / "checkpoints").iterdir())] == ["step_000001"]
