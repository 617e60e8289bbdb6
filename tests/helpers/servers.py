"""Inference servers, judges and `retrain serve` inside the test process."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.engines.server import canary
from retrain.engines.server.adapters import AdapterStore
from retrain.engines.server.client import ServerClient
from retrain.engines.server.completions import ServedModel
from retrain.engines.server.dialects import DIALECTS
from retrain.engines.server.engine import ServerEngine
from retrain.engines.server.hypotheses import Hypothesis, ServedTokens, trainer_logprobs
from retrain.engines.server.pool import Waits
from retrain.policy.base import BaseModel, load_base
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.serving.app import app_of
from retrain.serving.listening import listening_socket
from retrain.serving.service import Service
from retrain.types import Action, PolicyRef, Problem, SampleRequest

from .lanes import save_adapter, trained
from .models import qwen3_directory, toy_base

Sent = tuple[int, Any] | None
"""Status and JSON of an answer; None: nothing is sent, and the connection is cut."""
Fault = Callable[[int, Any], Sent | Awaitable[Sent]]
"""From status and JSON of the true answer to what is sent instead. A function that blocks stops the whole server."""


class StandIn:
    """Serves ``model`` until ``close``. Each completion uses up one of ``faults``; ``always`` applies to all of them.
    ``asked`` has the bodies of all completions. Where ``naps`` is a list, it gets the requests to sleep and to wake up,
    and completions and adapters are refused in between; without ``frees_cache`` there is no route that frees the cache
    alone; the server dies at the request ``dies_at``. Where ``listed`` is set, it replaces the list of models."""

    def __init__(self, model: Any, *, key: str | None = None, port: int = 0):
        self.service = Service(load_base(str(model), devices="cpu"), name="base")
        self.app = app_of(self.service, key)
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None
        self.asked: list[dict[str, Any]] = []
        self.naps: list[str] | None = None
        self.frees_cache, self.dies_at, self.is_awake = True, "", True
        self.listed: Any = None
        self.port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def adapters(self) -> list[str]:
        return [name for name in self.service.served if name != "base"]

    def start(self) -> None:
        """Listen, where it listened before."""
        bound = listening_socket("127.0.0.1", self.port)
        self.port = bound.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(self, log_level="critical", lifespan="off", ws="none"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [bound]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        """Listen no longer, and forget the adapters, as a process does that dies."""
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
        self.forget()

    def forget(self) -> None:
        """As a process does that was started anew."""
        for name in self.adapters:
            self.service.unload(name)

    def close(self) -> None:
        self.stop()
        self.service.close()

    async def _naps(self, naps: list[str], scope: Any, receive: Any, send: Any) -> bool:
        """Answer a request to sleep or to wake up, and refuse work meanwhile, as vLLM does; return whether it was."""
        path, query = scope["path"], scope["query_string"].decode()
        if path not in NAP_ROUTES:
            if not self.is_awake and path.rpartition("/")[2] in ("completions", "load_lora_adapter"):
                naps.append(f"refused {path}")
                await Response("asleep", 500)(scope, receive, send)
                return True
            return False
        if path == self.dies_at:
            self.dies_at, self.is_awake = "", True
            threading.Thread(target=self.stop).start()
            while (await receive())["type"] != "http.disconnect":
                pass
            return True
        if path == "/release_kv_cache_memory" and not self.frees_cache:
            await Response(status_code=404)(scope, receive, send)
            return True
        if path == "/release_kv_cache_memory" and naps[-1:] != ["/pause?mode=wait"]:
            await Response("release needs a completed pause", 500)(scope, receive, send)
            return True
        naps.append(f"{path}?{query}" if query else path)
        self.is_awake = path == "/wake_up"
        await Response()(scope, receive, send)
        return True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.naps is not None and (await self._naps(self.naps, scope, receive, send)):
            return
        if scope["path"] == "/v1/models" and self.listed is not None:
            await JSONResponse(self.listed)(scope, receive, send)
            return
        if scope["path"] not in ("/v1/completions", "/generate"):
            path = scope["path"]
            path = f"/v1{path}" if path.endswith("lora_adapter") and not path.startswith("/v1") else path
            await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
            return
        asked = await Request(scope, receive).json()
        self.asked.append(asked)
        generate = scope["path"] == "/generate"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=self.url) as inner:
            headers = {key.decode(): value.decode() for key, value in scope["headers"] if key == b"authorization"}
            answer = await inner.post(
                "/v1/completions", json=_as_completion(asked) if generate else asked, headers=headers, timeout=60
            )
        status, payload = answer.status_code, answer.json()
        if generate and asked["sampling_params"].get("top_k") == 0:  # SGLang's value without top-k is -1
            status, payload = 400, {"error": {"message": "top_k must be -1 (disable) or at least 1"}}
        if generate and status == 200:
            payload = _as_generated(payload, scored=asked["sampling_params"]["max_new_tokens"] == 0)
        fault = self.faults.popleft() if self.faults else self.always
        changed = (status, payload) if fault is None else fault(status, payload)
        if inspect.isawaitable(changed):
            changed = await changed
        if changed is None:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        status, payload = changed
        content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await Response(content, status, media_type="application/json")(scope, receive, send)


def _as_completion(asked: dict[str, Any]) -> dict[str, Any]:
    """SGLang's request in vLLM's words."""
    how = asked["sampling_params"]
    body = {
        "model": asked.get("lora_path", "base"), "prompt": asked["input_ids"], "max_tokens": how["max_new_tokens"],
        "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    if how["max_new_tokens"] == 0:
        assert asked["return_logprob"]
        assert asked["logprob_start_len"] == 0
        return body | {"echo": True}
    same = ("temperature", "top_p", "top_k", "min_p", "n", "stop_token_ids")
    return body | {"seed": how["sampling_seed"]} | {key: how[key] for key in same}


def _as_generated(payload: dict[str, Any], scored: bool) -> dict[str, Any]:
    """vLLM's answer in SGLang's words: a completion, or only the prompt's log-probabilities."""
    choice = payload["choices"][0]
    if scored:
        return {"text": "", "meta_info": {"input_token_logprobs": _triples(choice, "prompt_token_ids")}}
    about = {
        "finish_reason": {"type": choice["finish_reason"]},
        "output_token_logprobs": _triples(choice, "token_ids"),
        "prompt_tokens": len(choice["prompt_token_ids"]),
    }
    return {"text": choice["text"], "meta_info": about}


def _triples(choice: dict[str, Any], tokens: str) -> list[list[Any]]:
    pairs = zip(choice["logprobs"]["token_logprobs"], choice[tokens], strict=True)
    return [[logprob, token, None] for logprob, token in pairs]


NAP_ROUTES = ("/sleep", "/wake_up", "/pause", "/release_kv_cache_memory")
TEXTS = ["12+34=? the answer is \\boxed{46}", canary.TEXT]

IMPATIENT = Waits(pause_s=0.01, probe_s=(0.05, 0.1), start_s=1.0)


def engine_of(
    base: BaseModel, urls: Sequence[str], folder: Path, dialect: str = "vllm",
    client: type[ServerClient] = ServerClient, waits: Waits = IMPATIENT, patience_s: float = 600.0, **keys: Any,
) -> ServerEngine:  # fmt: skip
    """An engine that samples at these addresses through this class of clients."""
    settings = {"key": "", "timeout_s": 60.0, "max_in_flight": 64} | {
        key: keys.pop(key) for key in ("key", "timeout_s", "max_in_flight", "upload") if key in keys
    }
    served = ServedModel(base.name, base.text, base.vocab_size, base.eos_ids, base.context_length)
    store = AdapterStore(folder, base.name, base.dtype)
    engine = ServerEngine(
        served, urls, lambda url: client(url, DIALECTS[dialect], **settings), store,
        waits=replace(waits, patience_s=patience_s), **keys,
    )  # fmt: skip
    try:
        engine.open()
    except Exception:
        engine.close()
        raise
    return engine


def weights(lanes: Lanes, seed: int, rank: int = 4, alpha: float = 8.0, size: float = 0.1) -> LoraWeights:
    """An adapter that changes the model a lot."""
    adapter = lanes.new_adapter(rank, alpha).initialise("served", seed)
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for shape in lanes.shapes:
            adapter.B[shape.name].copy_(size * torch.randn(shape.out_features, rank, generator=stream))
    return adapter.frozen()


def publish(engine: ServerEngine, own: LoraWeights, version: int = 0, run: str = "run") -> PolicyRef:
    engine.publish(ref := PolicyRef(run, version), LocalSnapshot(own))
    return ref


def requests(ref: PolicyRef, count: int = 3, samples: int = 2, **keys: Any) -> list[SampleRequest]:
    given = {"max_tokens": 8, "temperature": 1.0} | keys
    return [SampleRequest(ref, (5 + i, 9, 30 + i), samples, stream=("served", i), **given) for i in range(count)]


def apart(base: BaseModel, lanes: Lanes, own: LoraWeights | None, asked: Sequence[SampleRequest],
          groups: Sequence[Sequence[Action]]) -> float:  # fmt: skip
    """Largest difference of the server's log-probabilities from our own."""
    said = [
        ServedTokens(request.prompt_ids, action.token_ids, action.logprobs_T)
        for request, group in zip(asked, groups, strict=True)
        for action in group
    ]
    mine = trainer_logprobs(base, lanes, said, Hypothesis("", own, asked[0].temperature))
    return float(np.abs(mine - np.concatenate([each.logprobs_T for each in said])).max())


def served_world() -> tuple[Any, ...]:
    """Return fixtures of a module: a toy model's directory, the model loaded as training does, its lanes, and a server
    of that model with the fixture that clears its faults and adapters after each test."""

    @pytest.fixture(scope="module")
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return qwen3_directory(tmp_path_factory.mktemp("served") / "model", TEXTS)

    @pytest.fixture(scope="module")
    def base(model: Path) -> BaseModel:
        return load_base(str(model), devices="cpu")

    @pytest.fixture(scope="module")
    def lanes(base: BaseModel) -> Lanes:
        return Lanes(base)

    @pytest.fixture(scope="module")
    def standin(model: Path) -> Iterator[StandIn]:
        running = StandIn(model)
        yield running
        running.close()

    @pytest.fixture
    def server(standin: StandIn) -> Iterator[StandIn]:
        yield standin
        standin.faults.clear()
        standin.asked.clear()
        standin.always = standin.listed = None
        standin.forget()

    return model, base, lanes, standin, server


T = TypeVar("T")
NAMES = ("base", "one", "two")


class World:
    """The service, its application, and the adapters that it serves, by name, as they are trained and on disk."""

    def __init__(self, folder: Path, **options: Any):
        self.serve(Service(toy_base(folder / "model"), "base", **options))
        for seed, name in enumerate(NAMES):
            self.adapters[name] = trained(self.service.lanes, seed, size=0.3 if seed else 0.0)
            if seed:
                self.directories[name] = folder / name
                self.directories[name].mkdir()
                save_adapter(self.directories[name], self.adapters[name], self.service.base.name)
                self.service.load_at_start(name, self.directories[name])

    @classmethod
    def of(cls, service: Service) -> World:
        world = cls.__new__(cls)
        world.serve(service)
        return world

    def serve(self, service: Service) -> None:
        self.service, self.app = service, app_of(service)
        self.adapters: dict[str, Adapter] = {}
        self.directories: dict[str, Path] = {}

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[T]], app: Any = None) -> T:
        async def main() -> T:
            # A mistake of the server is an answer here, as it is to a client over a network.
            transport = httpx.ASGITransport(app or self.app, raise_app_exceptions=False, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
                return await work(client)

        return asyncio.run(main())

    def post(self, path: str, body: Any, app: Any = None, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        return self.run(lambda client: client.post(path, content=content, headers=headers), app)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, text: str = "what is 12 + 34?", **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, body: Any) -> list[dict[str, Any]]:
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        return events(answer.text)

    def fresh(self, model: str, prompt_ids: Any, token_ids: Any, temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities [T, V] by one forward pass of transformers."""
        base, ids = self.service.base, torch.tensor([[*prompt_ids, *token_ids]])
        with torch.no_grad(), self.service.lanes.single(self.adapters[model]):
            logits = base.model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
        return torch.log_softmax(logits / temperature, -1)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


CAPITAL = Problem("p", "What is the capital of France?", "Paris")


def chat(content: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


class JudgeServer(ThreadingHTTPServer):
    """Answers as ``respond(handler, request)`` says; keeps the requests."""

    daemon_threads = True
    respond: Callable[[BaseHTTPRequestHandler, dict[str, Any]], tuple[int, bytes, dict[str, str]] | None]

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.stopped = threading.Event()
        super().__init__(("127.0.0.1", 0), JudgeHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class JudgeHandler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        self.server.requests.append(request)
        self.server.headers.append(dict(self.headers))
        answer = self.server.respond(self, request)
        if answer is None:
            return
        status, body, headers = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stopped.set()
    server.shutdown()
    server.server_close()
    thread.join()


def says(content: Any) -> Callable[..., tuple[int, bytes, dict[str, str]]]:
    return lambda handler, request: (200, chat(content), {})
