"""Workers train the same bytes as one process, also after deaths, stops and a change of executor."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers.campaigns import (
    Heard,
    StopAfter,
    alone,
    contents,
    continue_training,
    differing,
    eventually,
    planned,
    suspended_writer,
    who_writes,
    writer,
)

from retrain.campaign.controller import execute
from retrain.cli.run_status import read_status
from retrain.files import ASIDE, read_json
from retrain.ownership import process_start
from retrain.records.observer import NullObserver
from retrain.util.session import LEASE
from tests.system.clusters import ranks_of

pytestmark = pytest.mark.timeout(600)
CPU = "backend.devices=cpu"
PROCESSES = ["campaign.executor=processes", "campaign.workers=2"]
SLURM = ["campaign.executor=slurm", "campaign.workers=2", CPU]
HERE = "campaign.executor=inprocess"
RANKS = ['backend.shard="dp"', "backend.ranks=2", CPU]


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory) -> dict:
    """What one process leaves behind."""
    out = tmp_path_factory.mktemp("whole") / "out"
    files = alone(world, out, [CPU])
    (world / "whole.json").write_bytes((out / "manifest.json").read_bytes())
    return files


@pytest.fixture(params=["processes", "slurm", "ray"])
def there(request) -> list[str]:
    """The settings of an executor with two workers."""
    if request.param == "processes":
        return [*PROCESSES, CPU]
    if request.param == "slurm":
        request.getfixturevalue("impatient_slurm")
        return [*SLURM, "slurm.cluster=local"]
    return ["campaign.executor=ray", f"ray.address={request.getfixturevalue('nodes').address}", CPU]


def leases(out: Path) -> list[Path]:
    return list(out.glob(f"runs/*/{LEASE}"))


def states(out: Path) -> list[str]:
    return [run["state"] for run in read_json(out / "manifest.json")["runs"]]


def test_two_workers_leave_what_one_process_leaves(tmp_path, world, whole):
    out, shown = tmp_path / "out", []

    def look(spec, count):
        if count == 1:
            shown.extend(run for run in read_status(out)["runs"] if run["run_id"] == spec.run_id)
            shown.extend(read_status(out / "runs" / spec.run_id)["runs"])

    heard = Heard(look)
    assert execute(planned(world, out, [*PROCESSES, CPU]), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert {worker for each in heard.workers.values() for worker in each} == {"1 cpu", "2 cpu"}
    assert len(heard.workers) == 8
    assert [run["worker"] for run in shown] == [heard.workers[run["run_id"]][0] for run in shown]
    assert [run["state"] for run in shown] == ["running"] * 2
    assert {run["worker"] for run in read_status(out)["runs"]} == {None}
    memory, memory_alone = (read_json(path)["memory"] for path in (out / "manifest.json", world / "whole.json"))
    shares = {run: memory[run]["decode_bytes"] / memory_alone[run]["decode_bytes"] for run in memory_alone}
    assert {run: round(share, 2) for run, share in shares.items()} == dict.fromkeys(heard.workers, 0.5)


def test_a_killed_worker_costs_steps_and_nothing_else(tmp_path, world, whole, there, request):
    """In a cluster of Ray, a node vanishes too."""
    out, killed, lost = tmp_path / "out", [], []

    def disturb(spec, count):
        if count >= 3 and not killed and (found := suspended_writer(out)):
            killed.append(found[0])
            half = found[1] / f"checkpoints/.step_000001.{killed[0]}{ASIDE}/adapter.json"
            half.parent.mkdir(parents=True, exist_ok=True)  # it may be writing just that one
            half.write_text("half of i")
            os.kill(killed[0], signal.SIGKILL)
        if count >= 8 and "ray" in there[0] and not lost and (busy := who_writes(out)) is not None:
            nodes = request.getfixturevalue("nodes")
            lost.append(busy)
            os.kill(busy, signal.SIGSTOP)  # however fast it is
            nodes.remove(nodes.that_have(busy)[0])
            os.kill(busy, signal.SIGCONT)
            nodes.add(num_cpus=1, num_gpus=1)

    heard = Heard(disturb)
    assert execute(planned(world, out, there), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    deaths = [text for text in heard.messages if "its job begins again" in text]
    named = "was ended by SIGKILL" if "slurm" in there[0] else f"(process {killed[0]}) was ended by SIGKILL"
    assert sum(named in text and "(1 of 3" in text for text in deaths) == 1
    assert len(deaths) == 1 or lost
    assert {worker.split()[0] for each in heard.workers.values() for worker in each} >= {"1", "2"}
    assert leases(out) == []


def test_a_killed_controller_and_an_interrupted_one_lose_nothing_and_another_executor_goes_on(
    tmp_path, world, whole, there
):
    """The workers of a controller that is gone go on, and ``resume`` finds them by their leases."""
    out = tmp_path / "out"
    file = planned(world, out, there).source.path
    sets = ["campaign.seeds=[1,2,3,4]", "training.save_every=1", "squeeze.enabled=false", *there]
    words = [word for text in sets for word in ("--set", text)]
    command = [sys.executable, "-m", "retrain", "train", file, "--out", out, *words, "--plain"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        pid = eventually(lambda: who_writes(out))  # a worker trains before the controller reports it
        process.kill()
    lived = []

    def interrupt(spec, count):
        lived.append(process_start(pid) is not None)
        if count == 4:
            os.kill(os.getpid(), signal.SIGINT)

    heard = Heard(interrupt)
    assert continue_training(out, *there, observer=heard, status=130).saved
    assert lived[0]
    assert not any("begins again" in text or text.startswith("waiting for process") for text in heard.messages)
    eventually(lambda: process_start(pid) is None)
    assert "interrupted" in states(out)
    assert "running" not in states(out)
    assert leases(out) == []
    shown = []

    def look(spec, count):  # the lock that a worker has left there says nothing
        shown.append(read_status(out / "runs" / spec.run_id)["runs"][0]["state"])

    continue_training(out, HERE, observer=Heard(look))
    assert {*shown} == {"running"}
    assert differing(contents(out), whole) == []


def test_what_one_process_began_workers_finish(tmp_path, world, whole, there):
    out = tmp_path / "out"
    assert execute(planned(world, out, [CPU]), StopAfter(3)).exit_status == 130
    continue_training(out, *there)
    assert differing(contents(out), whole) == []


def test_a_second_interrupt_ends_at_once(tmp_path, world):
    out, pids = tmp_path / "out", []

    def twice(spec, count):
        pids.append(writer(out, spec.run_id))
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    begin = time.monotonic()
    outcome = execute(planned(world, out, [*PROCESSES, "campaign.workers=1", "training.max_tokens=200"]), Heard(twice))
    assert (outcome.exit_status, outcome.saved) == (130, False)
    assert process_start(pids[0]) is None
    assert time.monotonic() - begin < 300


def test_the_interim_analysis_decides_the_same_in_workers(tmp_path, world):
    """A difference that every seed shows (of the learning rate, so that it is surely there) is decided after seven
    of eight seeds; the others are stopped. One worker, as with lanes = 2 a second one may have trained them before."""
    sets = ["campaign.seeds=[1,2,3,4,5,6,7,8]", "campaign.primary_metric=final:optim/lr"]
    sets += ["evaluation.problems=0", "training.eval_every=0"]
    for name, executor in (("here", []), ("there", [*PROCESSES, "campaign.workers=1"])):
        plan = planned(world, tmp_path / name, [*sets, *executor], steps=2, condition="lr = 0.02")
        assert execute(plan, NullObserver()).exit_status == 0
    here, there = (read_json(tmp_path / name / "manifest.json") for name in ("here", "there"))
    assert there["interim"] == here["interim"]
    assert (there["interim"]["seeds"], len(there["interim"]["decided"])) == ([1, 2, 3, 4, 5, 6, 7], 1)
    assert states(tmp_path / "there") == states(tmp_path / "here") == ["done"] * 14 + ["stopped"] * 2
    done = [run["run_id"] for run in there["runs"] if run["state"] == "done"]
    found, expected = (
        {name: data for name, data in contents(tmp_path / place).items() if any(f"{run}/" in name for run in done)}
        for place in ("there", "here")
    )
    assert differing(found, expected, runs=14) == []


@pytest.mark.parametrize("command", ["scancel --signal=USR1", "scontrol requeue"])
def test_a_worker_that_slurm_preempts_goes_on_from_its_step(tmp_path, world, whole, standin, impatient_slurm, command):
    """SIGUSR1 before the time limit; or SIGTERM and SIGKILL, after which the job waits again."""
    out, tasks = tmp_path / "out", []

    def preempt(spec, count):
        if count == 3:
            tasks.append(f"4711_{heard.workers[spec.run_id][-1].split()[0]}")
            os.system(f"{command} {tasks[0]}")

    heard = Heard(preempt)
    assert execute(planned(world, out, SLURM), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert ["requeue", tasks[0]] in standin.calls("scontrol")
    assert [text for text in heard.messages if "restarts" in text] == []
    if "USR1" in command:
        assert sum("was preempted: it has saved" in text for text in heard.messages) == 1
    assert len(standin.calls("sbatch")) == 1
    asked = {"jobs": {"1": "4711_1", "2": "4711_2"}, "closed": True}
    assert read_json(out / "workers/slurm_jobs.json") == asked


@pytest.fixture(scope="module")
def whole_of_ranks(world, tmp_path_factory) -> dict:
    """What one process and the rank that it has started leave behind."""
    return alone(world, tmp_path_factory.mktemp("ranks") / "out", RANKS)


def test_a_worker_or_a_rank_that_dies_costs_steps_and_nothing_else(tmp_path, world, whole_of_ranks):
    out, killed, seen = tmp_path / "out", [], {}

    def disturb(spec, count):
        due = len(killed) < (1 if count < 8 else 2)
        if not due or (found := suspended_writer(out)) is None:
            return
        worker, _ = found
        seen[worker] = ranks_of(worker)
        killed.append(worker if killed else seen[worker][0])
        os.kill(killed[-1], signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)

    heard = Heard(disturb)
    assert execute(planned(world, out, [*PROCESSES, *RANKS]), heard).exit_status == 0
    assert differing(contents(out), whole_of_ranks) == []
    deaths = [text for text in heard.messages if "its job begins again" in text]
    assert len(deaths) == 2
    assert sum(f"ended: rank 1 (process {killed[0]}) was ended by SIGKILL" in text for text in deaths) == 1
    assert sum(f"(process {killed[1]}) was ended by SIGKILL" in text for text in deaths) == 1
    assert {len(ranks) for ranks in seen.values()} == {1}
    eventually(lambda: not any(psutil.pid_exists(rank) for ranks in seen.values() for rank in ranks))
    assert {read_json(path)["built"]["ranks"] for path in out.glob("runs/*/config.json")} == {2}


def test_a_campaign_goes_from_ranks_of_slurm_jobs_to_those_of_one_process(
    tmp_path, world, whole_of_ranks, impatient_slurm
):
    out = tmp_path / "out"
    assert execute(planned(world, out, [*SLURM, "slurm.cluster=local", *RANKS]), StopAfter(3)).exit_status == 130
    continue_training(out, HERE)
    assert differing(contents(out), whole_of_ranks) == []


def test_actors_of_ray_start_ranks(tmp_path, world, whole_of_ranks, nodes):
    out = tmp_path / "out"
    sets = ["campaign.executor=ray", f"ray.address={nodes.address}", "campaign.workers=2", *RANKS]
    nodes.add(num_cpus=2)
    heard = Heard(lambda spec, count: os.kill(ranks_of(writer(out, spec.run_id))[0], 9) if count == 3 else None)
    assert execute(planned(world, out, sets), heard).exit_status == 0
    nodes.remove(len(nodes.members) - 1)
    assert differing(contents(out), whole_of_ranks) == []
    assert sum("rank 1 (process" in text for text in heard.messages) == 1
    assert leases(out) == []
