"""Fixtures that several files of the system suite share."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import retrain.campaign.executors.slurm as slurm
import retrain.campaign.running.protocol as protocol
import retrain.campaign.running.workers as waiting
from retrain.campaign.executors.local import Local
from retrain.campaign.executors.ray import ray_workers
from retrain.campaign.executors.slurm import slurm_workers
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.protocol import WorkerDevice
from retrain.campaign.running.workers import CampaignWorkers
from retrain.config import load
from retrain.config.describe import toml
from retrain.ownership import claim
from retrain.util.session import DirectoryLock
from tests.system.clusters import STUB, Nodes, SlurmStandin, cluster_of


@pytest.fixture
def standin(tmp_path_factory, monkeypatch) -> Iterator[SlurmStandin]:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    played = SlurmStandin(tmp_path_factory.mktemp("slurm"))
    for name, value in played.environment.items():
        monkeypatch.setenv(name, value)
    yield played
    played.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray")
    with cluster_of(*[{"num_cpus": 1, "num_gpus": 1}] * 2) as made:
        yield made


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def impatient_slurm(monkeypatch):
    """Make controllers ask Slurm for the states of its tasks five times a second."""
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.2)


@pytest.fixture
def stub_workers(request, tmp_path, out, monkeypatch, impatient_slurm):
    """Makes executors of workers that train nothing, for the directory ``out``."""
    out.mkdir()
    claim(out)
    monkeypatch.setattr(protocol, "PROGRAM", STUB)
    monkeypatch.setattr(waiting, "TICK_SECONDS", 0.05)
    locked: list[DirectoryLock] = []

    def plan_of(settings: list[str]) -> Plan:
        (tmp_path / "my campaign.toml").write_text("[campaign]\nseeds = [1]\nmax_steps = 1\n")
        return Plan.of(load(tmp_path / "my campaign.toml", settings), out)

    def on_slurm(count: int, keys: dict) -> CampaignWorkers:
        if not locked:
            locked.append(stack.enter_context(DirectoryLock(out, beat=0.5)))
        devices = keys.pop("devices", "cpu")
        settings = [f"slurm.{key}={toml(value)}" for key, value in keys.items()]
        settings += ["campaign.executor=slurm", f"campaign.workers={count}", f"backend.devices={devices}"]
        return slurm_workers(plan_of(settings), 2)

    def on_ray(count: int | str, sets: list[str]) -> CampaignWorkers:
        address = request.getfixturevalue("nodes").address
        settings = ["campaign.executor=ray", f"campaign.workers={count}", f"ray.address={address}", *sets]
        return ray_workers(plan_of(settings))

    with ExitStack() as stack:

        def make(executor: str, count: int | str = 2, *sets: str, slot: WorkerDevice | None = None, **keys):
            if executor == "processes":
                made = CampaignWorkers(Local([slot or WorkerDevice("cpu", 1)] * int(count), out), out)
            elif executor == "ray":
                made = on_ray(count, [*sets])
            else:
                made = on_slurm(int(count), {"cluster": "local" if executor == "slurm, local" else "slurm"} | keys)
            stack.callback(made.close)
            return made

        yield make
