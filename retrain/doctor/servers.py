"""Check that servers sample from the weights that are trained here, as a run does before its first step."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from retrain.campaign.planning.plan import Plan
from retrain.config import Config, load, parse_dict
from retrain.config.machine import SERVERS
from retrain.doctor.results import FAIL, PASS, Result
from retrain.engines.server.automatic import RANKS
from retrain.engines.server.canary import CanarySettings, run_canaries
from retrain.engines.server.completions import RANK_HINT
from retrain.engines.server.engine import ServerEngine
from retrain.errors import RetrainError, UsageError
from retrain.models.directory import local_directory
from retrain.policy.base import BaseModel
from retrain.policy.lora import Lanes
from retrain.records.schema.base import Values
from retrain.training.bases import Bases

PATIENCE_S = 20.0  # Seconds that a server may be unreachable during a check


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


def check_servers(config: Config, begins: Callable[[str], None], any_rank: bool = False) -> Iterator[Result]:
    """Check that the servers answer, then that they pass a run's canary; stop at the first failure.

    ``any_rank``: also accept servers that only take adapters of a smaller rank than the default ``lora_rank``.
    Raises ModelError if the model is not on this machine.
    """
    with Bases() as bases, TemporaryDirectory(prefix="retrain-doctor-") as folder:
        begins("answers")
        begin = time.perf_counter()
        try:
            base, lanes, engine = bases.with_servers(config, Path(folder))
        except UsageError as error:
            yield Result(FAIL, str(error), name="answers", seconds=time.perf_counter() - begin)
            return
        texts, servers = [], engine.pool.servers
        for server in servers:
            context = f", {server.context} tokens" if server.context else ""
            state = f"serves {server.base!r}{context}" if server.alive else f"does not answer: {server.reason}"
            texts.append(f"{server.url} {state}")
        status = PASS if all(server.alive for server in servers) else FAIL
        yield Result(status, "; ".join(texts), name="answers", seconds=time.perf_counter() - begin)
        begins("canary")
        begin = time.perf_counter()
        result = canary_result(config, base, lanes, engine, any_rank)
        yield replace(result, name="canary", seconds=time.perf_counter() - begin)


def canary_result(
    config: Config, base: BaseModel, lanes: Lanes, engine: ServerEngine, any_rank: bool = False
) -> Result:
    tolerance = config.inference.tolerance_in(str(base.dtype).removeprefix("torch."))
    default, result = config.model.lora_rank, Result(FAIL)
    for rank in [default, *(rank for rank in reversed(RANKS) if rank < default and any_rank)]:
        kind = CanarySettings(rank, config.lora.alpha, config.training.temperature, tolerance)
        try:
            texts = [canary.summary for canary in run_canaries(engine, base, lanes, [kind])]
        except RetrainError as error:
            result = Result(FAIL, str(error))
            if RANK_HINT in str(error):
                continue
            return result
        if rank < default:
            texts.append(f"with an adapter of rank {rank}: it takes none of rank {default}, the default of [model] "
                         f"lora_rank; to train with that, start it with {RANK_HINT} {default}")  # fmt: skip
        return Result(PASS, "; ".join(texts))
    return result
