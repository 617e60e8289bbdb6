"""Workers as jobs of Slurm, with workers that train nothing: submitit's local jobs, and a stand-in for Slurm itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cases import FAST, STUB_BOOT, eventually

import retrain.campaign.running.slurm as slurm
import retrain.campaign.running.spawning as boot
import retrain.campaign.running.workers as waiting
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.exchange import Tail, answers_of, append, commands_of, newest
from retrain.campaign.running.executors import executor_of
from retrain.campaign.running.lease import LEASE, DirectoryLock
from retrain.campaign.running.protocol import CohortJob, JobEnded, JobStarted, Message, StepDone, Tick
from retrain.campaign.running.slurm import Cluster
from retrain.campaign.running.slurm_task import Keeper, Task
from retrain.campaign.running.workers import Workers
from retrain.config import parse_dict
from retrain.errors import MissingExtra, UsageError, WorkersLost
from retrain.files import read_json, write_json
from retrain.ownership import process_start

pytest.importorskip("submitit")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(boot, "BOOT", STUB_BOOT)
    monkeypatch.setattr(waiting, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.2)


@pytest.fixture
def locked(tmp_path):
    with DirectoryLock(tmp_path, beat=0.5) as lock:
        yield lock


@pytest.fixture
def workers(tmp_path, locked):
    made: list[Workers] = []

    def make(count: int = 2, cluster: str = "slurm", devices: str = "cpu", **keys) -> Workers:
        campaign = {"executor": "slurm", "workers": count, "seeds": [1]}
        config = parse_dict(
            {"campaign": campaign, "backend": {"devices": devices}, "slurm": {"cluster": cluster} | keys}
        )
        cluster_of = Cluster(config, tmp_path, "my campaign", 2, FAST)
        made.append(Workers(count, devices != "cpu", cluster_of.start, cluster_of.finish))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def cluster_of(executor: Workers) -> Cluster:
    return executor.start.__self__  # type: ignore[attr-defined]


def job(tmp_path: Path, *runs: str) -> CohortJob:
    return CohortJob(str(tmp_path), ".", [{"run_id": run} for run in runs], {})


def heard(executor: Workers, on=lambda event: None) -> list:
    """All events but ticks."""
    events = []
    for event in executor.events():
        on(event)
        if not isinstance(event, Tick):
            events.append(event)
    return events


def ends(events) -> dict[str, JobEnded]:
    return {event.job: event for event in events if isinstance(event, JobEnded)}


def pids(events) -> dict[str, int]:
    return {event.run_id: event.row["pid"] for event in events if isinstance(event, StepDone)}


def texts(events) -> list[str]:
    return [event.text for event in events if isinstance(event, Message)]


# The files between a controller and a worker.


def test_lines_are_read_once_and_whole(tmp_path):
    path = tmp_path / "answers_1.jsonl"
    tail = Tail(path)
    assert tail.lines() == []
    append(path, {"a": 1}, b'{"b": "\\u2028"}\n')
    assert tail.lines() == [b'{"a": 1}\n', b'{"b": "\\u2028"}\n']
    with open(path, "ab", buffering=0) as file:
        file.write(b'{"c"')
        assert tail.lines() == []
        file.write(b": 3}\n" + b"\0" * 4 + b"}\n")
        assert tail.lines() == [b'{"c": 3}\n']
        assert tail.lines() == []
    path.write_bytes(path.read_bytes().replace(b"\0" * 4 + b"}", b'{"d": 4}'))  # the bytes have come
    assert tail.lines() == [b'{"d": 4}\n']


# The task on the node.


@pytest.fixture
def keeper(tmp_path):
    """A task's keeper at work in a thread, of a controller with the token "mine"."""
    started: list[tuple[Keeper, threading.Thread]] = []
    folder = tmp_path / "worker_1"
    folder.mkdir()
    write_json(tmp_path / LEASE, {"token": "mine", "count": 1})

    def start(**pace) -> Keeper:
        task = Task(str(tmp_path), str(folder), "mine", [], STUB_BOOT, 3, True, replace(FAST, **pace))
        made = Keeper(task)
        thread = threading.Thread(target=made.keep)
        thread.start()
        started.append((made, thread))
        eventually(lambda: newest(folder) > 0 and bool(Tail(answers_of(folder, newest(folder))).lines()))
        return made

    yield start
    for made, thread in started:
        made.leave()
        thread.join()


def said(tmp_path: Path, number: int = 1) -> list[bytes]:
    return Tail(answers_of(tmp_path / "worker_1", number)).lines()


def test_a_task_ends_when_its_controller_is_gone(tmp_path, keeper):
    made = keeper(patience=1.0)
    for count in range(2, 8):  # renewed, it goes on
        write_json(tmp_path / LEASE, {"token": "mine", "count": count})
        time.sleep(0.3)
        assert not made.over
    eventually(lambda: made.over, 20)
    assert b'"ended"' in said(tmp_path)[-1]


@pytest.mark.parametrize("how", ["token", "closed", "removed"])
def test_a_task_ends_when_it_is_no_longer_wanted(tmp_path, keeper, how):
    made = keeper(patience=1000.0)
    append(commands_of(tmp_path / "worker_1", 1), {"id": "1", "job": {"runs": [], "directory": str(tmp_path)}})
    eventually(lambda: any(b"JobEnded" in line for line in said(tmp_path)))
    if how == "token":
        write_json(tmp_path / LEASE, {"token": "another's", "count": 1})
    elif how == "closed":
        (tmp_path / "worker_1/closed").touch()
    else:
        (tmp_path / "worker_1").rename(tmp_path / "elsewhere")
    eventually(lambda: made.over, 20)
    assert newest(tmp_path / "worker_1") == (0 if how == "removed" else 1)


def test_a_task_that_is_idle_says_that_it_lives_and_with_what_it_computes(tmp_path, keeper, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    keeper()
    append(commands_of(tmp_path / "worker_1", 1), {"id": "1", "job": {"runs": [{"run_id": "a"}], "directory": "."}})
    eventually(lambda: b"beat" in said(tmp_path)[-1])
    (row,) = [line for line in said(tmp_path) if b'"step": 0, "pid"' in line]
    assert b'"OMP_NUM_THREADS": "3", "RETRAIN_OWN_GPU": "1"' in row


def test_signals_for_the_task_mean_nothing_to_its_worker(tmp_path, keeper):
    """Slurm may send them to all processes of a job."""
    import json

    keeper()
    pid = json.loads(said(tmp_path)[0])["process"]
    os.kill(pid, signal.SIGUSR1)
    os.kill(pid, signal.SIGUSR2)
    append(commands_of(tmp_path / "worker_1", 1), {"id": "1", "job": {"runs": [], "directory": "."}})
    eventually(lambda: any(b"JobEnded" in line for line in said(tmp_path)))
    assert newest(tmp_path / "worker_1") == 1


# Jobs of this machine, by submitit.


def test_workers_of_this_machine_do_jobs_die_and_are_replaced_in_the_same_job(tmp_path, workers):
    executor = workers(2, "local")
    handles = [executor.submit(job(tmp_path, *names)) for names in (("a", "b"), ("once-die",), ("c",))]
    events = heard(executor)
    assert [ends(events)[handle.id].status for handle in handles] == ["done", "died", "done"]
    host = os.uname().nodename
    assert {event.worker for event in events if isinstance(event, JobStarted)} == {f"1 {host}", f"2 {host}"}
    assert "was ended by SIGKILL, as when memory runs out" in ends(events)[handles[1].id].reason
    again = executor.submit(job(tmp_path, "once-die"))
    executor.submit(job(tmp_path, "d"))
    later = heard(executor)
    assert {end.status for end in ends(later).values()} == {"done"}
    assert pids(later)["once-die"] != pids(events)["once-die"]
    assert again.id in ends(later)
    folder = tmp_path / "workers/slurm_1"
    assert read_json(folder / "jobs.json")["jobs"].keys() == {"1", "2"}
    executor.close()
    assert all(process_start(pid) is None for pid in (pids(events) | pids(later)).values())
    assert read_json(folder / "jobs.json")["closed"]
    assert sorted(path.name for path in (tmp_path / "workers").iterdir()) == ["slurm_1"]  # nothing was asked again


def test_a_signal_before_the_time_limit_ends_a_job_and_the_worker_comes_back(tmp_path, workers):
    executor = workers(1, "local")
    handle, sent = executor.submit(job(tmp_path, "wait")), []

    def signal_once(event):
        if isinstance(event, StepDone) and not sent:
            sent.append(cluster_of(executor).places[0].job.job_id)
            task = f"/proc/{sent[0]}/task/{sent[0]}/children"
            os.kill(int(Path(task).read_text().split()[0]), signal.SIGUSR1)

    events = heard(executor, signal_once)
    # The stub ends at once when there are no more commands: its job has not been asked to stop.
    assert ends(events)[handle.id].status == "died"
    executor.submit(job(tmp_path, "b"))
    later = heard(executor)
    assert [end.status for end in ends(later).values()] == ["done"]
    assert any("was told to make room: all is saved" in text for text in [*texts(events), *texts(later)])
    assert cluster_of(executor).places[0].job.job_id == sent[0]
    assert newest(tmp_path / "workers/slurm_1/worker_1") == 2


# Slurm, played.


def test_all_workers_are_one_array_with_what_was_asked_for(tmp_path, workers, standin):
    executor = workers(
        3, devices="auto", partition="gpu", time="2-12:00:00", notice_s=120, account="lab", qos="long",
        constraint="a100&nvlink", gpu_type="h100", cpus=2, memory="64G", setup=["export ASKED=yes"],
        extra={"exclude": "node7", "exclusive": True},
    )  # fmt: skip
    for name in ("a", "b", "c"):
        executor.submit(job(tmp_path, name))
    events = heard(executor)
    assert [end.status for end in ends(events).values()] == ["done"] * 3
    assert len(standin.calls("sbatch")) == 1
    options = {line.removeprefix("#SBATCH --") for line in standin.script() if line.startswith("#SBATCH")}
    folder = tmp_path / "workers/slurm_1"
    assert options >= {
        "array=0-2%3", "job-name=retrain-my-campaign", "partition=gpu", "time=3600", "signal=USR1@120", "requeue",
        "account=lab", "qos=long", "constraint='a100&nvlink'", "gpus-per-node=h100:1", "cpus-per-task=2", "mem=64G",
        "exclude=node7", "exclusive", "open-mode=append", f"output={folder}/%A_%a_0_log.out",
    }  # fmt: skip
    assert {"export ASKED=yes", "export SUBMITIT_PREEMPT_SIGNAL=USR1"} <= {*standin.script()}
    assert read_json(folder / "jobs.json")["jobs"] == {"1": "4711_0", "2": "4711_1", "3": "4711_2"}
    assert texts(events)[0] == f"asked Slurm for 3 workers: job 4711; logs are in {folder}"
    executor.close()
    eventually(lambda: {standin.state(f"4711_{index}") for index in range(3)} == {"COMPLETED"})


def test_another_option_for_gpus_stands_alone(tmp_path):
    def options(devices, ranks=None, **keys):
        campaign = {"executor": "slurm", "workers": 2} | ({"gpus_per_cohort": ranks} if ranks else {})
        backend = {"devices": devices} | ({"shard": "dp"} if ranks else {})
        config = parse_dict({"campaign": campaign, "backend": backend, "slurm": keys})
        return slurm.sbatch_options(config, "x")

    assert options("auto")["gpus_per_node"] == 1
    assert options("auto", ranks=4)["gpus_per_node"] == 4
    assert options("auto", ranks=4, gpu_type="h100")["gpus_per_node"] == "h100:4"
    assert "gpus_per_node" not in options("cpu")
    assert "gpus_per_node" not in options("auto", extra={"gres": "gpu:1"})
    more = options("auto", extra={"gres": "gpu:1"})["additional_parameters"]
    assert more == {"requeue": True, "signal": "USR1@90", "gres": "gpu:1"}


def test_a_job_goes_to_a_worker_that_runs_and_what_waits_is_cancelled(tmp_path, workers, standin, monkeypatch):
    monkeypatch.setattr(slurm, "WAIT_SECONDS", 0.5)
    standin.room(1)
    executor = workers(3)
    for name in "abcd":
        executor.submit(job(tmp_path, name))
    events = heard(executor)
    assert len({*pids(events).values()}) == 1
    assert len(pids(events)) == 4
    (note,) = [text for text in texts(events) if "asked of Slurm" in text]
    assert note == "3 workers asked of Slurm, 0 run; the others begin when Slurm has room for them" or "1 run" in note
    executor.close()
    assert ["--state=PENDING", "4711_0", "4711_1", "4711_2"] in standin.calls("scancel")
    eventually(lambda: sorted(standin.state(f"4711_{n}") for n in range(3)) == ["CANCELLED by 0"] * 2 + ["COMPLETED"])


def test_a_stop_needs_no_worker(tmp_path, workers, standin):
    standin.room(0)
    executor = workers(2)
    handles = [executor.submit(job(tmp_path, name)) for name in "ab"]
    ticks = []

    def stop(event):
        ticks.append(event)
        if len(ticks) == 5:
            for handle in handles:
                handle.stop()

    assert [end.status for end in ends(heard(executor, stop)).values()] == ["stopped", "stopped"]


def test_before_its_time_limit_a_job_is_put_back_and_goes_on(tmp_path, workers, standin):
    executor = workers(2)
    executor.submit(job(tmp_path, "wait"))
    executor.submit(job(tmp_path, "b"))
    sent = []

    def at_the_limit(event):
        if isinstance(event, JobStarted) and event.runs == ["wait"]:
            sent.append(f"4711_{int(event.worker.split()[0]) - 1}")
            os.system(f"scancel --signal=USR1 {sent[0]}")

    heard(executor, at_the_limit)
    eventually(lambda: standin.calls("scontrol") == [["requeue", sent[0]]])
    eventually(lambda: standin.state(sent[0]) == "RUNNING")
    for name in "cdef":
        executor.submit(job(tmp_path, name))
    events = heard(executor)
    assert {end.status for end in ends(events).values()} == {"done"}
    assert len(standin.calls("sbatch")) == 1


def test_a_worker_that_somebody_cancels_is_not_asked_for_again(tmp_path, workers, standin, monkeypatch):
    executor = workers(2)
    first, _ = executor.submit(job(tmp_path, "wait-a")), executor.submit(job(tmp_path, "b"))
    done = []

    def cancel(event):
        if isinstance(event, JobStarted) and event.runs == ["wait-a"]:
            done.append(int(event.worker.split()[0]))
            os.system(f"scancel 4711_{done[0] - 1}")

    events = heard(executor, cancel)
    assert ends(events)[first.id].status == "died"
    for name in "cde":
        executor.submit(job(tmp_path, name))
    later = heard(executor)
    assert {end.status for end in ends(later).values()} == {"done"}
    assert {int(event.worker.split()[0]) for event in later if isinstance(event, JobStarted)} == {3 - done[0]}
    said = [text for text in [*texts(events), *texts(later)] if "was cancelled" in text]
    assert len(said) == 1
    assert said[0].endswith("Slurm says CANCELLED; no other is asked for in its place")
    assert len(standin.calls("sbatch")) == 1


def test_a_worker_that_ends_otherwise_is_asked_for_again(tmp_path, workers, standin):
    executor = workers(2)
    first, _ = executor.submit(job(tmp_path, "wait-a")), executor.submit(job(tmp_path, "b"))
    task = []

    def fail(event):
        if isinstance(event, JobStarted) and event.runs == ["wait-a"]:
            task.append(f"4711_{int(event.worker.split()[0]) - 1}")
            os.kill(int((standin.home / f"pid_{task[0]}").read_text()), signal.SIGKILL)

    events = heard(executor, fail)
    end = ends(events)[first.id]
    assert end.status == "died"
    assert f"(job {task[0]}) was ended: Slurm says FAILED; what it printed is in" in end.reason
    assert end.reason.endswith(f"slurm_1/{task[0]}_0_log.out")
    for name in "cd":
        executor.submit(job(tmp_path, name))
    assert {end.status for end in ends(heard(executor)).values()} == {"done"}
    assert len(standin.calls("sbatch")) == 2
    assert read_json(tmp_path / "workers/slurm_2/jobs.json")["jobs"] == {str(int(task[0][-1]) + 1): "4712"}


def test_where_no_worker_begins_the_campaign_ends_and_says_why(tmp_path, workers, standin):
    executor = workers(2, setup=["echo no such module >&2", "exit 3"])
    for name in "ab":
        executor.submit(job(tmp_path, name))
    heard_of: list = []
    with pytest.raises(WorkersLost, match=r"no worker is left: worker \d \(job 4711_\d\) did not begin: Slurm says F"):
        heard_of.extend(heard(executor))
    assert "no such module" in (tmp_path / "workers/slurm_1/4711_0_0_log.out").read_text()


def test_what_slurm_refuses_is_one_error(tmp_path, workers, standin, capfd):
    executor = workers(2, partition="nosuch")
    executor.submit(job(tmp_path, "a"))
    with pytest.raises(UsageError, match=r"Slurm takes no job: sbatch: error: invalid partition specified: nosuch; "):
        heard(executor)
    assert capfd.readouterr().err == ""


def test_what_an_earlier_controller_left_is_cancelled(tmp_path, workers, standin):
    standin.room(1)
    executor = workers(3)
    for name in ("wait", "b", "c"):
        executor.submit(job(tmp_path, name))
    events = executor.events()
    next(event for event in events if isinstance(event, StepDone))
    lost = cluster_of(executor)
    executor.start = executor.finish = lambda *args: []  # killed: it does nothing any more
    executor._seats = [None] * 3
    events.close()
    standin.room(4)
    another = workers(1)
    another.submit(job(tmp_path, "d"))
    assert [end.status for end in ends(heard(another)).values()] == ["done"]
    assert ["--state=PENDING", "4711_0", "4711_1", "4711_2"] in standin.calls("scancel")
    eventually(lambda: all(place.rests() for place in lost.places.values()))
    assert "RUNNING" not in {standin.state(f"4711_{index}") for index in range(3)} or eventually(
        lambda: "RUNNING" not in {standin.state(f"4711_{index}") for index in range(3)}
    )
    assert newest(tmp_path / "workers/slurm_2/worker_1") == 1


def test_what_is_given_up_is_killed_and_its_jobs_cancelled(tmp_path, workers, standin):
    executor = workers(2)
    executor.submit(job(tmp_path, "wait"))
    executor.submit(job(tmp_path, "wait-too"))
    events = executor.events()
    pid = next(event.row["pid"] for event in events if isinstance(event, StepDone))
    events.close()
    executor.close()
    assert process_start(pid) is None
    assert ["4711_0", "4711_1"] in standin.calls("scancel")


def test_a_worker_that_falls_silent_is_given_up(tmp_path, workers, standin, monkeypatch):
    executor = workers(1)
    handle = executor.submit(job(tmp_path, "wait"))

    def freeze(event):
        if isinstance(event, StepDone):
            monkeypatch.setattr(slurm, "SILENCE_SECONDS", 2.0)
            os.kill(int((standin.home / "pid_4711").read_text()), signal.SIGSTOP)

    end = ends(heard(executor, freeze))[handle.id]
    assert end.status == "died"
    assert "has said nothing for 2 s" in end.reason
    eventually(lambda: standin.state("4711") == "CANCELLED by 0")
    executor.submit(job(tmp_path, "b"))
    assert [end.status for end in ends(heard(executor)).values()] == ["done"]


# What has to be there.


def plan_of(tmp_path: Path, **keys) -> Plan:
    from retrain.config import load

    path = tmp_path / "some.toml"
    path.write_text('[campaign]\nseeds = [1]\nexecutor = "slurm"\nworkers = 2\n')
    return Plan.of(load(path), tmp_path / "out")


def test_without_slurm_or_submitit_it_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"there is no sbatch on this machine; .*type --executor processes"):
        executor_of(plan_of(tmp_path))
    monkeypatch.setattr(slurm, "is_installed", lambda module: False)
    with pytest.raises(MissingExtra, match=r"needs the package submitit: pip install '\.\[slurm\]'"):
        executor_of(plan_of(tmp_path))
