"""Reinforcement learning of language models as experiments with a verdict. Public names are loaded on first use, so
that ``import retrain`` is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.config import Config as Config
    from retrain.config import load as load
    from retrain.environments.protocol import Observation as Observation
    from retrain.environments.protocol import Step as Step
    from retrain.errors import ConfigError as ConfigError
    from retrain.errors import RetrainError as RetrainError
    from retrain.types import Action as Action
    from retrain.types import Completion as Completion
    from retrain.types import Problem as Problem
    from retrain.types import RewardResult as RewardResult

__version__ = "0.4.0"

_HOMES = {
    "Action": "retrain.types",
    "Completion": "retrain.types",
    "Config": "retrain.config",
    "ConfigError": "retrain.errors",
    "Observation": "retrain.environments.protocol",
    "Problem": "retrain.types",
    "RetrainError": "retrain.errors",
    "RewardResult": "retrain.types",
    "Step": "retrain.environments.protocol",
    "load": "retrain.config",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'retrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
