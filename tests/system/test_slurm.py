import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from helpers.campaigns import eventually

import retrain.campaign.executors.slurm as slurm
from retrain.campaign.controller import executor_of
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.protocol import JobStarted, StepDone
from retrain.campaign.running.workers import CampaignWorkers
from retrain.config import load, parse_dict
from retrain.errors import UsageError, WorkersLost
from retrain.files import read_json
from tests.system.clusters import ends, events_of, job, of_kind, pids, texts


@pytest.fixture
def workers(stub_workers, out):
    """Makes executors, with a job submitted for each name."""

    def make(count: int, *names: str, **keys) -> CampaignWorkers:
        return submit(stub_workers("slurm", count, **keys), out, names)

    return make


def statuses(events) -> list[str]:
    return [end.status for end in ends(events).values()]


def submit(executor: CampaignWorkers, out: Path, names: Iterable[str]) -> CampaignWorkers:
    for name in names:
        executor.submit(job(out, name))
    return executor


def at_start(run: str, act):
    """Call ``act`` with the task of the worker that begins a run."""

    def on_event(event):
        if isinstance(event, JobStarted) and event.runs == [run]:
            act(f"4711_{int(event.worker.split()[0])}")

    return on_event


def test_all_workers_are_one_array_with_what_was_asked_for(out, workers, standin, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    executor = workers(
        3, "a", "b", "c", devices="auto", partition="gpu", time="2-12:00:00", notice_s=120, account="lab", qos="long",
        constraint="a100&nvlink", gpu_type="h100", cpus=2, memory="64G", setup=["export ASKED=yes"],
        extra={"exclude": "node7", "exclusive": True},
    )  # fmt: skip
    events = events_of(executor)
    assert statuses(events) == ["done"] * 3
    rows = [event.row for event in of_kind(events, StepDone)]
    assert {(row["RETRAIN_OWN_GPU"], row["OMP_NUM_THREADS"]) for row in rows} == {("1", "2")}
    assert len(standin.calls("sbatch")) == 1
    options = {line.removeprefix("#SBATCH --") for line in standin.script() if line.startswith("#SBATCH")}
    folder = out / "workers"
    assert options >= {
        "array=1-3", "job-name=retrain-my-campaign", "partition=gpu", "time=3600", "signal=USR1@120", "requeue",
        "account=lab", "qos=long", "constraint='a100&nvlink'", "gpus-per-node=h100:1", "cpus-per-task=2", "mem=64G",
        "exclude=node7", "exclusive", "open-mode=append", f"output={folder}/slurm_%A_%a.log",
    }  # fmt: skip
    assert "export ASKED=yes" in standin.script()
    assert texts(events)[0] == f"asked Slurm for 3 workers: job 4711; logs are in {folder}"
    executor.close()
    assert read_json(folder / "slurm_jobs.json")["closed"]
    eventually(lambda: {standin.state(f"4711_{index}") for index in range(1, 4)} == {"COMPLETED"})


def test_gpus_that_are_asked_for():
    def options(devices="auto", ranks=None, **keys):
        campaign = {"executor": "slurm", "workers": 2} | ({"gpus_per_cohort": ranks} if ranks else {})
        backend = {"devices": devices} | ({"shard": "dp"} if ranks else {})
        config = parse_dict({"campaign": campaign, "backend": backend, "slurm": keys})
        return slurm.sbatch_options(config, "x", [1, 2], "log")

    assert "gpus-per-node=1" in options()
    assert "gpus-per-node=h100:4" in options(ranks=4, gpu_type="h100")
    assert not any(option.startswith("gpus") for option in options("cpu"))
    own = options(extra={"gres": "gpu:1"})  # another option for GPUs stands alone
    assert not any(option.startswith("gpus") for option in own)
    assert "gres=gpu:1" in own


def test_a_script_of_one_s_own_and_one_that_cannot_be_rendered(out, workers, tmp_path, standin):
    own = tmp_path / "own.sh"
    own.write_text(
        "#!/bin/bash\n{% for option in options %}\n#SBATCH --{{ option }}\n{% endfor %}\n# mine\n"
        "exec {{ launcher }} {{ command }}\n"
    )
    executor = workers(1, "a", template="own.sh")
    assert statuses(events_of(executor)) == ["done"]
    executor.close()
    assert "# mine" in standin.script()
    own.write_text("{{ nothing_of_that_name }}")
    with pytest.raises(UsageError, match=r"template .*own.sh cannot be rendered: 'nothing_of_that_name' is undefined"):
        events_of(workers(1, "a", template="own.sh"))


def test_a_job_goes_to_a_worker_that_runs_and_what_waits_is_cancelled(workers, standin, monkeypatch):
    monkeypatch.setattr(slurm, "WAIT_SECONDS", 0.5)
    standin.room(1)
    executor = workers(3, *"abcd")
    events = events_of(executor)
    assert len({*pids(events).values()}) == 1
    assert len(pids(events)) == 4
    (note,) = [text for text in texts(events) if "asked of Slurm" in text]
    assert note.startswith("3 workers asked of Slurm, ")
    assert note.endswith(" run; the others begin when Slurm has room for them")
    executor.close()
    assert ["--state=PENDING", "4711_1", "4711_2", "4711_3"] in standin.calls("scancel")
    over = {"CANCELLED by 0", "COMPLETED"}  # one may have begun when the first had ended
    eventually(lambda: {standin.state(f"4711_{n}") for n in range(1, 4)} <= over)


def test_a_worker_that_somebody_cancels_is_not_asked_for_again(out, workers, standin):
    executor, cancelled = workers(2, "wait-a", "b"), []

    def cancel(task):
        cancelled.append(int(task[-1]))
        (standin.home / "at_once").touch()
        os.kill(standin.pid(task), signal.SIGSTOP)  # no time to save
        os.system(f"scancel {task}")

    events = events_of(executor, at_start("wait-a", cancel))
    assert statuses(events).count("died") == 1
    later = events_of(submit(executor, out, "cde"))
    assert statuses(later) == ["done"] * 3
    assert {int(event.worker.split()[0]) for event in of_kind(later, JobStarted)} == {3 - cancelled[0]}
    (end,) = [end for end in ends(events).values() if end.status == "died"]
    assert end.reason.endswith("was cancelled: Slurm says CANCELLED; it is not replaced")
    assert len(standin.calls("sbatch")) == 1


def test_a_worker_that_ends_otherwise_is_asked_for_again(out, workers, standin):
    executor, tasks = workers(2, "wait-a", "b"), []

    def fail(task):
        tasks.append(task)
        os.kill(standin.pid(task), signal.SIGKILL)

    events = events_of(executor, at_start("wait-a", fail))
    (end,) = [end for end in ends(events).values() if end.status == "died"]
    assert f"(job {tasks[0]}) was ended: Slurm says FAILED; what it printed is in" in end.reason
    assert end.reason.endswith(f"workers/slurm_{tasks[0]}.log")
    assert statuses(events_of(submit(executor, out, "cd"))) == ["done"] * 2
    assert len(standin.calls("sbatch")) == 2
    assert f"#SBATCH --array={tasks[0][-1]}" in (standin.home / "script_4712.sh").read_text()


def test_where_no_worker_begins_the_campaign_ends_and_says_why(out, workers, standin, capfd):
    executor = workers(2, "a", "b", setup=["echo no such module >&2", "exit 3"])
    with pytest.raises(WorkersLost, match=r"no worker is left: worker \d \(job 4711_\d\) did not begin: Slurm says F"):
        events_of(executor)
    assert "no such module" in (out / "workers/slurm_4711_1.log").read_text()
    capfd.readouterr()
    refused = workers(2, "a", partition="nosuch")
    with pytest.raises(UsageError, match=r"Slurm takes no job: sbatch: error: invalid partition specified: nosuch; "):
        events_of(refused)
    assert capfd.readouterr().err == ""


def test_what_an_earlier_controller_left_goes_on_or_is_cancelled(out, workers, standin):
    """One that was killed: a worker that runs goes on with its task, what waits is taken out of the queue."""
    standin.room(1)
    executor = workers(3, "wait", "b", "c")
    events = executor.events()
    step = next(event for event in events if isinstance(event, StepDone))
    executor._jobs = {}  # killed: it does nothing any more
    events.close()
    executor.close = lambda: None
    standin.room(4)
    later = workers(3)
    handle = later.submit(job(out, "wait"))
    heard = []

    def stop(event):
        heard.append(event)
        if of_kind(heard, StepDone):
            handle.stop()

    found = events_of(later, stop)
    assert statuses(found) == ["stopped"]
    assert of_kind(found, StepDone)[0].row["pid"] == step.row["pid"]
    assert len(standin.calls("sbatch")) == 1
    later.close()
    assert ["--state=PENDING", "4711_1", "4711_2", "4711_3"] in standin.calls("scancel")
    eventually(lambda: "RUNNING" not in {standin.state(f"4711_{index}") for index in range(1, 4)})


def test_without_slurm_it_says_what_to_type(tmp_path, monkeypatch):
    path = tmp_path / "some.toml"
    path.write_text('[campaign]\nseeds = [1]\nexecutor = "slurm"\nworkers = 2\n')
    plan = Plan.of(load(path), tmp_path / "out")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"there is no sbatch on this machine; .*type --executor processes"):
        executor_of(plan)
