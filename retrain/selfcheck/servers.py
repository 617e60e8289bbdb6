"""Whether servers compute what is trained here, and how fast they sample: ``retrain doctor --url``.

The checks are those that a run makes before its first step, and the throughput of one adapter and of several at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.models import Bases
from retrain.config import Config, load, parse_dict
from retrain.engines.protocol import PolicyRef, SampleRequest
from retrain.engines.server.adapters import RANKS
from retrain.engines.server.canary import TEXT, canaries
from retrain.engines.server.engine import RANK_HINT, ServerEngine
from retrain.errors import RetrainError, UsageError
from retrain.models.directory import local_directory
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.selfcheck.results import Result, Status

TOKENS = 64
AT_ONCE = (1, 16, 64)
"""Requests in flight at which the throughput is measured."""
ADAPTERS = 4
PATIENCE_S = 20.0
"""Seconds that a server may be away in the middle of a check."""


@dataclass(frozen=True)
class Line:
    """What one check of a server came to."""

    name: str
    result: Result
    seconds: float


def asked_config(url: Sequence[str], engine: str | None, model: str | None, file: Path | None) -> Config:
    """The configuration that servers are checked against: a file's, or that of a model. Without either it is the model
    that the first server names.

    Raises UsageError when there is none here by that name.
    """
    # A campaign may be using them: they are not put to sleep.
    addresses = {"url": list(url), "launch": None, "launch_gpus": None, "patience_s": PATIENCE_S, "sleep": False}
    if file is not None:
        data = Plan.of(load(file)).specs[0].config.to_dict()
        kind = engine or (data["inference"]["engine"] if data["inference"]["engine"] != "local" else "vllm")
        data["inference"] |= addresses | {"engine": kind}
        data["model"] |= {} if model is None else {"model": model}
        return parse_dict(data)
    named = model or served_model(url[0])
    return parse_dict({"model": {"model": named}, "inference": addresses | {"engine": engine or "vllm"}})


def served_model(url: str) -> str:
    """The base model that a server names, as it can be had here. Raises UsageError."""
    import httpx

    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        listed = httpx.get(address, timeout=10.0)
        listed.raise_for_status()
        first: dict[str, Any] = next(each for each in listed.json()["data"] if not each.get("parent"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, StopIteration) as error:
        raise UsageError(f"{address}: {type(error).__name__}: {error}; name the model after the options") from error
    names = [first.get("root") or "", first["id"]]
    return next((name for name in names if name and local_directory(name)), names[1])


def examine_servers(
    config: Config, begins: Callable[[str], None] = lambda name: None, any_rank: bool = False
) -> Iterator[Line]:
    """Each check in turn; after one that fails the others would say nothing. ``any_rank``: nobody has chosen
    ``lora_rank``, so that a server which takes smaller adapters only is checked with those. Raises ModelError when the
    model cannot be had here."""
    with Bases() as bases, TemporaryDirectory(prefix="retrain-doctor-") as aside:
        begins("answers")
        begin = time.perf_counter()
        try:
            base, lanes, engine = bases.take_served(config, Path(aside))
        except UsageError as error:
            yield Line("answers", Result(Status.FAIL, str(error)), time.perf_counter() - begin)
            return
        yield Line("answers", _answers(engine), time.perf_counter() - begin)
        begins("canary")
        begin = time.perf_counter()
        tolerance = config.inference.tolerance_in(str(base.dtype).removeprefix("torch."))
        asked = rank = config.model.lora_rank
        smaller = [each for each in reversed(RANKS) if each < asked] if any_rank else []
        while True:
            kind = rank, config.lora.alpha, config.training.temperature, tolerance
            try:
                texts = [found.words for found in canaries(engine, base, lanes, [kind])]
            except RetrainError as error:
                if RANK_HINT in str(error) and smaller:
                    rank = smaller.pop(0)
                    continue
                yield Line("canary", Result(Status.FAIL, str(error)), time.perf_counter() - begin)
                return
            break
        if rank < asked:
            texts.append(
                f"with an adapter of rank {rank}: it takes none of rank {asked}, the default of [model] lora_rank; to "
                f"train with that, start it with {RANK_HINT} {asked}"
            )
        yield Line("canary", Result(Status.PASS, "; ".join(texts)), time.perf_counter() - begin)
        begins("throughput")
        begin = time.perf_counter()
        prompt = tuple(base.tokenizer(TEXT)["input_ids"])
        try:
            result = _throughput(engine, lanes, rank, config.lora.alpha, prompt)
        except RetrainError as error:
            result = Result(Status.FAIL, str(error))
        yield Line("throughput", result, time.perf_counter() - begin)


def _answers(engine: ServerEngine) -> Result:
    said = [
        f"{server.url} serves {server.base!r}" + (f", {server.context} tokens" if server.context else "")
        if server.alive
        else f"{server.url} does not answer: {server.reason}"
        for server in engine.pool.servers
    ]
    return Result(Status.PASS if all(server.alive for server in engine.pool.servers) else Status.FAIL, "; ".join(said))


def _throughput(engine: ServerEngine, lanes: Lanes, rank: int, alpha: float, prompt: tuple[int, ...]) -> Result:
    """Tokens a second, and what it takes to swap an adapter."""
    refs = [PolicyRef(f"doctor{i}", 0) for i in range(ADAPTERS)]
    weights = lanes.new_adapter(rank, alpha).initialise("doctor").frozen()
    speeds = []
    for ref in refs:
        engine.publish(ref, LocalSnapshot(weights, {}))
    swaps = []
    for ref in refs:
        engine.sample([SampleRequest(ref, prompt, 1, 1, 1.0, ("doctor", "swap"))])
        swaps.append(engine.sync_seconds or 0.0)
    ways = [(count, refs[:1]) for count in AT_ONCE] + [(AT_ONCE[-1], refs)]
    for count, used in ways:
        each = max(1, count // len(used))
        asked = [SampleRequest(ref, prompt, each, TOKENS, 1.0, ("doctor", count)) for ref in used]
        begin = time.perf_counter()
        groups = engine.sample(asked)
        sampled = sum(len(action) for group in groups for action in group)
        adapters = f" of {len(used)} adapters" if len(used) > 1 else ""
        speeds.append(f"{sampled / (time.perf_counter() - begin):,.0f} at {count} requests{adapters}")
    for ref in refs:
        engine.retire(ref)
    swap = sorted(swaps)[len(swaps) // 2]
    return Result(Status.PASS, f"tokens a second: {', '.join(speeds)}; an adapter is there after {1000 * swap:.0f} ms")
