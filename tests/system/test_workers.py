import re
from pathlib import Path

import pytest
import torch
from helpers.campaigns import eventually, run_cli
from helpers.models import campaign_head

from retrain.campaign.controller import executor_of
from retrain.campaign.executors.table import slots_of
from retrain.campaign.planning.manifest import fingerprint, read_plan, write_plan
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.protocol import JobStarted, StepDone, WorkerDevice
from retrain.config import load, parse_dict
from retrain.device import gpus_of, resolve_device
from retrain.errors import StorageError, UsageError
from retrain.ownership import process_start
from tests.system.clusters import ends, events_of, job, of_kind, pids

EXECUTORS = ("processes", "slurm, local", "ray")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=EXECUTORS)
def executor(request):
    if request.param == "ray":
        pytest.importorskip("ray")
    return request.param


def test_jobs_go_to_as_many_workers_as_there_are_and_those_are_kept(out, stub_workers, executor):
    workers = stub_workers(executor)
    handles = [workers.submit(job(out, *names)) for names in (("wait-a", "b"), ("wait-c",), ("d",), ("e",))]
    heard = []

    def stop_both(event):
        heard.append(event)
        if {"wait-a", "wait-c"} <= pids(heard).keys():
            for handle in handles[:2]:
                handle.stop()

    events = events_of(workers, stop_both)
    started = {event.job: event for event in of_kind(events, JobStarted)}
    assert [started[handle.id].runs for handle in handles] == [["wait-a", "b"], ["wait-c"], ["d"], ["e"]]
    assert {event.worker.split()[0] for event in started.values()} == {"1", "2"}
    assert [ends(events)[handle.id].status for handle in handles] == ["stopped", "stopped", "done", "done"]
    about_d = [type(event).__name__ for event in events if getattr(event, "run_id", "") == "d"]
    assert about_d == ["RunStarted", *["StepDone"] * 3, "RunEnded"]
    first = {*pids(events).values()}
    assert len(first) == 2
    workers.submit(job(out, "f"))  # and in a later round
    assert pids(events_of(workers))["f"] in first
    workers.close()
    eventually(lambda: {process_start(pid) for pid in first} == {None})


@pytest.mark.parametrize(("run", "says"), [
    ("once-die", "was ended by SIGKILL, as when memory runs out"),
    ("once-exit", "ended with exit status 7"),
    ("once-lost", "CUDA error: an illegal memory access was encountered"),
])  # fmt: skip
def test_a_worker_that_dies_ends_its_job_and_is_replaced(out, stub_workers, executor, run, says):
    workers = stub_workers(executor)
    first, second = workers.submit(job(out, run)), workers.submit(job(out, "b"))
    events = events_of(workers)
    end = ends(events)[first.id]
    assert (end.status, ends(events)[second.id].status) == ("died", "done")
    assert says in end.reason
    assert f"(process {pids(events)[run]})" in end.reason or "slurm" in executor
    steps = [event.row["step"] for event in of_kind(events, StepDone) if event.run_id == run]
    assert steps == [0, 1]  # all that it said
    if executor == "processes" and run == "once-exit":
        log = f"{out}/workers/worker_{end.reason.split()[1]}.log"
        assert end.reason.endswith(f"what it printed is in {log}")
        assert "something is wrong" in Path(log).read_text()
    workers.submit(job(out, run))
    workers.submit(job(out, "d"))
    again = events_of(workers)
    assert {event.status for event in ends(again).values()} == {"done"}
    assert pids(events)[run] not in pids(again).values()


def test_a_full_disk_ends_the_campaign_once_the_others_have_stopped(out, stub_workers, executor):
    workers = stub_workers(executor)
    for name in ("wait", "full", "never"):
        workers.submit(job(out, name))
    heard = []
    with pytest.raises(StorageError, match="out cannot be written: no space left") as caught:
        heard.extend(workers.events())
    assert caught.value.advice.startswith("Make room")
    assert {end.status for end in ends(heard).values()} == {"stopped"}
    assert "never" not in pids(heard)


def test_a_worker_knows_its_gpu_and_its_share_of_the_cores(out, stub_workers, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    workers = stub_workers("processes", 1, slot=WorkerDevice("gpu:1", 3, "5", 0.5))
    workers.submit(job(out, "a"))
    events = events_of(workers)
    row = of_kind(events, StepDone)[0].row
    assert (row["CUDA_VISIBLE_DEVICES"], row["OMP_NUM_THREADS"], row["RETRAIN_OWN_GPU"]) == ("5", "3", "1")
    assert row["RETRAIN_MEMORY_SHARE"] == "0.5"
    assert of_kind(events, JobStarted)[0].worker == "1 gpu:1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what the user has set stays
    monkeypatch.setenv("RETRAIN_MEMORY_SHARE", "0.1")  # that of the process that started this one does not
    environment = WorkerDevice("cpu", 8).environment
    assert (environment["OMP_NUM_THREADS"], environment["RETRAIN_MEMORY_SHARE"]) == ("2", "1")
    assert "RETRAIN_OWN_GPU" not in environment


@pytest.fixture
def slots(monkeypatch, gpus):
    """The slots of a campaign on a machine with ``count`` GPUs and 8 cores."""
    monkeypatch.setattr("retrain.campaign.executors.table.usable_cpus", lambda: 8)

    def slots(count: int, devices, workers="auto", ranks=None, **campaign):
        gpus.count = count
        campaign |= {"executor": "processes", "workers": workers, "seeds": [1], "max_steps": 1}
        backend = {"devices": devices} | ({"shard": "fsdp2", "ranks": ranks} if ranks else {})
        found = slots_of(parse_dict({"campaign": campaign, "backend": backend}))
        return [(slot.device, slot.visible, slot.threads, slot.memory) for slot in found]

    return slots


def test_devices_become_slots(slots, monkeypatch):
    everything = [(f"gpu:{index}", str(index), 2, 1.0) for index in range(4)]
    assert slots(4, "all") == slots(4, "auto") == slots(4, "gpu:0-3") == everything
    assert slots(4, ["gpu:3", "gpu:0"]) == [("gpu:3", "3", 4, 1.0), ("gpu:0", "0", 4, 1.0)]
    assert slots(4, "all", 2) == [("gpu:0", "0", 4, 1.0), ("gpu:1", "1", 4, 1.0)]
    assert slots(4, "cpu") == [("cpu", "", 8, 1.0)]
    assert [slot[:3] for slot in slots(0, "auto", 3)] == [("cpu", "", 2)] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-77,6,7")  # numbers are those of what is visible
    assert slots(4, "gpu:1-2") == [("gpu:1", "GPU-77", 4, 1.0), ("gpu:2", "6", 4, 1.0)]


def test_cohorts_have_parts_of_a_gpu_or_several(slots):
    two = [("gpu:0", "0", 4, 1.0), ("gpu:1", "1", 4, 1.0)]
    assert slots(2, "all", gpus_per_cohort=1) == slots(2, "all", gpus_per_cohort=1.0) == two
    assert slots(2, "all", gpus_per_cohort=0.5) == [("gpu:0", "0", 2, 0.5), ("gpu:1", "1", 2, 0.5)] * 2
    assert slots(2, "all", gpus_per_cohort=0.6) == [(*slot[:3], 0.6) for slot in two]  # a second would not fit
    assert slots(2, "all", 3, gpus_per_cohort=0.5)[2] == ("gpu:0", "0", 2, 0.5)
    pairs = [("gpu:0,1", "0,1", 4, 1.0), ("gpu:2,3", "2,3", 4, 1.0)]
    assert slots(5, "all", ranks=2) == slots(5, "all", ranks="auto", gpus_per_cohort=2) == pairs
    assert slots(5, ["gpu:4", "gpu:1", "gpu:0"], ranks=3) == [("gpu:4,1,0", "4,1,0", 8, 1.0)]
    assert slots(5, "cpu", 2, ranks=3) == [("cpu", "", 4, 0.5)] * 2


@pytest.mark.parametrize(("count", "asked", "says"), [
    (2, {"devices": "gpu:0-3"}, "devices has gpu:2: this machine shows 2 GPUs"),
    (2, {"devices": "all", "workers": 3}, r"workers = 3, and .* means 2 GPUs: .*type --workers 2"),
    (0, {"devices": "all"}, 'devices = "all": this machine shows no GPU'),
    (2, {"devices": "all", "workers": 5, "gpus_per_cohort": 0.5}, r"a GPU has 2 workers .*; type --workers 4"),
    (0, {"devices": "auto", "gpus_per_cohort": 0.5}, r"gpus_per_cohort = 0.5 has no effect: .* no GPU"),
    (5, {"devices": "all", "workers": 3, "ranks": "auto", "gpus_per_cohort": 2},
     r"workers = 3, and .* means 5 GPUs: a worker has 2 of them; type --workers 2"),
    (5, {"devices": "all", "ranks": "auto", "gpus_per_cohort": 8}, r"each worker has 8 GPUs .* means 5 GPUs; type"),
])  # fmt: skip
def test_devices_that_are_not_there(slots, count, asked, says):
    with pytest.raises(UsageError, match=says):
        slots(count, **asked)


def test_a_process_with_gpus_of_its_own_uses_those(slots, monkeypatch):
    slots(1, "cpu")
    with pytest.raises(UsageError):
        resolve_device("gpu:3")
    monkeypatch.setenv("RETRAIN_OWN_GPU", "1")
    assert resolve_device("gpu:3") == resolve_device("auto") == torch.device("cuda:0")
    assert resolve_device("cpu") == torch.device("cpu")
    slots(2, "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
    campaign = {"executor": "processes", "gpus_per_cohort": 2}
    config = parse_dict({"campaign": campaign, "backend": {"devices": "gpu:0-7", "shard": "dp"}})
    assert gpus_of(config.backend.devices, config.backend.named_gpus) == [("gpu:0", "6"), ("gpu:1", "3")]


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    (tmp_path / "single.toml").write_text('[training]\nmax_steps = 1\n[backend]\ndevices = "cpu"\n')
    head = campaign_head(("grpo", "none"), ("rloo", "none"), seeds=[1, 2, 3, 4], max_steps=1)
    (tmp_path / "camp.toml").write_text(head + '[backend]\ndevices = "cpu"\n')
    return tmp_path / "single.toml", tmp_path / "camp.toml"


def test_options_are_settings_of_a_campaign(files):
    refused = run_cli("train", files[0], "--executor", "processes")
    assert (refused.exit_code, "is a single run" in refused.stderr) == (2, True)
    wrong = run_cli("train", files[1], "--executor", "kubernetes")
    assert (wrong.exit_code, 'one of "inprocess", "processes"' in wrong.stderr) == (2, True)
    one = run_cli("train", files[1], "--dry-run").output
    shared = run_cli("train", files[1], "--dry-run", "--executor", "processes", "--workers", "2").output
    assert re.search(r"cohorts +1 cohort of \d+ runs that step together, for 1 worker", one)
    assert re.search(r"cohorts +2 cohorts of \d+ runs that step together, for 2 workers", shared)


def test_a_resume_may_change_who_trains(files, tmp_path):
    _, camp = files
    (tmp_path / "out").mkdir()
    plan = Plan.of(load(camp, ["campaign.executor=processes", "campaign.workers=2"]), tmp_path / "out")
    executor = executor_of(plan)
    assert (executor.slots, executor.has_gpu()) == (2, False)
    write_plan(plan)
    digests = [fingerprint(spec) for spec in read_plan(tmp_path / "out").specs]
    sets = ["campaign.executor=inprocess", "campaign.max_restarts=9", "backend.devices=gpu:0"]
    changed = read_plan(tmp_path / "out", sets)
    assert executor_of(changed).slots == 1
    assert [fingerprint(spec) for spec in changed.specs] == digests
