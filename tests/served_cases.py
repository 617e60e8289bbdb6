"""What tests of server engines share: engines of a stand-in, adapters of a base, and our own log-probabilities."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from standin import StandIn
from toymodels import qwen3_directory

from retrain.engines.protocol import PolicyRef, SampleRequest
from retrain.engines.server import canary
from retrain.engines.server.adapters import AdapterStore
from retrain.engines.server.client import Server
from retrain.engines.server.dialects import DIALECTS
from retrain.engines.server.engine import ServerEngine, Vocabulary
from retrain.engines.server.own import Hypothesis, Said, ours
from retrain.policy.base import BaseModel, load_base
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes, LoraWeights
from retrain.types import Action

TEXTS = ["12+34=? the answer is \\boxed{46}", canary.TEXT]


def engine_of(base: BaseModel, urls: Sequence[str], folder: Path, dialect: str = "vllm", **keys: Any) -> ServerEngine:
    """An engine that samples at these addresses."""
    settings = {"key": "", "timeout_s": 60.0, "max_in_flight": 64} | {
        key: keys.pop(key) for key in ("key", "timeout_s", "max_in_flight", "upload") if key in keys
    }
    words = Vocabulary(base.text, base.vocab_size, base.eos_ids, base.context_length)
    store = AdapterStore(folder, base.name)
    engine = ServerEngine(base.name, urls, lambda url: Server(url, DIALECTS[dialect], **settings), store, words, **keys)
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
    engine.publish(ref := PolicyRef(run, version), LocalSnapshot(own, {}))
    return ref


def requests(ref: PolicyRef, count: int = 3, samples: int = 2, **keys: Any) -> list[SampleRequest]:
    given = {"max_tokens": 8, "temperature": 1.0} | keys
    return [SampleRequest(ref, (5 + i, 9, 30 + i), samples, stream=("served", i), **given) for i in range(count)]


def apart(base: BaseModel, lanes: Lanes, own: LoraWeights | None, asked: Sequence[SampleRequest],
          groups: Sequence[Sequence[Action]]) -> float:  # fmt: skip
    """Largest difference of the server's log-probabilities from our own."""
    said = [
        Said(request.prompt_ids, action.token_ids, action.logprobs_T)
        for request, group in zip(asked, groups, strict=True)
        for action in group
    ]
    mine = ours(base, lanes, said, Hypothesis("", own, asked[0].temperature))
    return float(np.abs(mine - np.concatenate([each.logprobs_T for each in said])).max())


def ids(groups: Sequence[Sequence[Action]]) -> list[list[list[int]]]:
    return [[action.token_ids for action in group] for group in groups]


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
        standin.always = None
        standin.forget()

    return model, base, lanes, standin, server
