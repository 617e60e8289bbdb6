import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from helpers.campaigns import Heard, campaign, continue_training, eventually, train
from helpers.models import qwen3_directory
from helpers.servers import StandIn

from retrain.campaign.controller import execute, launch
from retrain.campaign.executors.local import Local
from retrain.campaign.planning.engine import with_engine
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.protocol import WorkerDevice
from retrain.campaign.running.workers import CampaignWorkers
from retrain.config import load
from retrain.config.runs import run_directory
from retrain.engines.server.automatic import GIB, Machine
from retrain.errors import ModelError, RetrainError, UsageError
from retrain.files import read_json
from retrain.util.session import lease_of
from tests.system.clusters import SERVE, SLEEPER, check_complete, recorded, rows_of

QUIET = ("training.save_every=2", "squeeze.enabled=false", "campaign.lanes=4")
SERVED = ('inference.engine="vllm"', "inference.patience_s=1.0", "inference.timeout_s=20.0")
WORKERS = (
    "training.save_every=1", "squeeze.enabled=false", "training.eval_every=0", "campaign.executor=processes",
    "campaign.workers=2", "campaign.lanes=2", "backend.devices=cpu",
)  # fmt: skip
LAUNCHED = ("inference.engine=openai", f"inference.launch='{SERVE}'", "inference.patience_s=120")
BESIDE = (
    "inference.engine=vllm", f"inference.launch='{SLEEPER}'", "inference.sleep=true", "inference.patience_s=120",
)  # fmt: skip
DIED = "the server has died (signal 9) and is started again"


@pytest.fixture
def server(model, impatient):
    made = StandIn(model)
    yield made
    made.close()


def at(server: StandIn) -> str:
    return f'inference.url="{server.url}"'


def test_a_cohort_is_sampled_by_servers_and_trained_here(tmp_path, model, server):
    told, out = Heard(), tmp_path / "out"
    sets = [*QUIET, *SERVED, at(server), "squeeze.enabled=true"]
    outcome = train(campaign(tmp_path, model, steps=4), out, *sets, observer=told)
    assert sum(line.startswith("canary: base within") for line in told.messages) == 1
    assert outcome.summary["squeeze"]["verified"]["full"]["accuracy"] is not None
    rows = rows_of(out)
    assert len(rows) == 4
    for own in rows.values():
        assert [row["step"] for row in own] == [0, 1, 2, 3]
        for row in own:
            assert row["kl_sample_train_v2"] < 1e-9
            assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)
            assert row["entropy"] is None
            assert "queue_depth" not in row
    assert len({row["mean_reward"] for own in rows.values() for row in own}) > 8
    # Every version that was asked for had a name of its own, and none is left behind.
    models = {body["model"] for body in server.asked if not body["model"].startswith("canary")}
    assert len({name.rpartition(".")[0] for name in models}) >= 4 * 4
    assert server.adapters == []
    assert not (out / "adapters").exists()
    assert (out / "report.html").is_file()
    assert read_json(out / "runs" / next(iter(rows)) / "config.json")["built"]["engine"] == "ServerEngine"


def test_a_server_that_stays_away_stops_the_runs_with_everything_saved(tmp_path, model, server):
    path, out = campaign(tmp_path, model, steps=4), tmp_path / "out"
    sets = [*QUIET, *SERVED, at(server), "training.eval_every=0"]
    train(path, tmp_path / "whole", *sets)
    away = Heard(lambda spec, count: server.stop() if count == 12 else None)
    with pytest.raises(RetrainError, match=r"(?s)no server answers.*retrain resume") as caught:
        train(path, out, *sets, observer=away)
    assert caught.value.exit_status == 1
    assert all(recorded(out, f"{server.url} is left out: "))
    assert all(recorded(out, "no server answers, for "))
    runs = read_json(out / "manifest.json")["runs"]
    assert {run["state"] for run in runs} == {"interrupted"}
    for run in runs:
        assert (out / run["path"] / "checkpoints/step_000003").is_dir()  # the steps before are saved
    with pytest.raises(UsageError, match="no server answers"):
        continue_training(out)
    server.start()
    continue_training(out)
    rewards = [
        {name: [row["mean_reward"] for row in own] for name, own in rows_of(tmp_path / folder).items()}
        for folder in ("out", "whole")
    ]
    assert rewards[0] == rewards[1]


def test_a_server_that_computes_something_else_is_refused_before_step_0(tmp_path, model, impatient):
    other = StandIn(qwen3_directory(tmp_path / "other", ["12+34=? the answer is"], seed=3))
    with pytest.raises(ModelError):
        train(campaign(tmp_path, model), tmp_path / "out", *QUIET, *SERVED, at(other))
    assert not list((tmp_path / "out").rglob("metrics.jsonl"))
    other.close()


def test_a_launched_server_that_is_killed_is_started_again(tmp_path, model):
    out, killed = tmp_path / "out", []

    def kill(spec, count):
        if count == 7:  # the first step of the second cohort
            killed.append(read_json(out / "server.json")["pid"])
            os.kill(killed[0], signal.SIGKILL)

    sets = [*QUIET, *LAUNCHED, "campaign.lanes=2"]
    train(campaign(tmp_path, model, steps=3), out, *sets, observer=Heard(kill))
    assert sum(recorded(out, DIED)) == 2
    assert all("canary: base within" in log.read_text() for log in out.glob("runs/*/run.log"))
    assert not psutil.pid_exists(killed[0])
    assert "serving" in (out / "server.log").read_text()
    check_complete(out)


def test_workers_share_servers_that_the_controller_keeps(tmp_path, model):
    """One is killed on the way; a squeeze analysis, in a worker, is sampled there as well."""
    out, killed = tmp_path / "out", []

    def kill(spec, count):
        if count == 4:
            killed.append(read_json(out / "server_1.json")["pid"])
            os.killpg(killed[0], signal.SIGKILL)

    heard = Heard(kill)
    sets = [*WORKERS, *LAUNCHED, "inference.replicas=2", "squeeze.enabled=true"]
    outcome = train(campaign(tmp_path, model, steps=3), out, *sets, observer=heard)
    assert outcome.summary["squeeze"]["verified"]["full"]["accuracy"] is not None
    check_complete(out)
    assert sum(line.startswith(DIED) for line in heard.messages) == 1
    assert any(recorded(out, DIED))
    assert len({line.split()[2] for line in heard.messages if line.startswith("canary at")}) == 2
    assert not psutil.pid_exists(killed[0])


def test_servers_and_workers_end_with_their_controller_and_another_goes_on(tmp_path, model):
    out = tmp_path / "out"
    words = [word for text in (*WORKERS, *LAUNCHED) for word in ("--set", text)]
    path = campaign(tmp_path, model, steps=3)
    command = [sys.executable, "-m", "retrain", "train", path, "--out", out, *words, "--verbose"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step "))
        server = psutil.Process(read_json(out / "server.json")["pid"])
        workers = [child for child in psutil.Process(process.pid).children() if child.pid != server.pid]
        process.kill()
    gone, there = psutil.wait_procs([server, *workers], timeout=90)
    assert (len(gone), there) == (3, [])
    continue_training(out)
    check_complete(out)


def test_a_command_that_is_no_server_ends_the_campaign_with_what_it_said(tmp_path, model):
    dies = f"{sys.executable} -c 'raise SystemExit(\"no such option\")'"
    sets = [*WORKERS, "inference.engine=openai", f'inference.launch="""{dies}"""', "inference.patience_s=120"]
    with pytest.raises(UsageError, match=r"(?s)launch: the server died 4 times in a row.*no such option"):
        train(campaign(tmp_path, model, steps=3), tmp_path / "out", *sets)


def served_in(out: Path) -> list[tuple[str, str, str]]:
    """Return process, GPU and port of every server that workers have started."""
    lines = [line for log in sorted(out.glob("workers/worker_*/server.log")) for line in log.read_text().splitlines()]
    return [tuple(line.split()[1::2]) for line in lines if line.startswith("process ")]


def check_nothing_is_left(out: Path) -> None:
    eventually(lambda: not [pid for pid, *_ in served_in(out) if psutil.pid_exists(int(pid))], 30)
    assert not [*out.glob("workers/worker_*/server.json"), *out.glob("workers/worker_*/adapters/*")]


@pytest.mark.parametrize("workers", [2, 1])
def test_every_worker_has_a_server_on_its_own_gpu(tmp_path, model, workers):
    """The one that works alone is killed on the way, and another one with a new server takes its place."""
    out, killed = tmp_path / "out", []

    def kill(spec, count):
        if count == 1 and workers == 1:
            killed.append(lease_of(run_directory(out, spec))["pid"])
            os.kill(killed[0], signal.SIGKILL)

    heard = Heard(kill)
    loaded = load(campaign(tmp_path, model, steps=3), [*WORKERS, *BESIDE])
    local = Local([WorkerDevice(f"gpu:{gpu}", 1, str(gpu)) for gpu in range(workers)], out)
    plan = check(Plan.of(loaded, out))
    assert execute(plan, heard, executor=CampaignWorkers(local, out)).exit_status == 0
    check_complete(out)
    servers = served_in(out)
    assert [gpu for _, gpu, _ in servers] == (["0", "1"] if workers == 2 else ["0", "0"])
    assert len({port for *_, port in servers}) == 2
    assert not [line for line in heard.messages if line.startswith(DIED)]
    for log in out.glob("workers/worker_*/server.log"):
        assert "/sleep?level=1" in log.read_text()
        assert "refused" not in log.read_text()
    check_nothing_is_left(out)


def test_the_servers_of_workers_end_with_ctrl_c(tmp_path, model):
    out = tmp_path / "out"
    words = [word for text in (*WORKERS, *BESIDE) for word in ("--set", text)]
    command = [sys.executable, "-m", "retrain", "train", campaign(tmp_path, model, steps=50), "--out", out, *words]
    with subprocess.Popen([*command, "--verbose"], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step "))
        eventually(lambda: len(served_in(out)) == 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        assert process.returncode == 130
    check_nothing_is_left(out)


def test_a_vllm_that_no_worker_can_start_leaves_their_own_engine(tmp_path, model):
    broken, heard, out = tmp_path / "python", Heard(), tmp_path / "out"
    broken.write_text("#!/bin/sh\necho 'RuntimeError: no kernel'\nexit 1\n")
    broken.chmod(0o755)
    sets = [text for text in WORKERS if not text.startswith("backend")]
    loaded = load(campaign(tmp_path, model, steps=2), [*sets, f"inference.python={broken}"])
    machine = Machine({"0": 24 * GIB, "1": 24 * GIB}, 64 * GIB, "0.32.0")
    choose = partial(with_engine, machine=machine, smallest=0)
    assert launch(loaded, out, heard, choose=choose).exit_status == 0
    assert "Sampling with retrain's own engine: vLLM did not start (RuntimeError: no kernel)" in heard.messages
    assert {log.read_text().count("no kernel") for log in out.rglob("server.log")} == {1}
    check_nothing_is_left(out)
