"""Campaigns that several ranks train together: what they leave is what one process leaves, and also when they stop."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from shard_cases import distance, left_by, on_ranks, planned
from standin import StandIn
from toycampaign import StopAfter, campaign
from worker_cases import Heard

from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.planning.references import check
from retrain.campaign.running import team
from retrain.campaign.running.controller import execute, launch
from retrain.config import load
from retrain.errors import ConfigError, RetrainError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.policy.ranks import Ranks
from retrain.record.observer import NullObserver

EQUAL = 2e-6
"""Relative difference of metrics and weights that is rounding, in fp32."""
"""Of tests that train whole campaigns again, for minutes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shard")


@pytest.fixture(scope="module")
def one(folder) -> dict:
    """What one process makes of it."""
    assert execute(planned(folder / "one", []), NullObserver()).exit_status == 0
    return left_by(folder / "one")


@pytest.fixture(scope="module")
def two(folder) -> dict:
    """What two ranks make of it."""
    assert execute(planned(folder / "two", on_ranks(2)), NullObserver()).exit_status == 0
    return left_by(folder / "two")


@pytest.fixture(scope="module")
def parted(folder) -> dict:
    """What two ranks make of it that hold a part of the base each."""
    assert execute(planned(folder / "parted", on_ranks(2, "fsdp2")), NullObserver()).exit_status == 0
    return left_by(folder / "parted")


@pytest.fixture(scope="module")
def stopped(folder) -> Path:
    """What two ranks have done when they are asked to stop in the second step."""
    assert execute(planned(folder / "stopped", on_ranks(2)), StopAfter(3)).exit_status == 130
    return folder / "stopped"


def resumed(stopped: Path, name: str, *sets: str) -> Path:
    """A copy of it that goes on with these settings; nothing has to be accepted."""
    out = stopped.with_name(name)
    shutil.copytree(stopped, out)
    assert execute(check(read_plan(out, sets)), NullObserver()).exit_status == 0
    return out


def test_two_ranks_leave_what_one_process_leaves(one, two, folder):
    assert distance(two, one) <= EQUAL
    for name, count in (("one", 1), ("two", 2)):
        configs = [read_json(path) for path in (folder / name / "runs").glob("*/config.json")]
        assert [config["built"]["ranks"] for config in configs] == [count, count]


def test_a_difference_is_seen(one):
    name = next(name for name in one if name.endswith("metrics.jsonl"))
    weights = next(name for name in one if name.endswith("final/adapter_model.safetensors"))
    row = one[name][-1] | {"optim/grad_norm": one[name][-1]["optim/grad_norm"] * (1 + 3e-6)}
    header, data = one[weights]
    for changed in ({"other": 1}, {name: [*one[name][:-1], row]}, {weights: (header, data[:-4] + b"abcd")}):
        assert distance({**one, **changed}, one) > EQUAL


def test_three_ranks_leave_what_one_process_leaves(one, folder):
    found = {}
    for shard in ("dp", "fsdp2"):
        out = folder / f"three_{shard}"
        assert execute(planned(out, on_ranks(3, shard)), NullObserver()).exit_status == 0
        found[shard] = left_by(out)
    assert distance(found["dp"], one) <= EQUAL
    assert found["fsdp2"] == found["dp"]


def test_ranks_with_parts_of_the_base_leave_what_ranks_with_the_whole_leave(one, two, parted):
    assert parted == two
    assert distance(parted, one) <= EQUAL


def test_one_rank_is_one_process(one, folder):
    sets = ['backend.shard="dp"', "backend.ranks=1"]
    assert execute(planned(folder / "alone", sets), NullObserver()).exit_status == 0
    assert left_by(folder / "alone") == one


def test_stopped_ranks_have_saved_their_step_and_go_on_to_the_last_bit(stopped, two):
    assert {len(read_jsonl(run / "metrics.jsonl")) for run in (stopped / "runs").iterdir()} == {2}
    out = resumed(stopped, "again")
    assert left_by(out) == two


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on(stopped, one, ranks):
    out = resumed(stopped, f"on_{ranks}", *on_ranks(ranks))
    assert distance(left_by(out), one) <= EQUAL
    for log in (out / "runs").glob("*/run.log"):
        assert "continues at step 2" in log.read_text()


def test_parts_of_the_base_go_on_to_the_last_bit_and_a_run_goes_from_parts_to_wholes_and_back(folder, two, stopped):
    out = folder / "halted"
    assert execute(planned(out, on_ranks(2, "fsdp2")), StopAfter(3)).exit_status == 130
    assert {len(read_jsonl(run / "metrics.jsonl")) for run in (out / "runs").iterdir()} == {2}
    assert left_by(resumed(out, "halted_again")) == two
    assert left_by(resumed(out, "halted_whole", 'backend.shard="dp"')) == two
    assert left_by(resumed(stopped, "stopped_parted", 'backend.shard="fsdp2"')) == two
    elsewhere = resumed(out, "halted_on_3", *on_ranks(3, "fsdp2"))
    assert distance(left_by(elsewhere), two) <= EQUAL


@pytest.mark.parametrize("shard", ["dp", "fsdp2"])
def test_a_rank_that_dies_ends_the_others_and_costs_steps_alone(folder, two, monkeypatch, shard):
    started = []
    popen = subprocess.Popen

    def start(*args, **options):
        process = popen(*args, **options)
        if team.BOOT in args[0]:
            started.append(process)
        return process

    monkeypatch.setattr(team.subprocess, "Popen", start)
    killer = Heard(lambda spec, count: os.kill(started[0].pid, signal.SIGKILL) if count == 3 else None)
    out = folder / f"killed_{shard}"
    begin = time.monotonic()
    with pytest.raises(RetrainError) as raised:
        execute(planned(out, on_ranks(3, shard)), killer)
    assert raised.value.exit_status == 1
    pid = started[0].pid
    assert f"rank 1 (process {pid}) was ended by SIGKILL, as when memory runs out" in str(raised.value)
    assert f"See what ended it, then type: retrain resume {out}" in str(raised.value)
    assert time.monotonic() - begin < 240
    assert [process.poll() is not None for process in started] == [True, True]
    assert {run["state"] for run in read_json(out / "manifest.json")["runs"]} == {"interrupted"}
    assert execute(check(read_plan(out, on_ranks(2, shard))), NullObserver()).exit_status == 0
    assert distance(left_by(out), two) <= EQUAL


def started_here(
    out: Path, *before: str, sets: str = "campaign.max_steps=3", shard: str = "dp"
) -> subprocess.Popen[str]:
    """``retrain train`` of this campaign in a process group of its own, ``before`` it words for Python."""
    planned(out, [])
    words = [*before, "-m", "retrain", "train", str(out.parent / f"{out.name}.toml"), "--out", str(out), "--verbose"]
    return subprocess.Popen(
        [sys.executable, *words, "--set", f'backend.shard="{shard}"', "--set", sets],
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"},  # on a busy machine a step takes its time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def until_step(process: subprocess.Popen[str], count: int) -> None:
    """Read on until so many steps have been printed."""
    assert process.stdout is not None
    for line in process.stdout:
        count -= line.startswith("step ")
        if count == 0:
            return
    raise AssertionError("it ended before")


@pytest.mark.parametrize("shard", ["dp", "fsdp2"])
def test_torchrun_starts_the_ranks(folder, two, shard):
    out = folder / f"torchrun_{shard}"
    process = started_here(out, *TORCHRUN, shard=shard)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert said.count(f"directory   {out}") == 1
    assert left_by(out) == two
    again = started_here(out, *TORCHRUN, shard=shard)  # nothing is left to do, and nobody waits for anybody
    said, _ = again.communicate(timeout=400)
    assert again.returncode == 0, said
    assert f"every run in {out} is done" in said


def test_ctrl_c_under_torchrun_saves_and_says_so_once(folder, two):
    out = folder / "interrupted"
    process = started_here(out, *TORCHRUN)
    until_step(process, 1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to torchrun and to both ranks
    said, _ = process.communicate(timeout=400)
    assert said.count("interrupted; everything up to the last finished step is saved. Type: retrain resume") == 1, said
    assert process.returncode != 0
    assert execute(check(read_plan(out, on_ranks(2))), NullObserver()).exit_status == 0
    assert left_by(out) == two


@pytest.mark.parametrize("shard", ["dp", "fsdp2"])
def test_ctrl_c_saves_and_says_so_once(folder, two, shard):
    out = folder / f"by_hand_{shard}"
    process = started_here(out, sets="backend.ranks=2", shard=shard)
    until_step(process, 1)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 130
    assert said.count("interrupted; everything up to the last finished step is saved. Type: retrain resume") == 1, said
    assert execute(check(read_plan(out, [])), NullObserver()).exit_status == 0
    assert left_by(out) == two


def test_ranks_end_with_rank_0(folder):
    process = started_here(folder / "headless", sets="backend.ranks=2")
    until_step(process, 1)
    (other,) = psutil.Process(process.pid).children()
    process.kill()
    said, _ = process.communicate(timeout=100)  # until nobody writes there any more
    assert "rank 1 ends: rank 0 is gone" in said
    psutil.wait_procs([other], timeout=20)
    assert not other.is_running()


@pytest.mark.filterwarnings("ignore:.*websockets.*:DeprecationWarning")
def test_with_servers_ranks_share_the_update_alone(tmp_path, model, monkeypatch):
    server, found, asked, ask = StandIn(model), [], [], Ranks.ask
    monkeypatch.setattr(Ranks, "ask", lambda self, name, *args: (asked.append(name), ask(self, name, *args))[1])
    served = ["inference.engine='vllm'", f"inference.url='{server.url}'", "training.micro_batch_tokens=40"]
    quiet = ["squeeze.enabled=false", "evaluation.problems=0", "training.eval_every=0"]
    try:
        for name, sets in (("alone", on_ranks(1)), ("together", on_ranks(2)), ("parted", on_ranks(2, "fsdp2"))):
            loaded = load(campaign(tmp_path, model, steps=2), [*quiet, *served, *sets])
            assert launch(loaded, tmp_path / name, NullObserver()).exit_status == 0
            found.append({key: rows for key, rows in left_by(tmp_path / name).items() if "metrics" in key})
    finally:
        server.close()
    assert set(asked) == {"load", "scores", "passes", "share_weights"}
    assert asked.count("passes") == 2 * 8
    assert (
        max(distance(each, found[0]) for each in found) < 1e-3
    )  # what is sampled depends on what reaches the server together


def test_what_does_not_go_with_ranks_is_refused_with_its_line(tmp_path):
    file = tmp_path / "wrong.toml"
    launched = '[inference]\nengine = "vllm"\nlaunch = "vllm serve {model} --enable-lora"'
    file.write_text(f'{launched}\n[backend]\nshard = "dp"\n')
    with pytest.raises(ConfigError, match=r'backend\.shard .*servers that are launched here.*shard = "none"'):
        load(file)


def test_a_backend_of_the_users_has_no_ranks(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text('[backend]\nbackend = "own:Own"\nshard = "dp"\n')
    with pytest.raises(ConfigError, match=r"backend\.shard  is \"dp\", and own:Own computes its updates itself"):
        load(file)


def test_several_gpus_are_for_ranks(tmp_path):
    file = tmp_path / "gpus.toml"
    file.write_text('[backend]\ndevices = "gpu:0-1"\n')
    with pytest.raises(ConfigError, match="one process trains on one device"):
        load(file)
    file.write_text('[backend]\ndevices = "gpu:0-1"\nshard = "dp"\n')
    assert load(file).config.backend.named_gpus == ["gpu:0", "gpu:1"]


def torchrun(monkeypatch, count: int) -> None:
    """As the first of so many processes that torchrun has started."""
    there = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    for name, value in there.items():
        monkeypatch.setenv(name, value)


def test_torchrun_without_shard_is_refused(tmp_path, monkeypatch):
    torchrun(monkeypatch, 2)
    with pytest.raises(UsageError, match=r'started 2 process\(es\), .* type --set backend.shard="dp"'):
        execute(planned(tmp_path / "out", []), NullObserver())
    assert not (tmp_path / "out").exists()


def test_torchrun_with_workers_is_refused(tmp_path, monkeypatch):
    torchrun(monkeypatch, 2)
    with pytest.raises(UsageError, match=r'of executor = "processes" start their ranks themselves: start retrain with'):
        execute(planned(tmp_path / "out", [*on_ranks(2), "campaign.executor=processes"]), NullObserver())
    assert not (tmp_path / "out").exists()


def test_torchrun_counts(tmp_path, monkeypatch):
    torchrun(monkeypatch, 2)
    config = planned(tmp_path / "out", on_ranks(3)).specs[0].config
    with pytest.raises(UsageError, match=r"ranks = 3, and torchrun has started 2: type --set backend\.ranks=2"):
        team.Team(config).ranks()


def test_every_rank_has_a_gpu_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = planned(tmp_path / "out", on_ranks(3)).specs[0].config
    with pytest.raises(UsageError, match=r"3 ranks, .* means 2 GPU\(s\).*type --set backend\.ranks=2"):
        team.Team(config).ranks()
