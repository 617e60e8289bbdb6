"""Campaigns in worker processes: the same bytes as in one, also after deaths, stops and a change of executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toycampaign import StopAfter
from verdict_cases import configuration
from worker_cases import Heard, alone, contents, differing, planned, writer

import retrain.campaign.running.spawning as spawning
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.controller import execute
from retrain.campaign.running.lease import LEASE
from retrain.campaign.running.protocol import (
    CohortJob,
    JobEnded,
    JobStarted,
    RunEnded,
    RunStarted,
    SqueezeJob,
    StepDone,
    Tick,
)
from retrain.config import load
from retrain.files import ASIDE, append_jsonl, read_json
from retrain.ownership import process_start
from retrain.record.observer import NullObserver
from retrain.record.status import read_status

THERE = ["campaign.executor=processes", "campaign.workers=2"]


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("whole") / "out"
    found = alone(world, out)
    (world / "whole.json").write_bytes((out / "manifest.json").read_bytes())
    return found


def leases(out: Path) -> list[Path]:
    return list(out.glob(f"runs/*/{LEASE}"))


def test_two_workers_leave_what_one_process_leaves(tmp_path, world, whole):
    out, shown = tmp_path / "out", []

    def look(spec, count):
        if count == 1:
            shown.extend(run for run in read_status(out)["runs"] if run["run_id"] == spec.run_id)
            shown.extend(read_status(out / "runs" / spec.run_id)["runs"])

    heard = Heard(look)
    assert execute(planned(world, out, THERE), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert {worker for each in heard.workers.values() for worker in each} == {"1 cpu", "2 cpu"}
    assert len(heard.workers) == 8
    assert [run["worker"] for run in shown] == [heard.workers[run["run_id"]][0] for run in shown]
    assert [run["state"] for run in shown] == ["running"] * 2
    assert {run["worker"] for run in read_status(out)["runs"]} == {None}
    assert leases(out) == []
    planned_bytes = {run: facts["decode_bytes"] for run, facts in read_json(out / "manifest.json")["memory"].items()}
    assert planned_bytes.keys() == heard.workers.keys()
    alone = read_json(world / "whole.json")["memory"]
    assert {run: round(size / alone[run]["decode_bytes"], 2) for run, size in planned_bytes.items()} == dict.fromkeys(
        alone, 0.5
    )


def test_a_killed_worker_costs_steps_and_nothing_else(tmp_path, world, whole):
    out, killed = tmp_path / "out", []

    def kill(spec, count):
        if count == 3:
            killed.append(writer(out, spec.run_id))
            half = out / "runs" / spec.run_id / f"checkpoints/.step_000001.{killed[0]}{ASIDE}/adapter.json"
            half.parent.mkdir(parents=True)
            half.write_text("half of i")
            os.kill(killed[0], signal.SIGKILL)

    heard = Heard(kill)
    assert execute(planned(world, out, THERE), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert sum("was ended by SIGKILL" in text and "(1 of 3 restarts)" in text for text in heard.messages) == 1
    assert f"(process {killed[0]})" in "".join(heard.messages)


def test_a_killed_controller_loses_nothing_and_another_executor_goes_on(tmp_path, world, whole):
    """Its workers end by themselves after their step; ``resume`` waits for them."""
    out = tmp_path / "out"
    plan = planned(world, out, THERE)
    file, sets = plan.source.path, ["campaign.seeds=[1,2,3,4]", "training.save_every=1", "squeeze.enabled=false"]
    words = [word for text in sets for word in ("--set", text)]
    command = [sys.executable, "-m", "retrain", "train", file, "--out", out, *words, "--verbose"]
    command += ["--executor", "processes", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        run = next(line.split("run=")[1].split()[0] for line in process.stdout if line.startswith("step "))
        pid = writer(out, run)
        process.kill()
    assert process_start(pid) is not None
    heard = Heard()
    changed = check(read_plan(out, ["campaign.executor=inprocess"]))
    assert execute(changed, heard).exit_status == 0
    assert process_start(pid) is None
    assert any(text.startswith("waiting for process") for text in heard.messages)
    assert differing(contents(out), whole) == []


def test_one_interrupt_ends_everywhere_after_the_step(tmp_path, world, whole):
    out = tmp_path / "out"
    stopped = execute(planned(world, out, THERE), StopAfter(2))
    assert (stopped.exit_status, stopped.saved) == (130, True)
    states = [run["state"] for run in read_json(out / "manifest.json")["runs"]]
    assert "interrupted" in states
    assert "running" not in states
    assert leases(out) == []
    states = []

    def look(spec, count):  # the lock that a worker has left there says nothing
        states.append(read_status(out / "runs" / spec.run_id)["runs"][0]["state"])

    assert execute(check(read_plan(out, ["campaign.executor=inprocess"])), Heard(look)).exit_status == 0
    assert {*states} == {"running"}
    assert differing(contents(out), whole) == []


def test_what_one_process_began_workers_finish(tmp_path, world, whole):
    out = tmp_path / "out"
    assert execute(planned(world, out), StopAfter(3)).exit_status == 130
    assert execute(check(read_plan(out, THERE)), NullObserver()).exit_status == 0
    assert differing(contents(out), whole) == []


def test_a_second_interrupt_ends_at_once(tmp_path, world):
    out, pids = tmp_path / "out", []

    def twice(spec, count):
        pids.append(writer(out, spec.run_id))
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    begin = time.monotonic()
    outcome = execute(planned(world, out, [*THERE, "campaign.workers=1", "training.max_tokens=200"]), Heard(twice))
    assert (outcome.exit_status, outcome.saved) == (130, False)
    assert process_start(pids[0]) is None
    assert time.monotonic() - begin < 300


def test_a_run_that_fails_in_a_worker_fails_alone(tmp_path, world):
    out = tmp_path / "out"
    plan = planned(
        world, out, [*THERE, "campaign.seeds=[1]"], steps=1, condition='reward = {custom_function = "fragile"}'
    )
    assert execute(plan, NullObserver()).exit_status == 1
    done, failed = read_json(out / "manifest.json")["runs"]
    assert (done["state"], failed["state"]) == ("done", "failed")
    assert "reward" in failed["reason"]
    assert "this grader is broken" in (out / failed["path"] / "run.log").read_text()


def test_what_does_not_fit_into_a_worker_is_cut(tmp_path, world, monkeypatch):
    patch = """
import retrain.campaign.running.fitting as fitting, retrain.campaign.running.assemble as assemble
def check(base, lanes, specs, *rest, **named):
    if len(specs) > 2:
        raise fitting.DoesNotFit(2, f"{len(specs)} runs are too many")
def main(*fds):
    assemble.check_memory = check
    import retrain.campaign.running.worker as worker
    worker.main(*fds)
import json, sys
main(*map(int, sys.argv[1:4]))
"""
    monkeypatch.setattr(spawning, "BOOT", f"import json, sys; sys.path[:] = json.loads(sys.argv[4]); exec({patch!r})")
    out, heard = tmp_path / "out", Heard()
    plan = planned(world, out, [*THERE, "campaign.seeds=[1,2]", "campaign.workers=1"], steps=1, lanes="auto")
    assert execute(plan, heard).exit_status == 0
    manifest = read_json(out / "manifest.json")
    assert ([len(group) for group in manifest["cohorts"]], manifest["lanes"]) == ([2, 2], 2)
    assert any("4 runs are too many: they train in 2 cohorts" in text for text in heard.messages)


def test_early_stopping_decides_the_same_in_workers(tmp_path, world):
    """A difference that every seed shows (of the learning rate, so that it is surely there) is decided after six of
    eight seeds; the others are stopped, in whatever worker they are."""
    sets = ["campaign.seeds=[1,2,3,4,5,6,7,8]", "campaign.sequential=linear", "campaign.primary_metric=final:optim/lr"]
    sets += ["evaluation.problems=0", "training.eval_every=0"]
    alone = planned(world, tmp_path / "alone", sets, steps=2, condition="lr = 0.02")
    assert execute(alone, NullObserver()).exit_status == 0
    there = planned(world, tmp_path / "there", [*sets, *THERE], steps=2, condition="lr = 0.02")
    assert execute(there, NullObserver()).exit_status == 0
    mine, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("there", "alone"))
    assert mine["sequential"] == theirs["sequential"]
    (looked,) = mine["sequential"]["conditions"].values()
    assert (looked["stopped_after"], len(looked["differences"])) == (6, 6)
    states = [{run["run_id"]: run["state"] for run in manifest["runs"]} for manifest in (mine, theirs)]
    assert states[0] == states[1]
    assert [*states[0].values()] == ["done"] * 12 + ["stopped"] * 4
    first = [name for name, state in states[0].items() if state == "done"]
    found, expected = (
        {name: data for name, data in contents(tmp_path / place).items() if any(f"{run}/" in name for run in first)}
        for place in ("there", "alone")
    )
    assert differing(found, expected, runs=12) == []


GRADER = """
from pathlib import Path

def score(completion, answer):
    if (Path(__file__).parent / "broken").exists():
        raise RuntimeError("this grader is broken")
    return sum(c in "02468" for c in completion) / max(1, len(completion))
"""


def test_what_failed_is_tried_again_alike_in_workers(tmp_path, world):
    """A condition whose grader is broken at first: what fails, what is kept and what is trained again."""
    (tmp_path / "grader.py").write_text(GRADER)
    kept = []
    for name, sets in (("alone", []), ("there", THERE)):
        condition = f'reward = {{custom_module = "{tmp_path}/grader.py"}}'
        sets = ["campaign.seeds=[1,2]", *sets]
        plan = planned(world, tmp_path / name, sets, condition=condition)
        (tmp_path / "broken").touch()
        assert execute(plan, NullObserver()).exit_status == 1
        kept.append(
            [(run["state"], run["reason"], run["step"]) for run in read_json(plan.directory / "manifest.json")["runs"]]
        )
        (tmp_path / "broken").unlink()
        heard = Heard()
        assert execute(check(read_plan(plan.directory)), heard).exit_status == 1
        assert any("2 failed runs not continued; type --retry-failed" in text for text in heard.messages)
        assert heard.steps == 0
        assert execute(check(read_plan(plan.directory)), heard, retry_failed=True).exit_status == 0
        assert heard.steps == 2  # the last one of each, from its own newest checkpoint
    assert kept[0] == kept[1]
    assert [state for state, _, _ in kept[0]] == ["done", "failed"] * 2
    assert differing(contents(tmp_path / "there"), contents(tmp_path / "alone"), runs=4) == []


def test_the_first_run_of_the_plan_is_analysed_whichever_ends_first(tmp_path):
    path = configuration(tmp_path, rule="off", lanes=2, seeds=[1, 2, 3], rest='[squeeze]\nverify = "off"\n')
    plan = Plan.of(load(path), tmp_path / "out")
    player = Player(3, turns=[3, 2, 1])
    assert execute(plan, NullObserver(), executor=player).exit_status == 0
    assert player.analysed == [("squeeze", "grpo+none_s1")]


class Player:
    """An executor that puts runs on the disk instead of training them, ``slots`` at a time, and analyses nothing; a job
    ends when ``turns`` says (seeds of the jobs in their order), or when it is stopped."""

    def __init__(self, slots: int, turns=(), dies: int = 0):
        self.slots, self.turns, self.dies = slots, list(turns), dies
        self.begun: list[set[int]] = []
        self.analysed: list[tuple[str, str]] = []
        self.stopped: list[set[int]] = []
        self.under_way: dict[str, CohortJob | SqueezeJob] = {}
        self.has_gpu = lambda: False

    def submit(self, job):
        player, name = self, str(len(self.begun) + len(self.analysed))
        seeds = {run["seed"] for run in job.runs} if isinstance(job, CohortJob) else set()
        if isinstance(job, CohortJob):
            self.begun.append(seeds)
        else:
            self.analysed.append((job.place, job.run["run_id"]))
        self.under_way[name] = job

        class Handle:
            id = name

            def stop(self):
                if seeds not in player.stopped:
                    player.stopped.append(seeds)

        return Handle()

    def events(self):
        while self.under_way:
            yield Tick()
            name, job = next(iter(self.under_way.items()))
            if not isinstance(job, CohortJob):
                del self.under_way[name]
                yield JobEnded(name)
                continue
            for other, each in self.under_way.items():
                if self.turns and self.turns[0] in {run["seed"] for run in each.runs}:
                    name, job = other, each
            seeds = {run["seed"] for run in job.runs}
            yield JobStarted(name, "1 cpu", [run["run_id"] for run in job.runs])
            for run in job.runs:
                yield RunStarted(run["run_id"], 0, 1)
            del self.under_way[name]
            if self.dies:
                self.dies -= 1
                yield JobEnded(name, "died", "worker 1 was ended by SIGKILL")
                continue
            if seeds in self.stopped:
                yield JobEnded(name, "stopped")
                continue
            self.turns = self.turns[1:] if self.turns and self.turns[0] in seeds else self.turns
            for run in job.runs:
                folder = Path(job.directory) / "runs" / run["run_id"]
                value = 0.5 + 0.01 * run["seed"] + (0.1 if run["label"].startswith("rloo") else 0.0)
                append_jsonl(
                    folder / "evals.jsonl", [{"step": 1, "name": "heldout", "eval/heldout/correct_rate": value}]
                )
                row = {"step": 0, "num_tokens": 5, "correct_rate": value}
                append_jsonl(folder / "metrics.jsonl", [row])
                yield StepDone(run["run_id"], row)
                yield RunEnded(run["run_id"], "done")
            yield JobEnded(name)

    def close(self):
        pass


def test_a_look_stops_what_is_under_way_and_begins_no_more(tmp_path):
    """Decided after six of eight seeds, whatever the order in which they end."""
    plan = Plan.of(load(configuration(tmp_path, lanes=2, rest="[squeeze]\nenabled = false\n")), tmp_path / "out")
    player = Player(3, turns=[2, 1, 4, 3, 5])
    assert execute(plan, NullObserver(), executor=player).exit_status == 0
    manifest = read_json(tmp_path / "out/manifest.json")
    looked = manifest["sequential"]["conditions"]["rloo+none"]
    assert [seed for seed, _ in looked["differences"]] == [1, 2, 3, 4, 5, 6]
    assert player.begun == [{1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}]
    assert player.stopped == [{7}, {8}]
    states = {seed: {run["state"] for run in manifest["runs"] if run["seed"] == seed} for seed in range(1, 9)}
    assert {seed for seed in states if states[seed] == {"done"}} == {1, 2, 3, 4, 5, 6}
    assert states[7] == states[8] == {"stopped"}
    serial = Player(1)
    plan = Plan.of(plan.source, tmp_path / "serial")
    assert execute(plan, NullObserver(), executor=serial).exit_status == 0
    assert serial.begun == [{1}, {2}, {3}, {4}, {5}, {6}]
    theirs = read_json(tmp_path / "serial/manifest.json")["sequential"]["conditions"]["rloo+none"]
    assert theirs["looks"] == looked["looks"]


def test_runs_whose_process_dies_again_and_again_have_failed(tmp_path):
    plan = Plan.of(
        load(
            configuration(tmp_path, rule="off", lanes=4, seeds=[1, 2, 3, 4], rest="[squeeze]\nenabled = false\n"),
            [*THERE, "campaign.max_restarts=1"],
        ),
        tmp_path / "out",
    )
    player, heard = Player(2, dies=3), Heard()
    assert execute(plan, heard, executor=player).exit_status == 1
    runs = read_json(tmp_path / "out/manifest.json")["runs"]
    assert [run["state"] for run in runs].count("failed") == 4
    reason = "worker 1 was ended by SIGKILL, 2 times now"
    assert {run["reason"] for run in runs} == {None, reason}
    assert not any("worker" in run for run in runs)
    heard_again = Player(2)
    assert execute(Plan.of(plan.source, tmp_path / "out"), NullObserver(), True, executor=heard_again).exit_status == 0
    assert heard_again.begun == [{1, 2}] or heard_again.begun == [{3, 4}]
