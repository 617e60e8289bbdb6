import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.campaigns import ROOT, Heard, campaign, eventually, suspended_writer, toy_world, train

from retrain.campaign.executors.ray_connection import slots_in
from retrain.campaign.running.protocol import JobStarted, StepDone
from retrain.config import parse_dict
from retrain.errors import UsageError, WorkersLost
from retrain.files import read_json, write_json
from retrain.ownership import MARK, process_start
from tests.soak.campaigns import differences, records
from tests.system import clusters

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def disconnected():
    yield
    assert not ray.is_initialized()


@pytest.fixture
def workers(stub_workers):
    return lambda *sets, count='"auto"': stub_workers("ray", count, *sets)


def all_waiting(handles, count, heard):
    """Stop the jobs once ``count`` workers have begun; ``heard`` collects the rows of their steps."""

    def on_event(event):
        if isinstance(event, StepDone):
            heard.append(event.row)
        if len({row["pid"] for row in heard}) == count:
            for handle in handles:
                handle.stop()

    return on_event


@pytest.mark.parametrize("device", ["gpu:0", "cpu"])
def test_each_gpu_of_the_cluster_has_a_worker_or_each_cpu(out, workers, monkeypatch, device):
    monkeypatch.delenv("OMP_NUM_THREADS")
    made = workers(*(["backend.devices=cpu"] if device == "cpu" else []))
    assert (made.slots, made.has_gpu()) == (2, device != "cpu")
    handles, rows = [made.submit(clusters.job(out, name)) for name in ("wait-a", "wait-b")], []
    events = clusters.events_of(made, all_waiting(handles, 2, rows))
    address = ray.util.get_node_ip_address()
    names = {event.worker for event in clusters.of_kind(events, JobStarted)}
    assert names == {f"{number} {address} {device}" for number in (1, 2)}
    assert {(row["RETRAIN_OWN_GPU"], row["OMP_NUM_THREADS"]) for row in rows} == {
        (None if device == "cpu" else "1", "1")
    }
    assert device == "cpu" or {row["CUDA_VISIBLE_DEVICES"] for row in rows} == {"0"}
    logs = [path.name for path in (out / "workers").iterdir() if path.is_file()]
    assert sorted(logs) == ["worker_1.log", "worker_2.log"]


def test_an_actor_that_dies_takes_its_worker_along(out, workers):
    made = workers(count=1)
    made.submit(clusters.job(out, "wait"))

    def kill(event):
        if isinstance(event, StepDone):
            ray.kill(made.executor._actors[1].handle)

    events = clusters.events_of(made, kill)
    pid = clusters.of_kind(events, StepDone)[0].row["pid"]
    (end,) = clusters.ends(events).values()
    assert end.status == "died"
    assert end.reason.endswith(f"(process {pid}) was lost with its Ray actor")
    eventually(lambda: process_start(pid) is None)


def test_nodes_that_do_not_share_the_directory_are_named(out, workers):
    made = workers()
    start = made.executor.start

    def elsewhere(slots):
        start(slots)  # they know the owner, and then there is another directory of that name
        write_json(out / MARK, read_json(out / MARK) | {"owner": "b" * 32})

    made.executor.start = elsewhere
    made.submit(clusters.job(out, "a"))
    with pytest.raises(WorkersLost, match=r"worker \d gets no work: node [\d.]+ \(.*\) does not see .*/out"):
        list(made.events())


def test_no_cluster_and_no_room_are_one_line(workers, nodes, monkeypatch):
    with pytest.raises(UsageError, match=r"no node of the Ray cluster has 64 CPUs and 1 GPU.* --workers 4"):
        workers("ray.cpus=64")
    assert not ray.is_initialized()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UsageError, match=r'at [\d.]+:1 \(address "auto"\).* type: ray start --head, or --addr'):
        workers("ray.address=auto")
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    assert workers("ray.address=auto").slots == 2


SHORT = (
    "campaign.max_steps=6", "campaign.seeds=[1, 2]", "campaign.lanes=2", "training.batch_size=2",
    "training.group_size=4", "training.max_tokens=24", "training.save_every=2", "training.eval_every=3",
    "evaluation.problems=8", "squeeze.enabled=false", "backend.devices=cpu",
)  # fmt: skip


def started(out: Path, *words: str) -> subprocess.Popen:
    """Start ``retrain train`` on a shortened campaign that ships with the program."""
    sets = [word for key in SHORT for word in ("--set", key)]
    command = [sys.executable, "-m", "retrain", "train", str(ROOT / "campaigns/five_conditions.toml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # the bits of a sum depend on how many threads add
    with (out.parent / f"{out.name}.log").open("w") as log:
        command += ["--out", str(out), *sets, *words]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def test_five_conditions_lose_a_node_of_three_and_end_as_in_one_process(tmp_path):
    out, alone = tmp_path / "ray", tmp_path / "alone"
    assert started(alone, "--executor", "inprocess").wait(300) == 0
    with clusters.cluster_of(*[{"num_cpus": 1}] * 3) as nodes:
        program = started(out, "--executor", "ray", "--address", nodes.address)
        eventually(lambda: sum(map(len, clusters.rows_of(out).values())) >= 12, 200)
        found: list[tuple[int, Path]] = []
        eventually(lambda: found or found.extend(filter(None, [suspended_writer(out)])) or found)
        worker = found[0][0]
        (number,) = nodes.that_have(worker)
        os.kill(worker, signal.SIGCONT)
        nodes.remove(number)
        assert program.wait(400) == 0
        assert not psutil.pid_exists(worker)
    assert "its job begins again" in (tmp_path / "ray.log").read_text()
    assert differences(records(out, exact=False), records(alone, exact=False)) == []


KEY = "RETRAIN_TEST_FLEET_KEY"
SERVED = (
    "training.save_every=1", "squeeze.enabled=false", "training.eval_every=0", "campaign.lanes=2",
    "backend.devices=cpu", "campaign.executor=ray", "campaign.workers=2", "inference.engine=openai",
    "inference.patience_s=240", "inference.timeout_s=60", f"inference.api_key_env={KEY}",
)  # fmt: skip


@pytest.fixture(scope="module")
def large():
    """A cluster with room for workers and servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, "of all nodes")
        with clusters.cluster_of({"num_cpus": 2}, {"num_cpus": 2}) as made:
            yield made


def servers(nodes: clusters.Nodes) -> list[psutil.Process]:
    """The servers of the cluster's actors; another test's are none of them."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process] * ("minder.py" in " ".join(process.cmdline()) and bool(nodes.that_have(process.pid)))
        except psutil.Error:
            continue
    return found


def test_servers_and_workers_share_a_cluster_that_loses_a_node(out, tmp_path, large):
    """The only server is killed, then its node vanishes with whatever is on it; another comes."""
    removed = []

    def server() -> psutil.Process:  # steps that had their samples are reported while a dead one is being replaced
        eventually(lambda: servers(large))
        return servers(large)[0]

    def disturb(spec, count: int) -> None:
        if count == 3:
            killed = server()
            os.killpg(killed.pid, signal.SIGKILL)
            psutil.wait_procs([killed], timeout=60)
        if not removed and any("is started again" in line for line in heard.messages):  # its actor has said so
            removed.extend(large.that_have(server().pid))
            large.remove(removed[0])
            large.add(num_cpus=2)

    heard = Heard(disturb)
    path = campaign(tmp_path, toy_world(tmp_path), steps=30)
    sets = [*SERVED, f"ray.address={large.address}", f"inference.launch='{clusters.SERVE}'"]
    train(path, out, *sets, observer=heard)
    clusters.check_complete(out, steps=30)
    said = "\n".join(heard.messages)
    assert "the server has died (signal 9) and is started again" in said
    assert "was lost with its actor or its node, and is started elsewhere" in said
    assert sum(line.startswith("canary: base within") for line in heard.messages) >= 3
    eventually(lambda: servers(large) == [])
    assert (out / "server.log").is_file()


def test_workers_have_the_room_that_servers_leave():
    def slots(*resources, replicas=2, each=1, **ray):
        inference = {"engine": "vllm", "launch": "vllm serve", "replicas": replicas}
        campaign = {"executor": "ray", "gpus_per_cohort": each}
        config = parse_dict({"campaign": campaign, "inference": inference, "ray": ray})
        return slots_in([{"Alive": True, "Resources": each} for each in resources], config)

    large, one = {"CPU": 16.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}
    assert slots(large) == (6, True)
    assert slots(large, large, server_gpus=4) == (8, True)
    assert slots(large, server_gpus=0.5) == (7, True)
    assert slots({"CPU": 4.0}, {"CPU": 2.0}, server_cpus=2) == (2, False)
    assert slots(one, one, replicas=1, cpus=8) == (1, True)  # its CPU and its GPU are those of one node
    assert slots(one, replicas=1, server_gpus=0.5, each=0.5) == (1, True)
    with pytest.raises(UsageError, match=r"^beside 1 server of .* no room for a worker, which asks for 1 CPU and 1 G"):
        slots(one, replicas=1)
    with pytest.raises(UsageError, match=r"no room for 2 servers .* 1 CPU and 2 GPUs \(.*--workers 4"):
        slots(one, one, server_gpus=2)
