"""Checks of the vLLM that retrain starts for a campaign's file: ``retrain doctor --vllm``."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from retrain.campaign.planning.engine import with_engine
from retrain.campaign.planning.plan import Plan
from retrain.config import Config, load
from retrain.doctor.results import FAIL, PASS, SKIP, Result
from retrain.doctor.servers import canary_result
from retrain.engines.server.engine import ServerEngine
from retrain.errors import RetrainError, UsageError
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.training.bases import Bases
from retrain.types import Action, PolicyRef, SampleRequest

CYCLES = 3  # Times that the server sleeps and wakes
LOADS, ADAPTERS = (1, 16, 64, 256), (1, 5)  # Requests at once, and adapters that they are spread over
PROMPT_TOKENS, TOKENS = 64, 64


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


def check_vllm(config: Config, begins: Callable[[str], None]) -> Iterator[Result]:
    """Start the server, compare its log-probabilities with the trainer's, let it sleep and wake, and measure its speed.
    Stop at the first failure. Raises ModelError if the model is not on this machine."""
    with Bases() as bases, TemporaryDirectory(prefix="retrain-doctor-") as folder:
        begin = time.perf_counter()
        begins("starts")
        try:
            base, lanes, engine = bases.with_servers(config, Path(folder))
        except UsageError as error:
            yield Result(FAIL, str(error), name="starts", seconds=time.perf_counter() - begin)
            return
        yield Result(PASS, engine.pool.servers[0].url, name="starts", seconds=time.perf_counter() - begin)
        checks: dict[str, Callable[[], Result]] = {
            "canary": lambda: canary_result(config, base, lanes, engine),
            "sleeps": lambda: _sleeps(config, lanes, engine),
            "speed": lambda: _speed(config, lanes, engine),
        }
        for name, check in checks.items():
            begins(name)
            begin = time.perf_counter()
            try:
                result = check()
            except RetrainError as error:
                result = Result(FAIL, str(error))
            yield replace(result, name=name, seconds=time.perf_counter() - begin)
            if result.status == FAIL:
                return


def _sleeps(config: Config, lanes: Lanes, engine: ServerEngine) -> Result:
    released = config.inference.released
    if not released:
        return Result(SKIP, "the server has a GPU of its own, or [inference] sleep is false")
    ref = _publish(config, lanes, engine, 0)
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


def _speed(config: Config, lanes: Lanes, engine: ServerEngine) -> Result:
    begin = time.perf_counter()
    refs = [_publish(config, lanes, engine, version) for version in range(max(ADAPTERS))]
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


def _publish(config: Config, lanes: Lanes, engine: ServerEngine, version: int) -> PolicyRef:
    ref = PolicyRef("doctor", version)
    adapter = lanes.new_adapter(config.model.lora_rank, config.lora.alpha)
    engine.publish(ref, LocalSnapshot(adapter.frozen()))
    return ref


def _sample(engine: ServerEngine, refs: list[PolicyRef], count: int, tokens: int = TOKENS) -> list[list[Action]]:
    """Sample ``count`` completions, spread over these adapters in turn."""
    top = min(engine.model.size, 1000)
    prompts = [tuple((7 * row + 31 * column) % top for column in range(PROMPT_TOKENS)) for row in range(count)]
    return engine.sample(
        [
            SampleRequest(refs[row % len(refs)], prompt, 1, tokens, 1.0, ("doctor", row))
            for row, prompt in enumerate(prompts)
        ]
    )


def _tokens(groups: list[list[Action]]) -> list[list[int]]:
    return [list(action.token_ids) for group in groups for action in group]


def _used_gib() -> float:
    """Return the GiB of the GPU that all processes use; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
