"""Servers that several workers share: who keeps them alive, and what workers do when they come, go and move."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fleet_cases import Heard, recorded, whole
from served_cases import apart, engine_of, publish, requests, served_world, weights
from standin import StandIn
from toycampaign import campaign, toy_world
from toymodels import config_errors

from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.planning.references import check
from retrain.campaign.running.controller import execute, launch
from retrain.campaign.running.executors import slots_of
from retrain.config import load, parse_dict
from retrain.engines.server import engine as engine_module
from retrain.engines.server import launch as launching
from retrain.engines.server import pool as pooling
from retrain.engines.server.canary import canaries
from retrain.engines.server.client import Server, Unreached
from retrain.engines.server.dialects import DIALECTS
from retrain.engines.server.fleet import Launches, Told, shares
from retrain.engines.server.launch import Launched
from retrain.errors import ServerFailed, UsageError
from retrain.files import read_json
from retrain.record.observer import NullObserver

model, base, lanes, *_ = served_world()
SERVE = f"{sys.executable} -m retrain serve {{model}} --port {{port}}"
SLEEPER = f"{sys.executable} -c 'import time; time.sleep(600)'"
WORKERS = ("campaign.executor=processes", "campaign.workers=2", "campaign.lanes=2", "backend.devices=cpu")
QUIET = ("training.save_every=1", "squeeze.enabled=false", "training.eval_every=0")


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.02)


def unheard(text: str, level: str) -> None:
    """Nobody hears this."""


# -- one server --------------------------------------------------------------------------------------------------------


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    """Also where that is killed, and with what the server has started itself."""
    program = tmp_path / "server.py"
    program.write_text(
        "import pathlib, subprocess, sys, os, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    owner = (
        "import pathlib, sys, time\nfrom retrain.engines.server.launch import Launched\n"
        f"Launched({f'{sys.executable} {program}'!r}, 'm', pathlib.Path({str(tmp_path)!r}), None, False, print)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", owner])
    eventually(lambda: (tmp_path / "pids").is_file() and len((tmp_path / "pids").read_text().split()) == 2)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    process.kill()
    process.wait()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert not psutil.pid_exists(read_json(tmp_path / "server.json")["pid"])


def test_a_server_that_hangs_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "LOOK_S", 0.05)
    monkeypatch.setattr(launching, "ANSWER_S", 0.2)
    monkeypatch.setattr(launching, "HUNG_S", 1.0)
    program, told = tmp_path / "server.py", []
    program.write_text(
        "import http.server, sys, time\n"
        "class Once(http.server.BaseHTTPRequestHandler):\n"
        "    asked = 0\n"
        "    def do_GET(self):\n"
        "        Once.asked += 1\n"
        "        if Once.asked > 3: time.sleep(600)\n"
        "        self.send_error(404)\n"
        "    def log_message(self, *words): pass\n"
        "host, port = (sys.argv[sys.argv.index(key) + 1] for key in ('--host', '--port'))\n"
        "print('at', host, flush=True)\n"
        "http.server.HTTPServer((host, int(port)), Once).serve_forever()\n"
    )
    launched = Launched(
        f"{sys.executable} {program}", "m", tmp_path, None, False, lambda text, level: told.append(text)
    )
    first = read_json(tmp_path / "server.json")["pid"]
    eventually(lambda: told)
    assert told[0].startswith("the server has died (no answer for 1 s) and is started again")
    assert not psutil.pid_exists(first)
    eventually(lambda: "at 127.0.0.1" in (tmp_path / "server.log").read_text())
    launched.close()


def test_a_server_listens_where_it_is_told(tmp_path):
    def words(command: str, host: str = "10.0.0.3") -> list[str]:
        return launching._filled(command, "m", host)[0]

    assert words("serve {model} --port 8")[3:] == ["8", "--host", "10.0.0.3"]
    assert words("serve --port 8 --host 0.0.0.0") == ["serve", "--port", "8", "--host", "0.0.0.0"]
    assert words("serve --port=8 --bind={host}") == ["serve", "--port=8", "--bind=10.0.0.3"]
    assert launching._filled("serve --port 8 --host 10.0.0.9", "m", "127.0.0.1")[1:] == ("10.0.0.9", 8)
    assert launching._filled("serve --port=8 --host=0.0.0.0", "m", "127.0.0.1")[1:] == ("127.0.0.1", 8)
    launched = Launched(SLEEPER, "m", tmp_path, None, False, unheard, host="127.0.0.2", name="second")
    assert launched.url == f"http://127.0.0.2:{launched.port}"
    assert (tmp_path / "second.log").is_file()
    launched.close()


def test_a_server_that_was_let_go_of_is_away(tmp_path):
    """For a request that waited for its turn while its node was lost."""

    async def asked() -> bool:
        server = Server("http://127.0.0.1:9", DIALECTS["vllm"], "", 5.0, 4)
        await server.open()
        await server.close()
        with pytest.raises(Unreached):
            await server.get("/health")
        return await server.check()

    assert not asyncio.run(asked())


def test_a_server_ends_with_its_minder(tmp_path):
    launched = Launched(SLEEPER, "m", tmp_path, None, False, unheard)
    minder = psutil.Process(read_json(tmp_path / "server.json")["pid"])
    eventually(minder.children)
    (server,) = minder.children()
    eventually(lambda: "time.sleep(600)" in " ".join(server.cmdline()))
    launched._closing.set()  # which nobody starts again
    minder.kill()
    eventually(lambda: not server.is_running())


def test_a_minder_ends_as_its_command_does(tmp_path):
    for end, status in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)):
        words = [sys.executable, launching.minder.__file__, sys.executable, "-c", end]
        with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as process:
            assert process.wait(20) == status


# -- several -----------------------------------------------------------------------------------------------------------


def test_replicas_divide_up_the_gpus(tmp_path):
    assert shares("0,1, 4,5", 2) == ["0,1", "4,5"]
    assert shares("3", 1) == ["3"]
    assert shares(None, 2) == [None, None]
    script = tmp_path / "dies.py"
    script.write_text("import os\nprint('has', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nraise SystemExit(3)")
    asked = {"engine": "vllm", "launch": f"{sys.executable} {script}", "launch_gpus": "2,3", "replicas": 2}
    made = Launches(parse_dict({"inference": asked}), tmp_path, unheard)
    assert len(set(made.urls)) == 2
    eventually(lambda: made.gave_up)
    assert "died 4 times in a row, last by exit status 3" in made.gave_up
    assert ["has 2" in (tmp_path / f"server_{n}.log").read_text() for n in (1, 2)] == [True, False]
    assert "has 3" in (tmp_path / "server_2.log").read_text()
    made.close()
    with pytest.raises(UsageError, match="no program 'no-such-program'"):
        Launches(parse_dict({"inference": asked | {"launch": "no-such-program"}}), tmp_path, unheard)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(engine_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(pooling, "PROBE_S", (0.05, 0.1))


def test_an_engine_follows_its_servers(tmp_path, model, base, lanes, quick):
    """They join, move and go, while it samples; what is sampled is what the adapter says, wherever it is."""
    first, second, told = StandIn(model), StandIn(model), []
    kept = Told()
    kept.tell([first.url])
    engine = engine_of(
        base, [], tmp_path / "adapters", fleet=kept, patience_s=30.0, tell=lambda text, level: told.append(text)
    )
    own = weights(lanes, 3)
    ref = publish(engine, own)

    def right() -> None:
        asked = requests(ref)
        assert apart(base, lanes, own, asked, engine.sample(asked)) < 1e-4

    right()
    assert (len(first.asked), len(second.asked)) == (6, 0)
    kept.tell([first.url, second.url])
    eventually(lambda: f"{second.url} has joined" in told)
    engine.forget_sequences()
    right()
    assert second.asked
    first.stop()
    kept.tell([second.url])
    eventually(lambda: [server.url for server in engine.pool.servers] == [second.url])
    asked_before = len(second.asked)
    right()
    assert len(second.asked) == asked_before + 6
    assert not [line for line in told if first.url in line]  # nobody misses it
    kept.tell([], "they died")
    with pytest.raises(ServerFailed, match="they died"):
        right()
    engine.close()
    kept.tell([first.url])  # which nobody hears any more
    first.service.close()
    second.close()


def test_a_server_that_is_given_up_while_it_is_tried_costs_nothing(tmp_path, model, base, lanes, quick):
    """The trial goes on with the one that comes in its place."""
    first, second, kept = StandIn(model), StandIn(model), Told()
    kept.tell([first.url])
    engine = engine_of(base, [], tmp_path / "adapters", fleet=kept, patience_s=30.0)

    def moves(status: int, payload: object) -> None:
        threading.Thread(target=first.stop).start()
        kept.tell([second.url])

    first.always = moves
    found = list(canaries(engine, base, lanes, [(4, 8.0, 1.0, 1e-4)]))
    assert len(found) == 1
    assert 0 < found[0].tokens <= 96
    assert len(second.asked) > len(first.asked) > 0
    engine.close()
    first.service.close()
    second.close()


def test_an_engine_waits_for_the_first_address(tmp_path, model, base, monkeypatch):
    never = Told()
    with pytest.raises(UsageError, match=r"no server could be started within 0\.2 s"):
        engine_of(base, [], tmp_path / "a", fleet=never, patience_s=0.2)
    never.tell([], "the server died 4 times")
    with pytest.raises(UsageError, match=r"\[inference\] launch: the server died 4 times"):
        engine_of(base, [], tmp_path / "a", fleet=never, patience_s=30.0)


# -- campaigns ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return toy_world(tmp_path_factory.mktemp("toy"))


def test_workers_share_the_servers_of_an_address(tmp_path, toy, quick):
    server, heard = StandIn(toy), Heard()
    sets = [*QUIET, *WORKERS, "inference.engine=vllm", f'inference.url="{server.url}"']
    assert launch(load(campaign(tmp_path, toy, steps=3), sets), tmp_path / "out", heard).exit_status == 0
    whole(tmp_path / "out")
    assert heard.workers == {"1 cpu", "2 cpu"}
    assert sum(line.startswith("canary: base within") for line in heard.lines) == 2
    assert server.adapters == []
    server.close()


def test_workers_share_servers_that_the_controller_keeps(tmp_path, toy):
    """One is killed on the way; a squeeze analysis, in a worker, is sampled there as well."""
    killed = []

    def kill(count: int) -> None:
        if count == 4:
            killed.append(read_json(tmp_path / "out/server_1.json")["pid"])
            os.killpg(killed[0], signal.SIGKILL)

    heard = Heard(kill)
    sets = [*QUIET, *WORKERS, "inference.engine=openai", f"inference.launch='{SERVE}'", "inference.replicas=2"]
    sets += ["inference.patience_s=120", "squeeze.enabled=true"]
    outcome = launch(load(campaign(tmp_path, toy, steps=3), sets), tmp_path / "out", heard)
    assert outcome.exit_status == 0
    assert outcome.summary["squeeze"]["verified"]["full"]["accuracy"] is not None
    whole(tmp_path / "out")
    assert sum(line.startswith("the server has died (signal 9) and is started again") for line in heard.lines) == 1
    assert any(recorded(tmp_path / "out", "the server has died (signal 9) and is started again"))
    assert len({line.split()[2] for line in heard.lines if line.startswith("canary at")}) == 2
    assert not psutil.pid_exists(killed[0])


def test_servers_and_workers_end_with_their_controller_and_another_goes_on(tmp_path, toy):
    out = tmp_path / "out"
    path = campaign(tmp_path, toy, steps=3)
    sets = [*QUIET, *WORKERS, "inference.engine=openai", f"inference.launch='{SERVE}'", "inference.patience_s=120"]
    words = [word for text in sets for word in ("--set", text)]
    command = [sys.executable, "-m", "retrain", "train", path, "--out", out, *words, "--verbose"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step "))
        server = psutil.Process(read_json(out / "server.json")["pid"])
        workers = [child for child in psutil.Process(process.pid).children() if child.pid != server.pid]
        process.kill()
    gone, there = psutil.wait_procs([server, *workers], timeout=90)
    assert (len(gone), there) == (3, [])
    heard = Heard()
    assert execute(check(read_plan(out)), heard).exit_status == 0
    whole(out)


def test_a_command_that_is_no_server_ends_the_campaign_with_what_it_said(tmp_path, toy):
    dies = f"{sys.executable} -c 'raise SystemExit(\"no such option\")'"
    sets = [*QUIET, *WORKERS, "inference.engine=openai", f'inference.launch="""{dies}"""', "inference.patience_s=120"]
    with pytest.raises(UsageError, match=r"(?s)launch: the server died 4 times in a row.*no such option"):
        launch(load(campaign(tmp_path, toy, steps=3), sets), tmp_path / "out", NullObserver())


# -- what does not go together -----------------------------------------------------------------------------------------

LAUNCH = {"engine": "vllm", "launch": "vllm serve"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"inference": {"engine": "vllm", "url": "http://a", "replicas": 2}}, "replicas  has no effect without launch"),
        ({"inference": LAUNCH | {"launch_gpus": "0,1,2", "replicas": 2}}, "has 3, which 2 replicas cannot divide up"),
        ({"campaign": {"executor": "slurm", "workers": 2}, "inference": LAUNCH}, "is no node with a GPU"),
        ({"campaign": {"executor": "ray"}, "inference": LAUNCH | {"launch_gpus": "0"}}, "[ray] server_gpus = 1"),
        ({"campaign": {"executor": "processes"}, "inference": LAUNCH | {"sleep": True}}, "sleep = false"),
    ],
)
def test_what_does_not_go_together_is_said(data, says):
    assert says in config_errors(data)


def test_workers_have_the_gpus_that_servers_leave(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def slots(gpus: str | None = None, devices: object = "auto", **keys):
        asked = LAUNCH | ({"launch_gpus": gpus} if gpus else {}) | keys
        campaigns = {"executor": "processes"}
        found = slots_of(parse_dict({"campaign": campaigns, "inference": asked, "backend": {"devices": devices}}))
        return [slot.device for slot in found]

    assert slots("2,3") == slots("2,3", "all") == ["gpu:0", "gpu:1"]
    assert slots("2,3", ["gpu:1"]) == ["gpu:1"]
    with pytest.raises(UsageError, match=r"devices has gpu:2, which \[inference\] launch_gpus gives to the servers"):
        slots("2,3", "gpu:1-2")
    with pytest.raises(UsageError, match=r'which of 4 GPUs are theirs: type --set inference.launch_gpus="3"'):
        slots()
    with pytest.raises(UsageError, match="gives all 4 GPUs to the servers"):
        slots("0,1,2,3")
    with pytest.raises(UsageError, match=r"launch_gpus has gpu:2, and this machine shows 0, 1, 2, 3: it names GPUs as"):
        slots("gpu:2")
    with pytest.raises(UsageError, match=r"launch_gpus has 2, twice"):
        slots("2,2", replicas=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert slots("7") == ["gpu:0", "gpu:1", "gpu:2"]
    with pytest.raises(UsageError, match=r'launch_gpus has 1, and this machine shows 4, 5, 6, 7: .*launch_gpus="7"'):
        slots("1")
