"""A server that computes truly and lies on demand: ``retrain serve``'s application on a socket, behind a layer that
changes or withholds answers. It speaks SGLang's protocol as well, in words of its own over the same completions."""

import inspect
import json
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from retrain.policy.base import load_base
from retrain.serving.app import app_of
from retrain.serving.listening import listening_socket
from retrain.serving.service import Service

Sent = tuple[int, Any] | None
"""Status and JSON of an answer; None: nothing is sent, and the connection is cut."""
Fault = Callable[[int, Any], Sent | Awaitable[Sent]]
"""From status and JSON of the true answer to what is sent instead. A function that blocks stops the whole server."""


class StandIn:
    """Serves ``model`` until ``close``. ``faults`` are used up by completions, one each; ``always`` is for all.
    ``asked`` are the bodies of all completions; ``naps``, where it is a list, what it was told of sleeping."""

    def __init__(self, model: Any, *, key: str | None = None, port: int = 0):
        self.service = Service(load_base(str(model), devices="cpu"), name="base")
        self.app = app_of(self.service, key)
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None
        self.asked: list[dict[str, Any]] = []
        self.naps: list[str] | None = None
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

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in ("/sleep", "/wake_up") and self.naps is not None:
            query = scope["query_string"].decode()
            self.naps.append(f"{scope['path']}?{query}" if query else scope["path"])
            await Response()(scope, receive, send)
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
            payload = _as_scored(payload) if asked["sampling_params"]["max_new_tokens"] == 0 else _as_generated(payload)
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
        "model": asked.get("lora_path", "base"),
        "prompt": asked["input_ids"],
        "max_tokens": how["max_new_tokens"],
        "logprobs": 0,
        "return_token_ids": True,
    }
    if how["max_new_tokens"] == 0:
        assert asked["return_logprob"]
        assert asked["logprob_start_len"] == 0
        return body | {"echo": True}
    same = ("temperature", "top_p", "top_k", "min_p", "n", "stop_token_ids")
    return body | {"seed": how["sampling_seed"]} | {key: how[key] for key in same}


def _as_generated(payload: dict[str, Any]) -> dict[str, Any]:
    """vLLM's answer in SGLang's words."""
    choice = payload["choices"][0]
    about = {
        "finish_reason": {"type": choice["finish_reason"]},
        "output_token_logprobs": _triples(choice, "token_ids"),
        "prompt_tokens": len(choice["prompt_token_ids"]),
    }
    return {"text": choice["text"], "meta_info": about}


def _as_scored(payload: dict[str, Any]) -> dict[str, Any]:
    """What vLLM says of a prompt's tokens in SGLang's words."""
    return {"text": "", "meta_info": {"input_token_logprobs": _triples(payload["choices"][0], "prompt_token_ids")}}


def _triples(choice: dict[str, Any], tokens: str) -> list[list[Any]]:
    pairs = zip(choice["logprobs"]["token_logprobs"], choice[tokens], strict=True)
    return [[logprob, token, None] for logprob, token in pairs]
