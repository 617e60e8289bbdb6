"""The policy: frozen base, LoRA lanes, log-probabilities, updates, and the files an adapter lives in."""

from retrain.policy.adapter_io import read_adapter, save_adapter
from retrain.policy.base import BaseModel, load_base
from retrain.policy.logprobs import TrainSequence
from retrain.policy.lora import Adapter, Lanes
from retrain.policy.update import Denominators, LossSettings, new_optimizer, train_step

__all__ = [
    "Adapter",
    "BaseModel",
    "Denominators",
    "Lanes",
    "LossSettings",
    "TrainSequence",
    "load_base",
    "new_optimizer",
    "read_adapter",
    "save_adapter",
    "train_step",
]
