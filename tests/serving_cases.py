"""A server in this process over a toy model with two adapters, and clients of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from lane_cases import trained
from toymodels import toy_base

from retrain.policy.adapter_io import save_adapter
from retrain.policy.lora import Adapter
from retrain.serving.app import app_of
from retrain.serving.service import Service

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
