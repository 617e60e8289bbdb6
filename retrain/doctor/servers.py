"""Check that servers, running ones or the vLLM that a campaign's file starts, sample from the same weights as the model
in this process."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from retrain.campaign.planning.engine import with_engine
from retrain.campaign.planning.plan import Plan
from retrain.config import Config, load, parse_dict
from retrain.config.machine import SERVERS
from retrain.doctor.results import FAIL, PASS, SKIP, Result
from retrain.engines.server.automatic import RANKS
from retrain.engines.server.canary import CanarySettings, run_canaries
from retrain.engines.server.completions import RANK_HINT
from retrain.engines.server.engine import ServerEngine
from retrain.errors import RetrainError, UsageError
from retrain.models.directory import local_directory
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.records.schema.base import Values
from retrain.training.bases import Bases
from retrain.types import Action, PolicyRef, SampleRequest

PATIENCE_S = 20.0  # Seconds that a server may be unreachable during a check
CYCLES = 3  # Times that the server sleeps and wakes
LOADS, ADAPTERS = (1, 16, 64, 256), (1, 5)  # Requests at once, and adapters that they are spread over
PROMPT_TOKENS, TOKENS = 64, 64


def server_config(url: Sequence[str], engine: str | None, model: str | None, file: Path | None) -> Config:
    """Return the configuration that servers are checked against: that of a file, else of ``model``, else of the model
    that the first server reports. Raises UsageError if it reports none."""
    # A campaign may be using the servers: they are not put to sleep.
    unused = dict.fromkeys(("launch", "launch_options", "python", "launch_gpus"))
    addresses = {**unused, "url": list(url), "patience_s": PATIENCE_S, "sleep": False}
    if file is not None:
        data = Plan.of(load(file)).specs[0].config.to_dict()
        kind = engine or (data["inference"]["engine"] if data["inference"]["engine"] in SERVERS else "vllm")
        data["inference"] |= addresses | {"engine": kind}
        data["model"] |= {} if model is None else {"model": model}
        return parse_dict(data)
    named = model or served_model(url[0])
    return parse_dict({"model": {"model": named}, "inference": addresses | {"engine": engine or "vllm"}})


def served_model(url: str) -> str:
    """Return the base model that a server reports: ``root`` or id if it is on this machine, else id. Raises
    UsageError."""
    import httpx

    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        listed = httpx.get(address, timeout=10.0)
        listed.raise_for_status()
        first: Values = next(entry for entry in listed.json()["data"] if not entry.get("parent"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, StopIteration) as error:
        raise UsageError(f"{address}: {type(error).__name__}: {error}; name the model after the options") from error
    names = [first.get("root") or "", first["id"]]
    return next((name for name in names if name and local_directory(name)), names[1])


def vllm_plan(file: Path) -> tuple[Config, str]:
    """Return the configuration of a file's first run with vLLM as its engine, and the note on the choice. Raises
    UsageError if vLLM cannot be started here, or the file names a server that runs already."""
    loaded = load(file)
    if loaded.config.inference.url is not None:
        raise UsageError(f"{file} names servers that run already: type retrain doctor --url URL --file {file}")
    if loaded.config.inference.engine != "vllm":
        loaded = load(file, ["inference.engine=vllm"])
    plan = with_engine(Plan.of(loaded))
    return plan.specs[0].config, "; ".join(plan.notes) or f"vLLM by the command of {file}"


@dataclass(frozen=True)
class Servers:
    """Servers under check, and the model that they are compared with. ``any_rank``: also accept servers that only take
    adapters of a smaller rank than the default ``lora_rank``."""

    config: Config
    any_rank: bool
    base: BaseModel
    lanes: Lanes
    engine: ServerEngine


def run_checks(
    config: Config,
    begins: Callable[[str], None],
    checks: Mapping[str, Callable[[Servers], Result]],
    any_rank: bool = False,
) -> Iterator[Result]:
    """Connect to servers, or start them, and yield the results of ``checks`` up to the first failure. Raises ModelError
    if the model is not on this machine."""
    servers = None
    with Bases() as bases, TemporaryDirectory(prefix="retrain-doctor-") as folder:
        for name, check in checks.items():
            begins(name)
            begin = time.perf_counter()
            try:
                if servers is None:
                    servers = Servers(config, any_rank, *bases.with_servers(config, Path(folder)))
                result = check(servers)
            except RetrainError as error:
                if servers is None and not isinstance(error, UsageError):
                    raise
                result = Result(FAIL, str(error))
            yield replace(result, name=name, seconds=time.perf_counter() - begin)
            # Servers that answer are compared even if others do not.
            if servers is None or (result.status == FAIL and check is not answers):
                return


def answers(servers: Servers) -> Result:
    texts, listed = [], servers.engine.pool.servers
    for server in listed:
        context = f", {server.context} tokens" if server.context else ""
        state = f"serves {server.base!r}{context}" if server.alive else f"does not answer: {server.reason}"
        texts.append(f"{server.url} {state}")
    return Result(PASS if all(server.alive for server in listed) else FAIL, "; ".join(texts))


def starts(servers: Servers) -> Result:
    return Result(PASS, servers.engine.pool.servers[0].url)


def canary(servers: Servers) -> Result:
    config, base = servers.config, servers.base
    tolerance = config.inference.tolerance_in(str(base.dtype).removeprefix("torch."))
    default, result = config.model.lora_rank, Result(FAIL)
    for rank in [default, *(rank for rank in reversed(RANKS) if rank < default and servers.any_rank)]:
        kind = CanarySettings(rank, config.lora.alpha, config.training.temperature, tolerance)
        try:
            texts = [each.summary for each in run_canaries(servers.engine, base, servers.lanes, [kind])]
        except RetrainError as error:
            if RANK_HINT not in str(error):
                raise
            result = Result(FAIL, str(error))
            continue
        if rank < default:
            texts.append(f"with an adapter of rank {rank}: it takes none of rank {default}, the default of [model] "
                         f"lora_rank; to train with that, start it with {RANK_HINT} {default}")  # fmt: skip
        return Result(PASS, "; ".join(texts))
    return result


def sleeps(servers: Servers) -> Result:
    engine, released = servers.engine, servers.config.inference.released
    if not released:
        return Result(SKIP, "the server has a GPU of its own, or [inference] sleep is false")
    ref = _publish(servers, 0)
    before, texts = _sample(engine, [ref], 8), []
    for _ in range(CYCLES):
        awake, begin = _used_gib(), time.perf_counter()
        engine.forget_sequences()
        slept, asleep = time.perf_counter() - begin, _used_gib()
        begin = time.perf_counter()
        after = _sample(engine, [ref], 8)
        texts.append(f"{awake:.1f} → {asleep:.1f} GiB in {slept:.1f} s, awake and sampled in "
                     f"{time.perf_counter() - begin:.1f} s")  # fmt: skip
        if _tokens(after) != _tokens(before):
            return Result(FAIL, f"equal seeds give other tokens after {released} was released", "; ".join(texts))
    return Result(PASS, f"equal seeds give equal tokens ({released} released)", "; ".join(texts))


def speed(servers: Servers) -> Result:
    engine, begin = servers.engine, time.perf_counter()
    refs = [_publish(servers, version) for version in range(max(ADAPTERS))]
    _sample(engine, refs, 1, tokens=1)
    texts = [f"{len(refs)} adapters loaded in {time.perf_counter() - begin:.1f} s"]
    for adapters in ADAPTERS:
        rates = []
        for requests in LOADS:
            begin = time.perf_counter()
            groups = _sample(engine, refs[:adapters], requests)
            tokens = sum(len(action.token_ids) for group in groups for action in group)
            rates.append(f"{tokens / (time.perf_counter() - begin):.0f}")
        texts.append(f"{'/'.join(rates)} tokens/s at {'/'.join(map(str, LOADS))} requests over {adapters}")
    return Result(PASS, "; ".join(texts))


def _publish(servers: Servers, version: int) -> PolicyRef:
    ref = PolicyRef("doctor", version)
    adapter = servers.lanes.new_adapter(servers.config.model.lora_rank, servers.config.lora.alpha)
    servers.engine.publish(ref, LocalSnapshot(adapter.frozen()))
    return ref


def _sample(engine: ServerEngine, refs: list[PolicyRef], count: int, tokens: int = TOKENS) -> list[list[Action]]:
    """Sample ``count`` completions, spread over these adapters in turn."""
    top, requests = min(engine.model.size, 1000), []
    for row in range(count):
        prompt = tuple((7 * row + 31 * column) % top for column in range(PROMPT_TOKENS))
        requests.append(SampleRequest(refs[row % len(refs)], prompt, 1, tokens, 1.0, ("doctor", row)))
    return engine.sample(requests)


def _tokens(groups: list[list[Action]]) -> list[list[int]]:
    return [list(action.token_ids) for group in groups for action in group]


def _used_gib() -> float:
    """Return the GiB of the GPU that all processes use; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


RUNNING = {"answers": answers, "canary": canary}
"""Checks of servers that run already."""
VLLM = {"starts": starts, "canary": canary, "sleeps": sleeps, "speed": speed}
"""Checks of a vLLM that retrain starts."""
