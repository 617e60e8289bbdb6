"""Campaigns that servers sample for: as good as our own engine, whatever happens to the servers."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from fleet_cases import recorded
from standin import StandIn
from toycampaign import StopAfter, campaign, toy_world
from toymodels import Messages

from retrain.campaign.running.controller import launch, resume
from retrain.campaign.running.models import Bases
from retrain.config import load, parse_dict
from retrain.engines.server import engine as engine_module
from retrain.engines.server.launch import Launched
from retrain.errors import ModelError, RetrainError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.record.observer import NullObserver

QUIET = ("training.save_every=2", "squeeze.enabled=false", "campaign.lanes=4")
SERVED = ('inference.engine="vllm"', "inference.patience_s=1.0", "inference.timeout_s=20.0")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return toy_world(tmp_path_factory.mktemp("served"))


@pytest.fixture
def server(model, monkeypatch):
    monkeypatch.setattr(engine_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(engine_module, "START_PATIENCE_S", 1.0)
    made = StandIn(model)
    yield made
    made.close()


def rows_of(directory: Path) -> dict[str, list]:
    names = sorted(path.name for path in (directory / "runs").iterdir())
    return {name: read_jsonl(directory / "runs" / name / "metrics.jsonl") for name in names}


def test_a_cohort_is_sampled_by_servers_and_trained_here(tmp_path, model, server):
    path, told = campaign(tmp_path, model, steps=4), Messages()
    sets = [*QUIET, *SERVED, f'inference.url="{server.url}"']
    assert launch(load(path, sets), tmp_path / "out", told).exit_status == 0
    assert any(line.startswith("canary: base within") for line in told.lines)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 4
    for own in rows.values():
        assert len(own) == 4
        for row in own:
            assert row["kl_sample_train_v2"] < 1e-9
            assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)
            assert row["entropy"] is None
    assert len({row["mean_reward"] for own in rows.values() for row in own}) > 8
    # Every version that was asked for had a name of its own, and none is left behind.
    models = {body["model"] for body in server.asked if not body["model"].startswith("canary")}
    assert len({name.rpartition(".")[0] for name in models}) >= 4 * 4
    assert server.adapters == []
    assert not (tmp_path / "out/adapters").exists()
    assert read_json(tmp_path / "out/runs" / next(iter(rows)) / "config.json")["built"]["engine"] == "ServerEngine"
    squeezed = launch(load(path, [*sets, "squeeze.enabled=true"]), tmp_path / "squeezed", NullObserver())
    assert squeezed.summary["squeeze"]["verified"]["full"]["accuracy"] is not None


def test_a_server_that_stays_away_stops_the_runs_with_everything_saved(tmp_path, model, server):
    path = campaign(tmp_path, model, steps=4)
    sets = [*QUIET, *SERVED, f'inference.url="{server.url}"', "training.eval_every=0"]
    whole = launch(load(path, sets), tmp_path / "whole", NullObserver())
    assert whole.exit_status == 0

    class Killer(NullObserver):
        left = 12

        def step(self, spec, row):
            self.left -= 1
            if self.left == 0:
                server.stop()

    with pytest.raises(RetrainError, match=r"(?s)no server answers.*retrain resume") as caught:
        launch(load(path, sets), tmp_path / "out", Killer())
    assert caught.value.exit_status == 1
    assert all(recorded(tmp_path / "out", f"{server.url} is left out: "))
    assert all(recorded(tmp_path / "out", "no server answers, for "))
    runs = read_json(tmp_path / "out/manifest.json")["runs"]
    assert {run["state"] for run in runs} == {"interrupted"}
    for run in runs:
        assert (tmp_path / "out" / run["path"] / "checkpoints/step_000003").is_dir()  # the steps before are saved
    with pytest.raises(UsageError, match="no server answers"):
        resume(tmp_path / "out", NullObserver())
    server.start()
    assert resume(tmp_path / "out", NullObserver()).exit_status == 0
    again = rows_of(tmp_path / "out")
    for name, own in rows_of(tmp_path / "whole").items():
        assert [row["mean_reward"] for row in again[name]] == [row["mean_reward"] for row in own]


def test_a_server_that_computes_something_else_is_refused_before_step_0(tmp_path, model, server):
    import toymodels

    other = StandIn(toymodels.qwen3_directory(tmp_path / "other", ["12+34=? the answer is"], seed=3))
    path = campaign(tmp_path, model, steps=2)
    with pytest.raises(ModelError):
        launch(load(path, [*QUIET, *SERVED, f'inference.url="{other.url}"']), tmp_path / "out", NullObserver())
    assert not list((tmp_path / "out").rglob("metrics.jsonl"))
    other.close()


# -- servers that are started here ------------------------------------------------------------------------------------


SERVE = f"{sys.executable} -m retrain serve {{model}} --port {{port}}"


def test_a_launched_server_that_is_killed_is_started_again(tmp_path, model, monkeypatch):
    monkeypatch.setattr(engine_module, "PAUSE_S", 0.01)
    path, told = campaign(tmp_path, model, steps=3), Messages()
    identity, seen = tmp_path / "out/server.json", []

    class Kill(NullObserver):
        steps = 0

        def step(self, spec, row):
            self.steps += 1
            if self.steps == 7 and not seen:  # the first step of the second cohort
                seen.append(read_json(identity)["pid"])
                os.kill(seen[0], signal.SIGKILL)

        def message(self, text, level="info"):
            told.message(text)
            if text.startswith("the server has died"):
                seen.append(text)

    sets = [*QUIET, 'inference.engine="openai"', "inference.patience_s=120", f"inference.launch='{SERVE}'"]
    sets.append("campaign.lanes=2")
    assert launch(load(path, sets), tmp_path / "out", Kill()).exit_status == 0
    assert "signal 9" in seen[1]
    assert sum(recorded(tmp_path / "out", "the server has died (signal 9) and is started again")) == 2
    assert all("canary: base within" in log.read_text() for log in (tmp_path / "out").glob("runs/*/run.log"))
    assert not identity.exists()
    assert not alive(seen[0])
    assert "serving" in (tmp_path / "out/server.log").read_text()
    for own in rows_of(tmp_path / "out").values():
        assert max(row["kl_sample_train_v2"] for row in own) < 1e-9


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_command_that_dies_is_given_up_with_what_it_said(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os\nprint('no GPU for', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nraise SystemExit(3)"
    )
    told = []
    launched = Launched(
        f"{sys.executable} {script} --port 1234", "m", tmp_path, "5", False, lambda text, level: told.append(text)
    )
    deadline = time.monotonic() + 60
    while not launched.gave_up and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "died 4 times in a row, last by exit status 3" in launched.gave_up
    assert "no GPU for 5" in launched.gave_up
    assert launched.port == 1234
    assert len(told) == 3
    launched.close()


def test_a_server_that_cannot_be_started_again_is_given_up(tmp_path):
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\nsleep 600\n")
    program.chmod(0o755)
    launched = Launched(str(program), "m", tmp_path, None, False, lambda text, level: None)
    program.unlink()
    os.killpg(read_json(tmp_path / "server.json")["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not launched.gave_up and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "died (signal 9) and cannot be started again: [inference] launch: " in launched.gave_up
    launched.close()


def test_a_server_stays_for_adapters_of_another_rank(tmp_path, model, server):
    with Bases() as bases:
        engines = []
        for rank in (4, 8):
            sections = {"model": {"model": str(model), "lora_rank": rank}, "backend": {"devices": "cpu"}}
            config = parse_dict({**sections, "inference": {"engine": "vllm", "url": server.url}})
            engines.append(bases.take_served(config, tmp_path / "out")[2])
    assert engines[0] is engines[1]


def test_a_server_whose_owner_was_killed_is_ended_at_the_next_start(tmp_path):
    sleeper = f"{sys.executable} -c 'import time; time.sleep(600)'"
    first = Launched(sleeper, "m", tmp_path, None, False, lambda text, level: None)
    first._closing.set()  # as if its process were gone
    pid, told = read_json(tmp_path / "server.json")["pid"], []
    second = Launched(sleeper, "m", tmp_path, None, False, lambda text, level: told.append(text))
    first._process.wait(10)
    assert not alive(pid)
    assert told == [f"ending the server that an earlier process left behind (process {pid})"]
    now = read_json(tmp_path / "server.json")["pid"]
    second.close()
    assert not alive(now)


def test_what_cannot_be_launched(tmp_path):
    for command, words in (("no-such-program --x", "there is no program 'no-such-program'"), ("a 'b", "No closing")):
        with pytest.raises(UsageError, match=words):
            Launched(command, "m", tmp_path, None, False, lambda text, level: None)


def test_a_campaign_that_is_stopped_goes_on_with_its_servers(tmp_path, model, server):
    path = campaign(tmp_path, model, steps=4)
    sets = [*QUIET, *SERVED, f'inference.url="{server.url}"']
    outcome = launch(load(path, sets), tmp_path / "out", StopAfter(6))
    assert outcome.exit_status == 130
    assert server.adapters == []
    assert resume(tmp_path / "out", NullObserver()).exit_status == 0
    assert {len(own) for own in rows_of(tmp_path / "out").values()} == {4}
