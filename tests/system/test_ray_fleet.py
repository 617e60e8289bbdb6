"""Servers in a Ray cluster of this machine, beside the workers that sample from them: they are placed, lost with their
node, and start elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from fleet_cases import Heard, whole
from ray_cases import Nodes, cluster_of
from toycampaign import campaign, toy_world

from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.controller import launch
from retrain.campaign.running.raycluster import ray_workers, slots_in
from retrain.config import load, parse_dict
from retrain.errors import UsageError
from retrain.ownership import claim

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)
KEY = "RETRAIN_TEST_FLEET_KEY"
SERVE = f"{sys.executable} -m retrain serve {{model}} --port {{port}} --api-key-env {KEY}"
SETS = (
    "training.save_every=1", "squeeze.enabled=false", "training.eval_every=0", "campaign.lanes=2",
    "backend.devices=cpu", "campaign.executor=ray", "campaign.workers=2", "inference.engine=openai",
    "inference.patience_s=240", "inference.timeout_s=60",
    f"inference.api_key_env={KEY}",
)  # fmt: skip


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, "of all nodes")
        with cluster_of({"num_cpus": 2}, {"num_cpus": 2}) as made:
            yield made


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return toy_world(tmp_path_factory.mktemp("toy"))


def servers(nodes: Nodes) -> list[psutil.Process]:
    """The servers of the cluster's actors; another test's are none of them."""
    return [each for each in psutil.process_iter() if _serves(each, nodes)]


def _serves(process: psutil.Process, nodes: Nodes) -> bool:
    try:
        return "minder.py" in " ".join(process.cmdline()) and nodes.has(process.pid)
    except psutil.Error:
        return False


def a_server(nodes: Nodes) -> psutil.Process:
    """One that runs: steps that had their samples are reported while a dead one is still being replaced."""
    deadline = time.monotonic() + 60
    while not (found := servers(nodes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found[0]


def test_servers_and_workers_share_a_cluster_that_loses_a_node(tmp_path, toy, nodes):
    """The only server is killed, then its node vanishes with whatever is on it; another comes."""
    removed = []

    def disturb(count: int) -> None:
        if count == 3:
            server = a_server(nodes)
            os.killpg(server.pid, signal.SIGKILL)
            psutil.wait_procs([server], timeout=60)
        if not removed and any("is started again" in line for line in heard.lines):  # its actor has said so
            removed.append(nodes.of(a_server(nodes).pid))
            nodes.remove(removed[0])
            nodes.add(num_cpus=2)

    heard, out = Heard(disturb), tmp_path / "out"
    sets = [*SETS, f"ray.address={nodes.address}", f"inference.launch='{SERVE}'"]
    assert launch(load(campaign(tmp_path, toy, steps=30), sets), out, heard).exit_status == 0
    whole(out, steps=30)
    said = "\n".join(heard.lines)
    assert "the server has died (signal 9) and is started again" in said
    assert "was lost with its actor or its node, and is started elsewhere" in said
    assert sum(line.startswith("canary: base within") for line in heard.lines) >= 3
    deadline = time.monotonic() + 60
    while servers(nodes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert servers(nodes) == []
    assert (out / "server.log").is_file()


def test_a_command_that_does_not_exist_ends_the_campaign(tmp_path, toy, nodes):
    sets = [*SETS, f"ray.address={nodes.address}", "inference.launch=no-such-program", "inference.patience_s=60"]
    with pytest.raises(UsageError, match=r"^\[inference\] launch: there is no program 'no-such-program'; give its"):
        launch(load(campaign(tmp_path, toy, steps=2), sets), tmp_path / "out", Heard())


def test_no_room_for_a_server_is_said(tmp_path, toy, nodes, monkeypatch):
    monkeypatch.setattr("retrain.campaign.running.rayfleet.ROOM_SECONDS", 1.0)
    sets = [
        *SETS,
        f"ray.address={nodes.address}",
        f"inference.launch='{SERVE}'",
        "ray.server_cpus=64",
        "inference.replicas=2",
    ]
    plan = Plan.of(load(campaign(tmp_path, toy, steps=2), sets), tmp_path / "out")
    claim(plan.directory)
    workers, said = ray_workers(plan), []
    try:
        assert workers.fleet is not None
        fleet = workers.fleet(lambda text, level: said.append(text))
        deadline = time.monotonic() + 60
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert sorted(said)[0] == "server 1 waits for room in the Ray cluster: it asks for 64 CPUs"
        assert (fleet.urls, fleet.gave_up) == ([], "")
        fleet.close()
    finally:
        workers.close()


def test_workers_have_the_room_that_servers_leave():
    def slots(*resources, **ray):
        inference = {"engine": "vllm", "launch": "vllm serve", "replicas": ray.pop("replicas", 2)}
        campaign = {"executor": "ray", "gpus_per_cohort": ray.pop("each", 1)}
        config = parse_dict({"campaign": campaign, "inference": inference, "ray": ray})
        return slots_in([{"Alive": True, "Resources": each} for each in resources], config)

    large = {"CPU": 16.0, "GPU": 8.0}
    assert slots(large) == (6, True)
    assert slots(large, large, server_gpus=4) == (8, True)
    assert slots(large, server_gpus=0.5) == (7, True)
    assert slots({"CPU": 4.0}) == (2, False)
    assert slots({"CPU": 4.0}, {"CPU": 2.0}, server_cpus=2) == (2, False)
    one = {"CPU": 8.0, "GPU": 1.0}
    assert slots(one, one, replicas=1, cpus=8) == (1, True)  # its CPU and its GPU are those of one node
    assert slots(one, replicas=1, server_gpus=0.5, each=0.5) == (1, True)
    with pytest.raises(
        UsageError, match=r"^beside 1 server of .* no room for a worker, which asks for 1 CPU and 1 GPU \("
    ):
        slots(one, replicas=1)
    with pytest.raises(UsageError, match=r"no room for 2 servers .* 1 CPU and 2 GPUs \(.*--workers 4"):
        slots(one, one, server_gpus=2)
