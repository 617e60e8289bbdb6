"""The policy: frozen base, LoRA lanes, log-probabilities, objectives, updates, and the files an adapter lives in."""

from retrain.policy.adapter_io import read_adapter, save_adapter
from retrain.policy.base import BaseModel, load_base
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.objective import Objective
from retrain.types import Denominators, TrainBatch

__all__ = [
    "Adapter",
    "BaseModel",
    "Denominators",
    "Lanes",
    "LocalPolicy",
    "Objective",
    "TrainBatch",
    "load_base",
    "read_adapter",
    "save_adapter",
]
