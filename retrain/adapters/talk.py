"""Answers of a trained adapter beside those of its base: the same prompts, the same random numbers, one batch."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrain.adapters.export import uniform
from retrain.adapters.provenance import Provenance
from retrain.config import Config
from retrain.config.evaluation import HELDOUT, EvaluationSet
from retrain.data.prompts import render
from retrain.engines.local import LocalEngine
from retrain.engines.server.build import server_engine
from retrain.engines.server.engine import ServerEngine
from retrain.errors import ModelError, UsageError
from retrain.policy.adapter_io import AdapterFile
from retrain.policy.base import BaseModel, workers_for
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Adapter, Lanes
from retrain.types import Action, PolicyRef, Problem, Prompt, SampleRequest


def answers(
    source: Provenance,
    prompts: Sequence[str],
    *,
    samples: int,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Sample every prompt with the adapter and with its base; sample k of both draws the same random numbers.

    Prompts go through the system prompt, prompt template and chat template of the run; temperature and max_tokens are
    by default those of its held-out evaluation. Returns adapter, base, temperature, max_tokens, seed and ``prompts``,
    each {prompt, rendered, tokens, base: [{text, tokens, stop}], adapter: [...]}. Raises RetrainError when the model
    or adapter cannot be loaded, or a prompt is too long for it.
    """
    config = source.config
    given = {"max_tokens": max_tokens, "temperature": temperature}
    asked = config.resolved(EvaluationSet(name=HELDOUT)).sampling
    asked = replace(asked, **{key: value for key, value in given.items() if value is not None}).requested
    with ExitStack() as stack:
        base = source.load(config.backend.device, config.inference.dtype)
        if changed := source.other_weights(base):
            tell(changed)
        with AdapterFile(source.adapter) as file:
            file.require_plain()
            lanes = Lanes(base, _layers(file, base))
            stack.callback(lanes.detach)
            adapters = [lanes.new_adapter(1, 1.0), lane_adapter(file, lanes)]  # one of zeros is the base
        engine = _engine(config, base, lanes, stack, tell)
        refs = [PolicyRef("base", 0), PolicyRef("adapter", 0)]
        for ref, adapter in zip(refs, adapters, strict=True):
            engine.publish(ref, LocalSnapshot(adapter.frozen()))
        rendered = [render(Problem(f"prompt {i + 1}", text, ""), base.tokenizer, config.data)
                    for i, text in enumerate(prompts)]  # fmt: skip
        requests = [
            SampleRequest(ref, prompt.token_ids, samples, stream=(seed, "talk", i), **vars(asked))
            for ref in refs
            for i, prompt in enumerate(rendered)
        ]
        sampled = engine.sample(requests)
    count = len(rendered)
    return {
        "adapter": str(source.adapter),
        "base": source.base,
        "temperature": asked.temperature,
        "max_tokens": asked.max_tokens,
        "seed": seed,
        "prompts": [
            {
                "prompt": text,
                "rendered": as_read(prompt, base.tokenizer),
                "tokens": len(prompt.token_ids),
                "base": [answer(each) for each in sampled[i]],
                "adapter": [answer(each) for each in sampled[count + i]],
            }
            for i, (text, prompt) in enumerate(zip(prompts, rendered, strict=True))
        ],
    }


def _engine(
    config: Config, base: BaseModel, lanes: Lanes, stack: ExitStack, tell: Callable[[str], None]
) -> LocalEngine | ServerEngine:
    """The engine of the run: its servers where they are there, else this process, as for a run that launched one."""
    if config.inference.url:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="retrain-sample-")))
        try:
            served = server_engine(config, base, directory, lambda text, level: tell(text))
            stack.callback(served.close)
            return served
        except UsageError as error:
            tell(f"{error}\nThe answers are sampled in this process instead.")
    workers = workers_for(base)
    stack.callback(workers.close)
    return LocalEngine(base, lanes, workers=workers, tell=tell)


def as_read(prompt: Prompt, tokenizer: Any) -> str:
    """The prompt as the model reads it, special tokens and all."""
    return tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)


def answer(completion: Action) -> dict[str, Any]:
    return {"text": completion.text, "tokens": len(completion), "stop": completion.stop_reason}


def _layers(file: AdapterFile, base: BaseModel) -> list[str]:
    layers = dict(base.model.named_modules())
    for name, where in file.modules.items():
        weight = getattr(layers.get(name), "weight", None)
        if weight is None or tuple(weight.shape) != (where.b_shape[0], where.a_shape[1]):
            raise ModelError(
                f"{file.directory} adapts {name}, which is not a linear layer of that size in {base.name}: "
                "give the right base with --base"
            )
    return list(file.modules)


def lane_adapter(file: AdapterFile, lanes: Lanes) -> Adapter:
    """The adapter on the lanes, every module at the highest rank and the one scale."""
    scale, pairs = uniform(file, file.rank)
    adapter = lanes.new_adapter(file.rank, scale * file.rank)
    adapter.load(dict(pairs))
    return adapter
