"""Workers whose cohorts several ranks train: the same bytes as one process with as many ranks, also after deaths."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from ray_cases import cluster_of
from worker_cases import Heard, alone, contents, differing, planned, writer

from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.controller import execute
from retrain.files import read_json
from retrain.record.observer import NullObserver

CPU = "backend.devices=cpu"
RANKS = ['backend.shard="dp"', "backend.ranks=2", CPU]
TWO = ["campaign.workers=2", *RANKS]


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory) -> dict:
    """What one process and the rank that it has started leave."""
    return alone(world, tmp_path_factory.mktemp("whole") / "out", RANKS)


def ranks_of(worker: int) -> list[int]:
    """The processes that a worker has started as its ranks."""
    return [child.pid for child in psutil.Process(worker).children() if "follow_started" in " ".join(child.cmdline())]


def test_the_ranks_of_two_workers_leave_what_those_of_one_process_leave(tmp_path, world, whole):
    out, seen = tmp_path / "out", {}

    def look(spec, count):
        if count > 2:
            return
        worker = writer(out, spec.run_id)
        seen[worker] = ranks_of(worker)

    heard = Heard(look)
    assert execute(planned(world, out, ["campaign.executor=processes", *TWO]), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert {worker for each in heard.workers.values() for worker in each} == {"1 cpu", "2 cpu"}
    assert {len(ranks) for ranks in seen.values()} == {1}
    assert not any(psutil.pid_exists(rank) for ranks in seen.values() for rank in ranks)
    assert {read_json(path)["built"]["ranks"] for path in out.glob("runs/*/config.json")} == {2}


def test_a_worker_or_a_rank_that_dies_costs_steps_and_nothing_else(tmp_path, world, whole):
    out, killed, orphans = tmp_path / "out", [], []

    def disturb(spec, count):
        if count == 2:
            killed.extend(ranks_of(writer(out, spec.run_id)))
            os.kill(killed[0], signal.SIGKILL)
        if count == 8:
            killed.append(writer(out, spec.run_id))
            orphans.extend(ranks_of(killed[-1]))
            os.kill(killed[-1], signal.SIGKILL)

    heard = Heard(disturb)
    assert execute(planned(world, out, ["campaign.executor=processes", *TWO]), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    deaths = [text for text in heard.messages if "its job begins again" in text]
    assert len(deaths) == 2
    assert sum(f"ended: rank 1 (process {killed[0]}) was ended by SIGKILL" in text for text in deaths) == 1
    assert sum(f"(process {killed[1]}) was ended by SIGKILL" in text for text in deaths) == 1
    assert len(orphans) == 1
    assert not psutil.pid_exists(orphans[0])


def test_a_campaign_goes_from_ranks_of_workers_to_those_of_one_process(tmp_path, world, whole):
    out = tmp_path / "out"
    stop = Heard(lambda spec, count: os.kill(os.getpid(), signal.SIGINT) if count == 3 else None)
    assert execute(planned(world, out, ["campaign.executor=processes", *TWO]), stop).exit_status == 130
    assert execute(check(read_plan(out, ["campaign.executor=inprocess"])), NullObserver()).exit_status == 0
    assert differing(contents(out), whole) == []


def test_slurm_starts_ranks(tmp_path, world, whole):
    out = tmp_path / "out"
    local = ["campaign.executor=slurm", "slurm.cluster=local", *TWO]
    assert execute(planned(world, out, local), NullObserver()).exit_status == 0
    assert differing(contents(out), whole) == []


@pytest.mark.timeout(600)
def test_ray_starts_ranks(tmp_path, world, whole):
    pytest.importorskip("ray")
    out = tmp_path / "out"
    with cluster_of({"num_cpus": 2}) as nodes:
        there = ["campaign.executor=ray", f"ray.address={nodes.address}", *TWO]
        heard = Heard(lambda spec, count: os.kill(ranks_of(writer(out, spec.run_id))[0], 9) if count == 3 else None)
        assert execute(planned(world, out, there), heard).exit_status == 0
    assert differing(contents(out), whole) == []
    assert sum("rank 1 (process" in text for text in heard.messages) == 1
    assert not list(Path(out).glob("runs/*/.lease"))
