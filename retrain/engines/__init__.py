"""Engines sample completions; ``LocalEngine`` does so in this process, with the weights that are being trained."""

from retrain.engines.local import LocalEngine
from retrain.engines.protocol import Engine
from retrain.types import PolicyRef, SampleRequest

__all__ = ["Engine", "LocalEngine", "PolicyRef", "SampleRequest"]
