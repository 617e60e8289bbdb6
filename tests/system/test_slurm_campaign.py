"""Campaigns on Slurm: the same bytes as in one process, also after deaths, preemption and a change of executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from slurm_cases import FAST
from toycampaign import StopAfter
from worker_cases import Heard, a_writer, alone, contents, differing, planned, writer

import retrain.campaign.running.slurm as slurm
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.controller import execute
from retrain.campaign.running.exchange import newest
from retrain.campaign.running.lease import LEASE
from retrain.files import read_json
from retrain.ownership import process_start
from retrain.record.observer import NullObserver

pytest.importorskip("submitit")
HERE = ["campaign.executor=slurm", "campaign.workers=2", "backend.devices=cpu"]
LOCAL = [*HERE, "slurm.cluster=local"]


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory) -> dict:
    return alone(world, tmp_path_factory.mktemp("whole") / "out", ["backend.devices=cpu"])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(slurm, "Pace", lambda: replace(FAST, patience=60.0))  # a lease is renewed every 5 s
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.5)


def test_a_killed_worker_of_a_local_job_costs_steps_and_nothing_else(tmp_path, world, whole):
    out, killed = tmp_path / "out", []

    def kill(spec, count):
        if count == 3:
            killed.append(writer(out, spec.run_id))
            os.kill(killed[0], signal.SIGKILL)

    heard = Heard(kill)
    assert execute(planned(world, out, LOCAL), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert sum("was ended by SIGKILL" in text and "(1 of 3 restarts)" in text for text in heard.messages) == 1
    host = os.uname().nodename
    assert {worker for each in heard.workers.values() for worker in each} == {f"1 {host}", f"2 {host}"}
    assert sorted(newest(out / f"workers/slurm_1/worker_{number}") for number in (1, 2)) == [1, 2]
    assert list(out.glob(f"runs/*/{LEASE}")) == []


def test_before_the_time_limit_a_worker_saves_and_slurm_starts_it_again(tmp_path, world, whole, standin):
    """SIGUSR1 to all processes of the job, as Slurm may send it."""
    out, signalled = tmp_path / "out", []

    def limit(spec, count):
        if count == 3:
            number = heard.workers[spec.run_id][-1].split()[0]
            signalled.append(f"4711_{int(number) - 1}")
            os.system(f"scancel --signal=USR1 {signalled[0]}")

    heard = Heard(limit)
    assert execute(planned(world, out, HERE), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert standin.calls("scontrol") == [["requeue", signalled[0]]]
    assert [text for text in heard.messages if "restarts" in text] == []
    assert sum("was told to make room: all is saved" in text for text in heard.messages) == 1
    assert len(standin.calls("sbatch")) == 1
    assert read_json(out / "workers/slurm_1/jobs.json") == {
        "cluster": "slurm", "jobs": {"1": "4711_0", "2": "4711_1"}, "closed": True,
    }  # fmt: skip


def test_a_preempted_worker_that_slurm_ends_goes_on_from_its_step(tmp_path, world, whole, standin):
    """SIGTERM, and once its time is over SIGKILL; then Slurm has the job wait again."""
    out, task = tmp_path / "out", []

    def preempt(spec, count):
        if count == 3:
            task.append(f"4711_{int(heard.workers[spec.run_id][-1].split()[0]) - 1}")
            os.system(f"scontrol requeue {task[0]}")

    heard = Heard(preempt)
    assert execute(planned(world, out, HERE), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert [text for text in heard.messages if "restarts" in text] == []
    assert len(standin.calls("sbatch")) == 1


def test_one_interrupt_saves_and_another_executor_goes_on(tmp_path, world, whole, standin):
    out = tmp_path / "out"
    stopped = execute(planned(world, out, HERE), StopAfter(2))
    assert (stopped.exit_status, stopped.saved) == (130, True)
    assert list(out.glob(f"runs/*/{LEASE}")) == []
    assert execute(check(read_plan(out, ["campaign.executor=inprocess"])), NullObserver()).exit_status == 0
    assert differing(contents(out), whole) == []
    again = read_plan(out, ["campaign.executor=slurm"])  # what was asked of Slurm is still known
    assert {spec.config.campaign.workers for spec in again.specs} == {2}


def test_workers_of_a_killed_controller_save_and_end(tmp_path, world, whole):
    out = tmp_path / "out"
    file = planned(world, out, LOCAL).source.path
    sets = ["campaign.seeds=[1,2,3,4]", "training.save_every=1", "squeeze.enabled=false", "backend.devices=cpu"]
    words = [word for text in [*sets, "slurm.cluster=local"] for word in ("--set", text)]
    command = [sys.executable, "-m", "retrain", "train", file, "--out", out, *words, "--plain"]
    command += ["--executor", "slurm", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        pid = a_writer(out)  # what the controller tells of its workers comes later than what they do
        process.kill()
    assert process_start(pid) is not None
    heard = Heard()
    assert execute(check(read_plan(out)), heard).exit_status == 0
    assert process_start(pid) is None
    assert differing(contents(out), whole) == []
    assert any(text.startswith("waiting for process") for text in heard.messages)
