"""Servers that are started here and shared by workers: who keeps them alive, and what engines do meanwhile."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.campaigns import eventually
from helpers.servers import StandIn, apart, engine_of, publish, requests, served_world, weights
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from retrain.campaign.executors.table import slots_of
from retrain.config import parse_dict
from retrain.engines.server import launch as launching
from retrain.engines.server.automatic import VARIABLES
from retrain.engines.server.fleet import LocalFleet, RemoteFleet, gpu_shares, model_argument
from retrain.engines.server.launch import HealthWaits, ServerProcess, server_environment
from retrain.errors import ModelError, ServerFailed, UsageError
from retrain.files import read_json
from retrain.serving.listening import listening_socket

model, base, lanes, *_ = served_world()
SLEEPER = f"{sys.executable} -c 'import time; time.sleep(600)'"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def launched(tmp_path, told) -> Iterator:
    """Starts servers of the directory, which are closed at the end."""
    made: list[ServerProcess] = []

    def start(command: str, gpus: str | None = None, **keys) -> ServerProcess:
        made.append(
            ServerProcess(
                command, "m", tmp_path, server_environment(gpus), lambda text, level: told.append(text), **keys
            )
        )
        return made[-1]

    yield start
    for server in made:
        server.close()


def pid_in(folder: Path, name: str = "server") -> int:
    return read_json(folder / f"{name}.json")["pid"]


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
        "import pathlib, sys, time\nfrom retrain.engines.server.launch import ServerProcess\n"
        f"ServerProcess({f'{sys.executable} {program}'!r}, 'm', pathlib.Path({str(tmp_path)!r}), {{}}, print)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", owner])
    eventually(lambda: (tmp_path / "pids").is_file() and len((tmp_path / "pids").read_text().split()) == 2)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    process.kill()
    process.wait()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in [*pids, pid_in(tmp_path)]))


def test_a_server_that_hangs_is_started_again(tmp_path, launched, told):
    program = tmp_path / "server.py"
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
    launched(f"{sys.executable} {program}", health_waits=HealthWaits(0.05, 0.2, 1.0))
    first = pid_in(tmp_path)
    eventually(lambda: told)
    assert told[0].startswith("the server has died (no answer for 1 s) and is started again")
    assert not psutil.pid_exists(first)
    eventually(lambda: "at 127.0.0.1" in (tmp_path / "server.log").read_text())


def test_a_start_that_fails_is_repeated_only_where_a_port_was_in_use(tmp_path, launched, told):
    script = tmp_path / "dies.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nraise SystemExit(3)")
    composed = f"env {VARIABLES} {sys.executable} {script}"
    server = launched(composed)
    eventually(lambda: server.gave_up)
    assert server.gave_up.startswith("the server died at its start by exit status 3; ")
    assert told == []
    script.write_text("import sys\nprint('OSError: [Errno 98] Address already in use')\nraise SystemExit(1)")
    server = launched(composed, name="other")
    eventually(lambda: server.gave_up)
    assert server.gave_up.startswith("the server died 4 times in a row, last by exit status 1; ")


def test_no_other_process_is_given_the_port_of_a_server(launched):
    server = launched(SLEEPER)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.port))
    with listening_socket("127.0.0.1", server.port):  # as a server binds it
        pass
    server.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.port))


def test_a_server_that_dies_while_the_gpu_is_in_use_is_started_later(tmp_path, launched, told):
    server = launched(SLEEPER)
    first = pid_in(tmp_path)
    server.hold_restarts(True)
    psutil.Process(first).kill()
    eventually(lambda: told)
    assert told[0].startswith("the server has died (signal 9) and is started again when the update ends; its output")
    time.sleep(0.5)
    assert pid_in(tmp_path) == first
    server.hold_restarts(False)
    eventually(lambda: pid_in(tmp_path) != first)


def test_a_server_that_is_not_started_again_can_be_closed(tmp_path, launched, told):
    server = launched(SLEEPER)
    server.hold_restarts(True)
    psutil.Process(pid_in(tmp_path)).kill()
    eventually(lambda: told)
    server.close()
    assert not (tmp_path / "server.json").exists()


def test_a_server_does_not_get_the_trainers_allocator(monkeypatch):
    """vLLM cannot sleep with expandable segments; a user's own setting is the user's concern."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert server_environment(None)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("RETRAIN_OWN_ALLOCATOR", "1")
    assert not {"PYTORCH_ALLOC_CONF", "RETRAIN_OWN_ALLOCATOR"} & server_environment(None).keys()
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")  # by a plug-in
    assert "RETRAIN_OWN_ALLOCATOR" not in server_environment(None)


def test_a_server_gets_the_snapshot_that_is_trained():
    """With a hub name alone, a server would hold the newest revision."""
    repository = Path(constants.HF_HUB_CACHE) / "models--own--model"
    for revision, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    for revision, commit in ((None, "a" * 40), ("v1", "b" * 40), ("b" * 40, "b" * 40)):
        config = parse_dict({"model": {"model": "own/model"} | ({"revision": revision} if revision else {})})
        assert model_argument(config) == str(repository / "snapshots" / commit)
    with pytest.raises(ModelError, match="cannot find model own/model at revision v9: "):
        model_argument(parse_dict({"model": {"model": "own/model", "revision": "v9"}}))


@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
def test_pickled_weights_are_downloaded_where_there_are_no_others(tmp_path, monkeypatch, whole):
    def download(name, *, allow_patterns, **options):
        for file in filter_repo_objects(["config.json", whole, "pytorch_model.bin"], allow_patterns=allow_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model_argument(parse_dict({"model": {"model": "own/model"}})) == str(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", whole}


def test_a_server_listens_where_it_is_told(tmp_path, launched):
    def filled(command: str, host: str = "10.0.0.3"):
        return launching._filled(command, "m", host, 9)

    assert filled("serve {model} --port 8")[0][3:] == ["8", "--host", "10.0.0.3"]
    assert filled("serve --port=8 --bind={host}")[0] == ["serve", "--port=8", "--bind=10.0.0.3"]
    assert filled("serve --port 8 --host 10.0.0.9", "127.0.0.1")[1:] == ("10.0.0.9", 8)
    assert filled("serve --port=8 --host=0.0.0.0", "127.0.0.1")[1:] == ("127.0.0.1", 8)
    server = launched(SLEEPER, host="127.0.0.2", name="second")
    assert server.url == f"http://127.0.0.2:{server.port}"
    assert (tmp_path / "second.log").is_file()
    for command, words in (("no-such-program --x", "there is no program 'no-such-program'"), ("a 'b", "No closing")):
        with pytest.raises(UsageError, match=words):
            launched(command)


def test_replicas_divide_up_the_gpus(tmp_path, told):
    assert gpu_shares("0,1, 4,5", 2) == ["0,1", "4,5"]
    assert gpu_shares("3", 1) == ["3"]
    assert gpu_shares(None, 2) == [None, None]
    script = tmp_path / "dies.py"
    script.write_text("import os\nprint('has', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nraise SystemExit(3)")
    asked = {"engine": "vllm", "launch": f"{sys.executable} {script}", "launch_gpus": "2,3", "replicas": 2}
    made = LocalFleet(parse_dict({"inference": asked}), tmp_path, lambda text, level: told.append(text))
    assert len(set(made.urls)) == 2
    eventually(lambda: made.gave_up)
    assert "died 4 times in a row, last by exit status 3" in made.gave_up
    made.close()
    logs = [(tmp_path / f"server_{number}.log").read_text() for number in (1, 2)]
    assert [("has 2" in log, "has 3" in log) for log in logs] == [(True, False), (False, True)]


@pytest.fixture
def two(model) -> Iterator[list[StandIn]]:
    servers = [StandIn(model), StandIn(model)]
    yield servers
    for server in servers:
        server.service.close()


def test_an_engine_follows_its_servers(tmp_path, base, lanes, told, two):
    """They join, move and go, while it samples; what is sampled is what the adapter says, wherever it is."""
    (first, second), fleet = two, RemoteFleet()
    fleet.update([first.url])
    notify = lambda text, level: told.append(text)  # noqa: E731
    engine = engine_of(base, [], tmp_path / "adapters", fleet=fleet, patience_s=30.0, notify=notify)
    own = weights(lanes, 3)
    ref = publish(engine, own)

    def check() -> None:
        asked = requests(ref)
        assert apart(base, lanes, own, asked, engine.sample(asked)) < 1e-4

    check()
    assert (len(first.asked), len(second.asked)) == (6, 0)
    fleet.update([first.url, second.url])
    eventually(lambda: f"{second.url} has joined" in told)
    engine.forget_sequences()
    check()
    assert second.asked
    first.stop()
    fleet.update([second.url])
    eventually(lambda: [server.url for server in engine.pool.servers] == [second.url])
    asked_before = len(second.asked)
    check()
    assert len(second.asked) == asked_before + 6
    assert not [line for line in told if first.url in line]  # nobody misses it
    fleet.update([], "they died")
    with pytest.raises(ServerFailed, match="they died"):
        check()
    engine.close()
    fleet.update([first.url])  # which nobody hears any more


def test_an_engine_waits_for_the_first_address(tmp_path, base):
    never = RemoteFleet()
    with pytest.raises(UsageError, match=r"no server could be started within 0\.2 s"):
        engine_of(base, [], tmp_path / "a", fleet=never, patience_s=0.2)
    never.update([], "the server died 4 times")
    with pytest.raises(UsageError, match=r"\[inference\] launch: the server died 4 times"):
        engine_of(base, [], tmp_path / "a", fleet=never, patience_s=30.0)


LAUNCH = {"engine": "vllm", "launch": "vllm serve"}


def test_workers_have_the_gpus_that_servers_leave(monkeypatch, gpus):
    gpus.count = 4

    def slots(gpus: str | None = None, devices: object = "auto", **keys):
        inference = LAUNCH | ({"launch_gpus": gpus} if gpus else {}) | keys
        sections = {"campaign": {"executor": "processes"}, "inference": inference, "backend": {"devices": devices}}
        return [slot.device for slot in slots_of(parse_dict(sections))]

    assert slots("2,3") == slots("2,3", "all") == ["gpu:0", "gpu:1"]
    assert slots("2,3", ["gpu:1"]) == ["gpu:1"]
    assert slots(sleep="kv") == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]  # each starts a server of its own
    for asked, says in (
        ({"gpus": "2,3", "devices": "gpu:1-2"}, r"has gpu:2, which \[inference\] launch_gpus gives to the servers"),
        ({}, r'which of 4 GPUs are theirs: type --set inference.launch_gpus="3"'),
        ({"gpus": "0,1,2,3"}, "gives all 4 GPUs to the servers"),
        ({"gpus": "gpu:2"}, r"launch_gpus has gpu:2, and this machine shows 0, 1, 2, 3: it names GPUs as"),
        ({"gpus": "2,2", "replicas": 2}, r"launch_gpus has 2, twice"),
    ):
        with pytest.raises(UsageError, match=says):
            slots(**asked)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert slots("7") == ["gpu:0", "gpu:1", "gpu:2"]
    with pytest.raises(UsageError, match=r'launch_gpus has 1, and this machine shows 4, 5, 6, 7: .*launch_gpus="7"'):
        slots("1")
