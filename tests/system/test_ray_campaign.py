"""Workers in a Ray cluster of this machine: where they are placed, deaths of processes, actors, nodes and controllers,
and campaigns that end with the same bytes as in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from ray_cases import StubHost, cluster_of
from toycampaign import StopAfter
from toymodels import campaign_head
from worker_cases import Heard, alone, contents, differing, planned, who_writes, writer

import retrain.campaign.running.raycluster as raycluster
import retrain.campaign.running.workers as waiting
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.controller import execute
from retrain.campaign.running.protocol import CohortJob, JobEnded, JobStarted, Message, StepDone, Tick
from retrain.campaign.running.raycluster import ray_workers
from retrain.campaign.running.workers import Workers
from retrain.config import load
from retrain.errors import StorageError, UsageError
from retrain.files import read_json, write_json
from retrain.ownership import MARK, claim, process_start
from retrain.record.observer import NullObserver

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)
NODE = {"num_cpus": 1, "num_gpus": 1}
CPU = "backend.devices=cpu"


@pytest.fixture(scope="module")
def nodes():
    with cluster_of(NODE, NODE) as made:
        yield made


@pytest.fixture
def executor(tmp_path, nodes, monkeypatch):
    """Makes executors of stub workers."""
    monkeypatch.setattr(raycluster, "Host", StubHost)
    monkeypatch.setattr(waiting, "TICK_SECONDS", 0.05)
    file = tmp_path / "some.toml"
    file.write_text(campaign_head(("grpo", "none"), seeds=[1], max_steps=1))
    with ExitStack() as stack:

        def make(*sets: str) -> Workers:
            settings = ["campaign.executor=ray", f"ray.address={nodes.address}", *sets]
            plan = Plan.of(load(file, settings), tmp_path / "out")
            claim(plan.directory)
            workers = ray_workers(plan)
            stack.callback(workers.close)
            return workers

        yield make
    assert not ray.is_initialized()


def job(tmp_path: Path, *runs: str) -> CohortJob:
    return CohortJob(str(tmp_path / "out"), str(tmp_path), [{"run_id": run} for run in runs], {})


def ends(events) -> dict[str, JobEnded]:
    return {event.job: event for event in events if isinstance(event, JobEnded)}


def of_kind(events, kind) -> list:
    return [event for event in events if isinstance(event, kind)]


def test_each_gpu_of_the_cluster_has_a_worker(tmp_path, executor):
    workers = executor()
    assert (workers.slots, workers.has_gpu()) == (2, True)
    handles = [workers.submit(job(tmp_path, *names)) for names in (("wait-a", "b"), ("wait-c",), ("d",))]
    events = []
    for event in workers.events():
        events.append(event)
        if len({event.run_id for event in of_kind(events, StepDone)}) == 2:  # both have begun
            for handle in handles[:2]:
                handle.stop()
    assert [ends(events)[handle.id].status for handle in handles] == ["stopped", "stopped", "done"]
    address = ray.util.get_node_ip_address()
    started = of_kind(events, JobStarted)
    assert {event.worker for event in started} == {f"1 {address} gpu:0", f"2 {address} gpu:0"}
    assert [event.runs for event in sorted(started, key=lambda event: event.job)] == [
        ["wait-a", "b"], ["wait-c"], ["d"]
    ]  # fmt: skip
    rows = [event.row for event in of_kind(events, StepDone)]
    assert {(row["CUDA_VISIBLE_DEVICES"], row["RETRAIN_OWN_GPU"], row["OMP_NUM_THREADS"]) for row in rows} == {
        ("0", "1", "1")
    }
    assert len({row["pid"] for row in rows}) == 2  # the third job went to one that was there
    assert sorted(path.name for path in (tmp_path / "out/workers").iterdir()) == ["worker_1.log", "worker_2.log"]
    workers.close()
    assert {process_start(row["pid"]) for row in rows} == {None}


def test_without_gpus_wanted_workers_have_cpus(tmp_path, executor, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    workers = executor(CPU)
    assert (workers.slots, workers.has_gpu()) == (2, False)
    workers.submit(job(tmp_path, "a"))
    events = list(workers.events())
    assert of_kind(events, JobStarted)[0].worker.endswith(" cpu")
    row = of_kind(events, StepDone)[0].row
    assert (row["RETRAIN_OWN_GPU"], row["OMP_NUM_THREADS"]) == (None, "1")


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("die", "(process {pid}) was ended by SIGKILL, as when memory runs out"),
        ("exit", "(process {pid}) ended with exit status 7; what it printed is in {log}"),
        ("once-lost", "(process {pid}) ended: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_worker_that_dies_is_told_and_replaced(tmp_path, executor, run, says):
    workers = executor("campaign.workers=1")
    first = workers.submit(job(tmp_path, run))
    events = list(workers.events())
    pid = of_kind(events, StepDone)[0].row["pid"]
    end = ends(events)[first.id]
    name = of_kind(events, JobStarted)[0].worker
    assert end.status == "died"
    assert end.reason == f"worker {name} " + says.format(pid=pid, log=tmp_path / "out/workers/worker_1.log")
    assert [event.row["step"] for event in of_kind(events, StepDone)] == [0, 1]  # all that it said
    second = workers.submit(job(tmp_path, "b"))
    again = list(workers.events())
    assert ends(again)[second.id].status == "done"
    assert of_kind(again, StepDone)[0].row["pid"] != pid


def test_an_actor_that_dies_takes_its_worker_along(tmp_path, executor):
    workers = executor("campaign.workers=1")
    handle = workers.submit(job(tmp_path, "wait"))
    events = []
    for event in workers.events():
        events.append(event)
        if isinstance(event, StepDone):
            ray.kill(workers.start.__self__.links[0]._actor)
    pid = of_kind(events, StepDone)[0].row["pid"]
    assert ends(events)[handle.id].status == "died"
    assert ends(events)[handle.id].reason.endswith(f"(process {pid}) was lost with its Ray actor")
    until(lambda: process_start(pid) is None)


def until(done) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_fault_of_all_ends_the_campaign(tmp_path, executor):
    workers = executor()
    workers.submit(job(tmp_path, "wait"))
    workers.submit(job(tmp_path, "full"))
    heard = []
    with pytest.raises(StorageError, match="no space left"):
        heard.extend(workers.events())
    assert [event.status for event in of_kind(heard, JobEnded)] == ["stopped"]


def test_who_waits_for_room_is_told_once_and_needs_none_where_others_are_free(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(raycluster, "ROOM_SECONDS", 0.5)
    workers = executor("campaign.workers=5")
    handles = [workers.submit(job(tmp_path, "a-wait" if n == 0 else f"b{n}")) for n in range(5)]
    events, told, pids = [], [], set()
    for event in workers.events():
        events.append(event)
        told += [event.text] if isinstance(event, Message) else []
        pids |= {event.row["pid"]} if isinstance(event, StepDone) else set()
        if told and len(ends(events)) == 4:  # all others were done by the worker that had room
            handles[0].stop()
    assert {end.status for end in ends(events).values()} == {"done", "stopped"}
    assert len(ends(events)) == 5
    assert len(pids) == 2
    assert len(told) == 1
    assert "waits for room in the Ray cluster: it asks for 1 GPU and 1 CPU, and of what the cluster has" in told[0]
    assert told[0].endswith("are free: 0 of 2 GPUs, 0 of 2 CPUs")


def test_what_waits_for_room_can_be_stopped(tmp_path, executor, monkeypatch):
    workers = executor("campaign.workers=1", "ray.cpus=64")
    handle = workers.submit(job(tmp_path, "a"))
    events = []
    for event in workers.events():
        events.append(event)
        if isinstance(event, Tick):
            handle.stop()
    assert ends(events)[handle.id].status == "stopped"


def test_what_is_given_up_is_killed(tmp_path, executor):
    workers = executor("campaign.workers=2", "ray.cpus=1")
    workers.submit(job(tmp_path, "wait"))
    events = workers.events()
    pid = next(event.row["pid"] for event in events if isinstance(event, StepDone))
    events.close()
    assert process_start(pid) is None


def test_nodes_that_do_not_share_the_directory_are_named(tmp_path, executor, monkeypatch):
    workers = executor()
    mark = tmp_path / "out" / MARK
    start = workers.start

    def elsewhere(slots):
        links = list(start(slots))  # they know the owner, and then there is another directory of that name
        write_json(mark, read_json(mark) | {"owner": "b" * 32})
        return links

    workers.start = elsewhere
    workers.submit(job(tmp_path, "a"))
    with pytest.raises(UsageError, match=r"node [\d.]+ \(.*\) does not see .*/out: a campaign on a Ray cluster needs"):
        list(workers.events())
    assert not (tmp_path / "out/workers").exists()


def test_a_node_that_vanishes_costs_its_worker(tmp_path, executor, nodes):
    workers = executor()
    first, second = (workers.submit(job(tmp_path, name)) for name in ("wait-a", "wait-b"))
    events, removed = [], False
    for event in workers.events():
        events.append(event)
        running = {event.run_id for event in of_kind(events, StepDone)}
        if len(running) == 2 and not removed:
            removed = True
            nodes.remove(1)
        if any(end.status == "died" for end in ends(events).values()):
            first.stop()
            second.stop()
    assert sorted(end.status for end in ends(events).values()) == ["died", "stopped"]
    (died,) = (end for end in ends(events).values() if end.status == "died")
    assert "was lost with its" in died.reason
    nodes.add(**NODE)
    third = [workers.submit(job(tmp_path, name)) for name in "cd"]
    assert {ends(list(workers.events()))[handle.id].status for handle in third[:1]} == {"done"}


def test_workers_have_a_part_of_a_gpu_or_several(tmp_path, executor, nodes):
    nodes.add(num_cpus=2, num_gpus=2)
    for sets, seen in (
        (["campaign.gpus_per_cohort=0.5", "campaign.workers=4"], {("0", "0.5"), ("1", "0.5")}),
        (["campaign.gpus_per_cohort=2", 'backend.shard="dp"', "campaign.workers=1"], {("0,1", "1")}),
    ):
        workers = executor(*sets)
        handles = [workers.submit(job(tmp_path, f"wait-{number}")) for number in range(workers.slots)]
        rows = []
        for event in workers.events():
            if isinstance(event, StepDone):
                rows.append((event.row["CUDA_VISIBLE_DEVICES"], event.row["RETRAIN_MEMORY_SHARE"]))
            if len(rows) == workers.slots:
                for handle in handles:
                    handle.stop()
        assert set(rows) <= seen | {("0", "0.5")}
        assert len(rows) == workers.slots
        workers.close()
    nodes.remove(len(nodes.members) - 1)


def test_no_cluster_and_no_room_are_one_line(tmp_path, executor, nodes, monkeypatch):
    with pytest.raises(UsageError, match=r"no node of the Ray cluster has 64 CPUs and 1 GPU.* --workers 4"):
        executor("ray.cpus=64")
    assert not ray.is_initialized()
    with pytest.raises(UsageError, match=r"no Ray cluster answers at [\d.]+:1 .* type: ray start --head, or --addr"):
        executor("ray.address=127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UsageError, match=r'at [\d.]+:1 \(address "auto"\)'):
        executor("ray.address=auto")
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    assert executor("ray.address=auto").slots >= 2  # a node that is gone counts for a while


def there(nodes, *sets: str) -> list[str]:
    return ["campaign.executor=ray", f"ray.address={nodes.address}", CPU, *sets]


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory) -> dict:
    return alone(world, tmp_path_factory.mktemp("whole") / "out", ["backend.devices=cpu"])


def test_a_campaign_that_loses_a_worker_and_a_node_leaves_what_one_process_leaves(tmp_path, world, whole, nodes):
    out, killed, lost = tmp_path / "out", [], []

    def disturb(spec, count):
        if count == 3:
            killed.append(writer(out, spec.run_id))
            os.kill(killed[0], signal.SIGKILL)
        if count >= 8 and not lost and (busy := who_writes(out)) is not None:
            lost.append(busy)
            os.kill(busy, signal.SIGSTOP)  # however fast it is
            nodes.remove(nodes.of(busy))
            os.kill(busy, signal.SIGCONT)
            nodes.add(**NODE)

    heard = Heard(disturb)
    assert execute(planned(world, out, there(nodes)), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    deaths = [text for text in heard.messages if "its job begins again" in text]
    assert sum(f"(process {killed[0]}) was ended by SIGKILL" in text for text in deaths) == 1
    assert len(deaths) >= 2
    trained_by = {worker.split()[0] for each in heard.workers.values() for worker in each}
    assert trained_by >= {"1", "2"}  # the new node's may be a third
    assert list(out.glob("runs/*/.lease")) == []


def test_a_killed_controller_loses_nothing_and_another_executor_goes_on(tmp_path, world, whole, nodes):
    """Its actors end with it, and their processes by themselves; ``resume`` waits for them."""
    out = tmp_path / "out"
    plan = planned(world, out, there(nodes))
    file, sets = plan.source.path, ["campaign.seeds=[1,2,3,4]", "training.save_every=1", "squeeze.enabled=false"]
    words = [word for text in [*sets, CPU] for word in ("--set", text)]
    command = [sys.executable, "-m", "retrain", "train", file, "--out", out, *words, "--verbose"]
    command += ["--executor", "ray", "--address", nodes.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        run = next(line.split("run=")[1].split()[0] for line in process.stdout if line.startswith("step "))
        pid = writer(out, run)
        process.kill()
    half = execute(check(read_plan(out, there(nodes))), StopAfter(4))  # which waits for them, and is interrupted
    assert (half.exit_status, half.saved) == (130, True)
    assert process_start(pid) is None
    assert execute(check(read_plan(out, ["campaign.executor=inprocess"])), NullObserver()).exit_status == 0
    assert differing(contents(out), whole) == []


def test_what_one_process_began_a_cluster_finishes(tmp_path, world, whole, nodes):
    out = tmp_path / "out"
    assert execute(planned(world, out, [CPU]), StopAfter(3)).exit_status == 130
    assert execute(check(read_plan(out, there(nodes))), NullObserver()).exit_status == 0
    assert differing(contents(out), whole) == []
