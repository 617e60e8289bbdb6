"""Executors: jobs and events of plain data, a controller that knows nothing else, and one plan for each command."""

from __future__ import annotations

import json
import os
import pickle
import signal
from pathlib import Path

import pytest
from timing_keys import is_timing_key
from toycampaign import campaign
from toyexecutor import Processes

from retrain.campaign.planning.changes import Approval
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.planning.plan import Plan, RunSpec
from retrain.campaign.planning.references import check
from retrain.campaign.running.controller import execute
from retrain.campaign.running.executor import InProcess
from retrain.campaign.running.protocol import (
    CohortJob,
    Evaluated,
    Facts,
    JobEnded,
    JobStarted,
    Message,
    RunEnded,
    RunStarted,
    SqueezeJob,
    StepDone,
    Tick,
    from_json,
    to_json,
)
from retrain.config import load
from retrain.errors import RetrainError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.record.observer import NullObserver


def steps_of(out: Path) -> dict[str, list[dict]]:
    """The rows of every run, without what a clock told."""

    def timeless(row: dict) -> dict:
        return {k: v for k, v in row.items() if not is_timing_key(k)}

    return {path.parent.name: [timeless(row) for row in read_jsonl(path)] for path in out.glob("runs/*/metrics.jsonl")}


class Heard(NullObserver):
    """Everything that was told, in order; ``on`` is called with each entry."""

    def __init__(self, on=lambda entry: None):
        self.told, self.on = [], on

    def _tell(self, *entry) -> None:
        self.told.append(entry)
        self.on(entry)

    def run_started(self, spec, step, max_steps):
        self._tell("started", spec.run_id, step)

    def step(self, spec, row):
        self._tell("step", spec.run_id, row["step"])

    def evaluated(self, spec, name, row):
        self._tell("evaluated", spec.run_id, name)

    def run_finished(self, spec, status, message=""):
        self._tell(status, spec.run_id, message)


class Recorded:
    """An executor that remembers its jobs."""

    def __init__(self, executor):
        self.executor, self.jobs = executor, []
        self.events, self.close, self.has_gpu = executor.events, executor.close, executor.has_gpu
        self.slots = executor.slots

    def submit(self, job):
        self.jobs.append(job)
        return self.executor.submit(job)


def planned(folder: Path, model: Path, out: str, **settings) -> Plan:
    return check(Plan.of(load(campaign(folder, model, steps=2, **settings)), folder / out))


def test_jobs_and_events_are_plain_data(tmp_path, model):
    """JSON and pickle give back what went in, and so does a run's configuration."""
    plan = planned(tmp_path, model, "out")
    runs, longest = [spec.to_json() for spec in plan.specs], {"training": 8, "heldout": {"heldout": 16}}
    items = [
        CohortJob("out", "here", runs, longest, {"grpo+none_s1": 3}, together=False, accepted=["data: a → b"]),
        SqueezeJob("out", "here", runs[0], longest),
        RunStarted("grpo+none_s1", 2, 4),
        StepDone("grpo+none_s1", {"step": 2, "loss": None, "mean_reward": 0.1 + 0.2}),
        Evaluated("grpo+none_s1", "heldout", {"eval/heldout/correct_rate": 0.5}),
        RunEnded("grpo+none_s1", "failed", "a reason"),
        Facts({"squeeze": {"recommended_rank": 2, "rows": [{"rank": 1}]}}),
        Message("a line", "warning"),
        JobStarted("1", "2 gpu:1", ["grpo+none_s1"]),
        Tick(),
        JobEnded("1", "too_large", "two fit", 2, ["a", "b"]),
    ]
    for item in items:
        assert from_json(json.loads(json.dumps(to_json(item), allow_nan=False))) == item
        assert pickle.loads(pickle.dumps(item)) == item
    assert [RunSpec.from_json(json.loads(json.dumps(run))) for run in runs] == plan.specs


def test_what_the_executor_here_says_is_plain_data_in_order(tmp_path, model):
    plan = planned(tmp_path, model, "out", lanes=4)
    executor = InProcess()
    handle = executor.submit(CohortJob.of(plan, plan.specs))
    assert not (tmp_path / "out").exists()  # nothing is done before somebody listens
    events = list(executor.events())
    executor.close()
    assert [from_json(json.loads(json.dumps(to_json(event)))) for event in events] == events
    assert events[-1] == JobEnded(handle.id)
    assert not (tmp_path / "out/manifest.json").exists()  # that is the controller's
    for spec in plan.specs:
        mine = [event for event in events if getattr(event, "run_id", None) == spec.run_id]
        kinds = [type(event).__name__ for event in mine]
        assert kinds == ["RunStarted", "Evaluated", "StepDone", "Evaluated", "StepDone", "RunEnded"]
        assert [event.row["step"] for event in mine if isinstance(event, StepDone)] == [0, 1]
        assert mine[-1] == RunEnded(spec.run_id, "done")


def test_a_toy_executor_trains_a_campaign_as_this_process_does(tmp_path, model):
    """Every cohort in a process of its own, through the same controller: the same numbers, manifest and report."""
    here, there = Heard(), Heard()
    assert execute(planned(tmp_path, model, "here", lanes=2), here).exit_status == 0
    toy = Recorded(Processes())
    outcome = execute(planned(tmp_path, model, "there", lanes=2), there, executor=toy)
    assert outcome.exit_status == 0
    assert [type(job).__name__ for job in toy.jobs] == ["CohortJob", "SqueezeJob", "CohortJob"]
    assert there.told == here.told
    rows = steps_of(tmp_path / "there")
    assert rows == steps_of(tmp_path / "here")
    assert sorted(map(len, rows.values())) == [2, 2, 2, 2]
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("here", "there"))
    assert [(run["state"], run["step"]) for run in theirs["runs"]] == [("done", 2)] * 4
    for key in ("runs", "cohorts", "declared", "report"):
        assert theirs[key] == ours[key]
    assert theirs["squeeze"]["recommended_rank"] == ours["squeeze"]["recommended_rank"]
    assert (tmp_path / "there/report.html").is_file()


def test_a_toy_executor_stops_and_another_goes_on(tmp_path, model):
    """A signal to the controller reaches the job through its handle; what was saved there is continued here."""
    assert execute(planned(tmp_path, model, "whole"), NullObserver()).exit_status == 0

    steps: list[tuple] = []

    def interrupt(entry) -> None:
        if entry[0] == "step":
            steps.append(entry)
            if len(steps) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    outcome = execute(planned(tmp_path, model, "out"), Heard(interrupt), executor=Processes())
    assert (outcome.exit_status, outcome.saved) == (130, True)
    assert {run["state"] for run in read_json(tmp_path / "out/manifest.json")["runs"]} == {"interrupted"}
    assert execute(check(read_plan(tmp_path / "out")), NullObserver()).exit_status == 0
    assert steps_of(tmp_path / "out") == steps_of(tmp_path / "whole")


def test_an_executor_that_fails_leaves_the_runs_to_be_continued(tmp_path, model):
    class Ends(Processes):
        def submit(self, job):
            child = super().submit(job)
            child.process.kill()
            return child

    with pytest.raises(RetrainError, match="the child ended with status -9"):
        execute(planned(tmp_path, model, "out"), NullObserver(), executor=Ends())
    assert {run["state"] for run in read_json(tmp_path / "out/manifest.json")["runs"]} == {"pending"}
    assert execute(check(read_plan(tmp_path / "out")), NullObserver()).exit_status == 0


def test_accepted_changes_reach_a_job_that_has_found_them(tmp_path, model):
    """What only the executor can know (here the data) is asked about by the controller, once."""
    (tmp_path / "problems.jsonl").write_text("".join(f'{{"prompt": "{n}+1=?", "answer": "1"}}\n' for n in range(20)))
    path = campaign(tmp_path, model, steps=2)
    path.write_text(path.read_text() + f'[data]\nsource = "{tmp_path}/problems.jsonl"\n')
    out = tmp_path / "out"
    assert execute(check(Plan.of(load(path, ["campaign.max_steps=1"]), out)), NullObserver()).exit_status == 0
    text = (tmp_path / "problems.jsonl").read_text()
    (tmp_path / "problems.jsonl").write_text(text.replace("7+1", "7+2"))
    with pytest.raises(UsageError, match=r"data: \w+ → \w+"):
        execute(check(Plan.of(load(path), out)), NullObserver())
    asked: list[list[str]] = []
    approval = Approval(ask=lambda lines: asked.append(lines) or True)
    mine = Recorded(InProcess())
    assert execute(check(Plan.of(load(path), out)), NullObserver(), approval=approval, executor=mine).exit_status == 0
    assert [[line.partition(":")[0] for line in lines] for lines in asked] == [["data"]]
    assert [job.accepted for job in mine.jobs if isinstance(job, CohortJob)] == [[], asked[0]]


def test_a_job_says_what_else_is_planned(tmp_path, model):
    """What problems fit depends on the longest completions of the whole plan, which a job of one run knows as well."""
    plan = planned(tmp_path, model, "out", condition='"training.max_tokens" = 40')
    lengths = {spec.config.training.max_tokens for spec in plan.specs}
    assert len(lengths) == 2
    for spec in plan.specs:
        assert CohortJob.of(plan, [spec]).longest["training"] == max(lengths)
