"""Fixtures that several files of the system suite share."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import retrain.campaign.executors.ray as raycluster
import retrain.campaign.executors.slurm as slurm
import retrain.campaign.running.launching as spawning
import retrain.campaign.running.workers as waiting
from retrain.campaign.executors.local import Slot, processes
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.session import DirectoryLock
from retrain.campaign.running.workers import Workers
from retrain.config import load, parse_dict
from retrain.ownership import claim
from tests.system.clusters import FAST, STUB_BOOT, Nodes, SlurmStandin, StubHost, cluster_of


@pytest.fixture
def standin(tmp_path_factory, monkeypatch) -> Iterator[SlurmStandin]:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    played = SlurmStandin(tmp_path_factory.mktemp("slurm"), monkeypatch)
    yield played
    played.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A Ray cluster of two nodes."""
    pytest.importorskip("ray")
    with cluster_of(*[{"num_cpus": 1, "num_gpus": 1}] * 2) as made:
        yield made


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def stub_workers(request, tmp_path, out, monkeypatch):
    """Makes executors of workers that train nothing, for the directory ``out``."""
    out.mkdir()
    monkeypatch.setattr(spawning, "BOOT", STUB_BOOT)
    monkeypatch.setattr(raycluster, "Host", StubHost)
    monkeypatch.setattr(waiting, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.2)
    locked: list[DirectoryLock] = []

    def on_slurm(count: int, keys: dict) -> Workers:
        if not locked:
            locked.append(stack.enter_context(DirectoryLock(out, beat=0.5)))
        devices = keys.pop("devices", "cpu")
        sections = {"campaign": {"executor": "slurm", "workers": count, "seeds": [1]}, "backend": {"devices": devices}}
        cluster = slurm.Cluster(parse_dict(sections | {"slurm": keys}), out, "my campaign", 2, FAST)
        return Workers(count, devices != "cpu", cluster.start, cluster.finish)

    def on_ray(count: int, sets: list[str]) -> Workers:
        address = request.getfixturevalue("nodes").address
        settings = ["campaign.executor=ray", f"campaign.workers={count}", f"ray.address={address}", *sets]
        (tmp_path / "some.toml").write_text("[campaign]\nseeds = [1]\nmax_steps = 1\n")
        plan = Plan.of(load(tmp_path / "some.toml", settings), out)
        claim(plan.directory)
        return raycluster.ray_workers(plan)

    with ExitStack() as stack:

        def make(executor: str, count: int | str = 2, *sets: str, slot: Slot | None = None, **keys) -> Workers:
            if executor == "processes":
                made = processes([slot or Slot("cpu", 1)] * int(count), out)
            elif executor == "ray":
                made = on_ray(count, [*sets])
            else:
                made = on_slurm(int(count), {"cluster": "local" if executor == "slurm, local" else "slurm"} | keys)
            stack.callback(made.close)
            return made

        yield make
