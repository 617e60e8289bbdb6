"""The executor of worker processes, with workers that train nothing: deaths, faults, stops, devices."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from toymodels import campaign_head, config_errors
from typer.testing import CliRunner

import retrain.campaign.running.spawning as boot
import retrain.campaign.running.workers as waiting
from retrain.campaign.planning.manifest import fingerprint, read_plan, write_plan
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running import team
from retrain.campaign.running.executors import executor_of, gpus_of, slots_of
from retrain.campaign.running.processes import Slot, processes
from retrain.campaign.running.protocol import CohortJob, JobEnded, JobStarted, RunEnded, StepDone, Tick
from retrain.campaign.running.workers import Workers
from retrain.cli import app
from retrain.config import load, parse_dict
from retrain.errors import ConfigError, StorageError, UsageError
from retrain.ownership import process_start
from retrain.policy.device import resolve_device

STUB = Path(__file__).parents[1] / "stubworker.py"
ONE_CORE = Slot("cpu", 1)


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    monkeypatch.setattr(boot, "BOOT", f"import runpy; runpy.run_path({str(STUB)!r}, run_name='__main__')")
    monkeypatch.setattr(waiting, "TICK_SECONDS", 0.02)


@pytest.fixture
def workers(tmp_path):
    made: list[Workers] = []

    def make(count: int = 2, slot: Slot = ONE_CORE) -> Workers:
        made.append(processes([slot] * count, tmp_path))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def job(tmp_path: Path, *runs: str) -> CohortJob:
    return CohortJob(str(tmp_path), ".", [{"run_id": run} for run in runs], {})


def told(events) -> dict[str, list]:
    """Events without ticks, by the run or job that they are about."""
    by: dict[str, list] = {}
    for event in events:
        if not isinstance(event, Tick):
            by.setdefault(getattr(event, "run_id", None) or getattr(event, "job", ""), []).append(event)
    return by


def test_jobs_go_to_as_many_workers_as_there_are_and_those_are_kept(tmp_path, workers):
    executor = workers(2)
    handles = [executor.submit(job(tmp_path, *names)) for names in (("a", "b"), ("c",), ("d",), ("e",))]
    events = told(executor.events())
    started = {event.job: event for event in (each[0] for each in events.values()) if isinstance(event, JobStarted)}
    assert [started[handle.id].runs for handle in handles] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert {event.worker for event in started.values()} == {"1 cpu", "2 cpu"}
    assert [events[handle.id][-1] for handle in handles] == [JobEnded(handle.id) for handle in handles]
    assert [type(event).__name__ for event in events["b"]] == ["RunStarted", *["StepDone"] * 3, "RunEnded"]
    pids = {event.row["pid"] for name in "abcde" for event in events[name] if isinstance(event, StepDone)}
    assert len(pids) == 2
    executor.submit(job(tmp_path, "f"))  # and in a later round
    later = told(executor.events())["f"]
    assert later[1].row["pid"] in pids
    assert sorted(path.name for path in (tmp_path / "workers").iterdir()) == ["worker_1.log", "worker_2.log"]


def test_a_job_submitted_while_somebody_listens_is_done(tmp_path, workers):
    executor = workers(1)
    executor.submit(job(tmp_path, "a"))
    ended = []
    for event in executor.events():
        if isinstance(event, RunEnded) and event.run_id == "a":
            executor.submit(job(tmp_path, "b"))
        if isinstance(event, JobEnded):
            ended.append(event.job)
    assert ended == ["1", "2"]


def test_a_worker_that_is_killed_ends_its_job_and_the_next_has_another(tmp_path, workers):
    executor = workers(2)
    first, second = executor.submit(job(tmp_path, "die")), executor.submit(job(tmp_path, "b"))
    events = told(executor.events())
    end = events[first.id][-1]
    assert (end.status, events[second.id][-1].status) == ("died", "done")
    pid = events["die"][1].row["pid"]
    assert end.reason == f"worker 1 cpu (process {pid}) was ended by SIGKILL, as when memory runs out"
    assert [event.row["step"] for event in events["die"] if isinstance(event, StepDone)] == [0, 1]  # all that it said
    executor.submit(job(tmp_path, "c"))
    executor.submit(job(tmp_path, "d"))
    again = told(executor.events())
    assert {again[name][-1].status for name in "cd"} == {"done"}
    assert pid not in {again[name][1].row["pid"] for name in "cd"}


def test_a_worker_that_exits_says_where_it_printed(tmp_path, workers):
    executor = workers(1)
    handle = executor.submit(job(tmp_path, "exit"))
    end = told(executor.events())[handle.id][-1]
    assert end.status == "died"
    assert "ended with exit status 7" in end.reason
    assert end.reason.endswith(f"what it printed is in {tmp_path}/workers/worker_1.log")
    assert "something is wrong" in (tmp_path / "workers/worker_1.log").read_text()


def test_a_lost_device_costs_the_worker_and_not_the_campaign(tmp_path, workers):
    executor = workers(1)
    handle = executor.submit(job(tmp_path, "once-lost"))
    end = told(executor.events())[handle.id][-1]
    assert end.status == "died"
    assert "illegal memory access" in end.reason
    again = executor.submit(job(tmp_path, "once-lost"))
    assert told(executor.events())[again.id][-1].status == "done"


def test_a_full_disk_ends_the_campaign_once_the_others_have_stopped(tmp_path, workers):
    executor = workers(2)
    executor.submit(job(tmp_path, "wait"))
    executor.submit(job(tmp_path, "full"))
    executor.submit(job(tmp_path, "never"))
    heard = []
    with pytest.raises(StorageError, match="out cannot be written: no space left") as caught:
        heard.extend(executor.events())
    assert caught.value.advice.startswith("Make room")
    assert [event.status for event in heard if isinstance(event, JobEnded)] == ["stopped"]
    assert "never" not in told(heard)


def test_a_stop_reaches_a_job_in_the_middle_and_one_that_waits(tmp_path, workers):
    executor = workers(1)
    handles = [executor.submit(job(tmp_path, name)) for name in ("wait-a", "wait-b")]
    ends = []
    for event in executor.events():
        if isinstance(event, StepDone):
            for handle in handles:
                handle.stop()
                handle.stop()
        if isinstance(event, JobEnded):
            ends.append(event.status)
    assert ends == ["stopped", "stopped"]


def test_what_is_given_up_is_killed(tmp_path, workers):
    executor = workers(1)
    executor.submit(job(tmp_path, "wait"))
    events = executor.events()
    pid = next(event.row["pid"] for event in events if isinstance(event, StepDone))
    events.close()
    assert process_start(pid) is None


def test_an_idle_worker_that_is_killed_is_replaced(tmp_path, workers):
    executor = workers(1)
    executor.submit(job(tmp_path, "a"))
    pid = told(executor.events())["a"][1].row["pid"]
    os.kill(pid, signal.SIGKILL)
    while process_start(pid) is not None:
        time.sleep(0.01)
    handle = executor.submit(job(tmp_path, "b"))
    assert told(executor.events())[handle.id][-1].status in ("died", "done")  # heard of it before or after


def test_a_worker_knows_its_gpu_and_its_share_of_the_cores(tmp_path, workers, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    executor = workers(1, Slot("gpu:1", 3, "5", 0.5))
    executor.submit(job(tmp_path, "a"))
    events = told(executor.events())
    row = events["a"][1].row
    assert (row["CUDA_VISIBLE_DEVICES"], row["OMP_NUM_THREADS"], row["RETRAIN_OWN_GPU"]) == ("5", "3", "1")
    assert row["RETRAIN_MEMORY_SHARE"] == "0.5"
    assert events["1"][0].worker == "1 gpu:1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what the user has set stays
    assert Slot("cpu", 8).environment["OMP_NUM_THREADS"] == "2"
    assert "RETRAIN_OWN_GPU" not in Slot("cpu", 8).environment
    monkeypatch.setenv("RETRAIN_MEMORY_SHARE", "0.1")  # of who started this, and no matter of theirs
    assert Slot("cpu", 8).environment["RETRAIN_MEMORY_SHARE"] == "1"


def config(devices, workers="auto", executor="processes", **more):
    campaign = {"executor": executor, "seeds": [1], "max_steps": 1, **more}
    campaign |= {} if workers == "auto" else {"workers": workers}
    return parse_dict({"campaign": campaign, "backend": {"devices": devices}})


def visible(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_devices_become_slots(monkeypatch):
    visible(monkeypatch, 4)
    monkeypatch.setattr("retrain.campaign.running.executors.cores", lambda: 8)

    def slots(devices, workers="auto"):
        return [(slot.device, slot.visible, slot.threads) for slot in slots_of(config(devices, workers))]

    everything = [(f"gpu:{index}", str(index), 2) for index in range(4)]
    assert slots("all") == slots("auto") == slots("gpu:0-3") == everything
    assert slots("gpu:1-2") == [("gpu:1", "1", 4), ("gpu:2", "2", 4)]
    assert slots(["gpu:3", "gpu:0"]) == [("gpu:3", "3", 4), ("gpu:0", "0", 4)]
    assert slots("all", 2) == [("gpu:0", "0", 4), ("gpu:1", "1", 4)]
    assert slots("gpu:2") == [("gpu:2", "2", 8)]
    assert slots("cpu") == [("cpu", "", 8)]
    assert slots("cpu", 3) == [("cpu", "", 2)] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-77,6,7")  # numbers are those of what is visible
    assert slots("gpu:1-2") == [("gpu:1", "GPU-77", 4), ("gpu:2", "6", 4)]


def test_devices_that_are_not_there(monkeypatch):
    visible(monkeypatch, 2)
    with pytest.raises(UsageError, match="devices has gpu:2: this machine shows 2 GPUs"):
        slots_of(config("gpu:0-3"))
    with pytest.raises(UsageError, match=r"workers = 3, and .* means 2 GPUs: .*type --workers 2"):
        slots_of(config("all", 3))
    visible(monkeypatch, 0)
    with pytest.raises(UsageError, match='devices = "all": this machine shows no GPU'):
        slots_of(config("all"))
    assert [slot.device for slot in slots_of(config("auto", 2))] == ["cpu", "cpu"]


def test_several_cohorts_on_a_gpu_have_their_part_of_it_each(monkeypatch):
    visible(monkeypatch, 2)
    monkeypatch.setattr("retrain.campaign.running.executors.cores", lambda: 8)

    def slots(share, workers="auto"):
        found = slots_of(config("all", workers, gpus_per_cohort=share))
        return [(slot.device, slot.visible, slot.threads, slot.memory) for slot in found]

    two = [("gpu:0", "0", 4, 1.0), ("gpu:1", "1", 4, 1.0)]
    assert slots(1) == slots(1.0) == two
    assert slots(0.5) == [("gpu:0", "0", 2, 0.5), ("gpu:1", "1", 2, 0.5)] * 2
    assert slots(0.3) == [("gpu:0", "0", 1, 0.3), ("gpu:1", "1", 1, 0.3)] * 3
    assert slots(0.6) == [(*slot[:3], 0.6) for slot in two]  # a second one would not fit beside it
    assert slots(0.1)[18:] == [("gpu:0", "0", 1, 0.1), ("gpu:1", "1", 1, 0.1)]
    assert slots(0.5, 3) == [("gpu:0", "0", 2, 0.5), ("gpu:1", "1", 2, 0.5), ("gpu:0", "0", 2, 0.5)]
    with pytest.raises(UsageError, match=r"a GPU has 2 workers with gpus_per_cohort = 0.5; type --workers 4"):
        slots(0.5, 5)
    visible(monkeypatch, 0)
    with pytest.raises(UsageError, match=r"gpus_per_cohort = 0.5 has no effect: this machine shows no GPU"):
        slots_of(config("auto", gpus_per_cohort=0.5))


def test_ranks_of_a_worker_have_a_gpu_each(monkeypatch):
    visible(monkeypatch, 5)
    monkeypatch.setattr("retrain.campaign.running.executors.cores", lambda: 8)

    def slots(devices, workers="auto", ranks="auto", **keys):
        backend = {"devices": devices, "shard": "fsdp2", "ranks": ranks}
        wanted = parse_dict({"campaign": {"executor": "processes", "workers": workers, **keys}, "backend": backend})
        return [(slot.device, slot.visible, slot.threads, slot.memory) for slot in slots_of(wanted)]

    two = [("gpu:0,1", "0,1", 4, 1.0), ("gpu:2,3", "2,3", 4, 1.0)]
    assert slots("all", gpus_per_cohort=2) == slots("all", ranks=2) == slots("all", ranks=2, gpus_per_cohort=2) == two
    assert slots("all", 1, gpus_per_cohort=2) == [("gpu:0,1", "0,1", 8, 1.0)]
    assert slots(["gpu:4", "gpu:1", "gpu:0"], ranks=3) == [("gpu:4,1,0", "4,1,0", 8, 1.0)]
    with pytest.raises(UsageError, match=r"workers = 3, and .* means 5 GPUs: a worker has 2 of them; type --workers 2"):
        slots("all", 3, gpus_per_cohort=2)
    with pytest.raises(UsageError, match=r"each worker has 8 GPUs .* means 5 GPUs; type --set campaign.gpus_per_coho"):
        slots("all", gpus_per_cohort=8)
    assert slots("cpu", 2, ranks=3) == [("cpu", "", 4, 0.5)] * 2
    visible(monkeypatch, 0)
    with pytest.raises(UsageError, match=r"gpus_per_cohort = 2 has no effect: this machine shows no GPU"):
        slots("auto", gpus_per_cohort=2)


def test_a_process_with_gpus_of_its_own_gives_each_rank_one_of_them(monkeypatch):
    visible(monkeypatch, 2)
    monkeypatch.setenv("RETRAIN_OWN_GPU", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
    wanted = parse_dict(
        {"campaign": {"executor": "processes", "gpus_per_cohort": 2}, "backend": {"devices": "gpu:0-7", "shard": "dp"}}
    )
    assert gpus_of(wanted) == [("gpu:0", "6"), ("gpu:1", "3")]
    started = []

    def start(words, **options):
        started.append(options["env"])
        raise BlockingIOError

    monkeypatch.setattr(team.subprocess, "Popen", start)
    with pytest.raises(BlockingIOError):
        team.Team(wanted).ranks()
    assert [(row.get("RETRAIN_OWN_GPU"), row["CUDA_VISIBLE_DEVICES"]) for row in started] == [(None, "6,3")]


def test_a_process_with_a_gpu_of_its_own_uses_that_one(monkeypatch):
    visible(monkeypatch, 1)
    with pytest.raises(UsageError):
        resolve_device("gpu:3")
    monkeypatch.setenv("RETRAIN_OWN_GPU", "1")
    assert resolve_device("gpu:3") == resolve_device("auto") == torch.device("cuda:0")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"backend": {"devices": "all"}}, 'is "all", and one process trains on one device: devices = "auto"'),
        ({"campaign": {}, "backend": {"devices": "gpu:0-3"}}, 'or executor = "processes" in [campaign]'),
        ({"backend": {"devices": "gpu:3-1"}}, '"gpu:1-3"'),
        ({"backend": {"devices": ["gpu:1", "gpu:1"]}}, "has gpu:1 twice"),
        ({"backend": {"devices": ["cpu"]}}, "GPUs such as"),
        ({"campaign": {"gpus_per_cohort": 0.5}}, 'campaign.gpus_per_cohort  has no effect with executor = "inprocess"'),
        (
            {"campaign": {"executor": "processes", "gpus_per_cohort": 0.5}, "backend": {"devices": "cpu"}},
            'campaign.gpus_per_cohort  has no effect with devices = "cpu"',
        ),
        (
            {"campaign": {"executor": "processes", "gpus_per_cohort": 2}},
            'gpus_per_cohort  is 2, and with shard = "none" a cohort trains on one GPU: [backend] shard = "dp"',
        ),
        (
            {"campaign": {"executor": "processes", "gpus_per_cohort": 1.5}},
            "is 1.5: a cohort has a part of one GPU, or whole GPUs: gpus_per_cohort = 2",
        ),
        (
            {"campaign": {"executor": "processes", "gpus_per_cohort": 0.5}, "backend": {"shard": "dp"}},
            'each worker of executor = "processes" has one device: there is nothing to divide: [campaign] gpus_per',
        ),
        (
            {"campaign": {"executor": "ray", "gpus_per_cohort": 4}, "backend": {"shard": "dp", "ranks": 2}},
            "backend.ranks  is 2, and gpus_per_cohort = 4: each rank of a worker has one GPU: gpus_per_cohort = 2",
        ),
        (
            {"campaign": {"executor": "slurm", "workers": 2, "gpus_per_cohort": 0.5}},
            "campaign.gpus_per_cohort  is 0.5, and a job of Slurm's has whole GPUs: gpus_per_cohort = 1",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(data, says):
    assert says in config_errors(data)


def test_workers_need_their_executor(tmp_path):
    path = tmp_path / "some.toml"
    head = campaign_head(("grpo", "none"), ("rloo", "none"), seeds=[1], max_steps=1, workers=2)
    path.write_text(head)
    with pytest.raises(ConfigError, match=r"campaign.workers  has no effect.*or executor = \"processes\""):
        load(path)
    path.write_text(head.replace("workers", 'executor = "processes"\nworkers'))
    assert load(path).config.campaign.workers == 2


def test_a_plan_says_who_trains_it(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text(campaign_head(("grpo", "none"), seeds=[1], max_steps=1) + '[backend]\ndevices = "cpu"\n')
    assert executor_of(Plan.of(load(path))).slots == 1
    executor = executor_of(Plan.of(load(path, ["campaign.executor=processes", "campaign.workers=3"])))
    assert (executor.slots, executor.has_gpu()) == (3, False)


def single_and_campaign(tmp_path) -> tuple[Path, Path]:
    (tmp_path / "single.toml").write_text('[training]\nmax_steps = 1\n[backend]\ndevices = "cpu"\n')
    head = campaign_head(("grpo", "none"), ("rloo", "none"), seeds=[1, 2, 3, 4], max_steps=1)
    (tmp_path / "camp.toml").write_text(head + '[backend]\ndevices = "cpu"\n')
    return tmp_path / "single.toml", tmp_path / "camp.toml"


def test_options_are_settings_of_a_campaign(tmp_path):
    single, camp = single_and_campaign(tmp_path)
    refused = CliRunner().invoke(app, ["train", str(single), "--executor", "processes"])
    assert (refused.exit_code, "is a single run" in refused.stderr) == (2, True)
    wrong = CliRunner().invoke(app, ["train", str(camp), "--executor", "kubernetes"])
    assert (wrong.exit_code, 'one of "inprocess", "processes"' in wrong.stderr) == (2, True)
    alone = CliRunner().invoke(app, ["train", str(camp), "--dry-run"]).output
    shared = (
        CliRunner().invoke(app, ["train", str(camp), "--dry-run", "--executor", "processes", "--workers", "2"]).output
    )
    assert re.search(r"cohorts +1 cohort of \d+ runs that step together, for 1 worker", alone)
    assert re.search(r"cohorts +2 cohorts of \d+ runs that step together, for 2 workers", shared)


def test_a_resume_may_change_who_trains_and_not_what(tmp_path):
    single, camp = single_and_campaign(tmp_path)
    (tmp_path / "out").mkdir()
    write_plan(Plan.of(load(camp, ["campaign.executor=processes", "campaign.workers=2"]), tmp_path / "out"))
    same = read_plan(tmp_path / "out")
    digests = [fingerprint(spec) for spec in same.specs]
    sets = ["campaign.executor=inprocess", "campaign.max_restarts=9", "backend.devices=gpu:0"]
    changed = read_plan(tmp_path / "out", sets)
    assert executor_of(changed).slots == 1
    assert [fingerprint(spec) for spec in changed.specs] == digests
    with pytest.raises(UsageError, match="says which runs there are"):
        read_plan(tmp_path / "out", ["campaign.seeds=[1]"])
    (tmp_path / "one").mkdir()
    write_plan(Plan.of(load(single), tmp_path / "one"))
    refused = CliRunner().invoke(app, ["resume", str(tmp_path / "one"), "--workers", "2"])
    assert (refused.exit_code, "campaign.workers is for campaigns" in refused.stderr) == (2, True)
