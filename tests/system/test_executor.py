import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.campaigns import Heard, campaign
from helpers.records import configuration

from retrain.campaign.controller import execute
from retrain.campaign.planning.changes import Approval
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running import protocol
from retrain.campaign.running.jobs import InProcess
from retrain.config import load
from retrain.errors import UsageError
from retrain.files import append_jsonl, read_json
from retrain.records.observer import NullObserver
from retrain.training.inputs import CohortJob


def planned(folder: Path, model: Path, **settings) -> Plan:
    return check(Plan.of(load(campaign(folder, model, steps=2, **settings)), folder / "out"))


def test_a_job_of_one_run_knows_the_longest_completions_of_the_plan(tmp_path, model):
    plan = planned(tmp_path, model, condition='"training.max_tokens" = 40')
    assert {plan.job([spec]).longest.training for spec in plan.specs} == {40}
    assert {spec.config.training.max_tokens for spec in plan.specs} == {10, 40}


def test_a_job_that_was_written_as_json_is_the_same(tmp_path, model):
    plan = planned(tmp_path, model)
    squeeze = protocol.SqueezeJob(plan.directory, plan.folder, plan.specs[:1], plan.longest, "squeeze/one")
    for job in (plan.job(plan.specs, failed_at={"grpo+none_s1": 3}, accepted=["data: a → b"]), squeeze):
        assert protocol.job_from_json(json.loads(json.dumps(protocol.job_to_json(job)))) == job


def test_accepted_changes_reach_a_job_that_has_found_them(tmp_path, model):
    """What only the executor can know (here the data) is asked about by the controller, once."""

    class Recorded(InProcess):
        jobs = ()

        def do(self, job, observer, stop):
            self.jobs = (*self.jobs, job)
            return super().do(job, observer, stop)

    problems, out = tmp_path / "problems.jsonl", tmp_path / "out"
    problems.write_text("".join(f'{{"prompt": "{n}+1=?", "answer": "1"}}\n' for n in range(20)))
    path = campaign(tmp_path, model, steps=2)
    path.write_text(path.read_text() + f'[data]\nsource = "{problems}"\n')
    assert execute(check(Plan.of(load(path, ["campaign.max_steps=1"]), out)), NullObserver()).exit_status == 0
    problems.write_text(problems.read_text().replace("7+1", "7+2"))
    with pytest.raises(UsageError, match=r"data: \w+ → \w+"):
        execute(check(Plan.of(load(path), out)), NullObserver())
    asked: list[list[str]] = []
    approval, executor = Approval(ask=lambda lines: asked.append(lines) or True), Recorded()
    plan = check(Plan.of(load(path), out))
    assert execute(plan, NullObserver(), approval=approval, executor=executor).exit_status == 0
    assert [[line.partition(":")[0] for line in lines] for lines in asked] == [["data"]]
    assert [job.accepted for job in executor.jobs if isinstance(job, CohortJob)] == [[], asked[0]]


class Player:
    """Puts runs on the disk and analyses nothing; jobs end last first, and the first ``dies`` lose their worker."""

    slots = 3

    def __init__(self, dies: int = 0):
        self.dies, self.jobs, self.begun, self.analysed = dies, [], [], []
        self.has_gpu = lambda: False
        self.close = lambda: None

    def submit(self, job):
        if isinstance(job, CohortJob):
            self.begun.append({spec.seed for spec in job.runs})
        else:
            self.analysed.append((job.subfolder, job.runs[0].run_id))
        name = str(len(self.begun) + len(self.analysed))
        self.jobs.append((name, job))
        return SimpleNamespace(id=name, stop=lambda: None)

    def events(self):
        while self.jobs:
            yield protocol.Tick()
            name, job = self.jobs.pop()
            runs = job.runs if isinstance(job, CohortJob) else []
            if runs:
                yield protocol.JobStarted(name, "1 cpu", [run.run_id for run in runs])
            if runs and self.dies:
                self.dies -= 1
                yield protocol.JobEnded(name, "died", "worker 1 was ended by SIGKILL")
                continue
            for run in runs:
                row = {"step": 0, "num_tokens": 5, "correct_rate": 0.5}
                yield protocol.RunStarted(run.run_id, 0, 1)
                append_jsonl(job.directory / "runs" / run.run_id / "metrics.jsonl", [row])
                yield protocol.StepDone(run.run_id, row)
                yield protocol.RunEnded(run.run_id, "done")
            yield protocol.JobEnded(name)


def plan_for(tmp_path: Path, *sets: str, squeeze: bool = False, **settings) -> Plan:
    rest = '[squeeze]\nverify = "off"\n' if squeeze else "[squeeze]\nenabled = false\n"
    return Plan.of(load(configuration(tmp_path, rule="off", rest=rest, **settings), [*sets]), tmp_path / "out")


def test_the_first_run_of_the_plan_is_analysed_whichever_ends_first(tmp_path):
    player, plan = Player(), plan_for(tmp_path, squeeze=True, lanes=2, seeds=[1, 2, 3])
    assert execute(plan, NullObserver(), executor=player).exit_status == 0
    assert player.analysed == [("squeeze", "grpo+none_s1")]


def test_runs_whose_process_dies_again_and_again_have_failed(tmp_path):
    sets = ("campaign.executor=processes", "campaign.workers=2", "campaign.max_restarts=1")
    plan = plan_for(tmp_path, *sets, lanes=4, seeds=[1, 2, 3, 4])
    assert execute(plan, Heard(), executor=Player(dies=3)).exit_status == 1
    runs = read_json(tmp_path / "out/manifest.json")["runs"]
    assert [run["state"] for run in runs].count("failed") == 4
    assert {run["reason"] for run in runs} == {None, "worker 1 was ended by SIGKILL, 2 times now"}
    assert not any("worker" in run for run in runs)
    again = Player()
    assert execute(Plan.of(plan.source, tmp_path / "out"), NullObserver(), True, executor=again).exit_status == 0
    assert again.begun in ([{1, 2}], [{3, 4}])
