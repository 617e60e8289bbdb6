"""The inputs of a run besides its settings: code that its configuration names, and how base, data and machine differ
from what its records say. Nothing of torch is imported here."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from retrain.config import Config
from retrain.config.base import is_plugin
from retrain.config.root import flat, value_at

KEYS = (
    "algorithm.advantage_mode",
    "algorithm.transform_mode",
    "algorithm.uncertainty_kind",
    "algorithm.loss",
    "planning.detector",
    "backend.backend",
)
"""Keys that name code which runs in the training process."""
SOURCES = ("data.source", "data.eval_source")
SET_SOURCE = "evaluation.sets.{}.source"
BASE_WEIGHTS = "weights of the base model"


def named_code(config: Config) -> Iterator[tuple[str, str]]:
    """(key, ``module:function``) of all code besides rewards that a configuration names."""
    for key in (*KEYS, *SOURCES):
        if is_plugin(value := value_at(config, key)):
            yield key, value
    for index, each in enumerate(config.evaluation.sets):
        if each.source is not None and is_plugin(each.source):
            yield SET_SOURCE.format(index), each.source


def is_source(key: str) -> bool:
    return key in SOURCES or key.startswith("evaluation.sets.")


def change_line(name: str, old: Any, new: Any) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in (old, new)]
    return f"{name}: {' → '.join(texts)}"


def world_changes(facts: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences in what has to be loaded to be known: weights and tokenizer of the base, the teacher, and the data.

    ``now`` is nested as in config.json.
    """
    names = {"base.fingerprint": BASE_WEIGHTS, "base.tokenizer": "tokenizer of the base model", "data_hash": "data"}
    return _differences(facts, now, names | {"taught_by": "weights of the teacher", "rubrics": "rubrics of the data"})


def machine_changes(facts: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences in what only rounding depends on, which no one need accept: device and what drives it, number format,
    threads. The same kind of GPU at another index is none."""
    names = {"device": "device", "dtype": "number format", "threads.workers": "workers", "threads.torch": "threads"}
    names |= {"gpu.driver": "GPU driver", "gpu.cuda": "CUDA", "gpu.cudnn": "cuDNN"}
    return _differences(facts, now, {f"built.{key}": name for key, name in names.items()})


def _differences(facts: Mapping[str, Any], now: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    before, after = dict(flat(facts)), dict(flat(now))
    return [
        change_line(name, before[key], after[key])
        for key, name in names.items()
        if key in before and key in after and before[key] != after[key]
    ]
