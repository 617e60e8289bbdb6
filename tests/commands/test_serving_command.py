from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from helpers.campaigns import run_cli, toy_world, train_quietly
from helpers.models import TINY_RUN

from retrain.adapters.sources import sources

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("served")
    model = toy_world(home).rename(home / "toy")
    reward = f'[reward]\ntype = "custom"\ncustom_module = "{home / "toyrewards.py"}"\nworkers = 1\n'
    train_quietly(home, TINY_RUN.format(model=model) + "max_tokens = 8\n" + reward)
    return home


class Running:
    """``retrain serve`` with these arguments, and a client of it."""

    def __init__(self, *arguments: object, **environment: str):
        command = [sys.executable, "-m", "retrain", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), self.process.communicate(timeout=60)
        names, _, self.url = line.removeprefix("serving ").strip().partition(" at ")
        self.names = names.split(",")

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0)

    def end(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with self.process:  # closes its pipes
            pass


def test_a_run_and_further_adapters_for_openai_s_client(home):
    """The run under its directory's name, over the base that it was trained on; another name for its checkpoint."""
    with Running(home / "out", "--adapter", f"same={home / 'out' / 'final'}") as server:
        assert server.names == ["toy", "out", "same"]
        assert server.url.startswith("http://127.0.0.1:")
        with server.client() as client:
            assert [card.id for card in client.models.list()] == server.names
            asked = {"prompt": "12 + 34", "max_tokens": 12, "seed": 3, "logprobs": 0}
            said = {name: client.completions.create(model=name, **asked).choices[0] for name in server.names}
            assert said["out"] == said["same"]
            assert said["toy"].logprobs.token_logprobs != said["out"].logprobs.token_logprobs
            chat = {"messages": [{"role": "user", "content": "12"}], "seed": 1, "max_completion_tokens": 20}
            whole = client.chat.completions.create(model="out", **chat)
            parts = client.chat.completions.create(model="out", **chat, stream=True)
            assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.completions.create(model="nobody", **asked)
            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                client.completions.create(model="toy", prompt="a", max_tokens=-1)
            streamed = {"model": "out", "prompt": "a", "max_tokens": 300, "stream": True}
            begin = time.monotonic()
            parts = client.completions.create(**streamed, extra_body={"ignore_eos": True})
            seconds = [time.monotonic() - begin for _ in parts]
            assert seconds[0] < seconds[-1] / 2  # tokens are sent while others are drawn
            left = client.completions.create(**streamed)
            next(iter(left))
            left.close()  # a client that leaves is no reason for a word
        assert server.end() == (0, "", "")


def test_what_runs_is_finished_and_what_comes_later_is_not_begun(home):
    with Running(home / "toy") as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        assert server.names == ["toy"]
        client.completions.create(model="toy", prompt="a", max_tokens=1)  # what takes time the first time
        body = {"ignore_eos": True, "return_token_ids": True}
        ask = partial(client.completions.create, model="toy", prompt="a", n=8, max_tokens=500, extra_body=body)
        answer = pool.submit(ask)
        time.sleep(0.2)
        assert not answer.done()
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        with suppress(httpx.TransportError):  # as soon as nobody listens any more
            while time.monotonic() - begin < 60:
                httpx.get(server.url + "/models")
        assert answer.result(60).usage.completion_tokens == 8 * 500
        assert server.process.wait(60) == 0


def test_a_half_sent_request_is_closed(home):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with Running(home / "toy", "--timeout", 1) as server:
        address = ("127.0.0.1", httpx.URL(server.url).port)
        with socket.create_connection(address, timeout=20) as half:
            half.sendall(head + b"Content-Length: 1000\r\n\r\n" + b'{"prompt": "1')
            assert half.recv(100) == b""


def refused(*arguments: object) -> str:
    result = run_cli("serve", *arguments)
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    return line


def test_what_is_refused_before_anything_is_loaded(home, tmp_path, monkeypatch):
    out = home / "out"
    monkeypatch.delenv("NO_KEY", raising=False)
    monkeypatch.setenv("ODD_KEY", "a b ")
    assert "--api-key-env" in refused(out, "--host", "192.168.7.9")
    assert "NO_KEY is not set" in refused(out, "--host", "0.0.0.0", "--api-key-env", "NO_KEY")
    assert "ODD_KEY" in refused(out, "--api-key-env", "ODD_KEY")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port 0" in refused(out, "--port", taken.getsockname()[1])
    assert "NAME=DIR" in refused(out, "--port", 0, "--adapter", "x")
    assert "two adapters are called out" in refused(out, "--port", 0, "--adapter", f"out={out}")
    assert "the base's name" in refused(out, "--port", 0, "--adapter", f"toy={out}")
    assert "holds no adapter" in refused(tmp_path, "--port", 0)
    assert "--base" in refused("tiny-reasoner", "--port", 0, "--base", "tiny-reasoner")
    (tmp_path / "notes.txt").write_text("x")
    assert "not a TOML file" in refused(tmp_path / "notes.txt", "--port", 0)
    assert "nobody/nothing" in refused("nobody/nothing", "--port", 0)


def test_a_campaign_and_a_file(home, silent_campaign):
    given = sources(str(silent_campaign / "out"))
    assert (given.name, len(given.adapters)) == ("model", 4)
    assert all((path / "adapter_model.safetensors").is_file() for path in given.adapters.values())
    assert sources(str(silent_campaign / "silent.toml")).adapters == {}
    assert sources("tiny-reasoner").config.model.model == "tiny-reasoner"
    assert sources(str(home / "out" / "final")).adapters.keys() == {"out"}
