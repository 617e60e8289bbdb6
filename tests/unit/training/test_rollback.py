import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from helpers.campaigns import campaign

from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.records.observer import NullObserver
from retrain.training.assemble import assemble
from retrain.training.loop import Cohort

KEYS = ["sepa.schedule='auto'", "sepa.warmup_steps=1", "sepa.correct_rate_gate=0.0", "campaign.seeds=[1]"]


@contextmanager
def assembled(folder, model, *keys: str) -> Iterator[Cohort]:
    """Two runs, the second with SEPA's λ by what it saw, where their checkpoints in ``folder`` are."""
    path = campaign(folder, model)
    path.write_text(path.read_text().replace("gtpo_hicra_placebo", "gtpo_sepa"))
    with ExitStack() as stack:
        planned = Plan.of(load(path, [*KEYS, *keys]), folder / "out")
        made = assemble(planned.job(planned.specs), NullObserver(), lambda: False, stack)
        for run in made.runs:
            run.publish_to(made.engine)
        yield made
        for run in made.runs:
            run.recorder.close(failed=True)


@pytest.fixture
def cohort(model, tmp_path):
    with assembled(tmp_path, model) as cohort:
        yield cohort


def checkpoints(run) -> list[str]:
    return sorted(path.name for path in (run.recorder.directory / "checkpoints").glob("*"))


def state(run):
    """All that a checkpoint would hold of it, but for what the recorder counts."""
    return {key: value for key, value in run.state({}).to_dict().items() if key != "recorder"}


def test_weights_that_moved_in_the_step_that_failed_are_not_taken_back(cohort):
    """What was before is no more, so the run is not saved as if it were."""
    other, run = cohort.runs
    point = run.rollback_point()

    def half(*arguments):
        raise RuntimeError("the machine went away")

    run.policy.optimizer.register_step_post_hook(half)
    cohort.step(cohort.runs)
    cohort.saver.settle()
    assert run.error == "RuntimeError: the machine went away"
    assert (run.step, run.policy.version) == (0, 1)
    assert not run.roll_back(point)
    assert (checkpoints(other), checkpoints(run)) == (["step_000001"], [])


def test_a_run_that_fails_in_its_credit_is_saved_as_it_was_before_the_step(cohort, monkeypatch):
    """Its cohort is saved with it, at one common step."""
    cohort.step(cohort.runs)
    run, before = cohort.runs[1], state(cohort.runs[1])

    def failing(groups, scores, step):
        run.algorithm.restore({"sepa": {"opened_at": 99}})
        run.health.counters.ungraded_steps, run.health.counters.skipped_updates = 2, 1
        raise RuntimeError("credit went wrong")

    monkeypatch.setattr(run.algorithm, "credit", failing)
    cohort.step(cohort.runs)
    assert run.error == "RuntimeError: credit went wrong"
    assert cohort.runs[0].error is None
    cohort.saver.settle()
    assert state(run) == before
    assert checkpoints(run) == ["step_000001"]


def test_a_checkpoint_brings_back_all_that_a_run_remembers(model, tmp_path):
    """Also failures in a row, learnt memory and back pressure. Later checkpoints would be taken for the newest."""
    with assembled(tmp_path, model) as cohort:
        cohort.step(cohort.runs)
        run = cohort.runs[1]
        run.health.counters.ungraded_steps, run.health.counters.skipped_updates = 2, 1
        run.policy.budget.shrink([5, 2], [40, 40], "out of memory")
        cohort.saver.shared = lambda: {"pressure": {"loads": [3]}, "engine": {}}
        cohort.saver.save(cohort.runs)
        before = state(run)
        cohort.step(cohort.runs)
        cohort.saver.settle()
        assert checkpoints(run) == ["step_000001", "step_000002"]
        shutil.rmtree(cohort.runs[0].recorder.directory / "checkpoints/step_000002")
        assert all(state(run)[key] != before[key] for key in ("step", "cursor", "algorithm", "policy"))
    with assembled(tmp_path, model) as again:
        run = again.runs[1]
        assert state(run) == before
        assert (before["policy"]["version"], before["ungraded_steps"], before["skipped_updates"]) == (1, 2, 1)
        assert run.policy.budget.tokens == 40
        assert run.checkpoints.loaded.shared["pressure"] == {"loads": [3]}
        assert checkpoints(run) == ["step_000001"]


def test_a_checkpoint_counts_when_the_whole_cohort_has_its_own(cohort):
    """What is written of the others is not announced, and nothing older makes room for it."""
    cohort.step(cohort.runs)
    other, run = cohort.runs
    (run.recorder.directory / "checkpoints").write_text("in the way")
    cohort.saver.save(cohort.runs)
    cohort.saver.settle()
    assert (other.error, "cannot" in run.error) == (None, True)
    assert checkpoints(other) == ["step_000001"]
    assert not (other.recorder.directory / "checkpoints.jsonl").exists()


def test_checkpoints_that_are_kept_for_good_stay_while_a_run_saves(model, tmp_path):
    with assembled(tmp_path, model, "training.save_every=1", "training.keep_last=1", "training.keep_every=2") as cohort:
        kept = []
        for _ in range(3):
            cohort.step(cohort.runs)
            cohort.saver.settle()
            kept.append(checkpoints(cohort.runs[0]))
    assert kept == [["step_000001"], ["step_000002"], ["step_000002", "step_000003"]]
